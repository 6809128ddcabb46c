"""Planning at run time: measures steps, makes a plan, applies it, compares it with its prediction, plans again.

Owns when plans are made and changed; plan_maker owns how one is made, plan_cache which batch shape has which. It moves no
bytes: an actuator applies plans to the engine. Invariants: a plan changes only between two steps, and one that did not pass
the checker is never applied; those of the solver have passed the simulator, too.

    step       0          1          2       3               4 ...
    setting    lean       lean       plan    plan            plan
    measured   -          profile    -       as predicted?
                                             if off by more than 5 %: profile corrected, planned again from step 2

While there is no plan every layer saves and moves its input and attention's outputs, and recomputes the rest, so that a
step that is measured needs little memory. A setting's first step is not measured, since kernels are chosen and each
layer's recompute is tried in it.

A shape that comes later is planned before its first step, from the profile of the nearest shape: layer bytes, and
device memory above what is in use between steps, are scaled with the tokens.

Bytes of a planned step that no lower tier had room for are kept or recomputed by the engine, which never fails for it; the
next plan leaves as many bytes of that tier free.

Every step is compared with the device's budget, as long as the run lasts. One that exceeds it is told, again whenever it
gets worse, and the next plan leaves that much free. Where a step without a plan exceeds it, or no plan fits, layers save
their input alone.

What a step's time is off by has two causes. If plain compute, without waits and recompute, takes another time than in
the profile, the machine's speed has changed: a second step confirms it, and recompute is scaled with it. If not, the
prediction was wrong, and is corrected. Steps of a settled plan are timed as wholes; if their pace changes for good, steps
are measured again to tell a change of speed, which is planned for, from one outside the layers, which is not.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from memo.autoplan.actuator import saved_peak_bytes
from memo.autoplan.limits import MEASURING
from memo.autoplan.plan_cache import CachedPlan, Phase, PlanCache, growth, joint
from memo.autoplan.plan_maker import PlanMaker
from memo.autoplan.plan_outcome import PlanOutcome, describe_level
from memo.autoplan.plan_source import PlanSource
from memo.autoplan.profile_from_step import (
    measured_hardware,
    measured_profile,
    scaled_profile,
    seconds_of,
)
from memo.autoplan.speed import corrected, speed_of, steadier
from memo.autoplan.step_evidence import NOTHING_SAVED, StepEvidence, single_rank, worst
from memo.autoplan.step_timeline import StepTimeline
from memo.errors import Infeasible, MemoError, PlanError
from memo.events import PLAN_MADE, Note
from memo.lru import LRU
from memo.mip.activation import ActivationProblem
from memo.mip.inputs import Signature
from memo.swap import Level, layer_input
from memo.units import format_bytes, format_duration
from memo.warn_user import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from memo.autoplan.actuator import Actuator
    from memo.autoplan.step_evidence import AllGather
    from memo.autoplan.step_timeline import StepTimes
    from memo.events import Lane, Tracer
    from memo.machine import LinkRates
    from memo.mip.activation import ActivationPlan, StagePrediction, StageTurns
    from memo.mip.inputs import Hardware, Profile

TOLERANCE = 0.05
"""Accepted relative difference between a measurement and its prediction."""
MAX_CORRECTIONS = 3
"""Times that one signature's plan is made again."""
SPEED_CHANGE = 0.1
"""Relative change of plain compute that makes a settled plan be made again."""
WORSE = 1.1
"""An excess over the device's budget is told again once it is so many times the worst one that was told."""
MOST_WARNED = 64
"""Causes of warnings that are remembered, to warn once for each."""


class AutoPlan(PlanSource):
    """Planning of one manager.

    Args:
        actuator: applies plans and measures steps.
        make_plan: solves a problem; returns a checked plan, or raises a MemoError.
        all_gather: collects a value from all ranks that must use the same plan.
        held: most microbatches in flight on this rank, by its pipeline's schedule; None: all of a step's.
        turns: order of forwards and backwards of this rank's pipeline stages, where it has several.
        tracer: the run's own trace, or None.
        model: the model's name in signatures.
    """

    def __init__(
        self,
        actuator: Actuator,
        make_plan: Callable[[ActivationProblem], ActivationPlan],
        *,
        all_gather: AllGather = single_rank,
        held: int | None = None,
        turns: StageTurns | None = None,
        tracer: Tracer | None = None,
        model: str = "model",
    ) -> None:
        self._actuator = actuator
        self._all_gather = all_gather
        self._maker = PlanMaker(actuator, make_plan, all_gather=all_gather, held=held, turns=turns)
        self._timeline = StepTimeline(tracer, now_ns=actuator.now_ns)
        self._model = model
        self._cache = PlanCache()
        self._shape: Signature | None = None  # of the step under way
        self._checks_budget = False  # a new shape or plan: this step's device memory is compared with the budget
        self._measured: Signature | None = None  # of the step whose device memory was measured last
        self._listening = False
        self._applied: ActivationPlan | Level = MEASURING
        self._forwards = 0  # since nothing was saved
        self._trained = False  # one of these forwards was with gradients
        self._rates: tuple[LinkRates | None, Mapping[Lane, float]] | None = None
        self._why_not: str | None = None
        self._warned: LRU[str, bool] = LRU(MOST_WARNED)
        self._worst_excess = 0
        self._ended = 0  # training steps
        self._progress = ""
        self._begun_s: float | None = None  # when the step under way began; None if it cannot be timed
        actuator.apply(MEASURING)

    @property
    def plan(self) -> ActivationPlan | None:
        """The plan in use; None while all layers are at one level."""
        cached = self._cache.current
        return None if cached is None else cached.plan

    def outcome(self) -> PlanOutcome:
        """Returns the state of planning for a report."""
        cached = self._cache.current or CachedPlan()
        return PlanOutcome(
            phase=cached.phase.name.lower().replace("_", " "),
            signature=self._cache.signature,
            plan=cached.plan,
            measured_s=cached.measured_s,
            predicted_peak_bytes=cached.predicted_peak_bytes,
            measured_peak_bytes=cached.measured_peak_bytes,
            plans=self._cache.plans,
            why_not=self._why_not,
            others_bytes=self._maker.others_bytes,
            late_bytes=cached.late_bytes,
            fallback=None if cached.plan is not None or self._why_not is None else self._maker.fallback(cached),
            level=cached.level,
            progress=self._progress,
        )

    def before_forward(self, *, may_end: bool = True) -> None:
        """Called before each forward. If nothing is saved, the step before it may have ended, and is then evaluated.

        Args:
            may_end: False between the microbatches of one step, of which the last one is measured.
        """
        idle = self._actuator.idle
        ended = idle and may_end
        spare, spare_in_all = self._actuator.spare_bytes() if ended else (0, 0)
        asks = ended and self._trained and self._has_changed_pace()
        lacking = self._actuator.take_lacking() if ended else (0, 0)
        states = self._all_gather((idle, ended, spare, spare_in_all, asks, lacking))
        if not all(state[0] for state in states):
            self._forwards += 1
            return
        cached = self._cache.current
        has_ended = all(state[1] for state in states)
        if cached is not None and self._trained and has_ended:
            self._end_step(
                cached,
                spare=min(state[2] for state in states),
                spare_in_all=min(state[3] for state in states),
                changed_pace=any(state[4] for state in states),
                lacking=(max(state[5][0] for state in states), max(state[5][1] for state in states)),
            )
        self._forwards, self._trained = 1, False
        if not self._observes:
            self._actuator.forget_peaks()
        if has_ended:
            self._begun_s = self._actuator.now_ns() / 1e9
        if self._listening:
            self._actuator.finish()  # or the spans of the microbatch before, which come late, were counted with this one's
            self._timeline.restart()

    def before_layer(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Called before each layer: the hidden states of a forward's first layer give the signature.

        Ranks that use one plan may have batches of different shapes: it is made for the largest of each dimension.
        """
        if self._forwards != 1 or self._trained:
            return  # the setting stays until the backward of all of these forwards is done
        hidden = layer_input(args, kwargs)
        if hidden is None or not torch.is_grad_enabled():
            return
        self._trained = True
        shape = joint(self._all_gather(_signature(self._model, hidden)))
        if shape == self._shape:
            return
        self._shape = shape
        cached = self._cache.find(shape)
        if cached is None:
            signature = self._cache.new_signature(shape)
            cached = self._first_entry(signature)
            self._cache.add(signature, cached)
        self._checks_budget = True
        self._actuator.restart_peaks()
        self._apply(cached)

    def after_forward(self) -> None:
        """Called after each forward: in the first step it is known what every plan needs.

        Raises:
            Infeasible: one layer's saved tensors, or the gradients, have no room beside what the program holds itself.
        """
        cached = self._cache.current
        if cached is None or cached.phase is not Phase.WARM_UP or not self._trained:
            return
        lacking = max(self._all_gather(self._actuator.lacking_bytes()))
        if lacking > 0:
            self._actuator.finish()
            raise Infeasible(self._actuator.why_infeasible())

    def _has_changed_pace(self) -> bool:
        """Adds the time of the step that has ended to its entry's pace; True if that asks for a closer look."""
        cached, begun_s = self._cache.current, self._begun_s
        if cached is None or begun_s is None or cached.phase is not Phase.SETTLED or self._checks_budget:
            return False
        if cached.plan is None or cached.plan.declined is not None or self._shape is None:
            return False
        return cached.pace.add((self._actuator.now_ns() / 1e9 - begun_s) / (self._shape.batch * self._shape.tokens))

    # End of a step.

    @property
    def _observes(self) -> bool:
        """True if the step under way is evaluated when it ends; else it is compared with the budget alone."""
        cached = self._cache.current
        return self._checks_budget or cached is None or cached.phase is not Phase.SETTLED

    def _end_step(
        self, cached: CachedPlan, *, spare: int, spare_in_all: int, changed_pace: bool, lacking: tuple[int, int]
    ) -> None:
        """Evaluates the step that has ended.

        Args:
            cached: its entry.
            spare: bytes of the device's budget that it did not use up to the end of backward, on the rank with the
                fewest; negative if it went above.
            spare_in_all: the same until now.
            changed_pace: on some rank, settled steps have come to take another time.
            lacking: bytes that the host and the disk had no room for, on the rank with the most of each.
        """
        number, self._ended = self._ended, self._ended + 1
        if spare_in_all < 0:
            self._warn_excess(-spare_in_all, after_backward=spare >= 0)
        lacks = cached.plan is not None and any(lacking) and cached.short_plans < MAX_CORRECTIONS
        if lacks:
            _leave_free(cached, lacking)
        if not self._observes and spare >= 0 and not lacks:
            if changed_pace:
                cached.phase = Phase.CHECKING
                self._apply(cached)
            return
        grown = self._growth(self._shape)
        peak = self._actuator.take_peak(growth=None if cached.plan is None else grown)
        trials = max(self._all_gather(self._actuator.take_trials()))
        if cached.plan is None or grown > 1.0:
            self._measured = self._shape
        self._checks_budget = False
        if spare < 0 and cached.plan is not None:
            self._plan_smaller(cached, max(self._all_gather(peak)), excess=-spare)
        elif lacks:
            self._plan_with_less_room(cached)
        elif cached.phase is Phase.WARM_UP:
            cached.phase = Phase.PROFILING
            self._measure_rates()  # before pages are locked, which stops copies
            self._actuator.prepare_host()
        elif spare < 0 and cached.setting is MEASURING:
            cached.phase, cached.setting = Phase.WARM_UP, Level.SAVE_INPUT
            cached.level = Level.SAVE_INPUT
        elif cached.phase is Phase.PLANNED:
            cached.phase = Phase.COMPARING
        elif cached.phase is Phase.PROFILING and trials and cached.repeated < MAX_CORRECTIONS:
            cached.repeated += 1  # what layers hold from their second call on may take another plan, and its trial time
        elif cached.phase.measures:
            looks_at_links = cached.phase is Phase.PROFILING
            evidence = self._evidence(cached, peak, trials=trials, looks_at_links=looks_at_links)
            found = worst(self._all_gather(evidence))
            if cached.phase is Phase.PROFILING:
                cached.spare_bytes = spare
                self._profile(cached, found)
            elif cached.phase is Phase.COMPARING:
                self._compare(cached, found)
            else:
                self._check(cached, found)
        self._progress = f"step {number}: {_state(cached)}"
        self._apply(cached)

    def _evidence(self, cached: CachedPlan, peak: int, *, trials: int, looks_at_links: bool) -> StepEvidence:
        """Measurements of the entry's step that has ended, on this rank."""
        assert self._shape is not None
        self._actuator.finish()
        times = self._timeline.times()
        if times is None:
            if not peak and not self._actuator.costs():
                return StepEvidence(problem=NOTHING_SAVED)
            return StepEvidence(problem="no layer ran forward and backward in the step that was measured")
        names = tuple(times.layers)
        if self._actuator.costs().keys() - times.layers.keys():
            return StepEvidence(problem="some layers did not run in the step that was measured")
        if cached.phase is Phase.PROFILING:
            cached.layers = names
            self._actuator.plan_for(names)
        elif names != cached.layers:
            return StepEvidence(problem="other layers ran than in the step that was measured")
        try:
            profile = measured_profile(
                times,
                self._actuator.costs(),
                self._shape,
                mlp_tiles=self._actuator.mlp_tiles,
                codec=self._actuator.codec,
                is_measuring=cached.setting is MEASURING and not trials,
                repeated=self._actuator.repeated(),
            )
        except MemoError as error:
            return StepEvidence(problem=str(error))
        return StepEvidence(
            profile=profile,
            hardware=self._hardware_of(times) if looks_at_links else None,
            calls=max(layer.calls for layer in times.layers.values()),
            measured_s=times.span_ns / 1e9,
            peak_bytes=peak,
            trials=trials,
        )

    def _hardware_of(self, times: StepTimes) -> Hardware:
        limits = self._actuator.limits()
        link, disks = self._measure_rates()
        return measured_hardware(
            times,
            device_bytes=limits.device_bytes + limits.others_bytes,
            host_bytes=limits.host_bytes,
            link=link,
            disks=disks,
        )

    def _measure_rates(self) -> tuple[LinkRates | None, Mapping[Lane, float]]:
        """Rates of the link and of the disks, measured alone, once."""
        if self._rates is None:
            self._actuator.finish()
            self._rates = self._actuator.link(), self._actuator.disk_rates()
        return self._rates

    def _apply(self, cached: CachedPlan) -> None:
        """Applies an entry's setting; a level is applied again for each length, which decides on the room beside it."""
        grown = self._growth(self._shape)
        self._actuator.plan_for(cached.layers)
        if cached.setting is not self._applied or (isinstance(cached.setting, Level) and grown != 1.0):
            self._applied = cached.setting
            self._actuator.apply(cached.setting, growth=grown)
            if cached.plan is not None and cached.plan.declined is None:
                limits = "; ".join(cached.plan.binding) or "no limit"
                self._timeline.tell(
                    Note(t=self._timeline.now(), step=self._timeline.step, cause=PLAN_MADE, message=limits)
                )
        self._actuator.watch(closely=self._observes)
        if cached.phase.measures:
            self._timeline.restart()
        if cached.phase.measures != self._listening:
            self._listening = cached.phase.measures
            self._actuator.listen(self._timeline if self._listening else None)

    def _profile(self, cached: CachedPlan, found: StepEvidence) -> None:
        try:
            if found.profile is None:
                raise PlanError(str(found.problem))
            self._maker.hardware = found.hardware
            cached.profile, cached.calls = found.profile, found.calls
            self._plan(cached)
            self._why_not = None
        except MemoError as error:
            self._give_up(cached, str(error))

    def _give_up(self, cached: CachedPlan, why: str) -> None:
        """Ends planning of an entry: the device's budget comes before speed."""
        if why == NOTHING_SAVED:
            cached.phase, self._why_not = Phase.SETTLED, why
            return
        if cached.profile is None or cached.spare_bytes < 0:
            cached.level = Level.SAVE_INPUT
        cached.phase, cached.setting = Phase.SETTLED, cached.level
        self._why_not = why
        self._warn("no-plan", f"no plan: {why}; {describe_level(cached.level)}")

    def _plan(self, cached: CachedPlan, *, excess: int = 0) -> None:
        """Makes a plan from the entry's profile, and sets it to be tried in the next step.

        Args:
            cached: the entry.
            excess: bytes above the device's budget in a step by the plan before; this one leaves them free, whether
                or not what was measured explains them.

        Raises:
            MemoError: no plan fits, or it cannot be made. The entry's setting is as before.
        """
        assert cached.profile is not None
        grown = self._growth(cached.profile.signature)
        self._take(cached, *self._maker.make(cached, growth=grown, excess=excess))

    def _take(self, cached: CachedPlan, plan: ActivationPlan, others_bytes: int, unmeasured_bytes: int) -> None:
        """Sets a plan to be tried in the next step."""
        assert cached.profile is not None
        cached.others_bytes, cached.unmeasured_bytes = others_bytes, unmeasured_bytes
        cached.planned(plan)
        cached.late_bytes = self._actuator.late_bytes(plan)
        cached.predicted_peak_bytes = saved_peak_bytes(plan, cached.profile) + cached.late_bytes
        self._checks_budget = True  # also for a plan that moves nothing: its profile may be incomplete

    def _growth(self, shape: Signature | None) -> float:
        """Tokens of a shape as a multiple of those of the step whose device memory was measured last."""
        return 1.0 if shape is None or self._measured is None else growth(self._measured, shape)

    def _first_entry(self, signature: Signature) -> CachedPlan:
        """Makes the entry of a new shape: planned at once from the nearest profile, or to be measured first."""
        known = self._cache.nearest(signature)
        if known is None or known.profile is None:
            return CachedPlan()
        try:
            profile = scaled_profile(known.profile, signature)
            cached = CachedPlan(profile=profile, level=known.level, layers=known.layers, calls=known.calls)
            self._actuator.plan_for(known.layers)
            self._plan(cached)
        except MemoError:
            return CachedPlan(setting=known.level, level=known.level)  # measured like the first one
        return cached

    def _compare(self, cached: CachedPlan, found: StepEvidence) -> None:
        """Compares a plan's step with its prediction; if it is off, corrects the profile and plans again."""
        assert cached.plan is not None
        assert cached.profile is not None
        if found.profile is None:
            self._settle(cached)
            return
        predicted, profile = cached.plan.stages[0], scaled_profile(found.profile, cached.profile.signature)
        fewer = seconds_of(found.profile) / seconds_of(profile)  # the plan may be for more tokens than the step had
        # The time of several microbatches includes pipeline bubbles; trial recomputes are not in the plan.
        is_timed = found.calls == 1 and not found.trials
        if is_timed:
            cached.timed(found.measured_s, predicted.microbatch_s * fewer)
        cached.measured_peak_bytes = peak = found.peak_bytes
        cached.peak_off = peak / cached.predicted_peak_bytes - 1 if cached.predicted_peak_bytes else 0.0
        if abs(cached.step_off or 0.0) <= TOLERANCE and cached.peak_off <= TOLERANCE:
            self._settle_or_use_room(cached)
        elif cached.corrections == MAX_CORRECTIONS:
            self._warn_off(predicted, cached)
            self._settle(cached)
        elif is_timed:
            self._correct_speed(cached, profile)
        else:
            self._correct(cached, cached.profile)

    def _correct_speed(self, cached: CachedPlan, profile: Profile) -> None:
        """Plans again after a step that took another time; the next one confirms it where the machine's speed changed."""
        assert cached.profile is not None
        speed = speed_of(cached.profile, profile)
        if abs(speed - 1) > TOLERANCE:
            cached.samples.append(profile)
            if len(cached.samples) == 1:
                return  # compared once more
            profile, agree = steadier(cached.profile, cached.samples)
            if not agree:
                self._settle(cached)
                return
        self._correct(cached, corrected(cached.profile, profile))

    def _settle_or_use_room(self, cached: CachedPlan) -> None:
        """Settles a plan, unless the room that it left for what had not been measured makes a step shorter."""
        assert cached.plan is not None
        assert cached.profile is not None
        if cached.unmeasured_bytes > TOLERANCE * cached.plan.problem.budgets.device_bytes:
            with contextlib.suppress(MemoError):
                found = self._maker.make(cached, growth=self._growth(cached.profile.signature))
                if found[0].step_s < (1 - TOLERANCE) * cached.plan.step_s:
                    self._take(cached, *found)
                    return
        self._settle(cached)

    def _check(self, cached: CachedPlan, found: StepEvidence) -> None:
        """Evaluates a settled plan's step that was measured again: two that agree make the machine's speed another one."""
        assert cached.profile is not None
        profile = None if found.profile is None else scaled_profile(found.profile, cached.profile.signature)
        if profile is None or found.trials or abs(speed_of(cached.profile, profile) - 1) <= SPEED_CHANGE:
            self._settle(cached)
            return
        cached.samples.append(profile)
        if len(cached.samples) == 1:
            return  # checked once more
        profile, agree = steadier(cached.profile, cached.samples)
        if not agree:
            self._settle(cached)
            return
        cached.corrections = 0
        if found.calls == 1 and cached.plan is not None and found.profile is not None:
            fewer = seconds_of(found.profile) / seconds_of(cached.samples[-1])
            cached.timed(found.measured_s, cached.plan.stages[0].microbatch_s * fewer)
        self._correct(cached, corrected(cached.profile, profile))

    def _settle(self, cached: CachedPlan) -> None:
        """Ends the measuring of a plan that has kept the budget."""
        cached.phase, cached.overruns, cached.samples = Phase.SETTLED, 0, []
        cached.pace.restart()

    def _plan_smaller(self, cached: CachedPlan, peak: int, *, excess: int) -> None:
        """Plans again after a step that exceeded the device's budget.

        Args:
            cached: the entry whose plan was in use.
            peak: the step's peak of saved tensors in bytes, the largest of all ranks. Its other memory is in `limits`.
            excess: bytes above the budget.
        """
        assert cached.plan is not None
        cached.overruns += 1
        try:
            if cached.overruns > MAX_CORRECTIONS:
                raise PlanError(f"{cached.overruns} plans took more device memory than the budget")
            known = max(0, peak - cached.predicted_peak_bytes - cached.margin_bytes)
            cached.margin_bytes += known
            self._plan(cached, excess=max(0, excess - known))
        except MemoError as error:
            self._give_up(cached, str(error))

    def _plan_with_less_room(self, cached: CachedPlan) -> None:
        """Plans again after a step in which a lower tier lacked room; keeps the plan if none can be made."""
        try:
            self._plan(cached)
        except MemoError as error:
            cached.short_plans = MAX_CORRECTIONS
            self._settle(cached)
            self._warn("no-plan", f"the plan stays as it is: {error}")

    def _correct(self, cached: CachedPlan, profile: Profile) -> None:
        """Plans again from a corrected profile; keeps the plan if none can be made, and tries no plan twice."""
        before = cached.plan
        assert before is not None
        cached.corrections += 1
        try:
            cached.profile = profile
            self._plan(cached)
            if cached.plan is not None and cached.plan.layers == before.layers:
                predicted = cached.plan.stages[0]
                if cached.step_off is not None:
                    cached.step_off = (1 + cached.step_off) * before.stages[0].microbatch_s / predicted.microbatch_s - 1
                if abs(cached.step_off or 0.0) > TOLERANCE or (cached.peak_off or 0.0) > TOLERANCE:
                    self._warn_off(predicted, cached)
                self._settle(cached)
        except MemoError as error:
            self._settle(cached)
            self._warn("no-plan", f"the plan stays as it is: {error}")

    def _warn_off(self, predicted: StagePrediction, cached: CachedPlan) -> None:
        signature = self._cache.signature
        assert signature is not None
        measured = "" if cached.measured_s is None else f"{format_duration(cached.measured_s)} and "
        if (cached.step_off or 0.0) <= 0 and (cached.peak_off or 0.0) <= 0:
            return  # faster, and in less memory
        self._warn(
            f"off {signature}",
            f"the plan for {signature.batch} x {signature.tokens} tokens predicts "
            f"{format_duration(predicted.microbatch_s)} and {format_bytes(cached.predicted_peak_bytes)} of activations; "
            f"measured {measured}{format_bytes(cached.measured_peak_bytes or 0)}",
        )

    def _warn_excess(self, excess: int, *, after_backward: bool) -> None:
        """Warns of the first excess, and of each that is worse than all before."""
        assert self._shape is not None
        if excess < WORSE * self._worst_excess:
            return
        self._worst_excess = excess
        when = ", after its backward" if after_backward else ""
        message = (
            f"a step of {self._shape.batch} x {self._shape.tokens} tokens took {format_bytes(excess)} more device memory "
            f"than its budget of {format_bytes(self._actuator.total_bytes)}{when}; planning goes on"
        )
        warn_user(message)

    def _warn(self, cause: str, message: str) -> None:
        if cause not in self._warned:
            self._warned[cause] = True
            warn_user(message)


def _state(cached: CachedPlan) -> str:
    """What planning of an entry does after a step."""
    plan = cached.plan
    if plan is None:
        what = {
            Phase.WARM_UP: "the next step tries each layer's recompute",
            Phase.PROFILING: "the next step is measured",
        }
        return what.get(cached.phase, "no plan fits")
    seconds = f"{format_duration(plan.stages[0].microbatch_s)} predicted"
    if cached.phase is Phase.PLANNED:
        return f"the next step is the first by a plan, {seconds}"
    if cached.phase is not Phase.SETTLED:
        return f"the next step is compared with the plan's prediction, {seconds}"
    measured = "" if cached.measured_s is None else f", {format_duration(cached.measured_s)} measured"
    return f"the plan holds, {seconds}{measured}"


def _leave_free(cached: CachedPlan, lacking: tuple[int, int]) -> None:
    """Has the next plan leave the bytes free that the host and the disk lacked, and one storage more for rounding."""
    assert cached.profile is not None
    cached.short_plans += 1
    largest = max(layer.largest_storage_bytes for layer in cached.profile.classes)
    host, disk = (nbytes + largest if nbytes else 0 for nbytes in lacking)
    cached.host_margin_bytes += host
    cached.disk_margin_bytes += disk


def _signature(model: str, hidden: torch.Tensor) -> Signature:
    batch = hidden.numel() // (hidden.size(-1) * hidden.size(-2)) if hidden.ndim > 2 else 1
    tokens = hidden.size(-2) if hidden.ndim > 1 else 1
    return Signature(model=model, batch=max(batch, 1), tokens=max(tokens, 1), dtype=str(hidden.dtype).split(".")[-1])
