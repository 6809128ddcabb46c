"""Plans of tensor parallelism: which modules of a layer are divided, and how, for a model of any kind.

The choice is the configuration's own (`base_model_tp_plan` of transformers), or else it follows two rules (Redco, Tan et al.
2023) from what the layer does: a linear map of the residual stream is divided by its outputs, and one whose result joins the
stream by its inputs. Which modules gather, which parameters' gradients are summed, how many projections are fused in a
matrix, and which attributes count a rank's heads is tried until memo.parallel.decoders.dataflow proves the division. A
module of a layer for which nothing is proved stays whole on every rank.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from memo.errors import one_line
from memo.parallel.decoders.dataflow import Call, check, first_hidden, run_wide
from memo.parallel.decoders.division import Boundary, DividedModule, Division, Kind, is_linear, sizes
from memo.parallel.decoders.operator_run import meta_tensors, tensors_of
from memo.parallel.decoders.operators import DividedDropout, NotDivisible
from memo.torch_private import TorchDispatchMode

_STYLES = {
    "colwise": DividedModule(kind=Kind.COLUMN),
    "packed_colwise": DividedModule(kind=Kind.COLUMN, pieces=2),
    "colwise_gather_output": DividedModule(kind=Kind.COLUMN, whole_outside=True),
    "colwise_rep": DividedModule(kind=Kind.COLUMN, whole_outside=True),
    "rowwise": DividedModule(kind=Kind.ROW),
    "rowwise_split_input": DividedModule(kind=Kind.ROW, whole_outside=True),
    "rowwise_rep": DividedModule(kind=Kind.ROW, whole_outside=True),
}
_TABLES = {"colwise": (-2, 1), "rowwise": (-1, 1), "packed_colwise": (-2, 2), "packed_rowwise": (-1, 2)}
"""Style of a parameter of experts to its divided dimension and the pieces fused along it."""
_MOST_SCALED = 2
"""Attributes of a module that are scaled together."""


def planned_parts(layer: nn.Module, path: str, plan: Mapping[str, str]) -> dict[str, DividedModule]:
    """Parts of a layer by the plan of its configuration.

    Args:
        layer: the layer.
        path: its name in the model.
        plan: names, in which `*` stands for a number, to styles of transformers.
    """
    styles = [(re.compile(rf"(.*\.)?{re.escape(name)}".replace(r"\*", r"\d+")), style) for name, style in plan.items()]

    def style_of(name: str) -> str | None:
        return next((style for pattern, style in styles if pattern.fullmatch(f"{path}.{name}")), None)

    found: dict[str, DividedModule] = {}
    for name, module in layer.named_modules():
        style = style_of(name) if name else None
        if style == "moe_tp_experts":
            tables = {own: style_of(f"{name}.{own}") for own, _ in module.named_parameters(recurse=False)}
            if tables and all(one in _TABLES for one in tables.values()):
                named = {own: _TABLES[one] for own, one in tables.items() if one is not None}
                found[name] = DividedModule(kind=Kind.EXPERTS, weights=named)
        elif style in _STYLES and (is_linear(module) or _is_adapted(module)):
            found |= _of_linear(name, module, _STYLES[style])
    return found


def _is_adapted(module: nn.Module) -> bool:
    """True for PEFT's LoRA of a linear map."""
    return is_linear(getattr(module, "base_layer", module)) and isinstance(
        getattr(module, "lora_A", None), nn.ModuleDict
    )


def _of_linear(name: str, module: nn.Module, part: DividedModule) -> dict[str, DividedModule]:
    """The part of a linear map, and of the adapter beside it: its second matrix has the outputs, its first the inputs."""
    if not _is_adapted(module):
        return {name: part}
    beside: Any = module.lora_B if part.kind is Kind.COLUMN else module.lora_A
    return {f"{name}.base_layer": part} | {
        f"{name}.lora_{'B' if part.kind is Kind.COLUMN else 'A'}.{adapter}": part for adapter in beside
    }


def parts_by_rules(layer: nn.Module, call: Call) -> dict[str, DividedModule]:
    """Parts of a layer by the two rules.

    Raises:
        NotDivisible: the layer does not run without data.
    """
    run = _Rules(layer)
    run.forward(call)
    found: dict[str, DividedModule] = {}
    for names, others, kind in ((run.first, run.last, Kind.COLUMN), (run.last, run.first, Kind.ROW)):
        for name in names:
            if name not in others:
                found |= _of_linear(name, layer.get_submodule(name), DividedModule(kind=kind))
    return found


def divide(
    layer: nn.Module, call: Call, parts: Mapping[str, DividedModule], *, ranks: int, sequence: bool, by_rules: bool
) -> Division:
    """Finds how the parts of a layer are divided.

    Args:
        layer: in training mode.
        call: its arguments, on the meta device.
        parts: by their names.
        ranks: among which they are divided.
        sequence: with sequence parallelism between the modules.
        by_rules: the parts were found by rules, so matrices may hold several projections.

    Raises:
        NotDivisible: nothing of the layer can be divided.
    """
    blocks = _blocks(parts)
    around = {
        name: Boundary.WHOLE
        for name, child in layer.named_children()
        if sequence and any(p.dim() > 1 for p in child.parameters()) and not _within(name, blocks.get("", ()))
    }
    found = Division(parts={}, boundaries=dict(around))
    for block, own in blocks.items():
        try:
            one = _divided_block(layer, call, block, own, around, ranks=ranks, sequence=sequence, by_rules=by_rules)
        except DividedDropout:
            raise
        except NotDivisible as error:
            found.whole[block or ", ".join(own)] = str(error)
            continue
        found.parts |= one.parts
        found.scaled |= one.scaled
        if block and one.boundaries.get(block) is not Boundary.WHOLE:
            found.boundaries.pop(block, None)
        found.boundaries |= {name: kind for name, kind in one.boundaries.items() if name not in around or name == block}
    if not found.parts:
        raise NotDivisible(next(iter(found.whole.values()), "no module of it is divided by its plan or the two rules"))
    steps = run_wide(layer, call, found.parts, found.scaled, ranks=ranks)
    found.summed = check(layer, call, found, steps, ranks=ranks, sequence=sequence)
    return found


def _blocks(parts: Mapping[str, DividedModule]) -> dict[str, dict[str, DividedModule]]:
    """Parts by the module of the layer that holds them; by "" where outputs and inputs of one product are in two."""
    blocks: dict[str, dict[str, DividedModule]] = {}
    for name, part in parts.items():
        blocks.setdefault(name.partition(".")[0], {})[name] = part
    for block, own in list(blocks.items()):
        kinds = {part.kind for part in own.values() if not part.whole_outside}
        if len(kinds) == 1 and Kind.EXPERTS not in kinds:
            blocks.setdefault("", {}).update(blocks.pop(block))
    return blocks


def _within(name: str, parts: Iterable[str]) -> bool:
    return any(part == name or part.startswith(f"{name}.") for part in parts)


def _divided_block(
    layer: nn.Module,
    call: Call,
    block: str,
    parts: Mapping[str, DividedModule],
    around: Mapping[str, Boundary],
    *,
    ranks: int,
    sequence: bool,
    by_rules: bool,
) -> Division:
    """Division of one module of the layer, while the others stay whole."""
    reason: NotDivisible | None = None
    for scaled in _scalings(layer, parts, ranks):
        try:
            steps = run_wide(layer, call, parts, scaled, ranks=ranks)
        except Exception as error:  # of the layer's own code, which a wrong number of heads breaks
            reason = reason or NotDivisible(f"{type(error).__name__}: {one_line(error)}")
            continue
        for fused in _fusings(parts, by_rules=by_rules):
            for boundaries in _boundaries(block, parts):
                others = {name: kind for name, kind in around.items() if name != block}
                one = Division(parts=fused, boundaries=others | boundaries, scaled=scaled)
                try:
                    check(layer, call, one, steps, ranks=ranks, sequence=sequence)
                    return one
                except NotDivisible as error:
                    reason = error if reason is None or error.reached > reason.reached else reason
                except Exception as error:
                    reason = reason or NotDivisible(f"{type(error).__name__}: {one_line(error)}")
    assert reason is not None
    raise reason


def _boundaries(block: str, parts: Mapping[str, DividedModule]) -> Iterator[dict[str, Boundary]]:
    """Where hidden states enter, the best first."""
    columns = [name for name, part in parts.items() if part.kind is Kind.COLUMN]
    if not block:
        yield dict.fromkeys(columns, Boundary.ENTRY)
        return
    if all(part.kind is not Kind.EXPERTS for part in parts.values()):
        yield {block: Boundary.ENTRY}
    parents = {name.rpartition(".")[0] if name.rpartition(".")[0] != block else name for name in columns}
    yield {block: Boundary.WHOLE} | dict.fromkeys(parents, Boundary.ENTRY)
    yield {block: Boundary.WHOLE} | dict.fromkeys(columns, Boundary.ENTRY)


def _fusings(parts: Mapping[str, DividedModule], *, by_rules: bool) -> Iterator[dict[str, DividedModule]]:
    """Parts with other numbers of projections in a matrix."""
    yield dict(parts)
    if by_rules:
        for name, pieces in itertools.product((n for n, p in parts.items() if p.kind is Kind.COLUMN), (3, 2)):
            yield {**parts, name: dataclasses.replace(parts[name], pieces=pieces)}


def _scalings(layer: nn.Module, parts: Mapping[str, DividedModule], ranks: int) -> Iterator[dict[str, tuple[str, ...]]]:
    """Attributes that may be proportional to the heads, of modules that hold divided ones; none at first."""
    yield {}
    holders = {name.rpartition(".")[0] for name, part in parts.items() if part.kind is not Kind.EXPERTS} - {""}
    choices = [
        (holder, name)
        for holder in sorted(holders)
        for name, value in vars(layer.get_submodule(holder)).items()
        if type(value) is int and value > 1 and value % ranks == 0 and not name.startswith("_")
    ]
    for count in range(1, _MOST_SCALED + 1):
        for chosen in itertools.combinations(choices, count):
            yield {holder: tuple(n for h, n in chosen if h == holder) for holder, _ in chosen}


def _holders(name: str) -> list[str]:
    """Names of the modules around a module."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


class _Rules(TorchDispatchMode):
    """A run of a layer that finds the first linear maps of the residual stream, and the last ones before it joins."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer = layer
        self.first: dict[str, None] = {}
        self.last: dict[str, None] = {}
        self._states: dict[int, frozenset[str]] = {}
        """Tensors made of the stream, to the linear maps next to them on the way."""
        self._kept: list[Any] = []
        self._paused = False
        self._shape = (0, 0)

    def forward(self, call: Call) -> None:
        args, kwargs = call
        hidden = first_hidden(args, kwargs)
        self._note(hidden, frozenset())
        self._shape = (hidden.shape[-1], hidden.numel())
        linear = [
            (name, one)
            for name, one in self.layer.named_modules()
            if _is_adapted(one)
            or (is_linear(one) and not any(_is_adapted(self.layer.get_submodule(up)) for up in _holders(name)))
        ]
        try:
            for name, module in linear:
                module.forward = self._of_linear(name, module)
            with torch.no_grad(), self:
                torch.func.functional_call(self.layer, meta_tensors(self.layer), args, kwargs, tie_weights=False)
        except Exception as error:
            raise NotDivisible(f"it does not run without data: {type(error).__name__}") from error
        finally:
            for _, module in linear:
                module.__dict__.pop("forward", None)

    def _of_linear(self, name: str, module: nn.Module) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            if self._states.get(id(x)) == frozenset():
                self.first[name] = None
            self._paused = True
            made = x.new_empty(*x.shape[:-1], sizes(getattr(module, "base_layer", module))[0])
            self._paused = False
            if id(x) in self._states:
                self._note(made, frozenset({name}))
            return made

        return forward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._paused:
            return output
        found = [self._states[id(x)] for x in tensors_of((args, kwargs)) if id(x) in self._states]
        if not found:
            return output
        joined = frozenset().union(*found)
        joins = func.overloadpacket.__name__ in ("add", "add_") and len(found) == 2 and frozenset() in found
        if joins and joined and (output.shape[-1], output.numel()) == self._shape:
            self.last |= dict.fromkeys(joined)
            joined = frozenset()
        for x in tensors_of(output):
            self._note(x, joined)
        return output

    def _note(self, x: torch.Tensor, state: frozenset[str]) -> None:
        self._kept.append(x)
        self._states[id(x)] = state
