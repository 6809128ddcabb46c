"""Trials of a manager's layers: which replays give what autograd saved, which steps never run again, and their times.

A trial holds for later calls of the same operators, but not the first ones whose input is zero throughout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from memo.lru import LRU
from memo.swap.levels import Setting, comparing_nbytes
from memo.swap.recompute.trial import ReplayMismatch, try_out

if TYPE_CHECKING:
    from collections.abc import Callable

    from memo.swap.engine.engine import Engine
    from memo.swap.engine.saved_storage import SavedStorage
    from memo.swap.recompute.choice import Choice
    from memo.swap.recompute.recorded_call import OpenCall, RecordedCall
    from memo.swap.recompute.tape.plan import Plan
    from memo.swap.recompute.tape.tape import Tape
    from memo.swap.recompute.tape.work import Rates

_S_PER_PS = 1e-12
MOST_BLANK = 3
"""Trials of a layer that prove nothing, as its input was zero, until the next one counts all the same."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST_FORMS = 512
"""Replays that are remembered, over all layers, settings and lengths."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A call that has just ended, to be planned."""

    call: OpenCall
    recorded: RecordedCall
    setting: Setting
    choice: Choice
    here: int
    """The caller's stream."""

    @property
    def layer(self) -> str:
        """The layer's name."""
        return self.call.layer.name

    @property
    def tape(self) -> Tape:
        """Tape of the recorded call."""
        return self.choice.tape

    @property
    def operators(self) -> Iterator[Any]:
        """The log without its sizes."""
        return self.recorded.operators

    def release(self, storage: int, saved: SavedStorage) -> bool:
        """Gives up a saved storage for an equal one on the caller's stream; False where it was saved on another one."""
        if saved.home != self.here:
            return False
        self.call.has_released = True
        self.call.recorder.tensors.pop(storage, None)
        return True


def _is_blank(call: OpenCall) -> bool:
    """True for an input of zeros: what is wrong elsewhere may show nothing there. False where nobody can tell."""
    hidden = call.hidden
    if type(hidden) not in _PLAIN or hidden.dtype not in _FLOATS or hidden.is_meta or not hidden.numel():
        return False
    if hidden.untyped_storage().nbytes() < hidden.nbytes:  # the layer has given it up
        return False
    some = hidden.detach().any()
    return not torch.equal(some, torch.ones_like(some))  # as tensors without bytes answer


class Trials:
    """Trials of one manager's layers.

    Args:
        engine: packs what is kept.
        rates: of a device that is not here: replays take what follows from them, and are not tried out.
    """

    def __init__(self, engine: Engine, *, rates: Rates | None) -> None:
        self.run = 0
        """Number of trials."""
        self.device_room: Callable[[], int] | None = None
        """Bytes of the device's budget that are free; None: not known."""
        self.unit_s: dict[str, float] = {}
        """Layer -> seconds of a unit of a replay's cost, by its fastest trial: others waited for a copy, or were first."""
        self._blank: dict[str, int] = {}
        """Layer -> trials that proved nothing."""
        self._engine = engine
        self._rates = rates
        self._shown: LRU[tuple[Any, ...], bool] = LRU(MOST_FORMS)
        """Forms of replays that have passed their trial."""
        self._passed: LRU[tuple[Any, ...], frozenset[int]] = LRU(MOST_FORMS)
        """Layer and the log of a call -> steps that have run again in trials that passed."""
        self._wrong: LRU[tuple[Any, ...], frozenset[int]] = LRU(MOST_FORMS)
        """Layer and its operators -> steps that a trial found to give something else."""

    def wrong_of(self, case: Case) -> frozenset[int]:
        """Steps of the case's layer that a trial found to give something else; they never run again."""
        return self._wrong.get((case.layer, *case.operators)) or frozenset()

    def proves(self, call: OpenCall) -> bool:
        """False of a trial of this call that says nothing of others; the next call is tried, too."""
        if call.proves is None:
            seen = self._blank.get(call.layer.name, 0)
            call.proves = bool(call.recorder.collectives) or seen >= MOST_BLANK or not _is_blank(call)
            self._blank[call.layer.name] = seen + (not call.proves)
        return call.proves

    def may_skip(self, case: Case, plan: Plan) -> bool:
        """True if earlier trials have shown a plan, or all of its steps while there is no room for another trial."""
        form, sized = self._forms(case, plan)
        has_passed = form in self._shown or self._has_passed(case, plan)
        return sized in self._shown or (has_passed and not self._has_room(plan))

    def passed(self, case: Case, plan: Plan) -> None:
        """Notes that a plan's trial has passed, where that says something of other calls."""
        if self.proves(case.call):
            for form in self._forms(case, plan):
                self._shown[form] = True
            run = (case.layer, case.recorded.key)
            self._passed[run] = frozenset(plan.steps).union(self._passed.get(run) or ())

    def again(self, case: Case, found: Plan) -> ReplayMismatch | None:
        """Tries a plan that is in use again, if there is room; what it shows now is all that is known of it."""
        try:
            unlike = self.unlike(case, found) if self._has_room(found) else None
        except torch.OutOfMemoryError:
            return None
        if unlike is not None:
            for form in self._forms(case, found):
                self._shown.pop(form)
            self._passed[case.layer, case.recorded.key] = frozenset()
        return unlike

    def unlike(self, case: Case, plan: Plan) -> ReplayMismatch | None:
        """Tries a plan out; None if it gave what autograd saved, or for a device that is not here."""
        if self._rates is not None:
            self.unit_s[case.layer] = _S_PER_PS
            return None
        self.run += 1
        began = self._finished_s()
        try:
            has_room = self._has_room(plan)
            with self._engine.trial(case.call.group, has_room=has_room):
                try_out(case.recorded.replay(plan, self._engine), release=None if has_room else case.release)
        except ReplayMismatch as unlike:
            if unlike.step is not None:  # a later call may not show it: all of it may be zero there
                self._wrong[case.layer, *case.operators] = self.wrong_of(case) | {unlike.step}
            self._passed[case.layer, case.recorded.key] = frozenset()
            return ReplayMismatch(
                unlike.step, str(unlike)
            )  # a fresh one: the frames of this one hold the call's tensors
        self._timed(case.layer, plan.cost, self._finished_s() - began)
        return None

    def _forms(self, case: Case, plan: Plan) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Keys of a passed trial: for any sizes, as routed rows differ, and for saved bytes within a factor of 2."""
        form = (case.layer, case.setting, *case.operators, plan.steps)
        return form, (*form, case.recorded.saved_nbytes.bit_length())

    def _has_passed(self, case: Case, plan: Plan) -> bool:
        """True if each step of a plan has run again in trials that passed."""
        passed = self._passed.get((case.layer, case.recorded.key))
        return passed is not None and passed.issuperset(plan.steps)

    def _has_room(self, plan: Plan) -> bool:
        """True if a trial of a plan keeps the device's budget."""
        if self.device_room is None:
            return True
        largest = max((plan.tape.storages[storage][1] for storage in plan.wanted), default=0)
        return plan.trial_bytes + comparing_nbytes(largest) <= self.device_room()

    def _finished_s(self) -> float:
        """The host's clock in seconds, after all work of the device."""
        self._engine.backend.finish()
        return self._engine.backend.now_ns() / 1e9

    def _timed(self, layer: str, replayed: int, seconds: float) -> None:
        """Records the time of a trial. One replay is measured, those of all levels follow by their operators."""
        each_s = seconds / max(1, replayed)
        self.unit_s[layer] = min(each_s, self.unit_s.get(layer, each_s))
