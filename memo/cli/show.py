"""`memo show`: a plan of addresses as a table, its arenas first, then where every buffer lies; or one of activations."""

from __future__ import annotations

import argparse
import json

from memo.cli.activation_tables import activation_summary, activation_table
from memo.cli.address_tables import arena_table, plan_summary, printable, table
from memo.errors import ExitCode, UsageError
from memo.mip.activation import ActivationPlan, check_plan, read_any_plan
from memo.mip.address import check


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `memo show`."""
    parser.add_argument("plan", help="a plan in JSON; - is standard input")
    parser.add_argument(
        "--buffers",
        type=int,
        default=20,
        metavar="N",
        help="of an address plan, list the first N by offset (default 20; 0 for none)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> ExitCode:
    """Shows invalid plans, too, and says that they are."""
    if args.buffers < 0:
        raise UsageError(f"--buffers {args.buffers} is negative; 0 lists none")
    plan = read_any_plan(args.plan)
    if isinstance(plan, ActivationPlan):
        return _show_activations(plan, args)
    violation = check(plan)
    if args.json:
        print(json.dumps({**plan_summary(plan), "valid": violation is None}))
        return ExitCode.OK
    print(arena_table(plan))
    placed = sorted(zip(plan.problem.buffers, plan.offsets, strict=False), key=lambda p: (p[0].arena, p[1], p[0].start))
    rows = [
        (printable(b.id), printable(b.arena, width=20), f"{offset}", f"{b.nbytes}", f"{b.start}", f"{b.end}")
        for b, offset in placed[: args.buffers]
    ]
    if rows:
        print(f"\n{table(('buffer', 'arena', 'offset', 'bytes', 'start', 'end'), rows)}")
        if len(placed) > len(rows):
            print(f"... and {len(placed) - len(rows):,} more (--buffers {len(placed)})")
    if violation is not None:
        print(f"\nINVALID: rule {violation.rule}: {violation.message}")
    return ExitCode.OK


def _show_activations(plan: ActivationPlan, args: argparse.Namespace) -> ExitCode:
    violation = check_plan(plan)
    if args.json:
        print(json.dumps({**activation_summary(plan), "valid": violation is None}))
        return ExitCode.OK
    print(activation_table(plan))
    if violation is not None:
        print(f"\nINVALID: rule {violation.rule}: {violation.message}")
    return ExitCode.OK
