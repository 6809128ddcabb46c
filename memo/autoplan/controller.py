"""Planning at run time: measures steps, makes a plan, applies it, compares it with its prediction, plans again.

Owns when plans are made and changed; memo.autoplan.plan_cache owns which batch shape has which plan. It moves no bytes:
an actuator applies plans to the engine. Invariants: a plan changes only between two steps, and one that did not pass
the checker and the simulator is never applied.

    step       1         2        3          4       5                6 ...
    setting    safest    mixed    mixed      plan    plan             plan
    measured   -         -        profile    -       as predicted?
                                                     if off by more than 5 %: profile corrected, planned again from step
                                                     4

The safest setting moves attention outputs and recomputes the rest, so a measured step does not run out of memory where
the plan would not; tensors for which the tiers have no room stay on the device, as in a plan. The mixed setting has
tokens at each level of recompute, to time them: as many as the safest step left room for. A setting's first step is not
measured, since kernels are chosen and each layer's recompute is tried in it.

A shape that comes later is planned before its first step, from the profile of the nearest shape: layer bytes, and
device memory above what is in use between steps, are scaled with the tokens. If a step exceeds the device's budget all
the same, a warning says so, and the next plan leaves that much free.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

from memo.autoplan.actuator_protocol import MEASURING, SAFEST, Setting
from memo.autoplan.plan_cache import CachedPlan, Phase, PlanCache, growth, joint
from memo.autoplan.plan_outcome import PlanOutcome
from memo.autoplan.profile_from_step import (
    beside_layers,
    measured_hardware,
    measured_profile,
    scaled_profile,
    seconds_of,
)
from memo.autoplan.step_evidence import StepEvidence, least, single_rank, worst
from memo.autoplan.step_timeline import StepTimeline
from memo.errors import Infeasible, MemoError, PlanError
from memo.lru import LRU
from memo.mip.activation import ActivationProblem, Budgets, Pipeline, predict_stages
from memo.mip.inputs import Signature
from memo.swap import layer_input
from memo.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from memo.autoplan.actuator_protocol import ActuatorProtocol
    from memo.autoplan.step_evidence import AllGather
    from memo.autoplan.step_timeline import StepTimes
    from memo.events import Tracer
    from memo.mip.activation import ActivationPlan, StagePrediction, StageTurns
    from memo.mip.inputs import Hardware, Profile

__all__ = ["AutoPlan"]

TOLERANCE = 0.05
"""Accepted relative difference between a measurement and its prediction."""
MAX_CORRECTIONS = 3
"""Times that one signature's plan is made again."""
MOST_WARNED = 64
"""Causes of warnings that are remembered, to warn once for each."""


class AutoPlan:
    """Planning of one manager; a plan source of memo.manager.

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
        actuator: ActuatorProtocol,
        make_plan: Callable[[ActivationProblem], ActivationPlan],
        *,
        all_gather: AllGather = single_rank,
        held: int | None = None,
        turns: StageTurns | None = None,
        tracer: Tracer | None = None,
        model: str = "model",
    ) -> None:
        self._actuator = actuator
        self._make_plan = make_plan
        self._all_gather = all_gather
        self._held = held
        self._turns = turns
        self._timeline = StepTimeline(tracer)
        self._model = model
        self._cache = PlanCache()
        self._shape: Signature | None = None  # of the step under way
        self._checks_budget = False  # a new shape or plan: this step's device memory is compared with the budget
        self._measured: Signature | None = None  # of the step whose device memory was measured last
        self._listening = False
        self._applied: ActivationPlan | Setting = MEASURING
        self._forwards = 0  # since nothing was saved
        self._trained = False  # one of these forwards was with gradients
        self._planning_s = 0.0
        self._others_bytes = 0
        self._hardware: Hardware | None = None
        self._why_not: str | None = None
        self._warned: LRU[str, bool] = LRU(MOST_WARNED)
        actuator.apply(MEASURING)

    @property
    def plan(self) -> ActivationPlan | None:
        """The plan in use; None while a setting is used instead."""
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
            planning_s=self._planning_s,
            why_not=self._why_not,
            others_bytes=self._others_bytes,
        )

    def before_forward(self, *, may_end: bool = True) -> None:
        """Called before each forward. If nothing is saved, the step before it may have ended, and is then evaluated.

        Args:
            may_end: False between the microbatches of one step, of which the last one is measured.
        """
        idle = self._actuator.idle
        ended = idle and may_end
        excess = self._actuator.excess_bytes() if ended and self._observes else 0
        states = self._all_gather((idle, ended, excess))
        if not all(rank_idle for rank_idle, _, _ in states):
            self._forwards += 1
            return
        cached = self._cache.current
        if cached is not None and self._trained and all(rank_ended for _, rank_ended, _ in states):
            self._end_step(cached, excess=max(rank_excess for _, _, rank_excess in states))
        self._forwards, self._trained = 1, False
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

    # End of a step.

    @property
    def _observes(self) -> bool:
        """True if the step under way is evaluated when it ends; else torch's statistics are left alone."""
        cached = self._cache.current
        return self._checks_budget or cached is None or cached.phase is not Phase.SETTLED

    def _end_step(self, cached: CachedPlan, *, excess: int) -> None:
        if not self._observes:
            return
        grown = self._growth(self._shape)
        peak = self._actuator.take_peak(growth=None if cached.plan is None else grown)
        trials = self._actuator.take_trials()
        if cached.plan is None or grown > 1.0:
            self._measured = self._shape
        self._checks_budget = False
        if excess:
            self._warn_excess(excess)
        if excess and cached.plan is not None:
            self._plan_smaller(cached, max(self._all_gather(peak)))
        elif cached.phase is Phase.WARM_UP:
            share = min(self._all_gather(self._actuator.spare_share(peak, max(self._forwards, self._held or 1))))
            cached.phase, cached.setting = Phase.MIXED, dataclasses.replace(MEASURING, matmuls=share)
        elif cached.phase is Phase.MIXED:
            cached.phase = Phase.PROFILING
        elif cached.phase is Phase.PLANNED:
            cached.phase = Phase.COMPARING
        elif cached.phase.measures:
            looks_at_links = cached.phase is Phase.PROFILING
            found = worst(self._all_gather(self._evidence(peak, trials=trials, looks_at_links=looks_at_links)))
            if cached.phase is Phase.PROFILING:
                self._profile(cached, found)
            else:
                self._compare(cached, found)
        self._apply(cached)

    def _evidence(self, peak: int, *, trials: int, looks_at_links: bool) -> StepEvidence:
        """Measurements of the step that has ended, on this rank."""
        assert self._shape is not None
        self._actuator.finish()
        times = self._timeline.times()
        if times is None:
            return StepEvidence(problem="no layer ran forward and backward in the step that was measured")
        if len(times.layers) < self._actuator.n_layers:
            return StepEvidence(problem="some layers did not run in the step that was measured")
        try:
            profile = measured_profile(times, self._actuator.costs(), self._shape, mlp_tiles=self._actuator.mlp_tiles)
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
        return measured_hardware(
            times,
            device_bytes=limits.device_bytes + limits.others_bytes,
            host_bytes=limits.host_bytes,
            link=self._actuator.link(),
        )

    def _apply(self, cached: CachedPlan) -> None:
        """Applies an entry's setting; one that is no plan depends on the length, and is applied again for each."""
        grown = self._growth(self._shape)
        if cached.setting is not self._applied or (isinstance(cached.setting, Setting) and grown != 1.0):
            self._applied = cached.setting
            self._actuator.apply(cached.setting, growth=grown)
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
            self._hardware = found.hardware
            cached.profile, cached.calls = found.profile, found.calls
            self._plan(cached)
            self._why_not = None
        except MemoError as error:
            others = self._others_bytes if isinstance(error, Infeasible) else 0
            beside = f", beside {format_bytes(others)} for everything but saved tensors" if others else ""
            self._give_up(cached, f"{error}{beside}")

    def _give_up(self, cached: CachedPlan, why: str) -> None:
        """Ends planning of an entry at the safest setting: the device's budget comes before speed."""
        cached.phase, cached.setting = Phase.SETTLED, SAFEST
        self._why_not = why
        self._warn("no-plan", f"no plan: {why}; every layer stays at the safest setting")

    def _plan(self, cached: CachedPlan) -> None:
        """Makes a plan from the entry's profile, and sets it to be tried in the next step.

        Raises:
            MemoError: no plan fits, or it cannot be made. The entry's setting is as before.
        """
        assert cached.profile is not None
        assert self._hardware is not None
        begin = time.perf_counter()
        limits = least(self._all_gather(self._actuator.limits(self._growth(cached.profile.signature))))
        profile, self._others_bytes = beside_layers(cached.profile, limits)
        room = limits.device_bytes + limits.others_bytes - self._others_bytes
        problem = ActivationProblem(
            profile=profile,
            hardware=self._hardware,
            budgets=Budgets(
                device_bytes=max(0, room - cached.margin_bytes),
                host_bytes=limits.host_bytes,
                disk_bytes=limits.disk_bytes,
            ),
            pipeline=self._pipeline(cached.calls),
        )
        # All ranks solve the same problem, and all use the first rank's answer: rounding may differ between machines.
        answer = self._all_gather(self._solve(problem))[0]
        self._planning_s += time.perf_counter() - begin
        if isinstance(answer, MemoError):
            raise answer
        cached.planned(answer)
        saved_alone = dataclasses.replace(answer.problem, profile=cached.profile)
        cached.predicted_peak_bytes = predict_stages(saved_alone, answer.layers)[0].peak_device_bytes
        self._checks_budget = True  # also for a plan that moves nothing: its profile may be incomplete

    def _pipeline(self, calls: int) -> Pipeline:
        if self._turns is not None and self._turns.microbatches == calls:
            return Pipeline(microbatches=calls, own=self._turns)
        return Pipeline(microbatches=calls, held=min(self._held or calls, calls))

    def _solve(self, problem: ActivationProblem) -> ActivationPlan | MemoError:
        try:
            return self._make_plan(problem)
        except MemoError as error:
            return error

    def _growth(self, shape: Signature | None) -> float:
        """Tokens of a shape as a multiple of those of the step whose device memory was measured last."""
        return 1.0 if shape is None or self._measured is None else growth(self._measured, shape)

    def _first_entry(self, signature: Signature) -> CachedPlan:
        """Makes the entry of a new shape: planned at once from the nearest profile, or to be measured first."""
        known = self._cache.nearest(signature)
        if known is not None and known.profile is not None:
            try:
                cached = CachedPlan(profile=scaled_profile(known.profile, signature), calls=known.calls)
                self._plan(cached)
                return cached
            except MemoError:
                pass  # measured like the first one
        return CachedPlan()

    def _compare(self, cached: CachedPlan, found: StepEvidence) -> None:
        """Compares a plan's step with its prediction; if it is off, corrects the profile and plans again."""
        assert cached.plan is not None
        assert cached.profile is not None
        if found.profile is None:
            cached.phase = Phase.SETTLED
            return
        predicted, profile = cached.plan.stages[0], scaled_profile(found.profile, cached.profile.signature)
        fewer = seconds_of(found.profile) / seconds_of(profile)  # the plan may be for more tokens than the step had
        # The time of several microbatches includes pipeline bubbles; trial recomputes are not in the plan.
        is_timed = found.calls == 1 and not found.trials
        if is_timed:
            cached.measured_s = found.measured_s
            cached.step_off = found.measured_s / (predicted.microbatch_s * fewer) - 1
        cached.measured_peak_bytes = peak = found.peak_bytes
        cached.peak_off = peak / cached.predicted_peak_bytes - 1 if cached.predicted_peak_bytes else 0.0
        if abs(cached.step_off or 0.0) <= TOLERANCE and cached.peak_off <= TOLERANCE:
            cached.phase = Phase.SETTLED
        elif cached.corrections == MAX_CORRECTIONS:
            self._warn_off(predicted, cached)
            cached.phase = Phase.SETTLED
        else:
            self._correct(cached, _corrected(cached.profile, profile) if is_timed else cached.profile)

    def _plan_smaller(self, cached: CachedPlan, peak: int) -> None:
        """Plans again after a step that exceeded the device's budget.

        Args:
            cached: the entry whose plan was in use.
            peak: the step's peak of saved tensors in bytes, the largest of all ranks. Its other memory is in `limits`.
        """
        assert cached.plan is not None
        assert cached.profile is not None
        cached.margin_bytes = max(cached.margin_bytes, peak - cached.predicted_peak_bytes)
        if cached.corrections == MAX_CORRECTIONS:
            self._give_up(cached, f"{MAX_CORRECTIONS + 1} plans took more device memory than the budget")
            return
        cached.corrections += 1
        try:
            self._plan(cached)
        except MemoError as error:
            self._give_up(cached, str(error))

    def _correct(self, cached: CachedPlan, profile: Profile) -> None:
        """Plans again from a corrected profile; keeps the plan if none can be made."""
        cached.corrections += 1
        try:
            cached.profile = profile
            self._plan(cached)
        except MemoError as error:
            cached.phase = Phase.SETTLED
            self._warn("no-plan", f"the plan stays as it is: {error}")

    def _warn_off(self, predicted: StagePrediction, cached: CachedPlan) -> None:
        signature = self._cache.signature
        assert signature is not None
        measured = "" if cached.measured_s is None else f"{format_duration(cached.measured_s)} and "
        self._warn(
            f"off {signature}",
            f"the plan for {signature.batch} x {signature.tokens} tokens predicts "
            f"{format_duration(predicted.microbatch_s)} and {format_bytes(cached.predicted_peak_bytes)} of activations; "
            f"measured {measured}{format_bytes(cached.measured_peak_bytes or 0)}",
        )

    def _warn_excess(self, excess: int) -> None:
        assert self._shape is not None
        self._warn(
            "excess",
            f"a step of {self._shape.batch} x {self._shape.tokens} tokens took {format_bytes(excess)} more device memory "
            f"than its budget",
        )

    def _warn(self, cause: str, message: str) -> None:
        if cause not in self._warned:
            self._warned[cause] = True
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _corrected(profile: Profile, measured: Profile) -> Profile:
    """Returns the profile with the times of a later step and its own bytes: a layer that is kept shows no levels."""
    fresh = measured.layer_profiles()
    by_class: dict[str, list[tuple[float, float]]] = {}
    for name, layer in zip(profile.layers, fresh, strict=True):
        by_class.setdefault(name, []).append((layer.forward_s, layer.backward_s))

    def mean(name: str, which: int) -> float:
        return sum(pair[which] for pair in by_class[name]) / len(by_class[name])

    return dataclasses.replace(
        profile,
        role=measured.role,
        classes=tuple(
            dataclasses.replace(known, forward_s=mean(known.name, 0), backward_s=mean(known.name, 1))
            for known in profile.classes
        ),
        embedding=measured.embedding,
        head=measured.head,
    )


def _signature(model: str, hidden: torch.Tensor) -> Signature:
    batch = hidden.numel() // (hidden.size(-1) * hidden.size(-2)) if hidden.ndim > 2 else 1
    tokens = hidden.size(-2) if hidden.ndim > 1 else 1
    return Signature(model=model, batch=max(batch, 1), tokens=max(tokens, 1), dtype=str(hidden.dtype).split(".")[-1])
