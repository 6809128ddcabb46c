"""The orders that plans are made for are those of torch's own schedules."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from memo.mip.inputs import Pass, PipelineSchedule
from memo.mip.inputs.pipeline_schedules import rank_turns
from memo.parallel.pipeline import TORCH_NAMES

RANKS, MICROBATCHES = (2, 3, 4, 8), range(1, 25)
INTERLEAVED = (PipelineSchedule.INTERLEAVED, PipelineSchedule.ZERO_BUBBLE)
CHUNKS = [(schedule, schedule.default_chunks) for schedule in PipelineSchedule]
CHUNKS += [(schedule, chunks) for schedule in INTERLEAVED for chunks in (3, 4, 7)]
KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def torchs(schedule: PipelineSchedule, ranks: int, rank: int, microbatches: int, chunks: int) -> Iterable[Any]:
    """What torch's class lays down for a rank; it is asked without the processes that its constructor wants."""
    kind: Any = get_schedule_class(TORCH_NAMES[schedule])
    rounds = max(1, microbatches // ranks)
    known = SimpleNamespace(
        pp_group_size=ranks,
        n_local_stages=chunks,
        num_stages=ranks * chunks,
        _num_stages=ranks,
        _n_microbatches=microbatches,
        microbatches_per_round=microbatches // rounds,
    )
    if chunks == 1:
        return kind._get_pipeline_order(known)[rank]
    return kind._calculate_single_rank_operations(known, rank)


def words(actions: Iterable[Any], own: list[int]) -> list[str]:
    """As turns are told: by chunk; the first stage's backward is whole and comes when its second half does."""
    said = []
    for action in actions:
        if action is None or action.computation_type.name not in KINDS:
            continue
        kind = KINDS[action.computation_type.name]
        if action.stage_index == 0 and kind in "IW":
            if kind == "I":
                continue
            kind = "B"
        said.append(f"{own.index(action.stage_index)}{kind}{action.microbatch_index}")
    return said


@pytest.mark.parametrize(("schedule", "chunks"), CHUNKS)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_rank_does_what_torch_has_it_do(schedule: PipelineSchedule, chunks: int, ranks: int) -> None:
    tried = 0
    for microbatches in MICROBATCHES:
        if schedule.reason_unsupported(microbatches, ranks) is not None:
            continue
        for rank in range(ranks):
            turns = rank_turns(schedule, ranks=ranks, rank=rank, microbatches=microbatches, chunks=chunks)
            mine = [f"{turn.chunk}{turn.kind}{turn.microbatch}" for turn in turns]
            own = schedule.stages_of(rank, ranks, chunks=chunks)
            theirs = words(torchs(schedule, ranks, rank, microbatches, chunks), own)
            if schedule is PipelineSchedule.ONE_F_ONE_B:  # torch shows the last stage's numbers one too high
                mine, theirs = ([word[:2] for word in order] for order in (mine, theirs))
            assert mine == theirs, (microbatches, rank)
            tried += 1
    assert tried >= ranks


@pytest.mark.parametrize(("schedule", "chunks"), CHUNKS)
def test_what_is_begun_is_ended_once(schedule: PipelineSchedule, chunks: int) -> None:
    turns = rank_turns(schedule, ranks=4, rank=1, microbatches=8, chunks=chunks)
    ends = [turn.call for turn in turns if turn.kind in (Pass.BACKWARD, Pass.WEIGHT)]
    begins = [turn.call for turn in turns if turn.kind is Pass.FORWARD]
    assert sorted(begins) == sorted(ends) == sorted(set(ends))
    assert len(begins) == 8 * chunks


@pytest.mark.parametrize(
    ("schedule", "chunks", "words"),
    [
        ("interleaved-1f1b", 1, "is too few for interleaved-1f1b; at least 2"),
        ("interleaved-zero-bubble", 0, "is too few for interleaved-zero-bubble; at least 2"),
        ("zbv", 3, "is not possible with zbv, which gives a rank 2"),
        ("1f1b", 2, "is not possible with 1f1b, which gives a rank 1"),
    ],
)
def test_a_number_of_chunks_that_torchs_class_refuses_is_refused(schedule: str, chunks: int, words: str) -> None:
    assert PipelineSchedule(schedule).reason_not_chunks(chunks) == words
