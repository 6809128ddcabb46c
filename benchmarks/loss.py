"""The loss without logits, memo's and torch's own F.linear_cross_entropy: errors against float64, memory, time.

    python -m benchmarks.loss [--tokens 2k,8k,32k] [--vocab 8192] [--hidden 256] [--rounds 3]

Every way gets the same inputs, in float32 and in bfloat16, of which most targets can be told, as in training. Errors are
relative, of the value and of both gradients (Frobenius), against the plain loss of the same inputs in float64. Memory is
the resident set at its peak above what it was before, results included; time is the least of interleaved rounds, forward
and backward, told as a multiple of memo's. Needs torch 2.13.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.results import write_result
from memo.autoplan.device_budget import device_budget_of
from memo.loss.chunked_cross_entropy import chunked_linear_cross_entropy
from memo.loss.chunks import chunk_tokens
from memo.machine.process_memory import return_freed_memory
from memo.units import format_bytes, format_tokens, parse_tokens

SMALL_CHUNK = 64
"""A million tokens at a vocabulary of 128,000 are 4,096 chunks of the default size; these make as many of fewer tokens."""
REFERENCE_CHUNK = 1024

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ways(vocab: int) -> dict[str, Loss]:
    """The ways to compute it, by name; the first is what others are compared with."""
    own = chunk_tokens(vocab, trained=True)

    def ours(chunk: int) -> Loss:
        return lambda x, weight, targets: chunked_linear_cross_entropy(x, weight, targets, chunk=chunk)

    def torchs_mean(options: Any) -> Loss:
        return lambda x, weight, targets: F.linear_cross_entropy(x, weight, targets, options=options)

    def torchs_none(options: Any) -> Loss:
        return lambda x, weight, targets: F.linear_cross_entropy(
            x, weight, targets, reduction="none", options=options
        ).mean(dtype=torch.float32)  # fmt: skip

    def rows(chunk: int) -> Any:
        return torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, chunking_method=None)

    return {
        f"memo, chunks of {own}": ours(own),
        f"memo, chunks of {SMALL_CHUNK}": ours(SMALL_CHUNK),
        "torch, mean, not chunked": torchs_mean(None),
        "torch, mean, its own chunks": torchs_mean(torch.nn.LinearCrossEntropyOptions()),
        f"torch, mean, chunks of {own}": torchs_mean(rows(own)),
        f"torch, mean, chunks of {SMALL_CHUNK}": torchs_mean(rows(SMALL_CHUNK)),
        f"torch, none, chunks of {own}": torchs_none(rows(own)),
        f"torch, none, chunks of {SMALL_CHUNK}": torchs_none(rows(SMALL_CHUNK)),
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One set of inputs, and what is exactly true of it."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    value: float
    gradients: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, tokens: int, vocab: int, width: int, dtype: torch.dtype) -> Case:
        """Three of four targets are drawn by the model itself, so that the loss is that of one which has learned."""
        generator = torch.Generator().manual_seed(tokens)
        weight = torch.randn(vocab, width, generator=generator).to(dtype)
        targets = torch.randint(vocab, (tokens,), generator=generator)
        noise = torch.randn(tokens, width, generator=generator)
        known = (torch.rand(tokens, 1, generator=generator) < 0.75) * weight[targets].float() * (6.0 / width)
        hidden = (noise * 2.0 * width**-0.5 + known).to(dtype)
        value, gradients = exact(hidden, weight, targets)
        return cls(hidden=hidden.requires_grad_(), weight=weight.requires_grad_(), targets=targets, value=value,
                   gradients=gradients)  # fmt: skip


def exact(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> tuple[float, tuple[torch.Tensor, torch.Tensor]]:
    """The plain loss and its gradients in float64, some tokens after others, since all logits would not fit."""
    wide = weight.double().requires_grad_()
    total, parts = 0.0, []
    for x, target in zip(hidden.split(REFERENCE_CHUNK), targets.split(REFERENCE_CHUNK), strict=True):
        x = x.double().requires_grad_()
        loss = F.cross_entropy(F.linear(x, wide), target, reduction="sum") / len(targets)
        loss.backward()
        total += float(loss.detach())
        assert x.grad is not None
        parts.append(x.grad)
    assert wide.grad is not None
    return total, (torch.cat(parts), wide.grad)


def measure(case: Case, loss: Loss) -> dict[str, float]:
    """One forward and backward: seconds, peak bytes above what was there before, errors."""
    memory = device_budget_of(case.hidden.device, None)
    memory.restart()
    before, begin = memory.peak_bytes(), time.perf_counter()
    value = loss(case.hidden, case.weight, case.targets)
    gradients = torch.autograd.grad(value, (case.hidden, case.weight))
    seconds, peak = time.perf_counter() - begin, memory.peak_bytes() - before
    hidden_error, weight_error = map(relative_error, gradients, case.gradients)
    return {
        "seconds": seconds,
        "peak_bytes": peak,
        "value_error": abs(float(value.detach()) - case.value) / case.value,
        "hidden_gradient_error": hidden_error,
        "weight_gradient_error": weight_error,
    }


def relative_error(got: torch.Tensor, true: torch.Tensor) -> float:
    """Of all elements together."""
    return float((got.double() - true).norm() / true.norm())


def rounds(case: Case, named: dict[str, Loss], count: int) -> dict[str, dict[str, float]]:
    """Each way's figures: the least time and the largest peak of interleaved rounds."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in named}
    for _ in range(count):
        for name, loss in named.items():
            rows[name].append(measure(case, loss))
    seconds = {name: min(row["seconds"] for row in seen) for name, seen in rows.items()}
    peaks = {name: max(row["peak_bytes"] for row in seen) for name, seen in rows.items()}
    memos = next(iter(seconds.values()))
    return {
        name: {**seen[0], "seconds": seconds[name], "times_memos": seconds[name] / memos, "peak_bytes": peaks[name]}
        for name, seen in rows.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="2k,8k,32k")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not hasattr(F, "linear_cross_entropy"):
        print(f"torch {torch.__version__} has no F.linear_cross_entropy to compare with", file=sys.stderr)
        return 1
    return_freed_memory()
    named = ways(args.vocab)
    cases = []
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in map(parse_tokens, args.tokens.split(",")):
            case = Case.of(tokens, args.vocab, args.hidden, dtype)
            figures = rounds(case, named, args.rounds)
            kind = str(dtype).removeprefix("torch.")
            cases.append({"dtype": kind, "tokens": tokens, "loss": case.value, "ways": figures})
            print(f"{kind}, {format_tokens(tokens)} tokens, loss {case.value:.4f}")
            for name, row in figures.items():
                print(told(name, row), flush=True)
    body = {"vocab": args.vocab, "hidden": args.hidden, "rounds": args.rounds, "cases": cases}
    versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    print(f"Wrote {write_result('loss', {**versions, **body, 'load_average': os.getloadavg()})}")
    return 0


def told(name: str, row: dict[str, float]) -> str:
    return (
        f"  {name:30} value {row['value_error']:.1e}  d hidden {row['hidden_gradient_error']:.1e}  "
        f"d weight {row['weight_gradient_error']:.1e}  peak {format_bytes(int(row['peak_bytes'])):>9}  "
        f"time {row['times_memos']:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
