"""Profile of a GPT by arithmetic, for a machine that need not be there: bytes and FLOPs of the model, rates of the machine.

Owns the profile of a layer (from the figures of block_bytes.py), of the embedding and of the head, for the fused kernels of
a GPU. Tensor parallelism is Megatron's with sequence parallelism, which divides every saved tensor by tp; context
parallelism divides tokens. Rates are those of matrix products in the given precision. Needs no torch.

A tiled MLP does the same work in more pieces. Each tile of a pass adds the time of TILE_ROWS more rows, since the last
blocks of rows leave a GPU partly idle, and the time of its kernel launches.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memo.errors import UsageError
from memo.gpt.arithmetic.adapter_bytes import AdapterBytes
from memo.gpt.arithmetic.block_bytes import FLOAT, BlockBytes, BlockFigures, Coded, ElementSizes
from memo.gpt.arithmetic.collectives import Collective, CollectiveKind, Ranks, exchange_s
from memo.gpt.arithmetic.embedding_exchange import RowExchange
from memo.gpt.arithmetic.flops import (
    adapter_parameter_count,
    expert_layer_parameter_count,
    flops_per_token,
    layer_matrices,
    layer_parameter_count,
    parameter_count,
)
from memo.gpt.arithmetic.layout import StepLayout
from memo.gpt.arithmetic.mixture_bytes import MixtureFigures
from memo.gpt.arithmetic.optimizers import Optimizer, orthogonalisation_flops
from memo.gpt.arithmetic.rank_weights import RankWeights
from memo.gpt.arithmetic.step_collectives import ChunkOfLayers, StepCollectives, padded_elements
from memo.gpt.arithmetic.tensor_overlap import TensorSeconds, require_halves
from memo.gpt.arithmetic.training import AS_MEMO_TRAINS, NF4_BYTES, BaseFormat, Training, TrainingMethod
from memo.gpt.config import GPTConfig
from memo.gpt.run_config import EmbeddingGradients
from memo.gpt.train_config import Precision
from memo.loss import LOGIT_NBYTES, chunk_tokens, moved_nbytes
from memo.mip.inputs import (
    ALL,
    ATTENTION,
    CODE_BYTES,
    MATMULS,
    Coding,
    Collectives,
    EmbeddingOrHeadProfile,
    Hardware,
    LayerProfile,
    PointProfile,
    Profile,
    Role,
    StaticBytes,
    checking_nbytes,
)
from memo.swap import comparing_nbytes, least_part_nbytes

if TYPE_CHECKING:
    from memo.gpt.arithmetic.step_collectives import WeightUnit

TILE_ROWS = 128  # rows of a block in a GPU's matrix product
LAUNCHES = 8  # kernels of one tile in one pass


@functools.lru_cache(maxsize=4096)
def derive_profile(
    config: GPTConfig,
    machine: Hardware,
    layout: StepLayout,
    method: TrainingMethod = AS_MEMO_TRAINS,
    *,
    precision: Precision = Precision.BF16,
    accumulate: int = 1,
    name: str = "gpt",
) -> Profile:
    """Derives the profile of one rank's microbatch.

    Args:
        config: the model, with the number of MLP tiles.
        machine: rates and memories of the machine.
        layout: size of the step and its parallelism.
        method: training method; the embedding's gradient is exchanged as rows where that is `SPARSE`, and the profile's
            `embedding_exchange` has the times of both ways.
        precision: number format of weights and arithmetic.
        accumulate: microbatches in a step, whose gradients are added up before they are reduced.
        name: name of the model in the profile.

    Raises:
        UsageError: the layout does not divide the model, or the choices contradict one another; the sparse exchange is
            not possible.
    """
    lora, optimizer, recompute, codec = method.lora, method.optimizer, method.recompute, method.codec
    if codec is not None and recompute is not None:
        raise UsageError(f"--codec {codec} has no meaning with --recompute {recompute}")
    _check_experts(
        config,
        layout,
        {
            "--lora": lora > 0,
            "--optimizer muon": optimizer is Optimizer.MUON,
            "--mlp-tiles": config.mlp_tiles > 1,
            "--tp-overlap": len(layout.halves) > 1,
        },
    )
    require_divided(config, layout)
    require_halves(layout, lora=lora)
    smallest = min(min(shape) for shape in layer_matrices(config))
    training = Training.of(
        method,
        layout,
        precision=precision,
        accumulate=accumulate,
        smallest=smallest,
        smallest_of_ends=config.hidden,
    )
    weights = RankWeights(machine, layout, training)
    sizes = ElementSizes.of(precision)
    table = config.vocab_size * config.hidden / layout.tp
    rows = RowExchange.of(config, weights, accumulate=accumulate, held=weights.end_static(table))
    asks_rows = method.embedding is EmbeddingGradients.SPARSE
    if asks_rows and isinstance(rows, str):
        raise UsageError(f"--embedding-exchange sparse: {rows}; use --embedding-exchange dense")
    sparse = rows if asks_rows and isinstance(rows, RowExchange) else None
    step = StepCollectives(
        config=config,
        layout=layout,
        precision=precision,
        sparse_embedding=sparse is not None,
        frozen_projection=bool(lora),
    )
    ends = _Ends(config, machine, layout, sizes, weights, step, sparse)
    kinds = [_LayerKind.of(config, layer, layout.tokens) for layer in range(config.layers)]
    classes = {
        kind: _layer(config, sizes, weights, step, kind, coded=codec is not None) for kind in dict.fromkeys(kinds)
    }
    planned = list(classes.values())
    if recompute is not None:
        nbytes = round(config.hidden * sizes.stream * layout.rank_tokens)
        planned = [recompute.of(layer, input_bytes=nbytes) for layer in planned]
    # Of the largest stage.
    stage_layers = layout.layers_of_stage(config.layers)
    with_experts = min(-(-stage_layers // config.moe.every), config.moe_layers) if config.moe is not None else 0
    trained = _trained_count(config, weights, step, layers=stage_layers - with_experts, with_experts=with_experts)
    apart = step.layer_units(experts=True)[1:] if with_experts else []
    shares = sum(unit.elements / unit.shards for unit in apart)
    trained_here = trained + with_experts * shares * weights.update_shards
    backward_s = sum(classes[kind].backward_s for kind in kinds)
    optimizer_s = weights.optimizer_s(trained_here, backward_s=backward_s, accumulate=accumulate)
    exchanged_s = weights.update_s(trained) + ends.tied_s()
    if not weights.gathers_each_pass:
        exchanged_s += with_experts * weights.apart_s(step.gather, apart)
    if sparse is not None:
        optimizer_s += sparse.whole_update_s
        exchanged_s += weights.update_s(trained - table) - weights.update_s(trained)
    if optimizer is Optimizer.MUON and not lora:
        flops = stage_layers * orthogonalisation_flops(layer_matrices(config)) / layout.tp
        optimizer_s += weights.orthogonalisation_s(flops)
    largest = max(math.prod(shape) for shape in layer_matrices(config))
    head = ends.head()
    head = dataclasses.replace(head, static=head.static + weights.in_flight(trained_here, largest=largest))
    return Profile(
        signature=layout.signature(model=name, dtype=str(precision), heads=config.heads),
        role=Role.DERIVED,
        classes=tuple(planned),
        layers=tuple(classes[kind].name for kind in kinds),
        mlp_tiles=config.mlp_tiles,
        embedding=ends.embedding(),
        head=head,
        optimizer_s=optimizer_s,
        optimizer_exchange_s=exchanged_s,
        embedding_exchange=None if isinstance(rows, str) else rows.figures(sparse=asks_rows),
        send_s=exchange_s([step.send()], machine, layout),
        send_bytes=step.send().nbytes if layout.pp > 1 else 0.0,
        link_share=max(
            weights.link_share([(layer, _exchanged_on_link(weights, step, experts=kind.experts))], accumulate)
            for kind, layer in classes.items()
        ),
        model_flops_causal_per_token=flops_per_token(config, layout.tokens, lora=lora),
        model_flops_full_per_token=flops_per_token(config, layout.tokens, causal=False, lora=lora),
        codec=codec,
    )


def _beside_recompute(block: BlockBytes, tokens: float) -> dict[str, int]:
    """Bytes that the recompute at level `attention` holds, and those that are absent at backward's peak."""
    parts = block.in_parts
    if parts is None or min(parts.given) * tokens < least_part_nbytes(sum(parts.given) * tokens):
        return {"held_bytes": round(block.held * tokens)}
    return {"held_bytes": round(parts.held * tokens), "absent_bytes": int(parts.absent * tokens)}


def _fewer(points: Sequence[PointProfile]) -> tuple[PointProfile, ...]:
    """Returns the points that save fewer bytes than all before them."""
    found: list[PointProfile] = []
    for point in points:
        if not found or point.saved_bytes < found[-1].saved_bytes:
            found.append(point)
    return tuple(found)


def _check_experts(config: GPTConfig, layout: StepLayout, given: dict[str, bool]) -> None:
    """Raises UsageError where experts do not divide, or are trained in a way that memo train does not have for them."""
    if config.moe is None:
        if layout.ep > 1:
            raise UsageError(f"--ep {layout.ep} has no meaning without --experts")
        return
    if config.moe.experts % layout.ep:
        raise UsageError(
            f"--ep {layout.ep} does not divide the model's {config.moe.experts} experts; a rank needs whole ones"
        )
    if config.moe.shared_hidden % layout.tp:
        raise UsageError(f"tp {layout.tp} does not divide {config.moe.shared_hidden} columns of the shared experts")
    flag = next((flag for flag, is_given in given.items() if is_given), None)
    if flag is not None:
        raise UsageError(f"a mixture of experts is not planned with {flag}; leave it out")


def require_divided(config: GPTConfig, layout: StepLayout) -> None:
    """Raises UsageError where the layout does not divide the model's heads, widths and layers, or its local attention."""
    if config.is_local_within(layout.tokens) and layout.rings(config.heads):
        raise UsageError(
            "local attention is not possible with ring attention; choose --cp so that it divides the heads, or 1"
        )
    if config.heads % layout.tp or config.kv_heads % layout.tp or config.ffn % layout.tp:
        raise UsageError(f"tp {layout.tp} does not divide {config.heads} heads, {config.kv_heads} key/value heads")
    if config.layers < layout.pp:
        raise UsageError(f"{config.layers} layers do not make {layout.pp} pipeline stages; use a smaller pp")


@dataclasses.dataclass(frozen=True, slots=True)
class _LayerKind:
    """Properties that tell classes of layers apart."""

    experts: bool
    """Experts are in the place of the MLP."""
    window: int | None
    """Window of local attention; None is full attention."""

    @classmethod
    def of(cls, config: GPTConfig, layer: int, tokens: int) -> _LayerKind:
        return cls(experts=config.has_experts(layer), window=config.window_of(layer, tokens))

    def __str__(self) -> str:
        words = ["local"] * (self.window is not None) + ["experts"] * self.experts
        return " ".join(words) or "block"


def _layer(
    config: GPTConfig,
    sizes: ElementSizes,
    weights: RankWeights,
    step: StepCollectives,
    kind: _LayerKind,
    *,
    coded: bool,
) -> LayerProfile:
    """Profile of a layer of a kind; `coded`: what moves are codes."""
    machine, layout = weights.machine, weights.layout
    tokens, experts, window = layout.rank_tokens, kind.experts, kind.window
    tp, cp, rings = layout.tp, layout.cp, step.rings
    # As memo train shards experts: over ranks with the same ones, and all that have different tokens.
    gathered_within = tp > 1 or layout.ep > 1
    figures = functools.partial(MixtureFigures, ep=layout.ep, apart=gathered_within) if experts else BlockFigures
    block = figures(config, layout.tokens, sizes, batch=layout.batch, tp=tp, cp=cp, rings=rings, window=window).block()
    products_s = tokens / machine.product_flops_per_s
    memory_s = tokens / machine.elementwise_bytes_per_s
    keys = min(layout.tokens if window is None else window, layout.tokens / (layout.cp if rings else 1))
    attention_s, backward_attention_s = (
        max(
            machine.attention_s(
                block.attention_computed * tokens, head=config.head_dim, keys=keys, backward=bool(twice)
            ),
            (1 + twice) * block.attention_traffic * memory_s,
        )
        for twice in (0, 1)
    )
    ring_s = [layout.cp * nbytes * memory_s for nbytes in block.ring_traffic]
    context_s = exchange_s(step.context_forward(), machine, layout)
    # A ring's rotations run beside the kernel, but for what lasts longer.
    hidden_s = attention_s * (layout.cp - 1) / layout.cp if step.rings else 0.0
    tensor = TensorSeconds.of(step, block, machine, (attention_s, backward_attention_s), experts=experts)
    there, back = (step.expert_forward(), step.expert_backward()) if experts else ((), ())
    forward_exchange_s = tensor.forward_s + exchange_s(there, machine, layout)
    forward_exchange_s += max(context_s - hidden_s, 0.0)
    backward_exchange_s = tensor.backward_s + exchange_s(back, machine, layout)
    hidden_s *= backward_attention_s / attention_s
    backward_exchange_s += max(exchange_s(step.context_backward(), machine, layout) - hidden_s, 0.0)
    own, *apart = step.layer_units(experts=experts)
    elements = padded_elements(own.shapes, weights.shards)
    on_rank = _own_parameter_count(config, layout, apart, experts=experts) / tp
    gathered_weights = weights.gathered_bytes(on_rank, apart)
    # Adapters are whole on every tensor-parallel rank. They read what the frozen maps read, which autograd saves for their
    # gradients, and save what is between their two products; a frozen weight has no gradient.
    lora = weights.training.lora
    adapters = adapter_parameter_count(config, lora)
    adapted = AdapterBytes.of(config, weights.training, sizes)
    of_adapters, beside_adapters = adapted.saved * tokens, adapted.beside * tokens
    largest_matrix = max(math.prod(shape) for shape in layer_matrices(config)) / layout.tp
    quantized = weights.training.base is BaseFormat.NF4
    # Each pass makes the matrices anew from their codes, one after the other.
    matrices = sum(math.prod(shape) for shape in layer_matrices(config)) / layout.tp
    dequantized_s = (NF4_BYTES + sizes.product) * matrices / machine.elementwise_bytes_per_s if quantized else 0.0
    beside_adapters += sizes.product * largest_matrix if quantized else 0.0
    # Autocast's copies of the weights live from their first use until backward has used them.
    copied_weights = sizes.product * (on_rank + sum(unit.elements for unit in apart)) if sizes.casts else 0.0
    if experts and sizes.stream != FLOAT:  # a router's is copied to float32
        copied_weights += FLOAT * config.expert_count * config.hidden
    points = (
        PointProfile(name=ALL, saved_bytes=round(block.all * tokens + of_adapters)),
        # Sums over ranks are saved; gathered tensors are read by products only, whose results are saved.
        PointProfile(
            name=MATMULS,
            saved_bytes=round((block.matmuls + adapted.between) * tokens),
            beside_bytes=round(block.beside * tokens),
            recompute_s=(block.elementwise_again + adapted.forward) * memory_s
            + block.exchanges_again_at_matmuls * context_s,
            held_bytes=round(block.held * tokens),
        ),
        PointProfile(
            name=ATTENTION,
            saved_bytes=round(block.at_attention * tokens),
            recompute_s=block.projections_again * products_s
            + (block.elementwise_again + adapted.forward) * memory_s
            + dequantized_s
            + tensor.again_s
            + block.exchanges_again * context_s,
            recompute_flops=block.projections_again * tokens,
            **_beside_recompute(block, tokens),
        ),
    )
    layer = LayerProfile(
        name=str(kind),
        always_bytes=round(block.always * tokens),
        points=_fewer(points),
        forward_s=max(
            (block.projections + 2 * adapters) * products_s
            + attention_s
            + (block.elementwise + adapted.forward) * memory_s
            + ring_s[0]
            + dequantized_s
            + _tiling_s(config, block, machine)
            + tensor.halving_s[0],
            tensor.launches * block.kernels[0] * machine.launch_s,
        )
        + forward_exchange_s,
        backward_s=max(
            ((1 if lora else 2) * block.projections + block.retiled + 4 * adapters) * products_s
            + backward_attention_s
            + (block.elementwise_backward + adapted.backward) * memory_s
            + ring_s[1]
            + dequantized_s
            + 2 * _tiling_s(config, block, machine)
            + tensor.halving_s[1],
            tensor.launches * block.kernels[1] * machine.launch_s,
        )
        + backward_exchange_s,
        forward_flops=(block.projections + 2 * adapters + block.attention) * tokens,
        backward_flops=((1 if lora else 2) * block.projections + block.retiled + 4 * adapters + 2 * block.attention)
        * tokens,
        attention_flops=block.attention * tokens,
        attention_s=attention_s if window is None else 0.0,
        forward_exchange_s=forward_exchange_s,
        backward_exchange_s=backward_exchange_s,
        gather_s=weights.gather_s(elements) + weights.apart_s(step.gather, apart) if weights.gathers_each_pass else 0.0,
        sync_s=weights.sync_s(adapters) if lora else weights.sync_s(elements) + weights.apart_s(step.reduce, apart),
        forward_transient_bytes=round(block.forward_transient * tokens + beside_adapters)
        + comparing_nbytes(round(block.largest * tokens)),
        backward_transient_bytes=round(copied_weights + block.backward_transient * tokens + beside_adapters),
        between_bytes=round(block.between * tokens),
        static=weights.static(on_rank + adapters, apart, trained=adapters if lora else on_rank, coded=matrices)
        + StaticBytes(cast=round(copied_weights)),
        storages=block.storages,
        largest_storage_bytes=round(max(block.largest, adapted.largest) * tokens),
    )
    gradients = 0.0 if lora else gathered_weights
    layer = weights.with_gathered(layer, weights=gathered_weights, gradients=gradients)
    return _coded(layer, block.coded, machine, sizes, tokens) if coded else layer


def _coded(layer: LayerProfile, values: Coded, machine: Hardware, sizes: ElementSizes, tokens: float) -> LayerProfile:
    """A layer of which codes move. Two layers' codes are on the device at once, coming or going, and what a check takes."""
    codes = math.ceil(2 * CODE_BYTES * values.values * tokens)
    checked = checking_nbytes(layer.largest_storage_bytes / min(sizes.product, sizes.stream))
    return dataclasses.replace(
        layer,
        forward_transient_bytes=layer.forward_transient_bytes + codes + checked,
        backward_transient_bytes=layer.backward_transient_bytes + codes,
        coding=Coding.at_rate(
            machine.hbm_bytes_per_s,
            values=values.values * tokens,
            spared_bytes=math.floor(values.spared * tokens),
        ),
    )


def _own_parameter_count(config: GPTConfig, layout: StepLayout, apart: Sequence[WeightUnit], *, experts: bool) -> int:
    """Parameters of a layer that the ranks with the same parameters share: all but those that other ranks do."""
    if not experts:
        return layer_parameter_count(config)
    others = (unit.elements * (layout.ep if unit.ranks is Ranks.EXPERT_COPIES else 1) for unit in apart)
    return expert_layer_parameter_count(config) - sum(others)


def _trained_count(
    config: GPTConfig, weights: RankWeights, step: StepCollectives, *, layers: int, with_experts: int
) -> float:
    """Trained parameters of the ends and of so many layers of both kinds, on a rank before sharding.

    Those of units apart are not among them.
    """
    layout, lora = weights.layout, weights.training.lora
    if lora:
        return layers * adapter_parameter_count(config, lora)
    dense = dataclasses.replace(config, moe=None)
    ends = config.vocab_size * config.hidden
    if layout.pp == 1:
        ends = parameter_count(dense) - config.layers * layer_parameter_count(config)
    mixed = 0
    if with_experts:
        apart = step.layer_units(experts=True)[1:]
        mixed = with_experts * _own_parameter_count(config, layout, apart, experts=True)
    return (layers * layer_parameter_count(config) + mixed + ends) / layout.tp


def _tiling_s(config: GPTConfig, block: BlockBytes, machine: Hardware) -> float:
    """Seconds that tiles add to one pass over an MLP."""
    if config.mlp_tiles == 1:
        return 0.0
    rows_s = TILE_ROWS * block.mlp / machine.product_flops_per_s
    return config.mlp_tiles * (rows_s + LAUNCHES * machine.launch_s)


def _exchanged_on_link(weights: RankWeights, step: StepCollectives, *, experts: bool) -> float:
    """Bytes that a layer's exchanges move over a GPU's link to the host in two passes, in one direction."""
    machine, layout = weights.machine, weights.layout
    rate_of, nodes = Collectives(machine).host_link_bytes_per_s, machine.gpus_per_node
    there, back = step.tensor_forward(experts=experts), step.tensor_backward(experts=experts)
    tensor_s = exchange_s((*there, *back), machine, layout)
    context_s = exchange_s((*step.context_forward(), *step.context_backward()), machine, layout)
    nbytes = tensor_s * rate_of(layout.tensor_group(nodes)) + context_s * rate_of(layout.context_group(nodes))
    if experts:
        routed_s = exchange_s((*step.expert_forward(), *step.expert_backward()), machine, layout)
        nbytes += routed_s * rate_of(layout.expert_group(nodes))
    return nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Ends:
    """Profiles of the model's ends: embedding and head."""

    config: GPTConfig
    machine: Hardware
    layout: StepLayout
    sizes: ElementSizes
    weights: RankWeights
    step: StepCollectives
    sparse: RowExchange | None
    """The exchange of the embedding's gradient as rows; None for the dense one."""

    def _gathered(self, *, first: bool) -> int:
        """Elements of an end's parameters that are gathered with those of its stage; without a pipeline all at once."""
        alone = self.layout.pp == 1
        chunk = ChunkOfLayers(layers=0, is_first=first or alone, is_last=not first or alone)
        if alone and not first:
            return 0
        return padded_elements(self.step.end_shapes(chunk), self.weights.shards)

    @property
    def _head_weights(self) -> int:
        """Parameters of the output projection beside the embedding's; another stage has a copy of tied ones."""
        config = self.config
        return 0 if config.tie_embeddings and self.layout.pp == 1 else config.vocab_size * config.hidden

    def tied_s(self) -> float:
        """Seconds to add the two copies' gradients of a tied table, once a step; 0 where there is one copy."""
        if not self.config.tie_embeddings or self.layout.pp == 1 or self.weights.training.lora:
            return 0.0
        weights = self.weights
        nbytes = weights.training.states.gradient * self._head_weights / self.layout.tp / weights.shards
        summed = Collective(kind=CollectiveKind.ALL_REDUCE, ranks=Ranks.ENDS, nbytes=nbytes)
        return exchange_s([summed], self.machine, self.layout)

    def embedding(self) -> EmbeddingOrHeadProfile:
        """Embedding: reads a row per token, adds to it in backward; the float32 rotary tables live for all layers.

        Tensor-parallel ranks look up all tokens of their group. In backward they hold the gradient of all of them, and a
        copy masked to their own rows of the vocabulary. Rows that a sparse exchange receives come when all else is done.
        """
        config, machine, tokens = self.config, self.machine, self.layout.rank_tokens
        row = config.hidden * self.sizes.stream
        parameters, sparse = config.vocab_size * config.hidden / self.layout.tp, self.sparse
        elements = self._gathered(first=True)
        waits_s = self.weights.end_gather_s(elements) + exchange_s(self.step.embedding_forward(), machine, self.layout)
        backward_waits_s = exchange_s(self.step.embedding_backward(), machine, self.layout)
        transient = row * tokens * (1 if self.layout.tp == 1 else 2 * self.layout.tp + 1)
        rotary = 4 * config.hidden // config.heads * self.layout.tokens / self.layout.cp
        return EmbeddingOrHeadProfile(
            forward_s=2 * row * tokens / machine.elementwise_bytes_per_s + waits_s,
            backward_s=4 * row * tokens / machine.elementwise_bytes_per_s + backward_waits_s,
            forward_exchange_s=waits_s,
            backward_exchange_s=backward_waits_s,
            # Without a pipeline the head's come last, too: FSDP reduces the ends together.
            sync_s=(sparse.rows_s if sparse else 0.0) + self.weights.end_sync_s(elements),
            saved_bytes=round(8 * tokens + (rotary if config.positions == "rotary" else 0)),
            transient_bytes=round(max(transient, sparse.received_bytes if sparse else 0)),
            static=(sparse.static if sparse else self.weights.end_static(parameters)) + self._positions_static(),
        )

    def _positions_static(self) -> StaticBytes:
        """Bytes of a learned position table, which is sharded over all ranks with different tokens."""
        if self.config.positions != "learned":
            return StaticBytes()
        parameters, weights = self.layout.tokens * self.config.hidden, self.weights
        if self.layout.tp == 1:
            return weights.end_static(parameters)
        trained = 0 if weights.training.lora else parameters
        return weights.training.static_bytes(parameters, weights.shards * self.layout.tp, trained=trained, of_end=True)

    def head(self) -> EmbeddingOrHeadProfile:
        """Head: norm, projection and loss, whose gradients the chunked loss computes in forward."""
        config, machine, tokens = self.config, self.machine, self.layout.rank_tokens
        flops = 2.0 * config.vocab_size * config.hidden * tokens
        row = config.hidden * self.sizes.stream * tokens
        weights, elements = self.weights, self._gathered(first=False)
        waits_s = weights.end_gather_s(elements) + exchange_s(self.step.head_forward(), machine, self.layout)
        backward_waits_s = exchange_s(self.step.head_backward(), machine, self.layout)
        # Gradient of the projection's weight in float32, and its copy in the dtype of products, which backward reads.
        matrix = config.vocab_size * config.hidden / self.layout.tp
        products = 3
        mixed = config.has_experts(config.layers - 1)
        apart = self.step.layer_units(experts=mixed)[1:]
        # The last layer's weights, but for those that are gathered apart.
        own = _own_parameter_count(config, self.layout, apart, experts=mixed)
        stays = round(weights.gathered_bytes(own / self.layout.tp))
        trained = not weights.training.lora
        if not trained:
            matrix, products = 0.0, 2
        rows, all_tokens = -(-config.vocab_size // self.layout.tp), math.ceil(tokens * self.layout.tp)
        logits = LOGIT_NBYTES * rows * min(all_tokens, chunk_tokens(rows, trained=trained))
        moved = moved_nbytes(all_tokens, rows, config.hidden, product_nbytes=self.sizes.product, trained=trained)
        moved -= self.sizes.product * (2 + trained) * all_tokens * rows  # within the products' own time
        return EmbeddingOrHeadProfile(
            forward_s=products * flops / machine.product_flops_per_s
            + (moved + 4 * row) / machine.elementwise_bytes_per_s
            + waits_s,
            backward_s=6 * row / machine.elementwise_bytes_per_s + backward_waits_s,
            forward_exchange_s=waits_s,
            backward_exchange_s=backward_waits_s,
            sync_s=weights.end_sync_s(elements),
            forward_flops=products * flops,
            # The norm's input, its output, the output's gradient, and the weight's.
            saved_bytes=round(3 * row + self.sizes.product * matrix),
            transient_bytes=round(logits + row + 4 * matrix) + stays,
            gathered_bytes=stays,
            static=weights.end_static(self._head_weights / self.layout.tp),
        )
