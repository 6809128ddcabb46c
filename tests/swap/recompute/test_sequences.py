"""Packed sequences, document masks, padding and cross-attention: each divided and equal bit for bit, or whole and equal."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from offload_models import SEQ, assert_split, causal, compare, gpt, hugging_face, ours, refused, token_ids
from small_models import gradients
from torch import nn
from torch.nn import functional as F

import memo
from memo.errors import ModifiedAfterSave
from memo.swap import Level

if TYPE_CHECKING:
    from pathlib import Path

MIXES = [0.0, 0.5, (0.25, 0.5, 0.25)]
ENDS = [0, 13, 14, 40, SEQ]  # of the sequences packed into one
HIDDEN, HEADS = 32, 2


def positions() -> torch.Tensor:
    """Each packed sequence counts from zero."""
    return torch.cat([torch.arange(stop - first) for first, stop in itertools.pairwise(ENDS)])[None]


def documents() -> torch.Tensor:
    """True where a token may look at another: of its own sequence, and no later one."""
    number = torch.repeat_interleave(torch.arange(len(ENDS) - 1), torch.tensor(ENDS).diff())
    return ((number[:, None] == number[None]) & torch.ones(SEQ, SEQ).tril().bool())[None, None]


def attend_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """(tokens, heads, size), as the variable-length interface of flash attention has it: each sequence by itself."""
    parts = [
        F.scaled_dot_product_attention(*(t[first:stop].transpose(0, 1)[None] for t in (q, k, v)), is_causal=True)
        for first, stop in itertools.pairwise(cu_seqlens.tolist())
    ]
    return torch.cat([part[0].transpose(0, 1) for part in parts])


class PackedBlock(nn.Module):
    """Takes (tokens, hidden), no batch, and where its sequences end."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.attend = attend

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.reshape(-1, HEADS, HIDDEN // HEADS) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        q, k = (t * turn[:, None, :] for t in (q, k))
        x = x + self.out(self.attend(q, k, v, cu_seqlens).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Packed(nn.Module):
    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, HIDDEN)
        self.layers = nn.ModuleList([PackedBlock(attend) for _ in range(3)])

    def forward(self, ids: torch.Tensor, cu_seqlens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        turn = torch.cos(position[0][:, None] * torch.linspace(0.1, 1.0, HIDDEN // HEADS)).to(self.embed.weight.dtype)
        x = self.embed(ids[0])
        for layer in self.layers:
            x = layer(x, cu_seqlens, turn)
        return F.cross_entropy(x @ self.embed.weight.t(), ids[0])


def packed(model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(token_ids(step, 1), torch.tensor(ENDS), positions())
    return loss


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_packed_sequences_with_cu_seqlens_through_a_marked_function(
    mix: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    calls = 0

    def counted(*args: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return attend_varlen(*args)

    assert_split(compare(lambda: Packed(memo.memoize(counted)), packed, tmp_path, mix, dtype), mix)
    assert calls == 2 * 3 * 3  # steps and layers, with and without memo: never again in backward


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_packed_sequences_that_nobody_marked(mix: Any, tmp_path: Path) -> None:
    """Each sequence's attention is an operator of its own, and the ends are numbers of the program."""
    assert_split(compare(lambda: Packed(attend_varlen), packed, tmp_path, mix), mix)


@pytest.mark.covering(1)
@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_packed_position_ids(name: str, mix: Any, tmp_path: Path) -> None:
    assert_split(compare(lambda: hugging_face(name), causal(1, position_ids=positions()), tmp_path, mix), mix)


@pytest.mark.covering(1)
@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_document_mask(name: str, mix: Any, tmp_path: Path) -> None:
    forward = causal(2, attention_mask=documents().expand(2, 1, SEQ, SEQ), use_cache=False)
    assert_split(compare(lambda: hugging_face(name), forward, tmp_path, mix), mix)


@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("variant", ["gpt", "llama"])
def test_our_own_model_within_documents(variant: str, tiles: int, tmp_path: Path) -> None:
    """Where documents end only attention reads; an MLP in tiles treats tokens apart, and so does the dropout after it."""
    shape = {"end_of_document": 7, "mlp_tiles": tiles, "dropout": 0.1 if variant == "gpt" else 0.0}
    for mix in MIXES:
        assert_split(compare(lambda: gpt(variant, **shape), ours(2), tmp_path, mix), mix)


@pytest.mark.parametrize("alpha", [0.25, Level.SAVE_INPUT], ids=str)
def test_documents_whose_ends_are_changed_before_backward(alpha: Any, tmp_path: Path) -> None:
    """An error where attention runs again; where its result is kept nothing reads them."""

    def step(model: nn.Module, manager: Any) -> list[torch.Tensor | None]:
        seen: list[Any] = []
        hook = model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[2]))  # type: ignore[index, union-attr]
        with manager:
            loss = model(token_ids(0, 2), token_ids(1, 2))
        hook.remove()
        seen[0].starts.add_(1)
        loss.backward()
        return gradients(model)

    model, reference = gpt("gpt", end_of_document=7), gpt("gpt", end_of_document=7)
    reference.load_state_dict(model.state_dict())
    manager = memo.offload(model, alpha=alpha, disk=tmp_path, min_bytes=1024)
    try:
        got = step(model, manager)
    except ModifiedAfterSave:
        return
    assert all(map(torch.equal, got, step(reference, contextlib.nullcontext())))  # type: ignore[arg-type]
    assert manager.stats.bytes_recomputed > 0


@pytest.mark.covering(2)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_padding(name: str, mix: Any, side: str, tmp_path: Path) -> None:
    mask = torch.ones(2, SEQ, dtype=torch.long)
    mask[0, :9] = 0
    mask = mask if side == "left" else mask.flip(1)
    assert_split(compare(lambda: hugging_face(name), causal(2, attention_mask=mask), tmp_path, mix), mix)


class Crossing(nn.Module):
    """A decoder's layer: attention to itself, and to what an encoder made."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(HIDDEN) for _ in range(3))
        self.qkv, self.own = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.q, self.kv, self.out = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
        heads = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*heads, is_causal=is_causal).transpose(1, 2).reshape(q.shape)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        x = x + self.own(self.attend(*self.qkv(self.norm1(x)).chunk(3, -1), is_causal=True))
        x = x + self.out(self.attend(self.q(self.norm2(x)), *self.kv(memory).chunk(2, -1), is_causal=False))
        return x + self.down(F.gelu(self.up(self.norm3(x))))


class Decoder(nn.Module):
    def __init__(self, encoded: int) -> None:
        super().__init__()
        self.encoded = encoded
        self.embed, self.encode = nn.Embedding(96, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList([Crossing() for _ in range(3)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        memory = self.encode(x).repeat(1, 2, 1)[:, : self.encoded]
        for layer in self.layers:
            x = layer(x, memory)
        return F.cross_entropy((x @ self.embed.weight.t()).flatten(0, 1), ids.flatten())


@pytest.mark.covering(2)
@pytest.mark.parametrize("encoded", [24, SEQ, 96])
@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_attention(dtype: torch.dtype, mix: Any, encoded: int, tmp_path: Path) -> None:
    """To fewer tokens, to as many, and to more."""

    def forward(model: nn.Module, step: int) -> torch.Tensor:
        loss: torch.Tensor = model(token_ids(step, 2))
        return loss

    assert_split(compare(lambda: Decoder(encoded), forward, tmp_path, mix, dtype), mix)


@pytest.mark.parametrize("cache", [True, False])
def test_an_encoder_and_decoder_whose_attention_is_written_out(cache: bool, tmp_path: Path) -> None:
    manager = compare(lambda: hugging_face("t5"), causal(2, use_cache=cache), tmp_path, 0.25)
    assert manager.stats.bytes_recomputed > 0
    assert refused(manager) == {}
