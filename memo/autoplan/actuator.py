"""Applies an ActivationPlan to one manager: placements to the Engine, points of recompute to RecomputePolicy.

Owns the conversion of a plan's points and fractions, and the device bytes that a plan may use: what parameters, gradients,
optimizer state and transient tensors leave of the budget.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from memo.allocator import unsplit_nbytes
from memo.autoplan.backward_end import at_end_of_backward
from memo.autoplan.device_peaks import DevicePeaks, MeasuredRecompute, Outside
from memo.autoplan.layer_classes import mlp_tiles_of
from memo.autoplan.limits import MEASURING, Limits
from memo.events import TierName
from memo.mip.activation import lower_tier_nbytes, predict_stages, room_in_forward
from memo.swap import Level, Placement, Quota, Setting, setting_of, whole_pages
from memo.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from memo.autoplan.device_budget import DeviceBudget
    from memo.autoplan.device_peaks import Part
    from memo.events import Lane, Tracer
    from memo.machine import LinkRates
    from memo.mip.activation import ActivationPlan
    from memo.mip.inputs import Profile
    from memo.swap import Engine, Layer, LayerCosts, RecomputePolicy

UNBOUNDED_DISK = 1 << 60
"""Bytes of a scratch file without budget: a full disk is found by a failed write, and its bytes go to another tier."""


class Actuator:
    """Applies plans and levels to one manager's engine, and measures its steps: what AutoPlan knows of the engine.

    Args:
        engine, recompute_policy: what settings are applied to.
        layers: the managed layers, in the order of the model.
        budget: the device's budget and counters.
        tracer: the run's own trace, or None.
        link: measures the device's link when nothing else uses it, in so many bytes of device memory; None without a link.
        disk_rates: measures the disks, by lane, when nothing else uses them.
        missing_gradient_bytes: bytes of the gradients that backward has still to allocate.
    """

    def __init__(
        self,
        engine: Engine,
        recompute_policy: RecomputePolicy,
        layers: Sequence[Layer],
        budget: DeviceBudget,
        *,
        tracer: Tracer | None,
        link: Callable[[int], LinkRates | None] = lambda room_bytes: None,
        disk_rates: Callable[[], Mapping[Lane, float]] = dict,
        missing_gradient_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._engine = engine
        self._recompute_policy = recompute_policy
        self._layers = layers
        self._planned = list(enumerate(layers))  # those that a plan is for, with their numbers
        self._budget = budget
        self._tracer = tracer
        self._link, self._disk_rates = link, disk_rates
        self._missing_gradient_bytes = missing_gradient_bytes
        self._peaks = DevicePeaks(budget, engine.stats)
        self._others: Mapping[Part, int] = {}  # beside saved tensors, in the last step
        self._absent: Mapping[
            str, int
        ] = {}  # of a layer's saved tensors at its backward's peak, in the last step at a level
        self._idle_bytes = self._gradient_bytes = 0  # in use between steps; gradients that backward then allocates
        self._held_bytes = budget.used_bytes()  # before the first step
        self._trials = 0
        engine.when_idle(_weakly(self._when_idle))
        recompute_policy.keep_within(lambda: budget.total_bytes - budget.used_bytes())

    @property
    def idle(self) -> bool:
        """True while nothing is saved: another setting may be applied."""
        return self._engine.stats.live_entries == 0

    def listen(self, tracer: Tracer | None) -> None:
        """Sends events to `tracer`, or for None to the run's own trace."""
        self._engine.listen(tracer or self._tracer)

    def finish(self) -> None:
        """Waits for the device, so that every span has ended, and delivers their events."""
        self._engine.backend.finish()
        self._engine.backend.synchronize()
        self._engine.end_step()

    def now_ns(self) -> int:
        """The clock of the engine's events."""
        return self._engine.backend.now_ns()

    def apply(self, setting: ActivationPlan | Level, *, growth: float = 1.0) -> None:
        """Applies a plan, or one level to all layers, from the next layer call on.

        Args:
            setting: the plan or the level.
            growth: tokens of the next step as a multiple of those of the last one.
        """
        room = self.limits(growth).device_bytes
        if not self._others:  # nothing is known of what else a step needs
            room = max(0, self._budget.total_bytes - self._budget.used_bytes()) // 2
        if isinstance(setting, Level):
            self._engine.place({}, rest_bytes=room)
            self._recompute_policy.choose({layer.name: setting_of(setting) for layer in self._layers})
        else:
            placements, chosen = self._settings_of(setting)
            overlap, late = setting.problem.overlap, self.late_bytes(setting)
            may_stay = late or None if overlap else 0  # without a disk a GPU's streams wait, and not the host
            self._engine.place(placements, rest_bytes=room, late_bytes=may_stay, overlap=overlap)
            self._expect(dict(zip((TierName.HOST, TierName.DISK), lower_tier_nbytes(setting), strict=True)))
            others = {layer.name: setting_of(MEASURING) for layer in self._layers if layer.name not in chosen}
            self._recompute_policy.choose({**others, **chosen})
        self._recompute_policy.begin_forwards(self._layers)

    def late_bytes(self, plan: ActivationPlan) -> int:
        """Bytes on their way to the disk that the device may hold beside what the plan counts: up to a layer's.

        Without, the host waits for the writes of each layer, and the device for the host.
        """
        if not plan.problem.overlap:
            return 0
        known = plan.problem.profile.layer_profiles()
        saved = [part.saved_bytes(layer) for part, layer in zip(plan.layers, known, strict=True)]
        late = sum(part.disk * nbytes for part, nbytes in zip(plan.layers, saved, strict=True))
        return int(min(late, max(saved, default=0)))

    def _expect(self, needs: Mapping[TierName, int]) -> None:
        for tier in self._engine.tiers:
            tier.expect(needs.get(tier.name, 0))

    @property
    def n_layers(self) -> int:
        """Number of managed layers."""
        return len(self._layers)

    @property
    def mlp_tiles(self) -> int:
        """Number of tiles in which the layers compute their MLP."""
        return mlp_tiles_of(layer.module for layer in self._layers)

    @property
    def codec(self) -> str | None:
        """Codec of what moves; None: it moves as it is."""
        codec = self._engine.codec
        return None if codec is None else codec.name.lower()

    def reload_ahead(self) -> None:
        """Lets reloads run ahead within what the last step left free; by one layer before the first step."""
        peak = self.take_peak()
        if peak:
            self._engine.reload_ahead(max(0, self.limits().device_bytes - peak))

    def plan_for(self, names: Collection[str]) -> None:
        """Sets the layers that plans are for, such as those of text where no image runs through its own; () for all.

        The others recompute all but attention.
        """
        self._planned = [pair for pair in enumerate(self._layers) if not names or pair[1].name in names]

    def _settings_of(self, plan: ActivationPlan) -> tuple[dict[int, Placement], dict[str, Setting]]:
        placements, chosen = settings_of(plan, [layer for _, layer in self._planned])
        return {self._planned[at][0]: placement for at, placement in placements.items()}, chosen

    def prepare_host(self) -> None:
        """Begins to pin the host memory that a plan may use: all that is saved and has no room on the device."""
        saved = [known.points[0].saved_bytes for known in self.costs().values() if known.points]
        kept = self.limits().device_bytes - 2 * max(saved, default=0)  # two layers come and go
        need = max(0, sum(saved) - max(0, kept))
        for tier in self._engine.tiers:
            if tier.name is TierName.HOST and need:
                tier.expect(min(need, tier.obtainable or 0))

    def host_excess(self, plan: ActivationPlan) -> int:
        """Bytes by which the storages of a step by a plan need more of the host tier than it has."""
        host = next((tier for tier in self._engine.tiers if tier.name is TierName.HOST), None)
        if host is None or host.obtainable is None:
            return 0
        placements, chosen = self._settings_of(plan)
        claims: list[int] = []
        carried: Mapping[TierName, float] = {}
        for number, layer in self._planned:
            sizes = self._recompute_policy.moved_nbytes(layer.name, chosen[layer.name])
            placement = placements[number]
            quota = Quota(placement, expected_nbytes=sum(sizes), carried={} if placement.begins else carried)
            claims += [nbytes for nbytes in sizes if quota.choose(nbytes) is TierName.HOST]
            carried = quota.carried
        held = max(map(sum, plan.problem.pipeline.peak_in_flight(0)))
        # All are held when forward ends, so that first fit has put each above those before it.
        return max(0, held * sum(map(whole_pages, claims)) - host.obtainable)

    def costs(self) -> Mapping[str, LayerCosts]:
        """Costs by level of the layers recomputed by tokens, by layer name."""
        return {costs.layer: costs for costs in self._recompute_policy.costs()}

    def limits(self, growth: float = 1.0) -> Limits:
        """Budgets of saved tensors: device memory that the last step used for anything else is taken off.

        Memory in use between steps, and gradients, do not depend on the batch. The rest is assumed to grow with the
        tokens, as logits and a layer's temporaries do; a shorter step is assumed to need no less than the last one.
        """
        around = self._grown(Outside.LAYERS, growth)
        layers = tuple(self._grown(layer.name, growth) for _, layer in self._planned)
        recomputes = tuple(
            self._grown(part, growth) if (part := MeasuredRecompute(layer.name)) in self._others else 0
            for _, layer in self._planned
        )
        others = max(around, *layers, *recomputes)
        budgets = {tier.name: tier.obtainable for tier in self._engine.tiers}
        disk = budgets.get(TierName.DISK, 0)
        return Limits(
            device_bytes=max(0, self._budget.total_bytes - self._budget.noise_bytes - others),
            others_bytes=others,
            around_bytes=around,
            beside_layers=layers,
            beside_recomputes=recomputes,
            absent_layers=tuple(self._absent.get(layer.name, 0) if growth >= 1 else 0 for _, layer in self._planned),
            host_bytes=budgets.get(TierName.HOST, 0) or 0,
            disk_bytes=UNBOUNDED_DISK if disk is None else disk,
        )

    def _grown(self, where: Part, growth: float) -> int:
        most = max(self._others.values(), default=0)
        nbytes = self._others.get(where, most)
        growing = nbytes - self._idle_bytes
        if where is not Outside.LAYERS or len(self._others) == 1:  # around the layers the peak precedes all gradients
            growing = min(growing, most - self._idle_bytes - self._gradient_bytes)
        return nbytes + round(max(0, growing) * max(0.0, growth - 1.0))

    def link(self) -> LinkRates | None:
        """Measures the link; nothing else may use it meanwhile."""
        rates = self._link(self._budget.total_bytes - self._budget.used_bytes())
        self._peaks.restart()  # the measurement's own memory belongs to no step
        return rates

    def disk_rates(self) -> Mapping[Lane, float]:
        """Measures the disks, by lane; nothing else may use them meanwhile."""
        rates = self._disk_rates()
        self._peaks.restart()
        return rates

    def spare_bytes(self) -> tuple[int, int]:
        """Bytes by which the device stayed below its budget since the last `take_peak` or `forget_peaks`.

        Negative above the budget. The first number is up to the end of backward, which a plan decides on; the second of
        all the time, an optimizer's step included.
        """
        total = self._budget.total_bytes
        return total - self._peaks.planned_peak_bytes, total - self._peaks.peak_bytes

    @property
    def total_bytes(self) -> int:
        """The device's budget."""
        return self._budget.total_bytes

    def lacking_bytes(self) -> int:
        """Bytes by which every plan exceeds the device's budget; not known where the counter is not of tensors alone."""
        if self._budget.noise_bytes:
            return 0
        return self._least_bytes()[0] - self._budget.total_bytes

    def _least_bytes(self) -> tuple[int, str]:
        """The least that any step holds at one time, and what: each layer is whole in its backward."""
        layer = max(
            self.costs().values(), key=lambda known: known.points[0].saved_bytes if known.points else 0, default=None
        )
        whole = layer.points[0].saved_bytes if layer is not None and layer.points else 0
        gradients, held = self._missing_gradient_bytes(), self._held_bytes
        if gradients > whole or layer is None:
            return held + gradients, f"gradients take {format_bytes(gradients)}"
        return held + whole, f"{layer.layer} alone saves {format_bytes(whole)}"

    def why_infeasible(self) -> str:
        """Says what has no room, and beside what."""
        least, what = self._least_bytes()
        return (
            f"no plan fits: {what} beside {format_bytes(self._held_bytes)} of weights, optimizer state and whatever else is "
            f"held between steps, and the device's budget is {format_bytes(self._budget.total_bytes)}; it takes more than "
            f"{format_bytes(least, up=True)}, or a shorter sequence"
        )

    @property
    def margin_bytes(self) -> int:
        """Bytes that a suggested budget has beside what steps have shown: resident memory (CPU) is not of tensors alone."""
        return self._budget.noise_bytes + self._budget.unseen_bytes

    def unmeasured_bytes(self, *, first: bool, growth: float = 1.0) -> int:
        """Bytes that the steps before a plan for `growth` times their tokens did not show.

        What torch's allocator may give beyond the sizes asked for. Before the first plan also what is in use since, as by
        planning itself, or still to come; and a layer's largest tensor, by which a step may hold more or less at its peak
        where layers bring back other tensors, or try it out: for more tokens than were measured twice what they add.
        """
        known = self.costs().values()
        sizes = Counter(size for costs in known for size in costs.sizes)
        unsplit = 0 if self._budget.noise_bytes else sum(n * unsplit_nbytes(size, sizes) for size, n in sizes.items())
        if not first:
            return unsplit
        since = max(0, self._budget.used_bytes() - self._idle_bytes) + self._budget.unseen_bytes
        largest = max((max(costs.sizes, default=0) for costs in known), default=0)
        return unsplit + since + round(largest * max(1.0, 2 * growth - 1))

    def forget_peaks(self) -> None:
        """Forgets the peaks so far, without restarting the device's counter."""
        self._peaks.forget()

    def take_lacking(self) -> tuple[int, int]:
        """Bytes since the last call that were to go to the host and to the disk, and that no tier had room for."""
        lacking = self._engine.take_lacking()
        return lacking.get(TierName.HOST, 0), lacking.get(TierName.DISK, 0)

    def repeated(self) -> Collection[str]:
        """Layers that were recomputed whole, for lack of room or by their level."""
        return frozenset(self._recompute_policy.repeated)

    def take_trials(self) -> int:
        """Number of trial recomputes of all layers since the last call."""
        before, self._trials = self._trials, self._recompute_policy.trials_run
        return self._trials - before

    def take_peak(self, *, growth: float | None = None) -> int:
        """Ends a measurement; returns the most bytes of saved tensors on the device at one time since the last call.

        The other device memory in use is noted for `limits`.

        Args:
            growth: None after a step at a level. After a step by a plan, its tokens as a multiple of those of the
                step noted before; that step's bytes still count where they are more, since another plan may recompute
                more.
        """
        step = self._peaks.end_step()
        before = {} if growth is None else {where: self._grown(where, growth) for where in self._others}
        if growth is None:  # a plan's points have other parts
            self._absent = step.absent
        else:
            self._absent = self._absent if growth >= 1 else {}  # of a shorter step parts may be too small
        self._others = before | {where: max(nbytes, before.get(where, 0)) for where, nbytes in step.others.items()}
        self._idle_bytes, self._gradient_bytes = self._budget.used_bytes(), self._missing_gradient_bytes()
        return step.saved_bytes

    def restart_peaks(self) -> None:
        """Forgets the peaks so far: a step of another shape begins."""
        self._held_bytes = min(self._held_bytes, self._budget.used_bytes())
        self._peaks.restart()

    def watch(self, *, closely: bool) -> None:
        """Measures device memory layer by layer, where the device frees memory at once, or over whole steps.

        Recomputes that have passed their trial are tried again only in steps that are not watched closely.
        """
        self._recompute_policy.tries_again = not closely
        self._peaks.by_layer = closely and self._budget.frees_at_once
        boundaries = self._peaks.by_layer or self._budget.trim is not None
        # A resident set does not fall at once when a recompute's tensors are freed.
        recompute = self._peaks.cross_recompute if self._peaks.by_layer and not self._budget.noise_bytes else None
        self._engine.at_layer_boundaries(_weakly(self._cross_boundary) if boundaries else None, recompute)

    def _cross_boundary(self, begins: str | None) -> None:
        if self._budget.trim is not None:
            self._budget.trim()
        if self._peaks.by_layer:
            self._peaks.cross_boundary(begins)

    def _when_idle(self) -> None:
        """Ends the peaks of backward, since a program may restart the device's before the next forward."""
        at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._peaks.end_backward()
        if self._budget.trim is not None:
            self._budget.trim()


def _weakly(method: Callable[..., object]) -> Callable[..., None]:
    """The method, for an owner that its object holds: a cycle would keep both, and the model, until it is collected."""
    found = WeakMethod(method)

    def call(*args: Any) -> None:
        bound = found()
        if bound is not None:
            bound(*args)

    return call


def late_bytes_of(plan: ActivationPlan) -> list[int]:
    """Bytes by layer whose copies out may end beside the layer after the next one, in the same pass."""
    room, found = room_in_forward(plan.problem, plan.layers), [0] * len(plan.layers)
    if not plan.problem.overlap:
        return found
    for chunk in plan.problem.stages[0].chunks:
        found[chunk.start : max(chunk.start, chunk.stop - 2)] = room[chunk.start + 2 : chunk.stop]
    return found


def saved_peak_bytes(plan: ActivationPlan, profile: Profile) -> int:
    """Peak of saved tensors on the device by a plan, late copies out included.

    Args:
        plan: the plan.
        profile: of the layers' saved tensors alone.
    """
    alone = dataclasses.replace(plan.problem, profile=profile)
    peak = predict_stages(alone, plan.layers)[0].peak_device_bytes
    less, late = room_in_forward(alone, plan.layers), late_bytes_of(plan)
    found = [peak]
    for number, (part, layer) in enumerate(zip(plan.layers, profile.layer_profiles(), strict=True)):
        if late[number]:
            moved = part.saved_bytes(layer) * (part.host + part.disk)
            found.append(peak - less[number + 2] + min(late[number], math.ceil(moved)))
    return max(found)


def settings_of(plan: ActivationPlan, layers: Sequence[Layer]) -> tuple[dict[int, Placement], dict[str, Setting]]:
    """Converts a plan to placements by layer number, for the Engine, and points by layer name, for RecomputePolicy."""
    known = plan.problem.profile.layer_profiles()
    begins = {chunk.start for chunk in plan.problem.stages[0].chunks}
    late = late_bytes_of(plan)
    placements = {
        number: Placement(
            kept=part.kept,
            host=part.host,
            disk=part.disk,
            nbytes=int(part.saved_bytes(known[number])),
            late_nbytes=late[number],
            begins=number in begins,
        )
        for number, part in enumerate(plan.layers)
    }
    points = {layer.name: setting_of({part.point: 1.0}) for layer, part in zip(layers, plan.layers, strict=True)}
    return placements, points
