"""Storages of FSDP2's parameters in a run without bytes: they are told of, instead of being resized."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

from memo.torch_private import fsdp_param, fsdp_param_group

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


class CountsStorages(Protocol):
    """Counts the memory of storages."""

    def emptied(self, storage: torch.UntypedStorage) -> None:
        """A storage has given up its memory and lives on."""

    def refilled(self, storage: torch.UntypedStorage) -> None:
        """An emptied storage has memory again."""


@contextlib.contextmanager
def storages_without_memory(counts: CountsStorages) -> Iterator[None]:
    """Has FSDP tell `counts` when it frees and allocates, instead of resizing storages that have no memory."""
    modules: tuple[Any, ...] = (fsdp_param, fsdp_param_group)
    replaced = {
        "free_storage": lambda tensor: counts.emptied(tensor.untyped_storage()),
        "alloc_storage": lambda tensor: counts.refilled(tensor.untyped_storage()),
    }
    before = [(module, name, getattr(module, name)) for module in modules for name in replaced if hasattr(module, name)]
    for module, name, _ in before:
        setattr(module, name, replaced[name])
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)
