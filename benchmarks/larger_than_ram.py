"""A sequence whose activations exceed memory: the same CPU training in one limit without memo, and with alpha and a disk.

    python -m benchmarks.larger_than_ram [--seq 8k] [--layers 12] [--hidden 256] [--steps 2] [--limit 1GiB] [--disk-dir DIR]

Each arm is a process of its own whose data (heap and private mappings, RLIMIT_DATA) the kernel limits, to so much beside
what torch takes when it is loaded. A third arm runs without memo and without the limit: what it needs, and that losses and
gradients are the same to the last bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.limited import taken_bytes, use_at_most
from memo.units import format_bytes, format_duration, parse_bytes, parse_tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is trained; the same in every arm."""

    seq: int
    layers: int
    hidden: int
    steps: int

    @property
    def saved_nbytes(self) -> int:
        """What autograd saves of the layers without memo: sixteen units of s·h in single precision."""
        return 16 * self.layers * self.seq * self.hidden * 4


def in_a_process(
    shape: Shape, *, alpha: float | None, limit: int | None, disk_dir: str, threads: int = 2, timeout_s: float = 900
) -> dict[str, Any]:
    """Runs one arm; its result, or under "failed" the first line of what ended it."""
    request = json.dumps({"shape": dataclasses.asdict(shape), "alpha": alpha, "limit": limit, "disk_dir": disk_dir})
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.larger_than_ram", "--arm", request],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        cwd=Path(__file__).parent.parent,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0 or not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["it left no word"])[-1]
        return {"failed": f"ended with {done.returncode}: {last}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _arm(request: dict[str, Any]) -> dict[str, Any]:
    """In the process: limits itself, then trains."""
    from memo.machine.process_memory import return_freed_memory

    if request["limit"] is not None:
        _limit_data(request["limit"])

    return_freed_memory()
    try:
        return _train(Shape(**request["shape"]), request["alpha"], request["disk_dir"])
    except (RuntimeError, MemoryError) as error:
        return {"failed": str(error).splitlines()[0] if str(error) else type(error).__name__}


def _limit_data(nbytes: int) -> None:
    """Leaves this process so much beside what torch and memo have taken once they are loaded."""
    import memo.gpt.model.model  # noqa: F401  half a gibibyte more where torch is built for CUDA

    use_at_most(taken_bytes() + nbytes)


def _train(shape: Shape, alpha: float | None, disk_dir: str) -> dict[str, Any]:
    import contextlib

    import torch

    import memo
    from memo.gpt.config import preset
    from memo.gpt.model.model import GPT
    from memo.machine.process_memory import peak_rss_bytes

    torch.manual_seed(0)
    heads = max(1, shape.hidden // 64)
    made = GPT(
        preset(
            "tiny", layers=shape.layers, hidden=shape.hidden, heads=heads, kv_heads=heads, ffn=4 * shape.hidden,
            max_seq=shape.seq,
        )
    )  # fmt: skip
    manager = None if alpha is None else memo.offload(made, alpha=alpha, host=0, disk=disk_dir)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.01)
    digest, seconds = hashlib.sha256(), []
    for step in range(shape.steps):
        ids = torch.randint(0, 257, (1, shape.seq + 1), generator=torch.Generator().manual_seed(step))
        begin = time.perf_counter()
        with manager or contextlib.nullcontext():
            loss = made(ids[:, :-1], ids[:, 1:])
        loss.backward()
        seconds.append(time.perf_counter() - begin)
        for tensor in (loss.detach(), *(parameter.grad for parameter in made.parameters())):
            digest.update(tensor.contiguous().numpy().tobytes())
        optimizer.step()
        optimizer.zero_grad()
    result = {
        "step_s": seconds,
        "peak_rss_bytes": peak_rss_bytes(),
        "losses_and_gradients_sha256": digest.hexdigest(),
    }
    if manager is not None:
        stats = manager.stats
        result |= {
            "disk_bytes_per_step": stats.bytes_disk // shape.steps,
            "recomputed_bytes_per_step": stats.bytes_recomputed // shape.steps,
            "recompute_s": stats.recompute_s,
            "stall_s": stats.stall_s,
            "peak_activation_bytes": stats.peak_device_bytes,
        }
        manager.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seq", default="8k")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--limit", default="1GiB")
    parser.add_argument("--disk-dir", default=tempfile.gettempdir())
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm is not None:
        print(json.dumps(_arm(json.loads(args.arm))))
        return
    limit = parse_bytes(args.limit, what="limit")
    shape = Shape(seq=parse_tokens(args.seq), layers=args.layers, hidden=args.hidden, steps=args.steps)
    print(
        f"{shape.layers} layers of {shape.hidden}, {shape.seq} tokens: {format_bytes(shape.saved_nbytes)} saved for backward"
    )
    arms = {
        "without memo, limited": (None, limit),
        "alpha 0.25 and disk, limited": (0.25, limit),
        "without memo, no limit": (None, None),
    }
    results = {}
    for name, (alpha, most) in arms.items():
        result = results[name] = in_a_process(shape, alpha=alpha, limit=most, disk_dir=args.disk_dir)
        allowed = "-" if most is None else format_bytes(most)
        print(f"{name:30} limit {allowed:>9}  {_told(result)}", flush=True)
    digests = {result.get("losses_and_gradients_sha256") for result in results.values()} - {None}
    is_equal = len(digests) == 1 and sum("failed" not in result for result in results.values()) == 2
    print(f"losses and gradients of the runs that trained are {'equal' if is_equal else 'NOT equal'} bit for bit")
    from benchmarks.results import write_result

    body = {"shape": dataclasses.asdict(shape), "saved_bytes": shape.saved_nbytes, "limit_bytes": limit}
    print(f"Wrote {write_result('larger-than-ram', {**body, 'arms': results, 'bit_for_bit': is_equal})}")


def _told(result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"fails: {result['failed']}"
    told = f"{format_duration(min(result['step_s']))} a step, peak resident {format_bytes(result['peak_rss_bytes'])}"
    if "disk_bytes_per_step" in result:
        told += (
            f", {format_bytes(result['disk_bytes_per_step'])} to disk and"
            f" {format_bytes(result['recomputed_bytes_per_step'])} recomputed a step"
        )
    return told


if __name__ == "__main__":
    main()
