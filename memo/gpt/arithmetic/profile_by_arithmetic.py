"""Profile of a GPT by arithmetic, for a machine that need not be there: bytes and FLOPs of the model, rates of the machine.

Owns the profile of a layer (from the figures of block_bytes.py), of the embedding and of the head, for the fused kernels of
a GPU. Tensor parallelism is Megatron's with sequence parallelism, which divides every saved tensor by tp; context
parallelism divides tokens. Rates are those of matrix products in the given precision. Needs no torch.

A tiled MLP does the same work in more pieces. Each tile of a pass adds the time of TILE_ROWS more rows, since the last
blocks of rows leave a GPU partly idle, and the time of its kernel launches.
"""

from __future__ import annotations

import dataclasses

from memo.errors import UsageError
from memo.gpt.arithmetic.block_bytes import Block, ElementSizes
from memo.gpt.arithmetic.flops import flops_per_token, layer_parameter_count, parameter_count
from memo.gpt.arithmetic.framework_profile import profile_of_training
from memo.gpt.arithmetic.kernel_times import KernelRates
from memo.gpt.arithmetic.layout import Layout
from memo.gpt.arithmetic.training import Training
from memo.gpt.config import GPTConfig
from memo.gpt.train_config import Precision
from memo.mip.inputs import (
    ALL,
    ATTENTION,
    MATMULS,
    Collectives,
    EndProfile,
    Group,
    Hardware,
    LayerProfile,
    PointProfile,
    Profile,
    Role,
    Signature,
)
from memo.swap import comparing_nbytes

__all__ = ["Layout", "derive_profile"]

STATE_BYTES = 16  # per parameter: float32 weight, gradient and two moments of Adam
LOGITS = 1 << 25  # in one chunk of the loss: memo.loss.chunked_cross_entropy.CHUNK_LOGITS
LOGIT_BYTES = 2 * 4  # a logit and its gradient in float32
# Attention's backward makes five products of the scores' size where forward makes two (Dao et al. 2022).
ATTENTION_BACKWARD = 2.5
TILE_ROWS = 128  # rows of a block in a GPU's matrix product
REPLAYED = 33  # kernels of a recompute of all but attention, at most
MOST_OF_LINK = 0.9  # of the link to the host that collectives may take before copies share what is left
LAUNCHES, LAUNCH_S = 8, 5e-6  # kernels of one tile in one pass, and the launch time of one


def derive_profile(
    config: GPTConfig,
    machine: Hardware,
    layout: Layout,
    *,
    precision: Precision = Precision.BF16,
    training: Training | None = None,
    rates: KernelRates | None = None,
    name: str = "gpt",
) -> Profile:
    """Derives the profile of one rank's microbatch.

    Args:
        config: the model, with the number of MLP tiles.
        machine: rates and memories of the machine.
        layout: size of the step and its parallelism.
        precision: number format of weights and arithmetic, of memo's own engine.
        training: choices of another framework, which computes in 16 bits; None is memo's own engine.
        rates: what kernels reach on the machine, for `training`; None is what the machine's description says.
        name: name of the model in the profile.

    Raises:
        UsageError: the layout does not divide the model.
    """
    if config.heads % layout.tp or config.kv_heads % layout.tp or config.ffn % layout.tp:
        raise UsageError(f"tp {layout.tp} does not divide {config.heads} heads, {config.kv_heads} key/value heads")
    if config.layers < layout.pp:
        raise UsageError(f"{config.layers} layers do not make {layout.pp} pipeline stages; use a smaller pp")
    if training is not None:
        return profile_of_training(config, machine, layout, training, rates=rates, name=name)
    signature = Signature(
        model=name,
        batch=layout.batch,
        tokens=layout.tokens,
        dtype=str(precision),
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
    )
    sizes = ElementSizes.of(precision)
    layer = _layer(config, machine, layout, sizes)
    ends = _Ends(config, machine, layout, sizes)
    stage_parameters = -(-parameter_count(config) // layout.pp)
    return Profile(
        signature=signature,
        role=Role.DERIVED,
        classes=(layer,),
        layers=("block",) * config.layers,
        mlp_tiles=config.mlp_tiles,
        embedding=ends.embedding(),
        head=ends.head(),
        # Adam reads weight, gradient and two moments, and writes all but the gradient: 7 float32 per parameter.
        optimizer_s=7 * 4 * stage_parameters / _shards(layout) / machine.hbm_bytes_per_s,
        send_s=_send_s(config, machine, layout, sizes),
        link_share=_link_share(machine, layout, layer),
        model_flops_causal_per_token=flops_per_token(config, layout.tokens),
        model_flops_full_per_token=flops_per_token(config, layout.tokens, causal=False),
    )


def _layer(config: GPTConfig, machine: Hardware, layout: Layout, sizes: ElementSizes) -> LayerProfile:
    tokens = layout.rank_tokens
    block = Block.of(config, layout.tokens, sizes, batch=layout.batch, tp=layout.tp, cp=layout.cp)
    products_s = tokens / (machine.peak_flops * machine.matmul_efficiency)
    attention_s = block.attention * tokens / (machine.peak_flops * machine.attention_efficiency)
    memory_s = tokens / machine.hbm_bytes_per_s
    tensor_s, context_s = _tensor_s(config, machine, layout, sizes), _context_s(config, machine, layout, sizes)
    parameters, weights = layer_parameter_count(config), _Weights(machine, layout, sizes)
    gathered_weights = sizes.product * parameters / layout.tp if _shards(layout) > layout.tp else 0.0
    # Autocast's copies of the weights live from their first use until backward has used them.
    copied_weights = sizes.product * parameters / layout.tp if sizes.casts else 0.0
    return LayerProfile(
        name="block",
        always_bytes=round(block.always * tokens),
        points=(
            PointProfile(
                name=ALL,
                saved_bytes=round(block.all * tokens),
                beside_bytes=round(block.in_pieces * tokens),
            ),
            # Sums over ranks are saved; gathered tensors are read by products only, whose results are saved.
            PointProfile(
                name=MATMULS,
                saved_bytes=round(block.matmuls * tokens),
                beside_bytes=round((block.beside + block.products_in_pieces) * tokens),
                recompute_s=block.elementwise_again * memory_s + block.exchanges_again_at_matmuls * context_s,
                held_bytes=round(block.held_at_matmuls * tokens),
            ),
            PointProfile(
                name=ATTENTION,
                saved_bytes=0,
                recompute_s=block.projections_again * products_s
                + block.elementwise_again * memory_s
                + 3 / 4 * tensor_s  # all but the sum after the last projection
                + block.exchanges_again * context_s,
                recompute_flops=block.projections_again * tokens,
                held_bytes=round(block.held_at_attention * tokens),
            ),
        ),
        # A piece costs its launches, and what the last blocks of rows of its products leave idle, as a tile does.
        piece_s=REPLAYED * LAUNCH_S + TILE_ROWS / tokens * block.projections_again * products_s,
        forward_s=block.projections * products_s
        + attention_s
        + block.elementwise * memory_s
        + tensor_s
        + context_s
        + _tiling_s(config, block, machine),
        backward_s=(2 * block.projections + block.retiled) * products_s
        + ATTENTION_BACKWARD * attention_s
        + 2 * block.elementwise * memory_s
        + 1.5 * tensor_s  # the two gathers again, for the weights' gradients
        + context_s
        + 2 * _tiling_s(config, block, machine),
        forward_exchange_s=tensor_s + context_s,
        backward_exchange_s=1.5 * tensor_s + context_s,
        gather_s=weights.gather_s(parameters),
        sync_s=weights.sync_s(parameters),
        forward_flops=(block.projections + block.attention) * tokens,
        backward_flops=(2 * block.projections + block.retiled + 2 * block.attention) * tokens,
        attention_flops=block.attention * tokens,
        attention_s=attention_s,
        forward_transient_bytes=round(gathered_weights + block.forward_transient * tokens)
        + comparing_nbytes(round(block.largest * tokens)),
        # With the gradient of the layer's weights, in the dtype of the products.
        backward_transient_bytes=round(2 * gathered_weights + copied_weights + block.backward_transient * tokens),
        between_bytes=round(block.between * tokens),
        static_bytes=round(STATE_BYTES * parameters / _shards(layout) + copied_weights),
        storages=block.storages,
        largest_storage_bytes=round(block.largest * tokens),
    )


def _tiling_s(config: GPTConfig, block: Block, machine: Hardware) -> float:
    """Seconds that tiles add to one pass over an MLP."""
    if config.mlp_tiles == 1:
        return 0.0
    rows_s = TILE_ROWS * block.mlp / (machine.peak_flops * machine.matmul_efficiency)
    return config.mlp_tiles * (rows_s + LAUNCHES * LAUNCH_S)


def _shards(layout: Layout) -> int:
    """Number of ranks that one stage's parameters and optimizer state are sharded over."""
    return layout.gpus // layout.pp


def _tensor_s(config: GPTConfig, machine: Hardware, layout: Layout, sizes: ElementSizes) -> float:
    """Seconds of tensor parallelism's two gathers and two sums in one forward."""
    nbytes = config.hidden * sizes.product * layout.tokens * layout.batch / layout.cp
    return 4 * Collectives(machine).all_gather_s(nbytes, layout.tensor_group(machine.gpus_per_node))


def _context_s(config: GPTConfig, machine: Hardware, layout: Layout, sizes: ElementSizes) -> float:
    """Seconds of context parallelism's all-to-alls in one forward: queries, keys, values, and attention's output."""
    rank_bytes = sizes.product * layout.rank_tokens
    group, collectives = layout.context_group(machine.gpus_per_node), Collectives(machine)
    there = 3 * collectives.all_to_all_s(config.qkv_width / 3 * rank_bytes, group)
    return there + collectives.all_to_all_s(config.hidden * rank_bytes, group)


@dataclasses.dataclass(frozen=True, slots=True)
class _Weights:
    """Collectives over weights and gradients, as torch's FSDP runs them for memo: docs/parallel.md.

    Layers are gathered before each pass. In a pipeline they stay between a microbatch's forward and its backward, which is
    half of a gather for each pass. Gradients are reduced once a step.
    """

    machine: Hardware
    layout: Layout
    sizes: ElementSizes

    @property
    def _group(self) -> Group:
        return self.layout.data_group(self.machine.gpus_per_node)

    def gather_s(self, parameters: float) -> float:
        """Seconds to gather the weights of so many parameters of all tensor ranks, once a pass."""
        whole = Collectives(self.machine).all_gather_s(self._nbytes(parameters), self._group)
        return whole if self.layout.pp == 1 else whole / 2

    def sync_s(self, parameters: float) -> float:
        """Seconds to reduce their gradients."""
        return Collectives(self.machine).reduce_scatter_s(self._nbytes(parameters), self._group)

    def _nbytes(self, parameters: float) -> float:
        return self.sizes.stream * parameters / self.layout.tp


def _send_s(config: GPTConfig, machine: Hardware, layout: Layout, sizes: ElementSizes) -> float:
    """Seconds to send a microbatch's residual stream to the next stage; tensor ranks send a part each."""
    if layout.pp == 1:
        return 0.0
    nbytes = config.hidden * sizes.stream * layout.rank_tokens
    return Collectives(machine).send_s(nbytes, beyond_node=layout.leaves_node(machine.gpus_per_node))


def _link_share(machine: Hardware, layout: Layout, layer: LayerProfile) -> float:
    """Fraction of a GPU's link to the host that collectives take: by their time, and the link's part in that time."""
    collectives, busy = Collectives(machine), 0.0
    exchanged_s = layer.forward_exchange_s + layer.backward_exchange_s
    inner = layout.tensor_group(machine.gpus_per_node) if layout.tp > 1 else layout.context_group(machine.gpus_per_node)
    busy += exchanged_s * collectives.host_link_bytes_per_s(inner)
    busy += 2 * layer.gather_s * collectives.host_link_bytes_per_s(layout.data_group(machine.gpus_per_node))
    pass_s = max(layer.forward_s + layer.backward_s, 2 * layer.gather_s)
    link = min(machine.d2h_bytes_per_s, machine.h2d_bytes_per_s)
    return min(busy / pass_s / link, MOST_OF_LINK) if pass_s and link else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Ends:
    """Profiles of the model's ends: embedding and head."""

    config: GPTConfig
    machine: Hardware
    layout: Layout
    sizes: ElementSizes

    def embedding(self) -> EndProfile:
        """Embedding: reads a row per token, adds to it in backward; the float32 rotary tables live for all layers.

        Tensor-parallel ranks look up all tokens of their group. In backward they hold the gradient of all of them, and a
        copy masked to their own rows of the vocabulary.
        """
        config, machine, tokens = self.config, self.machine, self.layout.rank_tokens
        row = config.hidden * self.sizes.stream
        parameters = config.vocab_size * config.hidden
        weights = _Weights(machine, self.layout, self.sizes)
        rotary = 4 * config.hidden // config.heads * self.layout.tokens / self.layout.cp
        return EndProfile(
            forward_s=2 * row * tokens / machine.hbm_bytes_per_s + weights.gather_s(parameters),
            forward_exchange_s=weights.gather_s(parameters),
            sync_s=weights.sync_s(parameters),
            backward_s=4 * row * tokens / machine.hbm_bytes_per_s,
            saved_bytes=round(8 * tokens + (rotary if config.positions == "rotary" else 0)),
            transient_bytes=round(row * tokens * (1 if self.layout.tp == 1 else 2 * self.layout.tp + 1)),
            static_bytes=round(STATE_BYTES * parameters / _shards(self.layout)),
        )

    def head(self) -> EndProfile:
        """Head: norm, projection and loss, whose gradients the chunked loss computes in forward."""
        config, machine, tokens = self.config, self.machine, self.layout.rank_tokens
        flops = 2.0 * config.vocab_size * config.hidden * tokens
        row = config.hidden * self.sizes.stream * tokens
        weights = 0 if config.tie_embeddings else config.vocab_size * config.hidden
        exchange = _Weights(machine, self.layout, self.sizes)
        logits = LOGIT_BYTES * min(LOGITS, tokens * config.vocab_size)
        # Gradient of the projection's weight in float32, and its copy in the dtype of products.
        matrix = (4 + self.sizes.product) * config.vocab_size * config.hidden / self.layout.tp
        return EndProfile(
            forward_s=3 * flops / (machine.peak_flops * machine.matmul_efficiency)
            + 4 * row / machine.hbm_bytes_per_s
            + exchange.gather_s(weights),
            forward_exchange_s=exchange.gather_s(weights),
            sync_s=exchange.sync_s(weights),
            backward_s=6 * row / machine.hbm_bytes_per_s,
            forward_flops=3 * flops,
            saved_bytes=round(3 * row),  # the norm's input, its output, and the output's gradient
            transient_bytes=round(logits + row + matrix),
            static_bytes=round(STATE_BYTES * weights / _shards(self.layout)),
        )
