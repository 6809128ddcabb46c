"""`memo show`: prints an address plan (its arenas, then the offset of each buffer) or an activation plan as tables."""

from __future__ import annotations

import argparse
import json

from memo.cli.check import checked_plan
from memo.cli.tables.activation import activation_summary, activation_table
from memo.cli.tables.address import arena_table, plan_summary
from memo.errors import ExitCode, UsageError
from memo.mip.address import AddressPlan
from memo.trace import printable
from memo.units import text_table


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `memo show`."""
    parser.add_argument("plan", help="address plan or activation plan in JSON; - is standard input")
    parser.add_argument(
        "--buffers",
        type=int,
        default=20,
        metavar="N",
        help="for an address plan: list the N buffers with the lowest offsets; 0 is none (default 20)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> ExitCode:
    """Prints the plan, also an invalid one, which is marked."""
    if args.buffers < 0:
        raise UsageError(f"--buffers {args.buffers} is negative; 0 lists none")
    plan, found = checked_plan(args.plan)
    if args.json:
        summary = plan_summary(plan) if isinstance(plan, AddressPlan) else activation_summary(plan)
        print(json.dumps({**summary, "valid": not found}))
        return ExitCode.OK
    print(_tables(plan, args.buffers) if isinstance(plan, AddressPlan) else activation_table(plan))
    if found:
        print(f"\nINVALID: rule {found['rule']}: {found['message']}")
    return ExitCode.OK


def _tables(plan: AddressPlan, most: int) -> str:
    placed = sorted(zip(plan.problem.buffers, plan.offsets, strict=False), key=lambda p: (p[0].arena, p[1], p[0].start))
    rows = [
        (printable(b.id), printable(b.arena, limit=20), f"{offset}", f"{b.nbytes}", f"{b.start}", f"{b.end}")
        for b, offset in placed[:most]
    ]
    buffers = f"\n\n{text_table(('buffer', 'arena', 'offset', 'bytes', 'start', 'end'), rows)}" if rows else ""
    more = (
        f"\n... and {len(placed) - len(rows):,} more (--buffers {len(placed)})" if 0 < len(rows) < len(placed) else ""
    )
    return f"{arena_table(plan)}{buffers}{more}"
