"""Detects side effects of a forward on objects that its layer's modules hold or name (lists, dicts, generators).

A forward may leave results behind (a router's loss, a list of features). A recompute, and already its trial, would
leave another one, of some of the tokens only and with a graph that must not be used. Plain attributes are watched by
module_state.py, until backward; this looks from a forward's begin to its end, into containers, objects and random
generators, and at objects that the modules' classes and their forwards name (reachable_names.py). Not seen: what a
forward changes in another module, or where none of these leads; and what a memoized function keeps, which no division
runs again.
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import random
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from memo.swap.recompute.guards.module_state import modules_of
from memo.swap.recompute.guards.reachable_names import named_by
from memo.swap.recompute.record.memoized import is_memoized

__all__ = ["SideEffects"]

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_COMPARED_BY_VALUE = frozenset({type(None), bool, int, float, complex, str, bytes})
_EMPTY_CELL = types.CellType()
_CONTAINERS = (list, tuple, dict, set, collections.deque)
_LEAVES = (torch.Tensor, nn.Module, type, types.ModuleType)

# How far to look: what a layer keeps books in is flat, and a data set is not a layer's to hold.
_DEPTH = 4
_MOST_THINGS = 10_000


class SideEffects:
    """Objects held by a layer's modules, as they are at construction."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = list(_objects_held(module))

    def changed(self) -> str | None:
        """The first that is another now."""
        now = list(_objects_held(self._module))
        if len(now) != len(self._before):
            return "the set of its modules' attributes"
        for (name, held), (_, holds) in zip(self._before, now, strict=True):
            if len(held) != len(holds) or not all(map(_same, held, holds)):
                return name
        return None


def _objects_held(module: nn.Module) -> Iterator[tuple[str, list[Any]]]:
    """Name of each attribute, its value and what is in it; and so for what is not held but named."""
    seen: set[int] = set()
    kinds: dict[type, None] = {}
    for child in modules_of(module):
        kinds[type(child)] = None
        for name, value in vars(child).items():
            if name not in _OF_EVERY_MODULE and type(value) not in _COMPARED_BY_VALUE:
                yield f"attribute {name!r} of a module", _things(value, seen)
    for kind in kinds:
        for space, name in named_by(kind):
            value = space.get(name)
            if (
                type(value) in _COMPARED_BY_VALUE
                or isinstance(value, (*_CONTAINERS, types.FunctionType))
                or _is_own(value)
            ):
                yield f"{name!r} of its class or its file", _things(value, seen)


def _things(value: Any, seen: set[int]) -> list[Any]:
    if type(value) in _COMPARED_BY_VALUE:
        return [value]
    return list(itertools.islice(_walk(value, _DEPTH, seen), _MOST_THINGS))


def _walk(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    yield value
    if depth and type(value) not in _COMPARED_BY_VALUE and id(value) not in seen:
        seen.add(id(value))
        for item in _contents(value):
            yield from _walk(item, depth - 1, seen)


def _contents(value: Any) -> Iterable[Any]:
    """Contents of a container, an object or a random generator; none for torch's objects and memo's."""
    if isinstance(value, _LEAVES):
        return ()
    if isinstance(value, _CONTAINERS):
        return list(value.values() if isinstance(value, dict) else value)
    if isinstance(value, random.Random):
        _, words, gauss = value.getstate()
        return words[0], words[-1], gauss
    if isinstance(value, itertools.count):
        return (repr(value),)
    if isinstance(value, types.FunctionType):
        return () if is_memoized(value) else _state_of(value)
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return () if frame is None else (frame.f_lasti, *frame.f_locals.values())
    if isinstance(value, Iterator) and type(value).__module__ == "builtins":
        return (operator.length_hint(value),)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
        return _stand(getattr(value, "bit_generator", None) or value._bit_generator)
    if type(value).__module__.split(".")[0] in ("torch", "memo"):
        return ()
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name) for name in slots if name != "__dict__")]


def _state_of(function: types.FunctionType) -> list[Any]:
    """State of a function: closure, default arguments, attributes."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY_CELL]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values()]


def _is_own(value: object) -> bool:
    """True for an object of a class that is no library's, and no module or tensor."""
    module = type(value).__module__.split(".")[0]
    return module not in sys.stdlib_module_names and module not in ("torch", "numpy") and not isinstance(value, _LEAVES)


def _stand(bits: Any) -> list[Any]:
    """Position of a NumPy bit generator."""
    state = bits.state
    numbers = [*state["state"].values(), *state.values()]
    return [
        number.tobytes() if hasattr(number, "tobytes") else number for number in numbers if type(number) is not dict
    ]


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) in _COMPARED_BY_VALUE and type(one) is type(other) and one == other)
