"""Pipelines are rehearsed stage by stage: each in its budgets by its own plan, and together in the time that is planned."""

from __future__ import annotations

import functools
import json

import pytest

from memo.cli.main import main
from memo.gpt import preset
from memo.mip.activation import Pipeline, microbatches_s
from memo.mip.inputs import Pass, PipelineSchedule
from memo.parallel import Layout
from memo.rehearsal import RehearsedPipeline, SimulatedMachine, gpt_step_of_rank, rehearse_pipeline
from memo.rehearsal.turns import RankTimes

TOKENS, MICROBATCHES = 16384, 4


def rehearsed(layout: Layout, *, device: str = "4GiB", host: str = "16GiB") -> RehearsedPipeline:
    config = preset("125m", layers=4, max_seq=TOKENS)
    build = functools.partial(gpt_step_of_rank(config, layout, microbatches=MICROBATCHES), batch=1, tokens=TOKENS)
    pipeline = Pipeline(
        stages=layout.pp, microbatches=MICROBATCHES, schedule=layout.schedule, chunks=layout.stages_per_rank
    )
    machine = functools.partial(SimulatedMachine, "h100", ranks=layout.ranks)
    return rehearse_pipeline(build, machine, pipeline, device=device, host=host)


def test_each_stage_settles_in_its_budgets_and_shares_the_node_s_memory_by_what_it_holds() -> None:
    found = rehearsed(Layout(pp=4), device="1.8GiB")
    assert [stage.failure for stage in found.stages] == [None] * 4
    assert found.fits, [str(one) for stage in found.stages for one in stage.violations]
    assert found.settled_after is not None
    assert [stage.host_budget for stage in found.stages] == [(16 << 30) * held // 10 for held in (4, 3, 2, 1)]
    plans = [stage.plan for stage in found.stages if stage.plan is not None]
    assert [plan.problem.pipeline.held for plan in plans] == [4, 3, 2, 1]


def test_stages_wait_for_one_another() -> None:
    found = rehearsed(Layout(pp=2, dp=2))
    times = found.times
    busiest = max(sum(each.turns_s.values()) for each in times) * MICROBATCHES
    alone = max(stage.step_s or 0.0 for stage in found.stages)
    assert alone == pytest.approx(busiest, rel=0.1)
    assert found.step_s is not None
    assert found.step_s > alone + min(each.turn_s(0, Pass.FORWARD) for each in times)
    assert times[0].send_s > 0


def test_measured_turns_are_combined_as_predicted_ones() -> None:
    times = [RankTimes(turns_s={(0, Pass.FORWARD): 1.0, (0, Pass.BACKWARD): 2.0}, sync_s=0.5, send_s=0.25)] * 2
    pipeline = Pipeline(stages=2, microbatches=2)
    # F0 F1 . . B0 . B1 on the first rank: the second one's F0 begins at 1.25, its B0 ends at 4.25, its F1 at 5.25, its B1 at
    # 7.25; the first one's B1 begins at 7.5.
    assert microbatches_s(pipeline, times, send_s=lambda giver, taker: times[giver].send_s) == 7.5 + 2.0 + 0.5


@pytest.mark.parametrize("schedule", [PipelineSchedule.INTERLEAVED, PipelineSchedule.ZERO_BUBBLE_V], ids=str)
def test_turns_of_every_kind_and_chunk_are_measured(schedule: PipelineSchedule) -> None:
    found = rehearsed(Layout(pp=2, schedule=schedule), device="8GiB")
    assert found.step_s is not None
    for stage, times in enumerate(found.times):
        for chunk in (0, 1):
            halves = (Pass.INPUT, Pass.WEIGHT) if schedule.splits_backward and (stage, chunk) != (0, 0) else ()
            for kind in (Pass.FORWARD, *(halves or (Pass.BACKWARD,))):
                assert times.turn_s(chunk, kind) > 0
        step = found.stages[stage].step_s
        assert sum(times.turns_s.values()) * MICROBATCHES + times.sync_s == pytest.approx(step, rel=1e-3)


SEVEN_B = ("--model", "7b", "--layers", "8", "--pp", "4", "--accumulate", "8", "--device", "30GiB")
QWEN = ("--model", "qwen3-0.6b", "--layers", "4", "--pp", "2", "--accumulate", "4", "--loss-without-logits")
MODELS = {
    "1f1b": (*SEVEN_B, "--seq", "32k", "--gpus", "8", "--tp", "2"),
    "gpipe": (*SEVEN_B, "--seq", "16k", "--gpus", "8", "--cp", "2"),
    "interleaved-1f1b": (*SEVEN_B, "--seq", "16k", "--gpus", "4"),
    "of transformers": (*QWEN, "--seq", "16k", "--gpus", "4", "--stage-layers", "2,2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS)
def test_a_pipeline_takes_what_is_planned(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (*MODELS[case], "--gpu", "h100", "--host", "200GiB", "--json")
    schedule = ("--schedule", case) if case in tuple(PipelineSchedule) else ()
    assert main(["rehearse", *flags, *schedule]) == 0
    rehearsed = json.loads(capsys.readouterr().out)
    zero = ("--zero", "3", "--precision", "bf16") if schedule else ()
    assert main(["plan", *flags, *schedule, *zero]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert rehearsed["fits"]
    assert rehearsed["step_s"] == pytest.approx(planned["step_s"], rel=0.05)


def test_the_command_shows_a_row_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "tiny", "--seq", "2k", "--gpus", "4", "--pp", "2", "--accumulate", "2"]
    assert main(["rehearse", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("2 stages, 1f1b, 2 microbatches: ")
    assert [line.split()[0] for line in lines[-4:-1]] == ["stage", "0", "1"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--pp", "2", "--gpus", "4"], "--accumulate 1 is too few for 1f1b on 2 pipeline ranks"),
        (["--pp", "2", "--gpus", "5"], "--gpus 5 is no multiple of --tp 1 times --cp 1 times --pp 2"),
        (["--schedule", "gpipe"], "--schedule gpipe has no meaning without --pp"),
        (["--stage-layers", "1,1"], "--stage-layers has no meaning without --pp"),
        (["--pp", "2", "--gpus", "2", "--accumulate", "2", "--attach"], "--attach does not go with --pp"),
    ],
)
def test_what_is_no_pipeline_is_one_line(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "--model", "tiny", *flags]) != 0
    said = capsys.readouterr().err
    assert says in said
    assert len(said.strip().splitlines()) == 1
