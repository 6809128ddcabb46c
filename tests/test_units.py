"""Sizes, token counts and durations: what is understood, and that whatever else is typed is one line of advice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memo.errors import UsageError
from memo.units import format_bytes, format_duration, format_tokens, parse_bytes, parse_duration_s, parse_tokens

DIGITS = "9" * 5000  # more than Python turns into an int, or a float into anything but infinity


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        *((0, 0), (4096, 4096), ("0", 0), ("4096B", 4096), ("64KiB", 65536), (" 1.5 GiB ", 3 << 29), ("0.3B", 0)),
        *(("2097152TiB", 1 << 61), ("8GB", 8 * 10**9), ("1.5TB", 15 * 10**11), ("4kB", 4000), ("2MB", 2 * 10**6)),
        *(("1048576", 1 << 20), ("40gb", 40 * 10**9), ("8gib", 8 << 30), ("8GIB", 8 << 30)),
    ],
)
def test_sizes(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "tokens"), [(7, 7), ("4096", 4096), ("32k", 32768), ("1M", 1 << 20), ("0.5k", 512), ("1.5m", 3 << 19)]
)
def test_token_counts(text: int | str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(("text", "seconds"), [("60s", 60), ("500ms", 0.5), ("2m", 120), ("1.5h", 5400), (3, 3)])
def test_durations(text: float | str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("parse", [parse_bytes, parse_tokens, parse_duration_s])
@pytest.mark.parametrize(
    "text", ["", "-1", "1e9", "nan", "inf", "five", "1 parsec", DIGITS, f"{DIGITS}.5", f"{DIGITS}m", "\x1b[2J"]
)
def test_what_is_no_amount_is_refused_with_the_name_of_the_flag(parse: Callable[..., Any], text: str) -> None:
    with pytest.raises(UsageError, match=r"^--flag: ") as error:
        parse(text, what="--flag")
    assert len(str(error.value)) < 200
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("text", "says"), [("64", "write 64GiB, or 64B"), ("8G", "write 8GiB, or 8GB"), ("1.5", "1.5GiB")]
)
def test_a_size_that_can_be_read_in_two_ways_is_refused_with_both(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_bytes(text, what="--host")
    assert parse_bytes("64", bare=True) == 64


@pytest.mark.parametrize("given", [True, 1.5, None, -1, 1 << 63, "4194304.1TiB"])
def test_a_size_is_a_whole_number_that_the_formats_can_hold(given: Any) -> None:
    with pytest.raises(UsageError, match=r"^size: "):
        parse_bytes(given)


@pytest.mark.parametrize("given", [0, -5, "1.0001k", 1 << 63, "99999999999999m"])
def test_a_token_count_is_a_whole_positive_number(given: Any) -> None:
    with pytest.raises(UsageError, match=r"^token count: .* is not a whole number of tokens"):
        parse_tokens(given)


def test_amounts_are_written_as_they_are_read() -> None:
    assert [format_bytes(n) for n in (0, 1000, 3 << 29, -(1 << 40))] == ["0 B", "1000 B", "1.5 GiB", "-1 TiB"]
    assert [format_tokens(n) for n in (1 << 20, 3 << 10, 1000)] == ["1m", "3k", "1000"]
    assert [format_duration(s) for s in (0.34, 4.81, 185)] == ["340 ms", "4.81 s", "3 min 05 s"]


@pytest.mark.parametrize(
    "nbytes", [0, 5, 1023, 1024, 80_330_000_000, 164_444_836_581, (1 << 40) + 1, 671_325_792_778, 1 << 50]
)
def test_a_size_that_is_rounded_up_is_enough(nbytes: int) -> None:
    shown = parse_bytes(format_bytes(nbytes, up=True).replace(" ", ""))
    assert nbytes <= shown <= nbytes * 1.001 + 1
