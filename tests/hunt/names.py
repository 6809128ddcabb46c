"""What programs call beside torch: functions and operators of one's own, kernels that the dispatcher does not see, hooks.

`Stack` is what a random model is beside its random forward: its layers, its loss.
"""

from __future__ import annotations

import contextlib
import functools
import random  # noqa: F401 (programs use it)
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memo
from tests.hunt.kernels import hidden_write, rewritten  # noqa: F401 (programs use them)
from tests.hunt.operators import DEVICE, Sampled  # noqa: F401 (programs use them)

HIDDEN, TOKENS, BATCH = 16, 32, 2
H = HIDDEN
STREAMS = 3
"""Streams beside the current one."""


class Replaced:
    """Where a checkpoint around layers is a plain call: in a manager, and in the run that it is compared with.

    It runs functions with side effects once, and not again in backward.
    """

    always = False
    hooks: ClassVar[list[Any]] = []
    """The topmost hooks for saved tensors where each was entered: a manager replaces nothing under hooks set later."""

    def __enter__(self) -> None:
        Replaced.hooks.append(_topmost())

    def __exit__(self, *exception: object) -> None:
        Replaced.hooks.pop()


def _topmost() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def around_layers(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
    """A checkpoint that a manager replaces; in the run without memo a plain call where there would be a manager."""
    is_model = isinstance(function, nn.Module)  # an attached manager begins in the model's forward
    if (Replaced.hooks and Replaced.hooks[-1] == _topmost()) or (Replaced.always and not is_model):
        return function(x)
    return checkpoint(function, x, use_reentrant=False)


class Scaled(torch.autograd.Function):
    """tanh(exp(tanh(x)) · w), with what its backward needs saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        inner = x.tanh().exp()
        out = (inner * weight).tanh()
        ctx.save_for_backward(x, inner, out, weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, inner, out, weight = ctx.saved_tensors
        above = grad * (1 - out * out)
        return above * weight * inner * (1 - x.tanh() ** 2), (above * inner).sum((0, 1))


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Parted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = x.size(-1) // 2
        left, right = x[..., :half].sin(), x[..., half:].contiguous() * 1
        ctx.save_for_backward(x, right)
        return left, right

    @staticmethod
    def backward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        x, kept = ctx.saved_tensors
        return torch.cat([left * x[..., : left.size(-1)].cos(), right + 0 * kept], -1)


def fill(out: torch.Tensor, x: torch.Tensor) -> None:
    """Writes tanh(x) + 0.5 where torch's dispatcher does not see it."""
    value = numpy.tanh(x.detach().float().cpu().numpy()) + numpy.float32(0.5)
    if out.is_cuda:
        with torch._C._DisableTorchDispatch():  # its storage has a version of its own: autograd sees nothing either
            out.data.copy_(torch.from_numpy(value))
    elif out.dtype is torch.bfloat16:
        out.detach().view(torch.int16).numpy()[...] = (value.astype(numpy.float32).view(numpy.uint32) >> 16).astype(
            numpy.int16
        )
    else:
        out.detach().numpy()[...] = value


class Opaque(torch.autograd.Function):
    """tanh(x) + 0.5 by a kernel that the dispatcher does not see, into memory that `make` gives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        out = make(x)
        fill(out, x)
        ctx.save_for_backward(out)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (out,) = ctx.saved_tensors
        return grad * (1 - (out - 0.5).square()), None


def _halve(x: torch.Tensor) -> None:
    x.mul_(0.5)


_LIBRARY = torch.library.Library("memo_random", "FRAGMENT")
_LIBRARY.define("smooth(Tensor x) -> Tensor")
_LIBRARY.define("halve(Tensor(a!) x) -> ()")
_LIBRARY.define("carried(Tensor x) -> Tensor")
_LIBRARY.define("projected(Tensor x, Tensor w) -> Tensor")
_LIBRARY.impl("projected", lambda x, w: F.linear(x, w).tanh(), DEVICE.upper())
_LIBRARY.impl("halve", _halve, DEVICE.upper())
_LIBRARY.impl("smooth", lambda x: torch.atan(x), DEVICE.upper())
_LIBRARY.impl("carried", lambda x: x.cumsum(1).div(x.size(1)), DEVICE.upper())


def _save_input(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_of_smooth(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return grad / (1 + x * x)


torch.library.register_autograd("memo_random::smooth", _backward_of_smooth, setup_context=_save_input, lib=_LIBRARY)
torch.library.register_autograd(
    "memo_random::carried",
    lambda ctx, grad: grad.flip(1).cumsum(1).flip(1).div(grad.size(1)),
    lib=_LIBRARY,
)
torch.library.register_autograd(
    "memo_random::projected",
    lambda ctx, grad: (grad.to(ctx.saved_tensors[1].dtype) @ ctx.saved_tensors[1], None),
    setup_context=_save_input,
    lib=_LIBRARY,
)


@memo.memoize
def memoized_noise(x: torch.Tensor) -> torch.Tensor:
    """Other results each time."""
    return x.sigmoid() + torch.rand_like(x)


@memo.recomputable
def recomputable_gate(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Of each token alone."""
    return (x * scale).sigmoid() * x


def hooked(module: nn.Module, factor: float) -> nn.Module:
    """With a forward hook that changes the output."""
    module.register_forward_hook(lambda _module, _args, out: out * factor)
    return module


def counted(module: nn.Module) -> nn.Module:
    """With a forward hook that counts calls."""
    module.calls = 0  # type: ignore[assignment]

    def count(inner: Any, _args: Any, _out: Any) -> None:
        inner.calls += 1

    module.register_forward_hook(count)
    return module


def zeroed(module: nn.Linear) -> nn.Module:
    """With a weight of zeros, as gates and adapters begin."""
    nn.init.zeros_(module.weight)
    return module


def drawn_below(number: int) -> int:
    """A number that the model's seed decides."""
    return int(torch.randint(number, ()))


class Tagged(torch.Tensor):
    """A subclass without a habit of its own."""


def halved_gradients(module: nn.Module) -> nn.Module:
    """With a backward hook that changes the gradients of the input."""
    module.register_full_backward_hook(
        lambda _module, given, _out: tuple(
            grad * 0.5 if grad is not None and grad.is_floating_point() else grad for grad in given
        )
    )
    return module


def shifted_input(module: nn.Module) -> nn.Module:
    """With a hook before its forward that changes the first argument."""

    def shift(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return (args[0] + 0.125, *args[1:]) if args else None

    module.register_forward_pre_hook(shift)
    return module


def tied(layers: nn.ModuleList) -> None:
    """The second layer of a class has the first parameter of the first one of it."""
    first: dict[type[nn.Module], nn.Module] = {}
    for layer in layers:
        other = first.setdefault(type(layer), layer)
        for name, parameter in other.named_parameters(recurse=False):
            if other is not layer:
                setattr(layer, name, parameter)
                return


def checked_saves() -> torch.autograd.graph.saved_tensors_hooks:
    """Hooks for saved tensors that change nothing, and find changes in place as autograd does without hooks."""

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        return tensor.detach(), tensor._version

    def unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
        if packed[0]._version != packed[1]:
            raise RuntimeError("modified by an inplace operation")
        return packed[0]

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def in_a_thread(call: Callable[[], None]) -> None:
    """Calls in another thread, and waits for it."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@contextlib.contextmanager
def beside(*given: torch.Tensor, stream: int = 0) -> Iterator[None]:
    """Work on another stream, behind what the current one has; nobody waits for it before `joined`. On a CPU, just work."""
    if DEVICE == "cpu":
        yield
        return
    here, other = torch.cuda.current_stream(), _stream(stream)
    other.wait_stream(here)
    with torch.cuda.stream(other):
        yield
    for tensor in given:
        tensor.record_stream(other)


def joined(tensor: torch.Tensor) -> torch.Tensor:
    """The current stream waits for all work beside it, which gives this tensor."""
    if tensor.is_cuda:
        here = torch.cuda.current_stream()
        for number in range(STREAMS):
            here.wait_stream(_stream(number))
        tensor.record_stream(here)
    return tensor


@contextlib.contextmanager
def on_device() -> Iterator[None]:
    """Tensors that a program makes without naming a device lie where programs run; a GPU's operators repeat their bits."""
    if DEVICE == "cpu":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.device(DEVICE):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


@functools.cache
def _stream(number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream()


class Stack(nn.Module):
    """Layers on a learned offset of the step's input; `run`, a program's, calls them."""

    def __init__(self, kinds: Sequence[Callable[[], nn.Module]]) -> None:
        super().__init__()
        self.calls = 0
        self.start = nn.Parameter(torch.randn(HIDDEN) / 2)
        self.layers = nn.ModuleList([kind() for kind in kinds])
        self.beside: list[torch.Tensor] = []

    def run(self, x: torch.Tensor, mask: torch.Tensor, rotary: Any) -> torch.Tensor:
        """Hidden states after all layers; each drawn program's text has its own."""
        raise NotImplementedError

    def hidden(self, result: Any) -> torch.Tensor:
        """The hidden states of what a layer returns; the other tensors go into the loss."""
        first, *more = _tensors(result)
        self.beside += more
        return first

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.beside = []
        x = given + self.start
        tokens = x.size(1)
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        angles = torch.arange(tokens, dtype=torch.float32).view(-1, 1) / torch.arange(1, HIDDEN // 4 + 1)
        x = self.run(x, mask, (angles.cos().to(x.dtype), angles.sin().to(x.dtype)))
        beside = x.new_zeros((), dtype=torch.float32)
        for more in self.beside:
            beside = beside + more.float().mean()
        for layer in self.layers:
            if layer.aside is not None:
                beside = beside + layer.aside.square().mean().float()
                layer.aside = None
        self.beside = []
        out = F.layer_norm(x.float(), (HIDDEN,))
        return (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).mean() + out.sin().mean() + beside


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in inner for tensor in _tensors(item)]
