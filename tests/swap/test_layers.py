"""Which modules of a model are its layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from memo.errors import NoRepeatedLayers
from memo.swap import find_layers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)


class Leaf(nn.Module):
    """Of a user, with parameters of its own alone."""


class Model(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def blocks(kind: Callable[[], nn.Module] = Block) -> list[nn.Module]:
    return [kind() for _ in range(3)]


def listed(kind: Callable[[], nn.Module] = Block) -> nn.ModuleList:
    return nn.ModuleList(blocks(kind))


def linears() -> nn.ModuleList:
    return listed(lambda: nn.Linear(4, 4))


def named_twice(first: str, second: str) -> Model:
    layers = listed()
    parts = {"layers": layers, "backbone": Model(layers=layers), "net": nn.Sequential(*layers)}
    return Model(**{first: parts[first], second: parts[second]})


IN_ORDER = ["layers.0", "layers.1", "layers.2"]
MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a list": (lambda: Model(layers=listed()), IN_ORDER),
    "a user's leaves": (lambda: Model(layers=listed(Leaf)), IN_ORDER),
    "under two names": (lambda: named_twice("backbone", "layers"), [f"backbone.{name}" for name in IN_ORDER]),
    "under two names, outer first": (lambda: named_twice("layers", "backbone"), IN_ORDER),
    "in a Sequential too": (lambda: named_twice("layers", "net"), IN_ORDER),
    "beside heads": (lambda: Model(layers=listed(), heads=linears()), IN_ORDER),
    "heads alone": (lambda: Model(heads=linears()), ["heads.0", "heads.1", "heads.2"]),
    "two stacks": (
        lambda: Model(encoder=Model(layers=listed()), decoder=Model(layers=listed())),
        [f"{part}.layers.{number}" for part in ("encoder", "decoder") for number in range(3)],
    ),
    "a ModuleDict": (
        lambda: Model(layers=nn.ModuleDict({f"h{number}": Block() for number in range(2)})),
        ["layers.h0", "layers.h1"],
    ),
    "numbered names": (lambda: Model(layer1=Block(), layer2=Block(), head=nn.Linear(4, 4)), ["layer1", "layer2"]),
    "numbered names beside a list": (
        lambda: Model(proj1=nn.Sequential(Block()), proj2=nn.Sequential(Block()), layers=listed()),
        IN_ORDER,
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", MODELS)
def test_layers_are_found_once_each(which: str) -> None:
    make, names = MODELS[which]
    layers = find_layers(make())
    assert [layer.name for layer in layers] == names
    assert layers[-1].last


@pytest.mark.parametrize(
    "model", [Block(), Model(a=Block(), b=Block()), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))]
)
def test_a_model_without_a_stack_is_told(model: nn.Module) -> None:
    with pytest.raises(NoRepeatedLayers, match="no repeated layers found in"):
        find_layers(model)
