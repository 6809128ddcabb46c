"""Every rank's step is the plan's: real layouts agree, and each perturbation of the plan or of a rank is found."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from memo.cli.main import main
from memo.dry_run import all_ranks, dry_run
from memo.dry_run.simulated_step import RankStep, step_of_rank
from memo.errors import ExitCode, PlanError, UsageError
from memo.gpt import AttentionPattern, MoeConfig, Precision, preset
from memo.gpt.arithmetic import Collective, PlannedRun, StepCollectives, planned_run
from memo.mip.activation import plan_to_json
from memo.mip.activation.files import plan_from_json
from memo.mip.inputs import PipelineSchedule
from memo.parallel import Layout


def made(
    *,
    variant: str | None = None,
    precision: Precision = Precision.BF16,
    microbatches: int = 2,
    vocab: int = 259,
    tokens: int = 768,
    layers: int = 4,
    kv_heads: int | None = None,
    sparse_embedding: bool = False,
    overlap: bool = False,
    moe: dict[str, int] | None = None,
    pattern: AttentionPattern | None = None,
    rows: int | None = None,
    **sizes: int | PipelineSchedule | tuple[int, ...],
) -> PlannedRun:
    shape = {"vocab_size": vocab, "max_seq": tokens, "layers": layers, "heads": 4} | (
        {"kv_heads": kv_heads} if kv_heads else {}
    )
    if moe is not None:
        shape["moe"] = MoeConfig(**{"experts": 8, "shared_experts": 1, "expert_hidden": 64, "every": 2} | moe)
    shape |= {} if pattern is None else {"pattern": pattern}
    config = preset("tiny", variant=variant, **shape)  # type: ignore[arg-type]
    layout = Layout(tp_overlap=overlap, **sizes)  # type: ignore[arg-type]
    return PlannedRun(
        config=config,
        precision=precision,
        layout=layout,
        tokens=tokens,
        rows=rows or layout.dp,
        microbatches=microbatches,
        sparse_embedding=sparse_embedding,
    )


@pytest.mark.parametrize(
    "run",
    [
        made(dp=2, tp=2, cp=2),
        made(dp=3, variant="llama", precision=Precision.BF16_AUTOCAST),
        made(cp=3, precision=Precision.FP32),
        made(tp=4, precision=Precision.BF16_AUTOCAST),
        made(dp=2, tp=2, pp=2),
        made(tp=2, pp=2, microbatches=4),
        made(dp=2, pp=2, microbatches=4, schedule=PipelineSchedule.INTERLEAVED),
        made(dp=2, pp=2, microbatches=4, layers=8, chunks=4, schedule=PipelineSchedule.INTERLEAVED),
        made(tp=2, pp=2, microbatches=4, stage_layers=(3, 1)),
        made(dp=2, tp=2, variant="llama", kv_heads=4, sparse_embedding=True, vocab=2001),
        made(dp=2, pp=2, variant="llama", sparse_embedding=True, microbatches=3, tokens=128),
        made(cp=2, dp=2, tp=2, variant="llama", kv_heads=4, sparse_embedding=True),
        made(cp=2, tp=2, pp=2, pattern=AttentionPattern(window=100)),
        made(cp=4, variant="llama", kv_heads=2),
        made(cp=2, tp=2, variant="llama", kv_heads=2, precision=Precision.BF16_AUTOCAST),
        made(tp=4, dp=2, overlap=True, variant="llama", kv_heads=4, precision=Precision.BF16_AUTOCAST),
        made(tp=2, cp=2, overlap=True, rows=3),
        made(tp=2, pp=2, overlap=True, rows=2, microbatches=4),
    ],
    ids=lambda run: (
        f"dp{run.layout.dp}-cp{run.layout.cp}-tp{run.layout.tp}-pp{run.layout.pp}-{run.precision}"
        f"-chunks{run.layout.stages_per_rank}"
        f"{'-uneven' * bool(run.layout.stage_layers)}{'-sparse' * run.sparse_embedding}"
        f"{'-local' * (run.config.pattern is not None)}{'-overlap' * run.layout.tp_overlap}"
        f"{'-shared' * (run.config.kv_heads % (run.layout.cp * run.layout.tp) > 0)}"
    ),
)
def test_what_ranks_issue_is_what_the_plan_counts(run: PlannedRun) -> None:
    found = dry_run(run)
    assert found.disagreements == ()
    assert sorted(rank for kind in found.kinds for rank in kind.ranks) == list(range(run.layout.ranks))


@pytest.mark.parametrize(
    "run",
    [
        made(tp=2, moe={"shared_experts": 0}),
        made(dp=4, ep=4, moe={}),
        made(dp=4, cp=2, ep=2, moe={"shared_experts": 0}, precision=Precision.BF16_AUTOCAST),
        made(dp=2, cp=2, tp=2, ep=2, moe={"bottleneck": 32}),
        made(dp=2, pp=2, ep=2, moe={}),
        made(dp=2, pp=2, ep=2, moe={"every": 4}),  # the first stage has no experts
        made(tp=2, pp=2, microbatches=4, moe={}),
        made(dp=16, moe={"every": 1}),  # twice as many ranks as experts, whose matrices are sharded by inputs
        made(dp=3, moe={"every": 3}, precision=Precision.FP32),
        made(dp=2, ep=2, moe={"experts": 6, "top_k": 1}, tokens=128),  # rows that ranks divide and experts do not
        made(dp=3, ep=3, moe={"experts": 6, "top_k": 1}, tokens=128, rows=6),  # nor do ranks
    ],
    ids=lambda run: (
        f"dp{run.layout.dp}-cp{run.layout.cp}-tp{run.layout.tp}-pp{run.layout.pp}-ep{run.layout.ep}"
        f"-every{run.config.moe.every}"
    ),
)
def test_ranks_with_experts_issue_what_the_plan_counts(run: PlannedRun) -> None:
    assert dry_run(run).disagreements == ()


def test_an_exchange_of_experts_that_the_plan_does_not_count_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCollectives, "expert_backward", lambda step: ())
    found = dry_run(made(dp=2, ep=2, moe={}))
    assert (
        "all-to-all of 393,216 bytes over dp x cp (2 ranks): the step issues 16, the plan counts 8"
        in found.disagreements[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [PipelineSchedule.ZERO_BUBBLE, PipelineSchedule.ZERO_BUBBLE_V])
def test_split_backwards_are_counted(schedule: PipelineSchedule) -> None:
    pytest.importorskip("torch", minversion="2.13")
    assert dry_run(made(tp=2, pp=2, microbatches=4, schedule=schedule)).disagreements == ()


def test_a_plan_that_counts_a_gather_too_few_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = StepCollectives.tensor_backward

    def fewer(self: StepCollectives, *, experts: bool = False) -> tuple[Collective, ...]:
        first, *others = whole(self, experts=experts)
        return (dataclasses.replace(first, count=first.count - 1), *others)

    monkeypatch.setattr(StepCollectives, "tensor_backward", fewer)
    wrong = dry_run(made(tp=2, dp=2)).disagreements
    assert wrong[0].startswith("rank 0: all-gather of 196,608 bytes over tp (2 ranks): the step issues ")
    assert wrong[0].endswith("the plan counts 44")


@pytest.mark.parametrize("sizes", [{"tp": 2, "pp": 2}, {"dp": 2, "pp": 2}])
def test_a_stage_with_too_few_layers_is_found(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]) -> None:
    def fewer(run: PlannedRun, rank: int) -> RankStep:
        if rank < 2:
            return step_of_rank(run, rank)
        layout = dataclasses.replace(run.layout, stage_layers=(3, 1))
        return step_of_rank(dataclasses.replace(run, layout=layout), rank)

    monkeypatch.setattr(all_ranks, "step_of_rank", fewer)
    wrong = dry_run(made(**sizes)).disagreements
    assert wrong
    assert all(line.startswith(("rank 2: ", "rank 3: ")) for line in wrong), wrong
    assert any("the step issues" in line for line in wrong)


def test_rows_of_fewer_tokens_than_the_step_exchanges_are_found() -> None:
    run = made(dp=2, variant="llama", sparse_embedding=True, vocab=2001, microbatches=1)
    wrong_count = all_ranks.against_plan(
        all_ranks.Place.of(run.layout, 0),
        step_of_rank(run, 0).calls,
        dataclasses.replace(run, tokens=384, config=run.config).collectives_of(stage=0, tp_rank=0, replica=0),
    )
    assert any("all-gather of 6,144 bytes over dp x cp (2 ranks): the step issues 1" in line for line in wrong_count)


def test_a_rank_with_another_shape_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank of tensor parallelism has fewer rows of the vocabulary, and so is run for itself."""

    def changed(run: PlannedRun, rank: int) -> RankStep:
        step = step_of_rank(run, rank)
        if rank == 0:
            return step
        first = next(number for number, call in enumerate(step.calls) if call.ranks == (0, 1) and len(call.shape) > 1)
        other = dataclasses.replace(step.calls[first], shape=(1, 1))
        return dataclasses.replace(step, calls=(*step.calls[:first], other, *step.calls[first + 1 :]))

    monkeypatch.setattr(all_ranks, "step_of_rank", changed)
    wrong = dry_run(made(tp=2)).disagreements
    assert any("rank 1: collective " in line and "they would wait for one another" in line for line in wrong), wrong


def test_a_rank_in_another_group_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = all_ranks.groups_of_rank

    def swapped(layout: Layout, rank: int) -> dict:  # type: ignore[type-arg]
        return right(layout, {2: 1, 1: 2}.get(rank, rank))

    monkeypatch.setattr(all_ranks, "groups_of_rank", swapped)
    wrong = dry_run(made(tp=2, dp=2)).disagreements
    assert "rank 1: its group tp has the ranks [2, 3], and by its place [0, 1]" in wrong


def plan_file(folder: Path, *flags: str) -> Path:
    path = folder / "plan.json"
    given = ["plan", "--model", "7b", "--layers", "2", "--seq", "4k", "--gpu", "h100", "--precision", "bf16", *flags]
    assert main([*given, "-f", "-o", str(path)]) == ExitCode.OK
    return path


@pytest.mark.parametrize(
    "flags",
    [
        ("--gpus", "4", "--ep", "4", "--device", "800MiB"),
        ("--gpus", "4", "--ep", "2", "--tp", "2", "--device", "600MiB"),
        ("--gpus", "2", "--tp", "2", "--host", "0", "--device", "523MiB"),
        ("--gpus", "4", "--ep", "2", "--pp", "2", "--accumulate", "2", "--device", "1200MiB"),
        ("--gpus", "2", "--cp", "2", "--device", "460MiB", "--expert-bottleneck", "128"),
        ("--gpus", "2", "--ep", "2", "--precision", "bf16-autocast", "--device", "1200MiB", "--shared-experts", "0"),
    ],
    ids=["ep", "ep and tp", "tp, recomputed", "ep and pp", "cp and a bottleneck", "autocast"],
)
def test_plans_with_experts_hold_what_they_say(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer rows come to a rank's experts than the plan has room for, and whole storages move."""
    shape = ("--layers", "6", "--hidden", "512", "--heads", "8")
    path = plan_file(tmp_path, "--model", "moe-tiny", *shape, "--seq", "16k", "--host", "4GiB", *flags)
    plan = plan_from_json(path.read_text())
    assert any(layer.host or layer.recomputes for layer in plan.layers)
    capsys.readouterr()
    assert main(["dry-run", str(path), "--json"]) == ExitCode.OK
    said = json.loads(capsys.readouterr().out)
    for kind in said["kinds"]:
        assert 0.8 < kind["peak_nbytes"] / kind["planned_peak_nbytes"] <= 1.02


def test_a_plan_of_a_pattern_moves_and_holds_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pattern = ("--sliding-window", "512", "--full-every", "3")
    shape = ("--hidden", "512", "--heads", "8", "--kv-heads", "4", "--variant", "llama", *pattern)
    size = ("--model", "tiny", *shape, "--layers", "6", "--seq", "32k")
    path = plan_file(tmp_path, *size, "--gpus", "4", "--tp", "2", "--cp", "2", "--device", "360MiB", "--host", "1GiB")
    plan = plan_from_json(path.read_text())
    assert plan.problem.profile.layers == ("local", "local", "block") * 2
    assert any(layer.host or layer.recomputes for layer in plan.layers)
    capsys.readouterr()
    assert main(["dry-run", str(path), "--json"]) == ExitCode.OK
    for kind in json.loads(capsys.readouterr().out)["kinds"]:
        assert 0.8 < kind["peak_nbytes"] / kind["planned_peak_nbytes"] <= 1.02


def test_a_plan_that_moves_and_recomputes_agrees_and_holds_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ("--hidden", "512", "--heads", "8", "--variant", "llama")
    size = ("--model", "tiny", *shape, "--layers", "6", "--seq", "32k")
    path = plan_file(tmp_path, *size, "--gpus", "4", "--tp", "2", "--device", "610MiB", "--host", "1GiB")
    plan = plan_from_json(path.read_text())
    assert any(layer.host or layer.recomputes for layer in plan.layers)
    capsys.readouterr()
    assert main(["dry-run", str(path), "--json"]) == ExitCode.OK
    said = json.loads(capsys.readouterr().out)
    assert said["agrees"]
    for kind in said["kinds"]:
        assert 0.85 < kind["peak_nbytes"] / kind["planned_peak_nbytes"] <= 1.02


def test_a_plan_whose_ranks_share_key_value_heads_holds_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ("--hidden", "512", "--heads", "8", "--variant", "llama")  # two key/value heads for eight ranks
    size = ("--model", "tiny", *shape, "--layers", "6", "--seq", "128k")
    path = plan_file(tmp_path, *size, "--gpus", "8", "--cp", "8", "--device", "610MiB", "--host", "16GiB")
    plan = plan_from_json(path.read_text())
    assert not plan.problem.profile.signature.ring
    assert any(layer.host or layer.recomputes for layer in plan.layers)
    capsys.readouterr()
    assert main(["dry-run", str(path), "--json"]) == ExitCode.OK
    for kind in json.loads(capsys.readouterr().out)["kinds"]:
        assert 0.9 < kind["peak_nbytes"] / kind["planned_peak_nbytes"] <= 1.02


@pytest.mark.parametrize(
    "flags",
    [
        ("--gpus", "2", "--pp", "2", "--layers", "3", "--accumulate", "2"),
        ("--gpus", "2", "--embedding-exchange", "sparse"),
        ("--gpus", "4", "--pp", "2", "--layers", "5", "--accumulate", "4", "--stage-layers", "4,1"),
    ],
    ids=["layers that do not divide", "rows of the embedding", "given numbers of layers"],
)
def test_every_plan_that_memo_plan_writes_by_default_is_run(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(tmp_path, *flags)
    capsys.readouterr()
    assert main(["dry-run", str(path)]) == ExitCode.OK


@pytest.mark.parametrize("schedule", [each for each in PipelineSchedule if each is not PipelineSchedule.GPIPE])
def test_a_stage_of_few_layers_holds_no_more_than_the_plan_says(
    schedule: PipelineSchedule, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results until their backward, and what chunks of one rank pass on, are a large part of what it holds then."""
    pytest.importorskip("torch", minversion="2.13")
    chunks = schedule.default_chunks
    shape = ("--layers", str(4 * chunks), "--hidden", "512", "--heads", "8")
    ranks = ("--gpus", "4", "--pp", "4", "--accumulate", "16", "--schedule", str(schedule))
    path = plan_file(tmp_path, *shape, "--seq", "32k", "--device", "16GiB", *ranks)
    assert main(["dry-run", str(path), "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for kind in found["kinds"]:
        assert 0.8 * kind["planned_peak_nbytes"] < kind["peak_nbytes"] < 1.002 * kind["planned_peak_nbytes"], kind


def test_stages_on_different_machines_are_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.json"
    groups = [
        {"name": name, "gpu": gpu, "nodes": 1, "gpus_per_node": 2} for name, gpu in (("new", "h100"), ("old", "a800"))
    ]
    links = [{"between": ["new", "old"], "net": "1x100Gb"}]
    cluster.write_text(json.dumps({"format": "memo-cluster", "version": 1, "groups": groups, "links": links}))
    path = tmp_path / "plan.json"
    asked = ["plan", "--model", "7b", "--layers", "6", "--seq", "8k", "--cluster", str(cluster), "--tp", "2"]
    assert main([*asked, "--pp", "2", "--accumulate", "4", "--precision", "bf16", "-o", str(path)]) == ExitCode.OK
    problem = plan_from_json(path.read_text()).problem
    assert problem.machines
    assert len(set(problem.pipeline.layers)) == 2
    capsys.readouterr()
    assert main(["dry-run", str(path)]) == ExitCode.OK


@pytest.mark.parametrize("share", [0.5, 2])
def test_a_wrong_number_of_bytes_of_weights_is_a_disagreement(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the share, of a plan that says so, from both sides."""

    def other(run: PlannedRun, rank: int) -> RankStep:
        step = step_of_rank(run, rank)
        return dataclasses.replace(step, states_bytes=round(step.states_bytes * share))

    monkeypatch.setattr(all_ranks, "step_of_rank", other)
    run = planned_run(plan_from_json(plan_file(tmp_path, "--gpus", "2").read_text()))
    wrong, *_ = dry_run(run).disagreements
    assert wrong.startswith("rank 0: its weights and optimizer state are ")


def test_a_plan_of_far_more_memory_than_a_step_holds_is_a_disagreement(tmp_path: Path) -> None:
    plan = plan_from_json(plan_file(tmp_path, "--gpus", "2", "--seq", "16k").read_text())
    large = dataclasses.replace(plan.stages[0], peak_device_bytes=2 * plan.stages[0].peak_device_bytes)
    (wrong,) = dry_run(planned_run(dataclasses.replace(plan, stages=(large,)))).disagreements
    assert wrong.startswith("rank 0: its step holds ")


def test_less_memory_than_a_step_holds_is_a_disagreement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = plan_file(tmp_path, "--gpus", "2", "--cp", "2")
    plan = plan_from_json(path.read_text())
    small = dataclasses.replace(plan.stages[0], peak_device_bytes=1 << 20)
    path.write_text(plan_to_json(dataclasses.replace(plan, stages=(small,))))
    capsys.readouterr()
    assert main(["dry-run", str(path)]) == ExitCode.PLAN_INVALID
    assert "the plan says 1 MiB of stage 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--gpus", "1"), "the plan is for one rank"),
        (("--gpus", "2", "--zero", "1"), "(ZeRO 3)"),
        (("--gpus", "2", "--recompute", "full"), "memo train has no fixed method of recompute"),
        (("--gpus", "2", "--lora", "4"), "memo train trains all weights, not adapters"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_in_one_line(
    flags: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(tmp_path, *flags)
    capsys.readouterr()
    assert main(["dry-run", str(path)]) in (ExitCode.FAILURE, ExitCode.USAGE)
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_a_plan_that_does_not_say_its_run_is_refused(tmp_path: Path) -> None:
    plan = plan_from_json(plan_file(tmp_path, "--gpus", "2").read_text())
    with pytest.raises(PlanError, match="does not say how that is trained"):
        planned_run(dataclasses.replace(plan, run=None))


def test_more_ranks_than_a_dry_run_takes_are_refused(tmp_path: Path) -> None:
    plan = plan_from_json(plan_file(tmp_path, "--gpus", "2").read_text())
    pipeline = dataclasses.replace(plan.problem.pipeline, stage_ranks=4097)
    many = dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, pipeline=pipeline))
    with pytest.raises(UsageError, match=r"4,097 ranks; a dry run is of at most 4,096"):
        dry_run(planned_run(many))


def test_a_model_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    plan = plan_from_json(plan_file(tmp_path, "--gpus", "2", "--cp", "2").read_text())
    signature = dataclasses.replace(plan.problem.profile.signature, tokens=1023)
    profile = dataclasses.replace(plan.problem.profile, signature=signature)
    odd = dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, profile=profile))
    with pytest.raises((UsageError, PlanError)):
        planned_run(odd)
