"""Choices of a framework beside those of `memo.gpt.arithmetic.Training`: kernels, recompute, overlaps, offloading.

Owns the choices. What a layer saves and takes under them is framework_layer.py's.
"""

from __future__ import annotations

import dataclasses
import enum

from memo.errors import UsageError
from memo.gpt.arithmetic import StateBytes, Training
from memo.mip.inputs import StaticBytes

GATHERED = 2
"""Bytes of a weight as it is gathered."""
ADAM_MIXED = StateBytes(weight=2, gradient=4, optimizer=12, reduced=4, passes=30)
"""bfloat16 weights, float32 master, gradients and moments: Megatron-Core."""


class AttentionKernel(enum.StrEnum):
    """Kernel of attention's scores."""

    FUSED = "fused"
    """In tiles, causal, never in memory (Dao et al. 2022)."""
    MATERIALISED = "materialised"
    """The whole square in memory: two batched products with softmax and dropout between them."""


class Kernels(enum.StrEnum):
    """Kernels of element-wise operations, which decide what these save."""

    FUSED = "fused"
    """One kernel for a norm, for bias and activation, for bias, dropout and residual: Megatron, compiled code."""
    EAGER = "eager"
    """One kernel an operator, norms in float32, as Hugging Face's and torchtitan's models run uncompiled."""


class Recompute(enum.StrEnum):
    """Fixed method of activation checkpointing, the same for every layer."""

    NONE = "none"
    SCORES = "scores"
    """Attention's scores (Korthikanti et al. 2022, "selective"); no effect where attention is fused."""
    EVERY_OTHER = "every-other"
    """Every second matrix product and everything element-wise: torchtitan's selective checkpointing by operator."""
    FULL = "full"
    """The layer, from its input."""


class Loss(enum.StrEnum):
    """Kernels of cross entropy, from the logits on."""

    FLOAT32 = "float32"
    """Logits are copied to float32, which becomes probability and gradient in place: Megatron's vocabulary-parallel
    loss."""
    COMPILED = "compiled"
    """Steps of `FLOAT32` compiled together: the float32 copy does not replace the logits."""
    EAGER = "eager"
    """Logits, a float32 copy, its logarithms and their gradient: torch's own, as models of Hugging Face call it."""
    FUSED = "fused"
    """The gradient replaces the logits."""
    CHUNKED = "chunked"
    """A chunk of tokens at a time, projection included: no logits in memory."""


class ContextExchange(enum.StrEnum):
    """Exchange among ranks of context parallelism."""

    HEADS = "heads"
    """Heads for tokens, four all-to-alls (Jacobs et al. 2023)."""
    KEYS = "keys"
    """Keys and values of all tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrameworkTraining(Training):
    """Choices of a framework.

    Raises:
        UsageError: two of them contradict one another.
    """

    states: StateBytes = ADAM_MIXED
    gathered_bytes: int = GATHERED
    zero: int = 0
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
    fused_accumulation: bool = True
    """Products of weights' gradients add to the gradient themselves; else another pass does, in each microbatch."""
    overlaps_gradients: bool = True
    """Gradients are reduced while backward runs; else all of them after it."""
    overlaps_backward_sums: bool = False
    """Sums over tensor ranks in backward run beside the products of the weights' gradients."""
    overlaps_tensor: bool = False
    """Tensor parallelism's collectives are cut into pieces that overlap with the products beside them."""
    parameter_offload: bool = False
    """Weights rest on the host, and come to the device layer by layer."""
    input_offload: bool = False
    """Whether the inputs that full recompute keeps go to the host."""
    workspace_bytes: int = 0
    """Memory that libraries hold on a GPU all the time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.input_offload and self.recompute is not Recompute.FULL:
            raise UsageError("layers' inputs go to the host only under full recompute")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 0 and below 1")

    def static_bytes(
        self, parameters: float, shards: int, *, trained: float | None = None, of_end: bool = False
    ) -> StaticBytes:
        """Bytes on the GPU as of `Training`; weights that rest on the host are not among them."""
        found = super().static_bytes(parameters, shards, trained=trained, of_end=of_end)
        return dataclasses.replace(found, weights=0) if self.parameter_offload else found
