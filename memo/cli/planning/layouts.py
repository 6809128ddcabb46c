"""`memo plan --search`: parses the cluster and what is fixed, searches, and prints or writes the answer."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import time
from typing import TYPE_CHECKING

from memo.cli.inputs.fields import given_fields
from memo.cli.inputs.flag_types import Count, Tokens
from memo.cli.inputs.model_shape import namesake
from memo.cli.planning.on_cluster import space_on_cluster
from memo.cli.planning.request import TILE_TOKENS, parse_request
from memo.cli.tables.layouts import Answer, longest_words, search_summary, search_table, smallest_table
from memo.cli.terminal.output_files import display_name
from memo.cli.terminal.progress import WaitingLine
from memo.errors import ExitCode, Infeasible, PlanInvalid, UsageError
from memo.gpt import EmbeddingGradients, GPTConfig
from memo.gpt.arithmetic import reason_not_sparse
from memo.mip.activation import plan_to_json
from memo.mip.address import write_file
from memo.mip.inputs import PipelineSchedule
from memo.mip.simulate import play, verify_by_simulation
from memo.parallel import ContextAttention
from memo.search import (
    DIMENSIONS,
    Space,
    finetune_arguments,
    launch_of,
    longest_that_fits,
    runs_under_memo_train,
    runs_under_parallelize,
    search_layouts,
    smallest_that_fits,
    why_not_finetuned,
    why_not_trained,
    with_run,
)
from memo.trace import printable
from memo.units import format_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from memo.search import Candidate, Found, Launch, Planned, Request

PROCESSES = 2
MOST_CALLS = 800
"""Passes of layers in a step that is played whole, for each of the best layouts; of a longer one so many are."""
LEAST_STEP_TOKENS = 1 << 20
"""Tokens of a step, at least, where its size is not given."""
_SPLIT = "a node would hold ranks that do not follow one another; give --tp, --cp and --pp of whole nodes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The search. The fields are flags."""

    search: bool = False
    """Find the layout, schedule, sharding and microbatch with the shortest step on a cluster, each with its plan."""
    nodes: Count | None = None
    """With --search: nodes of the cluster (default 1)."""
    gpus_per_node: Count | None = None
    """With --search: GPUs of a node (default: as many as --gpu has)."""
    dp: Count | None = None
    """With --search: data-parallel ranks (default: searched)."""
    batch_tokens: Tokens | None = None
    """With --search: tokens in a step of all ranks, such as 4m, instead of --global-batch (default: 1m, or one sequence)."""


def run_search(args: argparse.Namespace) -> ExitCode:
    """Searches, checks and simulates the best plans, writes one and prints the answer.

    Raises:
        UsageError: a flag does not go with --search, or no layout divides the model and the step.
        Infeasible: no layout fits.
    """
    space = _space(args)
    reason, runs, workers = why_not_trained(space.request), runs_under_memo_train, PROCESSES
    if space.request.config is not None and not isinstance(space.request.config, GPTConfig):
        # Each process would import transformers and record the layers anew.
        reason, runs, workers = None, runs_under_parallelize, 1
    begin_s = time.monotonic()
    longest = None
    with WaitingLine("memo plan", f"searching layouts of {space.gpus} GPUs", quiet=args.json) as waiting:
        if args.max_seq and (longest := longest_that_fits(space, tile=TILE_TOKENS, say=waiting.say)) is not None:
            space = longest.space
        found = search_layouts(space, runs=runs, workers=workers, say=waiting.say)
        seconds = time.monotonic() - begin_s
        smallest = None if found.best or space.cluster is not None else smallest_that_fits(space)
        waiting.say("simulating the best plans")
        steps = {one.candidate: play(one.plan, most=MOST_CALLS)[1].whole_step_s for one in _shown(found)}
        written = _proven(found, runs=runs if reason is None else None)
    if written is None and space.cluster is not None:
        raise Infeasible(
            f"no layout of {space.request.model} at {format_tokens(space.request.layout.tokens)} tokens fits on the "
            f"{space.gpus} GPUs of {args.cluster}; give more --host or --disk-budget, or a shorter --seq"
        )
    if written is None:
        raise _does_not_fit(smallest_table(space, smallest), as_json=args.json)
    written = dataclasses.replace(written, plan=with_run(written.plan, space.request, written.candidate))
    launch: Launch | None = None
    finetune: tuple[str, ...] = ()
    if runs is runs_under_parallelize:
        reason = why_not_finetuned(space.request, written.candidate)
        finetune = finetune_arguments(space.request, written.candidate)
    if reason is None and runs(written.candidate):
        plan_file, placement = args.output or "plan.json", space.placement(written.candidate)
        per_node = space.gpus_per_node
        launch = launch_of(
            written.plan, gpus_per_node=per_node, plan_file=plan_file, placement=placement, finetune=finetune
        )
        reason = _SPLIT if launch is None else None
    answer = Answer(found=found, simulated_s=steps, launch=launch, not_trained=reason, written=written)
    summary = {
        **search_summary(answer),
        "assumed": _assumed(args, space),
        "seconds": seconds,
        "output": args.output,
    }
    summary |= {} if longest is None else {"max_seq": longest.tokens, "binds": longest.binds}
    if args.output:
        write_file(args.output, plan_to_json(written.plan), overwrite=args.force)
    if args.json:
        print(json.dumps(summary))
        return ExitCode.OK
    if (line := namesake(args.model or "")) is not None:
        print(line)
    if longest is not None:
        print(f"{longest_words(longest)}\n")
    print(search_table(answer, output=args.output, seconds=seconds))
    for sentence in _assumed(args, space):
        print(f"assumed: {printable(sentence, limit=2000)}")
    if args.output:
        print(f"Wrote {display_name(args.output)}")
    return ExitCode.OK


def _proven(found: Found, *, runs: Callable[[Candidate], bool] | None) -> Planned | None:
    """The fastest plan that the simulator agrees with, among those that `runs` has a launch line for if there are any.

    Raises:
        PlanInvalid: the simulator agrees with none.
    """
    running = [one for one in found.planned if runs is not None and runs(one.candidate)]
    ranked = running or list(found.planned)
    for one in ranked[:-1]:
        with contextlib.suppress(PlanInvalid):
            verify_by_simulation(one.plan)
            return one
    for one in ranked[-1:]:
        verify_by_simulation(one.plan)
        return one
    return None


def _shown(found: Found) -> list[Planned]:
    """Plans that the answer shows."""
    runnable = [] if found.runnable is None or found.runnable in found.best else [found.runnable]
    return [*found.best, *runnable]


def _space(args: argparse.Namespace) -> Space:
    """The space that the flags describe, with the dimensions fixed that are given.

    Raises:
        UsageError: no layout divides the model and the step, or flags contradict each other.
    """
    one_gpu = _with_one_gpu(args)
    space = _of_equal_nodes(args, parse_request(one_gpu)) if args.cluster is None else space_on_cluster(one_gpu)
    fixed = given_fields(args, " ".join(DIMENSIONS))
    if args.cp_attention not in (None, ContextAttention.AUTO):
        fixed["ring"] = args.cp_attention == ContextAttention.RING
    request, config = space.request, space.request.config
    space = dataclasses.replace(space, global_batch=_global_batch(args, request), fixed=fixed)
    if request.embedding is EmbeddingGradients.SPARSE and isinstance(config, GPTConfig):
        reason = reason_not_sparse(tied=config.tie_embeddings, ranks=space.gpus, lora=request.lora)
        if reason is not None:
            raise UsageError(f"--embedding-exchange sparse: {reason}; use --embedding-exchange auto")
    ep = fixed.get("ep", 1)
    if ep != 1 and not (isinstance(config, GPTConfig) and config.moe is not None):
        raise UsageError(f"--ep {ep} has no meaning without --experts")
    if not space.shapes:
        raise UsageError(space.why_empty)
    return space


def _with_one_gpu(args: argparse.Namespace) -> argparse.Namespace:
    """The flags with a layout of one GPU, as the search replaces it."""
    ones = {"gpus": 1, "tp": 1, "cp": 1, "pp": 1, "ep": 1, "batch": None, "accumulate": None, "global_batch": None}
    later = {"schedule": PipelineSchedule.ONE_F_ONE_B, "chunks": None, "zero": None}
    return argparse.Namespace(**{**vars(args), **ones, **later})


def _of_equal_nodes(args: argparse.Namespace, request: Request) -> Space:
    """The space of a request on equal nodes."""
    machine, nodes = request.machine, 1 if args.nodes is None else args.nodes
    if args.gpus_per_node is not None:
        machine = dataclasses.replace(machine, gpus_per_node=args.gpus_per_node)
    if args.max_seq:  # a length that the ranks of every layout divide
        ranks = math.lcm(nodes * machine.gpus_per_node, getattr(request.config, "heads", 0) or 1, args.cp or 1)
        request = dataclasses.replace(request, layout=dataclasses.replace(request.layout, tokens=TILE_TOKENS * ranks))
    return Space(request=dataclasses.replace(request, machine=machine), nodes=nodes, global_batch=1)


def _global_batch(args: argparse.Namespace, request: Request) -> int:
    """Sequences of a step."""
    tokens = request.layout.tokens
    if args.global_batch is not None:
        return int(args.global_batch)
    if args.max_seq:
        return 1
    if args.batch_tokens is None:
        return max(-(-LEAST_STEP_TOKENS // tokens), 1)
    step: int = args.batch_tokens
    if step % tokens:
        low, high = step // tokens * tokens, (step // tokens + 1) * tokens
        near = " or ".join(format_tokens(size) for size in (low, high) if size)
        raise UsageError(
            f"--batch-tokens {format_tokens(step)} are no whole sequences of {format_tokens(tokens)} tokens; give {near}"
        )
    return step // tokens


def _assumed(args: argparse.Namespace, space: Space) -> list[str]:
    """Assumptions, as sentences without a full stop."""
    found = [sentence for sentence in space.request.assumed if "ZeRO" not in sentence]
    if args.global_batch is None and args.batch_tokens is None:
        tokens = space.global_batch * space.request.layout.tokens
        sequences = f"{space.global_batch} sequence{'s' * (space.global_batch > 1)}"
        flag = "--global-batch" if args.max_seq else "--batch-tokens"
        found.append(f"a step of all ranks is of {format_tokens(tokens)} tokens, {sequences} ({flag})")
    return found


def _does_not_fit(smallest: tuple[str, dict[str, object]], *, as_json: bool) -> Infeasible:
    """Prints what would fit, and returns the error."""
    words, summary = smallest
    if as_json:
        print(json.dumps({"status": "infeasible", "message": words, **summary}))
    return Infeasible(words)
