"""What a layer's modules hold besides tensors and numbers: whether a forward has changed it.

What a forward puts aside (a loss of its router, a list of features) is its model's to find, and a recompute would put aside
another: of some of the tokens only and of a graph that nobody may walk. Already a trial of one would. Plain attributes are
watched by the surroundings, until backward; this looks from a forward's begin to its end, into containers, objects and
random generators, and at what the modules' classes and their forwards name. Not seen: what a forward changes by way of
a function that it calls, or in another module.
"""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import random
import sys
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memo.swap.surroundings import modules_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Belongings"]

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_COMPARED_BY_VALUE = frozenset({type(None), bool, int, float, complex, str, bytes})
_CONTAINERS = (list, tuple, dict, set, collections.deque)
_LEAVES = (torch.Tensor, nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)

# How far to look: what a layer keeps books in is flat, and a data set is not a layer's to hold.
_DEPTH = 4
_MOST_THINGS = 10_000
_MOST_FORWARDS = 1_000  # of classes, which a program may make as it runs


class Belongings:
    """Of a layer, as they were when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = list(_belongings(module))

    def changed(self) -> str | None:
        """The first that is another now."""
        now = list(_belongings(self._module))
        if len(now) != len(self._before):
            return "the set of its modules' attributes"
        for (name, held), (_, holds) in zip(self._before, now, strict=True):
            if len(held) != len(holds) or not all(map(_same, held, holds)):
                return name
        return None


def _belongings(module: nn.Module) -> Iterator[tuple[str, list[Any]]]:
    """Name of each attribute, its value and what is in it; and so for what is not held but named."""
    seen: set[int] = set()
    kinds: dict[type, None] = {}
    for child in modules_of(module):
        kinds[type(child)] = None
        for name, value in vars(child).items():
            if name not in _OF_EVERY_MODULE and type(value) not in _COMPARED_BY_VALUE:
                yield f"attribute {name!r} of a module", _things(value, seen)
    for kind in kinds:
        for name, value in _named_by(kind):
            if type(value) in _COMPARED_BY_VALUE or isinstance(value, _CONTAINERS):
                yield f"{name!r} of its class or its file", _things(value, seen)


def _named_by(kind: type) -> Iterator[tuple[str, Any]]:
    """Attributes of a class of modules, and the globals that its forward names."""
    if kind.__module__.split(".")[0] != "torch":
        yield from vars(kind).items()
        names, namespace = _names_in(kind.__dict__.get("forward", kind.forward))  # type: ignore[attr-defined]
        for name in names:
            if name in namespace:
                yield name, namespace[name]


@functools.lru_cache(_MOST_FORWARDS)
def _names_in(forward: Callable[..., Any]) -> tuple[Sequence[str], dict[str, Any]]:
    """The names of globals and attributes in a function, and the globals."""
    forward = inspect.unwrap(forward)
    code = getattr(forward, "__code__", None)
    return ((), {}) if code is None else (code.co_names, forward.__globals__)


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
    """What a container, an object or a generator of random numbers holds; of torch's objects and of ours nothing."""
    if isinstance(value, _LEAVES):
        return ()
    if isinstance(value, _CONTAINERS):
        return list(value.values() if isinstance(value, dict) else value)
    if isinstance(value, random.Random):
        _, words, gauss = value.getstate()
        return words[0], words[-1], gauss
    if isinstance(value, itertools.count):
        return (repr(value),)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
        return _stand(getattr(value, "bit_generator", None) or value._bit_generator)
    if type(value).__module__.split(".")[0] in ("torch", "memo"):
        return ()
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name) for name in slots if name != "__dict__")]


def _stand(bits: Any) -> list[Any]:
    """Where a bit generator of NumPy's stands."""
    state = bits.state
    numbers = [*state["state"].values(), *state.values()]
    return [
        number.tobytes() if hasattr(number, "tobytes") else number for number in numbers if type(number) is not dict
    ]


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) in _COMPARED_BY_VALUE and type(one) is type(other) and one == other)
