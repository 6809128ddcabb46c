"""`memo.offload`, the Manager it returns, the plan sources and the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach
from memo.torch_version import require_torch

require_torch()

if TYPE_CHECKING:
    from memo.manager.arguments import require_choice as require_choice
    from memo.manager.claims import is_within_layer as is_within_layer
    from memo.manager.disabled import is_disabled as is_disabled
    from memo.manager.machine import Machine as Machine, machine_of as machine_of, use_machine as use_machine
    from memo.manager.manager import Manager as Manager, abandon as abandon
    from memo.manager.offloading import offload as offload
    from memo.manager.opening import OnFull as OnFull
    from memo.manager.replaced_checkpoints import is_replaced as is_replaced, modules_of as modules_of
    from memo.manager.report import Report as Report
    from memo.manager.resources import TierBudgets as TierBudgets, open_tiers as open_tiers
else:
    __getattr__, __dir__, __all__ = attach(__name__)
