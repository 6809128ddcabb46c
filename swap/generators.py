"""Random generators of the program, which a dispatch mode of its own may draw from as memo's operators run under it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

from memo.torch_private import get_dispatch_stack_at, len_torch_dispatch_stack

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


@contextmanager
def put_back() -> Iterator[None]:
    """Context at whose end torch's default generators are as at its begin; without effect while a graph is captured."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        yield
        return
    states = [(each, each.get_state()) for each in (torch.default_generator, *torch.cuda.default_generators)]
    try:
        yield
    finally:
        for each, state in states:
            each.set_state(state)


def leaves_generators(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Decorator of what runs memo's own operators: a dispatch mode of the program that sees them moves no generator."""

    @functools.wraps(function)
    def called(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        for at in range(len_torch_dispatch_stack()):
            if not _draws_nothing(type(get_dispatch_stack_at(at)).__module__):
                with put_back():
                    return function(*args, **kwargs)
        return function(*args, **kwargs)

    return called


@functools.cache
def _draws_nothing(module: str) -> bool:
    return module.startswith(("memo.", "torch."))
