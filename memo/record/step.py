"""The step that is recorded or profiled: memo's GPT, or what a user's function builds.

Owns how a user's function is found and called, and what its step may return: a loss, or nothing if it runs backward and
the optimizer itself.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from memo.errors import RecordError, UsageError
from memo.gpt import GPTConfig, Precision
from memo.nested import closure_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A model and its forward: all that a training step needs."""

    model: nn.Module
    loss: Callable[[], Any]
    """Runs one forward and returns the scalar loss; or runs the whole step, and returns whatever it likes."""
    inputs: tuple[torch.Tensor, ...] = ()
    """Tensors that the forward reads beside the model's; they count as static memory."""
    layers: Sequence[nn.Module] | None = None
    """The repeated layers; None finds them in the model."""
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    """Optimizers that step after backward."""
    whole: bool | None = False
    """True if `loss` runs backward and the optimizer itself; None finds out by running it once."""
    group: ProcessGroup | None = None
    """Ranks that communicate within the layers, as of `memo.offload`."""
    schedule: Any = None
    """Torch's pipeline schedule, which `loss` runs, as of `memo.offload`."""


def gpt_step(config: GPTConfig, *, batch: int, tokens: int, precision: Precision = Precision.BF16) -> Step:
    """Builds a step of memo's GPT on the CPU, with uninitialised weights.

    Args:
        config: the model.
        batch: sequences of the microbatch.
        tokens: tokens of each sequence, and the most that the loss takes as `tokens`.
        precision: dtypes of weights and computation.
    """
    from memo.gpt.model import GPT
    from memo.gpt.train import weight_dtype

    # Not initialised: random numbers need a seed read from a tensor, and byteless tensors have no contents.
    model = GPT(config, device="meta", dtype=weight_dtype(precision)).to_empty(device="cpu")
    ids = torch.zeros(batch, tokens, dtype=torch.int64)
    targets = torch.zeros(batch, tokens, dtype=torch.int64)

    def loss(tokens: int = tokens) -> torch.Tensor:
        given = (ids, targets) if tokens == ids.shape[1] else (ids[:, :tokens], targets[:, :tokens])
        with torch.autocast("cpu", torch.bfloat16, enabled=precision is Precision.BF16_AUTOCAST):
            return model(*given)  # type: ignore[no-any-return]

    return Step(model=model, loss=loss, inputs=(ids, targets))


def imported(name: str, *, what: str = "") -> Any:
    """Imports an object `module:name`, also from the working directory.

    Args:
        name: of the object.
        what: begins the message of an error; empty: the name.

    Raises:
        UsageError: there is none.
    """
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{what or name}: {error}") from None


def load_step(name: str, *, needs_loss: bool = False) -> Callable[..., Step]:
    """Loads a user's function that builds a step.

    The function takes the keywords `batch` and `tokens` and returns `(model, step)`, `(model, step, optimizer)` or `step`:
    a torch.nn.Module on the CPU; a callable without arguments that runs one forward and returns the loss, or that runs the
    whole training step; and one or more optimizers that step after backward. The loss is a scalar, or the only scalar with
    a gradient in what is returned: an object with `.loss`, a dictionary with "loss", a tuple. Modules of a step that comes
    without a model are found where it keeps them.

    Args:
        name: `module:function`, importable from the working directory.
        needs_loss: True refuses steps that run backward themselves.

    Returns:
        A callable with the same keywords that returns a Step. It raises RecordError if the function returns anything
        else.

    Raises:
        UsageError: there is no such function, or it does not take these keywords.
    """
    if not all(name.partition(":")):
        raise UsageError(f"{name!r} is neither a model's name nor module:function")
    function = imported(name)
    try:
        inspect.signature(function).bind(batch=0, tokens=0)
    except (TypeError, ValueError) as error:  # ValueError: a C function without a signature
        raise UsageError(f"{name} cannot be called with the keywords batch and tokens: {error}") from None

    def build(*, batch: int, tokens: int) -> Step:
        made = function(batch=batch, tokens=tokens)
        model, step, optimizers = _parts(made, name)
        loss = _RunsForward(name, model, step) if needs_loss else functools.partial(_loss_of_step, name, step)
        return Step(model=model, loss=loss, optimizers=optimizers, whole=False if needs_loss else None)

    return build


def _parts(made: Any, name: str) -> tuple[nn.Module, Callable[[], Any], tuple[torch.optim.Optimizer, ...]]:
    """Model, step and optimizers of what a user's function returned."""
    model: nn.Module | None = None
    step = made
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    if isinstance(made, (tuple, list)) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
        model, step = made[0], made[1]
        if len(made) == 3:
            given = made[2] if isinstance(made[2], (tuple, list)) else (made[2],)
            optimizers = tuple(one for one in given if isinstance(one, torch.optim.Optimizer))
            if len(optimizers) != len(given) or not given:
                raise RecordError(f"{name} returned {type(made[2]).__name__} in the place of an optimizer")
    if not callable(step):
        raise RecordError(
            f"{name} returned {type(made).__name__}, not (model, step), (model, step, optimizer) or step, a callable that "
            "returns the loss or runs the whole step"
        )
    try:
        inspect.signature(step.forward if isinstance(step, nn.Module) else step).bind()
    except TypeError as error:
        raise RecordError(f"the step that {name} returned cannot be called without arguments: {error}") from None
    except ValueError:  # a C function without a signature
        pass
    return _model_of(step) if model is None else model, step, optimizers


def _loss_of_step(name: str, step: Callable[[], Any]) -> torch.Tensor | None:
    """Runs a user's step; returns the loss in what it returns."""
    result = step()
    if result is None or isinstance(result, torch.Tensor):
        return result
    if isinstance(result, (int, float)):  # loss.item(), of a step that ran backward itself
        return None
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    if isinstance(result, (tuple, list)):
        scalars = [one for one in result if isinstance(one, torch.Tensor) and one.numel() == 1 and one.requires_grad]
        if len(scalars) == 1:
            return scalars[0]
    raise RecordError(
        f"the step of {name} returned {type(result).__name__}, which has no loss; return the loss, or None"
    )


class _RunsForward:
    """A user's step that must return its loss, before backward."""

    def __init__(self, name: str, model: nn.Module, step: Callable[[], Any]) -> None:
        self._name, self._step = name, step
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def __call__(self) -> torch.Tensor:
        had = [parameter.grad is not None for parameter in self._parameters]
        loss = _loss_of_step(self._name, self._step)
        if loss is None or had != [parameter.grad is not None for parameter in self._parameters]:
            raise RecordError(
                f"the step of {self._name} runs backward itself; here it must run one forward and return the loss"
            )
        return loss


# The model of a step.


def _model_of(step: Any) -> nn.Module:
    """The module that a step keeps; of several, a module that has all of them as children; an empty one of none."""
    modules: list[nn.Module] = []
    for found in _held(step, depth=4):
        if not any(found is other for other in modules):
            modules.append(found)
    inner = {child for module in modules for child in module.modules() if child is not module}
    outermost = [module for module in modules if module not in inner]
    if len(outermost) == 1:
        return outermost[0]
    parent = nn.Module()
    for number, module in enumerate(outermost):
        parent.add_module(f"{type(module).__name__}{number}", module)
    return parent


def _held(value: Any, *, depth: int) -> Iterator[nn.Module]:
    """Modules that a callable keeps: in its closure, in its object's attributes, in partial arguments."""
    if isinstance(value, nn.Module):
        yield value
    elif depth:
        for inner in _parts_of(value):
            yield from _held(inner, depth=depth - 1)


_HOLD_NO_MODULES = (str, bytes, int, float, torch.Tensor, torch.optim.Optimizer, type, ModuleType)


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, _HOLD_NO_MODULES):
        return []
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (tuple, list, set)):
        return list(value)
    if inspect.ismethod(value):
        return [value.__self__, value.__func__]
    if inspect.isfunction(value):
        cells = closure_of(value)
        named = [value.__globals__.get(name) for name in value.__code__.co_names]
        modules = [one for one in named if isinstance(one, nn.Module)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *modules]
    return list(getattr(value, "__dict__", {}).values())
