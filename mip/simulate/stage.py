"""Simulation of one pipeline stage's rank, copy by copy, as the swap engine would run it.

Owns the order of events within a stage and the bytes in each tier. Knows layers as `LayerWork`, neither plan nor cost
model: the time of a step follows from the events alone.

    forward    layer 0 | layer 1 | layer 2 | ... | head         a layer's copies are issued when its forward ends
    copies             |  out 0  |  out 1  |
    dropped                      ^ end of layer 1: the compute stream waits for out 0, then layer 0's sources go; what is
                                   recomputed went when layer 0 ended

    backward   head | ... | layer 2 | layer 1 | layer 0         reaching layer 2 issues the reload of layer 1, if there
    reloads               |   in 1  |   in 0  |                 is room on the device; if not, reaching layer 1 does; the
                                                                head is a layer in this

    network    | gather 1 | gather 2 | ...                      a layer's weights are gathered while the one before runs,
                                                                its gradients reduced while the one after it in backward
                                                                does; compute waits for both before it goes on

So the running layer's whole activations are on the device, and beside them what the one before it saves: the two rounding
buffers. What that one recomputes returns when its own replay runs. The last layer is one of the two until another forward
begins; where its backward follows at once it is never copied (R6).

A stage may have several chunks, whose turns follow one another in a given order. The second half of a split backward
runs from the first layer on; between the halves moved bytes leave again, and recomputed bytes stay.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import operator
from collections.abc import Mapping, Sequence

from memo.events import Lane, StallCause, TensorState, TierName, UseKind
from memo.mip.inputs.hardware import LaneRates
from memo.mip.inputs.pipeline_schedules import Pass, Turn
from memo.mip.simulate.links import Copy, Links, Queue
from memo.mip.simulate.result import (
    EndWork,
    LayerWork,
    Occupancy,
    Part,
    Peak,
    Phase,
    SimulatedSpan,
    StageSimulation,
    Transition,
    Usage,
    Wait,
)

_MOVED = (
    (Part.HOST, TierName.HOST, Queue.HOST_OUT, Queue.HOST_IN),
    (Part.DISK, TierName.DISK, Queue.DISK_OUT, Queue.DISK_IN),
)


class _State(enum.Enum):
    """States of a call: LIVE -> LEAVING -> AWAY -> RETURNING -> gone, or LIVE -> gone for a last layer needed at once.

    Between the halves of a backward RETURNING -> AWAY.
    """

    LIVE = enum.auto()
    """Whole on the device; no copy is issued."""
    LEAVING = enum.auto()
    AWAY = enum.auto()
    """The device holds no moved bytes."""
    RETURNING = enum.auto()


@dataclasses.dataclass(slots=True, eq=False)
class _Call:
    """One layer in one microbatch."""

    number: int
    work: LayerWork
    state: _State = _State.LIVE
    out: Sequence[Copy] = ()
    back: Sequence[Copy] = ()
    how: UseKind = UseKind.LIVE
    """Reloads of moved bytes in backward."""
    computed_again: bool = False


class SimulatedStage:
    """One rank's compute stream, links and memory.

    Args:
        chunks: the layers of each chunk, in forward order.
        rates: of the rank's lanes.
        turns: of a step with several chunks, in order; without them backwards run from the earliest microbatch on.
        static_nbytes: of parameters, gradients and optimizer state.
        budgets: bytes by tier; reloads are prefetched only while the device has room.
        overlap: False: compute waits for each copy out, and for each reload, which its own layer issues.
        embedding: work before the first layer, if the stage has it.
        head: work after the last layer, if the stage has it.
    """

    def __init__(
        self,
        *chunks: Sequence[LayerWork],
        rates: LaneRates,
        turns: Sequence[Turn] = (),
        static_nbytes: int = 0,
        budgets: Mapping[TierName, int] | None = None,
        overlap: bool = True,
        embedding: EndWork | None = None,
        head: EndWork | None = None,
    ) -> None:
        self._chunks = chunks
        self._turns = collections.deque(turn for turn in turns if turn.kind is not Pass.FORWARD)
        self._ends = (embedding or EndWork(name="embedding"), head or EndWork(name="head"))
        self._has_head = head is not None
        self._links = Links(rates)
        self._ledger = _Ledger(budgets or {})
        self._static_nbytes, self._overlap = static_nbytes, overlap
        self._ledger.change(0.0, TierName.DEVICE, static_nbytes)
        self._calls: dict[tuple[int, int], list[_Call]] = {}  # by chunk and microbatch, in the order of the forwards
        self._microbatches = [0] * len(chunks)
        self._made = 0
        self._held: _Call | None = None  # its copies wait until another forward begins
        self._undropped: _Call | None = None
        self._network_free_s = self._sync_free_s = 0.0
        self._spans: list[SimulatedSpan] = []
        self._waits: list[Wait] = []
        self._transitions: list[Transition] = []
        self._usages: list[Usage] = []

    @property
    def now_s(self) -> float:
        """Time of the compute stream."""
        return self._links.now_s

    def idle(self, until_s: float) -> None:
        """Lets the compute stream wait for another stage; copies go on."""
        if until_s > self.now_s:
            self._links.advance(until_s)

    def forward(self, chunk: int = 0) -> None:
        """Runs the forward of the next microbatch through a chunk."""
        embedding, head = self._ends
        held, self._held = self._held, None
        if held is not None:
            self._send(held)
        if chunk == 0:
            self._end_forward(embedding)
        calls = [_Call(self._made + number, layer) for number, layer in enumerate(self._chunks[chunk])]
        self._made += len(calls)
        self._await(self._collective(calls[0].work.name, "forward", calls[0].work.gather_s))
        for call, following in zip(calls, [*calls[1:], None], strict=True):
            self._forward(call, following)
        self._held = calls[-1]
        self._calls[chunk, self._microbatches[chunk]] = calls
        self._microbatches[chunk] += 1
        if chunk == len(self._chunks) - 1:
            self._end_forward(head)

    def backward(self, *, last: bool = False) -> None:
        """Runs the next backward, or half of one: by the order of turns, else of the earliest microbatch in flight.

        Args:
            last: of the step, so that gradients are reduced that are reduced once a step.
        """
        embedding, head = self._ends
        turn = self._turns.popleft() if self._turns else self._earliest()
        calls = self._calls[turn.call] if turn.kind is Pass.INPUT else self._calls.pop(turn.call)
        order = calls if turn.kind is Pass.WEIGHT else calls[::-1]
        has_head, has_embedding = turn.chunk == len(self._chunks) - 1, turn.chunk == 0
        if has_head and turn.kind is not Pass.WEIGHT:
            if self._has_head and self._may_prefetch(order[0], same_turn=True):
                self._fetch(order[0], UseKind.PREFETCHED)
            self._end_backward(head, turn.kind, last=last)
        then, before = self._next_turn(), None
        for call, following in zip(order, [*order[1:], None], strict=True):
            self._exchange_beside(before, following, turn.kind)
            if following is not None:
                self._backward(call, following, turn.kind, same_turn=True)
            else:
                stays = then is not None and then[0].call == turn.call
                self._backward(call, None if then is None or stays else then[1], turn.kind, stays=stays)
            self._sync(call.work, last=last)
            self._await(self._network_free_s)
            before = call
        self._exchange_beside(before, None, turn.kind)
        self._await(self._network_free_s)
        if has_head and turn.kind is Pass.WEIGHT:
            self._end_backward(head, turn.kind, last=last)
        if has_embedding:
            self._end_backward(embedding, turn.kind, last=last)

    def _earliest(self) -> Turn:
        (chunk, microbatch), _ = next(iter(self._calls.items()))
        return Turn(chunk=chunk, kind=Pass.BACKWARD, microbatch=microbatch)

    def _next_turn(self) -> tuple[Turn, _Call] | None:
        """The next backward turn and its first layer; None while its forward has not run."""
        if not self._turns and not self._calls:
            return None
        turn = self._turns[0] if self._turns else self._earliest()
        calls = self._calls.get(turn.call)
        return None if calls is None else (turn, calls[0 if turn.kind is Pass.WEIGHT else -1])

    @property
    def reduced_s(self) -> float:
        """Time from which all gradients are reduced."""
        return max(self.now_s, self._sync_free_s)

    def step(self, optimizer_s: float, exchange_s: float = 0.0) -> None:
        """Runs the optimizer once all gradients are reduced, and the exchange that follows it."""
        self._await(self._sync_free_s)
        self._run("optimizer", "optimizer", optimizer_s + exchange_s, exchange_s)

    def result(self) -> StageSimulation:
        """Returns everything that has happened so far."""
        return StageSimulation(
            end_s=self.now_s,
            spans=tuple(self._spans),
            waits=tuple(self._waits),
            copies=tuple(self._links.copies),
            transitions=tuple(self._transitions),
            usages=tuple(self._usages),
            occupancies=tuple(self._ledger.occupancies),
            peaks=self._ledger.peaks(),
            static_nbytes=self._static_nbytes,
        )

    # Forward.

    def _forward(self, call: _Call, following: _Call | None) -> None:
        work = call.work
        self._hold(TierName.DEVICE, work.saved_nbytes + work.forward_transient_nbytes, f"{work.name} forward")
        self._change(call, TensorState.LIVE, *Part)
        if following is not None:
            self._collective(following.work.name, "forward", following.work.gather_s)
        self._run(work.name, "forward", work.forward_s, work.forward_exchange_s)
        self._hold(TierName.DEVICE, -work.forward_transient_nbytes)
        self._hold(TierName.DEVICE, -work.of(Part.RECOMPUTED))
        self._change(call, TensorState.GONE, Part.RECOMPUTED)
        if following is not None:
            self._await(self._network_free_s)
            self._send(call)
        before, self._undropped = self._undropped, call
        for leaving in (before, None if self._overlap else call):
            if leaving is not None and leaving.state is _State.LEAVING:
                self._drop(leaving)

    def _send(self, call: _Call) -> None:
        """Issues the copies out, and takes their places in the lower tiers."""
        call.state = _State.LEAVING
        copies = []
        for part, tier, queue, _ in _MOVED:
            if call.work.of(part):
                self._hold(tier, call.work.in_tier(part))
                copies.append(self._copy(call, part, queue))
        call.out = copies
        self._change(call, TensorState.LEAVING, Part.HOST, Part.DISK)

    def _drop(self, call: _Call) -> None:
        """Waits until the copies out have ended, then frees all but the kept bytes."""
        self._wait(StallCause.DRAIN, call, call.out)
        call.state = _State.AWAY
        self._hold(TierName.DEVICE, -call.work.moved_nbytes)
        self._change(call, TensorState.AWAY, Part.HOST, Part.DISK)

    # Backward.

    def _backward(
        self, call: _Call, following: _Call | None, kind: Pass, *, same_turn: bool = False, stays: bool = False
    ) -> None:
        """Runs one layer's backward; `stays`: the second half of the same backward begins with this call."""
        work = call.work
        transient = work.backward_transient_nbytes + (0 if kind is Pass.WEIGHT else work.recompute_held_nbytes)
        if kind is Pass.BACKWARD:
            transient -= work.absent_nbytes
        self._hold(TierName.DEVICE, transient, f"{work.name} backward")
        if kind is Pass.INPUT:
            self._hold(TierName.DEVICE, work.between_nbytes)
        if not call.computed_again:
            self._hold(TierName.DEVICE, work.of(Part.RECOMPUTED))
            self._change(call, TensorState.LIVE, Part.RECOMPUTED)
        self._reach(call, following, same_turn=same_turn)
        returning = call.state is _State.RETURNING
        if returning:
            self._wait(StallCause.RELOAD, call, call.back)
            self._change(call, TensorState.BACK, Part.HOST, Part.DISK)
        self._use(call)
        if not call.computed_again:
            self._work(Lane.RECOMPUTE, work.name, "backward", work.recompute_s)
            call.computed_again = True
        seconds = work.backward_s * _share(kind) + (work.decode_s if returning else 0.0)
        self._run(work.name, "backward", seconds, work.backward_exchange_s * _share(kind))
        if kind is not Pass.INPUT:
            self._end(call)
        self._hold(TierName.DEVICE, -transient)  # which may be below 0, and what was absent then is not there now
        if kind is Pass.WEIGHT:
            self._hold(TierName.DEVICE, -work.between_nbytes)
        elif kind is Pass.INPUT and returning and not stays:
            self._leave_again(call)

    def _reach(self, call: _Call, following: _Call | None, *, same_turn: bool) -> None:
        """Reloads the call if it is away, and prefetches the following one if the device has room."""
        if self._held is call:
            self._held = None
        if self._undropped is call:
            self._undropped = None
        if call.state is _State.AWAY:
            self._fetch(call, UseKind.FETCHED)
        if following is not None and self._may_prefetch(following, same_turn=same_turn):
            self._fetch(following, UseKind.PREFETCHED)

    def _may_prefetch(self, following: _Call, *, same_turn: bool) -> bool:
        """Whether a call is away, fits, and is needed next; a stage's last one in another turn only if it has copies."""
        if not self._overlap or following.state is not _State.AWAY:
            return False
        if not self._ledger.fits(TierName.DEVICE, following.work.moved_nbytes):
            return False
        return same_turn or bool(following.out) or following.work is not self._chunks[-1][-1]

    def _leave_again(self, call: _Call) -> None:
        """Frees moved bytes after the first half of backward, without a copy; recomputed bytes stay."""
        call.state = _State.AWAY
        self._hold(TierName.DEVICE, -call.work.moved_nbytes)
        self._change(call, TensorState.AWAY, Part.HOST, Part.DISK)

    def _fetch(self, call: _Call, how: UseKind) -> None:
        """Takes the buffer and issues the reloads into it."""
        call.state, call.how = _State.RETURNING, how
        self._hold(TierName.DEVICE, call.work.moved_nbytes)
        call.back = [self._copy(call, part, queue) for part, _, _, queue in _MOVED if call.work.of(part)]
        self._change(call, TensorState.RETURNING, Part.HOST, Part.DISK)

    def _copy(self, call: _Call, part: Part, queue: Queue) -> Copy:
        work = call.work
        return self._links.put(
            queue, call=call.number, module=work.name, nbytes=work.in_tier(part), decoded_nbytes=work.of(part)
        )

    def _use(self, call: _Call) -> None:
        for part in (Part.KEPT, Part.HOST, Part.DISK):
            if call.work.of(part):
                how = UseKind.LIVE if part is Part.KEPT else call.how
                self._usages.append(Usage(t_s=self.now_s, call=call.number, part=part, how=how))

    def _end(self, call: _Call) -> None:
        """Frees everything of the call, once its gradients are computed."""
        work = call.work
        self._hold(TierName.DEVICE, -work.saved_nbytes)
        if call.out:
            for part, tier, _, _ in _MOVED:
                self._hold(tier, -work.in_tier(part))
        self._change(call, TensorState.GONE, *Part)

    # The ends, whose saved bytes stay on the device.

    def _end_forward(self, end: EndWork) -> None:
        self._hold(TierName.DEVICE, end.saved_nbytes + end.transient_nbytes, f"{end.name} forward")
        self._run(end.name, "forward", end.forward_s, end.forward_exchange_s)
        self._hold(TierName.DEVICE, -end.transient_nbytes)

    def _end_backward(self, end: EndWork, kind: Pass, *, last: bool) -> None:
        self._hold(TierName.DEVICE, end.transient_nbytes, f"{end.name} backward")
        self._run(end.name, "backward", end.backward_s * _share(kind), end.backward_exchange_s * _share(kind))
        self._sync(end, last=last)
        self._hold(TierName.DEVICE, -end.transient_nbytes - (0 if kind is Pass.INPUT else end.saved_nbytes))

    # Collectives, one after another; those of a step's end are in a queue of their own, which waits for the others.

    def _exchange_beside(self, before: _Call | None, following: _Call | None, kind: Pass) -> None:
        """Issues what runs beside a layer's backward: the following layer's gather, the reduction of the one before."""
        if following is not None and kind is not Pass.WEIGHT:
            self._collective(following.work.name, "backward", following.work.gather_s)
        if before is not None and kind is not Pass.INPUT:
            self._collective(before.work.name, "backward", before.work.reduce_s)

    def _collective(self, module: str, phase: Phase, seconds: float) -> float:
        """Issues a collective; returns when all that are issued have ended."""
        start_s = max(self.now_s, self._network_free_s)
        self._network_free_s = self._on_network(module, phase, start_s, seconds)
        if self._sync_free_s > self.now_s:
            self._sync_free_s += seconds
        return self._network_free_s

    def _sync(self, work: LayerWork | EndWork, *, last: bool) -> None:
        if last:
            start_s = max(self.now_s, self._network_free_s, self._sync_free_s)
            self._sync_free_s = self._on_network(work.name, "backward", start_s, work.sync_s)

    def _on_network(self, module: str, phase: Phase, start_s: float, seconds: float) -> float:
        end_s = start_s + seconds
        if seconds:
            self._spans.append(
                SimulatedSpan(lane=Lane.NETWORK, module=module, phase=phase, start_s=start_s, end_s=end_s)
            )
        return end_s

    def _await(self, until_s: float, module: str = "collectives") -> None:
        """Lets the compute stream wait for collectives; copies go on."""
        start_s = self.now_s
        if until_s > start_s:
            self._links.advance(until_s)
            self._waits.append(
                Wait(
                    cause=StallCause.COLLECTIVE,
                    module=module,
                    lane=Lane.NETWORK,
                    start_s=start_s,
                    end_s=self.now_s,
                )
            )

    # Events.

    def _run(self, module: str, phase: Phase, seconds: float, exchange_s: float) -> None:
        """Runs work of which the last part is collectives that compute waits for."""
        self._work(Lane.COMPUTE, module, phase, seconds - exchange_s)
        if exchange_s:
            self._await(self._on_network(module, phase, self.now_s, exchange_s), module)

    def _work(self, lane: Lane, module: str, phase: Phase, seconds: float) -> None:
        if seconds:
            start_s = self.now_s
            self._links.advance(start_s + seconds)
            self._spans.append(SimulatedSpan(lane=lane, module=module, phase=phase, start_s=start_s, end_s=self.now_s))

    def _wait(self, cause: StallCause, call: _Call, copies: Sequence[Copy]) -> None:
        start_s = self.now_s
        self._links.wait(copies)
        if self.now_s > start_s:
            latest = max(copies, key=operator.attrgetter("end_s"))
            assert latest.slowest is not None
            self._waits.append(
                Wait(
                    cause=cause,
                    module=call.work.name,
                    lane=latest.slowest,
                    start_s=start_s,
                    end_s=self.now_s,
                )
            )

    def _change(self, call: _Call, to: TensorState, *parts: Part) -> None:
        for part in parts:
            nbytes = call.work.of(part)
            if nbytes:
                self._transitions.append(
                    Transition(t_s=self.now_s, call=call.number, module=call.work.name, part=part, to=to, nbytes=nbytes)
                )

    def _hold(self, tier: TierName, nbytes: int, where: str | None = None) -> None:
        self._ledger.change(self.now_s, tier, nbytes, where)


def _share(kind: Pass) -> float:
    """Fraction of a layer's backward in a turn."""
    return 0.5 if kind in (Pass.INPUT, Pass.WEIGHT) else 1.0


class _Ledger:
    """Bytes in each tier, over time."""

    def __init__(self, budgets: Mapping[TierName, int]) -> None:
        self.occupancies: list[Occupancy] = []
        self._budgets = budgets
        self._where = "begin"
        self._held = dict.fromkeys(TierName, 0)
        self._most = dict.fromkeys(TierName, (0, 0.0, ""))

    def fits(self, tier: TierName, nbytes: int) -> bool:
        """Whether the tier has room for `nbytes` more."""
        budget = self._budgets.get(tier)
        return budget is None or self._held[tier] + nbytes <= budget

    def change(self, t_s: float, tier: TierName, nbytes: int, where: str | None = None) -> None:
        """Adds bytes to a tier, or removes them; `where` names the compute stream's work from now on."""
        self._where = where or self._where
        if nbytes:
            held = self._held[tier] = self._held[tier] + nbytes
            self.occupancies.append(Occupancy(t_s=t_s, tier=tier, nbytes=held))
            if held > self._most[tier][0]:
                self._most[tier] = (held, t_s, self._where)

    def peaks(self) -> tuple[Peak, ...]:
        """Peak of each tier."""
        return tuple(
            Peak(tier=tier, nbytes=nbytes, t_s=t_s, where=where, budget_nbytes=self._budgets.get(tier))
            for tier, (nbytes, t_s, where) in self._most.items()
        )
