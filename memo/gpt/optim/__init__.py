"""The optimizer, its learning-rate schedule, and the guard against bad losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.gpt.optim.host_bytes import (
        GROUP_BYTES as GROUP_BYTES,
        IN_FLIGHT_BYTES as IN_FLIGHT_BYTES,
        optimizer_host_bytes as optimizer_host_bytes,
        require_optimizer_room as require_optimizer_room,
    )
    from memo.gpt.optim.host_optimizer import HostOptimizer as HostOptimizer
    from memo.gpt.optim.loss_guard import LossGuardConfig as LossGuardConfig, OnNan as OnNan, OnSpike as OnSpike
    from memo.gpt.optim.lr_schedule import FLAGS as FLAGS, LrSchedule as LrSchedule
    from memo.gpt.optim.optimizer import adamw as adamw, empty_state as empty_state
else:
    __getattr__, __dir__, __all__ = attach(__name__)
