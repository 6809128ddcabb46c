"""Runs under torchrun: unmodified Hugging Face models, divided by memo.parallelize, against one process.

A name is a family and what is not as usual: `gpt2`, `llama_tied`, `opt_masked`, `neox_sharded` (two ranks share the rows,
by fully_shard).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
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
ROWS, TOKENS, IGNORE = 4, 48, -100

Batch = dict[str, torch.Tensor]
Step = tuple[float, dict[str, torch.Tensor]]


def model_of(family: str, changes: list[str]) -> nn.Module:
    torch.manual_seed(0)
    common: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    none = {"attention_dropout": 0.0}
    width, tied = 68 if "odd" in changes else 64, "tied" in changes
    if "odd" in changes:
        common["hidden_size"] = 40
    if family == "gpt2":
        shape = {"vocab_size": 61, "n_embd": common["hidden_size"], "n_head": 4, "n_layer": 2, "n_positions": 64}
        drops = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(**shape, **drops, tie_word_embeddings="untied" not in changes))
    if family == "llama":
        kv_heads = 2 if dist.get_world_size() == 2 or "sharded" in changes else 4
        return LlamaForCausalLM(
            LlamaConfig(**common, intermediate_size=width, num_key_value_heads=kv_heads, tie_word_embeddings=tied)
        )
    if family == "opt":
        sizes = {"ffn_dim": width, "max_position_embeddings": 64, "word_embed_proj_dim": common["hidden_size"]}
        return OPTForCausalLM(OPTConfig(**common, **sizes, **none, dropout=0.0))
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(**common, intermediate_size=width, hidden_dropout=0.0, tie_word_embeddings=tied, **none)
    )


def batch_of(step: int, changes: list[str]) -> Batch:
    """All rows; `masked`: some end early, and not each token that is there has a label."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 61, (ROWS, TOKENS), generator=generator)
    if "masked" not in changes:
        return {"input_ids": ids, "labels": ids}
    there = torch.arange(TOKENS) < torch.tensor([[48], [31], [5], [17]])
    asked = there & (torch.rand(ROWS, TOKENS, generator=generator) < 0.8)
    return {"input_ids": ids, "attention_mask": there.long(), "labels": ids.where(asked, IGNORE)}


def steps(model: nn.Module, batch: Callable[[int], Batch], manager: Any = None) -> list[Step]:
    """Three steps of AdamW: loss and whole gradients."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    done = []
    for step in range(3):
        if manager is None:
            loss = model(**batch(step), use_cache=False).loss
        else:
            with manager:
                loss = model(**batch(step), use_cache=False).loss
        loss.backward()
        grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        assert len(grads) == len(list(model.parameters()))
        done.append((float(loss), grads))
        optimizer.step()
        optimizer.zero_grad()
    return done


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def worst(got: list[Step], want: list[Step]) -> float:
    found = 0.0
    for (loss, grads), (loss0, grads0) in zip(got, want, strict=True):
        found = max(found, abs(loss / loss0 - 1))
        assert grads.keys() == grads0.keys()
        for name, grad in grads0.items():
            scale = grad.abs().max().clamp(min=1e-3)  # a key's bias has no gradient but noise: softmax does not see it
            found = max(found, float((grads[name] - grad).abs().max() / scale))
    return found


def divided(family: str, changes: list[str], mesh: DeviceMesh, *, sequence: bool) -> nn.Module:
    model = memo.parallelize(model_of(family, changes), mesh, sequence_parallel=sequence)
    if mesh.ndim > 1:
        for layer in next(module for module in model.modules() if isinstance(module, nn.ModuleList)):
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def check(name: str, *, sequence: bool) -> float:
    """How far loss and gradients are off those of one process. Memo changes no bit of them."""
    family, *changes = name.split("_")
    ranks = dist.get_world_size()
    if "sharded" in changes:
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
        rows = slice(mesh.get_local_rank("dp") * ROWS // 2, (mesh.get_local_rank("dp") + 1) * ROWS // 2)
    else:
        mesh, rows = init_device_mesh("cpu", (ranks,)), slice(ROWS)

    def own(step: int) -> Batch:
        return {key: value[rows] for key, value in batch_of(step, changes).items()}

    want = steps(model_of(family, changes), lambda step: batch_of(step, changes))
    plain = steps(divided(family, changes, mesh, sequence=sequence), own)
    model = divided(family, changes, mesh, sequence=sequence)
    manager = memo.offload(model, host="16MiB", min_bytes=256)
    managed = steps(model, own, manager)
    assert manager.stats.bytes_host > 0
    manager.close()
    for (loss, grads), (loss0, grads0) in zip(managed, plain, strict=True):
        assert loss == loss0
        assert all(torch.equal(grads[name], grads0[name]) for name in grads0), name
    return worst([(mean(loss, mesh), grads) for loss, grads in plain], want)


def mean(loss: float, mesh: DeviceMesh) -> float:
    """Over the ranks that share the rows."""
    if mesh.ndim == 1:
        return loss
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total, group=mesh.get_group("dp"))
    return float(total) / mesh["dp"].size()


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        for sequence in (True, False):
            off = check(name, sequence=sequence)
            assert off <= BOUND, f"{name}, sequence {sequence}: {off:.3g}"
            if dist.get_rank() == 0:
                print(f"equal {name} {'sequence' if sequence else 'replicated'} within {off:.2g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
