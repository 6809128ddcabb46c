"""Bandwidth of each kernel as a part of a device copy's, on a CUDA GPU; at least 85 % is asked for.

    python3 -m benchmarks.kernels

A kernel's bytes are those it must read and write, and the copy moves as many. Kernel and copy run in turn, round by round;
a ratio is a median over rounds. The result file is written after each kernel. Exits 3 without a GPU, 1 when a kernel is
slower than asked.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.machine import describe, gpu, no_gpu
from benchmarks.results import write_result
from memo.units import parse_tokens

if TYPE_CHECKING:
    import torch

ASKED = 0.85
ROUNDS = 15
WARM_UP = 3
SLEEP_CYCLES = 4_000_000  # some two milliseconds; a launch from Python takes a tenth of one
COUNT = 3 << 27
"""Values, 768 MiB in bfloat16: far beyond any GPU's cache."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel on fixed tensors."""

    name: str
    nbytes: int
    """Read and written."""
    work: Callable[[], Any]


def cases(device: torch.device, *, count: int = COUNT) -> Iterator[Case]:
    """Every public function of memo.kernels on some values in bfloat16."""
    import torch

    from memo.kernels import Codec, decode, encode

    values = torch.randn(count, device=device, dtype=torch.bfloat16)
    for codec in Codec:
        block = torch.empty(codec.nbytes(count), dtype=torch.uint8, device=device)

        def code(block: torch.Tensor = block, codec: Codec = codec) -> None:
            encode(values, block, codec)

        def values_of(block: torch.Tensor = block, codec: Codec = codec) -> None:
            decode(block, values, codec)

        nbytes = values.nbytes + block.numel()
        yield Case(name=f"encode, {codec.name.lower()}", nbytes=nbytes, work=code)
        yield Case(name=f"decode, {codec.name.lower()}", nbytes=nbytes, work=values_of)
    yield from _masks(values)


def _masks(like: torch.Tensor) -> Iterator[Case]:
    import torch

    from memo.kernels.masks import mask_nbytes, pack_mask, unpack_mask

    mask = torch.rand(like.shape, device=like.device) < 0.1
    bits = pack_mask(mask)
    nbytes = mask.numel() + mask_nbytes(mask.numel())
    yield Case(name="pack mask", nbytes=nbytes, work=lambda: pack_mask(mask))
    yield Case(name="unpack mask", nbytes=nbytes, work=lambda: unpack_mask(bits, mask))


def measure(case: Case, device: torch.device) -> dict[str, float]:
    """Median and least seconds of the kernel and of a copy of as many bytes, and the median of their ratios."""
    import torch

    source = torch.empty(case.nbytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    arms: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(source), "kernel": case.work}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(ROUNDS + WARM_UP):
        for name, work in arms.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(SLEEP_CYCLES)  # until the launch is issued: it is the device's time that is asked for
            begin.record()
            work()
            end.record()
            end.synchronize()
            if number >= WARM_UP:
                seconds[name].append(begin.elapsed_time(end) / 1e3)
    ratios = [copy / kernel for copy, kernel in zip(seconds["copy"], seconds["kernel"], strict=True)]
    return {
        "nbytes": case.nbytes,
        "kernel_median_s": statistics.median(seconds["kernel"]),
        "kernel_min_s": min(seconds["kernel"]),
        "copy_median_s": statistics.median(seconds["copy"]),
        "copy_min_s": min(seconds["copy"]),
        "of_copy": statistics.median(ratios),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels")
    parser.add_argument("--values", type=parse_tokens, default=COUNT, help=f"default {COUNT}")
    parser.add_argument("--asked", type=float, default=ASKED, help=f"share of a copy's bandwidth, default {ASKED}")
    args = parser.parse_args(arguments)
    found = gpu()
    if found is None:
        return no_gpu("kernels")
    import torch

    print(describe(found))
    device = torch.device("cuda")
    results: dict[str, dict[str, float]] = {}
    path = None
    print(f"{'kernel':14} {'GB/s':>7} {'copy GB/s':>10} {'of copy':>8}")
    for case in cases(device, count=args.values):
        row = results[case.name] = measure(case, device)
        rates = (row["nbytes"] / row[f"{arm}_median_s"] / 1e9 for arm in ("kernel", "copy"))
        slow = "  slower than asked" if row["of_copy"] < args.asked else ""
        print(f"{case.name:14} {next(rates):7.0f} {next(rates):10.0f} {row['of_copy']:8.1%}{slow}", flush=True)
        path = write_result("kernels", {"device": found, "asked": args.asked, "kernels": results})
    print(f"Wrote {path}")
    return 1 if any(row["of_copy"] < args.asked for row in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
