"""Dataflow of a model whose tokens are divided: the proof, without data, that ranks can each run it on their own.

Each rank has whole parameters, whose gradients are summed. The model runs on a rank's tokens and on those of all, and no
operator may mix tokens (memo.parallel.decoders.operator_run).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memo.parallel.decoders.operator_run import WITHOUT_GRADIENT, OperatorRun, settings_of
from memo.parallel.decoders.operators import Flow, NotDivisible, OperatorCall, State

_NUMBERING = frozenset(["arange", "add", "detach", "unsqueeze", "view", "expand", "alias", "cumsum", "mul", "sub"])
"""Operators that number tokens where a model is given no positions."""

_LONG = 2**16
"""Times that a sequence is longer than a rank's part, so that whatever a model does from some length on is seen."""

_ROWS = 2
"""Sequences of that run, so that a view that mixes rows with tokens is seen."""

_OF_VALUES = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.Tensor.new_tensor}
"""Functions that make tensors of values, which operators do not show."""


def check_tokens(model: nn.Module, forward: Callable[..., torch.Tensor], *, ranks: int) -> None:
    """Checks that ranks can each run a model on their own tokens.

    Args:
        model: its parameters may be anywhere, and are not read.
        forward: runs the model and returns (rows, tokens, any); called with tensors on the meta device: by name in the place
            of parameters and buffers, tokens, and their positions, (rows, tokens) each, or None for positions of its own.
        ranks: among which the tokens are divided.

    Raises:
        NotDivisible: an operator mixes tokens, or the model itself numbers them in another way than from 0.
    """
    for times in (ranks, _LONG):  # a short sequence first, since the long one's masks would have no room
        whole = _TokenRun(model, ranks=times, steps=None)
        whole.forward(forward, 8 * ranks * times)
        if times == ranks:
            alone = _TokenRun(model, ranks=ranks, steps=None)
            alone.forward(lambda tensors, ids, _: forward(tensors, ids, None), 8 * ranks * ranks)
            _check_numbering(alone.done, whole.done)
        run = _TokenRun(model, ranks=times, steps=whole.done)
        run.forward(forward, 8 * ranks)
        run.check_end()


def _check_numbering(alone: Sequence[OperatorCall], given: Sequence[OperatorCall]) -> None:
    """Raises NotDivisible unless a run beyond one with positions makes them by `arange` from 0, or counts a mask so."""
    counts = [collections.Counter((one.name.split(".")[1], one.settings) for one in run) for run in (alone, given)]
    more = {(name, tuple(one for one in settings if one is not None)) for name, settings in counts[0] - counts[1]}
    names = {name for name, _ in more}
    ranges = [[one for one in settings if isinstance(one, int)] for name, settings in more if name == "arange"]
    starts = all(len(given) == 1 or (given[0] == 0 and given[2:] in ([], [1])) for given in ranges)
    adds = all(settings == (0,) for name, settings in more if name == "add")
    counted = ("sub", (1,)) in more if "cumsum" in names else names.isdisjoint({"mul", "sub"})
    if not (starts and adds and counted) or names - _NUMBERING:
        raise NotDivisible("it numbers tokens in a way of its own")


class _TokenRun(OperatorRun):
    """One run of a model on so many tokens of each of a few sequences."""

    _tokens = 0

    def forward(self, forward: Callable[..., torch.Tensor], tokens: int) -> None:
        """Runs a model on tokens that are divided; so must be the result."""
        meta = self._weights()
        given = [torch.empty(_ROWS, tokens, dtype=torch.int64, device="meta") for _ in range(2)]
        for x in given:
            self._note(x, State(Flow.SHARDED, dim=1))
        self._tokens = tokens
        with self, _Values(self), torch.no_grad():
            made = forward(meta, *given)
        if self.steps is not None and self._state(made) != State(Flow.SHARDED, 1):
            raise NotDivisible("its logits are not those of its tokens")

    def note_values(self, args: Any, kwargs: Any) -> None:
        """Compares the values that a tensor is made of."""
        step = OperatorCall("python.tensor", (), (), (repr(settings_of(args, kwargs)),))
        whole = self._compare(step, skip_shapes=True)
        if whole is not None and whole.settings != step.settings:
            raise NotDivisible("a tensor is made of other numbers than on one rank")

    def _check_part(self, size: int, name: str) -> None:
        if size % self._tokens:
            raise NotDivisible(f"{name} puts tokens together")

    def _flow(
        self, name: str, states: Sequence[State], dims: Sequence[int | None], out_dims: Sequence[int | None]
    ) -> tuple[Flow, frozenset[str]]:
        flows = {state.flow for state in states} - {Flow.CONSTANT}
        if not flows or name.startswith(WITHOUT_GRADIENT):
            return Flow.CONSTANT, frozenset()
        divided = any(dim is not None for dim in (*dims, *out_dims))
        return Flow.WEIGHT if flows == {Flow.WEIGHT} and not divided else Flow.SHARDED, frozenset()


class _Values(TorchFunctionMode):
    """Has a run note the values that tensors are made of."""

    def __init__(self, run: _TokenRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_VALUES:
            self._run.note_values(args, kwargs or {})
        return func(*args, **(kwargs or {}))
