"""A rank's part of a GPT: some of its layers, and what stands before the first and after the last.

    first    tokens (b, s) -> embedding -> layers
    others   hidden (b, s, h) -> layers
    last     ... -> norm -> loss, this rank's weighted share of it

Owns which modules a stage keeps and which positions its tokens have. Parameter names are the whole model's, so that a
checkpoint does not know how many stages wrote it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from memo.gpt.loss import linear_cross_entropy
from memo.gpt.model import GPT
from memo.gpt.rotary import RotaryTables, rotary_tables

__all__ = ["Stage", "TokenRange"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenRange:
    """Tokens [first, last) of a sequence."""

    first: int
    last: int

    @classmethod
    def shard(cls, seq: int, index: int, count: int) -> TokenRange:
        """Number `index` of `count` equal parts."""
        part = seq // count
        return cls(first=index * part, last=(index + 1) * part)

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def slice(self) -> slice:
        return slice(self.first, self.last)


class Stage(nn.Module):
    """Takes over modules of `whole`, a GPT on the meta device."""

    def __init__(
        self,
        whole: GPT,
        *,
        layers: range,
        own: TokenRange,
        attended: TokenRange,
        loss_weight: float = 1.0,
        autocast: torch.dtype | None = None,
    ) -> None:
        """`own` are the tokens this rank holds between the layers, `attended` those that its projections see.

        `autocast` is of the forward alone: a pipeline runs backwards in between.
        """
        super().__init__()
        self.config = whole.config
        self.is_first, self.is_last = layers.start == 0, layers.stop == whole.config.layers
        self.own, self.attended, self.loss_weight, self.autocast = own, attended, loss_weight, autocast
        tied = whole.head is None
        self.tokens = whole.tokens if self.is_first or (self.is_last and tied) else None
        self.positions = whole.positions if self.is_first else None
        self.dropout = whole.dropout
        self.layers = nn.ModuleDict({str(index): whole.layers[index] for index in layers})
        self.norm = whole.norm if self.is_last else None
        self.head = whole.head if self.is_last else None

    @property
    def repeats_embedding(self) -> bool:
        """Whether this stage holds a second copy of the first one's embedding, to make logits with."""
        return self.tokens is not None and not self.is_first

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states, or on the last stage the weighted mean loss over this rank's tokens."""
        if self.autocast is None:
            return self._forward(x, targets)
        with torch.autocast(x.device.type, self.autocast):
            return self._forward(x, targets)

    def _forward(self, x: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
        if self.is_first:
            x = self._embed(x)
        rotary = self._rotary(x)
        for layer in self.layers.values():
            x = layer(x, rotary)
        if self.norm is None:
            return x
        assert targets is not None
        return linear_cross_entropy(self.norm(x), self._output_weight(), targets) * self.loss_weight

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.tokens is not None
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[self.own.slice]
        return self.dropout(x)  # type: ignore[no-any-return]

    def _rotary(self, x: torch.Tensor) -> RotaryTables | None:
        config = self.config
        if config.positions != "rotary":
            return None
        tables = self.attended
        return rotary_tables(
            len(tables), config.head_dim, config.rope_theta, first=tables.first, device=x.device, dtype=x.dtype
        )

    def _output_weight(self) -> torch.Tensor:
        if self.head is not None:
            return self.head.weight
        assert self.tokens is not None
        return self.tokens.weight
