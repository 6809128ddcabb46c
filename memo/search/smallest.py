"""Clusters that can, where none of a space's layouts fits: more nodes, or larger budgets of a node.

Owns the question alone; whether a layout fits is the planner's word, under the setting and the sharding that need least
memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from memo.errors import UsageError
from memo.mip.activation import DoesNotFit, device_peak_candidates, misfit_of
from memo.search.longest import fits_any_plan, leanest

if TYPE_CHECKING:
    from memo.mip.activation import ActivationProblem
    from memo.search.candidates import Candidate
    from memo.search.space import Space

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MOST_TIMES = 64
"""Times as many nodes that are tried."""
CLOSEST = 2
"""Layouts, of those that hold least in any case, that are asked for what they lack."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Smallest:
    """What would fit, where a space does not."""

    candidate: Candidate
    """The layout that lacks least memory on the GPU."""
    misfit: DoesNotFit
    """What it lacks, and where."""
    nodes: int | None
    """Fewest nodes, of the numbers tried, on which some layout fits; None where none does."""
    least_bytes: Mapping[str, int]
    """For `device`, `host` and `disk` the smallest budget that suffices by itself, in a layout of the cluster."""


def smallest_that_fits(space: Space) -> Smallest | None:
    """Finds what would fit; None where the space is empty, or the host lacks room for what is not an activation."""
    least: dict[str, int] = {}
    closest: tuple[Candidate, DoesNotFit] | None = None
    for _, candidate, problem in _by_memory(space)[:CLOSEST]:
        misfit = misfit_of(problem)
        for tier, nbytes in misfit.least_bytes.items():
            least[tier] = min(nbytes, least.get(tier, nbytes))
        if closest is None or misfit.least_bytes["device"] < closest[1].least_bytes["device"]:
            closest = candidate, misfit
    if closest is None:
        return None
    connected = space.request.machine.network.nics_per_node > 0
    larger = (nodes for nodes in NODES if connected and space.nodes < nodes <= MOST_TIMES * space.nodes)
    nodes = next((nodes for nodes in larger if _fits(dataclasses.replace(space, nodes=nodes))), None)
    return Smallest(candidate=closest[0], misfit=closest[1], nodes=nodes, least_bytes=least)


def _fits(space: Space) -> bool:
    """Whether some layout on all GPUs fits."""
    return any(fits_any_plan(space, candidate) for _, candidate, _ in _by_memory(space))


def _by_memory(space: Space) -> list[tuple[int, Candidate, ActivationProblem]]:
    """One candidate of each shape on all GPUs, with the bytes that a GPU holds in any case, ascending."""
    found = []
    for candidate in _leanest(space):
        with contextlib.suppress(UsageError):
            problem = space.problem(candidate, space.request.tiles[-1])
            places = (place for stage in problem.stages for place in device_peak_candidates(stage))
            found.append((max(place.resident_bytes for place in places), candidate, problem))
    return sorted(found, key=lambda one: (one[0], one[1].key))


def _leanest(space: Space) -> Iterator[Candidate]:
    """Yields of each shape on all GPUs the simplest of the candidates that hold least."""
    for shape in space.shapes:
        if shape.gpus == space.gpus:
            yield from leanest(space, shape)[:1]
