"""Tensor parallelism of a model of transformers, by the divisions that memo.parallel.decoders.plan found.

Owns their application; the division itself is memo.parallel.tensor_parallel and vocabulary_parallel. Parameter names stay;
every parameter becomes a DTensor.

    embedding        rows divided; all tokens on every rank
    first layer      takes this rank's tokens                |
    layers           see memo.parallel.tensor_parallel       |  with sequence parallelism
    last layer       gathers all tokens                      |
    norm             all tokens on every rank
    projection       rows divided; gathers the logits, which `memo.loss_without_logits` avoids
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memo.errors import UsageError
from memo.parallel.collectives import join, split
from memo.parallel.decoders.calls import ForwardCalls, LayerCall, tracing
from memo.parallel.decoders.dataflow import (
    first_hidden,
    first_output,
    with_first_output,
    with_hidden,
)
from memo.parallel.decoders.division import Boundary, Division, Kind, scattering
from memo.parallel.decoders.operators import NotDivisible
from memo.parallel.decoders.plan import divide, parts_by_rules, planned_parts
from memo.parallel.rank_agreement import require_same_batch, require_same_draws
from memo.parallel.tensor_parallel import ColumnParallel, DividedExperts, Entry, Replicated, RowParallel
from memo.parallel.tensor_parallel_group import note_group
from memo.parallel.vocabulary_parallel import VocabularyParallel, check_rows
from memo.warn_user import warn_user

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

# 2.11 is known to fail: its DTensor cannot place the gradients of fused projections.
_FUSED_SINCE = "2.13"
_SIZES = {
    "heads": ("num_attention_heads",),
    "key/value heads": ("num_key_value_heads",),
    "MLP columns": ("intermediate_size", "ffn_dim", "n_inner"),
}


def tokens_to_trace(ranks: int) -> int:
    """Tokens of the forward in which layers are looked at: so many that ranks divide a rank's part again."""
    return 8 * ranks * ranks


def check_sizes(model: nn.Module, ranks: int) -> None:
    """Raises UsageError unless heads, widths and words divide over the ranks."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = {
        what: size
        for what, names in _SIZES.items()
        if (size := next((value for name in names if isinstance(value := getattr(config, name, None), int)), None))
    }
    for what, size in found.items():
        if size % ranks:
            fits = max(n for n in range(1, ranks) if all(one % n == 0 for one in found.values()))
            raise UsageError(
                f"{ranks} ranks do not divide the model's {size} {what}; each needs whole ones; {fits} would"
            )
    for table in _vocabulary_tables(model):
        check_rows(table.weight.shape[0], ranks)


def find_divisions(
    model: nn.Module, calls: Sequence[LayerCall], *, ranks: int, sequence: bool
) -> dict[nn.Module, Division]:
    """Divisions of the layers.

    Warns of modules of layers that stay whole on every rank.

    Raises:
        UsageError: a layer cannot be divided, or not with this torch.
    """
    _require_own_weights(model, [one.layer for one in calls])
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    plan: Mapping[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    names = {module: name for name, module in model.named_modules()}
    found: dict[nn.Module, Division] = {}
    whole: dict[str, str] = {}
    often = collections.Counter(one.layer for one in calls)

    def division_of(one: LayerCall, *, sequence: bool) -> Division:
        if sequence and often[one.layer] > 1:
            raise NotDivisible("it runs more than once in a forward")
        planned = planned_parts(one.layer, names[one.layer], plan)
        parts = planned or parts_by_rules(one.layer, one.call)
        return divide(one.layer, one.call, parts, ranks=ranks, sequence=sequence, by_rules=not planned)

    with tracing(model):
        for one in calls:
            kind = type(one.layer).__name__
            try:
                division = division_of(one, sequence=sequence)
            except NotDivisible as error:
                advice = "use pp and dp"
                if sequence:
                    with contextlib.suppress(NotDivisible):
                        division_of(one, sequence=False)
                        advice = "give memo.parallelize sequence_parallel=False"
                raise UsageError(f"{kind} cannot be divided over {ranks} ranks: {error}; {advice}") from error
            _check_torch(kind, division)
            found[one.layer] = division
            whole |= {f"{name} of {kind}": reason for name, reason in division.whole.items()}
    for name, reason in whole.items():
        warn_user(f"memo.parallelize: {name} stays whole on every rank: {reason}")
    return found


def _require_own_weights(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Raises UsageError where a weight is used by another module, too, or alone: each divides its own."""
    for path, module in model.named_modules():
        if isinstance(module, (nn.ParameterDict, nn.ParameterList)) and any(True for _ in module.parameters()):
            raise UsageError(f"{path} has weights for another module, as adapters of embeddings do; use pp or dp")
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name and parameter in inside:
            raise UsageError(
                f"{first[parameter]} and {name} are one weight, which tensor parallelism would take apart; use pp or dp"
            )


def _refuse_parts(kwargs: Mapping[str, Any], config: Any) -> None:
    """Raises UsageError for outputs of which a rank has a part: others would be silently missing in a loss."""
    for name in ("output_hidden_states", "output_attentions"):
        asked = kwargs.get(name)
        if asked if asked is not None else getattr(config, name, False):
            raise UsageError(f"{name}: under tensor parallelism a rank has its own part of them; leave it out")


def _check_torch(kind: str, division: Division) -> None:
    fused = any(part.pieces > 1 for part in division.parts.values())
    if fused and torch.__version__ < _FUSED_SINCE:
        raise UsageError(
            f"to divide the fused projections of {kind} needs torch {_FUSED_SINCE}, this is {torch.__version__}; "
            f"models with a matrix for each projection can be divided with it"
        )


def apply(
    model: nn.Module,
    calls: ForwardCalls,
    divisions: Mapping[nn.Module, Division],
    mesh: DeviceMesh,
    *,
    sequence: bool,
) -> None:
    """Divides the model over the mesh, in place."""
    group = mesh.get_group()
    for layer, division in divisions.items():
        _apply(layer, division, mesh, sequence=sequence)
    _divide_vocabulary(model, mesh)
    _replicate_others(model, mesh)
    for one in calls.layers:
        note_group(one.layer, group)
    input_embeddings: Any = getattr(model, "get_input_embeddings", lambda: None)()
    first: nn.Module = input_embeddings if isinstance(input_embeddings, nn.Module) else calls.layers[0].layer
    draws = calls.draws

    def require_same(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _require_same(args, kwargs, group, draws=draws and module.training)

    first.register_forward_pre_hook(require_same, with_kwargs=True)
    config = getattr(model, "config", None)

    def check(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _refuse_parts(kwargs, config)
        if kwargs.get("labels") is not None:
            require_same_batch(group, kwargs["labels"])

    model.register_forward_pre_hook(check, with_kwargs=True)
    if sequence:
        for index, one in enumerate(calls.layers):
            if not one.takes_previous_output:
                one.layer.register_forward_pre_hook(_takes_own_tokens(group), with_kwargs=True)
            if index + 1 == len(calls.layers) or not calls.layers[index + 1].takes_previous_output:
                one.layer.register_forward_hook(_gathers_tokens(group))


def _apply(layer: nn.Module, division: Division, mesh: DeviceMesh, *, sequence: bool) -> None:
    scatters = scattering(division) if sequence else set()
    for name, part in division.parts.items():
        module = layer.get_submodule(name)
        if part.kind is Kind.EXPERTS:
            DividedExperts(part.weights)._apply(module, mesh)
        elif part.kind is Kind.COLUMN:
            style = ColumnParallel(sequence=sequence, pieces=part.pieces, gather_output=part.whole_outside)
            style._apply(module, mesh)
        else:
            RowParallel(sequence=name in scatters, split_input=part.whole_outside)._apply(module, mesh)
    inside = [f"{name}." for name, boundary in division.boundaries.items() if boundary is Boundary.WHOLE]
    for name, boundary in division.boundaries.items():
        module = layer.get_submodule(name)
        if boundary is Boundary.ENTRY:
            gathers = sequence and not any(name.startswith(outer) for outer in inside)
            Entry(sequence=gathers)._apply(module, mesh)
        elif sequence:
            module.register_forward_pre_hook(_gathers_input(mesh.get_group()), with_kwargs=True)
            module.register_forward_hook(_divides_output(mesh.get_group()))
    for owner in {name.rpartition(".")[0] for name in division.summed}:
        Replicated(sequence=True)._apply(layer.get_submodule(owner), mesh)
    for name, attributes in division.scaled.items():
        module = layer.get_submodule(name)
        for attribute in attributes:
            setattr(module, attribute, getattr(module, attribute) // mesh.size())


def _vocabulary_tables(model: nn.Module) -> list[nn.Embedding | nn.Linear]:
    """The input embedding and the output projection, where they can be divided by rows."""
    ends: list[Any] = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    tables = [end for end in ends if _is_rows(end)]
    while True:
        elsewhere = {p for module in model.modules() if module not in tables for p in module._parameters.values()}
        divided = [table for table in tables if elsewhere.isdisjoint(set(table._parameters.values()) - {None})]
        if divided == tables:
            return tables
        tables = divided  # what is tied to a table that stays whole stays whole


def _is_rows(end: Any) -> bool:
    """True for a plain linear layer, or an embedding whose lookup needs no other rows."""
    if type(end) is nn.Linear:
        return True
    return type(end) is nn.Embedding and end.max_norm is None and not (end.scale_grad_by_freq or end.sparse)


def _divide_vocabulary(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divides the tables by rows; a projection tied to the embedding stays tied."""
    divided: dict[torch.Tensor, torch.Tensor] = {}
    for table in _vocabulary_tables(model):
        whole = table.weight
        VocabularyParallel(sequence=False)._apply(table, mesh)
        table.weight = divided.setdefault(whole, table.weight)


def _replicate_others(model: nn.Module, mesh: DeviceMesh) -> None:
    """Makes replicated DTensors of all other parameters: optimizers and gradient norms take no mixture.

    Tied parameters stay tied.
    """
    from torch.distributed.tensor import DTensor

    made: dict[nn.Parameter, nn.Parameter] = {}
    style = Replicated(sequence=False)
    for module in model.modules():
        own = {name: p for name, p in module._parameters.items() if p is not None and not isinstance(p, DTensor)}
        if not own:
            continue
        style._apply(module, mesh)
        for name, former in own.items():
            now = made.setdefault(former, module._parameters[name])  # type: ignore[arg-type]
            module._parameters[name] = now


def _require_same(args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup, *, draws: bool) -> None:
    given = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
    if given is not None:
        require_same_batch(group, given)
        if draws:
            require_same_draws(given.device, group)


def _takes_own_tokens(group: dist.ProcessGroup) -> Callable[..., Any]:
    return lambda _, args, kwargs: with_hidden(args, kwargs, _own_tokens(first_hidden(args, kwargs), group))


def _own_tokens(hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    check_tokens(hidden.size(1), group.size())
    return split(hidden, group, 1)


def check_tokens(tokens: int, ranks: int) -> None:
    """Raises UsageError unless the tokens of a sequence divide over the ranks, as sequence parallelism needs."""
    if tokens % ranks:
        raise UsageError(
            f"a sequence of {tokens} tokens does not divide over {ranks} ranks; pad it to a multiple, or give "
            f"memo.parallelize sequence_parallel=False"
        )


def _gathers_tokens(group: dist.ProcessGroup) -> Callable[..., Any]:
    return lambda _, __, output: with_first_output(output, join(first_output(output), group, 1))


def _gathers_input(group: dist.ProcessGroup) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = first_hidden(args, kwargs)
        return with_hidden(args, kwargs, join(hidden, group, hidden.ndim - 2))

    return hook


def _divides_output(group: dist.ProcessGroup) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        first = first_output(output)
        return with_first_output(output, split(first, group, first.ndim - 2))

    return hook
