"""What a model keeps on its device between steps, and samples of the device's memory for the trace.

`OwnedMemory` counts weights, gradients and optimizer state by their tensors; it holds no tensor. `MemorySampler` writes
them to the trace, with the allocator's counter: at step and layer boundaries, and between them at most once in
SHORTEST_NS where a storage changes its state. What the counter has beyond the owned and the saved bytes is transient.

The allocator's peak is only read, never restarted: programs and planning have uses of their own for it. Where it has
risen between two samples, the trace gets one more sample, halfway between them.
"""

from __future__ import annotations

import heapq
import operator
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memo.events import CounterEvent, Owned, Owner, TierName
from memo.swap import has_storage, local_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from memo.events import Tracer

SHORTEST_NS = 200_000
"""Least time between two samples within a layer: reading the counter takes some 10 µs."""
MOST_TENSORS = 10
"""Largest tensors of each owner that are named."""


class OwnedMemory:
    """Weights, gradients and optimizer state of a model on one device. Holds the model and its optimizers weakly.

    Args:
        model: the model; its buffers count as weights.
        device: tensors on other devices are not counted.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = weakref.ref(model)
        self._device = device
        self._optimizers = _Optimizers(model)
        self._places: list[tuple[weakref.ref[nn.Module], str]] = []  # of trained parameters, by their modules
        # The hook holds no reference to this object, which must be collected with its manager.
        self._stop = weakref.finalize(self, register_optimizer_step_post_hook(self._optimizers).remove)

    def close(self) -> None:
        """Stops the watch for optimizers. Idempotent."""
        self._stop()

    def when_stepped(self, call: Callable[[], None]) -> None:
        """Registers a bound method, held weakly, for after each step of an optimizer of the model."""
        self._optimizers.stepped = weakref.WeakMethod(call)

    def nbytes(self, owner: Owner) -> int:
        """Bytes of one owner now."""
        return sum(nbytes for _, _, nbytes in self._tensors(owner))

    def begin_step(self) -> None:
        """Notes the parameters whose gradients `gradient_nbytes` counts."""
        model = self._model()
        places = {
            id(parameter): (weakref.ref(module), name)  # once each, where modules share it
            for module in (() if model is None else model.modules())
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad
        }
        self._places = list(places.values())

    def gradient_nbytes(self) -> int:
        """Bytes of the gradients now, of the parameters that `begin_step` noted; cheap enough for layer boundaries."""
        total = 0
        for known, name in self._places:
            module = known()
            parameter = None if module is None else module._parameters.get(name)
            gradient = None if parameter is None else parameter.grad
            if gradient is not None and gradient.device == self._device:
                total += gradient.nbytes if type(gradient) is torch.Tensor else local_part(gradient).nbytes
        return total

    def largest(self, owner: Owner, *, t: int = 0, step: int = 0) -> list[Owned]:
        """The largest tensors of one owner now, at most MOST_TENSORS, largest first, as events of this time."""
        found = heapq.nlargest(MOST_TENSORS, self._tensors(owner), key=operator.itemgetter(2))
        return [
            Owned(
                t=t,
                step=step,
                owner=owner,
                nbytes=nbytes,
                module=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
            )
            for name, tensor, nbytes in found
        ]

    def _tensors(self, owner: Owner) -> Iterator[tuple[str, torch.Tensor, int]]:
        """(name, tensor, bytes on the device) of each storage of an owner."""
        seen: set[int] = set()
        for name, tensor in self._candidates(owner):
            local = local_part(tensor)
            if local.device != self._device or not has_storage(local):
                continue
            storage = local.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                yield name, local, storage.nbytes()

    def _candidates(self, owner: Owner) -> Iterator[tuple[str, torch.Tensor]]:
        model = self._model()
        if model is None:
            return
        if owner is Owner.WEIGHTS:
            yield from model.named_parameters()
            yield from model.named_buffers()
        elif owner is Owner.GRADIENTS:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    yield name, parameter.grad
        elif owner is Owner.OPTIMIZER:
            yield from self._optimizers.state(model)


class _Optimizers:
    """Hook of all optimizers' steps, which notes those of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._ours: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.stepped: weakref.WeakMethod[Callable[[], None]] | None = None

    def __call__(self, optimizer: torch.optim.Optimizer, *args: object) -> None:
        if optimizer in self._others:
            return
        if optimizer not in self._ours:
            self._note(optimizer)
        stepped = None if self.stepped is None or optimizer not in self._ours else self.stepped()
        if stepped is not None:
            stepped()

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        model = self._model()
        ours = set() if model is None else {id(parameter) for parameter in model.parameters()}
        trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
        (self._ours if any(id(one) in ours for one in trained) else self._others).add(optimizer)

    def state(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        for optimizer in self._ours:
            for parameter, state in optimizer.state.items():
                found: dict[str, Any] = state if isinstance(state, dict) else {}
                name = names.get(parameter, "")
                for key, value in found.items():
                    if isinstance(value, torch.Tensor):
                        yield f"{name} {key}".strip(), value


class MemorySampler:
    """Writes the device's memory to a trace.

    Args:
        owned: the model's memory.
        tracer: receives the samples.
        used_bytes: the allocator's counter: all bytes in use now.
        peak_bytes: the largest `used_bytes` since it was last restarted.
    """

    def __init__(
        self,
        owned: OwnedMemory,
        tracer: Tracer,
        *,
        used_bytes: Callable[[], int],
        peak_bytes: Callable[[], int],
    ) -> None:
        self._owned = owned
        self._tracer = tracer
        self._used_bytes = used_bytes
        self._peak_bytes = peak_bytes
        self._at, self._used, self._peak = 0, 0, peak_bytes()
        self._totals: dict[Owner, int] = {}

    def begin_step(self) -> None:
        """Samples all owners, with their largest tensors, so that a part of the trace has them too."""
        self._totals.clear()
        self._owned.begin_step()
        for owner in (Owner.WEIGHTS, Owner.GRADIENTS, Owner.OPTIMIZER):
            self._own(owner, self._owned.nbytes(owner), named=True)
        self.sample()

    def stepped(self) -> None:
        """Samples what an optimizer's step may have changed."""
        for owner in (Owner.GRADIENTS, Owner.OPTIMIZER):
            self._own(owner, self._owned.nbytes(owner), named=not self._totals.get(owner))
        self.sample()

    def at_boundary(self) -> None:
        """Samples the gradients, which backward adds to, and the counter."""
        self._own(Owner.GRADIENTS, self._owned.gradient_nbytes(), named=False)
        self.sample()

    def at_change(self) -> None:
        """Samples the counter if it was not sampled just now."""
        if self._tracer.now() - self._at >= SHORTEST_NS:
            self.sample()

    def sample(self) -> None:
        """Samples the counter, and its peak where that has risen."""
        now, used, peak = self._tracer.now(), self._used_bytes(), self._peak_bytes()
        if peak > max(used, self._used) and peak != self._peak and self._at:
            self._count((self._at + now) // 2, peak)
        if used != self._used:
            self._count(now, used)
        self._at, self._used, self._peak = now, used, peak

    def _count(self, t: int, nbytes: int) -> None:
        self._tracer.emit(CounterEvent(t=t, step=self._tracer.step, tier=TierName.DEVICE, nbytes=nbytes))

    def _own(self, owner: Owner, nbytes: int, *, named: bool) -> None:
        if nbytes == self._totals.get(owner):
            return
        self._totals[owner] = nbytes
        now, step = self._tracer.now(), self._tracer.step
        self._tracer.emit(Owned(t=now, step=step, owner=owner, nbytes=nbytes))
        for one in self._owned.largest(owner, t=now, step=step) if named else ():
            self._tracer.emit(one)
