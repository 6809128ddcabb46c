"""Host cost of the planned allocator: nanoseconds for a malloc and its free, in replay.

Steps of the GPT, recorded without a GPU, are played over and over by a loop in C++ on the compiled allocator, a million
pairs in each round; the C library's malloc and free run the same calls in the same rounds, for comparison. The device is
the tests' stand-in: in replay no call reaches it.

    python -m benchmarks.arena_cost [--rounds N] [--no-write]
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.results import write_result
from memo.allocator.native import FREE, MALLOC, Native
from memo.allocator.plan_from_events import layout_of, problem_of, recording_of
from memo.allocator.trace import AllocationTrace
from memo.gpt.config import preset
from memo.mip.address.solver import Method, solve
from memo.mip.compile_cpp import build
from memo.record.recording import record_step
from memo.record.step import gpt_step

ROOT = Path(__file__).resolve().parent
PAIRS = 1_000_000
STEPS = {
    "12 layers": {"layers": 12},
    "32 layers": {"layers": 32},
    "32 layers, checkpointed": {"layers": 32, "checkpointed": True},
    "32 layers, offloaded": {"layers": 32, "alpha": 0.5},
}


class Loop:
    """The calls of one step, as C++ reads them."""

    def __init__(self, trace: AllocationTrace) -> None:
        number = {allocation.id: i for i, allocation in enumerate(trace.allocations)}
        calls = [(number[a.id], -1 if freed else a.size) for a, freed in trace.events()]
        freed = {block for block, nbytes in calls if nbytes < 0}
        # The gradients go at the step's end, too, so that every request is one for the arena.
        calls += [(block, -1) for block in range(len(number)) if block not in freed]
        self.n_pairs, self._n = len(number), len(calls)
        self._blocks = (ctypes.c_int64 * self._n)(*(block for block, _ in calls))
        self._nbytes = (ctypes.c_int64 * self._n)(*(nbytes for _, nbytes in calls))
        self._run = ctypes.CDLL(str(build(ROOT / "arena_cost.cpp"))).memo_arena_cost
        self._run.restype = ctypes.c_int64

    def run(self, functions: tuple[Any, Any, Any, Any], *, plan: int, steps: int) -> float:
        """Nanoseconds a pair. `functions`: malloc, free, begin_step, end_step; `plan` -1 opens no steps."""
        took = self._run(
            *(ctypes.cast(function, ctypes.c_void_p) for function in functions),
            ctypes.c_int64(plan),
            ctypes.c_int64(steps),
            ctypes.c_int64(self._n),
            self._blocks,
            self._nbytes,
            (ctypes.c_int64 * 64)(),  # the last step's summary, which the counters have, too
        )
        return float(took) / steps / self.n_pairs


def measure(native: Native, trace: AllocationTrace, rounds: int) -> dict[str, Any]:
    """One kind of step: both arms in turn, round by round."""
    loop = Loop(trace)
    ours = tuple(getattr(native.arena, name) for name in (MALLOC, FREE, "memo_arena_begin_step", "memo_arena_end_step"))
    theirs = tuple(
        getattr(ctypes.CDLL(str(build(ROOT / "arena_cost.cpp"))), f"plain_{name}") for name in ("malloc", "free")
    )
    loop.run(ours, plan=0, steps=1)
    recording = recording_of(native.events())
    layout = layout_of(recording, solve(problem_of(recording), method=Method.SEARCH, gap=0.005))
    sizes, streams = [request.nbytes for request in recording], [request.stream for request in recording]
    plan = native.add_plan(sizes, layout.offsets, streams, arena_nbytes=layout.nbytes)
    steps = -(-PAIRS // loop.n_pairs)
    before = native.counters(0)
    loop.run(ours, plan=plan, steps=1)
    times: dict[str, list[float]] = {"replay": [], "C library": []}
    for _ in range(rounds):
        times["replay"].append(loop.run(ours, plan=plan, steps=steps))
        times["C library"].append(loop.run((*theirs, *ours[2:]), plan=-1, steps=steps))
    after = native.counters(0)
    native.forget_plan(plan)
    return {
        "pairs_a_step": loop.n_pairs,
        "pairs_a_round": steps * loop.n_pairs,
        "outside_a_step": (after.outside - before.outside) // (rounds * steps + 1),
        "fallbacks": after.fallbacks - before.fallbacks,
        "arena_nbytes": layout.nbytes,
        "lower_bound_nbytes": layout.lower_bound_nbytes,
        "ns_a_pair": {
            name: {"min": round(min(each), 1), "median": round(statistics.median(each), 1)}
            for name, each in times.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.arena_cost")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="default 9")
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT.parent / "tests" / "support"))
    from standin_runtime import open_standin

    cases = {}
    for native, _ in open_standin():
        for name, options in STEPS.items():
            config = preset("125m", layers=int(options["layers"]), max_seq=8192)
            build_step = functools.partial(gpt_step, config, batch=1, tokens=8192)
            rest = {key: value for key, value in options.items() if key != "layers"}
            trace = record_step(build_step, **rest).trace  # type: ignore[arg-type]
            cases[name] = case = measure(native, trace, arguments.rounds)
            figures = ", ".join(
                f"{arm} {ns['min']:.0f} / {ns['median']:.0f} ns" for arm, ns in case["ns_a_pair"].items()
            )
            print(f"{name}: {case['pairs_a_step']} pairs a step; min / median a pair: {figures}", flush=True)
    if not arguments.no_write:
        print(f"Wrote {write_result('arena-cost', {'rounds': arguments.rounds, 'cases': cases})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
