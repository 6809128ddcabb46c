"""`memo train`: turns the command line, and the plan that it names, into a RunConfig and runs it.

The training, and torch with it, is in memo.gpt.train.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memo.cli.inputs.batch_sizes import BatchOptions, batch_sizes
from memo.cli.inputs.fields import add_fields, given_fields
from memo.cli.inputs.model_shape import SHAPE_FIELDS, add_shape_flags, gpt_size, named_shape, shape_flag
from memo.cli.terminal.file_kinds import FileKind, require_kind
from memo.cli.terminal.output_files import print_written
from memo.cli.terminal.progress import WaitingLine
from memo.errors import ExitCode, UsageError
from memo.gpt import (
    PRESETS,
    EmbeddingGradients,
    GPTConfig,
    OffloadConfig,
    RunConfig,
    TrainConfig,
    preset_name,
)
from memo.gpt.arithmetic import planned_run
from memo.gpt.optim import FLAGS, LossGuardConfig, LrSchedule
from memo.hugging_face import published_name
from memo.mip.activation import read_activation_plan
from memo.parallel import Layout
from memo.trace import trace_path

if TYPE_CHECKING:
    from memo.gpt.arithmetic import PlannedRun
    from memo.mip.activation import ActivationPlan

EPILOG = """\
examples:
  memo train --model 125m --seq 32k --data texts/ --offload disk --disk /scratch --steps 100 \\
             --checkpoint-dir run1 --checkpoint-every 20 --metrics run1.jsonl

  memo plan --model 7b --seq 128k --gpu h100 --gpus 8 --tp 4 -o plan.json
  torchrun --nproc-per-node 8 -m memo.cli.main train --plan plan.json

Ctrl-C finishes the step, saves a checkpoint and exits with code 130. --resume continues from there, with the same losses bit
for bit. Sizes are written as 8GiB, token counts as 32k or 1m.
"""

FIRST_LINE_S = 30.0
"""Seconds until a log has a line on what a run does, if no step has ended."""
_SCHEDULE = "steps peak floor warmup"
_LAYOUT = "dp tp pp cp ep cp_attention schedule chunks stage_layers sequence_parallel tp_overlap"
_OFFLOAD = "mode plan device host host_pool disk disk_budget alpha codec trace trace_stacks"
_DATA = "data field documents mask_documents tokenizer seq"
_OUTPUT = (
    "metrics tensorboard checkpoint_dir checkpoint_every checkpoint_minutes checkpoint_keep resume on planned_allocator "
    "peak_flops deterministic"
)
_EXCHANGES = "embedding_exchange compress_gradients pipeline_dtype"
_TRAINING = "seed precision optimizer_offload eval_every"
_ROPE = "rope_theta rope_scaling"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `memo train`."""
    model = parser.add_argument_group("model")
    presets = ", ".join(PRESETS)
    model.add_argument("--model", metavar="NAME", help=f"model size: {presets} (default: the plan's, else tiny)")
    add_shape_flags(model, training=True)
    add_fields(model, RunConfig, _ROPE)
    add_fields(model, GPTConfig, "mlp_tiles", default="the plan's, else 1")
    data = parser.add_argument_group("data")
    add_fields(data, RunConfig, _DATA)
    add_fields(data, BatchOptions)
    training = parser.add_argument_group("training")
    add_fields(training, LrSchedule, _SCHEDULE, flags=FLAGS)
    add_fields(training, TrainConfig, "weight_decay clip eval_steps")
    add_fields(training, LossGuardConfig, "on_nan on_spike")
    add_fields(training, RunConfig, _TRAINING)
    ranks = parser.add_argument_group("parallelism, one process per rank (start them with torchrun)")
    add_fields(ranks, Layout, _LAYOUT)
    add_fields(ranks, RunConfig, f"{_EXCHANGES} adapt")
    offload = parser.add_argument_group("activation offloading")
    add_fields(offload, OffloadConfig, _OFFLOAD, flags={"mode": "--offload"})
    add_fields(parser.add_argument_group("output and device"), RunConfig, _OUTPUT)


def run(args: argparse.Namespace) -> ExitCode:
    """Trains to the last step or until interrupted."""
    config = _config(args)
    with WaitingLine("memo train", "starting", log_after_s=FIRST_LINE_S) as waiting:
        from memo.gpt.train import train

        adapter = None
        if config.adapt:
            from memo.adapt import LayoutAdapter

            adapter = LayoutAdapter(config)
        code = train(config, phase=lambda text: waiting.end() if text is None else waiting.say(text), adapter=adapter)
    if adapter is not None and adapter.changed and code is ExitCode.OK:
        from memo.adapt import restart_rank

        restart_rank(trace=config.offload.trace)
    if config.offload.trace is not None and os.environ.get("RANK", "0") == "0":
        print_written(trace_path(Path(config.offload.trace), rank=0))
    return code


def _config(args: argparse.Namespace) -> RunConfig:
    """Builds the run's configuration from the flags, and from the plan that they name.

    Raises:
        UsageError: flags contradict each other or the plan, or a number is out of range.
        PlanError: the plan's file cannot be read.
    """
    planned, offload = None, OffloadConfig(**given_fields(args, _OFFLOAD))
    if args.plan is not None:
        require_kind(args.plan, FileKind.ACTIVATION_PLAN)
        plan = read_activation_plan(args.plan)
        planned = None if plan.run is None else planned_run(plan)
        offload = dataclasses.replace(offload, **{**_tiers_of(plan), **given_fields(args, _OFFLOAD)})
    given = given_fields(args, f"{_DATA} {_TRAINING} {_EXCHANGES} adapt {_OUTPUT} {_ROPE}")
    if planned is None:
        model, shape = _named(args)
        layout = Layout(**given_fields(args, _LAYOUT))
        batch, accumulate = batch_sizes(args.batch, args.accumulate, args.global_batch, replicas=layout.dp)
        keeps_batch = args.batch is args.accumulate is args.global_batch is None
    else:
        _refuse_contradictions(args, planned)
        model, layout, accumulate = planned.model, planned.layout, planned.microbatches
        shape = dataclasses.replace(planned.config, **given_fields(args, "dropout"))
        layout = dataclasses.replace(layout, **given_fields(args, "sequence_parallel tp_overlap"))
        batch, keeps_batch = planned.rows // layout.dp, False
        sparse = EmbeddingGradients.SPARSE if planned.sparse_embedding else EmbeddingGradients.DENSE
        given = {
            "seq": planned.tokens,
            "precision": planned.precision,
            "embedding_exchange": sparse,
            "optimizer_offload": planned.optimizer_offload,
            **given,
        }
    schedule = LrSchedule.of(**given_fields(args, _SCHEDULE))
    numbers = given_fields(args, "weight_decay clip eval_steps")
    if numbers.get("clip") == 0:
        numbers["clip"] = None
    guard = LossGuardConfig(**given_fields(args, "on_nan on_spike"))
    return RunConfig(
        model=model,
        shape=shape,
        layout=layout,
        batch=batch * layout.dp,
        keeps_batch=keeps_batch,
        training=TrainConfig(schedule=schedule, accumulate=accumulate, loss_guard=guard, **numbers),
        offload=offload,
        **given,
    )


def _named(args: argparse.Namespace) -> tuple[str, GPTConfig]:
    """The model that the flags name, and its shape."""
    name = args.model or "tiny"
    known = gpt_size(name)
    if known is None and published_name(name) is not None:
        size = preset_name(name)
        instead = "" if size is None else f", or give {size}, memo's GPT of its size"
        raise UsageError(
            f"--model {name} is a model of Hugging Face's transformers, which memo train does not build; train it "
            f"with transformers under memo.offload{instead}"
        )
    return known or name, dataclasses.replace(named_shape(args, known or name), **given_fields(args, "mlp_tiles"))


def _tiers_of(plan: ActivationPlan) -> dict[str, Any]:
    """Budgets of the tiers that a plan uses, as it has them on the machine of this rank's stage, and its codec."""
    problem = plan.problem
    rank, ranks = int(os.environ.get("RANK", "0")), max(problem.gpus // problem.pipeline.stages, 1)
    budgets = problem.machine_of(min(rank // ranks, problem.pipeline.stages - 1)).budgets
    found: dict[str, Any] = {} if problem.profile.codec is None else {"codec": problem.profile.codec}
    if any(stage.peak_host_bytes for stage in plan.stages):
        found["host"] = budgets.host_bytes
    if any(stage.peak_disk_bytes for stage in plan.stages):
        found |= {"disk": Path(tempfile.gettempdir()), "disk_budget": budgets.disk_bytes}
    return found


def _refuse_contradictions(args: argparse.Namespace, planned: PlannedRun) -> None:
    """Refuses a flag with another value than the plan has, in which the rest of the plan would be wrong."""
    shape, layout = planned.config, planned.layout
    has: dict[str, tuple[str, object]] = {
        name: (shape_flag(name), getattr(part, name, None))
        for name in (*SHAPE_FIELDS, "mlp_tiles")
        for part in (shape, shape.moe, shape.pattern)
        if hasattr(part, name)
    }
    has |= {name: (f"--{name.replace('_', '-')}", getattr(layout, name)) for name in _LAYOUT.split()[:-2]}
    has |= {
        "chunks": ("--chunks", layout.stages_per_rank),
        "model": ("--model", planned.model),
        "variant": ("--variant", shape.variant),
        "seq": ("--seq", planned.tokens),
        "batch": ("--batch", planned.rows // layout.dp),
        "accumulate": ("--accumulate", planned.microbatches),
        "global_batch": ("--global-batch", planned.rows * planned.microbatches),
        "precision": ("--precision", planned.precision),
    }
    for name, value in given_fields(args, " ".join((*SHAPE_FIELDS, *has))).items():
        flag, planned_value = has.get(name, (shape_flag(name), None))
        if (gpt_size(value) or value if name == "model" else value) != planned_value:
            shown = "none" if planned_value in (None, ()) else planned_value
            raise UsageError(f"{flag} {value}: {args.plan} is for {shown}; leave {flag} out, or plan again with it")
