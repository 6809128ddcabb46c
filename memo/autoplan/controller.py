"""Decides at run time what becomes of each layer's tensors: measure one step, plan, check, run, compare, plan again.

Owns the making of plans and when they change; which shape of batch has which is memo.autoplan.plan_cache. It moves no
byte: placements go to the engine, levels to the token-wise treatment. A plan is in force between two steps only; one
that did not pass the checker and the simulator never is.

    step       1         2        3          4       5               6 ...
    setting    safest    mixed    mixed      plan    plan            plan
    measured   -         -        profile    -       as predicted?   -
                                                     more than 5 % off: profile corrected, planned again, and as from 4

The safest setting moves attention's results and recomputes the rest, so that what is measured never runs out of memory
where the plan would not: what the tiers have no room for stays on the device, as a plan would have to have it. The mixed one
has tokens at each level of recompute, to time them, as many as the safest one showed to have room. A setting's first step
is not measured: kernels are being chosen, and each layer's recompute is being tried out.

A shape that comes later is planned before its first step, of what the nearest one showed: layers' bytes and what else the
device holds beyond its rest grow with the tokens. A step that took more than the device's budget all the same is told, and
its plan made again with that much less.
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
from memo.autoplan.step_evidence import StepEvidence, alone, least, worst
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
    from memo.autoplan.step_evidence import Everyones
    from memo.autoplan.step_timeline import StepTimes
    from memo.events import Tracer
    from memo.mip.activation import ActivationPlan, StagePrediction, StageTurns
    from memo.mip.inputs import Hardware, Profile

__all__ = ["AutoPlan"]

TOLERANCE = 0.05
"""How far a measurement may be from its prediction."""
MAX_CORRECTIONS = 3
MOST_WARNED = 64


class AutoPlan:
    """One manager's planning. `make_plan` answers a problem with a plan that was checked, or raises a MemoError.

    `everyones` asks the ranks that must carry out the same plan. `held` says how many microbatches a pipeline's schedule has
    in flight here; None takes all of a step's for in flight. `turns` says it turn by turn, of several stages.
    """

    def __init__(
        self,
        managed: ActuatorProtocol,
        make_plan: Callable[[ActivationProblem], ActivationPlan],
        *,
        everyones: Everyones = alone,
        held: int | None = None,
        turns: StageTurns | None = None,
        beyond: Tracer | None = None,
        model: str = "model",
    ) -> None:
        self._managed = managed
        self._make_plan = make_plan
        self._everyones = everyones
        self._held = held
        self._turns = turns
        self._figures = StepTimeline(beyond)
        self._model = model
        self._regimes = PlanCache()
        self._shape: Signature | None = None  # of the step under way
        self._watches = False  # its shape is not that of the step before: does it keep the budget?
        self._measured: Signature | None = None  # of the one whose device memory was looked at last
        self._listening = False
        self._in_force: ActivationPlan | Setting = MEASURING
        self._forwards = 0  # since the last time that nothing was alive
        self._trained = False  # one of them was of training
        self._planning_s = 0.0
        self._others_bytes = 0
        self._hardware: Hardware | None = None
        self._why_not: str | None = None
        self._warned: LRU[str, bool] = LRU(MOST_WARNED)
        managed.use(MEASURING)

    @property
    def plan(self) -> ActivationPlan | None:
        """In force now; None while the safest setting is."""
        regime = self._regimes.current
        return None if regime is None else regime.plan

    def use(self) -> PlanOutcome:
        """For a report."""
        regime = self._regimes.current or CachedPlan()
        return PlanOutcome(
            phase=regime.phase.name.lower().replace("_", " "),
            signature=self._regimes.signature,
            plan=regime.plan,
            measured_s=regime.measured_s,
            predicted_peak_bytes=regime.predicted_peak_bytes,
            measured_peak_bytes=regime.measured_peak_bytes,
            plans=self._regimes.plans,
            planning_s=self._planning_s,
            why_not=self._why_not,
            others_bytes=self._others_bytes,
        )

    def before_forward(self) -> None:
        """A forward is about to begin. Where nothing is alive, the step before it is over and can be judged."""
        idle = self._managed.idle
        said = self._everyones((idle, self._managed.excess_bytes() if idle and self._judges else 0))
        if not all(theirs for theirs, _ in said):
            self._forwards += 1
            return
        regime = self._regimes.current
        if regime is not None and self._trained:
            self._conclude(regime, excess=max(excess for _, excess in said))
        self._forwards, self._trained = 1, False
        if self._listening:
            self._figures.restart()

    def before_layer(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A layer is about to run: what a forward's first one is given is the signature. A decoder may have other tokens.

        Ranks that carry out one plan may have batches of other shapes: it is made for the largest of each dimension.
        """
        if self._forwards != 1 or self._trained:
            return  # what is in force stays until all of these have been backwarded
        hidden = layer_input(args, kwargs)
        if hidden is None or not torch.is_grad_enabled():
            return
        self._trained = True
        shape = joint(self._everyones(_signature(self._model, hidden)))
        if shape == self._shape:
            return
        self._shape = shape
        regime = self._regimes.find(shape)
        if regime is None:
            signature = self._regimes.new_signature(shape)
            regime = self._new(signature)
            self._regimes.add(signature, regime)
        self._watches = True
        self._managed.restart_peaks()
        self._enter(regime)

    # One step's end.

    @property
    def _judges(self) -> bool:
        """Whether the step under way is looked at when it is over. The others leave torch's statistics to the program."""
        regime = self._regimes.current
        return self._watches or regime is None or regime.phase is not Phase.SETTLED

    def _conclude(self, regime: CachedPlan, *, excess: int) -> None:
        if not self._judges:
            return
        grown = self._growth(self._shape)
        peak = self._managed.take_peak(growth=None if regime.plan is None else grown)
        trials = self._managed.take_trials()
        if regime.plan is None or grown > 1.0:
            self._measured = self._shape
        self._watches = False
        if excess:
            self._tell_excess(excess)
        if excess and regime.plan is not None:
            self._keep_less(regime, max(self._everyones(peak)))
        elif regime.phase is Phase.WARM_UP:
            share = min(self._everyones(self._managed.spare_share(peak, max(self._forwards, self._held or 1))))
            regime.phase, regime.setting = Phase.MIXED, dataclasses.replace(MEASURING, matmuls=share)
        elif regime.phase is Phase.MIXED:
            regime.phase = Phase.PROFILING
        elif regime.phase is Phase.PLANNED:
            regime.phase = Phase.COMPARING
        elif regime.phase.measures:
            looks_at_links = regime.phase is Phase.PROFILING
            found = worst(self._everyones(self._found(peak, trials=trials, looks_at_links=looks_at_links)))
            if regime.phase is Phase.PROFILING:
                self._profile(regime, found)
            else:
                self._compare(regime, found)
        self._enter(regime)

    def _found(self, peak: int, *, trials: int, looks_at_links: bool) -> StepEvidence:
        """Of the step that is over, on this rank."""
        assert self._shape is not None
        self._managed.finish()
        times = self._figures.times()
        if times is None:
            return StepEvidence(problem="no layer ran forward and backward in the step that was measured")
        if len(times.layers) < self._managed.n_layers:
            return StepEvidence(problem="some layers did not run in the step that was measured")
        try:
            profile = measured_profile(times, self._managed.costs(), self._shape, mlp_tiles=self._managed.mlp_tiles)
        except MemoError as error:
            return StepEvidence(problem=str(error))
        return StepEvidence(
            profile=profile,
            hardware=self._machine(times) if looks_at_links else None,
            calls=max(layer.calls for layer in times.layers.values()),
            measured_s=times.span_ns / 1e9,
            peak_bytes=peak,
            trials=trials,
        )

    def _machine(self, times: StepTimes) -> Hardware:
        limits = self._managed.limits()
        return measured_hardware(
            times,
            device_bytes=limits.device_bytes + limits.others_bytes,
            host_bytes=limits.host_bytes,
            link=self._managed.link(),
        )

    def _enter(self, regime: CachedPlan) -> None:
        """The regime's setting comes into force; one that is a bound and no plan, anew at each length."""
        grown = self._growth(self._shape)
        if regime.setting is not self._in_force or (isinstance(regime.setting, Setting) and grown != 1.0):
            self._in_force = regime.setting
            self._managed.use(regime.setting, growth=grown)
        self._managed.watch(closely=self._judges)
        if regime.phase.measures:
            self._figures.restart()
        if regime.phase.measures != self._listening:
            self._listening = regime.phase.measures
            self._managed.listen(self._figures if self._listening else None)

    def _profile(self, regime: CachedPlan, found: StepEvidence) -> None:
        try:
            if found.profile is None:
                raise PlanError(str(found.problem))
            self._hardware = found.hardware
            regime.profile, regime.calls = found.profile, found.calls
            self._plan(regime)
            self._why_not = None
        except MemoError as error:
            others = self._others_bytes if isinstance(error, Infeasible) else 0
            beside = f", beside {format_bytes(others)} for everything but saved tensors" if others else ""
            self._give_up(regime, f"{error}{beside}")

    def _give_up(self, regime: CachedPlan, why: str) -> None:
        """No plan: the device's budget is worth more than speed."""
        regime.phase, regime.setting = Phase.SETTLED, SAFEST
        self._why_not = why
        self._warn("no-plan", f"no plan: {why}; every layer stays at the safest setting")

    def _plan(self, regime: CachedPlan) -> None:
        """Makes the plan of what is known, and has it tried.

        Raises:
            MemoError: there is none.
        """
        assert regime.profile is not None
        assert self._hardware is not None
        begin = time.perf_counter()
        limits = least(self._everyones(self._managed.limits(self._growth(regime.profile.signature))))
        profile, self._others_bytes = beside_layers(regime.profile, limits)
        room = limits.device_bytes + limits.others_bytes - self._others_bytes
        problem = ActivationProblem(
            profile=profile,
            hardware=self._hardware,
            budgets=Budgets(
                device_bytes=max(0, room - regime.margin_bytes),
                host_bytes=limits.host_bytes,
                disk_bytes=limits.disk_bytes,
            ),
            pipeline=self._pipeline(regime.calls),
        )
        # All solve the same problem; that all get the same answer of it is left to no arithmetic.
        answer = self._everyones(self._answer(problem))[0]
        self._planning_s += time.perf_counter() - begin
        if isinstance(answer, MemoError):
            raise answer
        regime.planned(answer)
        saved_alone = dataclasses.replace(answer.problem, profile=regime.profile)
        regime.predicted_peak_bytes = predict_stages(saved_alone, answer.layers)[0].peak_device_bytes
        self._watches = True  # also one that does nothing: what it was made of may have missed something

    def _pipeline(self, calls: int) -> Pipeline:
        if self._turns is not None and self._turns.microbatches == calls:
            return Pipeline(microbatches=calls, own=self._turns)
        return Pipeline(microbatches=calls, held=min(self._held or calls, calls))

    def _answer(self, problem: ActivationProblem) -> ActivationPlan | MemoError:
        try:
            return self._make_plan(problem)
        except MemoError as error:
            return error

    def _growth(self, shape: Signature | None) -> float:
        """How many times as many tokens this shape has as the step whose device memory is known."""
        return 1.0 if shape is None or self._measured is None else growth(self._measured, shape)

    def _new(self, signature: Signature) -> CachedPlan:
        """Another batch or length: planned at once from what is known of another one, else measured first."""
        known = self._regimes.nearest(signature)
        if known is not None and known.profile is not None:
            try:
                regime = CachedPlan(profile=scaled_profile(known.profile, signature), calls=known.calls)
                self._plan(regime)
                return regime
            except MemoError:
                pass  # measured like the first one
        return CachedPlan()

    def _compare(self, regime: CachedPlan, found: StepEvidence) -> None:
        """Predicted against measured; what is off is measured into the profile, and the plan made again."""
        assert regime.plan is not None
        assert regime.profile is not None
        if found.profile is None:
            regime.phase = Phase.SETTLED
            return
        predicted, profile = regime.plan.stages[0], scaled_profile(found.profile, regime.profile.signature)
        fewer = seconds_of(found.profile) / seconds_of(profile)  # than the plan is for, the step may have had of tokens
        # The time of several microbatches is the pipeline's, bubbles included; and a trial is none of the plan's.
        is_timed = found.calls == 1 and not found.trials
        if is_timed:
            regime.measured_s = found.measured_s
            regime.step_off = found.measured_s / (predicted.microbatch_s * fewer) - 1
        regime.measured_peak_bytes = peak = found.peak_bytes
        regime.peak_off = peak / regime.predicted_peak_bytes - 1 if regime.predicted_peak_bytes else 0.0
        if abs(regime.step_off or 0.0) <= TOLERANCE and regime.peak_off <= TOLERANCE:
            regime.phase = Phase.SETTLED
        elif regime.corrections == MAX_CORRECTIONS:
            self._warn_off(predicted, regime)
            regime.phase = Phase.SETTLED
        else:
            self._correct(regime, _corrected(regime.profile, profile) if is_timed else regime.profile)

    def _keep_less(self, regime: CachedPlan, peak: int) -> None:
        """After a step that took more than the budget; `peak` is that of its saved tensors, on the worst of the ranks.

        What it took besides is known by now, and left free by the next plan.
        """
        assert regime.plan is not None
        assert regime.profile is not None
        regime.margin_bytes = max(regime.margin_bytes, peak - regime.predicted_peak_bytes)
        if regime.corrections == MAX_CORRECTIONS:
            self._give_up(regime, f"{MAX_CORRECTIONS + 1} of them took more device memory than the budget")
            return
        regime.corrections += 1
        try:
            self._plan(regime)
        except MemoError as error:
            self._give_up(regime, str(error))

    def _correct(self, regime: CachedPlan, profile: Profile) -> None:
        """Plans again, of what is known now."""
        regime.corrections += 1
        try:
            regime.profile = profile
            self._plan(regime)
        except MemoError as error:
            regime.phase = Phase.SETTLED
            self._warn("no-plan", f"the plan stays as it is: {error}")

    def _warn_off(self, predicted: StagePrediction, regime: CachedPlan) -> None:
        signature = self._regimes.signature
        assert signature is not None
        measured = "" if regime.measured_s is None else f"{format_duration(regime.measured_s)} and "
        self._warn(
            f"off {signature}",
            f"the plan for {signature.batch} x {signature.tokens} tokens predicts "
            f"{format_duration(predicted.microbatch_s)} and {format_bytes(regime.predicted_peak_bytes)} of activations; "
            f"measured {measured}{format_bytes(regime.measured_peak_bytes or 0)}",
        )

    def _tell_excess(self, excess: int) -> None:
        assert self._shape is not None
        self._warn(
            "excess",
            f"a step of {self._shape.batch} x {self._shape.tokens} tokens took {format_bytes(excess)} of device memory more "
            f"than its budget",
        )

    def _warn(self, cause: str, message: str) -> None:
        if cause not in self._warned:
            self._warned[cause] = True
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _corrected(profile: Profile, measured: Profile) -> Profile:
    """The profile with the times of a later step. Its bytes stay: a layer that is kept shows no levels."""
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
