"""Loss curves with and without a codec: three seeds, 200 steps on real text, the documentation of this repository.

    make bench ARMS=codec_loss
    python -m benchmarks.codec_loss [--steps 200] [--seeds 3]

All saved tensors of all layers move (alpha 1), so that every one that a codec takes is coded. Declared before the first run:
a codec does no harm if, for each seed, the mean loss of the last tenth of the steps is within MARGIN of the exact run's,
in nats a token. A seed draws weights and batches, so that exact runs differ by more than that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, write_result

MARGIN = 0.02
CODECS = (None, "int8", "fp8")
MODEL = ["--model", "tiny", "--layers", "4", "--hidden", "128", "--heads", "4", "--seq", "128", "--batch", "2"]
RUN = [*MODEL, "--on", "cpu", "--precision", "fp32", "--warmup", "20", "--lr", "1e-3"]
MOVED = ["--offload", "host", "--host", "1GiB", "--alpha", "1"]


def losses(data: Path, folder: Path, *, steps: int, seed: int, codec: str | None) -> list[float]:
    """Loss of each step of a run by `memo train`."""
    metrics = folder / f"{seed}-{codec}.jsonl"
    command = [sys.executable, "-m", "memo.cli.main", "train", *RUN, *MOVED, "--data", str(data), "--steps", str(steps)]
    command += ["--seed", str(seed), "--metrics", str(metrics), *(["--codec", codec] if codec else [])]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def compared(curves: dict[str, list[list[float]]], *, last: int) -> list[dict[str, Any]]:
    """For each codec and seed the mean loss of the last steps, and by how much it is above the exact run's."""
    ends = {name: [statistics.fmean(curve[-last:]) for curve in of_seeds] for name, of_seeds in curves.items()}
    rows = []
    for name, of_seeds in ends.items():
        above = [end - exact for end, exact in zip(of_seeds, ends["exact"], strict=True)]
        rows.append({"codec": name, "losses": of_seeds, "above": above, "harmless": max(map(abs, above)) <= MARGIN})
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="codec_loss", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args(arguments)
    curves: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "text.txt"
        data.write_text("\n".join(path.read_text() for path in sorted(ROOT.glob("docs/*.md"))))
        for codec in CODECS:
            for seed in range(args.seeds):
                curve = losses(data, folder, steps=args.steps, seed=seed, codec=codec)
                curves.setdefault(codec or "exact", []).append(curve)
                print(f"  {codec or 'exact':5} seed {seed}: {curve[0]:.3f} to {curve[-1]:.3f}", flush=True)
    rows = compared(curves, last=max(args.steps // 10, 1))
    for row in rows:
        print(f"  {row['codec']:5} last tenth {row['losses']}, above exact {row['above']}")
    body = {"steps": args.steps, "margin": MARGIN, "flags": [*RUN, *MOVED], "rows": rows, "curves": curves}
    print(f"\nWrote {write_result('codec-loss', body)}")
    return 0 if all(row["harmless"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
