"""Checker's arithmetic for a stage of several chunks: a whole step turn by turn, layer by layer.

Keeps the state of every call's layers, counts the equal ones, and sums them up at each layer, so that it needs no theory of
which moments are fullest. Shares no code with the planner.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memo.mip.activation.check_step import (
    Walk,
    backward_transient_bytes,
    coding_s,
    copy_s,
    is_divided,
    moved,
    recompute_s,
    rounding_bytes,
    saved_bytes,
    sync_s,
    waiting_bytes,
    whole_bytes,
)
from memo.mip.inputs.pipeline_schedules import Kind

if TYPE_CHECKING:
    from memo.mip.activation.plan import ActivationPlan
    from memo.mip.inputs.pipeline_schedules import Turn

__all__ = ["own_layers", "walk_turns"]

_Layer = tuple[int, int, int]
"""Chunk, microbatch, index of the layer."""


class _State(enum.IntEnum):
    """Bytes of a call's layer that are on the device."""

    WHOLE = enum.auto()
    WAITING = enum.auto()
    """Right before or after it runs."""
    KEPT = enum.auto()
    STILL = enum.auto()
    """All but the moved bytes."""


def own_layers(plan: ActivationPlan, stage: int) -> list[int]:
    """Indices of a stage's layers; the last one does not move."""
    return [index for chunk in _chunks(plan, stage) for index in chunk]


def walk_turns(plan: ActivationPlan, stage: int) -> Walk:
    """Walks through all turns of a step."""
    return _Walker(plan, stage).walk()


def _chunks(plan: ActivationPlan, stage: int) -> list[range]:
    """Layer indices of each of a stage's chunks."""
    pipeline, count = plan.problem.pipeline, len(plan.layers)
    if pipeline.own is not None:
        sizes = list(pipeline.own.layers)
    elif pipeline.layers:
        sizes = list(pipeline.layers)
    else:
        parts = pipeline.chunks * pipeline.stages
        sizes = [count // parts + (1 if part < count % parts else 0) for part in range(parts)]
    bounds = [sum(sizes[:part]) for part in range(len(sizes) + 1)]
    return [range(bounds[place], bounds[place + 1]) for place in pipeline.chunk_positions(stage)]


def _next_backwards(turns: Sequence[Turn]) -> list[Turn | None]:
    """For each turn the next backward, or half of one."""
    found: list[Turn | None] = []
    following: Turn | None = None
    for turn in reversed(turns):
        found.append(following)
        following = following if turn.kind is Kind.FORWARD else turn
    return found[::-1]


class _Walker:
    """Walk through one stage's step."""

    def __init__(self, plan: ActivationPlan, stage: int) -> None:
        self._plan, self._pipeline = plan, plan.problem.pipeline
        self._profile = plan.problem.profile
        self._known = self._profile.layer_profiles()
        self._rates = plan.problem.machine_of(stage).lanes
        self._chunks = _chunks(plan, stage)
        self._turns = self._pipeline.turns(stage)
        self._split = {turn.chunk for turn in self._turns if turn.kind is Kind.WEIGHT}
        self._following = _next_backwards(self._turns)
        self._holds: dict[_Layer, _State] = {}
        self._counts: collections.Counter[tuple[int, _State]] = collections.Counter()  # of `_holds`, by index and state
        self._heads = self._embeddings = 0  # microbatches in flight at the ends
        self._gradients = 0  # bytes that wait for a second half
        self._walk = Walk()
        self._last_pass: list[tuple[float, float]] = []  # work, and the reduction of its gradients once a step
        own = [index for chunk in self._chunks for index in chunk]
        self._bytes = {(index, state): self._nbytes(index, state) for index in own for state in _State}
        self._moved = {index: moved(self._known[index], plan.layers[index]) for index in own}
        divided = is_divided([plan.layers[index] for index in own[:-1]])
        self._rounding = [
            rounding_bytes([self._known[index] for index in chunk if index != own[-1]], divided=divided)
            for chunk in self._chunks
        ]
        self._static = sum(self._known[index].static_bytes for index in own)
        self._starts, self._ends = own[0] == 0, own[-1] == len(self._known) - 1
        self._static += self._profile.embedding.static_bytes if self._starts else 0
        self._static += self._profile.head.static_bytes if self._ends else 0
        self._static += plan.problem.message_bytes(stage)

    def walk(self) -> Walk:
        latest: Turn | None = None  # the latest forward, whose last layer is whole
        for at, turn in enumerate(self._turns):
            if turn.kind is Kind.FORWARD:
                self._forward(turn, latest)
                latest = turn
            else:
                latest = None if latest is not None and latest.call == turn.call else latest
                self._backward(turn, at, latest)
        microbatches = self._pipeline.microbatches
        self._walk.clock_s /= microbatches
        self._walk.recompute_s /= microbatches
        self._walk.communication_s /= microbatches
        self._walk.sync_s = sync_s(self._last_pass)
        self._walk.written = sum(disk for _, disk in self._moved.values())
        return self._walk

    def _forward(self, turn: Turn, latest: Turn | None) -> None:
        chunk = self._chunks[turn.chunk]
        out_s = 0.0
        if latest is not None:
            out_s = self._out_s(self._chunks[latest.chunk][-1])
        if chunk[0] == 0:
            self._embeddings += 1
            self._stands(self._profile.embedding.transient_bytes, None)
            embedding = self._profile.embedding
            self._walk.runs(embedding.forward_s, exchange_s=embedding.forward_exchange_s)
        self._walk.runs(0.0, network_s=self._known[chunk[0]].gather_s)
        for index in chunk:
            self._hold((turn.chunk, turn.microbatch, index), _State.WHOLE)
            self._stands(self._transient(index), index)
            layer = self._known[index]
            gather_s = self._known[index + 1].gather_s if index < chunk[-1] else 0.0
            work_s = layer.forward_s + coding_s(layer, self._plan.layers[index])[0]
            self._walk.runs(work_s, exchange_s=layer.forward_exchange_s, network_s=gather_s, copy_s=out_s)
            out_s = self._out_s(index)
            self._hold((turn.chunk, turn.microbatch, index), _State.WAITING)
            if index > chunk[0]:
                self._hold((turn.chunk, turn.microbatch, index - 1), _State.KEPT)
            elif latest is not None:  # copied out beside this first layer
                self._hold((latest.chunk, latest.microbatch, self._chunks[latest.chunk][-1]), _State.KEPT)
        if chunk[-1] == len(self._known) - 1:
            self._heads += 1
            self._stands(self._profile.head.transient_bytes, None)
            head = self._profile.head
            self._walk.runs(head.forward_s, exchange_s=head.forward_exchange_s)
        self._lower_tiers()

    def _backward(self, turn: Turn, at: int, latest: Turn | None) -> None:
        chunk, second_half = self._chunks[turn.chunk], turn.kind is Kind.WEIGHT
        has_head = chunk[-1] == len(self._known) - 1
        order = list(chunk if second_half else reversed(chunk))
        share = 0.5 if turn.chunk in self._split else 1.0
        self._last_pass = []
        self._reach(turn, order[0], exposed=True)
        if has_head:
            if not second_half:
                self._stands(self._profile.head.transient_bytes, None)
                self._head_backward(share)
            self._heads -= turn.kind is Kind.BACKWARD
        reduce_s = 0.0
        for index, following in zip(order, [*order[1:], None], strict=True):
            self._hold((turn.chunk, turn.microbatch, index), _State.WHOLE)
            work_s = share * self._known[index].backward_s + coding_s(self._known[index], self._plan.layers[index])[1]
            if not second_half:
                again_s = recompute_s(self._known[index], self._plan.layers[index])
                self._walk.recompute_s += again_s
                work_s += again_s
            if following is not None:
                copy_s = self._reach(turn, following)
            else:
                copy_s = self._read_ahead(at, latest)
            layer = self._known[index]
            gather_s = 0.0 if following is None or second_half else self._known[following].gather_s
            network_s = reduce_s + gather_s
            exchange_s = share * layer.backward_exchange_s
            seconds = self._walk.runs(work_s, exchange_s=exchange_s, network_s=network_s, copy_s=copy_s)
            reduce_s = 0.0 if turn.kind is Kind.INPUT else layer.reduce_s
            self._last_pass.append((seconds - network_s, layer.sync_s))
            if turn.kind is Kind.INPUT:
                self._gradients += self._known[index].between_bytes
            recomputing = 0.0 if second_half else backward_transient_bytes(self._known[index], self._plan.layers[index])
            self._stands(max(self._transient(index), recomputing), index)
            if second_half:
                self._gradients -= self._known[index].between_bytes
            key = turn.chunk, turn.microbatch, index
            if turn.kind is not Kind.INPUT:
                self._hold(key, None)
            elif index != order[-1] or not self._goes_on(at):
                self._hold(key, _State.STILL)
        self._walk.runs(0.0, network_s=reduce_s)
        if second_half and has_head:
            self._stands(self._profile.head.transient_bytes, None)
            self._head_backward(share)
            self._heads -= 1
        if chunk[0] == 0:
            embedding = self._profile.embedding
            self._stands(embedding.transient_bytes, None)
            self._walk.runs(share * embedding.backward_s, exchange_s=share * embedding.backward_exchange_s)
            self._last_pass.append((share * embedding.backward_s, embedding.sync_s))
            self._embeddings -= turn.kind is not Kind.INPUT

    def _head_backward(self, share: float) -> None:
        head = self._profile.head
        self._walk.runs(share * head.backward_s, exchange_s=share * head.backward_exchange_s)
        self._last_pass.append((share * head.backward_s, head.sync_s))

    def _goes_on(self, at: int) -> bool:
        """Whether the next backward is the second half of this one, so that the first layer stays."""
        following = self._following[at]
        return following is not None and following.call == self._turns[at].call

    def _read_ahead(self, at: int, latest: Turn | None) -> float:
        """Reloads the first layer of the next backward during a turn's last layer; returns its copies' seconds."""
        following = self._following[at]
        if following is None or (latest is not None and following.call == latest.call):
            return 0.0
        chunk = self._chunks[following.chunk]
        index = chunk[0] if following.kind is Kind.WEIGHT else chunk[-1]
        return 0.0 if index == self._chunks[-1][-1] else self._reach(following, index)

    def _reach(self, turn: Turn, index: int, *, exposed: bool = False) -> float:
        """Reloads a layer whose forward has run; returns its copies' seconds, which the clock adds if `exposed`."""
        key = turn.chunk, turn.microbatch, index
        state = self._holds.get(key)
        if state not in (_State.KEPT, _State.STILL):
            return 0.0
        self._hold(key, _State.WAITING if state is _State.KEPT else _State.WHOLE)
        in_s = self._in_s(index)
        if exposed:
            self._walk.clock_s += in_s
        return in_s

    # Bytes.

    def _hold(self, key: _Layer, state: _State | None) -> None:
        """Changes the state of a call's layer; None: it is gone."""
        before = self._holds.pop(key, None)
        if before is not None:
            self._counts[key[2], before] -= 1
        if state is not None:
            self._holds[key] = state
            self._counts[key[2], state] += 1

    def _stands(self, besides: float, layer: int | None) -> None:
        held = self._static + sum(count * self._bytes[which] for which, count in self._counts.items())
        held += self._heads * self._profile.head.saved_bytes + self._embeddings * self._profile.embedding.saved_bytes
        self._walk.stands(held + besides + self._gradients, layer)

    def _nbytes(self, index: int, state: _State) -> float:
        layer, plan = self._known[index], self._plan.layers[index]
        if state in (_State.WHOLE, _State.WAITING):
            return whole_bytes(layer, plan) if state is _State.WHOLE else waiting_bytes(layer, plan)
        saved = saved_bytes(layer, plan)
        return saved * plan.kept if state is _State.KEPT else whole_bytes(layer, plan) - saved * (plan.host + plan.disk)

    def _transient(self, index: int) -> float:
        return max(self._known[index].forward_transient_bytes, self._known[index].backward_transient_bytes)

    def _lower_tiers(self) -> None:
        """Records the peaks of host and disk, which are after a forward."""
        held = [(index, count) for (index, _), count in self._counts.items()]
        self._walk.host = max(self._walk.host, sum(count * self._moved[index][0] for index, count in held))
        self._walk.disk = max(self._walk.disk, sum(count * self._moved[index][1] for index, count in held))
        calls = collections.Counter({chunk[0]: 0 for chunk in self._chunks})  # no backward has begun and not ended
        for index, count in held:
            calls[index] += count
        rounding = sum(calls[chunk[0]] * nbytes for chunk, nbytes in zip(self._chunks, self._rounding, strict=True))
        self._walk.rounding = max(self._walk.rounding, rounding)

    # Time.

    def _out_s(self, index: int) -> float:
        host, disk = self._moved[index]
        return copy_s(host, disk, self._rates.d2h_bytes_per_s, self._rates.disk_write_bytes_per_s)

    def _in_s(self, index: int) -> float:
        host, disk = self._moved[index]
        return copy_s(host, disk, self._rates.h2d_bytes_per_s, self._rates.disk_read_bytes_per_s)
