"""`memo show`: prints an address plan (its arenas, then the offset of each buffer) or an activation plan as tables."""

from __future__ import annotations

import argparse
import json

from memo.cli.tables.activation import activation_summary, activation_table
from memo.cli.tables.address import arena_table, plan_summary
from memo.cli.terminal.file_kinds import FileKind, require_kind
from memo.errors import ExitCode, UsageError
from memo.mip.activation import ActivationPlan, check_plan, read_any_plan
from memo.mip.address import check
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
    require_kind(args.plan, FileKind.ACTIVATION_PLAN, FileKind.ADDRESS_PLAN)
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
        (printable(b.id), printable(b.arena, limit=20), f"{offset}", f"{b.nbytes}", f"{b.start}", f"{b.end}")
        for b, offset in placed[: args.buffers]
    ]
    if rows:
        print(f"\n{text_table(('buffer', 'arena', 'offset', 'bytes', 'start', 'end'), rows)}")
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
