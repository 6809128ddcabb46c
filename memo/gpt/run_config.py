"""Configuration of a training run: model, data, training, offloading, outputs. Needs no torch."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from memo.compression import GradientCompression
from memo.errors import UsageError
from memo.gpt.config import PRESETS, Variant
from memo.gpt.rope_scaling import RopeScaling
from memo.gpt.train_config import Precision, TrainConfig
from memo.parallel import Layout

__all__ = ["Documents", "EmbeddingGradients", "OffloadConfig", "OffloadMode", "RunConfig"]


class OffloadMode(enum.StrEnum):
    """Place of activations between forward and backward."""

    NONE = "none"
    HOST = "host"
    DISK = "disk"
    AUTO = "auto"


class EmbeddingGradients(enum.StrEnum):
    """Exchange of the embedding's gradient between data-parallel ranks."""

    AUTO = "auto"
    """The way with fewer bytes in training, the shorter step in planning."""
    DENSE = "dense"
    """The whole table, sharded like all other parameters."""
    SPARSE = "sparse"
    """The rows of the tokens that a rank has seen; every rank has the whole table."""


class Documents(enum.StrEnum):
    """Content of a row of a batch."""

    PACKED = "packed"
    """A window anywhere in the text, which may cross document ends."""
    WHOLE = "whole"
    """Tokens of one document, from its beginning on; documents shorter than a row are skipped."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Tiers and budgets of activation offloading.

    Raises:
        UsageError: options contradict each other or the mode.
    """

    mode: OffloadMode = OffloadMode.NONE
    plan: Path | None = None
    """File of an activation plan, with mode auto; None plans from measured steps."""
    device_budget: int | None = None
    """Device memory for the whole training, in bytes; None is all there is."""
    host_budget: int | None = None
    """Host memory for activations, in bytes; with mode disk, it is filled before the disk."""
    host_pool: Path | None = None
    """File by which jobs of a node share `host_budget`."""
    disk_dir: Path | None = None
    """Directory of the scratch file; None is the system's temporary directory."""
    disk_budget: int | None = None
    """Size of the scratch file, in bytes."""
    alpha: float | None = None
    """Largest fraction of what can be recomputed that moves."""
    codec: str | None = None
    """Format of what moves, "int8" or "fp8"; None: exact."""
    trace: str | Path | None = None
    """Trace file; a name that ends in a slash is a directory."""
    trace_stacks: bool = False
    """With `trace`: write the Python lines that saved each tensor."""

    def __post_init__(self) -> None:
        given = {
            "--plan": self.plan,
            "--device": self.device_budget,
            "--host": self.host_budget,
            "--host-pool": self.host_pool,
            "--disk": self.disk_dir,
            "--disk-budget": self.disk_budget,
            "--alpha": self.alpha,
            "--codec": self.codec,
            "--trace": self.trace,
            "--trace-stacks": self.trace_stacks or None,
        }
        useless = {
            OffloadMode.NONE: list(given),
            OffloadMode.HOST: ["--plan", "--device", "--disk", "--disk-budget"],
            OffloadMode.DISK: ["--plan", "--device"],
        }.get(self.mode, [])
        for flag in useless:
            if given[flag] is not None:
                if flag in ("--plan", "--device"):
                    fitting = "auto"
                else:
                    fitting = "disk or auto" if flag.startswith("--disk") else "host, disk or auto"
                raise UsageError(f"{flag} has no meaning with --offload {self.mode}; use --offload {fitting}")
        if self.trace_stacks and self.trace is None:
            raise UsageError("--trace-stacks needs --trace; it adds Python lines to the trace")
        if self.mode is OffloadMode.HOST and self.host_budget == 0:
            raise UsageError("--host 0 leaves --offload host no memory; give some, or use --offload disk")
        if self.host_pool is not None and not self.host_budget:
            raise UsageError("--host-pool needs --host SIZE: the budget of all jobs that share the file")
        if self.plan is not None and self.alpha is not None:
            raise UsageError("--plan and --alpha both say what moves; give one of them")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise UsageError(f"--alpha {self.alpha} is not between 0 (recompute all) and 1 (move all)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run of `memo train`.

    Raises:
        UsageError: options contradict each other, or a number is out of range.
    """

    model: str
    variant: Variant
    seq: int
    batch: int
    """Sequences in a microbatch of all data-parallel ranks together."""
    training: TrainConfig
    """Its precision is replaced by `precision` once the device is known."""
    layers: int | None = None
    """Replaces the preset's number; likewise `hidden`, `heads` and `dropout`."""
    hidden: int | None = None
    heads: int | None = None
    dropout: float | None = None
    experts: int | None = None
    """Experts of a layer that has them; None is the preset's; likewise the numbers of `MoeConfig` below."""
    top_k: int | None = None
    shared_experts: int | None = None
    expert_hidden: int | None = None
    expert_bottleneck: int | None = None
    every: int | None = None
    balance_loss: float | None = None
    z_loss: float | None = None
    sliding_window: int | None = None
    """Tokens of the window of local attention; None is the preset's."""
    full_every: int | None = None
    """Distance of the layers with full attention; None is the preset's, else 2."""
    rope_theta: float | None = None
    """Base of the rotary frequencies; None is the checkpoint's, else the model's."""
    rope_scaling: str | None = None
    """As of `RopeScaling.parse`; None is the checkpoint's, else none."""
    mlp_tiles: int = 1
    documents: Documents = Documents.PACKED
    mask_documents: bool = False
    """Attention does not cross document ends, and positions restart in each document."""
    data: Sequence[str] | None = None
    """Files, directories and globs; None is the source of Python's standard library."""
    field: str = "text"
    tokenizer: str | None = None
    seed: int = 0
    precision: Precision | None = None
    """None is bf16-autocast on a GPU, fp32 on a CPU."""
    deterministic: bool = False
    eval_every: int = 0
    """Steps between evaluations; 0 is never."""
    checkpoint_dir: Path | None = None
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 is never. There is always one at the end and after an interrupt."""
    checkpoint_minutes: float = 0.0
    """Minutes between checkpoints; 0 is never."""
    checkpoint_keep: int = 2
    resume: Path | Literal["latest"] | None = None
    keeps_batch: bool = False
    """With `resume`: take as many sequences a step as the checkpoint did, whatever `batch` and the training say."""
    metrics: Path | None = None
    tensorboard: Path | None = None
    """Directory of TensorBoard's event files."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    peak_flops: float | None = None
    """Peak FLOPs per second of the device; None looks the device up by name."""
    offload: OffloadConfig = dataclasses.field(default_factory=OffloadConfig)
    planned_allocator: bool = False
    """Allocate device memory at planned addresses of one arena."""
    layout: Layout = dataclasses.field(default_factory=Layout)
    """Ranks of data, tensor, pipeline and context parallelism."""
    embedding_gradients: EmbeddingGradients = EmbeddingGradients.DENSE
    compress_gradients: GradientCompression | None = None
    """Exchange of gradients between data-parallel ranks; None is exact."""
    pipeline_dtype: Literal["bf16"] | None = None
    """Number format of hidden states and their gradients between pipeline stages; None is that of the weights."""

    def __post_init__(self) -> None:
        if self.model not in PRESETS:
            raise UsageError(f"unknown model {self.model!r}; choose one of {', '.join(PRESETS)}")
        for name in ("batch", "checkpoint_keep", "mlp_tiles"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)} is less than 1")
        for name in ("seed", "eval_every", "checkpoint_every"):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)} is negative")
        if self.seed >= 1 << 63:
            raise UsageError("--seed is above 2^63 - 1, the largest seed of a random number generator")
        if not self.checkpoint_minutes >= 0:
            raise UsageError(f"--checkpoint-minutes {self.checkpoint_minutes} is not zero or a positive number")
        for name in ("checkpoint_every", "checkpoint_minutes"):
            if getattr(self, name) and self.checkpoint_dir is None:
                raise UsageError(f"--{name.replace('_', '-')} needs --checkpoint-dir")
        if self.resume == "latest" and self.checkpoint_dir is None:
            raise UsageError("--resume needs --checkpoint-dir, or the path of a checkpoint")
        if self.planned_allocator and self.device == "cpu":
            raise UsageError("--planned-allocator needs a GPU; leave it out with --on cpu")
        if self.pipeline_dtype is not None and self.layout.pp == 1:
            raise UsageError(f"--pipeline-dtype {self.pipeline_dtype} has no meaning without --pp")
        if self.pipeline_dtype is not None and self.precision is Precision.BF16:
            raise UsageError(
                "--pipeline-dtype bf16: with --precision bf16 stages pass on bfloat16 already; leave it out"
            )
        if self.documents is Documents.WHOLE and self.mask_documents:
            raise UsageError("--mask-documents: with --documents whole a row is of one document; leave one of them out")
        if self.rope_theta is not None and not 0 < self.rope_theta < math.inf:
            raise UsageError(f"--rope-theta {self.rope_theta} is not a positive number")
        if self.rope_scaling is not None:
            RopeScaling.parse(self.rope_scaling, seq=self.seq)
        if self.peak_flops is not None and not self.peak_flops > 0:
            raise UsageError(f"--peak-flops {self.peak_flops} is not a positive number")
