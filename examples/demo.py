"""Demo: trains the same GPT twice, without memo and with it, and compares losses, memory and speed.

    make demo                       # or: python examples/demo.py

Each run is a process of its own, `memo train` with the same model, data and seed:

    memo train ... --offload none   activations stay in device memory until backward needs them
    memo train ... --offload disk   activations move to a scratch file (with a GPU: to host memory first)

The device is a CUDA GPU if there is one, else the CPU. The text is the source of Python's standard library. On a CPU,
"peak memory" is the peak resident set of the process; on a GPU it is torch's max_memory_allocated.

Exit code 0 means that the losses are equal to the last bit and the peak is below half.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from memo.units import format_bytes, format_duration, format_tokens, text_table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Training run that suits this machine, and the offload options of its second run."""

    device: str
    model: list[str]
    seq: int
    steps: int
    offload: list[str]

    def flags(self) -> list[str]:
        """Arguments of `memo train` that both runs share."""
        return [*self.model, "--seq", str(self.seq), "--steps", str(self.steps), "--seed", "1", "--on", self.device]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one run: the metrics of each step, and the duration of the process."""

    steps: list[dict[str, Any]]
    duration_s: float

    @property
    def losses(self) -> list[float]:
        """Loss of each step."""
        return [step["loss"] for step in self.steps]

    @property
    def peak_bytes(self) -> int:
        """Peak device memory, or the peak resident set on a CPU."""
        last = self.steps[-1]
        return int(last["peak_device_bytes"] or last["peak_rss_bytes"])

    @property
    def tokens_per_s(self) -> float:
        """Mean over all steps but the first, which also warms up."""
        timed = self.steps[1:] or self.steps
        return len(timed) / sum(1 / step["tokens_per_s"] for step in timed)

    def total(self, key: str) -> int:
        """Sum of one metric over all steps."""
        return sum(step[key] for step in self.steps)


def main() -> int:
    """Runs both trainings, prints the comparison and returns the exit code."""
    setup = setup_for_gpu() if torch.cuda.is_available() else setup_for_cpu()
    with tempfile.TemporaryDirectory(prefix="memo-demo-") as scratch:
        print("Two trainings of the same model, a minute or two each on two cores. They show memory, not speed.")
        print(f"1/2  {format_tokens(setup.seq)} tokens, activations in memory")
        without = train(setup, ["--offload", "none"], Path(scratch) / "without.jsonl")
        print(f"\n2/2  the same with memo.offload: {' '.join(setup.offload)}")
        trace = Path(scratch) / "trace.rank0.jsonl"
        with_memo = train(setup, [*setup.offload, "--trace", str(trace)], Path(scratch) / "with.jsonl")
        report = write_report(trace, plain_s=setup.seq / without.tokens_per_s)
    identical = without.losses == with_memo.losses  # floats compared exactly, no tolerance
    ratio = with_memo.peak_bytes / without.peak_bytes
    print(f"\n{table(setup, without, with_memo, ratio)}")
    print(f"losses {'identical to the last bit' if identical else 'DIFFER'}; peak memory {ratio:.0%}")
    print(f"every byte and millisecond of the second run: {report} (open it in a browser)")
    return 0 if identical and ratio < 0.5 else 1


def write_report(trace: Path, *, plain_s: float) -> Path:
    """Writes the second run's timeline as one HTML file into the current directory, compared with a step without memo."""
    report = Path("report.html").resolve()
    command = [sys.executable, "-m", "memo.cli.main", "trace", "html", str(trace), "-o", str(report), "-f"]
    command += ["--plain", str(plain_s)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return report


def setup_for_cpu() -> Setup:
    """Setup for a CPU: many thin layers, so that activations are most of the memory and a step takes seconds.

    Two heads of 64, since torch's attention on a CPU uses as many cores in backward as there are heads.
    """
    model = ["--model", "tiny", "--layers", "48", "--hidden", "128", "--heads", "2"]
    return Setup(device="cpu", model=model, seq=4096, steps=3, offload=["--offload", "disk"])


def setup_for_gpu() -> Setup:
    """Setup for a GPU: the longest sequence with which the run without memo fits, too.

    The 125m model saves about 0.4 MiB per token under bfloat16 autocast. Activations go to host memory first, then to disk.
    """
    free, _ = torch.cuda.mem_get_info()
    seq = next((seq for seq in (65536, 32768, 16384, 8192) if seq << 20 < free), 4096)
    free_host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    host_budget = min(seq << 19, free_host // 2)
    # Equal bits in two runs need deterministic GPU kernels, with or without memo.
    model = ["--model", "125m", "--precision", "bf16-autocast", "--deterministic"]
    offload = ["--offload", "disk", "--host", str(host_budget)]
    return Setup(device="cuda", model=model, seq=seq, steps=8, offload=offload)


def train(setup: Setup, offload: list[str], metrics: Path) -> Outcome:
    """Runs `memo train` once; its output goes to this terminal."""
    command = [sys.executable, "-m", "memo.cli.main", "train", *setup.flags(), *offload, "--metrics", str(metrics)]
    begin = time.perf_counter()
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        raise SystemExit(code)
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return Outcome(steps=steps, duration_s=time.perf_counter() - begin)


def table(setup: Setup, without: Outcome, with_memo: Outcome, ratio: float) -> str:
    """Table that compares the two runs."""
    rows = [
        (f"loss of step {step}", repr(a), repr(b), "identical" if a == b else "DIFFERENT")
        for step, (a, b) in enumerate(zip(without.losses, with_memo.losses, strict=True), start=1)
    ]
    peak = "peak device memory" if setup.device == "cuda" else "peak resident memory"
    rows.append((peak, format_bytes(without.peak_bytes), format_bytes(with_memo.peak_bytes), f"{ratio:.0%}"))
    for tier in ("host", "disk"):
        moved = [format_bytes(run.total(f"{tier}_bytes")) for run in (without, with_memo)]
        rows.append((f"moved to {tier}", *moved, f"in {setup.steps} steps"))
    speeds = [f"{run.tokens_per_s:,.0f}" for run in (without, with_memo)]
    speed = with_memo.tokens_per_s / without.tokens_per_s
    noise = " (noise: memo makes nothing faster)" if speed > 1 else ""
    rows.append(("tokens per second", *speeds, f"{speed:.0%}{noise}"))
    rows.append(("whole run", *(format_duration(run.duration_s) for run in (without, with_memo)), ""))
    title = f"{' '.join(setup.model)} at {format_tokens(setup.seq)} tokens on {setup.device}"
    return f"{title}\n{text_table(('', 'without memo', 'with memo.offload', ''), rows, left=(0, 3))}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
