"""A machine whose steps a test describes: it says what its layers did, and remembers the settings that were applied."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from memo.autoplan import AutoPlan
from memo.autoplan.limits import Limits
from memo.events import Lane, Span, StateChange, TensorState, Tracer
from memo.machine import LinkRates
from memo.mip.activation import ActivationPlan, solve_problem
from memo.swap import LayerCosts, Level, PointCost

LAYERS = [f"layers.{n}" for n in range(6)]
TOKENS = 64
FORWARD_NS, BACKWARD_NS = 1_000_000_000, 2_000_000_000
LAYER_BYTES = 5 << 20
INPUT_BYTES = 1 << 19
CURVE = (
    # Point, bytes that a layer of TOKENS tokens saves at it, seconds of its recompute.
    ("all", LAYER_BYTES, 0.0),
    ("p1", 3 << 20, 6.4e-3),
    ("attention", 1 << 20, 0.64),
    ("input", INPUT_BYTES, 1.28),
)


class Machine:
    """In the place of an `Actuator`: remembers the settings that were applied, and emits the events of a step by them."""

    mlp_tiles = 2
    codec = None
    n_layers = len(LAYERS)

    def repeated(self) -> Collection[str]:
        return ()

    def lacking_bytes(self) -> int:
        return 0

    def why_infeasible(self) -> str:
        return ""

    def plan_for(self, names: Collection[str]) -> None:
        assert not names or tuple(names) == tuple(LAYERS)

    def __init__(self, *, device_bytes: int, host_bytes: int = 1 << 40) -> None:
        self.used: list[ActivationPlan | Level] = []
        self.growths: list[float] = []  # that each of `used` was for
        self.heard_by: Tracer | None = None
        self.listened = 0
        self.idle = True
        self.device_bytes = self.total_bytes = device_bytes
        self.host_bytes = host_bytes
        self.disk_bytes = self.late = 0  # `late` where a plan uses the disk
        self.others_bytes = 0
        self.margin_bytes = 0
        self.tokens = TOKENS
        self.slowness = 1.0
        self.clock_ns = 0
        self.peak = 0
        self.whole: set[str] = set()  # layers that cannot be recomputed
        self.mute = False
        self.transient_bytes = 0  # of the last step
        self.after_bytes = 0  # more than in backward, after it
        self.loaded_bytes = 0  # by planning
        self.unexplained_bytes = 0  # above the peak of saved tensors, and not in `limits`
        self.hidden_bytes = 0  # of saved tensors, above what a plan counts
        self.trials = 0  # in each step
        self.lacking = 0, 0  # bytes of host and disk, in the step under way
        self.addresses = 1.0  # bytes of host addresses that a plan's storages need, as a multiple of their own
        self.watched: list[bool] = []
        self.prepared_after: list[int] = []  # number of settings that had been applied
        self.links_measured_after: list[int] = []  # number of times that the host had been prepared

    def listen(self, tracer: Tracer | None) -> None:
        self.listened += tracer is not None
        self.heard_by = tracer

    def finish(self) -> None: ...

    def now_ns(self) -> int:
        return self.clock_ns

    def apply(self, setting: ActivationPlan | Level, *, growth: float = 1.0) -> None:
        self.used.append(setting)
        self.growths.append(growth)

    def prepare_host(self) -> None:
        self.prepared_after.append(len(self.used))

    def host_excess(self, plan: ActivationPlan) -> int:
        moved = sum(
            part.host * part.saved_bytes(layer)
            for part, layer in zip(plan.layers, plan.problem.profile.layer_profiles(), strict=True)
        )
        return max(0, round(self.addresses * moved) - self.host_bytes)

    def late_bytes(self, plan: ActivationPlan) -> int:
        return self.late if any(part.disk for part in plan.layers) else 0

    def costs(self) -> Mapping[str, LayerCosts]:
        return {name: self._costs(name) for name in LAYERS if name not in self.whole}

    def _costs(self, name: str) -> LayerCosts:
        share = self.tokens / TOKENS
        curve = ((point, round(nbytes * share), seconds * share) for point, nbytes, seconds in CURVE)
        return LayerCosts(
            layer=name,
            tokens=self.tokens,
            points=tuple(PointCost(name=name, saved_bytes=nbytes, recompute_s=s) for name, nbytes, s in curve),
        )

    def limits(self, growth: float = 1.0) -> Limits:
        transient = round(self.transient_bytes * max(1.0, growth))
        return Limits(
            device_bytes=max(0, self.device_bytes - transient),
            others_bytes=self.others_bytes + transient,
            host_bytes=self.host_bytes,
            disk_bytes=self.disk_bytes,
        )

    def spare_bytes(self) -> tuple[int, int]:
        spare = self.device_bytes - self.peak - self.transient_bytes - self.unexplained_bytes
        return spare, spare - self.after_bytes

    def unmeasured_bytes(self, *, first: bool, growth: float = 1.0) -> int:
        return self.loaded_bytes if first else 0

    def forget_peaks(self) -> None: ...

    def take_trials(self) -> int:
        return self.trials

    def take_lacking(self) -> tuple[int, int]:
        lacking, self.lacking = self.lacking, (0, 0)
        return lacking

    def link(self) -> LinkRates | None:
        self.links_measured_after.append(len(self.prepared_after))
        return LinkRates(
            d2h_bytes_per_s=1e7, h2d_bytes_per_s=1e7, d2h_together_bytes_per_s=1e7, h2d_together_bytes_per_s=1e7
        )

    def disk_rates(self) -> Mapping[Lane, float]:
        return dict.fromkeys((Lane.DISK_WRITE, Lane.DISK_READ), 1e7) if self.disk_bytes else {}

    def take_peak(self, *, growth: float | None = None) -> int:
        return self.peak

    def restart_peaks(self) -> None:
        pass

    def watch(self, *, closely: bool) -> None:
        self.watched.append(closely)

    @property
    def full_bytes(self) -> int:
        return LAYER_BYTES * self.tokens // TOKENS

    def tell(self) -> None:
        """Emits the events of the step now under way to whoever listens."""
        if self.heard_by is None or self.mute:
            return
        plan = self.used[-1] if isinstance(self.used[-1], ActivationPlan) else None
        recompute = 0 if plan is None else plan.stages[0].recompute_s * 1e9 / len(LAYERS)
        t = self.heard_by.now()
        scale = self.slowness * self.tokens / TOKENS
        forward, backward = round(FORWARD_NS * scale), round(BACKWARD_NS * scale)
        for name in LAYERS:
            self.heard_by.emit(StateChange(t=t, step=0, id=1, to=TensorState.LIVE, nbytes=self.full_bytes, module=name))
            self._span(t, forward, name, "forward", Lane.COMPUTE)
            t += forward
        for name in reversed(LAYERS):
            self._span(t, backward + round(recompute), name, "backward", Lane.COMPUTE)
            self._span(t, round(recompute), name, "backward", Lane.RECOMPUTE)
            t += backward + round(recompute)

    def _span(self, t: int, d: int, module: str, phase: str, lane: Lane) -> None:
        assert self.heard_by is not None
        self.heard_by.emit(Span(t=t, d=d, step=0, lane=lane, module=module, phase=phase))


def make(machine: Machine) -> AutoPlan:
    return AutoPlan(machine, solve_problem)


def step(auto: AutoPlan, machine: Machine, *, tokens: int = TOKENS, batch: int = 2) -> None:
    machine.tokens = tokens
    auto.before_forward()
    auto.before_layer((torch.zeros(batch, tokens, 8),), {})
    if isinstance(machine.used[-1], ActivationPlan):
        machine.peak = machine.used[-1].stages[0].peak_device_bytes + machine.hidden_bytes
    machine.tell()


def tight(machine_layers: float = 3.5) -> Machine:
    return Machine(device_bytes=round(machine_layers * LAYER_BYTES))
