"""Pipeline stages of a model of transformers: on each rank the model's own forward, in which other stages' parts do nothing.

    before the layers    the first stage's; elsewhere zeros, which the stage's first layer does not see
    layers               the stage's; others give on what they get
    after the layers     the last stage's; elsewhere what they get

So masks, positions and rotary tables are computed on every stage, by the model's own code, from the tokens. Parameter names
are the whole model's.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from memo.errors import UsageError, one_line
from memo.parallel.decoders.calls import ForwardCalls, outside_modules, tracing
from memo.parallel.decoders.context import Sequences
from memo.parallel.decoders.dataflow import first_hidden
from memo.parallel.decoders.operator_run import meta_tensors
from memo.parallel.layout import Layout


def check_stages(model: nn.Module, layers: Sequence[nn.Module], calls: ForwardCalls, layout: Layout) -> None:
    """Raises UsageError unless the model is a chain of layers that the stages of the layout can divide."""
    name, count = type(model).__name__, len(layers)
    for reason in _reasons_no_chain(model, layers, calls):
        raise UsageError(f"{name} {reason}; use tp and dp")
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise UsageError("output_router_logits adds losses of all layers on the last stage; set it to False")
    if count < layout.stages:
        advice = f"pp={min(layout.pp, count)}" + (", schedule='1f1b'" if layout.stages_per_rank > 1 else "")
        raise UsageError(f"{layout.stages} pipeline stages are more than the {count} layers of {name}; use {advice}")


def _reasons_no_chain(model: nn.Module, layers: Sequence[nn.Module], calls: ForwardCalls) -> Iterator[str]:
    """Reasons why a model is no chain of layers, as ends of sentences about it."""
    if [one.layer for one in calls.layers] != list(layers):
        yield f"does not run its {len(layers)} layers once each and in order"
    if not all(one.takes_previous_output for one in calls.layers[1:]):
        yield "changes hidden states between its layers"
    if calls.shares_hidden:
        yield "uses hidden states between its layers elsewhere, too"
    if any(0 < one.layers_before < len(layers) for one in calls.outside):
        yield "runs a module between its layers"
    before = {one.module for one in calls.outside if not one.layers_before}
    for module in before & {one.module for one in calls.outside if one.layers_before}:
        yield f"runs {type(module).__name__} before and after its layers"
    for one in calls.outside:
        given, made = one.input_shape, one.output_shape
        if not one.layers_before and made[: len(given)] != given and made[:-1] != given[:-1]:
            yield f"runs {type(one.module).__name__} before its layers, which is no embedding or norm"
    outside = {p for module in outside_modules(model, layers) for p in module.parameters()}
    holders = [p for module in layers for p in set(module.parameters())]
    if len(set(holders)) < len(holders) or not outside.isdisjoint(holders):
        yield "has layers that share parameters with others"
    if set(model.parameters()) - outside - set(holders):
        yield "has parameters of its own beside its layers"


def check_runs(model: nn.Module, layers: Sequence[nn.Module], calls: ForwardCalls, stages: Sequence[range]) -> None:
    """Raises UsageError unless the model's code runs as each of its stages, without data or memory."""
    hidden = first_hidden(*calls.layers[0].call)
    ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device="meta")
    for own in stages:
        stage = DecoderStage(model, layers, calls, own)
        batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
        try:
            with tracing(stage):
                given = (torch.empty_like(hidden, device="meta"),)
                made = torch.func.functional_call(stage, meta_tensors(stage), given, batch, tie_weights=False)
        except Exception as error:
            raise UsageError(
                f"{type(model).__name__} does not run with only some of its layers: {type(error).__name__}: "
                f"{one_line(error)}; use tp and dp"
            ) from error
        if not stage.is_last and made.shape != hidden.shape:
            raise UsageError(
                f"{type(model).__name__} passes on other hidden states than its layers take; use tp and dp"
            )


def balanced(costs: Sequence[float], stages: int, *, last: float) -> list[range]:
    """Consecutive layers for each stage, such that the most costly stage costs least.

    Args:
        costs: of each layer.
        stages: each gets at least one layer.
        last: what the last stage costs beside its layers.
    """
    count = len(costs)
    sums = [0.0, *itertools.accumulate(costs)]
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(1, stages + 1):
        extra = last if stage == stages else 0.0
        row = {
            end: min(
                (max(cost, sums[end] - sums[begin] + extra), begin)
                for begin, (cost, _) in best[-1].items()
                if begin < end
            )
            for end in range(stage, count - stages + stage + 1)
        }
        best.append(row)
    ends = [count]
    for row in reversed(best[1:]):
        ends.append(row[ends[-1]][1])
    ends.reverse()
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]


class DecoderStage(nn.Module):
    """Pipeline stage of a model.

    Args:
        model: the whole model; it is not changed, and the stage shares its own parameters with it.
        layers: of the model.
        calls: of its forward.
        own: indices of the stage's layers.
        sequences: with context parallelism, what divides a batch's tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        calls: ForwardCalls,
        own: range,
        sequences: Sequences | None = None,
    ) -> None:
        super().__init__()
        self._sequences = sequences
        self.is_first, self.is_last = own.start == 0, own.stop == len(layers)
        replaced: dict[nn.Module, nn.Module] = {
            one.layer: _SkippedLayer(one.layer, as_tuple=one.returns_tuple)
            for index, one in enumerate(calls.layers)
            if index not in own
        }
        self._before = None if self.is_first else cast("_SkippedLayer", replaced[layers[own.start - 1]])
        self._after = None if self.is_last else cast("_SkippedLayer", replaced[layers[own.stop]])
        for one in calls.outside:
            if not one.layers_before and not self.is_first:
                replaced[one.module] = _Zeros(
                    None if one.output_shape == one.input_shape else one.output_shape[-1], _dtype(one.module)
                )
            elif one.layers_before and not self.is_last:
                replaced[one.module] = _Same()
        if not self.is_first:
            called = {one.module for one in calls.outside}
            replaced |= {module: _Same() for module in outside_modules(model, layers) if module not in called}
        kept: dict[nn.Module, nn.Module] = {layers[index]: layers[index] for index in own}
        self.model = _copied(model, kept | replaced)
        self.layers = tuple(layers[index] for index in own)

    def forward(
        self, x: torch.Tensor, *, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **named: Any
    ) -> torch.Tensor:
        """Runs the stage.

        Args:
            x: hidden states of the stage before, (rows, tokens of this rank, hidden); the first stage does not use it.
            input_ids: (rows, tokens).
            labels: (rows, tokens), which the last stage needs.
            named: further arguments of the model, such as its attention mask.

        Returns:
            Hidden states (rows, tokens of this rank, hidden), or on the last stage the model's loss.
        """
        whole: Any = self.model
        batch = {"input_ids": input_ids, "use_cache": False, **named}
        if self._sequences is not None:
            batch = self._sequences.own(batch)
        if self._before is not None:
            self._before.gives = x
        if self._after is None:
            loss: torch.Tensor = whole(labels=labels, **batch).loss
            return loss.to(torch.promote_types(_dtype(self.layers[0]), torch.float32))
        self._after.shape = batch["input_ids"].shape
        whole.base_model(**batch)
        return self._after.take()


class _SkippedLayer(nn.Module):
    """Place of a layer of another stage; has its plain attributes, which the model's forward may read."""

    def __init__(self, layer: nn.Module, *, as_tuple: bool) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(layer).items() if not name.startswith("_") and name != "training"}
        self.__dict__.update(plain)
        self._as_tuple = as_tuple
        self.gives: torch.Tensor | None = None
        """Hidden states for the stage's first layer, where that follows."""
        self.shape: torch.Size | None = None
        """Rows and tokens, where the stage's last layer is before: its hidden states are taken, and the rest gets zeros."""
        self._taken: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """Returns the hidden states of the stage's last layer."""
        taken, self._taken = self._taken, None
        assert taken is not None
        return taken

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = first_hidden(args, kwargs)
        if self.gives is not None:
            hidden, self.gives = self.gives, None
        elif self.shape is not None:
            self._taken = hidden
            hidden = hidden.new_zeros(()).expand(*self.shape, *hidden.shape[2:])
        return (hidden,) if self._as_tuple else hidden


class _Same(nn.Module):
    """Place of a module whose result is not used."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x


class _Zeros(nn.Module):
    """Place of a module before the layers: zeros of its width, or of what it is given."""

    def __init__(self, width: int | None, dtype: torch.dtype) -> None:
        super().__init__()
        self._width = width
        self.weight = torch.empty(0, dtype=dtype)  # models read its type

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._width is None:
            return x
        return torch.zeros(*x.shape, self._width, dtype=self.weight.dtype, device=x.device)  # models write into it


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


def _copied(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    """The module tree with other modules in the places of `known`; parameters and buffers are the same."""
    if module in known:
        return known[module]
    made = known[module] = copy.copy(module)
    for name, value in vars(made).items():
        if name.startswith("_") and isinstance(value, dict):
            made.__dict__[name] = copy.copy(value)
    made._modules = {name: None if child is None else _copied(child, known) for name, child in module._modules.items()}
    return made
