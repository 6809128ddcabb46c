"""`make gpu-bench ARMS=...`: step time, peak memory and link use of each way to fit a step, side by side in one run.

    python3 -m benchmarks.gpu_bench short      350m at 8k tokens: what gpu-check prints
    python3 -m benchmarks.gpu_bench swap       350m and 1.3b at lengths that still fit without offload
    python3 -m benchmarks.gpu_bench plan       the automatic plan, predicted and measured, beside fixed ways (gpu_plans)
    python3 -m benchmarks.gpu_bench alpha      350m at 128k tokens over alpha, table and plot (gpu_plans)
    python3 -m benchmarks.gpu_bench length     the longest sequence of each way under --cap (benchmarks.longest)
    python3 -m benchmarks.gpu_bench 1m         350m at a million tokens, by plan (benchmarks.gpu_million)
    python3 -m benchmarks.gpu_bench hf         Llama-3-8B with LoRA, Qwen3-4B, Qwen3-0.6B beside the best flags (gpu_hf)
    python3 -m benchmarks.gpu_bench allocator  the planned allocator beside PyTorch's (benchmarks.gpu_allocator)

Without an arm, all of them. Options replace an arm's own model, lengths and limits:

    make gpu-bench ARMS="1m --host 88GiB --layers 8,6,4 --minutes 5"
    make gpu-bench ARMS="plan --seq 64k --rounds 3 --host 64GiB"
    make gpu-bench ARMS="plan --seq 64k --ways 'keep everything; memo'"
    make gpu-bench ARMS="hf --model llama-3-8b+lora16 --seq 32k --seq 64k --rounds 3"
    make gpu-bench ARMS="length --cap 16GiB --minutes 6"

Each arm writes a result file, anew after each row. Exits 3 without a GPU; with --device cpu the arms short, swap, plan,
alpha and hf run without one, for testing them, and write nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.machine import DETERMINISTIC, describe, gpu, no_gpu
from memo.units import parse_bytes, parse_tokens

if TYPE_CHECKING:
    from benchmarks.peers.ways import Way


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model at one length."""

    model: str
    seq: int
    rounds: int


CASES: dict[str, tuple[Case, ...]] = {
    "short": (Case(model="350m", seq=8192, rounds=3),),
    "swap": (Case(model="350m", seq=32768, rounds=4), Case(model="1.3b", seq=8192, rounds=4)),
    "plan": tuple(Case(model="350m", seq=kilo << 10, rounds=2) for kilo in (8, 32, 128, 256)),
    "alpha": (Case(model="350m", seq=128 << 10, rounds=2),),
    "hf": tuple(
        Case(model=model, seq=kilo << 10, rounds=2)
        for model, kilo in (
            ("llama-3-8b+lora16", 32),
            ("llama-3-8b+lora16", 64),
            ("qwen3-4b", 64),
            ("qwen3-0.6b", 32),
            ("llama-3-8b+lora16", 16),
            ("qwen3-4b", 32),
            ("llama-3-8b+lora16", 128),
            ("qwen3-4b", 16),
            ("qwen3-4b", 128),
            ("qwen3-0.6b", 16),
            ("qwen3-0.6b", 64),
            ("qwen3-0.6b", 128),
        )
    ),
}
NEED_GPU = ("length", "1m", "allocator")
ARMS = ("allocator", *CASES, "length", "1m")
"""In this order: an allocator is chosen once in a process, so that its arm starts processes of its own before all else."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options that replace an arm's own settings; None where not given."""

    device: str
    model: str | None
    seq: list[int] | None
    layers: list[int] | None
    mlp_tiles: int | None
    rounds: int | None
    host: int | None
    minutes: float
    gpu: str | None
    cap: int
    ways: list[str] | None
    resume: Path | None
    disk: Path | None
    no_bits: bool
    small: bool
    trl: Path | None

    def cases(self, arm: str) -> tuple[Case, ...]:
        """The arm's models and lengths, with these options in place of its own."""
        own = CASES[arm]
        lengths = self.seq or [case.seq for case in own]
        if self.seq is not None or self.model is not None:
            first = own[0]
            own = tuple(Case(model=self.model or first.model, seq=seq, rounds=first.rounds) for seq in lengths)
        return own if self.rounds is None else tuple(dataclasses.replace(case, rounds=self.rounds) for case in own)

    def chosen(self, ways: Sequence[Way]) -> list[Way]:
        """Those of `ways` that are asked for; all where none is named. Exits 2 for a name that none has."""
        asked = self.ways or [""]
        if lacking := [name for name in asked if not any(name in way.name for way in ways)]:
            known = ", ".join(way.name for way in ways)
            print(f"gpu-bench: no way is called {lacking[0]!r}; there are {known}", file=sys.stderr)
            sys.exit(2)
        return [way for way in ways if any(name in way.name for name in asked)]

    def host_of(self, default: str) -> str:
        """memo's host budget; `default` where none is given."""
        return default if self.host is None else str(self.host)


def parsed(arguments: list[str]) -> tuple[list[str], Options]:
    """Arms and options, in any order. Exits 2 for what cannot be meant."""
    parser = argparse.ArgumentParser(
        prog="gpu-bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("arms", nargs="*", metavar="ARM", help=f"all, or some of {', '.join(ARMS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model")
    parser.add_argument("--seq", action="append", type=parse_tokens, help="may be given several times")
    parser.add_argument(
        "--layers", type=_numbers, help="instead of the model's own; for 1m depths to choose from, as 8,6,4"
    )
    parser.add_argument("--mlp-tiles", type=int, help="tiles of every way's MLPs; 1m takes its plan's (default 1)")
    parser.add_argument("--rounds", type=int, help="measured steps of each way")
    parser.add_argument("--host", type=parse_bytes, help="memo's budget of host memory")
    parser.add_argument(
        "--minutes", type=float, default=7.0, help="for the measured steps of 1m, or for length (default 7)"
    )
    parser.add_argument("--gpu", help="preset of rates for the plan of 1m (default: by name)")
    parser.add_argument("--cap", type=parse_bytes, default=16 << 30, help="device memory for length (default 16GiB)")
    parser.add_argument(
        "--ways",
        type=lambda text: [name for part in text.split(";") if (name := part.strip())],
        help='of short, swap, plan, alpha and hf those with such a name alone, as "keep everything; memo"',
    )
    parser.add_argument("--resume", type=Path, metavar="FILE", help="of hf: a result file whose rows do not run again")
    parser.add_argument(
        "--disk", type=Path, metavar="DIR", help="of hf: adds memo at alpha 0 with all that moves on disk"
    )
    parser.add_argument("--no-bits", action="store_true", help="of hf: without the step whose gradients are compared")
    parser.add_argument("--small", action="store_true", help="of hf: the models with few channels, for testing")
    parser.add_argument(
        "--trl", type=Path, help="TRL's activation_offloading.py (default: in .gpu, or an installed trl)"
    )
    args = parser.parse_intermixed_args(arguments)
    given = vars(args)
    arms = given.pop("arms")
    unknown = [arm for arm in arms if arm not in (*ARMS, "all")]
    if unknown:
        parser.error(f"unknown arm {unknown[0]!r}; one of {', '.join(ARMS)}")
    return [arm for arm in ARMS if not arms or "all" in arms or arm in arms], Options(**given)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main(arguments: list[str]) -> int:
    arms, options = parsed(arguments)
    os.environ.update(DETERMINISTIC)
    facts = {"device": "cpu"} if options.device == "cpu" else gpu()
    if facts is None:
        return no_gpu("gpu-bench")
    if options.device == "cuda":
        print(describe(facts), flush=True)
    else:
        refused = [arm for arm in arms if arm in NEED_GPU]
        if refused:
            print(f"gpu-bench: {', '.join(refused)}: only on a GPU", file=sys.stderr)
        arms = [arm for arm in arms if arm not in NEED_GPU]
    from benchmarks.arms import Bench  # needs torch, without which there was no GPU either

    bench = Bench(options, facts)
    succeeded = [bench.run(arm) for arm in arms]
    return 0 if succeeded and all(succeeded) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
