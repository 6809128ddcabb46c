"""Rules of the operators that work token by token, and where each leaves the token axis.

A rule maps one call of one operator to the token axes of its results. The list is closed: an operator without a rule that
meets a token axis is `Unproven`, and its step never runs on a part of the tokens. A rule may say MIXED too often, which
costs memory, and never too seldom, which would cost a gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from memo.swap.recompute.axis.token_axis import Axis, Mark, Meaning, regroup
from memo.torch_private import OpOverload

__all__ = ["COLLECTIVES", "TRIANGLES", "Call", "Meanings", "Unproven", "meaning_of", "tensors_in"]

_ATEN = torch.ops.aten
_ATOMS = frozenset({type(None), bool, int, float, str})


class Unproven(Exception):
    """Not known to work token by token; the message is the reason, as a person reads it."""


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of an operator's arguments or results, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, (tuple, list, dict)):
        _collect(value, found)
    return found


def _collect(values: Any, found: list[torch.Tensor]) -> None:
    for item in values.values() if isinstance(values, dict) else values:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif type(item) not in _ATOMS and isinstance(item, (tuple, list, dict)):
            _collect(item, found)


class Meanings(Protocol):
    """Token axes of the tensors of one layer call of `tokens` tokens."""

    @property
    def tokens(self) -> int:
        """Tokens of one sequence."""

    def of(self, tensor: torch.Tensor) -> Meaning:
        """Token axis of a tensor, or its Mark."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of one operator, after it ran."""

    func: OpOverload
    args: Sequence[Any]
    kwargs: dict[str, Any]
    out: Any
    tokens: Meanings
    given: Sequence[torch.Tensor]
    """The tensors among the arguments."""

    def argument(self, name: str) -> Any:
        """The argument of that name, or its default."""
        for position, declared in enumerate(self.func._schema.arguments):
            if declared.name == name:
                if position < len(self.args) and not declared.kwarg_only:
                    return self.args[position]
                return self.kwargs.get(name, declared.default_value)
        return None

    def meaning(self, tensor: torch.Tensor | None) -> Meaning:
        """Token axis of an argument, or its Mark."""
        return Mark.SAME if tensor is None else self.tokens.of(tensor)

    def only_first(self) -> Axis | None:
        """The axis of the first argument, when no other tensor argument has one."""
        axis = self.meaning(self.given[0])
        rest = [self.meaning(tensor) for tensor in self.given[1:]]
        return axis if isinstance(axis, Axis) and all(other is Mark.SAME for other in rest) else None


Rule = Callable[[Call], Meaning]


def meaning_of(call: Call) -> Meaning:
    """Token axis of all results of `call`, or their Mark.

    Raises:
        Unproven: no rule says how the operator treats tokens.
    """
    meanings = {call.tokens.of(tensor) for tensor in call.given}
    if meanings <= {Mark.SAME}:
        return Mark.SAME
    rule = _RULES.get(call.func.overloadpacket) or COLLECTIVES.get(call.func._schema.name)
    if rule is None and torch.Tag.pointwise in call.func.tags:
        rule = _pointwise
    has_axis = any(isinstance(meaning, Axis) for meaning in meanings)
    if has_axis and rule is None:
        raise Unproven(f"{call.func.overloadpacket} is not known to work token by token")
    if call.out is not None and (not tensors_in(call.out) or torch.Tag.dynamic_output_shape in call.func.tags):
        raise Unproven(
            f"{call.func.overloadpacket} lets numbers or sizes depend on the tokens, which is not known to work"
        )
    if rule is None or not has_axis:
        return Mark.MIXED
    return Mark.MIXED if Mark.MIXED in meanings else rule(call)


def _pointwise(call: Call) -> Meaning:
    """Broadcasting from the right; what does not run over the tokens must be of size one there."""
    shape = tensors_in(call.out)[0].shape
    axes = {
        axis.at(axis.dim - tensor.ndim + len(shape))
        for tensor in call.given
        if isinstance(axis := call.meaning(tensor), Axis)
    }
    found = axes.pop()
    alike = not axes and all(_broadcasts(call, tensor, found, len(shape)) for tensor in call.given)
    return found if alike else Mark.MIXED


def _view(call: Call) -> Meaning:
    axis = call.only_first()
    if axis is None or isinstance(call.args[1], torch.dtype):
        return Mark.MIXED
    return regroup(call.args[0].shape, axis, call.out.shape, call.tokens.tokens) or Mark.MIXED


def _expand(call: Call) -> Meaning:
    axis = call.only_first()
    return Mark.MIXED if axis is None else axis.at(axis.dim - call.args[0].ndim + call.out.ndim)


def _permute(call: Call) -> Meaning:
    axis, ndim = call.only_first(), call.args[0].ndim
    order = [dim % ndim for dim in call.argument("dims")]
    return Mark.MIXED if axis is None else axis.at(order.index(axis.dim))


def _transpose(call: Call) -> Meaning:
    axis, ndim = call.only_first(), call.args[0].ndim
    if axis is None or ndim < 2:
        return axis or Mark.MIXED
    first, second = (0, 1) if call.func.overloadpacket is _ATEN.t else (d % ndim for d in call.args[1:3])
    return axis.at({first: second, second: first}.get(axis.dim, axis.dim))


def _unsqueeze(call: Call) -> Meaning:
    axis = call.only_first()
    dim = call.args[1] % call.out.ndim
    return Mark.MIXED if axis is None else axis.at(axis.dim + (dim <= axis.dim))


def _squeeze(call: Call) -> Meaning:
    axis, ndim = call.only_first(), call.args[0].ndim
    if axis is None or len(call.args) < 2:
        return Mark.MIXED
    dims = {dim % ndim for dim in (call.args[1] if isinstance(call.args[1], (list, tuple)) else [call.args[1]])}
    gone = sum(1 for dim in dims if dim < axis.dim and call.args[0].size(dim) == 1)
    return axis.at(axis.dim - gone)


def _as_complex(call: Call) -> Meaning:
    """Pairs in the last dimension as complex numbers, which rotary positions may be, and back."""
    axis = call.only_first()
    return axis if axis is not None and axis.dim < min(call.args[0].ndim, call.out.ndim) else Mark.MIXED


def _along(call: Call) -> Meaning:
    """Takes parts along one dimension, which must not be the tokens'. Trivial parts of the tokens are all of them."""
    axis, tensor = call.only_first(), call.args[0]
    if axis is None:
        return Mark.MIXED
    if call.argument("dim") % tensor.ndim != axis.dim:
        return axis
    whole = all(part.shape == tensor.shape for part in tensors_in(call.out))
    return axis if whole and call.argument("step") in (None, 1) else Mark.MIXED


def _pick(call: Call) -> Meaning:
    """Takes parts along one dimension and removes it."""
    axis, ndim = call.only_first(), call.args[0].ndim
    dim = (call.argument("dim") or 0) % ndim
    if axis is None or dim == axis.dim:
        return Mark.MIXED
    return axis.at(axis.dim - (dim < axis.dim))


def _split(call: Call) -> Meaning:
    """Splits along the tokens, into parts of equally many whole rows: the shards of that many ranks."""
    axis, tensor = call.only_first(), call.args[0]
    if axis is None or call.argument("dim") % tensor.ndim != axis.dim:
        return _along(call)
    rows, rest = divmod(call.out[0].size(axis.dim), call.tokens.tokens * axis.inner)
    whole = rest == 0 and all(part.shape == call.out[0].shape for part in call.out)
    return dataclasses.replace(axis, outer=rows) if whole else Mark.MIXED


def _cat(call: Call) -> Meaning:
    """Beside each other, or, along the tokens, as rows one after the other."""
    parts = [part for part in call.args[0] if part.numel()]  # an empty cache is put before the first keys
    axes = [axis for part in parts if isinstance(axis := call.meaning(part), Axis)]
    if not axes or len(axes) < len(parts):
        return Mark.MIXED
    axis, dim = axes[0], (call.argument("dim") or 0) % parts[0].ndim
    if axis.dim == dim:
        alike = all((other.dim, other.inner) == (axis.dim, axis.inner) for other in axes)
        return dataclasses.replace(axis, outer=sum(other.outer for other in axes)) if alike else Mark.MIXED
    return axis if all(other == axis for other in axes) else Mark.MIXED


def _stack(call: Call) -> Meaning:
    axes = {call.meaning(part) for part in call.args[0]}
    axis = axes.pop()
    if axes or not isinstance(axis, Axis):
        return Mark.MIXED
    return axis.at(axis.dim + ((call.argument("dim") or 0) % call.out.ndim <= axis.dim))


def _reduce(call: Call) -> Meaning:
    """Over named dimensions that are not the tokens'."""
    axis, ndim = call.only_first(), call.args[0].ndim
    given = call.argument("dim")
    dims = {dim % ndim for dim in ([given] if isinstance(given, int) else given or ())}
    if axis is None or not dims or axis.dim in dims:
        return Mark.MIXED
    keeps = tensors_in(call.out)[0].ndim == ndim
    return axis if keeps else axis.at(axis.dim - sum(1 for dim in dims if dim < axis.dim))


def _norm(call: Call) -> Meaning:
    """Over the last dimensions, as many as `normalized_shape` has."""
    axis = call.only_first()
    return axis if axis is not None and axis.dim < call.args[0].ndim - len(call.args[1]) else Mark.MIXED


def _times_matrix(call: Call) -> Meaning:
    """(..., tokens, ..., k) times a matrix that is the same for all tokens; a bias may come first or last."""
    tensors = tensors_in(call.args)
    left = tensors[1] if call.func.overloadpacket is _ATEN.addmm else tensors[0]
    meanings = [call.meaning(tensor) for tensor in tensors]
    axis = meanings.pop(1 if call.func.overloadpacket is _ATEN.addmm else 0)
    if not isinstance(axis, Axis) or axis.dim == left.ndim - 1 or any(other is not Mark.SAME for other in meanings):
        return Mark.MIXED
    if call.func.overloadpacket is _ATEN.addmm and tensors[0].ndim > 1 and tensors[0].size(0) != 1:
        return Mark.MIXED
    return axis


def _batched(call: Call) -> Meaning:
    """Tokens in the rows of the left factor, or one product per token; `baddbmm` adds something first."""
    *added, left, right = call.given
    axis, other = call.meaning(left), call.meaning(right)
    if not isinstance(axis, Axis) or not ((axis.dim == 1 and other is Mark.SAME) or (axis.dim == 0 and other == axis)):
        return Mark.MIXED
    return axis if all(_broadcasts(call, tensor, axis, left.ndim) for tensor in added) else Mark.MIXED


def _broadcasts(call: Call, tensor: torch.Tensor, axis: Axis, ndim: int) -> bool:
    """True for an operand with the same tokens where a result of so many dimensions has that axis, or of size one there."""
    meaning, dim = call.meaning(tensor), axis.dim - ndim + tensor.ndim
    if isinstance(meaning, Axis):
        return meaning == axis.at(dim)
    return meaning is Mark.SAME and (dim < 0 or tensor.size(dim) == 1)


def _embedding(call: Call) -> Meaning:
    table, index = (call.meaning(tensor) for tensor in call.args[:2])
    return index if table is Mark.SAME else Mark.MIXED


def _chosen(call: Call) -> Meaning:
    """top-k, sort and the like, along a dimension that is not the tokens'."""
    axis = call.only_first()
    dim = call.argument("dim")
    return axis if axis is not None and (-1 if dim is None else dim) % call.args[0].ndim != axis.dim else Mark.MIXED


def _index_select(call: Call) -> Meaning:
    """Entries of a dimension that is not the tokens', the same for all of them; or a row of a table for each token."""
    tensor, dim = call.args[0], call.argument("dim")
    axis, index = call.meaning(tensor), call.meaning(call.argument("index"))
    if tensor.ndim == 0:
        return Mark.MIXED
    if isinstance(axis, Axis):
        return axis if index is Mark.SAME and dim % tensor.ndim != axis.dim else Mark.MIXED
    return index.at(dim % tensor.ndim) if axis is Mark.SAME and isinstance(index, Axis) else Mark.MIXED


def _gather(call: Call) -> Meaning:
    """Entries of another dimension than the tokens', other ones for each token: both run over the same tokens."""
    tensor, index = call.args[0], call.argument("index")
    axis = call.meaning(tensor)
    if not isinstance(axis, Axis) or call.meaning(index) != axis or index.ndim != tensor.ndim:
        return Mark.MIXED
    return axis if call.argument("dim") % tensor.ndim != axis.dim else Mark.MIXED


def _scatter(call: Call) -> Meaning:
    """Writes one number at places of another dimension than the tokens'. Several numbers at one place have no order."""
    return _gather(call) if call.func._overloadname == "value" else Mark.MIXED


def _pad(call: Call) -> Meaning:
    """At the ends of dimensions that are not the tokens'; pairs of widths, of the last dimension first."""
    axis, pad = call.only_first(), call.argument("pad")
    if axis is None:
        return Mark.MIXED
    at = 2 * (call.args[0].ndim - 1 - axis.dim)
    return axis if not any(pad[at : at + 2]) else Mark.MIXED


def _repeat(call: Call) -> Meaning:
    """The tokens once; new dimensions come before the others."""
    axis, repeats = call.only_first(), call.argument("repeats")
    if axis is None:
        return Mark.MIXED
    moved = axis.at(axis.dim + len(repeats) - call.args[0].ndim)
    return moved if repeats[moved.dim] == 1 else Mark.MIXED


def _triangle(call: Call) -> Meaning:
    """A part of the rows has the diagonal of its first row: its second argument is moved by as many."""
    axis = call.only_first()
    if axis is None or call.kwargs:
        return Mark.MIXED
    return axis if axis == Axis(dim=call.args[0].ndim - 2) else Mark.MIXED


TRIANGLES = frozenset({_ATEN.tril, _ATEN.triu, _ATEN.tril_, _ATEN.triu_})
"""Operators that depend on the number of a row; of a part of the rows their second argument counts from its first one."""


def _all_gather(call: Call) -> Meaning:
    """The shards of all ranks one after the other, along the first dimension."""
    axis = call.only_first()
    return Mark.MIXED if axis is None else axis if axis.dim else axis.joined(call.argument("group_size"))


def _reduce_scatter(call: Call) -> Meaning:
    """A rank's shard of the sum, along the first dimension."""
    axis = call.only_first()
    return (axis and (axis if axis.dim else axis.divided(call.argument("group_size")))) or Mark.MIXED


def _no_result(call: Call) -> Meaning:
    return Mark.SAME


COLLECTIVES: dict[str, Rule] = {
    "_c10d_functional::all_gather_into_tensor": _all_gather,
    "_c10d_functional::all_reduce": _pointwise,
    "_c10d_functional::reduce_scatter_tensor": _reduce_scatter,
}
"""torch's own, by the names of their schemas, of ranks that have as many tokens each. Their results are new tensors."""

_LIKE = (
    "_to_copy", "alias", "clone", "complex", "copy_", "detach", "empty_like", "fill_",
    "floor_divide", "floor_divide_", "full_like", "lift_fresh", "masked_fill", "masked_fill_", "ones_like", "polar",
    "zero_", "zeros_like",
)  # fmt: skip
_REDUCTIONS = (
    "all", "amax", "amin", "any", "argmax", "argmin", "linalg_vector_norm", "logsumexp", "max", "mean", "min", "sum",
    "var",
)  # fmt: skip
_RULES: dict[Any, Rule] = {
    **dict.fromkeys((getattr(_ATEN, name) for name in _LIKE), _pointwise),
    **dict.fromkeys((_ATEN.view, _ATEN._unsafe_view, _ATEN.reshape, _ATEN._reshape_alias), _view),
    **dict.fromkeys((_ATEN.transpose, _ATEN.t), _transpose),
    **dict.fromkeys((_ATEN.view_as_complex, _ATEN.view_as_real), _as_complex),
    **dict.fromkeys((_ATEN.slice, _ATEN.split_with_sizes), _along),
    **dict.fromkeys((_ATEN.select, _ATEN.unbind), _pick),
    **dict.fromkeys((_ATEN._softmax, _ATEN._log_softmax, _ATEN._safe_softmax), _chosen),
    **dict.fromkeys((_ATEN.topk, _ATEN.sort), _chosen),
    **dict.fromkeys((getattr(_ATEN, name) for name in _REDUCTIONS), _reduce),
    **dict.fromkeys((_ATEN.scatter, _ATEN.scatter_), _scatter),
    **dict.fromkeys(TRIANGLES, _triangle),
    **dict.fromkeys((_ATEN.native_layer_norm, _ATEN._fused_rms_norm), _norm),
    **dict.fromkeys((_ATEN.mm, _ATEN.addmm, _ATEN.linear), _times_matrix),
    **dict.fromkeys((_ATEN.bmm, _ATEN.baddbmm), _batched),
    _ATEN.cat: _cat,
    _ATEN.constant_pad_nd: _pad,
    _ATEN.embedding: _embedding,
    _ATEN.expand: _expand,
    _ATEN.gather: _gather,
    _ATEN.index_select: _index_select,
    _ATEN.permute: _permute,
    _ATEN.record_stream: _no_result,
    _ATEN.repeat: _repeat,
    _ATEN.split: _split,
    _ATEN.squeeze: _squeeze,
    _ATEN.stack: _stack,
    _ATEN.unsqueeze: _unsqueeze,
}
