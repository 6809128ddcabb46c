"""Arguments of a layer, held for a second run: taken apart where that is safe, refused in a word where it is not."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from memo.swap.recompute.axis.operator_rules import Unproven
from memo.swap.recompute.record.layer_arguments import Arguments, check_arguments

TOKENS = 8


@dataclasses.dataclass(frozen=True)
class Plain:
    scale: torch.Tensor
    name: str = "plain"


@dataclasses.dataclass(frozen=True)
class Checked:
    scale: torch.Tensor

    def __post_init__(self) -> None:
        assert self.scale.ndim == 2


@dataclasses.dataclass(frozen=True)
class Derived:
    scale: torch.Tensor
    half: int = dataclasses.field(init=False, default=1)


def test_a_frozen_record_is_cut_with_the_tokens_of_its_tensors() -> None:
    hidden, scale = torch.ones(1, TOKENS, 4), torch.arange(TOKENS)[:, None]
    check_arguments((hidden, Plain(scale)), {})
    (given, record), _ = Arguments((hidden, Plain(scale)), {}, hidden).give(hidden[:, 5:], (5, TOKENS))
    assert given.shape == (1, 3, 4)
    assert record.name == "plain"
    assert record.scale.flatten().tolist() == [5, 6, 7]


@pytest.mark.parametrize("kind", [Checked, Derived])
def test_a_record_that_looks_at_its_fields_or_makes_some_is_refused_and_no_error(kind: type) -> None:
    """It could not be made anew around what is held: the layer is to move whole, not to fail."""
    hidden = torch.ones(1, TOKENS, 4)
    with pytest.raises(Unproven, match=kind.__name__):
        check_arguments((hidden, kind(torch.ones(TOKENS, 1))), {})
