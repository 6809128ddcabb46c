"""Decoder-only GPT with the architecture of GPT-2 or Llama, as its config says.

Plain torch without any part of the swap engine, since `memo.offload` must work on models that do not know memo; the one
exception is `memoize` on attention over packed documents. `layers` is the ModuleList that `memo.offload` finds. Tensors that
layers share are arguments, so a layer is a function of (x, rotary tables, spans) and its own parameters.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from memo.errors import UsageError
from memo.gpt.config import GPTConfig, MoeConfig
from memo.gpt.model.attention import attend, attend_within
from memo.gpt.model.experts import MoeMlp
from memo.gpt.model.init_weights import initialise
from memo.gpt.model.packed_documents import DocumentSpans
from memo.gpt.model.rotary import RotaryTables, rotary_tables, rotate, tables_at
from memo.gpt.model.tiled_mlp import tiled_mlp
from memo.loss import chunked_linear_cross_entropy
from memo.machine import require_within_norm_limit


def _linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


def _norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.hidden, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden, eps=config.norm_eps, bias=config.bias)


class Attention(nn.Module):
    """Causal self-attention with a fused query/key/value projection.

    The projection's columns are grouped by key/value head, [its query heads, key, value]. A column-parallel shard of it is
    thus a smaller attention of the same form.

    Args:
        config: the model.
        window: tokens that each one attends to; None is all of them.
    """

    def __init__(self, config: GPTConfig, window: int | None = None) -> None:
        super().__init__()
        self.head_dim, self.group = config.head_dim, config.group
        self.qkv = _linear(config.hidden, config.qkv_width, config.bias)
        self.out = _linear(config.hidden, config.hidden, config.bias)
        # Both are replaced under context parallelism.
        self.attend: Callable[..., torch.Tensor] = functools.partial(attend, window=window)
        self.attend_within: Callable[..., torch.Tensor] = functools.partial(attend_within, window=window)

    def forward(
        self, x: torch.Tensor, rotary: RotaryTables | None = None, spans: DocumentSpans | None = None
    ) -> torch.Tensor:
        """Attention output of `x`, both (batch, tokens, hidden)."""
        return self.out(self.mix(x, rotary, spans))  # type: ignore[no-any-return]

    def mix(
        self, x: torch.Tensor, rotary: RotaryTables | None = None, spans: DocumentSpans | None = None
    ) -> torch.Tensor:
        """Input of the output projection, (batch, tokens, width of this rank's heads)."""
        grouped = self.qkv(x).unflatten(-1, (-1, self.group + 2, self.head_dim))
        query, key, value = grouped.split([self.group, 1, 1], dim=3)
        if rotary is not None:
            # Rotation makes new queries and keys. A copy of the values frees the projection, which attention would otherwise
            # keep for them alone.
            query, key, value = rotate(query, rotary), rotate(key, rotary), value.clone()
        query, key, value = (part.flatten(2, 3) for part in (query, key, value))
        if spans is None:
            mixed = self.attend(query, key, value)
        else:
            mixed = self.attend_within(query, key, value, spans)
        return mixed.flatten(2)


class Mlp(nn.Module):
    """MLP of GPT-2, down(gelu(up(x))), or of Llama, down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        is_gated = config.mlp == "swiglu"
        self.activation: Callable[..., torch.Tensor] = _swiglu if is_gated else F.gelu
        self.gate = _linear(config.hidden, config.ffn, config.bias) if is_gated else None
        self.up = _linear(config.hidden, config.ffn, config.bias)
        self.down = _linear(config.ffn, config.hidden, config.bias)
        self.tiles = config.mlp_tiles

    @property
    def wide(self) -> tuple[nn.Linear, ...]:
        """Projections whose results the activation takes."""
        return (self.up,) if self.gate is None else (self.gate, self.up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """MLP output of `x`, both (batch, tokens, hidden)."""
        if self.tiles > 1:
            return tiled_mlp(x, tiles=self.tiles, activation=self.activation, wide=self.wide, down=self.down)
        return self.down(self.widen(x))  # type: ignore[no-any-return]

    def widen(self, x: torch.Tensor) -> torch.Tensor:
        """Input of the last projection, (batch, tokens, width of this rank)."""
        return self.activation(*(linear(x) for linear in self.wide))


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


class Block(nn.Module):
    """Transformer layer: x = x + attention(norm1(x)), then x + mlp(norm2(x)).

    Args:
        config: the model.
        layer: number of the layer, which decides whether its attention is local and its MLP a mixture of experts.
    """

    def __init__(self, config: GPTConfig, layer: int = 0) -> None:
        super().__init__()
        self.norm1 = _norm(config)
        self.attention = Attention(config, config.window_of(layer))
        self.norm2 = _norm(config)
        moe = config.moe
        self.mlp = Mlp(config) if moe is None or not moe.is_in(layer) else _moe_mlp(config, moe)
        self.dropout = nn.Dropout(config.dropout)
        self.in_halves: Callable[..., torch.Tensor] | None = None  # set under overlapped tensor parallelism

    def forward(
        self, x: torch.Tensor, rotary: RotaryTables | None = None, spans: DocumentSpans | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Layer output of `x`, both (batch, tokens, hidden); with experts also the router's losses, a scalar."""
        if self.in_halves is not None:
            return self.in_halves(self, x, rotary, spans)
        x = x + self.dropout(self.attention(self.norm1(x), rotary, spans))
        out = self.mlp(self.norm2(x))
        if isinstance(out, tuple):
            return x + self.dropout(out[0]), out[1]
        return x + self.dropout(out)  # type: ignore[no-any-return]


def _moe_mlp(config: GPTConfig, moe: MoeConfig) -> MoeMlp:
    shared = dataclasses.replace(config, ffn=moe.shared_hidden) if moe.shared_experts else None
    return MoeMlp(config, None if shared is None else Mlp(shared))


def run_layers(
    layers: Iterable[nn.Module], x: torch.Tensor, rotary: RotaryTables | None, spans: DocumentSpans | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output of the last layer, (batch, tokens, hidden), and the sum of the routers' losses; None without experts."""
    routers: list[torch.Tensor] = []
    for layer in layers:
        out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = layer(x, rotary, spans)
        if isinstance(out, tuple):
            x, losses = out
            routers.append(losses)
        else:
            x = out
    return x, torch.stack(routers).sum() if routers else None


class GPT(nn.Module):
    """GPT language model, from tokens to logits or to the mean loss.

    Args:
        config: the shape.
        device: device of the parameters; None is torch's default. On the meta device nothing is initialised: call
            `to_empty(device=...)` and `reset_parameters()` later.
        dtype: data type of the parameters; None is torch's default.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        home = torch.get_default_device() if device is None else torch.device(device)
        # On the meta device first, since the modules' own initialisation would draw every weight twice.
        with torch.device("meta"):
            self.tokens = nn.Embedding(config.vocab_size, config.hidden)
            self.positions = nn.Embedding(config.max_seq, config.hidden) if config.positions == "learned" else None
            self.dropout = nn.Dropout(config.dropout)
            self.layers = nn.ModuleList([Block(config, index) for index in range(config.layers)])
            self.norm = _norm(config)
            # A tied projection uses the embedding's weight itself; there is no second parameter.
            self.head = None if config.tie_embeddings else nn.Linear(config.hidden, config.vocab_size, bias=False)
        self.to(dtype=dtype or torch.get_default_dtype())
        if home.type != "meta":
            self.to_empty(device=home)
            self.reset_parameters()

    @property
    def output_weight(self) -> torch.Tensor:
        """Weight of the output projection, (vocabulary, hidden)."""
        return self.tokens.weight if self.head is None else self.head.weight

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises as GPT-2, from one draw of torch's global RNG."""
        initialise(self, self.config, int(torch.randint(1 << 62, ())))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Computes logits or the loss.

        Args:
            tokens: (batch, tokens), int64.
            targets: (batch, tokens), int64; -100 is ignored.

        Returns:
            Logits (batch, tokens, vocabulary) without targets, else the mean loss; in training with the routers' losses.

        Raises:
            UsageError: more tokens than the learned position table has rows.
        """
        end = self.config.end_of_document
        spans = None if end is None else DocumentSpans.of(tokens, end)
        x, rotary = self._embed(tokens, spans)
        require_within_norm_limit(x, "the model")
        x, routers = run_layers(self.layers, x, rotary, spans)
        x = self.norm(x)
        if targets is None:
            return F.linear(x, self.output_weight)
        loss = chunked_linear_cross_entropy(x, self.output_weight, targets)
        return loss + routers if self.training and routers is not None else loss

    def _embed(self, tokens: torch.Tensor, spans: DocumentSpans | None) -> tuple[torch.Tensor, RotaryTables | None]:
        seq, config = tokens.shape[1], self.config
        x = self.tokens(tokens)
        if self.positions is None:
            tables = rotary_tables(
                seq, config.head_dim, config.rope_theta, device=x.device, dtype=x.dtype, scaling=config.rope_scaling
            )
            return self.dropout(x), tables if spans is None else tables_at(tables, spans.positions)
        if seq > config.max_seq:
            raise UsageError(f"model: {seq} tokens, but learned positions for {config.max_seq}; raise max_seq")
        rows = self.positions.weight[:seq] if spans is None else self.positions(spans.positions)
        return self.dropout(x + rows), None
