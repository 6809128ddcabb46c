"""Token ranges and pieces that the runtime can cut: rounding of a layer's fractions, and candidates for pieces.

Rounding keeps every budget. Fewer tokens are saved than asked, so every tier holds less and more is recomputed; where
recomputed bytes stay on the device between the halves of a backward, the moved bytes are not reduced.

Pieces in which layers are recomputed are tried one after another. One bound of the bytes that a recompute holds at once is
for all classes of layers, so a class that holds little is recomputed in one piece where another one is cut:

    bytes held     most of any class / 2, / 4, ... / 64
    piece          the fraction of a class's tokens that holds so much, in whole tiles
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from memo.mip.activation.cost import predict_stages
from memo.mip.activation.plan import ActivationProblem, LayerPlan, StagePrediction, chunk_layers
from memo.mip.inputs.profile import ALL, ATTENTION, MATMULS, LayerProfile

__all__ = [
    "LEAST_TOKENS",
    "in_storages",
    "in_tiles",
    "most_gained_bytes",
    "most_held_bytes",
    "most_lost_bytes",
    "piece_candidates",
    "piece_tokens",
    "storage_bytes",
    "tile_of",
]

LONG_TILE, SHORT_TILE = 256, 8
"""Tokens; a sequence is cut at a multiple, so that a product over a part of the rows runs as the whole one does."""
LONG_TOKENS = 8 * LONG_TILE
LEAST_PIECE = 32
"""Tokens of the smallest piece that is planned: of what a range leaves over, two of LEAST_TOKENS can be made."""
LEAST_TOKENS = 16
"""Smallest range whose products are recomputed: kernels of smaller products round differently."""

MOST_HALVINGS = 6
"""Halvings of the bytes held; a 64th is less than one tensor of the hidden size."""

ALMOST_WHOLE = 1e-6
"""Part of a storage that floating-point errors may take from it."""

_LEVELS = {ALL, MATMULS, ATTENTION}


def tile_of(tokens: int) -> int:
    """Multiple at which a sequence of so many tokens is cut."""
    return LONG_TILE if tokens >= LONG_TOKENS else SHORT_TILE


def piece_tokens(share: float, tokens: int) -> int:
    """Tokens of a piece: whole tiles, not more than this fraction of all tokens as far as pieces may be as small."""
    return min(
        tokens,
        max(_down(share * tokens, tile_of(tokens), tokens), -(-LEAST_PIECE // tile_of(tokens)) * tile_of(tokens)),
    )


def most_lost_bytes(layer: LayerProfile, tokens: int) -> float:
    """Upper bound of the saved bytes that rounding takes from a layer: a tile per range, and the least last range."""
    return sum(known.saved_bytes for known in layer.points) * _most_moved(layer, tokens)


def most_gained_bytes(layer: LayerProfile, tokens: int) -> tuple[float, float]:
    """Upper bounds of the (beside, held) bytes that rounding adds to a layer, where it goes on to points that have more.

    Those beside of a class whose last point has none are not bounded: `in_tiles` then adds tokens to that point alone.
    """
    pairs = list(itertools.pairwise(layer.points))
    held = sum(max(0, deeper.held_bytes - point.held_bytes) for point, deeper in pairs)
    beside = sum(max(0, deeper.beside_bytes - point.beside_bytes) for point, deeper in pairs) if _grows(layer) else 0
    most = _most_moved(layer, tokens)
    return beside * most, held * most


def _grows(layer: LayerProfile) -> bool:
    """Whether a range always gets what the one before it loses."""
    held = any(point.held_bytes for point in layer.points)
    return held or bool(layer.points[-1].beside_bytes) or _has_further_points(layer)


def _has_further_points(layer: LayerProfile) -> bool:
    return not _LEVELS.issuperset(point.name for point in layer.points)


def _most_moved(layer: LayerProfile, tokens: int) -> float:
    """Upper bound of the fraction of the tokens by which rounding moves the end of a range.

    Where another range than the last can be too short, it may be given up to a last one that was made longer.
    """
    lengthened = 2 if _has_further_points(layer) else 1
    return (tile_of(tokens) + lengthened * LEAST_TOKENS) / tokens


def in_tiles(
    problem: ActivationProblem, plans: Sequence[LayerPlan]
) -> tuple[tuple[LayerPlan, ...], tuple[StagePrediction, ...]]:
    """Rounds token ranges to tiles; no layer saves more than asked. A layer that cannot be divided stays as it is.

    A range gets what the one before it loses, if the device has room for the bytes that recomputes are then given.

    Returns:
        The rounded layer plans, and the predictions of each stage under them.
    """
    tokens, known = problem.profile.signature.rank_tokens, problem.profile.layer_profiles()
    grown = [_rounded(plan, layer, tokens) for plan, layer in zip(plans, known, strict=True)]
    layers = _moving_as_much(problem, grown, plans)
    stages = predict_stages(problem, layers)
    budgets = (problem.machine_of(stage).budgets.device_bytes for stage in range(len(stages)))
    if all(stage.peak_device_bytes <= budget for stage, budget in zip(stages, budgets, strict=True)):
        return layers, stages
    shrunk = [
        _rounded(plan, layer, tokens, middle_grows=_grows(layer)) for plan, layer in zip(plans, known, strict=True)
    ]
    layers = _moving_as_much(problem, shrunk, plans)
    return layers, predict_stages(problem, layers)


def storage_bytes(layer: LayerProfile) -> float:
    """Bytes of a storage, as if all of a layer's were of one size; 0 where their number is unknown."""
    return layer.full_bytes / layer.storages if layer.storages else 0.0


def in_storages(problem: ActivationProblem, plans: Sequence[LayerPlan]) -> tuple[LayerPlan, ...]:
    """Rounds moved bytes of layers at one point to whole storages, upwards, as the engine places them.

    The engine keeps no more than planned; what a layer so keeps too little, the next one may keep more. A device then
    holds no more than before at any layer, and a lower tier less than one storage more.
    """
    known, rounded = problem.profile.layer_profiles(), list(plans)
    for stage in range(problem.pipeline.stages):
        for chunk in chunk_layers(problem, stage):
            carried = 0.0
            for index in chunk:
                plan, size = plans[index], storage_bytes(known[index])
                saved, moving = plan.saved_bytes(known[index]), plan.host + plan.disk
                if not (size and saved and moving and plan.kept) or len(plan.points) > 1:
                    continue
                due = plan.kept * saved + carried
                share = min(math.floor(due / size + ALMOST_WHOLE) * size / saved, 1.0)
                carried = max(due - share * saved, 0.0)
                host = (1 - share) * (plan.host / moving if plan.disk else 1.0)
                disk = (
                    max(1 - share - host, 0.0) if plan.disk else 0.0
                )  # without one, not even an error's part of a byte
                rounded[index] = dataclasses.replace(plan, kept=share, host=host, disk=disk)
    return tuple(rounded)


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
        _with_moved(new, plan, known[index]) if index in split and known[index].divisible else new
        for index, (new, plan) in enumerate(zip(rounded, plans, strict=True))
    )


def _with_moved(plan: LayerPlan, before: LayerPlan, layer: LayerProfile) -> LayerPlan:
    saved, moving = plan.saved_bytes(layer), before.host + before.disk
    if not saved or not moving:
        return plan
    share = min(moving * before.saved_bytes(layer), saved) / saved
    host, disk = (share * part / moving for part in (before.host, before.disk))
    return dataclasses.replace(plan, kept=1.0 - share, host=host, disk=disk)


def _rounded(plan: LayerPlan, layer: LayerProfile, tokens: int, *, middle_grows: bool = True) -> LayerPlan:
    """Rounds one layer's ranges down to tiles; `middle_grows`: a range gets what the one before it loses.

    Otherwise the class's last point gets what all others lose.
    """
    if not layer.divisible:
        return plan
    tile, names = tile_of(tokens), [point.name for point in layer.points]
    shares = [plan.fraction(name) for name in names]
    used = [number for number, share in enumerate(shares) if share]
    last = used[-1] if middle_grows else len(names) - 1
    if used == [0]:
        return dataclasses.replace(plan, piece=1.0)
    ends = [tokens] * len(names)
    for number in range(last):
        if middle_grows:
            ends[number] = _down(sum(shares[: number + 1]) * tokens, tile, tokens)
        else:
            before = ends[number - 1] if number else 0
            ends[number] = min(before + _down(shares[number] * tokens, tile, tokens), tokens)
    ends = _without_short_ranges(ends, names, tile)
    counts = [end - begin for begin, end in itertools.pairwise([0, *ends])]
    longest = max((count for name, count in zip(names, counts, strict=True) if name != ALL), default=0)
    piece = piece_tokens(plan.piece, tokens)
    return dataclasses.replace(
        plan,
        points={name: count / tokens for name, count in zip(names, counts, strict=True) if count},
        piece=piece / tokens if piece < longest else 1.0,
    )


def _without_short_ranges(ends: Sequence[int], names: Sequence[str], tile: int) -> list[int]:
    """Gives ranges of less than LEAST_TOKENS to the one after them, and makes the last one longer.

    Point `all` recomputes nothing and `matmuls` no product: their ranges may be of any length.
    """
    tokens, kept = ends[-1], list(ends)

    def short(number: int) -> bool:
        begin = kept[number - 1] if number else 0
        return names[number] not in (ALL, MATMULS) and begin < kept[number] < begin + LEAST_TOKENS

    for number in range(1, len(kept)):
        if kept[number] < tokens and short(number):
            kept[number] = kept[number - 1]
    last = kept.index(tokens)
    if short(last):
        begin = max(0, tokens - LEAST_TOKENS) // tile * tile
        kept[:last] = [min(end, begin) for end in kept[:last]]
        cut = kept.index(begin) if begin in kept else last  # the range before it, which is now shorter
        if short(cut):
            kept[cut:last] = [kept[cut - 1]] * (last - cut)
    return kept


def _down(count: float, tile: int, tokens: int) -> int:
    nearly = count + 1e-6 * tile  # a floating-point error must not cost a tile
    return tokens if nearly >= tokens else math.floor(nearly / tile) * tile


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
