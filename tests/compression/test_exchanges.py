"""Compressed exchanges on real ranks: their bounds, bits, bytes, values that are not finite, and error feedback."""

from __future__ import annotations

from pathlib import Path

import pytest
from ready_ranks import run_ranks

from memo.compression import CompressionMethod, GradientCompression
from memo.errors import UsageError

WORKER = Path(__file__).parent / "exchange_worker.py"


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.parallel), 4])
def test_exchanges_hold_what_their_modules_promise(ranks: int) -> None:
    done = run_ranks(ranks, WORKER, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": held") == 12


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("int4", "none of int8, powersgd and powersgd:RANK"),
        ("powersgd:", "none of int8"),
        ("powersgd:-1", "none of int8"),
        ("powersgd:²", "none of int8"),
        ("powersgd:0", "the rank of powersgd is 1 or more, not 0"),
        ("int8:4", "int8 has no rank"),
    ],
)
def test_a_method_that_is_none_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        GradientCompression.parse(text)


@pytest.mark.parametrize("text", ["int8", "powersgd:4", "powersgd:16"])
def test_a_method_is_what_its_text_says(text: str) -> None:
    assert str(GradientCompression.parse(text)) == text
    assert GradientCompression.parse("powersgd") == GradientCompression(method=CompressionMethod.POWERSGD, rank=4)
