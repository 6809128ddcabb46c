"""Repeated layers of a model, the unit of offload: how they are found, and hooks around their forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle

from memo.errors import NoRepeatedLayers, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Layer", "LayerHook", "find_layers", "hook_forward", "is_gathered_whole"]

_Begin = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
_End = Callable[[nn.Module, object, object], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One repeated layer of a model."""

    module: nn.Module
    name: str
    last: bool
    """Last of its stack: backward usually begins with it at once, so its copies out wait until another layer follows."""


def find_layers(
    model: nn.Module, wanted: nn.ModuleList | Sequence[nn.Module] | type[nn.Module] | None = None
) -> list[Layer]:
    """Finds the layers of `model`, in definition order.

    Args:
        model: the model; it is not changed.
        wanted: the layers as a ModuleList, a list of modules, or a class. None: the children of every outermost ModuleList
            with at least two children of one class, or Sequential of such composite children; an encoder-decoder has two
            such stacks.

    Raises:
        NoRepeatedLayers: there are none.
        UsageError: a module in `wanted` is not part of the model.
    """
    names = {module: name for name, module in model.named_modules()}
    stacks: list[list[nn.Module]]
    if wanted is None:
        stacks = list(_stacks(model))
    elif isinstance(wanted, type):
        stacks = [[module for module in names if isinstance(module, wanted)]]
    else:
        stacks = [list(dict.fromkeys(wanted))]  # a module that is used twice is one layer
    layers = [
        Layer(module=module, name=_name(names, module), last=module is stack[-1])
        for stack in stacks
        for module in stack
    ]
    if not layers:
        raise NoRepeatedLayers(_none_found(model, wanted))
    return layers


def _none_found(model: nn.Module, wanted: object) -> str:
    if isinstance(wanted, type):
        return f"layers: no module of {type(model).__name__} is a {wanted.__name__}"
    if wanted is not None:
        return "layers: the list is empty; leave it out to have them found, or name some"
    return (
        f"no repeated layers found in {type(model).__name__}: no ModuleList with two or more children of one class; "
        f"name them: memo.offload(model, layers=[...])"
    )


def _name(names: dict[nn.Module, str], module: nn.Module) -> str:
    if module not in names:
        raise UsageError(f"layers: {type(module).__name__} is not a part of the model")
    return names[module] or type(module).__name__


def _stacks(module: nn.Module) -> Iterator[list[nn.Module]]:
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and _repeats(child):
            yield list(child.children())
        else:
            yield from _stacks(child)


def _repeats(stack: nn.Module) -> bool:
    kinds = [type(child) for child in stack.children()]
    repeated = {kind for kind in kinds if kinds.count(kind) >= 2}
    if isinstance(stack, nn.ModuleList):
        return bool(repeated)
    # A Sequential of plain operations (Linear, GELU, Linear) is the inside of one layer, not a stack of layers.
    return any(type(child) in repeated and any(child.children()) for child in stack.children())


def is_gathered_whole(module: nn.Module) -> bool:
    """True for a layer that is a leaf of ZeRO-3: all of its parameters are gathered before its forward and its backward.

    DeepSpeed's `set_z3_leaf_modules` marks it. Each time the parameters are in other memory.
    """
    return bool(getattr(module, "_z3_leaf", False))


class LayerHook(Protocol):
    """A removable hook around a layer's forward."""

    def remove(self) -> None:
        """Removes the hook."""


def hook_forward(module: nn.Module, begin: _Begin, end: _End) -> list[LayerHook]:
    """Calls `begin` before each forward of a layer and `end` after it, also after an exception.

    The forward hooks of a layer compiled by `layer.compile()` would be compiled with it, which is an error where it must be
    one graph. There the hook wraps the compiled call.

    Args:
        module: the layer.
        begin: called with (module, args, kwargs).
        end: called with (module, args, output); output is None after an exception.

    Returns:
        The hooks, to be removed by the caller.
    """
    if module._compiled_call_impl is not None:
        return [_CompiledHook(module, begin, end)]
    hooks = [
        module.register_forward_pre_hook(begin, with_kwargs=True),
        # First of the forward hooks, as the pre-hook is the last: a recompute tried out in `end` still finds the layer as
        # its forward did, with its parameters gathered.
        module.register_forward_hook(end, always_call=True, prepend=True),
    ]
    for hook, number in zip(hooks, _NUMBERS.setdefault(module, [hook.id for hook in hooks]), strict=True):
        _renumber(hook, number)
    return [*hooks]


_NUMBERS: WeakKeyDictionary[nn.Module, list[int]] = WeakKeyDictionary()
"""Numbers under which a layer's hooks are registered again in each forward. A model that was compiled as a whole guards on
them, and would be compiled anew for others.
"""


def _renumber(hook: RemovableHandle, number: int) -> None:
    hooks = hook.hooks_dict_ref()
    if hooks is None or number in hooks:  # of another manager
        return
    first = hook.id == next(iter(hooks))
    for table in (hooks, *(found for known in hook.extra_dict_ref if (found := known()) is not None)):
        if hook.id in table:
            table[number] = table.pop(hook.id)
    if first:
        hooks.move_to_end(number, last=False)
    hook.id = number


class _CompiledHook:
    """Replaces the compiled call of a layer until it is removed."""

    def __init__(self, module: nn.Module, begin: _Begin, end: _End) -> None:
        self._module = module
        self._begin = begin
        self._end = end
        self._compiled = module._compiled_call_impl
        self._is_removed = False
        module._compiled_call_impl = self._installed = self._call

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        assert self._compiled is not None
        if self._is_removed:
            return self._compiled(*args, **kwargs)
        self._begin(self._module, args, kwargs)
        output = None
        try:
            output = self._compiled(*args, **kwargs)
            return output
        finally:
            self._end(self._module, args, output)

    def remove(self) -> None:
        """Restores the compiled call; where another wrapper replaced this one meanwhile, it only becomes a pass-through."""
        self._is_removed = True
        if self._module._compiled_call_impl is self._installed:
            self._module._compiled_call_impl = self._compiled
