"""`memo check`: checks a plan against every rule; a simulator, event by event, counts its bytes."""

from __future__ import annotations

import argparse
import json

from memo.cli.terminal.file_kinds import FileKind, require_kind
from memo.errors import ExitCode, PlanInvalid
from memo.mip.activation import ActivationPlan, check_plan, read_any_plan
from memo.mip.address import check
from memo.mip.simulate import verify_by_simulation
from memo.trace import printable


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `memo check`."""
    parser.add_argument("plan", help="address plan or activation plan in JSON; - is standard input")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a sentence")


def run(args: argparse.Namespace) -> ExitCode:
    """Checks the plan; an invalid one ends with exit code 5 and the broken rule."""
    require_kind(args.plan, FileKind.ACTIVATION_PLAN, FileKind.ADDRESS_PLAN)
    plan = read_any_plan(args.plan)
    if isinstance(plan, ActivationPlan):
        return _check_activations(plan, args)
    violation = check(plan)
    if args.json:
        report: dict[str, object] = {"valid": violation is None, "buffers": len(plan.problem.buffers)}
        if violation is not None:
            report |= {"rule": violation.rule.value, "message": violation.message, "ids": list(violation.buffers)}
        print(json.dumps(report))
        return ExitCode.OK if violation is None else ExitCode.PLAN_INVALID
    if violation is not None:
        raise PlanInvalid(f"rule {violation.rule}: {violation.message}")
    arenas = "1 arena" if len(plan.arenas) == 1 else f"{len(plan.arenas)} arenas"
    print(f"{printable(args.plan)}: valid, {len(plan.problem.buffers):,} buffers in {arenas}")
    return ExitCode.OK


def _check_activations(plan: ActivationPlan, args: argparse.Namespace) -> ExitCode:
    """Checks an activation plan by its rules and by a simulated step."""
    violation = check_plan(plan)
    rule, message = (None, None) if violation is None else (violation.rule.value, violation.message)
    if rule is None:
        try:
            verify_by_simulation(plan)
        except PlanInvalid as error:
            rule, message = "simulation", str(error)
    if args.json:
        report: dict[str, object] = {"valid": rule is None, "layers": len(plan.layers)}
        print(json.dumps(report | ({} if rule is None else {"rule": rule, "message": message})))
        return ExitCode.OK if rule is None else ExitCode.PLAN_INVALID
    if rule is not None:
        raise PlanInvalid(f"rule {rule}: {message}")
    codec = plan.problem.profile.codec
    coded = f", what moves as {codec} codes" if codec else ""
    print(f"{printable(args.plan)}: valid, {len(plan.layers):,} layers{coded}; a simulated step keeps every budget")
    return ExitCode.OK
