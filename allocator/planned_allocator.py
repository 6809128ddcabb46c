"""Planned allocator over a run: each kind of step is warmed up, recorded, planned in the background and replayed.

Steps of one signature (a sequence length, training or evaluation) request the same memory in the same order; each
signature has its own plan. Its first step warms up (workspaces, optimizer state), its second is recorded, and once the
plan is ready its steps are replayed:

    step      1          2         3 ...                       4 ...
    stage     WARM_UP    RECORD    PLANNING (in background)    REPLAY ──divergence──▶ PLANNING, still replaying

A step that diverges from its plan is safe (arena.cpp) and counted. If its requests match the plan, only frees came
later, and the next plan has the longer lifetimes. If its requests differ, they are planned once a second step makes the
same ones: a rare step must not cost the others their plan.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

from memo.allocator.native import Begun
from memo.allocator.plan_from_events import Recording, ReplayLayout, layout_of, merge, problem_of, recording_of
from memo.allocator.plan_in_background import Planning
from memo.errors import AllocatorError, MemoError
from memo.warn_user import warn_user

if TYPE_CHECKING:
    from memo.allocator.native import Native
    from memo.allocator.step import StepSummary

KEPT_SIGNATURES = 8  # least recently used ones are dropped
PLANS_EACH = 8  # plans for one signature; requests that diverge after that are left to the pool


class AllocatorStage(enum.Enum):
    """Progress of a signature."""

    WARM_UP = "warm-up"
    RECORD = "record"
    PLANNING = "planning"
    REPLAY = "replay"
    UNPLANNED = "unplanned"
    """No plan could be made, or there is no memory for its arena: steps are served by the pool."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Kind:
    """Steps of one signature."""

    stage: AllocatorStage = AllocatorStage.WARM_UP
    recording: Recording = ()
    """Requests of the current plan, or of the one being made."""
    candidate: Recording = ()
    """Requests of the last step that differed from `recording`."""
    planning: Planning | None = None
    plan: int | None = None
    layout: ReplayLayout | None = None
    n_plans: int = 0


class PlannedAllocator:
    """Plans and replays the steps of a process. Called from one thread; one step at a time.

    Args:
        native: The native allocator.
        plan_seconds: Time limit for one plan.
    """

    def __init__(self, native: Native, *, plan_seconds: float) -> None:
        self._native = native
        self._plan_seconds = plan_seconds
        self._kinds: collections.OrderedDict[Hashable, _Kind] = collections.OrderedDict()
        self._open: _Kind | None = None
        self._warned = False
        self.last: StepSummary | None = None
        """Summary of the last step."""

    @property
    def native(self) -> Native:
        """Native allocator that serves the requests."""
        return self._native

    @property
    def in_step(self) -> bool:
        """True between `begin_step` and `end_step`."""
        return self._open is not None

    def stage(self, signature: Hashable = "step") -> AllocatorStage:
        """Returns the stage of a signature."""
        kind = self._kinds.get(signature)
        return AllocatorStage.WARM_UP if kind is None else kind.stage

    def layout(self, signature: Hashable = "step") -> ReplayLayout | None:
        """Returns the arena layout of a signature's steps; None before there is a plan."""
        kind = self._kinds.get(signature)
        return None if kind is None else kind.layout

    def layouts(self) -> tuple[ReplayLayout, ...]:
        """Returns the layouts in use, the most recently used signature's last."""
        return tuple(kind.layout for kind in self._kinds.values() if kind.layout is not None)

    @contextlib.contextmanager
    def step(self, signature: Hashable = "step", *, device: int = 0) -> Iterator[None]:
        """Encloses one whole step: forward, backward, optimizer, and the release of the gradients.

        Args:
            signature: Equal for steps that request the same memory: a sequence length, training or evaluation.
            device: Index of the GPU.

        Raises:
            AllocatorError: A step is open.
        """
        self.begin_step(signature, device=device)
        try:
            yield
        except BaseException:
            self.end_step(learn=False)
            raise
        self.end_step()

    def begin_step(self, signature: Hashable = "step", *, device: int = 0) -> None:
        """Opens a step.

        Raises:
            AllocatorError: A step is open.
        """
        if self.in_step:
            raise AllocatorError("a step of the planned allocator begins inside another one")
        kind = self._kinds.setdefault(signature, _Kind())
        self._kinds.move_to_end(signature)
        self._drop_oldest()
        if kind.planning is not None and kind.planning.done():
            self._adopt(kind)
        begun = self._native.begin_step(device, kind.plan)
        self._open = kind
        if begun is Begun.NO_ROOM:
            self._leave_unplanned(kind, "the device has no room for the arena")

    def end_step(self, *, learn: bool = True) -> None:
        """Closes the step.

        Args:
            learn: False for a step that did not run to its end: its requests are not recorded or planned.

        Raises:
            AllocatorError: No step is open.
        """
        self.last = summary = self._native.end_step()
        kind, self._open = self._open, None
        if kind is None or not learn:
            return
        if kind.stage is AllocatorStage.WARM_UP:
            kind.stage = AllocatorStage.RECORD
        elif kind.stage is AllocatorStage.RECORD:
            self._plan(kind, recording_of(self._native.events()))
        elif kind.stage is AllocatorStage.REPLAY and summary.first is not None:
            self._warn(
                f"a step left its plan ({summary.fallbacks} of {summary.requests} requests served by the pool): "
                f"{summary.first}"
            )
            self._plan_again(kind, recording_of(self._native.events()))

    def wait(self) -> None:
        """Waits for all plans that are being made; for tests and benchmarks."""
        for kind in self._kinds.values():
            if kind.planning is not None:
                self._adopt(kind)

    def close(self) -> None:
        """Drops all plans; live blocks stay valid."""
        for kind in self._kinds.values():
            self._drop(kind)
        self._kinds.clear()

    def _plan(self, kind: _Kind, recording: Recording) -> None:
        kind.recording, kind.candidate = recording, ()
        if not any(request.in_arena for request in recording):
            kind.stage = AllocatorStage.UNPLANNED
            return
        kind.n_plans += 1
        kind.planning = Planning(problem_of(recording), time_limit_s=self._plan_seconds)
        if kind.plan is None:
            kind.stage = AllocatorStage.PLANNING

    def _plan_again(self, kind: _Kind, recording: Recording) -> None:
        if kind.planning is not None or kind.n_plans >= PLANS_EACH or not recording:
            return
        same = merge(kind.recording, recording)
        again = merge(kind.candidate, recording)
        if same is not None:
            if same != kind.recording:
                self._plan(kind, same)
        elif again is not None:
            self._plan(kind, again)
        else:
            kind.candidate = recording

    def _adopt(self, kind: _Kind) -> None:
        """Adopts the plan of the background process; if it failed, an earlier plan stays in use."""
        assert kind.planning is not None
        planning, kind.planning = kind.planning, None
        try:
            layout = layout_of(kind.recording, planning.result())
            requests = layout.recording
            plan = self._native.add_plan(
                [request.nbytes for request in requests],
                layout.offsets,
                [request.stream for request in requests],
                arena_nbytes=layout.nbytes,
            )
        except MemoError as error:
            if kind.plan is None:
                self._leave_unplanned(kind, str(error))
            return
        if kind.plan is not None:
            self._native.forget_plan(kind.plan)
        kind.plan, kind.layout, kind.stage = plan, layout, AllocatorStage.REPLAY

    def _leave_unplanned(self, kind: _Kind, why: str) -> None:
        self._drop(kind)
        kind.stage = AllocatorStage.UNPLANNED
        self._warn(f"steps run without a plan: {why}")

    def _drop_oldest(self) -> None:
        while len(self._kinds) > KEPT_SIGNATURES:
            _, kind = self._kinds.popitem(last=False)
            self._drop(kind)

    def _drop(self, kind: _Kind) -> None:
        if kind.planning is not None:
            kind.planning.cancel()
        if kind.plan is not None:
            self._native.forget_plan(kind.plan)
        kind.planning = kind.plan = kind.layout = None

    def _warn(self, text: str) -> None:
        """Warns once; later divergences are only counted."""
        if not self._warned:
            self._warned = True
            warn_user(f"planned allocator: {text}", UserWarning)
