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

__all__ = ["Runs", "fold", "runs_of"]


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
    """Merges dimensions that are contiguous in all views.

    Returns:
        The shared shape with as few dimensions as the strides allow, and the strides of each view in it.

    Raises:
        UsageError: The views differ in shape.
    """
    shape = tuple(views[0].shape)
    if any(tuple(view.shape) != shape for view in views):
        raise UsageError(f"views must have one shape, not {', '.join(str(tuple(v.shape)) for v in views)}")
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
