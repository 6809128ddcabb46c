"""How a view lies in memory: `rows` contiguous runs of `run` elements, `stride` elements from one to the next.

    (2, s, h)[:, :k]   2 runs of k * h elements, s * h apart

Owns the folding of dimensions. The invariant: element e of the view, counted row-major, is at
(e // run) * stride + e % run behind the view's first element.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memo.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["Runs", "fold", "runs_of"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Counted in elements of the view."""

    rows: int
    run: int
    stride: int

    @property
    def count(self) -> int:
        return self.rows * self.run


def runs_of(view: torch.Tensor) -> Runs:
    """Raises UsageError for a view that is not rows of contiguous runs at one distance."""
    shape, (strides,) = fold(view)
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


def fold(*views: torch.Tensor) -> tuple[list[int], list[list[int]]]:
    """The shape that all views share with as few dimensions as their strides allow, and each one's strides in it.

    Raises:
        UsageError: the views differ in shape.
    """
    shape = tuple(views[0].shape)
    if any(tuple(view.shape) != shape for view in views):
        raise UsageError(f"tensors of one shape are needed, not {', '.join(str(tuple(v.shape)) for v in views)}")
    sizes, strides = [1], [[1] for _ in views]
    for dim in (dim for dim in range(len(shape)) if shape[dim] != 1):
        here = [view.stride(dim) for view in views]
        if sizes == [1]:
            sizes, strides = [shape[dim]], [[step] for step in here]
        elif all(done[-1] == step * shape[dim] for done, step in zip(strides, here, strict=True)):
            sizes[-1] *= shape[dim]
            for done, step in zip(strides, here, strict=True):
                done[-1] = step
        else:
            sizes.append(shape[dim])
            for done, step in zip(strides, here, strict=True):
                done.append(step)
    return sizes, strides
