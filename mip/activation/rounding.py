"""Rounding of a solution's token fractions to ranges that the runtime can cut, within every budget.

Owns the rounding alone. Fewer tokens are saved than asked, so every tier holds less and more is recomputed; where
recomputed bytes stay on the device between the halves of a backward, the moved bytes are not reduced.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from memo.mip.activation.cost import predict_stages
from memo.mip.activation.plan import ActivationProblem, LayerPlan, StagePrediction, chunk_layers
from memo.mip.inputs.profile import LayerProfile, Level

__all__ = ["LEAST_TOKENS", "in_tiles", "most_lost_bytes", "tile_of"]

LONG_TILE, SHORT_TILE = 256, 8
"""Tokens; a sequence is cut at a multiple, so that a product over a part of the rows runs as the whole one does."""
LONG_TOKENS = 8 * LONG_TILE
LEAST_TOKENS = 16
"""Smallest range that is recomputed: kernels of smaller products round differently."""


def tile_of(tokens: int) -> int:
    """Multiple at which a sequence of so many tokens is cut."""
    return LONG_TILE if tokens >= LONG_TOKENS else SHORT_TILE


def most_lost_bytes(layer: LayerProfile, tokens: int) -> float:
    """Upper bound of the saved bytes that rounding takes from a layer: a tile per range, and the least last range."""
    return sum(known.saved_bytes for known in layer.levels) * (tile_of(tokens) + LEAST_TOKENS) / tokens


def in_tiles(
    problem: ActivationProblem, plans: Sequence[LayerPlan]
) -> tuple[tuple[LayerPlan, ...], tuple[StagePrediction, ...]]:
    """Rounds token ranges to tiles; no layer saves more than asked.

    The second range gets what the first one loses, if the device has room for the bytes that recomputes are then given.

    Returns:
        The rounded layer plans, and the predictions of each stage under them.
    """
    tokens, known = problem.profile.signature.rank_tokens, problem.profile.layer_profiles()
    layers = _moving_as_much(problem, [_rounded(plan, tokens) for plan in plans], plans)
    stages = predict_stages(problem, layers)
    if all(stage.peak_device_bytes <= problem.budgets.device_bytes for stage in stages):
        return layers, stages
    shrunk = [
        _rounded(plan, tokens, middle_grows=layer.level(Level.SAVE_ATTENTION) is None)
        for plan, layer in zip(plans, known, strict=True)
    ]
    layers = _moving_as_much(problem, shrunk, plans)
    return layers, predict_stages(problem, layers)


def _moving_as_much(
    problem: ActivationProblem, rounded: Sequence[LayerPlan], plans: Sequence[LayerPlan]
) -> tuple[LayerPlan, ...]:
    """Where backward is split, moves as many bytes as before rounding, or all that are still saved."""
    known, pipeline = problem.profile.layer_profiles(), problem.pipeline
    split = {
        index
        for stage in range(pipeline.stages)
        for number, chunk in enumerate(chunk_layers(problem, stage))
        if pipeline.splits(stage, number)
        for index in chunk
    }
    return tuple(
        _with_moved(new, plan, known[index]) if index in split else new
        for index, (new, plan) in enumerate(zip(rounded, plans, strict=True))
    )


def _with_moved(plan: LayerPlan, before: LayerPlan, layer: LayerProfile) -> LayerPlan:
    saved, moving = plan.saved_bytes(layer), before.host + before.disk
    if not saved or not moving:
        return plan
    share = min(moving * before.saved_bytes(layer), saved) / saved
    host, disk = (share * part / moving for part in (before.host, before.disk))
    return dataclasses.replace(plan, kept=1.0 - share, host=host, disk=disk)


def _rounded(plan: LayerPlan, tokens: int, *, middle_grows: bool = True) -> LayerPlan:
    """Rounds one layer's ranges down to tiles; `middle_grows`: the second range gets what the first one loses."""
    tile = tile_of(tokens)
    whole = not plan.attention_tokens and not plan.matmul_tokens
    first = tokens if whole else _down(plan.all_tokens * tokens, tile, tokens)
    if not middle_grows:
        second = min(first + _down(plan.matmul_tokens * tokens, tile, tokens), tokens)
    elif plan.attention_tokens:
        second = max(_down((plan.all_tokens + plan.matmul_tokens) * tokens, tile, tokens), first)
    else:
        second = tokens
    if tokens - LEAST_TOKENS < second < tokens:
        second = max(0, tokens - LEAST_TOKENS) // tile * tile
        first = min(first, second)
    return dataclasses.replace(
        plan,
        all_tokens=first / tokens,
        matmul_tokens=(second - first) / tokens,
        attention_tokens=(tokens - second) / tokens,
    )


def _down(count: float, tile: int, tokens: int) -> int:
    nearly = count + 1e-6 * tile  # a floating-point error must not cost a tile
    return tokens if nearly >= tokens else math.floor(nearly / tile) * tile
