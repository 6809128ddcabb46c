"""State of a layer's modules that a recompute depends on: parameters, buffers, plain attributes, hooks.

`ModuleState` records it in forward and compares it in backward; nothing here restores it. Tensors are compared by
version counter, plain attributes by value.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.modules.module as torch_modules
from torch import nn

from memo.errors import ModifiedAfterSave
from memo.swap.engine.saved_storage import version_of
from memo.swap.tensor_kinds import is_sharded

__all__ = ["ModuleState", "has_others", "hooks_within", "modules_of", "parameters_of"]


def has_others(module: torch.nn.Module, own: Sequence[torch.Tensor]) -> bool:
    """True while a layer has other parameters than `own`, as within torch.func.functional_call.

    A sharded parameter does not count: it is replaced while it is gathered, in forward and in backward.
    """
    now = parameters_of(module)
    return len(now) != len(own) or any(a is not b and not is_sharded(b) for a, b in zip(now, own, strict=True))


# What an attribute may be to be compared: a value that cannot change in place. Others (a list, a configuration object)
# are not watched.
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})


def modules_of(module: nn.Module) -> list[nn.Module]:
    """The module and its descendants, each once; three times as fast as `module.modules()`, which builds names."""
    found = [module]
    known = {module}
    for parent in found:
        for child in parent._modules.values():
            if child is not None and child not in known:
                known.add(child)
                found.append(child)
    return found


def parameters_of(module: nn.Module) -> list[torch.Tensor]:
    """Parameters of the module and its descendants; a shared one appears once for each module that has it."""
    every = [parameter for child in modules_of(module) for parameter in child._parameters.values()]
    return [parameter for parameter in every if parameter is not None]


def hooks_within(module: nn.Module) -> str | None:
    """Description of the hooks that a recompute of the layer would call again; None where there are none.

    Hooks on the layer itself run around its forward, which alone is repeated.
    """
    if _has_hooks_of_others(torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks):
        return "hooks on all modules"
    for child in modules_of(module):
        if child is not module and _has_hooks_of_others(child._forward_hooks, child._forward_pre_hooks):
            return "hooks on its modules"
    return None


def _has_hooks_of_others(*hooks: Mapping[int, Any]) -> bool:
    """True for a hook that may have side effects: any but torch's and memo's own, which only transform their input."""
    for hook in itertools.chain.from_iterable(some.values() for some in hooks if some):
        module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
        if module.split(".")[0] not in ("torch", "memo"):
            return True
    return False


class ModuleState:
    """Parameters, buffers and plain attributes of a layer's modules at construction."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tensors = [
            (tensor, version_of(tensor))
            for child in modules_of(module)
            for tensor in (*child._parameters.values(), *child._buffers.values())
            if tensor is not None
        ]
        self._attributes = _attributes(module)

    def check(self, name: str) -> None:
        """Compares the state with the recorded one, before a recompute.

        Raises:
            ModifiedAfterSave: a tensor or an attribute has changed, or hooks were added; nothing was run.
        """
        for tensor, version in self._tensors:
            if version_of(tensor) != version:
                raise ModifiedAfterSave(
                    f"a parameter or buffer of {name} of shape {tuple(tensor.shape)} was changed in place before"
                    " backward recomputed the layer; step the optimizer after backward"
                )
        changed = self.changed_attribute()
        if changed is not None:
            raise ModifiedAfterSave(
                f"{changed} of {name} was changed before backward recomputed the layer, which would compute something"
                " else now; change it after backward"
            )
        hooks = hooks_within(self._module)
        if hooks is not None:
            raise ModifiedAfterSave(
                f"{name} cannot be computed again in backward: {hooks} would be called again; put them there after backward"
            )

    def changed_tensor(self) -> torch.Tensor | None:
        """The first parameter or buffer that was changed in place."""
        return next((tensor for tensor, version in self._tensors if version_of(tensor) != version), None)

    def changed_attribute(self) -> str | None:
        """Name of the first plain attribute that has changed."""
        now = _attributes(self._module)
        if now == self._attributes:
            return None
        return _first_difference(self._attributes, now)


_Attributes = list[tuple[int, dict[str, object]]]
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _attributes(module: nn.Module) -> _Attributes:
    return [(id(child), _own(vars(child))) for child in modules_of(module)]


def _own(every: dict[str, object]) -> dict[str, object]:
    """Plain attributes of the module's own class, and `training` of those that every module has."""
    own: dict[str, object] = {"training": every["training"]}
    for name in every.keys() - _OF_EVERY_MODULE:
        if type(every[name]) in _PLAIN:
            own[name] = every[name]
    return own


def _first_difference(before: _Attributes, now: _Attributes) -> str:
    for (was, ours), (is_, theirs) in zip(before, now, strict=False):
        if was != is_:
            break
        for name in ours.keys() | theirs.keys():
            if name not in ours or name not in theirs or not _same(ours[name], theirs[name]):
                return f"attribute {name!r} of a module"
    return "the set of modules"


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other
