"""Mixture of experts: equal to its definition token by token, no token dropped, and the same bits with memo."""

from __future__ import annotations

import dataclasses
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import memo
from memo.errors import UsageError
from memo.gpt import GPTConfig, MoeConfig, Variant, preset
from memo.gpt.arithmetic import parameter_count
from memo.gpt.arithmetic.flops import matmul_parameter_count
from memo.gpt.model import GPT, Experts
from memo.gpt.model.experts import MoeMlp

HIDDEN, STEPS = 32, 3


def _config(variant: Variant = "gpt", layers: int = 4, **moe: Any) -> GPTConfig:
    numbers = {"experts": 4, "top_k": 2, "shared_experts": 1, "expert_hidden": 16, "every": 2} | moe
    return preset("tiny", variant=variant, layers=layers, hidden=HIDDEN, heads=2, max_seq=512, moe=MoeConfig(**numbers))


def _mixture(variant: Variant = "gpt", **moe: Any) -> MoeMlp:
    torch.manual_seed(0)
    mlp = GPT(_config(variant, **moe)).double().layers[1].mlp
    assert isinstance(mlp, MoeMlp)
    return mlp


def _expert(experts: Experts, number: int, row: torch.Tensor) -> torch.Tensor:
    up, down = row @ experts.up.weight[number], experts.down.weight[number]
    if experts.gate is None:
        return F.gelu(up) @ down
    return (F.silu(row @ experts.gate.weight[number]) * up) @ down


def _token_by_token(mlp: MoeMlp, x: torch.Tensor) -> torch.Tensor:
    rows = []
    for token in x.flatten(0, 1):
        shares = (mlp.router.weight @ token).softmax(-1)
        chosen = shares.argsort(descending=True)[: mlp.router.moe.top_k].tolist()
        total = torch.stack([shares[number] for number in chosen]).sum() if len(chosen) > 1 else 1.0
        given = token if mlp.descend is None else mlp.descend.weight @ token
        row = torch.stack([shares[number] / total * _expert(mlp.experts, number, given) for number in chosen]).sum(0)
        row = row if mlp.ascend is None else mlp.ascend.weight @ row
        rows.append(row if mlp.shared is None else row + mlp.shared(token))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("variant", ["gpt", "llama"])
@pytest.mark.parametrize(("top_k", "shared", "bottleneck"), [(1, 0, 0), (2, 1, 0), (4, 2, 0), (2, 1, 8)])
def test_output_and_gradients_are_the_definition_s(variant: Variant, top_k: int, shared: int, bottleneck: int) -> None:
    mlp = _mixture(variant, top_k=top_k, shared_experts=shared, bottleneck=bottleneck)
    x = torch.randn(2, 37, HIDDEN, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(x)
    sought = [x, *mlp.parameters()]
    got, want = mlp(x)[0], _token_by_token(mlp, x)
    results = zip(
        (got, *torch.autograd.grad(got, sought, upstream)),
        (want, *torch.autograd.grad(want, sought, upstream, materialize_grads=True)),
        strict=True,
    )
    # float64 sums of at most 74 rows and 32 columns.
    for ours, theirs in results:
        assert (ours - theirs).abs().max() <= 2**-40 * max(float(theirs.detach().abs().max()), 1.0)


def test_grouped_products_are_the_loop_s() -> None:
    mlp = _mixture().float()
    x = torch.randn(1, 64, HIDDEN)
    wide = _mixture()
    assert torch.allclose(mlp(x)[0].double(), wide(x.double())[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_token_is_dropped_where_all_choose_one_expert(dtype: torch.dtype) -> None:
    mlp = _mixture(top_k=1, shared_experts=0).to(dtype)
    with torch.no_grad():
        mlp.router.weight.zero_()
        mlp.router.weight[2] = 1.0
    x = torch.rand(1, 50, HIDDEN, dtype=dtype) + 0.1
    out, _ = mlp(x)
    share = F.linear(x, mlp.router.weight).softmax(-1).amax(-1, keepdim=True)
    bound = 2**-40 if dtype is torch.float64 else 2**-18
    assert (out - share * _expert(mlp.experts, 2, x)).abs().max() <= bound
    out.sum().backward()
    used = mlp.experts.up.weight.grad
    assert used is not None
    assert [bool(grad.any()) for grad in used] == [False, False, True, False]


def test_router_losses_are_one_and_log_experts_squared_when_balanced() -> None:
    mlp = _mixture(experts=4, top_k=4, balance_coefficient=1.0, z_coefficient=0.0)
    with torch.no_grad():
        mlp.router.weight.zero_()
    x = torch.randn(1, 9, HIDDEN, dtype=torch.float64)
    assert abs(mlp(x)[1].item() - 1.0) <= 1e-12
    mlp.router.moe = dataclasses.replace(mlp.router.moe, balance_coefficient=0.0, z_coefficient=1.0)
    assert abs(mlp(x)[1].item() - float(torch.tensor(4.0, dtype=torch.float64).log() ** 2)) <= 1e-12


def test_router_losses_train_the_router_and_are_not_in_an_evaluation() -> None:
    torch.manual_seed(0)
    model = GPT(_config(balance_coefficient=3.0))
    without = GPT(_config(balance_coefficient=0.0, z_coefficient=0.0))
    without.load_state_dict(model.state_dict())
    tokens = torch.randint(257, (1, 65))
    pair = tokens[:, :-1], tokens[:, 1:]
    assert model(*pair).item() > without(*pair).item() + 1.0
    model.eval(), without.eval()
    assert torch.equal(model(*pair), without(*pair))


@pytest.mark.parametrize("bottleneck", [0, 8])
@pytest.mark.parametrize("variant", ["gpt", "llama"])
def test_parameters_and_weights_of_a_token_are_counted(variant: Variant, bottleneck: int) -> None:
    config = _config(variant, bottleneck=bottleneck)
    model = GPT(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(config)
    assert [isinstance(layer.mlp, MoeMlp) for layer in model.layers] == [False, True, False, True]
    unused = sum(
        parameter.numel() // 4 * 2 for name, parameter in model.named_parameters() if ".experts." in name
    )  # 2 of 4 experts
    matrices = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and not name.startswith(("tokens", "positions", "head"))
    )
    assert matmul_parameter_count(config) == matrices - unused + config.vocab_size * HIDDEN


def _steps(config: GPTConfig, scratch: Path, alpha: float | None, dtype: torch.dtype, *, autocast: bool) -> list[Any]:
    """Losses, gradients and choices of three steps."""
    torch.manual_seed(3)
    model = GPT(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router" in name:
                parameter.mul_(50)  # clear choices
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    choices: list[torch.Tensor] = []
    for layer in model.layers:
        if isinstance(layer.mlp, MoeMlp):
            layer.mlp.router.register_forward_hook(lambda _module, _args, out: choices.append(out[0].clone()))
    manager = None
    if alpha is not None:
        manager = memo.offload(model, disk=scratch, min_bytes=256, alpha=alpha)
    seen: list[Any] = []
    with closing(manager) if manager is not None else nullcontext():
        for step in range(STEPS):
            tokens = torch.randint(257, (2, 129), generator=torch.Generator().manual_seed(step))
            with manager or nullcontext(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            seen += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        if manager is not None:
            assert manager.stats.bytes_disk > 0
            assert manager.stats.live_entries == 0
            if alpha == 0.5:
                assert manager.stats.bytes_recomputed > 0
    counts = [torch.bincount(chosen.flatten(), minlength=4) for chosen in choices[: STEPS * 2]]
    assert not torch.equal(counts[0], counts[2])  # the first layer with experts, in two steps
    return seen


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:.*whole tensors")
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("variant", "dtype", "autocast", "bottleneck"),
    [
        ("gpt", torch.float32, False, 0),
        ("gpt", torch.float32, False, 16),
        ("llama", torch.float64, False, 0),
        ("llama", torch.float32, True, 0),
    ],
)
def test_gradients_are_the_same_bits_with_memo_while_routing_changes(
    tmp_path: Path, alpha: float, variant: Variant, dtype: torch.dtype, autocast: bool, bottleneck: int
) -> None:
    config = _config(variant, bottleneck=bottleneck)
    plain = _steps(config, tmp_path, None, dtype, autocast=autocast)
    managed = _steps(config, tmp_path, alpha, dtype, autocast=autocast)
    assert len(plain) == len(managed)
    for ours, theirs in zip(managed, plain, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"top_k": 5}, "--top-k 5 is more than the 4 experts"),
        ({"top_k": 0}, "--top-k 0 is less than 1"),
        ({"experts": 0}, "--experts 0 is less than 1"),
        ({"shared_experts": -1}, "--shared-experts -1 is negative"),
        ({"bottleneck": -1}, "--expert-bottleneck -1 is negative"),
        ({"every": 9}, "--every 9 leaves no layer of 4"),
        ({"z_coefficient": float("nan")}, "--z-loss nan is not zero or a positive number"),
    ],
)
def test_numbers_that_do_not_fit_are_one_line(wrong: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        _config(**wrong)
