"""The 125m preset at 8k tokens on the CPU, everything to disk: step time against the run without memo, and peak bytes.

    python -m benchmarks.cpu_step [--seq 8k] [--rounds 3] [--disk-dir DIR]

Both arms take turns in one process on the same model and tokens; the ratio is the median over rounds of neighbours.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch

import memo
from benchmarks.results import write_result
from memo.gpt.config import preset
from memo.gpt.model.model import GPT
from memo.units import format_bytes, parse_tokens


def step(model: GPT, ids: torch.Tensor, manager: memo.Manager | None) -> float:
    """Seconds of one forward and backward."""
    model.zero_grad(set_to_none=True)
    begin = time.perf_counter()
    if manager is None:
        loss = model(ids[:, :-1], ids[:, 1:])
    else:
        with manager:
            loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="125m")
    parser.add_argument("--seq", default="8k")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk-dir", default=tempfile.gettempdir())
    args = parser.parse_args()
    seq = parse_tokens(args.seq)
    torch.manual_seed(0)
    config = preset(args.model, max_seq=seq)
    model = GPT(config)
    ids = torch.randint(0, config.vocab_size, (1, seq + 1))
    manager = memo.offload(model, alpha=1.0, disk=args.disk_dir)
    plain, managed = [], []
    for number in range(args.rounds + 1):
        a, b = step(model, ids, None), step(model, ids, manager)
        print(f"round {number}{' (warm-up)' if not number else ''}: without {a:.2f} s, with {b:.2f} s, {b / a:.3f}x")
        if number:
            plain.append(a)
            managed.append(b)
    ratio = statistics.median(b / a for a, b in zip(plain, managed, strict=True))
    stats = manager.stats
    saved = (stats.bytes_disk + stats.bytes_forwarded) // (args.rounds + 1)
    peak = stats.peak_device_bytes / saved
    print(manager.report())
    print(f"step time with memo / without: {ratio:.3f} (goal 1.15)")
    print(f"peak activation bytes in memory: {format_bytes(stats.peak_device_bytes)}, {peak:.3f} of all (goal 0.25)")
    manager.close()
    path = write_result(
        "cpu-step",
        {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "model": args.model,
            "seq": seq,
            "plain_step_s": plain,
            "managed_step_s": managed,
            "ratio": ratio,
            "saved_bytes_per_step": saved,
            "peak_activation_bytes": stats.peak_device_bytes,
            "peak_share": peak,
            "stall_s": stats.stall_s,
        },
    )
    print(f"Wrote {path}")


if __name__ == "__main__":
    main()
