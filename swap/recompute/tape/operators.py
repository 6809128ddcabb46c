"""Facts of an operator's schema, looked up once: each operator of a forward is, on the host, while the device waits."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from memo.swap.recompute.tape.attention import drops_by, is_attention
from memo.torch_private import (
    DispatchKey,
    ForceDispatchKeyGuard,
    OpOverload,
    RestorePythonTLSSnapshot,
    dispatch_has_kernel_for_dispatch_key,
    dispatch_tls_local_exclude_set,
    dispatch_tls_local_include_set,
    resolve_process_group,
)

_ATEN = torch.ops.aten
# These say when a collective's result is there, and change nothing in it.
_AWAIT = frozenset({"_c10d_functional::_wrap_tensor_autograd", "_c10d_functional::wait_tensor"})
# torch's own, which give new tensors.
_COLLECTIVES = frozenset(
    f"_c10d_functional::{name}" for name in ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor")
)
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
# Torch's own whose kernels call operators that autocast casts for, as those of other packages may.
_CALL_CAST = frozenset({_ATEN._sparse_addmm, _ATEN._trilinear, _ATEN.linalg_pinv})
_BELOW_AUTOGRAD = (
    DispatchKey.AutogradFunctionality, DispatchKey.AutogradOther, DispatchKey.AutogradNestedTensor,
    DispatchKey.ADInplaceOrView,
)  # fmt: skip
_LAZY = (DispatchKey.Conjugate, DispatchKey.Negative)
NON_BLOCKING = "non_blocking"
_PRODUCT = re.compile("mm|mv|dot|linear|conv|rnn|lstm|gru|attention|cdist|euclidean|matrix_exp|corrcoef|cov$")
_OVERWRITE = frozenset({_ATEN.copy_, _ATEN.fill_, _ATEN.zero_})


@functools.cache
def is_random(func: OpOverload) -> bool:
    """True for operators that draw from a generator, or may: other packages' attention that can drop has no tag."""
    return torch.Tag.nondeterministic_seeded in func.tags or (is_attention(func) and drops_by(func) is not None)


class Operator:
    """Facts of an operator that hold for all of its calls."""

    __slots__ = (
        "allocates",
        "awaits",
        "calls_others",
        "func",
        "group_at",
        "heeds_precision",
        "is_apart",
        "is_attention",
        "is_collective",
        "is_known",
        "is_overload",
        "is_random",
        "non_blocking_at",
        "overwrites",
        "reads_shapes",
        "writes",
    )  # fmt: skip

    def __init__(self, func: Any, *, is_apart: bool = False) -> None:
        self.func = func
        self.is_apart = is_apart
        """It stands for calls at another precision of products than the layer began with."""
        self.is_overload = is_overload = isinstance(func, OpOverload)
        self.is_attention = is_attention(func)
        self.is_random = is_overload and is_random(func)
        name = func._schema.name if is_overload else ""
        self.awaits = name in _AWAIT
        self.is_collective = name in _COLLECTIVES
        self.is_known = (
            (is_overload and func.namespace in ("aten", "prim", "prims")) or self.is_collective or self.is_attention
        )
        """It is one of torch's own, or attention: its schema says all that its kernel reads and writes."""
        self.group_at = _group_at(func) if is_overload else None
        """The position of the process group, if it is given one."""
        self.non_blocking_at = _position(func, NON_BLOCKING) if is_overload else None
        """The position of the argument that lets the host go on before a copy is done, if it has one."""
        self.writes = _writes(func) if is_overload else ()
        """Position and name of the arguments that it changes in place."""
        self.allocates = is_overload and func.overloadpacket in _ALLOCATE
        """Its result is memory that nothing was written into."""
        self.reads_shapes = is_overload and func.overloadpacket in _READ_SHAPES
        """It uses no number of what it is given."""
        self.calls_others = is_overload and (not self.is_known or func.overloadpacket in _CALL_CAST)
        """Its kernel may call operators for which more keys count than for its own."""
        self.heeds_precision = is_overload and (self.calls_others or _PRODUCT.search(func._schema.name) is not None)
        """It computes products, or may."""
        self.overwrites = _overwrites(func, self.writes, is_random=self.is_random) if self.writes else ()
        """Arguments of `writes` of which it sets every element and reads none."""


_OPERATORS: dict[int, Operator] = {}
_APART: dict[int, Operator] = {}  # by the identity of what each holds: an OpOverload's hash is computed in Python


def operator_of(func: Any) -> Operator:
    """The facts of an operator, looked up once."""
    operator = _OPERATORS.get(id(func))
    if operator is None:
        operator = _OPERATORS.setdefault(id(func), Operator(func))  # one for all threads: it is compared by identity
    return operator


def apart(operator: Operator) -> Operator:
    """Variant of an operator for calls at another matmul precision than the layer began with."""
    func = operator.func
    return _APART.get(id(func)) or _APART.setdefault(id(func), Operator(func, is_apart=True))


def call(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_complex: bool = False) -> Any:
    """The result of an operator, called by a dispatch mode as it is without one.

    Torch hides all keys above that of modes from a kernel that a mode calls: autocast, conjugation, views, autograd. For a
    kernel that calls other operators these are put back as the caller has them, but autograd where it has a formula for this
    one. With `is_complex` every kernel sees conjugation again, and nothing else: a complex one's may conjugate.
    """
    func = operator.func
    if operator.calls_others:
        with RestorePythonTLSSnapshot():
            hidden = dispatch_tls_local_exclude_set()
        if _has_formula(func):
            for key in _BELOW_AUTOGRAD:
                hidden = hidden.add(key)
    elif is_complex and operator.is_overload and func.namespace == "aten":
        hidden = dispatch_tls_local_exclude_set()
        for key in _LAZY:
            hidden = hidden.remove(key)
    else:
        return func(*args, **kwargs)
    with ForceDispatchKeyGuard(dispatch_tls_local_include_set(), hidden):
        return func(*args, **kwargs)


@functools.cache
def _has_formula(func: OpOverload) -> bool:
    """True where autograd has a kernel for an operator; without one it sees the operators that its kernel calls."""
    has_kernel = functools.partial(dispatch_has_kernel_for_dispatch_key, func.name())
    return any(map(has_kernel, ("Autograd", "AutogradCPU", "AutogradCUDA")))


def _writes(func: OpOverload) -> tuple[tuple[int, str], ...]:
    if func.overloadpacket is _ATEN.record_stream:
        return ()  # its schema says so; what it changes is the allocator's books
    return tuple(
        (position, declared.name)
        for position, declared in enumerate(func._schema.arguments)
        if declared.alias_info is not None and declared.alias_info.is_write
    )


def _group_at(func: OpOverload) -> int | None:
    return _position(func, "group_name", "process_group") if func.namespace in _COLLECTIVE_NAMESPACES else None


def _position(func: OpOverload, *names: str) -> int | None:
    """Position of the first argument of one of these names."""
    return next((at for at, declared in enumerate(func._schema.arguments) if declared.name in names), None)


def group_of(func: OpOverload, args: Sequence[Any]) -> dist.ProcessGroup | None:
    """The process group that a collective is given; None for what only waits for one."""
    at = operator_of(func).group_at
    if at is None:
        return None
    group = args[at]
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, str):
        return cast("dist.ProcessGroup", resolve_process_group(group))
    return dist.ProcessGroup.unbox(group)


def _overwrites(func: OpOverload, writes: Sequence[tuple[int, str]], *, is_random: bool) -> tuple[tuple[int, str], ...]:
    """Position and name of arguments that are written and not read: `out=`, and the first one of fills and copies."""
    fills = is_random or func.overloadpacket in _OVERWRITE
    declared = func._schema.arguments
    return tuple(write for write in writes if declared[write[0]].is_out or (fills and write[0] == 0))
