"""The model: deterministic, causal, loss and logits agree, both manners train, the meta device works."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memo.errors import UsageError
from memo.gpt import GPTConfig, Variant, preset
from memo.gpt.model import GPT
from memo.gpt.model.model import Block
from memo.gpt.model.rotary import rotary_tables

VARIANTS: list[Variant] = ["gpt", "llama"]


def _small(variant: Variant = "gpt", **overrides: object) -> GPTConfig:
    return preset("tiny", variant=variant, **{"layers": 2, "hidden": 64, "heads": 4, "max_seq": 64} | overrides)


def _tokens(config: GPTConfig, batch: int = 2, seq: int = 48) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_seed_same_weights(variant: Variant) -> None:
    torch.manual_seed(5)
    one = GPT(_small(variant)).state_dict()
    torch.manual_seed(5)
    other = GPT(_small(variant)).state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    torch.manual_seed(6)
    different = GPT(_small(variant)).state_dict()
    assert not torch.equal(one["tokens.weight"], different["tokens.weight"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_initial_weights_have_gpt2s_spread(variant: Variant) -> None:
    config = preset("tiny", variant=variant, layers=8, hidden=256)
    model = GPT(config)
    residual = 0.02 / (2 * 8) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            expected = residual if ".out." in name or ".down." in name else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, float("norm" in name and "weight" in name))), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_meta_model_becomes_the_real_one(variant: Variant) -> None:
    config = _small(variant)
    torch.manual_seed(5)
    real = GPT(config)
    later = GPT(config, device="meta")
    assert all(parameter.is_meta for parameter in later.parameters())
    later.to_empty(device="cpu")
    torch.manual_seed(5)
    later.reset_parameters()
    tokens = _tokens(config)
    assert torch.equal(real(tokens), later(tokens))


def test_default_device_and_dtype_are_torchs() -> None:
    with torch.device("meta"):
        assert GPT(_small()).tokens.weight.is_meta
    assert GPT(_small(), dtype=torch.bfloat16).layers[0].mlp.up.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_is_the_cross_entropy_of_the_logits(variant: Variant) -> None:
    config = _small(variant)
    model = GPT(config, dtype=torch.float64)
    tokens = _tokens(config)
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    loss = model(tokens, targets)
    logits = model(tokens)
    assert logits.shape == (2, 48, config.vocab_size)
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten()), rtol=0, atol=1e-12)
    assert GPT(config)(tokens, targets).dtype is torch.float32


@pytest.mark.parametrize("variant", VARIANTS)
def test_later_tokens_change_no_earlier_logits(variant: Variant) -> None:
    config = _small(variant)
    model, tokens = GPT(config, dtype=torch.float64), _tokens(config)
    changed = tokens.clone()
    changed[:, 30:] = (changed[:, 30:] + 1) % config.vocab_size
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :30], after[:, :30], rtol=0, atol=1e-13)
    assert not torch.allclose(before[:, 30:], after[:, 30:])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_steps_learn(variant: Variant, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = _small(variant, dropout=0.1)
    model, tokens = GPT(config, dtype=dtype), _tokens(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_gets_a_gradient_under_autocast(variant: Variant) -> None:
    config = _small(variant)
    model, tokens = GPT(config), _tokens(config)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, tokens.roll(-1, 1))
    loss.backward()
    assert loss.dtype is torch.float32
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_tied_embeddings_are_one_parameter_and_stay_one() -> None:
    model = GPT(_small())
    assert model.head is None
    assert model.output_weight is model.tokens.weight
    assert not any("head" in name for name in model.state_dict())
    assert copy.deepcopy(model).double().output_weight.dtype is torch.float64
    untied = GPT(_small(tie_embeddings=False))
    assert untied.head is not None
    assert untied.output_weight is untied.head.weight


def test_dropout_acts_in_training_only() -> None:
    config = _small(dropout=0.5)
    model, tokens = GPT(config), _tokens(config)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_longer_than_the_position_table_is_a_usage_error() -> None:
    config = _small(max_seq=32)
    with pytest.raises(UsageError, match="48 tokens, but learned positions for 32"):
        GPT(config)(_tokens(config))
    GPT(_small("llama", max_seq=32))(_tokens(config))


@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_are_functions_of_their_input_and_the_tables(variant: Variant) -> None:
    config = _small(variant)
    model, tokens = GPT(config, dtype=torch.float64), _tokens(config)
    assert isinstance(model.layers, nn.ModuleList)
    assert all(isinstance(layer, Block) for layer in model.layers)
    tables = None
    x = model.tokens(tokens)
    if config.positions == "learned":
        x = x + model.positions.weight[:48]
    else:
        tables = rotary_tables(48, config.head_dim, config.rope_theta, device=x.device, dtype=x.dtype)
    for layer in model.layers:
        x = layer(x, tables)
    assert torch.equal(model(tokens), F.linear(model.norm(x), model.output_weight))


def test_grouped_heads_equal_the_same_heads_written_out() -> None:
    # A model with 2 key/value heads, and one with 4 whose projection repeats the same rows.
    torch.manual_seed(0)
    few = GPT(_small("llama", kv_heads=2), dtype=torch.float64)
    many = GPT(_small("llama", kv_heads=4), dtype=torch.float64)
    state, d, hidden = few.state_dict(), 16, 64
    for index in range(2):
        name = f"layers.{index}.attention.qkv.weight"
        grouped = state[name].view(2, 4, d, hidden)  # per key/value head: two query heads, key, value
        heads = [torch.stack((q, group[2], group[3])) for group in grouped for q in (group[0], group[1])]
        state[name] = torch.cat(heads).reshape(12 * d, hidden)
    many.load_state_dict(state)
    tokens = _tokens(few.config)
    torch.testing.assert_close(few(tokens), many(tokens), rtol=0, atol=1e-12)


def _saved_units(config: GPTConfig, batch: int, seq: int) -> float:
    """Storages that one layer saves for backward, in units of batch * seq * hidden elements."""
    block = GPT(config).layers[0]
    x = torch.randn(batch, seq, config.hidden, requires_grad=True)
    tables = None
    if config.positions == "rotary":
        tables = rotary_tables(seq, config.head_dim, config.rope_theta, device=x.device, dtype=x.dtype)
    storages: dict[object, int] = {}
    shared = {tensor.untyped_storage() for tensor in (*block.parameters(), *(tables or ()))}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage not in shared:
            storages[storage] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(x, tables)
    assert out.requires_grad
    return sum(storages.values()) / (4 * batch * seq * config.hidden)


def test_a_gpt_layer_saves_sixteen_units() -> None:
    # 16 b s h elements (MEMO, Figure 4) and, per token, two norms' mean and rstd and one log-sum-exp per head.
    config = _small(layers=1)
    statistics = (4 + config.heads) / config.hidden
    assert _saved_units(config, 2, 32) == pytest.approx(16 + statistics, abs=1e-9)


def test_rotation_frees_the_fused_projection() -> None:
    # The GPT layer with rotary positions: q, k and v are new storages, 3 units, and the projection itself is gone.
    config = _small(layers=1, positions="rotary")
    statistics = (4 + config.heads) / config.hidden
    assert _saved_units(config, 2, 32) == pytest.approx(16 + statistics, abs=1e-9)
