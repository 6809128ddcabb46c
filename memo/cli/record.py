"""`memo record`: records the allocations of one training step on tensors without bytes, so no GPU is needed.

The trace goes to a file, or to standard output where that is a pipe: `memo record ... | memo pack`. The recording, and torch
with it, is in memo.record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

from memo.allocator import AllocationTrace
from memo.cli.inputs.fields import given_fields
from memo.cli.inputs.flag_types import Alpha, Count, Flag, Force, Json, OutputFile
from memo.cli.inputs.step_source import OWN_MODEL, StepOptions
from memo.cli.terminal.output_files import display_name, refuse_existing
from memo.cli.terminal.progress import WaitingLine
from memo.errors import ExitCode, UsageError
from memo.gpt import Precision
from memo.mip.address import problem_to_csv, problem_to_json, write_file
from memo.parallel import Layout
from memo.units import format_bytes, format_tokens, text_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from memo.record import Recording, Step

EPILOG = f"""\
examples:
  memo record --model 7b --seq 1m --alpha 0.25 -o trace.csv && memo pack trace.csv
  memo record --model mymodel:build --seq 32k --checkpoint | memo pack
  memo record --model mymodel:build --seq 32k --optimizer adam,foreach=False -o trace.csv
  memo record --model 7b --seq 1m --tp 8 --alpha 1 | memo pack

{OWN_MODEL}Here it may also return (model, step, optimizer), or a step alone, which may run backward and the optimizer itself
and return None.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(StepOptions):
    """Options of `memo record`."""

    precision: Annotated[str, Flag(choices=tuple(map(str, Precision)), metavar=None)] = "bf16"
    tp: Count = 1
    """Record one rank of N-way tensor parallelism."""
    cp: Count = 1
    """Record one rank of N-way context parallelism."""
    no_sequence_parallel: bool = False
    """With --tp: every rank keeps all tokens between the matrix products (default: a share of them)."""
    alpha: Annotated[Alpha | None, Flag(one_of="way")] = None
    """Offload activations: move at most the fraction F, from 0 to 1, of what can be recomputed (default: no offloading)."""
    checkpoint: Annotated[bool, Flag(one_of="way")] = False
    """Recompute every layer in backward."""
    optimizer: Annotated[str | None, Flag(nargs="?", const="adamw")] = None
    """Include the optimizer's update and the release of the gradients: a name of torch.optim or module:Class, with
    arguments, such as sgd,momentum=0.9 (without a name: adamw); a step that brings its own needs no option (default: no
    update)."""
    exact: bool = False
    """Record requested sizes instead of CUDA's multiples of 512 bytes."""
    assume: Annotated[float | None, Flag(one_of="reads", metavar="NUMBER")] = None
    """Where the step reads a tensor that is computed from weights, such as loss.item(), each element is NUMBER; of a
    comparison, 0 is false and any other number true (default: that is an error)."""
    real: Annotated[bool, Flag(one_of="reads")] = False
    """Use real tensors, which a step may read."""
    output: OutputFile | None = None
    """Write the trace: JSON if FILE ends in .json, else CSV."""
    force: Force = False
    json: Json = False


def run(args: Options) -> ExitCode:
    """Records the step, writes the trace and prints a summary."""
    refuse_existing(args.output, force=args.force)
    what = f"recording a step of {args.model} at {format_tokens(args.seq)}"
    with WaitingLine("memo record", what, quiet=args.json):
        recording = _record(args)
    if args.output:
        to_text = problem_to_json if args.output.endswith(".json") else problem_to_csv
        write_file(args.output, to_text(recording.trace.problem()), overwrite=args.force)
    piped = not (args.output or args.json or sys.stdout.isatty())
    if args.json:
        print(json.dumps(_summary(args, recording)))
        return ExitCode.OK
    print(_table(args, recording), file=sys.stderr if piped else sys.stdout)
    if piped:
        sys.stdout.write(problem_to_csv(recording.trace.problem()))
    if args.output:
        print(f"Wrote {display_name(args.output)}")
    return ExitCode.OK


def _record(args: Options) -> Recording:
    collecting = gc.isenabled()
    gc.disable()  # importing torch makes a million objects and no garbage: a quarter of this command's time
    try:
        with contextlib.ExitStack() as stack:
            build = _builder(args, stack)
            from memo.record import record_step

            return record_step(
                build,
                checkpointed=args.checkpoint,
                **given_fields(args, "alpha optimizer exact real assume"),
            )
    finally:
        if collecting:
            gc.enable()


def _builder(args: Options, stack: contextlib.ExitStack) -> Callable[[], Step]:
    """Builder of the step of one rank; `stack` closes the simulated process group."""
    layout = Layout(tp=args.tp, cp=args.cp, sequence_parallel=not args.no_sequence_parallel)
    if layout.ranks == 1:
        return args.builder(needs_loss=False)
    if not args.is_preset:
        raise UsageError("--tp and --cp apply to named models only; leave them out")
    config = args.config
    layout.check(config, seq=args.seq, batch=args.batch, microbatches=1)
    if args.real:
        raise UsageError("--real needs values from the other ranks of --tp and --cp, which are not run; leave it out")
    from memo.parallel import simulated_rank
    from memo.record import rank_step

    world = stack.enter_context(simulated_rank(layout))
    return rank_step(config, world, batch=args.batch, tokens=args.seq, precision=Precision(args.precision))


def _summary(args: Options, recording: Recording) -> dict[str, Any]:
    """Object that `--json` prints; sizes in bytes."""
    trace = recording.trace
    return {
        "model": args.model,
        "batch": args.batch,
        "tokens": args.seq,
        "layers": recording.layers,
        "tp": args.tp,
        "cp": args.cp,
        "sequence_parallel": args.tp > 1 and not args.no_sequence_parallel,
        "alpha": args.alpha,
        "checkpoint": args.checkpoint,
        "optimizer": args.optimizer,
        "allocations": len(trace.allocations),
        "events": _events(trace),
        "peak_nbytes": trace.peak_nbytes,
        "static_nbytes": recording.static_nbytes,
        "saved_nbytes": {role.value: nbytes for role, nbytes in recording.saved_nbytes.items()},
        "moved_nbytes": recording.moved_nbytes,
        "peak_away_nbytes": recording.peak_away_nbytes,
        "whole_layers": recording.whole_layers,
        "output": args.output,
    }


def _events(trace: AllocationTrace) -> int:
    return sum(1 for _ in trace.events())


def _table(args: Options, recording: Recording) -> str:
    trace = recording.trace
    way = "checkpointed" if args.checkpoint else "plain" if args.alpha is None else f"offloaded, alpha {args.alpha:g}"
    rows = [
        ("allocations", f"{len(trace.allocations):,}"),
        ("peak of the step", format_bytes(trace.peak_nbytes)),
        ("parameters and state", format_bytes(recording.static_nbytes)),
    ]
    rows += [(f"saved, {role}", format_bytes(nbytes)) for role, nbytes in recording.saved_nbytes.items()]
    if args.alpha is not None:
        rows += [
            ("offloaded", format_bytes(recording.moved_nbytes)),
            ("most away at once", format_bytes(recording.peak_away_nbytes)),
        ]
    ranks = "".join(f", one rank of {name} {size}" for name, size in (("tp", args.tp), ("cp", args.cp)) if size > 1)
    head = f"{args.model}, {recording.layers} layers, {args.batch} x {format_tokens(args.seq)} tokens{ranks}, {way}"
    whole = [f"whole tensors: {name}: {reason}" for name, reason in recording.whole_layers.items()]
    return "\n".join([text_table((head, ""), rows), *whole])
