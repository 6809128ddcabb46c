"""Optimizers beside Adam: the state that each keeps for a parameter, what its step reads and writes, and its products.

Owns these numbers, with their sources; where states are sharded is `Training`. Needs no torch.

    adamw       two moments in the weights' format, as torch.optim.AdamW keeps them (Kingma and Ba 2015)
    adamw8bit   two moments of 8 bits, and a float32 scale for each block of 256 (Dettmers et al. 2022; bitsandbytes)
    adafactor   a mean for each row and each column of a matrix, in float32 (Shazeer and Stern 2018; torch.optim.Adafactor)
    sgd         nothing: without momentum
    muon        one momentum for matrices of layers, orthogonalised by five steps of products (Jordan et al. 2024;
                torch.optim.Muon); AdamW for the ends
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memo.gpt.arithmetic.training import StateBytes

_SCALED = 1 + 4 / 256  # bytes of an 8-bit moment with its part of a block's scale
_MEAN = 4  # bytes of a row's or a column's mean
_NEWTON_SCHULZ = 5  # steps of Muon's orthogonalisation


class Optimizer(enum.StrEnum):
    """An optimizer by the name of its flag."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw8bit"
    ADAFACTOR = "adafactor"
    SGD = "sgd"
    MUON = "muon"


def layer_states(optimizer: Optimizer, adam: StateBytes, *, smallest: int) -> StateBytes:
    """Bytes of a layer's parameter.

    Args:
        optimizer: which.
        adam: weight, gradient and states under AdamW.
        smallest: least number of rows or columns of a layer's matrices; Adafactor's means are at most so many fewer.
    """
    if optimizer is Optimizer.ADAMW:
        return adam
    state = {
        Optimizer.ADAMW_8BIT: 2 * _SCALED,
        Optimizer.ADAFACTOR: 2 * _MEAN / smallest,
        Optimizer.SGD: 0.0,
        Optimizer.MUON: float(adam.gradient),
    }[optimizer]
    gradients = 2 if optimizer is Optimizer.ADAFACTOR else 1  # read for the means, and for the update
    return dataclasses.replace(adam, optimizer=state, passes=gradients * adam.gradient + 2 * (adam.weight + state))


def end_states(optimizer: Optimizer, adam: StateBytes, *, smallest: int) -> StateBytes:
    """Bytes of a parameter of the embedding or the head, whose matrices Muon leaves to AdamW."""
    return adam if optimizer is Optimizer.MUON else layer_states(optimizer, adam, smallest=smallest)


def orthogonalisation_flops(matrices: Iterable[tuple[int, int]]) -> float:
    """Operations of Muon's step on matrices of these shapes: five times two products with X and one square."""
    flops = 0.0
    for rows, columns in matrices:
        small, large = sorted((rows, columns))
        flops += _NEWTON_SCHULZ * (4.0 * small * small * large + 2.0 * small**3)
    return flops
