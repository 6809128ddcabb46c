"""How numbers and foreign names are written for people: durations, rates, and names that cannot act on a terminal.

Names in a trace come from whoever wrote the model or the file. `printable` makes them inert everywhere text is shown:
what a terminal or a bidirectional text engine would obey is shown as its escape instead.
"""

from __future__ import annotations

import unicodedata

__all__ = ["duration", "percent", "printable", "rate"]

_INERT = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # controls, bidi and zero-width marks, surrogates, line separators


def printable(name: str, *, limit: int = 80) -> str:
    """The name with everything invisible or obeyed escaped as `\\x1b` or `\\u202e`, cut in its middle when long."""
    if len(name) > limit:
        head = (limit - 1) * 2 // 3
        name = f"{name[:head]}…{name[-(limit - 1 - head) :]}"
    return "".join(_escaped(char) if unicodedata.category(char) in _INERT else char for char in name)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def duration(ns: float) -> str:
    """`4.81 s`, `140 ms`, `2.4 ms`, `310 µs`."""
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
    """`61 %`; one decimal below ten; a dash where there is nothing to divide by."""
    if value is None:
        return "–"
    if 0 < abs(value) < 0.05:
        return "<0.1 %"
    return f"{value:.1f} %" if 0 < abs(value) < 9.95 else f"{value:.0f} %"


def rate(bytes_per_s: float | None) -> str:
    """`23.1 GB/s`: powers of ten, as links are sold."""
    if bytes_per_s is None:
        return "–"
    if bytes_per_s < 1e6:
        return f"{bytes_per_s / 1e3:.3g} kB/s"
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"
