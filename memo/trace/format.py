"""Formatting of numbers and foreign names for people: durations, rates, and names that cannot act on a terminal.

Names in a trace come from whoever wrote the model or the file. `printable` makes them inert wherever text is shown:
characters that a terminal or a bidirectional text engine would obey are shown as their escapes.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

_INERT = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # controls, bidi and zero-width marks, surrogates, line separators

_LAST_WORD, _FIRST_WORD = re.compile(r"(?<= )[^ ]{1,20}\Z"), re.compile(r"\A[^ ]{1,20}(?= )")
_HOME = re.compile(r"(?<![^\s'\"=,:;(\[])/(?:home|Users)/[^\s'\"/]+")
_FOLDERS = re.compile(r"(?<![^\s'\"=,:;(\[])(?:…|\.{1,2})?/(?:[^\s'\"/]+/)+(?=[^\s'\"/])")


def printable(name: str, *, limit: int = 80) -> str:
    """Escapes control and invisible characters of a name, and cuts its middle beyond `limit` characters, between words."""
    if len(name) > limit:
        head = (limit - 1) * 2 // 3
        begin, end = name[:head], name[-(limit - 1 - head) :]
        name = f"{_LAST_WORD.sub('', begin)}…{_FIRST_WORD.sub('', end)}"
    return "".join(_escaped(char) if unicodedata.category(char) in _INERT else char for char in name)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def without_folders(value: Any) -> Any:
    """Shortens every path in the texts of a JSON value that begins at a root, `.` or `..` to its last part: `…/data.txt`."""
    if isinstance(value, str):
        return _FOLDERS.sub("…/", _HOME.sub("…", value)) if "/" in value else value
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    return [without_folders(item) for item in value] if isinstance(value, list | tuple) else value


def duration(ns: float) -> str:
    """Formats nanoseconds: `4.81 s`, `140 ms`, `2.4 ms`, `310 µs`."""
    if ns >= 119.995e9:
        minutes, seconds = divmod(round(ns / 1e9), 60)
        return f"{minutes} min {seconds:02d} s"
    if ns >= 0.9995e9:
        return f"{ns / 1e9:.2f} s"
    if ns >= 9.95e6:
        return f"{ns / 1e6:.0f} ms"
    if ns >= 0.9995e6:
        return f"{ns / 1e6:.1f} ms"
    return f"{ns / 1e3:.0f} µs" if ns else "0 s"


def percent(value: float | None) -> str:
    """Formats a percentage: `61 %`, `6.1 %`; a dash for None."""
    if value is None:
        return "–"
    if 0 < abs(value) < 0.05:
        return "<0.1 %"
    return f"{value:.1f} %" if 0 < abs(value) < 9.95 else f"{value:.0f} %"


def rate(bytes_per_s: float | None) -> str:
    """Formats bytes per second: `23.1 GB/s`, in powers of ten as links are specified; a dash for None."""
    if bytes_per_s is None:
        return "–"
    units = (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3))
    unit, size = next((pair for pair in units if bytes_per_s >= 0.9995 * pair[1]), units[-1])  # three digits: no 1e+03
    return f"{bytes_per_s / size:.3g} {unit}"
