"""One call of one layer, able to run again on its last tokens: what backward needs and no tier holds.

It owns the layer's arguments and the answers to what is not computed twice. A replay runs the layer's own forward on the
tokens from `first` on, takes each saved tensor as autograd saves it, and stops after the last one that is wanted: the
projection behind it is never computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from memo.errors import ModifiedAfterSave, SwapError
from memo.swap.answers import Answer, is_attention, is_random
from memo.swap.tokenrules import tensors_in
from memo.swap.tokens import Axis, Layout, Rows, cut, rows_of

if TYPE_CHECKING:
    from memo.swap.engine import Engine
    from memo.swap.saved import Handle, Kept, SavedStorage, Sharded

__all__ = ["Argument", "LayerCall", "Precision", "Wanted"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A saved tensor whose tokens from `first` on are computed again; `position` counts what autograd saves."""

    position: int
    saved: weakref.ref[SavedStorage]
    axis: Axis
    rows: Rows
    layout: Layout
    """How the recomputed tensor must lie in its storage."""
    dtype: torch.dtype


class Argument:
    """A tensor that the layer was given: held by reference, since all layers share it. Watched for changes."""

    __slots__ = ("requires_grad", "tensor", "tokens", "version")

    def __init__(self, tensor: torch.Tensor, tokens: int) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.requires_grad = tensor.requires_grad
        self.tokens = tokens

    def cut(self, first: int) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise ModifiedAfterSave(
                f"an argument of shape {tuple(self.tensor.shape)} of a layer was changed in place before backward"
                " recomputed the layer; use an out-of-place operation"
            )
        dims = [dim for dim, size in enumerate(self.tensor.size()) if size == self.tokens]
        if len(dims) == 1:
            part = cut(self.tensor, Axis(dim=dims[0]), first, self.tokens)
        else:  # a mask over pairs of tokens, which only attention sees, and attention is not computed again
            part = self.tensor
            for dim in dims:
                part = part.narrow(dim, first, self.tokens - first)
        return part.detach().requires_grad_(self.requires_grad)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What the program had chosen during the forward: autocast, and which attention kernels."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    attention: tuple[bool, bool, bool, bool]
    """Whether flash, memory-efficient, cuDNN and plain attention were allowed."""

    @classmethod
    def now(cls, device_type: str) -> Precision:
        return cls(
            device_type=device_type,
            enabled=torch.is_autocast_enabled(device_type),
            dtype=torch.get_autocast_dtype(device_type),
            attention=_attention_allowed(),
        )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            undo.enter_context(torch.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=False))
            if self.attention != _attention_allowed():  # a choice of kernels that ended before backward
                backends = [name for name, allowed in zip(_BACKENDS, self.attention, strict=True) if allowed]
                undo.enter_context(sdpa_kernel(backends))
            yield


_BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)


def _attention_allowed() -> tuple[bool, bool, bool, bool]:
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.math_sdp_enabled()


class LayerCall:
    """One call of one layer, with `tokens` tokens of which those from `first` on can be computed again."""

    def __init__(
        self,
        engine: Engine,
        module: torch.nn.Module,
        name: str,
        *,
        hidden: Handle | Kept | Sharded,
        hidden_grad: bool,
        arguments: Callable[[torch.Tensor, int], tuple[Sequence[Any], dict[str, Any]]],
        answers: Sequence[Answer],
        precision: Precision,
        outside: weakref.WeakSet[torch.UntypedStorage],
        first: int,
        tokens: int,
    ) -> None:
        self.name = name
        self.first = first
        self.tokens = tokens
        self.wanted: list[Wanted] = []
        self._engine = engine
        self._module = module
        self._hidden = hidden
        self._hidden_grad = hidden_grad
        self._arguments = arguments
        self._answers = answers
        self._precision = precision
        self.outside = outside
        self._versions = [(tensor, tensor._version) for tensor in (*module.parameters(), *module.buffers())]
        self._lock = threading.Lock()

    def recompute(self, take: Callable[[Wanted, torch.Tensor], None]) -> None:
        """Runs the layer on its last tokens; `take` gets each wanted tensor's storage, as bytes.

        Raises:
            ModifiedAfterSave: an argument, a parameter or a buffer has changed since the forward.
            SwapError: the layer did not do what it did in forward.
        """
        if not self.wanted:
            return
        with self._lock:
            for tensor, version in self._versions:
                if tensor._version != version:
                    raise ModifiedAfterSave(
                        f"a parameter or buffer of {self.name} of shape {tuple(tensor.shape)} was changed in place before"
                        " backward recomputed the layer; step the optimizer after backward"
                    )
            whole = self._engine.unpack(self._hidden, by_backward=False).detach()
            hidden = cut(whole, Axis(dim=whole.ndim - 2), self.first, self.tokens)
            args, kwargs = self._arguments(hidden.detach().requires_grad_(self._hidden_grad), self.first)
            replay = _Replaying(self, self._engine, self._answers, take, tensors_in((args, kwargs)))
            with self._as_in_forward(), saved_tensors_hooks(replay.save, _never), replay, contextlib.suppress(_Enough):
                self._module.forward(*args, **kwargs)
            replay.check_complete()

    @contextlib.contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        with torch.enable_grad(), self._precision.again():
            yield


class _Enough(BaseException):
    """Everything wanted has been saved. No Exception, so that the layer's own handlers let it pass."""


def _never(packed: None) -> torch.Tensor:
    raise AssertionError("nothing is backwarded through a replay")


class _Replaying(TorchDispatchMode):
    """Answers what is not computed twice, and hands over what autograd saves."""

    def __init__(
        self,
        call: LayerCall,
        engine: Engine,
        answers: Sequence[Answer],
        take: Callable[[Wanted, torch.Tensor], None],
        given: Sequence[torch.Tensor],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call
        self._engine = engine
        self._answers = iter(answers)
        self._take = take
        self._wanted = iter(call.wanted)
        self._next = next(self._wanted, None)
        self._position = 0
        self._asleep = False
        # What may be used: what the forward used, what a replay is given, and what it makes.
        self._known = weakref.WeakSet([*call.outside, *(t.untyped_storage() for t in given)])

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._asleep:
            return func(*args, **(kwargs or {}))
        if is_attention(func) or is_random(func):
            out = self._answer(func, args)
        else:
            for tensor in tensors_in((args, kwargs)):
                if tensor.untyped_storage() not in self._known and func.overloadpacket is not torch.ops.aten.lift_fresh:
                    raise self._diverged(f"{func} was given a tensor of shape {tuple(tensor.shape)} that is new to it")
            out = func(*args, **(kwargs or {}))
        self._known.update(tensor.untyped_storage() for tensor in tensors_in(out))
        return out

    def memoized(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], token_dim: int | None
    ) -> Any:
        """A marked function: its arguments are as good as saved, its results are known."""
        for tensor in tensors_in((args, kwargs)):
            self.save(tensor)
        self._asleep, out = True, None
        try:
            out = self._answer(function, args)
        finally:
            self._asleep = False
        self._known.update(tensor.untyped_storage() for tensor in tensors_in(out))
        return out

    def _answer(self, func: Any, args: Sequence[Any]) -> Any:
        answer = next(self._answers, None)
        if answer is None or answer.func != func:  # type: ignore[attr-defined]
            raise self._diverged(f"it called {func}")
        return answer.give(self._engine, args, first=self._call.first, tokens=self._call.tokens)

    def save(self, tensor: torch.Tensor) -> None:
        """Autograd saves `tensor`: the counterpart of what it saved in forward at the same position."""
        self._asleep = True  # what is done with it here is no part of the layer
        try:
            self._save(tensor)
        finally:
            self._asleep = False

    def _save(self, tensor: torch.Tensor) -> None:
        wanted, position = self._next, self._position
        self._position += 1
        if wanted is None or position != wanted.position:
            return
        local = tensor.detach()
        if local.dtype != wanted.dtype or not wanted.layout.fits(local):
            raise self._diverged(
                f"it saved {tuple(local.shape)} of {local.dtype} with strides {local.stride()} for"
                f" {wanted.layout.shape} of {wanted.dtype} with strides {wanted.layout.stride}"
            )
        if rows_of(local, wanted.axis, self._call.tokens - self._call.first) != wanted.rows:
            raise self._diverged("it laid a saved tensor out in memory in another way")
        self._take(wanted, torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.untyped_storage()))
        self._next = next(self._wanted, None)
        if self._next is None:
            raise _Enough

    def check_complete(self) -> None:
        if self._next is not None:
            raise self._diverged("it saved less")

    def _diverged(self, how: str) -> SwapError:
        return SwapError(
            f"{self._call.name} did not repeat in backward what it did in forward: {how}; is something random, or does"
            " it depend on what changes from call to call? Exclude it with alpha=1"
        )
