"""`memo train`: turns the command line into a RunConfig and runs it.

The training, and torch with it, is in memo.gpt.train.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from memo.cli.inputs.batch_sizes import add_batch_flags, batch_sizes
from memo.cli.inputs.expert_flags import add_expert_flags
from memo.cli.inputs.pattern_flags import add_pattern_flags
from memo.cli.inputs.stage_layers import add_stage_layers_flag
from memo.cli.terminal.file_kinds import FileKind, require_kind
from memo.cli.terminal.progress import WaitingLine
from memo.compression import GradientCompression
from memo.errors import ExitCode, UsageError
from memo.gpt import (
    PRESETS,
    Documents,
    EmbeddingGradients,
    OffloadConfig,
    OffloadMode,
    Precision,
    RunConfig,
    TrainConfig,
    preset_name,
    variant_of,
)
from memo.gpt.optim import LossGuardConfig, LrSchedule, OnNan, OnSpike
from memo.hugging_face import published_name
from memo.mip.activation import ActivationPlan, layers_of_runs, read_activation_plan
from memo.parallel import ContextAttention, Layout, PipelineSchedule
from memo.units import parse_bytes, parse_tokens

__all__ = ["configure", "run"]

_EPILOG = """\
example:
  memo train --model 125m --seq 32k --data texts/ --offload disk --disk /scratch --steps 100 \\
             --checkpoint-dir run1 --checkpoint-every 20 --metrics run1.jsonl

  torchrun --nproc-per-node 8 -m memo.cli.main train --tp 4 --dp 2 --model 7b --seq 128k --batch 1 ...

Ctrl-C finishes the step, saves a checkpoint and exits with code 130. --resume continues from there, with the same losses bit
for bit. Sizes are written as 8GiB, token counts as 32k or 1m.
"""

_MAX_AUTO_WARMUP = 2000  # steps

_T = TypeVar("_T")
_E = TypeVar("_E", bound=enum.StrEnum)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `memo train`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    model = parser.add_argument_group("model")
    _model_flags(model)
    add_pattern_flags(model)
    add_expert_flags(parser.add_argument_group("mixture of experts"), losses=True)
    _data_flags(parser.add_argument_group("data"))
    _training_flags(parser.add_argument_group("training"))
    _layout_flags(parser.add_argument_group("parallelism, one process per rank (start them with torchrun)"))
    _offload_flags(parser.add_argument_group("activation offloading"))
    _output_flags(parser.add_argument_group("output"))
    _device_flags(parser.add_argument_group("device"))


def run(args: argparse.Namespace) -> ExitCode:
    """Trains to the last step or until interrupted."""
    config = _config(args)
    with WaitingLine("memo train", "starting", quiet=True) as waiting:  # a log has the run's own lines
        from memo.gpt.train import train

        return train(config, phase=lambda text: waiting.end() if text is None else waiting.say(text))


def _model_flags(group: argparse._ArgumentGroup) -> None:
    presets = ", ".join(PRESETS)
    group.add_argument("--model", default="tiny", metavar="NAME", help=f"model size: {presets} (default tiny)")
    group.add_argument(
        "--variant",
        choices=("gpt", "llama"),
        help="architecture of the layers (default: the model's, gpt where it has both)",
    )
    group.add_argument("--layers", type=int, metavar="N", help="number of layers (default: the model's)")
    group.add_argument("--hidden", type=int, metavar="N", help="width of the residual stream (default: the model's)")
    group.add_argument("--heads", type=int, metavar="N", help="number of query heads (default: the model's)")
    group.add_argument(
        "--rope-theta",
        type=float,
        metavar="BASE",
        help="base of the rotary frequencies (default: the checkpoint's with --resume, else the model's)",
    )
    group.add_argument(
        "--rope-scaling",
        metavar="KIND:FACTOR",
        help="rotary positions of a model first trained on sequences FACTOR times shorter than --seq: linear, ntk or yarn, "
        "such as yarn:8; none (default: the checkpoint's with --resume, else none)",
    )
    group.add_argument("--dropout", type=float, metavar="P", help="dropout probability (default: the model's, 0)")
    group.add_argument(
        "--mlp-tiles",
        type=int,
        metavar="N",
        help="compute each MLP in N tiles and save only its input (default: the plan's number with --plan, else 1)",
    )


def _data_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data",
        action="extend",
        nargs="+",
        metavar="PATH",
        help="text files, directories, globs, .jsonl or .parquet files (default: the source of Python's standard library)",
    )
    group.add_argument(
        "--field", default="text", metavar="NAME", help="name of the text field in .jsonl and .parquet (default text)"
    )
    group.add_argument(
        "--documents",
        type=_argument(_one_of(Documents)),
        default=Documents.PACKED,
        metavar="{packed,whole}",
        help="packed: a sequence may cross document ends; whole: it lies in one document, and documents shorter than "
        "--seq are skipped (default packed)",
    )
    group.add_argument(
        "--mask-documents",
        action="store_true",
        help="with packed documents: attention does not cross document ends (default: it does)",
    )
    group.add_argument(
        "--tokenizer", metavar="FILE", help="Hugging Face tokenizer.json (default: one token per byte of text)"
    )
    group.add_argument(
        "--seq",
        type=_tokens,
        default=1024,
        metavar="TOKENS",
        help="sequence length in tokens, such as 32k or 1m (default 1k)",
    )
    add_batch_flags(group)


def _training_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--steps",
        type=int,
        default=100,
        metavar="N",
        help="steps of the whole run, resumed ones included (default 100)",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="random seed of weights, batches and dropout (default 0)"
    )
    group.add_argument("--lr", type=float, default=3e-4, metavar="RATE", help="peak learning rate (default 3e-4)")
    group.add_argument(
        "--warmup",
        type=int,
        metavar="STEPS",
        help=f"steps of linear learning-rate warmup (default: a tenth of --steps, at most {_MAX_AUTO_WARMUP})",
    )
    group.add_argument(
        "--min-lr", type=float, metavar="RATE", help="learning rate at the last step (default: a tenth of --lr)"
    )
    group.add_argument(
        "--weight-decay", type=float, default=0.1, metavar="RATE", help="AdamW weight decay of matrices (default 0.1)"
    )
    group.add_argument(
        "--clip", type=float, default=1.0, metavar="NORM", help="clip the gradient norm to NORM; 0 is off (default 1)"
    )
    group.add_argument(
        "--precision",
        type=_precision,
        metavar="{fp32,bf16-autocast,bf16}",
        help="number format of weights and arithmetic (default: bf16-autocast on a GPU, fp32 on a CPU)",
    )
    group.add_argument(
        "--on-nan",
        type=_argument(_one_of(OnNan)),
        default=OnNan.STOP,
        metavar="{stop,skip}",
        help="when a loss or gradient is not finite: save the previous step and stop, or skip the update (default stop)",
    )
    group.add_argument(
        "--on-spike",
        type=_argument(_one_of(OnSpike)),
        default=OnSpike.WARN,
        metavar="{warn,skip,stop}",
        help="when the loss jumps: print a warning, skip the update, or stop (default warn)",
    )
    group.add_argument(
        "--eval-every", type=int, default=0, metavar="STEPS", help="steps between evaluations; 0 is never (default 0)"
    )
    group.add_argument("--eval-steps", type=int, default=8, metavar="N", help="batches in an evaluation (default 8)")


def _layout_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dp", type=int, default=1, metavar="N", help="data parallelism: ranks that divide the batch (default 1)"
    )
    group.add_argument(
        "--tp", type=int, default=1, metavar="N", help="tensor parallelism: ranks that divide each matrix (default 1)"
    )
    group.add_argument(
        "--pp", type=int, default=1, metavar="N", help="pipeline parallelism: ranks that divide the layers (default 1)"
    )
    group.add_argument(
        "--cp",
        type=int,
        default=1,
        metavar="N",
        help="context parallelism: ranks that divide each sequence (default 1)",
    )
    group.add_argument(
        "--ep",
        type=int,
        default=1,
        metavar="N",
        help="with --experts: expert parallelism, ranks of --dp that divide the experts (default 1)",
    )
    group.add_argument(
        "--cp-attention",
        type=_argument(_one_of(ContextAttention)),
        default=ContextAttention.AUTO,
        metavar="{auto,ulysses,ring}",
        help="with --cp: ulysses exchanges heads for tokens and needs query heads that divide by tp x cp; ring passes keys "
        "and values around; auto is ulysses where heads divide, else ring (default auto)",
    )
    group.add_argument(
        "--schedule",
        type=_argument(_one_of(PipelineSchedule)),
        default=PipelineSchedule.ONE_F_ONE_B,
        metavar="{" + ",".join(PipelineSchedule) + "}",
        help="with --pp: pipeline schedule of the --accumulate microbatches (default 1f1b)",
    )
    group.add_argument(
        "--chunks",
        type=int,
        metavar="N",
        help="with an interleaved --schedule: runs of consecutive layers of each pipeline rank (default 2)",
    )
    add_stage_layers_flag(group, default="the plan's with --plan, else equal ones")
    group.add_argument(
        "--no-sequence-parallel",
        dest="sequence_parallel",
        action="store_false",
        help="with --tp: keep all tokens on every rank between the matrix products (default: divide them)",
    )
    _add_embedding_flag(group)
    group.add_argument(
        "--compress-gradients",
        type=_argument(GradientCompression.parse),
        metavar="{int8,powersgd[:RANK]}",
        help="with --dp or --cp: exchange gradients with an error: int8 sends codes of one byte; powersgd two factors of "
        "each matrix, of rank 4 or RANK, and feeds the error back (default: exact)",
    )
    group.add_argument(
        "--pipeline-dtype",
        choices=("bf16",),
        help="with --pp: pass hidden states and their gradients between stages as bfloat16, half of float32's bytes "
        "(default: the weights' number format)",
    )


def _add_embedding_flag(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--embedding-exchange",
        dest="embedding_gradients",
        type=_argument(_one_of(EmbeddingGradients)),
        metavar="{auto,dense,sparse}",
        help="with --dp or --cp: exchange the embedding's gradient dense, as a whole table, or sparse, as the rows of "
        "the tokens that a rank has seen, for which every rank has the table whole; auto takes the one of fewer bytes "
        "(default: the plan's with --plan, else dense)",
    )


def _offload_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--offload",
        type=_mode,
        default=OffloadMode.NONE,
        metavar="{none,host,disk,auto}",
        help="where activations wait between forward and backward: none leaves them on the device; host and disk move "
        "them; auto measures the first steps and plans (default none)",
    )
    group.add_argument(
        "--plan", type=Path, metavar="FILE", help="with --offload auto: run this plan, written by memo plan"
    )
    group.add_argument(
        "--device",
        dest="device_budget",
        type=_device_bytes,
        metavar="SIZE",
        help="with --offload auto: limit of device memory for the whole training (default: 94 %% of the "
        "GPU's memory, which is also the most; on a CPU 80 %% of the free memory)",
    )
    group.add_argument(
        "--host",
        dest="host_budget",
        type=_bytes,
        metavar="SIZE",
        help="limit of host memory for activations, such as 8GiB (default: a share of the free memory on a GPU, else "
        "none; none with --offload disk)",
    )
    group.add_argument(
        "--host-pool",
        type=Path,
        metavar="FILE",
        help="share --host with all jobs of this node that name the same file, such as /dev/shm/memo-host",
    )
    group.add_argument(
        "--disk",
        dest="disk_dir",
        type=Path,
        metavar="DIR",
        help="directory of the scratch file (default with --offload disk: the system's temporary directory)",
    )
    group.add_argument(
        "--disk-budget",
        type=_bytes,
        metavar="SIZE",
        help="size of the scratch file, reserved at the start (default: grows up to the free disk space)",
    )
    group.add_argument(
        "--alpha",
        type=float,
        metavar="F",
        help="most of what can be recomputed that moves, a fraction from 0 to 1 (default: 1 with --offload "
        "host and disk, planned with auto)",
    )
    group.add_argument(
        "--codec",
        choices=("int8", "fp8"),
        help="move values as one-byte codes with a bounded error (default: bit for bit)",
    )
    group.add_argument(
        "--trace",
        nargs="?",
        const="trace.rank0.jsonl",
        metavar="FILE",
        help="write a trace of every saved tensor to FILE, one file per rank; without a value to trace.rank0.jsonl; a name "
        "that ends in / is a directory (default: no trace)",
    )
    group.add_argument(
        "--trace-stacks",
        action="store_true",
        help="with --trace: record the Python lines that saved each tensor (default: off)",
    )


def _output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--metrics", type=Path, metavar="FILE", help="write the metrics of each step, one JSON object per line"
    )
    group.add_argument("--tensorboard", type=Path, metavar="DIR", help="write the same metrics for TensorBoard")
    group.add_argument(
        "--checkpoint-dir",
        type=Path,
        metavar="DIR",
        help="write a checkpoint at the end and when interrupted (default: no checkpoints)",
    )
    group.add_argument(
        "--checkpoint-every",
        type=int,
        default=0,
        metavar="STEPS",
        help="also write a checkpoint every STEPS steps; 0 is never (default 0)",
    )
    group.add_argument(
        "--checkpoint-minutes",
        type=float,
        default=0.0,
        metavar="MIN",
        help="also write a checkpoint every MIN minutes; 0 is never (default 0)",
    )
    group.add_argument(
        "--checkpoint-keep", type=int, default=2, metavar="N", help="number of newest checkpoints to keep (default 2)"
    )
    group.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="CHECKPOINT",
        help="continue from CHECKPOINT, or without a value from the newest one in --checkpoint-dir (default: a new run)",
    )


def _device_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--on",
        dest="device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device to train on; auto is a GPU if there is one (default auto)",
    )
    group.add_argument(
        "--planned-allocator",
        action="store_true",
        help="allocate GPU memory at planned addresses, without fragmentation (default: PyTorch's caching allocator)",
    )
    group.add_argument(
        "--peak-flops",
        type=float,
        metavar="FLOPS",
        help="peak FLOPs per second of the device, for mfu (default: known by the GPU's name)",
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="use GPU kernels that give the same bits in every run; somewhat slower (default: off)",
    )


def _config(args: argparse.Namespace) -> RunConfig:
    """Builds the run's configuration from the flags.

    Raises:
        UsageError: flags contradict each other, or a number is out of range.
        PlanError: the plan's file cannot be read.
    """
    flags = dict(vars(args))
    schedule = _schedule(flags.pop("lr"), flags.pop("min_lr"), flags.pop("warmup"), flags.pop("steps"))
    sizes = ("dp", "tp", "pp", "cp", "ep", "cp_attention", "schedule", "chunks", "sequence_parallel")
    layout = Layout(**{name: flags.pop(name) for name in sizes}, stage_layers=flags.pop("stage_layers"))
    numbers = [flags.pop(name) for name in ("batch", "accumulate", "global_batch")]
    keeps_batch = numbers == [None] * 3
    batch, accumulate = batch_sizes(*numbers, replicas=layout.dp)
    training = TrainConfig(
        schedule=schedule,
        clip=flags.pop("clip") or None,
        loss_guard=LossGuardConfig(on_nan=flags.pop("on_nan"), on_spike=flags.pop("on_spike")),
        accumulate=accumulate,
        **{name: flags.pop(name) for name in ("weight_decay", "eval_steps")},
    )
    tiers = (
        "plan",
        "device_budget",
        "host_budget",
        "host_pool",
        "disk_dir",
        "disk_budget",
        "alpha",
        "codec",
        "trace",
        "trace_stacks",
    )
    offload = OffloadConfig(mode=flags.pop("offload"), **{name: flags.pop(name) for name in tiers})
    planned = None
    if offload.plan is not None:
        require_kind(offload.plan, FileKind.ACTIVATION_PLAN)
        plan = read_activation_plan(offload.plan)
        layout, planned = _with_stages_of(plan, layout), plan.problem.profile
    if flags["mlp_tiles"] is None:
        flags["mlp_tiles"] = 1 if planned is None else planned.mlp_tiles
    if flags["embedding_gradients"] is None:
        sparse = planned is not None and planned.embedding_exchange is not None and planned.embedding_exchange.sparse
        flags["embedding_gradients"] = EmbeddingGradients.SPARSE if sparse else EmbeddingGradients.DENSE
    if flags["resume"] not in (None, "latest"):
        flags["resume"] = Path(flags["resume"])
    if preset_name(flags["model"]) is None and published_name(flags["model"]) is not None:
        raise UsageError(
            f"--model {flags['model']} is a model of Hugging Face's transformers, which memo train does not build; train it "
            "with transformers under memo.offload"
        )
    flags["model"] = preset_name(flags["model"]) or flags["model"]
    flags["variant"] = variant_of(flags["model"], flags["variant"])
    return RunConfig(
        training=training, offload=offload, layout=layout, batch=batch * layout.dp, keeps_batch=keeps_batch, **flags
    )


def _with_stages_of(plan: ActivationPlan, layout: Layout) -> Layout:
    """The layout with the numbers of layers that a plan's stages have; of a plan for other stages, itself."""
    pipeline = plan.problem.pipeline
    if pipeline.stages == 1 or pipeline.stages * pipeline.chunks != layout.stages or layout.stage_layers:
        return layout
    sizes = layers_of_runs(plan.problem)
    return layout if len(set(sizes)) == 1 else dataclasses.replace(layout, stage_layers=sizes)


def _schedule(lr: float, min_lr: float | None, warmup: int | None, steps: int) -> LrSchedule:
    return LrSchedule(
        peak=lr,
        floor=lr / 10 if min_lr is None else min_lr,
        warmup=min(_MAX_AUTO_WARMUP, steps // 10) if warmup is None else warmup,
        steps=steps,
    )


def _argument(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Wraps a parser for argparse, which shows the message of an ArgumentTypeError only."""

    def convert(text: str) -> _T:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _one_of(kinds: type[_E]) -> Callable[[str], _E]:
    def parse(text: str) -> _E:
        if text not in tuple(kinds):
            raise UsageError(f"{text!r} is none of {', '.join(kinds)}; choose one of them")
        return kinds(text)

    return parse


_bytes = _argument(parse_bytes)


def _device_bytes(text: str) -> int:
    if text.partition(":")[0] in ("auto", "cpu", "cuda"):
        device = text.partition(":")[0]
        raise argparse.ArgumentTypeError(f"a budget is a size, such as 40GiB; to train on a device write --on {device}")
    return _bytes(text)


_tokens = _argument(parse_tokens)
_mode = _argument(_one_of(OffloadMode))
_precision = _argument(_one_of(Precision))
