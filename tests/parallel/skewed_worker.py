"""Runs under torchrun: routers that send all tokens to one rank's experts in some steps, with memo against without.

Says `equal <layout> alpha <alpha> <case>` where each rank's losses and gradients were the same bits, its host tier kept
within its budget, and what a step had beyond it went where it should and was told.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from equality_worker import CPU, layout_of, training

import memo
from memo.gpt import MoeConfig, Precision, preset
from memo.gpt.arithmetic.block_bytes import ElementSizes
from memo.gpt.arithmetic.mixture_bytes import SKEW, MixtureFigures
from memo.gpt.model.build_rank import build_stages
from memo.gpt.model.experts import Router
from memo.gpt.train import ParallelTrainer
from memo.parallel import Layout, World, join
from memo.trace import read_traces
from memo.units import format_bytes

ROWS, SEQ, LAYERS, EXPERTS, TOP_K, BIAS = 4, 256, 4, 8, 2, 60.0
MOE = MoeConfig(experts=EXPERTS, top_k=TOP_K, expert_hidden=96)
SHAPE = preset("tiny", vocab_size=61, max_seq=SEQ, layers=LAYERS, hidden=32, heads=4, ffn=32, kv_heads=4, moe=MOE)
PAGES = 40 * 4096  # each storage takes whole pages, which arithmetic by the token does not count
# Expert-parallel rank that gets all tokens in a step; None: experts are chosen equally often.
TO = (None, 0, None, -1, None)


class Drawn:
    """Random tokens as a function of the step."""

    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(61, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(step))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class SkewedRouters:
    """Adds a bias to all routers' logits that changes by step."""

    def __init__(self, ep: int) -> None:
        self._ep = ep
        self._bias = torch.zeros(EXPERTS)
        self._is_skewed = False

    def begin(self, step: int) -> None:
        to = TO[step - 1]
        self._is_skewed = to is not None
        self._bias = torch.zeros(EXPERTS)
        if to is not None:
            own = EXPERTS // self._ep
            first = to % self._ep * own
            self._bias[first : first + own] = BIAS

    def forward(self, router: Router, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = F.linear(x, router.weight)
        if self._is_skewed:
            logits = logits + self._bias
        else:  # token n: experts 2 n and 2 n + 1, so that each rank gets as many
            numbers = torch.arange(len(x) * TOP_K).view(-1, TOP_K) % EXPERTS
            logits = logits + BIAS * F.one_hot(numbers, EXPERTS).sum(1).to(x.dtype)
        shares = logits.softmax(-1)
        largest, chosen = shares.topk(TOP_K, dim=-1)
        return chosen, largest / largest.sum(-1, keepdim=True), router._losses(logits, shares, chosen)

    @contextmanager
    def installed(self) -> Iterator[None]:
        forward = Router.forward
        Router.forward = lambda router, x: self.forward(router, x)  # type: ignore[method-assign]
        try:
            yield
        finally:
            Router.forward = forward  # type: ignore[method-assign]


def planned_nbytes(layout: Layout) -> int:
    """Bytes that a plan has room for on a rank: of all layers but the last, whose backward comes next."""
    tokens = ROWS // layout.dp * SEQ // layout.tp
    block = MixtureFigures(SHAPE, SEQ, ElementSizes.of(Precision.FP32), tp=layout.tp, ep=layout.ep, skew=SKEW).block()
    return (LAYERS - 1) * (int(tokens * (block.always + block.all)) + PAGES)


@dataclasses.dataclass
class Seen:
    """What a rank saw of its steps."""

    steps: list[tuple[float, float, dict[str, torch.Tensor]]] = dataclasses.field(default_factory=list)
    disk: list[int] = dataclasses.field(default_factory=list)
    report: memo.Report | None = None
    times: list[float] = dataclasses.field(default_factory=list)


def run(layout: Layout, world: World, options: dict[str, Any] | None, budget: int) -> Seen:
    """All steps, with memo where there are options."""
    stages = build_stages(SHAPE, world, seq=SEQ, device=CPU, dtype=torch.float32, seed=7)
    routers, seen, grads = SkewedRouters(layout.ep), Seen(), {}
    manager = None
    if options is not None:
        layers = [layer for stage in stages for layer in stage.layers.values()]
        modules, host = torch.nn.ModuleList(stages), budget * dist.get_world_size()
        manager = memo.offload(modules, host=host, min_bytes=256, layers=layers, **options)
        manager.step = 1
    config = training(1)
    trainer = ParallelTrainer(stages, world, Drawn(), config, device=CPU, rows=ROWS, around_forward=manager)

    def note(*_: object) -> None:
        for name, parameter in trainer.named_parameters():
            assert parameter.grad is not None
            grads[name] = parameter.grad.to_local().clone()

    trainer.optimizer.register_step_pre_hook(note)
    with routers.installed(), closing(manager) if manager is not None else contextmanager(lambda: iter([None]))():
        for step in range(1, len(TO) + 1):
            routers.begin(step)
            result = trainer.step(step)
            assert result is not None
            assert result.expert_rows is not None
            seen.steps.append((result.loss, result.grad_norm, dict(grads)))
            seen.times.append(result.expert_rows.times)
            if manager is not None:
                gc.collect()
                assert manager.stats.live_entries == 0, manager.stats
                host_tier = manager._engine.tiers[0]
                assert host_tier.used == 0
                assert max(host_tier.peak, host_tier.reserved) <= budget
                seen.disk.append(manager.stats.bytes_disk)
                manager.step_done()
        if manager is not None:
            seen.report = manager.report()
    return seen


def compare(got: Seen, want: Seen, what: str) -> None:
    for step, (ours, theirs) in enumerate(zip(got.steps, want.steps, strict=True), 1):
        assert ours[:2] == theirs[:2], f"{what}, step {step}: {ours[:2]}, not {theirs[:2]}"
        for name, grad in theirs[2].items():
            assert torch.equal(ours[2][name], grad), f"{what}, step {step}: {name}"


def check_spills(got: Seen, layout: Layout, world: World, trace: Path) -> None:
    """In a step, and on a rank, whose experts got more than is planned for, and nowhere else; and it was told."""
    own = world.dp % layout.ep
    spilled = [after - before for before, after in itertools.pairwise([0, *got.disk])]
    for step, nbytes in enumerate(spilled):
        to = TO[step]
        is_more = to is not None and to % layout.ep == own
        assert (nbytes > 0) == is_more, (own, step, spilled)
        assert got.times[step] == (1.0 if to is None else layout.ep)
    assert got.report is not None
    figures = got.report.spills
    (path,) = (path for path in trace.iterdir() if f"rank{dist.get_rank()}." in path.name)
    notes = [event for event in read_traces([path])[0].events if event.kind == "note" and event.cause == "spill"]
    if not any(spilled):
        assert figures is None
        assert not notes
        return
    assert figures is not None
    assert figures.nbytes == sum(spilled)
    assert figures.steps == sum(map(bool, spilled))
    worst = spilled.index(max(spilled)) + 1
    assert (figures.worst.step, figures.worst.nbytes) == (worst, max(spilled))
    assert f"spilled: {format_bytes(figures.nbytes)}" in str(got.report)
    assert f"most in step {worst}" in str(got.report)
    assert {note.step for note in notes} == {step for step, nbytes in enumerate(spilled, 1) if nbytes}
    assert all("found no room in the host tier and went to the disk tier" in note.message for note in notes)


def check(name: str, case: str, alphas: list[float]) -> Iterator[str]:
    layout, _, _ = layout_of(name)
    world = World.of(layout, "cpu")
    budget = planned_nbytes(layout)
    want = run(layout, world, None, budget)
    for alpha in alphas:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / str(dist.get_rank())
            trace.mkdir()
            options: dict[str, Any] = {"alpha": alpha, "trace": trace}
            if case == "disk":
                options["disk"] = folder
            else:
                options["on_full"] = case
            got = run(layout, world, options, budget)
            compare(got, want, f"{name}, alpha {alpha}, {case}")
            assert got.times == want.times
            if alpha == 1 and case == "disk":
                check_spills(got, layout, world, trace)
            elif case == "recompute":
                assert got.report is not None
                assert got.report.recompute is not None
                assert got.report.recompute.repeated or alpha < 1, got.report.recompute
        yield f"equal {name} alpha {alpha:g} {case}"


def main() -> None:
    """Arguments: alphas separated by commas, `disk`, `recompute`, `spill` or `raise`, and names of layouts."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*recomputed whole")
    with join(CPU):
        for name in sys.argv[3:]:
            for told in check(name, sys.argv[2], [float(alpha) for alpha in sys.argv[1].split(",")]):
                dist.barrier()
                if dist.get_rank() == 0:
                    print(told, flush=True)


if __name__ == "__main__":
    main()
