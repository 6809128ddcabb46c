"""Writes that version counters do not show, into what replays of other layers read.

Fused kernels of torch's optimizers change parameters so, and other libraries' kernels or writes through `.data` may; a
layer's forward may write through `.data` into what another layer has read. Autograd does not notice; a replay that reads a
tensor asks here whether its memory was written after its forward.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch.optim.optimizer import register_optimizer_step_post_hook

from memo.swap.storage_map import StorageMap
from memo.swap.tensor_kinds import has_storage, local_part
from memo.torch_private import disable_dynamo

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch.optim import Optimizer

STEP, LAYER = "an optimizer's step between forward and backward", "another layer's forward"


class UncountedWrites:
    """The latest uncounted write into each storage."""

    def __init__(self) -> None:
        self.count = 0
        """Optimizer steps and layers that wrote so, so far."""
        self._latest = StorageMap()
        self._is_listening = False
        self._lock = threading.Lock()

    def begin(self) -> int:
        """Returns `count`; steps of all optimizers are noted from the first call on."""
        if not self._is_listening:
            self._is_listening = True
            register_optimizer_step_post_hook(self._by_step)
        return self.count

    def wrote(self, storage: torch.UntypedStorage, *, since: int) -> str | None:
        """Kind of the last write into `storage` after that numbered `since`: STEP or LAYER; None without one."""
        latest, by = (0, None) if self.count == since else self._latest.find(ref(storage)) or (0, None)
        return by if latest > since else None

    def by_layer(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Notes what a layer's forward, which has just ended, wrote into and has not made."""
        self._note(storages, LAYER)

    @disable_dynamo  # type: ignore[untyped-decorator]  # an optimizer may be compiled
    def _by_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        written = [
            local_part(parameter)
            for group in optimizer.param_groups
            if group.get("fused") or not type(optimizer).__module__.startswith("torch.optim.")
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        self._note((parameter.untyped_storage() for parameter in written if has_storage(parameter)), STEP)

    def _note(self, storages: Iterable[torch.UntypedStorage], by: str) -> None:
        written = list(storages)
        if written:
            with self._lock:
                self.count += 1
                for storage in written:
                    self._latest[storage] = self.count, by


uncounted_writes = UncountedWrites()
"""The writes of this process; hooks for optimizers' steps are the process's, too."""
