"""Forward hooks that belong to one module alone: its copies and files are those of a module without them.

Owns the type of these hooks, and how `copy` and `pickle` reduce classes whose modules have had some. A
class that copies or pickles its own hooks, as torch.fx.GraphModule, gets ones that do nothing and need no memo.
"""

from __future__ import annotations

import contextlib
import copyreg
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

_TABLES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Tables of hooks, and of their flags by the same numbers."""


def own_hook(module: nn.Module, call: Callable[..., None]) -> Callable[..., None]:
    """A forward hook or pre-hook of a module that calls `call`; the caller registers it."""
    reduction = _reductions.get(type(module))
    if reduction is None:
        reduction = _reductions[type(module)] = _Reduction(type(module))
    return _Hook(call, reduction)


class _Reduction:
    """Has `copy` and `pickle` reduce modules of a class by `_reduced`, while some of them have hooks of ours."""

    _kind: type[nn.Module] | None = None  # an interruption may leave no other

    def __init__(self, kind: type[nn.Module]) -> None:
        self._kind = kind
        copyreg.dispatch_table.setdefault(kind, _reduced)

    def __del__(self) -> None:
        kind = self._kind
        is_latest = kind is not None and _reductions.get(kind) in (self, None)
        if is_latest and copyreg.dispatch_table.get(kind) is _reduced:  # type: ignore[arg-type]
            del copyreg.dispatch_table[kind]  # type: ignore[arg-type]


_reductions: weakref.WeakValueDictionary[type[nn.Module], _Reduction] = weakref.WeakValueDictionary()
"""Class of hooked modules -> its reduction, which these hooks hold."""


class _Hook:
    def __init__(self, call: Callable[..., None], reduction: _Reduction) -> None:
        self._call, self._reduction = call, reduction

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes anything and returns None


def _reduced(module: nn.Module) -> Any:
    """Reduces a module as without `copyreg`, less our hooks."""
    reduced: Any = module.__reduce_ex__(2)
    if len(reduced) < 3 or not isinstance(reduced[2], dict):  # a class with a reduction of its own
        return reduced
    make, args, state, *rest = reduced
    tables = {name: state[name] for name in _TABLES if name in state}
    ours = {number for table in tables.values() for number, hook in table.items() if isinstance(hook, _Hook)}
    if not ours:
        return reduced
    left = {name: OrderedDict(item for item in table.items() if item[0] not in ours) for name, table in tables.items()}
    return make, args, state | left, *rest
