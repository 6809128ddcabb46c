"""Runs under torchrun: small models of transformers in a layout, against one process, and with memo.offload.

    decoders_worker.py TP PP DP CP NAME...

A name ends in +lora where adapters alone are trained.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import memo
from benchmarks.small_architectures import VOCAB, build, use_depth
from memo.parallel.decoders import whole_tensor

BOUND = 1e-6
ROWS, TOKENS = 8, 48
Step = tuple[float, dict[str, torch.Tensor]]


def model_of(name: str) -> Any:
    kind, _, lora = name.partition("+")
    model: Any = build(kind, experts="eager").double().train()
    model.config.use_cache = False
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).double()
    return model


def train(model: Any, ids: torch.Tensor, *, pipelined: bool, manager: Any = None) -> list[Step]:
    """Two steps, the second of two batches: losses, and whole gradients by name."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)  # AdamW enlarges rounding
    done = []
    for step in range(2):
        own = ids.roll(step, 1)
        optimizer.zero_grad()
        for turn in range(step + 1):
            with manager or contextlib.nullcontext():
                loss = forward(model, own.roll(turn, 0), pipelined)
            if not pipelined:
                loss.backward()
        optimizer.step()
        grads = {name: whole_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        done.append((float(loss.detach()), grads))
    return done


def forward(model: Any, ids: torch.Tensor, pipelined: bool) -> torch.Tensor:
    return model.step(input_ids=ids, labels=ids) if pipelined else model(input_ids=ids, labels=ids).loss


def check(name: str, tp: int, pp: int, dp: int, cp: int) -> float:
    """How far losses and gradients are off those of one process. memo changes no bit of them."""
    ids = torch.randint(3, VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    own = ids.unflatten(0, (dp, -1))[dist.get_rank() // (cp * tp) % dp]
    whole = model_of(name)
    names = {name for name, _ in whole.named_parameters()}
    twins: dict[str, str] = {}
    first: dict[nn.Parameter, str] = {}
    for key, parameter in whole.named_parameters(remove_duplicate=False):
        twins[key] = first.setdefault(parameter, key)
    want = train(whole, ids, pipelined=False)

    def divided() -> Any:
        return memo.parallelize(model_of(name), tp=tp, pp=pp, dp=dp, cp=cp, microbatches=4 if pp > 1 else None)

    plain = train(divided(), own, pipelined=pp > 1)
    model = divided()
    schedule = {"layers": model.layers, "schedule": model.schedule(*own.shape)} if pp > 1 else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager = memo.offload(model, alpha=0.1, min_bytes=1, host="16MiB", **schedule)
    managed = train(model, own, pipelined=pp > 1, manager=manager)
    assert manager.stats.bytes_recomputed > 0
    manager.close()
    for (loss, grads), (loss0, grads0) in zip(managed, plain, strict=True):
        assert loss == loss0
        assert all(torch.equal(grads[key], grads0[key]) for key in grads0), name
    off = 0.0
    for (loss, grads), (loss0, grads0) in zip(plain, want, strict=True):
        total = torch.tensor(loss, dtype=torch.float64)
        if pp == 1:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        off = max(off, abs(float(total) / loss0 - 1))
        for key, grad in grads.items():
            wanted = grads0[twins[key]]
            off = max(off, float((grad - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6)))
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (off, {twins[key] for key in plain[0][1]}))
    assert set().union(*(found for _, found in seen)) == set(want[0][1]) <= names
    return max(off for off, _ in seen)


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    tp, pp, dp, cp = map(int, sys.argv[1:5])
    use_depth(max(2, 2 * pp) if pp > 1 else 2)
    dist.init_process_group("gloo")
    for name in sys.argv[5:]:
        off = check(name, tp, pp, dp, cp)
        assert off <= BOUND, f"{name}: {off:.3g}"
        if dist.get_rank() == 0:
            print(f"equal {name} within {off:.2g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
