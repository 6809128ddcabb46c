"""How a framework trains: states of the optimizer, sharding, kernels, recompute. Chosen beside a layout and a model.

Owns the choices and the bytes per parameter that follow from them. Does not own what a layer saves or takes under them:
framework_layer.py. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import enum

from memo.errors import UsageError
from memo.mip.inputs import StaticBytes

__all__ = [
    "ADAM_FP32",
    "ADAM_MIXED",
    "ADAM_PURE",
    "GATHERED",
    "AttentionKernel",
    "ContextExchange",
    "Kernels",
    "Loss",
    "Recompute",
    "StateBytes",
    "Training",
]


GATHERED = 2
"""Bytes of a weight as it is gathered."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter, before any sharding."""

    weight: int
    """The weight that is stored, or sharded."""
    gradient: int
    """The gradient that microbatches add to."""
    optimizer: float
    """Master weight and moments."""
    reduced: int
    """The gradient as it crosses the network."""
    passes: float
    """Bytes that an optimizer step reads and writes."""


# An Adam step reads gradient, weight and two moments, and writes the last three. What is not fused reads and writes
# once for each of some dozen operators.
ADAM_FP32 = StateBytes(weight=4, gradient=4, optimizer=8, reduced=4, passes=28)
"""Weights in float32, cast for each product: torch's FSDP with mixed precision."""
ADAM_MIXED = StateBytes(weight=2, gradient=4, optimizer=12, reduced=4, passes=30)
"""bfloat16 weights, float32 master, gradients and moments: Megatron-Core."""
ADAM_PURE = StateBytes(weight=2, gradient=2, optimizer=4, reduced=2, passes=14)
"""Everything in bfloat16."""


class AttentionKernel(enum.StrEnum):
    """How attention computes its scores."""

    FUSED = "fused"
    """In tiles, causal, never in memory (Dao et al. 2022)."""
    MATERIALISED = "materialised"
    """The whole square in memory: two batched products with softmax and dropout between them."""


class Kernels(enum.StrEnum):
    """How element-wise operations run, and which tensors they save."""

    FUSED = "fused"
    """One kernel for a norm, for bias and activation, for bias, dropout and residual: Megatron, compiled code."""
    EAGER = "eager"
    """One kernel an operator, norms in float32, as Hugging Face's and torchtitan's models run uncompiled."""


class Recompute(enum.StrEnum):
    """What every layer computes again in backward, as a fixed method."""

    NONE = "none"
    SCORES = "scores"
    """Attention's scores (Korthikanti et al. 2022, "selective"); no effect where attention is fused."""
    EVERY_OTHER = "every-other"
    """Every second matrix product and everything element-wise: torchtitan's selective checkpointing by operator."""
    FULL = "full"
    """The layer, from its input."""


class Loss(enum.StrEnum):
    """How cross entropy is computed from the logits."""

    FLOAT32 = "float32"
    """Logits are copied to float32, which becomes probability and gradient in place: Megatron's vocabulary-parallel
    loss."""
    COMPILED = "compiled"
    """The same steps compiled together, whose copy does not replace the one before it."""
    EAGER = "eager"
    """Logits, a float32 copy, its logarithms and their gradient: torch's own, as models of Hugging Face call it."""
    FUSED = "fused"
    """The gradient replaces the logits."""
    CHUNKED = "chunked"
    """A chunk of tokens at a time, projection included: no logits in memory."""


class ContextExchange(enum.StrEnum):
    """What ranks of context parallelism exchange."""

    HEADS = "heads"
    """Heads for tokens, four all-to-alls (Jacobs et al. 2023)."""
    KEYS = "keys"
    """Keys and values of all tokens."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Choices of a framework that a layout does not have.

    Raises:
        UsageError: two of them contradict one another.
    """

    states: StateBytes = ADAM_MIXED
    end_states: StateBytes | None = None
    """Those of the embedding and the head; None: the same."""
    lora: int = 0
    """Rank of the adapters on every linear map of a layer (Hu et al. 2021), which alone are trained; 0: everything is."""
    zero: int = 0
    """0: data-parallel ranks hold everything; 1: the optimizer is sharded; 2: gradients, too; 3: weights, too."""
    sharded_over: int | None = None
    """Ranks that share one copy, for hybrid sharding; None is all data-parallel ranks."""
    recompute: Recompute = Recompute.NONE
    stops_early: bool = False
    """Full recompute ends with the last tensor that backward needs, before the MLP's last product: torch's checkpoints
    that are not reentrant."""
    attention: AttentionKernel = AttentionKernel.FUSED
    kernels: Kernels = Kernels.FUSED
    loss: Loss = Loss.FLOAT32
    metric_bytes: float = 0.0
    """Bytes of a logit that metrics beside the loss read and write."""
    dropout: float = 0.0
    """Probability behind attention and the MLP; above 0 each saves a mask of one byte an element."""
    attention_dropout: float = 0.0
    """Probability on the scores; above 0, where they are materialised, a mask and the scores behind it are saved."""
    fp8: bool = False
    """Matrix products of the layers in 8 bits."""
    tiled_mlp: bool = False
    """MLPs compute a tile of tokens at a time, forward and backward, and save only their input."""
    sequence_parallel: bool = True
    """Tensor-parallel ranks also divide the tokens, between the matrices."""
    context: ContextExchange = ContextExchange.HEADS
    gathered_bytes: int = GATHERED
    """Bytes per parameter of a gathered weight."""
    reduces_once: bool = False
    """Under `zero` 2 and 3: gradients are added up whole and reduced with a step's last microbatch."""
    accumulates: bool = False
    """Whether a step has several microbatches."""
    whole_in_step: bool = False
    """Under `zero` 2 and 3: weights are gathered once a step and stay until its end, and gradients are added up whole:
    torch's FSDP under pipeline schedules."""
    fused_accumulation: bool = True
    """Products of weights' gradients add to the gradient themselves; else another pass does, in each microbatch."""
    overlaps_gradients: bool = True
    """Gradients are reduced while backward runs; else all of them after it."""
    overlaps_backward_sums: bool = False
    """Sums over tensor ranks in backward run beside the products of the weights' gradients."""
    overlaps_tensor: bool = False
    """Tensor parallelism's collectives are cut into pieces that overlap with the products beside them."""
    optimizer_offload: bool = False
    """Optimizer state and its step are on the host."""
    parameter_offload: bool = False
    """Weights rest on the host, and come to the device layer by layer."""
    input_offload: bool = False
    """What full recompute keeps of a layer goes to the host."""
    workspace_bytes: int = 0
    """Memory that libraries hold on a GPU all the time."""

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise UsageError(f"zero is {self.zero}; it is 0, 1, 2 or 3")
        if self.sharded_over is not None and self.sharded_over < 1:
            raise UsageError(f"weights are sharded over {self.sharded_over} ranks; at least 1")
        if self.lora < 0:
            raise UsageError(f"lora is {self.lora}; it is the rank of adapters, or 0")
        if self.input_offload and self.recompute is not Recompute.FULL:
            raise UsageError("layers' inputs go to the host only under full recompute")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 0 and below 1")

    def static_bytes(
        self, parameters: float, shards: int, *, trained: float | None = None, of_end: bool = False
    ) -> StaticBytes:
        """Bytes that a rank holds on its GPU of some parameters' weights, gradients and optimizer.

        Args:
            parameters: how many, before any sharding over data-parallel ranks.
            shards: ranks that what is sharded is divided over.
            trained: how many of them are trained; None: all.
            of_end: whether they are the embedding's or the head's.
        """
        states = self.end_states if of_end and self.end_states is not None else self.states
        zero, trained = self.zero, parameters if trained is None else trained
        gathered = whole_gradient = 0.0
        if zero >= 2 and shards > 1 and self.whole_in_step:
            gathered, whole_gradient = self.gathered_bytes if zero == 3 else 0, states.reduced
        elif zero >= 2 and shards > 1 and self.reduces_once and self.accumulates:
            whole_gradient = states.gradient
        weight = 0.0 if self.parameter_offload else states.weight / (shards if zero >= 3 else 1)
        gradient = 0.0 if self.optimizer_offload and zero >= 2 else states.gradient / (shards if zero >= 2 else 1)
        optimizer = 0.0 if self.optimizer_offload else states.optimizer / (shards if zero >= 1 else 1)
        return StaticBytes(
            weights=round(weight * parameters),
            gradients=round((gradient + whole_gradient) * trained),
            optimizer=round(optimizer * trained),
            gathered=round(gathered * parameters),
        )
