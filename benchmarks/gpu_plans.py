"""Plans and alphas on a GPU, against every fixed way, in one run: what was predicted, what was measured, who is fastest.

    python3 -m benchmarks.gpu_plans plan     350m at 8k, 32k, 128k and 256k tokens: the automatic plan
    python3 -m benchmarks.gpu_plans alpha    350m at 128k tokens: alpha from 0 to 1 and full checkpointing; table and plot

The automatic plan gets a device budget that keeping everything does not fit: where that ran, half of what it took. With
`--model tiny --seq 2k --device cpu` the same code runs without a GPU, for testing it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import memo
from benchmarks.gpu_check import NO_GPU, gpu
from benchmarks.results import write_result
from memo.device_memory import device_memory
from memo.gpt.config import preset
from memo.gpt.model import GPT
from memo.units import format_bytes, parse_tokens

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
MOST_STEPS = 14
"""Of the automatic plan: three to measure, two for each of its corrections."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What runs, where."""

    model: str
    device: torch.device
    host: str
    rounds: int

    def make(self, seq: int) -> tuple[GPT, torch.Tensor]:
        """The same weights and tokens every time."""
        torch.manual_seed(0)
        config = preset(self.model, max_seq=seq)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        model = GPT(config, device=self.device, dtype=dtype)
        return model, torch.randint(0, config.vocab_size, (1, seq + 1), device=self.device)

    def tiers(self) -> dict[str, Any]:
        """Host memory is the tier; no disk."""
        return {"host": self.host, "disk": []}


def one_step(model: GPT, ids: torch.Tensor, context: Any, device: torch.device) -> tuple[float, int]:
    """(seconds, peak bytes) of one forward and backward."""
    memory = device_memory(device, None)
    _synchronize(device)
    memory.restart()
    begin = time.perf_counter()
    with context:
        loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    _synchronize(device)
    seconds = time.perf_counter() - begin
    model.zero_grad(set_to_none=True)
    return seconds, memory.peak_bytes()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def checkpointed(model: GPT) -> Any:
    """Every layer recomputed in backward, by torch's own non-reentrant checkpoint."""
    from benchmarks.gpu_bench import checkpointed as every_layer

    with every_layer(model):
        yield


def compare(setup: Setup, seq: int, ways: dict[str, Callable[[GPT], Any]]) -> dict[str, dict[str, Any]]:
    """Median seconds and peak bytes of each way; one that does not fit says so.

    One after the other and not in turns, since two host arenas of this size need not fit beside each other. A way makes what
    is entered around each forward: nothing (None), a manager, or a function that makes a context.
    """
    model, ids = setup.make(seq)
    return {name: _run(setup, model, ids, make) for name, make in ways.items()}


def _run(setup: Setup, model: GPT, ids: torch.Tensor, make: Callable[[GPT], Any]) -> dict[str, Any]:
    seconds: list[float] = []
    peaks: list[int] = []
    failed = None
    way = make(model)
    try:
        for _ in range(setup.rounds + 2):
            context = way() if callable(way) else way or contextlib.nullcontext()
            taken, peak = one_step(model, ids, context, setup.device)
            seconds.append(taken)
            peaks.append(peak)
    except (torch.cuda.OutOfMemoryError, memo.MemoError) as error:
        failed = str(error).splitlines()[0]
        model.zero_grad(set_to_none=True)
    if isinstance(way, memo.Manager):
        way.close()
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()
    # In the first two, kernels are chosen and recomputes tried out.
    counted = seconds[2:]
    return {
        "step_s": statistics.median(counted) if counted and failed is None else None,
        "peak_bytes": max(peaks[2:], default=0),
        "failed": failed,
    }


def fixed_ways(setup: Setup, alphas: tuple[float, ...]) -> dict[str, Callable[[GPT], Any]]:
    """Keep everything, torch's checkpointing, and memo at fixed alphas."""

    def at(alpha: float) -> Callable[[GPT], Any]:
        return lambda model: memo.offload(model, alpha=alpha, **setup.tiers())

    return {
        "keep everything": lambda model: None,
        "full checkpointing": lambda model: lambda: checkpointed(model),
        **{f"alpha {alpha:g}": at(alpha) for alpha in alphas},
    }


def automatic(setup: Setup, seq: int, device_bytes: int | None) -> dict[str, Any]:
    """Steps until the plan is settled, and what it said of the steps after."""
    model, ids = setup.make(seq)
    manager = memo.offload(model, device=device_bytes, **setup.tiers())
    for _ in range(MOST_STEPS):
        one_step(model, ids, manager, setup.device)
    stats, seconds, peaks = manager.stats, [], []
    stats.restart_peak()
    waited = stats.stall_s
    for _ in range(setup.rounds):
        seconds.append(one_step(model, ids, manager, setup.device)[0])
        peaks.append(stats.restart_peak())
    report, plan = manager.report(), manager.plan
    manager.close()
    if plan is None:
        return {"failed": "; ".join(report.plan.lines()) if report.plan else "no plan"}
    predicted = plan.stages[0]
    return {
        "declined": plan.declined,
        "step_s": statistics.median(seconds),
        "predicted_s": predicted.microbatch_s,
        "step_off": statistics.median(seconds) / predicted.microbatch_s - 1,
        "peak_bytes": max(peaks),
        "predicted_peak_bytes": predicted.peak_device_bytes,
        "stall_s": (stats.stall_s - waited) / setup.rounds,
        "predicted_stall_s": predicted.stall_s,
        "lines": report.plan.lines() if report.plan else [],
    }


def plans(setup: Setup, lengths: list[int]) -> Iterator[dict[str, Any]]:
    """The automatic plan at each length beside the fixed ways."""
    for seq in lengths:
        rows = compare(setup, seq, fixed_ways(setup, (0.0, 1.0)))
        kept = rows["keep everything"]
        budget = None if kept["step_s"] is None else kept["peak_bytes"] // 2
        ours = automatic(setup, seq, budget)
        print(f"\n{setup.model} at {seq} tokens, device budget {'all' if budget is None else format_bytes(budget)}")
        _print_rows(rows)
        if "failed" in ours:
            print(f"  automatic plan         {ours['failed']}")
        else:
            print(
                f"  automatic plan         {ours['step_s'] * 1e3:9.1f} ms ({ours['step_off']:+.1%} of the prediction), "
                f"saved tensors at most {format_bytes(ours['peak_bytes'])} "
                f"({format_bytes(ours['predicted_peak_bytes'])} predicted)"
            )
            print("".join(f"    {line}\n" for line in ours["lines"]), end="")
        yield {"seq": seq, "device_budget": budget, "fixed": rows, "plan": ours}


def alphas(setup: Setup, seq: int, plot: Path) -> dict[str, Any]:
    """Step time over alpha, as a table and a plot."""
    rows = compare(setup, seq, fixed_ways(setup, ALPHAS))
    print(f"\n{setup.model} at {seq} tokens")
    _print_rows(rows)
    steps = {alpha: rows[f"alpha {alpha:g}"]["step_s"] for alpha in ALPHAS}
    drawn = _plot(steps, rows["full checkpointing"]["step_s"], f"{setup.model}, {seq} tokens", plot)
    print(f"Wrote {plot}" if drawn else "no plot: matplotlib is not installed")
    return {"seq": seq, "ways": rows}


def _plot(steps: dict[float, float | None], checkpointing: float | None, title: str, path: Path) -> bool:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    known = {alpha: step for alpha, step in steps.items() if step is not None}
    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot(list(known), list(known.values()), marker="o", label="memo")
    if checkpointing is not None:
        axes.axhline(checkpointing, linestyle="--", color="grey", label="full checkpointing")
    axes.set(xlabel="alpha: fraction of the tokens that moves", ylabel="step time (s)", title=title, ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=150)
    return True


def _print_rows(rows: dict[str, dict[str, Any]]) -> None:
    for name, row in rows.items():
        if row["step_s"] is None:
            print(f"  {name:22} {row['failed']}")
        else:
            print(f"  {name:22} {row['step_s'] * 1e3:9.1f} ms, peak {format_bytes(row['peak_bytes'])}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("arm", choices=("plan", "alpha"))
    parser.add_argument("--model", default="350m")
    parser.add_argument("--seq", action="append", type=parse_tokens, help="may be given several times")
    parser.add_argument("--host", default="96GiB")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(arguments)
    hardware: dict[str, Any] | None = {"device": "cpu"} if args.device == "cpu" else gpu()
    if hardware is None:
        print("gpu-plans: no CUDA GPU that this interpreter's torch can use; nothing was run", file=sys.stderr)
        return NO_GPU
    setup = Setup(model=args.model, device=torch.device(args.device), host=args.host, rounds=args.rounds)

    def write(**result: Any) -> None:
        if args.device == "cuda":
            path = write_result(f"gpu-{args.arm}", {"device": hardware, "model": args.model, **result})
            print(f"Wrote {path}", flush=True)

    if args.arm == "plan":
        cases = []
        for case in plans(setup, args.seq or [8 << 10, 32 << 10, 128 << 10, 256 << 10]):
            cases.append(case)
            write(cases=cases)  # after each: what is cut off leaves the ones before
    else:
        where = (
            Path(__file__).parent / "results" / f"alpha-{args.model}.png"
            if args.device == "cuda"
            else Path("alpha.png")
        )
        write(**alphas(setup, (args.seq or [128 << 10])[0], where))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
