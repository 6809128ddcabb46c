"""A rank's part of a GPT: some of its layers, and what stands before the first and after the last.

    first    tokens (b, s) -> embedding -> layers
    others   hidden (b, s, h) -> layers
    last     ... -> norm -> loss, the mean over the tokens of its tensor-parallel group

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
from memo.gpt.vocabulary import Vocabulary, WholeVocabulary
from memo.parallel.vocabulary_rows import own_rows

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
        autocast: torch.dtype | None = None,
    ) -> None:
        """`own` are the tokens this rank holds between the layers, `attended` those that its projections see.

        `autocast` is of the forward alone: a pipeline runs backwards in between.
        """
        super().__init__()
        self.config = whole.config
        self.is_first, self.is_last = layers.start == 0, layers.stop == whole.config.layers
        self.own, self.attended, self.autocast = own, attended, autocast
        self.vocabulary: Vocabulary = WholeVocabulary()
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
        """Hidden states, or on the last stage the mean loss."""
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
        weight = own_rows(self._output_weight())
        return linear_cross_entropy(self.norm(x), weight, targets, vocabulary=self.vocabulary)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.tokens is not None
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(self.own.first, self.own.last, device=x.device))
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
