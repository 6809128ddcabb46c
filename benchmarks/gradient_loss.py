"""Loss curves with exact and with compressed exchanges between ranks: three seeds, 200 steps on real text, two ranks.

    make bench ARMS=gradient_loss
    python -m benchmarks.gradient_loss [--steps 200] [--seeds 3]

The text is the documentation of this repository. Declared before the first run: an exchange does no harm if, for each seed,
the mean loss of the last tenth of the steps is within its margin of the exact run's, in nats a token: int8, whose error is
at most 1/254 of a group's largest value, as the codec of activations (codec_loss.py); PowerSGD of rank 4, which sends a few
percent of the bytes and is the harsher choice, within five times that; bfloat16 between pipeline stages, off by at most
2^-8 of each value, as int8. A seed draws weights and batches, the same in every layout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, write_result

MARGINS = {"exact": 0.0, "int8": 0.02, "powersgd:4": 0.1, "pipeline bf16": 0.02}
RANKS = 2
FLAGS = {
    "exact": ["--dp", str(RANKS)],
    "int8": ["--dp", str(RANKS), "--compress-gradients", "int8"],
    "powersgd:4": ["--dp", str(RANKS), "--compress-gradients", "powersgd:4"],
    "pipeline bf16": ["--pp", str(RANKS), "--pipeline-dtype", "bf16"],
}
RUN = ["--model", "tiny", "--layers", "4", "--hidden", "128", "--heads", "4", "--seq", "128"]
RUN += [
    "--global-batch",
    "4",
    "--accumulate",
    "2",
    "--on",
    "cpu",
    "--precision",
    "fp32",
    "--warmup",
    "20",
    "--lr",
    "1e-3",
]


def measured(data: Path, folder: Path, *, steps: int, seed: int, exchange: str) -> list[dict[str, Any]]:
    """Metrics of each step of a run by `memo train`."""
    metrics = folder / f"{seed}-{exchange.replace(' ', '-')}.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [
        "-m",
        "memo.cli.main",
        "train",
        *RUN,
        *FLAGS[exchange],
        "--data",
        str(data),
        "--steps",
        str(steps),
        "--seed",
        str(seed),
    ]
    command += ["--metrics", str(metrics)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, text=True, env=one_thread)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def compared(curves: dict[str, list[list[float]]], *, last: int) -> list[dict[str, Any]]:
    """For each exchange and seed the mean loss of the last steps, and by how much it is above the exact run's."""
    ends = {name: [statistics.fmean(curve[-last:]) for curve in of_seeds] for name, of_seeds in curves.items()}
    rows = []
    for name, of_seeds in ends.items():
        above = [end - exact for end, exact in zip(of_seeds, ends["exact"], strict=True)]
        harmless = max(map(abs, above)) <= MARGINS[name]
        rows.append(
            {"exchange": name, "margin": MARGINS[name], "losses": of_seeds, "above": above, "harmless": harmless}
        )
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="gradient_loss", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args(arguments)
    curves: dict[str, list[list[float]]] = {}
    share = {"exact": 1.0, "pipeline bf16": 0.5}  # of float32
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "text.txt"
        data.write_text("\n".join(path.read_text() for path in sorted(ROOT.glob("docs/*.md"))))
        for exchange in MARGINS:
            for seed in range(args.seeds):
                lines = measured(data, folder, steps=args.steps, seed=seed, exchange=exchange)
                curve = [line["loss"] for line in lines]
                curves.setdefault(exchange, []).append(curve)
                if "gradient_bytes" in lines[-1]:
                    share[exchange] = lines[-1]["gradient_sent_bytes"] / lines[-1]["gradient_bytes"]
                print(f"  {exchange:13} seed {seed}: {curve[0]:.3f} to {curve[-1]:.3f}", flush=True)
    rows = [
        {**row, "share_of_bytes": share[row["exchange"]]} for row in compared(curves, last=max(args.steps // 10, 1))
    ]
    for row in rows:
        print(f"  {row['exchange']:13} {row['share_of_bytes']:6.1%} of the bytes, above exact {row['above']}")
    body = {
        "steps": args.steps,
        "margins": MARGINS,
        "flags": {name: [*RUN, *flags] for name, flags in FLAGS.items()},
        "rows": rows,
        "curves": curves,
    }
    print(f"\nWrote {write_result('gradient-loss', body)}")
    return 0 if all(row["harmless"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
