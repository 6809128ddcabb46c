"""`memo plan`: plans which activations of each layer are kept, moved and recomputed, without a GPU.

The input is a named model on a named GPU, or a profile measured by `memo profile`. A plan is written only after the
independent checker and the simulator have passed it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from memo.cli.inputs.batch_sizes import add_batch_flags
from memo.cli.inputs.budgets import add_budget_flags
from memo.cli.inputs.fields import add_fields
from memo.cli.inputs.machine import add_machine_flags
from memo.cli.inputs.model_shape import shape_flag
from memo.cli.inputs.planned_model import add_model_flags
from memo.cli.planning.changes import changes_that_fit, explain_misfit
from memo.cli.planning.layouts import add_search_flags, refuse_search_flags, run_search
from memo.cli.planning.request import AUTO, TILE_TOKENS, TRAINING_FIELDS, parse_request
from memo.cli.planning.search import describe_longest, fewest_gpus, longest_sequence
from memo.cli.tables.activation import activation_summary, activation_table
from memo.cli.terminal.output_files import display_name, file_name, refuse_existing, require_matplotlib
from memo.cli.terminal.progress import WaitingLine
from memo.errors import ExitCode, UsageError
from memo.mip.activation import (
    DoesNotFit,
    plan_to_json,
)
from memo.mip.inputs import PipelineSchedule
from memo.mip.simulate import verify_by_simulation
from memo.parallel import Layout
from memo.search import TrainingMethod, with_run
from memo.trace import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memo.mip.activation import ActivationPlan
    from memo.mip.simulate import Simulation
    from memo.search import Request

EPILOG = """\
examples:
  memo plan --model 7b --seq 1m --gpu a800 --gpus 8 --tp 8 --host 2TiB --device 80GiB -o plan.json
  memo simulate plan.json -o trace.jsonl
  memo plan --model ./Qwen3-8B --max-seq --gpu h100 --gpus 8 --loss without-logits
  memo plan --model llama3-70b --seq 128k --gpu h100 --gpus auto
  memo plan --model 7b --seq 8k --cluster cluster.json --tp 2 --pp 4 --accumulate 8
  memo plan --search --model 65b --seq 128k --gpu a800 --nodes 8 --batch-tokens 4m -o plan.json
  memo plan --search --model 7b --max-seq --gpu a800 --host 2TiB
"""

DEFAULTS = {"gpus": 1, "tp": 1, "cp": 1, "pp": 1, "ep": 1, "schedule": str(PipelineSchedule.ONE_F_ONE_B)}
"""Values of what is searched under --search and is not given otherwise."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `memo plan`."""
    what = parser.add_argument_group("model: either --model and --seq, or --profile")
    add_model_flags(what)
    length = what.add_mutually_exclusive_group()
    length.add_argument("--seq", metavar="TOKENS", help="sequence length in tokens, such as 128k or 1m")
    length.add_argument(
        "--max-seq",
        action="store_true",
        help=f"find the longest sequence that fits, in steps of {TILE_TOKENS:,} tokens for each rank of --cp, and plan it; "
        "with --search the longest that any layout fits, and the fastest layouts for it",
    )
    what.add_argument(
        "--mlp-tiles",
        metavar="N",
        default="auto",
        help="compute each MLP of a named model in N tiles; auto chooses the number with the shortest step (default auto)",
    )
    add_batch_flags(what)
    what.add_argument("--profile", metavar="FILE", help="profile measured by memo profile")
    how = parser.add_argument_group("training of a named model")
    add_fields(how, TrainingMethod, TRAINING_FIELDS, flags={"embedding": shape_flag("embedding")})
    where = parser.add_argument_group("machine")
    add_machine_flags(where)
    where.add_argument(
        "--gpus",
        type=_gpus,
        metavar="N",
        help="number of GPUs in all; auto finds the fewest that fit: 1, 2, 4, 8, then whole nodes, with --cp or --tp "
        "within a node where that takes fewer (default 1; with --cluster all of it)",
    )
    where.add_argument(
        "--cluster",
        metavar="FILE",
        help="instead of --gpu: a JSON description of groups of nodes that are not alike and their links; plans every "
        "placement of the layout on them",
    )
    add_fields(where, Layout, "tp cp pp ep cp_attention schedule chunks stage_layers")
    where.add_argument(
        "--net",
        metavar="NICS",
        help="network between nodes: the NICs of a node, such as 8x400Gb, or none for one node (default: that of --gpu)",
    )
    add_search_flags(parser)
    add_budget_flags(parser)
    out = parser.add_argument_group("output")
    out.add_argument("-o", "--output", type=file_name, metavar="FILE", help="write the plan to FILE as JSON")
    out.add_argument("-f", "--force", action="store_true", help="overwrite existing files")
    out.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    out.add_argument(
        "--sweep",
        choices=("seq", "device", "host"),
        help="plan for a range of sequence lengths up to --seq, or of budgets of device or host memory, and print one line "
        "for each",
    )
    out.add_argument(
        "--plot", type=file_name, metavar="FILE", help="with --sweep: draw it; FILE ends in .png, .svg or .pdf"
    )


def run(args: argparse.Namespace) -> ExitCode:
    """Plans or searches, checks and simulates, writes the plan and prints it."""
    if args.codec is not None and (args.search or args.cluster is not None):
        flag = "--search" if args.search else "--cluster"
        raise UsageError(f"--codec does not go with {flag}; give one layout on one kind of machine")
    if args.search:
        refuse_existing(args.output, args.html, force=args.force)
        return run_search(args)
    refuse_search_flags(args)
    defaults = {name: value for name, value in DEFAULTS.items() if getattr(args, name) is None}
    if args.cluster is not None:
        defaults.pop("gpus", None)
    args = argparse.Namespace(**{**vars(args), **defaults})
    if args.cluster is not None:
        return _run_on_cluster(args)
    if args.max_seq and (args.gpus == AUTO or args.sweep is not None):
        other = "--gpus auto" if args.gpus == AUTO else f"--sweep {args.sweep}"
        raise UsageError(f"--max-seq and {other} each look for a size; give the number of one of them")
    if args.gpus == AUTO and args.sweep is not None:
        raise UsageError(f"--gpus auto and --sweep {args.sweep} exclude each other; give a number of GPUs")
    refuse_existing(args.output, args.plot, force=args.force)
    require_matplotlib(args.plot)
    if args.plot is not None and args.sweep is None:
        raise UsageError(
            "--plot draws a sweep only; add --sweep seq, device or host, or use memo simulate for a timeline"
        )
    what = " ".join(["planning", *(given for given in (args.model, args.seq and f"at {args.seq}") if given)])
    with WaitingLine("memo plan", what, quiet=args.json) as waiting:
        request, found = _request(args, say=waiting.say)
        misfit = None
        if args.sweep is None:
            try:
                plan = request.plan()
                simulation = verify_by_simulation(plan)
            except DoesNotFit as error:
                misfit = error, changes_that_fit(request, error, say=waiting.say)
    if misfit is not None:
        raise explain_misfit(request, *misfit, as_json=args.json)
    if args.sweep is not None:
        from memo.cli.planning.sweep import run_sweep

        return run_sweep(request, args)
    return _finish(args, with_run(plan, request), simulation, found, request.assumed)


def _run_on_cluster(args: argparse.Namespace) -> ExitCode:
    """Plans a layout of groups of nodes that are not alike."""
    from memo.cli.planning.on_cluster import plan_on_cluster, space_on_cluster

    refuse_existing(args.output, force=args.force)
    with WaitingLine("memo plan", f"planning {args.model} on {args.cluster}", quiet=args.json):
        space = space_on_cluster(args)
        plan, lines, summary = plan_on_cluster(space)
        simulation = verify_by_simulation(plan)
    found = _Found(lines=lines, summary=summary)
    return _finish(args, with_run(plan, space.request), simulation, found, space.request.assumed)


def _finish(
    args: argparse.Namespace, plan: ActivationPlan, simulation: Simulation, found: _Found, assumed: Sequence[str]
) -> ExitCode:
    """Writes the plan and prints it."""
    if args.output:
        from memo.mip.address import write_file

        write_file(args.output, plan_to_json(plan), overwrite=args.force)
    if args.json:
        printed = {"simulated_step_s": simulation.whole_step_s, "output": args.output, "assumed": list(assumed)}
        print(json.dumps({**activation_summary(plan), **found.summary, **printed}))
        return ExitCode.OK
    for line in found.lines:
        print(f"{line}\n")
    print(activation_table(plan))
    for row in found.rows:
        print(row)
    for sentence in assumed:
        print(f"assumed: {printable(sentence, limit=2000)}")
    off = abs(simulation.whole_step_s / plan.step_s - 1) if plan.step_s else 0.0
    print(f"checked, and simulated event by event: {off:.2%} off the prediction")
    if args.output:
        print(f"Wrote {display_name(args.output)}")
    return ExitCode.OK


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Findings beside the plan, for people and for --json."""

    lines: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    """Below the plan's table."""
    summary: Mapping[str, object] = dataclasses.field(default_factory=dict)


def _request(args: argparse.Namespace, *, say: Callable[[str], None]) -> tuple[Request, _Found]:
    """The request of the flags, with what was searched for filled in; `say` is told what is done."""
    if args.max_seq:
        longest = longest_sequence(parse_request(args, say=say))
        summary = {"max_seq": longest.request.layout.tokens, "binds": longest.binds, "proposal": longest.proposal}
        return longest.request, _Found(lines=(describe_longest(longest),), summary=summary)
    if args.gpus != AUTO:
        return parse_request(args, say=say), _Found()
    step = args.tp * args.cp * args.pp * args.ep
    first = parse_request(argparse.Namespace(**{**vars(args), "gpus": step}), say=say)

    def with_ranks(**ranks: int) -> Request:
        return parse_request(argparse.Namespace(**{**vars(args), **ranks}), model=first.config)

    request, tried = fewest_gpus(with_ranks, first)
    layout = request.layout
    ranks = {name: getattr(layout, name) for name in ("cp", "tp") if getattr(layout, name) != getattr(args, name)}
    too_few = f"; {', '.join(map(str, tried))} {'is' if len(tried) == 1 else 'are'} too few" if tried else ""
    line = f"fewest GPUs: {layout.gpus}{''.join(f' --{name} {size}' for name, size in ranks.items())}{too_few}"
    return request, _Found(lines=(line,), summary={"gpus": layout.gpus, **ranks, "gpus_too_few": tried})


def _gpus(text: str) -> int | str:
    """A number of GPUs, or `auto`."""
    if text.lower() == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto") from None
