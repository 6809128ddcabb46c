"""One layer as a framework runs it, under its choices: bytes that it saves and holds, times of its passes.

Owns the list of a layer's products, element-wise passes and saved tensors, for kernels fused as Megatron's or run one by
one as by Hugging Face. memo's own layer is in memo/gpt/arithmetic/block_bytes.py.

    saved, per token, in elements of h (hidden), q (queries), p (queries, keys and values), f (MLP)
    beside the matrices        input h | norm h | residual h | norm h | with dropout two masks, a byte an element
    within tensor parallelism  projection p | rotated queries and keys | attention's out q | up f or 2 f | activation f
    scores in memory           s heads: probabilities, and with dropout their mask and what it leaves

With sequence parallelism all of it is divided by tp, else only what is within: 34 s b h / tp and s b h (10 + 24 / tp) of
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from benchmarks.published.framework_training import AttentionKernel, ContextExchange, Kernels, Recompute
from benchmarks.published.kernel_times import KernelTimes
from benchmarks.published.transformer import Transformer
from memo.mip.inputs import Collectives
from memo.parallel import key_copies

if TYPE_CHECKING:
    from benchmarks.published.framework_training import FrameworkTraining
    from memo.gpt.arithmetic import StepLayout
    from memo.gpt.config import GPTConfig

E = 2  # bytes of an element of products and of the residual stream
STATISTIC = 4  # bytes of attention's statistic of a row, in float32
ATTENTION_BACKWARD = 2.5  # five products of the scores' size where forward makes two (Dao et al. 2022)
# Bytes read and written for each score in memory by softmax in forward and in backward, and by dropout in either.
SCORE_FORWARD, SCORE_BACKWARD, DROPPED = 4, 6, 5
# Bytes for each element of a norm in float32, operator by operator, and of a rotation in complex numbers.
EAGER_NORM, EAGER_ROTATION = 36, 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Seconds of one pass, by cause."""

    products: float = 0.0
    attention: float = 0.0
    passes: float = 0.0
    exchange: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.products + self.attention + self.passes + self.exchange

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            products=self.products + other.products,
            attention=self.attention + other.attention,
            passes=self.passes + other.passes,
            exchange=self.exchange + other.exchange,
        )


@dataclasses.dataclass(frozen=True)
class FrameworkLayer:
    """Bytes and times of one layer for one microbatch on one rank."""

    config: GPTConfig
    layout: StepLayout
    training: FrameworkTraining
    times: KernelTimes

    # Sizes.

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch that the matrices of one rank see."""
        return self.layout.tokens * self.layout.batch / self.layout.cp

    @property
    def _outside(self) -> float:
        """Divisor of what is beside the matrices."""
        return self.layout.tp if self.training.sequence_parallel else 1

    @property
    def _queries(self) -> int:
        return self.config.heads * self.config.head_dim

    @property
    def _qkv(self) -> int:
        return (self.config.heads + 2 * self.config.kv_heads) * self.config.head_dim

    @property
    def _exchanged(self) -> float:
        """Elements of queries, keys and values that exchange heads for tokens, with the copies of ranks that share heads."""
        config, ranks = self.config, self.layout.tp * self.layout.cp
        return (config.heads + 2 * config.kv_heads * key_copies(config.heads, config.kv_heads, ranks)) * config.head_dim

    @property
    def _ups(self) -> int:
        return 2 if self.config.mlp == "swiglu" else 1

    @property
    def _mlps(self) -> tuple[tuple[float, float], ...]:
        """(inner width on a rank, rows that go through it) of each MLP of the layer.

        Tensor ranks that do not share an expert have each their own tokens; ranks that share one gather theirs. A rank's
        experts get as many rows as its own tokens choose.
        """
        config, tp = self.config, self.layout.tp
        experts = config.experts if isinstance(config, Transformer) else None
        if experts is None:
            return ((config.ffn / tp, self.tokens),)
        shared = ((experts.shared_ffn / tp, self.tokens),) if experts.shared_ffn else ()
        return ((experts.ffn / experts.tensor_ranks, self._routed_rows), *shared)

    @property
    def _routed_rows(self) -> float:
        """Rows that a rank's experts get: 0 without experts."""
        experts = self.config.experts if isinstance(self.config, Transformer) else None
        return self.tokens / self.layout.tp * experts.per_token * experts.tensor_ranks if experts else 0.0

    @property
    def _copied_rows(self) -> float:
        """Rows of a rank's own tokens, one for each expert that they choose."""
        experts = self.config.experts if isinstance(self.config, Transformer) else None
        return self.tokens / self.layout.tp * experts.per_token if experts else 0.0

    # Bytes.

    @functools.cached_property
    def input_bytes(self) -> float:
        """Bytes of the layer's input."""
        return E * self.config.hidden * self.tokens / self._outside

    @functools.cached_property
    def whole_bytes(self) -> float:
        """Bytes that autograd saves where nothing is recomputed."""
        return (self._beside + self._attention(scores=True)) * self.tokens + self._mlp

    @functools.cached_property
    def saved_bytes(self) -> float:
        """Bytes that the layer saves under its method of recompute."""
        match self.training.recompute:
            case Recompute.FULL:
                return 0.0 if self.training.input_offload else self.input_bytes
            case Recompute.EVERY_OTHER:
                return self._every_other * self.tokens
            case Recompute.SCORES:
                return (self._beside + self._attention(scores=False)) * self.tokens + self._mlp
            case _:
                return self.whole_bytes

    @property
    def _beside(self) -> float:
        masks = 2 * self.config.hidden if self.training.dropout else 0
        inputs = 4 * E * self.config.hidden
        statistics = 4 * STATISTIC if self.config.norm == "layernorm" else 2 * STATISTIC
        return (inputs + masks + statistics) / self._outside + self._converted

    @property
    def _converted(self) -> float:
        """Norms run in float32 save their input and its normalised form so."""
        if self.training.kernels is Kernels.FUSED or self.config.norm != "rmsnorm":
            return 0.0
        return 2 * 2 * 4 * self.config.hidden / self._outside

    def _attention(self, *, scores: bool) -> float:
        config, training = self.config, self.training
        rotated = E * (self._qkv - config.kv_heads * config.head_dim) if config.positions == "rotary" else 0
        heads = self.layout.cp > 1 and training.context is ContextExchange.HEADS
        exchanged = E * (self._exchanged + self._queries) if heads else 0
        normalised = isinstance(config, Transformer) and config.head_norms
        keys = E * (self._qkv - config.kv_heads * config.head_dim) if normalised else 0
        within = E * (self._qkv + self._queries) + rotated + keys + exchanged
        if training.attention is AttentionKernel.FUSED:
            return (within + STATISTIC * config.heads) / self.layout.tp
        dropped = 1 + E if training.attention_dropout else 0
        squares = (E + dropped) * config.heads * self.layout.tokens if scores else 0
        return (within + squares) / self.layout.tp

    @property
    def _mlp(self) -> float:
        """Bytes that MLPs save.

        Experts also save their input, their activation before the router's probability weighs it, and each copy of a token
        before these are summed.
        """
        if self.training.tiled_mlp:
            return 0.0
        # The activated gate is there beside its product.
        wide = self._ups + (2 if self.training.kernels is Kernels.EAGER and self._ups == 2 else 1)
        inner = sum(wide * E * width * rows for width, rows in self._mlps)
        if self._routed_rows:
            inner += E * self._mlps[0][0] * self._routed_rows
        return inner + E * self.config.hidden * (self._routed_rows + self._copied_rows)

    @property
    def _every_other(self) -> float:
        """Bytes per token that torchtitan's selective checkpointing keeps: input, attention's out, products 1, 3, 5, 7.

        In the order queries, keys, values, output, gate, up, down; with two matrices an MLP's first product.
        """
        config = self.config
        values = config.kv_heads * config.head_dim
        within = E * (2 * self._queries + values + config.ffn) + STATISTIC * config.heads
        down = config.hidden if self._ups == 2 else 0
        return within / self.layout.tp + E * (config.hidden + down) / self._outside

    @functools.cached_property
    def backward_transient_bytes(self) -> float:
        """Bytes that backward holds beside what is saved: what is recomputed, and gradients of the widest tensors."""
        config, tp = self.config, self.layout.tp
        again = max(self.whole_bytes - self.saved_bytes, 0.0)
        if self.training.recompute is Recompute.SCORES and self.training.attention is AttentionKernel.MATERIALISED:
            # Recomputed scores are there while attention's backward runs, when no gradient of the MLP is.
            return again
        stream = 2 * E * config.hidden / self._outside
        gathered = 2 * E * config.hidden if tp > 1 and self.training.sequence_parallel else 0
        if self.training.tiled_mlp:
            exchanged = 2 * E * (self._exchanged + self._queries) if self.layout.cp > 1 else 0
            inner = E * (self._qkv + 2 * self._queries) / tp + exchanged / tp
        else:
            inner = max(self._ups * E * width * rows for width, rows in self._mlps) / self.tokens
        return again + (stream + gathered + inner) * self.tokens

    @functools.cached_property
    def forward_transient_bytes(self) -> float:
        """Bytes that forward holds beside what it saves."""
        if self.training.recompute in (Recompute.NONE, Recompute.SCORES):
            return E * self.config.hidden * self.tokens / self._outside
        return max(self.whole_bytes - self.saved_bytes, 0.0)

    @property
    def storages(self) -> int:
        """Number of tensors that are saved."""
        return 12

    @property
    def largest_bytes(self) -> float:
        """Bytes of the largest saved tensor."""
        return E * max(self.config.hidden, self._ups * self.config.ffn) * self.tokens / self.layout.tp

    # Times.

    @functools.cached_property
    def forward(self) -> Seconds:
        """Time of forward."""
        products = sum(self._products(index)[0] for index in range(4))
        return Seconds(
            products=products,
            attention=self._scores_s(backward=False),
            passes=self.times.passes_s(self._passes() * self.tokens),
            exchange=self._tensor_s(products) + self._context_s(),
        )

    @functools.cached_property
    def backward(self) -> Seconds:
        """Time of backward, with what the method of recompute computes again."""
        products = sum(self._products(index)[1] for index in range(4))
        own = Seconds(
            products=products,
            attention=self._scores_s(backward=True),
            passes=self.times.passes_s(2 * self._passes() * self.tokens),
            exchange=self._waits * self._tensor_s(products) + self._context_s(),
        )
        if self.training.tiled_mlp and self.training.recompute is not Recompute.FULL:
            mlp = self._products(2)[0] + self._products(3)[0]
            own += Seconds(products=mlp)
        return own + self._again()

    @property
    def _waits(self) -> float:
        """Part of tensor parallelism's collectives that backward waits for.

        Sums, or with sequence parallelism the scatter that is half of them, have a product beside them that does not need
        their result; the gathers before the products have not.
        """
        if not self.training.overlaps_backward_sums:
            return 1.0
        return 0.5 if self.training.sequence_parallel else 0.0

    def _again(self) -> Seconds:
        match self.training.recompute:
            case Recompute.FULL:
                tiled = self._products(2)[0] + self._products(3)[0] if self.training.tiled_mlp else 0.0
                whole = self.forward
                if not self.training.stops_early:
                    return whole + Seconds(products=tiled)
                share = 3 / 4 if self.layout.tp > 1 else 1.0  # the last sum over tensor ranks is not repeated either
                return Seconds(
                    products=whole.products - self._products(3)[0] + tiled,
                    attention=whole.attention,
                    passes=whole.passes,
                    exchange=share * whole.exchange,
                )
            case Recompute.SCORES if self.training.attention is AttentionKernel.MATERIALISED:
                return Seconds(attention=self._scores_s(backward=False))
            case Recompute.EVERY_OTHER:
                config, times, tp = self.config, self.times, self.layout.tp
                keys = times.product_s(self.tokens, config.kv_heads * config.head_dim / tp, config.hidden)
                wide = times.product_s(self.tokens, config.ffn / tp, config.hidden, fp8=self.training.fp8)
                out = self._products(1)[0]
                again = keys + out + wide
                return Seconds(
                    products=again,
                    passes=times.passes_s(self._passes() * self.tokens),
                    exchange=0.5 * self._tensor_s(again),
                )
            case _:
                return Seconds()

    def _products(self, index: int) -> tuple[float, float]:
        """Seconds of a linear layer in forward and backward: projection, attention's output, the MLP's first, second."""
        config, tp, fp8 = self.config, self.layout.tp, self.training.fp8
        three, tokens = functools.partial(self.times.three_products_s, fp8=fp8), self.tokens
        if index == 0:
            return three(tokens, self._qkv / tp, config.hidden)
        if index == 1:
            return three(tokens, config.hidden, self._queries / tp)
        sizes = [
            (self._ups * width, config.hidden) if index == 2 else (config.hidden, width) for width, _ in self._mlps
        ]
        parts = [three(rows, *size) for size, (_, rows) in zip(sizes, self._mlps, strict=True)]
        return sum(part[0] for part in parts), sum(part[1] for part in parts)

    def _scores_s(self, *, backward: bool) -> float:
        """Seconds of attention between its projections."""
        config, training, layout = self.config, self.training, self.layout
        causal_flops = 2.0 * self._queries * layout.tokens * self.tokens / layout.tp
        if training.attention is AttentionKernel.FUSED:
            return self.times.attention_s((ATTENTION_BACKWARD if backward else 1.0) * causal_flops)
        squares = config.heads * self.tokens / layout.tokens / layout.tp  # one for each head and sequence
        side, width = layout.tokens, config.head_dim
        scores_s, values_s = self.times.product_s(side, side, width), self.times.product_s(side, width, side)
        products_s = scores_s + (3 if backward else 1) * values_s
        dropped = DROPPED if training.attention_dropout else 0
        nbytes = ((SCORE_BACKWARD if backward else SCORE_FORWARD) + dropped) * side**2
        return squares * (products_s + self.times.passes_s(nbytes))

    def _passes(self) -> float:
        """Bytes per token that element-wise operations of a forward read and write."""
        config, eager = self.config, self.training.kernels is Kernels.EAGER
        norm = (EAGER_NORM if eager and config.norm == "rmsnorm" else 2 * E) * config.hidden
        residual = 3 * E * config.hidden + (config.hidden if self.training.dropout else 0)
        rotated = self._qkv - config.kv_heads * config.head_dim if config.positions == "rotary" else 0
        rotation = (EAGER_ROTATION if eager else 2 * E) * rotated
        each = (3 if self._ups == 2 else 2) + (2 if eager and self._ups == 2 else 0)
        inner = sum(each * E * width * rows for width, rows in self._mlps) / self.tokens
        return 2 * (norm + residual) / self._outside + rotation / self.layout.tp + inner

    def _tensor_s(self, beside_s: float) -> float:
        """Seconds for which one pass waits for tensor parallelism's collectives.

        Args:
            beside_s: the products that pieces of them overlap with, where they do.
        """
        layout = self.layout
        if layout.tp == 1:
            return 0.0
        group = layout.tensor_group(self.times.machine.gpus_per_node)
        collectives, nbytes = Collectives(self.times.machine), E * self.config.hidden * self.tokens
        # Two gathers and two reduce-scatters, or two all-reduces.
        seconds = 4 * collectives.all_gather_s(nbytes, group)
        if self.training.overlaps_tensor:
            # The first piece of each is waited for, and what takes longer than the products.
            return max(seconds / layout.tp, seconds - beside_s)
        return seconds

    def _context_s(self) -> float:
        """Seconds of context parallelism's exchanges in one pass."""
        layout, config = self.layout, self.config
        if layout.cp == 1:
            return 0.0
        group = layout.context_group(self.times.machine.gpus_per_node)
        collectives = Collectives(self.times.machine)
        if self.training.context is ContextExchange.HEADS:
            there = E * self._exchanged * self.tokens / layout.tp
            back = E * self._queries * self.tokens / layout.tp
            return collectives.all_to_all_s(there, group) + collectives.all_to_all_s(back, group)
        keys = 2 * config.kv_heads * config.head_dim
        return collectives.all_gather_s(E * keys * self.tokens * layout.cp / layout.tp, group)
