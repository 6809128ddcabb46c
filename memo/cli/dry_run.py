"""`memo dry-run`: runs a step of every rank of a plan's layout in one process, without devices, data or other ranks.

Says whether collectives, messages and memory of the step are those of the plan, and whether any rank would wait for
another for ever. The run, and torch with it, is in memo.dry_run.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from memo.cli.terminal.file_kinds import FileKind, require_kind
from memo.cli.terminal.progress import WaitingLine
from memo.errors import ExitCode, PlanInvalid
from memo.gpt.arithmetic import planned_run
from memo.mip.activation import read_activation_plan
from memo.units import format_bytes, text_table

if TYPE_CHECKING:
    from memo.dry_run import DryRun

EPILOG = """\
example:
  memo plan --model 7b --seq 128k --gpu h100 --gpus 256 --tp 8 --pp 4 --accumulate 16 -o plan.json
  memo dry-run plan.json

Every rank's process groups are compared with its place in the layout. Of ranks of the same pipeline stage whose shards have
equal shapes one is run, on tensors without bytes. Exit code 5: a rank would do something else than the plan says.
"""
_MOST = 20  # disagreements that are printed


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `memo dry-run`."""
    parser.add_argument("plan", help="activation plan of a named model, in JSON; - is standard input")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> ExitCode:
    """Runs the ranks and compares; exit code 5 where something is not as planned."""
    require_kind(args.plan, FileKind.ACTIVATION_PLAN)
    planned = planned_run(read_activation_plan(args.plan))
    with WaitingLine("memo dry-run", "starting", quiet=args.json) as waiting:
        from memo.dry_run import dry_run

        result = dry_run(planned, progress=waiting.say)
    if args.json:
        print(json.dumps(_summary(result), allow_nan=False))
        return ExitCode.PLAN_INVALID if result.disagreements else ExitCode.OK
    print(_table(result))
    if result.disagreements:
        for line in result.disagreements[1:_MOST]:
            print(line)
        more = len(result.disagreements) - 1
        raise PlanInvalid(f"{result.disagreements[0]}{f'; and {more:,} more disagreements' if more else ''}")
    layout = result.run.layout
    print(
        f"{layout.ranks:,} ranks agree with the plan and with one another; {len(result.kinds)} of them were run, in "
        f"{result.duration_s:.0f} s"
    )
    return ExitCode.OK


def _summary(result: DryRun) -> dict[str, Any]:
    """Object that `--json` prints; sizes in bytes."""
    layout = result.run.layout
    assert result.run.plan is not None
    planned = result.run.plan.stages
    kinds = [
        {
            "stage": kind.stage,
            "ranks": len(kind.ranks),
            "first_rank": kind.ranks[0],
            "collectives": len(kind.step.calls),
            "collective_nbytes": sum(call.nbytes for call in kind.step.calls),
            "static_nbytes": kind.step.states_bytes,
            "peak_nbytes": kind.step.peak_bytes,
            "planned_peak_nbytes": planned[kind.stage].peak_device_bytes,
        }
        for kind in result.kinds
    ]
    return {
        "agrees": not result.disagreements,
        "ranks": layout.ranks,
        "dp": layout.dp,
        "tp": layout.tp,
        "pp": layout.pp,
        "cp": layout.cp,
        "schedule": str(layout.schedule),
        "kinds": kinds,
        "disagreements": list(result.disagreements),
        "duration_s": result.duration_s,
    }


def _table(result: DryRun) -> str:
    layout = result.run.layout
    assert result.run.plan is not None
    rows = [
        (
            f"stage {kind.stage}, rank {kind.ranks[0]} and {len(kind.ranks) - 1} like it",
            f"{len(kind.step.calls):,}",
            format_bytes(sum(call.nbytes for call in kind.step.calls)),
            format_bytes(kind.step.peak_bytes),
            format_bytes(result.run.plan.stages[kind.stage].peak_device_bytes),
        )
        for kind in result.kinds
    ]
    head = f"{layout.ranks:,} ranks: dp {layout.dp}, tp {layout.tp}, pp {layout.pp}, cp {layout.cp}"
    head += f", ep {layout.ep}" * (layout.ep > 1)
    return text_table((head, "collectives", "bytes in them", "peak of the step", "by the plan"), rows)
