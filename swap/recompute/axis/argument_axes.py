"""Token dimensions of a layer's arguments, also where other dimensions happen to be as long.

A rotary table of as many tokens as a head is wide, as many sequences as tokens: sizes alone do not tell. In this order:

    two lengths     a dimension that has grown with the tokens since the layer's last call at another length runs over them,
                    and so may one of size one that has grown
    usual order     (batch, ..., tokens, features): the last two dimensions as long are a mask over pairs of tokens; of three
                    dimensions or fewer, where that reading is refused, the next call takes the first of the two
    neither         the last one as long: the batch comes before the tokens

A wrong choice costs no gradient. What is chosen is cut so, and the proof carries it through every operator: an
operator that meets two axes in different places, or that adds over one, is refused, whatever they were taken for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memo.swap.recompute.axis.token_axis import Axis, Mark, Meaning

__all__ = ["Shapes", "TokenDims"]

_MASK = 4
"""Dimensions (batch, heads, tokens, tokens) of what is a mask however it is used."""

_Shapes = tuple[tuple[int, ...], ...]


class TokenDims:
    """Token dimensions of one call's arguments; `before` has tokens and shapes of an earlier call at another length."""

    def __init__(self, tokens: int, *, before: tuple[int, _Shapes] | None = None, no_pairs: bool = False) -> None:
        self.tokens = tokens
        self._before = before
        self._no_pairs = no_pairs
        self.guessed_pairs = False
        """A mask over pairs of tokens may be something else."""

    def axes(self, position: int, tensor: torch.Tensor, joined: Sequence[int] = ()) -> list[Axis]:
        """Two for a mask over pairs of tokens. `position` is the tensor's among those of the call.

        `joined` are numbers of shards: as long as the tokens of so many ranks together, rank after rank, is long enough too.
        """
        shape = tuple(tensor.shape)
        outer = {count * self.tokens: count for count in (*joined, 1)}
        found = [Axis(dim=dim, outer=outer[size]) for dim, size in enumerate(shape) if size in outer]
        known = self._shape_before(position, len(shape))
        if known is not None:
            tokens, sizes = known
            found = [axis for axis in found if sizes[axis.dim] in (1, shape[axis.dim] * tokens / self.tokens)]
        if len(found) < 2:
            return found
        pair = [axis for axis in found if axis.dim >= len(shape) - 2]
        if len(pair) < 2:
            return found[-1:]
        if known is None and len(shape) < _MASK:
            self.guessed_pairs = True
            if self._no_pairs:
                return pair[:1]
        return pair

    def meaning(self, position: int, tensor: torch.Tensor, joined: Sequence[int] = ()) -> Meaning:
        """As the layer's forward sees it: of a mask over pairs nothing is known."""
        axes = self.axes(position, tensor, joined)
        if len(axes) > 1:
            return Mark.MIXED
        return axes[0] if axes else Mark.SAME

    def _shape_before(self, position: int, ndim: int) -> tuple[int, tuple[int, ...]] | None:
        if self._before is None:
            return None
        tokens, shapes = self._before
        known = position < len(shapes) and len(shapes[position]) == ndim
        return (tokens, shapes[position]) if known else None


class Shapes:
    """Shapes of each layer's arguments, at its last call and at the last one of another length."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, _Shapes]] = {}
        self._other: dict[str, tuple[int, _Shapes]] = {}

    def before(self, layer: str, tokens: int, tensors: Sequence[torch.Tensor]) -> tuple[int, _Shapes] | None:
        """Notes a call. Returns the tokens and shapes of an earlier one of another length."""
        last = self._last.get(layer)
        if last is not None and last[0] != tokens:
            self._other[layer] = last
        self._last[layer] = tokens, tuple(tuple(tensor.shape) for tensor in tensors)
        return self._other.get(layer)
