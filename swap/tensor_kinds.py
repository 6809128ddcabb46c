"""Which saved tensors may move at all (rule R3), and what of a layer call they belong to.

A sharded tensor (DTensor) is its local part: its own storage is a fake that has no address. Never moved: parameters,
their views and autocast's casts of them; the storages of a layer's other arguments and of the model's buffers; small
storages; tensors of another device, sparse, quantised or conjugated tensors, those with tangents and other subclasses.
What does not move is kept by reference, so a wrong answer here costs memory and never a gradient.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = [
    "are_wrapped",
    "argument_storages",
    "cast_of_parameter",
    "has_hidden_state",
    "has_storage",
    "is_plain",
    "is_sharded",
    "layer_input",
    "local_part",
    "view_of_parameter",
]

# Nodes that change how a parameter is seen and not what it holds. The walk stops at the first other node.
_SEEN_THROUGH = frozenset(
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
        "UnsafeViewBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
        # What a rank holds of a sharded parameter: torch's DTensor.to_local, and memo.parallel's copy_in after it.
        "_CopyInBackward",
        "_ToTorchTensorBackward",
    }
)
_LEAF = "torch::autograd::AccumulateGrad"
_MAX_HOPS = 6


def is_plain(tensor: torch.Tensor) -> bool:
    """True for an ordinary strided tensor whose storage is all there is to it."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not has_hidden_state(tensor)


def has_hidden_state(tensor: torch.Tensor) -> bool:
    """True where bytes, shape and strides are not the whole truth: a pending conjugation or negation, a quantiser, a
    list of tensors under one, zeros without memory, maybe a tangent of forward-mode differentiation."""
    return (
        tensor.is_conj()
        or tensor.is_neg()
        or tensor.is_quantized
        or tensor.is_nested
        or tensor._is_zerotensor()
        or forward_ad._current_level >= 0
    )


def is_sharded(tensor: torch.Tensor) -> bool:
    """True for a DTensor. Asks without importing torch.distributed, which a run without it need not load."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def are_wrapped(types: Iterable[type]) -> bool:
    """Whether a DTensor or a collective's result still under way is of these types: both have code of their own for
    operators, which calls them again on what is under it."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    return any(issubclass(kind, module.DTensor) or hasattr(kind, "trigger_wait") for kind in types)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor under a DTensor or a collective's result still under way, which is waited for."""
    if type(tensor) is torch.Tensor:
        return tensor
    if is_sharded(tensor):
        tensor = tensor._local_tensor  # type: ignore[attr-defined]
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def view_of_parameter(tensor: torch.Tensor) -> bool:
    """True for a view of a parameter: `nn.Linear` saves `weight.t()`, which is no Parameter itself."""
    base = tensor._base
    return base is not None and isinstance(base, Parameter)


def never_moves(tensor: torch.Tensor) -> bool:
    """True for a plain strided tensor that is seen through a parameter, or is more than its bytes."""
    base = tensor._base
    if (
        base is not None and type(base) is not torch.Tensor and isinstance(base, Parameter)
    ):  # the exact type is asked first:
        return True  # being a Parameter is decided in Python
    return has_hidden_state(tensor)


def cast_of_parameter(tensor: torch.Tensor) -> bool:
    """True for autocast's low-precision copy of a parameter, for a rank's part of it, and for views of either.

    Found by walking back to the leaf.
    """
    node: Any = tensor.grad_fn
    for _ in range(_MAX_HOPS):
        if node is None:
            return False
        name = node.name()
        if name not in _SEEN_THROUGH:
            return name == _LEAF and isinstance(node.variable, Parameter)
        node = node.next_functions[0][0]
    return False


def layer_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """A layer call's hidden states: `hidden_states` by name, else the first tensor."""
    named = kwargs.get("hidden_states")
    return named if isinstance(named, torch.Tensor) else next(_tensors((args, kwargs)), None)


def argument_storages(args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[torch.UntypedStorage]:
    """Storages of a layer call's arguments other than its hidden states (the first tensor, or `hidden_states`)."""
    if not kwargs and args and all(value is None for value in args[1:]):
        return set()
    found = _tensors((kwargs["hidden_states"], args, kwargs) if "hidden_states" in kwargs else (args, kwargs))
    locals_ = [local_part(tensor) for tensor in found]
    storages = [tensor.untyped_storage() if is_plain(tensor) else None for tensor in locals_]
    return {storage for storage in storages[1:] if storage is not None} - {*storages[:1]}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def has_storage(tensor: torch.Tensor) -> bool:
    """True where a tensor's own bytes are all of it; of the others nothing is compared but the operators."""
    return type(tensor) in (torch.Tensor, Parameter) and tensor.layout is torch.strided and not tensor.is_nested
