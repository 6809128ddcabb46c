"""Hybrids and mixtures of experts of transformers: measured by `memo profile`, planned, and run to equal bits."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

import memo
from memo.cli.main import main
from memo.errors import ExitCode
from memo.mip.activation import read_activation_plan, read_profile

pytest.importorskip("transformers")

TOKENS = 256
MODELS = f"""
import torch, transformers

SHAPE = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings={TOKENS},
)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
HEADS = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)


def build(kind, batch, tokens, **more):
    config = transformers.AutoConfig.for_model(kind, **SHAPE, **more)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.randint(0, config.vocab_size, (batch, tokens))
    return model, lambda: model(input_ids=ids, labels=ids, use_cache=False).loss


def gemma3_text(*, batch, tokens):
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return build("gemma3_text", batch, tokens, sliding_window=64, layer_types=kinds)


def gpt_oss(*, batch, tokens):
    return build("gpt_oss", batch, tokens, sliding_window=64, **EXPERTS)


def qwen3_next(*, batch, tokens):
    return build("qwen3_next", batch, tokens, shared_expert_intermediate_size=32, **EXPERTS, **HEADS)
"""
CLASSES = {"gemma3_text": 1, "gpt_oss": 1, "qwen3_next": 2}
"""Classes of layers, at least: where a window is no fewer bytes, its layers are like the others."""


@pytest.mark.parametrize("kind", CLASSES)
def test_a_measured_hybrid_is_planned_and_trains_to_equal_bits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hybrids.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "hybrids", raising=False)
    command = ["profile", "--model", f"hybrids:{kind}", "--seq", str(TOKENS), "--repeats", "1", "-o", "profile.json"]
    assert main([*command, "--disk", str(tmp_path)]) == ExitCode.OK
    profile = read_profile(tmp_path / "profile.json")
    assert len(profile.classes) >= CLASSES[kind]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch adds experts' biases up in any order on several
    try:
        plan = planned(capsys)
        assert losses_and_gradients(kind, plan) == losses_and_gradients(kind, None)
    finally:
        torch.set_num_threads(threads)


def planned(capsys: pytest.CaptureFixture[str]) -> str:
    """Path of a plan with the least device memory, so that bytes must move or be computed again."""
    command = ["plan", "--profile", "profile.json", "--gpu", "a800", "--host", "1GiB", "--json"]
    assert main([*command, "--device", "1MiB"]) == ExitCode.INFEASIBLE
    least = json.loads(capsys.readouterr().out.splitlines()[-1])["least_budgets_bytes"]["device"]
    assert main([*command, "--device", str(least), "-o", "plan.json"]) == ExitCode.OK
    plan = read_activation_plan(Path("plan.json"))
    moved = sum(stage.peak_host_bytes for stage in plan.stages)
    assert moved or any(layer.recomputes for layer in plan.layers)
    return "plan.json"


def losses_and_gradients(kind: str, plan: str | None) -> list[bytes]:
    """Bits of two steps' losses and gradients."""
    model, step = getattr(importlib.import_module("hybrids"), kind)(batch=1, tokens=TOKENS)
    found = []
    manager = None if plan is None else memo.offload(model, plan=plan, host="1GiB")
    for _ in range(2):
        model.zero_grad()
        if manager is None:
            loss = step()
            loss.backward()
        else:
            with manager:
                loss = step()
                loss.backward()
        found.append(loss.detach().numpy().tobytes())
        found += [weight.grad.numpy().tobytes() for weight in model.parameters() if weight.grad is not None]
    return found
