"""Twelve kinds of layers, small: dense, with dropout, with attention written out, experts, scans, cross-attention, sequences
first, joint attention of two streams, images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from offload_models import GROUPED, HF, VOCAB, causal, hugging_face
from torch import nn
from torch.nn import functional as F

HIDDEN, HEADS = 32, 4

Forward = Callable[[nn.Module, int], torch.Tensor]


class SequenceFirst(nn.Module):
    """As Megatron has it: (tokens, sequences, hidden), attention by baddbmm, dropout on its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, sequences, _ = x.shape
        size, rows = HIDDEN // HEADS, sequences * HEADS
        fused = self.qkv(self.norm1(x)).view(tokens, sequences, HEADS, 3 * size)
        q, k, v = (part.reshape(tokens, rows, size).transpose(0, 1) for part in fused.split(size, -1))
        scores = torch.baddbmm(torch.zeros(rows, tokens, tokens), q, k.transpose(1, 2), beta=0.0, alpha=size**-0.5)
        scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -1e4).softmax(-1)
        attended = (F.dropout(scores, 0.1) @ v).transpose(0, 1).reshape(x.shape)
        x = x + F.dropout(self.out(attended), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), 0.1)


class Joint(nn.Module):
    """As SD3 has it: two streams that attend to each other, each shifted and scaled by a third tensor."""

    def __init__(self) -> None:
        super().__init__()

        def pair(inside: int, outside: int) -> nn.ModuleList:
            return nn.ModuleList([nn.Linear(inside, outside) for _ in range(2)])

        self.modulate, self.qkv, self.out = pair(HIDDEN, 6 * HIDDEN), pair(HIDDEN, 3 * HIDDEN), pair(HIDDEN, HIDDEN)
        self.up, self.down = pair(HIDDEN, 4 * HIDDEN), pair(4 * HIDDEN, HIDDEN)

    def forward(self, image: torch.Tensor, text: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor, ...]:
        moved = [modulate(F.silu(time))[:, None].chunk(6, -1) for modulate in self.modulate]
        heads: list[list[torch.Tensor]] = [[], [], []]
        for x, by, qkv in zip((image, text), moved, self.qkv, strict=True):
            normed = F.layer_norm(x, (HIDDEN,)) * (1 + by[1]) + by[0]
            for parts, part in zip(heads, qkv(normed).chunk(3, -1), strict=True):
                parts.append(part.unflatten(-1, (HEADS, -1)).transpose(1, 2))
        joined = F.scaled_dot_product_attention(*(torch.cat(parts, 2) for parts in heads)).transpose(1, 2).flatten(2)
        done = []
        for number, attended in enumerate(joined.split([image.size(1), text.size(1)], 1)):
            by = moved[number]
            x = (image, text)[number] + by[2] * self.out[number](attended)
            normed = F.layer_norm(x, (HIDDEN,)) * (1 + by[4]) + by[3]
            done.append(x + by[5] * self.down[number](F.gelu(self.up[number](normed), approximate="tanh")))
        return tuple(done)


class _SequencesFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, HIDDEN), nn.ModuleList([SequenceFirst() for _ in range(3)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids.t())
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy((x @ self.embed.weight.t()).flatten(0, 1), ids.t().flatten())


class _TwoStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.time = nn.Embedding(VOCAB, HIDDEN), nn.Linear(1, HIDDEN)
        self.layers = nn.ModuleList([Joint() for _ in range(3)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        image, text, time = self.embed(ids), self.embed(ids[:, :16]), self.time(torch.ones(len(ids), 1))
        for layer in self.layers:
            image, text = layer(image, text, time)
        return image.square().mean() + text.square().mean()


def _tokens(model: nn.Module, step: int) -> torch.Tensor:
    torch.manual_seed(step)
    loss: torch.Tensor = model(torch.randint(1, VOCAB, (2, 64)))
    return loss


def _image(model: nn.Module, step: int) -> torch.Tensor:
    torch.manual_seed(step)
    loss: torch.Tensor = model(pixel_values=torch.randn(2, 3, 32, 32), labels=torch.tensor([0, 1])).loss
    return loss


def _made(name: str, **shape: Any) -> Callable[[], nn.Module]:
    """Of transformers: the model's class by the start of its name and the end of its kind."""

    def make() -> nn.Module:
        import transformers as hf

        family, kind = name.split(" for ")
        config = getattr(hf, f"{family}Config")(**shape)
        made: nn.Module = getattr(hf, f"{family}For{kind}")(config)
        return made

    return make


_MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {**GROUPED, **_MARKS, "head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
_IMAGES = {"image_size": 32, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}

KINDS: dict[str, tuple[Callable[[], nn.Module], Forward]] = {
    "Llama": (lambda: hugging_face("llama"), causal(2)),
    "GPT-2 with dropout": (lambda: hugging_face("gpt2, dropout"), causal(2)),
    "Gemma2": (_made("Gemma2 for CausalLM", **_GROUPED, attn_implementation="eager"), causal(2)),
    "Mixtral": (lambda: hugging_face("mixtral"), causal(2)),
    "Qwen3-MoE": (_made("Qwen3Moe for CausalLM", **_GROUPED, **_EXPERTS, num_experts=4), causal(2)),
    "DeepSeek-V3": (_made("DeepseekV3 for CausalLM", **{**GROUPED, **_MARKS, **_EXPERTS, **_LATENT}), causal(2)),
    "Mamba": (lambda: hugging_face("mamba"), causal(2)),
    "BERT with dropout": (_made("Bert for MaskedLM", **HF, intermediate_size=64, pad_token_id=0), causal(2)),
    "T5": (lambda: hugging_face("t5"), causal(2)),
    "sequences first": (_SequencesFirst, _tokens),
    "joint attention": (_TwoStreams, _tokens),
    "ViT": (_made("ViT for ImageClassification", **_IMAGES, intermediate_size=64), _image),
}
