"""Is the solver worth it? Thirty problems simulated and six carried out on the paced CPU engine, by memo's LP and by rules.

    make bench ARMS=solver
    python -m benchmarks.solver [--rounds 3] [--parts simulated,carried] [--problems 30] [--note TEXT]

Every rule has the same budgets of device, host and disk, and its plan counts where the independent checker accepts it. Step
times of the thirty are the simulator's, beside them the bound of the linear program before anything is rounded; those of the
six are measured in turn, a round after the other.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.machine import no_solver
from benchmarks.results import write_result
from benchmarks.solver.compared import compared
from benchmarks.solver.problems import problems
from benchmarks.solver.rules import RULES
from memo.mip.activation.solver import relaxed_step_s

BASE = "LP"
PARTS = ("simulated", "carried")


def simulated(most: int | None = None) -> list[dict[str, Any]]:
    """A row for each of the first `most` problems: steps of each rule, the bound of any, and the seconds of choosing."""
    rows = []
    for named in itertools.islice(problems(), most):
        row: dict[str, Any] = {"problem": named.name, "bound_s": relaxed_step_s(named.problem)}
        row |= {key: {} for key in ("step_s", "predicted_s", "choosing_s")}
        for rule, choose in RULES.items():
            begun = time.process_time()
            found = choose(named.problem)
            row["choosing_s"][rule] = time.process_time() - begun
            row["step_s"][rule] = None if found is None else found.step_s
            row["predicted_s"][rule] = None if found is None else found.plan.step_s
        rows.append(row)
        print(_told(named.name, row["step_s"]), flush=True)
    return rows


def is_deciding(row: dict[str, Any]) -> bool:
    """Whether the rules that move bytes do not all reach the LP's step: where they do, links hide every copy."""
    movers = [row["step_s"][rule] for rule in ("greedy", "uniform alpha", "SSDTrain", "all swap")]
    return any(found is None or found > row["step_s"][BASE] * 1.0005 for found in movers)


def _told(name: str, step_s: dict[str, float | None]) -> str:
    base = step_s[BASE]
    cells = [
        f"{rule} {'-' if found is None or base is None else f'{found / base:.3f}'}" for rule, found in step_s.items()
    ]
    return f"  {name:62} {'  '.join(cells)}"


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each rule, over the problems: how often it fits, median and worst time over the LP's, seconds to choose."""
    told = compared(rows, RULES, BASE)
    for rule, one in told.items():
        gaps = [gap for row in rows if (gap := gap_of(row, rule)) is not None]
        one["median_gap"], one["worst_gap"] = (statistics.median(gaps), max(gaps)) if gaps else (None, None)
        times = [row["choosing_s"][rule] for row in rows if "choosing_s" in row]
        one["choosing_s"] = statistics.median(times) if times else None
    return told


def carried_summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The summary of what was carried out: by rule, with measured over simulated steps, and the pairs in order."""
    told = summary(rows)
    for rule, one in told.items():
        shares = [row["measured_over_simulated"][rule] for row in rows if rule in row["simulated_s"]]
        one["measured_over_simulated"] = statistics.median(shares) if shares else None
    return {"carried_rules": told, "pairs_in_order": [sum(row["pairs_in_order"][at] for row in rows) for at in (0, 1)]}


def gap_of(row: dict[str, Any], rule: str) -> float | None:
    """Part of the bound by which a rule's predicted step is above it; None without a plan or a bound."""
    bound_s, step_s = row.get("bound_s"), row.get("predicted_s", {}).get(rule)
    return None if bound_s is None or step_s is None else step_s / bound_s - 1


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="solver", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default="simulated,carried")
    parser.add_argument("--problems", type=int, help="the first so many of those simulated; all by default")
    parser.add_argument("--note", help="what the result's readers should know of the machine")
    args = parser.parse_args(arguments)
    if args.problems is not None and args.problems < 1:
        parser.error(f"--problems {args.problems} is not a number of 1 or more")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} is not a number of 1 or more")
    wrong = set(args.parts.split(",")) - set(PARTS)
    if wrong:
        parser.error(f"--parts: {min(wrong)!r} is none of {', '.join(PARTS)}")
    lacking = no_solver()
    if lacking is not None:
        print(f"solver: {lacking}", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    body: dict[str, Any] = {"load": os.getloadavg()}
    if args.note:
        body["note"] = args.note
    if "simulated" in args.parts:
        print("step time over the LP's, simulated; -: no valid plan")
        body["simulated"] = simulated(args.problems)
        body["rules"] = summary(body["simulated"])
        deciding = [row for row in body["simulated"] if is_deciding(row)]
        body["deciding"], body["deciding_rules"] = len(deciding), summary(deciding)
        for rule, one in body["rules"].items():
            shown = (
                ""
                if one["median"] is None
                else f"median {one['median']:.3f}, worst {one['worst']:.3f}, best {one['best']:.3f}"
            )
            gap = "" if one["median_gap"] is None else f", {one['median_gap']:.2%} above the bound"
            print(
                f"  {rule:20} fits {one['fits']:2} of {one['of']}  {shown}{gap}, {one['choosing_s'] * 1e3:.0f} ms to choose"
            )
        path = write_result("solver", body)
    if "carried" in args.parts:
        from benchmarks.solver.carried import carried

        print("\ncarried out on the paced engine, step time over the LP's")
        body["carried"] = []
        for row in carried(args.rounds):
            body["carried"].append(row)
            body |= carried_summary(body["carried"])
            path = write_result("solver", body)
            print(_told(row["problem"], row["step_s"]), flush=True)
    print(f"\nWrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
