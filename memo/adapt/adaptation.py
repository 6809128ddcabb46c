"""Decisions on a run's layout: when links are measured, when another layout pays, and which one was left before.

    plan settled ──▶ MEASURED_STEPS steps ──▶ links measured ──▶ changed by more than SHARE? ──▶ decision
                                                    ▲  every EVERY_STEPS steps or more                │ changes
                                                    ╰────────────────────────────────────────────────┤
                                              checkpoint, the ranks restart, the plan settles anew ◀──╯

Another layout's step is its prediction times the ratio of measurement to prediction of this one. It is chosen if the steps
that are left would end earlier by more than SHARE of their time, the restart counted. A layout that was left counts with the
step that was measured in it, as long as its prediction has not changed by more than SHARE: so none is tried twice for the
same links. Until then its ratio counts, too, if it is larger: one prediction that failed makes all others dearer.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from memo.adapt.choices import AdaptationState, LayoutChoice, LeftLayout, require_adaptable
from memo.adapt.prices import Prices, Readings, measured_links
from memo.errors import CheckpointError, MemoError
from memo.gpt.arithmetic import STATES, parameter_count
from memo.gpt.train import ADAPTATION, EndedStep, LayoutDecision
from memo.mip import decode, encode
from memo.parallel import RESTARTS
from memo.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memo.gpt import RunConfig
    from memo.machine import CollectiveRates

SHARE = 0.1
"""Share of the time left that a change must save, and of a measurement by which it must change to count as another."""
MEASURED_STEPS = 5
"""Steps whose median is the measured step."""
EVERY_STEPS = 20
"""Fewest steps between two measurements of the links."""
MOST_MEASURING = 0.05
"""Most of a run's time that passes in measurements of links and searches; they become rarer where they take long."""
DISK_BYTES_PER_S = 1e9
"""Rate at which a checkpoint is assumed to be written and read, until a change of layout has been measured."""


class LayoutAdapter:
    """Adapter of a run's ranks; implements `memo.gpt.train.Adapter`.

    Args:
        config: the run.

    Attributes:
        changed: True once the run has ended to go on in the layout of `state`.

    Raises:
        UsageError: an option fixes the layout, or the ranks cannot restart.
    """

    def __init__(self, config: RunConfig) -> None:
        self._ranks = int(os.environ.get("WORLD_SIZE", "1"))
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        require_adaptable(config, ranks=self._ranks, under_torchrun=served)
        self.changed = False
        self._state = AdaptationState(choice=LayoutChoice.of_run(config))
        self._start_s: float | None = None  # of these processes, until their first step
        self._unsettled: list[float] = []
        self._has_settled = False
        self._steps: deque[float] = deque(maxlen=MEASURED_STEPS)
        self._next = 0
        self._decided_s = (0.0, 0.0)  # measured and predicted step of the last decision

    def resumed(self, config: RunConfig, settings: dict[str, Any]) -> RunConfig:
        """The run in the layout that its checkpoint was to go on in, for as many ranks and sequences a step.

        Raises:
            CheckpointError: the checkpoint's state is none.
        """
        if ADAPTATION not in settings:
            return config
        try:
            state = decode(AdaptationState, settings[ADAPTATION], ADAPTATION)
        except MemoError as error:
            raise CheckpointError(f"the checkpoint to resume is damaged: {error}") from None
        asked, kept = LayoutChoice.of_run(config), state.choice
        same = config.keeps_batch or asked.batch * asked.accumulate == kept.batch * kept.accumulate
        if kept.layout.ranks != self._ranks or not same:
            return config
        self._state = state
        return kept.run(config)

    def state(self) -> dict[str, Any]:
        """JSON values that a checkpoint stores."""
        values: dict[str, Any] = encode(self._state)
        return values

    def consider(self, ended: EndedStep) -> LayoutDecision | None:
        """Decision after a step; None where links are not due, or nothing has changed. A collective call."""
        if self._start_s is None:
            self._begin(ended)
        if not self._has_settled:
            self._unsettled.append(ended.duration_s)
            self._has_settled = _all_ranks(ended.manager is None or ended.manager.has_settled, ended.device)
            return None
        self._steps.append(ended.duration_s)
        if len(self._steps) < MEASURED_STEPS or ended.step < self._next:
            return None
        begin = time.perf_counter()
        rates = measured_links(ended.device)
        readings = Readings.take(ended, step_s=statistics.median(self._steps), device_bytes=ended.config.offload.device)
        answer: list[Any] = [None, None, None]
        if dist.get_rank() == 0:
            try:
                answer[0] = self.decide(ended, readings, rates)
            except MemoError as error:  # of the search; the run goes on as it is
                words = LayoutChoice.of_run(ended.config).words
                figures = {"changed": False, "from": words, "reason": str(error)}
                answer[0] = LayoutDecision(changes=False, line=f"keeps {words}: {error}", figures=figures)
            rarer = math.ceil((time.perf_counter() - begin) / (MOST_MEASURING * readings.step_s))
            answer[1:] = self._state, ended.step + max(EVERY_STEPS, rarer)
        dist.broadcast_object_list(answer, src=0)
        decision: LayoutDecision | None
        decision, self._state, self._next = answer
        self.changed = decision is not None and decision.changes
        return decision

    def _begin(self, ended: EndedStep) -> None:
        """Notes how long it took these processes to begin; after a change of layout that is its cost."""
        self._start_s = max(_process_s() - ended.duration_s, 0.0)
        self._state = dataclasses.replace(self._state, choice=LayoutChoice.of_run(ended.config))
        changed = int(os.environ.get(RESTARTS, "0")) > 0
        if changed and self._state.cost_s is None and self._state.decided_unix_s:
            cost_s = max(time.time() - self._state.decided_unix_s - ended.duration_s, 0.0)
            self._state = dataclasses.replace(self._state, cost_s=cost_s)

    def _cost(self, ended: EndedStep, step_s: float) -> tuple[float, str]:
        """Seconds that a change of layout takes, and how they are known."""
        settling_s = max(sum(self._unsettled) - len(self._unsettled) * step_s, 0.0)
        if self._state.cost_s is not None:
            return self._state.cost_s + settling_s, "measured at the last change"
        states = STATES[ended.precision]
        nbytes = (states.weight + states.optimizer) * parameter_count(ended.shape)
        assert self._start_s is not None
        return self._start_s + settling_s + 2 * nbytes / DISK_BYTES_PER_S, "start measured, checkpoint estimated"

    def decide(self, ended: EndedStep, readings: Readings, rates: CollectiveRates) -> LayoutDecision | None:
        """Decision of one rank for all, after which `state` is that to store; None where nothing has changed.

        Args:
            ended: the last step.
            readings: the worst of all ranks.
            rates: measured collectives.
        """
        here, step_s = LayoutChoice.of_run(ended.config), readings.step_s
        prices = Prices(ended, readings.machine(ended.device, rates), readings)
        predicted_s = 0.0 if prices.here is None else prices.here.step_s
        if not any(map(_differ, self._decided_s, (step_s, predicted_s))):
            return None
        self._decided_s = (step_s, predicted_s)
        left, known = ended.config.training.schedule.steps - ended.step, self._known(prices, here)
        options = self._options(prices, here, known, step_s=step_s) if predicted_s else []
        measured = f"{format_duration(step_s)} a step measured, {_links(rates)}"
        figures: dict[str, Any] = {"changed": False, "from": here.words, "step_s": step_s, "steps_left": left}
        if not options:
            reason = "no other layout of the ranks fits" if predicted_s else "no plan of it fits what was measured"
            figures["reason"] = reason
            return LayoutDecision(changes=False, line=f"keeps {here.words}: {measured}; {reason}", figures=figures)
        expected_s, there, how = min(options, key=lambda option: option[0])
        cost_s, cost_how = self._cost(ended, step_s)
        saved_s = left * (step_s - expected_s) - cost_s
        changes = saved_s > SHARE * left * step_s
        figures |= {"changed": changes, "to": there.words, "expected_s": expected_s, "reason": how}
        figures |= {"cost_s": cost_s, "saved_s": saved_s}
        reason = (
            f"{there.words} {format_duration(expected_s)} expected ({how}); steps left {left}, restart "
            f"{format_duration(cost_s)} ({cost_how}): the change {'saves' if saved_s > 0 else 'costs'} "
            f"{format_duration(abs(saved_s))}"
        )
        if not changes:
            line = f"keeps {here.words}: {measured}; {reason}, and is to save {SHARE:.0%} of the time left"
            return LayoutDecision(changes=False, line=line, figures=figures)
        others = tuple(one for one in known if one.choice.words != there.words)
        one = LeftLayout(choice=here, predicted_s=predicted_s, measured_s=step_s)
        self._state = AdaptationState(choice=there, left=(*others, one), decided_unix_s=time.time())
        line = f"changes from {here.words} to {there.words}: {measured}; {reason}"
        return LayoutDecision(changes=True, line=line, figures=figures)

    def _known(self, prices: Prices, here: LayoutChoice) -> list[LeftLayout]:
        """Other layouts that ran with links as they are now."""
        others = [one for one in self._state.left if one.choice.words != here.words]
        now_s = [prices.step_s(one.choice) for one in others]
        return [
            one
            for one, seconds in zip(others, now_s, strict=True)
            if seconds is not None and not _differ(seconds, one.predicted_s)
        ]

    def _options(
        self, prices: Prices, here: LayoutChoice, known: Sequence[LeftLayout], *, step_s: float
    ) -> list[tuple[float, LayoutChoice, str]]:
        """Expected steps of other layouts, and how they are known: those of `known` and the best of all others."""
        options = [(one.measured_s, one.choice, "measured when it was left") for one in known]
        found = prices.best({here.words, *(one.choice.words for one in known)})
        if found is not None and prices.here is not None:
            predicted_s = prices.here.step_s
            ratio = max([step_s / predicted_s, *(one.measured_s / one.predicted_s for one in known)])
            how = f"by predictions of {format_duration(predicted_s)} and {format_duration(found[1])}"
            options.append((ratio * found[1], found[0], how))
        return options


def _differ(one: float, other: float) -> bool:
    """Whether two measurements differ by more than SHARE."""
    return abs(one - other) > SHARE * min(one, other)


def _links(rates: CollectiveRates) -> str:
    """The measured all-gather, between nodes where there are several."""
    gathers = [fit for fit in rates.fits if fit.collective == "all_gather"]
    if not gathers:
        return "links not measured"
    fit = gathers[-1]
    return f"all-gather {format_duration(fit.latency_s)} and {fit.bytes_per_s / 1e9:.3g} GB/s"


def _all_ranks(flag: bool, device: torch.device) -> bool:
    every = torch.tensor(int(flag), device=device)
    dist.all_reduce(every, op=dist.ReduceOp.MIN)
    return bool(every)


def _process_s() -> float:
    """Seconds since this process began."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
