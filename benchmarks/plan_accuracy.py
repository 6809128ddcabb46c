"""Plans against what they promise, on the CPU engine: predicted and measured step time, and who wins.

    python -m benchmarks.plan_accuracy [--rounds 5] [--quick]

A machine does not keep its speed for as long as a benchmark takes, so the steps that are compared take turns. A round is

    plain       a step without memo: what the machine computes at just now
    planned     a step by the plan
    predicted   a step at the level that plans are made of, measured layer by layer; the plan's time is predicted of it
    others      on paced rows: keep everything, swap everything, recompute everything, where it fits the budget

and of each round planned / predicted - 1 is one error. Their median is the bias, half of the range between their quartiles
the spread. Against the prediction that the plan was made with, which is older, both are given too: what they have more is
the machine's drift, which the plain steps show.

Paced rows are a length, a link speed and a device budget. The model's layers compute little and sleep for the time that a
layer of its length would take, in proportion to the tokens they are given (attention's part to their square), so that a
busy machine does not decide the result; copies, waits, recompute and plans are the real ones. Computed rows are a GPT that
computes, and count the processor time of its thread, which other work on the machine hardly changes; waiting takes none.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import memo
from benchmarks.results import ROOT, write_result
from memo.autoplan.actuator import Actuator
from memo.autoplan.controller import AutoPlan
from memo.autoplan.device_budget import DeviceBudget
from memo.autoplan.limits import MEASURING
from memo.autoplan.profile_from_step import measured_profile
from memo.autoplan.step_timeline import StepTimeline
from memo.gpt.config import preset
from memo.gpt.model.model import GPT
from memo.machine.link_bandwidth import LinkRates
from memo.manager.manager import Manager
from memo.manager.plan_source import checked_plan
from memo.mip.activation.cost import predict_stages
from memo.mip.activation.plan import ActivationPlan, ActivationProblem, LayerPlan
from memo.swap.backends.cpu import CpuBackend
from memo.swap.backends.protocol import HostStamp
from memo.swap.engine.engine import Engine
from memo.swap.engine.tier_choice import WhenFull
from memo.swap.layers import find_layers
from memo.swap.levels import Level, setting_of
from memo.swap.recompute.policy import RecomputePolicy
from memo.swap.tiers.host_and_disk import DiskTier, HostTier
from memo.swap.tiers.tier import Tier
from memo.units import format_bytes

sys.path.insert(0, str(ROOT / "tests" / "support"))
from throttled_backend import PacedBackend, PacedDisk

HIDDEN = 256
LAYERS = 8
SAVED = 12
"""Tensors of the input's size that a layer saves."""
TOKEN_S = 5e-5
"""Time of a layer's token-wise operations for a token, forward; backward takes twice that."""
SQUARE_S = 1.2e-8
"""Time of attention for a pair of tokens."""


class Work(torch.autograd.Function):
    """Takes a time in proportion to the tokens, forward, and twice that, backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.seconds = hidden.size(-2) * TOKEN_S / 2
        time.sleep(ctx.seconds)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * ctx.seconds)
        return grad


class Attention(torch.autograd.Function):
    """A mean over the tokens before, standing for attention: mixes tokens, takes as long as their number squared."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.tokens = hidden.size(-2)
        time.sleep(ctx.tokens**2 * SQUARE_S)
        count = torch.arange(1, ctx.tokens + 1, dtype=hidden.dtype).unsqueeze(-1)
        ctx.save_for_backward(count)
        return hidden.cumsum(-2) / count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * ctx.tokens**2 * SQUARE_S)
        (count,) = ctx.saved_tensors
        return (grad / count).flip(-2).cumsum(-2).flip(-2)


attention = memo.memoize(Attention.apply)


class Block(nn.Module):
    """Saves twelve tensors of its input's size: that, attention's result, and ten that are token-wise."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((HIDDEN,), 0.5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = Work.apply(hidden * self.scale)
        x = hidden + attention(x)
        y = Work.apply(x * self.scale)
        for _ in range(8):
            y = torch.tanh(y * self.scale)
        return x + y


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One machine and one length."""

    tokens: int
    link_bytes_per_s: float
    device_layers: float
    """Budget for saved tensors, in layers' worth of them."""
    host_layers: float
    disk_bytes_per_s: float = 0.0

    @property
    def layer_bytes(self) -> int:
        """What a layer saves: tensors of its input's size."""
        return SAVED * self.tokens * HIDDEN * 4

    @property
    def device_bytes(self) -> int:
        return round(self.device_layers * self.layer_bytes)

    def __str__(self) -> str:
        disk = f", disk {self.disk_bytes_per_s / 1e6:.0f} MB/s" if self.disk_bytes_per_s else ""
        return (
            f"{self.tokens} tokens, link {self.link_bytes_per_s / 1e6:.0f} MB/s, {self.device_layers:g} layers on the "
            f"device, {self.host_layers:g} in host memory{disk}"
        )


def cases(*, quick: bool) -> list[Case]:
    """Lengths by link speeds by budgets; one more with a host tier too small for everything, and a disk behind it."""
    lengths, links, budgets = (512, 1024), (30e6, 120e6, 480e6), (3.2, 5.5)
    made = [
        Case(tokens=tokens, link_bytes_per_s=link, device_layers=budget, host_layers=LAYERS)
        for tokens, link, budget in itertools.product(lengths, links, budgets)
    ]
    made.append(Case(tokens=1024, link_bytes_per_s=480e6, device_layers=3.2, host_layers=2, disk_bytes_per_s=60e6))
    return made[::4] if quick else made


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """A GPT that computes, and its device budget."""

    tokens: int
    hidden: int
    device_layers: float
    """Budget for saved tensors, in layers' worth of them."""

    @property
    def layer_bytes(self) -> int:
        """Saved bytes of a layer: sixteen units of s·h in single precision."""
        return 16 * self.tokens * self.hidden * 4

    @property
    def device_bytes(self) -> int:
        return round(self.device_layers * self.layer_bytes)

    def __str__(self) -> str:
        return f"{self.tokens} tokens, GPT of {self.hidden} computed, {self.device_layers:g} layers on the device"


def computed_cases(*, quick: bool) -> list[Computed]:
    made = [
        Computed(tokens=tokens, hidden=hidden, device_layers=budget)
        for tokens, hidden in ((512, 128), (1024, 128), (1024, 256))
        for budget in (2.6, 4.0)
    ]
    return made[::3] if quick else made


class ProcessorClock:
    """A trace without events whose clock is the processor time of the calling thread."""

    step = 0

    def now(self) -> int:
        return time.thread_time_ns()

    stacks = False

    def at(self, monotonic_ns: int) -> int:
        """Stamps are of this clock already."""
        return monotonic_ns

    def emit(self, event: object) -> None: ...


class _ProcessorStamp(HostStamp):
    def __init__(self) -> None:
        self.at = time.thread_time_ns()


class ProcessorTimeBackend(CpuBackend):
    """The CPU backend, timed by the processor time of the thread that computes."""

    def stamp(self, stream: int | None = None) -> HostStamp:
        return _ProcessorStamp()


class Bench:
    """One model, the clock that its steps are timed by, and managers for it."""

    def __init__(self, case: Case | Computed) -> None:
        torch.manual_seed(0)
        self.case = case
        self.is_paced = isinstance(case, Case)
        self.tracer = None if self.is_paced else ProcessorClock()
        self.clock = time.perf_counter if self.is_paced else time.thread_time
        if isinstance(case, Case):
            self.model: nn.Module = Stack()
            self._batch = (torch.randn(1, case.tokens, HIDDEN),)
        else:
            heads = case.hidden // 64
            config = preset(
                "tiny",
                layers=LAYERS,
                hidden=case.hidden,
                heads=heads,
                kv_heads=heads,
                ffn=4 * case.hidden,
                max_seq=case.tokens,
            )
            self.model = GPT(config)
            ids = torch.randint(0, 257, (1, case.tokens + 1))
            self._batch = (ids[:, :-1], ids[:, 1:])

    def manager(self) -> tuple[Manager, Engine, RecomputePolicy]:
        """With lanes as the case has them, and nothing decided yet."""
        case = self.case
        if isinstance(case, Computed):
            backend: CpuBackend = ProcessorTimeBackend()
            tiers: list[Tier] = [HostTier(backend, LAYERS * case.layer_bytes)]
        else:
            backend = PacedBackend(d2h_bytes_per_s=case.link_bytes_per_s, h2d_bytes_per_s=case.link_bytes_per_s)
            tiers = [HostTier(backend, round(case.host_layers * case.layer_bytes))]
            if case.disk_bytes_per_s:
                room = LAYERS * case.layer_bytes
                disk = PacedDisk(room, write_bytes_per_s=case.disk_bytes_per_s, read_bytes_per_s=case.disk_bytes_per_s)
                tiers.append(DiskTier(disk, room))
        engine = Engine(backend, tiers, min_bytes=4096, when_full=WhenFull.STAY, tracer=self.tracer)
        recompute_policy = RecomputePolicy(engine, Level.SAVE_ALL)
        return (
            Manager(self.model, find_layers(self.model), engine, recompute_policy=recompute_policy),
            engine,
            recompute_policy,
        )

    def link(self, _: int) -> LinkRates | None:
        """The rate that is paced; one that is not is measured in the step."""
        if not isinstance(self.case, Case):
            return None
        rate = self.case.link_bytes_per_s
        return LinkRates(
            d2h_bytes_per_s=rate, h2d_bytes_per_s=rate, d2h_together_bytes_per_s=rate, h2d_together_bytes_per_s=rate
        )

    def step(self, managed: Manager | None) -> float:
        """Seconds of one forward and backward."""
        self.model.zero_grad(set_to_none=True)
        begin = self.clock()
        with managed or contextlib.nullcontext():
            loss = self.model(*self._batch)
        loss.backward()
        return self.clock() - begin


class Predictor:
    """Predicts a plan's time of a step that it runs and measures, as memo.autoplan does before it plans."""

    def __init__(self, bench: Bench, plan: ActivationPlan) -> None:
        self._bench, self._plan = bench, plan
        self.manager, self._engine, self._recompute_policy = bench.manager()
        self._timeline = StepTimeline(bench.tracer)
        self._engine.listen(self._timeline)
        layers = find_layers(bench.model)
        self._recompute_policy.choose({layer.name: setting_of(MEASURING) for layer in layers})

    def step(self) -> float:
        """Predicted seconds of a step by the plan."""
        self._timeline.restart()
        self._bench.step(self.manager)
        self._engine.backend.synchronize()
        self._engine.end_step()
        times = self._timeline.times()
        assert times is not None
        costs = {one.layer: one for one in self._recompute_policy.costs()}
        problem = self._plan.problem
        profile = measured_profile(times, costs, problem.profile.signature, is_measuring=True)
        return predicted_s(dataclasses.replace(problem, profile=profile), self._plan.layers, paced=self._bench.is_paced)


def predicted_s(problem: ActivationProblem, layers: Sequence[LayerPlan], *, paced: bool) -> float:
    """Predicted seconds of a step; waits take no processor time."""
    stage = predict_stages(problem, layers)[0]
    return stage.microbatch_s if paced else stage.compute_s + stage.recompute_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Errors of predictions: measured over predicted, minus 1."""

    bias: float
    """Median."""
    spread: float
    """Half of the range between the quartiles."""
    worst: float
    """The largest error by amount."""

    @classmethod
    def of(cls, measured: Sequence[float], predicted: Sequence[float]) -> Accuracy:
        """Of pairs that were measured together; at least two."""
        errors = [one / other - 1 for one, other in zip(measured, predicted, strict=True)]
        low, _, high = statistics.quantiles(errors, n=4, method="inclusive")
        return cls(bias=statistics.median(errors), spread=(high - low) / 2, worst=max(errors, key=abs))

    def __str__(self) -> str:
        return f"bias {self.bias:+.1%}, spread {self.spread:.1%}, worst {self.worst:+.1%}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Result of one case: seconds of each round, by arm."""

    case: Case | Computed
    planned_with_s: float
    """Prediction that the plan was made with."""
    plain_s: list[float]
    measured_s: list[float]
    predicted_s: list[float]
    fixed_s: dict[str, list[float]]
    """Of the fixed choices that fit the budget."""
    peak_bytes: int
    levels: str

    @property
    def now(self) -> Accuracy:
        """Against predictions of the same rounds."""
        return Accuracy.of(self.measured_s, self.predicted_s)

    @property
    def then(self) -> Accuracy:
        """Against the prediction that the plan was made with."""
        return Accuracy.of(self.measured_s, [self.planned_with_s] * len(self.measured_s))

    @property
    def drift(self) -> float:
        """Spread of the plain steps: what the machine did meanwhile."""
        return Accuracy.of(self.plain_s, [statistics.median(self.plain_s)] * len(self.plain_s)).spread

    @property
    def against_best(self) -> float | None:
        """The plan's time as a multiple of the best fixed choice's, in the median of the rounds."""
        if not self.fixed_s:
            return None
        best = min(self.fixed_s.values(), key=statistics.median)
        return statistics.median(one / other for one, other in zip(self.measured_s, best, strict=True))

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "paced" if isinstance(self.case, Case) else "computed",
            **dataclasses.asdict(self.case),
            "planned_with_s": self.planned_with_s,
            "plain_s": self.plain_s,
            "measured_s": self.measured_s,
            "predicted_s": self.predicted_s,
            "fixed_s": self.fixed_s,
            "peak_bytes": self.peak_bytes,
            "levels": self.levels,
            "now": dataclasses.asdict(self.now),
            "then": dataclasses.asdict(self.then),
            "drift": self.drift,
        }


def run(case: Case | Computed, rounds: int) -> Row:
    """All arms take turns, so that what the machine does besides is everybody's."""
    bench = Bench(case)
    automatic, engine, recompute_policy = bench.manager()
    memory = DeviceBudget(total_bytes=case.device_bytes, peak_bytes=lambda: 0, restart=lambda: None)
    actuator = Actuator(engine, recompute_policy, automatic.layers, memory, tracer=None, link=bench.link)
    planning = AutoPlan(actuator, checked_plan, tracer=bench.tracer)
    automatic.plan_with(planning)
    while planning.outcome().phase != "settled":
        bench.step(automatic)
    plan = planning.plan
    assert plan is not None, planning.outcome().lines()
    predictor = Predictor(bench, plan)
    arms: dict[str, Callable[[], float]] = {
        "plain": lambda: bench.step(None),
        "planned": lambda: bench.step(automatic),
        "predicted": predictor.step,
    }
    others = [predictor.manager]
    if bench.is_paced:
        for name, levels in {"swap all": Level.SAVE_ALL, "recompute all": Level.SAVE_ATTENTION}.items():
            fixed, _, treatment = bench.manager()
            treatment.choose({layer.name: levels for layer in fixed.layers})
            others.append(fixed)
            arms[name] = functools.partial(bench.step, fixed)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 2):
        for name, arm in arms.items():
            taken = arm()
            if number > 1:  # the first round tries each layer's recompute out, the second one is warm
                seconds[name].append(taken)
    if bench.is_paced and (plan.declined is not None or LAYERS * case.layer_bytes <= case.device_bytes):
        seconds["keep all"] = seconds["plain"]
    peak = automatic.stats.restart_peak()
    for one in (automatic, *others):
        one.close()
    first = plan.layers[0]
    return Row(
        case=case,
        planned_with_s=predicted_s(plan.problem, plan.layers, paced=bench.is_paced),
        plain_s=seconds.pop("plain"),
        measured_s=seconds.pop("planned"),
        predicted_s=seconds.pop("predicted"),
        fixed_s=seconds,
        peak_bytes=peak,
        levels=f"{first.point}, kept {first.kept:.2f}",
    )


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Bias and spread over all rounds of all rows of a kind, and the worst row's median."""
    measured = [one for row in rows for one in row.measured_s]
    now = Accuracy.of(measured, [one for row in rows for one in row.predicted_s])
    then = Accuracy.of(measured, [row.planned_with_s for row in rows for _ in row.measured_s])
    against = [row.against_best for row in rows if row.against_best is not None]
    return {
        "rows": len(rows),
        "now": dataclasses.asdict(now),
        "then": dataclasses.asdict(then),
        "worst_bias_of_a_row": max((row.now.bias for row in rows), key=abs),
        "drift": max(row.drift for row in rows),
        "worst_against_best": max(against, default=None),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a quarter of the cases")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path, kinds = None, {}
    rows: list[Row] = []
    for kind, made in (("paced", cases(quick=args.quick)), ("computed", computed_cases(quick=args.quick))):
        own: list[Row] = []
        for case in made:
            own.append(row := run(case, max(2, args.rounds)))
            rows.append(row)
            fixed = "".join(f"; {name} {statistics.median(taken):.3f} s" for name, taken in row.fixed_s.items())
            print(
                f"{case}\n  plan {statistics.median(row.measured_s):.3f} s ({row.levels}; peak "
                f"{format_bytes(row.peak_bytes)} of {format_bytes(case.device_bytes)}): {row.now}; against its first "
                f"prediction {row.then}; plain steps spread {row.drift:.1%}{fixed}",
                flush=True,
            )
            kinds[kind] = summary(own)
            body = {"layers": LAYERS, "load": os.getloadavg(), "kinds": kinds, "rows": [one.to_json() for one in rows]}
            path = write_result("plan-accuracy", body)
        print(f"{kind}: {len(own)} rows, {Accuracy(**kinds[kind]['now'])} (goal: bias within 5 %)")
        if kinds[kind]["worst_against_best"] is not None:
            print(
                f"  against the best fixed choice that fits, at most {kinds[kind]['worst_against_best']:.3f} of its time "
                "(goal 1)"
            )
    print(f"Wrote {path}")


if __name__ == "__main__":
    main()
