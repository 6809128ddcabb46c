"""Arithmetic model of a layer with a mixture of experts: the figures of `BlockBytes`, per token of a rank.

Owns what routing and experts save and hold beside attention, norms and the shared experts, which are those of a dense layer.
Needs no torch. Tests compare the bytes with those that a recorded step saves and holds.

    letters, in bytes per token: h, H, q as in block_bytes.py;  b  what experts read of a token: the bottleneck or h;
                                 e  one expert's inner width;  k experts for each token
    saved   router      its float32 input (or under autocast the norm's result), probabilities and logits in float32,
                        k choices, their numbers in order and the inverse, their weights
            experts     rows k b | inner 2 k e (gelu) or 4 k e (swiglu) | results k b
            beside      norm h, where shared experts or a bottleneck read it, and once more for each of them under autocast;
                        with a bottleneck the mixed results b
    under expert parallelism the rows that arrive, with their numbers in order: `skew` times as many as a rank sends
"""

from __future__ import annotations

import dataclasses

from memo.gpt.arithmetic.block_bytes import FLOAT, BlockBytes, BlockFigures, ElementSizes
from memo.gpt.arithmetic.flops import expert_layer_weights
from memo.gpt.config import GPTConfig

ID = 8
SKEW = 1.25
"""Rows that a rank's experts get, as a multiple of the mean of all ranks, for which memory is planned. Routers are trained
to balance; what a step has beyond it moves, as everything that does not fit."""


class MixtureFigures(BlockFigures):
    """Computation of a layer whose MLP is a mixture; as a dense layer's, its `f` is that of the shared experts.

    Args as of `BlockFigures`; `ep`: ranks that divide the experts; `apart`: weights of router and experts are sharded apart
    from the layer's, so that they are gathered within it. `skew` has no meaning with one expert-parallel rank, which gets
    its own rows.
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
        ep: int = 1,
        apart: bool = False,
        skew: float = SKEW,
    ) -> None:
        assert config.moe is not None
        super().__init__(config, tokens, sizes, batch=batch, tp=tp, cp=cp, rings=rings, window=window)
        self.moe = moe = config.moe
        self.tiled, self.f = False, moe.shared_hidden * sizes.product
        self.narrow = (moe.bottleneck or config.hidden) * sizes.product
        self.parted, self.arrive = ep > 1, skew if ep > 1 else 1.0
        self.apart = apart

    def block(self) -> BlockBytes:
        """The figures. A router's tokens are a token's own; experts compute as many rows as a rank's tokens choose."""
        config, moe = self.config, self.moe
        weights = expert_layer_weights(config, of_a_token=True)
        # A recompute stops at the last saved tensor: of the shared experts or the bottleneck it is the last product's input.
        last = moe.shared_hidden + moe.bottleneck
        saved = self.always() + self.rest()
        of_experts = moe.top_k * (self._ups + 1) * (moe.bottleneck or config.hidden) * moe.expert_hidden
        return dataclasses.replace(
            super().block(),
            matmuls=self._exchanged
            + self.q
            + self.h
            + self._ups * (self.f + self._wide)
            + self._results
            + self._descended,
            projections=2.0 * weights,
            projections_again=2.0 * (weights - config.hidden * last - of_experts * self.apart),
            at_attention=self._exchanged + self._of_weights_apart,
            retiled=0.0,
            mlp=0.0,
            forward_transient=max(self._behind_experts(), self._behind_attention() - saved, 0),
            backward_transient=max(self._backward_of_experts(), self._backward_of_attention() - saved, 0),
            held=max(self._behind_experts(), self.q + self.repeated),
            in_parts=None,
        )

    # Saved.

    @property
    def _ups(self) -> int:
        """Products of an expert before its last one."""
        return 2 if self.gated else 1

    @property
    def _exchanged(self) -> float:
        """Bytes that level `attention` saves beside what every level does, since ranks have exchanged them.

        Exchanged rows are not repeated, nor is what a bottleneck gives to the experts where tokens are divided, nor then the
        norm's result.
        """
        if not (self.parted or self.moe.bottleneck):
            return 0.0
        return self._arriving + self._results + self.h + (self.stream if self.sizes.casts else 0)

    @property
    def _of_weights_apart(self) -> float:
        """Bytes that level `attention` saves besides: products of weights gathered within the layer are not repeated."""
        if not self.apart:
            return 0.0
        results = 0.0 if self.parted or self.moe.bottleneck else self._results
        return self._ups * self._wide + results + self._descended + FLOAT * self.moe.experts

    @property
    def _arriving(self) -> float:
        """Rows of a token that experts read, on the ranks of their experts."""
        return self.moe.top_k * self.narrow * self.arrive

    @property
    def _results(self) -> float:
        """Results of the experts, on the ranks of the tokens."""
        return self.moe.top_k * self.narrow

    @property
    def _wide(self) -> float:
        """One inner tensor of the experts."""
        return self.moe.top_k * self.moe.expert_hidden * self.sizes.product * self.arrive

    @property
    def _descended(self) -> float:
        return self.narrow if self.moe.bottleneck else 0.0

    @property
    def _orders(self) -> float:
        """Choices of the router, orders of the rows and weights of the choices, which are never repeated."""
        return self.moe.top_k * (3 * ID + self.sizes.product + (2 * ID * self.arrive if self.parted else 0))

    @property
    def _router(self) -> float:
        """Router's float32 input, where it is not the norm's result, probabilities, logits, and their sums."""
        wide = FLOAT * self.config.hidden if self.sizes.stream != FLOAT else 0
        sums = FLOAT * (1 + self.moe.top_k) if self.moe.top_k > 1 else 0
        return wide + 2 * FLOAT * self.moe.experts + FLOAT + sums

    @property
    def _readers(self) -> int:
        """Products beside the experts that read the norm's result; ranks that share their matrices cast it once."""
        shared = (2 if self.gated and self.tp == 1 else 1) if self.f else 0
        return shared + (1 if self.moe.bottleneck else 0)

    def _norm_results(self) -> float:
        """Bytes saved of the norm's result before the MLP."""
        if self.sizes.casts:
            return self.stream + self._readers * self.h
        return self.h if self._readers or self.sizes.stream == FLOAT else 0

    def rest(self) -> float:
        """Bytes of all saved tensors that are not saved at every level."""
        exchanged = self.h if self.exchanged else 0
        attention = self.h + self.attended + self._gathered() + exchanged
        routed = self._arriving + self._results + self._descended + (4 if self.gated else 2) * (self._wide + self.f)
        return attention + self.stream + self._norm_results() + self._router + self._orders + routed + self._norms()

    def _coded_in_rest(self) -> tuple[float, float]:
        """Without choices, orders and the router's probabilities; its float32 input counts with the residual stream."""
        wide = FLOAT * self.config.hidden if self.sizes.stream != FLOAT else 0
        stream = self.stream + (self.stream if self.sizes.casts else 0)
        return stream, self.rest() - stream - self._norms() - self._orders - self._router + wide

    def storages(self) -> int:
        """Number of saved storages."""
        router, routed = 8, 2 + 2 + (4 if self.gated else 2) + (2 if self.parted else 0)
        return super().storages() + router + routed + self._readers + 1

    def largest(self) -> float:
        """Bytes of the largest saved storage."""
        return max(self.stream, self.q, self.f, self._arriving, self._wide, FLOAT * self.config.hidden)

    # Read and written.

    def _activation(self) -> float:
        """Bytes that router, gathers, activations and sums read and write, of as many rows as come to a rank on average."""
        gathers = (6 if self.parted else 2) * self._results + 2 * self._results
        inner = (5 if self.gated else 2) * (self.f + self._wide / self.arrive)
        return self.h + 2 * self._router + gathers + inner + 3 * self._results + self.narrow

    def _activation_backward(self) -> float:
        """Twice what forward does, as element-wise backwards read a gradient besides."""
        return 2 * self._activation()

    def _cast_again(self) -> float:
        return 0.0

    # Transient.

    @property
    def _unsaved_norm(self) -> float:
        """The norm's result, where nothing saves it."""
        return 0.0 if self._norm_results() else self.h

    @property
    def _small(self) -> float:
        """Sorted choices, weights before they are cast, and gradients of the logits."""
        return (ID + FLOAT) * self.moe.top_k + FLOAT * self.moe.experts

    def _behind_experts(self) -> float:
        """Bytes held behind the experts, saved or not: on their way home, or weighed and summed, beside the shared ones'."""
        cast = self.moe.top_k * self.stream if self.sizes.casts and not self.moe.bottleneck else 0.0
        there = cast + (self._results + self._arriving if self.parted else 0.0)
        back = self._arriving + (self._arriving + self._results if self.parted else 0.0)
        mixed = self._results + self.narrow
        out = self.h + (self._behind_mlp() + self._descended if self.f else self.stream)
        return self._unsaved_norm + self._small + max(there, back, mixed, out)

    def _backward_of_experts(self) -> float:
        """Bytes held in the backward of the mixture: gradients of results, on their way, of inner tensors, and of rows."""
        entering = self.stream + (self.h if self.sizes.casts else 0)
        weighed = 2 * self._results
        moved = 2 * self._arriving + self._results if self.parted else 0.0
        inner = (2 if self.gated else -1) * self._wide + 2 * self._arriving - self._results
        shared = self._backward_of_mlp() - entering + self.h if self.f else 0.0
        return entering + self._small + max(weighed, moved, inner, shared)
