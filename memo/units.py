"""Parsing and formatting of sizes, token counts and durations, and text tables; every package's, imports only `memo.errors`.

Token counts use k = 1024 and m = 1048576, so 128k is 131072. Bytes are in binary units (`80GiB` is 80 x 2^30) or decimal
ones (`80GB` is 80 x 10^9), as the standards define them. `80G` and a bare `80` are refused: they are read in two ways or
more, and a budget must mean one thing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Sequence

from memo.errors import UsageError

_BYTE_UNITS = {
    "b": 1,
    **{f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
_BYTES = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)")
_TOKENS = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)([kKmM]?)")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
LEAST_BARE = 1 << 20
"""Bytes from which a number without a unit is taken as bytes; a smaller one may well be meant as GiB."""
_FEWEST = 4096
"""Bytes below which an int is taken for a number of GiB whose unit was forgotten."""
_MOST = 1 << 62
"""Largest number of bytes or tokens that the plan and trace formats can hold."""
_DURATION_S = {None: 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_bytes(text: int | str, *, what: str = "size", bare: bool = False) -> int:
    """Parses a number of bytes.

    Args:
        text: an int of bytes, or text with a unit: B, KiB, MiB, GiB, TiB in powers of 1024, or kB, MB, GB, TB in powers of
            1000, such as `64KiB`, `1.5GiB` or `8gb`. Without one: `0`, or whole bytes from 2^20 on. A fraction of a byte is
            dropped. Of ints, 1 to 4095 are refused, since most who write 64 mean GiB.
        what: name of the quantity, for the error message.
        bare: whether smaller numbers without a unit are bytes, too: of what nobody counts in GiB.

    Raises:
        UsageError: negative, not a number, more than 2^62, another unit, or a number below 2^20 without one.
    """
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise UsageError(f"{what}: {_shown(text)} is not a size; write for instance 8GiB")
    if isinstance(text, int):
        if 0 < text < _FEWEST and not bare:
            raise UsageError(f"{what}: {text} is {text} bytes; write '{text}GiB' for as many GiB, or '{text}B'")
        nbytes = text
    else:
        match = _BYTES.fullmatch(text.strip())
        if match is not None and not match[2] and (bare or match[1] == "0" or _is_many_bytes(match[1])):
            unit = 1
        elif match is not None and match[2].lower() in ("", *"kmgt"):
            letter = match[2].upper() or "G"
            other = f"{match[1]}{letter}B" if match[2] else f"{match[1]}B for bytes"
            raise UsageError(
                f"{what}: {_shown(text)} can be read in several ways; write {match[1]}{letter}iB, or {other}"
            )
        elif match is not None and match[2].lower() in _BYTE_UNITS:
            unit = _BYTE_UNITS[match[2].lower()]
        else:
            raise UsageError(f"{what}: cannot read {_shown(text)}; write for instance 8GiB, or 8GB for 8 x 10^9 bytes")
        assert match is not None
        nbytes = math.floor(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if nbytes < 0:
        raise UsageError(f"{what}: {_shown(text)} is negative; write for instance 8GiB")
    if nbytes > _MOST:
        raise UsageError(f"{what}: {_shown(text)} is more than 2^62 bytes")
    return nbytes


def format_bytes(nbytes: float, *, up: bool = False, down: bool = False) -> str:
    """Formats bytes with four significant digits and an IEC unit: `1.5 GiB`, `0 B`, `-2 KiB`.

    Args:
        nbytes: the number.
        up: round upwards, so that what is named is enough.
        down: round downwards, so that no less is possible.
    """
    if (up or down) and nbytes >= 1024:
        size = 1024.0 ** min(int(math.log(nbytes, 1024)), 4)
        digit = 10.0 ** (math.floor(math.log10(nbytes / size)) - 3)
        digits = math.ceil(nbytes / size / digit) if up else math.floor(nbytes / size / digit)
        return format_bytes(digits * digit * size)
    sign, value = ("-", -nbytes) if nbytes < 0 else ("", float(nbytes))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{sign}{value:.0f} B" if unit == "B" else f"{sign}{value:.4g} {unit}"
        value /= 1024
    return f"{sign}{value:.4g} TiB"


def parse_tokens(text: int | str, *, what: str = "token count") -> int:
    """Parses a number of tokens.

    Args:
        text: an int, or text such as `4096`, `32k` (32768) or `1m` (1048576).
        what: name of the quantity, for the error message.

    Raises:
        UsageError: not a whole number of tokens from 1 to 2^62.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        count: float = text
    else:
        match = _TOKENS.fullmatch(str(text).strip())
        if match is None:
            raise UsageError(f"{what}: cannot read {_shown(text)}; write for instance 4096, 32k or 1m")
        count = float(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()]
    if not 0 < count <= _MOST or count != int(count):
        raise UsageError(f"{what}: {_shown(text)} is not a whole number of tokens from 1 to 2^62")
    return int(count)


def format_tokens(count: int) -> str:
    """Formats a number of tokens: `32k`, `1m`, or the plain number where it is no multiple of 1024."""
    for unit, size in (("m", 1 << 20), ("k", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def parse_duration_s(text: float | str, *, what: str = "duration") -> float:
    """Parses a duration; returns seconds.

    Args:
        text: a number of seconds, or text such as `60s`, `500ms`, `2m`, `1h`.
        what: name of the quantity, for the error message.

    Raises:
        UsageError: negative, zero, infinite, or not a duration.
    """
    match = _DURATION.fullmatch(str(text).strip())
    if match is None:
        raise UsageError(f"{what}: cannot read {_shown(text)}; write for instance 60s, 500ms or 2m")
    seconds = float(match[1]) * _DURATION_S[match[2]]
    if seconds <= 0 or not math.isfinite(seconds):
        raise UsageError(f"{what}: {_shown(text)} is not a positive duration")
    return seconds


def format_duration(seconds: float) -> str:
    """Formats seconds: `340 ms`, `4.81 s`, `3 min 05 s`."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def format_wear(bytes_per_day: float) -> str:
    """Formats a rate of writes, positive, with the time in which it uses up the usual rating of a consumer drive of 1 TB."""
    days = 600e12 / bytes_per_day
    lasts = f"{days:.3g} days" if days < 1000 else f"{days / 365:,.0f} years"
    return f"{bytes_per_day / 1e12:.3g} TB a day at this rate: {lasts} for each 600 TBW that the drives are rated for"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Container[int] = (0,)) -> str:
    """Formats a table, whose columns are flush right but those of these numbers."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _is_many_bytes(number: str) -> bool:
    return "." not in number and int(number) >= LEAST_BARE


def _shown(given: object) -> str:
    """The given value for an error message: escaped, and cut to 60 characters."""
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:57]}..."
