"""Collectives of one step of `memo train` on one rank, pass by pass, from the model and the layout alone.

Owns which collectives memo's own engine issues, over which ranks, with how many bytes, and how often. The predicted
seconds of memo.gpt.arithmetic.profile_by_arithmetic are sums over these lists, and `memo dry-run` compares them with
what a rank issues. Needs no torch. t is the tokens of a microbatch after context parallelism, h the hidden size:

    layer       tp   forward    gather (t, h), sum to shards (t, h), for attention and again for the MLP; in halves of t
                                where these overlap
                     backward   the transposed ones; both gathers again for the weights' gradients; and one sum of h numbers
                                for each parameter that every rank has: norms, biases of the second projections
                cp   Ulysses    heads for tokens: q, k, v, attention's result; backward the same. Of k and v a copy for
                                each rank that shares a head
                     ring       keys and values go around, in backward their gradients, too
    embedding   tp   gather of token ids, sum to shards (t, h); backward gathers (t, h)
    head        tp   number of counted tokens; for each chunk of tokens: gather (chunk, h) and its targets, maximum, sums,
                     sum to shards of the gradient; backward sums the norm's gradients
    weights  dp x cp gather of each layer before each of its passes (the last one stays), of the ends before forward;
                     reduction once a step. In a pipeline all are gathered once a step. An embedding whose gradient is
                exchanged as rows: counts, numbers and rows once a step, of at most a rank's tokens
    experts     all  choices of each expert, over all ranks with different tokens; where tp divides these, each rank's loss
                ep   rows for each expert; their vectors there, and the results back; backward the same
                     experts are sharded over the ranks with the same ones; where tp divides tokens, what each rank has
                     whole (routers, experts, projections of a bottleneck) over all with different tokens, each by itself
    stages      pp   a microbatch's hidden states to the next stage, their gradient to the one before
    step        all  whether to stop, the mean loss, the gradients' norm
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from memo.gpt.arithmetic.block_bytes import ElementSizes
from memo.gpt.arithmetic.collectives import Collective, CollectiveKind, Ranks, exchange_s
from memo.gpt.arithmetic.embedding_traffic import EmbeddingTraffic
from memo.gpt.config import expert_shard_dimension
from memo.gpt.train_config import Precision
from memo.loss import chunk_tokens
from memo.mip.inputs import PipelineSchedule
from memo.parallel import key_copies

if TYPE_CHECKING:
    from memo.gpt.arithmetic.layout import StepLayout
    from memo.gpt.config import GPTConfig, MoeConfig
    from memo.mip.inputs import Hardware

ID = 8  # bytes of a token's number, and of the step's three sums
WIDE = 4  # bytes of a float32, in which the loss computes

Shape = tuple[int, int]
"""Rows and columns of a rank's part of a parameter, before it is sharded over replicas."""


def padded_elements(shapes: Iterable[Shape], shards: int) -> int:
    """Elements that shards of some parameters have together: FSDP pads rows to a multiple of the shards."""
    return sum(math.ceil(rows / shards) * shards * columns for rows, columns in shapes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightUnit:
    """Parameters that are gathered and reduced together."""

    shapes: tuple[Shape, ...]
    """The rows are what is divided."""
    ranks: Ranks = Ranks.REPLICAS
    shards: int
    """Number of these ranks."""

    @property
    def elements(self) -> int:
        """Elements before sharding."""
        return sum(rows * columns for rows, columns in self.shapes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOfLayers:
    """Consecutive layers that a rank runs for each microbatch, and their place in the pipeline."""

    layers: int
    experts: int = 0
    """How many of them have experts."""
    is_first: bool = True
    """It has the embedding."""
    is_last: bool = True
    """It has the head."""
    receives: bool = False
    """Another rank has the layers before; sends likewise those after."""
    sends: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepCollectives:
    """Collectives of one rank, by pass. Those over one rank are left out."""

    config: GPTConfig
    layout: StepLayout
    precision: Precision = Precision.BF16
    sparse_embedding: bool = False
    """The embedding's table is whole on every rank, and its gradient is exchanged as rows."""
    frozen_projection: bool = False
    """Adapters alone are trained, so that the loss has smaller chunks."""

    @property
    def rings(self) -> bool:
        """Whether context-parallel ranks attend in a ring."""
        return self.layout.rings(self.config.heads)

    @property
    def replicas(self) -> int:
        """Ranks that parameters are sharded over."""
        return self.layout.replicas * self.layout.cp

    @property
    def stream_nbytes(self) -> int:
        """Bytes of an element between the layers."""
        return self._sizes.stream

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

    def layer_forward(self, *, experts: bool = False) -> tuple[Collective, ...]:
        """Collectives of a microbatch's forward through one layer; `experts`: one that has them."""
        routed = self.expert_forward() if experts else ()
        return (*self.tensor_forward(experts=experts), *self.context_forward(), *routed)

    def layer_backward(self, *, experts: bool = False) -> tuple[Collective, ...]:
        """Collectives of its backward, without any recompute."""
        routed = self.expert_backward() if experts else ()
        return (*self.tensor_backward(experts=experts), *self.context_backward(), *routed)

    def _divides_mlp(self, *, experts: bool) -> bool:
        """Whether tensor-parallel ranks divide a layer's MLP, as they do its attention: of a mixture its shared experts."""
        moe = self.config.moe
        return not experts or moe is None or bool(moe.shared_experts)

    def tensor_forward(self, *, experts: bool = False) -> tuple[Collective, ...]:
        """Tensor parallelism's part of `layer_forward`."""
        mlp = self._divides_mlp(experts=experts)
        return self._tensor(attention=(1, 1), mlp=(mlp, mlp))

    def tensor_again(self, *, experts: bool = False) -> tuple[Collective, ...]:
        """What a replay of a whole layer repeats of it: all but the sum after the last projection."""
        return self._tensor(attention=(1, 1), mlp=(self._divides_mlp(experts=experts), 0))

    def tensor_backward(self, *, experts: bool = False) -> tuple[Collective, ...]:
        """Tensor parallelism's part of `layer_backward`."""
        mlp = self._divides_mlp(experts=experts)
        shared = 2 * self._norms + (1 + mlp if self.config.bias else 0)
        return (*self._tensor(attention=(2, 1), mlp=(2 * mlp, mlp)), *self._sums_of_shared(shared))

    @property
    def _moe(self) -> MoeConfig:
        moe = self.config.moe
        assert moe is not None
        return moe

    def expert_forward(self) -> tuple[Collective, ...]:
        """Collectives of a microbatch's forward through one mixture of experts, its shared ones' excepted."""
        found = []
        if self._token_ranks > 1:
            found += [self._one(CollectiveKind.ALL_REDUCE, Ranks.TOKENS, self._moe.experts * ID)]
        if self.layout.tp > 1:
            found += [self._one(CollectiveKind.ALL_REDUCE, Ranks.TENSOR, WIDE)]
        if self.layout.ep > 1:
            found += [self._one(CollectiveKind.ALL_TO_ALL, Ranks.EXPERTS, self._moe.experts * ID)]
        return (*found, *self._exchanged_rows())

    def expert_backward(self) -> tuple[Collective, ...]:
        """Collectives of its backward."""
        return self._exchanged_rows()

    def _exchanged_rows(self) -> tuple[Collective, ...]:
        """Routed rows to the ranks of their experts and back, of ranks that are chosen equally often."""
        if self.layout.ep == 1:
            return ()
        moe = self._moe
        rows = self._tokens // self.layout.tp * moe.top_k
        nbytes = rows * (moe.bottleneck or self.config.hidden) * self._sizes.product
        return (self._one(CollectiveKind.ALL_TO_ALL, Ranks.EXPERTS, nbytes).times(2),)

    @staticmethod
    def _one(kind: CollectiveKind, ranks: Ranks, nbytes: int) -> Collective:
        return Collective(kind=kind, ranks=ranks, nbytes=nbytes)

    @property
    def _token_ranks(self) -> int:
        """Ranks with different tokens."""
        return self.replicas * self.layout.tp

    def _tensor(self, *, attention: tuple[int, int], mlp: tuple[int, int]) -> tuple[Collective, ...]:
        """Gathers and sums of tokens for attention and for the MLP; in halves, each of both."""
        found: collections.Counter[tuple[CollectiveKind, int]] = collections.Counter()
        halves, width = self.layout.halves, self.config.hidden * self._sizes.product
        for tokens, counts in ((self.layout.attention_halves, attention), (halves, mlp)):
            for half in tokens:
                found[CollectiveKind.ALL_GATHER, half * width] += counts[0]
                found[CollectiveKind.REDUCE_SCATTER, half * width] += counts[1]
        return self._over_tensor(*((*key, count) for key, count in found.items() if count))

    def half_s(self, kind: CollectiveKind, machine: Hardware) -> float:
        """Seconds of one half's gather or sum of tokens."""
        nbytes = self._tokens * self.config.hidden * self._sizes.product / 2
        return exchange_s(self._over_tensor((kind, nbytes, 1)), machine, self.layout)

    def _sums_of_shared(self, parameters: int) -> tuple[Collective, ...]:
        """Sums of the gradients of parameters of h numbers that each tensor-parallel rank has."""
        return self._over_tensor((CollectiveKind.ALL_REDUCE, self.config.hidden * self._sizes.stream, parameters))

    def _over_tensor(self, *given: tuple[CollectiveKind, float, int]) -> tuple[Collective, ...]:
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
        return self._rotations(self._sizes.product, self.layout.cp - 1)

    def context_backward(self) -> tuple[Collective, ...]:
        """Context parallelism's part of `layer_backward`."""
        if self.layout.cp == 1:
            return ()
        if not self.rings:
            return self._heads_for_tokens()
        around = self._rotations(self._sizes.product, self.layout.cp - 1)
        return (*around, *self._rotations(WIDE, self.layout.cp))  # gradients are added up in float32

    def layer_again(self) -> tuple[Collective, ...]:
        """What a replay of all tokens of a layer repeats, attention's own result excepted."""
        return (*self.tensor_again(), *(() if self.rings else self.context_forward()))

    def _heads_for_tokens(self) -> tuple[Collective, ...]:
        config, tp = self.config, self.layout.tp
        copied = config.kv_heads * key_copies(config.heads, config.kv_heads, tp * self.layout.cp)
        head = config.head_dim * self._sizes.product
        return tuple(
            Collective(kind=CollectiveKind.ALL_TO_ALL, ranks=Ranks.CONTEXT, nbytes=heads * half * head // tp, count=2)
            for half in self.layout.attention_halves
            for heads in (config.heads, copied)  # q and the result; k and v
        )

    def _rotations(self, element: int, count: int) -> tuple[Collective, ...]:
        """Keys and values, of as many heads as queries have, or their gradients, from rank to rank."""
        width = self.config.hidden * element
        return tuple(
            Collective(
                kind=CollectiveKind.ROTATE, ranks=Ranks.CONTEXT, nbytes=2 * half * width // self.layout.tp, count=count
            )
            for half in self.layout.attention_halves
        )

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
        chunk = max(1, chunk_tokens(widest, trained=not self.frozen_projection) // tp)
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

    def layer_units(self, *, experts: bool = False) -> list[WeightUnit]:
        """A rank's parts of the parameters of one layer; the first unit is the layer's own."""
        own, apart = self._layer_shapes(experts=experts), []
        if experts:
            parts = self._expert_units()
            apart = [unit for unit in parts if unit.ranks is not Ranks.REPLICAS]
            own += [shape for unit in parts if unit.ranks is Ranks.REPLICAS for shape in unit.shapes]
        return [WeightUnit(shapes=tuple(own), shards=self.replicas), *apart]

    def _layer_shapes(self, *, experts: bool) -> list[Shape]:
        """Shapes of norms, attention and an MLP, which may be shared experts."""
        config, tp = self.config, self.layout.tp
        h, qkv = config.hidden, config.qkv_width // tp
        ffn = (self._moe.shared_hidden if experts else config.ffn) // tp
        up = [(ffn, h)] * (2 if config.mlp == "swiglu" else 1)
        shapes = [(h, 1)] * (2 * self._norms) + [(qkv, h), (h, h // tp)]
        shapes += [*up, (h, ffn)] if ffn else []
        if config.bias:
            shapes += [(qkv, 1), (h, 1), *([*((ffn, 1) for _ in up), (h, 1)] if ffn else [])]
        return shapes

    def _expert_units(self) -> list[WeightUnit]:
        """Router, experts and projections of a bottleneck, which are whole on each rank that has them."""
        config, moe, layout = self.config, self._moe, self.layout
        ranks, shards = Ranks.REPLICAS, self.replicas
        if layout.tp > 1:
            ranks, shards = Ranks.TOKENS, self._token_ranks
        h, narrow, own = config.hidden, moe.bottleneck or config.hidden, moe.experts // layout.ep
        whole = [((moe.experts, h),)] + ([((narrow, h),), ((h, narrow),)] if moe.bottleneck else [])
        units = [WeightUnit(shapes=shapes, ranks=ranks, shards=shards) for shapes in whole]
        if layout.ep > 1:
            ranks, shards = Ranks.EXPERT_COPIES, self._token_ranks // layout.ep
        ups = [(narrow, moe.expert_hidden)] * (2 if config.mlp == "swiglu" else 1)
        matrices = []
        for inputs, outputs in (*ups, (moe.expert_hidden, narrow)):
            by_inputs = expert_shard_dimension(own, inputs, shards=shards)
            matrices.append((inputs, own * outputs) if by_inputs else (own, inputs * outputs))
        return [*units, WeightUnit(shapes=tuple(matrices), ranks=ranks, shards=shards)]

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

    def end_unit(self, chunk: ChunkOfLayers, tp_rank: int = 0) -> WeightUnit:
        """Parameters of the ends that are gathered together."""
        return WeightUnit(shapes=tuple(self.end_shapes(chunk, tp_rank)), shards=self.replicas)

    def gather(self, unit: WeightUnit) -> tuple[Collective, ...]:
        """Gather of some parameters together."""
        return self._sharded(CollectiveKind.ALL_GATHER, unit)

    def reduce(self, unit: WeightUnit) -> tuple[Collective, ...]:
        """Reduction of their gradients, which are in the weights' format."""
        return self._sharded(CollectiveKind.REDUCE_SCATTER, unit)

    def _sharded(self, kind: CollectiveKind, unit: WeightUnit) -> tuple[Collective, ...]:
        elements = padded_elements(unit.shapes, unit.shards)
        if unit.shards == 1 or not elements:
            return ()
        return (Collective(kind=kind, ranks=unit.ranks, nbytes=elements * self._sizes.stream),)

    def _positions(self, chunk: ChunkOfLayers) -> list[WeightUnit]:
        """A learned position table under tensor parallelism, whose ranks read different rows of it."""
        if not (chunk.is_first and self.config.positions == "learned" and self.layout.tp > 1):
            return []
        shape = (self._position_rows, self.config.hidden)
        return [WeightUnit(shapes=(shape,), ranks=Ranks.TOKENS, shards=self._token_ranks)]

    def _tied(self, tp_rank: int, replica: int) -> tuple[Collective, ...]:
        """The sum of a tied table's two gradients, each rank's shard of them."""
        nbytes = _own_rows(self.table_rows(tp_rank), replica, self.replicas) * self.config.hidden * self._sizes.stream
        return (Collective(kind=CollectiveKind.ALL_REDUCE, ranks=Ranks.ENDS, nbytes=nbytes),)

    def embedding_rows(self, *, microbatches: int, tp_rank: int = 0) -> tuple[Collective, ...]:
        """Exchange of the embedding's gradient as rows, once a step, where a rank's tokens are all distinct."""
        traffic = EmbeddingTraffic(
            rows=self.table_rows(tp_rank),
            width=self.config.hidden,
            tokens=self._tokens * microbatches,
            ranks=self.replicas,
            element=self._sizes.stream,
        )
        return traffic.row_collectives

    def shard_rows(self, chunks: Iterable[ChunkOfLayers], *, tp_rank: int, replica: int) -> tuple[Shape, ...]:
        """Rows of each parameter of chunks of layers and their ends, the rows before sharding and those of one replica."""
        found: list[Shape] = []
        for chunk in chunks:
            units = [unit for _, experts in _kinds(chunk) for unit in self.layer_units(experts=experts)]
            for unit in (*units, self.end_unit(chunk, tp_rank)):
                index = self._index(unit.ranks, tp_rank, replica)
                found += [(rows, _own_rows(rows, index, unit.shards)) for rows, _ in unit.shapes]
            if chunk.is_first and self.sparse_embedding:
                found.append((self.table_rows(tp_rank),) * 2)
        return tuple(found)

    def _index(self, ranks: Ranks, tp_rank: int, replica: int) -> int:
        """Number of a rank among those that share a unit."""
        if ranks is Ranks.REPLICAS:
            return replica
        dp, cp = divmod(replica, self.layout.cp)
        dp = dp // self.layout.ep if ranks is Ranks.EXPERT_COPIES else dp
        return (dp * self.layout.cp + cp) * self.layout.tp + tp_rank

    # The step.

    def chunks_of(
        self,
        stage: int,
        *,
        schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B,
        chunks: int | None = None,
        layers: Sequence[int] = (),
    ) -> list[ChunkOfLayers]:
        """The runs of layers of one pipeline rank, in the order of the layers; arguments as of `step`."""
        pp = self.layout.pp
        rank_of = {place: rank for rank in range(pp) for place in schedule.stages_of(rank, pp, chunks=chunks)}
        last = len(rank_of) - 1
        counts = layers or [self.config.layers // len(rank_of)] * len(rank_of)
        return [
            ChunkOfLayers(
                layers=counts[place],
                experts=self._with_experts(sum(counts[:place]), counts[place]),
                is_first=place == 0,
                is_last=place == last,
                receives=place > 0 and rank_of[place - 1] != stage,
                sends=place < last and rank_of[place + 1] != stage,
            )
            for place in schedule.stages_of(stage, pp, chunks=chunks)
        ]

    def _with_experts(self, first: int, count: int) -> int:
        return sum(self.config.has_experts(layer) for layer in range(first, first + count))

    def step(
        self,
        *,
        stage: int = 0,
        tp_rank: int = 0,
        replica: int = 0,
        microbatches: int = 1,
        schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B,
        chunks: int | None = None,
        layers: Sequence[int] = (),
    ) -> list[Collective]:
        """All collectives of one rank in a step without recompute, not in order.

        Args:
            stage: pipeline rank.
            tp_rank: rank of tensor parallelism.
            replica: rank among those with the same parameters, dp before cp.
            microbatches: of the step.
            schedule: of the pipeline.
            chunks: runs of layers of a pipeline rank; None is the schedule's own number.
            layers: numbers of layers of all runs, in the order of the layers; without them equal ones.
        """
        own = self.chunks_of(stage, schedule=schedule, chunks=chunks, layers=layers)
        found = [each.times(microbatches) for chunk in own for each in self._microbatch(chunk)]
        passes = 1 if self.layout.pp > 1 else microbatches
        for chunk in own:
            found += [each.times(passes) for each in self._gathers(chunk, tp_rank)]
            for count, experts in _kinds(chunk):
                units = self.layer_units(experts=experts)
                found += [each.times(count) for unit in units for each in self.reduce(unit)]
            for unit in (self.end_unit(chunk, tp_rank), *self._positions(chunk)):
                found += self.reduce(unit)
            if chunk.is_first and self.sparse_embedding:
                found += self.embedding_rows(microbatches=microbatches, tp_rank=tp_rank)
        if self._has_two_tables(own):
            found += self._tied(tp_rank, replica)
        if self.layout.gpus > 1:
            found.append(Collective(kind=CollectiveKind.ALL_REDUCE, ranks=Ranks.ALL, nbytes=ID, count=3))
        if self.layout.ep > 1:  # the rows of each rank's experts, and the layer with most
            found.append(self._one(CollectiveKind.ALL_REDUCE, Ranks.ALL, 2 * self.layout.gpus * ID))
        return found

    def _microbatch(self, chunk: ChunkOfLayers) -> Iterator[Collective]:
        for count, experts in _kinds(chunk):
            both = *self.layer_forward(experts=experts), *self.layer_backward(experts=experts)
            yield from (each.times(count) for each in both)
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
        # Before both passes, but for the last layer's own, which stays gathered between them.
        passes = 1 if self.layout.pp > 1 else 2
        last = self.config.has_experts(self.config.layers - 1)
        for count, experts in _kinds(chunk):
            own, *apart = self.layer_units(experts=experts)
            stays = passes == 2 and experts == last
            yield from (each.times(passes * count - stays) for each in self.gather(own))
            yield from (each.times(passes * count) for unit in apart for each in self.gather(unit))
        yield from self.gather(self.end_unit(chunk, tp_rank))
        yield from (each.times(passes) for unit in self._positions(chunk) for each in self.gather(unit))

    def _has_two_tables(self, own: list[ChunkOfLayers]) -> bool:
        """Whether one of a tied table's two copies is on this rank and the other one on another."""
        tied = self.config.tie_embeddings and self.layout.pp > 1
        return tied and any(chunk.is_first for chunk in own) != any(chunk.is_last for chunk in own)


def _kinds(chunk: ChunkOfLayers) -> list[tuple[int, bool]]:
    """Numbers of a chunk's layers without experts and with, of those that there are."""
    return [
        (count, experts) for count, experts in ((chunk.layers - chunk.experts, False), (chunk.experts, True)) if count
    ]


def _own_rows(rows: int, index: int, shards: int) -> int:
    """Rows of one of a parameter's shards."""
    each = math.ceil(rows / shards)
    return min(each, max(0, rows - index * each))
