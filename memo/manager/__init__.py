"""`memo.offload`, the Manager it returns, the plan sources and the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach
from memo.torch_version import require_torch

require_torch()

if TYPE_CHECKING:
    from memo.manager.machine import Machine as Machine, use_machine as use_machine
    from memo.manager.manager import Manager as Manager
    from memo.manager.offloading import offload as offload
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "machine": "Machine use_machine",
            "manager": "Manager",
            "offloading": "offload",
        },
    )
