"""Measures memory by what operations made: no allocator, no noise, the same on every device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in args:
            if isinstance(value, torch.Tensor):
                self._known.add(value.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor) and value.untyped_storage() not in self._known:
                self._born(value.untyped_storage())
        return result

    def _born(self, storage: Any) -> None:
        self._known.add(storage)
        if storage.device.type == "meta":
            return  # a form without bytes
        nbytes = storage.nbytes()
        self.live += nbytes
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, nbytes)
        weakref.finalize(storage, self._died, nbytes)

    def _died(self, nbytes: int) -> None:
        self.live -= nbytes


class CountedDevice(LiveBytes):
    """A model's device, as a GPU's allocator counts it: its weights, and all that operations make while this is entered."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        for tensor in (*model.parameters(), *model.buffers()):
            storage = tensor.untyped_storage()
            if storage not in self._known:
                self._known.add(storage)
                self.live += storage.nbytes()
        self.peak = self.top = self.live
        """`top` is another peak, that only the test restarts."""

    def restart(self) -> None:
        self.peak = self.live

    def _born(self, storage: Any) -> None:
        super()._born(storage)
        self.top = max(self.top, self.live)


class LiveLocalBytes(LiveBytes):
    """Without DTensors, whose own storage is no memory and says the size of the whole."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)
