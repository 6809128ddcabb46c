"""Warnings point at the line of the program, not at memo's."""

from __future__ import annotations

import warnings

import pytest
import torch
from small_models import ids, stack

import memo
from memo.warn_user import warn_user


def test_a_warning_points_at_the_programs_line() -> None:
    model = stack()
    memo.offload(model, host="8MiB")
    with pytest.warns(RuntimeWarning, match="no forward of Stack was managed") as told:
        model(ids(0)).backward()
    assert told[0].filename == __file__


def test_lines_of_memo_and_torch_are_skipped() -> None:
    code = compile("warn_user('alone')", "memo/alone.py", "exec")
    names = {"warn_user": warn_user, "__name__": "memo.alone"}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.utils._pytree.tree_map(lambda _: exec(code, names), [0])
    assert [one.filename for one in told] == [__file__]
