"""Shape of a GPT: a validated dataclass, and presets of the published sizes (presets.toml).

Owns every number that decides a model's parameters and FLOPs. Does not import torch, so the command line and the planners
can use it alone. Invariant: a GPTConfig is consistent; heads divide the width, key/value heads divide the heads.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Literal, get_args

from memo.errors import UsageError
from memo.gpt.attention_pattern import AttentionPattern
from memo.gpt.rope_scaling import RopeScaling
from memo.toml_tables import toml_tables

Norm = Literal["layernorm", "rmsnorm"]
Mlp = Literal["gelu", "swiglu"]
Positions = Literal["learned", "rotary"]
Variant = Literal["gpt", "llama"]

# A SwiGLU has three matrices where a GELU MLP has two: 2/3 of its width keeps the parameter count (Shazeer 2020,
# "GLU Variants Improve Transformer"); the multiple of 256 is Llama's.
SWIGLU_MULTIPLE = 256


MOE_FLAGS = {"bottleneck": "expert-bottleneck", "balance_coefficient": "balance-loss", "z_coefficient": "z-loss"}
"""Flags of fields of MoeConfig that have not the field's name."""


def moe_flag(name: str) -> str:
    """The flag of a field of MoeConfig."""
    return f"--{MOE_FLAGS.get(name, name.replace('_', '-'))}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Mixture of experts in the place of some layers' MLPs.

    Raises:
        UsageError: a number is out of range.
    """

    experts: int
    """Experts of a layer that has them."""
    top_k: int = 2
    """With --experts: experts of each token."""
    shared_experts: int = 0
    """With --experts: experts that all tokens use besides, as one MLP of their widths together."""
    expert_hidden: int
    """With --experts: inner width of an expert."""
    bottleneck: int = 0
    """With --experts: numbers of a token that its routed experts get and return, and their ranks exchange: one projection of
    the layer descends to them before the exchange, one ascends behind it (Jin et al. 2025, "BigMac"). 0: all of the hidden
    size."""
    every: int = 1
    """With --experts: distance of the layers with experts; the last of each N layers has them."""
    balance_coefficient: float = 0.01
    """With --experts: factor of the load-balancing loss (Fedus et al. 2021, "Switch Transformers", section 2.2)."""
    z_coefficient: float = 0.001
    """With --experts: factor of the router z-loss (Zoph et al. 2022, "ST-MoE", section 3.3)."""

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "expert_hidden", "every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{moe_flag(name)} {getattr(self, name)} is less than 1")
        for name in ("shared_experts", "bottleneck"):
            if getattr(self, name) < 0:
                raise UsageError(f"{moe_flag(name)} {getattr(self, name)} is negative")
        if self.top_k > self.experts:
            raise UsageError(f"--top-k {self.top_k} is more than the {self.experts} experts there are")
        for name in ("balance_coefficient", "z_coefficient"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{moe_flag(name)} {getattr(self, name)} is not zero or a positive number")

    @property
    def shared_hidden(self) -> int:
        """Inner width of the shared experts together; 0 without."""
        return self.shared_experts * self.expert_hidden

    def is_in(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return layer % self.every == self.every - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Shape of a decoder-only transformer.

    Raises:
        UsageError: the numbers do not fit together.
    """

    vocab_size: int
    """Rows of the token embedding."""
    hidden: int
    """Width of the residual stream."""
    layers: int
    """Number of layers."""
    heads: int
    """Number of query heads; each has width hidden / heads."""
    kv_heads: int
    """Number of key and value heads; fewer than the query heads is grouped-query attention."""
    ffn: int
    """Inner width of the MLP."""
    max_seq: int
    """Rows of the learned position table. Rotary models take any length and ignore it."""
    norm: Norm = "layernorm"
    mlp: Mlp = "gelu"
    positions: Positions = "learned"
    dropout: float = 0.0
    """Dropout probability on the embedding and on each block's outputs; none inside attention, as in its fused kernels."""
    tie_embeddings: bool = True
    """Use the token embedding as the output projection."""
    bias: bool = True
    """Biases in the linear layers of the blocks and in LayerNorm."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    mlp_tiles: int = 1
    """Tiles of each MLP; above 1 it saves only its input and recomputes its wide activations in backward."""
    moe: MoeConfig | None = None
    """Mixture of experts; None has none."""
    pattern: AttentionPattern | None = None
    """Layers with local attention; None has none."""
    end_of_document: int | None = None
    """Token that ends a document; attention does not cross it and positions restart after it. None for no boundaries."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "ffn", "max_seq", "mlp_tiles"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"model: {name} is {value!r}; it must be a whole number of at least 1")
        for name, kinds in (("norm", Norm), ("mlp", Mlp), ("positions", Positions)):
            value, allowed = getattr(self, name), get_args(kinds)
            if value not in allowed:
                raise UsageError(f"model: {name} is {value!r}; choose one of {', '.join(allowed)}")
        if self.hidden % self.heads:
            raise UsageError(f"model: {self.heads} heads do not divide a hidden size of {self.hidden}")
        if self.heads % self.kv_heads:
            raise UsageError(f"model: {self.kv_heads} key/value heads do not divide {self.heads} heads")
        if self.positions == "rotary" and self.head_dim % 2:
            raise UsageError(f"model: rotary positions need an even head size, not {self.head_dim}")
        if not 0.0 <= self.dropout < 1.0:
            raise UsageError(f"model: dropout is {self.dropout}; it must be at least 0 and below 1")
        if self.end_of_document is not None and not 0 <= self.end_of_document < self.vocab_size:
            raise UsageError(
                f"model: end_of_document {self.end_of_document} is not a token; give a number below {self.vocab_size}"
            )
        if not 0.0 < self.rope_theta < math.inf or not self.norm_eps > 0.0:
            raise UsageError("model: rope_theta and norm_eps must be positive")
        if self.moe is not None and self.moe.every > self.layers:
            raise UsageError(f"--every {self.moe.every} leaves no layer of {self.layers} with experts")
        if self.pattern is not None and self.pattern.full_every > self.layers:
            raise UsageError(
                f"--full-every {self.pattern.full_every} leaves no layer of {self.layers} with full attention; give 0 if "
                "none is to have it"
            )
        if self.positions != "rotary" and self.rope_scaling is not None:
            raise UsageError("model: rope_scaling is for rotary positions, and these are learned")

    @property
    def variant(self) -> Variant:
        """The architecture by its name: "llama" with RMSNorm, else "gpt"."""
        return "llama" if self.norm == "rmsnorm" else "gpt"

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return 0 if self.moe is None else self.layers // self.moe.every

    @property
    def expert_count(self) -> int:
        """Experts of a layer that has them; 0 without."""
        return 0 if self.moe is None else self.moe.experts

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return self.moe is not None and self.moe.is_in(layer)

    def window_of(self, layer: int, tokens: float = math.inf) -> int | None:
        """Window of a layer, counted from 0; None where attention in a sequence of `tokens` tokens is full."""
        pattern = self.pattern
        return pattern.window if pattern is not None and pattern.is_local(layer) and pattern.window < tokens else None

    def is_local_within(self, tokens: int) -> bool:
        """Whether any layer's attention in a sequence of `tokens` tokens is local."""
        return self.local_window is not None and self.local_window < tokens

    @property
    def local_window(self) -> int | None:
        """Tokens of the window of layers with local attention; None where none has it."""
        return next(filter(None, map(self.window_of, range(self.layers))), None)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def group(self) -> int:
        """Number of query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def qkv_width(self) -> int:
        """Output width of the fused query/key/value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def _preset(*, moe: Any = None, pattern: Any = None, **shape: Any) -> GPTConfig:
    return GPTConfig(
        **{"kv_heads": shape["heads"], "ffn": 4 * shape["hidden"]} | shape,
        moe=moe and MoeConfig(**moe),
        pattern=pattern and AttentionPattern(**pattern),
    )


PRESETS: dict[str, GPTConfig] = {
    name: _preset(**shape) for name, shape in toml_tables(__file__, "presets.toml").items()
}


def with_experts(shape: GPTConfig, *, experts: int | None = None, **numbers: float | None) -> GPTConfig:
    """The shape with its mixture of experts changed, or with one.

    Args:
        shape: the model.
        experts: number of experts; None is the model's.
        **numbers: the other numbers of a MoeConfig, such as `top_k`; None is the model's.

    Raises:
        UsageError: a number is out of range, or there are no experts.
    """
    fields: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    if shape.moe is None and experts is None:
        if fields:
            raise UsageError(f"{moe_flag(next(iter(fields)))} has no meaning without --experts")
        return shape
    fields |= {} if experts is None else {"experts": experts}
    if shape.moe is not None:
        return dataclasses.replace(shape, moe=dataclasses.replace(shape.moe, **fields))
    return dataclasses.replace(shape, moe=MoeConfig(**{"expert_hidden": shape.ffn} | fields))


def expert_shard_dimension(experts: int, inputs: int, *, shards: int) -> int:
    """Dimension by which matrices (experts, inputs, outputs) are sharded: whole experts where each rank gets as many.

    Else their inputs, where these divide: shards of whole experts would be filled up with zeros, and some ranks empty.
    """
    return 1 if experts % shards and not inputs % shards else 0


def preset_key(name: str) -> str:
    """Spelling by which names of models are compared: `Meta-Llama-3-8B-Instruct` and `llama3-8b` have one."""
    spelled = re.sub(r"[\s_]+", "-", name.strip().lower())
    spelled = re.sub(r"^meta-", "", re.sub(r"(-(instruct|base|chat|hf|v0\.1))+$", "", spelled))
    return re.sub(r"^llama-?3(\.[123])?-", "llama3-", re.sub(r"^(llama|qwen)-(?=\d)", r"\1", spelled))


def preset_name(name: str) -> str | None:
    """The key of PRESETS that a name means, by any case; None for none."""
    return next((known for known in PRESETS if known == preset_key(name)), None)


def variant_of(name: str, asked: Variant | None) -> Variant:
    """The architecture of a preset.

    Args:
        name: a preset's name.
        asked: what the user asked for; None is the preset's own, which is "gpt" where it has both.

    Raises:
        UsageError: the preset has one architecture, and another one is asked for.
    """
    known = preset_name(name)
    if known is None or PRESETS[known].variant == "gpt":  # such presets have a form of each variant
        return asked or "gpt"
    if asked == "gpt":
        raise UsageError(f"{name} is a llama; leave out the variant")
    return "llama"


def preset(
    name: str,
    *,
    variant: Variant | None = None,
    vocab_size: int | None = None,
    max_seq: int | None = None,
    **overrides: Any,
) -> GPTConfig:
    """Shape of a named size, with fields replaced.

    Args:
        name: a key of PRESETS, by any case.
        variant: "gpt" for the GPT-2 architecture; "llama" for RMSNorm, rotary positions, SwiGLU, no biases, and four query
            heads per key/value head. None is the preset's own, "gpt" where it has both.
        vocab_size: replaces the preset's; None keeps it.
        max_seq: replaces the preset's; None keeps it.
        **overrides: other fields of GPTConfig; None keeps the preset's. Where `heads` or `hidden` is replaced, `kv_heads`
            and `ffn` follow in proportion unless they are given too.

    Raises:
        UsageError: unknown preset, variant or field, or numbers that do not fit together.
    """
    known = preset_name(name)
    if known is None:
        raise UsageError.unknown("model", name, PRESETS)
    if variant is not None and variant not in get_args(Variant):
        raise UsageError(f"unknown variant {variant!r}; choose one of {', '.join(get_args(Variant))}")
    unknown = overrides.keys() - {field.name for field in dataclasses.fields(GPTConfig)}
    if unknown:
        raise UsageError(f"model: no field named {', '.join(sorted(unknown))}")
    variant, base = variant_of(name, variant), PRESETS[known]
    given = {"vocab_size": vocab_size, "max_seq": max_seq} | overrides
    changes = {field: value for field, value in given.items() if value is not None}
    heads, hidden = changes.get("heads", base.heads), changes.get("hidden", base.hidden)
    for field, value in (("heads", heads), ("hidden", hidden)):
        if not isinstance(value, int):
            raise UsageError(f"model: {field} is {value!r}; it must be a whole number of at least 1")
    if base.variant == "llama":
        derived = _proportional(base, hidden, heads)
    else:
        derived = _llama_fields(hidden, heads) if variant == "llama" else {"kv_heads": heads, "ffn": 4 * hidden}
    return dataclasses.replace(base, **(derived | changes))


def _proportional(base: GPTConfig, hidden: int, heads: int) -> dict[str, Any]:
    """Key/value heads and inner width in the base's proportions."""
    kv_heads = heads // base.group if heads % base.group == 0 else heads
    return {"kv_heads": kv_heads, "ffn": base.ffn * hidden // base.hidden}


def _llama_fields(hidden: int, heads: int) -> dict[str, Any]:
    two_thirds = -(-8 * hidden // (3 * SWIGLU_MULTIPLE)) * SWIGLU_MULTIPLE
    return {
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "positions": "rotary",
        "bias": False,
        "tie_embeddings": False,
        "ffn": two_thirds,
        "kv_heads": heads // 4 if heads % 4 == 0 else heads,
    }
