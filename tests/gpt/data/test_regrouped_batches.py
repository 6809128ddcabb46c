"""Regrouped batches have the rows of a step in the order in which they are drawn, whatever the microbatches."""

from __future__ import annotations

import pytest
import torch

from memo.gpt.data.regrouped_batches import RegroupedBatches


class Counted:
    """Row `r` of microbatch `m` of step `s` is 100 s + 10 m + r, and its target one more."""

    description = "numbers"

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        rows = 100 * step + 10 * microbatch + torch.arange(self.batch)[:, None].repeat(1, 3)
        return rows, rows + 1


@pytest.mark.parametrize(("drawn", "batch"), [(4, 2), (2, 4), (4, 12), (12, 1), (3, 2), (2, 3), (4, 3), (5, 5)])
def test_a_steps_rows_are_the_same_in_the_same_order(drawn: int, batch: int) -> None:
    source = Counted(drawn)
    regrouped = RegroupedBatches(source, batch=batch)
    total = drawn * batch * 12
    for part in (0, 1):
        want = torch.cat([source.at(7, microbatch)[part] for microbatch in range(total // drawn)])
        got = torch.cat([regrouped.at(7, microbatch)[part] for microbatch in range(total // batch)])
        assert torch.equal(got, want)
    tokens, targets = regrouped.at(7, 1)
    assert tokens.shape == targets.shape == (batch, 3)
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
    assert (regrouped.batch, regrouped.description) == (batch, "numbers")
