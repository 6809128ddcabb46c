"""Byteless tensors: CPU tensors with address space and no memory, so a step of any model runs in a few megabytes.

`BytelessMode` is a dispatch mode. Operators that move no data (views, `set_`) run unchanged. Others run under
torch's FakeTensorMode, on fakes made for the call, and their results become ordinary CPU tensors over address space
that no memory backs. Types, devices, storage identities, version counters and lifetimes are those of a real CPU run, so
autograd, saved-tensor hooks and memo's engine behave as usual. Only contents are missing: `item()` and `if tensor:`
raise, and `torch.equal` returns True. Counts and masks are computed, so that a step can read them: memo.allocator.contents.

    byteless tensors ──▶ operator ──▶ fakes of the arguments ──▶ shapes of the results ──▶ byteless tensors

Results are cached by operator and argument metadata, which makes thirty-two equal layers cheap.
"""

from __future__ import annotations

import enum
import functools
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memo.allocator.contents import MAKES_ZEROS, Blank, assumption, fits, is_called_by, reader, written
from memo.allocator.local_mode import LocalTensorMode
from memo.errors import RecordError
from memo.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    UnsupportedOperatorException,
    tree_map_only,
)

# Not in the mmap module before Python 3.12.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

_ATEN = torch.ops.aten
# These move no data, though their schemas do not say so.
_UNCHANGED = frozenset({_ATEN._unsafe_view.default, _ATEN.lift_fresh.default, _ATEN._fused_sdp_choice.default})


def _grouped_product(
    left: torch.Tensor,
    right: torch.Tensor,
    ends: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Result of a grouped matrix product: one matrix for all groups, or one for each where both or neither is divided."""
    if left.dtype == torch.bfloat16:
        return torch.ops.aten._grouped_mm(left, right, ends, bias, out_dtype)
    rows, columns = left.shape[-2], right.shape[-1]
    if left.dim() != right.dim():
        return left.new_empty(rows, columns, dtype=out_dtype)
    groups = left.shape[0] if ends is None else ends.shape[0]
    return left.new_empty(groups, rows, columns, dtype=out_dtype)


# torch's own shape function refuses all types but bfloat16, which kernels do not.
_SHAPES: dict[Any, Callable[..., Any]] = {_ATEN._grouped_mm.default: _grouped_product}

_CPU = torch.device("cpu")
_META = torch.device("meta")


def byteless_storage(nbytes: int) -> torch.UntypedStorage:
    """Returns a storage of `nbytes` with address space and no memory, until it is written to.

    Raises:
        RecordError: The system gives no address space of that size.
    """
    if nbytes < mmap.PAGESIZE:
        return torch.UntypedStorage(nbytes)  # smaller than the smallest mapping
    try:
        # Shared: RLIMIT_DATA counts private mappings in full.
        space = mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE)
    except (OSError, OverflowError) as error:
        raise RecordError(
            f"no address space for a tensor of {nbytes} bytes ({error}); is a limit set, such as ulimit -v or"
            " vm.overcommit_memory=2?"
        ) from None
    return torch.frombuffer(space, dtype=torch.uint8).untyped_storage()


class _New(NamedTuple):
    """Result tensor over a new storage."""

    storage: int
    """Index among the call's new storages."""
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Argument(NamedTuple):
    """Result that is one of the tensor arguments."""

    number: int


class _Outcome(NamedTuple):
    """Results of an operator for given argument metadata."""

    storages_nbytes: tuple[int, ...]
    results: Any
    """Structure of the operator's result with _New and _Argument in place of tensors."""
    made: tuple[tuple[torch.dtype, int], ...]
    """Dtype and bytes of each new tensor's storage."""


class BytelessMode(LocalTensorMode):
    """Dispatch mode in which operators on CPU tensors compute shapes only, but for counts and masks.

    Args:
        assume: Number that every element has where the step reads a tensor without contents. Default None: that raises
            RecordError.
    """

    def __init__(self, *, assume: float | None = None) -> None:
        super().__init__()
        # No fallback: it would run the real kernel, on zeros, in real memory.
        self._fake = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self._outcomes: dict[Any, _Outcome] = {}
        self._blank = Blank()
        self._assume = assume
        self._calls = _Calls(self._readable)

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._calls.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        self._calls.__exit__(*exception)  # type: ignore[no-untyped-call]
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Declares that tensors have no contents, such as parameters that were made by `torch.ones`."""
        self._blank.add(tensor.untyped_storage() for tensor in tensors)

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns byteless results of an operator.

        Raises:
            RecordError: The operator needs the contents of a tensor that has none, or has no shape function.
        """
        kind = _kind(func)
        if kind is _Kind.MOVES_NOTHING:
            return func(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        key = (func, _metadata(args, tensors), _metadata(tuple(kwargs.items()), tensors) if kwargs else ())
        if _is_on_meta(tensors, kwargs):
            return func(*args, **kwargs)
        return self.compute(func, args, kwargs, key, tensors)

    def compute(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Any,
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """Returns the results of an operator that computes something.

        Args:
            func: the operator.
            args: its positional arguments.
            kwargs: its other arguments.
            key: the operator with dtypes, sizes and strides of its arguments, and their values where they are numbers.
            tensors: the tensors among its arguments.
        """
        kind = _kind(func)
        reads_blank = self._blank.are_read(func, tensors)
        if kind is _Kind.COMMUNICATES:
            if reads_blank:
                self.forget(written(func, args, kwargs))
            elif func is torch.ops.c10d._allgather_base_.default:  # the other ranks are taken to say the same
                args[0].view(-1, args[1].numel()).copy_(args[1].view(1, -1))
            return _communicated(func, args)
        if not reads_blank:
            return self._run_with_contents(func, args, kwargs, key, tensors)
        if kind is _Kind.COMPARES:
            return True  # tensors without contents do not differ
        try:
            outcome = self._outcome(func, args, kwargs, key, tensors)
        except _NeedsContents:
            return self._run_without_contents(func, args, kwargs)
        self.forget(written(func, args, kwargs))
        if kind is _Kind.CHANGES_FIRST:
            return args[0]
        results = self._realise(outcome, tensors, known=assumption(func, args))
        if func is _ATEN.topk.default:
            self._balance(results[1], among=args[0].shape[args[2] if len(args) > 2 else -1])
        return results

    def _run_with_contents(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Any,
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """Runs the real kernel, unless its results are large, or numbers drawn at random."""
        try:
            outcome = self._outcome(func, args, kwargs, key, tensors)
        except RecordError:  # no shape function, or data decides the shape
            return func(*args, **kwargs)
        changed = list(written(func, args, kwargs))
        there = [(tensor.dtype, tensor.untyped_storage().nbytes()) for tensor in changed]
        if fits(func, [*outcome.made, *there]):
            if func in MAKES_ZEROS:
                return self._realise(outcome, tensors, known=False)
            result = func(*args, **kwargs)
            for tensor in changed:
                self._blank.discard(tensor.untyped_storage())
            return result
        self.forget(changed)
        return args[0] if _kind(func) is _Kind.CHANGES_FIRST else self._realise(outcome, tensors)

    def _run_without_contents(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator whose result's shape, or a number that it returns, depends on contents."""
        if func is _ATEN.index.Tensor and not any(self._blank.has(mask) for mask in args[1] if mask is not None):
            return self.run(func, (args[0], _positions(args[1])), kwargs)
        if func is _ATEN.masked_select.default and not self._blank.has(args[1]):
            count = int(args[1].expand(torch.broadcast_shapes(args[0].shape, args[1].shape)).sum())
            return self.run(_ATEN.new_empty.default, (args[0], (count,)), {"pin_memory": False})
        filled = tree_map_only(torch.Tensor, lambda tensor: self._readable(tensor, func), (args, kwargs))
        return func(*filled[0], **filled[1])

    def _balance(self, chosen: torch.Tensor, *, among: int) -> None:
        """Gives the indices that `topk` chose contents: each is chosen as often as the others, as by a balanced router."""
        if fits(_ATEN.fill_.Scalar, [(chosen.dtype, chosen.nbytes)]):
            chosen.copy_(torch.arange(chosen.numel()).remainder(among).view_as(chosen))
            self._blank.discard(chosen.untyped_storage())

    def _readable(self, tensor: torch.Tensor, func: OpOverload | str) -> torch.Tensor:
        """The tensor, if it has contents; else one that has the assumed ones.

        Raises:
            RecordError: none are assumed.
        """
        if not self._blank.has(tensor):
            return tensor
        assumed = 0 if is_called_by(nn.init) else self._assume  # no number that was drawn is out of bounds
        if assumed is None:
            raise RecordError(
                f"{_named(func)} at {reader()} needs the contents of a tensor, and while recording those computed from "
                "weights or random numbers have none; name a number to assume (--assume 1), or record real tensors (memo "
                "record --real)"
            )
        return torch.full((), assumed).to(tensor.dtype).expand(tensor.shape)

    def _outcome(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Any,
        tensors: Sequence[torch.Tensor],
    ) -> _Outcome:
        outcome = self._outcomes.get(key)
        if outcome is None:
            outcome = self._outcomes[key] = self._trace(func, args, kwargs, tensors)
        return outcome

    def _trace(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> _Outcome:
        fakes = [self._fake_of(tensor) for tensor in tensors]
        order = iter(fakes)
        args, kwargs = tree_map_only(torch.Tensor, lambda _: next(order), (args, kwargs))
        try:
            with self._fake:
                out = _SHAPES.get(func, func)(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise _NeedsContents(str(func)) from None
        except (UnsupportedOperatorException, RuntimeError) as error:
            if not isinstance(error, UnsupportedOperatorException) and "no fake impl" not in str(error):
                raise
            raise RecordError(
                f"{func} at {reader()} has no shape function: register one (torch.library.register_fake), or record with "
                "real tensors (--real)"
            ) from None
        return _describe(out, fakes)

    def _fake_of(self, tensor: torch.Tensor) -> FakeTensor:
        elem = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)
        return FakeTensor(self._fake, elem, _CPU)

    def _realise(self, outcome: _Outcome, tensors: Sequence[torch.Tensor], *, known: bool | None = None) -> Any:
        """Makes an operator's results; `known` is the contents of all of their elements."""
        storages = [self.storage(nbytes) for nbytes in outcome.storages_nbytes]
        if known is None or not fits(_ATEN.fill_.Scalar, outcome.made):
            self._blank.add(storages)
        else:
            for storage in storages:
                if known or storage.nbytes() < mmap.PAGESIZE:  # a mapping is zeros
                    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(known)
        return _tensors_of(outcome.results, storages, tensors)

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """Makes the storage of a result."""
        return byteless_storage(nbytes)


def _named(func: OpOverload | str) -> str:
    """Name of an operator with what a program calls it, where that is not the same."""
    return f"{func} (item(), int(), float() or bool())" if func is _ATEN._local_scalar_dense.default else str(func)


class _NeedsContents(RecordError):
    """The shape of an operator's results, or a number that it returns, depends on data."""


class _Calls(TorchFunctionMode):
    """Mode over calls that are no operator: a tensor's conversion to an object of Python or numpy, and RMSNorm.

    A CPU computes an RMSNorm by several operators, and saves their results in float32. A GPU has one kernel; LayerNorm
    without bias is such a kernel: of the same shapes, with one statistic of a token more.
    """

    def __init__(self, readable: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
        super().__init__()
        self._readable = readable

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _CONVERSIONS:
            args = (self._readable(args[0], f"Tensor.{func.__name__}()"), *args[1:])
        if func in _RMS_NORMS:
            func = _rms_norm_of_a_gpu
        return func(*args, **(kwargs or {}))


def _rms_norm_of_a_gpu(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    return torch.layer_norm(input, normalized_shape, weight, None, 1e-5 if eps is None else eps)


_RMS_NORMS = frozenset({torch.nn.functional.rms_norm, torch.rms_norm})


_CONVERSIONS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})


class _Kind(enum.Enum):
    """Operator kinds that the mode treats differently."""

    COMPARES = "compares contents"
    MOVES_NOTHING = "runs unchanged"
    COMMUNICATES = "fills its first argument with data of other ranks"
    CHANGES_FIRST = "returns its mutated first argument: `add_`, but not `add.out`"
    COMPUTES = "makes new tensors, or returns nothing"


@functools.cache
def _kind(func: OpOverload) -> _Kind:
    if func is _ATEN.equal.default:
        return _Kind.COMPARES
    if func.namespace == "profiler":  # record_function of optimizers; its handles are not hashable by value
        return _Kind.MOVES_NOTHING
    if func.namespace == "c10d":
        return _Kind.COMMUNICATES
    if func.is_view or func in _UNCHANGED or torch.Tag.inplace_view in func.tags:
        return _Kind.MOVES_NOTHING
    returned = func._schema.returns
    first = func._schema.arguments[0].alias_info if func._schema.arguments else None
    if first is not None and first.is_write and len(returned) == 1 and returned[0].alias_info is not None:
        return _Kind.CHANGES_FIRST
    return _Kind.COMPUTES


def _communicated(func: OpOverload, args: tuple[Any, ...]) -> Any:
    """Results of a collective: its first argument, and a completed Work."""
    from memo.torch_private import FakeWork

    made = [FakeWork().boxed() if "Work" in str(given.type) else args[0] for given in func._schema.returns]
    return made[0] if len(made) == 1 else tuple(made)


def _metadata(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Hashable key of an argument: dtype, size and stride of tensors, type and value of numbers.

    Appends the tensors it contains to `tensors`, in order.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return value.dtype, value.size(), value.stride()
    if isinstance(value, (tuple, list)):
        return tuple([_metadata(item, tensors) for item in value])
    if isinstance(value, (float, int)):
        return type(value), value  # 1, 1.0 and True are equal in Python and differ for operators
    return value


def _is_on_meta(tensors: Sequence[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    """True where the result is a meta tensor, which has no memory anyway."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "meta"
    return bool(tensors) and all(tensor.device.type == "meta" for tensor in tensors)


def _describe(out: Any, fakes: Sequence[torch.Tensor]) -> _Outcome:
    arguments = {fake.untyped_storage(): index for index, fake in enumerate(fakes)}
    new: dict[torch.UntypedStorage, int] = {}

    def describe(tensor: torch.Tensor) -> _New | _Argument:
        storage = tensor.untyped_storage()
        if storage in arguments:
            return _Argument(arguments[storage])
        index = new.setdefault(storage, len(new))
        return _New(index, tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    results = tree_map_only(torch.Tensor, describe, out)
    sizes = tuple(storage.nbytes() for storage in new)
    made = tuple((leaf.dtype, sizes[leaf.storage]) for leaf in _leaves(results) if isinstance(leaf, _New))
    return _Outcome(sizes, results, made)


def _leaves(result: Any) -> Iterator[Any]:
    if isinstance(result, (tuple, list)) and not isinstance(result, (_New, _Argument)):
        for item in result:
            yield from _leaves(item)
    else:
        yield result


def _positions(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Indices with masks, which have contents, as the positions at which they are true."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found += index.nonzero().unbind(1)
        else:
            found.append(index)
    return found


def _tensors_of(result: Any, storages: Sequence[torch.UntypedStorage], arguments: Sequence[torch.Tensor]) -> Any:
    # Not a closure that calls itself: such a cycle would keep the storages alive until a garbage collection.
    if isinstance(result, _New):
        blank = torch.empty(0, dtype=result.dtype)
        return blank.set_(storages[result.storage], result.offset, result.size, result.stride)
    if isinstance(result, _Argument):
        return arguments[result.number]
    if isinstance(result, (tuple, list)):
        return type(result)(_tensors_of(item, storages, arguments) for item in result)
    return result
