"""Profile of a model as a framework trains it: layers from framework_layer.py, embedding, head, optimizer, collectives.

Owns the profile's composition for a `FrameworkTraining`. A method of recompute is part of the layer: point `all` saves
what the method keeps. Where that is more than the layer's input there is a second point, `input`, at which a plan
recomputes the layer whole. memo's own engine is in memo/gpt/arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from benchmarks.published.framework_layer import E, FrameworkLayer
from benchmarks.published.framework_training import GATHERED, Loss, Recompute
from benchmarks.published.kernel_times import KernelRates, KernelTimes
from benchmarks.published.transformer import Transformer
from memo.gpt.arithmetic import RankWeights
from memo.gpt.arithmetic.flops import flops_per_token, layer_parameter_count, mlp_parameter_count
from memo.gpt.arithmetic.profile_by_arithmetic import require_divided
from memo.mip.inputs import (
    ALL,
    INPUT,
    Collectives,
    EmbeddingOrHeadProfile,
    LayerProfile,
    PointProfile,
    Profile,
    Role,
    Signature,
    StaticBytes,
)

if TYPE_CHECKING:
    from benchmarks.published.framework_training import FrameworkTraining
    from memo.gpt.arithmetic import StepLayout
    from memo.gpt.config import GPTConfig
    from memo.mip.inputs import Hardware

# Bytes of a logit: at once at the peak, and read and written by the loss in both passes.
LOGIT_BYTES = {Loss.FLOAT32: 6, Loss.COMPILED: 10, Loss.EAGER: 14, Loss.FUSED: 2, Loss.CHUNKED: 0}
LOGIT_PASSES = {Loss.FLOAT32: 54, Loss.COMPILED: 30, Loss.EAGER: 40, Loss.FUSED: 8, Loss.CHUNKED: 8}


@functools.lru_cache(maxsize=4096)
def profile_of_training(
    config: GPTConfig,
    machine: Hardware,
    layout: StepLayout,
    training: FrameworkTraining,
    *,
    rates: KernelRates,
    name: str = "gpt",
) -> Profile:
    """Derives the profile of one rank's microbatch.

    Args:
        config: the model; also a Transformer.
        machine: peaks, memories and links of the machine.
        layout: size of the step and its parallelism.
        training: the framework's choices.
        rates: what kernels reach on the machine.
        name: name of the model in the profile.

    Raises:
        UsageError: the layout does not divide the model.
    """
    require_divided(config, layout)
    return _Parts(config, machine, layout, training, KernelTimes(machine, rates)).profile(name)


class FrameworkWeights(RankWeights):
    """Weights of a framework, which under `zero` 2 and 3 frees them behind each backward and reduces gradients in each."""

    @property
    def gathers_each_pass(self) -> bool:
        """Whether weights are gathered, and gradients reduced, in each microbatch."""
        return not self.training.whole_in_step and self.training.zero >= 2

    def reduce_s(self, parameters: float) -> float:
        """Seconds to reduce gradients in each backward."""
        return super().sync_s(parameters) if self.gathers_each_pass else 0.0

    def sync_s(self, parameters: float) -> float:
        """Seconds to reduce gradients once a step."""
        return 0.0 if self.gathers_each_pass else super().sync_s(parameters)


@dataclasses.dataclass(frozen=True, slots=True)
class _Parts:
    """Parts of the profile."""

    config: GPTConfig
    machine: Hardware
    layout: StepLayout
    training: FrameworkTraining
    times: KernelTimes

    @property
    def _layer(self) -> FrameworkLayer:
        return FrameworkLayer(self.config, self.layout, self.training, self.times)

    @property
    def _exchange(self) -> FrameworkWeights:
        return FrameworkWeights(self.machine, self.layout, self.training)

    @property
    def _dense(self) -> float:
        """Parameters of a layer on one rank, without experts."""
        config = self.config
        whole = layer_parameter_count(config)
        if isinstance(config, Transformer) and config.experts is not None:
            whole += config.beside_experts - mlp_parameter_count(config)
        return whole / self.layout.tp

    @property
    def _routed(self) -> float:
        """Parameters of a layer's experts on one rank."""
        config = self.config
        if not isinstance(config, Transformer) or config.experts is None:
            return 0.0
        experts = config.experts
        return experts.count * config.expert_matrices / (experts.ranks * experts.tensor_ranks)

    def _static(self, *, dense: float, routed: float = 0.0) -> StaticBytes:
        """Bytes on a rank of these parameters' weights, gradients and optimizer."""
        shards, expert_shards = self._exchange.shards, 1
        experts = self.config.experts if isinstance(self.config, Transformer) else None
        if experts is not None:
            expert_shards = max(self.layout.stage_gpus // (experts.ranks * experts.tensor_ranks), 1)
        training = self.training
        return training.static_bytes(dense, shards) + training.static_bytes(routed, expert_shards)

    @property
    def _vocabulary(self) -> float:
        return self.config.vocab_size * self.config.hidden / self.layout.tp

    @property
    def _head_weights(self) -> float:
        """Parameters of the head beside the embedding's, which another stage cannot share."""
        return 0.0 if self.config.tie_embeddings and self.layout.pp == 1 else self._vocabulary

    @property
    def _positions(self) -> float:
        return float(self.config.max_seq * self.config.hidden) if self.config.positions == "learned" else 0.0

    def profile(self, name: str) -> Profile:
        config, layout = self.config, self.layout
        return Profile(
            signature=Signature(
                model=name,
                batch=layout.batch,
                tokens=layout.tokens,
                dtype="bf16",
                tp=layout.tp,
                cp=layout.cp,
                pp=layout.pp,
            ),
            role=Role.DERIVED,
            classes=(self._layer_profile(),),
            layers=("block",) * config.layers,
            embedding=self._embedding(),
            head=self._head(),
            optimizer_s=self._optimizer_s(),
            optimizer_exchange_s=self._optimizer_exchange_s(),
            send_s=self._send_s(),
            send_bytes=self._send_bytes,
            model_flops_causal_per_token=flops_per_token(config, layout.tokens),
            model_flops_full_per_token=flops_per_token(config, layout.tokens, causal=False),
        )

    def _layer_profile(self) -> LayerProfile:
        layer, exchange, training = self._layer, self._exchange, self.training
        parameters = self._dense + self._routed
        sharded = training.zero >= 3 and not training.whole_in_step
        gathered = GATHERED * parameters if sharded or training.parameter_offload else 0.0
        share = self.layout.pp / self.config.layers
        forward, backward = layer.forward, layer.backward
        # A method that keeps more than the input can give way to one that does not, layer by layer.
        saved, kept = layer.saved_bytes, 0.0
        points: tuple[PointProfile, ...] = (PointProfile(name=ALL, saved_bytes=round(saved)),)
        if training.recompute in (Recompute.NONE, Recompute.SCORES):
            kept = layer.input_bytes
            points = (
                PointProfile(name=ALL, saved_bytes=round(saved - kept)),
                PointProfile(name=INPUT, saved_bytes=0, recompute_s=forward.total),
            )
        return LayerProfile(
            name="block",
            always_bytes=round(kept),
            points=points,
            forward_s=forward.total,
            backward_s=backward.total + self._accumulation_s(parameters),
            forward_exchange_s=forward.exchange,
            backward_exchange_s=backward.exchange,
            gather_s=exchange.gather_s(parameters),
            reduce_s=exchange.reduce_s(parameters),
            sync_s=exchange.sync_s(parameters) if training.overlaps_gradients else 0.0,
            attention_s=forward.attention,
            forward_transient_bytes=round(2 * gathered + layer.forward_transient_bytes),
            backward_transient_bytes=round(3 * gathered + layer.backward_transient_bytes),
            forward_gathered_bytes=round(2 * gathered),
            backward_gathered_bytes=round(3 * gathered),
            static=self._static(dense=self._dense, routed=self._routed)
            + StaticBytes(other=round(share * training.workspace_bytes)),
            storages=layer.storages,
            largest_storage_bytes=round(layer.largest_bytes),
        )

    def _accumulation_s(self, parameters: float) -> float:
        """Seconds to add a microbatch's gradients, as products leave them, to those before."""
        if self.training.fused_accumulation or self._exchange.gathers_each_pass:
            return 0.0
        return self.times.passes_s((GATHERED + 2 * self.training.states.gradient) * parameters)

    def _embedding(self) -> EmbeddingOrHeadProfile:
        layer, exchange = self._layer, self._exchange
        row = layer.input_bytes
        parameters = self._vocabulary + self._positions
        waits = exchange.gather_s(parameters)
        masks = row / E if self.training.dropout else 0.0
        gathered = GATHERED * parameters * (self.training.zero >= 3)
        return EmbeddingOrHeadProfile(
            forward_s=self.times.passes_s(2 * row) + waits,
            backward_s=self.times.passes_s(4 * row) + waits + exchange.reduce_s(parameters),
            forward_exchange_s=waits,
            backward_exchange_s=waits + exchange.reduce_s(parameters),
            sync_s=exchange.sync_s(parameters) if self.training.overlaps_gradients else 0.0,
            saved_bytes=round(masks + 8 * layer.tokens),
            transient_bytes=round(2 * row + gathered),
            gathered_bytes=round(gathered),
            static=self._static(dense=parameters),
        )

    def _head(self) -> EmbeddingOrHeadProfile:
        layer, exchange, training = self._layer, self._exchange, self.training
        row, tokens = layer.input_bytes, layer.tokens
        width = self.config.vocab_size / self.layout.tp
        forward, backward = self.times.three_products_s(tokens, width, self.config.hidden)
        passes = self.times.passes_s((LOGIT_PASSES[training.loss] + training.metric_bytes) * tokens * width)
        waits = exchange.gather_s(self._vocabulary)
        flops = 2.0 * tokens * width * self.config.hidden
        logits = LOGIT_BYTES[training.loss] * tokens * width
        gathered = E * self.config.hidden * tokens if training.sequence_parallel and self.layout.tp > 1 else 0.0
        weights = GATHERED * self._vocabulary * (2 if training.zero >= 3 else 0)
        return EmbeddingOrHeadProfile(
            forward_s=forward + passes / 2 + waits,
            backward_s=backward
            + passes / 2
            + waits
            + exchange.reduce_s(self._head_weights)
            + self._accumulation_s(self._head_weights),
            forward_flops=flops,
            backward_flops=2 * flops,
            forward_exchange_s=waits,
            backward_exchange_s=waits + exchange.reduce_s(self._head_weights),
            sync_s=exchange.sync_s(self._head_weights) if training.overlaps_gradients else 0.0,
            saved_bytes=round(2 * row),
            transient_bytes=round(logits + row + gathered + weights),
            gathered_bytes=round(weights),
            static=self._static(dense=self._head_weights),
        )

    @property
    def _stage_parameters(self) -> float:
        """Parameters of the stage with most of them."""
        layers = self.layout.layers_of_stage(self.config.layers)
        ends = self._vocabulary + self._positions + (self._head_weights if self.layout.pp == 1 else 0.0)
        return layers * (self._dense + self._routed) + ends

    def _optimizer_s(self) -> float:
        training = self.training
        if training.optimizer_offload:
            return 0.0
        owned = self._stage_parameters / (self._exchange.shards if training.zero else 1)
        return training.states.passes * owned / self.machine.hbm_bytes_per_s

    def _optimizer_exchange_s(self) -> float:
        exchange, parameters = self._exchange, self._stage_parameters
        late = 0.0 if self.training.overlaps_gradients else exchange.sync_s(parameters)
        return exchange.update_s(parameters) + late

    @property
    def _send_bytes(self) -> float:
        """Ranks of tensor parallelism send a part each, also without sequence parallelism (Narayanan et al. 2021, 4.1)."""
        return E * self.config.hidden * self._layer.tokens / self.layout.tp if self.layout.pp > 1 else 0.0

    def _send_s(self) -> float:
        layout, machine = self.layout, self.machine
        if layout.pp == 1:
            return 0.0
        leaves = layout.leaves_node(machine.gpus_per_node)
        return Collectives(machine).send_s(self._send_bytes, beyond_node=leaves, gpus=layout.gpus)
