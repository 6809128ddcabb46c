"""The profile of a GPT on a machine that is not at hand: bytes and FLOPs by arithmetic, seconds from a description.

Owns the arithmetic of what one block saves, moves and computes, in bytes a token, for the fused kernels of a GPU in
bfloat16 with weights in float32. Tensor parallelism is Megatron's with sequence parallelism: every saved tensor is
divided by tp; context parallelism divides tokens. Needs no torch. A test holds the bytes against what autograd saves.

    letters, in bytes a token and rank:  h, f, q, v  widths of the residual stream, the MLP, the query/key/value
                                         projection and one of keys or values
    saved, gelu     input h | norm h | q k v | attention's out h | residual h | norm h | up f | gelu f     16h with f = 4h
    saved, swiglu   the same with gate f | up f | silu f | product f
    and statistics in float32: one a head of attention, one (rmsnorm) or two (layernorm, in bfloat16) of each norm
"""

from __future__ import annotations

import dataclasses

from memo.errors import UsageError
from memo.gpt.config import GPTConfig
from memo.gpt.counts import flops_per_token, layer_parameter_count, parameter_count
from memo.mip.hardware import Hardware
from memo.mip.profile import EndProfile, LayerProfile, Level, LevelProfile, Profile, Role, Signature

__all__ = ["Layout", "derive_profile"]

ITEM = 2  # bytes of a bfloat16
STATE_BYTES = 16  # of a parameter: float32 weight, gradient and two moments of Adam
LOGITS_BYTES = 2 * 4 << 25  # one chunk of logits and its gradient in float32: memo.gpt.loss.CHUNK_LOGITS elements
# Attention's backward makes five products of the scores' size where forward makes two (Dao et al. 2022).
ATTENTION_BACKWARD = 2.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What runs on how many GPUs."""

    tokens: int
    """Of a sequence."""
    batch: int = 1
    """Sequences in a microbatch."""
    gpus: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in ("tokens", "batch", "gpus", "tp", "cp", "pp"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.gpus % (self.tp * self.cp * self.pp):
            raise UsageError(f"{self.gpus} GPUs are no multiple of tp {self.tp} x cp {self.cp} x pp {self.pp}")

    @property
    def rank_tokens(self) -> float:
        """Of a microbatch, that one rank has of tensors that are divided among tp and cp."""
        return self.tokens * self.batch / (self.tp * self.cp)

    @property
    def replicas(self) -> int:
        """Data parallelism: whatever GPUs are left."""
        return self.gpus // (self.tp * self.cp * self.pp)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """One block, by token: bytes of what is saved and of what element-wise work reads and writes, FLOPs of the rest."""

    always: float
    all: float
    matmuls: float
    """Outputs of the products that something saved depends on: all but the last projection's."""
    elementwise: float
    """Read and written by norms, rotation, residuals and the MLP's activation."""
    elementwise_again: float
    """The part of it that the level `matmuls` repeats."""
    projections: float
    """FLOPs of the matrix products with weights, forward."""
    projections_again: float
    """Those without the last one."""
    attention: float
    """FLOPs of the causal scores, forward."""

    @classmethod
    def of(cls, config: GPTConfig, tokens: int) -> _Block:
        """By the letters of this module's docstring."""
        h, f = config.hidden * ITEM, config.ffn * ITEM
        q = config.qkv_width * ITEM
        norms = 2 * (2 * ITEM if config.norm == "layernorm" else 4)
        inner = (4 if config.mlp == "swiglu" else 2) * f
        # Queries that share keys are gathered from the projection, of which attention then keeps all besides.
        gathered = h if config.positions == "learned" and config.group > 1 else 0
        rotation = 2 * q if config.positions == "rotary" else 0
        up = (2 if config.mlp == "swiglu" else 1) * f
        # norm: read, write; residual: two reads, a write; activation: reads what `up` wrote, writes the rest of `inner`.
        activation = up + (3 if config.mlp == "swiglu" else 1) * f
        again = 2 * h + rotation + 3 * h + 2 * h + activation
        weights = layer_parameter_count(dataclasses.replace(config, bias=False)) - 2 * config.hidden
        last = config.ffn * config.hidden
        return cls(
            always=2 * h + 4 * config.heads,
            all=h + q + gathered + h + h + inner + norms,
            matmuls=q + h + up,
            elementwise=again + 3 * h,
            elementwise_again=again,
            projections=2.0 * weights,
            projections_again=2.0 * (weights - last),
            attention=2.0 * config.hidden * tokens,
        )


def derive_profile(config: GPTConfig, machine: Hardware, layout: Layout, *, name: str = "gpt") -> Profile:
    """One rank's microbatch under this layout.

    Raises:
        UsageError: the layout does not divide the model, or its MLP is tiled.
    """
    if config.heads % layout.tp or config.kv_heads % layout.tp or config.ffn % layout.tp:
        raise UsageError(f"tp {layout.tp} does not divide {config.heads} heads, {config.kv_heads} key/value heads")
    if config.mlp_tiles > 1:
        raise UsageError(f"mlp_tiles {config.mlp_tiles}: only a whole MLP can be derived; measure a tiled one")
    if config.layers < layout.pp:
        raise UsageError(f"{config.layers} layers make no {layout.pp} pipeline stages")
    signature = Signature(
        model=name, batch=layout.batch, tokens=layout.tokens, dtype="bf16", tp=layout.tp, cp=layout.cp, pp=layout.pp
    )
    ends = _Ends(config, machine, layout)
    stage_parameters = -(-parameter_count(config) // layout.pp)
    return Profile(
        signature=signature,
        role=Role.DERIVED,
        classes=(_layer(config, machine, layout),),
        layers=("block",) * config.layers,
        embedding=ends.embedding(),
        head=ends.head(),
        # Adam reads weight, gradient and moments and writes all but the gradient.
        optimizer_s=7 * 4 * stage_parameters / _shards(layout) / machine.hbm_bytes_per_s,
        model_flops_causal_per_token=flops_per_token(config, layout.tokens),
        model_flops_full_per_token=flops_per_token(config, layout.tokens, causal=False),
    )


def _layer(config: GPTConfig, machine: Hardware, layout: Layout) -> LayerProfile:
    block, tokens = _Block.of(config, layout.tokens), layout.rank_tokens
    products_s = tokens / (machine.peak_flops * machine.matmul_efficiency)
    attention_s = block.attention * tokens / (machine.peak_flops * machine.attention_efficiency)
    memory_s = tokens / machine.hbm_bytes_per_s
    exchange_s = _exchange_s(config, machine, layout)
    wide = config.hidden * ITEM * layout.tokens * layout.batch / layout.cp if layout.tp > 1 else 0.0  # gathered
    parameters = layer_parameter_count(config)
    gathered_weights = ITEM * parameters / layout.tp if _shards(layout) > layout.tp else 0.0
    fixed = wide + gathered_weights
    h, f = config.hidden * ITEM * tokens, config.ffn * ITEM * tokens
    return LayerProfile(
        name="block",
        always_bytes=round(block.always * tokens),
        levels=(
            LevelProfile(level=Level.ALL, saved_bytes=round(block.all * tokens)),
            LevelProfile(
                level=Level.MATMULS,
                saved_bytes=round(block.matmuls * tokens),
                recompute_s=block.elementwise_again * memory_s,
            ),
            LevelProfile(
                level=Level.ATTENTION,
                saved_bytes=0,
                # Of the four exchanges of a forward, the one behind the last projection is not repeated.
                recompute_s=block.projections_again * products_s
                + block.elementwise_again * memory_s
                + 3 / 4 * exchange_s,
                recompute_flops=block.projections_again * tokens,
            ),
        ),
        forward_s=block.projections * products_s + attention_s + block.elementwise * memory_s + exchange_s,
        backward_s=2 * block.projections * products_s
        + ATTENTION_BACKWARD * attention_s
        + 2 * block.elementwise * memory_s
        + 1.5 * exchange_s,  # the two gathers once more, for the weights' gradients
        forward_flops=(block.projections + block.attention) * tokens,
        backward_flops=(2 * block.projections + 2 * block.attention) * tokens,
        attention_flops=block.attention * tokens,
        attention_s=attention_s,
        forward_transient_bytes=round(fixed + f + h),
        # The gradients of the MLP's two wide tensors, of the residual and of one more, and a layer's own in bfloat16.
        backward_transient_bytes=round(fixed + 2 * f + 2 * h + gathered_weights),
        static_bytes=round(STATE_BYTES * parameters / _shards(layout)),
    )


def _shards(layout: Layout) -> int:
    """Ranks that share one stage's parameters and their state: fully sharded over replicas and context, too."""
    return layout.gpus // layout.pp


def _exchange_s(config: GPTConfig, machine: Hardware, layout: Layout) -> float:
    """Two gathers and two scatters of tensor parallelism, four all-to-alls of context parallelism, in one forward."""
    whole = config.hidden * ITEM * layout.tokens * layout.batch
    tensor = 4 * (layout.tp - 1) / layout.tp * whole / layout.cp
    context = 4 * (layout.cp - 1) / layout.cp * whole / (layout.cp * layout.tp)
    if tensor + context == 0:
        return 0.0
    return (tensor + context) / machine.nvlink_bytes_per_s


@dataclasses.dataclass(frozen=True, slots=True)
class _Ends:
    config: GPTConfig
    machine: Hardware
    layout: Layout

    def embedding(self) -> EndProfile:
        """A row read for each token and added to in backward; the rotary tables stay for all layers."""
        config, machine, tokens = self.config, self.machine, self.layout.rank_tokens
        row = config.hidden * ITEM
        rotary = 2 * config.hidden // config.heads * ITEM * self.layout.tokens / self.layout.cp
        return EndProfile(
            forward_s=2 * row * tokens / machine.hbm_bytes_per_s,
            backward_s=4 * row * tokens / machine.hbm_bytes_per_s,
            saved_bytes=round(8 * tokens + (rotary if config.positions == "rotary" else 0)),
            transient_bytes=round(row * tokens),
            static_bytes=round(STATE_BYTES * config.vocab_size * config.hidden / _shards(self.layout)),
        )

    def head(self) -> EndProfile:
        """Norm, projection and loss; memo.gpt.loss makes the gradients in forward, a chunk of logits at a time."""
        config, machine, tokens = self.config, self.machine, self.layout.rank_tokens
        flops = 2.0 * config.vocab_size * config.hidden * tokens
        row = config.hidden * ITEM * tokens
        weights = 0 if config.tie_embeddings else config.vocab_size * config.hidden
        return EndProfile(
            forward_s=3 * flops / (machine.peak_flops * machine.matmul_efficiency) + 4 * row / machine.hbm_bytes_per_s,
            backward_s=6 * row / machine.hbm_bytes_per_s,
            forward_flops=3 * flops,
            saved_bytes=round(3 * row),  # the norm's input and output, and the gradient of that
            transient_bytes=round(LOGITS_BYTES + row + 4 * config.vocab_size * config.hidden / self.layout.tp),
            static_bytes=round(STATE_BYTES * weights / _shards(self.layout)),
        )
