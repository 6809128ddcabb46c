"""Worth of each part of memo: each switched off in turn, on the same work.

    make bench ARMS=parts
    python -m benchmarks.parts [--rounds 5] [--parts planned,engine,addresses,tiles]

planned     the thirty problems of benchmarks.solver, step time simulated, over the plan with everything on. Off are: the
            middle level (SAVE_MATMULS), tokens at all levels (swap alone), links (recompute alone), plans of single layers
            (one setting for all layers but the last, the best of a grid), the disk
engine      a stack of layers on the CPU engine with paced links, everything moved: step time with the first reload not
            issued before backward, and with no reload before backward reaches its layer; rounds in turn. And the share of
            reads that forwarding answers from sources still on the device, which would be reloads without it (not timed)
addresses   recorded steps: memory that each allocator reserves over the bytes that are live at the fullest moment
tiles       least device memory that has a plan, and the step there, with the MLP in eight tiles over one

The loss without logits has a benchmark of its own, own_loss.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from benchmarks.machine import no_solver
from benchmarks.plan_accuracy import LAYERS, Bench, Case
from benchmarks.results import quartiles, write_result
from benchmarks.solver.compared import compared
from benchmarks.solver.problems import HUGE, MODELS, TENSOR_PARALLEL, derived, least_bytes, problems, with_budget
from benchmarks.solver.rules import best_of, lp, placed
from memo.allocator.caching_model import Segments, simulate_caching
from memo.gpt.config import preset
from memo.mip.activation.plan import ActivationProblem, Budgets, LayerPlan
from memo.mip.address.solver import solve
from memo.mip.inputs.profile import ALL, ATTENTION, MATMULS, LayerProfile
from memo.record import record_step
from memo.record.step import gpt_step
from memo.swap.engine import h2d
from memo.swap.levels import Level

NO_DISK = "no disk"
"""Asked of problems that have one."""
KINDS = ("planned", "engine", "addresses", "tiles")
GRID = 8
"""Parts of the grid of one setting for all layers."""


def _with_layers(problem: ActivationProblem, change: Callable[[LayerProfile], LayerProfile]) -> ActivationProblem:
    profile = problem.profile
    classes = tuple(change(known) for known in profile.classes)
    return dataclasses.replace(problem, profile=dataclasses.replace(profile, classes=classes))


def _without(problem: ActivationProblem, *names: str) -> ActivationProblem:
    def change(layer: LayerProfile) -> LayerProfile:
        return dataclasses.replace(layer, points=tuple(one for one in layer.points if one.name not in names))

    return _with_layers(problem, change)


def _with_budgets(problem: ActivationProblem, **changes: int) -> ActivationProblem:
    return dataclasses.replace(problem, budgets=dataclasses.replace(problem.budgets, **changes))


def _solved(problem: ActivationProblem) -> float | None:
    found = lp(problem)
    return None if found is None else found.step_s


def one_setting(problem: ActivationProblem) -> float | None:
    """The best of a grid of one setting for all layers but the last, which is kept."""
    layers = problem.profile.layer_profiles()
    shares = [part / GRID for part in range(GRID + 1)]

    def candidates() -> Iterator[Sequence[LayerPlan]]:
        for point, kept in itertools.product((ALL, MATMULS, ATTENTION), shares):
            one = LayerPlan(point=point, kept=kept, host=1 - kept)
            yield placed(problem, layers, [*[one] * (len(layers) - 1), LayerPlan()])

    found = best_of(problem, candidates())
    return None if found is None else found.step_s


PLANNED: dict[str, Callable[[ActivationProblem], float | None]] = {
    "everything on": _solved,
    "no middle level": lambda problem: _solved(_without(problem, MATMULS)),
    "swap alone": lambda problem: _solved(_without(problem, MATMULS, ATTENTION)),
    "recompute alone": lambda problem: _solved(_with_budgets(problem, host_bytes=0, disk_bytes=0)),
    "one setting for all layers": one_setting,
    NO_DISK: lambda problem: _solved(_with_budgets(problem, disk_bytes=0)),
}


def planned() -> list[dict[str, Any]]:
    """Of each problem the step's seconds with each part off; None where no plan is left."""
    rows = []
    for named in problems():
        parts = [part for part in PLANNED if part != NO_DISK or named.problem.budgets.disk_bytes]
        rows.append({"problem": named.name, "step_s": {part: PLANNED[part](named.problem) for part in parts}})
    return rows


ENGINE: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "everything on": contextlib.nullcontext,
    "no reload before backward": lambda: mock.patch.object(h2d.Reload, "prefetch_first"),
    "no reload ahead of its layer": lambda: mock.patch.object(h2d, "_away_in_tiers", return_value=[]),
}
"""Each part off, as a context around a step."""


def engine(rounds: int) -> Iterator[dict[str, Any]]:
    """Of each link the step's seconds with each part off, and the bytes that were reloaded."""
    for link in (120e6, 480e6):
        bench = Bench(Case(tokens=512, link_bytes_per_s=link, device_layers=LAYERS, host_layers=LAYERS))
        managers = {}
        for part in ENGINE:
            managers[part], _, tapes = bench.manager()
            tapes.choose({layer.name: Level.SAVE_ALL for layer in managers[part].layers})
        taken: dict[str, list[float]] = {part: [] for part in ENGINE}
        for number in range(rounds + 2):
            for part, off in ENGINE.items():
                with off():
                    seconds = bench.step(managers[part])
                if number > 1:
                    taken[part].append(seconds)
        reloaded = {part: manager.stats.bytes_reloaded // (rounds + 2) for part, manager in managers.items()}
        forwarded = {part: manager.stats.bytes_forwarded // (rounds + 2) for part, manager in managers.items()}
        hits = {part: manager.report().prefetch_hits for part, manager in managers.items()}
        for manager in managers.values():
            manager.close()
        ratios = {
            part: [one / base for one, base in zip(taken[part], taken["everything on"], strict=True)] for part in ENGINE
        }
        yield {
            "link_bytes_per_s": link,
            "rounds_s": taken,
            "over_on": {part: quartiles(values) for part, values in ratios.items()},
            "reloaded_bytes": reloaded,
            "forwarded_bytes": forwarded,
            "prefetch_hits": hits,
        }


STEPS = {
    "350m, 8k": ("350m", 8192, {}),
    "350m, 8k, alpha 0.25": ("350m", 8192, {"alpha": 0.25}),
    "1.3b, 32k, alpha 0.25": ("1.3b", 32768, {"alpha": 0.25}),
    "350m, 8k, checkpointing": ("350m", 8192, {"checkpointed": True}),
}


def addresses() -> Iterator[dict[str, Any]]:
    """Of each recorded step the bytes that the allocators reserve, over the most that is live at once."""
    for name, (model, tokens, options) in STEPS.items():
        config = preset(model, max_seq=tokens, positions="rotary")
        trace = record_step(functools.partial(gpt_step, config, batch=1, tokens=tokens), **options).trace
        live = trace.peak_nbytes
        plan = solve(trace.problem(), time_limit_s=10)
        yield {
            "step": name,
            "buffers": len(trace.problem().buffers),
            "live_bytes": live,
            "caching_bytes": simulate_caching(trace, Segments.FIXED).reserved_nbytes,
            "expandable_bytes": simulate_caching(trace, Segments.EXPANDABLE).reserved_nbytes,
            "planned_bytes": sum(arena.nbytes for arena in plan.arenas),
        }


def tiles() -> Iterator[dict[str, Any]]:
    """Of each model with a large host: least device bytes with one tile and with eight, and the step's seconds there."""
    for model, tokens in MODELS:
        row: dict[str, Any] = {"problem": f"{model}, {tokens >> 10}k tokens"}
        wholes = {}
        for count in (1, 8):
            machine, profile = derived(model, tokens, "a100-80g", tiles=count)
            ranks = TENSOR_PARALLEL.get(model, 1)
            budgets = Budgets(device_bytes=HUGE, host_bytes=1 << 44, ranks_per_node=ranks)
            wholes[count] = ActivationProblem(profile=profile, hardware=machine, budgets=budgets)
            row[f"least_bytes_{count}"] = least_bytes(wholes[count])
        budget = round(1.02 * max(row["least_bytes_1"], row["least_bytes_8"]))
        row |= {f"step_s_{count}": _solved(with_budget(whole, budget)) for count, whole in wholes.items()}
        yield row


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="parts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default=",".join(KINDS))
    args = parser.parse_args(arguments)
    asked = args.parts.split(",")
    if unknown := sorted(set(asked) - set(KINDS)):
        parser.error(f"--parts has {', '.join(unknown)}; there are {', '.join(KINDS)}")
    if (lacking := no_solver()) is not None:
        print(f"parts: {lacking}", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    body: dict[str, Any] = {"load": os.getloadavg()}
    if "planned" in asked:
        body["planned"] = planned()
        body["planned_parts"] = compared(body["planned"], PLANNED, "everything on")
        print("step time over the plan with everything on, thirty problems simulated")
        for part, one in body["planned_parts"].items():
            shown = "" if one["median"] is None else f"median {one['median']:.3f}, worst {one['worst']:.3f}"
            more = f"above 1.01 in {one['costs_more_than_1_percent']}"
            print(f"  {part:30} fits {one['fits']:2} of {one['of']}  {shown}, {more}", flush=True)
        write_result("parts", body)
    if "engine" in asked:
        body["engine"] = []
        print("\nstep time over the engine with everything on, everything moved, paced links")
        for row in engine(args.rounds):
            forwarded, reloaded = row["forwarded_bytes"]["everything on"], row["reloaded_bytes"]["everything on"]
            row["forwarded_share"] = forwarded / (forwarded + reloaded)
            body["engine"].append(row)
            cells = "  ".join(
                f"{part} {ratio['median']:.3f} ±{ratio['spread']:.3f}" for part, ratio in row["over_on"].items()
            )
            print(
                f"  {row['link_bytes_per_s'] / 1e6:4.0f} MB/s  {cells}  forwarded {row['forwarded_share']:.0%}",
                flush=True,
            )
        write_result("parts", body)
    if "addresses" in asked:
        body["addresses"] = []
        print("\nreserved over live bytes at the fullest moment")
        for row in addresses():
            body["addresses"].append(row)
            ratios = {kind: row[f"{kind}_bytes"] / row["live_bytes"] for kind in ("caching", "expandable", "planned")}
            print(
                f"  {row['step']:26} " + "  ".join(f"{kind} {ratio:.3f}" for kind, ratio in ratios.items()), flush=True
            )
    if "tiles" in asked:
        body["tiles"] = list(tiles())
        print("\nthe MLP in eight tiles over one")
        for row in body["tiles"]:
            row["least_over"] = row["least_bytes_8"] / row["least_bytes_1"]
            row["step_over"] = row["step_s_8"] / row["step_s_1"]
            print(
                f"  {row['problem']:22} least device memory {row['least_over']:.3f}, step there {row['step_over']:.3f}"
            )
    print(f"\nWrote {write_result('parts', body)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
