"""Bans: which steps of a tape are never repeated at a level.

    always        random numbers, what the dispatcher does not see, operators outside torch without a declaration (tape.py),
                  results whose size depends on numbers
    attention     besides: attention, scans, sums in no fixed order, sorting, and products of two activations that are not
                  larger than both: such a product costs more operations per byte than any other step
    matmuls       besides: every matrix product, and every sum over ranks, which completes one. What was gathered or
                  exchanged is moved again between ranks, where that spares bytes

The user may ban or allow operators by name in addition (`Bans`): `aten.mm`, `mm`, or one of the groups `attention`,
`matmul`, `collective`, `scan`, `sort`, `scatter`. What is always banned stays so.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from memo.errors import UsageError
from memo.swap.levels import Level
from memo.swap.recompute.tape.log import Function, Origin
from memo.swap.recompute.tape.tape import ContentUse
from memo.torch_private import OpOverloadPacket

if TYPE_CHECKING:
    from memo.swap.recompute.tape.tape import Tape, TapeStep

GROUPS = ("attention", "matmul", "collective", "scan", "sort", "scatter")
"""Names that stand for several operators."""

_PRODUCTS = frozenset(
    (
        "mm", "addmm", "_addmm_activation", "linear", "bmm",
        "baddbmm", "addbmm", "addmv", "mv", "dot",
        "vdot", "_scaled_mm", "_int_mm", "_grouped_mm", "_scaled_grouped_mm",
        "convolution", "_convolution", "mkldnn_convolution", "_mkldnn_linear_pointwise", "conv1d",
        "conv2d", "conv3d", "_trilinear",
    )
)  # fmt: skip
_CONVOLUTIONS = frozenset(
    (
        "convolution", "_convolution", "mkldnn_convolution", "conv1d", "conv2d",
        "conv3d",
    )
)  # fmt: skip
_ADDS_FIRST = frozenset({"addmm", "_addmm_activation", "baddbmm", "addbmm", "addmv"})
"""Their first argument is no factor."""
_SCANS = frozenset(
    (
        "cumsum", "cumsum_", "cumprod", "cumprod_", "logcumsumexp",
        "cummax", "cummin", "_fft_r2c", "_fft_c2r", "_fft_c2c",
    )
)  # fmt: skip
_SORTS = frozenset(
    (
        "sort", "topk", "argsort", "kthvalue", "median",
        "mode", "unique", "_unique2", "unique_consecutive", "unique_dim",
    )
)  # fmt: skip
_SCATTERS = frozenset(
    (
        "index_add", "index_add_", "scatter_add", "scatter_add_", "index_put",
        "index_put_", "_index_put_impl_", "_unsafe_index_put", "scatter_reduce", "scatter_reduce_",
        "histc", "bincount", "index_reduce", "index_reduce_", "put",
        "put_",
    )
)  # fmt: skip
_SUMS = frozenset(
    ("all_reduce", "all_reduce_", "all_reduce_coalesced", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced")
)
"""Over ranks."""
_SIZED_BY_INDICES = frozenset({"index", "_unsafe_index"})
"""Tagged as operators whose results have sizes that depend on numbers, which is so for boolean indices alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bans:
    """The user's own bans: names of operators (`aten.mm`, `mm`) or of groups.

    Raises:
        UsageError: a name is unknown, or is in both.
    """

    keep: frozenset[str] = frozenset()
    """Their results are kept, at every level."""
    repeat: frozenset[str] = frozenset()
    """They may be repeated, though the level says no."""

    def __post_init__(self) -> None:
        for argument, names in (("keep", self.keep), ("repeat", self.repeat)):
            for name in sorted(names):
                if name not in GROUPS and not _is_operator(name):
                    raise UsageError(
                        f"{argument}: no operator {name!r}; give names such as 'aten.mm' or 'mm', or one of the groups "
                        f"{', '.join(GROUPS)}"
                    )
        both = self.keep & self.repeat
        if both:
            raise UsageError(f"keep and repeat: {min(both)!r} is in both")

    def __str__(self) -> str:
        parts = (
            f"{word} {', '.join(sorted(names))}"
            for word, names in (("keep", self.keep), ("repeat", self.repeat))
            if names
        )
        return "; ".join(parts)


NO_BANS = Bans()


def _is_operator(name: str) -> bool:
    """True for an operator of torch, or a registered one with its namespace."""
    namespace, _, plain = name.rpartition(".")
    if not plain.isidentifier() or (namespace and not namespace.isidentifier()):
        return False
    return isinstance(getattr(getattr(torch.ops, namespace or "aten"), plain, None), OpOverloadPacket)


@functools.cache
def groups_of(operator: Any) -> frozenset[str]:
    """Names of the groups that an operator belongs to."""
    if isinstance(operator, Function):
        return frozenset({"collective"} if operator.talks else ())
    found = set()
    name = operator.func.overloadpacket.__name__ if operator.is_overload else ""
    for group, names in (("matmul", _PRODUCTS), ("scan", _SCANS), ("sort", _SORTS), ("scatter", _SCATTERS)):
        if name in names:
            found.add(group)
    if operator.is_attention:
        found.add("attention")
    if operator.is_collective or (operator.is_overload and operator.func.namespace == "_c10d_functional"):
        found.add("collective")
    return frozenset(found)


def banned(tape: Tape, level: Level, *, chosen: Bans = NO_BANS, also: Iterable[int] = ()) -> dict[int, str]:
    """Steps that are never repeated, with the reason.

    Args:
        tape: of the call.
        level: SAVE_MATMULS, SAVE_ATTENTION or SAVE_INPUT; SAVE_ALL repeats nothing anyway.
        chosen: what the user keeps and repeats by name.
        also: numbers of steps that a trial has found to give something else.
    """
    found: dict[int, str] = dict.fromkeys(also, "repeating it gave something else")
    for step in tape.steps:
        if not step.makes or step.number in found:
            continue
        reason = step.opaque or _always(step, tape)
        if reason is None:
            names = {*groups_of(step.operator), step.name, step.name.rpartition(".")[2]}
            if names & chosen.keep:
                reason = "kept, as chosen"
            elif not names & chosen.repeat:
                reason = _by_level(step, tape, level)
        if reason is not None:
            found[step.number] = reason
    return found


def _always(step: TapeStep, tape: Tape) -> str | None:
    operator = step.operator
    if isinstance(operator, Function) or not operator.is_overload:
        return None
    if torch.Tag.dynamic_output_shape not in operator.func.tags:
        return None
    name = operator.func.overloadpacket.__name__
    if name in _SIZED_BY_INDICES:
        indices = step.args[1] if len(step.args) > 1 else ()
        types = [tape.geometry(use.value)[4] for use in indices if isinstance(use, ContentUse)]
        return "its size depends on numbers" if torch.bool in types or torch.uint8 in types else None
    return "its size depends on numbers"


def _by_level(step: TapeStep, tape: Tape, level: Level) -> str | None:
    groups = groups_of(step.operator)
    if level is Level.SAVE_INPUT:  # a trial of a sum in no fixed order may pass by luck, or at a size that has one
        is_unordered = "scatter" in groups and not torch.are_deterministic_algorithms_enabled()
        return "a scatter is kept" if is_unordered else None
    if not groups:
        return None
    for group, reason in (
        ("attention", "attention"),
        ("scan", "a scan"),
        ("sort", "sorting"),
        ("scatter", "a scatter"),
    ):
        if group in groups:
            return f"{reason} is kept"
    if level is Level.SAVE_MATMULS:
        if "matmul" in groups:
            return "convolutions are kept" if _is_convolution(step) else "matmuls are kept"
        sums = not isinstance(step.operator, Function) and step.operator.func.overloadpacket.__name__ in _SUMS
        return "sums over ranks are kept" if sums else None
    if "matmul" not in groups or is_cheap(step, tape):
        return None
    if _mixes_positions(step, tape):
        return "a convolution over several positions is kept"
    return "a product of two activations is kept"


def is_cheap(step: TapeStep, tape: Tape) -> bool:
    """True for a matrix product with a parameter, and for one whose result is larger than both factors."""
    name = step.operator.func.overloadpacket.__name__
    if _mixes_positions(step, tape):
        return False  # operations for each byte as many as its kernel has entries
    factors = [use for use in (*step.args, *step.kwargs.values()) if isinstance(use, ContentUse)]
    if name in _ADDS_FIRST:
        factors = factors[1:]
    made = [use for use in factors if _comes_from_activations(tape, use.content)]
    matrices = [use for use in made if len(tape.geometry(use.value)[2]) >= 2]
    if len(matrices) < 2:
        return True
    result = sum(tape.storages[tape.contents[content].storage][1] for content in step.makes)
    return all(result > _nbytes(tape, use) for use in matrices)


def _is_convolution(step: TapeStep) -> bool:
    operator = step.operator
    return not isinstance(operator, Function) and operator.func.overloadpacket.__name__ in _CONVOLUTIONS


def _mixes_positions(step: TapeStep, tape: Tape) -> bool:
    """True for a convolution whose kernel has more entries than one."""
    return _is_convolution(step) and any(size != 1 for size in tape.geometry(step.args[1].value)[2][2:])


def _nbytes(tape: Tape, use: ContentUse) -> int:
    _, _, size, _, dtype = tape.geometry(use.value)
    return size.numel() * dtype.itemsize


def _comes_from_activations(tape: Tape, content: int) -> bool:
    """False for a parameter, and for what is made of parameters alone (a cast, a merged adapter)."""
    todo, seen = [content], set()
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        birth = tape.storage(at)[0]
        if birth in (Origin.INPUT, Origin.GIVEN):
            return True
        writer = tape.contents[at].writer
        if writer >= 0:
            todo.extend(tape.steps[writer].reads)
    return False
