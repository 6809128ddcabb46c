"""Candidates for the device's memory peak in a stage's step, by the rules of `memo.mip.activation.plan`.

Owns the counts: which layers are whole on the device at a candidate, and in how many microbatches each of the others is
held. The plan of a layer is not known here, so that the linear program and the prediction use the same rows.
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
    """A point of a stage's step at which the device's memory may peak."""

    name: str
    resident_bytes: int
    """Bytes that do not depend on the plan: rounding buffers, transients, embedding and head."""
    kept: tuple[int, ...]
    """By layer of the stage: number of microbatches that hold only its kept bytes."""
    whole: tuple[int, ...]
    """By layer: number that hold it whole, where its recompute is then also given bytes."""
    unmoved: tuple[int, ...]
    """By layer: number that hold all of it but the moved bytes."""
    recomputing: tuple[int, ...]
    """By layer: number whose recompute runs."""

    def nbytes(
        self,
        *,
        kept: Sequence[float],
        recompute_extra_bytes: Sequence[float],
        unmoved: Sequence[float],
        held: Sequence[float],
    ) -> float:
        """Bytes on the device, given the bytes of each layer by kind."""
        counted = (
            (self.kept, kept),
            (self.whole, recompute_extra_bytes),
            (self.unmoved, unmoved),
            (self.recomputing, held),
        )
        return self.resident_bytes + sum(
            count * nbytes for counts, each in counted for count, nbytes in zip(counts, each, strict=True) if count
        )

    @property
    def amounts(self) -> tuple[int, ...]:
        """All that it holds; one that holds at least as much of everything as another dominates it."""
        return (self.resident_bytes, *self.kept, *self.whole, *self.unmoved, *self.recomputing)


def stage_static_bytes(problem: ActivationProblem, stage: int) -> int:
    """Bytes of parameters, gradients and optimizer state of one rank of a stage."""
    layers, own = problem.profile.layer_profiles(), stage_layers(problem, stage)
    static = sum(layers[index].static_bytes for index in own)
    if own[0] == 0:
        static += problem.profile.embedding.static_bytes
    if own[-1] == len(layers) - 1:
        static += problem.profile.head.static_bytes
    return static


def device_peak_candidates(problem: ActivationProblem, stage: int) -> list[PeakCandidate]:
    """Lists the candidates of a stage: for each moment the embedding, each layer and the head, in forward order."""
    moments = problem.pipeline.moments(stage)
    return [candidate for moment in moments for candidate in _MomentPeaks(problem, stage, moment).candidates()]


class _Residence(enum.Enum):
    """Form in which one microbatch's layer is on the device."""

    KEPT = enum.auto()
    WHOLE = enum.auto()
    UNMOVED = enum.auto()
    RECOMPUTING = enum.auto()
    """Beside being whole: what the recompute holds."""


class _Tally:
    """Running sum of the bytes on the device."""

    def __init__(self, layers: Sequence[LayerProfile], resident_bytes: int) -> None:
        self.resident_bytes = resident_bytes
        self._layers = layers
        self._counts = {how: [0] * len(layers) for how in _Residence}

    def add(self, number: int, how: _Residence, times: int = 1) -> None:
        """Adds a layer `times` times; negative removes it."""
        layer = self._layers[number]
        if how is _Residence.WHOLE:
            self.resident_bytes += times * layer.full_bytes
            if not any(point.beside_bytes for point in layer.points):
                return
        self._counts[how][number] += times

    def turn(self, number: int, how: _Residence) -> None:
        """Makes one that was there in this form whole."""
        self.add(number, how, -1)
        self.add(number, _Residence.WHOLE)

    def copy(self) -> _Tally:
        twin = _Tally(self._layers, self.resident_bytes)
        twin._counts = {how: list(counts) for how, counts in self._counts.items()}
        return twin

    def candidate(self, name: str) -> PeakCandidate:
        counts = {how.name.lower(): tuple(counts) for how, counts in self._counts.items()}
        return PeakCandidate(name=name, resident_bytes=self.resident_bytes, **counts)


class _MomentPeaks:
    """One moment: the calls besides the running one, and the running chunk layer by layer."""

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
        """Sum of all calls but the running one, where none of their layers is whole."""
        tally, moment = _Tally(self._layers, static), self._moment
        for waiting, between, chunk in zip(moment.waiting, moment.between, self._chunks, strict=True):
            for number in chunk:
                tally.add(number, _Residence.KEPT, waiting)
                tally.add(number, _Residence.UNMOVED, between)
                tally.resident_bytes += between * self._layers[number].between_bytes
        return tally

    def candidates(self) -> Iterator[PeakCandidate]:
        """Candidates within the running chunk."""
        kind, own = self._moment.kind, self._own
        second_half, forward = kind is Kind.WEIGHT, kind is Kind.FORWARD
        if self._starts and self._moment.chunk == 0 and kind in (Kind.BACKWARD, Kind.FORWARD):
            yield self._at("the embedding", self._embedding.transient_bytes, {}, ends_turn=True)
        halves = kind in (Kind.INPUT, Kind.WEIGHT)
        heads_own = self._head.saved_bytes if self._has_head and halves else 0
        for number in own:
            whole = range(number, number + 2) if second_half else range(number - 1, number + 1)
            ends_turn = number == (own[-1] if second_half else own[0])
            resident = heads_own
            if halves:  # gradients of the layers that the first half has been through, and the second not yet
                resident += sum(layer.between_bytes for layer in self._layers[number : own.stop])
            layer, name, running = self._layers[number], f"layer {self._indices[number]}", self._running(whole)
            left = forward and number > own[0]
            yield self._at(name, resident + layer.transient_bytes, running, ends_turn=ends_turn, latest_left=left)
            if kind in (Kind.BACKWARD, Kind.INPUT) and any(point.held_bytes for point in layer.points):
                resident += layer.backward_transient_bytes
                yield self._at(name, resident, running, ends_turn=ends_turn, recomputing=number)
        if self._has_head:
            running = {} if second_half else self._running(range(own[-1], own.stop))
            resident = self._head.saved_bytes + self._head.transient_bytes
            yield self._at("the head", resident, running, ends_turn=second_half, latest_left=forward)

    def _running(self, whole: range) -> Mapping[int, _Residence]:
        """Form of each of the running call's layers while `whole` are its rounding buffers."""
        found = {}
        for number in self._own:
            if number in whole:
                found[number] = _Residence.WHOLE
            elif number < whole.start and self._moment.kind is not Kind.WEIGHT:
                found[number] = _Residence.KEPT
            elif number >= whole.stop and self._moment.kind in (Kind.INPUT, Kind.WEIGHT):
                found[number] = _Residence.UNMOVED
        return found

    def _at(
        self,
        name: str,
        nbytes: int,
        running: Mapping[int, _Residence],
        *,
        ends_turn: bool = False,
        recomputing: int | None = None,
        latest_left: bool = False,
    ) -> PeakCandidate:
        """The candidate of one place; `latest_left`: the last layer of the forward before has left meanwhile."""
        tally = self._others.copy()
        tally.resident_bytes += nbytes
        if self._moment.whole_chunk is not None and not latest_left:
            tally.turn(self._chunks[self._moment.whole_chunk][-1], _Residence.KEPT)
        for number, how in running.items():
            tally.add(number, how)
        if recomputing is not None:
            tally.add(recomputing, _Residence.RECOMPUTING)
        if self._moment.ahead is not None and (ends_turn or self._moment.kind is Kind.FORWARD):
            chunk, second_half = self._moment.ahead
            number = self._chunks[chunk][0 if second_half else -1]
            if number < len(self._layers) - 1:  # the last layer does not move, and needs no reading
                tally.turn(number, _Residence.UNMOVED if second_half else _Residence.KEPT)
        return tally.candidate(name)
