"""Ways of other libraries, used as their manuals say: checkpointing with inputs on the CPU."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.peers.models import layers_of
from memo.errors import UsageError

MODULES = {
    "DeepSpeed checkpointing": ("deepspeed",),
    "sac_ilp, half": ("torch.distributed._tools.sac_estimator", "torch.distributed._tools.sac_ilp"),
}
"""Modules that a way imports in its first step unless they are loaded: no activation, and with DeepSpeed some 20 MiB."""


def load(way: str) -> None:
    """Imports a way's modules; those that are missing are the way's own to name."""
    for name in MODULES.get(way, ()):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


@contextlib.contextmanager
def deepspeed_checkpointed(model: nn.Module) -> Iterator[None]:
    """`deepspeed.checkpointing.checkpoint` around every layer, with `checkpoint_in_cpu` for a model on a GPU.

    On a CPU that option empties the very tensors that it means to have copied (0.19.8), so there it stays off.

    Raises:
        UsageError: deepspeed is not installed here.
    """
    try:
        import deepspeed
    except ImportError as error:
        raise UsageError(f"DeepSpeed: {error}; `make peers` installs it") from error
    checkpointing = deepspeed.checkpointing
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        deepspeed.init_distributed()
    if not checkpointing.is_configured():
        checkpointing.configure(None, partition_activations=False, checkpoint_in_cpu=next(model.parameters()).is_cuda)
    layers = layers_of(model)
    originals = [layer.forward for layer in layers]

    def recomputed(original: Any) -> Any:
        def forward(*args: Any, **named: Any) -> Any:
            return checkpointing.checkpoint(lambda *given: original(*given, **named), *args)

        return forward

    for layer in layers:
        layer.forward = recomputed(layer.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, original in zip(layers, originals, strict=True):
            layer.forward = original  # type: ignore[method-assign]


def checkpointing_switch(model: Any, to: str) -> Callable[..., Any]:
    """transformers' own method that enables or disables checkpointing; before 5.18 it is called gradient checkpointing.

    Raises:
        UsageError: the model is none of transformers'.
    """
    for kind in ("activation", "gradient"):
        if (switch := getattr(model, f"{kind}_checkpointing_{to}", None)) is not None:
            return switch  # type: ignore[no-any-return]
    raise UsageError("only for models of transformers")


@contextlib.contextmanager
def transformers_checkpointed(model: Any, *, offload: bool = False, **options: Any) -> Iterator[None]:
    """Checkpointing by transformers' own switch; `options` are those of torch's checkpoint.

    Raises:
        UsageError: the model is none of transformers', or the installed version cannot offload.
    """
    enable = checkpointing_switch(model, "enable")
    if offload and "offload" not in inspect.signature(enable).parameters:
        raise UsageError("activation_checkpointing_enable(offload=True): only from transformers 5.17 on")
    enable({"use_reentrant": False, **options}, **({"offload": True} if offload else {}))
    try:
        yield
    finally:
        checkpointing_switch(model, "disable")()
