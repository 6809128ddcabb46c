"""Optimizers of a recorded step: made by name, with the state that they have after their first step.

    adamw                          memo's own: fused, as `memo train` runs it
    sgd,momentum=0.9,foreach=False a class of torch.optim with arguments
    package.module:Class,lr=1e-4   any other class, called with the parameters

Classes of torch.optim take `foreach` where they have it: their default on a GPU, which makes temporaries as large as the
parameters.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memo.errors import RecordError, UsageError
from memo.gpt.optim import adamw, empty_state
from memo.record.step import imported
from memo.swap import tensors_within

_OWN = "adamw"
# They call the step again, or take gradients that dense layers do not have.
_NOT_THESE = ("lbfgs", "sparseadam", "optimizer")


def make_optimizer(spec: str, model: nn.Module) -> torch.optim.Optimizer:
    """Makes an optimizer of the parameters that require gradients, with its state allocated.

    Args:
        spec: a name of torch.optim in any case, or `module:Class`, and arguments: `sgd,momentum=0.9`.
        model: the model.

    Raises:
        UsageError: there is no such optimizer, or it refuses the arguments or the parameters.
        RecordError: no parameter requires a gradient.
    """
    name, _, given = (part.strip() for part in spec.partition(","))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise RecordError("no parameter of the model requires a gradient: nothing is trained")
    if name.lower() == _OWN and not given:
        own = adamw(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
        empty_state(own)
        return own
    kind = _class_of(name)
    arguments = _arguments(given, spec)
    takes = inspect.signature(kind).parameters
    kinds = {hasattr(parameter, "_local_tensor") for parameter in parameters}  # one call takes no mixture with DTensors
    if "foreach" in takes and len(kinds) == 1 and not arguments.keys() & {"foreach", "fused"}:
        arguments["foreach"] = True
    try:
        optimizer = kind(parameters, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"--optimizer {spec}: {error}") from None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"--optimizer {spec}: {name} makes a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    fill_state(optimizer)
    return optimizer


def fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Creates the state that an optimizer makes at its first step, which runs on gradients of zero."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if optimizer.state:
        return
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def state_of(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """Tensors of the optimizers' state."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from tensors_within(state)


def _class_of(name: str) -> Any:
    if ":" in name:
        return imported(name, what=f"--optimizer {name}")
    known = {
        key.lower(): kind
        for key, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and key.lower() not in _NOT_THESE
    }
    if name.lower() not in known:
        raise UsageError(f"--optimizer {name}: choose one of {', '.join(sorted(known))}, or module:Class")
    return known[name.lower()]


def _arguments(given: str, spec: str) -> dict[str, Any]:
    """Arguments as Python writes them in a call: `lr=0.1, betas=(0.9, 0.95)`."""
    try:
        call = ast.parse(f"f({given})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args:
            raise ValueError
        return {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, SyntaxError):
        raise UsageError(f"--optimizer {spec}: {given!r} is not name=value, divided by commas") from None
