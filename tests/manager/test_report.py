"""The report's figures are arithmetic on what happened."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from activation_problems import layer, machine
from small_models import ids, stack, train

import memo
from memo.autoplan import PlanOutcome
from memo.events import TierName, UseKind
from memo.manager.plan_source import FixedPlan
from memo.manager.report import DiskUse
from memo.mip.activation import ActivationPlan, ActivationProblem, Budgets, LayerPlan, predict_stages
from memo.mip.inputs import EmbeddingOrHeadProfile, Profile, Role, Signature, StaticBytes
from memo.trace.reader import read_trace
from memo.trace.stats import rank_stats
from memo.units import format_bytes

if TYPE_CHECKING:
    from pathlib import Path


def test_the_report_counts_bytes_peaks_and_hits(tmp_path: Path) -> None:
    model = stack(layers=4)
    manager = memo.offload(model, alpha=1.0, host="150KiB", disk=tmp_path, min_bytes=512)
    train(model, lambda step: model(ids(step)), manager, steps=2)
    report = manager.report()
    device, host, disk = report.tiers
    assert (device.tier, host.tier, disk.tier) == (TierName.DEVICE, TierName.HOST, TierName.DISK)
    assert host.moved_bytes + disk.moved_bytes == report.reloaded_bytes
    assert host.peak_bytes <= 150 << 10 == host.budget_bytes
    assert report.prefetch_hits == 1.0
    assert report.uses[UseKind.FETCHED] == 0
    assert report.spilled > 0
    assert report.disk is not None
    assert report.disk.written_bytes >= disk.moved_bytes  # whole blocks
    text = str(report)
    assert "150 KiB" in text
    assert re.search(r"writes [\d.e+-]+ TB a day at this rate: [\d.,]+ (days|years) for each 600 TBW", text)
    manager.close()


def test_wear_and_rates_are_bytes_over_their_own_time() -> None:
    use = DiskUse(written_bytes=10**9, read_bytes=2 * 10**9, write_busy_s=0.5, read_busy_s=2.0, elapsed_s=100.0)
    assert use.write_bytes_per_s == 2e9
    assert use.read_bytes_per_s == 1e9
    assert use.wear_bytes_per_day == pytest.approx(0.864e12)


def test_a_report_before_any_step_divides_nothing_by_zero(tmp_path: Path) -> None:
    manager = memo.offload(stack(), alpha=1.0, disk=tmp_path)
    report = manager.report()
    assert report.prefetch_hits is None
    assert report.overlap is None
    assert "stalls: none" in str(report)
    manager.close()


def test_closing_a_manager_in_the_middle_of_a_step_loses_no_span_of_its_trace(tmp_path: Path) -> None:
    import json

    model = stack(layers=4)
    manager = memo.offload(model, alpha=1.0, disk=tmp_path, min_bytes=512, trace=tmp_path / "trace.rank0.jsonl")
    train(model, lambda step: model(ids(step)), manager, steps=1)
    manager.close()
    lines = [json.loads(line) for line in (tmp_path / "trace.rank0.jsonl").read_text().splitlines()]
    lanes = [line["lane"] for line in lines if line.get("k") == "span"]
    assert lanes.count("nvme-write") == lanes.count("nvme-read") > 0
    assert lanes.count("compute") == 8  # four layers, forward and backward
    assert [line["phase"] for line in lines if line.get("k") == "step"] == ["begin", "end"]
    assert lines[-1]["k"] == "end"
    assert lines[-1]["dropped"] == 0


@pytest.mark.parametrize(
    ("tiers", "lanes"),
    [
        ({"host": 0, "disk": True}, {"nvme-write", "nvme-read"}),
        ({"host": "1MiB", "disk": True}, {"nvme-write", "nvme-read"}),  # a CPU has no link to host memory
    ],
)
def test_a_traces_header_has_the_budgets_and_the_measured_rate_of_each_lane_in_use(
    tmp_path: Path, tiers: dict[str, Any], lanes: set[str]
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    disk = scratch if tiers["disk"] is True else tiers["disk"]
    model = stack()
    manager = memo.offload(
        model, alpha=1.0, host=tiers["host"], disk=disk, disk_budget="1MiB", min_bytes=512, trace=tmp_path
    )
    written = manager.report().disk
    assert written is None or written.written_bytes == 0, "what measures the link is none of the run's own"
    train(model, lambda step: model(ids(step)), manager, steps=1)
    manager.close()
    trace = read_trace(tmp_path / "trace.rank0.jsonl")
    assert set(trace.meta["link_bytes_per_s"]) == lanes
    assert min(trace.meta["link_bytes_per_s"].values()) > 1e6
    assert trace.meta["budgets"]["host"] == (1 << 20 if tiers["host"] else 0)
    assert trace.meta["budgets"]["device"] is None  # on the CPU
    used = {lane.lane.value: lane.link_bytes_per_s for lane in rank_stats(trace).total.lanes if lane.copies}
    assert used
    assert all(rate in (None, trace.meta["link_bytes_per_s"].get(lane)) for lane, rate in used.items())
    assert list(scratch.iterdir()) == []


def test_the_first_line_is_the_benefit_measured(tmp_path: Path) -> None:
    model = stack(layers=8)
    manager = memo.offload(model, alpha=1.0, disk=tmp_path, min_bytes=512)
    assert str(manager.report()).startswith("nothing is managed yet: no forward has saved a tensor in the manager\n")
    train(model, lambda step: model(ids(step)), manager, steps=2)
    report = manager.report()
    b, s, h = 2, 48, 32
    units, statistics, vectors = 16 * b * s * h * 4, 2 * 2 * b * s * 4, 2 * b * s * 4
    assert 8 * units <= report.saved_peak_bytes <= 8 * (units + statistics + vectors), "all layers at once"
    device = report.tiers[0].peak_bytes
    assert device < report.saved_peak_bytes / 2
    assert str(report).splitlines()[0] == report.benefit
    peaks = (
        f"at most {format_bytes(device)} of the device (measured) instead of {format_bytes(report.saved_peak_bytes)};"
    )
    assert peaks in report.benefit
    assert "of waiting and 0 ms of recompute so far (measured)" in report.benefit
    manager.close()


def test_the_first_line_says_what_is_predicted_until_it_is_measured() -> None:
    stage = SimpleNamespace(microbatch_s=1.1, recompute_s=0.05, stall_s=0.05, peak_device_bytes=0)
    plan: Any = SimpleNamespace(stages=(stage,), declined=None, binding=())
    outcome = PlanOutcome(
        phase="planned",
        signature=None,
        plan=plan,
        measured_s=None,
        predicted_peak_bytes=1 << 20,
        measured_peak_bytes=None,
        plans=1,
        why_not=None,
    )
    model = stack()
    manager = memo.offload(model, alpha=1.0, host="8MiB", min_bytes=512)
    train(model, lambda step: model(ids(step)), manager, steps=1)
    report = dataclasses.replace(manager.report(), plan=outcome, saved_peak_bytes=1 << 22)
    assert report.benefit == (
        "saved tensors take at most 1 MiB of the device (predicted) instead of 4 MiB; step +10.0 % (predicted)"
    )
    measured = dataclasses.replace(outcome, measured_s=1.03, measured_peak_bytes=1 << 21)
    assert dataclasses.replace(report, plan=measured).benefit == (
        "saved tensors take at most 2 MiB of the device (measured) instead of 4 MiB; step +10.0 % (predicted)"
    )
    plan.declined = "fits"
    assert dataclasses.replace(report, plan=outcome).benefit == (
        "all saved tensors fit, 1 MiB (predicted): nothing is moved or recomputed"
    )
    manager.close()


def test_a_given_plans_saved_tensors_are_predicted_without_weights_and_transients() -> None:
    mib, static = 1 << 20, StaticBytes(weights=5 << 30, optimizer=7 << 30)
    known = layer(
        always=mib, all=7 * mib, matmuls=None, attention=None, static=static, backward_transient_bytes=1 << 30
    )
    head = EmbeddingOrHeadProfile(saved_bytes=1 << 30, transient_bytes=2 << 30, static=static)
    problem = ActivationProblem(
        profile=Profile(
            signature=Signature(model="any", batch=2, tokens=32, dtype="float32"),
            role=Role.DERIVED,
            classes=(known,),
            layers=(known.name,) * 4,
            head=head,
        ),
        hardware=machine(),
        budgets=Budgets(device_bytes=1 << 40, host_bytes=1 << 40),
    )
    layers = (LayerPlan(),) * 4
    plan = ActivationPlan(problem=problem, layers=layers, stages=predict_stages(problem, layers))
    actuator: Any = SimpleNamespace(codec=None, n_layers=4, mlp_tiles=1, apply=lambda plan: None)
    outcome = FixedPlan(actuator, plan).outcome()
    assert outcome is not None
    assert outcome.predicted_peak_bytes == 4 * 8 * mib
    line = outcome.lines()[1]
    assert f"saved tensors on the device at most 32 MiB predicted; {IN_ALL}" in line
    assert plan.stages[0].peak_device_bytes > 60 << 30
    model = stack()
    manager = memo.offload(model, alpha=1.0, host="8MiB", min_bytes=512)
    train(model, lambda step: model(ids(step)), manager, steps=1)
    benefit = dataclasses.replace(manager.report(), plan=outcome, saved_peak_bytes=48 * mib).benefit
    assert "at most 32 MiB of the device (predicted) instead of 48 MiB; " in benefit
    manager.close()


IN_ALL = "all device memory at most 63.03 GiB predicted"


def no_plan(**changes: Any) -> PlanOutcome:
    return PlanOutcome(
        phase="settled",
        signature=None,
        plan=None,
        measured_s=None,
        predicted_peak_bytes=0,
        measured_peak_bytes=None,
        plans=0,
        **{"why_not": "it does not fit", **changes},
    )


def test_without_a_plan_the_report_says_what_the_layers_do_and_what_that_takes() -> None:
    does = "every layer recomputes everything but attention and offloads the rest"
    assert no_plan().lines() == ["plan: none: it does not fit", does]
    stage: Any = SimpleNamespace(microbatch_s=6.75, recompute_s=1.5, stall_s=0.25)
    outcome = no_plan(fallback=stage)
    assert outcome.lines()[1] == (
        f"{does}: forward and backward 6.75 s predicted, of which 1.50 s is recompute and 250 ms stalls; 5.00 s "
        "with everything kept"
    )
    model = stack()
    manager = memo.offload(model, alpha=1.0, host="8MiB", min_bytes=512)
    train(model, lambda step: model(ids(step)), manager, steps=1)
    report = dataclasses.replace(manager.report(), plan=outcome, untimed_waits=3)
    assert report.benefit.endswith("; step +35.0 % (predicted)")
    assert dataclasses.replace(report, plan=no_plan()).benefit.endswith("; time not measured (record a trace)")
    manager.close()


def test_progress_of_planning_is_logged_once_a_step(caplog: pytest.LogCaptureFixture) -> None:
    class Planning:
        plan = None
        step = 1

        def before_forward(self, *, may_end: bool = True) -> None:
            self.step += may_end

        def before_layer(self, args: object, kwargs: object) -> None:
            pass

        def after_forward(self) -> None:
            pass

        def outcome(self) -> PlanOutcome:
            progress = "" if self.step > 3 else f"step {self.step}: measured, planning"
            return no_plan(why_not=None, progress=progress)

    model = stack()
    manager = memo.offload(model, alpha=1.0, host="8MiB", min_bytes=512)
    manager.plan_with(Planning())
    with caplog.at_level("INFO", logger="memo"):
        train(model, lambda step: model(ids(step)), manager, steps=5)
    told = [record.getMessage() for record in caplog.records if "planning" in record.getMessage()]
    assert told == [f"Stack: step {step}: measured, planning" for step in (1, 2, 3)]
    assert no_plan(why_not=None, progress="step 2: measured").lines() == ["plan: none yet (step 2: measured)"]
    manager.close()


def test_manager_and_report_show_themselves(caplog: pytest.LogCaptureFixture) -> None:
    model = stack()
    with caplog.at_level("INFO", logger="memo"):
        manager = memo.offload(model, host="8MiB", min_bytes=512)
        assert repr(manager).startswith(
            "<memo.Manager of Stack: 3 layers, not attached, step 0; nothing is managed yet"
        )
        manager.attach()
        train(model, lambda step: model(ids(step)), steps=6)
        model(ids()).backward()
    assert "3 layers, attached, step 6; all saved tensors fit" in repr(manager)
    page = manager._repr_html_()
    assert page.startswith("<div>&lt;memo.Manager of Stack")
    assert manager.report()._repr_html_() in page
    assert "<b>all saved tensors fit" in page
    assert [record.levelname for record in caplog.records] == ["INFO"] * len(caplog.records)
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "Stack: 3 layers managed on cpu"
    assert told[1] == "Stack: attached"
    assert told[2] == "Stack: step 0: the next step is measured"
    assert told[3].startswith("Stack: step 1: the plan holds, ")
    assert told[4].startswith("Stack: plan: nothing to move")
    manager.close()
    assert "closed" in repr(manager)


@pytest.mark.parametrize("tells", [True, False])
def test_what_moved_in_a_step_is_the_mean_of_the_steps_that_ran(tells: bool) -> None:
    model = stack(layers=4)
    manager = memo.offload(model, alpha=1.0, host="8MiB", min_bytes=512)
    manager.step = 100  # a resumed run
    for number in range(3):
        with manager:
            loss = model(ids(number))
        loss.backward()
        model.zero_grad()
        if tells:
            manager.step_done()
    report = manager.report()
    assert report.steps == 3
    assert f"{format_bytes(report.tiers[1].moved_bytes // 3)}" in str(report)
    manager.close()


@pytest.mark.parametrize("alpha", [1.0, 0.0])
@pytest.mark.parametrize("keeps", [False, True])
def test_tensors_that_the_program_holds_on_the_device_are_told(keeps: bool, alpha: float) -> None:
    """As of `output_hidden_states`: a layer's output is the next one's input, which is offloaded and stays."""
    model = stack(layers=4)
    outputs: list[torch.Tensor] = []
    if keeps:
        for each in model.layers:
            each.register_forward_hook(lambda module, args, output: outputs.append(output))
    manager = memo.offload(model, alpha=alpha, host="8MiB", min_bytes=512)
    train(model, lambda step: model(ids(step)), manager, steps=1)
    report = manager.report()
    manager.close()
    # All but the last two layers' are released when the forward ends.
    assert report.held_bytes == (2 * outputs[0].nbytes if keeps else 0)
    assert ("offloaded but still on the device" in str(report)) == keeps
