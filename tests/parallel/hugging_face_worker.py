"""Runs under torchrun: unmodified Hugging Face models, divided by memo.parallelize, against one process."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

import memo

# As in equality_worker: sums of float32 in another order.
BOUND = 2e-5


def model_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    common = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    none = {"attention_dropout": 0.0}
    if family == "gpt2":
        shape = {"vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
        return GPT2LMHeadModel(GPT2Config(**shape, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0))
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**common, intermediate_size=64, num_key_value_heads=2))
    if family == "opt":
        sizes = {"ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0}
        return OPTForCausalLM(OPTConfig(**common, **sizes, **none))
    return GPTNeoXForCausalLM(GPTNeoXConfig(**common, intermediate_size=64, hidden_dropout=0.0, **none))


def steps(model: nn.Module, manager: Any = None) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Three steps of AdamW: loss and whole gradients."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    done = []
    for step in range(3):
        ids = torch.randint(0, 61, (2, 48), generator=torch.Generator().manual_seed(step))
        if manager is None:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        else:
            with manager:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        assert len(grads) == len(list(model.parameters()))
        done.append((float(loss), grads))
        optimizer.step()
        optimizer.zero_grad()
    return done


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def worst(got: list[tuple[float, dict[str, torch.Tensor]]], want: list[tuple[float, dict[str, torch.Tensor]]]) -> float:
    found = 0.0
    for (loss, grads), (loss0, grads0) in zip(got, want, strict=True):
        found = max(found, abs(loss / loss0 - 1))
        assert grads.keys() == grads0.keys()
        for name, grad in grads0.items():
            scale = grad.abs().max().clamp(min=1e-3)  # a key's bias has no gradient but noise: softmax does not see it
            found = max(found, float((grads[name] - grad).abs().max() / scale))
    return found


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for family in sys.argv[1:]:
        want = steps(model_of(family))
        for sequence in (True, False):
            plain = steps(memo.parallelize(model_of(family), mesh, sequence_parallel=sequence))
            off = worst(plain, want)
            assert off <= BOUND, f"{family}, sequence {sequence}: {off:.3g}"
            model = memo.parallelize(model_of(family), mesh, sequence_parallel=sequence)
            manager = memo.offload(model, host="8MiB", min_bytes=256)
            managed = steps(model, manager)
            assert manager.stats.bytes_host > 0
            manager.close()
            for (loss, grads), (loss0, grads0) in zip(managed, plain, strict=True):
                assert loss == loss0
                assert all(torch.equal(grads[name], grads0[name]) for name in grads0), family
            if dist.get_rank() == 0:
                print(f"equal {family} {'sequence' if sequence else 'replicated'} within {off:.2g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
