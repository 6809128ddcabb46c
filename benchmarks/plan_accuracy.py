"""Plans against what they promise, on the CPU engine with slower links: predicted and measured step time, and who wins.

    python -m benchmarks.plan_accuracy [--rounds 3] [--quick]

Each row is a length, a link speed and a device budget. The model's layers compute little and sleep for the time that a
layer of its length would take, in proportion to the tokens they are given (attention's part to their square), so that a
busy machine does not decide the result; copies, waits, recompute and plans are the real ones. Beside the automatic plan
run: keep everything, swap everything, recompute everything, each where it fits the budget.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memo
from benchmarks.results import ROOT, write_result
from memo.autoplan.actuator import Actuator
from memo.autoplan.controller import AutoPlan
from memo.autoplan.device_budget import DeviceBudget
from memo.machine.link_bandwidth import LinkRates
from memo.manager.manager import Manager
from memo.manager.plan_source import checked_plan
from memo.mip.activation.plan import LayerPlan
from memo.swap.engine.engine import Engine
from memo.swap.layers import find_layers
from memo.swap.recompute.policy import Tapes
from memo.swap.tiers.host_and_disk import DiskTier, HostTier
from memo.swap.tiers.protocol import Tier
from memo.swap.token_levels import TokenLevels
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


def manager(model: nn.Module, case: Case) -> tuple[Manager, Engine, Tapes]:
    """With paced lanes, and nothing decided yet."""
    backend = PacedBackend(d2h_bytes_per_s=case.link_bytes_per_s, h2d_bytes_per_s=case.link_bytes_per_s)
    tiers: list[Tier] = [HostTier(backend, round(case.host_layers * case.layer_bytes))]
    if case.disk_bytes_per_s:
        room = LAYERS * case.layer_bytes
        disk = PacedDisk(room, write_bytes_per_s=case.disk_bytes_per_s, read_bytes_per_s=case.disk_bytes_per_s)
        tiers.append(DiskTier(disk, room))
    engine = Engine(backend, tiers, min_bytes=4096)
    tokenwise = Tapes(engine, TokenLevels(all=1.0))
    return Manager(model, find_layers(model), engine, tokenwise=tokenwise), engine, tokenwise


def step(model: nn.Module, ids: torch.Tensor, managed: Manager | None) -> float:
    """Seconds of one forward and backward."""
    model.zero_grad(set_to_none=True)
    begin = time.perf_counter()
    if managed is None:
        loss = model(ids)
    else:
        with managed:
            loss = model(ids)
    loss.backward()
    return time.perf_counter() - begin


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one case gave; seconds are medians."""

    case: Case
    predicted_s: float
    measured_s: float
    fixed_s: dict[str, float]
    """Of the fixed choices that fit the budget."""
    peak_bytes: int
    levels: str

    @property
    def off(self) -> float:
        return self.measured_s / self.predicted_s - 1

    @property
    def against_best(self) -> float:
        return self.measured_s / min(self.fixed_s.values())


def run(case: Case, rounds: int) -> Row:
    """The automatic plan and the fixed choices take turns, so that what the machine does besides is everybody's."""
    torch.manual_seed(0)
    model = Stack()
    ids = torch.randn(1, case.tokens, HIDDEN)
    automatic, engine, tokenwise = manager(model, case)
    memory = DeviceBudget(total_bytes=case.device_bytes, peak_bytes=lambda: 0, restart=lambda: None)
    actuator = Actuator(engine, tokenwise, automatic.layers, memory, tracer=None, link=functools.partial(_link, case))
    planning = AutoPlan(actuator, checked_plan)
    automatic.plan_with(planning)
    while planning.outcome().phase != "settled":
        step(model, ids, automatic)
    plan = planning.plan
    assert plan is not None, planning.outcome().lines()
    arms: dict[str, Callable[[], float]] = {"plan": lambda: step(model, ids, automatic)}
    others = []
    if plan.declined is not None or LAYERS * case.layer_bytes <= case.device_bytes:
        arms["keep all"] = lambda: step(model, ids, None)
    for name, levels in {"swap all": TokenLevels(all=1.0), "recompute all": TokenLevels(attention=1.0)}.items():
        fixed, _, treatment = manager(model, case)
        treatment.choose({layer.name: levels for layer in fixed.layers})
        others.append(fixed)
        arms[name] = functools.partial(step, model, ids, fixed)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name, arm in arms.items():
            taken = arm()
            if number:  # the first round tries each layer's recompute out
                seconds[name].append(taken)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    peak = automatic.stats.restart_peak()
    for one in (automatic, *others):
        one.close()
    first = plan.layers[0]
    return Row(
        case=case,
        predicted_s=plan.stages[0].microbatch_s,
        measured_s=medians.pop("plan"),
        fixed_s=medians,
        peak_bytes=peak,
        levels=f"{_points(first)}, kept {first.kept:.2f}",
    )


def _points(part: LayerPlan) -> str:
    return "/".join(f"{part.fraction(name):.2f}" for name in ("all", "matmuls", "attention"))


def _link(case: Case) -> LinkRates:
    rate = case.link_bytes_per_s
    return LinkRates(
        d2h_bytes_per_s=rate, h2d_bytes_per_s=rate, d2h_together_bytes_per_s=rate, h2d_together_bytes_per_s=rate
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a quarter of the cases")
    args = parser.parse_args()
    rows = []
    for case in cases(quick=args.quick):
        row = run(case, args.rounds)
        rows.append(row)
        fixed = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in row.fixed_s.items())
        print(
            f"{case}\n  plan {row.measured_s:.3f} s, {row.off:+.1%} of the prediction ({row.levels}; peak "
            f"{format_bytes(row.peak_bytes)} of {format_bytes(case.device_bytes)}); {fixed}",
            flush=True,
        )
    worst, slowest = max(abs(row.off) for row in rows), max(row.against_best for row in rows)
    print(
        f"{len(rows)} cases: at most {worst:.1%} off the prediction (goal 10 %); against the best fixed choice that "
        f"fits, at most {slowest:.3f} of its time (goal 1)"
    )
    path = write_result(
        "plan-accuracy",
        {
            "layers": LAYERS,
            "rows": [
                {
                    **dataclasses.asdict(row.case),
                    "predicted_s": row.predicted_s,
                    "measured_s": row.measured_s,
                    "fixed_s": row.fixed_s,
                    "peak_bytes": row.peak_bytes,
                }
                for row in rows
            ],
            "worst_off": worst,
            "worst_against_best": slowest,
        },
    )
    print(f"Wrote {path}")


if __name__ == "__main__":
    main()
