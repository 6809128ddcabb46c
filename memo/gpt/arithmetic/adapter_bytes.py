"""Bytes of a token that LoRA's adapters add to a layer: saved, held, read and written. Needs no torch.

As PEFT computes them: a float32 adapter of a bfloat16 map casts its input, which it saves again, and casts the sum back.
"""

from __future__ import annotations

import dataclasses

from memo.gpt.arithmetic.block_bytes import FLOAT, ElementSizes
from memo.gpt.arithmetic.flops import layer_matrices
from memo.gpt.arithmetic.training import AdapterDtype, Training
from memo.gpt.config import GPTConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterBytes:
    """Bytes of a token that the adapters of a layer's matrices add; see `AdapterDtype`."""

    saved: float = 0.0
    """Beside what the frozen maps save: what is between an adapter's two products, and each input that is cast."""
    between: float = 0.0
    """The first part of it."""
    beside: float = 0.0
    """Bytes of the widest adapter's result, as long as it is added."""
    largest: float = 0.0
    """Bytes of the largest input that is cast."""
    forward: float = 0.0
    """Read and written."""
    backward: float = 0.0

    @classmethod
    def of(cls, config: GPTConfig, training: Training, sizes: ElementSizes) -> AdapterBytes:
        """Bytes of a layer's adapters; none without them."""
        if not training.lora:
            return cls()
        shapes = layer_matrices(config)
        # A tiled MLP saves nothing of its own, and makes all of it anew.
        saving = shapes[:2] if config.mlp_tiles > 1 else shapes
        read, made = sum(columns for columns, _ in shapes), sum(rows for _, rows in shapes)
        widest, narrow = max(max(shape) for shape in shapes), sizes.product
        if training.lora_dtype is not AdapterDtype.FP32 or sizes.casts or narrow == FLOAT:
            # Two products, the scale, the sum; of the gradients the scale, each product twice, the sum at the input.
            between = len(saving) * training.lora * narrow
            return cls(
                saved=between,
                between=between,
                beside=narrow * widest,
                forward=narrow * (read + 6 * made),
                backward=narrow * (5 * read + 4 * made),
            )
        # The same in float32 with casts of the input, of the sum, and of both gradients.
        between = len(saving) * training.lora * FLOAT
        # Nothing saves the norms' results and the last map's input as they are any more: a frozen map does not.
        unsaved = narrow * (config.hidden if config.mlp_tiles > 1 else 2 * config.hidden + config.ffn)
        return cls(
            saved=FLOAT * sum(columns for columns, _ in saving) + between - unsaved,
            largest=FLOAT * max(columns for columns, _ in saving),
            between=between,
            beside=2 * FLOAT * widest,
            forward=(narrow + 2 * FLOAT) * read + (2 * narrow + 6 * FLOAT) * made,
            backward=(4 * narrow + 3 * FLOAT) * read + (2 * narrow + 6 * FLOAT) * made,
        )
