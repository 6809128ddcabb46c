"""Operators of torch's own sample database as modules: a sample's tensors are parameters, its results one number.

Names are those of torch.testing's `op_db`, a database that needs the package expecttest.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EMULATED = DEVICE == "cuda" and "emulated" in torch.cuda.get_device_name()
"""Where programs run."""

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch refuses deterministic algorithms without it

MOST_SAMPLES = 6
"""Samples of one operator that are drawn from."""
_NOT_DRAWN = frozenset(
    {
        "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",  # hold what was there
        "linalg.lstsq",  # does not repeat itself: one of its drivers reads memory that nothing has written
        "nn.functional.scaled_dot_product_attention",  # drawn as attention is
    }
)  # fmt: skip


@functools.cache
def _database() -> dict[tuple[str, str], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {
        (info.name, info.variant_test_name): info
        for info in op_db
        if info.supports_autograd and torch.float32 in info.dtypes and info.name not in _NOT_DRAWN
    }


def sampled_names(dtype: torch.dtype = torch.float32) -> list[tuple[str, str]]:
    """(name, variant) of each operator that can be drawn with such samples, in a fixed order."""
    return sorted(name for name, info in _database().items() if dtype in info.dtypes)


@functools.cache
def _samples(name: str, variant: str, dtype: torch.dtype) -> list[Any]:
    """The first samples, as `OpInfo.sample_inputs` gives them, which looks for the test it is called by: 0.1 s each."""
    from torch.testing._internal.common_utils import SEED, set_rng_seed

    info = _database()[name, variant]
    found: list[Any] = []
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        samples = iter(info.sample_inputs_func(info, DEVICE, dtype, False))
        while len(found) < MOST_SAMPLES:
            set_rng_seed(SEED)
            sample = next(samples, None)
            if sample is None:
                break
            found.append(sample)
    return found


class _Finite(torch.autograd.Function):
    """The same, with a gradient that is finite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.nan_to_num(0, 0, 0)


class Sampled(nn.Module):
    """A sample of an operator as a module of the hidden states x: a number that depends on the sample's tensors alone.

    The operator reads products of its parameters with one, which depends on x for autograd and for memo.
    """

    def __init__(
        self, name: str, variant: str, number: int, *, in_place: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        info, samples = _database()[name, variant], _samples(name, variant, dtype)
        sample = samples[number % len(samples)]
        self.operator: Callable[..., Any] = (info.inplace_variant if in_place else None) or info.op
        self.tensors = nn.ParameterList()
        self.arguments = _mapped((sample.input, tuple(sample.args), dict(sample.kwargs)), self._named)

    def _named(self, tensor: torch.Tensor) -> Any:
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.layout is not torch.strided:
            return tensor
        self.tensors.append(nn.Parameter(tensor.detach().clone()))
        return _Named(len(self.tensors) - 1)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Sampled:
        return self  # the sample's own types

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = 1 + 0 * _Finite.apply(x.float().mean())
        given, args, kwargs = _mapped(self.arguments, lambda named: self.tensors[named.number] * one, kind=_Named)
        total = x.new_zeros((), dtype=torch.float32)
        for result in _tensors(self.operator(given, *args, **kwargs)):
            if result.layout is torch.strided and (result.is_floating_point() or result.is_complex()):
                flat = torch.view_as_real(result.resolve_conj()) if result.is_complex() else result
                flat = _Finite.apply(flat).float().nan_to_num(0, 1, -1).tanh().reshape(-1)
                total = total + (flat * torch.linspace(0.5, 1, flat.numel())).sum()
        return total.to(x.dtype)


class _Named:
    """Stands for a parameter of the module in the sample's arguments."""

    def __init__(self, number: int) -> None:
        self.number = number


def _mapped(value: Any, change: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_mapped(item, change, kind) for item in value)
    if isinstance(value, dict):
        return {name: _mapped(item, change, kind) for name, item in value.items()}
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
