"""`memo.parallelize`: tensor parallelism of unmodified Hugging Face models, by a table of model families.

Owns the choice of modules that are divided by column, by row, over the vocabulary, or replicated. The division itself
is memo.parallel.tensor_parallel and vocabulary_parallel. Parameter names stay; every parameter becomes a DTensor.

    embedding        rows divided; all tokens on every rank
    first layer      takes this rank's tokens                |
    layers           see memo.parallel.tensor_parallel       |  with sequence parallelism
    last layer       gathers all tokens                      |
    norm             all tokens on every rank
    projection       rows divided; gathers the logits, which `memo.loss_without_logits` avoids
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from memo.errors import UsageError
from memo.parallel.collectives import join, split
from memo.parallel.rank_agreement import require_same_shape
from memo.parallel.tensor_parallel import ColumnParallel, Entry, Replicated, RowParallel
from memo.parallel.tensor_parallel_group import note_group
from memo.parallel.vocabulary_parallel import VocabularyParallel, check_rows
from memo.swap import layer_input

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

# 2.11 is known to fail: its DTensor cannot place the gradients of fused projections.
_FUSED_SINCE = "2.13"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Modules of one type of decoder layer, by their names within the layer."""

    entries: Sequence[str]
    """Modules whose input the column-parallel projections read."""
    columns: Mapping[str, int]
    """Projections divided by outputs -> number of projections fused in each."""
    rows: Sequence[str]
    """Projections divided by inputs."""
    norms: Sequence[str]
    """Modules that are replicated."""
    per_head: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Module -> its attribute that is proportional to the number of heads."""


FAMILIES = {
    "GPT2Block": Family(
        entries=("attn", "mlp"),
        columns={"attn.c_attn": 3, "mlp.c_fc": 1},
        rows=("attn.c_proj", "mlp.c_proj"),
        norms=("ln_1", "ln_2"),
        per_head={"attn": "split_size"},
    ),
    "LlamaDecoderLayer": Family(
        entries=("self_attn", "mlp"),
        columns={f"self_attn.{name}_proj": 1 for name in "qkv"} | {"mlp.gate_proj": 1, "mlp.up_proj": 1},
        rows=("self_attn.o_proj", "mlp.down_proj"),
        norms=("input_layernorm", "post_attention_layernorm"),
    ),
    "OPTDecoderLayer": Family(
        entries=("self_attn", "fc1"),
        columns={f"self_attn.{name}_proj": 1 for name in "qkv"} | {"fc1": 1},
        rows=("self_attn.out_proj", "fc2"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
        per_head={"self_attn": "num_heads"},
    ),
    "GPTNeoXLayer": Family(
        entries=("attention", "mlp"),
        columns={"attention.query_key_value": 1, "mlp.dense_h_to_4h": 1},  # q, k, v are fused head by head
        rows=("attention.dense", "mlp.dense_4h_to_h"),
        norms=("input_layernorm", "post_attention_layernorm"),
    ),
}


def parallelize(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = True) -> nn.Module:
    """Divides the layers and the vocabulary of a Hugging Face GPT-2, Llama, OPT or GPT-NeoX over `mesh`, in place.

        mesh = init_device_mesh("cuda", (8,))
        model = memo.parallelize(AutoModelForCausalLM.from_pretrained(name), mesh)
        manager = memo.offload(model)

    Every rank passes the whole model, or the same one on the meta device, and keeps its part; nothing is communicated. A
    forward takes the same (batch, tokens) on every rank and returns the same loss and logits on every rank; gradients are
    those of one process. With `memo.loss_without_logits` logits are neither computed in full nor gathered.

    Args:
        model: unmodified, from a configuration or a checkpoint, of any dtype.
        mesh: one-dimensional, or with a dimension named "tp", over which the model is divided.
        sequence_parallel: divides the tokens, too, between the matrices, so that a layer saves 1 / ranks of what it saves
            on one rank. The number of tokens must then be a multiple of the ranks. Not for `generate`.

    Returns:
        `model` itself, whose parameters are DTensors. Call `memo.offload` and `fully_shard` after this.

    Raises:
        UsageError: `mesh` is no DeviceMesh or has no dimension "tp"; the model is of another family; heads, widths or
            words do not divide over the ranks; GPT-2 on torch before 2.13. The model is then unchanged. A forward raises
            it on every rank for batches of different shapes, and for tokens that do not divide.
    """
    if not hasattr(mesh, "mesh_dim_names"):
        raise UsageError(f"mesh: {mesh!r} is no DeviceMesh; make one with torch.distributed.init_device_mesh")
    if mesh.ndim > 1:
        if "tp" not in (mesh.mesh_dim_names or ()):
            raise UsageError(f"mesh: of its dimensions {mesh.mesh_dim_names} none is named 'tp'")
        mesh = mesh["tp"]
    layers = [module for module in model.modules() if type(module).__name__ in FAMILIES]
    if not layers:
        raise UsageError(
            f"{type(model).__name__} has no layers that memo has a plan for ({', '.join(FAMILIES)}); divide it with "
            f"torch's parallelize_module instead"
        )
    _check(model, mesh.size())
    if mesh.size() == 1:
        return model
    _check_torch({type(layer).__name__ for layer in layers})
    for layer in layers:
        _divide(layer, FAMILIES[type(layer).__name__], mesh, sequence=sequence_parallel)
    _divide_vocabulary(model, mesh)
    _replicate_others(model, mesh)
    group = mesh.get_group()
    note_group(model, group)
    first = cast("nn.Module", model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else layers[0])  # type: ignore[operator]
    first.register_forward_pre_hook(lambda _, args, kwargs: _require_same(args, kwargs, group), with_kwargs=True)
    if sequence_parallel:
        layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: _take_own_tokens(args, kwargs, group), with_kwargs=True
        )
        layers[-1].register_forward_hook(lambda _, __, output: _gather_tokens(output, group))
    return model


def _check(model: nn.Module, ranks: int) -> None:
    """Raises UsageError unless heads, widths and words divide over the ranks."""
    config: Any = getattr(model, "config", None)
    sizes = {
        "heads": ("num_attention_heads",),
        "key/value heads": ("num_key_value_heads",),
        "MLP columns": ("intermediate_size", "ffn_dim", "n_inner"),
    }
    for what, names in sizes.items():
        size = next((value for name in names if (value := getattr(config, name, None)) is not None), None)
        if size is not None and size % ranks:
            raise UsageError(f"{ranks} ranks do not divide the model's {size} {what}; each needs whole ones")
    for table in _vocabulary_tables(model):
        check_rows(table.weight.shape[0], ranks)


def _check_torch(layers: Set[str]) -> None:
    fused = [layer for layer in layers if any(pieces > 1 for pieces in FAMILIES[layer].columns.values())]
    if fused and torch.__version__ < _FUSED_SINCE:
        raise UsageError(
            f"to divide the fused projections of {fused[0]} needs torch {_FUSED_SINCE}, this is {torch.__version__}; "
            f"Llama, OPT and GPT-NeoX layers can be divided with it"
        )


def _divide(layer: nn.Module, family: Family, mesh: DeviceMesh, *, sequence: bool) -> None:
    styles = [(name, Entry(sequence=sequence)) for name in family.entries]
    styles += [(name, ColumnParallel(sequence=sequence, pieces=pieces)) for name, pieces in family.columns.items()]  # type: ignore[misc]
    styles += [(name, RowParallel(sequence=sequence)) for name in family.rows]  # type: ignore[misc]
    styles += [(name, Replicated(sequence=sequence)) for name in family.norms]  # type: ignore[misc]
    for name, style in styles:
        style._apply(layer.get_submodule(name), mesh)
    for name, attribute in family.per_head.items():
        module = layer.get_submodule(name)
        setattr(module, attribute, getattr(module, attribute) // mesh.size())


def _vocabulary_tables(model: nn.Module) -> list[nn.Embedding | nn.Linear]:
    """The input embedding and the output projection, where they can be divided by rows."""
    ends: list[Any] = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    tables = [end for end in ends if _is_rows(end)]
    elsewhere = {id(p) for module in model.modules() if module not in tables for p in module._parameters.values()}
    return [
        table for table in tables if not any(id(p) in elsewhere for p in table._parameters.values() if p is not None)
    ]


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


def _require_same(args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup) -> None:
    given = layer_input(args, kwargs)
    if given is not None:
        require_same_shape(given, group)


def _take_own_tokens(args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup) -> Any:
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": _own_tokens(kwargs["hidden_states"], group)}
    return (_own_tokens(args[0], group), *args[1:]), kwargs


def _own_tokens(hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if hidden.size(1) % group.size():
        raise UsageError(
            f"a sequence of {hidden.size(1)} tokens does not divide over {group.size()} ranks; pad it to a multiple, or "
            f"give memo.parallelize sequence_parallel=False"
        )
    return split(hidden, group, 1)


def _gather_tokens(output: Any, group: dist.ProcessGroup) -> Any:
    if isinstance(output, tuple):
        return (join(output[0], group, 1), *output[1:])
    return join(output, group, 1)
