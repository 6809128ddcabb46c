"""Memory layout of a strided view: `rows` contiguous runs of `run` elements, `stride` elements apart.

    (2, s, h)[:, :k]   2 runs of k * h elements, s * h apart

Owns the folding of dimensions. Invariant: element e of the view, in row-major order, is (e // run) * stride + e % run
elements behind the view's first element.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memo.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["Runs", "runs_of"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Rows of contiguous runs; `run` and `stride` in elements of the view."""

    rows: int
    run: int
    stride: int

    @property
    def count(self) -> int:
        """Elements in all runs."""
        return self.rows * self.run


def runs_of(view: torch.Tensor) -> Runs:
    """Returns the layout of a view.

    Raises:
        UsageError: It is not rows of contiguous runs at equal distances.
    """
    shape, strides = _fold(view)
    if not view.numel():
        return Runs(rows=1, run=0, stride=0)
    if strides[-1] != 1:
        shape, strides = [*shape, 1], [*strides, 1]
    if len(shape) > 2:
        raise UsageError(
            f"a view of shape {tuple(view.shape)} and strides {view.stride()} is not rows of contiguous runs; "
            "make it contiguous first"
        )
    rows, stride = (1, shape[0]) if len(shape) == 1 else (shape[0], strides[0])
    return Runs(rows=rows, run=shape[-1], stride=stride)


def _fold(view: torch.Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides of a view with as few dimensions as its strides allow."""
    sizes, strides = [1], [1]
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        if sizes == [1]:
            sizes, strides = [size], [stride]
        elif strides[-1] == stride * size:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            strides.append(stride)
    return sizes, strides
