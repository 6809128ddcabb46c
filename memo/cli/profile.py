"""`memo profile`: what each layer saves, computes and repeats, measured in a real step; the input of `memo plan --profile`.

The work, and torch with it, is in memo.profiling.measure.
"""

from __future__ import annotations

import argparse
import functools
import json
from typing import TYPE_CHECKING

import memo
from memo.cli.address_tables import printable, table
from memo.cli.output_files import file_name, refuse_existing, shown
from memo.errors import ExitCode, UsageError
from memo.gpt import PRESETS, Precision, preset
from memo.mip import encode
from memo.mip.activation import profile_to_json
from memo.mip.address import write_file
from memo.units import format_bytes, format_duration, format_tokens, parse_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from memo.mip.inputs import LayerProfile, Profile
    from memo.record import Step

__all__ = ["configure", "run"]

_EPILOG = """\
example:
  memo profile --model tiny --seq 2k -o profile.json
  memo plan --profile profile.json --gpu machine.json --device 1GiB -o plan.json

A model of your own is a function in a module that can be imported from here. It is called with the keywords batch and
tokens, and returns (model, loss): a module on the CPU, and a callable that runs one forward and returns the loss.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `memo profile`."""
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
    parser.add_argument("--seq", default="1k", metavar="TOKENS", help="such as 4k (default 1k)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences (default 1)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of a named model (default fp32)")
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="steps of each kind; the shortest times count"
    )
    parser.add_argument("--disk-dir", metavar="DIR", help="for what moves while levels are measured")
    parser.add_argument("-o", "--output", type=file_name, metavar="FILE", help="write the profile")
    parser.add_argument("-f", "--force", action="store_true", help="overwrite an existing file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> ExitCode:
    """Measures, writes, reports."""
    if args.batch < 1 or args.repeats < 1:
        raise UsageError("--batch and --repeats must be at least 1")
    refuse_existing(args.output, force=args.force)
    tokens = parse_tokens(args.seq, what="--seq")
    build = _step_maker(args, tokens)
    profile = memo.profile(
        build, name=args.model, batch=args.batch, tokens=tokens, repeats=args.repeats, disk=args.disk_dir
    )
    if args.output:
        write_file(args.output, profile_to_json(profile), overwrite=args.force)
    if args.json:
        print(json.dumps(encode(profile)))
        return ExitCode.OK
    print(_table(profile))
    if args.output:
        print(f"Wrote {shown(args.output)}")
    return ExitCode.OK


def _step_maker(args: argparse.Namespace, tokens: int) -> Callable[[], Step]:
    if ":" in args.model:
        if args.layers is not None or args.variant != "gpt":
            raise UsageError("--layers and --variant are for the named models")
        from memo.record import load_step

        return functools.partial(load_step(args.model), batch=args.batch, tokens=tokens)
    config = preset(args.model, variant=args.variant, layers=args.layers)
    if config.positions == "learned" and tokens > config.max_seq:
        config = preset(args.model, variant=args.variant, layers=args.layers, max_seq=tokens)
    from memo.record import gpt_step

    return functools.partial(gpt_step, config, batch=args.batch, tokens=tokens, precision=Precision(args.precision))


def _table(profile: Profile) -> str:
    signature = profile.signature
    rows = [row for layer in profile.classes for row in _rows(layer, profile.layers.count(layer.name))]
    ends = [
        (name, "1", "-", "-", format_duration(end.forward_s), format_duration(end.backward_s), "-")
        for name, end in (("embedding", profile.embedding), ("head", profile.head))
    ]
    header = ("class and level", "layers", "saved", "transient", "forward", "backward", "recompute")
    return (
        f"{printable(signature.model)}, {signature.batch} x {format_tokens(signature.tokens)} tokens, {signature.dtype}\n\n"
        f"{table(header, [*rows, *ends])}\n\noptimizer {format_duration(profile.optimizer_s)}"
    )


def _rows(layer: LayerProfile, count: int) -> list[tuple[str, ...]]:
    whole = (
        printable(layer.name, width=30),
        f"{count}",
        format_bytes(layer.full_bytes),
        format_bytes(layer.transient_bytes),
        format_duration(layer.forward_s),
        format_duration(layer.backward_s),
        "-",
    )
    levels = [
        (
            f"  {known.level}",
            "",
            format_bytes(layer.fixed_bytes + known.saved_bytes),
            "",
            "",
            "",
            format_duration(known.recompute_s),
        )
        for known in layer.levels[1:]
    ]
    return [whole, *levels]
