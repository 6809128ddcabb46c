"""Candidates for the device's memory peak in a stage's step.

Owns the counts: which layers are whole on the device at a candidate, and in how many microbatches each of the others is
held. A candidate does not know the plan of a layer, so that the linear program and the prediction use the same rows;
`stage_memory` puts a plan in, and says by use what the device holds at the highest of them.

Note [One whole layer]. While layer i runs, in either direction, the device holds static bytes, what the
embedding has saved, the kept bytes of layers j < i-1, and two rounding buffers: layer i whole, which is all that autograd
saves and what its recompute is given besides, and all that layer i-1 saves at its point. What that one recomputes is
dropped when its forward ends, and is there again when its own backward begins. While the head runs, layer n-1 is there
as layer i-1 is. Of every other microbatch in flight the kept bytes are there. Where copies do
not overlap with compute, layer i-1 has left, or is not back yet.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from memo.mip.inputs.pipeline_schedules import Pass

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from memo.mip.activation.in_flight import SchedulePoint
    from memo.mip.activation.plan import ActivationProblem, LayerPlan
    from memo.mip.activation.stage_view import StageView
    from memo.mip.inputs.profile import EmbeddingOrHeadProfile, LayerProfile

    IntArray = NDArray[np.int64]

LIKELY = 2
"""Moments of each kind that are looked at, by each of two orders, where only likely peaks are asked for."""


class MemoryUse(enum.StrEnum):
    """Use of a byte on the device; every byte has one."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    """Master weights and moments."""
    GATHERED = "gathered_weights"
    """Whole weights of sharded ones, and their gradients until they are reduced."""
    CAST = "cast_weights"
    """Copies of weights in the number format of matrix products."""
    EMBEDDING = "embedding"
    """What it saves for the step, and its transients where it runs."""
    HEAD = "head"
    """What it saves between its passes, and logits and transients where it runs."""
    SAVED = "saved_tensors"
    """What layers save and the plan keeps on the device."""
    ROUNDING = "rounding_buffers"
    """What the running layers save beyond that: bytes on their way out, or back, or recomputed."""
    RECOMPUTE = "recompute"
    """Bytes that a recompute is given, and holds."""
    TRANSIENT = "transients"
    """Tensors of the running layer that nothing saves."""
    MESSAGES = "messages"
    """Buffers of a pipeline's messages in flight: activations and their gradients, of all microbatches that are received."""
    OTHER = "other"
    """Libraries' memory, and static bytes that a profile does not tell apart."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes on the device of one rank of a stage, at the instant when they are most."""

    stage: int
    where: str
    """What runs, such as `layer 29` or `the head`."""
    phase: str
    """`forward`, `backward` or `recompute` of a layer; empty for the model's ends."""
    uses: Mapping[MemoryUse, int]
    """Bytes by use, in the order of `MemoryUse`, without those that have none."""

    @property
    def nbytes(self) -> int:
        """Sum over all uses: the stage's peak."""
        return sum(self.uses.values())

    @property
    def static_bytes(self) -> int:
        """Bytes that are there before any activation, without messages."""
        return sum(
            self.uses.get(use, 0)
            for use in (MemoryUse.WEIGHTS, MemoryUse.GRADIENTS, MemoryUse.OPTIMIZER, MemoryUse.CAST, MemoryUse.OTHER)
        )


class _Residence(enum.IntEnum):
    """Form in which one microbatch's layer is on the device."""

    KEPT = 0
    WHOLE = 1
    """Where a recompute of it may be given bytes: these; what autograd saves is in `resident`."""
    SAVED = 2
    """Before or after it runs: what it saves at its point, of which the least of any point is in `resident`."""
    UNMOVED = 3
    """All of it but the moved bytes."""
    RECOMPUTING = 4
    """Beside being whole: what the recompute holds."""
    ABSENT = 5
    """Saved bytes that are absent while its backward runs in one piece, which never holds all of it; subtracted."""


_LayerBytes = dict[_Residence, Sequence[float]]
"""Bytes of each layer of a stage in each form."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeakCandidate:
    """A point of a stage's step at which the device's memory may peak."""

    name: str
    phase: str
    resident: Mapping[MemoryUse, int]
    """Bytes that do not depend on the plan: static ones, rounding buffers, transients, embedding and head."""
    counts: tuple[tuple[int, ...], ...]
    """Number of microbatches that hold each layer of the stage, by `_Residence`."""
    running: tuple[int, ...]
    """For each layer how many hold rounding buffers of it in `resident`: all that autograd saves, or the least saved."""

    @property
    def kept(self) -> tuple[int, ...]:
        """For each layer of the stage the number of microbatches that hold only its kept bytes."""
        return self.counts[_Residence.KEPT]

    @property
    def unmoved(self) -> tuple[int, ...]:
        """For each layer the number that hold all of it but the moved bytes."""
        return self.counts[_Residence.UNMOVED]

    @property
    def resident_bytes(self) -> int:
        """Sum of `resident`."""
        return sum(self.resident.values())

    def nbytes(self, layers: _LayerBytes) -> float:
        """Bytes on the device, given the bytes of each layer by kind."""
        saved = self._sum(layers, _Residence.KEPT, _Residence.SAVED, _Residence.UNMOVED)
        recomputed = self._sum(layers, _Residence.WHOLE, _Residence.RECOMPUTING)
        return self.resident_bytes + saved + int(recomputed) + int(self._sum(layers, _Residence.ABSENT))

    def uses(self, layers: _LayerBytes) -> dict[MemoryUse, int]:
        """Returns the bytes by use, which add up to `nbytes` rounded to a byte."""
        uses = dict.fromkeys(MemoryUse, 0) | dict(self.resident)
        kept = sum(count * nbytes for count, nbytes in zip(self.running, layers[_Residence.KEPT], strict=True) if count)
        uses[MemoryUse.ROUNDING] += round(self._sum(layers, _Residence.SAVED)) - round(kept)
        uses[MemoryUse.ROUNDING] += int(self._sum(layers, _Residence.ABSENT))
        uses[MemoryUse.RECOMPUTE] += int(self._sum(layers, _Residence.WHOLE, _Residence.RECOMPUTING))
        uses[MemoryUse.SAVED] += round(self.nbytes(layers)) - sum(uses.values())
        return {use: nbytes for use, nbytes in uses.items() if nbytes}

    def _sum(self, layers: _LayerBytes, *forms: _Residence) -> float:
        """Sum of each layer's count times its bytes, in these forms."""
        pairs = ((self.counts[how], layers[how]) for how in forms)
        return sum(n * nbytes for counts, each in pairs for n, nbytes in zip(counts, each, strict=True) if n)


@functools.lru_cache(maxsize=96)
def device_peak_candidates(stage: StageView, *, likely_only: bool = False) -> tuple[PeakCandidate, ...]:
    """Lists the candidates of a stage: for each moment the embedding, each layer and the head, in forward order.

    Args:
        stage: the stage.
        likely_only: a few candidates where the peak is likely: of the moments those with most in flight, and of their
            layers the first and the last one that run.
    """
    moments: Sequence[SchedulePoint] = stage.pipeline.moments(stage.number)
    if likely_only and len(moments) > LIKELY:
        moments = _likely(moments)
    return tuple(
        candidate
        for moment in moments
        for candidate in _MomentPeaks(stage, moment).candidates(turn_ends_only=likely_only)
    )


@functools.lru_cache(maxsize=96)
def grouped_peak_candidates(stage: StageView, sizes: tuple[int, ...]) -> tuple[list[str], IntArray, IntArray]:
    """Candidates of a stage's peak, where layers in groups of these sizes share a plan.

    Returns:
        Of each its name, the bytes that do not depend on the plan, and how many layers of each group it holds in each form
        of `_Residence`, times microbatches.
    """
    import numpy as np

    candidates = device_peak_candidates(stage)
    starts = [0, *itertools.accumulate(sizes[:-1])]
    counts = np.add.reduceat(np.array([one.counts for one in candidates]), starts, axis=2).swapaxes(1, 2)
    return [one.name for one in candidates], np.array([one.resident_bytes for one in candidates]), counts


def _likely(moments: Sequence[SchedulePoint]) -> list[SchedulePoint]:
    """Moments of each kind with most in flight, and with most between the halves of a backward."""
    found: dict[SchedulePoint, None] = {}
    for kind in Pass:
        own = [moment for moment in moments if moment.kind is kind]
        by_all = sorted(own, key=lambda moment: -sum(moment.waiting) - sum(moment.between))
        by_between = sorted(own, key=lambda moment: (-sum(moment.between), -sum(moment.waiting)))
        found |= dict.fromkeys((*by_all[:LIKELY], *by_between[:LIKELY]))
    return list(found)


def stage_memory(stage: StageView, plans: Sequence[LayerPlan]) -> DeviceMemory:
    """Says by use what one rank of a stage holds at its peak.

    Args:
        stage: the stage.
        plans: plan of each layer of the model.
    """
    layers = _layer_bytes(stage.layers, [plans[index] for index in stage.indices])
    peak = max(device_peak_candidates(stage), key=lambda place: place.nbytes(layers))
    return DeviceMemory(stage=stage.number, where=peak.name, phase=peak.phase, uses=peak.uses(layers))


def room_in_forward(problem: ActivationProblem, plans: Sequence[LayerPlan]) -> list[int]:
    """Bytes that the device holds less, by layer, while its forward runs than at the stage's peak; in any microbatch."""
    found = [0] * len(plans)
    for stage in problem.stages:
        layers = _layer_bytes(stage.layers, [plans[index] for index in stage.indices])
        held: dict[str, float] = {}
        peak = 0.0
        for place in device_peak_candidates(stage):
            nbytes = place.nbytes(layers)
            peak = max(peak, nbytes)
            if place.phase == "forward":
                held[place.name] = max(held.get(place.name, 0.0), nbytes)
        for index in stage.indices:
            found[index] = int(peak - held[_name(index)])
    return found


def highest_memory(problem: ActivationProblem, plans: Sequence[LayerPlan]) -> DeviceMemory:
    """What a rank of the stage with the highest peak holds then; of equal stages the first."""
    return max((stage_memory(stage, plans) for stage in problem.stages), key=lambda memory: memory.nbytes)


def _layer_bytes(layers: Sequence[LayerProfile], plans: Sequence[LayerPlan]) -> _LayerBytes:
    """Bytes of these layers under their plans, beyond what a candidate counts without a plan."""
    saved = [plan.saved_bytes(layer) for layer, plan in zip(layers, plans, strict=True)]
    extra = [plan.beside_bytes(layer) for layer, plan in zip(layers, plans, strict=True)]
    return {
        _Residence.KEPT: [nbytes * plan.kept for nbytes, plan in zip(saved, plans, strict=True)],
        _Residence.WHOLE: extra,
        _Residence.SAVED: [nbytes - layer.least_saved_bytes for nbytes, layer in zip(saved, layers, strict=True)],
        _Residence.UNMOVED: [
            layer.full_bytes + given - nbytes * (plan.host + plan.disk)
            for layer, plan, nbytes, given in zip(layers, plans, saved, extra, strict=True)
        ],
        _Residence.RECOMPUTING: [plan.held_bytes(layer) for layer, plan in zip(layers, plans, strict=True)],
        _Residence.ABSENT: [plan.absent_bytes(layer) for layer, plan in zip(layers, plans, strict=True)],
    }


def _name(layer: int) -> str:
    return f"layer {layer}"


class _Tally:
    """Running sum of the bytes on the device."""

    def __init__(self, layers: Sequence[LayerProfile], resident: Mapping[MemoryUse, int]) -> None:
        import numpy as np  # here, since a manager with a fixed alpha imports this module and needs torch alone

        self._resident = dict(resident)
        self._layers = layers
        self._running = np.zeros(len(layers), np.int64)
        self._counts = np.zeros((len(_Residence), len(layers)), np.int64)

    def add(self, numbers: int | range, how: _Residence, times: int = 1) -> None:
        """Adds layers `times` times; negative removes them."""
        numbers = range(numbers, numbers + 1) if isinstance(numbers, int) else numbers
        if how not in (_Residence.WHOLE, _Residence.SAVED):
            self._counts[how, numbers.start : numbers.stop] += times
            return
        for number in numbers:
            layer, saved = self._layers[number], how is _Residence.SAVED
            self._running[number] += times
            self.hold({MemoryUse.ROUNDING: times * (layer.least_saved_bytes if saved else layer.full_bytes)})
            if saved or any(point.beside_bytes for point in layer.points):
                self._counts[how, number] += times

    def hold(self, nbytes: Mapping[MemoryUse, int]) -> None:
        """Adds bytes that do not depend on the plan."""
        for use, more in nbytes.items():
            self._resident[use] = self._resident.get(use, 0) + more

    def turn(self, number: int, before: _Residence, after: _Residence) -> None:
        """Changes the form of one layer."""
        self.add(number, before, -1)
        self.add(number, after)

    def copy(self) -> _Tally:
        twin = _Tally(self._layers, self._resident)
        twin._running[:] = self._running
        twin._counts[:] = self._counts
        return twin

    def candidate(self, name: str, phase: str) -> PeakCandidate:
        counts, running = tuple(map(tuple, self._counts.tolist())), tuple(self._running.tolist())
        return PeakCandidate(name=name, phase=phase, resident=self._resident, counts=counts, running=running)


class _MomentPeaks:
    """One moment: the calls besides the running one, and the running chunk layer by layer."""

    def __init__(self, stage: StageView, moment: SchedulePoint) -> None:
        self._moment = moment
        self._indices, self._layers, self._chunks = stage.indices, stage.layers, stage.numbers
        self._embedding, self._head = stage.problem.profile.embedding, stage.problem.profile.head
        self._starts, ends, static = stage.has_embedding, stage.has_head, stage.static
        self._own = self._chunks[moment.chunk]
        self._overlaps = stage.problem.overlap
        self._has_head = ends and self._own is self._chunks[-1]
        resident = {
            MemoryUse.WEIGHTS: static.weights,
            MemoryUse.GRADIENTS: static.gradients,
            MemoryUse.OPTIMIZER: static.optimizer,
            MemoryUse.GATHERED: static.gathered,
            MemoryUse.CAST: static.cast,
            MemoryUse.MESSAGES: static.messages,
            MemoryUse.OTHER: static.other,
        }
        if self._starts:
            resident[MemoryUse.EMBEDDING] = self._embedding.saved_bytes * moment.held[0]
        if ends:
            resident[MemoryUse.HEAD] = self._head.saved_bytes * (moment.waiting[-1] + moment.between[-1])
        self._others = self._tally(resident)

    def _tally(self, resident: Mapping[MemoryUse, int]) -> _Tally:
        """Sum of all calls but the running one, where none of their layers is whole."""
        tally, moment = _Tally(self._layers, resident), self._moment
        for waiting, between, chunk in zip(moment.waiting, moment.between, self._chunks, strict=True):
            tally.add(chunk, _Residence.KEPT, waiting)
            tally.add(chunk, _Residence.UNMOVED, between)
            if between:
                tally.hold({MemoryUse.TRANSIENT: between * sum(self._layers[number].between_bytes for number in chunk)})
        return tally

    # Note [Transients]: on top come, in a forward, the layer's transients of forward; in a backward those of backward, and
    # where a part is recomputed (of a split backward in the first half) what the recompute holds besides, with which it is
    # at least a forward; while the embedding or the head runs, their own. A recompute in parts never has all of the layer
    # there: less by what is absent then, but not where a split backward needs all of it for its second half.
    #
    # Note [Between the halves]: of a split backward each half takes half of its time, the first one the recompute too.
    # Between them a call holds what has not moved, recomputed or not, and the gradients of its results; what has moved
    # leaves again, and returns for the second half, which runs from the first layer on.

    def candidates(self, *, turn_ends_only: bool) -> Iterator[PeakCandidate]:
        """Candidates within the running chunk."""
        kind, own = self._moment.kind, self._own
        second_half, forward = kind is Pass.WEIGHT, kind is Pass.FORWARD
        if self._starts and self._moment.chunk == 0 and kind in (Pass.BACKWARD, Pass.FORWARD):
            yield self._at("the embedding", _of_end(self._embedding, MemoryUse.EMBEDDING), {}, ends_turn=True)
        halves = kind in (Pass.INPUT, Pass.WEIGHT)
        heads_own = self._head.saved_bytes if self._has_head and halves else 0
        for number in dict.fromkeys((own[0], own[-1])) if turn_ends_only else own:
            ends_turn = number == (own[-1] if second_half else own[0])
            resident = {MemoryUse.HEAD: heads_own, MemoryUse.TRANSIENT: 0}
            if halves:  # gradients of the layers that the first half has been through, and the second not yet
                resident[MemoryUse.TRANSIENT] = sum(layer.between_bytes for layer in self._layers[number : own.stop])
            layer, name, running = self._layers[number], _name(self._indices[number]), self._running(number)
            if forward:
                resident = _with(resident, layer.forward_transient_bytes, layer.forward_gathered_bytes)
                left = number > own[0]
                yield self._at(name, resident, running, phase="forward", ends_turn=ends_turn, latest_left=left)
                continue
            resident = _with(resident, layer.backward_transient_bytes, layer.backward_gathered_bytes)
            absent = number if not halves and any(point.absent_bytes for point in layer.points) else None
            yield self._at(name, resident, running, phase="backward", ends_turn=ends_turn, absent=absent)
            if not second_half and (layer.repeated_bytes or any(point.held_bytes for point in layer.points)):
                yield self._at(
                    name, resident, running, phase="recompute", ends_turn=ends_turn, absent=absent, recomputing=number
                )
        if self._has_head:
            running = {} if second_half else self._running(own.stop)
            resident = _of_end(self._head, MemoryUse.HEAD)
            resident[MemoryUse.HEAD] += self._head.saved_bytes
            yield self._at("the head", resident, running, ends_turn=second_half, latest_left=forward)

    def _running(self, number: int) -> Mapping[_Residence, range]:
        """Layers of the running call by their form while layer `number` runs, or after the last one the head."""
        own, kind = self._own, self._moment.kind
        if kind is Pass.WEIGHT:
            end = min(number + 2, own.stop)
            return {_Residence.WHOLE: range(number, end), _Residence.UNMOVED: range(end, own.stop)}
        before = max(own.start, number - 1) if self._overlaps or number == own.stop else number
        end = min(number + 1, own.stop)
        return {
            _Residence.KEPT: range(own.start, before),
            _Residence.SAVED: range(before, number),
            _Residence.WHOLE: range(number, end),
            _Residence.UNMOVED: range(end, own.stop if kind is Pass.INPUT else end),
        }

    def _at(
        self,
        name: str,
        resident: Mapping[MemoryUse, int],
        running: Mapping[_Residence, range],
        *,
        phase: str = "",
        ends_turn: bool = False,
        absent: int | None = None,
        recomputing: int | None = None,
        latest_left: bool = False,
    ) -> PeakCandidate:
        """The candidate of one place; `latest_left`: the last layer of the forward before has left meanwhile."""
        tally = self._others.copy()
        tally.hold(resident)
        if self._moment.whole_chunk is not None and not latest_left:
            tally.turn(self._chunks[self._moment.whole_chunk][-1], _Residence.KEPT, _Residence.SAVED)
        for how, numbers in running.items():
            tally.add(numbers, how)
        if recomputing is not None:
            tally.add(recomputing, _Residence.RECOMPUTING)
        if absent is not None:
            tally.add(absent, _Residence.ABSENT, -1)
        if self._moment.ahead is not None and (ends_turn or self._moment.kind is Pass.FORWARD):
            chunk, second_half = self._moment.ahead
            number = self._chunks[chunk][0 if second_half else -1]
            if number < len(self._layers) - 1:  # the last layer does not move, and needs no reading
                forms = (_Residence.UNMOVED, _Residence.WHOLE) if second_half else (_Residence.KEPT, _Residence.SAVED)
                tally.turn(number, *forms)
        return tally.candidate(name, phase)


def _of_end(end: EmbeddingOrHeadProfile, use: MemoryUse) -> dict[MemoryUse, int]:
    """Transient bytes of an end of the model."""
    return {use: end.transient_bytes - end.gathered_bytes, MemoryUse.GATHERED: end.gathered_bytes}


def _with(resident: Mapping[MemoryUse, int], transient_bytes: int, gathered_bytes: int) -> dict[MemoryUse, int]:
    """These bytes and a layer's transient ones, of which some are gathered weights."""
    transient = resident[MemoryUse.TRANSIENT] + transient_bytes - gathered_bytes
    return {**resident, MemoryUse.TRANSIENT: transient, MemoryUse.GATHERED: gathered_bytes}
