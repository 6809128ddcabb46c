"""Activation checkpointing of a model's layers as others do it: in full, with inputs offloaded, selective.

Each is a context manager that puts torch's non-reentrant checkpoint around every layer while it is open.

    full         layers' inputs stay on the device, all else is computed again
    offloaded    likewise, with the inputs in pinned host memory (Unsloth's way, copies on side streams)
    attention    attention's results stay, all else is computed again (TRL's `selective`); with inputs offloaded or not
    selective    results of attention and of every second matrix product stay, all else is computed again (torchtitan's way)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from benchmarks.peers.models import layers_of
from benchmarks.peers.moved import Moved

_ATEN = torch.ops.aten
_PRODUCTS = frozenset({_ATEN.mm.default, _ATEN.addmm.default})
_ATTENTION = frozenset(
    {
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    }
)


Context = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def checkpointed(
    model: nn.Module, *, every: int = 1, inputs: Context = contextlib.nullcontext, **options: Any
) -> Iterator[None]:
    """Every layer, or every n-th, recomputed in backward. `inputs` is around what saves inputs; `options` are torch's."""
    layers = layers_of(model)[::every]
    originals = [layer.forward for layer in layers]
    for layer, original in zip(layers, originals, strict=True):
        layer.forward = _recomputed(original, inputs, options)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, original in zip(layers, originals, strict=True):
            layer.forward = original  # type: ignore[method-assign]


def _recomputed(original: Callable[..., torch.Tensor], inputs: Context, options: dict[str, Any]) -> Callable[..., Any]:
    def forward(*args: Any, **named: Any) -> Any:
        with inputs():
            return checkpoint(functools.partial(original, **named), *args, use_reentrant=False, **options)

    return forward


def selectively_checkpointed(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Attention's results and those of every second matrix product of a layer stay, the first of them included."""
    return checkpointed(model, context_fn=lambda: create_selective_checkpoint_contexts(_Policy()))


def keep_attention() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """`context_fn` of torch's checkpoint: attention's results stay, all else is computed again."""
    return create_selective_checkpoint_contexts(_attention_saved)  # type: ignore[no-any-return]


def _attention_saved(_: SelectiveCheckpointContext, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_attention(func) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_attention(func: Any) -> bool:
    return func in _ATTENTION or (func.namespace.startswith("flash_attn") and "forward" in str(func))


class _Policy:
    """torchtitan's: of one layer's call, forward and recompute counted apart."""

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}

    def __call__(self, context: SelectiveCheckpointContext, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = _is_attention(func)
        if func in _PRODUCTS:
            self._products[context.is_recompute] += 1
            saved = self._products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@dataclasses.dataclass(slots=True, kw_only=True)
class _Input:
    """One layer's input while it is away."""

    index: int
    host: torch.Tensor
    device: torch.Tensor | None = None
    """Where it was fetched to, until backward takes it."""
    fetched: torch.cuda.Event | None = None
    taken: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Streams:
    """One each way: an input that is fetched does not queue behind those that still leave."""

    out: torch.cuda.Stream
    back: torch.cuda.Stream


class OffloadedInputs:
    """Checkpointing with each layer's input in host memory; one layer is fetched ahead of backward.

    Saved-tensor hooks around a non-reentrant checkpoint are given its inputs alone. Host buffers are kept from step to
    step, so that one forward is followed by its backward. On a CPU the same copies are made at once. `options` are those of
    torch's checkpoint.
    """

    def __init__(self, device: torch.device, **options: Any) -> None:
        self._device, self._options = device, options
        on_gpu = device.type == "cuda"
        self._streams = _Streams(out=torch.cuda.Stream(device), back=torch.cuda.Stream(device)) if on_gpu else None
        self._buffers: list[torch.Tensor] = []
        self._inputs: list[_Input] = []
        self.moved = Moved()

    @property
    def host_bytes(self) -> int:
        """Bytes of the host buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @contextlib.contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """Checkpoints the layers and moves their inputs; one forward."""
        if not all(entry.taken for entry in self._inputs):
            raise RuntimeError("offloaded checkpointing: a forward before the last one's backward")
        self._inputs = []
        if self._streams is not None:
            self._streams.out.wait_stream(self._streams.back)  # the buffers are read until then
        with checkpointed(model, inputs=lambda: saved_tensors_hooks(self._pack, self._unpack), **self._options):
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Input:
        if tensor.is_leaf:  # an empty tensor of torch's own
            return tensor.detach()
        index = len(self._inputs)
        entry = _Input(index=index, host=self._buffer(index, tensor))
        self._inputs.append(entry)
        self.moved.out_bytes += tensor.nbytes
        source = tensor.detach()
        if self._streams is None:
            entry.host.copy_(source)
            return entry
        self._streams.out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._streams.out):
            entry.host.copy_(source, non_blocking=True)
        source.record_stream(self._streams.out)
        return entry

    def _buffer(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """The host memory of a layer's input, made anew where the reserved one is too small."""
        if index == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=like.dtype))
        if self._buffers[index].numel() < like.numel() or self._buffers[index].dtype != like.dtype:
            self._buffers[index] = self._host(like.numel(), like.dtype)
        return self._buffers[index][: like.numel()].view(like.shape)

    def _host(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, pin_memory=self._streams is not None)

    def _unpack(self, saved: torch.Tensor | _Input) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        if saved.device is None:
            self._fetch(saved)
        tensor, saved.device, saved.taken = saved.device, None, True
        assert tensor is not None
        if saved.fetched is not None:
            torch.cuda.current_stream(self._device).wait_event(saved.fetched)
        if saved.index:
            self._fetch(self._inputs[saved.index - 1])
        return tensor

    def _fetch(self, entry: _Input) -> None:
        """Memory is the compute stream's: the copy waits for its earlier work, and its later work for the event."""
        self.moved.back_bytes += entry.host.nbytes
        entry.device = torch.empty(entry.host.shape, dtype=entry.host.dtype, device=self._device)
        if self._streams is None:
            entry.device.copy_(entry.host)
            return
        back = self._streams.back
        back.wait_stream(self._streams.out)
        back.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(back):
            entry.device.copy_(entry.host, non_blocking=True)
            entry.fetched = back.record_event()
        entry.device.record_stream(back)
