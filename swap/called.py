"""What an operator is given besides tensors: numbers, lengths that may follow the number of tokens, a constant's bytes."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Given", "given_besides", "is_constant", "keeps_content", "written"]

_ATEN = torch.ops.aten

# Whether these are called depends on how a tensor lies in memory, is a part at all, or was cast before; so what they give is
# told by what it was made of (origins), and compared where it is used.
_KEEP_CONTENT = frozenset(
    getattr(_ATEN, name)
    for name in (
        "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "as_strided", "clone", "detach", "expand", "reshape",
        "slice", "view",
    )
)  # fmt: skip
_NUMBERS = frozenset({bool, int, float, complex, str, torch.dtype})
_NO_LENGTHS = frozenset({"dim", "dim0", "dim1", "dims", "index", "k", "start"})
_LENGTH_TYPES = frozenset(
    form.format(number)
    for number in ("int", "SymInt")
    for form in ("{}", "Optional[{}]", "List[{}]", "Optional[List[{}]]")
)

Given = tuple[tuple[Any, ...], tuple[int, ...]]
"""Numbers, and lengths."""


def keeps_content(func: Any) -> bool:
    """True for an operator that changes how a tensor lies, is seen or is typed, and no more."""
    return isinstance(func, torch._ops.OpOverload) and func.overloadpacket in _KEEP_CONTENT


def is_constant(func: Any) -> bool:
    """True where the program made a tensor of its own numbers, each time anew: `torch.tensor(scale)`."""
    return func is _ATEN.lift_fresh.default


def given_besides(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Given:
    """Numbers must be the same in every run, lengths on as many tokens."""
    if is_constant(func):
        return (_told(args[0]),), ()
    lengths_at = _lengths_at(func)
    numbers: list[Any] = []
    lengths: list[int] = []
    for at, value in enumerate(args):
        kind = type(value)
        if kind in _NUMBERS:
            (lengths if at in lengths_at and kind is int else numbers).append(value)
        elif kind is list or kind is tuple:
            of_list = lengths if at in lengths_at else numbers
            for item in value:
                if type(item) in _NUMBERS:
                    (of_list if type(item) is int else numbers).append(item)
    if kwargs:
        for value in kwargs.values():
            if type(value) in _NUMBERS:
                numbers.append(value)
            elif type(value) in (list, tuple):
                numbers += [item for item in value if type(item) in _NUMBERS]
    return tuple(numbers), tuple(lengths)


@functools.cache
def written(func: Any) -> list[tuple[int, str]]:
    """Position and name of the arguments that an operator changes in place."""
    if not isinstance(func, torch._ops.OpOverload):
        return []
    return [
        (position, declared.name)
        for position, declared in enumerate(func._schema.arguments)
        if declared.alias_info is not None and declared.alias_info.is_write
    ]


@functools.cache
def _lengths_at(func: Any) -> frozenset[int]:
    """The positions of whole numbers, alone or in lists, that may follow the number of tokens."""
    if not isinstance(func, torch._ops.OpOverload):
        return frozenset()
    return frozenset(
        at
        for at, declared in enumerate(func._schema.arguments)
        if str(declared.type) in _LENGTH_TYPES and declared.name not in _NO_LENGTHS
    )


def _told(constant: torch.Tensor) -> str:
    """What tells one constant from another."""
    told = f"a constant of shape {tuple(constant.shape)} and {constant.dtype}"
    if type(constant) is not torch.Tensor or constant.layout is not torch.strided or constant.is_meta:
        return told
    content = constant.detach().cpu().contiguous().flatten().view(torch.uint8)
    return f"{told} with checksum {zlib.crc32(content.numpy().tobytes()):08x}"
