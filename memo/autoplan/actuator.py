"""Applies an ActivationPlan to one manager: placements to the Engine, recompute levels to TokenWise.

Owns the conversion of a plan's fractions into those, and the device budget of a plan: how much device memory is left
for saved tensors beside parameters, gradients, the optimizer's state and everything transient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd.variable import Variable

from memo.autoplan.actuator_protocol import Limits, Setting
from memo.autoplan.device_peaks import DevicePeaks, Place
from memo.autoplan.layer_classes import mlp_tiles_of
from memo.events import Tier
from memo.mip.activation import chunk_layers, lower_tier_nbytes
from memo.swap import Level, Placement, TokenLevels

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from memo.autoplan.device_budget import DeviceBudget
    from memo.events import Tracer
    from memo.mip.activation import ActivationPlan, LayerPlan
    from memo.swap import Engine, Layer, LayerCosts, TokenWise

__all__ = ["Actuator", "settings_of"]

MOST_MIXED = 0.5
"""Of the tokens: both levels of recompute are timed, with few bytes more than at the safest setting."""
SPARED = 0.9
"""Of the room that the safest setting leaves: storages are whole."""

UNBOUNDED_DISK = 1 << 60
"""What a scratch file may take that grows as needed: its end is found by running into it, and spilled then."""


class Actuator:
    """Satisfies `memo.autoplan.actuator_protocol.ActuatorProtocol`."""

    def __init__(
        self,
        engine: Engine,
        tokenwise: TokenWise,
        layers: Sequence[Layer],
        memory: DeviceBudget,
        *,
        tracer: Tracer | None,
        link: Callable[[], tuple[float, float, float] | None] = lambda: None,
        gradients_to_come: Callable[[], int] = lambda: 0,
    ) -> None:
        self._engine = engine
        self._tokenwise = tokenwise
        self._layers = layers
        self._memory = memory
        self._tracer = tracer
        self._link = link
        self._gradients_to_come = gradients_to_come
        self._used = DevicePeaks(memory, engine.stats)
        self._others: Mapping[str | Place, int] = {}  # beside saved tensors, in the last step
        self._idle_bytes = self._gradient_bytes = 0  # in use between steps, and what then comes to stay
        self._trials = 0
        engine.when_idle(self._when_idle)

    @property
    def idle(self) -> bool:
        """Nothing is saved now."""
        return self._engine.stats.live_entries == 0

    def listen(self, tracer: Tracer | None) -> None:
        """None: back to the trace that is being written, if one is."""
        self._engine.listen(tracer or self._tracer)

    def finish(self) -> None:
        """Waits for the device, so that every span has ended, and has them told."""
        self._engine.backend.synchronize()
        if self._engine.backend.device.type == "cuda":
            torch.cuda.synchronize(self._engine.backend.device)
        self._engine.end_step()

    def use(self, setting: ActivationPlan | Setting, *, growth: float = 1.0) -> None:
        """From the next layer call on."""
        if isinstance(setting, Setting):
            levels = TokenLevels(matmuls=setting.matmuls, attention=1.0 - setting.matmuls)
            self._expect({})
            self._engine.place({}, rest_bytes=self.limits(growth).device_bytes if setting.rest_stays else 0)
            self._tokenwise.choose(dict.fromkeys((layer.name for layer in self._layers), levels))
        else:
            placements, chosen = settings_of(setting, self._layers)
            self._engine.place(placements)
            self._expect(dict(zip((Tier.HOST, Tier.DISK), lower_tier_nbytes(setting), strict=True)))
            self._tokenwise.choose(chosen)
        self._tokenwise.look_at(self._layers)

    def _expect(self, needs: Mapping[Tier, int]) -> None:
        for tier in self._engine.tiers:
            tier.expect(needs.get(tier.name, 0))

    @property
    def n_layers(self) -> int:
        """Of the model."""
        return len(self._layers)

    @property
    def mlp_tiles(self) -> int:
        """In how many tiles the model's layers compute their MLP."""
        return mlp_tiles_of(layer.module for layer in self._layers)

    def reload_ahead(self) -> None:
        """Lets reloads run ahead as far as the last step left device memory for; before the first step, by one layer."""
        peak = self.take_peak()
        if peak:
            self._engine.reload_ahead(max(0, self.limits().device_bytes - peak))

    def spare_share(self, peak_bytes: int, calls: int) -> float:
        """Half of the tokens, or as many as there is room for; none where the device has none for one more layer's products.

        They stand whole in the layer that comes back while another one's backward runs, be it for ever so few tokens.
        """
        products = [
            known.tokens
            * (known.bytes_per_token.get(Level.SAVE_MATMULS, 0.0) + known.beside_per_token.get(Level.SAVE_MATMULS, 0.0))
            for known in self.costs().values()
        ]
        wanted = calls * sum(products)
        room = max(0, self.limits().device_bytes - peak_bytes)
        if room < max(products, default=0.0):
            return 0.0
        for tier in self._engine.tiers:
            room += UNBOUNDED_DISK if tier.budget is None else max(0, tier.budget - tier.peak)
        return min(MOST_MIXED, SPARED * room / wanted) if wanted else MOST_MIXED

    def costs(self) -> Mapping[str, LayerCosts]:
        """By layer name."""
        return {costs.layer: costs for costs in self._tokenwise.costs()}

    def limits(self, growth: float = 1.0) -> Limits:
        """Device memory that the last step used for other things is not for saved tensors.

        What was there at rest, and gradients, stay what they are in a longer step; the rest is taken to grow with the
        tokens, as logits and what a layer computes with do. A shorter step is believed to need no less.
        """
        around = self._grown(Place.AROUND, growth)
        layers = tuple(self._grown(layer.name, growth) for layer in self._layers)
        others = max(around, *layers)
        budgets = {tier.name: tier.budget for tier in self._engine.tiers}
        disk = budgets.get(Tier.DISK, 0)
        return Limits(
            device_bytes=max(0, self._memory.total_bytes - others),
            others_bytes=others,
            around_bytes=around,
            beside_layers=layers,
            host_bytes=budgets.get(Tier.HOST, 0) or 0,
            disk_bytes=UNBOUNDED_DISK if disk is None else disk,
        )

    def _grown(self, place: str | Place, growth: float) -> int:
        most = max(self._others.values(), default=0)
        nbytes = self._others.get(place, most)
        growing = nbytes - self._idle_bytes
        if place is not Place.AROUND or len(self._others) == 1:  # else before all gradients
            growing = min(growing, most - self._idle_bytes - self._gradient_bytes)
        return nbytes + round(max(0, growing) * max(0.0, growth - 1.0))

    def link(self) -> tuple[float, float, float] | None:
        """Measured at the first call, with nothing else on it."""
        found = self._link()
        self._used.restart()  # what the measurement took of the device is no step's
        return found

    def excess_bytes(self) -> int:
        """0 where all was within it."""
        return max(0, self._used.peak_bytes - self._memory.total_bytes)

    def take_trials(self) -> int:
        """Of all layers."""
        before, self._trials = self._trials, self._tokenwise.trials_run
        return self._trials - before

    def take_peak(self, *, growth: float | None = None) -> int:
        """Also notes how much device memory the step used beside saved tensors."""
        step = self._used.end_step()
        before = {} if growth is None else {place: self._grown(place, growth) for place in self._others}
        self._others = before | {place: max(nbytes, before.get(place, 0)) for place, nbytes in step.others.items()}
        self._idle_bytes, self._gradient_bytes = self._memory.now_bytes(), self._gradients_to_come()
        return step.saved_bytes

    def restart_peaks(self) -> None:
        """Forgets what memory was used before."""
        self._used.restart()

    def watch(self, *, closely: bool) -> None:
        """Closely: layer by layer, where the device's memory tells of each."""
        self._used.has_edges = closely and self._memory.falls_at_once
        self._engine.at_edges(self._used.edge if self._used.has_edges else None)

    def _when_idle(self) -> None:
        """Backward is nearly done. Before the next forward the program may restart the peaks, as loops that log them do."""
        try:
            Variable._execution_engine.queue_callback(self._used.end_backward)  # at its end
        except RuntimeError:  # no backward: the graph was let go
            self._used.end_backward()


def settings_of(plan: ActivationPlan, layers: Sequence[Layer]) -> tuple[dict[int, Placement], dict[str, TokenLevels]]:
    """What a plan says of each layer, in the words of those who carry it out."""
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
    levels = {layer.name: _levels(part) for layer, part in zip(layers, plan.layers, strict=True)}
    return placements, levels


def _levels(part: LayerPlan) -> TokenLevels:
    return TokenLevels(all=part.all_tokens, matmuls=part.matmul_tokens, attention=part.attention_tokens)
