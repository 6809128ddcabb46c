"""Generates the buffers of a transformer's step whose lifetimes are irregular, for measuring the address planner.

Grouped-query attention gives the tensors of a layer many sizes; copies to host drain at their own pace, so a source is
freed at a moment that has nothing to do with the layer that made it, and reloads arrive early by a random lead; several
microbatches run in 1F1B order, so lives of one overlap those of the next without nesting. Everything follows from the
arguments and the seed.

    python -m benchmarks.irregular_buffers --layers 32 --microbatches 4 --out trace.csv
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import random
from pathlib import Path

KIB = 1 << 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The imagined model and run."""

    layers: int = 32
    microbatches: int = 4
    in_flight: int = 2
    """Forwards run ahead of the first backward (1F1B warm-up)."""
    tokens: int = 4096
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    swapped: float = 0.6
    """Share of a layer's saved tensors that are copied out and back."""
    drain_bytes_per_tick: int = 24 << 20
    seed: int = 0


def irregular_buffers(shape: Shape) -> list[tuple[int, int, int]]:
    """(lower, upper, nbytes) of every buffer, by lower."""
    return sorted(_Step(shape).run())


class _Step:
    """A clock of operations and a copy lane of its own pace; buffers are kept as they die."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._random = random.Random(shape.seed)
        self._now = 0
        self._lane = 0.0
        self.buffers: list[tuple[int, int, int]] = []
        self._saved: dict[tuple[int, int], list[tuple[int, int, bool]]] = {}

    def run(self) -> list[tuple[int, int, int]]:
        shape = self._shape
        forward = backward = 0
        while backward < shape.microbatches:
            if forward < shape.microbatches and forward - backward < shape.in_flight:
                for layer in range(shape.layers):
                    self._forward(forward, layer)
                forward += 1
            else:
                for layer in reversed(range(shape.layers)):
                    self._backward(backward, layer)
                backward += 1
        return self.buffers

    def _sizes(self) -> list[int]:
        """Input, norm, q, k, v, attention out, its statistics, norm, gate, up, product, in bf16 but the statistics."""
        shape = self._shape
        h = 2 * shape.tokens * shape.hidden
        kv = h * shape.kv_heads // shape.heads
        ffn = 2 * shape.tokens * shape.ffn
        stats = 4 * shape.tokens
        return [h, stats, h, h, kv, kv, h, stats * shape.heads, h, stats, h, ffn, ffn, ffn]

    def _forward(self, microbatch: int, layer: int) -> None:
        kept = []
        for nbytes in self._sizes():
            start = self._tick()
            if self._random.random() < 0.35:
                self._temporary(nbytes)
            if nbytes > 512 * KIB and self._random.random() < self._shape.swapped:
                end = self._drained(start, nbytes)
                self._die(start, end, nbytes)
                kept.append((end, nbytes, True))
            else:
                kept.append((start, nbytes, False))
        self._saved[microbatch, layer] = kept

    def _backward(self, microbatch: int, layer: int) -> None:
        gradient = self._tick()
        for start, nbytes, swapped in reversed(self._saved.pop((microbatch, layer))):
            if swapped:
                start = max(start + 1, self._now - self._random.randint(2, 30))
            if self._random.random() < 0.5:
                self._temporary(nbytes)
            self._die(start, max(self._tick(), start + 1), nbytes)
            if self._random.random() < 0.3:
                self._die(gradient, self._tick(), nbytes)
                gradient = self._now - 1
        self._die(gradient, self._tick(), self._sizes()[0])

    def _drained(self, start: int, nbytes: int) -> int:
        pace = self._shape.drain_bytes_per_tick * self._random.uniform(0.6, 1.4)
        self._lane = max(self._lane, float(start)) + nbytes / pace
        return max(start + 1, int(self._lane))

    def _temporary(self, nbytes: int) -> None:
        start = self._now
        size = int(nbytes * self._random.choice((0.25, 0.5, 1, 1, 2))) // 512 * 512 + 512
        self._die(start, start + self._random.randint(1, 4), size)

    def _die(self, start: int, end: int, nbytes: int) -> None:
        self.buffers.append((start, end, nbytes))

    def _tick(self) -> int:
        self._now += 1
        return self._now - 1


def write(path: Path, buffers: list[tuple[int, int, int]]) -> None:
    """The buffers in the CSV format that `memo pack` reads."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "lower", "upper", "size"])
        writer.writerows((index, *buffer) for index, buffer in enumerate(buffers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in dataclasses.fields(Shape):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    parser.add_argument("--out", type=Path, required=True)
    args = vars(parser.parse_args())
    out = args.pop("out")
    buffers = irregular_buffers(Shape(**args))
    write(out, buffers)
    print(f"{out}: {len(buffers):,} buffers")


if __name__ == "__main__":
    main()
