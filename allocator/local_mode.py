"""Base of dispatch modes that act on this rank's plain tensors.

A sharded tensor's own code runs first; the mode then sees the operators on the parts that this rank holds. Operators
that run on fakes, for example where a DTensor computes a shape, pass through: they allocate nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from memo.torch_private import OpOverload, TorchDispatchMode, TorchDispatchModeKey, get_dispatch_mode


class LocalTensorMode(TorchDispatchMode):
    """Dispatch mode whose `run` is called for operators on plain local tensors only."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # disabling torch.compile at every operator takes as long as the mode itself

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if get_dispatch_mode(TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented
        return self.run(func, args, kwargs)

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one operator; implemented by subclasses."""
        raise NotImplementedError
