"""Turns of a rehearsed pipeline rank: seconds of its forwards and backwards, which wait for no message.

A turn ends with the work that the compute stream has been given by then; it begins where the one before it ended.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from memo.mip.inputs import Pass

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memo.rehearsal.machine import SimulatedMachine

_Turn = tuple[int, Pass]
"""Chunk and kind of turns."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Times of one pipeline rank in one step, as memo.mip.activation.pipeline_time reads them."""

    turns_s: Mapping[_Turn, float]
    """Mean seconds of a chunk's turns of one kind."""
    sync_s: float
    """Seconds from the last turn to the end of the step: reduction of gradients, optimizer."""
    send_s: float
    """Seconds of a message to another stage."""

    def turn_s(self, chunk: int, kind: Pass) -> float:
        """Seconds of one turn; 0 for a kind that the schedule does not have."""
        return self.turns_s.get((chunk, kind), 0.0)


class TurnMeter:
    """Measures the turns of one rank's stages.

    Args:
        machine: of the rank.
        schedule: torch's pipeline schedule, whose stages run through the meter from now on.
    """

    def __init__(self, machine: SimulatedMachine, schedule: Any) -> None:
        self._clock, self._network = machine.clock, machine.network
        self._turns_ns: collections.Counter[_Turn] = collections.Counter()
        self._calls: collections.Counter[_Turn] = collections.Counter()
        self._ended_ns = 0
        for chunk, stage in enumerate(getattr(schedule, "_stages", None) or [schedule._stage]):
            # Of the pipeline's first stage all of a split backward is in the second half (PipelineOrder).
            first, second = (Pass.BACKWARD, Pass.BACKWARD) if stage.is_first else (Pass.INPUT, Pass.WEIGHT)
            forward, weight = (chunk, Pass.FORWARD), (chunk, second)
            stage.forward_one_chunk = self._measured(stage.forward_one_chunk, forward)
            stage.backward_one_chunk = self._measured(
                stage.backward_one_chunk, (chunk, Pass.BACKWARD), half=(chunk, first)
            )
            stage.backward_weight_one_chunk = self._measured(stage.backward_weight_one_chunk, weight)

    def _measured(self, call: Callable[..., Any], turn: _Turn, *, half: _Turn | None = None) -> Callable[..., Any]:
        """The call, whose time is `turn`'s, or with full_backward=False that of `half`."""

        @functools.wraps(call)
        def run(*args: Any, **options: Any) -> Any:
            result = call(*args, **options)
            own = turn if half is None or options.get("full_backward", True) else half
            self._turns_ns[own] += self._lap_ns()
            self._calls[own] += 1
            return result

        return run

    def _lap_ns(self) -> int:
        before, self._ended_ns = self._ended_ns, max(self._clock.compute_ns, self._clock.host_ns)
        return self._ended_ns - before

    def begin_step(self) -> None:
        """Begins a step, when the device has no work."""
        self._turns_ns.clear()
        self._calls.clear()
        self._lap_ns()

    def end_step(self) -> RankTimes:
        """Ends a step, when the device has no work; returns its times."""
        microbatches = self._calls[0, Pass.FORWARD]  # both halves of the first stage's backward are one turn
        turns_s = {turn: ns / microbatches / 1e9 for turn, ns in self._turns_ns.items()}
        return RankTimes(turns_s=turns_s, sync_s=self._lap_ns() / 1e9, send_s=self._network.send_s)
