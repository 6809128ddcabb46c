"""Tensors with shapes and no bytes: a model of any size runs one step in a few megabytes.

`BytelessMode` is a dispatch mode. Operators that move no data (views, `set_`) run as they are. All others run under torch's
FakeTensorMode, on fakes made for the call, and their results become ordinary CPU tensors over address space that no memory
backs. So types, devices, storage identities, version counters and lifetimes are exactly those of a real CPU run, and what
asks for them (autograd, saved-tensor hooks, memo's own engine) cannot tell the difference. What asks for the bytes can:
`item()` and `if tensor:` raise, and `torch.equal` answers True.

    model ──▶ hollow tensors ──▶ operator ──▶ fakes of the arguments ──▶ shapes of the results ──▶ hollow tensors

An operator whose arguments look as they did before is not asked again, which is what makes thirty-two equal layers cheap.
"""

from __future__ import annotations

import enum
import functools
import mmap
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from memo.allocator.record_step import asked_for_shapes, runs_itself
from memo.errors import RecordError

__all__ = ["BytelessMode", "hollow_storage"]

# mmap's name for it is missing before Python 3.12.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

_ATEN = torch.ops.aten
# They move no data, though their schemas do not say so.
_AS_THEY_ARE = frozenset({_ATEN._unsafe_view.default, _ATEN.lift_fresh.default, _ATEN._fused_sdp_choice.default})

_CPU = torch.device("cpu")
_META = torch.device("meta")


def hollow_storage(nbytes: int) -> torch.UntypedStorage:
    """A storage of `nbytes` that takes address space and no memory, until somebody writes to it.

    Raises:
        RecordError: the system gives no address space of that size.
    """
    if nbytes < mmap.PAGESIZE:
        return torch.UntypedStorage(nbytes)  # less than the least there is to map
    try:
        # Shared, so that it is no data of this process, which a limit of its memory would count in full.
        space = mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE)
    except (OSError, OverflowError) as error:
        raise RecordError(
            f"no address space for a tensor of {nbytes} bytes ({error}); is a limit set, such as ulimit -v or"
            " vm.overcommit_memory=2?"
        ) from None
    return torch.frombuffer(space, dtype=torch.uint8).untyped_storage()


class _Made(NamedTuple):
    """A tensor that an operator makes: over which of its new storages, and how it lies there."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Given(NamedTuple):
    """A result that is one of the tensor arguments."""

    argument: int


class _Answer(NamedTuple):
    """What an operator makes of arguments that look like these."""

    storages_nbytes: tuple[int, ...]
    results: Any
    """The operator's own structure with _Made and _Given for its tensors."""


class BytelessMode(TorchDispatchMode):
    """While entered, every operator on CPU tensors computes shapes only."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # No fallback: it would run the real kernel, on zeros, in real memory.
        self._fake = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self._answers: dict[Any, _Answer] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return (
            False  # torch.compile need not be kept out of this mode at every operator: that takes as long as the mode
        )

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if asked_for_shapes():
            return func(*args, **kwargs)
        if runs_itself(types):
            return NotImplemented  # a DTensor's own code first: it comes back with the tensors that this rank holds
        kind = _kind(func)
        if kind is _Kind.COMPARES:
            return True  # there is nothing in which they could differ
        if kind is _Kind.MOVES_NOTHING:
            return func(*args, **kwargs)
        if kind is _Kind.COMMUNICATES:
            return _communicated(func, args)
        tensors: list[torch.Tensor] = []
        key = (func, _look(args, tensors), _look(tuple(kwargs.items()), tensors) if kwargs else ())
        if _is_on_meta(tensors, kwargs):
            return func(*args, **kwargs)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = self._ask(func, args, kwargs, tensors)
        if kind is _Kind.CHANGES_FIRST:
            return args[0]
        return _realise(answer, tensors)

    def _ask(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> _Answer:
        fakes = [self._fake_of(tensor) for tensor in tensors]
        order = iter(fakes)
        args, kwargs = tree_map_only(torch.Tensor, lambda _: next(order), (args, kwargs))
        try:
            with self._fake:
                out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise RecordError(
                f"{func} needs the contents of a tensor, and while recording tensors have none; record a step whose"
                " control flow and shapes do not depend on data"
            ) from None
        except UnsupportedOperatorException:
            raise RecordError(f"{func} cannot say what shapes its results have without computing them") from None
        return _describe(out, fakes)

    def _fake_of(self, tensor: torch.Tensor) -> FakeTensor:
        elem = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)
        return FakeTensor(self._fake, elem, _CPU)


class _Kind(enum.Enum):
    """What an operator is to this mode."""

    COMPARES = "answers whether contents are equal"
    MOVES_NOTHING = "runs as it is"
    COMMUNICATES = "fills its first argument with what other ranks have"
    CHANGES_FIRST = "returns its first argument, changed: `add_`, but not `add.out`"
    COMPUTES = "makes new tensors, or returns nothing"


@functools.cache
def _kind(func: torch._ops.OpOverload) -> _Kind:
    if func is _ATEN.equal.default:
        return _Kind.COMPARES
    if func.namespace == "profiler":  # marks of optimizers; their objects cannot be compared with each other
        return _Kind.MOVES_NOTHING
    if func.namespace == "c10d":
        return _Kind.COMMUNICATES
    if func.is_view or func in _AS_THEY_ARE or torch.Tag.inplace_view in func.tags:
        return _Kind.MOVES_NOTHING
    returned = func._schema.returns
    first = func._schema.arguments[0].alias_info if func._schema.arguments else None
    if first is not None and first.is_write and len(returned) == 1 and returned[0].alias_info is not None:
        return _Kind.CHANGES_FIRST
    return _Kind.COMPUTES


def _communicated(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> Any:
    """What a collective gives: what it was given to fill, and the work of it, which is over."""
    from torch._C._distributed_c10d import FakeWork

    made = [FakeWork().boxed() if "Work" in str(given.type) else args[0] for given in func._schema.returns]
    return made[0] if len(made) == 1 else tuple(made)


def _look(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Something hashable that is equal for arguments of which an operator cannot tell the difference.

    Appends the tensors that were met, in order.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return value.dtype, value.size(), value.stride()
    if isinstance(value, (tuple, list)):
        return tuple([_look(item, tensors) for item in value])
    if isinstance(value, (float, int)):
        return type(value), value  # 1, 1.0 and True are equal, and not the same to an operator
    return value


def _is_on_meta(tensors: Sequence[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    """True where the result is a meta tensor, which is hollow already."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "meta"
    return bool(tensors) and all(tensor.device.type == "meta" for tensor in tensors)


def _describe(out: Any, fakes: Sequence[torch.Tensor]) -> _Answer:
    given = {fake.untyped_storage(): place for place, fake in enumerate(fakes)}
    made: dict[torch.UntypedStorage, int] = {}

    def describe(tensor: torch.Tensor) -> _Made | _Given:
        storage = tensor.untyped_storage()
        if storage in given:
            return _Given(given[storage])
        place = made.setdefault(storage, len(made))
        return _Made(place, tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    results = tree_map_only(torch.Tensor, describe, out)
    return _Answer(tuple(storage.nbytes() for storage in made), results)


def _realise(answer: _Answer, tensors: Sequence[torch.Tensor]) -> Any:
    storages = [hollow_storage(nbytes) for nbytes in answer.storages_nbytes]
    return _tensors_of(answer.results, storages, tensors)


def _tensors_of(result: Any, storages: Sequence[torch.UntypedStorage], given: Sequence[torch.Tensor]) -> Any:
    # Not a closure that calls itself: such a cycle would keep the storages alive until a garbage collection.
    if isinstance(result, _Made):
        blank = torch.empty(0, dtype=result.dtype)
        return blank.set_(storages[result.storage], result.offset, result.size, result.stride)
    if isinstance(result, _Given):
        return given[result.argument]
    if isinstance(result, (tuple, list)):
        return type(result)(_tensors_of(item, storages, given) for item in result)
    return result
