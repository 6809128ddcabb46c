"""Token dimensions of a layer's arguments, by their sizes, also where other dimensions happen to be as long.

The order is (batch, ..., tokens, features): the last two dimensions that are as long are a mask over pairs of tokens, and
of other dimensions the last one runs over the tokens.

A wrong choice costs bytes and never a gradient: an argument is cut as was chosen, and the rules of operators
(operator_rules.py) refuse a step that meets axes in different places, or that adds over one, whatever was chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memo.swap.recompute.axis.token_axis import Axis

__all__ = ["token_axes"]


def token_axes(size: Sequence[int], tokens: int, *, joined: Iterable[int] = ()) -> list[Axis]:
    """Returns the axes of an argument that may run over the tokens.

    Args:
        size: of the argument.
        tokens: of one sequence, on this rank.
        joined: numbers of ranks; as long as the tokens of so many ranks together, rank after rank, is long enough too.

    Returns:
        One axis; two for a mask over pairs of tokens, queries first; none where no dimension is as long.
    """
    outer = {count * tokens: count for count in (*joined, 1)}
    found = [Axis(dim=dim, outer=outer[length]) for dim, length in enumerate(size) if length in outer]
    pair = [axis for axis in found if axis.dim >= len(size) - 2]
    return pair if len(pair) == 2 else found[-1:]
