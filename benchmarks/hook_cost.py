"""Python cost of pack and unpack per saved tensor (R12): the step of a GPT with and without memo, copies left out.

    python -m benchmarks.hook_cost

Every copy is answered at once by a stand-in tier, so the difference is the engine's own work: identity, the in-place
guard, groups, state changes, release. Arms run alternately in one process: no hooks, hooks that do nothing, memo. The
stand-in's reloads, which a machine's copy engine would do, are timed one by one and taken off. The median difference in
this thread's processor time is divided by the number of saved tensors, parameters among them. Beside it stand the mean, with
the garbage collections that most steps are spared, and the tenth percentiles' difference, for a machine that is not quiet.

Two cases: norm and softmax statistics below `min_bytes`, as they are with the default threshold at 8k tokens; and every
storage moved, however small. What doing nothing costs tells how fast the machine was at the time.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.results import write_result
from memo.events import Lane, TierName as TierName
from memo.gpt.config import preset
from memo.gpt.model.model import GPT
from memo.manager.manager import Manager
from memo.swap.backends.cpu import CpuBackend
from memo.swap.engine.engine import Engine
from memo.swap.layers import find_layers
from memo.swap.tiers import Extent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memo.swap.backends.protocol import Event

LAYERS = 32
ROUNDS = 60
BUDGET_US = 25.0


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
    """A tier whose copies are over when they are issued: out costs nothing, back is one memmove of a few KiB.

    The bytes must be the true ones: backward over uninitialised memory meets denormal numbers and takes twice as long.
    """

    name = TierName.HOST
    lane_out, lane_in = Lane.D2H, Lane.H2D
    budget: int | None = None
    used = peak = 0

    def __init__(self) -> None:
        self.instant = Instant()
        self.reloading_ns = 0
        """Time spent in reloads since this was last set to zero."""

    def reserve(self, nbytes: int) -> Extent:
        return Extent(self, nbytes)

    def write(self, extent: Extent, source: torch.Tensor, *, after: Event) -> Instant:
        extent.room = source
        return self.instant

    def read(self, extent: Extent, target: torch.Tensor, *, after: Event) -> Instant:
        begin = time.perf_counter_ns()
        ctypes.memmove(target.data_ptr(), extent.room.data_ptr(), target.numel())
        self.reloading_ns += time.perf_counter_ns() - begin
        return self.instant

    def release(self, extent: Extent) -> None:
        return None

    def end_step(self) -> None:
        return None

    def close(self) -> None:
        return None


def step(model: GPT, ids: torch.Tensor, manager: Any) -> int:
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


class Nothing:
    """Hooks that keep a detached tensor: the least that saved-tensor hooks can do."""

    def __enter__(self) -> None:
        self._hooks = saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
        self._hooks.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(None, None, None)


def quiet(times: list[int]) -> float:
    """The tenth percentile."""
    return statistics.quantiles(times, n=10)[0]


def measure(model: GPT, ids: torch.Tensor, min_bytes: int) -> dict[str, float]:
    """Microseconds per saved tensor over alternating rounds, of hooks that do nothing and of memo."""
    backend = CpuBackend()
    backend.empty = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)  # type: ignore[method-assign]
    tier = KeepsTheSource()
    memo = Manager(model, find_layers(model), Engine(backend, [tier], min_bytes=min_bytes))
    arms: dict[str, Any] = {"plain": None, "nothing": Nothing(), "memo": memo}
    times: dict[str, list[int]] = {name: [] for name in (*arms, "reloads")}
    for number in range(ROUNDS + 5):
        for name, context in arms.items():
            tier.reloading_ns = 0
            took = step(model, ids, context)
            if number >= 5:
                times[name].append(took)
                if context is memo:
                    times["reloads"].append(tier.reloading_ns)
    count = saved_tensors(model, ids)

    def per_tensor_us(rounds: Iterable[int], middle: Callable[[Iterable[int]], float] = statistics.median) -> float:
        return middle(rounds) / 1e3 / count

    above = {name: [b - a for a, b in zip(times["plain"], times[name], strict=True)] for name in arms}
    memo_alone = [total - reloads for total, reloads in zip(times["memo"], times["reloads"], strict=True)]
    own = [total - reloads for total, reloads in zip(above["memo"], times["reloads"], strict=True)]
    return {
        "plain_step_ms": statistics.median(times["plain"]) / 1e6,
        "nothing_us": per_tensor_us(above["nothing"]),
        "memo_with_reloads_us": per_tensor_us(above["memo"]),
        "memo_with_reloads_mean_us": per_tensor_us(above["memo"], statistics.mean),
        "memo_us": per_tensor_us(own),
        "memo_tenth_percentile_us": (quiet(memo_alone) - quiet(times["plain"])) / 1e3 / count,
        "moved_storages": sum(memo.stats.uses.values()) / (ROUNDS + 5),
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(preset("tiny", layers=LAYERS, hidden=64, heads=2, vocab_size=64, max_seq=16))
    ids = torch.randint(0, 64, (1, 16))
    count = saved_tensors(model, ids)
    print(f"{LAYERS} layers, {count} saved tensors a step, parameters among them")
    cases = {"statistics stay": measure(model, ids, 1024), "everything moves": measure(model, ids, 1)}
    for name, case in cases.items():
        print(
            f"{name:17} {case['moved_storages']:4.0f} storages moved: {case['memo_us']:6.2f} us per saved tensor "
            f"(budget {BUDGET_US:.0f}; with the stand-in's reloads {case['memo_with_reloads_us']:.2f}, "
            f"mean {case['memo_with_reloads_mean_us']:.2f}; tenth percentile {case['memo_tenth_percentile_us']:.2f}; "
            f"hooks that do nothing {case['nothing_us']:.2f}; step without hooks {case['plain_step_ms']:.1f} ms)"
        )
    result = {"torch": torch.__version__, "layers": LAYERS, "saved_tensors": count, "cases": cases}
    print(f"Wrote {write_result('hook-cost', result)}")


if __name__ == "__main__":
    main()
