"""Changes where no plan fits: the largest item of a GPU's memory, and the cheapest changes that make a plan fit.

Each change is tried: it is named only if the planner finds a plan with it, everything else as asked for. Where no single one
fits, those that make the largest items of the memory smaller are combined, and what a fit does not need is taken back.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from memo.cli.tables.activation import memory_summary, memory_table, use_name
from memo.errors import UsageError
from memo.mip.activation import MemoryUse, device_peak_candidates
from memo.units import format_bytes, format_tokens

if TYPE_CHECKING:
    from memo.gpt.arithmetic import StepLayout
    from memo.mip.activation import DeviceMemory, DoesNotFit, PeakCandidate
    from memo.search import Request

OFFLOAD = "--optimizer-offload"
MOST_TIMES = 64
"""Largest factor that is tried: of the GPUs (of one node, if fewer were asked for), and by which the sequence is divided."""
_WEIGHTS = frozenset({MemoryUse.WEIGHTS, MemoryUse.GRADIENTS, MemoryUse.OPTIMIZER, MemoryUse.GATHERED, MemoryUse.CAST})
"""Bytes that follow from weights, whatever the length."""


class _Item(enum.Enum):
    """Items of a GPU's memory that different changes make smaller."""

    WEIGHTS = enum.auto()
    HEAD = enum.auto()
    LAYERS = enum.auto()


def explain_misfit(request: Request, misfit: DoesNotFit, changes: list[str], *, as_json: bool) -> DoesNotFit:
    """Prints a GPU's memory under the plan that lacks least, and returns the error that says what to change.

    Args:
        request: the request.
        misfit: what planning it raised.
        changes: flags that each make a plan fit.
        as_json: print one object instead of the table.
    """
    error = misfit.with_message(_message(request, misfit, changes))
    if as_json:
        memory = memory_summary(misfit.problem, misfit.memory)
        found = {"status": "infeasible", "message": str(error), "memory": memory, "fits": changes}
        print(json.dumps({**found, "least_budgets_bytes": misfit.least_bytes}))
    else:
        print(f"{memory_table(misfit.problem, misfit.memory)}\n")
    return error


def changes_that_fit(
    request: Request, misfit: DoesNotFit, *, say: Callable[[str], None], shortens: bool = True
) -> list[str]:
    """Flags that each make a plan fit by itself, the one that asks for least first; the smallest value of each.

    Of changes that take more GPUs each is named that takes fewer than those before it. Where none fits by itself, changes
    are combined: first without a shorter sequence, and with one only where nothing else fits. Where the logits are most of
    the memory, and a loss without them is not enough, all other changes come with it.

    Args:
        request: the request.
        misfit: what planning it raised.
        say: is told what is tried.
        shortens: whether the sequence may become shorter.
    """
    trial = _Trial(request, say)
    singles: list[Request] = []
    now, fewest = request.layout.gpus, math.inf
    for options in _changes(trial.without_logits_where_most()):
        changed = trial.first(other for other in options if other.layout.gpus <= now or other.layout.gpus < fewest)
        if changed is not None:
            singles.append(changed)
            fewest = min(fewest, changed.layout.gpus) if changed.layout.gpus > now else fewest
    combined = None if singles else trial.combined()
    shorter = trial.first(_shorter(request)) if shortens else None
    if shortens and combined is None and shorter is None and not singles:
        combined = trial.combined(shortens=True)
    offloaded = None if request.config is None else dataclasses.replace(request, optimizer_offload=True)
    offloaded = None if request.optimizer_offload or offloaded is None else trial.first([offloaded])
    found = [_flags(request, changed) for changed in (*singles, combined, shorter, offloaded) if changed is not None]
    for tier, there in (("device", request.machine.device_bytes), ("host", request.machine.host_bytes)):
        least = misfit.least_bytes.get(tier)
        if least is not None and least <= there:
            found.append(f"--{tier} {format_bytes(least, up=True).replace(' ', '')}")
    return found


def described(request: Request, changes: Sequence[str]) -> str:
    """The changes in words."""
    note = f" ({request.offload_note})" if request.offload_note else ""
    return " or ".join(f"{flags}{note}" if flags == OFFLOAD else flags for flags in changes)


class _Trial:
    """Tries changes of a request. A model of transformers is not recorded at another length in vain."""

    def __init__(self, request: Request, say: Callable[[str], None]) -> None:
        self._request = request
        self._say = say

    def without_logits_where_most(self) -> Request:
        """The request; without logits where they are the largest item of the memory, and it is not enough to do without."""
        without = self._request.without_logits()
        if without is None or not self._weights_fit(self._request):
            return self._request
        nbytes = _items(self._request)
        is_most = max(nbytes, key=lambda item: nbytes[item]) is _Item.HEAD
        return without if is_most and not self.fits(without) else self._request

    def fits(self, changed: Request) -> bool:
        """Whether a plan fits."""
        self._say(f"trying {_flags(self._request, changed) or 'the request'}")
        try:
            return self._weights_fit(changed) and changed.fits()
        except UsageError:  # the layout does not divide the model
            return False

    def first(self, options: Iterable[Request]) -> Request | None:
        """The first that fits of ever larger changes, each of which takes less memory than those before it."""
        possible = [changed for changed in options if self._weights_fit(changed)]
        at = bisect.bisect_left(possible, True, key=self.fits)
        return possible[at] if at < len(possible) else None

    def combined(self, *, shortens: bool = False) -> Request | None:
        """Changes that fit together: as long as none does, one more of what makes the largest item of the memory smaller.

        Args:
            shortens: whether the sequence may become shorter.
        """
        changed: Request | None = self._request
        while changed is not None and not self.fits(changed):
            changed = next(
                (more for more in self._smaller(changed, shortens=shortens) if self._is_possible(more)), None
            )
        return None if changed is None else self._fewest(changed)

    def _smaller(self, request: Request, *, shortens: bool) -> Iterator[Request]:
        """Single changes for each item of the memory, those of the largest item first; weights first if they do not fit."""
        without_logits = request.without_logits()
        most = _most_gpus(self._request)
        cp, tp, ep, pp = (_more_ranks(request, name, most_gpus=most) for name in ("cp", "tp", "ep", "pp"))
        changes: dict[_Item, list[Iterable[Request]]] = {
            _Item.WEIGHTS: [_more_gpus(request), tp, ep, pp],
            _Item.HEAD: [[] if without_logits is None else [without_logits], cp, tp],
            _Item.LAYERS: [cp, tp],
        }
        nbytes, fit = _items(request), self._weights_fit(request)
        for item in sorted(nbytes, key=lambda item: -nbytes[item]) if fit else [_Item.WEIGHTS]:
            for options in changes[item]:
                yield from itertools.islice(options, 1)
        if shortens and fit:
            yield from itertools.islice(_shorter(request), 1)

    def _fewest(self, changed: Request) -> Request:
        """Returns the request less changes of the layout that the fit does not need, and on the fewest GPUs."""
        was = self._request
        for name in ("tokens", "tp", "ep", "pp", "cp"):
            less = changed.on(**{name: getattr(was.layout, name)})
            changed = less if less != changed and self.fits(less) else changed
        counts = gpu_counts(_step(changed.layout), was.machine.gpus_per_node)
        fewer = (changed.on(gpus=gpus) for gpus in counts if was.layout.gpus <= gpus < changed.layout.gpus)
        return next((less for less in fewer if self.fits(less)), changed)

    def _is_possible(self, changed: Request) -> bool:
        if changed.layout.gpus > _most_gpus(self._request):
            return False
        try:
            changed.problem(changed.tiles[-1])
        except UsageError:  # the layout does not divide the model
            return False
        return True

    def _weights_fit(self, changed: Request) -> bool:
        """Whether weights alone leave room, as they do at any length: here at one that the request has been planned at."""
        asked = self._request.layout
        try:
            nbytes = max(
                _weights(place) for place in _places(changed.on(tokens=asked.tokens // asked.cp * changed.layout.cp))
            )
        except UsageError:  # the layout does not divide the model
            return False
        return nbytes <= changed.budgets.device_bytes


def _places(request: Request) -> Iterator[PeakCandidate]:
    """Where a GPU's memory may peak."""
    problem = request.problem(request.tiles[-1])
    for stage in problem.stages:
        yield from device_peak_candidates(stage)


def _items(request: Request) -> dict[_Item, int]:
    """Bytes that every plan holds where they are most."""
    fullest = max(_places(request), key=lambda place: place.resident_bytes)
    items = {_Item.WEIGHTS: _weights(fullest), _Item.HEAD: fullest.resident.get(MemoryUse.HEAD, 0)}
    return {**items, _Item.LAYERS: fullest.resident_bytes - sum(items.values())}


def _weights(place: PeakCandidate) -> int:
    return sum(nbytes for use, nbytes in place.resident.items() if use in _WEIGHTS)


def _flags(request: Request, changed: Request) -> str:
    """Flags that turn the command line of `request` into that of `changed`."""
    found = ["--loss-without-logits"] if changed.config is not request.config else []
    found += [OFFLOAD] if changed.optimizer_offload and not request.optimizer_offload else []
    for name in ("gpus", "tp", "cp", "pp", "ep"):
        number = getattr(changed.layout, name)
        found += [f"--{name} {number}"] if number != getattr(request.layout, name) else []
    found += ["--zero 3"] if changed.zero != request.zero else []
    found += [f"--seq {format_tokens(changed.layout.tokens)}"] if changed.layout.tokens != request.layout.tokens else []
    return " ".join(found)


def _changes(request: Request) -> Iterator[Iterable[Request]]:
    """Changes of a named model's request, without shorter sequences: of each kind ever larger ones."""
    if request.config is None:
        return
    without_logits = request.without_logits()
    if without_logits is not None:
        yield [without_logits]
    if request.zero < 3 and request.layout.replicas > 1:
        yield [dataclasses.replace(request, zero=3)]
    yield _more_gpus(request)
    for name in ("tp", "cp"):
        yield _more_ranks(request, name, most_gpus=_most_gpus(request))


def _most_gpus(request: Request) -> int:
    return MOST_TIMES * max(request.layout.gpus, request.machine.gpus_per_node)


def gpu_counts(step: int, gpus_per_node: int) -> Iterator[int]:
    """1, 2, 4, 8 and so on in one node, then whole nodes: those that `step` divides."""
    counts = [1 << power for power in range(20) if 1 << power < gpus_per_node] + [gpus_per_node]
    nodes = [nodes * gpus_per_node for nodes in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)]
    found = sorted({gpus for gpus in (step, *counts, *nodes) if gpus >= step and gpus % step == 0})
    yield from found


def _more_gpus(request: Request) -> Iterator[Request]:
    layout = request.layout
    for gpus in gpu_counts(_step(layout), request.machine.gpus_per_node):
        if layout.gpus < gpus <= _most_gpus(request):
            yield dataclasses.replace(request.on(gpus=gpus), zero=3)


def _more_ranks(request: Request, name: str, *, most_gpus: int) -> Iterator[Request]:
    """More ranks of one kind of parallelism, those of tensors and contexts within a node, on more GPUs if it takes them."""
    layout, node = request.layout, request.machine.gpus_per_node
    ranks = getattr(layout, name)
    most = {"tp": node // layout.cp, "cp": node // layout.tp}.get(name, MOST_TIMES * ranks)
    sizes = [ranks * times for times in _powers(most // ranks)]
    if name == "pp":
        layers = 0 if request.config is None or request.stage_layers else request.config.layers
        sizes = [*(size for size in sizes if size < layers), *([layers] if layers > ranks else [])]
    for size in sizes:
        step = _step(layout) // ranks * size
        unit = step if node % step == 0 else math.lcm(step, node)
        gpus = (
            layout.gpus if layout.gpus % step == 0 else min(-(-layout.gpus // unit), max(most_gpus // unit, 1)) * unit
        )
        yield request.on(gpus=gpus, **{name: size})


def _shorter(request: Request) -> Iterator[Request]:
    for times in _powers(MOST_TIMES):
        tokens = request.layout.tokens // times
        if tokens * times == request.layout.tokens:
            yield request.on(tokens=tokens)


def _step(layout: StepLayout) -> int:
    """GPUs of one replica, of which the number of GPUs is a multiple."""
    return layout.tp * layout.cp * layout.pp * layout.ep


def _powers(most: int) -> Iterator[int]:
    times = 2
    while times <= most:
        yield times
        times *= 2


def _message(request: Request, misfit: DoesNotFit, changes: list[str]) -> str:
    signature, memory = misfit.problem.profile.signature, misfit.memory
    words = f"no plan fits: {signature.model} in {signature.dtype} at {format_tokens(signature.tokens)} tokens: "
    words += _largest(memory, misfit.problem.budgets.device_bytes)
    if changes:
        words += f"; it fits with {described(request, changes)}"
    elif request.config is not None:
        words += (
            f"; no change that was tried fits, alone or together: up to {_most_gpus(request)} GPUs, more ranks of each"
        )
        words += " kind of parallelism, a loss without logits and a shorter sequence"
    return f"{words}; the smallest device budget that fits is {format_bytes(misfit.least_bytes['device'], up=True)}"


def _largest(memory: DeviceMemory, budget: int) -> str:
    """The largest item of a GPU's memory against its budget."""
    static, given = memory.static_bytes, f"{format_bytes(budget, down=True)}"
    if static > budget:
        states = f"weights, gradients and optimizer state take {format_bytes(static)} before any activation"
        return f"{states}, and a GPU's budget is {given}"
    instant = f"at {memory.where}" + (f", {memory.phase}" if memory.phase else "")
    use = max(memory.uses, key=lambda use: memory.uses[use])
    largest, nbytes = use_name(use), memory.uses[use]
    if static > nbytes:
        largest, nbytes = "weights, gradients and optimizer state", static
    needed = format_bytes(memory.nbytes, up=True)
    return f"{needed} are needed {instant}, {format_bytes(nbytes)} of them for {largest}, and a GPU's budget is {given}"
