"""A model on the meta device, and its copy with one layer of each kind.

Owns how kinds of layers are told apart: by their class, the shapes of their parameters, and the plain settings of their
modules, such as a window of attention. All layers are built, without memory, so that every number of parameters is exact;
the copy is the same model with the other layers taken out.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memo.errors import UsageError, one_line
from memo.hugging_face import fused_attention
from memo.hugging_face.adapters import adapt
from memo.hugging_face.configuration import model_class, quiet
from memo.swap import find_layers

_OF_THE_PLACE = ("idx", "index", "number", "layer_id", "depth", "training")
_SCAN = frozenset({"A_log", "D"})
"""Parameters of the state space of Mamba and Mamba-2, whatever their module is called."""
MOST_KINDS = 12
"""More kinds than these are told apart by their parameters alone."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Equal layers of a model."""

    name: str
    parameters: int
    trained: int
    """Trained parameters: of adapters alone, where there are some."""
    layer: nn.Module
    """The one that the copy has."""

    def matrices(self) -> list[tuple[int, int]]:
        """Shapes of the trained matrices, those of fused experts one by one."""
        trained = [parameter for parameter in self.layer.parameters() if parameter.requires_grad]
        shapes = [tuple(parameter.shape) for parameter in trained if parameter.dim() >= 2]
        return [(shape[-2], shape[-1]) for shape in shapes for _ in range(math.prod(shape[:-2]))]

    def frozen_linear(self) -> list[int]:
        """Sizes of the frozen weights of linear maps; fused tensors of experts are none."""
        maps = [module for module in self.layer.modules() if isinstance(module, nn.Linear)]
        return [module.weight.numel() for module in maps if not module.weight.requires_grad]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShortModel:
    """A model with one layer of each kind, on the meta device."""

    model: nn.Module
    stacks: tuple[tuple[nn.Module, ...], ...]
    """Layers of the copy, by the list that they stand in."""
    kinds: tuple[LayerKind, ...]
    layers: tuple[str, ...]
    """The kind of each layer of the whole model, in forward order."""
    embedding_parameters: int
    head_parameters: int
    """Parameters of all that is neither in a layer nor the embedding; without an output projection that is the embedding."""
    projection_parameters: int
    """Parameters of the output projection, which multiplies every token."""
    trains_projection: bool
    is_tied: bool
    vocabulary: int
    attention: str
    """Implementation of attention."""
    is_causal: bool
    itemsize: int
    """Bytes of an element of its weights."""
    notes: tuple[str, ...] = ()
    """Assumptions of a plan of it, in sentences without a full stop."""


def short_model(
    config: Any,
    *,
    name: str,
    dtype: torch.dtype,
    lora: int = 0,
    adapter_dtype: torch.dtype = torch.float32,
) -> ShortModel:
    """Builds the model of a configuration on the meta device and takes out all but one layer of each kind.

    A layer follows the last kind's where there is another of it, since the last layer of all behaves as no other.

    Args:
        config: configuration of transformers; it is changed.
        name: of the model in error messages.
        dtype: of the parameters.
        lora: rank of adapters on the layers' linear maps, which alone are trained; 0: everything is.
        adapter_dtype: of the adapters.

    Raises:
        UsageError: transformers cannot build it on the meta device, it has no repeated layers, or they are Mamba's.
    """
    kind = model_class(config, name=name)
    model = built_model(kind, config, name=name, dtype=dtype)
    model.train()
    layers = [layer.module for layer in find_layers(model)]
    if any({name for name, _ in part.named_parameters(recurse=False)} >= _SCAN for part in model.modules()):
        raise UsageError(
            f"{name}: its Mamba layers are one fused scan on a GPU, and transformers' own code in its place saves many times"
            " as much; plan it from a profile that memo profile measures"
        )
    if lora:
        adapt(model, layers, lora, name=name, dtype=adapter_dtype)
    types = _types(config, len(layers))
    keys = _keys(layers, types)
    names = _names(layers, types, keys)
    kept = [index for index, key in enumerate(keys) if key not in keys[:index]]
    kinds = {
        keys[index]: LayerKind(
            name=names[index],
            parameters=sum(p.numel() for p in layers[index].parameters()),
            trained=sum(p.numel() for p in layers[index].parameters() if p.requires_grad),
            layer=layers[index],
        )
        for index in kept
    }
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    table, projection = (_part(model, f"get_{side}_embeddings") for side in ("input", "output"))
    stacks = _taken_out(model, layers, keys, config, types)
    embedding = set() if table is None else set(table.parameters())
    outside = set(model.parameters()) - inside - embedding
    weight = getattr(projection, "weight", None)
    text = config.get_text_config()
    return ShortModel(
        model=model,
        stacks=stacks,
        kinds=tuple(kinds.values()),
        layers=tuple(kinds[key].name for key in keys),
        embedding_parameters=sum(p.numel() for p in embedding),
        head_parameters=sum(p.numel() for p in outside),
        projection_parameters=0 if weight is None else weight.numel(),
        trains_projection=weight is not None and weight.requires_grad and not lora,
        is_tied=weight is not None and any(weight is p for p in embedding),
        vocabulary=int(text.vocab_size),
        attention=str(getattr(config, "_attn_implementation", "eager")),
        is_causal=not getattr(config, "is_encoder_decoder", False),
        itemsize=dtype.itemsize,
    )


def built_model(kind: type[Any], config: Any, *, name: str, dtype: torch.dtype) -> nn.Module:
    """Builds a model on the meta device, with attention as a GPU's fused kernel computes it where it can.

    Raises:
        UsageError: transformers cannot build it there.
    """
    fused_attention.register()
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    for part in (config, config.get_text_config()):
        part.use_cache = False
    failed: BaseException | None = None
    for attention in (fused_attention.NAME, "sdpa", None):
        try:
            given = {} if attention is None else {"attn_implementation": attention}
            with quiet(), torch.device("meta"):
                model: nn.Module = kind._from_config(config, dtype=dtype, **given)
            _part(model, "tie_weights")
            return model
        except Exception as error:  # of the model's own code
            failed = failed or error
    assert failed is not None
    raise UsageError(
        f"{name}: {kind.__name__} cannot be built without memory: {type(failed).__name__}: {one_line(failed)}"
    )


def _part(model: nn.Module, method: str) -> Any:
    """What a method of every model of transformers returns."""
    call: Any = getattr(model, method)
    return call()


def _types(config: Any, count: int) -> Sequence[str]:
    """The configuration's own name of each layer's kind; empty without."""
    types = getattr(config.get_text_config(), "layer_types", None) or ()
    return list(types) if len(types) == count else ()


def _keys(layers: Sequence[nn.Module], types: Sequence[str]) -> list[tuple[Any, ...]]:
    """Equal for layers of one kind."""
    shapes = [
        (
            types[index] if types else "",
            type(layer),
            tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()),
        )
        for index, layer in enumerate(layers)
    ]
    settings = [(*shape, _settings(layer)) for shape, layer in zip(shapes, layers, strict=True)]
    return settings if len(set(settings)) <= MOST_KINDS else [(*shape, ()) for shape in shapes]


def _settings(layer: nn.Module) -> tuple[Any, ...]:
    return tuple(
        (name, value)
        for module in layer.modules()
        for name, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, str)) and not any(part in name for part in _OF_THE_PLACE)
    )


def _names(layers: Sequence[nn.Module], types: Sequence[str], keys: Sequence[tuple[Any, ...]]) -> list[str]:
    """Names of the kinds, by layer: a second one of equal name is `name#2`."""
    named: dict[tuple[Any, ...], str] = {}
    for index, key in enumerate(keys):
        if key not in named:
            plain = types[index] if types else type(layers[index]).__name__
            alike = sum(known == plain or known.startswith(f"{plain}#") for known in named.values())
            named[key] = plain if not alike else f"{plain}#{alike + 1}"
    return [named[key] for key in keys]


def _taken_out(
    model: nn.Module, layers: Sequence[nn.Module], keys: Sequence[tuple[Any, ...]], config: Any, types: Sequence[str]
) -> tuple[tuple[nn.Module, ...], ...]:
    """Leaves the first layer of each kind in every list of layers, and one more of the last kind; returns the lists."""
    number = {layer: index for index, layer in enumerate(layers)}
    stacks = []
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            indices = [number[module] for module in child.children() if module in number]
            if not indices or len(indices) != len(list(child.children())):
                continue
            first = [
                index for index in indices if keys[index] not in {keys[other] for other in indices if other < index}
            ]
            more = [index for index in indices if index > first[-1] and keys[index] == keys[first[-1]]][:1]
            stay = [*first, *(more or [index for index in indices if index > first[-1]][:1])]
            text = config.get_text_config()
            named = getattr(text, "num_hidden_layers", None) == len(indices) and bool(types)
            if named:
                try:
                    text.layer_types = [types[index] for index in stay]
                except AttributeError:  # types follow from places, which must then stay as they are
                    stay = list(range(indices[0], stay[-1] + 1))
            setattr(parent, name, type(child)(*_as_given(child, [layers[index] for index in stay])))
            stacks.append(tuple(layers[index] for index in stay))
    return tuple(stacks)


def _as_given(child: nn.Module, layers: list[nn.Module]) -> list[Any]:
    """Arguments that make a list of this kind from layers."""
    takes_list = isinstance(child, nn.ModuleList) or "modules" in inspect.signature(type(child).__init__).parameters
    return [layers] if takes_list else layers
