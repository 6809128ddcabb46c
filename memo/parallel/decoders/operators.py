"""Operators that keep the parts of ranks apart: what each does with a divided dimension.

An operator is known to keep a dimension where it is elementwise, moves or splits other dimensions, views whole blocks, goes
along other dimensions, or multiplies one by one along it. All others are refused.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

Shape = tuple[int, ...]


class NotDivisible(Exception):
    """Reason why a layer cannot be divided in some way."""

    reached = 0
    """Operators that were found to divide before it."""


class DividedDropout(NotDivisible):
    """Dropout of a part, for which ranks would draw the same mask."""


class Flow(enum.IntEnum):
    """Gradient of a tensor on a rank; memo.parallel.decoders.dataflow has the table."""

    CONSTANT = 0
    WEIGHT = 1
    REPLICATED = 2
    PARTIAL = 3
    SHARDED = 4


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """Divided dimension and gradient of a tensor."""

    flow: Flow = Flow.CONSTANT
    dim: int | None = None
    """The divided dimension."""
    pieces: int = 1
    roots: frozenset[str] = frozenset()
    """Parameters that a WEIGHT was made of."""


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorCall:
    """An operator or a divided module of a run."""

    name: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    settings: tuple[Any, ...]


# What operators do with a divided dimension


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SAME_SHAPE = _names(
    "clone _to_copy detach alias lift_fresh copy_ zeros_like ones_like full_like empty_like view_as_real "
    "view_as_complex polar constant_pad_nd masked_fill masked_fill_"
)
_MADE_FULL = _names("zeros ones full empty new_zeros new_ones new_full new_empty scalar_tensor")
_VIEWS = _names("view _unsafe_view reshape _reshape_alias")
_MOVES = _names("transpose t permute unsqueeze squeeze slice select split split_with_sizes unbind")
_ALONG = _names(
    "mean sum amax amin _softmax _log_softmax _safe_softmax logsumexp var std cumsum topk sort argsort max min "
    "any all prod native_layer_norm _fused_rms_norm linalg_vector_norm flip roll argmax glu"
)
_LOOKUPS = _names("embedding gather index index_select")
_BY_INDEX = _names("gather scatter scatter_ scatter_add scatter_add_")
_PRODUCTS = _names("mm bmm addmm baddbmm")


def kept_pieces(
    func: Any,
    args: Any,
    kwargs: Any,
    states: Sequence[State],
    out_dims: Sequence[int | None],
    step: OperatorCall,
    whole: OperatorCall,
) -> int:
    """Pieces of the divided dimension of the results.

    Raises:
        NotDivisible: the operator does not keep the parts of ranks apart, or is not known to.
    """
    name = func.overloadpacket.__name__
    named = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    divided = [index for index, state in enumerate(states) if state.dim is not None]
    pieces = {states[index].pieces for index in divided}
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise DividedDropout("dropout in a divided part gives all ranks the same mask unless its probability is 0")
    if name in _MADE_FULL:
        if "fill_value" in named:
            at = [one.name for one in func._schema.arguments].index("fill_value")
            if step.settings[at] != whole.settings[at]:
                raise NotDivisible(f"{name} has other numbers than on one rank")
        return 1
    if not divided and name not in ("expand", "zeros_like", "ones_like"):
        raise NotDivisible(f"{name} makes a part of what is whole")
    if len(pieces) > 1:
        raise NotDivisible(f"{name} joins what is divided in different ways")
    count = pieces.pop() if pieces else 1
    if name == "constant_pad_nd":
        padded = {len(step.inputs[0]) - 1 - place // 2 for place, values in enumerate(args[1]) if values}
        if states[0].dim in padded:
            raise NotDivisible("constant_pad_nd shifts what is divided")
    if torch.Tag.pointwise in func.tags or name in _SAME_SHAPE:
        _check_aligned(name, states, out_dims, step)
        _check_numbers(name, step, whole)
        return count
    if named.get("scale_grad_by_freq"):
        raise NotDivisible("embedding scales gradients by how often a rank has a token")
    along = name != "gather" or named["dim"] % len(step.inputs[0]) == states[-1].dim
    if name in _LOOKUPS and divided == [1] and len(states) == 2 and along:
        return count  # of a table that is whole, at divided places
    if name in _BY_INDEX:
        if len({state.dim for state in states}) > 1 or states[0].dim == named["dim"] % len(step.inputs[0]):
            raise NotDivisible(f"{name} goes along a divided dimension")
        return count
    if name in _VIEWS:
        return _through_view(whole, out_dims[0], states[0])
    if name == "expand":
        _check_expanded(states[0].dim, out_dims[0], step, whole)
        return count
    if name == "repeat":
        if out_dims[0] is None or states[0].dim != out_dims[0] - len(step.outputs[0]) + len(step.inputs[0]):
            raise NotDivisible("repeat moves a divided dimension")
        if step.inputs[0][states[0].dim] != step.outputs[0][out_dims[0]]:
            raise NotDivisible("repeat mixes the parts of ranks")
        return count
    if name in ("cat", "stack"):
        _check_joined(name, named.get("dim", 0), states, out_dims[0], step)
        return count
    if name in _MOVES:
        return _through_move(name, named, states[0], out_dims, step, whole)
    if name in _ALONG:
        if divided != [0] or states[0].dim in _reduced(func, named, len(step.inputs[0])):
            raise NotDivisible(f"{name} goes along a divided dimension")
        _check_numbers(name, step, whole)
        if any(dim is None for dim in out_dims[:1]):
            raise NotDivisible(f"{name} drops a divided dimension")
        return count
    if name in _PRODUCTS:
        _check_product(name, states[-2:], step)
        _check_numbers(name, step, whole)
        return count
    raise NotDivisible(f"{name} is not known to keep ranks apart")


def _check_numbers(name: str, step: OperatorCall, whole: OperatorCall) -> None:
    if step.settings != whole.settings and name not in ("zeros_like", "ones_like"):
        raise NotDivisible(f"{name} has other numbers than on one rank")


def _check_aligned(name: str, states: Sequence[State], out_dims: Sequence[int | None], step: OperatorCall) -> None:
    """Divided dimensions fall on that of the result, where no other operand is whole."""
    if len(out_dims) != 1 or out_dims[0] is None:
        raise NotDivisible(f"{name} drops a divided dimension")
    from_end = len(step.outputs[0]) - out_dims[0]
    if name in ("view_as_real", "view_as_complex"):
        from_end += len(step.inputs[0]) - len(step.outputs[0])
    for state, shape in zip(states, step.inputs, strict=True):
        if state.dim is not None:
            if len(shape) - state.dim != from_end:
                raise NotDivisible(f"{name} mixes dimensions of which one is divided")
        elif len(shape) >= from_end and shape[len(shape) - from_end] != 1:
            raise NotDivisible(f"{name} mixes a part with a whole")


def _groups(before: Shape, after: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Runs of dimensions of a view that hold the same elements."""
    i = j = 0
    while i < len(before) or j < len(after):
        left, right = ([i], [j]) if i < len(before) and j < len(after) else ([], [])
        if not left:
            rest_left, rest_right = list(range(i, len(before))), list(range(j, len(after)))
            yield rest_left, rest_right
            return
        a, b = before[i], after[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a *= before[i]
                left.append(i)
                i += 1
            else:
                b *= after[j]
                right.append(j)
                j += 1
        yield left, right


def _through_view(whole: OperatorCall, out_dim: int | None, state: State) -> int:
    own = [(left, right) for left, right in _groups(whole.inputs[0], whole.outputs[0]) if state.dim in left]
    if state.dim is None or out_dim is None or not own:
        raise NotDivisible("a view drops a divided dimension")
    left, right = own[0]
    outer_in = [dim for dim in left if dim < state.dim and whole.inputs[0][dim] != 1]
    outer_out = [whole.outputs[0][dim] for dim in right if dim < out_dim and whole.outputs[0][dim] != 1]
    if out_dim not in right or (outer_in and outer_out):
        raise NotDivisible("a view mixes a divided dimension with others")
    if outer_in:  # one after another, as those of the sequences of a batch
        return state.pieces * math.prod(whole.inputs[0][dim] for dim in outer_in)
    if not outer_out:
        if state.pieces > 1 and len(right) > 1 and math.prod(whole.outputs[0][d] for d in right if d > out_dim) > 1:
            raise NotDivisible("a view mixes fused projections")
        return state.pieces
    if math.prod(outer_out) != state.pieces:
        raise NotDivisible("a view mixes a divided dimension with others")
    return 1


def _check_expanded(dim: int | None, out_dim: int | None, step: OperatorCall, whole: OperatorCall) -> None:
    shift = len(step.outputs[0]) - len(step.inputs[0])
    if out_dim is None or (dim is not None and out_dim != dim + shift):
        raise NotDivisible("expand moves a divided dimension")
    if dim is None and out_dim >= shift and whole.inputs[0][out_dim - shift] != 1:
        raise NotDivisible("expand makes a part of what is whole")


def _check_joined(name: str, dim: int, states: Sequence[State], out_dim: int | None, step: OperatorCall) -> None:
    stacks = name == "stack"
    dim %= len(step.inputs[0]) + stacks
    moved = {None if state.dim is None else state.dim + (stacks and dim <= state.dim) for state in states}
    if len(moved) > 1 or out_dim not in moved or (not stacks and dim in moved):
        raise NotDivisible(f"{name} joins parts with wholes")


def _through_move(
    name: str,
    named: dict[str, Any],
    state: State,
    out_dims: Sequence[int | None],
    step: OperatorCall,
    whole: OperatorCall,
) -> int:
    divided, rank = state.dim, len(step.inputs[0])
    assert divided is not None
    if name in ("slice", "select", "split", "split_with_sizes", "unbind"):
        dim = named.get("dim", 0) % rank
        if dim == divided:
            if name == "slice" and step.inputs == step.outputs and whole.inputs == whole.outputs:
                return state.pieces
            equal = name in ("split", "split_with_sizes") and len(set(whole.outputs)) == 1
            if not equal or len(out_dims) != state.pieces or any(out != dim for out in out_dims):
                raise NotDivisible(f"{name} takes apart a divided dimension")
            return 1
        if name in ("select", "slice"):
            _check_numbers(name, step, whole)
        after = divided - (name in ("select", "unbind") and dim < divided)
    elif name in ("transpose", "t"):
        one, two = (named["dim0"] % rank, named["dim1"] % rank) if name == "transpose" else (0, 1)
        after = {one: two, two: one}.get(divided, divided)
    elif name == "permute":
        after = [dim % rank for dim in named["dims"]].index(divided)
    elif name == "unsqueeze":
        after = divided + (named["dim"] % (rank + 1) <= divided)
    else:
        if whole.inputs[0][divided] == 1 or (step.inputs[0][divided] == 1 and len(step.outputs[0]) < rank):
            raise NotDivisible("squeeze takes a dimension of which a rank has one")
        if out_dims[0] is None:
            raise NotDivisible("squeeze drops a divided dimension")
        return state.pieces
    if any(out != after for out in out_dims):
        raise NotDivisible(f"{name} moves a divided dimension")
    return state.pieces


def _reduced(func: Any, named: dict[str, Any], rank: int) -> set[int]:
    """Dimensions along which an operator goes."""
    if "normalized_shape" in named:
        return set(range(rank - len(named["normalized_shape"]), rank))
    dims = named.get("dim", named.get("dims"))
    defaults = {one.name: one.default_value for one in func._schema.arguments if one.has_default_value()}
    if dims is None:
        dims = defaults.get("dim")
    if dims is None:
        return set(range(rank))
    return {dim % rank for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}


def _check_product(name: str, states: Sequence[State], step: OperatorCall) -> None:
    left, right = states
    batch = name in ("bmm", "baddbmm")
    if batch and left.dim == 0 and right.dim == 0:
        return
    # Rows of the left or columns of the right: the other is whole and has no dimension of that kind.
    row = 1 if batch else 0
    if (left.dim == row and right.dim is None) or (left.dim is None and right.dim == row + 1):
        return
    raise NotDivisible(f"{name} sums over a divided dimension, or mixes parts with wholes")
