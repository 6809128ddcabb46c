"""How a model is laid out over ranks: four sizes, a pipeline schedule, and every check that needs no process group.

    rank = ((pp * dp_size + dp) * cp_size + cp) * tp_size + tp        tp varies fastest: its ranks talk the most

Needs no torch, so that a layout that cannot be is refused before anything starts.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol

from memo.errors import UsageError
from memo.mip.inputs import PipelineSchedule

__all__ = ["ContextAttention", "Layout", "ModelShape", "PipelineSchedule"]


class ModelShape(Protocol):
    """The sizes of a model that must divide over ranks; `memo.gpt`'s GPTConfig has them."""

    @property
    def layers(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def ffn(self) -> int:
        """Width of the MLP."""

    @property
    def end_of_document(self) -> int | None:
        """The token that ends a document, within which attention then stays."""


class ContextAttention(enum.StrEnum):
    """How ranks that share a sequence attend to all of it."""

    AUTO = "auto"  # Ulysses where there are heads enough
    ULYSSES = "ulysses"  # Jacobs et al. 2023: ranks exchange heads for tokens
    RING = "ring"  # Liu et al. 2023: keys and values go around


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the mesh (pp, dp, cp, tp)."""

    dp: int = 1
    """Replicas that share the rows of a batch; parameters are sharded over them."""
    tp: int = 1
    """Ranks that share each layer's matrices."""
    pp: int = 1
    """Ranks that share the layers."""
    cp: int = 1
    """Ranks that share the tokens of a sequence also in attention."""
    cp_attention: ContextAttention = ContextAttention.AUTO
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    sequence_parallel: bool = True
    """Tensor-parallel ranks share the tokens between the matrices too."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} {getattr(self, name)} is less than 1")
        if self.cp == 1 and self.cp_attention is not ContextAttention.AUTO:
            raise UsageError(f"--cp-attention {self.cp_attention} has no meaning without --cp")
        if self.pp == 1 and self.schedule is not PipelineSchedule.ONE_F_ONE_B:
            raise UsageError(f"--schedule {self.schedule} has no meaning without --pp")

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def stages(self) -> int:
        """Pipeline stages in all."""
        return self.pp * self.stages_per_rank

    @property
    def stages_per_rank(self) -> int:
        return self.schedule.stages_per_rank if self.pp > 1 else 1

    @property
    def shards_tokens(self) -> bool:
        """Whether tensor-parallel ranks hold different tokens between the matrices."""
        return self.tp > 1 and self.sequence_parallel

    @property
    def token_shards(self) -> int:
        """Ranks that a sequence is divided over outside of attention and the matrices."""
        return self.cp * (self.tp if self.shards_tokens else 1)

    def rings(self, shape: ModelShape) -> bool:
        """Whether ranks that share a sequence attend around a ring. Its ranks hold an early and a late part of it each."""
        if self.cp == 1 or self.cp_attention is ContextAttention.ULYSSES:
            return False
        heads = self.tp * self.cp
        return self.cp_attention is ContextAttention.RING or bool(shape.heads % heads or shape.kv_heads % heads)

    def stages_of(self, pp_rank: int) -> list[int]:
        """Stages of one rank of the pipeline, in the order of the layers."""
        return self.schedule.stages_of(pp_rank, self.pp)

    def layers_of(self, stage: int, layers: int) -> range:
        """Positions of a stage's layers."""
        count = layers // self.stages
        return range(stage * count, (stage + 1) * count)

    def check(
        self, shape: ModelShape, *, seq: int, batch: int, microbatches: int, within_documents: bool = False
    ) -> None:
        """Raises UsageError for whatever does not divide, naming the flag and the numbers that would.

        `within_documents`: attention stays within them, as it also does where the shape names the token that ends one.
        """
        self._check_heads(shape)
        if self.rings(shape) and (within_documents or shape.end_of_document is not None):
            raise UsageError(
                "attention within documents does not go around a ring; use --cp-attention ulysses, or no --cp"
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
        if shape.layers % self.stages:
            raise UsageError(
                f"{shape.layers} layers do not divide over {self.stages} pipeline stages (--pp {self.pp}, {self.schedule})"
            )
        if self.pp > 1:
            self._check_microbatches(microbatches)

    def _check_heads(self, shape: ModelShape) -> None:
        if self.rings(shape):
            heads, flags = self.tp, f"--tp {self.tp}"
        else:
            heads = self.tp * self.cp
            flags = " times ".join(f"--{name} {size}" for name, size in (("tp", self.tp), ("cp", self.cp)) if size > 1)
        for count, what in ((shape.heads, "heads"), (shape.kv_heads, "key/value heads")):
            if count % heads:
                raise UsageError(f"{flags} does not divide the model's {count} {what}; a rank needs whole ones")

    def _check_microbatches(self, count: int) -> None:
        wrong = self.schedule.reason_unsupported(count, self.pp)
        if wrong is not None:
            raise UsageError(f"--accumulate {count} {wrong}")

    def check_ranks(self, ranks: int) -> None:
        """Raises UsageError unless exactly as many processes were started as the layout has."""
        if ranks != self.ranks:
            raise UsageError(
                f"--dp {self.dp} --tp {self.tp} --pp {self.pp} --cp {self.cp} is a layout of {self.ranks} ranks, but "
                f"{ranks} {'was' if ranks == 1 else 'were'} started; start it with torchrun on as many"
            )
