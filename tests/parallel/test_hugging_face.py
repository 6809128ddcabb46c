"""`memo.parallelize` of unmodified models: loss and gradients of one process, or a refusal that says why."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.torch_version import TorchVersion
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

from launching import DIVIDES_FUSED, run

import memo
from memo.errors import UsageError

NAMES = {
    2: ["gpt2", "llama", "opt", "neox"],
    4: [
        "gpt2_untied_masked",
        "gpt2_sharded",
        "llama_odd",
        "llama_tied_masked",
        "llama_sharded",
        "opt_odd_masked",
        "opt_sharded",
        "neox_odd",
        "neox_tied_masked",
        "neox_sharded",
    ],
}


@functools.cache
def said(ranks: int) -> str:
    """One launch for all, also where it fails: what it printed before that still counts."""
    return run(
        ranks, "hugging_face_worker.py", *(name for name in NAMES[ranks] if DIVIDES_FUSED or "gpt2" not in name)
    )[1]


@pytest.mark.parallel
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, names in NAMES.items() for name in names])
def test_an_unmodified_model_trains_as_in_one_process(ranks: int, name: str) -> None:
    if "gpt2" in name and not DIVIDES_FUSED:
        pytest.skip("GPT-2 needs torch 2.13")
    told = said(ranks)
    assert f"equal {name} sequence within" in told, told
    assert f"equal {name} replicated within" in told, told


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


SHAPE: dict[str, int] = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}


def llama(**changes: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**(SHAPE | {"num_attention_heads": 4, "num_key_value_heads": 4} | changes)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_key_value_heads": 2}, "4 ranks do not divide the model's 2 key/value heads"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, "4 ranks do not divide the model's 2 heads"),
        ({"intermediate_size": 66}, "4 ranks do not divide the model's 66 MLP columns"),
    ],
)
def test_what_does_not_divide_is_refused_and_nothing_is_changed(
    changes: dict[str, int], reason: str, mesh: DeviceMesh
) -> None:
    model = llama(**changes)
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(UsageError, match=reason):
        memo.parallelize(model, mesh)
    assert {name: type(module) for name, module in model.named_modules()} == before


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_embd=32, n_head=4, n_layer=2, n_positions=64, attn_pdrop=0.0, resid_pdrop=0.0)
    )


def test_a_torch_that_cannot_divide_fused_projections_is_refused_and_nothing_is_changed(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gpt2()
    before = {name: type(module) for name, module in model.named_modules()}
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    with pytest.raises(UsageError, match=r"fused projections of GPT2Block needs torch 2.13, this is 2.11.0"):
        memo.parallelize(model, mesh)
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_a_model_whose_layers_are_not_known_to_divide_is_refused(mesh: DeviceMesh) -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2))
    with pytest.raises(UsageError, match=r"MambaBlock cannot be divided over 4 ranks: .*; use pp and dp$"):
        memo.parallelize(model, mesh)


def test_dropout_of_a_divided_part_is_refused(mesh: DeviceMesh) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=4, attention_dropout=0.1))
    with pytest.raises(UsageError, match="dropout in a divided part gives all ranks the same mask"):
        memo.parallelize(model, mesh)


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(UsageError, match="mesh: 'cuda' is no DeviceMesh"):
        memo.parallelize(llama(), "cuda")  # type: ignore[arg-type]


def test_a_sequence_that_does_not_divide_is_refused(mesh: DeviceMesh) -> None:
    model = memo.parallelize(llama(), mesh)
    with pytest.raises(UsageError, match="a sequence of 30 tokens does not divide over 4 ranks"):
        model(input_ids=torch.zeros(1, 30, dtype=torch.int64))


@pytest.mark.parametrize("token", [-1, 61])
def test_a_token_that_no_rank_has_is_an_error(token: int, mesh: DeviceMesh) -> None:
    model = memo.parallelize(llama(), mesh)
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 32), token))


@pytest.mark.skipif(not DIVIDES_FUSED, reason="GPT-2 needs torch 2.13")
def test_a_rank_keeps_a_part_of_every_matrix_and_ties_stay(mesh: DeviceMesh) -> None:
    model = gpt2()
    names = [name for name, _ in model.named_parameters()]
    fused = model.transformer.h[0].attn.c_attn.weight.detach().clone()
    memo.parallelize(model, mesh)
    assert [name for name, _ in model.named_parameters()] == names
    assert model.lm_head.weight is model.transformer.wte.weight
    kept = model.transformer.h[0].attn.c_attn.weight.to_local()
    # Rank 0 has the first head's columns of each of q, k and v.
    assert torch.equal(kept, torch.cat([part[:, :8] for part in fused.split(32, dim=1)], dim=1))
