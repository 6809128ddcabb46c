"""Data types of a profile: what each layer of one training step saves, computes and recomputes, on one rank.

Pure data. Every byte and every second is of one rank and one microbatch. A profile is measured or derived by
arithmetic, and says which. Layers of one class are equal and share one `LayerProfile`.

    saved bytes          [ always: input, attention output, statistics | other: no token dimension | by point ]
    all                           saved                                       saved                  saved
    matmuls                       saved                                       saved                  matmul outputs *
    attention                     saved                                       saved                  nothing *
    *  and, beside what autograd saves, what a recompute is given: other products' results, dropout masks

A class has points of one curve: from point to point fewer bytes are saved, and more seconds recomputed. Each layer is at
one point, and different layers of a class may be at different ones. Seconds that were measured need not lie on the
curve's convex hull.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from typing import Any

from memo.errors import PlanError
from memo.mip.inputs.coding import CODECS, Coding

ALL = "all"
"""Name of the first point of every class: everything is saved."""
MATMULS = "matmuls"
"""Outputs of matrix products are saved; results of element-wise operations are recomputed."""
ATTENTION = "attention"
"""Attention's output is saved; everything else is recomputed."""
INPUT = "input"
"""The layer's input alone is saved; attention is recomputed, too. Points without a name of their own are p1, p2, ..."""

MAX_LAYERS = 10_000
MAX_POINTS = 256
MAX_NAME = 40
"""Characters of the name of a point, or of a type."""
MAX_TILES = 1 << 20
MAX_NBYTES = 1 << 62
MAX_AMOUNT = 1e30
"""Bound of seconds and FLOPs, so that sums of their products stay finite."""


def check_amounts(noun: object, where: str) -> None:
    """Checks that every number of a dataclass is finite, not negative, and small enough to add up.

    Raises:
        PlanError: a number is not; the message names the field.
    """
    assert dataclasses.is_dataclass(noun)
    for name in _field_names(noun.__class__):
        value = getattr(noun, name)
        if isinstance(value, float):
            amount = 0 <= value <= MAX_AMOUNT  # not so of one that is not a number
        elif isinstance(value, int):
            amount = 0 <= value <= MAX_NBYTES
        else:
            continue
        if not amount:
            raise PlanError(f"{where}: {name} is {value}, not a finite amount of 0 or more")


@functools.cache
def _field_names(noun: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(noun))


class Role(enum.StrEnum):
    """Origin of a profile's numbers."""

    MEASURED = "measured"
    DERIVED = "derived"
    """Bytes and FLOPs by arithmetic or fake tensors, seconds from a hardware description."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PointProfile:
    """One point of a layer's curve, with the whole layer at it."""

    name: str
    """An identifier, which means the same point in every layer of a class."""
    saved_bytes: int
    """Saved bytes that depend on the point; what is always saved comes on top."""
    beside_bytes: int = 0
    """The part of `saved_bytes` that a recompute is given and autograd does not save, on the device beside the whole
    layer."""
    recompute_s: float = 0.0
    recompute_flops: float = 0.0
    held_bytes: int = 0
    """Peak bytes of the recompute beside the layer's saved tensors, on top of its backward's transient. 0: a
    recompute holds what a forward holds."""
    absent_bytes: int = 0
    """Bytes of what autograd saved that are not there at the peak of the layer's backward: its recompute runs in parts, each
    when backward asks for what it gives. Of a split backward all of it is there."""

    def __post_init__(self) -> None:
        if not (self.name.isascii() and self.name.isidentifier() and len(self.name) <= MAX_NAME):
            raise PlanError(f"a point is named {self.name[:80]!r}; a name is letters, digits and underscores")
        check_amounts(self, f"point {self.name}")
        if self.beside_bytes > self.saved_bytes:
            raise PlanError(f"point {self.name}: of {self.saved_bytes} bytes saved {self.beside_bytes} stand beside")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StaticBytes:
    """Bytes that one rank holds on its device through a whole step, by their use."""

    weights: int = 0
    """Weights as they are stored: this rank's shard where they are sharded."""
    gradients: int = 0
    """Gradients that microbatches add to, and whole ones that wait to be reduced."""
    optimizer: int = 0
    """Master weights and moments."""
    gathered: int = 0
    """Whole copies of sharded weights that stay from pass to pass."""
    cast: int = 0
    """Copies of weights in the number format of matrix products: autocast's."""
    messages: int = 0
    """Buffers of a pipeline's messages in flight."""
    other: int = 0
    """Libraries' memory, and what is not told apart: files of earlier versions."""

    def __post_init__(self) -> None:
        check_amounts(self, "static bytes")

    def __add__(self, more: StaticBytes) -> StaticBytes:
        return StaticBytes(**{name: getattr(self, name) + getattr(more, name) for name in _field_names(StaticBytes)})

    def __mul__(self, count: int) -> StaticBytes:
        return StaticBytes(**{name: getattr(self, name) * count for name in _field_names(StaticBytes)})

    @property
    def nbytes(self) -> int:
        """Sum of the parts."""
        return sum(getattr(self, name) for name in _field_names(StaticBytes))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """A class of equal layers."""

    name: str
    always_bytes: int
    """Bytes saved at every point: layer input, attention output and statistics."""
    other_bytes: int = 0
    """Saved tensors without a token dimension, at every point, too."""
    points: tuple[PointProfile, ...]
    """Points that the layer can have: `all` first, the only one where nothing can be recomputed, then ever fewer saved
    bytes."""
    forward_s: float
    backward_s: float
    """Without any recompute."""
    forward_flops: float = 0.0
    """Floating-point operations that are executed; of causal attention, half the square."""
    backward_flops: float = 0.0
    attention_flops: float = 0.0
    """The part of `forward_flops` in attention scores."""
    attention_s: float = 0.0
    """The part of `forward_s` in scores of full attention, which alone grows with the square of the length."""
    tiled_s: float = 0.0
    """The part of `forward_s` and `backward_s` that an MLP in tiles adds: repeated products and launches."""
    tiled_flops: float = 0.0
    """The part of `backward_flops` in those products."""
    forward_exchange_s: float = 0.0
    """The part of `forward_s` in which compute waits for collectives of tensor and context parallelism."""
    backward_exchange_s: float = 0.0
    """The part of `backward_s`, likewise."""
    gather_s: float = 0.0
    """Time on the network of gathering the layer's sharded weights, before each pass, while the layer before runs."""
    reduce_s: float = 0.0
    """Time on the network of reducing its weights' gradients in each backward, while the next layer runs."""
    sync_s: float = 0.0
    """Time on the network of reducing them once a step, while the last microbatch's backward goes on."""
    forward_transient_bytes: int = 0
    """Peak bytes of forward beside what it saves."""
    backward_transient_bytes: int = 0
    """Peak bytes of backward beside what forward saved."""
    forward_gathered_bytes: int = 0
    """The part of `forward_transient_bytes` in whole weights, this layer's and the next one's, of sharded ones."""
    backward_gathered_bytes: int = 0
    """The part of `backward_transient_bytes` in those and in their whole gradients, until they are reduced."""
    between_bytes: int = 0
    """Gradients that the first half of a split backward leaves for the second; 0 where they are counted elsewhere."""
    static: StaticBytes = StaticBytes()
    """This rank's part of the layer's parameters, gradients and optimizer state."""
    storages: int = 0
    """Number of storages that a tier must place, at the point with the most; 0 where unknown."""
    largest_storage_bytes: int = 0
    """Bytes of the largest storage at any point, which goes to one tier whole; 0 where unknown."""
    coding: Coding | None = None
    """Where the profile is of training with a codec."""

    def __post_init__(self) -> None:
        check_amounts(self, f"layer class {self.name[:80]!r}")
        if self.forward_exchange_s > self.forward_s or self.backward_exchange_s > self.backward_s:
            raise PlanError(f"layer class {self.name[:80]!r}: it communicates for longer than it runs")
        passes = (
            (self.forward_gathered_bytes, self.forward_transient_bytes),
            (self.backward_gathered_bytes, self.backward_transient_bytes),
        )
        if any(gathered > transient for gathered, transient in passes):
            raise PlanError(f"layer class {self.name[:80]!r}: gathered weights are a part of its transient bytes")
        self._check_points()
        if self.coding is not None and self.coding.spared_bytes > self.full_bytes:
            raise PlanError(
                f"layer class {self.name[:80]!r}: a codec spares {self.coding.spared_bytes} of {self.full_bytes} bytes"
            )

    def _check_points(self) -> None:
        where, names = f"layer class {self.name[:80]!r}", [point.name for point in self.points]
        if names[:1] != [ALL]:
            raise PlanError(f"{where}: its points are {names[:8]}; '{ALL}' comes first")
        if len(set(names)) != len(names):
            raise PlanError(f"{where}: two points have one name")
        if len(names) > MAX_POINTS:
            raise PlanError(f"{where}: {len(names)} points; at most {MAX_POINTS} are possible")
        whole = self.points[0]
        if any((whole.recompute_s, whole.recompute_flops, whole.held_bytes, whole.beside_bytes, whole.absent_bytes)):
            raise PlanError(f"{where}: point '{ALL}' recomputes nothing")
        for before, point in itertools.pairwise(self.points):
            if point.absent_bytes > self.full_bytes:
                raise PlanError(
                    f"{where}: at point {point.name} {point.absent_bytes} of {self.full_bytes} bytes are absent"
                )
            if point.saved_bytes >= before.saved_bytes:
                raise PlanError(
                    f"{where}: point {point.name} saves {point.saved_bytes} bytes, not fewer than {before.name} before it"
                )

    @property
    def static_bytes(self) -> int:
        """Sum of `static`."""
        return self.static.nbytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes saved at every point."""
        return self.always_bytes + self.other_bytes

    @property
    def full_bytes(self) -> int:
        """All bytes that autograd saves, which are on the device while the layer runs in either direction."""
        return self.fixed_bytes + self.points[0].saved_bytes

    @property
    def least_saved_bytes(self) -> int:
        """Bytes saved at the last point, the fewest of any."""
        return self.fixed_bytes + self.points[-1].saved_bytes

    @property
    def transient_bytes(self) -> int:
        """Larger transient of the two passes; a recompute in backward has a forward's, or its point's `held_bytes`."""
        return max(self.forward_transient_bytes, self.backward_transient_bytes)

    @property
    def repeated_bytes(self) -> int:
        """Forward's transient beyond backward's, which a recompute has again; 0 where there is no recompute."""
        return self.transient_bytes - self.backward_transient_bytes if len(self.points) > 1 else 0

    @property
    def coded_share(self) -> float:
        """Fraction by which codes make what a layer at point `all` moves fewer bytes; 0 without a codec."""
        return self.coding.spared_bytes / self.full_bytes if self.coding is not None and self.full_bytes else 0.0

    def point(self, name: str) -> PointProfile | None:
        """The point of this name; None where the layer does not have it."""
        return next((known for known in self.points if known.name == name), None)

    def at(self, name: str) -> PointProfile:
        """The point of this name.

        Raises:
            PlanError: the layer does not have it.
        """
        found = self.point(name)
        if found is None:
            raise PlanError(f"layer class {self.name[:80]!r} has no point {name[:MAX_NAME]!r}")
        return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOrHeadProfile:
    """Embedding before the layers, or head after them (final norm, projection to the vocabulary, loss)."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    forward_exchange_s: float = 0.0
    """The part of `forward_s` in which compute waits for collectives, gathers of sharded weights included."""
    backward_exchange_s: float = 0.0
    """The part of `backward_s`, likewise."""
    sync_s: float = 0.0
    """Time on the network of reducing its weights' gradients once a step."""
    saved_bytes: int = 0
    """Live from the end's forward to its backward: for the embedding while every layer runs, for the head between two
    of its own passes."""
    transient_bytes: int = 0
    """Peak bytes beside those, in either pass."""
    gathered_bytes: int = 0
    """The part of `transient_bytes` in whole weights of sharded ones."""
    static: StaticBytes = StaticBytes()

    def __post_init__(self) -> None:
        check_amounts(self, "embedding or head")
        if self.forward_exchange_s > self.forward_s or self.backward_exchange_s > self.backward_s:
            raise PlanError("embedding or head: it communicates for longer than it runs")
        if self.gathered_bytes > self.transient_bytes:
            raise PlanError("embedding or head: gathered weights are a part of its transient bytes")

    @property
    def static_bytes(self) -> int:
        """Sum of `static`."""
        return self.static.nbytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingExchange:
    """Exchange of the embedding's gradient between data-parallel ranks, in both ways; of one rank and one step.

    Dense: the whole table is reduced. Sparse: each rank sends the rows of the tokens that it has seen, with their
    numbers, to all others.
    """

    sparse: bool
    """Whether the profile is of the sparse exchange."""
    dense_s: float
    """Reduction of the gradient, and gathers of the table where it is sharded."""
    sparse_s: float
    """The rows' exchange and sum; where the table is sharded otherwise, also the update of other ranks' parts."""
    dense_bytes: int
    """Bytes that a rank receives."""
    sparse_bytes: int
    """Bytes that a rank receives, at most: where all its tokens are distinct."""
    resident_bytes: int = 0
    """Bytes of weights, gradients and optimizer state that the sparse exchange adds to a device, which has all rows."""

    def __post_init__(self) -> None:
        check_amounts(self, "embedding exchange")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Model and shapes that a profile or plan is valid for."""

    model: str
    batch: int
    """Sequences of a microbatch."""
    tokens: int
    """Length of a sequence, over all ranks that share it."""
    dtype: str
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ring: bool = False
    """Whether context-parallel ranks attend in a ring, instead of exchanging heads for tokens."""
    ep: int = 1
    """Ranks of data parallelism that divide the experts."""
    tp_overlap: bool = False
    """Whether each layer runs in two halves, with tensor-parallel collectives of one beside the other's compute."""

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "tp", "cp", "pp", "ep"):
            if not 1 <= getattr(self, name) <= 1 << 40:
                raise PlanError(f"signature: {name} is {getattr(self, name)}, not a count of 1 or more")
        if not (self.dtype.isascii() and self.dtype.isprintable() and 0 < len(self.dtype) <= MAX_NAME):
            raise PlanError(f"signature: dtype {self.dtype[:MAX_NAME]!a} is no name of a type")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """Bytes and times of one rank and one microbatch. Lists all layers of the model, also those of other stages."""

    signature: Signature
    role: Role
    classes: tuple[LayerProfile, ...]
    layers: tuple[str, ...]
    """The class of each layer, in forward order."""
    embedding: EmbeddingOrHeadProfile = EmbeddingOrHeadProfile()
    head: EmbeddingOrHeadProfile = EmbeddingOrHeadProfile()
    mlp_tiles: int = 1
    """Number of tiles in which every layer computes its MLP (`memo.gpt.model`)."""
    embedding_exchange: EmbeddingExchange | None = None
    """Dense or sparse, as `embedding` and `optimizer_s` count it; None where it is dense in any case."""
    optimizer_s: float = 0.0
    """Seconds per step."""
    optimizer_exchange_s: float = 0.0
    """Seconds per step in which updated weights are gathered and nothing else runs."""
    send_s: float = 0.0
    """Time of sending a microbatch's activations, or their gradients, to the neighbouring pipeline stage."""
    send_bytes: float = 0.0
    """Bytes of that message of one rank; 0 where they are unknown. A stage keeps room for all microbatches' messages that it
    receives (torch's pipelines)."""
    link_share: float = 0.0
    """Fraction of a GPU's link to the host that collectives take, so that copies have the rest."""
    model_flops_causal_per_token: float = 0.0
    """6N + 6Lhs: FLOPs of the model per token, over all ranks, forward and backward; for mfu_causal."""
    model_flops_full_per_token: float = 0.0
    """6N + 12Lhs, likewise; for mfu_full."""
    codec: str | None = None
    """Codec of what moves (memo.kernels.codec), by choice; None: bytes move as they are."""

    def __post_init__(self) -> None:
        check_amounts(self, "profile")
        if self.codec is not None and self.codec not in CODECS:
            raise PlanError(f"profile: the codec is {self.codec[:80]!r}, none of {', '.join(CODECS)}")
        if self.codec is None and any(layer.coding is not None for layer in self.classes):
            raise PlanError("profile: a layer class says what is coded, and the profile is of no codec")
        if self.link_share >= 1:
            raise PlanError(
                f"profile: collectives take {self.link_share:g} of the link to the host, and copies need some"
            )
        if not 1 <= self.mlp_tiles <= MAX_TILES:
            raise PlanError(f"profile: an MLP in {self.mlp_tiles} tiles; from 1 to {MAX_TILES} are possible")
        names = [known.name for known in self.classes]
        if len(set(names)) != len(names):
            raise PlanError("profile: two layer classes have one name")
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise PlanError(f"profile: {len(self.layers)} layers; from 1 to {MAX_LAYERS} are possible")
        unknown = set(self.layers) - set(names)
        if unknown:
            raise PlanError(f"profile: no layer class is named {min(unknown)[:80]!r}")

    def layer_profiles(self) -> tuple[LayerProfile, ...]:
        """Profile of each layer, in forward order; layers of one class share the object."""
        return self._layer_profiles

    @functools.cached_property
    def _layer_profiles(self) -> tuple[LayerProfile, ...]:
        by_name = {known.name: known for known in self.classes}
        return tuple(by_name[name] for name in self.layers)
