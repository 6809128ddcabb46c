"""`memo profile`: measures the saved bytes, compute time and recompute time of each layer in real steps.

The profile is the input of `memo plan --profile`. The measurements, and torch with them, are in memo.profiling.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Annotated

import memo
from memo.cli.inputs.flag_types import Count, Flag, Force, Json, OutputFile
from memo.cli.inputs.step_source import OWN_MODEL, StepOptions
from memo.cli.terminal.output_files import display_name, refuse_existing
from memo.cli.terminal.progress import WaitingLine
from memo.errors import ExitCode, UsageError
from memo.gpt import Precision
from memo.gpt.arithmetic import StepLayout, derive_profile, parameter_count
from memo.mip import encode
from memo.mip.activation import profile_to_json
from memo.mip.address import write_file
from memo.mip.inputs import hardware_preset
from memo.trace import printable
from memo.units import format_bytes, format_duration, format_tokens, text_table

if TYPE_CHECKING:
    from memo.mip.inputs import LayerProfile, Profile

EPILOG = f"""\
example:
  memo profile --model tiny --seq 2k -o profile.json
  memo plan --profile profile.json --gpu machine.json --device 1GiB -o plan.json

{OWN_MODEL}"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(StepOptions):
    """Options of `memo profile`."""

    repeats: Count = 3
    """Number of times that each kind of step runs; the shortest time counts."""
    disk: Annotated[str | None, Flag(metavar="DIR")] = None
    """Directory of the scratch file (default: the system's temporary directory)."""
    output: OutputFile | None = None
    """Write the profile to FILE as JSON."""
    force: Force = False
    json: Json = False


def run(args: Options) -> ExitCode:
    """Measures the step, writes the profile and prints it."""
    refuse_existing(args.output, force=args.force)
    if args.disk is not None and not os.path.isdir(args.disk):
        raise UsageError(f"--disk {display_name(args.disk)}: no such directory")
    steps = 2 * args.repeats + 6
    what = f"measuring about {steps} steps of {args.model} at {format_tokens(args.seq)}"
    with WaitingLine("memo profile", what, quiet=args.json):
        if args.is_preset:
            _require_room(args)
        profile = memo.profile(
            args.builder(),
            name=args.model,
            batch=args.batch,
            tokens=args.seq,
            repeats=args.repeats,
            disk=args.disk,
        )
    if args.output:
        write_file(args.output, profile_to_json(profile), overwrite=args.force)
    if args.json:
        print(json.dumps(encode(profile)))
        return ExitCode.OK
    print(_table(profile))
    if args.output:
        print(f"Wrote {display_name(args.output)}")
    return ExitCode.OK


def _require_room(args: Options) -> None:
    """Checks that host memory holds a plain step with AdamW's state, before anything is built.

    Raises:
        UsageError: says what the step needs, what is free, and what to do instead.
    """
    from memo.swap import available_host_bytes

    precision, config = Precision(args.precision), args.config
    # The machine decides times only.
    derived = derive_profile(
        config, hardware_preset("h100"), StepLayout(tokens=args.seq, batch=args.batch), precision=precision
    )
    by_name = {layer.name: layer for layer in derived.classes}
    saved = sum(by_name[name].full_bytes for name in derived.layers)
    state = 4 * (2 if precision is Precision.BF16 else 4) * parameter_count(config)  # weight, gradient, two moments
    free = available_host_bytes()
    if state + saved > free:
        raise UsageError(
            f"a step of {args.model} at {format_tokens(args.seq)} needs {format_bytes(state + saved)} of host memory "
            f"({format_bytes(state)} for weights, gradients and optimizer, {format_bytes(saved)} for saved tensors), and "
            f"{format_bytes(free)} are free; measure fewer layers, as --layers 2, or plan by arithmetic with memo plan "
            f"--model {args.model}"
        )


def _table(profile: Profile) -> str:
    signature = profile.signature
    rows = [row for layer in profile.classes for row in _rows(layer, profile.layers.count(layer.name))]
    ends = [
        (name, "1", "-", "-", format_duration(end.forward_s), format_duration(end.backward_s), "-")
        for name, end in (("embedding", profile.embedding), ("head", profile.head))
    ]
    header = ("class and point", "layers", "saved", "transient", "forward", "backward", "recompute")
    return (
        f"{printable(signature.model)}, {signature.batch} x {format_tokens(signature.tokens)} tokens, {signature.dtype}\n\n"
        f"{text_table(header, [*rows, *ends])}\n\noptimizer {format_duration(profile.optimizer_s)}"
    )


def _rows(layer: LayerProfile, count: int) -> list[tuple[str, ...]]:
    whole = (
        printable(layer.name, limit=30),
        f"{count}",
        format_bytes(layer.full_bytes),
        format_bytes(layer.transient_bytes),
        format_duration(layer.forward_s),
        format_duration(layer.backward_s),
        "-",
    )
    points = [
        (
            f"  {known.name}",
            "",
            format_bytes(layer.fixed_bytes + known.saved_bytes),
            format_bytes(layer.backward_transient_bytes + known.held_bytes) if known.held_bytes else "",
            "",
            "",
            format_duration(known.recompute_s),
        )
        for known in layer.points[1:]
    ]
    return [whole, *points]
