"""Configuration of a training run: model, data, training, offloading, outputs. Needs no torch."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from memo.compression import GradientCompression
from memo.errors import UsageError
from memo.gpt.config import GPTConfig
from memo.gpt.rope_scaling import RopeScaling
from memo.gpt.train_config import Precision, TrainConfig
from memo.parallel import Layout
from memo.units import parse_bytes, parse_tokens


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


_SIZE = {"type": parse_bytes, "metavar": "SIZE"}
_DIRECTORY = {"metavar": "DIR"}
_STEPS = {"metavar": "STEPS"}
_TRACE = {"type": str, "nargs": "?", "const": "trace.rank0.jsonl", "metavar": "FILE"}
_FILES = {"type": str, "action": "extend", "nargs": "+", "metavar": "PATH"}
_RESUME = {
    "type": lambda text: text if text == "latest" else Path(text),
    "nargs": "?",
    "const": "latest",
    "metavar": "CHECKPOINT",
}
_COMPRESSION = {"type": GradientCompression.parse, "metavar": "{int8,powersgd[:RANK]}"}


def _device_bytes(text: str) -> int:
    device = text.partition(":")[0]
    if device in ("auto", "cpu", "cuda"):
        raise UsageError(f"a budget is a size, such as 40GiB; to train on a device write --on {device}")
    return parse_bytes(text)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Tiers and budgets of activation offloading. `memo train` has a flag for each field.

    Raises:
        UsageError: options contradict each other or the mode.
    """

    mode: OffloadMode = OffloadMode.AUTO
    """Where activations wait between forward and backward: none leaves them on the device; host and disk move them; auto
    measures the first steps and plans (default: auto)."""
    plan: Path | None = None
    """Run this plan, written by memo plan: the model, the layout, the batch and the precision are the plan's."""
    device: Annotated[int | None, {"type": _device_bytes, "metavar": "SIZE"}] = None
    """With --offload auto: limit of device memory for the whole training (default: 94 % of the GPU's memory, which is also
    the most; on a CPU 80 % of the free memory)."""
    host: Annotated[int | None, _SIZE] = None
    """Limit of host memory for activations, such as 8GiB (default: a share of the free memory on a GPU, else none; none with
    --offload disk; the plan's with --plan)."""
    host_pool: Path | None = None
    """Share --host with all jobs of this node that name the same file, such as /dev/shm/memo-host."""
    disk: Annotated[Path | None, _DIRECTORY] = None
    """Directory of the scratch file (default with --offload disk and plans that use the disk: the system's temporary
    directory)."""
    disk_budget: Annotated[int | None, _SIZE] = None
    """Size of the scratch file, reserved at the start (default: grows up to the free disk space)."""
    alpha: float | None = None
    """Most of what can be recomputed that moves, a fraction from 0 to 1 (default: 1 with --offload host and disk, planned
    with auto)."""
    codec: Literal["int8", "fp8"] | None = None
    """Move values as one-byte codes with a bounded error (default: bit for bit; the plan's with --plan)."""
    trace: Annotated[str | Path | None, _TRACE] = None
    """Write a trace of every saved tensor to FILE, one file per rank; without a value to trace.rank0.jsonl; a name that ends
    in / is a directory (default: no trace)."""
    trace_stacks: bool = False
    """With --trace: record the Python lines that saved each tensor (default: off)."""

    def __post_init__(self) -> None:
        options = {
            "auto": ("plan", "device"),
            "disk or auto": ("disk", "disk_budget"),
            "host, disk or auto": ("host", "host_pool", "alpha", "codec", "trace", "trace_stacks"),
        }
        for modes, names in options.items():
            given = [name for name in names if getattr(self, name) is not None and getattr(self, name) is not False]
            if given and self.mode not in modes:
                flag = f"--{given[0].replace('_', '-')}"
                raise UsageError(f"{flag} has no meaning with --offload {self.mode}; use --offload {modes}")
        if self.trace_stacks and self.trace is None:
            raise UsageError("--trace-stacks needs --trace; it adds Python lines to the trace")
        if self.mode is OffloadMode.HOST and self.host == 0:
            raise UsageError("--host 0 leaves --offload host no memory; give some, or use --offload disk")
        if self.host_pool is not None and not self.host:
            raise UsageError("--host-pool needs --host SIZE: the budget of all jobs that share the file")
        if self.plan is not None and self.alpha is not None:
            raise UsageError("--plan and --alpha both say what moves; give one of them")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise UsageError(f"--alpha {self.alpha} is not between 0 (recompute all) and 1 (move all)")

    @property
    def words(self) -> str:
        """Plan, alpha or mode by which activations move, as a run's header has it."""
        if self.plan is not None:
            return f"plan {self.plan}"
        alpha = "" if self.alpha is None else f"alpha {self.alpha:g}"
        mode = "" if alpha and self.mode is OffloadMode.AUTO else f"offload {self.mode}"
        return ", ".join(filter(None, (mode, alpha)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run of `memo train`, which has a flag for each field but those of the model.

    Raises:
        UsageError: options contradict each other, or a number is out of range.
    """

    model: str
    """The model's name."""
    shape: GPTConfig
    """Its shape; vocabulary and length of a learned position table follow from data and `seq`."""
    training: TrainConfig
    """Its precision is replaced by `precision` once the device is known."""
    seq: Annotated[int, {"type": parse_tokens, "metavar": "TOKENS"}] = 1024
    """Sequence length in tokens, such as 32k or 1m (default 1k)."""
    batch: int = 1
    """Sequences in a microbatch of all data-parallel ranks together."""
    rope_theta: Annotated[float | None, {"metavar": "BASE"}] = None
    """Base of the rotary frequencies (default: the checkpoint's with --resume, else the model's)."""
    rope_scaling: Annotated[str | None, {"metavar": "KIND:FACTOR"}] = None
    """Rotary positions of a model first trained on sequences FACTOR times shorter than --seq: linear, ntk or yarn, such as
    yarn:8; none (default: the checkpoint's with --resume, else none)."""
    data: Annotated[Sequence[str] | None, _FILES] = None
    """Text files, directories, globs, .jsonl or .parquet files (default: the source of Python's standard library)."""
    field: str = "text"
    """Name of the text field in .jsonl and .parquet."""
    documents: Documents = Documents.PACKED
    """Division of documents into rows. packed: a sequence may cross document ends; whole: it lies in one document, and
    documents shorter than --seq are skipped."""
    mask_documents: bool = False
    """With packed documents: attention does not cross document ends, and positions restart in each (default: it does)."""
    tokenizer: Annotated[str | None, {"metavar": "FILE"}] = None
    """Tokenizer.json of Hugging Face (default: one token per byte of text)."""
    seed: int = 0
    """Random seed of weights, batches and dropout."""
    precision: Precision | None = None
    """Number format of weights and arithmetic (default: bf16-autocast on a GPU, fp32 on a CPU; the plan's with --plan)."""
    optimizer_offload: bool = False
    """Keep AdamW's state in host memory, with a copy of the parameters and their gradients, and update there: the GPU holds
    parameters alone; for one GPU (default: all on the device; the plan's with --plan)."""
    eval_every: Annotated[int, _STEPS] = 0
    """Steps between evaluations; 0 is never."""
    metrics: Path | None = None
    """Write the metrics of each step, one JSON object per line."""
    tensorboard: Annotated[Path | None, _DIRECTORY] = None
    """Write the same metrics for TensorBoard."""
    checkpoint_dir: Annotated[Path | None, _DIRECTORY] = None
    """Write a checkpoint at the end and when interrupted (default: no checkpoints)."""
    checkpoint_every: Annotated[int, _STEPS] = 0
    """Also write a checkpoint every STEPS steps; 0 is never."""
    checkpoint_minutes: Annotated[float, {"metavar": "MIN"}] = 0.0
    """Also write a checkpoint every MIN minutes; 0 is never (default 0)."""
    checkpoint_keep: int = 2
    """Number of newest checkpoints to keep."""
    resume: Annotated[Path | Literal["latest"] | None, _RESUME] = None
    """Continue from CHECKPOINT, or without a value from the newest one in --checkpoint-dir (default: a new run)."""
    keeps_batch: bool = False
    """With `resume`: take as many sequences a step as the checkpoint did, whatever `batch` and the training say."""
    on: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto is a GPU if there is one."""
    deterministic: bool = False
    """Use GPU kernels that give the same bits in every run; somewhat slower (default: off)."""
    planned_allocator: bool = False
    """Allocate GPU memory at planned addresses, without fragmentation (default: PyTorch's caching allocator)."""
    peak_flops: Annotated[float | None, {"metavar": "FLOPS"}] = None
    """Peak FLOPs per second of the device, for mfu (default: known by the GPU's name)."""
    offload: OffloadConfig = dataclasses.field(default_factory=OffloadConfig)
    layout: Layout = dataclasses.field(default_factory=Layout)
    """Ranks of data, tensor, pipeline and context parallelism."""
    adapt: bool = False
    """With --checkpoint-dir: once the plan has settled, measure steps and links, and restart the ranks in another layout
    from a checkpoint where that saves a tenth of the time that is left; the run starts in the layout of the
    flags, with --resume in the checkpoint's (default: the layout stays)."""
    embedding_exchange: EmbeddingGradients = EmbeddingGradients.DENSE
    """With --dp or --cp: exchange the embedding's gradient dense, as a whole table, or sparse, as the rows of the tokens
    that a rank has seen, for which every rank has the table whole; auto takes the one of fewer bytes (default: the plan's
    with --plan, else dense)."""
    compress_gradients: Annotated[GradientCompression | None, _COMPRESSION] = None
    """With --dp or --cp: exchange gradients with an error: int8 sends codes of one byte; powersgd two factors of each
    matrix, of rank 4 or RANK, and feeds the error back (default: exact)."""
    pipeline_dtype: Literal["bf16"] | None = None
    """With --pp: pass hidden states and their gradients between stages as bfloat16, half of float32's bytes (default: the
    weights' number format)."""

    def __post_init__(self) -> None:
        for name in ("batch", "checkpoint_keep"):
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
        if self.planned_allocator and self.on == "cpu":
            raise UsageError("--planned-allocator needs a GPU; leave it out with --on cpu")
        if self.optimizer_offload and self.layout.ranks > 1:
            raise UsageError(
                f"--optimizer-offload is for one GPU; {self.layout.ranks} share its state on the device: leave it out"
            )
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
