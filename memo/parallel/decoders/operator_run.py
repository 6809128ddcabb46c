"""A run of a model without data, operator by operator, that is compared with the run of the whole on one rank.

Both runs must be the same operators. A dimension in which their sizes differ by the number of ranks is divided, and each
operator that sees it must keep it (memo.parallel.decoders.operators). Subclasses know which part a rank may have, and how
gradients flow.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memo.parallel.decoders.operators import Flow, NotDivisible, OperatorCall, Shape, State, kept_pieces
from memo.torch_private import TorchDispatchMode

WITHOUT_GRADIENT = ("detach", "zeros", "ones", "full", "empty", "new_")
"""Beginnings of the names of operators whose results have no gradient."""


class OperatorRun(TorchDispatchMode):
    """One run of a model; compares with `steps` where there are some."""

    def __init__(self, model: nn.Module, *, ranks: int, steps: list[OperatorCall] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.ranks, self.steps = model, ranks, steps
        self.done: list[OperatorCall] = []
        self._states: dict[int, State] = {}
        self._kept: list[Any] = []  # identities must stay unique
        self._views: dict[int, list[torch.Tensor]] = {}
        self._paused = False

    def check_end(self) -> None:
        """Raises NotDivisible unless all steps were done."""
        if self.steps is not None and len(self.done) != len(self.steps):
            raise NotDivisible("it takes another way than on one rank")

    def _weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers without data."""
        meta = meta_tensors(self.model)
        for name, _ in self.model.named_parameters():
            self._note(meta[name], State(Flow.WEIGHT, roots=frozenset({name})))
        return meta

    @abc.abstractmethod
    def _check_part(self, size: int, name: str) -> None:
        """Raises NotDivisible unless a rank may have so much of a dimension."""

    @abc.abstractmethod
    def _flow(
        self, name: str, states: Sequence[State], dims: Sequence[int | None], out_dims: Sequence[int | None]
    ) -> tuple[Flow, frozenset[str]]:
        """Flow of what an operator makes, and the parameters that it is of."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self._paused:
            return output
        given = tensors_of((args, kwargs))
        made = tensors_of(output)
        step = OperatorCall(
            str(func),
            tuple(tuple(x.shape) for x in given),
            tuple(tuple(x.shape) for x in made),
            settings_of(args, kwargs),
        )
        whole = self._compare(step, skip_shapes=False)
        if whole is not None:
            self._follow(func, args, kwargs, given, made, step, whole)
        else:
            for x in made:
                self._note(x, State())
        return output

    def _compare(self, step: OperatorCall, *, skip_shapes: bool) -> OperatorCall | None:
        self.done.append(step)
        if self.steps is None:
            return None
        index = len(self.done) - 1
        if index >= len(self.steps) or self.steps[index].name != step.name:
            raise NotDivisible(f"it takes another way than on one rank, at {step.name}")
        whole = self.steps[index]
        if not skip_shapes and (len(whole.outputs) != len(step.outputs) or len(whole.inputs) != len(step.inputs)):
            raise NotDivisible(f"it takes another way than on one rank, at {step.name}")
        return whole

    def _divided(self, own: Shape, whole: Shape, name: str) -> int | None:
        """The dimension in which a rank has its part."""
        if len(own) != len(whole):
            raise NotDivisible(f"{name} gives another number of dimensions")
        found = [dim for dim, (a, b) in enumerate(zip(own, whole, strict=True)) if a != b]
        if len(found) > 1 or any(own[dim] * self.ranks != whole[dim] for dim in found):
            raise NotDivisible(f"{name} gives {own}, and on one rank {whole}")
        if not found:
            return None
        self._check_part(own[found[0]], name)
        return found[0]

    def _follow(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        given: list[torch.Tensor],
        made: list[torch.Tensor],
        step: OperatorCall,
        whole: OperatorCall,
    ) -> None:
        name = str(func).removeprefix("aten.")
        states = [self._state(x) for x in given]
        dims = [self._divided(a, b, name) for a, b in zip(step.inputs, whole.inputs, strict=True)]
        out_dims = [self._divided(a, b, name) for a, b in zip(step.outputs, whole.outputs, strict=True)]
        for state, dim in zip(states, dims, strict=True):
            if state.dim != dim:
                raise NotDivisible(f"{name} is given a tensor divided otherwise than it was made")
        pieces = 1
        if any(dim is not None for dim in (*dims, *out_dims)):
            pieces = kept_pieces(func, args, kwargs, states, out_dims, step, whole)
        elif step.settings != whole.settings:
            raise NotDivisible(f"{name} has other numbers than on one rank")
        flow, roots = self._flow(name, states, dims, out_dims)
        for x, dim in zip(made, out_dims, strict=True):
            now = flow if x.is_floating_point() or x.is_complex() else Flow.CONSTANT
            if any(x is one for one in given):
                self._write(name, x, now)
            self._note(
                x, State(now, dim, pieces if dim is not None else 1, roots if now is Flow.WEIGHT else frozenset())
            )

    def _write(self, name: str, x: torch.Tensor, flow: Flow) -> None:
        """Gives all views of a tensor the flow of what is written into it."""
        for other in self._views.get(id(x if x._base is None else x._base), ()):
            before = self._state(other)
            flows = {before.flow, flow} - {Flow.CONSTANT}
            if (not flows <= {Flow.PARTIAL, Flow.SHARDED} and len(flows) > 1) or Flow.WEIGHT in flows:
                raise NotDivisible(f"{name} writes into a tensor with another gradient")
            self._states[id(other)] = dataclasses.replace(before, flow=max(flows, default=Flow.CONSTANT))

    def _note(self, x: torch.Tensor, state: State) -> None:
        self._kept.append(x)
        self._views.setdefault(id(x if x._base is None else x._base), []).append(x)
        self._states[id(x)] = state

    def _state(self, x: torch.Tensor) -> State:
        return self._states.get(id(x), State())


def meta_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers without data, by all their names; a module of two names has the first one's.

    For functional_call with tie_weights=False, since with it torch leaves a module of two names without data.
    """
    made: dict[int, torch.Tensor] = {}
    return {
        f"{path}{'.' * bool(path)}{name}": made.setdefault(id(value), torch.empty_like(value, device="meta"))
        for path, one in module.named_modules()
        for name, value in itertools.chain(one._parameters.items(), one._buffers.items())
        if value is not None
    }


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [x for one in value for x in tensors_of(one)]
    return []


def settings_of(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Arguments that are no tensors."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return None
        if isinstance(value, (tuple, list)):
            return tuple(map(plain, value))
        return value

    return (*map(plain, args), *((name, plain(value)) for name, value in kwargs.items()))
