"""The places in a stage's step where the device's bytes may peak, by the rules of `memo.mip.activation.plan`.

Owns which layers stand whole there and how often each of the others is held; what a plan makes of a layer is not known
here, so that the program and the prediction read the same rows.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from memo.mip.activation.plan import chunk_layers, stage_layers
from memo.mip.inputs.pipeline_schedules import Kind

if TYPE_CHECKING:
    from memo.mip.activation.in_flight import Moment
    from memo.mip.activation.plan import ActivationProblem
    from memo.mip.inputs.profile import LayerProfile

__all__ = ["PeakCandidate", "device_peak_candidates", "stage_static_bytes"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeakCandidate:
    """A place in a stage at which the device's bytes have a peak of their own."""

    name: str
    resident_bytes: int
    """What stands there whatever the plan is: rounding buffers, transients, what the ends hold."""
    kept: tuple[int, ...]
    """By layer of the stage: in how many microbatches only its kept bytes are there."""
    whole: tuple[int, ...]
    """By layer: in how many it stands whole, where there is then also something that its recompute is given."""
    still: tuple[int, ...]
    """By layer: in how many all of that is there but for what has moved."""

    def nbytes(self, *, kept: Sequence[float], beside: Sequence[float], still: Sequence[float]) -> float:
        """On the device, with so many bytes of each layer."""
        counted = ((self.kept, kept), (self.whole, beside), (self.still, still))
        return self.resident_bytes + sum(
            count * nbytes for counts, each in counted for count, nbytes in zip(counts, each, strict=True) if count
        )

    def dominates(self, other: PeakCandidate) -> bool:
        """The other one holds nothing that this one does not."""
        mine = (*self.kept, *self.whole, *self.still, self.resident_bytes)
        others = (*other.kept, *other.whole, *other.still, other.resident_bytes)
        return all(a >= b for a, b in zip(mine, others, strict=True))


def stage_static_bytes(problem: ActivationProblem, stage: int) -> int:
    """Parameters, gradients and optimizer state of one rank of a stage."""
    layers, own = problem.profile.layer_profiles(), stage_layers(problem, stage)
    static = sum(layers[index].static_bytes for index in own)
    if own[0] == 0:
        static += problem.profile.embedding.static_bytes
    if own[-1] == len(layers) - 1:
        static += problem.profile.head.static_bytes
    return static


def device_peak_candidates(problem: ActivationProblem, stage: int) -> list[PeakCandidate]:
    """Moment by moment, and within each in forward order: the embedding, each layer, the head."""
    moments = problem.pipeline.moments(stage)
    return [position for moment in moments for position in _Place(problem, stage, moment).positions()]


class _As(enum.Enum):
    """In which way one microbatch's layer is on the device."""

    KEPT = enum.auto()
    WHOLE = enum.auto()
    STILL = enum.auto()


class _Tally:
    """What is on the device, as it adds up."""

    def __init__(self, layers: Sequence[LayerProfile], resident_bytes: int) -> None:
        self.resident_bytes = resident_bytes
        self._layers = layers
        self._counts = {how: [0] * len(layers) for how in _As}

    def add(self, number: int, how: _As, times: int = 1) -> None:
        """A layer's bytes come, or go."""
        layer = self._layers[number]
        if how is _As.WHOLE:
            self.resident_bytes += times * layer.full_bytes
            if not any(level.beside_bytes for level in layer.levels):
                return
        self._counts[how][number] += times

    def turn(self, number: int, how: _As) -> None:
        """One that was there in this way stands whole."""
        self.add(number, how, -1)
        self.add(number, _As.WHOLE)

    def copy(self) -> _Tally:
        twin = _Tally(self._layers, self.resident_bytes)
        twin._counts = {how: list(counts) for how, counts in self._counts.items()}
        return twin

    def position(self, name: str) -> PeakCandidate:
        counts = {how.name.lower(): tuple(counts) for how, counts in self._counts.items()}
        return PeakCandidate(name=name, resident_bytes=self.resident_bytes, **counts)


class _Place:
    """One moment: what is there besides the running chunk, and then that chunk layer by layer."""

    def __init__(self, problem: ActivationProblem, stage: int, moment: Moment) -> None:
        self._moment = moment
        self._indices = stage_layers(problem, stage)
        known = problem.profile.layer_profiles()
        self._layers = [known[index] for index in self._indices]
        self._embedding, self._head = problem.profile.embedding, problem.profile.head
        self._starts, ends = self._indices[0] == 0, self._indices[-1] == len(known) - 1
        self._chunks: list[range] = []
        for chunk in chunk_layers(problem, stage):
            first = self._chunks[-1].stop if self._chunks else 0
            self._chunks.append(range(first, first + len(chunk)))
        self._own = self._chunks[moment.chunk]
        self._has_head = ends and self._own is self._chunks[-1]
        static = stage_static_bytes(problem, stage)
        if self._starts:
            static += self._embedding.saved_bytes * moment.held[0]
        if ends:
            static += self._head.saved_bytes * (moment.waiting[-1] + moment.between[-1])
        self._others = self._tally(static)

    def _tally(self, static: int) -> _Tally:
        """Of all calls but the running one."""
        tally, moment = _Tally(self._layers, static), self._moment
        for waiting, between, chunk in zip(moment.waiting, moment.between, self._chunks, strict=True):
            for number in chunk:
                tally.add(number, _As.KEPT, waiting)
                tally.add(number, _As.STILL, between)
                tally.resident_bytes += between * self._layers[number].between_bytes
        if moment.standing is not None:
            tally.turn(self._chunks[moment.standing][-1], _As.KEPT)
        return tally

    def positions(self) -> Iterator[PeakCandidate]:
        """Of the running chunk."""
        kind, own = self._moment.kind, self._own
        second_half = kind is Kind.WEIGHT
        if self._starts and self._moment.chunk == 0 and kind in (Kind.BACKWARD, Kind.FORWARD):
            yield self._at("the embedding", self._embedding.transient_bytes, {})
        halves = kind in (Kind.INPUT, Kind.WEIGHT)
        heads_own = self._head.saved_bytes if self._has_head and halves else 0
        for number in own:
            whole = range(number, number + 2) if second_half else range(number - 1, number + 1)
            ends_turn = number == (own[-1] if second_half else own[0])
            beside = self._layers[number].transient_bytes + heads_own
            if halves:  # gradients of the layers that the first half has been through, and the second not yet
                beside += sum(layer.between_bytes for layer in self._layers[number : own.stop])
            yield self._at(f"layer {self._indices[number]}", beside, self._running(whole), ends_turn=ends_turn)
        if self._has_head:
            running = {} if second_half else self._running(range(own[-1], own.stop))
            yield self._at("the head", self._head.saved_bytes + self._head.transient_bytes, running)

    def _running(self, whole: range) -> Mapping[int, _As]:
        """How the running call's layers are there while these are its rounding buffers."""
        found = {}
        for number in self._own:
            if number in whole:
                found[number] = _As.WHOLE
            elif number < whole.start and self._moment.kind is not Kind.WEIGHT:
                found[number] = _As.KEPT
            elif number >= whole.stop and self._moment.kind in (Kind.INPUT, Kind.WEIGHT):
                found[number] = _As.STILL
        return found

    def _at(self, name: str, nbytes: int, running: Mapping[int, _As], *, ends_turn: bool = False) -> PeakCandidate:
        tally = self._others.copy()
        tally.resident_bytes += nbytes
        for number, how in running.items():
            tally.add(number, how)
        if self._moment.ahead is not None and (ends_turn or self._moment.kind is Kind.FORWARD):
            chunk, second_half = self._moment.ahead
            number = self._chunks[chunk][0 if second_half else -1]
            if number < len(self._layers) - 1:  # the last layer does not move, and needs no reading
                tally.turn(number, _As.STILL if second_half else _As.KEPT)
        return tally.position(name)
