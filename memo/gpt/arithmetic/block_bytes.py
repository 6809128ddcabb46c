"""Arithmetic model of one GPT layer: saved bytes, transient bytes and FLOPs per token.

Owns the figures of one token on one rank, in bytes and FLOPs. Does not own their use: profile_by_arithmetic.py makes a
profile of them for a layout and a machine. Needs no torch. Tests compare the bytes with those that autograd saves and a
recorded step holds.

    letters, in bytes per token: h, f, q  widths of the residual stream, the MLP and the query/key/value projection, in the
                                 dtype of matrix products;  H  the residual stream in its own dtype
                                 (float32 under autocast, where every norm's result is cast before it is used)
    saved, gelu     input H | norm h | q k v | attention's out h | residual H | norm h | up f | gelu f    16h with f = 4h
    saved, swiglu   the same with gate f | up f | silu f | product f; under autocast norm h is cast for each of the two
    saved, tiled    the same without any f
    and statistics: one float32 per attention head, one (rmsnorm) or two (layernorm, in H's dtype) per norm
    under Ulysses: attention's out once more, in the form that the next projection reads; keys and values with the copies
    of ranks that share them (memo.parallel.Ulysses)
    in a ring: keys and values of as many heads as queries have (memo.parallel.Ring)
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from memo.gpt.arithmetic.flops import causal_keys, layer_parameter_count
from memo.gpt.config import GPTConfig
from memo.gpt.train_config import Precision
from memo.mip.inputs import CODE_BYTES
from memo.parallel import key_copies

FLOAT = STATISTIC = 4  # bytes of a float32
ALIGNED = 128  # tiles are multiples of it: memo.gpt.model.tiled_mlp.ALIGNED
# Bytes that tiled_mlp holds for a tile of rows in backward, in units of a tile of one wide activation, with those of the
# tile before it. A tile of columns needs one less.
PIECES_GELU, PIECES_SWIGLU = 6, 10
# Scores of a block of queries that memo.gpt.model.local_attention holds at once in float32, where no kernel has a window.
SCORES, QUERIES = 4, 128
TILE = 128  # queries, or keys, of a tile of scores in a flash kernel
# Bytes that rotating an element reads and writes, forward and backward, by bytes of an element (memo.gpt.model.rotary).
ROTATION = {2: (26.5, 45.0), 4: (28.5, 37.0)}
# What rotating an element holds at most, with its result, in units of its bytes (memo.gpt.model.rotary).
ROTATING = {2: 2.5, 4: 2.0}
# What torch's ring holds at most beside q, k, v, and reads and writes for each rank whose keys come by, in units of h,
# forward and backward: keys, values and their float32 gradients, sent and received, and results in float32, merged.
# Recorded from 2, 3, 4 and 8 ranks by tests/gpt/arithmetic/test_ring_bytes.py; traffic counted from the code.
RING_HALF, RING_FLOAT = (13.1, 30.1), (12.1, 20.1)
RING_TRAFFIC = (27.0, 37.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElementSizes:
    """Bytes per element."""

    product: int
    """Bytes of an input or output of matrix products and attention."""
    stream: int
    """Bytes in the residual stream."""

    @classmethod
    def of(cls, precision: Precision) -> ElementSizes:
        """Element sizes of a precision; torch's autocast casts inputs of matrix products and adds in float32."""
        product = 4 if precision is Precision.FP32 else 2
        return cls(product=product, stream=2 if precision is Precision.BF16 else 4)

    @property
    def casts(self) -> bool:
        """True if norm results and weights are copied to the dtype of the matrix product that reads them."""
        return self.stream != self.product


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """Values of a token that a codec may code: floats, but for statistics (memo.swap.engine.coded_copy)."""

    values: float
    """Number of all values that are saved."""
    spared: float
    """Bytes by which codes make those of a layer that saves everything fewer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """Figures of one layer per token, in bytes and FLOPs, before the division by tensor parallelism."""

    always: float
    """Bytes saved at every level: the input, and attention's output and statistics."""
    all: float
    """Bytes of all other saved tensors."""
    matmuls: float
    """Bytes of the matrix products' results that recompute at level `matmuls` reads: all but the last projection's. Under
    tensor parallelism, attention's projection counts as a rank's share of the sum."""
    beside: float
    """Part of `matmuls` that autograd does not save, and that is held in addition."""
    at_attention: float = 0.0
    """Bytes that level `attention` saves of `all`, and `matmuls` has in it, too: of experts what ranks have exchanged."""
    between: float
    """Bytes of the gradients that the input half of a split backward keeps for the weights' half."""
    elementwise: float
    """Bytes read and written by norms, rotation, residuals and the MLP's activation, forward."""
    elementwise_backward: float
    """Bytes that they read and write in backward, with the sums that are gradients of biases."""
    elementwise_again: float
    """Part of `elementwise` that level `matmuls` repeats."""
    rotation: tuple[float, float]
    """Part of both that rotation and copies of heads have, forward and backward."""
    activation: tuple[float, float]
    """Part of both that the MLP's activation has."""
    kernels: tuple[int, int]
    """Kernels that forward and backward launch, as eager PyTorch runs them."""
    projections: float
    """FLOPs of the matrix products with weights, forward."""
    projections_again: float
    """Part of `projections` that level `attention` repeats."""
    retiled: float
    """FLOPs that a tiled MLP repeats in backward at every level; 0 without tiles."""
    mlp: float
    """FLOPs of the MLP's matrix products, forward."""
    attention: float
    """FLOPs of the causal scores, forward; of local attention those within the window."""
    attention_computed: float
    """FLOPs that the kernel does for them; of local attention also the rest of the tiles at the window's edges."""
    attention_traffic: float = 0.0
    """Bytes that local attention reads and writes, forward; of full attention few for its FLOPs, and not counted."""
    exchanges_again: float
    """Fraction of Ulysses' four exchanges that level `attention` repeats; 0 without Ulysses."""
    exchanges_again_at_matmuls: float
    """Fraction that level `matmuls` repeats; less where queries, keys and values are exchanged as projected, and saved."""
    forward_transient: float
    """Largest number of bytes that forward holds at once beyond everything it saves."""
    backward_transient: float
    """Largest number of bytes that backward holds at once beyond everything that is saved."""
    held: float
    """Largest number of bytes that a recompute holds at once beside the layer's saved tensors."""
    in_parts: RecomputeInParts | None
    """The recompute at level `attention`; None where it has one part."""
    ring_traffic: tuple[float, float]
    """Bytes that a ring's hop reads and writes beside attention's kernel, forward and backward; 0 without a ring."""
    storages: int
    """Number of saved storages at the level with the most."""
    largest: float
    """Bytes of the largest saved storage."""
    coded: Coded
    """Values of it that a codec may code."""


class RecomputeInParts(NamedTuple):
    """A recompute of which one part makes attention's tensors again, one the MLP's (memo.swap.recompute.parts)."""

    given: tuple[float, float]
    """Bytes that each part gives."""
    held: float
    """Largest number of bytes that it holds beside the layer's saved tensors."""
    absent: float
    """Bytes of these that are not there at backward's peak."""


def _spared(nbytes: float, itemsize: int) -> float:
    """Bytes by which values of this size are fewer as codes."""
    return nbytes * (1 - CODE_BYTES / itemsize)


class BlockFigures:
    """Computation of a layer's figures; attributes are the letters of the module's docstring.

    Args:
        config: the model.
        tokens: length of the whole sequence, which attention sees.
        sizes: bytes per element.
        batch: sequences in a microbatch.
        tp: ranks of tensor parallelism.
        cp: ranks of context parallelism.
        rings: whether these attend in a ring.
        window: tokens that each one attends to, fewer than `tokens`; None is all of them.
    """

    def __init__(
        self,
        config: GPTConfig,
        tokens: int,
        sizes: ElementSizes,
        *,
        batch: int = 1,
        tp: int = 1,
        cp: int = 1,
        rings: bool = False,
        window: int | None = None,
    ) -> None:
        self.config, self.sizes, self.tokens, self.batch, self.tp, self.cp = config, sizes, tokens, batch, tp, cp
        self.h, self.f = config.hidden * sizes.product, config.ffn * sizes.product
        self.q, self.stream = config.qkv_width * sizes.product, config.hidden * sizes.stream
        self.cast = self.stream if sizes.casts else 0  # a norm's result, of which a cast copy is saved
        self.rings, self.exchanged, self.window = rings, cp > 1 and not rings, window
        copies = config.group if rings else key_copies(config.heads, config.kv_heads, tp * cp)
        # Keys and values as attention reads them, where they are copied; all that it reads.
        self.repeated = copies * (self.q - self.h) if copies > 1 else 0
        self.attended = self.h + self.repeated if self.repeated else self.q
        self.gated, self.tiled = config.mlp == "swiglu", config.mlp_tiles > 1

    def block(self) -> BlockBytes:
        """Bytes and work of the block."""
        config, h = self.config, self.h
        width, ups = config.hidden * config.ffn, 2 if self.gated else 1
        weights = layer_parameter_count(dataclasses.replace(config, bias=False)) - 2 * config.hidden
        mlp = 2.0 * (ups + 1) * width
        again = self._elementwise_again()
        saved = self.always() + self.rest()
        return BlockBytes(
            always=self.always(),
            all=self.rest(),
            matmuls=self.q + h + (0 if self.tiled else ups * self.f),
            beside=h + (self.q if self._queries_are_made_anew() else 0),
            between=self._between(),
            elementwise=again + (self._activation() if self.tiled else 0) + 2 * self.stream + h,
            elementwise_backward=self._elementwise_backward(),
            elementwise_again=again,
            rotation=(self._heads_apart(), self._rotated_backward()),
            activation=(self._activation(), self._activation_backward()),
            kernels=self._kernels(),
            projections=2.0 * weights,
            # A recompute stops at the last saved tensor: before the last projection, or before a tiled MLP.
            projections_again=2.0 * weights - (mlp if self.tiled else 2.0 * width),
            # Twice everything up to the activation, and the gradient of its output once more than without tiles.
            retiled=2.0 * (2 * ups + 1) * width if self.tiled else 0.0,
            mlp=mlp,
            attention=4.0 * config.hidden * causal_keys(self.tokens, self.window),
            attention_computed=4.0 * config.hidden * self._computed_keys(),
            attention_traffic=0.0 if self.window is None else self.attended + self.h,
            exchanges_again=1.0 if self.exchanged else 0.0,
            exchanges_again_at_matmuls=self._exchanges_at_matmuls(),
            forward_transient=max(self._behind_mlp(), self._behind_attention() - saved, 0),
            backward_transient=max(self._backward_of_mlp(), self._backward_of_attention() - saved, 0),
            held=self._held(),
            in_parts=self._in_parts(),
            ring_traffic=(RING_TRAFFIC[0] * h, RING_TRAFFIC[1] * h) if self.rings else (0.0, 0.0),
            storages=self.storages(),
            largest=self.largest(),
            coded=self.coded(),
        )

    def _computed_keys(self) -> float:
        """Keys for each query in the tiles that a kernel computes: of a window one more tile, half at each edge."""
        full = causal_keys(self.tokens)
        return full if self.window is None else min(full, causal_keys(self.tokens, self.window) + TILE)

    # Saved.

    def coded(self) -> Coded:
        """Values that a codec may code."""
        stream, product = self.sizes.stream, self.sizes.product
        wide, narrow = self._coded_in_rest()
        return Coded(
            values=(self.stream + wide) / stream + (self.h + narrow) / product,
            spared=_spared(self.stream + wide, stream) + _spared(self.h + narrow, product),
        )

    def _coded_in_rest(self) -> tuple[float, float]:
        """Bytes of `rest` that can be coded: in the residual stream's dtype, and in that of products."""
        return self.stream, self.rest() - self.stream - self._norms()

    def always(self) -> float:
        """Bytes saved at every level."""
        return self.stream + self.h + STATISTIC * self.config.heads

    def rest(self) -> float:
        """Bytes of all other saved tensors."""
        exchanged = self.h if self.exchanged else 0
        # Autocast casts for each product separately; where ranks or tiles share the matrices, one cast is made before.
        twice = self.h if self._casts_twice() else 0
        attention = self.h + self.attended + self._gathered() + exchanged
        return attention + self.stream + self.h + twice + self._inner() + self._norms()

    def _inner(self) -> float:
        return 0 if self.tiled else (4 if self.gated else 2) * self.f

    def _casts_twice(self) -> bool:
        return self.gated and self.sizes.casts and self.tp == 1 and not self.tiled

    def _queries_are_made_anew(self) -> bool:
        """True if autograd saves the result of rotation or of a separate exchange instead of the projection's output."""
        return self.config.positions == "rotary" or (self.exchanged and not self._as_projected())

    def storages(self) -> int:
        """Number of saved storages: the letters of the module's docstring, and the products that a recompute reads."""
        config, always, norms = self.config, 3, 2 * (2 if self.config.norm == "layernorm" else 1)
        apart = config.positions == "rotary" or self.repeated > 0
        attention = 2 + (3 if apart else 1) + (self._gathered() > 0) + self.exchanged
        inner = 0 if self.tiled else 4 if self.gated else 2
        return always + attention + 3 + self._casts_twice() + inner + norms

    def largest(self) -> float:
        """Bytes of the largest saved storage."""
        return max(self.stream, self.q, 0 if self.tiled else self.f)

    def _gathered(self) -> float:
        """Bytes of the queries that grouped-query attention copies out of the projection, and saves in addition to it.

        There is no copy where rotation or an exchange makes new queries, nor on a rank with one key/value head, whose
        queries are contiguous; and where keys and values are copied, too, nothing reads the projection.
        """
        config, made_anew = self.config, self.exchanged or self.repeated
        copied = config.positions == "learned" and config.group > 1 and config.kv_heads > self.tp and not made_anew
        return self.h if copied else 0

    def _norms(self) -> float:
        return 2 * (2 * self.sizes.stream if self.config.norm == "layernorm" else STATISTIC)

    def _between(self) -> float:
        """Gradients that the first half of a split backward leaves to the second: of the results of norms and products.

        Tensor-parallel ranks have gathered those of the last projections' results.
        """
        inner = 0 if self.tiled else (2 if self.gated else 1) * self.f
        return 2 * self.stream + self.q + 2 * self.tp * self.h + inner

    # Read and written.

    def _elementwise_again(self) -> float:
        norm = 3 * self.stream + self.h if self.cast else 2 * self.h
        residual = 2 * self.stream + self.h
        inner = self._cast_again() + (0 if self.tiled else self._activation())
        return 2 * norm + self._heads_apart() + residual + inner

    @property
    def _keys(self) -> float:
        return (self.q - self.h) / 2

    @property
    def _rotates(self) -> bool:
        return self.config.positions == "rotary"

    def _heads_apart(self) -> float:
        """Bytes that rotation and the copy of the values read and write, or without it the copy of the queries."""
        if not self._rotates:
            return 2 * self.h if self.config.group > 1 and self.config.kv_heads > self.tp else 0
        rotated = ROTATION[self.sizes.product][0] * (self.h + self._keys) / self.sizes.product
        return rotated + 2 * self._keys

    def _elementwise_backward(self) -> float:
        cast = self.stream + self.h if self.cast else 0
        norms = residuals = 2 * (3 * self.stream + cast)
        biases = (2 * self.h + self.q + (2 if self.gated else 1) * self.f) if self.config.bias else 0
        again = self._activation() if self.tiled else 0
        inner = again + self._cast_again() + self._activation_backward()
        return norms + residuals + 2 * self.q + self._rotated_backward() + biases + inner

    def _rotated_backward(self) -> float:
        rotated = ROTATION[self.sizes.product][1] * (self.h + self._keys) / self.sizes.product
        return rotated if self._rotates else 0.0

    def _cast_again(self) -> float:
        return self.stream + self.h if self._casts_twice() else 0

    def _activation_backward(self) -> float:
        """Bytes that the backward of the MLP's activation reads and writes, with the sum of two products' gradients."""
        summed = 3 * (self.stream if self._casts_twice() else self.h)
        return 9 * self.f + summed if self.gated else 3 * self.f

    def _kernels(self) -> tuple[int, int]:
        wide, matrices, biases = self.sizes.product == FLOAT, 4 + self.gated, (4 + self.gated) * self.config.bias
        casts = (matrices + biases + self._casts_twice()) * self.sizes.casts
        rotations = (11, 18) if wide else (15, 30)
        forward = 10 + 2 * self.gated + (self.config.group > 1 and not self._rotates) + casts + 2 * self.sizes.casts
        backward = 15 + 5 * self.gated + biases + casts + 4 * self.sizes.casts
        return forward + rotations[0] * self._rotates, backward + rotations[1] * self._rotates

    def _exchanges_at_matmuls(self) -> float:
        if not self.exchanged:
            return 0.0
        return 1 / 4 if self._as_projected() else 1.0

    def _as_projected(self) -> bool:
        """True if queries, keys and values are exchanged together, as the projection's output."""
        return self.config.positions == "learned" and self.config.group == 1

    def _activation(self) -> float:
        """Bytes that the MLP's activation reads and writes."""
        return (5 if self.gated else 2) * self.f

    # Transient. Under tensor parallelism a projection's input or output is whole: tp times a rank's share.

    def _behind_mlp(self) -> float:
        """Bytes held after the MLP: the last projection's result, before and after it is added to the stream."""
        tile = (4 if self.gated else 2) * self.f * self._tile(self._rows) if self.tiled else 0
        if self.tp == 1:
            copied = self.h if self.tiled and self.cast else 0  # of the norm's result, by this product's own cast
            return max(self.cast + self.h + tile + copied, self.h + self.stream)
        bias = self.stream if self.config.bias else 0
        copies = 2 if self.batch == 1 else 3  # gathered input, partial sums, and these in the order of the ranks
        summed = copies * self.tp * self.h + self.h + bias
        return max(2 * self.tp * self.h + tile, summed) + self.cast

    def _behind_attention(self) -> float:
        """Bytes held after attention, saved or not, with the projection's output and its rotated copy."""
        rotary, exchanged = self.config.positions == "rotary", self.exchanged
        projections = (1 + (1 if rotary else 0)) * self.q + (self.attended if exchanged else 0)
        results = (3 if exchanged else 1) * self.h + self.h
        whole = 2 * self.tp * self.h + 2 * self.h if self.tp > 1 else 0  # and its sum before and after the bias
        projections += self.repeated
        # The projection after it starts when the ring has gone.
        behind = max(results + whole, self._ring[0] * self.h if self.rings else 0, self.h + self._scores())
        return self.stream + self.cast + self.h + projections + behind + STATISTIC * self.config.heads

    def _scores(self) -> float:
        """Bytes of the scores that local attention in blocks of queries holds at once, of all heads and sequences."""
        if self.window is None or self.sizes.product != FLOAT:
            return 0.0
        columns = min(self.window + QUERIES, self.tokens)
        return SCORES * FLOAT * self.config.heads * min(QUERIES, self.tokens) * columns / self.tokens

    @property
    def _ring(self) -> tuple[float, float]:
        """Most that a ring holds, forward and backward, in units of h."""
        return RING_FLOAT if self.sizes.product == FLOAT else RING_HALF

    def _backward_of_mlp(self) -> float:
        """Bytes held in the MLP's backward: gradients of the stream, its cast copy, and those of the wide activations.

        All saved tensors are still held, except the activation's results once their gradients are computed.
        """
        entering = self.stream + (self.h if self.sizes.casts else 0)
        gathered = self.tp * self.h if self.tp > 1 else 0
        if self.tiled:
            pieces = PIECES_SWIGLU if self.gated else PIECES_GELU
            by_columns = (pieces - 1) * self.f * self._tile(self.config.ffn // self.tp)
            by_rows = self.tp * self.h + (pieces * self.f + self.tp * self.h) * self._tile(self._rows)
            return entering + 2 * gathered + max(by_columns, by_rows)
        through = self.stream + ((2 if self.gated else -1) * self.f) + 2 * gathered
        return max(entering + gathered + self.f, through)

    @property
    def _rows(self) -> int:
        return self.batch * self.tokens // self.cp

    def _tile(self, length: int) -> float:
        """Share of one tile in all rows or wide columns."""
        step = -(-length // (self.config.mlp_tiles * ALIGNED)) * ALIGNED
        return min(step, length) / length

    def _held(self) -> float:
        return 3 * self.h if self.tiled else 0  # a tiled MLP makes no wide activation anew, but what it reads

    def _in_parts(self) -> RecomputeInParts | None:
        """The recompute in two parts: the MLP's, whose backward follows, and attention's when all that has gone.

        Where ranks exchange queries, keys and values, their part runs as backward begins, too.
        """
        if self.tp > 1:
            return None
        saved = self.always() + self.rest()
        made_again = self.h + self.attended + self._gathered() + (self.h if self.exchanged else 0)
        of_attention = 0.0 if self.exchanged else made_again
        mlp, attention = saved - of_attention + self._backward_of_mlp(), self._backward_of_attention()
        entering = self.stream + (self.h if self.sizes.casts else 0)
        first = saved - of_attention + entering + self._held()
        # Input and attention's result, the gradients of the stream and of that result; norm, projection, and beside these
        # the queries on their way through rotation, or all that is rotated.
        turned = max(ROTATING[self.sizes.product] * self.h, self.q) if self._rotates else 0
        second = 2 * self.stream + 3 * self.h + self.q + self.cast + turned + (self.attended if self.exchanged else 0)
        peak = max(mlp, attention)
        whole = saved + max(self._backward_of_mlp(), attention - saved, 0)
        return RecomputeInParts(
            given=(made_again, self.rest() - made_again),
            held=max(0.0, first - peak, second - peak),
            absent=max(0.0, whole - peak),
        )

    def _backward_of_attention(self) -> float:
        """Bytes held in attention's backward: input, norm, projection and output, their gradients, and the residual's."""
        saved = self.stream + self.h + self.attended + self.h
        exchanged = self.attended + 2 * self.h if self.exchanged else 0
        whole = 2 * self.tp * self.h if self.tp > 1 else 0
        gradients = self._ring[1] * self.h + self.repeated if self.rings else self.attended + self._scores()
        return saved + 2 * self.stream + self.h + gradients + exchanged + whole
