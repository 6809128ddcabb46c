"""The nouns of a profile: what each layer of one training step saves, computes and recomputes, on one rank.

Pure data, no torch. Every byte and every second is of one rank and one microbatch; a profile is made by measuring a step
or derived from arithmetic, and says which. Layers of one class are alike: they share one `LayerProfile`.

    what a layer saves   [ always: input, attention output, statistics | other: no token dimension | token-wise         ]
    SAVE_ALL                      saved                                       saved                      saved
    SAVE_MATMULS                  saved                                       saved                      matmul outputs *
    SAVE_ATTENTION                saved                                       saved                      nothing *
    *  and, beside what autograd saves, what a recompute is given: other products' results, masks of dropout

A level is chosen for each token, so of the token-wise part any mix of the three may be saved; `recompute_s` is the time
of bringing back all tokens at that level, and half of the tokens take half of it.
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
"""Bound of seconds and FLOPs: sums of products of them stay finite."""


def check_amounts(noun: object, where: str) -> None:
    """Every byte count, time and amount of a dataclass is finite, not negative, and small enough to add up.

    Raises:
        PlanError: names the field.
    """
    assert dataclasses.is_dataclass(noun)
    for field in dataclasses.fields(noun):
        value = getattr(noun, field.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        limit = MAX_NBYTES if isinstance(value, int) else MAX_AMOUNT
        if not (math.isfinite(value) and 0 <= value <= limit):
            raise PlanError(f"{where}: {field.name} is {value}, which is no amount")


class Level(enum.StrEnum):
    """How much of the token-wise part is saved for a token; the rest is computed again in backward."""

    SAVE_ALL = "all"
    SAVE_MATMULS = "matmuls"
    """Outputs of matrix products are saved, what element-wise operations make of them is recomputed."""
    SAVE_ATTENTION = "attention"
    """Nothing of the token-wise part is saved; attention itself never runs again, as its output is always saved."""


class Role(enum.StrEnum):
    """Where a profile's numbers come from."""

    MEASURED = "measured"
    DERIVED = "derived"
    """Bytes and FLOPs by arithmetic or fake tensors, seconds from a hardware description."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LevelProfile:
    """One level, as if every token of the layer were at it."""

    level: Level
    saved_bytes: int
    """Of the token-wise part; what is always saved comes on top."""
    beside_bytes: int = 0
    """What stands beside the whole layer where its tokens are at several levels: of `saved_bytes`, what autograd does not
    save and a recompute is given, and what lies in several pieces and is gathered in a block of its own to move."""
    recompute_s: float = 0.0
    recompute_flops: float = 0.0

    def __post_init__(self) -> None:
        check_amounts(self, f"level {self.level}")
        if self.beside_bytes > self.saved_bytes:
            raise PlanError(f"level {self.level}: of {self.saved_bytes} bytes saved {self.beside_bytes} stand beside")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """A class of layers."""

    name: str
    always_bytes: int
    """Layer input, attention output and its statistics: saved whole at every level."""
    other_bytes: int = 0
    """Saved tensors without a token dimension: whole at every level, too."""
    levels: tuple[LevelProfile, ...]
    """SAVE_ALL first; a layer that cannot recompute a part of its tokens has no other."""
    forward_s: float
    backward_s: float
    """Without any recompute."""
    forward_flops: float = 0.0
    """Floating-point operations that are really done: attention as the causal half."""
    backward_flops: float = 0.0
    attention_flops: float = 0.0
    """The part of `forward_flops` that attention's scores do; and of `forward_s`, the time that they take. They alone
    grow with the square of the length."""
    attention_s: float = 0.0
    forward_transient_bytes: int = 0
    """The largest sum of bytes that forward has beside what it saves."""
    backward_transient_bytes: int = 0
    between_bytes: int = 0
    """Gradients that the first half of a split backward leaves for the weights; 0 also where they count among what a
    step holds besides."""
    static_bytes: int = 0
    """This rank's part of the layer's parameters, gradients and optimizer state."""
    storages: int = 0
    """What a tier has to find places for, at whichever level has most; this and the next are 0 where nobody knows them."""
    largest_storage_bytes: int = 0
    """At any level: it goes to one place whole."""

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
        """What is saved whatever the levels are."""
        return self.always_bytes + self.other_bytes

    @property
    def full_bytes(self) -> int:
        """Everything that autograd saves: what stands on the device while the layer runs, in either direction, beside what
        its recompute is given."""
        return self.fixed_bytes + self.levels[0].saved_bytes

    @property
    def transient_bytes(self) -> int:
        """The larger of the two passes; a recompute in backward has a forward's transients."""
        return max(self.forward_transient_bytes, self.backward_transient_bytes)

    def level(self, level: Level) -> LevelProfile | None:
        """What is known of a level; None where the layer cannot be treated so."""
        return next((known for known in self.levels if known.level is level), None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndProfile:
    """What stands before the layers (embedding) or behind them (final norm, projection to the vocabulary, loss)."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    saved_bytes: int = 0
    """Of the embedding: live from its forward to its backward, that is while every layer runs. Of the head: live only
    between its own forward and backward."""
    transient_bytes: int = 0
    """The largest sum of bytes beside those, in either pass."""
    static_bytes: int = 0

    def __post_init__(self) -> None:
        check_amounts(self, "embedding or head")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What a profile and a plan were made for: another batch or length needs another one."""

    model: str
    batch: int
    """Sequences in a microbatch."""
    tokens: int
    """Of one sequence, over all ranks that share it."""
    dtype: str
    tp: int = 1
    cp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "tp", "cp", "pp"):
            if not 1 <= getattr(self, name) <= 1 << 40:
                raise PlanError(f"signature: {name} is {getattr(self, name)}, which is no count")

    @property
    def rank_tokens(self) -> int:
        """Tokens of a sequence whose layers one rank computes (token ranges of a plan are cut from these)."""
        return -(-self.tokens // self.cp)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One rank's microbatch. All layers of the model are listed; a pipeline stage runs a part of them."""

    signature: Signature
    role: Role
    classes: tuple[LayerProfile, ...]
    layers: tuple[str, ...]
    """The class of each layer, in forward order."""
    embedding: EndProfile = EndProfile()
    head: EndProfile = EndProfile()
    mlp_tiles: int = 1
    """In how many tiles every layer computes its MLP (memo.gpt.model.tiled_mlp); another number is another profile."""
    optimizer_s: float = 0.0
    """Once a step."""
    model_flops_causal_per_token: float = 0.0
    """6N + 6Lhs: what the model needs for a token of the sequence, over all ranks, forward and backward; for mfu_causal."""
    model_flops_full_per_token: float = 0.0
    """6N + 12Lhs: for mfu_full."""

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
        """One for each layer, in forward order; layers of one class share the object."""
        by_name = {known.name: known for known in self.classes}
        return tuple(by_name[name] for name in self.layers)
