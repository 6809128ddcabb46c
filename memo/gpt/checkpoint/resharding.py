"""What it costs to go on from a checkpoint at another layout: the bytes that each rank reads of it.

Owns the division of every parameter over the ranks of a layout, by arithmetic. Needs no torch and no checkpoint.

A checkpoint has the parts that the ranks of its layout wrote, each of them once. A rank of the new layout reads each part
that overlaps its own, and reads it whole, since a part is the unit of torch.distributed.checkpoint's files:

    written at dp 4     [ part 0 ][ part 1 ][ part 2 ][ part 3 ]
    read at dp 3        [   rank 0   ][   rank 1   ][   rank 2   ]     rank 0 reads parts 0 and 1, for 4/3 of a part

A parameter is written three times over, with AdamW's two moments, in the weights' format.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from memo.errors import UsageError
from memo.units import format_bytes, format_duration

if TYPE_CHECKING:
    from memo.gpt.config import GPTConfig
    from memo.parallel import Layout

TENSORS = 3
"""A weight and its two moments."""
COUNTER_BYTES = 4
"""AdamW's count of steps, one for each parameter."""
COLUMNS, ROWS = 0, 1  # dimensions that tensor parallelism divides: of column- and of row-parallel weights

Box = tuple[tuple[int, int], tuple[int, int]]
"""Rows and columns of a part, half-open; a vector has one column."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resharding:
    """Bytes of weights and optimizer state that the ranks of a new layout read of a checkpoint."""

    old: Layout
    new: Layout
    own_bytes: tuple[int, ...]
    """Bytes that each rank of the new layout has."""
    read_bytes: tuple[int, ...]
    """Bytes that it reads."""

    @property
    def total_bytes(self) -> int:
        """Bytes that all ranks read."""
        return sum(self.read_bytes)

    def seconds(
        self, *, ranks_per_node: int, node_bytes_per_s: float, shared_bytes_per_s: float | None = None
    ) -> float:
        """Seconds until all ranks have read.

        Args:
            ranks_per_node: ranks that share a node's link, neighbours by number.
            node_bytes_per_s: rate at which a node reads from the checkpoint's file system.
            shared_bytes_per_s: rate at which that serves all nodes together; None: as fast as they read.

        Raises:
            UsageError: a number is not positive.
        """
        for number in (ranks_per_node, node_bytes_per_s, 1 if shared_bytes_per_s is None else shared_bytes_per_s):
            if not number > 0:
                raise UsageError(f"a checkpoint is read at a rate, and by ranks, above 0, not {number}")
        nodes = range(0, len(self.read_bytes), ranks_per_node)
        slowest = max(sum(self.read_bytes[first : first + ranks_per_node]) for first in nodes) / node_bytes_per_s
        return slowest if shared_bytes_per_s is None else max(slowest, self.total_bytes / shared_bytes_per_s)

    def row(self, *, ranks_per_node: int, node_bytes_per_s: float) -> str:
        """The line of a plan's tables.

        Args:
            ranks_per_node: as of `seconds`.
            node_bytes_per_s: as of `seconds`; 0 where no rate is known, and no time follows.
        """
        worst = max(range(len(self.read_bytes)), key=lambda rank: self.read_bytes[rank])
        most, own = self.read_bytes[worst], self.own_bytes[worst]
        whose = "its own" if most == own else f"for its {format_bytes(own)}"
        time = ""
        if node_bytes_per_s:
            seconds = self.seconds(ranks_per_node=ranks_per_node, node_bytes_per_s=node_bytes_per_s)
            time = f", {format_duration(seconds)} at {node_bytes_per_s / 1e9:.3g} GB/s a node"
        return (
            f"resharding: {_sizes(self.old)} to {_sizes(self.new)}: a rank reads at most {format_bytes(most)} of the "
            f"checkpoint, {whose}; all {format_bytes(self.total_bytes)}{time}"
        )


def reshard(
    config: GPTConfig,
    old: Layout,
    new: Layout,
    *,
    element: int,
    sparse_embedding: tuple[bool, bool] = (False, False),
) -> Resharding:
    """Counts what the ranks of a layout read of a checkpoint that another layout wrote.

    Args:
        config: the model.
        old: layout of the run that wrote it; its heads, width and layers divide.
        new: layout of the run that reads it; likewise.
        element: bytes of a weight.
        sparse_embedding: whether every replica had, and has, the embedding whole, for the sparse exchange of its gradient.

    Raises:
        UsageError: the model does not divide over one of the layouts.
    """
    for layout in (old, new):
        _require_divides(config, layout)
    parameters = list(_parameters(config))
    read: dict[str, npt.NDArray[np.int64]] = {}
    own: dict[str, npt.NDArray[np.int64]] = {}
    for parameter in parameters:
        whole = tuple(sparse and parameter.name == "tokens.weight" for sparse in sparse_embedding)
        written = np.array(sorted({_part(parameter, old, place, whole[0]) for place in _places(old)}))
        parts = np.array([_part(parameter, new, place, whole[1]) for place in _places(new)])
        own[parameter.name] = _elements(parts)
        read[parameter.name] = np.array([_overlapping(part, written) for part in parts], dtype=np.int64)
    ranks = [(pp, index) for pp in range(new.pp) for index in range(new.ranks // new.pp)]
    held = {pp: list(_held(config, new, pp, parameters)) for pp in range(new.pp)}

    def nbytes(figures: dict[str, npt.NDArray[np.int64]], pp: int, index: int) -> int:
        counters = sum(count for _, count in held[pp]) * COUNTER_BYTES
        elements = sum(count * int(figures[parameter.name][index]) for parameter, count in held[pp])
        return TENSORS * element * elements + counters

    return Resharding(
        old=old,
        new=new,
        own_bytes=tuple(nbytes(own, *rank) for rank in ranks),
        read_bytes=tuple(nbytes(read, *rank) for rank in ranks),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Parameter:
    """A parameter by the name that it has in each layer or at an end."""

    name: str
    shape: tuple[int, ...]
    divided: int | None
    """The dimension that tensor parallelism divides; None: whole on every rank of its group."""
    of_layer: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Coordinates of a rank within its pipeline stage."""

    replica: int
    tp: int


def _parameters(config: GPTConfig) -> Iterator[_Parameter]:
    """Parameters of one layer, and of the ends."""
    hidden, ffn, norm_bias = config.hidden, config.ffn, config.bias and config.norm == "layernorm"

    def linear(name: str, outputs: int, inputs: int, dim: int) -> Iterator[_Parameter]:
        yield _Parameter(name=f"{name}.weight", shape=(outputs, inputs), divided=dim)
        if config.bias:
            yield _Parameter(name=f"{name}.bias", shape=(outputs,), divided=0 if dim == COLUMNS else None)

    def norm(name: str, *, of_layer: bool) -> Iterator[_Parameter]:
        yield _Parameter(name=f"{name}.weight", shape=(hidden,), divided=None, of_layer=of_layer)
        if norm_bias:
            yield _Parameter(name=f"{name}.bias", shape=(hidden,), divided=None, of_layer=of_layer)

    yield from norm("norm1", of_layer=True)
    yield from linear("attention.qkv", config.qkv_width, hidden, COLUMNS)
    yield from linear("attention.out", hidden, hidden, ROWS)
    yield from norm("norm2", of_layer=True)
    if config.mlp == "swiglu":
        yield from linear("mlp.gate", ffn, hidden, COLUMNS)
    yield from linear("mlp.up", ffn, hidden, COLUMNS)
    yield from linear("mlp.down", hidden, ffn, ROWS)
    table = (config.vocab_size, hidden)
    yield _Parameter(name="tokens.weight", shape=table, divided=0, of_layer=False)
    if config.positions == "learned":
        yield _Parameter(name="positions.weight", shape=(config.max_seq, hidden), divided=None, of_layer=False)
    yield from norm("norm", of_layer=False)
    if not config.tie_embeddings:
        yield _Parameter(name="head.weight", shape=table, divided=0, of_layer=False)


def _held(
    config: GPTConfig, layout: Layout, pp: int, parameters: Sequence[_Parameter]
) -> Iterator[tuple[_Parameter, int]]:
    """Parameters of a pipeline rank's stages, and how many of each."""
    stages = layout.stages_of(pp)
    layers = sum(len(layout.layers_of(stage, config.layers)) for stage in stages)
    first, last = 0 in stages, layout.stages - 1 in stages
    tied = config.tie_embeddings and layout.stages > 1
    at_ends = {"tokens.weight": first + (last and tied), "positions.weight": int(first)}
    for parameter in parameters:
        count = layers if parameter.of_layer else at_ends.get(parameter.name, int(last))
        if count:
            yield parameter, count


def _places(layout: Layout) -> Iterator[_Place]:
    for replica in range(layout.dp * layout.cp):
        for tp in range(layout.tp):
            yield _Place(replica, tp)


@functools.cache
def _chunk(begin: int, end: int, index: int, count: int) -> tuple[int, int]:
    """Part `index` of `count` of a range, all of one size but the last ones: torch.chunk's."""
    size = -(-(end - begin) // count)
    return min(begin + index * size, end), min(begin + (index + 1) * size, end)


def _part(parameter: _Parameter, layout: Layout, place: _Place, whole: bool) -> Box:
    """A rank's part: tensor parallelism's of the parameter, and of that FSDP's, by rows."""
    rows, columns = parameter.shape[0], parameter.shape[1] if len(parameter.shape) > 1 else 1
    box = [(0, rows), (0, columns)]
    if parameter.divided is not None:
        box[parameter.divided] = _chunk(*box[parameter.divided], place.tp, layout.tp)
    index, count = place.replica, layout.dp * layout.cp
    if parameter.name == "positions.weight" and layout.shards_tokens:
        index, count = index * layout.tp + place.tp, count * layout.tp
    if not whole:
        box[0] = _chunk(*box[0], index, count)
    return box[0], box[1]


def _elements(parts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Elements of each part, (count, 2, 2)."""
    sizes: npt.NDArray[np.int64] = (parts[..., 1] - parts[..., 0]).prod(axis=-1)
    return sizes


def _overlapping(part: npt.NDArray[np.int64], written: npt.NDArray[np.int64]) -> int:
    """Elements of all written parts that have some of `part`."""
    if not _elements(part):
        return 0
    meets = ((written[..., 0] < part[:, 1]) & (written[..., 1] > part[:, 0])).all(axis=1)
    return int(_elements(written[meets]).sum())


def _require_divides(config: GPTConfig, layout: Layout) -> None:
    """Raises UsageError where the model does not divide over a layout, whatever a step is."""
    unit = 2 * layout.token_shards  # a length that every layout divides, since it is not the parameters' concern
    layout.check(config, seq=unit, batch=layout.dp, microbatches=layout.pp * layout.stages_per_rank)


def _sizes(layout: Layout) -> str:
    named = [f"{name} {getattr(layout, name)}" for name in ("dp", "tp", "pp", "cp") if getattr(layout, name) > 1]
    return ", ".join(named) or "one rank"
