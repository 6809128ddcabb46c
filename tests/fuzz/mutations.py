"""Mutations of inputs: of the values in JSON, of the lines of a trace, of text; what is no JSON is changed byte by byte.

A coverage-guided fuzzer that flips bytes seldom leaves a document that can be parsed. So half of the inputs are parsed, one
to four of their values are replaced, moved, repeated or removed, and the result is written again.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

CANARY = "<script>canary()</script>"
"""HTML that must never reach a page as such."""
_NUMBERS = (
    0,
    -1,
    1,
    2,
    7,
    255,
    10_000,
    2**31,
    2**32,
    2**53 + 1,
    2**62,
    2**62 + 1,
    2**63,
    2**64,
    -(2**63),
    10**30,
    10**400,
)
_FLOATS = (0.0, -0.0, 0.5, 1.0, -1.5, 1e-320, 1e-9, 1e15, 1e18, 1e30, 1e300, 1.7e308, -1e308)
_TEXTS = (
    "",
    "x",
    "\x1b[31mred\x1b]8;;http://x\x07",
    CANARY,
    "[bold]x[/bold][/]",
    "../../../../etc/passwd",
    "/dev/zero",
    "\u202ereversed",
    "a\nb\r\tc",
    "\ud800",
    "\0",
    "é" * 300,
    "80GiB",
    "8x400Gb",
    "1e400",
    "nan",
    "9" * 40,
)
_RAW = (
    "1e400",
    "-1e400",
    "NaN",
    "Infinity",
    "-Infinity",
    "1" * 5000,
    '"' + "\\u0000" * 9 + '"',
    "[" * 1200 + "]" * 1200,
    "1.0",
)
"""JSON texts that Python's writer does not write."""

Mutate = Callable[[bytes, int], bytes]
"""Changes some bytes of (data, most bytes): the fuzzer's own way."""
Shape = Callable[[bytes, int, random.Random, Mutate], bytes]
"""Changes an input: (data, most bytes, random numbers, the byte-wise way)."""


def changed_value(document: Any, draw: random.Random) -> Any:
    """The document with one of its values replaced, moved, repeated or removed. Changes it in place, too."""
    places = list(_places(document))
    if not places:
        return _other(document, draw, [])
    holder, key = draw.choice(places)
    what = draw.randrange(10)
    if what == 0 and isinstance(holder, dict):
        del holder[key]
    elif what == 0:
        holder.insert(key, holder[key])
    elif what == 1 and isinstance(holder, dict):
        holder[draw.choice(_TEXTS + tuple(holder))] = holder.pop(key)
    elif what == 1:
        del holder[key]
    elif what == 2 and isinstance(holder, list):
        draw.shuffle(holder)
    else:
        holder[key] = _other(holder[key], draw, places)
    return document


def _places(value: Any) -> list[tuple[Any, Any]]:
    """All values within a document, as (what holds it, its key or index)."""
    found: list[tuple[Any, Any]] = []
    holders = [value]
    while holders:
        holder = holders.pop()
        keys = holder if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            found.append((holder, key))
            holders.append(holder[key])
    return found


def _other(value: Any, draw: random.Random, places: Sequence[tuple[Any, Any]]) -> Any:
    what = draw.randrange(8)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and what < 3:
        return draw.choice(
            (value + 1, value - 1, -value, value * 2, value // 2, value * 1000, value / 3 if value else 1)
        )
    if what < 4:
        return draw.choice(_NUMBERS)
    if what == 4:
        return draw.choice(_FLOATS)
    if what == 5:
        return draw.choice(_TEXTS)
    if what == 6 and places:
        holder, key = draw.choice(places)
        return json.loads(json.dumps(holder[key]))
    return draw.choice((None, True, False, [], {}, [value], {"x": value}, [[]] * 5, [1] * 1000))


def _written(document: Any, draw: random.Random) -> str:
    text = json.dumps(document, indent=draw.choice((None, None, None, 1)))
    if draw.randrange(8):
        return text
    numbers = list(re.finditer(r"(?<=[:\[ ])-?\d[\d.e+-]*(?=[,\]}\s])", text))
    members = list(re.finditer(r'"[^"\\]*": [^,{}\[\]]+', text))
    if numbers and draw.randrange(2):
        place = draw.choice(numbers)
        return f"{text[: place.start()]}{draw.choice(_RAW)}{text[place.end() :]}"
    if members:  # a key twice
        place = draw.choice(members)
        return f"{text[: place.end()]}, {place[0]}{text[place.end() :]}"
    return text


def _changed_text(text: str, draw: random.Random) -> str:
    document = json.loads(text)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        document = changed_value(document, draw)
    return _written(document, draw)


def _or_bytes(change: Callable[[bytes, random.Random], bytes]) -> Shape:
    """Three of four times `change`, where it can; else byte by byte."""

    def shape(data: bytes, most: int, draw: random.Random, mutate: Mutate) -> bytes:
        if draw.randrange(4):
            try:
                found = change(data, draw)
            except Exception:  # the input is no longer of this shape
                pass
            else:
                if len(found) <= most:
                    return found
        return mutate(data, most)

    return shape


def _json(data: bytes, draw: random.Random) -> bytes:
    return _changed_text(data.decode(), draw).encode()


def _lines(data: bytes, draw: random.Random) -> bytes:
    lines = data.decode().splitlines()
    at = draw.randrange(len(lines))
    what = draw.randrange(8)
    if what == 0:
        lines.insert(draw.randrange(len(lines)), lines[at])
    elif what == 1:
        del lines[at]
    elif what == 2:
        other = draw.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    else:
        lines[at] = _changed_text(lines[at], draw).replace("\n", "")
    end = "" if draw.randrange(8) == 0 else "\n"
    return ("\n".join(lines) + end).encode()


def _words(data: bytes, draw: random.Random) -> bytes:
    """Of text whose numbers and names stand between other characters, such as CSV and sizes."""
    parts = re.split(r"([,\s:x=+-])", data.decode())
    at = draw.randrange(len(parts))
    number = draw.choice(_NUMBERS)
    if number > 1 << 1000:
        number = int("9" * draw.choice((20, 400, 4000)))
    parts[at] = draw.choice(
        (
            str(number),
            *_TEXTS[:12],
            draw.choice(string.printable),
            parts[draw.randrange(len(parts))],
            parts[at] * 2,
            "1.5",
        )
    )
    return "".join(parts).encode(errors="surrogatepass")


def _gzipped_lines(data: bytes, draw: random.Random) -> bytes:
    return gzip.compress(_lines(gzip.decompress(data), draw), compresslevel=1, mtime=0)


def _bytes(data: bytes, most: int, draw: random.Random, mutate: Mutate) -> bytes:
    return mutate(data, most)


JSON, LINES, WORDS, GZIPPED_LINES = (_or_bytes(change) for change in (_json, _lines, _words, _gzipped_lines))
BYTES: Shape = _bytes
