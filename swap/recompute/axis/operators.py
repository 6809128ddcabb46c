"""Operators and their calls: the facts of an operator's schema, looked up once, and the arguments of one call.

Each operator of a forward and a recompute is looked up on the host while the device waits for its next kernel. So
facts of the schema are cached as attributes, and the arguments are traversed in one pass.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from memo.swap.recompute.axis.operator_rules import COLLECTIVES, tensors_in

__all__ = ["Given", "Operator", "group_of", "is_attention", "operator_of"]

_ATEN = torch.ops.aten
_ATTENTION = frozenset(
    getattr(_ATEN, name)
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    )
    if hasattr(_ATEN, name)
)
_PRODUCTS = frozenset({_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.linear})

# Whether these are called depends on how a tensor lies in memory, is a part at all, or was cast before; so what they give is
# told by what it was made of (origins), and compared where it is used.
_KEEP_CONTENT = frozenset(
    getattr(_ATEN, name)
    for name in (
        "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "as_strided", "clone", "detach", "expand", "reshape",
        "slice", "view",
    )
)  # fmt: skip
# These say when a collective's result is there, and change nothing in it.
_AWAIT = frozenset({"_c10d_functional::_wrap_tensor_autograd", "_c10d_functional::wait_tensor"})
_COLLECTIVE_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d")
# Their results are memory that nothing was written into.
_ALLOCATE = frozenset(
    getattr(_ATEN, name)
    for name in (
        "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_",
        "resize_as_",
    )
)  # fmt: skip
# These use of a tensor its shape and its type, and no number in it.
_READ_SHAPES = frozenset(
    getattr(_ATEN, name)
    for name in (
        "empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones_like",
        "resize_", "zeros_like",
    )
)  # fmt: skip
_OVERWRITE = frozenset({_ATEN.copy_, _ATEN.fill_, _ATEN.zero_})
_NUMBERS = frozenset({bool, int, float, complex, str, torch.dtype})
_NO_LENGTHS = frozenset({"dim", "dim0", "dim1", "dims", "index", "k", "start"})
_LENGTH_TYPES = frozenset(
    form.format(number)
    for number in ("int", "SymInt")
    for form in ("{}", "Optional[{}]", "List[{}]", "Optional[List[{}]]")
)
_TENSOR = object()
_NOWHERE: frozenset[int] = frozenset()


@functools.cache
def is_attention(func: torch._ops.OpOverload) -> bool:
    """True for the fused attention operators of torch and of the flash_attn package."""
    return func.overloadpacket in _ATTENTION or (
        func.namespace.startswith("flash_attn") and "forward" in func.overloadpacket.__name__
    )


@functools.cache
def is_random(func: torch._ops.OpOverload) -> bool:
    """True for operators that draw from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def is_product(func: torch._ops.OpOverload) -> bool:
    """True for the matrix products that have a rule for tokens (memo.swap.recompute.axis.operator_rules)."""
    return func.overloadpacket in _PRODUCTS


class Operator:
    """Facts of an operator that hold for all of its calls."""

    __slots__ = (
        "allocates", "awaits", "func", "group_at", "is_attention", "is_collective", "is_constant", "is_known",
        "is_overload", "is_product", "is_random", "joins", "keeps_content", "lengths_at", "overwrites", "reads_shapes",
        "writes",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        self.func = func
        self.is_overload = is_overload = isinstance(func, torch._ops.OpOverload)
        self.is_attention = is_overload and is_attention(func)
        self.is_random = is_overload and is_random(func)
        self.is_product = is_overload and is_product(func)
        name = func._schema.name if is_overload else ""
        self.awaits = name in _AWAIT
        self.is_collective = name in COLLECTIVES
        self.joins = func is _ATEN.cat.default
        self.is_known = (
            self.is_attention or self.is_collective or (is_overload and func.namespace in ("aten", "prim", "prims"))
        )
        """It is one of those that may have a rule for tokens (memo.swap.recompute.axis.operator_rules)."""
        self.is_constant = func is _ATEN.lift_fresh.default
        """The program made a tensor of its own numbers, each time anew: `torch.tensor(scale)`."""
        self.keeps_content = is_overload and func.overloadpacket in _KEEP_CONTENT
        """It changes how a tensor lies, is seen or is typed, and no more."""
        self.lengths_at = _lengths_at(func) if is_overload else _NOWHERE
        """The positions of whole numbers, alone or in lists, that may follow the number of tokens."""
        self.group_at = _group_at(func) if is_overload else None
        """The position of the process group, if it is given one."""
        self.writes = _writes(func) if is_overload else ()
        """Position and name of the arguments that it changes in place."""
        self.allocates = is_overload and func.overloadpacket in _ALLOCATE
        """Its result is memory that nothing was written into."""
        self.reads_shapes = is_overload and func.overloadpacket in _READ_SHAPES
        """It uses no number of what it is given."""
        self.overwrites = _overwrites(func, self.writes, is_random=self.is_random) if self.writes else ()
        """Those of `writes` of which it sets every element and reads none."""


class Given:
    """One call of an operator, before it runs: its arguments, sorted into tensors, numbers and lengths."""

    __slots__ = ("args", "kwargs", "lengths", "numbers", "operator", "others", "tensors")

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.operator = operator = operator_of(func)
        self.args = args
        self.kwargs = kwargs
        self.tensors: list[torch.Tensor] = []
        self.others: list[Any] = []
        """The arguments with a mark in place of each tensor."""
        self.numbers: list[Any] = []
        """Numbers that must be the same in every run."""
        self.lengths: list[int] = []
        """Whole numbers that may follow the number of tokens."""
        lengths_at = operator.lengths_at
        if operator.group_at is not None:
            args = self._with_ranks(operator.group_at)
        for at, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
                self.others.append(_TENSOR)
            elif value is None:
                self.others.append(None)
            else:
                self._take(value, self.lengths if at in lengths_at else self.numbers)
        for name, value in kwargs.items():
            self.others.append(name)
            self._take(value, self.numbers)
        if operator.is_constant:
            self.numbers = [_fingerprint(args[0])]

    def _with_ranks(self, group_at: int) -> list[Any]:
        """The arguments, with the process group's ranks in its place.

        torch takes equal meshes for one another: a layer may be given a group, and its recompute another one of the same
        ranks, which has another name.
        """
        group = group_of(self.operator.func, self.args)
        assert group is not None
        ranks = dist.get_process_group_ranks(group)
        return [*self.args[:group_at], f"ranks {ranks}", *self.args[group_at + 1 :]]

    def _take(self, value: Any, whole: list[Any]) -> None:
        """One argument, or the tensors among its items; `whole` is where whole numbers go."""
        kind = type(value)
        if kind in _NUMBERS:
            self.others.append(value)
            (whole if kind is int else self.numbers).append(value)
        elif kind is list or kind is tuple:
            self.others.append(len(value))
            for item in value:
                if type(item) in _NUMBERS:
                    self.others.append(item)
                    (whole if type(item) is int else self.numbers).append(item)
                else:
                    self._take_other(item)
        else:
            self._take_other(value)

    def _take_other(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            self.others.append(_TENSOR)
        elif isinstance(value, (list, tuple, dict)):
            self.others.append(len(value))
            items: Iterable[Any] = value
            if isinstance(value, dict):
                self.others.extend(value)
                items = value.values()
            for item in items:
                self._take_other(item)
        else:
            self.others.append(value)

    def call(self) -> Any:
        """Runs the operator."""
        return self.operator.func(*self.args, **self.kwargs)

    def changed(self) -> list[torch.Tensor]:
        """The tensors that it changes in place."""
        return self._at(self.operator.writes)

    def overwritten(self) -> list[torch.Tensor]:
        """The tensors of which it sets every element and reads none."""
        return self._at(self.operator.overwrites)

    def read(self) -> list[torch.Tensor]:
        """The tensors of which it reads elements."""
        if self.operator.reads_shapes:
            return []
        read = list(self.tensors)
        for tensor in self.overwritten():
            del read[next(at for at, other in enumerate(read) if other is tensor)]  # it may be given twice
        return read

    def _at(self, arguments: Sequence[tuple[int, str]]) -> list[torch.Tensor]:
        args, kwargs = self.args, self.kwargs
        return [
            tensor
            for position, name in arguments
            for tensor in tensors_in(args[position] if position < len(args) else kwargs.get(name))
        ]


_OPERATORS: dict[int, Operator] = {}  # by the identity of what each holds: an OpOverload's hash is computed in Python


def operator_of(func: Any) -> Operator:
    """The facts of an operator, looked up once."""
    operator = _OPERATORS.get(id(func))
    if operator is None:
        operator = _OPERATORS[id(func)] = Operator(func)
    return operator


def _lengths_at(func: torch._ops.OpOverload) -> frozenset[int]:
    return frozenset(
        at
        for at, declared in enumerate(func._schema.arguments)
        if str(declared.type) in _LENGTH_TYPES and declared.name not in _NO_LENGTHS
    )


def _writes(func: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    if func.overloadpacket is _ATEN.record_stream:
        return ()  # its schema says so; what it changes is the allocator's books
    return tuple(
        (position, declared.name)
        for position, declared in enumerate(func._schema.arguments)
        if declared.alias_info is not None and declared.alias_info.is_write
    )


def _group_at(func: torch._ops.OpOverload) -> int | None:
    if func.namespace not in _COLLECTIVE_NAMESPACES:
        return None
    names = [declared.name for declared in func._schema.arguments]
    return next((at for at, name in enumerate(names) if name in ("group_name", "process_group")), None)


def group_of(func: torch._ops.OpOverload, args: Sequence[Any]) -> dist.ProcessGroup | None:
    """The process group that a collective is given; None for what only waits for one."""
    at = operator_of(func).group_at
    if at is None:
        return None
    group = args[at]
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(args[at])  # type: ignore[attr-defined]
    return dist.ProcessGroup.unbox(group)


def _overwrites(
    func: torch._ops.OpOverload, writes: Sequence[tuple[int, str]], *, is_random: bool
) -> tuple[tuple[int, str], ...]:
    """Position and name of arguments that are written and not read: `out=`, and the first one of fills and copies."""
    fills = is_random or func.overloadpacket in _OVERWRITE
    declared = func._schema.arguments
    return tuple(write for write in writes if declared[write[0]].is_out or (fills and write[0] == 0))


def _fingerprint(constant: torch.Tensor) -> str:
    """Shape, type and checksum of a constant's numbers."""
    told = f"a constant of shape {tuple(constant.shape)} and {constant.dtype}"
    if type(constant) is not torch.Tensor or constant.layout is not torch.strided or constant.is_meta:
        return told
    content = constant.detach().cpu().contiguous().flatten().view(torch.uint8)
    return f"{told} with checksum {zlib.crc32(content.numpy().tobytes()):08x}"
