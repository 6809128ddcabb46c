"""`memo plan`: plans which activations of each layer are kept, moved and recomputed, without a GPU.

The input is a named model on a named GPU, or a profile measured by `memo profile`. A plan is written only after the
independent checker and the simulator have passed it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

from memo.cli.inputs.batch_sizes import BatchOptions
from memo.cli.inputs.budgets import BudgetOptions
from memo.cli.inputs.fields import add_fields, is_given, refuse_given
from memo.cli.inputs.flag_types import Flag, Force, InputFile, Json, OutputFile, Tokens
from memo.cli.inputs.machine import MachineOptions, Nics
from memo.cli.inputs.model_shape import namesake, shape_flag
from memo.cli.inputs.planned_model import add_model_flags
from memo.cli.planning.changes import changes_that_fit, explain_misfit
from memo.cli.planning.layouts import SearchOptions, run_search
from memo.cli.planning.request import AUTO, TRAINING_FIELDS, CountOrAuto, parse_request
from memo.cli.planning.search import describe_longest, fewest_gpus, longest_sequence
from memo.cli.tables.activation import activation_summary, activation_table
from memo.cli.terminal.output_files import display_name, refuse_existing
from memo.cli.terminal.progress import WaitingLine
from memo.errors import ExitCode
from memo.gpt.arithmetic import TrainingMethod
from memo.mip.activation import (
    DoesNotFit,
    plan_to_json,
)
from memo.mip.inputs import PipelineSchedule
from memo.mip.simulate import verify_by_simulation
from memo.parallel import Layout
from memo.search import with_run
from memo.trace import printable
from memo.units import format_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memo.mip.activation import ActivationPlan
    from memo.mip.simulate import Simulation
    from memo.search import Request

EPILOG = """\
examples:
  memo plan --model 7b --seq 1m --gpu a800 --gpus 8 --tp 8 --host 2TiB --device 80GiB -o plan.json
  memo simulate plan.json -o trace.jsonl
  memo plan --model ./Qwen3-8B --max-seq --gpu h100 --gpus 8 --loss-without-logits
  memo plan --model llama3-70b --seq 128k --gpu h100 --gpus auto
  memo plan --model 7b --seq 8k --cluster cluster.json --tp 2 --pp 4 --accumulate 8
  memo plan --search --model 65b --seq 128k --gpu a800 --nodes 8 --batch-tokens 4m -o plan.json
  memo plan --search --model 7b --max-seq --gpu a800 --host 2TiB
"""

DEFAULTS = {"gpus": 1, "tp": 1, "cp": 1, "pp": 1, "ep": 1, "schedule": PipelineSchedule.ONE_F_ONE_B}
"""Values of what is searched under --search and is not given otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Step:
    """The step of the model. The fields are flags."""

    seq: Annotated[Tokens | None, Flag(one_of="length")] = None
    """Sequence length in tokens, such as 128k or 1m."""
    max_seq: Annotated[bool, Flag(one_of="length")] = False
    """Find the longest sequence that fits, in steps of 1,024 tokens for each rank of --cp, and plan it; with --search the
    longest that any layout fits, and the fastest layouts for it."""
    mlp_tiles: CountOrAuto = AUTO
    """Compute each MLP of a named model in N tiles; auto chooses the number with the shortest step."""
    profile: InputFile | None = None
    """Profile measured by memo profile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gpus:
    """Number of GPUs, and their network. The fields are flags."""

    gpus: CountOrAuto | None = None
    """Number of GPUs in all; auto finds the fewest that fit: 1, 2, 4, 8, then whole nodes, with --cp or --tp within a node
    where that takes fewer (default 1; with --cluster all of it)."""
    cluster: InputFile | None = None
    """Instead of --gpu: a JSON description of groups of nodes that are not alike and their links; plans every placement of
    the layout on them."""
    net: Nics | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Output:
    """Output. The fields are flags."""

    output: OutputFile | None = None
    """Write the plan to FILE as JSON."""
    force: Force = False
    json: Json = False


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `memo plan`."""
    what = parser.add_argument_group("model: either --model and --seq, or --profile")
    add_model_flags(what)
    add_fields(what, _Step)
    add_fields(what, BatchOptions)
    how = parser.add_argument_group("training of a named model")
    add_fields(how, TrainingMethod, TRAINING_FIELDS, flags={"embedding": shape_flag("embedding")})
    where = parser.add_argument_group("machine")
    add_fields(where, MachineOptions)
    add_fields(where, _Gpus)
    add_fields(where, Layout, "tp cp pp ep cp_attention tp_overlap schedule chunks stage_layers")
    search = parser.add_argument_group("search for a layout (docs/search.md); dimensions that are given are fixed")
    add_fields(search, SearchOptions)
    add_fields(parser.add_argument_group("budgets"), BudgetOptions)
    add_fields(parser.add_argument_group("output"), _Output)


_CLASHES = (
    ("--search", "--gpus", "give --nodes and --gpus-per-node"),
    ("--search", "--profile", "give --model"),
    ("--search", "--codec", "give one layout"),
    ("--cluster", "--nodes --gpus-per-node", "leave it out"),
    ("--cluster", "--codec", "give one kind of machine"),
    (
        "--cluster",
        "--gpu --net --attention --doctor --profile --max-seq --gpus=auto --optimizer-offload",
        "its file has the machines; leave out one of them",
    ),
    ("--max-seq", "--batch-tokens", "give --global-batch (default: one sequence)"),
    ("--global-batch", "--batch-tokens", "they are the same size; give one of them"),
    ("--max-seq", "--gpus=auto", "each looks for a size; give the number of one of them"),
    ("--profile", "--max-seq --gpus=auto", "which is of one length and rank; give --model"),
)
"""A flag, those that do not go with it, and what to do instead."""
_ONLY_SEARCH = "--nodes --gpus-per-node --dp --batch-tokens"
"""Flags that go with --search only."""


def run(args: argparse.Namespace) -> ExitCode:
    """Plans or searches, checks and simulates, writes the plan and prints it."""
    for flag, others, instead in _CLASHES:
        if is_given(args, flag):
            refuse_given(args, others, f"does not go with {flag}; {instead}")
    if not args.search:
        refuse_given(args, _ONLY_SEARCH, "goes with --search only")
    if args.search:
        refuse_existing(args.output, force=args.force)
        return run_search(args)
    defaults = {name: value for name, value in DEFAULTS.items() if getattr(args, name) is None}
    if args.cluster is not None:
        defaults.pop("gpus", None)
    args = argparse.Namespace(**{**vars(args), **defaults})
    if args.cluster is not None:
        return _run_on_cluster(args)
    refuse_existing(args.output, force=args.force)
    length = f"at {format_tokens(args.seq)}" if args.seq else None
    what = " ".join(filter(None, ("planning", args.model, length)))
    with WaitingLine("memo plan", what, quiet=args.json) as waiting:
        request, found = _request(args, say=waiting.say)
        misfit = None
        try:
            plan = request.plan()
            simulation = verify_by_simulation(plan)
        except DoesNotFit as error:
            misfit = error, changes_that_fit(request, error, say=waiting.say, shortens=not args.max_seq)
    if misfit is not None:
        raise explain_misfit(request, *misfit, as_json=args.json)
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
    for line in (*filter(None, [namesake(args.model or "")]), *found.lines):
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
        asked = parse_request(args, say=say)
        if not asked.fits():
            return asked, _Found()  # planning it says what it lacks
        longest = longest_sequence(asked, say=say)
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
