"""Runs on each of two ranks: a Llama of transformers under FSDP2, with memo's ways of checkpointing, equals itself without.

Three steps; losses, sharded gradients, and the bytes that move.
"""

from __future__ import annotations

import contextlib
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import memo
from memo.checkpointing import function
from memo.integrations.hf import checkpoint_with_memo
from memo.parallel import join

LAYERS = 3


def made(checkpointed: str) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=128, num_attention_heads=2, vocab_size=61
    )
    model = LlamaForCausalLM(config).train()
    if checkpointed == "by torch":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif checkpointed == "by memo":
        checkpoint_with_memo(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trained(model: Any, context: AbstractContextManager[Any]) -> list[torch.Tensor]:
    torch.manual_seed(5 + dist.get_rank())
    ids = torch.randint(0, 61, (2, 128))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found = []
    for _ in range(3):
        with context:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters()]
        assert all(isinstance(grad, DTensor) for grad in grads)
        found += [loss.detach().clone(), *(grad.to_local().clone() for grad in grads)]
        optimizer.step()
        optimizer.zero_grad()
    return found


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)  # transformers' new name of gradient checkpointing
    torch.set_num_threads(1)
    function.MIN_BYTES = 64
    with join(torch.device("cpu")):
        wanted = trained(made("not"), contextlib.nullcontext())

        def equals(model: nn.Module, context: AbstractContextManager[Any]) -> None:
            assert all(map(torch.equal, trained(model, context), wanted))

        equals(made("by memo"), contextlib.nullcontext())
        (context,) = function._thread.contexts.values()
        use = context.report().recompute
        assert use is not None
        assert use.accepted == LAYERS
        assert not use.refused
        moved = []
        for checkpointed in ("not", "by torch"):
            model = made(checkpointed)
            manager = memo.offload(model, alpha=0.0, host="64MiB", min_bytes=64)
            equals(model, manager)
            assert manager.report().replaced == (LAYERS if checkpointed == "by torch" else 0)
            moved.append(manager.report().tiers[1].moved_bytes)
            manager.close()
        assert moved[0] == moved[1] > 0
        saved = memo.saved_tensors(host="64MiB", min_bytes=64)
        equals(made("not"), saved)
        saved.close()
        print(f"rank {dist.get_rank()} done", flush=True)


if __name__ == "__main__":
    main()
