"""`memo check`: checks a plan against every rule; a simulator, event by event, counts its bytes."""

from __future__ import annotations

import argparse
import json
from typing import Any

from memo.cli.terminal.file_kinds import FileKind, require_kind
from memo.errors import ExitCode, PlanInvalid
from memo.mip.activation import ActivationPlan, check_plan, read_any_plan
from memo.mip.address import AddressPlan, check
from memo.mip.simulate import verify_by_simulation
from memo.trace import printable


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `memo check`."""
    parser.add_argument("plan", help="address plan or activation plan in JSON; - is standard input")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a sentence")


def run(args: argparse.Namespace) -> ExitCode:
    """Checks the plan; an invalid one ends with exit code 5 and the broken rule."""
    plan, found = checked_plan(args.plan)
    if isinstance(plan, ActivationPlan):
        codec, counted = plan.problem.profile.codec, {"layers": len(plan.layers)}
        coded = f", what moves as {codec} codes" if codec else ""
        words = f"{len(plan.layers):,} layers{coded}; a simulated step keeps every budget"
        try:
            if not found:
                verify_by_simulation(plan)
        except PlanInvalid as error:
            found = {"rule": "simulation", "message": str(error)}
    else:
        counted = {"buffers": len(plan.problem.buffers)}
        arenas = "1 arena" if len(plan.arenas) == 1 else f"{len(plan.arenas)} arenas"
        words = f"{len(plan.problem.buffers):,} buffers in {arenas}"
    if args.json:
        print(json.dumps({"valid": not found, **counted, **found}))
        return ExitCode.PLAN_INVALID if found else ExitCode.OK
    if found:
        raise PlanInvalid(f"rule {found['rule']}: {found['message']}")
    print(f"{printable(args.plan)}: valid, {words}")
    return ExitCode.OK


def checked_plan(path: str) -> tuple[ActivationPlan | AddressPlan, dict[str, Any]]:
    """Reads a plan of either kind; returns it with the first rule that it breaks, empty where there is none.

    Raises:
        MemoError: the file is of another kind, or cannot be read.
    """
    require_kind(path, FileKind.ACTIVATION_PLAN, FileKind.ADDRESS_PLAN)
    plan = read_any_plan(path)
    if isinstance(plan, ActivationPlan):
        broken = check_plan(plan)
        return plan, {} if broken is None else {"rule": broken.rule.value, "message": broken.message}
    rule = check(plan)
    return plan, {} if rule is None else {"rule": rule.rule.value, "message": rule.message, "ids": list(rule.buffers)}
