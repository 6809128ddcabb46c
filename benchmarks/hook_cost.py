"""What pack and unpack cost per saved tensor, in Python: the step of a GPT with and without memo, copies left out.

    python -m benchmarks.hook_cost

Every copy is answered at once by a stand-in tier, so the difference is the engine's own work: identity, the in-place
guard, groups, state changes. Both arms run alternately in one process; the median of the differences is divided by the
number of saved tensors.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.results import write_result
from memo.gpt.config import preset
from memo.gpt.model import GPT
from memo.manager import Manager
from memo.swap.cpu import CpuBackend
from memo.swap.engine import Engine
from memo.swap.layers import find_layers
from memo.trace.events import Lane
from memo.trace.events import Tier as TierName

if TYPE_CHECKING:
    from collections.abc import Callable

    from memo.swap.backend import Event

LAYERS = 32
ROUNDS = 60
BUDGET_US = 15.0


class Instant:
    """A copy that is over when it is issued."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def interval_ns(self) -> tuple[int, int] | None:
        return None

    def cancel(self) -> bool:
        return False


class KeepsTheSource:
    """A tier that remembers the source instead of copying it, and gives its bytes back for nothing."""

    name = TierName.HOST
    lane_out, lane_in = Lane.D2H, Lane.H2D
    budget: int | None = None
    used = peak = 0

    def __init__(self) -> None:
        self.tier = self
        self.instant = Instant()

    def claim(self, nbytes: int) -> KeepsTheSource:
        return self

    def leave(self, source: torch.Tensor, *, after: Event) -> Instant:
        return self.instant

    def enter(self, target: torch.Tensor, *, after: Event) -> Instant:
        return self.instant

    def release(self) -> None:
        return None

    def end_step(self) -> None:
        return None

    def close(self) -> None:
        return None


def step(model: GPT, ids: torch.Tensor, manager: Manager | None) -> int:
    """Nanoseconds of this thread's processor time in one forward and backward: other work on the machine is left out."""
    begin = time.thread_time_ns()
    if manager is None:
        loss = model(ids, ids)
    else:
        with manager:
            loss = model(ids, ids)
    loss.backward()
    return time.thread_time_ns() - begin


def saved_tensors(model: GPT, ids: torch.Tensor) -> int:
    """How many tensors autograd saves in one step."""
    count = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, ids)
    return count


def measure(model: GPT, ids: torch.Tensor, make: Callable[[], Manager]) -> tuple[float, float, float]:
    """(plain seconds, managed seconds, microseconds per saved tensor), medians over alternating rounds."""
    manager = make()
    plain, managed = [], []
    for number in range(ROUNDS + 5):
        a, b = step(model, ids, None), step(model, ids, manager)
        if number >= 5:
            plain.append(a)
            managed.append(b)
    difference = statistics.median(b - a for a, b in zip(plain, managed, strict=True))
    return (
        statistics.median(plain) / 1e9,
        statistics.median(managed) / 1e9,
        difference / 1e3 / saved_tensors(model, ids),
    )


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = preset("tiny", layers=LAYERS, hidden=64, heads=2, vocab_size=64, max_seq=16)
    model = GPT(config)
    ids = torch.randint(0, 64, (1, 16))

    def make() -> Manager:
        backend = CpuBackend()
        backend.empty = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)  # type: ignore[method-assign]
        engine = Engine(backend, [KeepsTheSource()], min_bytes=1)
        return Manager(model, find_layers(model), engine)

    plain, managed, microseconds = measure(model, ids, make)
    count = saved_tensors(model, ids)
    print(f"{LAYERS} layers, {count} saved tensors a step, parameters among them, every one of them looked at")
    print(f"step without memo {plain * 1e3:7.2f} ms")
    print(f"step with memo    {managed * 1e3:7.2f} ms")
    print(f"pack + unpack     {microseconds:7.2f} us per saved tensor (budget {BUDGET_US:.0f} us)")
    path = write_result(
        "hook-cost",
        {
            "torch": torch.__version__,
            "layers": LAYERS,
            "saved_tensors": count,
            "plain_step_s": plain,
            "managed_step_s": managed,
            "us_per_saved_tensor": microseconds,
        },
    )
    print(f"Wrote {path}")


if __name__ == "__main__":
    main()
