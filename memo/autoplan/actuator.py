"""Applies an ActivationPlan to one manager: placements to the Engine, points of recompute to Tapes.

Owns the conversion of a plan's fractions, and the device bytes that a plan may use: what parameters, gradients,
optimizer state and transient tensors leave of the budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memo.autoplan.actuator_protocol import Limits, Setting
from memo.autoplan.backward_end import at_end_of_backward
from memo.autoplan.device_peaks import DevicePeaks, Outside
from memo.autoplan.layer_classes import mlp_tiles_of
from memo.events import Tier
from memo.mip.activation import chunk_layers, lower_tier_nbytes
from memo.mip.inputs import ALL, ATTENTION, MATMULS
from memo.swap import Level, Mix, Placement, TokenLevels

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from memo.autoplan.device_budget import DeviceBudget
    from memo.events import Tracer
    from memo.machine import LinkRates
    from memo.mip.activation import ActivationPlan, LayerPlan
    from memo.swap import Engine, Layer, LayerCosts, Tapes

__all__ = ["Actuator", "settings_of"]

MOST_MIXED = 0.5
"""Largest fraction of tokens at SAVE_ALL while dividing is timed."""
SPARED = 0.9
"""Share of the spare room that is filled; the rest allows for storages that are moved whole."""

UNBOUNDED_DISK = 1 << 60
"""Bytes of a scratch file without budget: a full disk is found by a failed write, and its bytes go to another tier."""


class Actuator:
    """Applies plans and settings to one manager's engine, and measures its steps; implements ActuatorProtocol.

    Args:
        engine, tokenwise: what settings are applied to.
        layers: the managed layers, in the order of the model.
        budget: the device's budget and counters.
        tracer: the run's own trace, or None.
        link: measures the device's link when nothing else uses it; None without a link.
        missing_gradient_bytes: bytes of the gradients that backward has still to allocate.
    """

    def __init__(
        self,
        engine: Engine,
        tokenwise: Tapes,
        layers: Sequence[Layer],
        budget: DeviceBudget,
        *,
        tracer: Tracer | None,
        link: Callable[[], LinkRates | None] = lambda: None,
        missing_gradient_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._engine = engine
        self._tokenwise = tokenwise
        self._layers = layers
        self._budget = budget
        self._tracer = tracer
        self._link = link
        self._missing_gradient_bytes = missing_gradient_bytes
        self._peaks = DevicePeaks(budget, engine.stats)
        self._others: Mapping[str | Outside, int] = {}  # beside saved tensors, in the last step
        self._idle_bytes = self._gradient_bytes = 0  # in use between steps; gradients that backward then allocates
        self._trials = 0
        engine.when_idle(self._when_idle)

    @property
    def idle(self) -> bool:
        """True while nothing is saved."""
        return self._engine.stats.live_entries == 0

    def listen(self, tracer: Tracer | None) -> None:
        """Sends events to `tracer`, or for None to the run's own trace."""
        self._engine.listen(tracer or self._tracer)

    def finish(self) -> None:
        """Waits for the device, so that every span has ended, and delivers their events."""
        self._engine.backend.synchronize()
        if self._engine.backend.device.type == "cuda":
            torch.cuda.synchronize(self._engine.backend.device)
        self._engine.end_step()

    def apply(self, setting: ActivationPlan | Setting, *, growth: float = 1.0) -> None:
        """Applies a plan or a setting from the next layer call on."""
        rest_bytes = self.limits(growth).device_bytes
        if isinstance(setting, Setting):
            self._expect({})
            self._engine.place({}, rest_bytes=rest_bytes)
            self._tokenwise.choose({layer.name: setting.levels(number) for number, layer in enumerate(self._layers)})
        else:
            placements, chosen = settings_of(setting, self._layers)
            self._engine.place(placements, rest_bytes=rest_bytes)
            self._expect(dict(zip((Tier.HOST, Tier.DISK), lower_tier_nbytes(setting), strict=True)))
            self._tokenwise.choose(chosen)
        self._tokenwise.begin_forwards(self._layers)

    def _expect(self, needs: Mapping[Tier, int]) -> None:
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

    def spare_share(self, peak_bytes: int, calls: int) -> float:
        """Fraction of the tokens, at most a half, of which everything fits; 0 if one layer's does not fit on the device.

        While one layer's backward runs, the next layer's tensors return into whole buffers, however small the fraction.
        """
        repeated = [_repeated_bytes(known) for known in self.costs().values()]
        wanted = calls * sum(repeated)
        room = max(0, self.limits().device_bytes - peak_bytes)
        if room < max(repeated, default=0.0):
            return 0.0
        for tier in self._engine.tiers:
            room += UNBOUNDED_DISK if tier.obtainable is None else max(0, tier.obtainable - tier.peak)
        return min(MOST_MIXED, SPARED * room / wanted) if wanted else MOST_MIXED

    def costs(self) -> Mapping[str, LayerCosts]:
        """Costs by level of the layers recomputed by tokens, by layer name."""
        return {costs.layer: costs for costs in self._tokenwise.costs()}

    def limits(self, growth: float = 1.0) -> Limits:
        """Budgets of saved tensors: device memory that the last step used for anything else is taken off.

        Memory in use between steps, and gradients, do not depend on the batch. The rest is assumed to grow with the
        tokens, as logits and a layer's temporaries do; a shorter step is assumed to need no less than the last one.
        """
        around = self._grown(Outside.LAYERS, growth)
        layers = tuple(self._grown(layer.name, growth) for layer in self._layers)
        others = max(around, *layers)
        budgets = {tier.name: tier.obtainable for tier in self._engine.tiers}
        disk = budgets.get(Tier.DISK, 0)
        return Limits(
            device_bytes=max(0, self._budget.total_bytes - self._budget.noise_bytes - others),
            others_bytes=others,
            around_bytes=around,
            beside_layers=layers,
            host_bytes=budgets.get(Tier.HOST, 0) or 0,
            disk_bytes=UNBOUNDED_DISK if disk is None else disk,
        )

    def _grown(self, where: str | Outside, growth: float) -> int:
        most = max(self._others.values(), default=0)
        nbytes = self._others.get(where, most)
        growing = nbytes - self._idle_bytes
        if where is not Outside.LAYERS or len(self._others) == 1:  # around the layers the peak precedes all gradients
            growing = min(growing, most - self._idle_bytes - self._gradient_bytes)
        return nbytes + round(max(0, growing) * max(0.0, growth - 1.0))

    def link(self) -> LinkRates | None:
        """Measures the link; nothing else may use it meanwhile."""
        rates = self._link()
        self._peaks.restart()  # the measurement's own memory belongs to no step
        return rates

    def spare_bytes(self) -> tuple[int, int]:
        """Bytes by which the device stayed below its budget, up to the end of backward and in all."""
        total = self._budget.total_bytes
        return total - self._peaks.planned_peak_bytes, total - self._peaks.peak_bytes

    def unmeasured_bytes(self) -> int:
        """Bytes that the steps before a first plan did not show: in use since, as by planning itself, or still to come."""
        return max(0, self._budget.used_bytes() - self._idle_bytes) + self._budget.unseen_bytes

    def forget_peaks(self) -> None:
        """Forgets the peaks so far, without restarting the device's counter."""
        self._peaks.forget()

    def take_lacking(self) -> tuple[int, int]:
        """Bytes since the last call that were to go to the host and to the disk, and that no tier had room for."""
        lacking = self._engine.take_lacking()
        return lacking.get(Tier.HOST, 0), lacking.get(Tier.DISK, 0)

    def take_trials(self) -> int:
        """Number of trial recomputes of all layers since the last call."""
        before, self._trials = self._trials, self._tokenwise.trials_run
        return self._trials - before

    def take_peak(self, *, growth: float | None = None) -> int:
        """Returns the peak of saved tensors, and notes the other device memory that the step used."""
        step = self._peaks.end_step()
        before = {} if growth is None else {where: self._grown(where, growth) for where in self._others}
        self._others = before | {where: max(nbytes, before.get(where, 0)) for where, nbytes in step.others.items()}
        self._idle_bytes, self._gradient_bytes = self._budget.used_bytes(), self._missing_gradient_bytes()
        return step.saved_bytes

    def restart_peaks(self) -> None:
        """Forgets the peaks so far."""
        self._peaks.restart()

    def watch(self, *, closely: bool) -> None:
        """Measures device memory layer by layer, where the device frees memory at once, or over whole steps."""
        self._peaks.by_layer = closely and self._budget.frees_at_once
        boundaries = self._peaks.by_layer or self._budget.trim is not None
        self._engine.at_layer_boundaries(self._cross_boundary if boundaries else None)

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


def settings_of(
    plan: ActivationPlan, layers: Sequence[Layer]
) -> tuple[dict[int, Placement], dict[str, TokenLevels | Mix]]:
    """Converts a plan to placements by layer number, for the Engine, and points by layer name, for Tapes."""
    known = plan.problem.profile.layer_profiles()
    begins = {chunk.start for chunk in chunk_layers(plan.problem, 0)}
    placements = {
        number: Placement(
            kept=part.kept,
            host=part.host,
            disk=part.disk,
            nbytes=int(part.saved_bytes(known[number])),
            begins=number in begins,
        )
        for number, part in enumerate(plan.layers)
    }
    points = {layer.name: _points(part) for layer, part in zip(layers, plan.layers, strict=True)}
    return placements, points


def _points(part: LayerPlan) -> TokenLevels | Mix:
    """Three levels where the plan has no other points."""
    if set(part.points) <= {ALL, MATMULS, ATTENTION}:
        return TokenLevels(
            all=part.fraction(ALL),
            matmuls=part.fraction(MATMULS),
            attention=part.fraction(ATTENTION),
            piece=part.piece,
        )
    return Mix(points=part.points)


def _repeated_bytes(costs: LayerCosts) -> float:
    """Bytes that a layer saves at `all` and not at `attention`, and those beside them."""
    if costs.points:
        known = {point.name: point for point in costs.points}
        full, least = costs.points[0], known.get(ATTENTION, costs.points[-1])
        return max(0.0, float(full.saved_bytes - least.saved_bytes)) + full.beside_bytes
    level = Level.SAVE_ALL
    return costs.tokens * (costs.bytes_per_token[level] + costs.beside_per_token.get(level, 0.0))
