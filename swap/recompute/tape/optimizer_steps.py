"""Optimizer steps that change parameters without counting it at their version counters.

Fused kernels of torch's optimizers do, and other libraries' kernels or writes through `.data` may. Autograd does not
notice; a replay that reads a parameter asks here whether such a step came after its forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook

from memo.swap.storage_map import StorageMap
from memo.swap.tensor_kinds import has_storage, local_part

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

__all__ = ["OptimizerSteps", "uncounted_steps"]


class OptimizerSteps:
    """The latest uncounted step that wrote each parameter's memory."""

    def __init__(self) -> None:
        self.count = 0
        """Uncounted steps so far."""
        self._latest = StorageMap()
        self._is_listening = False

    def begin(self) -> int:
        """Returns `count`; steps of all optimizers are noted from the first call on."""
        if not self._is_listening:
            self._is_listening = True
            register_optimizer_step_post_hook(self._note)
        return self.count

    def wrote(self, storage: torch.UntypedStorage, *, since: int) -> bool:
        """True if a step after the one numbered `since` wrote a parameter that lies in `storage`."""
        return self.count != since and (self._latest.find(ref(storage)) or 0) > since

    @_disable_dynamo  # an optimizer may be compiled
    def _note(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        written = [
            local_part(parameter)
            for group in optimizer.param_groups
            if group.get("fused") or not type(optimizer).__module__.startswith("torch.optim.")
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if written:
            self.count += 1
            for parameter in written:
                if has_storage(parameter):
                    self._latest[parameter.untyped_storage()] = self.count


uncounted_steps = OptimizerSteps()
"""Of this process, as hooks for the steps of all optimizers are."""
