"""`make gpu-bench ARMS=...`: step time, peak memory and link use of each way to fit a step, side by side in one run.

    python3 -m benchmarks.gpu_bench short      350m at 8k tokens: what gpu-check prints
    python3 -m benchmarks.gpu_bench swap       350m and 1.3b at lengths that still fit without offload
    python3 -m benchmarks.gpu_bench 1m         350m at a million tokens, by plan (benchmarks.gpu_million)
    python3 -m benchmarks.gpu_bench plan       the automatic plan, predicted and measured, beside fixed ways (gpu_plans)
    python3 -m benchmarks.gpu_bench alpha      350m at 128k tokens over alpha, table and plot (gpu_plans)
    python3 -m benchmarks.gpu_bench allocator  the planned allocator beside PyTorch's (benchmarks.gpu_allocator)

Arms run in turn, round by round, on one GPU; ratios are medians over rounds within the run. Exits 3 without a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from benchmarks import gpu_allocator, gpu_million
from benchmarks.gpu_check import NO_GPU, gpu, missing
from benchmarks.results import write_result

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from memo.gpt.model import GPT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One model at one length."""

    model: str
    seq: int
    rounds: int


ARMS: dict[str, tuple[Case, ...]] = {
    "short": (Case(model="350m", seq=8192, rounds=3),),
    "swap": (Case(model="350m", seq=32768, rounds=4), Case(model="1.3b", seq=8192, rounds=4)),
}
ALLOCATOR = "allocator"
"""An arm of its own: an allocator is chosen once in a process."""
MILLION = "1m"
"""Likewise: one step each way, not rounds."""
PLANS = ("plan", "alpha")
"""Likewise: rows of their own."""


def ways(model: GPT, manager: Any) -> dict[str, Callable[[], Any]]:
    """Each way to hold a step's activations, as a context manager around the forward."""
    import torch

    return {
        "keep everything": contextlib.nullcontext,
        "memo, host tier": lambda: manager,
        "save_on_cpu, pinned": lambda: torch.autograd.graph.save_on_cpu(pin_memory=True),
        "full checkpointing": lambda: checkpointed(model),
    }


@contextlib.contextmanager
def checkpointed(model: GPT) -> Any:
    """Every layer recomputed in backward, by torch's own non-reentrant checkpoint."""
    from torch.utils.checkpoint import checkpoint

    originals = [layer.forward for layer in model.layers]
    for layer, original in zip(model.layers, originals, strict=True):
        layer.forward = lambda *args, _original=original: checkpoint(_original, *args, use_reentrant=False)
    try:
        yield
    finally:
        for layer, original in zip(model.layers, originals, strict=True):
            layer.forward = original


def one_step(model: GPT, ids: torch.Tensor, context: Any) -> tuple[float, int]:
    """(seconds, peak bytes) of one forward and backward."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    with context:
        loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    model.zero_grad(set_to_none=True)
    return seconds, torch.cuda.max_memory_allocated()


def run_case(case: Case) -> dict[str, Any]:
    """Medians of every way, ratios to keeping everything."""
    import torch

    import memo
    from memo.gpt.config import preset
    from memo.gpt.model import GPT

    torch.manual_seed(0)
    config = preset(case.model, max_seq=case.seq)
    model = GPT(config, device=torch.device("cuda"), dtype=torch.bfloat16)
    ids = torch.randint(0, config.vocab_size, (1, case.seq + 1), device="cuda")
    manager = memo.offload(model, alpha=1.0, host="64GiB")
    arms = ways(model, manager)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    peaks: dict[str, int] = dict.fromkeys(arms, 0)
    failed: dict[str, str] = {}
    for number in range(case.rounds + 1):
        for name, context in arms.items():
            if name in failed:
                continue
            try:
                took, peak = one_step(model, ids, context())
            except torch.cuda.OutOfMemoryError as error:
                failed[name] = str(error).splitlines()[0]
                model.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
                continue
            if number:  # the first round warms up
                seconds[name].append(took)
                peaks[name] = max(peaks[name], peak)
    plain = statistics.median(seconds["keep everything"]) if seconds["keep everything"] else None
    rows = {
        name: {
            "step_s": statistics.median(times) if times else None,
            "ratio": statistics.median(times) / plain if times and plain else None,
            "peak_bytes": peaks[name],
            "failed": failed.get(name),
        }
        for name, times in seconds.items()
    }
    manager.close()
    del arms, manager  # and its host memory, before another manager takes as much
    release_host_memory()
    link = link_use(model, ids)
    print(f"\n{case.model} at {case.seq} tokens, bf16, {case.rounds} rounds")
    for name, row in rows.items():
        if row["step_s"] is None:
            print(f"  {name:22} {row['failed']}")
        else:
            ratio = "" if row["ratio"] is None else f"{row['ratio']:6.3f}x"
            print(f"  {name:22} {row['step_s'] * 1e3:9.1f} ms {ratio}  peak {row['peak_bytes'] / 2**30:7.2f} GiB")
    for lane, use in link.items():
        print(f"  {lane}: {use['bytes_per_s'] / 1e9:.1f} GB/s, {use['share']:.2f} of the link alone")
    return {"model": case.model, "seq": case.seq, "rounds": case.rounds, "ways": rows, "link": link}


def release_host_memory() -> None:
    """Gives back what torch keeps page-locked for `save_on_cpu`, rounded up to powers of two; only torch itself could."""
    import torch

    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()


def link_use(model: GPT, ids: torch.Tensor) -> dict[str, dict[str, float]]:
    """What the copies of one traced step reach in each direction, against the link measured by itself."""
    import json
    import tempfile

    import torch

    import memo
    from memo.swap.probe import measure_link

    rates = measure_link(torch.device("cuda"), seconds=2.0)
    alone = {"d2h": rates.d2h_bytes_per_s, "h2d": rates.h2d_bytes_per_s}
    with tempfile.TemporaryDirectory() as folder:
        manager = memo.offload(model, alpha=1.0, host="64GiB", trace=folder)
        for _ in range(2):
            one_step(model, ids, manager)
            manager.step_done()
        manager.close()
        with open(f"{folder}/trace.rank0.jsonl") as lines:
            events = [json.loads(line) for line in lines]
    use = {}
    for lane, nominal in alone.items():
        # Copies under 4 MiB are launch time more than link time.
        spans = [e for e in events if e.get("lane") == lane and e["nbytes"] >= 4 << 20 and e["step"] == 1]
        busy_ns = sum(span["d"] for span in spans)
        if busy_ns:
            rate = sum(span["nbytes"] for span in spans) / busy_ns * 1e9
            use[lane] = {"bytes_per_s": rate, "link_bytes_per_s": nominal, "share": rate / nominal}
    return use


def main(names: list[str]) -> int:
    device = gpu()
    if device is None:
        print("gpu-bench: no CUDA GPU that this interpreter's torch can use; nothing was run", file=sys.stderr)
        return NO_GPU
    if missing():
        print(f"gpu-bench: {sys.executable} lacks {', '.join(missing())}; nothing was run", file=sys.stderr)
        return 1
    known = [*ARMS, *PLANS, MILLION, ALLOCATOR]
    wanted = known if names in ([], ["all"]) else names
    unknown = [name for name in wanted if name not in known]
    if unknown:
        print(f"gpu-bench: unknown arm {unknown[0]!r}; one of {', '.join(known)}", file=sys.stderr)
        return 2
    failed = ALLOCATOR in wanted and gpu_allocator.main(["--rounds", "3"]) != 0
    for name in wanted:
        if name == ALLOCATOR:
            continue
        if name in PLANS:
            from benchmarks import gpu_plans

            failed |= gpu_plans.main([name]) != 0
            continue
        if name == MILLION:
            failed |= gpu_million.main([]) != 0
            continue
        cases = []
        for case in ARMS[name]:
            cases.append(run_case(case))
            # After each case: what is cut off leaves the ones before.
            print(f"Wrote {write_result(f'gpu-bench-{name}', {'device': device, 'cases': cases})}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
