"""Rules of the torch functions that deferred logits pass through without being computed.

A rule takes the deferred logits and the function's arguments, and returns the result, or NotImplemented where it needs
the elements. Functions of rows (shift, slice, flatten) are applied to the hidden states; element-wise functions are
recorded (memo.loss.logit_transform).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import GetSetDescriptorType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from memo.loss.chunked_cross_entropy import IGNORE
from memo.loss.logit_transform import DIVISIONS
from memo.torch_private import parse_to

if TYPE_CHECKING:
    from memo.loss.deferred_logits import DeferredLogits


def by_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """Result of `func` for deferred logits as its first argument, or NotImplemented."""
    rule = _RULES.get(getattr(func, "__name__", ""))
    if rule is None:
        return NotImplemented
    try:
        inspect.signature(rule).bind(func, *args, **kwargs)
    except TypeError:  # arguments that the rule does not know
        return NotImplemented
    return rule(func, *args, **kwargs)


def _by_number(func: Any, logits: DeferredLogits, number: Any) -> Any:
    if type(number) not in (int, float) or (number == 0 and func.__name__ in DIVISIONS):
        return NotImplemented
    return logits.recorded(func, number)


def _tanh(func: Any, logits: DeferredLogits) -> Any:
    return logits.recorded(func)


def _add(func: Any, logits: DeferredLogits, other: Any) -> Any:
    """Records a bias that needs no gradient, as the first function, for a projection that is not divided."""
    projection = logits.product.projection
    own: Tensor | None = projection.bias
    if logits.steps.functions or own is not None or isinstance(projection.weight, DTensor):
        return NotImplemented
    if type(other) is not Tensor or other.requires_grad:
        return NotImplemented
    if other.shape[-1:] != logits.shape[-1:] or other.numel() != logits.shape[-1] or other.device != logits.device:
        return NotImplemented
    dtype = torch.promote_types(logits.dtype, other.dtype)
    return logits.recorded(func, other.clone(), dtype=dtype)


_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


def _cast(func: Any, logits: DeferredLogits) -> Any:
    return _to(func, logits, _CASTS[func.__name__])


def _to(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    try:
        device, dtype, _, layout = parse_to(*args, **kwargs)
    except (TypeError, RuntimeError):  # a copy, or a cast to integers
        return NotImplemented
    if layout is not None or (device is not None and torch.empty(0, device=device).device != logits.device):
        return NotImplemented
    if dtype is None or dtype == logits.dtype:
        return logits
    return logits.recorded(Tensor.to, dtype, dtype=dtype)


def _same(func: Any, logits: DeferredLogits) -> Any:
    return logits


def _clone(func: Any, logits: DeferredLogits) -> Any:
    """Deferred, too, where no graph is recorded, as in DDP's node around the outputs."""
    return NotImplemented if torch.is_grad_enabled() else logits.copy()


def _detach(func: Any, logits: DeferredLogits) -> Any:
    with torch.no_grad():
        return logits.rows(logits.hidden.detach(), Tensor.detach)


def _view(func: Any, logits: DeferredLogits, *sizes: Any) -> Any:
    """Views the rows; a last dimension of the vocabulary's size is the vocabulary, since elements keep their order."""
    shape = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    if not shape or shape[-1] != logits.shape[-1]:
        return NotImplemented
    hidden = logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1])
    return logits.rows(hidden, lambda whole: func(whole, *sizes))


def _flatten(func: Any, logits: DeferredLogits, start: int = 0, end: int = -1) -> Any:
    first, last = (at % logits.ndim for at in (start, end))
    if last == logits.ndim - 1:
        return NotImplemented
    return logits.rows(logits.hidden.flatten(first, last), lambda whole: func(whole, start, end))


def _getitem(func: Any, logits: DeferredLogits, index: Any) -> Any:
    """Indexes rows by slices and integers, with the whole vocabulary."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or type(part) in (int, slice) for part in parts) or parts.count(Ellipsis) > 1:
        return NotImplemented
    at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    left, right = parts[:at], parts[at + 1 :]
    every = (*left, *(slice(None),) * (logits.ndim - len(left) - len(right)), *right)
    if len(every) != logits.ndim or every[-1] != slice(None):
        return NotImplemented
    return logits.rows(logits.hidden[every[:-1]], lambda whole: whole[index])


def _cross_entropy(
    func: Any,
    logits: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORE,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    usual = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    one_each = logits.ndim == 2 and target.dtype == torch.int64 and target.shape == logits.shape[:1]
    if not usual or not one_each or reduction not in ("mean", "sum"):
        return NotImplemented
    return logits.cross_entropy(target, reduction=reduction, ignore_index=ignore_index)


_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_CASTS, _cast),
    **dict.fromkeys((*DIVISIONS, "mul", "multiply"), _by_number),
    **dict.fromkeys(("view", "reshape"), _view),
    "flatten": _flatten,
    "add": _add,
    "tanh": _tanh,
    "to": _to,
    "contiguous": _same,
    "clone": _clone,
    "detach": _detach,
    "__getitem__": _getitem,
    "cross_entropy": _cross_entropy,
}

_READING = ("data", "real", "imag", "T", "mT", "H", "mH")
_PROPERTIES = [
    name for name in dir(Tensor) if isinstance(getattr(Tensor, name), GetSetDescriptorType) and name not in _READING
]
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "stride",
    "is_contiguous", "is_floating_point", "is_complex", "is_signed", "element_size", "get_device",
    "is_inference", "_is_view", "register_hook", "retain_grad", "__len__", "__hash__", "__dir__",
)  # fmt: skip

# Functions and properties of a tensor that do not read its elements.
WITHOUT_ELEMENTS = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(Tensor, name) for name in _METHODS),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
