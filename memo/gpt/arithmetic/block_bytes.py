"""One block of the GPT by arithmetic: what it saves, what else stands beside that while it runs, what it computes.

Owns the figures of one token on one rank, in bytes and floating-point operations; a layout and a machine make a profile
of them (memo.gpt.arithmetic.profile_by_arithmetic). Needs no torch. Tests hold the bytes against what autograd saves
and a recorded step holds.

    letters, in bytes a token:   h, f, q  widths of the residual stream, the MLP and the query/key/value projection, in the
                                 type of matrix products;  H  the residual stream in its own type
                                 (float32 under autocast, where every norm's result is cast before it is used)
    saved, gelu     input H | norm h | q k v | attention's out h | residual H | norm h | up f | gelu f    16h with f = 4h
    saved, swiglu   the same with gate f | up f | silu f | product f; under autocast norm h is cast for each of the two
    saved, tiled    the same without any f
    and statistics: one float32 a head of attention, one (rmsnorm) or two (layernorm, in H's type) of each norm
    under Ulysses attention's out once more, as the projection after it has it (memo.parallel.ulysses)
"""

from __future__ import annotations

import dataclasses

from memo.gpt.arithmetic.flops import layer_parameter_count
from memo.gpt.config import GPTConfig
from memo.gpt.train_config import Precision

__all__ = ["Block", "ElementSizes"]

STATISTIC = 4  # bytes of a float32
ALIGNED = 128  # tiles are multiples of it: memo.gpt.model.tiled_mlp.ALIGNED
# What tiled_mlp holds of a tile of rows in backward, in tiles of one wide activation: those of the tile before it among
# them. Of a tile of columns it is one less.
PIECES_GELU, PIECES_SWIGLU = 6, 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElementSizes:
    """Bytes of an element."""

    product: int
    """Of what matrix products and attention read and write."""
    stream: int
    """Of the residual stream."""

    @classmethod
    def of(cls, precision: Precision) -> ElementSizes:
        """As torch's autocast has them: it casts what goes into a matrix product, and adds to the stream in float32."""
        product = 4 if precision is Precision.FP32 else 2
        return cls(product=product, stream=2 if precision is Precision.BF16 else 4)

    @property
    def casts(self) -> bool:
        """Whether a norm's result is copied for the product that reads it, and weights with it."""
        return self.stream != self.product


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Figures of one token; those that tensor parallelism divides are to be divided by its size."""

    always: float
    """Saved whole at every level: the input and attention's result, with attention's statistics."""
    all: float
    """What else is saved."""
    matmuls: float
    """Of that, the results of matrix products that something saved depends on: all but the last projection's. Of
    attention's, under tensor parallelism, a rank's share of the sum."""
    beside: float
    """Of these, what autograd does not save: it stands beside everything that is."""
    in_pieces: float
    """Of `all`, where the first tokens are those of several sequences or of several ranks: they move in one piece, which
    stands beside them."""
    products_in_pieces: float
    """Likewise of the matrix products' results that autograd saves."""
    between: float
    """Gradients of norms' and products' results: what the first half of a split backward leaves for the weights."""
    elementwise: float
    """Bytes read and written by norms, rotation, residuals and the MLP's activation."""
    elementwise_again: float
    """The part of it that level `matmuls` repeats."""
    projections: float
    """FLOPs of the matrix products with weights, forward."""
    projections_again: float
    """The part of it that level `attention` repeats."""
    retiled: float
    """FLOPs that a tiled MLP repeats in backward whatever the level is; 0 without tiles."""
    mlp: float
    """FLOPs of the MLP's matrix products, forward."""
    attention: float
    """FLOPs of the causal scores, forward."""
    exchanges_again: float
    """Of Ulysses' four exchanges, the part that level `attention` repeats; 0 where heads are not exchanged."""
    exchanges_again_at_matmuls: float
    """The part that level `matmuls` repeats: queries, keys and values exchanged as the product gave them are saved so."""
    forward_transient: float
    """The most that forward holds at one time beyond everything it saves."""
    backward_transient: float
    """Likewise backward."""
    storages: int
    """What has to find a place where anything moves; no level has more."""
    largest: float
    """Of the largest of them."""

    @classmethod
    def of(
        cls, config: GPTConfig, tokens: int, sizes: ElementSizes, *, batch: int = 1, tp: int = 1, cp: int = 1
    ) -> Block:
        """By the letters of this module's docstring; `tokens` is the whole sequence's length, which attention sees."""
        return _BlockFigures(config, sizes, tokens, batch, tp, cp).block()


class _BlockFigures:
    def __init__(self, config: GPTConfig, sizes: ElementSizes, tokens: int, batch: int, tp: int, cp: int) -> None:
        self.config, self.sizes, self.tokens, self.batch, self.tp, self.cp = config, sizes, tokens, batch, tp, cp
        self.h, self.f = config.hidden * sizes.product, config.ffn * sizes.product
        self.q, self.stream = config.qkv_width * sizes.product, config.hidden * sizes.stream
        self.cast = self.stream if sizes.casts else 0  # a norm's result beside the copy that is saved of it
        # As memo.parallel.layout.Layout.rings has it.
        self.exchanged = cp > 1 and not (config.heads % (tp * cp) or config.kv_heads % (tp * cp))
        self.gated, self.tiled = config.mlp == "swiglu", config.mlp_tiles > 1

    def block(self) -> Block:
        config, h = self.config, self.h
        width, ups = config.hidden * config.ffn, 2 if self.gated else 1
        weights = layer_parameter_count(dataclasses.replace(config, bias=False)) - 2 * config.hidden
        mlp = 2.0 * (ups + 1) * width
        again = self._elementwise_again()
        saved = self.always() + self.rest()
        return Block(
            always=self.always(),
            all=self.rest(),
            matmuls=self.q + h + (0 if self.tiled else ups * self.f),
            beside=h + (self.q if self._queries_are_made_anew() else 0),
            in_pieces=self._in_pieces(),
            products_in_pieces=self._products_in_pieces(),
            between=2 * self.stream + self.q + 2 * h + (0 if self.tiled else ups * self.f),
            elementwise=again + (self._activation() if self.tiled else 0) + 2 * self.stream + h,
            elementwise_again=again,
            projections=2.0 * weights,
            # A recompute stops where the last saved tensor is: before the last projection, or before all of a tiled MLP.
            projections_again=2.0 * weights - (mlp if self.tiled else 2.0 * width),
            # Twice everything up to the activation, and the gradient of what it gives once more than without tiles.
            retiled=2.0 * (2 * ups + 1) * width if self.tiled else 0.0,
            mlp=mlp,
            attention=2.0 * config.hidden * self.tokens,
            exchanges_again=1.0 if self.exchanged else 0.0,
            exchanges_again_at_matmuls=self._exchanges_at_matmuls(),
            forward_transient=max(self._behind_mlp(), self._behind_attention() - saved, 0),
            backward_transient=max(self._backward_of_mlp(), self._backward_of_attention() - saved, 0),
            storages=self.storages(),
            largest=self.largest(),
        )

    # Saved.

    def always(self) -> float:
        return self.stream + self.h + STATISTIC * self.config.heads

    def rest(self) -> float:
        exchanged = self.h if self.exchanged else 0
        # Autocast casts for each product by itself; where ranks or tiles share the matrices, it is done before.
        twice = self.h if self._casts_twice() else 0
        attention = self.h + self.q + self._gathered() + exchanged
        return attention + self.stream + self.h + twice + self._inner() + self._norms()

    def _inner(self) -> float:
        return 0 if self.tiled else (4 if self.gated else 2) * self.f

    def _in_pieces(self) -> float:
        """Between gathering and summing a rank has tokens of all; between two exchanges attention has."""
        if self.batch > 1:
            return self.rest()
        if self.tp > 1:
            return self.q + self._gathered() + (self.h if self.exchanged else 0) + self._inner()
        return self.q if self.exchanged else 0

    def _products_in_pieces(self) -> float:
        queries = 0 if self._queries_are_made_anew() else self.q
        if self.batch > 1 or self.tp > 1:
            return queries + (0 if self.tiled else (2 if self.gated else 1) * self.f)
        return queries if self.exchanged else 0

    def _casts_twice(self) -> bool:
        return self.gated and self.sizes.casts and self.tp == 1 and not self.tiled

    def _queries_are_made_anew(self) -> bool:
        """Autograd saves what rotation, or an exchange of another form, makes of the projection, and not that itself."""
        return self.config.positions == "rotary" or (self.exchanged and not self._as_projected())

    def storages(self) -> int:
        """The letters of this module's docstring one by one, and the products that a recompute is given."""
        config, always, norms = self.config, 3, 2 * (2 if self.config.norm == "layernorm" else 1)
        attention = 2 + (3 if config.positions == "rotary" else 1) + (self._gathered() > 0) + self.exchanged
        inner = 0 if self.tiled else 4 if self.gated else 2
        return always + attention + 3 + self._casts_twice() + inner + norms

    def largest(self) -> float:
        return max(self.stream, self.q, 0 if self.tiled else self.f)

    def _gathered(self) -> float:
        """Queries that share keys are copied out of the projection, of which attention then keeps all besides; not where
        rotation or an exchange makes new ones, nor on a rank with one key: there they lie together already."""
        config = self.config
        copied = config.positions == "learned" and config.group > 1 and config.kv_heads > self.tp and not self.exchanged
        return self.h if copied else 0

    def _norms(self) -> float:
        return 2 * (2 * self.sizes.stream if self.config.norm == "layernorm" else STATISTIC)

    # Read and written.

    def _elementwise_again(self) -> float:
        norm = 2 * self.stream + self.h if self.cast else 2 * self.h
        rotation = 2 * self.q if self.config.positions == "rotary" else 0
        residual = 2 * self.stream + self.h
        return 2 * norm + rotation + residual + (0 if self.tiled else self._activation())

    def _exchanges_at_matmuls(self) -> float:
        if not self.exchanged:
            return 0.0
        return 1 / 4 if self._as_projected() else 1.0

    def _as_projected(self) -> bool:
        """Queries, keys and values are exchanged together, as one product gave them."""
        return self.config.positions == "learned" and self.config.group == 1

    def _activation(self) -> float:
        """Reads what `up` wrote, writes the rest."""
        return (5 if self.gated else 2) * self.f

    # Beside what is saved. Under tensor parallelism what a projection reads or gives is whole: tp times a rank's share.

    def _behind_mlp(self) -> float:
        """The last projection's result, before it and after it is added to the stream."""
        tile = (4 if self.gated else 2) * self.f * self._tile(self._rows) if self.tiled else 0
        if self.tp == 1:
            copied = self.h if self.tiled and self.cast else 0  # of the norm's result, by this product's own cast
            return max(self.cast + self.h + tile + copied, self.h + self.stream)
        bias = self.stream if self.config.bias else 0
        copies = 2 if self.batch == 1 else 3  # what was gathered, the partial sums, and these in the order of the ranks
        summed = copies * self.tp * self.h + self.h + bias
        return max(2 * self.tp * self.h + tile, summed) + self.cast

    def _behind_attention(self) -> float:
        """All that stands there after attention, saved or not: the projection and what rotation made of it among it."""
        rotary, exchanged = self.config.positions == "rotary", self.exchanged
        projections = (1 + (1 if rotary else 0) + (1 if exchanged else 0)) * self.q
        results = (3 if exchanged else 1) * self.h + self.h
        whole = 2 * self.tp * self.h + 2 * self.h if self.tp > 1 else 0  # and its sum before and after the bias
        return self.stream + self.cast + self.h + projections + results + whole + STATISTIC * self.config.heads

    def _backward_of_mlp(self) -> float:
        """The stream's gradient, its copy for the product, the gradients of the wide activations.

        Beside them still stands everything saved, but for the activation's results when their gradients are through."""
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
        """A tile's share of all rows, or of all wide columns."""
        step = -(-length // (self.config.mlp_tiles * ALIGNED)) * ALIGNED
        return min(step, length) / length

    def _backward_of_attention(self) -> float:
        """Input, norm, queries to values and attention's result; and the gradients of all these and of the residual."""
        saved = self.stream + self.h + self.q + self.h
        exchanged = self.q + 2 * self.h if self.exchanged else 0
        whole = 2 * self.tp * self.h if self.tp > 1 else 0
        return saved + 2 * self.stream + self.h + self.q + exchanged + whole
