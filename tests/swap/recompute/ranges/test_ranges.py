"""Token ranges of a tape: gradients equal at any alpha, bytes by arithmetic, and a range that is wrong is not used."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from offload_models import causal, gpt, hugging_face, ours
from small_models import SEQ, assert_equal, gradients, ids, in_ranges, plain, stack, train
from torch import nn
from torch.nn import functional as F

import memo
from memo.swap.levels import TokenLevels
from memo.swap.recompute import plans, trials
from memo.swap.recompute.axis import operator_rules
from memo.swap.recompute.ranges import rows

if TYPE_CHECKING:
    from pathlib import Path

ALPHAS = [
    0.037, 0.091, 0.133, 0.171, 0.219, 0.256, 0.303, 0.347, 0.389, 0.431,
    0.477, 0.518, 0.559, 0.603, 0.641, 0.687, 0.729, 0.773, 0.811, 0.953,
]  # fmt: skip


class SequenceFirst(nn.Module):
    """(tokens, batch, hidden), as Megatron-Core has it: a fused projection, dropout after each projection."""

    def __init__(self, hidden: int = 32, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, batch, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(tokens, batch, self.heads, 3 * hidden // self.heads)
        q, k, v = (part.permute(1, 2, 0, 3) for part in qkv.chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)
        x = x + F.dropout(self.out(attended.reshape(tokens, batch, hidden)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), self.dropout)


class SequenceFirstModel(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 32)
        self.layers = nn.ModuleList([SequenceFirst(dropout=dropout) for _ in range(3)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).transpose(0, 1).contiguous()
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy((x @ self.embed.weight.t()).flatten(0, 1), ids.t().flatten())


def on_ids(model: nn.Module, step: int) -> torch.Tensor:
    torch.manual_seed(step)  # for dropout
    loss: torch.Tensor = model(ids(step))
    return loss


def written_out(name: str) -> nn.Module:
    """With attention as products and a softmax."""
    model: Any = hugging_face(name)
    model.set_attn_implementation("eager")
    return model  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "llama": (lambda: hugging_face("llama"), causal(2)),
    "gpt2": (lambda: hugging_face("gpt2"), causal(2)),
    "gpt": (lambda: gpt("gpt", layers=2), ours(2)),
    "gpt, dropout": (lambda: gpt("gpt", layers=2, dropout=0.1), ours(2)),
    "our llama": (lambda: gpt("llama", layers=2), ours(2)),
    "llama, eager": (lambda: written_out("llama"), causal(2)),
    "gpt2, eager": (lambda: written_out("gpt2"), causal(2)),
    "gpt2, eager, dropout": (lambda: written_out("gpt2, dropout"), causal(2)),
    "t5, eager": (lambda: written_out("t5"), causal(2)),
    "sequence first": (SequenceFirstModel, on_ids),
    "sequence first, dropout": (lambda: SequenceFirstModel(0.1), on_ids),
}


def fresh(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().to(dtype).train()


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Differences found by the trials of token ranges, one for each that passed."""
    found: list[float] = []
    whole = trials.try_out_ranges

    def noted(*args: Any, **kwargs: Any) -> float:
        found.append(whole(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(trials, "try_out_ranges", noted)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_odd_alphas_are_equal_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path, ranges: list[float]) -> None:
    """Each alpha in a step of its own; the ranges end at multiples of eight tokens whatever it is."""
    model, forward = fresh(name, dtype), MODELS[name][1]
    want = forward(model, 0)
    want.backward()
    expected = gradients(model)
    manager = memo.offload(model, alpha=1.0, disk=tmp_path, min_bytes=512)
    layers = [layer.name for layer in manager.layers]
    ends = set()
    for alpha in ALPHAS:
        manager.choose_levels(dict.fromkeys(layers, in_ranges(alpha)))
        model.zero_grad()
        with manager:
            loss = forward(model, 0)
        loss.backward()
        assert torch.equal(loss, want)
        for ours_, theirs in zip(gradients(model), expected, strict=True):
            assert (ours_ is None and theirs is None) or torch.equal(ours_, theirs)  # type: ignore[arg-type]
        ends.add(TokenLevels.of_alpha(alpha).ends(SEQ if "first" in name else 63))
    assert len(ranges) >= 5 * len(layers)  # one for each alpha that ends elsewhere
    assert set(ranges) == {0.0}
    manager.close()


@pytest.mark.parametrize("name", ["llama", "gpt", "our llama", "sequence first"])
def test_bytes_are_those_that_always_move_and_the_first_tokens_of_the_others(
    name: str, tmp_path: Path, ranges: list[float]
) -> None:
    def moved(alpha: float | TokenLevels) -> int:
        model = fresh(name, torch.float32)
        manager = memo.offload(model, alpha=alpha, disk=tmp_path, min_bytes=1)
        with manager:
            MODELS[name][1](model, 0)
        nbytes = manager.stats.bytes_disk
        manager.close()
        return nbytes

    tokens = {"sequence first": SEQ, "llama": 64}.get(name, 63)
    always, every = moved(0.0), moved(1.0)
    assert not ranges
    for alpha in (0.25, 0.5):
        first = TokenLevels.of_alpha(alpha).ends(tokens)[0]
        assert moved(in_ranges(alpha)) * tokens == always * tokens + first * (every - always)
    assert ranges


class Turned(nn.Module):
    """A layer in which each token meets another one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x).sin().flip(1))).tanh())


@pytest.mark.parametrize(
    "alpha", [in_ranges(0.25), TokenLevels(all=0.25, matmuls=0.5, attention=0.25, piece=0.99)], ids=str
)
def test_a_rule_that_is_wrong_is_found_by_the_trial(
    alpha: Any, tmp_path: Path, ranges: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tokens of what is turned are the first ones: whole storages are used instead."""
    monkeypatch.setitem(operator_rules._RULES, torch.ops.aten.flip, operator_rules._pointwise)
    model, reference = stack(make=Turned), stack(make=Turned)
    manager = memo.offload(model, alpha=alpha, disk=tmp_path, min_bytes=512)
    got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, train(reference, lambda step: reference(ids(step))))
    assert ranges == []
    assert manager.stats.bytes_recomputed > 0
    manager.close()


class Summed(nn.Module):
    """A layer that adds up what came before each token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x).cumsum(1))).tanh())


def test_tokens_that_are_mixed_are_kept_and_the_axis_begins_anew(tmp_path: Path, ranges: list[float]) -> None:
    """The sum is kept as it is; what follows from it is divided."""
    model, reference = stack(make=Summed), stack(make=Summed)
    manager = memo.offload(model, alpha=in_ranges(0.25), disk=tmp_path, min_bytes=512)
    got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, train(reference, lambda step: reference(ids(step))))
    assert set(ranges) == {0.0}
    manager.close()


class Filled(nn.Module):
    """Makes tensors of its own that are as long as the tokens, and writes into them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        out = torch.empty(up.shape)
        out[..., :32].copy_(up[..., 32:].sigmoid())
        out[..., 32:] = up[..., :32].tanh() * torch.arange(x.size(1))[:, None].cos()
        biased = up * torch.ones(x.size(1), 1) + x.new_zeros(x.size(0), x.size(1), 64)
        return x + self.down(biased * out)


def test_memory_that_the_layer_allocates_is_as_long_as_the_range(tmp_path: Path, ranges: list[float]) -> None:
    model, reference = stack(make=Filled), stack(make=Filled)
    manager = memo.offload(model, alpha=in_ranges(0.5), disk=tmp_path, min_bytes=512)
    got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, train(reference, lambda step: reference(ids(step))))
    assert ranges
    manager.close()


class Merged(nn.Module):
    """An adapter is added to its weight in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.a, self.b = nn.Parameter(torch.randn(64, 4) / 8), nn.Parameter(torch.randn(4, 32) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(F.linear(self.norm(x), self.up.weight + self.a @ self.b)))


def test_a_merged_weight_is_neither_divided_nor_moved(tmp_path: Path, ranges: list[float]) -> None:
    """It is the same for all tokens, and made again whole."""

    def run(alpha: float | TokenLevels) -> int:
        model, reference = stack(make=Merged), stack(make=Merged)
        manager = memo.offload(model, alpha=alpha, disk=tmp_path, min_bytes=1)
        got = train(model, lambda step: model(ids(step)), manager)
        assert_equal(got, train(reference, lambda step: reference(ids(step))))
        nbytes = manager.stats.bytes_disk
        manager.close()
        return nbytes

    always, half, every = run(0.0), run(in_ranges(0.5)), run(1.0)
    merged = 2 * 64 * 32 * 4 * 3  # layers that move, weights, bytes, steps
    assert ranges
    assert half - always == (every - always - merged) / 2


class RoundsByPlace(nn.Module):
    """33 wide: what stands at the end of a tensor is computed one by one on a CPU, and rounds in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 33), nn.Linear(33, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).abs().pow(1.3))


@pytest.mark.parametrize("exact", [False, True])
def test_whole_storages_are_used_where_a_part_rounds_in_another_way_and_is_to_be_exact(
    exact: bool, tmp_path: Path, ranges: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "rounds_by_place", lambda *_: False)  # as of a kernel of which that is not known
    model, reference = stack(make=RoundsByPlace), stack(make=RoundsByPlace)
    manager = memo.offload(model, alpha=in_ranges(0.25), exact=exact, disk=tmp_path, min_bytes=512)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        got = train(model, lambda step: model(ids(step, batch=1)), manager, steps=1)
    want = train(reference, lambda step: reference(ids(step, batch=1)), steps=1)
    use = manager.report().recompute
    assert use is not None
    assert use.refused == {}
    if exact:
        assert_equal(got, want)
        assert (ranges, use.deviation) == ([], 0.0)
        assert manager.stats.bytes_recomputed > 0
    else:
        assert 0.0 < max(ranges) <= 1.0
        assert use.deviation == max(ranges)
    manager.close()


class Routed(nn.Module):
    """Two experts, each for the rows that a number of the input gives it, as an eager loop has them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList([nn.Linear(32, 256), nn.Linear(32, 256)])
        self.down = nn.ModuleList([nn.Linear(256, 32), nn.Linear(256, 32)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        out = torch.zeros_like(rows)
        score = rows.detach()[:, 0]
        chosen = (score > score.mean()).long()  # about as many each way
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            (at,) = torch.where(chosen == expert)
            out = out.index_add(0, at, down(F.silu(up(rows[at]))))
        return x + out.view_as(x)


def test_calls_with_other_counts_of_routed_rows_are_not_read_by_tokens_again(
    tmp_path: Path, ranges: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def token_layouts(*args: Any) -> Any:
        read.append(len(args))
        return rows.token_layouts(*args)

    monkeypatch.setattr(plans, "token_layouts", token_layouts)
    model, reference = stack(make=Routed), stack(make=Routed)
    manager = memo.offload(model, alpha=in_ranges(0.5), disk=tmp_path, min_bytes=512)
    got = train(model, lambda step: model(ids(step)), manager, steps=3)
    first = len(read)
    got += train(model, lambda step: model(ids(3 + step)), manager, steps=4)
    want = train(reference, lambda step: reference(ids(step)), steps=3)
    assert_equal(got, want + train(reference, lambda step: reference(ids(3 + step)), steps=4))
    assert manager.stats.bytes_recomputed > 0
    assert not ranges
    assert len(read) - first < 4, "of twelve calls, those whose replay was tried out"
    manager.close()


class Mirrored(nn.Module):
    """What it adds mixes tokens, and no graph needs it: only a call that is recorded for ranges holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mirrored = x.detach().narrow(2, 0, 8).flip(1)
        shown = (self.up(self.norm(x)) + mirrored.repeat(1, 1, 8)).tanh()
        return x + self.down(shown.sin().exp())  # type: ignore[no-any-return]


@pytest.mark.parametrize("alpha", [0.3, 0.6])
def test_ranges_are_planned_for_the_next_call_which_holds_what_they_keep(
    offload: Callable[..., memo.Manager], alpha: float
) -> None:
    def make() -> nn.Module:
        return stack(make=Mirrored)

    model = make()
    manager = offload(model, alpha=in_ranges(alpha), min_bytes=1)
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain(make))
    told = manager.explain(0)
    assert told.ranges
    assert next(row for row in told.rows if row.operator == "aten.flip").kept_tokens is not None


class Streams(nn.Module):
    """Four streams of hidden states for each token, (batch, tokens, streams, hidden), that are mixed and written back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.mix = nn.Linear(4 * 32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.mix(x.flatten(2)).sigmoid()
        read, write = weights.chunk(2, -1)
        joined = self.norm((read.unsqueeze(-1) * x).sum(2))
        heads = joined.unflatten(-1, (2, 16)).transpose(1, 2)
        joined = joined + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        made = self.down(F.gelu(self.up(joined)))
        return x + write.unsqueeze(-1) * made.unsqueeze(2)


class Streaming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(61, 32)
        self.layers = nn.ModuleList([Streams() for _ in range(3)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).unsqueeze(2).repeat(1, 1, 4, 1)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy((x.mean(2) @ self.embed.weight.t()).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("alpha", [*map(in_ranges, (0.2, 0.5, 0.8)), TokenLevels(attention=1.0, piece=0.4)], ids=str)
def test_hidden_states_of_four_dimensions_are_divided_along_tokens(
    offload: Callable[..., memo.Manager], alpha: Any
) -> None:
    model = Streaming()
    manager = offload(model, alpha=alpha)
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain(Streaming))
    told = manager.explain(0)
    assert told.tokens == SEQ
    assert told.ranges
