"""`memo rehearse`: runs the first steps of a training on a simulated GPU, and says whether it fits and how long steps take.

The engine, the planner and the tiers are those of a run; the GPU, its link, host memory and disk are simulated. The
rehearsal, and torch with it, is in memo.rehearsal.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import sys
from typing import TYPE_CHECKING, Annotated, Literal

from memo.cli.inputs.fields import add_fields, given_fields, refuse_given
from memo.cli.inputs.flag_types import Alpha, Count, Flag, Force, Json, Size, WrittenFile
from memo.cli.inputs.machine import Gpu, MachineOptions, Nics, machine_of
from memo.cli.inputs.model_shape import gpt_size, namesake
from memo.cli.inputs.rehearsed_model import RehearsedModel
from memo.cli.inputs.step_source import OWN_MODEL
from memo.cli.tables.rehearsal import (
    pipeline_summary,
    pipeline_table,
    rehearsal_summary,
    settled_line,
    step_line,
    what_would_fit,
)
from memo.cli.terminal.output_files import print_written, refuse_existing
from memo.errors import ExitCode, Infeasible, MemoError, UsageError
from memo.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from memo.record import Step
    from memo.rehearsal import Rehearsal, RehearsedPipeline, RehearsedStep, SimulatedMachine

EPILOG = f"""\
examples:
  memo rehearse --model llama-3-8b --lora 16 --seq 32k --loss-without-logits --gpu h100
  memo rehearse --model qwen3-8b --lora 16 --lengths 8k,32k,12k --device 40GiB --host 64GiB
  memo rehearse --model llama3-70b --seq 32k --gpus 32 --tp 8 --pp 4 --accumulate 8
  memo rehearse --model ./config.json --seq 16k --gpu rtx4090 --disk-space 1TiB --disk-write 3GB --disk-read 6GB

Exit code 3: the training does not fit, or a budget was exceeded. Exit code 4: no plan settled in as many steps as are tried.

{OWN_MODEL}"""
_START_S = 10.0
"""Processor seconds of imports and building."""
_FIRST_S, _LATER_S = 0.03, 0.0035
"""Processor seconds for each parameter tensor of the layers in the first step under memo, which tries recompute, and in
each step. They depend on the number of operators, not on sizes: 32 layers of Llama-3-8B with adapters at 32k took 43 s on
one machine with two cores, 102 s on another that others used, too."""
_EXPECTED_STEPS = 6
"""Steps until a plan has settled, and two by it: four to nine were seen."""
_SAY_FROM_S = 20.0


def _host(text: str) -> int | str:
    return text if text == "auto" else parse_bytes(text)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise UsageError(f"{text} is not a finite number")
    return number


def _of_disk(text: str) -> int:
    if not (size := parse_bytes(text)):
        raise UsageError("a disk without space or speed is none; leave it out")
    return size


_OfDisk = Annotated[int, Flag(type=_of_disk, metavar="SIZE")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Training:
    """The training. The fields are flags."""

    optimizer: str = "adamw"
    """Name of torch.optim or module:Class, with arguments, such as sgd,momentum=0.9; none is none, or what a model of your
    own brings."""
    optimizer_offload: bool = False
    """Keep AdamW's state, gradients and a copy of the parameters in host memory and update there, as memo train does."""
    attach: bool = False
    """Attach the manager (default: enter it around the forward)."""
    way: Literal["memo", "checkpoint", "keep"] = "memo"
    """Treatment of activations: memo.offload, torch's checkpoint of every layer, or nothing."""
    alpha: Alpha | None = None
    """Move at most the fraction F, from 0 to 1, of what can be recomputed (default: planned)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Machine(MachineOptions):
    """The machine and its budgets. The fields are flags."""

    gpu: Gpu = "h100"
    device: Size | None = None
    """Budget of device memory (default: 94 % of the GPU's)."""
    net: Nics | None = None
    host_memory: Size | None = None
    """Free host memory of a node (default: the node's share for its GPUs in use)."""
    host: Annotated[int | str, Flag(type=_host, metavar="SIZE")] = "auto"
    """Budget of host memory, which a node's GPUs share (default: 70 % of what is free)."""
    disk_space: Size = 0
    """Disk space of a node; 0 is none."""
    disk_budget: _OfDisk | None = None
    """Budget of disk space (default: all of --disk-space)."""
    disk_write: _OfDisk | None = None
    """Bytes that a node's disks write in a second, such as 5GB (default: the node's share for its GPUs in use)."""
    disk_read: _OfDisk | None = None
    """Bytes that a node's disks read in a second, such as 5GB (default: the node's share for its GPUs in use)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """The rehearsal and its output. The fields are flags."""

    steps: Count | None = None
    """Steps to run (default: until the plan has settled)."""
    assume: Annotated[float | None, Flag(type=_finite, metavar="NUMBER")] = None
    """Where the step reads a tensor's contents, such as loss.item(), each element is NUMBER (default: an error)."""
    trace: WrittenFile | None = None
    """Write a trace, which memo trace reads."""
    force: Force = False
    json: Json = False


_GROUPS = {"model and step": RehearsedModel, "training": _Training, "machine and budgets": _Machine, "output": _Run}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `memo rehearse`."""
    for title, kind in _GROUPS.items():
        add_fields(parser.add_argument_group(title), kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RehearsedModel, _Training, _Machine, _Run):
    """Options of `memo rehearse`.

    Raises:
        UsageError: options contradict each other.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.way != "memo":
            refuse_given(self, "--alpha --trace --attach", "applies to --way memo; leave it out")
        if self.optimizer_offload and (self.gpus > 1 or self.optimizer != "adamw"):
            raise UsageError("--optimizer-offload is for one GPU and adamw; leave out it, or --gpus and --optimizer")
        if self.layout.pp > 1:
            refuse_given(self, "--attach --trace --lengths", "does not go with --pp; leave out one of them")
        if not self.disk_space:
            refuse_given(
                self, "--disk-budget --disk-write --disk-read", "needs a disk; give --disk-space, such as 1TiB"
            )
            if self.host == 0 and self.way == "memo":
                raise UsageError(
                    "--host 0 without --disk-space leaves nowhere to move activations to; give one of them"
                )
        elif (self.disk_budget or 0) > self.disk_space:
            raise UsageError(f"--disk-budget is more than the {format_bytes(self.disk_space)} of --disk-space")


def run(args: Options) -> ExitCode:
    """Rehearses, prints each step, the report and whether it fits; exit code 3 where it does not."""
    refuse_existing(args.trace, force=args.force)
    hardware = machine_of(args, net=args.net)
    if args.device is not None and not 0 < args.device <= hardware.device_bytes:
        given, most = format_bytes(args.device, up=True), format_bytes(hardware.device_bytes, down=True)
        raise UsageError(f"--device: {given} are not within the {most} of {hardware.name}; give another size or --gpu")
    build = args.builder()
    from memo.machine import require_host_memory
    from memo.mip.activation import Pipeline
    from memo.rehearsal import SimulatedMachine, Way, rehearse, rehearse_pipeline

    new_machine = functools.partial(
        SimulatedMachine,
        hardware,
        ranks=args.gpus,
        host_bytes=args.host_memory,
        disk_bytes=args.disk_space,
        disk_write_bytes_per_s=args.disk_write,
        disk_read_bytes_per_s=args.disk_read,
        assume=args.assume,
    )
    machine = new_machine()
    if isinstance(args.host, int):
        require_host_memory(args.host, machine.total_host_bytes(), argument="--host {}")
    budget = machine.device_budget(args.device).total_bytes

    decisions = [""]

    def on_step(step: RehearsedStep, *, stage: int | None = None) -> None:
        if not args.json:
            if not step.number and not stage and (line := namesake(args.model)) is not None:
                print(line)
            if not step.number and stage is not None:
                print(f"stage {stage}")
            print(step_line(step, budget, before=decisions[-1]), flush=True)
        decisions.append(step.decision)

    options = {
        "way": Way(args.way),
        "optimizer": None if args.optimizer == "none" else args.optimizer,
        **given_fields(args, "device host disk_budget lengths optimizer_offload attach steps trace alpha"),
    }
    build = _with_estimate(build, args)
    layout = args.layout
    if layout.pp == 1:
        return _print(args, machine, rehearse(build, machine, on_step=on_step, accumulate=args.accumulate, **options))
    pipeline = Pipeline(
        stages=layout.pp, microbatches=args.accumulate, schedule=layout.schedule, chunks=layout.stages_per_rank
    )
    found = rehearse_pipeline(
        build, new_machine, pipeline, on_step=lambda stage, step: on_step(step, stage=stage), **options
    )
    return _print_pipeline(args, machine, found)


def _print(args: Options, machine: SimulatedMachine, found: Rehearsal) -> ExitCode:
    if args.json:
        head = {"model": args.model, "gpu": machine.hardware.name, "way": args.way}
        print(json.dumps(head | rehearsal_summary(found), allow_nan=False))
    else:
        for text in found.warned:
            print(f"warning: {' '.join(text.split())}")
        if found.report:
            print(found.report)
        if found.optimizer_host_bytes:
            print(f"optimizer: {format_bytes(found.optimizer_host_bytes)} of host memory, beside the host tier's")
        if args.trace:
            print_written(args.trace)
        if found.steps:
            print(settled_line(found))
    if found.failure is not None and found.has_room:
        raise MemoError(found.failure)
    misfit = what_would_fit(found, most_device=machine.device_budget(None).total_bytes)
    if misfit is not None:
        has_logits = gpt_size(args.model) is None and not args.loss_without_logits and "the head takes" in found.report
        raise Infeasible(f"{misfit}, or --loss-without-logits" if has_logits else misfit)
    return ExitCode.OK if found.settled or args.steps is not None else ExitCode.NO_PLAN_IN_TIME


def _print_pipeline(args: Options, machine: SimulatedMachine, found: RehearsedPipeline) -> ExitCode:
    if args.json:
        head = {"model": args.model, "gpu": machine.hardware.name, "way": args.way}
        print(json.dumps(head | pipeline_summary(found), allow_nan=False))
    else:
        for text in dict.fromkeys(text for stage in found.stages for text in stage.warned):
            print(f"warning: {' '.join(text.split())}")
        print(f"\n{pipeline_table(found)}")
    for stage in found.stages:
        if stage.failure is not None and stage.has_room:
            raise MemoError(stage.failure)
    most = machine.device_budget(None).total_bytes
    misfits = [(number, what_would_fit(stage, most_device=most)) for number, stage in enumerate(found.stages)]
    wrong = [f"stage {number}: {text}" for number, text in misfits if text is not None]
    if wrong:
        raise Infeasible("; ".join(wrong))
    return ExitCode.OK if found.settled_after is not None or args.steps is not None else ExitCode.NO_PLAN_IN_TIME


def _with_estimate(build: Callable[[], Step], args: Options) -> Callable[[], Step]:
    """The builder; once the model is there it says how long the rehearsal will take, if that is long."""
    said = False

    def built() -> Step:
        from memo.swap import find_layers

        nonlocal said
        step = build()
        if said:  # for another stage
            return step
        said = True
        layers = find_layers(step.model, step.layers)
        parameters = args.layout.pp * sum(len(list(layer.module.parameters())) for layer in layers)
        steps = args.steps or (_EXPECTED_STEPS + 3 * max(0, len(args.lengths) - 1))
        seconds = _START_S + parameters * (_FIRST_S * (args.way == "memo") + steps * args.accumulate * _LATER_S)
        if seconds > _SAY_FROM_S and (not args.json or sys.stderr.isatty()):
            about = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
            of = " in the first stage" if args.layout.pp > 1 else ""
            print(f"memo rehearse: {len(layers)} layers{of}, about {about} of CPU time", file=sys.stderr, flush=True)
        return step

    return built
