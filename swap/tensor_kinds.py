"""Tensor kinds: predicates on the tensors of a layer call that decide whether a saved tensor may move (R3).

A sharded tensor (DTensor) stands for its local part: its own storage is a fake that has no address. Never moved are
parameters, their views and autocast's casts of them; the storages of a layer's other arguments and of the model's buffers;
small storages; tensors of another device; sparse, quantised and conjugated tensors, those with tangents, and other
subclasses. A tensor that does not move is kept by reference: a wrong answer here costs memory and never a gradient.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

from memo.nested import leaves_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_LOCAL_PART = "_ToTorchTensorBackward"
# Autograd nodes of views, copies and casts. The walk back to a parameter stops at the first other node.
_VIEWS_AND_CASTS = frozenset(
    {
        "AliasBackward0",
        "AsStridedBackward0",
        "CloneBackward0",
        "DetachBackward0",
        "ExpandBackward0",
        "PermuteBackward0",
        "ReshapeAliasBackward0",
        "SelectBackward0",
        "SliceBackward0",
        "SplitBackward0",
        "SplitWithSizesBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "TBackward0",
        "ToCopyBackward0",
        "TransposeBackward0",
        "UnbindBackward0",
        "UnsafeViewBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
        # The local part of a sharded parameter: torch's DTensor.to_local, and memo.parallel's copy_in after it.
        "_CopyInBackward",
        _LOCAL_PART,
    }
)
_LEAF = "torch::autograd::AccumulateGrad"
_MAX_HOPS = 6


def is_plain(tensor: torch.Tensor) -> bool:
    """True for a strided torch.Tensor that its bytes, shape and strides describe completely."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not has_hidden_state(tensor)


def has_hidden_state(tensor: torch.Tensor) -> bool:
    """True where bytes, shape and strides do not describe a tensor completely.

    That is a pending conjugation or negation, quantisation, nesting, zeros without memory, or, inside forward-mode
    differentiation, a possible tangent.
    """
    return (
        tensor.is_conj()
        or tensor.is_neg()
        or tensor.is_quantized
        or tensor.is_nested
        or tensor._is_zerotensor()
        or forward_ad._current_level >= 0
    )


def is_sharded(tensor: torch.Tensor) -> bool:
    """True for a DTensor. Does not import torch.distributed, which a run without it need not load."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def are_wrapped(types: Iterable[type]) -> bool:
    """True if one of `types` is a DTensor or the pending result of a collective.

    Both dispatch operators by themselves, and call them again on the tensors that they wrap.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    return any(issubclass(kind, module.DTensor) or hasattr(kind, "trigger_wait") for kind in types)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a DTensor, or the result of a pending collective after waiting for it; else `tensor`."""
    if type(tensor) is torch.Tensor:
        return tensor
    if is_sharded(tensor):
        tensor = tensor._local_tensor  # type: ignore[attr-defined]
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def never_moves(tensor: torch.Tensor) -> bool:
    """True for a strided tensor that is a view of a parameter, or has hidden state.

    `nn.Linear` saves `weight.t()`, which is no Parameter itself.
    """
    base = tensor._base
    # The exact type comes first because isinstance(base, Parameter) runs Python code.
    if base is not None and type(base) is not torch.Tensor and isinstance(base, Parameter):
        return True
    return has_hidden_state(tensor)


def cast_of_parameter(tensor: torch.Tensor) -> bool:
    """True for autocast's low-precision copy of a parameter, the local part of a sharded one, and views of either."""
    return parameter_behind(tensor) is not None


def parameter_behind(tensor: torch.Tensor) -> Parameter | None:
    """Returns the parameter that a tensor is a view, a cast or the local part of; None for any other tensor.

    Walks the autograd graph back to the leaf, at most six nodes. A view of a sharded tensor's local part has that part as
    its base, which autograd does not know: up to there any node with one input may be a view, and is one if the tensor
    is in the parameter's own memory.
    """
    node: Any = tensor.grad_fn
    base = tensor._base
    is_in_local = base is not None and base.grad_fn is None and not base.requires_grad
    is_known = True
    for _ in range(_MAX_HOPS):
        if node is None:
            return None
        name = node.name()
        if name == _LEAF:
            found = node.variable if isinstance(node.variable, Parameter) else None
            return found if found is None or is_known or _share_memory(tensor, local_part(found)) else None
        inputs = [function for function, _ in node.next_functions if function is not None]
        if name not in _VIEWS_AND_CASTS and not (is_in_local and len(inputs) == 1):
            return None
        is_known = is_known and name in _VIEWS_AND_CASTS
        is_in_local = is_in_local and name != _LOCAL_PART
        node = node.next_functions[0][0] if name in _VIEWS_AND_CASTS else inputs[0]
    return None


def _share_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return has_storage(other) and tensor.untyped_storage()._cdata == other.untyped_storage()._cdata


def layer_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns a layer call's hidden states: the argument `hidden_states`, else the first tensor; None without tensors."""
    named = kwargs.get("hidden_states")
    return named if isinstance(named, torch.Tensor) else next(tensors_within((args, kwargs)), None)


def argument_storages(args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[torch.UntypedStorage]:
    """Returns the storages of a layer call's arguments other than its hidden states (`layer_input`)."""
    if not kwargs and args and all(value is None for value in args[1:]):
        return set()
    found = tensors_within((kwargs["hidden_states"], args, kwargs) if "hidden_states" in kwargs else (args, kwargs))
    locals_ = [local_part(tensor) for tensor in found]
    storages = [tensor.untyped_storage() if is_plain(tensor) else None for tensor in locals_]
    return {storage for storage in storages[1:] if storage is not None} - {*storages[:1]}


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested arguments or results, in order."""
    return (leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor))


def has_storage(tensor: torch.Tensor) -> bool:
    """True for a strided tensor or parameter with a storage of its own; the bytes of other tensors are not compared."""
    return type(tensor) in (torch.Tensor, Parameter) and tensor.layout is torch.strided and not tensor.is_nested
