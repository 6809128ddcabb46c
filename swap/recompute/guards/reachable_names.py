"""Objects outside a layer that its forward names, itself or through functions that it calls, and where it may keep state.

Found once for each class of modules, by reading code and not by running it: globals, attributes of classes, of files
and of objects, as far as functions lead that are not Python's, NumPy's or torch's. It owns where to look, and not what
is found there (side_effects.py). A function that is reached otherwise (by getattr, out of a table) is not found.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from memo.swap.recompute.record.memoized import is_memoized

__all__ = ["named_by"]

_Place = tuple[Mapping[str, Any], str]
"""A namespace and a name in it, for what is there may be replaced."""

_LIBRARIES = sys.stdlib_module_names | {"torch", "memo", "numpy"}
_MOST_FUNCTIONS = 500  # of one class


@functools.lru_cache(1_000)  # classes, which a program may make as it runs
def named_by(kind: type[nn.Module]) -> tuple[_Place, ...]:
    """The places that the forward of a class of modules names, and the attributes of the class."""
    if _is_librarys(kind):
        return ()
    places: dict[tuple[int, str], _Place] = {}
    functions: dict[types.FunctionType, None] = {}
    own = [base for base in kind.__mro__ if not _is_librarys(base)]
    waiting = [function for base in own if (function := _function(vars(base).get("forward"))) is not None]
    for base in own:
        places |= {(id(base), name): (vars(base), name) for name in vars(base)}
    while waiting and len(functions) < _MOST_FUNCTIONS:
        function = waiting.pop()
        if function in functions or _is_librarys(function):
            continue
        functions[function] = None
        names = set(_names(function.__code__))
        spaces: list[Mapping[str, Any]] = [function.__globals__]
        spaces += [space for name in names for space in _spaces_of(function.__globals__.get(name))]
        for space in spaces:
            places |= {(id(space), name): (space, name) for name in names if name in space}
        for space in (*spaces, *map(vars, own)):
            waiting += [found for name in names if (found := _function(space.get(name))) is not None]
    return tuple((space, name) for space, name in places.values() if _may_keep(space[name]))


def _may_keep(value: object) -> bool:
    """False for what holds nothing that a forward might change: most functions, classes and files."""
    if isinstance(value, types.FunctionType):
        return bool(value.__closure__ or value.__defaults__ or value.__kwdefaults__ or vars(value))
    return not isinstance(
        value, (type, types.ModuleType, types.BuiltinFunctionType, property, staticmethod, classmethod)
    )


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _spaces_of(value: object) -> list[Mapping[str, Any]]:
    """Namespaces of a module, a class or an instance; none for those of a library."""
    if isinstance(value, types.ModuleType):
        return [] if value.__name__.split(".")[0] in _LIBRARIES else [vars(value)]
    kind = value if isinstance(value, type) else type(value)
    if isinstance(value, types.FunctionType) or _is_librarys(kind):
        return []
    return [vars(base) for base in kind.__mro__ if not _is_librarys(base)]


def _function(value: object) -> types.FunctionType | None:
    """The function behind what a name stands for; none behind a memoized one."""
    value = value.__func__ if isinstance(value, (staticmethod, classmethod, types.MethodType)) else value
    value = inspect.unwrap(value, stop=is_memoized) if callable(value) else value
    return value if isinstance(value, types.FunctionType) and not is_memoized(value) else None


def _is_librarys(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "builtins").split(".")[0] in _LIBRARIES
