"""Spills: what found no room is told by step and layer, with what the layer saves otherwise."""

from __future__ import annotations

from pathlib import Path

import torch
from small_models import stack, train
from torch import nn

import memo
from memo.events import Note, TierName
from memo.trace import read_traces
from memo.units import format_bytes

TOKENS, HIDDEN = 64, 32


class Wider(nn.Module):
    """Saves `times` as much as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.times = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x.repeat(1, self.times, 1) * self.weight).exp()[:, : x.shape[1]]  # type: ignore[no-any-return]


def test_the_step_that_spilled_most_is_told_with_its_layer(tmp_path: Path) -> None:
    model = nn.Sequential(*(Wider() for _ in range(4)))
    times = [1, 1, 4, 1, 8, 1]
    one = 2 * TOKENS * HIDDEN * 4
    manager = memo.offload(
        model, layers=list(model), host=8 * one, disk=tmp_path, alpha=1.0, min_bytes=256, trace=tmp_path / "trace"
    )
    manager.step = 1
    assert manager.report().spills is None
    spilled = []
    for step, wide in enumerate(times, 1):
        model[1].times = wide  # type: ignore[assignment]
        before = manager.stats.bytes_disk
        with manager:
            out = model(torch.linspace(-1, 0, 2 * TOKENS * HIDDEN).view(2, TOKENS, HIDDEN)).sum()
        out.backward()
        spilled.append(manager.stats.bytes_disk - before)
        assert (spilled[-1] > 0) == (wide > 1), (step, spilled)
        told = manager.report().spills
        if step > 2:
            assert told is not None, "while the step is under way, too"
        manager.step_done()
    told = manager.report().spills
    assert told is not None
    assert (told.nbytes, told.steps) == (sum(spilled), 2)
    assert (told.worst.step, told.worst.nbytes) == (5, spilled[4])
    assert told.worst.layer.nbytes <= spilled[4]
    assert (told.worst.layer.full, told.worst.layer.tier) == (TierName.HOST, TierName.DISK)
    line = next(line for line in str(manager.report()).splitlines() if line.startswith("spilled: "))
    assert f"{format_bytes(sum(spilled))} in 2 steps, most in step 5, {format_bytes(spilled[4])}: " in line
    manager.close()
    (trace,) = tmp_path.glob("trace*")
    notes = [event for event in read_traces([trace])[0].events if isinstance(event, Note) and event.cause == "spill"]
    assert {note.step for note in notes} == {3, 5}
    assert all(note.module for note in notes)
    wide = next(note for note in notes if note.step == 5 and note.module == "1")
    assert wide.message.startswith("1 saved ")
    assert "times its mean: " in wide.message
    assert "found no room in the host tier and went to the disk tier" in wide.message


def test_nothing_is_told_where_all_finds_room(tmp_path: Path) -> None:
    model = stack()
    manager = memo.offload(model, host="64MiB", disk=tmp_path, alpha=1.0, min_bytes=256)
    train(model, lambda step: model(torch.full((2, 8), step)), manager)
    assert manager.report().spills is None
    assert "\nspilled: " not in str(manager.report())
    manager.close()
