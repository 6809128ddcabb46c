"""Pipeline stage of a GPT: some of its layers, with the embedding on the first and the loss on the last.

    first    tokens (b, s) -> embedding -> layers
    others   hidden (b, s, h) -> layers
    last     ... -> norm -> loss, the mean over the tokens of its tensor-parallel group
    routers' losses of other stages than the last one join the backward with the hidden states that a stage passes on

Owns the choice of a stage's modules and the positions of its tokens. Parameter names are the whole model's, so a checkpoint
is independent of the number of stages.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from memo.gpt.model.model import GPT, run_layers
from memo.gpt.model.packed_documents import DocumentSpans
from memo.gpt.model.rotary import RotaryTables, rotary_tables, tables_at
from memo.loss import Vocabulary, WholeVocabulary, chunked_linear_cross_entropy
from memo.machine import require_within_norm_limit
from memo.parallel import SequenceShards, own_rows


class PipelineStage(nn.Module):
    """Pipeline stage on one rank.

    Args:
        whole: a GPT on the meta device, whose modules the stage takes over.
        layers: numbers of the stage's layers.
        own: tokens that this rank holds between the layers.
        attended: tokens that this rank's projections see.
        autocast: data type of matrix products in forward; None without autocast. It is the stage's own, since a pipeline
            runs backwards between forwards.
    """

    def __init__(
        self,
        whole: GPT,
        *,
        layers: range,
        own: SequenceShards,
        attended: SequenceShards,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = whole.config
        self.is_first, self.is_last = layers.start == 0, layers.stop == whole.config.layers
        self.own, self.attended, self.autocast = own, attended, autocast
        self.vocabulary: Vocabulary = WholeVocabulary()
        tied = whole.head is None
        self.tokens = whole.tokens if self.is_first or (self.is_last and tied) else None
        self.positions = whole.positions if self.is_first else None
        self.sparse_embedding = False
        """The embedding is whole on every data-parallel rank, and the trainer exchanges its gradient as rows."""
        self.dropout = whole.dropout
        self.layers = nn.ModuleDict({str(index): whole.layers[index] for index in layers})
        self.norm = whole.norm if self.is_last else None
        self.head = whole.head if self.is_last else None
        self.dtype = whole.tokens.weight.dtype
        """Data type of hidden states within the stage."""
        self.passed_dtype = self.dtype
        """Data type in which stages pass on hidden states and their gradients."""
        self._router_losses: list[torch.Tensor] = []

    def take_router_losses(self) -> list[torch.Tensor]:
        """Routers' losses of the training forwards since the last call, where the stage's own result does not have them."""
        taken, self._router_losses = self._router_losses, []
        return taken

    @property
    def repeats_embedding(self) -> bool:
        """True if this stage has its own copy of the first stage's embedding as the output projection."""
        return self.tokens is not None and not self.is_first

    def forward(
        self, x: torch.Tensor, targets: torch.Tensor | None = None, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Runs the stage.

        Args:
            x: tokens (batch, tokens) on the first stage, else hidden states (batch, tokens, hidden).
            targets: (batch, tokens), needed on the last stage.
            rows: all tokens of the rows of `x`, (batch, seq), for a model with document boundaries.

        Returns:
            Hidden states (batch, tokens, hidden) as `passed_dtype`, or on the last stage the mean loss over its
            tensor-parallel group.
        """
        if self.autocast is None:
            return self._forward(x, targets, rows)
        with torch.autocast(x.device.type, self.autocast):
            return self._forward(x, targets, rows)

    def _forward(self, x: torch.Tensor, targets: torch.Tensor | None, rows: torch.Tensor | None) -> torch.Tensor:
        spans = self._spans(rows)
        if self.is_first:
            x = self._embed(x, spans)
        else:
            x = x.to(self.dtype)
        require_within_norm_limit(x, "a rank")
        rotary = self._rotary(x, spans)
        x, routers = run_layers(self.layers.values(), x, rotary, spans)
        if self.norm is None:
            x = x.to(self.passed_dtype)
            if not self.training or routers is None:
                return x
            self._router_losses.append(routers.detach())
            return cast("torch.Tensor", _WithLosses.apply(x, routers))  # type: ignore[no-untyped-call]
        assert targets is not None
        weight = own_rows(self._output_weight())
        loss = chunked_linear_cross_entropy(self.norm(x), weight, targets, vocabulary=self.vocabulary)
        return loss + routers if self.training and routers is not None else loss

    def _spans(self, rows: torch.Tensor | None) -> DocumentSpans | None:
        end = self.config.end_of_document
        if end is None:
            return None
        assert rows is not None
        return DocumentSpans.of(rows, end)

    def _embed(self, tokens: torch.Tensor, spans: DocumentSpans | None) -> torch.Tensor:
        assert self.tokens is not None
        x = self.tokens(tokens)
        if self.positions is not None:
            own = self.own.positions(x.device) if spans is None else self.own.of(spans.positions)
            x = x + self.positions(own)
        return self.dropout(x)  # type: ignore[no-any-return]

    def _rotary(self, x: torch.Tensor, spans: DocumentSpans | None) -> RotaryTables | None:
        if self.config.positions != "rotary":
            return None
        if spans is not None:
            return tables_at(self._tables(range(spans.longest), x), self.attended.of(spans.positions))
        tables = [self._tables(positions, x) for positions in self.attended.ranges]
        if len(tables) == 1:
            return tables[0]
        cos, sin = zip(*tables, strict=True)
        return torch.cat(cos), torch.cat(sin)

    def _tables(self, positions: range, x: torch.Tensor) -> RotaryTables:
        config = self.config
        return rotary_tables(
            len(positions),
            config.head_dim,
            config.rope_theta,
            first=positions.start,
            device=x.device,
            dtype=x.dtype,
            scaling=config.rope_scaling,
        )

    def _output_weight(self) -> torch.Tensor:
        if self.head is not None:
            return self.head.weight
        assert self.tokens is not None
        return self.tokens.weight


class _WithLosses(torch.autograd.Function):
    """Hidden states, of which backward gives losses the gradient that they have as terms of the loss: one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        ctx.dtype = losses.dtype
        return x.clone()  # a pipeline detaches what it sends in place, which a view does not allow

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, torch.ones((), dtype=ctx.dtype, device=grad.device)
