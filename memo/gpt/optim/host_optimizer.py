"""AdamW on the host for a model on one GPU: a copy of each parameter, its gradient and its states are in host memory.

    backward    compute   layer 2 | layer 1 | layer 0
                d2h               | gradients 2 | 1 | 0
    update      host                                    | AdamW of group 0 | group 1   | group 2
                h2d                                                        | weights 0 | 1 | 2

Owns that memory, pinned, and the copies in both directions. Invariant: from one forward to the next `step`, device and host
hold the same parameters; the device holds no gradients but those whose copies are under way. The numbers are those of AdamW
on gradients as backward made them: nothing is rounded on the way.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memo.gpt.optim.host_bytes import GROUP_BYTES, IN_FLIGHT_BYTES, aligned, optimizer_host_bytes
from memo.gpt.optim.optimizer import adamw

if TYPE_CHECKING:
    from memo.swap.backends import Backend, Event


@dataclasses.dataclass(slots=True, eq=False)
class _Trained:
    """A parameter on both sides."""

    device: nn.Parameter
    host: nn.Parameter
    gradient: torch.Tensor
    """On the host: sum of the step's gradients so far, where `norm` is set."""
    norm: torch.Tensor | None = None
    """Norm of that sum, on the device."""
    copied: Event | None = None
    """End of the copy of that sum to the host."""


class HostOptimizer:
    """AdamW whose state and step are on the host; in a training step it stands in for `torch.optim.AdamW`.

    Hooks copy each gradient to the host as backward makes it and release it, so `parameter.grad` is None after backward.

    Args:
        model: its parameters that require gradients are trained; they are contiguous, and in the order of forward.
        backend: of the model's device; `close` closes it.
        lr: initial learning rate.
        betas: decay rates of the two moments.
        weight_decay: decoupled weight decay of matrices.

    Raises:
        SwapError: the system refuses the memory, or to lock it.
    """

    def __init__(
        self, model: nn.Module, backend: Backend, *, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.nbytes = optimizer_host_bytes(parameters)
        """Bytes of host memory."""
        self._backend = backend
        memory = _HostMemory(backend, self.nbytes)
        self._groups: list[tuple[list[_Trained], torch.optim.AdamW]] = []
        for group in _groups(parameters):
            trained: list[_Trained] = []
            states: dict[torch.Tensor, Any] = {}
            for parameter in group:
                copy, gradient, mean, square = (memory.like(parameter) for _ in range(4))
                one = _Trained(device=parameter, host=nn.Parameter(copy), gradient=gradient)
                trained.append(one)
                step = torch.zeros((), dtype=torch.float32)
                states[one.host] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}
            optimizer = adamw([one.host for one in trained], lr=lr, betas=betas, weight_decay=weight_decay)
            optimizer.state.update(states)
            self._groups.append((trained, optimizer))
        self._leaving: collections.deque[tuple[Event, torch.Tensor]] = collections.deque()
        self._leaving_bytes = 0
        self._fetched: dict[_Trained, tuple[Event, torch.Tensor]] = {}  # sums on their way back to the device
        self._following: dict[_Trained, _Trained] = {}  # the order of gradients in a step's first backward
        self._latest: _Trained | None = None
        self._returned: Event | None = None  # end of the last copy of an updated parameter to the device
        self._clipping: tuple[float, torch.Tensor] | None = None
        hooks = [one.device.register_post_accumulate_grad_hook(self._taking(one)) for one in self._trained()]
        self._hooks = [*hooks, model.register_forward_pre_hook(lambda *_: self.wait())]
        self.take_parameters()

    @property
    def state(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """AdamW's state of each of the model's parameters, live."""
        return {one.device: optimizer.state[one.host] for group, optimizer in self._groups for one in group}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of AdamW, live."""
        return [group for _, optimizer in self._groups for group in optimizer.param_groups]

    def take_parameters(self) -> None:
        """Copies the parameters from the device, where they were changed; blocks until they are there."""
        self._backend.d2h.wait(self._backend.compute_event())
        copied = [self._backend.d2h.copy(_bytes(one.host), _bytes(one.device)) for one in self._trained()]
        for event in copied[-1:]:  # the stream's order
            event.synchronize()

    def clip(self, limit: float) -> float:
        """Norm of all gradients together; the next `step` scales them to `limit`, as torch's `clip_grad_norm_`."""
        norms = [one.norm for one in self._trained() if one.norm is not None]
        total = torch.linalg.vector_norm(torch.stack(norms)).cpu() if norms else torch.zeros(())
        self._clipping = limit, total
        return float(total)

    def step(self) -> None:
        """Updates the parameters that have gradients; the device's are there after `wait`."""
        backend, scaled = self._backend, False
        if self._clipping is not None:
            limit, total = self._clipping
            scaled = bool(limit / (total + 1e-6) < 1)  # torch's own factor; one of 1 changes no gradient
        for one in self._trained():
            one.host.grad = None if one.norm is None else one.gradient
            if one.copied is not None:
                one.copied.synchronize()
        if self._returned is not None:
            self._returned.synchronize()  # a copy back reads what is now updated
        backend.h2d.wait(backend.compute_event())  # backward reads the device's parameters
        for group, optimizer in self._groups:
            if scaled:
                nn.utils.clip_grads_with_norm_([one.host for one in group], limit, total)
            optimizer.step()
            for one in group:
                if one.norm is not None:
                    self._returned = backend.h2d.copy(_bytes(one.device), _bytes(one.host))

    def wait(self) -> None:
        """Orders the device's further work after the copies of updated parameters; each forward begins with it."""
        if self._returned is not None:
            self._backend.compute_wait(self._returned)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients; `set_to_none` is there for the optimizer that this one stands in for."""
        self._release(0)
        while self._fetched:
            _, (copied, _earlier) = self._fetched.popitem()
            self._backend.compute_wait(copied)
        self._clipping = self._latest = None
        for one in self._trained():
            one.norm = one.copied = one.host.grad = None

    def close(self) -> None:
        """Removes the hooks, waits for the copies and closes the backend."""
        for hook in self._hooks:
            hook.remove()
        self._backend.finish()
        self.zero_grad()
        self._backend.close()

    def _trained(self) -> Iterator[_Trained]:
        return (one for group, _ in self._groups for one in group)

    def _taking(self, one: _Trained) -> Callable[[torch.Tensor], None]:
        return lambda _: self._take(one)

    def _take(self, one: _Trained) -> None:
        """Copies a gradient out as soon as backward has it, added to those of earlier microbatches."""
        backend, gradient = self._backend, one.device.grad
        assert gradient is not None  # autograd has just set it
        one.device.grad = None
        gradient = gradient.contiguous()
        if one.norm is not None:
            self._fetch(one)
            copied, earlier = self._fetched.pop(one)
            backend.compute_wait(copied)
            gradient = earlier.add_(gradient)
            if (following := self._following.get(one)) is not None:
                self._fetch(following)  # beside the work that makes its gradient
        elif self._latest is not None:
            self._following[self._latest] = one
        self._latest = one
        one.norm = torch.linalg.vector_norm(gradient)
        self._release(max(0, IN_FLIGHT_BYTES - gradient.nbytes))
        backend.d2h.wait(backend.compute_event())
        one.copied = backend.d2h.copy(_bytes(one.gradient), _bytes(gradient))
        self._leaving.append((one.copied, gradient))
        self._leaving_bytes += gradient.nbytes

    def _fetch(self, one: _Trained) -> None:
        """Begins to copy the sum of a step's earlier gradients back to the device, once."""
        if one in self._fetched or one.copied is None:
            return
        backend = self._backend
        earlier = backend.empty(one.gradient.nbytes).view(one.gradient.dtype).view(one.gradient.shape)
        for event in (one.copied, backend.compute_event()):  # written on the host; allocated here
            backend.h2d.wait(event)
        self._fetched[one] = backend.h2d.copy(_bytes(earlier), _bytes(one.gradient)), earlier

    def _release(self, most_bytes: int) -> None:
        """Releases the oldest gradients, each after its copy, until at most so many bytes are on the device."""
        while self._leaving and self._leaving_bytes > most_bytes:
            event, gradient = self._leaving.popleft()
            self._leaving_bytes -= gradient.nbytes
            self._backend.compute_wait(event)  # the memory is reused in the compute stream's order


class _HostMemory:
    """Pinned memory of zeros, resident, from which tensors are cut one after another."""

    def __init__(self, backend: Backend, nbytes: int) -> None:
        slab = backend.host_slab(nbytes)
        try:
            slab.grow(nbytes)
            slab.wait(nbytes)
        finally:
            slab.close()  # the memory stays locked until its last view is gone
        self._memory = slab.memory
        self._memory.zero_()  # a page counts as the process's from its first write on
        self._used = 0

    def like(self, parameter: torch.Tensor) -> torch.Tensor:
        """The next tensor, of the parameter's shape and dtype."""
        first, end = self._used, self._used + parameter.nbytes
        self._used += aligned(parameter.nbytes)
        return self._memory[first:end].view(parameter.dtype).view(parameter.shape)


def _groups(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Consecutive parameters of some GROUP_BYTES each."""
    groups: list[list[nn.Parameter]] = []
    nbytes = GROUP_BYTES
    for parameter in parameters:
        if nbytes >= GROUP_BYTES:
            groups.append([])
            nbytes = 0
        groups[-1].append(parameter)
        nbytes += parameter.nbytes
    return groups


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8)
