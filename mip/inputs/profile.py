"""Data types of a profile: what each layer of one training step saves, computes and recomputes, on one rank.

Pure data. Every byte and every second is of one rank and one microbatch. A profile is measured or derived by
arithmetic, and says which. Layers of one class are equal and share one `LayerProfile`.

    saved bytes          [ always: input, attention output, statistics | other: no token dimension | token-wise ]
    SAVE_ALL                      saved                                       saved                  saved
    SAVE_MATMULS                  saved                                       saved                  matmul outputs *
    SAVE_ATTENTION                saved                                       saved                  nothing *
    *  and, beside what autograd saves, what a recompute is given: other products' results, dropout masks

The level is chosen per token, so any mix of the three is possible in the token-wise part. `recompute_s` is the time of
recomputing all tokens at that level; half of the tokens take half of it.
"""

from __future__ import annotations

import dataclasses
import enum
import math

from memo.errors import PlanError

__all__ = [
    "MAX_LAYERS",
    "EndProfile",
    "LayerProfile",
    "Level",
    "LevelProfile",
    "Profile",
    "Role",
    "Signature",
    "check_amounts",
]

MAX_LAYERS = 10_000
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
    for field in dataclasses.fields(noun):
        value = getattr(noun, field.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        limit = MAX_NBYTES if isinstance(value, int) else MAX_AMOUNT
        if not (math.isfinite(value) and 0 <= value <= limit):
            raise PlanError(f"{where}: {field.name} is {value}, not a finite amount of 0 or more")


class Level(enum.StrEnum):
    """Part of the token-wise bytes that is saved for a token; the rest is recomputed in backward."""

    SAVE_ALL = "all"
    SAVE_MATMULS = "matmuls"
    """Outputs of matrix products are saved; results of element-wise operations are recomputed."""
    SAVE_ATTENTION = "attention"
    """Nothing of the token-wise part is saved. Attention is never recomputed: its output is always saved."""


class Role(enum.StrEnum):
    """Origin of a profile's numbers."""

    MEASURED = "measured"
    DERIVED = "derived"
    """Bytes and FLOPs by arithmetic or fake tensors, seconds from a hardware description."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LevelProfile:
    """One level of a layer, with every token at it."""

    level: Level
    saved_bytes: int
    """Saved bytes of the token-wise part; what is always saved comes on top."""
    beside_bytes: int = 0
    """Bytes on the device beside the whole layer where its tokens are at several levels. Of `saved_bytes`, these are
    what a recompute is given and autograd does not save, and what is gathered from several pieces into one block to
    move."""
    recompute_s: float = 0.0
    recompute_flops: float = 0.0

    def __post_init__(self) -> None:
        check_amounts(self, f"level {self.level}")
        if self.beside_bytes > self.saved_bytes:
            raise PlanError(f"level {self.level}: of {self.saved_bytes} bytes saved {self.beside_bytes} stand beside")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """A class of equal layers."""

    name: str
    always_bytes: int
    """Layer input, attention output and statistics, saved at every level."""
    other_bytes: int = 0
    """Saved tensors without a token dimension, at every level, too."""
    levels: tuple[LevelProfile, ...]
    """Levels that the layer can have, SAVE_ALL first; the only one where tokens cannot be recomputed."""
    forward_s: float
    backward_s: float
    """Without any recompute."""
    forward_flops: float = 0.0
    """Floating-point operations that are executed; of causal attention, half the square."""
    backward_flops: float = 0.0
    attention_flops: float = 0.0
    """The part of `forward_flops` in attention scores, which alone grows with the square of the length."""
    attention_s: float = 0.0
    """The part of `forward_s` in attention scores."""
    forward_transient_bytes: int = 0
    """Peak bytes of forward beside what it saves."""
    backward_transient_bytes: int = 0
    """Peak bytes of backward beside what forward saved."""
    between_bytes: int = 0
    """Gradients that the first half of a split backward leaves for the second; 0 where they are counted elsewhere."""
    static_bytes: int = 0
    """This rank's part of the layer's parameters, gradients and optimizer state."""
    storages: int = 0
    """Number of storages that a tier must place, at the level with the most; 0 where unknown."""
    largest_storage_bytes: int = 0
    """Bytes of the largest storage at any level, which goes to one tier whole; 0 where unknown."""

    def __post_init__(self) -> None:
        check_amounts(self, f"layer class {self.name[:80]!r}")
        names = [level.level for level in self.levels]
        if not names or names[0] is not Level.SAVE_ALL or sorted(names, key=list(Level).index) != names:
            raise PlanError(
                f"layer class {self.name[:80]!r}: its levels are {names}; 'all' comes first, each once at most"
            )
        if len(set(names)) != len(names):
            raise PlanError(f"layer class {self.name[:80]!r}: a level appears twice")
        if self.levels[0].recompute_s or self.levels[0].recompute_flops:
            raise PlanError(f"layer class {self.name[:80]!r}: level 'all' recomputes nothing")

    @property
    def fixed_bytes(self) -> int:
        """Bytes saved at every level."""
        return self.always_bytes + self.other_bytes

    @property
    def full_bytes(self) -> int:
        """All bytes that autograd saves, which are on the device while the layer runs in either direction."""
        return self.fixed_bytes + self.levels[0].saved_bytes

    @property
    def transient_bytes(self) -> int:
        """Larger transient of the two passes; a recompute in backward has a forward's."""
        return max(self.forward_transient_bytes, self.backward_transient_bytes)

    def level(self, level: Level) -> LevelProfile | None:
        """The profile of a level; None where the layer cannot have it."""
        return next((known for known in self.levels if known.level is level), None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndProfile:
    """Embedding before the layers, or head after them (final norm, projection to the vocabulary, loss)."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    saved_bytes: int = 0
    """Live from the end's forward to its backward: for the embedding while every layer runs, for the head between two
    of its own passes."""
    transient_bytes: int = 0
    """Peak bytes beside those, in either pass."""
    static_bytes: int = 0

    def __post_init__(self) -> None:
        check_amounts(self, "embedding or head")


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

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "tp", "cp", "pp"):
            if not 1 <= getattr(self, name) <= 1 << 40:
                raise PlanError(f"signature: {name} is {getattr(self, name)}, not a count of 1 or more")

    @property
    def rank_tokens(self) -> int:
        """Tokens of a sequence that one rank computes; a plan's token ranges are parts of these."""
        return -(-self.tokens // self.cp)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Bytes and times of one rank and one microbatch. Lists all layers of the model, also those of other stages."""

    signature: Signature
    role: Role
    classes: tuple[LayerProfile, ...]
    layers: tuple[str, ...]
    """The class of each layer, in forward order."""
    embedding: EndProfile = EndProfile()
    head: EndProfile = EndProfile()
    mlp_tiles: int = 1
    """Number of tiles in which every layer computes its MLP (`memo.gpt.model`)."""
    optimizer_s: float = 0.0
    """Seconds per step."""
    model_flops_causal_per_token: float = 0.0
    """6N + 6Lhs: FLOPs of the model per token, over all ranks, forward and backward; for mfu_causal."""
    model_flops_full_per_token: float = 0.0
    """6N + 12Lhs, likewise; for mfu_full."""

    def __post_init__(self) -> None:
        check_amounts(self, "profile")
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
        by_name = {known.name: known for known in self.classes}
        return tuple(by_name[name] for name in self.layers)
