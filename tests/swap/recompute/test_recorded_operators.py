"""Operators of torch's sample database while a layer is recorded: the same bits, forward and backward, as without."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memo
from memo.swap.recompute.tape.recorder import Recorder
from tests.hunt.operators import MOST_SAMPLES, Sampled, sampled_names


class Layer(nn.Module):
    """Torch computes its loss in another way, which saves more, under every dispatch mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([30, 25]), torch.tensor([12, 9])
        return x + nn.functional.ctc_loss(
            x.log_softmax(-1).transpose(0, 1), torch.ones(2, 16, dtype=torch.long), *lengths
        )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_layer_whose_saves_go_to_a_checkpoint_is_not_recorded() -> None:
    def gradient(alpha: float | None) -> torch.Tensor:
        model, x = Model(), torch.linspace(-2, 2, 2 * 32 * 16).view(2, 32, 16).requires_grad_()
        manager = memo.offload(model, alpha=alpha, host="1MiB", min_bytes=1) if alpha is not None else None
        with manager or contextlib.nullcontext():
            loss = checkpoint(model, x, use_reentrant=False)
        loss.backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(0.0), gradient(None))


def _bits(
    name: tuple[str, str], number: int, *, autocast: bool, recorded: bool, dtype: torch.dtype
) -> list[torch.Tensor] | str:
    """Result and gradients of a sample, or the kind of error that it ends with."""
    torch.manual_seed(0)
    try:
        operator, x = Sampled(*name, number, dtype=dtype), torch.ones(2, 2)
        parameters = list(operator.parameters())
        recorder = Recorder(x, []) if recorded else contextlib.nullcontext()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), recorder:
            total = operator(x)
        found = [total, *torch.autograd.grad(total, parameters, allow_unused=True)] if total.requires_grad else [total]
    except Exception as error:
        return type(error).__name__
    return [each.detach().reshape(-1).view(torch.uint8) for each in found if each is not None]


def _same(ours: list[torch.Tensor] | str, theirs: list[torch.Tensor] | str) -> bool:
    if isinstance(ours, str) or isinstance(theirs, str):
        return ours == theirs
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dtype", "autocast", "least"),
    [
        (torch.float32, False, 2000),
        (torch.float32, True, 2000),
        (torch.bfloat16, False, 1000),
        (torch.complex64, False, 1000),
    ],
)
def test_every_operator_of_torchs_samples_gives_the_same_bits_while_it_is_recorded(
    dtype: torch.dtype, autocast: bool, least: int
) -> None:
    unlike, compared = [], 0
    # Autocast is off within `pinverse`, which calls linalg.pinv, and on within linalg.pinv: no mode can tell them apart.
    for name in sorted({*sampled_names(dtype)} - ({("pinverse", "")} if autocast else set())):
        for number in range(MOST_SAMPLES):
            plain = _bits(name, number, autocast=autocast, recorded=False, dtype=dtype)
            if not _same(plain, _bits(name, number, autocast=autocast, recorded=False, dtype=dtype)):
                continue
            compared += not isinstance(plain, str)
            if not _same(plain, _bits(name, number, autocast=autocast, recorded=True, dtype=dtype)):
                unlike.append((*name, number))
    assert not unlike
    assert compared > least
