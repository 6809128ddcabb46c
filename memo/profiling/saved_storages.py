"""Sizes of the storages that autograd saves in each layer, from one real forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from memo.swap import Layer


def saved_storages(loss: Callable[[], torch.Tensor], layers: Sequence[Layer]) -> dict[str, list[int]]:
    """Runs one forward; returns the bytes of each storage saved in it, by layer name.

    A storage counts for the layer that saved it first; parameters and buffers do not count.
    """
    found: dict[str, list[int]] = {layer.name: [] for layer in layers}
    running: list[str] = []
    # Storage objects compare by identity; `seen` keeps them alive, so that none is reused for another storage.
    seen = {
        tensor.untyped_storage() for layer in layers for tensor in (*layer.module.parameters(), *layer.module.buffers())
    }

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if running and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage not in seen:
                seen.add(storage)
                found[running[-1]].append(storage.nbytes())
        return tensor.detach()

    def entering(name: str) -> Callable[..., None]:
        return lambda *_: running.append(name)

    def leaving(*_: Any) -> None:
        running.pop()

    hooks = [layer.module.register_forward_pre_hook(entering(layer.name)) for layer in layers]
    hooks += [layer.module.register_forward_hook(leaving, always_call=True) for layer in layers]
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss()
    finally:
        for hook in hooks:
            hook.remove()
    return found
