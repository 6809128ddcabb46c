"""`memo rehearse`: runs the first steps of a training on a simulated GPU, and says whether it fits and how long steps take.

The engine, the planner and the tiers are those of a run; the GPU, its link, host memory and disk are simulated. The
rehearsal, and torch with it, is in memo.rehearsal.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING

from memo.cli.inputs.machine import add_machine_flags, machine_of
from memo.cli.inputs.rehearsed_model import add_rehearsed_model, rehearsed_step
from memo.cli.inputs.step_source import OWN_MODEL
from memo.cli.tables.rehearsal import rehearsal_summary, settled_line, step_line, what_would_fit
from memo.cli.terminal.output_files import file_path, print_written, refuse_existing
from memo.errors import ExitCode, Infeasible, MemoError, UsageError
from memo.units import format_bytes, parse_bytes, parse_tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from memo.record import Step
    from memo.rehearsal import Rehearsal, RehearsedStep, SimulatedMachine

EPILOG = f"""\
examples:
  memo rehearse --model llama-3-8b --lora 16 --seq 32k --loss-without-logits --gpu h100
  memo rehearse --model qwen3-8b --lora 16 --lengths 8k,32k,12k --device 40GiB --host 64GiB
  memo rehearse --model ./config.json --seq 16k --gpu rtx4090 --disk-space 1TiB --disk-write 3GB --disk-read 6GB

Exit code 3: the training does not fit, or a budget was exceeded. Exit code 4: no plan settled in as many steps as are tried.

{OWN_MODEL}"""
_LAYER_S = 0.08
"""Processor seconds of one layer in one step, forward and backward: 0.075 for a layer of Qwen3-8B with adapters, at 32k
tokens, on one core of a server; it depends on the number of operators and not on their sizes."""
_START_S = 5.0
"""Seconds of imports, building and the trials of the first step."""
_EXPECTED_STEPS = 8
"""Steps until a plan has settled, and two by it: five to nine were seen."""
_SAY_FROM_S = 20.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `memo rehearse`."""
    add_rehearsed_model(parser.add_argument_group("model"))
    _add_step(parser.add_argument_group("step"))
    _add_machine(parser.add_argument_group("machine and budgets"))
    parser.add_argument("--steps", type=int, metavar="N", help="steps to run (default: until the plan has settled)")
    parser.add_argument(
        "--assume",
        type=float,
        metavar="NUMBER",
        help="where the step reads a tensor's contents, such as loss.item(), each element is NUMBER (default: an error)",
    )
    parser.add_argument("--trace", type=file_path, metavar="FILE", help="write a trace, which memo trace reads")
    parser.add_argument("-f", "--force", action="store_true", help="overwrite an existing trace")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def _add_step(step: argparse._ArgumentGroup) -> None:
    step.add_argument("--seq", metavar="TOKENS", help="sequence length in tokens, such as 32k (default 1k)")
    step.add_argument("--batch", type=int, default=1, metavar="N", help="sequences in a microbatch (default 1)")
    step.add_argument(
        "--lengths",
        metavar="TOKENS,...",
        help="sequence lengths of the steps, one after another, again and again, such as 8k,32k,12k (default: --seq)",
    )
    step.add_argument("--accumulate", type=int, default=1, metavar="N", help="microbatches in a step (default 1)")
    step.add_argument(
        "--optimizer",
        default="adamw",
        metavar="NAME",
        help="a name of torch.optim or module:Class, with arguments, such as sgd,momentum=0.9; none is none, or what a "
        "model of your own brings (default adamw)",
    )
    step.add_argument("--attach", action="store_true", help="attach the manager (default: enter it around the forward)")
    step.add_argument(
        "--way",
        choices=("memo", "checkpoint", "keep"),
        default="memo",
        help="what is done with activations: memo.offload, torch's checkpoint of every layer, or nothing (default memo)",
    )
    step.add_argument(
        "--alpha",
        type=float,
        metavar="F",
        help="move at most the fraction F, from 0 to 1, of what can be recomputed (default: planned)",
    )


def _add_machine(where: argparse._ArgumentGroup) -> None:
    add_machine_flags(where, default="h100")
    where.add_argument("--device", metavar="SIZE", help="budget of device memory (default: 94 %% of the GPU's)")
    where.add_argument(
        "--host-memory", metavar="SIZE", help="free host memory (default: one GPU's share of the node's)"
    )
    where.add_argument(
        "--host", default="auto", metavar="SIZE", help="budget of host memory (default: 70 %% of what is free)"
    )
    where.add_argument("--disk-space", default="0", metavar="SIZE", help="disk space; 0 is none (default 0)")
    where.add_argument("--disk-budget", metavar="SIZE", help="budget of disk space (default: all of --disk-space)")
    for what in ("write", "read"):
        where.add_argument(
            f"--disk-{what}",
            metavar="SIZE",
            help=f"bytes that the disk {what}s in a second, such as 5GB (default: one GPU's share of the node's)",
        )


def run(args: argparse.Namespace) -> ExitCode:
    """Rehearses, prints each step, the report and whether it fits; exit code 3 where it does not."""
    lengths = _lengths(args)
    tokens = max(lengths) if lengths else parse_tokens(args.seq or "1k", what="--seq")
    _check(args)
    refuse_existing(args.trace, force=args.force)
    machine_options = _machine_options(args)
    build = rehearsed_step(args, tokens)
    from memo.rehearsal import SimulatedMachine, Way, rehearse

    machine = SimulatedMachine(machine_of(args), **machine_options)
    budget = machine.device_budget(None if args.device is None else parse_bytes(args.device)).total_bytes

    decisions = [""]

    def on_step(step: RehearsedStep) -> None:
        if not args.json:
            print(step_line(step, budget, before=decisions[-1]), flush=True)
        decisions.append(step.decision)

    options: dict[str, Any] = {} if args.alpha is None else {"alpha": args.alpha}
    found = rehearse(
        _with_estimate(build, args, len(lengths)),
        machine,
        way=Way(args.way),
        device=args.device,
        host=args.host,
        disk_budget=args.disk_budget,
        lengths=lengths,
        accumulate=args.accumulate,
        optimizer=None if args.optimizer == "none" else args.optimizer,
        attach=args.attach,
        steps=args.steps,
        trace=None if args.trace is None else str(args.trace),
        on_step=on_step,
        **options,
    )
    return _print(args, machine, found)


def _print(args: argparse.Namespace, machine: SimulatedMachine, found: Rehearsal) -> ExitCode:
    if args.json:
        head = {"model": args.model, "gpu": machine.hardware.name, "way": args.way}
        print(json.dumps(head | rehearsal_summary(found), allow_nan=False))
    else:
        for text in found.warned:
            print(f"warning: {' '.join(text.split())}")
        if found.report:
            print(found.report)
        if args.trace:
            print_written(args.trace)
        if found.steps:
            print(settled_line(found))
    if found.failure is not None and found.has_room:
        raise MemoError(found.failure)
    misfit = what_would_fit(found, most_device=machine.device_budget(None).total_bytes)
    if misfit is not None:
        raise Infeasible(misfit)
    return ExitCode.OK if found.settled or args.steps is not None else ExitCode.NO_PLAN_IN_TIME


def _check(args: argparse.Namespace) -> None:
    for flag in ("batch", "accumulate", "steps"):
        number = getattr(args, flag)
        if number is not None and number < 1:
            raise UsageError(f"--{flag} {number} is less than 1")
    if args.alpha is not None and not 0 <= args.alpha <= 1:
        raise UsageError(f"--alpha {args.alpha} is not between 0 (recompute all) and 1 (move all)")
    for flag in ("alpha", "trace", "attach"):
        if args.way != "memo" and getattr(args, flag) not in (None, False):
            raise UsageError(f"--{flag} applies to --way memo; leave it out")


def _lengths(args: argparse.Namespace) -> list[int]:
    if args.lengths is None:
        return []
    if args.seq is not None:
        raise UsageError("--seq and --lengths exclude each other; give one of them")
    return [parse_tokens(text, what="--lengths") for text in args.lengths.split(",")]


def _machine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the simulated machine; the sizes of all budgets are checked."""
    hardware = machine_of(args)
    if args.device is not None:
        device = parse_bytes(args.device, what="--device")
        if not 0 < device <= hardware.device_bytes:
            most = format_bytes(hardware.device_bytes, down=True)
            raise UsageError(
                f"--device {args.device} is not within the {most} of {hardware.name}; give another size or --gpu"
            )
    disk = parse_bytes(args.disk_space, what="--disk-space")
    if args.host != "auto" and parse_bytes(args.host, what="--host") == 0 and not disk and args.way == "memo":
        raise UsageError("--host 0 without --disk-space leaves nowhere to move activations to; give one of them")
    for flag in ("disk_budget", "disk_write", "disk_read"):
        given = getattr(args, flag)
        if given is None:
            continue
        size = parse_bytes(given, what=f"--{flag.replace('_', '-')}")
        if not disk:
            raise UsageError(f"--{flag.replace('_', '-')} needs a disk; give --disk-space, such as --disk-space 1TiB")
        if not size:
            raise UsageError(
                f"--{flag.replace('_', '-')} 0: a disk without space or speed is none; leave out --disk-space"
            )
    if args.disk_budget is not None and parse_bytes(args.disk_budget) > disk:
        raise UsageError(f"--disk-budget {args.disk_budget} is more than --disk-space {args.disk_space}")
    if args.assume is not None and not math.isfinite(args.assume):
        raise UsageError(f"--assume {args.assume} is not a finite number")
    return {
        "host_bytes": None if args.host_memory is None else parse_bytes(args.host_memory, what="--host-memory"),
        "disk_bytes": disk,
        "disk_write_bytes_per_s": None if args.disk_write is None else parse_bytes(args.disk_write),
        "disk_read_bytes_per_s": None if args.disk_read is None else parse_bytes(args.disk_read),
        "assume": args.assume,
    }


def _with_estimate(build: Callable[[], Step], args: argparse.Namespace, lengths: int) -> Callable[[], Step]:
    """The builder; once the model is there it says how long the rehearsal will take, if that is long.

    Estimated as microbatches x layers x the seconds that a layer was measured to take (_LAYER_S), and a start.
    """

    def built() -> Step:
        from memo.swap import find_layers

        step = build()
        layers = len(find_layers(step.model, step.layers))
        steps = args.steps or (_EXPECTED_STEPS + 3 * max(0, lengths - 1))
        seconds = _START_S + steps * args.accumulate * layers * _LAYER_S
        if seconds > _SAY_FROM_S and (not args.json or sys.stderr.isatty()):
            about = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
            print(f"memo rehearse: {layers} layers, about {about}", file=sys.stderr, flush=True)
        return step

    return built
