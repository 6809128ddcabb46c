"""Layout of a model over ranks: four mesh sizes, a pipeline schedule, and all checks that need no process group.

    rank = ((pp * dp_size + dp) * cp_size + cp) * tp_size + tp        tp varies fastest: its ranks communicate most

Imports no torch, so that an impossible layout is refused before anything starts.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Annotated, Protocol

from memo.errors import UsageError
from memo.mip.inputs import PipelineSchedule as PipelineSchedule


def key_copies(heads: int, kv_heads: int, ranks: int) -> int:
    """Copies of each key/value head that ranks need to attend with an equal part of the query heads each.

        8 query heads, 2 key/value heads A B, 4 ranks    queries 01 23 45 67, keys A A B B: 2 copies
        12 query heads, 4 key/value heads, 3 ranks       queries 0123 4567 .., keys AAAB BBCC CDDD: 3 copies, since a
                                                         kernel takes as many queries for each key/value head

    Args:
        heads: query heads, a multiple of the ranks.
        kv_heads: key/value heads.
        ranks: among which the query heads are divided in order.

    Returns:
        1 where the ranks divide the key/value heads.
    """
    group = heads // kv_heads
    return group // math.gcd(group, heads // ranks)


class ModelShape(Protocol):
    """The sizes of a model that must divide over ranks; `memo.gpt`'s GPTConfig has them."""

    @property
    def layers(self) -> int:
        """Number of transformer layers."""

    @property
    def heads(self) -> int:
        """Query heads of a layer."""

    @property
    def kv_heads(self) -> int:
        """Key/value heads of a layer."""

    @property
    def ffn(self) -> int:
        """Width of the MLP."""

    @property
    def expert_count(self) -> int:
        """Experts of a layer that has them; 0 without."""

    @property
    def end_of_document(self) -> int | None:
        """Token that ends a document; None where attention is not limited to documents."""

    @property
    def local_window(self) -> int | None:
        """Tokens of the window of layers with local attention; None where none has it."""


def parse_layer_counts(text: str) -> tuple[int, ...]:
    """Reads numbers of layers such as `12,13,4,3`.

    Raises:
        UsageError: one is not a number of layers.
    """
    counts = text.split(",")
    if not all(count.strip().isdecimal() and 0 < int(count) < 1 << 31 for count in counts):
        raise UsageError(f"{text[:40]!r}: give a number of layers for each stage, such as 9,9,8,6")
    return tuple(map(int, counts))


class ContextAttention(enum.StrEnum):
    """Context parallelism: how ranks that share a sequence compute attention."""

    AUTO = "auto"  # Ulysses where its heads divide
    ULYSSES = "ulysses"  # Jacobs et al. 2023: ranks exchange heads for tokens
    RING = "ring"  # Liu et al. 2023: keys and values go around


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the mesh (pp, dp, cp, tp) and the options that go with them.

    Raises:
        UsageError: a size is below 1, or an option has no meaning with these sizes.
    """

    dp: int = 1
    """Data parallelism: ranks that divide the batch; parameters are sharded over them."""
    tp: int = 1
    """Tensor parallelism: ranks that divide each matrix."""
    pp: int = 1
    """Pipeline parallelism: ranks that divide the layers."""
    cp: int = 1
    """Context parallelism: ranks that divide each sequence, in attention, too."""
    ep: int = 1
    """With --experts: expert parallelism, ranks of --dp that divide the experts; for all else they are data-parallel
    ones."""
    cp_attention: ContextAttention = ContextAttention.AUTO
    """With --cp: ulysses exchanges heads for tokens and needs query heads that divide by tp x cp; ring passes keys and
    values around; auto is ulysses where heads divide, else ring."""
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    """With --pp: pipeline schedule of the microbatches."""
    chunks: int | None = None
    """With an interleaved --schedule: runs of consecutive layers of each pipeline rank (default 2)."""
    sequence_parallel: bool = True
    """With --tp: ranks also divide the tokens, between the matrix products; without it each keeps all of them there."""
    tp_overlap: bool = False
    """With --tp: run each layer in two halves, so that collectives of one overlap with compute of the other (halves of the
    sequences; of one sequence, of the MLP's tokens)."""
    stage_layers: Annotated[tuple[int, ...], {"type": parse_layer_counts, "metavar": "N,N,..."}] = ()
    """With --pp: numbers of layers of the stages, in their order; of an interleaved --schedule of all its runs of layers
    (default: equal ones)."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} {getattr(self, name)} is less than 1")
        if self.dp % self.ep:
            raise UsageError(f"--ep {self.ep} does not divide --dp {self.dp}; its ranks are data-parallel ones")
        if self.cp == 1 and self.cp_attention is not ContextAttention.AUTO:
            raise UsageError(f"--cp-attention {self.cp_attention} has no meaning without --cp")
        if self.pp == 1 and self.schedule is not PipelineSchedule.ONE_F_ONE_B:
            raise UsageError(f"--schedule {self.schedule} has no meaning without --pp")
        if self.tp_overlap and self.tp == 1:
            raise UsageError("--tp-overlap has no meaning without --tp; give --tp 2 or more, or leave it out")
        wrong = None if self.chunks is None else self.schedule.reason_not_chunks(self.chunks)
        if wrong is not None:
            raise UsageError(f"--chunks {self.chunks} {wrong}")
        if self.stage_layers and len(self.stage_layers) != self.stages:
            raise UsageError(
                f"--stage-layers has {len(self.stage_layers)} numbers, and pipeline stages are {self.stages} in all"
            )
        if any(count < 1 for count in self.stage_layers):
            raise UsageError(f"--stage-layers has a stage of {min(self.stage_layers)} layers; each has at least one")

    @property
    def ranks(self) -> int:
        """Processes of the run."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def stages(self) -> int:
        """Pipeline stages of all ranks."""
        return self.pp * self.stages_per_rank

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages on each rank."""
        return self.chunks or self.schedule.default_chunks

    @property
    def shards_tokens(self) -> bool:
        """True when tensor-parallel ranks hold different tokens between the matrices."""
        return self.tp > 1 and self.sequence_parallel

    @property
    def token_shards(self) -> int:
        """Number of ranks that a sequence is divided over, outside attention and the matrices."""
        return self.cp * (self.tp if self.shards_tokens else 1)

    def rings(self, shape: ModelShape) -> bool:
        """True for ring attention, whose ranks hold an early and a late part of the sequence each."""
        if self.cp == 1 or self.cp_attention is ContextAttention.ULYSSES:
            return False
        return self.cp_attention is ContextAttention.RING or bool(shape.heads % (self.tp * self.cp))

    def stages_of(self, pp_rank: int) -> list[int]:
        """Stages of one pipeline rank, in the order of the layers."""
        return self.schedule.stages_of(pp_rank, self.pp, chunks=self.chunks)

    def layers_of(self, stage: int, layers: int) -> range:
        """Indices of a stage's layers, of `layers` in all."""
        if self.stage_layers:
            first = sum(self.stage_layers[:stage])
            return range(first, first + self.stage_layers[stage])
        count = layers // self.stages
        return range(stage * count, (stage + 1) * count)

    def check(
        self, shape: ModelShape, *, seq: int, batch: int, microbatches: int, within_documents: bool = False
    ) -> None:
        """Checks that a model and a batch divide over the ranks.

        Args:
            shape: sizes of the model.
            seq: tokens of a sequence.
            batch: sequences of a step.
            microbatches: of a step.
            within_documents: attention is limited to documents; also where `shape` names the token that ends one.

        Raises:
            UsageError: something does not divide; the message names the flag and numbers that would.
        """
        self._check_heads(shape)
        self._check_experts(shape.expert_count)
        if self.rings(shape) and (within_documents or shape.end_of_document is not None):
            raise UsageError(
                "attention within documents is not possible with ring attention; use --cp-attention ulysses, or no --cp"
            )
        if self.rings(shape) and shape.local_window is not None and shape.local_window < seq:
            raise UsageError(
                "local attention is not possible with ring attention; use --cp-attention ulysses, or no --cp"
            )
        if shape.ffn % self.tp:
            raise UsageError(f"--tp {self.tp} does not divide the MLP's width of {shape.ffn}")
        if seq % self.token_shards:
            raise UsageError(f"--seq {seq} does not divide over {self.token_shards} ranks; use a multiple")
        if self.rings(shape) and seq % (2 * self.cp):
            raise UsageError(
                f"--seq {seq} does not divide into an early and a late part for each of --cp {self.cp}; use a multiple of "
                f"{2 * self.cp}"
            )
        if batch % self.dp:
            raise UsageError(f"--batch {batch} does not divide over --dp {self.dp}; use a multiple")
        if self.tp_overlap:
            self._check_halves(shape, tokens=seq // self.token_shards, rows=batch // self.dp)
        if self.stage_layers and sum(self.stage_layers) != shape.layers:
            raise UsageError(
                f"--stage-layers {','.join(map(str, self.stage_layers))} are not the model's {shape.layers} layers"
            )
        if shape.layers % self.stages and not self.stage_layers:
            chunks = f", --chunks {self.chunks}" if self.chunks else ""
            raise UsageError(
                f"{shape.layers} layers do not divide over {self.stages} pipeline stages (--pp {self.pp}, "
                f"{self.schedule}{chunks}); --stage-layers gives each its own number"
            )
        if self.pp > 1:
            self._check_microbatches(microbatches)

    def _check_heads(self, shape: ModelShape) -> None:
        flags, queried = f"--tp {self.tp}", self.tp
        if self.cp > 1 and not self.rings(shape):  # its ranks share key/value heads where these are fewer
            flags, queried = f"{flags} times --cp {self.cp}" if self.tp > 1 else f"--cp {self.cp}", self.tp * self.cp
        for what, count, given, ranks in (
            ("heads", shape.heads, flags, queried),
            ("key/value heads", shape.kv_heads, f"--tp {self.tp}", self.tp),
        ):
            if count % ranks:
                raise UsageError(f"{given} does not divide the model's {count} {what}; a rank needs whole ones")

    def _check_experts(self, count: int) -> None:
        if not count:
            if self.ep > 1:
                raise UsageError(f"--ep {self.ep} has no meaning without --experts")
            return
        if count % self.ep:
            raise UsageError(f"--ep {self.ep} does not divide the model's {count} experts; a rank needs whole ones")

    def _check_halves(self, shape: ModelShape, *, tokens: int, rows: int) -> None:
        if shape.expert_count:
            raise UsageError("--tp-overlap: experts are chosen for all rows at once; leave it out with --experts")
        if rows == tokens == 1:
            raise UsageError(
                f"--tp-overlap: one sequence with one token on a rank has no halves; use --batch {2 * self.dp} or "
                f"--seq {2 * self.token_shards}"
            )

    def _check_microbatches(self, count: int) -> None:
        wrong = self.schedule.reason_unsupported(count, self.pp)
        if wrong is not None:
            raise UsageError(f"--accumulate {count} {wrong}")

    def check_ranks(self, ranks: int) -> None:
        """Raises UsageError unless `ranks` processes, as many as were started, are what the layout needs."""
        if ranks != self.ranks:
            raise UsageError(
                f"--dp {self.dp} --tp {self.tp} --pp {self.pp} --cp {self.cp} is a layout of {self.ranks} ranks, but "
                f"{ranks} {'was' if ranks == 1 else 'were'} started; on one node start them with "
                f"torchrun --nproc-per-node {self.ranks}"
            )
