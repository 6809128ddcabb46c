"""How weights are trained: states of the optimizer, sharding, adapters. Chosen beside a layout and a model.

Owns the choices and the bytes per parameter that follow from them. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated, Any

from memo.errors import UsageError
from memo.gpt.arithmetic.fixed_methods import RecomputeMethod
from memo.gpt.arithmetic.layout import StepLayout
from memo.gpt.arithmetic.optimizers import Optimizer, end_states, layer_states
from memo.gpt.run_config import EmbeddingGradients
from memo.gpt.train_config import Precision
from memo.mip.inputs import CODECS, StaticBytes


class AdapterDtype(enum.StrEnum):
    """Number format of LoRA adapters and of their optimizer's state."""

    FP32 = "fp32"  # as PEFT makes those of a bfloat16 model; each map's input is cast, and saved again
    BF16 = "bf16"  # autocast_adapter_dtype=False


class BaseFormat(enum.StrEnum):
    """Number format of the frozen weights under adapters."""

    FULL = "full"  # as --precision has it
    NF4 = "4bit"  # bitsandbytes' NF4: half a byte, and the scale of 64 in a byte (Dettmers et al. 2023)


NF4_BYTES = 0.5 + 1 / 64
"""Bytes of a parameter in NF4 with doubly quantized scales."""


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
ADAM_PURE = StateBytes(weight=2, gradient=2, optimizer=4, reduced=2, passes=14)
"""Everything in bfloat16."""
STATES = {Precision.FP32: ADAM_FP32, Precision.BF16_AUTOCAST: ADAM_FP32, Precision.BF16: ADAM_PURE}
"""Bytes of a parameter's states by the precision in which weights are stored; autocast is not FSDP's affair."""


def adapter_states(optimizer: Optimizer, dtype: AdapterDtype, weights: StateBytes, *, rank: int) -> StateBytes:
    """Bytes of an adapter's parameter, which is in float32 whatever the weights are, or as they are."""
    return layer_states(optimizer, ADAM_FP32 if dtype is AdapterDtype.FP32 else weights, smallest=max(1, rank))


def _method(text: str) -> RecomputeMethod | None:
    """Reads a fixed method; None is the plan's choice."""
    if text != "plan" and text not in tuple(RecomputeMethod):
        raise UsageError(f"{text!r} is none of plan, {', '.join(RecomputeMethod)}; choose one of them")
    return None if text == "plan" else RecomputeMethod(text)


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{text} is no rank; give a number of at least 1")
    return int(text)


_METHODS = {"type": _method, "metavar": f"{{plan,{','.join(RecomputeMethod)}}}"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMethod:
    """Training method of a named model. The fields but the last are flags of `memo plan`, and their docstrings its help."""

    recompute: Annotated[RecomputeMethod | None, _METHODS] = None
    """Recompute of the layers: plan chooses; none, selective (scores: as none, since attention is fused) and full (the
    layer) are fixed methods, counted as compute, that move nothing unless --host says so (default plan)."""
    zero: Annotated[int, {"choices": range(4), "metavar": None}] = 3
    """Degree of ZeRO, shared out by data-parallel ranks: 1 optimizer state, 2 gradients, too, 3 weights, too, as memo train
    does."""
    optimizer: Optimizer = Optimizer.ADAMW
    """Optimizer, whose state is kept in the weights' format unless it says otherwise."""
    lora: Annotated[int, {"type": _rank, "metavar": "RANK"}] = 0
    """Train adapters of this rank on every linear map of the layers, and nothing else (default: everything)."""
    lora_dtype: AdapterDtype = AdapterDtype.FP32
    """With --lora: number format of the adapters; fp32 is what PEFT makes of those of a bfloat16 model, each of which saves
    its input again, in float32."""
    base: BaseFormat = BaseFormat.FULL
    """With --lora: number format of the frozen weights; 4bit is bitsandbytes' NF4."""
    embedding: EmbeddingGradients = EmbeddingGradients.AUTO
    """Exchange of the embedding's gradient between data-parallel ranks: dense, as a whole table, or sparse, as the rows of
    the tokens that a rank has seen; auto is the one with the shorter step that fits."""
    codec: Annotated[str | None, {"choices": CODECS, "metavar": None}] = None
    """Move values as one-byte codes with a bounded error, as memo train --codec does (default: bit for bit)."""
    optimizer_offload: bool = False
    """Optimizer state and its step are on the host; memo train has it for one GPU."""
    sharded_over: int | None = None
    """Ranks that share one copy of what `zero` shards, for hybrid sharding; None is all data-parallel ranks."""

    @property
    def choices(self) -> dict[str, Any]:
        """The method's fields, without those of a subclass."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(TrainingMethod)}


AS_MEMO_TRAINS = TrainingMethod()
"""The method of `memo train`: everything is trained by AdamW, and sharded over all data-parallel ranks."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training(TrainingMethod):
    """A method with the bytes of a model's states.

    Raises:
        UsageError: two choices contradict one another.
    """

    states: StateBytes
    end_states: StateBytes | None = None
    """States of the embedding and the head; None: the same."""
    adapter_states: StateBytes | None = None
    """States of the adapters; None: as of the weights."""
    gathered_bytes: int
    """Bytes per parameter of a gathered weight."""
    accumulates: bool = False
    """Whether a step has several microbatches, whose gradients are added up whole and reduced with the last one."""
    whole_in_step: bool = False
    """Under `zero` 2 and 3: weights are gathered once a step and stay until its end, and gradients are added up whole:
    torch's FSDP under pipeline schedules."""

    @classmethod
    def of(
        cls,
        method: TrainingMethod,
        layout: StepLayout,
        *,
        precision: Precision,
        accumulate: int,
        smallest: int,
        smallest_of_ends: int,
    ) -> Training:
        """The training of a model.

        Args:
            method: the choices.
            layout: of the step.
            precision: number format of the weights.
            accumulate: microbatches in a step.
            smallest: smaller dimension of the layers' smallest matrix.
            smallest_of_ends: likewise of the embedding and the head.
        """
        if method.base is BaseFormat.NF4 and layout.gpus > 1:
            raise UsageError(f"--base {method.base} is planned on one GPU; leave it out with {layout.gpus}")
        weights = STATES[precision]
        return cls(
            **method.choices,
            states=layer_states(method.optimizer, weights, smallest=smallest),
            adapter_states=adapter_states(method.optimizer, method.lora_dtype, weights, rank=method.lora),
            end_states=end_states(method.optimizer, weights, smallest=smallest_of_ends),
            gathered_bytes=weights.weight,
            accumulates=accumulate > 1,
            whole_in_step=layout.pp > 1,  # weights stay gathered through a step of a pipeline
        )

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise UsageError(f"zero is {self.zero}; it is 0, 1, 2 or 3")
        if self.sharded_over is not None and self.sharded_over < 1:
            raise UsageError(f"weights are sharded over {self.sharded_over} ranks; at least 1")
        if self.lora < 0:
            raise UsageError(f"lora is {self.lora}; it is the rank of adapters, or 0")
        if self.base is BaseFormat.NF4 and not self.lora:
            raise UsageError(
                f"--base {self.base} has no meaning without --lora: weights that are trained are not quantized"
            )

    @property
    def trained_states(self) -> StateBytes:
        """States of what is trained: of the weights, or of the adapters."""
        return self.adapter_states if self.lora and self.adapter_states is not None else self.states

    def static_bytes(
        self, parameters: float, shards: int, *, trained: float | None = None, coded: float = 0.0, of_end: bool = False
    ) -> StaticBytes:
        """Bytes that a rank holds on its GPU of some parameters' weights, gradients and optimizer.

        Args:
            parameters: how many, before any sharding over data-parallel ranks.
            shards: ranks that what is sharded is divided over.
            trained: how many of them are trained; None: all.
            coded: how many are quantized with a base in 4 bits.
            of_end: whether they are the embedding's or the head's.
        """
        stored = self.end_states if of_end and self.end_states is not None else self.states
        states = self.trained_states if self.lora else stored
        quantized = coded if self.base is BaseFormat.NF4 else 0.0
        frozen = stored.weight * (parameters - quantized) + NF4_BYTES * quantized
        zero, trained = self.zero, parameters if trained is None else trained
        gathered = whole_gradient = 0.0
        if zero >= 2 and shards > 1 and self.whole_in_step:
            gathered, whole_gradient = self.gathered_bytes if zero == 3 else 0, states.reduced
        elif zero >= 2 and shards > 1 and self.accumulates:
            whole_gradient = states.gradient
        weight_shards = shards if zero >= 3 else 1
        leaves = self.optimizer_offload and (zero >= 2 or shards == 1)
        gradient = 0.0 if leaves else states.gradient / (shards if zero >= 2 else 1)
        optimizer = 0.0 if self.optimizer_offload else states.optimizer / (shards if zero >= 1 else 1)
        return StaticBytes(
            weights=round((frozen + (states.weight - stored.weight) * trained) / weight_shards),
            gradients=round((gradient + whole_gradient) * trained),
            optimizer=round(optimizer * trained),
            gathered=round(gathered * parameters),
        )
