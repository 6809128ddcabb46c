"""Sizes of the pieces of tokens in which layers are recomputed: the candidates, of which the solver tries one by one.

Owns the candidates alone. One bound of the bytes that a recompute holds at once is for all classes of layers, so a class
that holds little is recomputed in one piece where another one is cut:

    bytes held     most of any class / 2, / 4, ... / 64
    piece          the fraction of a class's tokens that holds so much, in whole tiles
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from memo.mip.activation.plan import ActivationProblem
from memo.mip.activation.rounding import piece_tokens
from memo.mip.inputs.profile import LayerProfile

__all__ = ["most_held_bytes", "piece_candidates"]

MOST_HALVINGS = 6
"""Of the bytes held; a 64th is less than one tensor of the hidden size."""


def piece_candidates(problem: ActivationProblem) -> Iterator[Mapping[str, float]]:
    """Yields the fraction of tokens computed at once by class name, ever smaller ones; classes in one piece are left out."""
    tokens = problem.profile.signature.rank_tokens
    most = {layer.name: most_held_bytes(layer) for layer in problem.profile.classes if layer.divisible}
    before: Mapping[str, float] = {}
    for halvings in range(1, MOST_HALVINGS + 1):
        bound = max(most.values(), default=0) / 2**halvings
        cut = {name: bound / held for name, held in most.items() if held > bound}
        shares = {name: piece_tokens(share, tokens) / tokens for name, share in cut.items()}
        found = {name: share for name, share in shares.items() if share < 1}
        if found != before:
            yield found
        before = found


def most_held_bytes(layer: LayerProfile) -> int:
    """Bytes that a recompute of the whole layer holds at once, at the point with the most."""
    return max(point.held_bytes for point in layer.points)
