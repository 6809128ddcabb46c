"""Contents of the tensors of a byteless run: which storages have none, and which operators need none.

Weights, activations and gradients have no contents. What a step's control flow is made of has them: token ids, positions,
masks, sequence boundaries, step counters. So the real kernels run where all arguments of an operator have contents and
its results are integers or few numbers; a result is blank as soon as one argument is.

    arange, zeros, tensor([..])  ──▶  == cumsum any item ...   computed: contents
    empty weights, randn         ──▶  mm add softmax ...       shapes only: blank

Contents of a storage are known as a whole or not at all.
"""

from __future__ import annotations

import functools
import math
import sys
import sysconfig
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch

from memo import errors
from memo.torch_private import OpOverload

_ATEN = torch.ops.aten

_COUNTS = frozenset({torch.bool, torch.int16, torch.int32, torch.int64})
# Eight million positions are computed. Other types hold data: only scalars, rotary frequencies and the like are.
_MOST_COUNTS_NBYTES = 64 << 20
_MOST_OTHER_NBYTES = 64 << 10

_EMPTY = frozenset(
    {
        _ATEN.empty.memory_format,
        _ATEN.empty_strided.default,
        _ATEN.empty_like.default,
        _ATEN.new_empty.default,
        _ATEN.new_empty_strided.default,
    }
)
MAKES_ZEROS = _EMPTY | {_ATEN.zeros.default, _ATEN.zeros_like.default, _ATEN.new_zeros.default}
"""Operators whose results are zeros, or are to be written: a fresh mapping has that without a kernel."""
# They read no contents of their arguments.
_OF_SHAPES = frozenset(
    {
        *MAKES_ZEROS,
        _ATEN.ones_like.default,
        _ATEN.full_like.default,
        _ATEN.new_ones.default,
        _ATEN.new_full.default,
    }
)
_OVERWRITE = frozenset({_ATEN.copy_.default, _ATEN.fill_.Scalar, _ATEN.fill_.Tensor, _ATEN.zero_.default})


class Blank:
    """Storages without contents; all others have contents."""

    def __init__(self) -> None:
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def add(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Declares that storages have no contents."""
        for storage in storages:
            self._storages.add(storage)

    def discard(self, storage: torch.UntypedStorage) -> None:
        """Declares that a storage has contents from now on."""
        self._storages.discard(storage)

    def has(self, tensor: torch.Tensor) -> bool:
        """True for a tensor without contents."""
        return tensor.untyped_storage() in self._storages

    def are_read(self, func: OpOverload, tensors: Sequence[torch.Tensor]) -> bool:
        """True if an operator reads a tensor without contents.

        Args:
            func: the operator.
            tensors: its tensor arguments, in order.
        """
        if func in _OF_SHAPES:
            return False
        if func in _OVERWRITE and _is_whole(tensors[0]):
            tensors = tensors[1:]
        storages = self._storages
        return any(tensor.untyped_storage() in storages for tensor in tensors)


def fits(func: OpOverload, made: Iterable[tuple[torch.dtype, int]]) -> bool:
    """True if an operator's results are computed where its arguments have contents.

    Args:
        func: the operator.
        made: dtype and bytes of each storage that it makes or writes to.
    """
    random = _is_random(func) or func in _EMPTY
    # Numbers that are drawn, or not yet written, are data.
    return all(
        nbytes <= (_MOST_COUNTS_NBYTES if dtype in _COUNTS else 0 if random else _MOST_OTHER_NBYTES)
        for dtype, nbytes in made
    )


@functools.cache
def _is_random(func: OpOverload) -> bool:
    """True for operators that draw random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


@functools.cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator writes to."""
    if func is _ATEN._amp_foreach_non_finite_check_and_unscale_.default:
        return ((0, "self"),)  # `found_inf` stays as it is: gradients count as finite
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Tensor arguments that an operator writes to."""
    for position, name in _written_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def assumption(func: OpOverload, args: tuple[Any, ...]) -> bool | None:
    """Result of a test whether numbers are finite: they are. None for other operators."""
    if func in (_ATEN.isnan.default, _ATEN.isinf.default):
        return False
    if func in (_ATEN.eq.Tensor, _ATEN.ne.Tensor):  # parts of torch.isfinite, as the next two
        return (func is _ATEN.eq.Tensor) if args[0] is args[1] else None
    if func in (_ATEN.eq.Scalar, _ATEN.ne.Scalar) and isinstance(args[1], float) and math.isinf(args[1]):
        return func is _ATEN.ne.Scalar
    return None


def reader() -> str:
    """File, line and function that run an operator now: the innermost frame of neither torch nor memo."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code):
            return place(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return "an unknown place"


def is_called_by(module: ModuleType) -> bool:
    """True if a function of a module runs now, below torch's and memo's frames."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code):
        if frame.f_code.co_filename == module.__file__:
            return True
        frame = frame.f_back
    return False


def is_users(code: CodeType) -> bool:
    """True for code of neither torch nor memo."""
    path = code.co_filename
    return not path.startswith((*_PLUMBING, "<")) and (path.startswith(_SITE) or not path.startswith(_STDLIB))


def place(code: CodeType, line: int) -> str:
    """File, line and function, for a message."""
    return f"{_short(code.co_filename)}:{line} ({code.co_name})"


def _short(path: str) -> str:
    """Path from site-packages or the working directory on; the last two parts of others."""
    for root in (_SITE, f"{Path.cwd()}/"):
        if path.startswith(root):
            return path[len(root) :]
    return "/".join(Path(path).parts[-2:])


_SITE, _STDLIB = (f"{sysconfig.get_paths()[kind]}/" for kind in ("purelib", "stdlib"))
# Of the installed package, or of the tree, whose other folders are its subpackages.
_ROOT = Path(__file__).parent.parent
_PLUMBING = (
    f"{Path(torch.__file__).parent}/",
    f"{Path(errors.__file__).parent}/",
    *(f"{_ROOT}/{folder}/" for folder in ("allocator", "swap", "kernels", "mip")),
)
