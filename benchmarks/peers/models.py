"""The two models that ways are compared on: our GPT, and an unmodified Llama of transformers.

Weights and tokens are the same in every process. Neither ever has its logits, so that what the loss takes is equal in every
way: the GPT's own loss comes in chunks, Llama's by `memo.loss_without_logits`. Positions are rotary: no parameter depends on
the length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

import memo
from memo.gpt.config import preset
from memo.gpt.model.model import GPT

Family = Literal["gpt", "llama"]
VOCABULARY = 512


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model and the tokens of its step."""

    family: Family
    layers: int
    hidden: int
    heads: int
    tokens: int
    """In one sequence."""
    head_dim: int | None = None
    """Llama only: narrower heads make long sequences affordable on a CPU; None: hidden / heads."""
    dtype: str = "float32"

    def make(self, device: torch.device) -> tuple[nn.Module, torch.Tensor]:
        """The model and its ids, [1, tokens + 1]."""
        torch.manual_seed(0)
        dtype = getattr(torch, self.dtype)
        model: nn.Module
        if self.family == "gpt":
            config = preset(
                "tiny", layers=self.layers, hidden=self.hidden, heads=self.heads, kv_heads=self.heads,
                ffn=4 * self.hidden, vocab_size=VOCABULARY, max_seq=self.tokens, positions="rotary",
            )  # fmt: skip
            model = GPT(config, device=device, dtype=dtype)
        else:
            model = self._llama().to(device=device, dtype=dtype)
            memo.loss_without_logits(model)
        ids = torch.randint(0, VOCABULARY, (1, self.tokens + 1), generator=torch.Generator().manual_seed(0))
        return model.train(), ids.to(device)

    def _llama(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=self.hidden, intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.heads,
            head_dim=self.head_dim,
            max_position_embeddings=max(self.tokens, 2048), use_cache=False, attn_implementation="sdpa",
        )  # fmt: skip
        return LlamaForCausalLM(config)

    def loss(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Mean loss of the next token."""
        if self.family == "gpt":
            return model(ids[:, :-1], ids[:, 1:])  # type: ignore[no-any-return]
        return model(ids[:, :-1], labels=ids[:, :-1]).loss  # type: ignore[no-any-return]


def layers_of(model: Any) -> Sequence[nn.Module]:
    """The repeated layers."""
    return model.layers if isinstance(model, GPT) else model.model.layers  # type: ignore[no-any-return]
