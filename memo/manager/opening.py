"""Parts of one manager, opened for the device that its model is on: tiers, engine, recompute, plan source.

`memo.offload` checks its arguments into OffloadOptions, from which the parts are opened at once where the model's device is
known, and at the first forward where the model was on the meta device or has moved to a GPU since.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from memo.autoplan import Actuator, AutoPlan, PlanSource, missing_gradient_bytes, single_rank
from memo.manager.device_memory import MemorySampler, OwnedMemory
from memo.manager.machine import machine_of
from memo.manager.plan_source import FixedPlan, FixedSetting, checked_plan
from memo.manager.resources import TierBudgets, device_of, offloaded_training_bytes, open_recorder, open_tiers
from memo.mip.activation import lower_tier_nbytes
from memo.parallel import PipelineOrder, gather_values, group_of
from memo.swap import Bans, Engine, Layer, RecomputePolicy, Setting, WhenFull

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn
    from torch.distributed import ProcessGroup

    from memo.autoplan import AllGather
    from memo.kernels import Codec
    from memo.mip.activation import ActivationPlan
    from memo.swap.disk import DiskStore
    from memo.trace import TraceRecorder

_Path = str | os.PathLike[str]

OnFull = Literal["spill", "raise", "recompute"]
"""Response to a full tier: use the next tier, raise, or use the next tier and recompute layers when all are full. A run
that makes its plans itself never raises, whichever it is."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Parts of an open manager."""

    engine: Engine
    recompute_policy: RecomputePolicy
    recorder: TraceRecorder | None = None
    """None: no trace."""
    store: DiskStore | None = None
    """None: no disk tier, or one whose traffic is not counted."""
    actuator: Actuator | None = None
    """Observer of layer boundaries and backward's ends; held here, since the engine has a weak reference alone."""
    source: PlanSource | None = None
    """None: a fixed `alpha` or fixed levels."""
    owned: OwnedMemory | None = None
    """The model's weights, gradients and optimizer state; None: not counted."""
    sampler: MemorySampler | None = None
    """None: no trace."""

    def close(self, end_step: Callable[[], None] | None = None) -> None:
        """Releases memory and files, and ends the trace, its last step by `end_step`.

        Raises:
            SwapError: a copy in flight failed. The trace is ended all the same.
        """
        try:
            self.engine.close()
        finally:
            if self.owned is not None:
                self.owned.close()
            if self.recorder is not None:
                if end_step is not None:
                    end_step()
                self.recorder.close()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """Arguments of `memo.offload`, checked; `open` may be called for one device after another."""

    model: nn.Module
    layers: Sequence[Layer]
    plan: ActivationPlan | None
    """This rank's part of a given plan."""
    plan_name: str
    automatic: bool
    """Plans are made while training."""
    setting: Setting
    """Setting of layers that `levels` does not name."""
    levels: Mapping[str, Setting]
    bans: Mapping[str, Bans]
    device_bytes: int | None
    host: int | str
    host_pool: _Path | None
    disk: _Path | Sequence[_Path] | None
    disk_budget: int | str | None
    min_bytes: int
    codec: Codec | None
    """Codec of what moves; None: exact."""
    on_full: OnFull
    verify: bool
    trace: _Path | None
    trace_stacks: bool
    group: ProcessGroup | None
    order: PipelineOrder | None

    def device(self) -> torch.device | None:
        """The model's device; None on the meta device.

        Raises:
            UsageError: it is on several GPUs, or on a device that memo does not manage.
        """
        return device_of(self.model)

    def open(self, device: torch.device) -> Runtime:
        """Opens everything for a device; nothing is left open after an error."""
        machine = machine_of(device)
        budget = machine.device_budget(self.device_bytes)
        room = TierBudgets.of(
            machine,
            host=self.host,
            host_pool=self.host_pool,
            disk=self.disk,
            disk_budget=self.disk_budget,
            weights=_weights(self.plan, self.order),
            reserved_bytes=offloaded_training_bytes(self.model, device),
        )
        is_traced = self.trace is not None
        backend = machine.backend(timing=is_traced or self.automatic or self.plan is not None)
        recorder = None
        if self.trace is not None:
            recorder = open_recorder(
                self.trace,
                self.model,
                room,
                device_bytes=self.device_bytes or machine.device_bytes,
                stacks=self.trace_stacks,
                now_ns=backend.now_ns,
            )
        tiers, store = open_tiers(room, backend, verify=self.verify)
        engine = Engine(
            backend,
            tiers,
            min_bytes=self.min_bytes,
            when_full=WhenFull.STAY if self.automatic else WhenFull[self.on_full.upper()],
            verify=self.verify,
            codec=self.codec,
            tracer=recorder,
        )
        if self.order is not None:
            engine.expect(self.order.backward)
        recompute_policy = RecomputePolicy(
            engine,
            self.setting,
            bans=self.bans,
            verify=self.verify,
        )
        owned = OwnedMemory(self.model, device)
        sampler = None
        if recorder is not None:
            sampler = MemorySampler(owned, recorder, used_bytes=budget.used_bytes, peak_bytes=budget.peak_bytes)
            engine.sample_memory(sampler.at_boundary)
            owned.when_stepped(sampler.stepped)
            recorder.on_change = sampler.at_change
        parts = Runtime(
            engine=engine,
            recompute_policy=recompute_policy,
            recorder=recorder,
            store=store,
            owned=owned,
            sampler=sampler,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(parts.close)  # a plan that does not fit the model leaves no file or buffer behind
            if self.levels:
                recompute_policy.choose(self.levels)
            actuator = Actuator(
                engine,
                recompute_policy,
                self.layers,
                budget,
                tracer=recorder,
                link=machine.link,
                disk_rates=lambda: machine.lanes(directories=room.directories) if room.directories else {},
                missing_gradient_bytes=lambda: missing_gradient_bytes(self.model.parameters(), device),
            )
            parts = dataclasses.replace(parts, actuator=actuator, source=self._source(actuator, recorder))
            undo.pop_all()
        return parts

    def _source(self, actuator: Actuator, recorder: TraceRecorder | None) -> PlanSource | None:
        if self.automatic:
            return AutoPlan(
                actuator,
                checked_plan,
                all_gather=_all_gather(self.group or group_of(self.model)),
                held=None if self.order is None else self.order.held,
                turns=None if self.order is None else self.order.turns,
                tracer=recorder,
                model=type(self.model).__name__,
            )
        if self.plan is not None:
            return FixedPlan(actuator, self.plan, name=self.plan_name)
        return None if self.device_bytes is None else FixedSetting(actuator)


def _weights(plan: ActivationPlan | None, order: PipelineOrder | None) -> tuple[int, int]:
    """Weights of this rank in sharing its node's host and disk budgets: its plan's bytes, else its calls in flight."""
    if plan is not None:
        host, disk = lower_tier_nbytes(plan)
        return max(host, 1), max(disk, 1)  # a tier that is turned on has some room
    return (1, 1) if order is None else (order.weight, order.weight)


def _all_gather(group: ProcessGroup | None) -> AllGather:
    return single_rank if group is None or group.size() == 1 else functools.partial(gather_values, group=group)
