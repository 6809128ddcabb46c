"""`memo explain`: runs two forwards of a small copy of a model, and shows what each kind of layer keeps and replays.

The explanation, and torch with it, is in memo.swap. The first forward makes the plan, the second is explained: from then on
what the plan keeps is there to be kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memo
from memo.cli.inputs.step_source import OWN_MODEL, add_step_options, is_preset, step_builder
from memo.cli.terminal.file_kinds import FileKind, require_kind
from memo.cli.terminal.progress import WaitingLine
from memo.errors import ExitCode, UsageError
from memo.gpt import Precision
from memo.hugging_face import configuration_from, model_class
from memo.units import format_bytes, format_tokens, parse_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memo.record import Step
    from memo.swap import LayerExplanation

EPILOG = f"""\
examples:
  memo explain --model tiny --variant llama
  memo explain --model config.json --seq 512 --level matmuls
  memo explain --model mymodel:build --layer 0 --keep aten.mm --json

A file that ends in .json is a configuration of Hugging Face's transformers. Of it and of a preset so few layers are built,
with random weights, that each kind of layer is among them.

{OWN_MODEL}"""

_LEVELS = {"matmuls": "SAVE_MATMULS", "attention": "SAVE_ATTENTION", "input": "SAVE_INPUT"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `memo explain`."""
    add_step_options(parser, precisions=("fp32", "bf16"), default="fp32")
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--alpha", type=float, metavar="F", help="move at most the fraction F of what can be recomputed (default 0)"
    )
    way.add_argument("--level", choices=tuple(_LEVELS), help="level of all layers, instead of --alpha")
    for name, about in (
        ("keep", "whose results are never recomputed"),
        ("repeat", "that may be recomputed at any level"),
    ):
        parser.add_argument(
            f"--{name}", nargs="+", metavar="NAME", help=f"operators or groups {about}, such as aten.mm or attention"
        )
    parser.add_argument("--layer", metavar="NAME", help="explain this layer, by name or position (default: all kinds)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> ExitCode:
    """Runs the forwards and prints what was found."""
    if args.batch < 1:
        raise UsageError("--batch must be at least 1")
    if args.alpha is not None and not 0 <= args.alpha < 1:
        raise UsageError(f"--alpha {args.alpha} is not from 0 to less than 1, where everything is offloaded")
    tokens = parse_tokens(args.seq, what="--seq")
    with WaitingLine("memo explain", f"building {args.model}", quiet=args.json) as waiting:
        step = _step(args, tokens)
        waiting.say(f"running two forwards of {args.model}")
        explained, untold = _explained(args, step)
    if args.json:
        kinds = [{**found.to_json(), "layers": names} for found, names in explained]
        print(
            json.dumps({"model": args.model, "batch": args.batch, "tokens": tokens, "kinds": kinds, "untold": untold})
        )
        return ExitCode.OK
    print(f"{args.model}, {args.batch} x {format_tokens(tokens)} tokens, {args.precision}")
    for found, names in explained:
        print(f"\n{found}")
        if len(names) > 1:
            print(f"alike: {', '.join(names[1:])}")
    for reason in untold.values():
        print(f"\n{reason}")
    return ExitCode.OK


def _step(args: argparse.Namespace, tokens: int) -> Step:
    if args.model.endswith(".json"):
        if args.variant is not None:
            raise UsageError("--variant applies to presets only; leave it out")
        return _hugging_face_step(args, tokens)
    if is_preset(args) and args.layers is None:
        args.layers = 2
    return step_builder(args, tokens)()


def _explained(args: argparse.Namespace, step: Step) -> tuple[list[tuple[LayerExplanation, list[str]]], dict[str, str]]:
    """The explanation of each kind of layer with the layers' names; and the layers that have none, with the reason."""
    from memo.swap import Level, available_host_bytes

    manager = memo.offload(
        step.model,
        layers=step.layers,
        alpha=args.alpha or 0.0,
        keep=args.keep,
        repeat=args.repeat,
        host=max(1, available_host_bytes() // 2),
        min_bytes=1,
    )
    try:
        names = [layer.name for layer in manager.layers]
        if args.level is not None:
            manager.choose_levels(dict.fromkeys(names, Level[_LEVELS[args.level]]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # what is refused stands in the explanation
            for _ in range(2):
                with manager:
                    step.loss()
        if args.layer is not None:
            found = manager.explain(int(args.layer) if args.layer.isdecimal() else args.layer)
            return [(found, [found.layer])], {}
        kinds: dict[LayerExplanation, list[str]] = {}
        untold: dict[str, str] = {}
        for name in names:
            try:
                found = manager.explain(name)
            except UsageError as error:
                untold[name] = str(error)
            else:
                kinds.setdefault(dataclasses.replace(found, layer=""), []).append(name)
        return [(dataclasses.replace(found, layer=of[0]), of) for found, of in kinds.items()], untold
    finally:
        manager.close()


def _hugging_face_step(args: argparse.Namespace, tokens: int) -> Step:
    """A step of a model from its configuration, on the CPU, with random weights.

    Raises:
        UsageError: there is no such file, or no model can be made of it, or it has no room.
    """
    if Path(args.model).is_file():
        require_kind(args.model, FileKind.MODEL_CONFIG)
    config = configuration_from(args.model)
    made = model_class(config, name=args.model)
    import torch

    from memo.record import Step
    from memo.swap import available_host_bytes

    config.use_cache = False
    _shorten(config.get_text_config(), args.layers)
    with torch.device("meta"):
        nbytes = sum(parameter.nbytes for parameter in made(config).parameters())
    free = available_host_bytes()
    if 2 * nbytes > free:
        raise UsageError(
            f"{args.model}: the weights take {format_bytes(nbytes)}, and {format_bytes(free)} are free; lower --layers, or "
            "the sizes in the file"
        )
    model = made(config).to(torch.float32 if args.precision == Precision.FP32 else torch.bfloat16)
    ids = torch.arange(args.batch * tokens).view(args.batch, tokens) % config.get_text_config().vocab_size
    return Step(model=model, loss=lambda: model(input_ids=ids, labels=ids).loss, inputs=(ids,))


def _shorten(config: Any, layers: int | None) -> None:
    """Leaves as many layers as are asked for, or as many as have one of each kind."""
    kinds: Sequence[Any] = getattr(config, "layer_types", None) or ()
    if layers is None:
        layers = max(
            [2, 1 + (getattr(config, "first_k_dense_replace", None) or 0), *(1 + kinds.index(kind) for kind in kinds)]
        )
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    if kinds:
        config.layer_types = list(kinds)[: config.num_hidden_layers]
