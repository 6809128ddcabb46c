"""A layout that cannot be is refused in one line, before anything starts; one that can says who holds what."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

sys.path.insert(0, str(Path(__file__).parent))

from launching import torchrun

from memo.errors import ExitCode, UsageError
from memo.gpt import AttentionPattern, MoeConfig, preset
from memo.parallel import ContextAttention, Layout, PipelineSchedule, key_copies, make_schedule

ULYSSES, RING = ContextAttention.ULYSSES, ContextAttention.RING
V = PipelineSchedule.ZERO_BUBBLE_V


@pytest.mark.parametrize(
    ("sizes", "changes", "reason"),
    [
        ({"tp": 3}, {}, "^--tp 3 does not divide the model's 8 heads"),
        ({"tp": 4, "cp": 4, "cp_attention": ULYSSES}, {}, "--tp 4 times --cp 4 does not divide the model's 8 heads"),
        ({"tp": 3, "cp": 2}, {}, "--tp 3 does not divide the model's 8 heads"),
        (
            {"cp": 4, "cp_attention": RING},
            {"seq": 60},
            "into an early and a late part for each of --cp 4; use a multiple of 8",
        ),
        (
            {"cp": 2, "cp_attention": RING},
            {"within_documents": True},
            "attention within documents is not possible with ring attention",
        ),
        ({"tp": 16, "cp": 2}, {"end_of_document": 0, "heads": 16}, "not possible with ring attention"),
        (
            {"cp": 2, "cp_attention": RING},
            {"pattern": AttentionPattern(window=16)},
            "local attention is not possible with ring attention; use --cp-attention ulysses, or no --cp",
        ),
        ({"tp": 4}, {"kv_heads": 2}, "does not divide the model's 2 key/value heads"),
        ({"tp": 4, "cp": 2}, {"kv_heads": 2}, "^--tp 4 does not divide the model's 2 key/value heads"),
        ({"cp": 3, "cp_attention": ULYSSES}, {"kv_heads": 2}, "^--cp 3 does not divide the model's 8 heads"),
        ({"tp": 4}, {"ffn": 130}, "--tp 4 does not divide the MLP's width of 130"),
        ({"cp": 8}, {"seq": 60}, "--seq 60 does not divide over 8 ranks"),
        ({"tp": 8, "sequence_parallel": True}, {"seq": 60}, "--seq 60 does not divide over 8 ranks"),
        ({"dp": 3}, {}, "--batch 4 does not divide over --dp 3"),
        ({"tp_overlap": True}, {}, "^--tp-overlap has no meaning without --tp; give --tp 2 or more"),
        (
            {"tp": 8, "dp": 4, "tp_overlap": True},
            {"seq": 8},
            "^--tp-overlap: one sequence with one token on a rank has no halves; use --batch 8 or --seq 16$",
        ),
        ({"pp": 3}, {}, "8 layers do not divide over 3 pipeline stages"),
        ({"pp": 8, "schedule": V}, {}, "8 layers do not divide over 16 pipeline stages"),
        ({"pp": 4}, {"microbatches": 3}, "--accumulate 3 is too few for 1f1b on 4 pipeline ranks; at least 4"),
        (
            {"pp": 2, "schedule": V},
            {"microbatches": 3},
            "--accumulate 3 is too few for zbv on 2 pipeline ranks; at least 4",
        ),
    ],
)
def test_what_does_not_divide_is_refused(sizes: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
    run = {"seq": 64, "batch": 4, "microbatches": 4} | changes
    model = {name: run.pop(name) for name in ("heads", "kv_heads", "ffn", "end_of_document", "pattern") if name in run}
    shape = preset("tiny", **({"layers": 8, "hidden": 64, "heads": 8} | model))
    with pytest.raises(UsageError, match=reason):
        Layout(**sizes).check(shape, **run)


def test_a_window_of_the_sequence_goes_around_a_ring() -> None:
    shape = preset("tiny", layers=8, pattern=AttentionPattern(window=64))
    Layout(cp=2, cp_attention=RING).check(shape, seq=64, batch=4, microbatches=4)


def test_more_context_ranks_than_heads_attend_around_a_ring() -> None:
    shape = preset("tiny", layers=8, hidden=64, heads=8)
    assert not Layout(cp=4, tp=2).rings(shape)
    assert Layout(cp=8, tp=2).rings(shape)
    assert Layout(cp=2, cp_attention=RING).rings(shape)
    assert not Layout(cp=8).rings(preset("tiny", hidden=64, heads=8, kv_heads=2)), "ranks share key/value heads"
    with pytest.raises(UsageError, match="--cp-attention ring has no meaning without --cp"):
        Layout(cp_attention=RING)
    Layout(cp=8, tp=2).check(shape, seq=64, batch=1, microbatches=1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"),
    [
        (8, 8, 4),
        (8, 2, 2),
        (8, 2, 4),
        (8, 2, 8),
        (8, 1, 8),
        (12, 4, 3),
        (12, 2, 3),
        (12, 6, 4),
        (28, 4, 7),
        (28, 4, 14),
    ],
)
def test_the_copies_of_key_value_heads_are_those_of_each_ranks_queries(heads: int, kv_heads: int, ranks: int) -> None:
    copies = key_copies(heads, kv_heads, ranks)
    assert (copies == 1) == (kv_heads % ranks == 0)
    copied = [head for head in range(kv_heads) for _ in range(copies)]
    queries, keys = heads // ranks, len(copied) // ranks
    for rank in range(ranks):
        own = copied[rank * keys : (rank + 1) * keys]
        used = [own[query // (queries // keys)] for query in range(queries)]  # as kernels group them
        assert used == [query // (heads // kv_heads) for query in range(rank * queries, (rank + 1) * queries)]


def test_a_schedule_without_a_pipeline_is_refused() -> None:
    with pytest.raises(UsageError, match="--schedule zbv has no meaning without --pp"):
        Layout(dp=2, schedule=V)


def test_fewer_microbatches_than_stages_are_fine_for_gpipe_alone() -> None:
    shape = preset("tiny", layers=8, hidden=64, heads=8)
    Layout(pp=4, schedule=PipelineSchedule.GPIPE).check(shape, seq=64, batch=4, microbatches=1)


@pytest.mark.parametrize("schedule", [PipelineSchedule.ZERO_BUBBLE, V])
def test_a_torch_that_cannot_split_a_backward_is_refused(
    schedule: PipelineSchedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    meta = torch.empty(1, 1, device="meta")
    sizes = {"tokens": meta, "hidden": meta, "microbatches": 4, "device": torch.device("cpu")}
    with pytest.raises(UsageError, match=f"--schedule {schedule} needs torch 2.13; 2.11.0"):
        make_schedule(Layout(pp=2, schedule=schedule), {}, None, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", PipelineSchedule)
@pytest.mark.parametrize("pp", [2, 4])
def test_every_layer_is_on_one_rank(schedule: PipelineSchedule, pp: int) -> None:
    layout = Layout(pp=pp, schedule=schedule)
    held = [layer for rank in range(pp) for stage in layout.stages_of(rank) for layer in layout.layers_of(stage, 16)]
    assert sorted(held) == list(range(16))


def test_a_v_puts_the_first_and_the_last_stage_on_one_rank() -> None:
    assert [Layout(pp=3, schedule=V).stages_of(rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_as_many_processes_as_ranks_or_one_line() -> None:
    command = [sys.executable, "-m", "memo.cli.main", "train", "--tp", "2", "--dp", "2"]
    environment = {**os.environ, "WORLD_SIZE": "3", "RANK": "0"}  # and no address: a process group could not be made
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == ExitCode.USAGE
    assert done.stderr == (
        "memo train: --dp 2 --tp 2 --pp 1 --cp 1 is a layout of 4 ranks, but 3 were started; on one node start "
        "them with torchrun --nproc-per-node 4\n"
    )


@pytest.mark.parametrize("flags", [["--schedule", "zbv"], ["--schedule", "v"]])
def test_what_all_ranks_find_wrong_is_said_once(flags: list[str]) -> None:
    command = [*torchrun(3, "-m"), "memo.cli.main", "train", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert len([line for line in done.stderr.splitlines() if line.startswith("memo train: ")]) == 1, done.stderr


@pytest.mark.parametrize(
    ("sizes", "experts", "line"),
    [
        ({"dp": 4, "ep": 4}, 6, "--ep 4 does not divide the model's 6 experts"),
        ({"dp": 2, "ep": 2}, None, "--ep 2 has no meaning without --experts"),
        ({"tp": 2, "tp_overlap": True}, 4, "--tp-overlap: experts are chosen for all rows at once; leave it out"),
    ],
)
def test_experts_that_do_not_fit_the_ranks_are_one_line(sizes: dict[str, int], experts: int | None, line: str) -> None:
    moe = None if experts is None else MoeConfig(experts=experts, expert_hidden=8)
    with pytest.raises(UsageError, match=line):
        Layout(**sizes).check(preset("tiny", moe=moe), seq=64, batch=4, microbatches=2)


@pytest.mark.parametrize(("dp", "ep"), [(3, 2), (2, 4), (1, 2)])
def test_expert_parallel_ranks_divide_the_data_parallel_ones(dp: int, ep: int) -> None:
    with pytest.raises(UsageError, match=f"--ep {ep} does not divide --dp {dp}"):
        Layout(dp=dp, ep=ep)
