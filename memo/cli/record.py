"""`memo record`: what one training step allocates, found out without a GPU and without its memory.

The trace goes to a file, or to standard output where that is a pipe: `memo record ... | memo pack`. The work, and torch with
it, is in memo.record.recording.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import sys
from typing import TYPE_CHECKING, Any

from memo.allocator import AllocationTrace, trace_to_csv, trace_to_json
from memo.cli.address_tables import table
from memo.cli.output_files import file_name, refuse_existing, shown
from memo.errors import ExitCode, UsageError
from memo.gpt import PRESETS, GPTConfig, Precision, preset
from memo.mip.address import write_file
from memo.parallel import Layout
from memo.units import format_bytes, format_tokens, parse_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from memo.record import Recording, Step

_EPILOG = """\
examples:
  memo record --model 7b --seq 1m --alpha 0.25 -o trace.csv && memo pack trace.csv
  memo record --model mymodel:build --seq 32k --checkpoint | memo pack
  memo record --model 7b --seq 1m --tp 8 --alpha 1 | memo pack

A model of your own is a function in a module that can be imported from here. It is called with the keywords batch and
tokens, and returns (model, loss): a module on the CPU, and a callable that runs one forward and returns the loss.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `memo record`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "--model",
        default="tiny",
        metavar="NAME",
        help=f"one of {', '.join(PRESETS)}, or module:function (default tiny)",
    )
    parser.add_argument("--variant", choices=("gpt", "llama"), default="gpt", help="the manner of the layers")
    parser.add_argument("--layers", type=int, metavar="N", help="instead of the preset's")
    parser.add_argument("--seq", default="1k", metavar="TOKENS", help="such as 32k or 1m (default 1k)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences (default 1)")
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="of a rank that shares matrices with others (default 1)"
    )
    parser.add_argument(
        "--cp", type=int, default=1, metavar="N", help="of a rank that shares the tokens of a sequence (default 1)"
    )
    parser.add_argument(
        "--no-sequence-parallel",
        action="store_true",
        help="with --tp: every rank holds all tokens between the matrices",
    )
    parser.add_argument(
        "--precision", choices=[str(p) for p in Precision], default="bf16", help="of a named model (default bf16)"
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--alpha", type=float, metavar="F", help="offloaded: the fraction of tokens moved, not recomputed; 1 moves all"
    )
    way.add_argument("--checkpoint", action="store_true", help="every layer is recomputed whole in backward")
    parser.add_argument("--optimizer", action="store_true", help="with AdamW's step and the gradients' release")
    parser.add_argument("--exact", action="store_true", help="sizes as asked for, not in CUDA's multiples of 512 bytes")
    parser.add_argument("--real", action="store_true", help="with real tensors, where a step needs their contents")
    parser.add_argument(
        "-o", "--output", type=file_name, metavar="FILE", help="the trace: CSV, or JSON if it ends in .json"
    )
    parser.add_argument("-f", "--force", action="store_true", help="overwrite an existing file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> ExitCode:
    """Records, writes, reports."""
    if args.batch < 1:
        raise UsageError("--batch must be at least 1")
    if args.alpha is not None and not 0 <= args.alpha <= 1:
        raise UsageError(f"--alpha {args.alpha} is no fraction; give a number from 0 (recompute all) to 1 (move all)")
    refuse_existing(args.output, force=args.force)
    tokens = parse_tokens(args.seq, what="--seq")
    recording = _record(args, tokens)
    if args.output:
        to_text = trace_to_json if args.output.endswith(".json") else trace_to_csv
        write_file(args.output, to_text(recording.trace), overwrite=args.force)
    piped = not (args.output or args.json or sys.stdout.isatty())
    if args.json:
        print(json.dumps(_summary(args, tokens, recording)))
        return ExitCode.OK
    print(_table(args, tokens, recording), file=sys.stderr if piped else sys.stdout)
    if piped:
        sys.stdout.write(trace_to_csv(recording.trace))
    if args.output:
        print(f"Wrote {shown(args.output)}")
    return ExitCode.OK


def _record(args: argparse.Namespace, tokens: int) -> Recording:
    collecting = gc.isenabled()
    gc.disable()  # importing torch makes a million objects and no garbage: a quarter of this command's time
    try:
        with contextlib.ExitStack() as stack:
            build = _step_maker(args, tokens, stack)
            from memo.record import record_step

            return record_step(
                build,
                alpha=args.alpha,
                checkpointed=args.checkpoint,
                optimizer=args.optimizer,
                exact=args.exact,
                real=args.real,
            )
    finally:
        if collecting:
            gc.enable()


def _step_maker(args: argparse.Namespace, tokens: int, stack: contextlib.ExitStack) -> Callable[[], Step]:
    """`stack` ends what the step needs around it."""
    layout = Layout(tp=args.tp, cp=args.cp, sequence_parallel=not args.no_sequence_parallel)
    if ":" in args.model:
        if args.layers is not None or args.variant != "gpt" or layout.ranks > 1:
            raise UsageError("--layers, --variant, --tp and --cp are for the named models")
        from memo.record import load_step

        return functools.partial(load_step(args.model), batch=args.batch, tokens=tokens)
    config = preset(args.model, variant=args.variant, layers=args.layers)
    if config.positions == "learned" and tokens > config.max_seq:
        config = preset(args.model, variant=args.variant, layers=args.layers, max_seq=tokens)
    size: dict[str, Any] = {"batch": args.batch, "tokens": tokens, "precision": Precision(args.precision)}
    if layout.ranks > 1:
        return _rank_step_maker(config, layout, args.real, size, stack)
    from memo.record import gpt_step

    return functools.partial(gpt_step, config, **size)


def _rank_step_maker(
    config: GPTConfig, layout: Layout, real: bool, size: dict[str, Any], stack: contextlib.ExitStack
) -> Callable[[], Step]:
    """One rank's part, played: the others do not exist."""
    layout.check(config, seq=size["tokens"], batch=size["batch"], microbatches=1)
    if real:
        raise UsageError("--real computes with numbers, of which the other ranks of --tp and --cp would give none")
    from memo.parallel import simulated_rank
    from memo.record import rank_step

    return rank_step(config, stack.enter_context(simulated_rank(layout)), **size)


def _summary(args: argparse.Namespace, tokens: int, recording: Recording) -> dict[str, Any]:
    """What `--json` prints; sizes in bytes."""
    trace = recording.trace
    return {
        "model": args.model,
        "batch": args.batch,
        "tokens": tokens,
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


def _table(args: argparse.Namespace, tokens: int, recording: Recording) -> str:
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
            ("moved off the device", format_bytes(recording.moved_nbytes)),
            ("most away at once", format_bytes(recording.peak_away_nbytes)),
        ]
    ranks = "".join(f", one rank of {name} {size}" for name, size in (("tp", args.tp), ("cp", args.cp)) if size > 1)
    head = f"{args.model}, {recording.layers} layers, {args.batch} x {format_tokens(tokens)} tokens{ranks}, {way}"
    whole = [f"whole tensors: {name}: {reason}" for name, reason in recording.whole_layers.items()]
    return "\n".join([table((head, ""), rows), *whole])
