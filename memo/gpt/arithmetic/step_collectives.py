"""Collectives of one step of `memo train` on one rank, pass by pass, from the model and the layout alone.

Owns which collectives memo's own engine issues, over which ranks, with how many bytes, and how often. The predicted
seconds of memo.gpt.arithmetic.profile_by_arithmetic are sums over these lists, and `memo dry-run` compares them with
what a rank issues. Needs no torch. t is the tokens of a microbatch after context parallelism, h the hidden size:

    layer       tp   forward    gather (t, h), sum to shards (t, h), for attention and again for the MLP
                     backward   the transposed ones; both gathers again for the weights' gradients; and one sum of h numbers
                                for each parameter that every rank has: norms, biases of the second projections
                cp   Ulysses    heads for tokens: q, k, v, attention's result; backward the same
                     ring       keys and values go around, in backward their gradients, too
    embedding   tp   gather of token ids, sum to shards (t, h); backward gathers (t, h)
    head        tp   number of counted tokens; for each chunk of tokens: gather (chunk, h) and its targets, maximum, sums,
                     sum to shards of the gradient; backward sums the norm's gradients
    weights  dp x cp gather of each layer before each of its passes (the last one stays), of the ends before forward;
                     reduction once a step. In a pipeline all are gathered once a step
    stages      pp   a microbatch's hidden states to the next stage, their gradient to the one before
    step        all  whether to stop, the mean loss, the gradients' norm
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from memo.gpt.arithmetic.block_bytes import ElementSizes
from memo.gpt.arithmetic.collectives import Collective, CollectiveKind, Ranks
from memo.gpt.train_config import Precision
from memo.mip.inputs import PipelineSchedule

if TYPE_CHECKING:
    from memo.gpt.arithmetic.layout import Layout
    from memo.gpt.config import GPTConfig

__all__ = ["ChunkOfLayers", "StepCollectives", "padded_elements"]

ID = 8  # bytes of a token's number, and of the step's three sums
WIDE = 4  # bytes of a float32, in which the loss computes
# Of memo.loss.chunked_cross_entropy.
CHUNK_LOGITS, MAX_CHUNK_TOKENS = 1 << 25, 8192

Shape = tuple[int, int]
"""Rows and columns of a rank's part of a parameter, before it is sharded over replicas."""


def padded_elements(shapes: Iterable[Shape], shards: int) -> int:
    """Elements that shards of some parameters have together: FSDP pads rows to a multiple of the shards."""
    return sum(math.ceil(rows / shards) * shards * columns for rows, columns in shapes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOfLayers:
    """Consecutive layers that a rank runs for each microbatch, and their place in the pipeline."""

    layers: int
    is_first: bool = True
    """It has the embedding."""
    is_last: bool = True
    """It has the head."""
    splits: bool = False
    """Its backward is split in two."""
    receives: bool = False
    """Another rank has the layers before; sends likewise those after."""
    sends: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepCollectives:
    """Collectives of one rank, by pass. Those over one rank are left out."""

    config: GPTConfig
    layout: Layout
    precision: Precision = Precision.BF16
    sparse_embedding: bool = False
    """The embedding's table is whole on every rank, and its gradient is exchanged as rows, which these lists leave out."""

    @property
    def rings(self) -> bool:
        """Whether context-parallel ranks attend in a ring."""
        return self.layout.rings(self.config.heads, self.config.kv_heads)

    @property
    def replicas(self) -> int:
        """Ranks that parameters are sharded over."""
        return self.layout.replicas * self.layout.cp

    @property
    def _sizes(self) -> ElementSizes:
        return ElementSizes.of(self.precision)

    @property
    def _tokens(self) -> int:
        """Tokens of a microbatch that a context-parallel rank has."""
        return self.layout.batch * self.layout.tokens // self.layout.cp

    @property
    def _norms(self) -> int:
        """Parameters of h numbers in one norm."""
        return 2 if self.config.norm == "layernorm" and self.config.bias else 1

    def layer_forward(self) -> tuple[Collective, ...]:
        """Collectives of a microbatch's forward through one layer."""
        return (*self.tensor_forward(), *self.context_forward())

    def layer_backward(self, *, splits: bool = False) -> tuple[Collective, ...]:
        """Collectives of its backward, without any recompute; `splits`: in two halves."""
        return (*self.tensor_backward(splits=splits), *self.context_backward())

    def tensor_forward(self) -> tuple[Collective, ...]:
        """Tensor parallelism's part of `layer_forward`."""
        return self._tensor(gathers=2, sums=2)

    def tensor_again(self) -> tuple[Collective, ...]:
        """What a replay of a whole layer repeats of it: all but the sum after the last projection."""
        return self._tensor(gathers=2, sums=1)

    def tensor_backward(self, *, splits: bool = False) -> tuple[Collective, ...]:
        """Tensor parallelism's part of `layer_backward`."""
        shared = 2 * self._norms + (2 if self.config.bias else 0)
        # A function written in Python is not told which half runs, so each half gathers what the products read.
        return (*self._tensor(gathers=6 if splits else 4, sums=2), *self._sums_of_shared(shared))

    def _tensor(self, *, gathers: int, sums: int) -> tuple[Collective, ...]:
        nbytes = self._tokens * self.config.hidden * self._sizes.product
        return self._over_tensor(
            (CollectiveKind.ALL_GATHER, nbytes, gathers), (CollectiveKind.REDUCE_SCATTER, nbytes, sums)
        )

    def _sums_of_shared(self, parameters: int) -> tuple[Collective, ...]:
        """Sums of the gradients of parameters of h numbers that each tensor-parallel rank has."""
        return self._over_tensor((CollectiveKind.ALL_REDUCE, self.config.hidden * self._sizes.stream, parameters))

    def _over_tensor(self, *given: tuple[CollectiveKind, int, int]) -> tuple[Collective, ...]:
        if self.layout.tp == 1:
            return ()
        return tuple(
            Collective(kind=kind, ranks=Ranks.TENSOR, nbytes=nbytes, count=count) for kind, nbytes, count in given
        )

    def context_forward(self) -> tuple[Collective, ...]:
        """Context parallelism's part of `layer_forward`."""
        if self.layout.cp == 1:
            return ()
        if not self.rings:
            return self._heads_for_tokens()
        return (self._rotation(self._sizes.product, self.layout.cp - 1),)

    def context_backward(self) -> tuple[Collective, ...]:
        """Context parallelism's part of `layer_backward`."""
        if self.layout.cp == 1:
            return ()
        if not self.rings:
            return self._heads_for_tokens()
        around = self._rotation(self._sizes.product, self.layout.cp - 1)
        return (around, self._rotation(WIDE, self.layout.cp))  # gradients are added up in float32

    def layer_again(self) -> tuple[Collective, ...]:
        """What a replay of all tokens of a layer repeats, attention's own result excepted."""
        return (*self.tensor_again(), *(() if self.rings else self.context_forward()))

    def _heads_for_tokens(self) -> tuple[Collective, ...]:
        config, tp = self.config, self.layout.tp
        each = self._tokens * config.head_dim * self._sizes.product // tp
        return tuple(
            Collective(kind=CollectiveKind.ALL_TO_ALL, ranks=Ranks.CONTEXT, nbytes=heads * each, count=2)
            for heads in (config.heads, config.kv_heads)  # q and the result; k and v
        )

    def _rotation(self, element: int, count: int) -> Collective:
        """Keys and values, of as many heads as queries have, or their gradients, from rank to rank."""
        nbytes = 2 * self._tokens * self.config.hidden // self.layout.tp * element
        return Collective(kind=CollectiveKind.ROTATE, ranks=Ranks.CONTEXT, nbytes=nbytes, count=count)

    def embedding_forward(self) -> tuple[Collective, ...]:
        """Collectives of a microbatch's embedding, without its weights'."""
        rows = self._tokens * self.config.hidden * self._sizes.stream
        return self._over_tensor(
            (CollectiveKind.ALL_GATHER, self._tokens * ID, 1), (CollectiveKind.REDUCE_SCATTER, rows, 1)
        )

    def embedding_backward(self) -> tuple[Collective, ...]:
        """Collectives of its backward."""
        rows = self._tokens * self.config.hidden * self._sizes.stream
        return self._over_tensor((CollectiveKind.ALL_GATHER, rows, 1))

    def head_forward(self) -> tuple[Collective, ...]:
        """Collectives of a microbatch's loss, chunk by chunk, gradients included."""
        tp = self.layout.tp
        found = [*self._over_tensor((CollectiveKind.ALL_REDUCE, ID, 1))]
        own, widest = self._tokens // tp, -(-self.config.vocab_size // tp)
        fitting = max(1, CHUNK_LOGITS // widest)
        chunk = max(1, min(MAX_CHUNK_TOKENS, 1 << (fitting.bit_length() - 1)) // tp)
        for tokens, count in ((chunk, own // chunk), (own % chunk, 1)):
            if tokens and count:
                rows = tp * tokens * self.config.hidden * self._sizes.product
                found += self._over_tensor(
                    (CollectiveKind.ALL_GATHER, rows, count),
                    (CollectiveKind.ALL_GATHER, tp * tokens * ID, count),
                    (CollectiveKind.ALL_REDUCE, tp * tokens * WIDE, count),
                    (CollectiveKind.ALL_REDUCE, 2 * tp * tokens * WIDE, count),
                    (CollectiveKind.REDUCE_SCATTER, rows, count),
                )
        return tuple(found)

    def head_backward(self) -> tuple[Collective, ...]:
        """Collectives of its backward."""
        return self._sums_of_shared(self._norms)

    def send(self) -> Collective:
        """A microbatch's hidden states, or their gradient, to the neighbouring stage."""
        nbytes = self._tokens // self.layout.tp * self.config.hidden * self._sizes.stream
        return Collective(kind=CollectiveKind.SEND, ranks=Ranks.STAGES, nbytes=nbytes)

    # Parameters.

    def layer_shapes(self) -> list[Shape]:
        """A rank's parts of the parameters of one layer."""
        config, tp = self.config, self.layout.tp
        h, qkv, ffn = config.hidden, config.qkv_width // tp, config.ffn // tp
        up = [(ffn, h)] * (2 if config.mlp == "swiglu" else 1)
        shapes = [(h, 1)] * (2 * self._norms) + [(qkv, h), (h, h // tp), *up, (h, ffn)]
        if config.bias:
            shapes += [(qkv, 1), (h, 1), *((ffn, 1) for _ in up), (h, 1)]
        return shapes

    def table_rows(self, tp_rank: int = 0) -> int:
        """Rows of the vocabulary on a rank of tensor parallelism; the last ranks may have fewer than the first."""
        most = -(-self.config.vocab_size // self.layout.tp)
        return min(most, max(0, self.config.vocab_size - tp_rank * most))

    def end_shapes(self, chunk: ChunkOfLayers, tp_rank: int = 0) -> list[Shape]:
        """A rank's parts of the ends' parameters that are gathered together, with the chunk that has them."""
        config, h = self.config, self.config.hidden
        table, shapes = (self.table_rows(tp_rank), h), []
        if (chunk.is_first and not self.sparse_embedding) or (chunk.is_last and config.tie_embeddings):
            shapes.append(table)
        if chunk.is_first and config.positions == "learned" and self.layout.tp == 1:
            shapes.append((self._position_rows, h))
        if chunk.is_last:
            shapes += [(h, 1)] * self._norms + ([] if config.tie_embeddings else [table])
        return shapes

    @property
    def _position_rows(self) -> int:
        """Rows of a learned position table, which memo train makes as long as a sequence."""
        return self.layout.tokens

    def gather(self, shapes: Iterable[Shape]) -> tuple[Collective, ...]:
        """Gather of some parameters together."""
        return self._sharded(CollectiveKind.ALL_GATHER, shapes, Ranks.REPLICAS, self.replicas)

    def reduce(self, shapes: Iterable[Shape]) -> tuple[Collective, ...]:
        """Reduction of their gradients, which are in the weights' format."""
        return self._sharded(CollectiveKind.REDUCE_SCATTER, shapes, Ranks.REPLICAS, self.replicas)

    def _sharded(
        self, kind: CollectiveKind, shapes: Iterable[Shape], ranks: Ranks, shards: int
    ) -> tuple[Collective, ...]:
        elements = padded_elements(shapes, shards)
        if shards == 1 or not elements:
            return ()
        return (Collective(kind=kind, ranks=ranks, nbytes=elements * self._sizes.stream),)

    def _positions(self, kind: CollectiveKind, chunk: ChunkOfLayers) -> tuple[Collective, ...]:
        """Those of a learned position table under tensor parallelism, whose ranks read different rows of it."""
        if not (chunk.is_first and self.config.positions == "learned" and self.layout.tp > 1):
            return ()
        shape = (self._position_rows, self.config.hidden)
        return self._sharded(kind, [shape], Ranks.TOKENS, self.replicas * self.layout.tp)

    def _tied(self, tp_rank: int, replica: int) -> tuple[Collective, ...]:
        """The sum of a tied table's two gradients, each rank's shard of them."""
        nbytes = self._own_rows(self.table_rows(tp_rank), replica) * self.config.hidden * self._sizes.stream
        return (Collective(kind=CollectiveKind.ALL_REDUCE, ranks=Ranks.ENDS, nbytes=nbytes),)

    def shard_rows(self, chunks: Iterable[ChunkOfLayers], *, tp_rank: int, replica: int) -> tuple[Shape, ...]:
        """Of each parameter of chunks of layers and their ends, the rows before sharding and those of one replica."""
        shapes = [shape for chunk in chunks for shape in (*self.layer_shapes(), *self.end_shapes(chunk, tp_rank))]
        return tuple((rows, self._own_rows(rows, replica)) for rows, _ in shapes)

    def _own_rows(self, rows: int, replica: int) -> int:
        each = math.ceil(rows / self.replicas)
        return min(each, max(0, rows - replica * each))

    # The step.

    def chunks_of(
        self, stage: int, *, schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B, chunks: int | None = None
    ) -> list[ChunkOfLayers]:
        """The runs of layers of one pipeline rank, in the order of the layers."""
        pp = self.layout.pp
        rank_of = {place: rank for rank in range(pp) for place in schedule.stages_of(rank, pp, chunks=chunks)}
        last = len(rank_of) - 1
        return [
            ChunkOfLayers(
                layers=self.config.layers // len(rank_of),
                is_first=place == 0,
                is_last=place == last,
                splits=place > 0 and schedule in (PipelineSchedule.ZERO_BUBBLE, PipelineSchedule.ZERO_BUBBLE_V),
                receives=place > 0 and rank_of[place - 1] != stage,
                sends=place < last and rank_of[place + 1] != stage,
            )
            for place in schedule.stages_of(stage, pp, chunks=chunks)
        ]

    def step(
        self,
        *,
        stage: int = 0,
        tp_rank: int = 0,
        replica: int = 0,
        microbatches: int = 1,
        schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B,
        chunks: int | None = None,
    ) -> list[Collective]:
        """All collectives of one rank in a step without recompute, not in order.

        Args:
            stage: pipeline rank.
            tp_rank: rank of tensor parallelism.
            replica: rank among those with the same parameters, dp before cp.
            microbatches: of the step.
            schedule: of the pipeline.
            chunks: runs of layers of a pipeline rank; None is the schedule's own number.
        """
        own = self.chunks_of(stage, schedule=schedule, chunks=chunks)
        found = [each.times(microbatches) for chunk in own for each in self._microbatch(chunk)]
        passes = 1 if self.layout.pp > 1 else microbatches
        for chunk in own:
            found += [each.times(passes) for each in self._gathers(chunk, tp_rank)]
            again = 2 * passes if self.layout.pp == 1 else 1
            found += [each.times(again) for each in self._positions(CollectiveKind.ALL_GATHER, chunk)]
            found += [each.times(chunk.layers) for each in self.reduce(self.layer_shapes())]
            found += self.reduce(self.end_shapes(chunk, tp_rank))
            found += self._positions(CollectiveKind.REDUCE_SCATTER, chunk)
        if self._has_two_tables(own):
            found += self._tied(tp_rank, replica)
        every = Collective(kind=CollectiveKind.ALL_REDUCE, ranks=Ranks.ALL, nbytes=ID, count=3)
        return [*found, every] if self.layout.gpus > 1 else found

    def _microbatch(self, chunk: ChunkOfLayers) -> Iterator[Collective]:
        for each in (*self.layer_forward(), *self.layer_backward(splits=chunk.splits)):
            yield each.times(chunk.layers)
        if chunk.is_first:
            yield from (*self.embedding_forward(), *self.embedding_backward())
        if chunk.is_last:
            yield from (*self.head_forward(), *self.head_backward())
        message = self.send()
        answer = dataclasses.replace(message, kind=CollectiveKind.RECEIVE)
        for _ in range(chunk.receives + chunk.sends):  # forward one way, backward the other
            yield from (message, answer)

    def _gathers(self, chunk: ChunkOfLayers, tp_rank: int) -> Iterator[Collective]:
        """Gathers of a chunk's weights, for one microbatch or in a pipeline for the step."""
        # Before both passes, but for the last layer, which stays gathered between them.
        gathers = chunk.layers if self.layout.pp > 1 else 2 * chunk.layers - 1
        yield from (each.times(gathers) for each in self.gather(self.layer_shapes()))
        yield from self.gather(self.end_shapes(chunk, tp_rank))

    def _has_two_tables(self, own: list[ChunkOfLayers]) -> bool:
        """Whether one of a tied table's two copies is on this rank and the other one on another."""
        tied = self.config.tie_embeddings and self.layout.pp > 1
        return tied and any(chunk.is_first for chunk in own) != any(chunk.is_last for chunk in own)
