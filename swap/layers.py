"""Repeated layers of a model, the unit of offload: how they are found, and hooks around their forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.hooks import RemovableHandle

from memo.errors import NoRepeatedLayers, UsageError
from memo.module_hooks import own_hook
from memo.torch_private import (
    TransformType,
    get_interpreter_stack,
    get_tracing_state,
    is_fx_symbolic_tracing,
    peek_interpreter_stack,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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
            such stacks. Where there are none, composite children of one class in a ModuleDict or under numbered names, as
            `layer1` and `layer2`.

    Raises:
        NoRepeatedLayers: there are none.
        UsageError: a module in `wanted` is not part of the model.
    """
    names = {module: name for name, module in model.named_modules()}
    stacks: list[list[nn.Module]]
    if wanted is None:
        stacks = _stacks(model)
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


def _stacks(model: nn.Module) -> list[list[nn.Module]]:
    """The first kind of stacks of which there are any."""
    kinds = (_lists_of_layers, _named_layers, _lists)
    return next(filter(None, (list(_outermost(model, set(), kind)) for kind in kinds)), [])


def _outermost(
    module: nn.Module, seen: set[nn.Module], stacks_of: Callable[[nn.Module], dict[str, list[nn.Module]]]
) -> Iterator[list[nn.Module]]:
    """Stacks that are in no other, each once, under whatever names it has."""
    stacks = stacks_of(module)
    for name, child in module.named_children():
        stack = stacks.get(name)
        if stack is None and child not in seen:
            seen.add(child)
            yield from _outermost(child, seen, stacks_of)
        elif stack is not None and not seen.issuperset(stack):
            seen.update(stack)
            yield stack


def _lists_of_layers(module: nn.Module) -> dict[str, list[nn.Module]]:
    """Lists, but not those of torch.nn's own operations, such as an output projection for each codebook."""
    return {
        name: stack
        for name, stack in _lists(module).items()
        if any(_has_parts(child) or not type(child).__module__.startswith("torch.nn.") for child in _repeated(stack))
    }


def _lists(module: nn.Module) -> dict[str, list[nn.Module]]:
    """Stacks that are lists. A Sequential of plain operations (Linear, GELU) is none: it is the inside of a layer."""
    found = {}
    for name, child in module.named_children():
        repeated = _repeated(child.children())
        if (isinstance(child, nn.ModuleList) and repeated) or (
            isinstance(child, nn.Sequential) and any(map(_has_parts, repeated))
        ):
            found[name] = list(child.children())
    return found


def _named_layers(module: nn.Module) -> dict[str, list[nn.Module]]:
    """Composite modules of one class in a ModuleDict, or under numbered names, as `layer1` and `layer2`."""
    groups: dict[tuple[str, type[nn.Module]], dict[str, nn.Module]] = {}
    found: dict[str, list[nn.Module]] = {}
    for name, child in module.named_children():
        stem = name.rstrip("0123456789")
        if 0 < len(stem) < len(name) and _has_parts(child):
            groups.setdefault((stem, type(child)), {})[name] = child
        if isinstance(child, nn.ModuleDict) and len(child) > 1 and len(_repeated(child.children())) == len(child):
            found |= {name: list(child.children())} if all(map(_has_parts, child.children())) else {}
    return found | {name: list(group.values()) for group in groups.values() if len(group) > 1 for name in group}


def _repeated(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules whose class another one of them has."""
    modules = list(modules)
    kinds = [type(module) for module in modules]
    return [module for module in modules if kinds.count(type(module)) >= 2]


def _has_parts(module: nn.Module) -> bool:
    return any(module.children())


def is_gathered_whole(module: nn.Module) -> bool:
    """True for a layer that is a leaf of ZeRO-3: all of its parameters are gathered before its forward and its backward.

    DeepSpeed's `set_z3_leaf_modules` marks it. Each time the parameters are in other memory.
    """
    return bool(getattr(module, "_z3_leaf", False))


def is_transformed() -> bool:
    """True within a transform of torch.func, `vmap` included, whose tensors have no bytes of their own."""
    return peek_interpreter_stack() is not None


def runs_as_written() -> bool:
    """False where torch traces the running module, or torch.func differentiates it: such calls are left alone.

    Their tensors may be symbols, and `grad`, `vjp` and `jacrev` allow no hooks for saved tensors; `vmap` and `jvp` do.
    Within `allow_mutation_on_saved_tensors` torch keeps copies of what was saved, by hooks of its own.
    """
    return not (
        torch.compiler.is_compiling()  # also torch.export; first, since Dynamo knows it and nothing below
        or any(level.key() not in _KEEP_HOOKS for level in get_interpreter_stack() or ())
        or get_tracing_state() is not None  # torch.jit.trace
        or get_proxy_mode() is not None
        or is_fx_symbolic_tracing()
        or torch.autograd.graph._allow_mutation_on_saved_tensors_enabled
    )


_KEEP_HOOKS = (TransformType.Vmap, TransformType.Jvp)
"""Transforms below which autograd saves plain tensors by hooks, as without them."""


class LayerHook(Protocol):
    """Hooks around a module's forward, in place between `install` and `remove`."""

    def install(self) -> None:
        """Puts the hooks in place; once."""

    def remove(self) -> None:
        """Removes what is in place of the hooks, also where `install` was interrupted. Idempotent."""


def hook_forward(module: nn.Module, begin: _Begin, end: _End, *, outermost: bool = False) -> LayerHook:
    """Hooks that call `begin` before each forward of a module and `end` after it, also after an exception.

    The forward hooks of a layer compiled by `layer.compile()` would be compiled with it, which is an error where it must be
    one graph. There the hook wraps the compiled call.

    Args:
        module: the layer.
        begin: called with (module, args, kwargs), after the module's other pre-hooks.
        end: called with (module, args, output), before its other forward hooks: a recompute tried in it finds the layer's
            parameters still gathered. Output is None after an exception.
        outermost: `begin` is called before the other pre-hooks, so that `end` is called also where one of them raises.

    Returns:
        The hooks, not in place yet.
    """
    if module._compiled_call_impl is not None:
        return _CompiledHook(module, begin, end)
    return _ModuleHooks(module, begin, end, outermost=outermost)


class _ModuleHooks:
    """A forward pre-hook and a forward hook of one module.

    They are written into torch's tables under numbers chosen in advance: `remove` finds them wherever an interruption has
    cut `install` or `remove`.
    """

    def __init__(self, module: nn.Module, begin: _Begin, end: _End, *, outermost: bool) -> None:
        self._module = module
        self._hooks = own_hook(module, begin), own_hook(module, end)
        self._outermost = outermost
        self._numbers = _NUMBERS.get(module) or _NUMBERS.setdefault(module, _new_numbers(module))

    def install(self) -> None:
        (before, *_), (after, *_) = tables = self._tables()
        if self._numbers[0] in before or self._numbers[1] in after:
            self._numbers = _new_numbers(self._module)  # those are another manager's
        for number, hook, (table, mark) in zip(self._numbers, self._hooks, tables, strict=True):
            mark[number] = True
            table[number] = hook
        after.move_to_end(self._numbers[1], last=False)
        if self._outermost:
            before.move_to_end(self._numbers[0], last=False)

    def remove(self) -> None:
        for number, hook, (table, mark) in zip(self._numbers, self._hooks, self._tables(), strict=True):
            if table.get(number, hook) is hook:
                table.pop(number, None)
                mark.pop(number, None)

    def _tables(self) -> tuple[list[Any], list[Any]]:
        """For each hook, torch's table of hooks and the table of its flag."""
        module = self._module
        return (
            [module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs],
            [module._forward_hooks, module._forward_hooks_always_called],
        )


_NUMBERS: WeakKeyDictionary[nn.Module, tuple[int, int]] = WeakKeyDictionary()
"""Numbers under which a layer's hooks are registered again in each forward. A model that was compiled as a whole guards on
them, and would be compiled anew for others.
"""


def _new_numbers(module: nn.Module) -> tuple[int, int]:
    return RemovableHandle(module._forward_pre_hooks).id, RemovableHandle(module._forward_hooks).id


class _CompiledHook:
    """Replaces the compiled call of a layer until it is removed."""

    def __init__(self, module: nn.Module, begin: _Begin, end: _End) -> None:
        self._module = module
        self._begin = begin
        self._end = end
        self._compiled = module._compiled_call_impl
        self._installed = self._call
        self._is_removed = False

    def install(self) -> None:
        self._compiled = self._module._compiled_call_impl
        self._module._compiled_call_impl = self._installed

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        assert self._compiled is not None
        if self._is_removed:
            return self._compiled(*args, **kwargs)
        output = None
        try:
            self._begin(self._module, args, kwargs)
            output = self._compiled(*args, **kwargs)
            return output
        finally:
            self._end(self._module, args, output)

    def remove(self) -> None:
        """Restores the compiled call; where another wrapper replaced this one meanwhile, it only becomes a pass-through."""
        self._is_removed = True
        if self._module._compiled_call_impl is self._installed:
            self._module._compiled_call_impl = self._compiled
