"""A recorded step is the step: held against real runs, torch's own trackers, the real engine, and arithmetic."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from race_checker import CheckingBackend, CheckingDisk
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from memo.allocator import AllocationRecorder
from memo.errors import NoRepeatedLayers, RecordError, UsageError
from memo.gpt import Precision, preset
from memo.gpt.arithmetic import parameter_count
from memo.gpt.optim import adamw, empty_state
from memo.manager import Manager
from memo.record import Recording, SavedRole, Step, gpt_step, load_step, record_step
from memo.swap import Engine, RecomputePolicy, find_layers, setting_of
from memo.swap.tiers import DiskTier

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def norms_of_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording has an RMSNorm as a GPU runs it, by one kernel; here a real run has the same in its place."""

    def fused(x: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None) -> Any:
        return nn.functional.layer_norm(x, shape, weight, None, 1e-5 if eps is None else eps)

    monkeypatch.setattr("torch.nn.functional.rms_norm", fused)


def small(precision: Precision = Precision.FP32, variant: Any = "gpt", **shape: Any) -> Callable[[], Step]:
    config = preset("tiny", variant=variant, **{"layers": 3, **shape})
    return lambda: gpt_step(config, batch=2, tokens=96, precision=precision)


SMALL = [
    pytest.param(small(precision, variant), id=f"{precision}-{variant}")
    for precision, variant in ((Precision.FP32, "gpt"), (Precision.BF16, "llama"), (Precision.BF16_AUTOCAST, "gpt"))
]
WAYS = [
    pytest.param({}, id="plain"),
    pytest.param({"checkpointed": True}, id="checkpointed"),
    pytest.param({"optimizer": "adamw"}, id="optimizer"),
]


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("build", SMALL)
def test_the_trace_is_that_of_a_real_run_event_by_event(build: Callable[[], Step], options: dict[str, bool]) -> None:
    byteless = record_step(build, exact=True, **options)
    real = record_step(build, exact=True, real=True, **options)
    assert made_and_sized(byteless) == made_and_sized(real)
    # Autocast frees its casts of the weights all at once, in an order of their addresses: so many events, each life one.
    assert byteless.trace.peak_nbytes == real.trace.peak_nbytes
    assert sorted(a.upper for a in byteless.trace.allocations) == sorted(a.upper for a in real.trace.allocations)
    assert byteless.saved_nbytes == real.saved_nbytes


@pytest.mark.parametrize("options", WAYS)
def test_without_autocast_every_death_is_at_the_same_event_too(options: dict[str, bool]) -> None:
    build = small(Precision.BF16)
    assert record_step(build, **options) == record_step(build, real=True, **options)


def made_and_sized(recording: Recording) -> list[tuple[int, int, str]]:
    made = [(a.lower, a.size, a.tag) for a in recording.trace.allocations]
    assert len(made) > 100
    return made


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("build", SMALL)
def test_the_peak_is_mem_trackers_to_the_byte(build: Callable[[], Step], options: dict[str, bool]) -> None:
    recording = record_step(build, exact=True, **options)
    step = build()
    if "checkpointed" in options:
        checkpoint_layers(step.model)
    adam = adamw(step.model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    if "optimizer" in options:
        empty_state(adam)
    tracker = MemTracker()
    tracker.track_external(step.model, adam, *step.inputs)
    with tracker:
        step.loss().backward()
        if "optimizer" in options:
            adam.step()
            adam.zero_grad()
    peak = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    assert peak == recording.trace.peak_nbytes + recording.static_nbytes


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("variant", ["gpt", "llama"])
def test_the_peak_is_the_profilers_on_a_real_run(variant: str, checkpointed: bool) -> None:
    """In float32: in half precision the CPU's matrix kernels have workspaces, which only the profiler sees."""
    build = small(variant=variant)
    recording = record_step(build, exact=True, checkpointed=checkpointed)
    step = build()
    if checkpointed:
        checkpoint_layers(step.model)
    step.loss().backward()
    step.model.zero_grad(set_to_none=True)
    gc.collect()  # what the collector frees of earlier steps is none of this one's
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step.loss().backward()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert max(itertools.accumulate(changes)) == recording.trace.peak_nbytes


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("variant", ["gpt", "llama"])
def test_offloaded_the_real_engine_over_real_bytes_allocates_the_same(variant: str, alpha: float) -> None:
    shape: dict[str, Any] = {"layers": 4, "hidden": 256, "heads": 4}
    build = small(variant=variant, **shape)
    recorded = record_step(build, alpha=alpha, exact=True)
    assert recorded.moved_nbytes > 0
    assert recorded.whole_layers == {}
    assert real_engine_lives(build(), alpha) == [(a.lower, a.upper, a.size) for a in recorded.trace.allocations]


def real_engine_lives(step: Step, alpha: float) -> list[tuple[int, int, int]]:
    """The third step of a manager whose copies run at once, into a disk that holds them."""
    for (
        parameter
    ) in step.model.parameters():  # what was in their memory may be zeros, of which each trial proves nothing
        nn.init.normal_(parameter, std=0.02)
    backend = CheckingBackend("eager")
    engine = Engine(backend, [DiskTier(CheckingDisk(backend, 64 << 20), None)], min_bytes=64 << 10)
    recompute_policy = RecomputePolicy(engine, setting_of(alpha))
    manager = Manager(step.model, find_layers(step.model), engine, recompute_policy=recompute_policy)
    for recorder in (AllocationRecorder(), AllocationRecorder(), AllocationRecorder()):
        recorder.adopt([*step.model.parameters(), *step.inputs])
        with recorder:
            with manager:
                loss = step.loss()
            loss.backward()
            del loss
        result = [(a.lower, a.upper, a.size) for a in recorder.trace(exact=True).allocations]
        step.model.zero_grad(set_to_none=True)
    manager.close()
    return result


def test_offloading_moves_what_the_paper_says_and_lowers_the_peak() -> None:
    """Layer input and attention output whole, at most alpha of the other fourteen units; the last layer stays."""
    config = preset("7b", layers=8)
    tokens, unit = 1 << 15, (1 << 15) * 4096 * 2
    build = lambda: gpt_step(config, batch=1, tokens=tokens)  # noqa: E731
    plain = record_step(build, exact=True)
    for alpha in (0.0, 0.25, 0.5, 1.0):
        recording = record_step(build, alpha=alpha, exact=True)
        statistics = 7 * tokens * 32 * 4  # softmax, in float32; those of the norms are cut by tokens, too
        norms = 7 * 4 * tokens * 2
        most = round(7 * (2 + 14 * alpha) * unit + statistics + alpha * norms)
        least = 7 * 2 * unit + statistics
        assert recording.moved_nbytes == most if alpha in (0.0, 1.0) else least < recording.moved_nbytes <= most
        assert recording.peak_away_nbytes == recording.moved_nbytes
        assert recording.trace.peak_nbytes < plain.trace.peak_nbytes - 3 * 16 * unit


def test_seven_billion_parameters_at_a_million_tokens_save_4096_gib() -> None:
    """Sixteen units of b·s·h in 16 bits a layer, as the paper counts them, and the statistics of two norms and a softmax."""
    tokens, config = 1 << 20, preset("7b")
    recording = record_step(lambda: gpt_step(config, batch=1, tokens=tokens), exact=True)
    saved, unit = recording.saved_nbytes, tokens * config.hidden * 2
    assert saved[SavedRole.INPUT] == saved[SavedRole.ATTENTION] == config.layers * unit
    assert saved[SavedRole.RECOMPUTABLE] == config.layers * 14 * unit
    assert saved[SavedRole.INPUT] + saved[SavedRole.ATTENTION] + saved[SavedRole.RECOMPUTABLE] == 4096 << 30
    norms, softmax = 2 * 2 * tokens * 2, tokens * config.heads * 4  # mean and deviation; one float32 a query and head
    assert saved[SavedRole.STATISTICS] == config.layers * (norms + softmax)
    assert recording.static_nbytes == 2 * parameter_count(config) + 2 * tokens * 8
    assert recording.trace.peak_nbytes > sum(saved.values())


def test_a_checkpointed_step_saves_only_the_layers_inputs() -> None:
    plain, checkpointed = record_step(small(), exact=True), record_step(small(), exact=True, checkpointed=True)
    kept = checkpointed.saved_nbytes
    assert kept[SavedRole.INPUT] == plain.saved_nbytes[SavedRole.INPUT] == 3 * 2 * 96 * 128 * 4
    assert kept[SavedRole.ATTENTION] == kept[SavedRole.RECOMPUTABLE] == kept[SavedRole.STATISTICS] == 0


def test_sizes_are_cudas_unless_exact_ones_are_asked_for() -> None:
    rounded, exact = (record_step(small(), exact=exact).trace for exact in (False, True))
    assert any(a.size % 512 for a in exact.allocations)
    assert [a.size for a in rounded.allocations] == [-(-a.size // 512) * 512 for a in exact.allocations]


def test_phases_and_places_are_named() -> None:
    trace = record_step(small(), optimizer="adamw").trace
    assert [phase for phase, _ in itertools.groupby(trace.allocations, lambda a: a.phase)] == ["forward", "backward"]
    by_tag = {a.tag: a for a in trace.allocations}
    assert by_tag["layers.1.mlp gelu"].phase == "forward"
    assert by_tag["layers.1.mlp.down gelu_backward"].group == "layers.1.backward"
    groups = {a.group for a in trace.allocations} - {""}
    assert groups == {f"layers.{layer}.{way}" for layer in range(3) for way in ("forward", "backward")}


@pytest.mark.parametrize("options", [{}, {"checkpointed": True}, {"alpha": 0.25}])
def test_a_group_ends_before_the_next_one_of_its_kind_begins(options: dict[str, Any]) -> None:
    """What a group names never lives together with what another group names."""
    trace = record_step(small(layers=4, hidden=256, heads=4), **options).trace
    spans = [(a.lower, a.upper, a.group) for a in trace.allocations if a.group]
    assert spans
    ranges: dict[str, tuple[int, int]] = {}
    for lower, upper, group in spans:
        first, last = ranges.get(group, (lower, upper))
        ranges[group] = min(first, lower), max(last, upper)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(sorted(ranges.values())))


def test_microbatches_have_passes_of_their_own() -> None:
    def build() -> Step:
        one = small()()
        return Step(model=one.model, loss=lambda: one.loss() + one.loss(), inputs=one.inputs)

    trace = record_step(build).trace
    lives: dict[str, list[tuple[int, int]]] = {}
    for a in trace.allocations:
        lives.setdefault(a.group, []).append((a.lower, a.upper))
    assert latest(lives["layers.1.forward"]) <= earliest(lives["layers.1.forward.2"])
    assert latest(lives["layers.1.backward.2"]) <= earliest(lives["layers.1.backward"])


def earliest(lives: list[tuple[int, int]]) -> int:
    return min(lower for lower, _ in lives)


def latest(lives: list[tuple[int, int]]) -> int:
    return max(upper for _, upper in lives)


def test_recording_twice_gives_the_same_trace() -> None:
    assert record_step(small(), alpha=0.5) == record_step(small(), alpha=0.5)


def test_tensors_in_a_cycle_die_at_no_moment_of_the_collectors_own() -> None:
    def build() -> Step:
        model, x = Plain(), torch.randn(2, 16, 8)

        def loss() -> torch.Tensor:
            for _ in range(20):
                cycle: list[Any] = [torch.randn(100)]
                cycle.append(cycle)
            return model(x)  # type: ignore[no-any-return]

        return Step(model=model, loss=loss)

    seldom = record_step(build)
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        assert record_step(build) == seldom
    finally:
        gc.set_threshold(*before)
    assert gc.isenabled()


class Plain(nn.Module):
    """No repeated layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum()


def test_a_model_without_layers_is_recorded_too() -> None:
    def build() -> Step:
        model, x = Plain(), torch.randn(2, 16, 8)
        return Step(model=model, loss=lambda: model(x))

    recording = record_step(build, exact=True)
    assert recording.layers == 0
    assert recording.trace.allocations[0].size == 2 * 16 * 8 * 4
    assert recording.static_nbytes == (8 * 8 + 8) * 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plain", "module:function"),
        ("no_such_module:f", "no_such_module"),
        ("json:no_such", "no_such"),
        (":f", "module"),
    ],
)
def test_a_users_function_that_is_not_there_is_a_usage_error(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_step(name)


def test_steps_that_cannot_be_recorded_say_why() -> None:
    model = Plain()
    x = torch.randn(4, 8)

    def step(loss: Callable[[], Any]) -> Callable[[], Step]:
        return lambda: Step(model=model, loss=loss)

    with pytest.raises(RecordError, match="no scalar"):
        record_step(step(lambda: model.linear(x)))
    with pytest.raises(RecordError, match="needs the contents"):
        record_step(step(lambda: model(x) * float(model(x).detach())))
    with pytest.raises(NoRepeatedLayers):
        record_step(step(lambda: model(x)), alpha=0.5)
    with pytest.raises(UsageError, match="not both"):
        record_step(small(), alpha=0.5, checkpointed=True)
    with pytest.raises(RecordError, match=r"Namespace returned|not \(model"):
        load_step("argparse:Namespace")(batch=1, tokens=1)


def checkpoint_layers(model: nn.Module) -> None:
    for layer in find_layers(model):
        forward = layer.module.forward

        def whole(*args: Any, forward: Callable[..., Any] = forward) -> Any:
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)

        layer.module.forward = whole
