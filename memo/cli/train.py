"""`memo train`: from flags to a RunConfig. The work, and torch with it, is in memo.gpt.train.run."""

from __future__ import annotations

import argparse
import enum
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from memo.errors import ExitCode, UsageError
from memo.gpt import PRESETS, Documents, OffloadConfig, OffloadMode, Precision, RunConfig, TrainConfig
from memo.gpt.optim import LossGuardConfig, OnNan, OnSpike, LrSchedule
from memo.mip.activation import read_activation_plan
from memo.parallel import ContextAttention, Layout, PipelineSchedule
from memo.units import parse_bytes, parse_tokens

__all__ = ["configure", "run"]

_EPILOG = """\
example:
  memo train --model 125m --seq 32k --data texts/ --offload disk --disk-dir /scratch --steps 100 \\
             --checkpoint-dir run1 --checkpoint-every 20 --metrics run1.jsonl

  torchrun --nproc-per-node 8 -m memo.cli.main train --tp 4 --dp 2 --model 7b --seq 128k --batch 2 ...

Ctrl-C finishes the step, saves and exits with 130; --resume goes on from there, to the same losses bit for bit.
"""

_MAX_AUTO_WARMUP = 2000  # steps; a tenth of the run below that

_T = TypeVar("_T")
_E = TypeVar("_E", bound=enum.StrEnum)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    _model_flags(parser.add_argument_group("model"))
    _data_flags(parser.add_argument_group("data"))
    _training_flags(parser.add_argument_group("training"))
    _layout_flags(parser.add_argument_group("layout, one process a rank (start with torchrun)"))
    _offload_flags(parser.add_argument_group("activations"))
    _output_flags(parser.add_argument_group("output"))
    _device_flags(parser.add_argument_group("device"))


def run(args: argparse.Namespace) -> ExitCode:
    config = _config(args)
    from memo.gpt.train import train

    return train(config)


def _model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", default="tiny", metavar="NAME", help=f"one of {', '.join(PRESETS)} (default tiny)")
    group.add_argument("--variant", choices=("gpt", "llama"), default="gpt", help="the manner of the layers")
    group.add_argument("--layers", type=int, metavar="N", help="instead of the preset's; so are the next three")
    group.add_argument("--hidden", type=int, metavar="N")
    group.add_argument("--heads", type=int, metavar="N")
    group.add_argument("--dropout", type=float, metavar="P")
    group.add_argument(
        "--mlp-tiles",
        type=int,
        metavar="N",
        help="compute each MLP in N tiles, its input alone saved (default: what --plan says, else 1)",
    )


def _data_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data",
        action="extend",
        nargs="+",
        metavar="PATH",
        help="text files, directories, globs, .jsonl or .parquet (default: the source of Python's standard library)",
    )
    group.add_argument("--field", default="text", metavar="NAME", help="the text's field in .jsonl and .parquet")
    group.add_argument(
        "--documents",
        type=_argument(_one_of(Documents)),
        default=Documents.PACKED,
        metavar="{packed,whole}",
        help="a row is a window across documents (default), or lies in one; those shorter than --seq are left out",
    )
    group.add_argument("--mask-documents", action="store_true", help="no attention from one document to another")
    group.add_argument("--tokenizer", metavar="FILE", help="a Hugging Face tokenizer.json (default: bytes)")
    group.add_argument("--seq", type=_tokens, default=1024, metavar="TOKENS", help="such as 32k or 1m (default 1k)")
    group.add_argument("--batch", type=int, default=1, metavar="N", help="sequences in a microbatch (default 1)")
    group.add_argument("--accumulate", type=int, default=1, metavar="N", help="microbatches in a step (default 1)")


def _training_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--steps", type=int, default=100, metavar="N", help="length of the whole run (default 100)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, batches and dropout (default 0)")
    group.add_argument("--lr", type=float, default=3e-4, metavar="RATE", help="peak learning rate (default 3e-4)")
    group.add_argument("--warmup", type=int, metavar="STEPS", help="default: a tenth of the run")
    group.add_argument("--min-lr", type=float, metavar="RATE", help="at the last step (default: a tenth of --lr)")
    group.add_argument("--weight-decay", type=float, default=0.1, metavar="RATE", help="of matrices (default 0.1)")
    group.add_argument("--clip", type=float, default=1.0, metavar="NORM", help="of the gradient; 0 is off (default 1)")
    group.add_argument(
        "--precision",
        type=_precision,
        metavar="{fp32,bf16-autocast,bf16}",
        help="default: bf16-autocast on a GPU, fp32 on a CPU",
    )
    group.add_argument(
        "--on-nan",
        type=_argument(_one_of(OnNan)),
        default=OnNan.STOP,
        metavar="{stop,skip}",
        help="a step that is not finite: save the step before and stop (default), or skip its update",
    )
    group.add_argument(
        "--on-spike",
        type=_argument(_one_of(OnSpike)),
        default=OnSpike.WARN,
        metavar="{warn,skip,stop}",
        help="a step whose loss jumps (default warn)",
    )
    group.add_argument("--eval-every", type=int, default=0, metavar="STEPS", help="0 is never (default)")
    group.add_argument("--eval-steps", type=int, default=8, metavar="N", help="batches of an evaluation (default 8)")


def _layout_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dp", type=int, default=1, metavar="N", help="ranks that share the rows of a batch")
    group.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share each layer's matrices")
    group.add_argument("--pp", type=int, default=1, metavar="N", help="ranks that share the layers")
    group.add_argument("--cp", type=int, default=1, metavar="N", help="ranks that share each sequence in attention")
    group.add_argument(
        "--cp-attention",
        type=_argument(_one_of(ContextAttention)),
        default=ContextAttention.AUTO,
        metavar="{auto,ulysses,ring}",
        help="with --cp: ranks exchange heads for tokens (ulysses), or pass keys and values around (ring), which needs no "
        "more heads than --tp; auto is ulysses where heads divide (default)",
    )
    group.add_argument(
        "--schedule",
        type=_argument(_one_of(PipelineSchedule)),
        default=PipelineSchedule.ONE_F_ONE_B,
        metavar="{" + ",".join(PipelineSchedule) + "}",
        help="of the pipeline; its microbatches are those of --accumulate (default 1f1b)",
    )
    group.add_argument(
        "--no-sequence-parallel",
        dest="sequence_parallel",
        action="store_false",
        help="with --tp, keep all tokens on every rank between the matrices",
    )


def _offload_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--offload",
        type=_mode,
        default=OffloadMode.NONE,
        metavar="{none,host,disk,auto}",
        help="where activations wait for backward (default none: on the device); auto measures and plans",
    )
    group.add_argument("--plan", type=Path, metavar="FILE", help="with --offload auto, a plan of `memo plan` instead")
    group.add_argument(
        "--device-budget",
        type=_bytes,
        metavar="SIZE",
        help="with --offload auto, all that training may take on the device",
    )
    group.add_argument("--host-budget", type=_bytes, metavar="SIZE", help="host memory for activations, such as 8GiB")
    group.add_argument("--disk-dir", type=Path, metavar="DIR", help="for the scratch file (default: the system's)")
    group.add_argument("--disk-budget", type=_bytes, metavar="SIZE", help="reserved at the start")
    group.add_argument("--alpha", type=float, metavar="F", help="fraction of tokens moved, not recomputed; 1 moves all")
    group.add_argument("--exact", action="store_true", help="recompute only what comes out the same bit for bit")
    group.add_argument(
        "--trace",
        nargs="?",
        const="trace.rank0.jsonl",
        metavar="FILE",
        help="write what happened to every saved tensor (default name trace.rank0.jsonl; each rank its own); a name that "
        "ends in / is a directory for it",
    )


def _output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--metrics", type=Path, metavar="FILE", help="one JSON object a step")
    group.add_argument("--tensorboard", type=Path, metavar="DIR", help="the same figures for TensorBoard")
    group.add_argument("--checkpoint-dir", type=Path, metavar="DIR", help="save at the end and when stopped")
    group.add_argument("--checkpoint-every", type=int, default=0, metavar="STEPS", help="and this often")
    group.add_argument(
        "--checkpoint-minutes", type=float, default=0.0, metavar="MIN", help="and this often; written while steps go on"
    )
    group.add_argument("--checkpoint-keep", type=int, default=2, metavar="N", help="newest ones to keep (default 2)")
    group.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="CHECKPOINT",
        help="go on from the newest checkpoint in --checkpoint-dir, or from this one",
    )


def _device_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto is a GPU if there is one"
    )
    group.add_argument(
        "--planned-allocator",
        action="store_true",
        help="plan where each step's memory lies on the GPU; nothing fragments",
    )
    group.add_argument("--peak-flops", type=float, metavar="FLOPS", help="per second, for mfu (default: by GPU name)")
    group.add_argument(
        "--deterministic", action="store_true", help="GPU kernels that give the same bits each time, somewhat slower"
    )


def _config(args: argparse.Namespace) -> RunConfig:
    """The flags as one checked object.

    Raises:
        UsageError: flags that contradict each other, or a number that means nothing.
        PlanError: the plan's file cannot be read.
    """
    flags = dict(vars(args))
    schedule = _schedule(flags.pop("lr"), flags.pop("min_lr"), flags.pop("warmup"), flags.pop("steps"))
    training = TrainConfig(
        schedule=schedule,
        clip=flags.pop("clip") or None,
        loss_guard=LossGuardConfig(on_nan=flags.pop("on_nan"), on_spike=flags.pop("on_spike")),
        **{name: flags.pop(name) for name in ("accumulate", "weight_decay", "eval_steps")},
    )
    tiers = ("plan", "device_budget", "host_budget", "disk_dir", "disk_budget", "alpha", "exact", "trace")
    offload = OffloadConfig(mode=flags.pop("offload"), **{name: flags.pop(name) for name in tiers})
    sizes = ("dp", "tp", "pp", "cp", "cp_attention", "schedule", "sequence_parallel")
    layout = Layout(**{name: flags.pop(name) for name in sizes})
    if flags["mlp_tiles"] is None:
        flags["mlp_tiles"] = 1 if offload.plan is None else read_activation_plan(offload.plan).problem.profile.mlp_tiles
    if flags["resume"] not in (None, "latest"):
        flags["resume"] = Path(flags["resume"])
    return RunConfig(training=training, offload=offload, layout=layout, **flags)


def _schedule(lr: float, min_lr: float | None, warmup: int | None, steps: int) -> LrSchedule:
    return LrSchedule(
        peak=lr,
        floor=lr / 10 if min_lr is None else min_lr,
        warmup=min(_MAX_AUTO_WARMUP, steps // 10) if warmup is None else warmup,
        steps=steps,
    )


def _argument(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """For argparse, which would replace the message of any other ValueError by one without advice."""

    def convert(text: str) -> _T:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _one_of(kinds: type[_E]) -> Callable[[str], _E]:
    def parse(text: str) -> _E:
        if text not in tuple(kinds):
            raise UsageError(f"{text!r} is none of {', '.join(kinds)}")
        return kinds(text)

    return parse


_bytes = _argument(parse_bytes)
_tokens = _argument(parse_tokens)
_mode = _argument(_one_of(OffloadMode))
_precision = _argument(_one_of(Precision))
