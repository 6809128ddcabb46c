"""Attention is recognised by any name, and nothing else is; what may drop is random unless it is told to drop nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
from taped import record
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import memo
from memo.swap import Bans, Level, is_attention, work_of
from memo.swap.recompute.tape.bans import banned
from memo.swap.recompute.tape.operators import operator_of

# As the packages register them; the kernels hub's have the hash of a build in their names.
FORWARDS = [
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
    "flash_attn_2_cuda::varlen_fwd",
    "flash_attn_3::fwd",
    "flash_attn_3::_flash_attn_forward",
    "flash_attn_4::_flash_attn_forward",
    "_flash_attn2_cuda_f12afc9::varlen_fwd",
    "_flash_attn3_cuda_9c5dc4c::fwd",
    "_vllm_fa2_C::varlen_fwd",
    "_diffusers_flash_attn_3::_flash_attn_forward",
    "xformers_flash::flash_fwd",
    "xformers_flash3::flash_fwd",
    "xformers::efficient_attention_forward_cutlass",
    "xformers::efficient_attention_forward_ck",
    "aiter::fmha_v3_fwd",
    "aiter::mha_fwd",
    "npu::npu_fusion_attention",
]
OTHERS = [
    "flash_attn::_flash_attn_backward",
    "_flash_attn2_cuda_f12afc9::varlen_bwd",
    "flash_attn_3::fwd_combine",
    "flash_attn_3::get_scheduler_metadata",
    "flash_attn::rotary_fwd",
    "flash_attn::layer_norm_fwd",
    "xformers_flash::flash_bwd",
    "npu::npu_fusion_attention_grad",
    "models::attention_mask",
    "models::swiglu_forward",
    "alpha_kernels::fwd",
]


def defined(name: str, schema: str = "(Tensor q, Tensor k, Tensor v) -> Tensor") -> Any:
    package, _, plain = name.partition("::")
    if not hasattr(getattr(torch.ops, package), plain):
        torch.library.define(name, schema)
    return getattr(getattr(torch.ops, package), plain).default


@pytest.mark.parametrize("name", FORWARDS)
def test_other_packages_attention_is_recognised(name: str) -> None:
    assert is_attention(defined(name))


@pytest.mark.parametrize("name", OTHERS)
def test_what_lies_beside_attention_is_not_taken_for_it(name: str) -> None:
    assert not is_attention(defined(name))


def test_torchs_own_operators() -> None:
    named = {
        name.partition(".")[0].partition("::")[2]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(("aten::", "torch_attn::"))
    }
    found = set()
    for name in named:
        packet = getattr(torch.ops.aten, name, None) or getattr(torch.ops.torch_attn, name, None)
        if packet is not None and any(is_attention(getattr(packet, overload)) for overload in packet.overloads()):
            found.add(name)
    # Not in every version; those that decompose are never seen by a recorder.
    assert found >= {
        "_cudnn_attention_forward",
        "_efficient_attention_forward",
        "_flash_attention_forward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
        "_varlen_attn",
    }
    assert not {name for name in found if "backward" in name or "atten" not in name.replace("attn", "atten")}


def test_flex_attention_is_attention_and_its_backward_is_not() -> None:
    assert is_attention(torch.ops.higher_order.flex_attention)
    assert not is_attention(torch.ops.higher_order.flex_attention_backward)
    assert not is_attention(torch.ops.higher_order.cond)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: float = 0.0) -> torch.Tensor:
    scores = (q.transpose(1, 2) @ k.transpose(1, 2).transpose(2, 3)).softmax(-1)
    return ((scores if not p else nn.functional.dropout(scores, p)) @ v.transpose(1, 2)).transpose(1, 2).contiguous()


@torch.library.custom_op("_flash_attn9_cuda_0abc123::fwd", mutates_args=())
def hashed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p_dropout: float) -> torch.Tensor:
    return attend(q, k, v, p_dropout)


@hashed.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p_dropout: float) -> torch.Tensor:
    return torch.empty_like(q)


def keep_inputs(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:3], output)


def backward(ctx: Any, grad: torch.Tensor) -> Any:
    q, k, v, out = ctx.saved_tensors
    with torch.enable_grad():
        given = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        return (*torch.autograd.grad(attend(*given), given, grad + 0 * out), None)


hashed.register_autograd(backward, setup_context=keep_inputs)


def halved(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return score * 0.5


class Layer(nn.Module):
    def __init__(self, how: str, p: float = 0.0) -> None:
        super().__init__()
        self.how, self.p = how, p
        self.qkv, self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(*x.shape[:2], 2, 16) for part in self.qkv(x).chunk(3, -1))
        if self.how == "hashed":
            out = hashed(q, k, v, self.p)
        else:
            out = flex_attention(*(t.transpose(1, 2) for t in (q, k, v)), score_mod=halved).transpose(1, 2)
        x = x + out.reshape(x.shape)
        return x + self.down(torch.relu(self.up(x)))


def test_a_kernel_by_another_name_is_kept_as_attention_and_repeated_from_the_input() -> None:
    taped = record(Layer("hashed"), torch.randn(2, 16, 32).requires_grad_())
    number = taped.step("_flash_attn9_cuda_0abc123.fwd").number
    assert banned(taped.tape, Level.SAVE_ATTENTION)[number] == "attention is kept"
    assert number not in banned(taped.tape, Level.SAVE_INPUT)
    assert number not in banned(taped.tape, Level.SAVE_ATTENTION, chosen=Bans(repeat=frozenset({"attention"})))


def test_another_kernel_that_drops_is_never_repeated() -> None:
    taped = record(Layer("hashed", p=0.5), torch.randn(2, 16, 32).requires_grad_())
    number = taped.step("_flash_attn9_cuda_0abc123.fwd").number
    assert banned(taped.tape, Level.SAVE_INPUT)[number] == "it draws random numbers"


def test_what_an_argument_of_the_share_that_is_kept_says() -> None:
    kept = defined("npu::npu_fusion_attention_kept", "(Tensor q, Tensor k, Tensor v, float keep_prob=1.) -> Tensor")
    assert operator_of(kept).is_random
    assert not operator_of(defined("flash_attn_3::fwd")).is_random


def test_the_work_of_attention_by_another_name_is_what_torchs_own_does() -> None:
    q, k, v = torch.empty(3, 2, 64, 4, 16, device="meta").unbind()
    own = torch.ops.aten._flash_attention_forward.default
    out = (torch.empty_like(q), *torch.empty(4, 1, device="meta").unbind())
    known = work_of(own, (q, k, v, None, None, 64, 64, 0.0, True, False), {}, out)
    assert work_of(defined("flash_attn_3::fwd"), (q, k, v), {}, torch.empty_like(q)).flops == known.flops
    rows = [tensor.flatten(0, 1) for tensor in (q, k, v)]  # two sequences in a row
    named = defined("flash_attn::_varlen_forward", "(Tensor q, Tensor k, Tensor v, int max_seqlen_k) -> Tensor")
    assert work_of(named, (*rows, 64), {}, torch.empty_like(rows[0])).flops == known.flops


def steps(how: str, alpha: float | Level | None, monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], Any]:
    # FlexAttention's eager backward works on a CPU, where torch refuses it.
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(how) for _ in range(3)))
    levels = dict.fromkeys(range(3), alpha) if isinstance(alpha, Level) else None
    manager = None
    if alpha is not None:
        setting: Any = {"levels": levels} if levels else {"alpha": alpha}
        manager = memo.offload(model, host="8MiB", min_bytes=256, layers=list(model), **setting)
    found: list[torch.Tensor] = []
    for step in range(2):
        x = torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(step)).requires_grad_()
        if manager is None:
            loss = model(x).square().mean()
        else:
            with manager:
                loss = model(x).square().mean()
        loss.backward()
        assert x.grad is not None
        found += [x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
        model.zero_grad()
    if manager is not None:
        manager.close()
    return found, None if manager is None else manager.report().recompute


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("how", ["hashed", "flex"])
def test_layers_with_any_attention_are_divided_and_equal(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want, _ = steps(how, None, monkeypatch)
    for setting in (0.0, 0.25, Level.SAVE_INPUT):
        got, use = steps(how, setting, monkeypatch)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert use.refused == {}
        assert use.accepted == 3
        assert use.recomputed_bytes > 0
