"""Runs under torchrun: steps with the embedding's gradient exchanged as rows against FSDP's exchange, and the bytes."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from memo.gpt import GPTConfig, TrainConfig, preset
from memo.gpt.arithmetic import EmbeddingTraffic
from memo.gpt.model.build_rank import build_stages
from memo.gpt.optim import LrSchedule
from memo.gpt.train import ParallelTrainer, embedding_gradients
from memo.parallel import Layout, World, join

SEQ, ROWS, STEPS, SEED, VOCAB, HIDDEN = 16, 12, 3, 7, 499, 32
CPU = torch.device("cpu")
UNIT = 2.0**-24
# As in equality_worker.py: what sums in another order move in three steps of AdamW.
BOUND = 2e-5


class Drawn:
    """Tokens as a function of (step, microbatch): drawn alike, or each but once in a step."""

    def __init__(self, *, distinct: bool) -> None:
        self.distinct = distinct

    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step if self.distinct else 1000 * step + microbatch)
        if self.distinct:
            whole = torch.randperm(VOCAB, generator=generator)[: 2 * ROWS * SEQ].view(2, ROWS, SEQ)
            return whole[microbatch].contiguous(), whole[1 - microbatch].contiguous()
        tokens = torch.randint(VOCAB, (ROWS, SEQ + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(shape: GPTConfig, world: World, microbatches: int, *, sparse: bool, distinct: bool) -> dict[str, Any]:
    """Losses, the first step's gradients as the optimizer sees them, the weights at the end, and bytes received."""
    stages = build_stages(shape, world, seq=SEQ, device=CPU, dtype=torch.float32, seed=SEED, sparse_embedding=sparse)
    schedule = LrSchedule(peak=1e-3, floor=1e-4, warmup=0, steps=10)
    # The norm of more than two ranks' gradients is of other sums, and a gradient that is clipped by it is, too.
    clip = 0.5 if world.replicas.size() == 2 else None
    config = TrainConfig(schedule=schedule, accumulate=microbatches, clip=clip, eval_steps=1)
    trainer = ParallelTrainer(stages, world, Drawn(distinct=distinct), config, device=CPU, rows=ROWS)
    seen: dict[str, torch.Tensor] = {}

    def whole(tensor: Any) -> torch.Tensor:
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()

    def note(*_: object) -> None:
        if not seen:
            seen.update({name: whole(parameter.grad) for name, parameter in trainer.named_parameters()})

    trainer.optimizer.register_step_pre_hook(note)
    received: list[int] = []
    gathered = embedding_gradients.all_gathered

    def counted(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        received.append((group.size() - 1) * x.numel() * x.element_size())
        return gathered(x, group, dim)

    embedding_gradients.all_gathered = counted
    losses = []
    for step in range(1, STEPS + 1):
        result = trainer.step(step)
        assert result is not None
        losses.append(result.loss)
    embedding_gradients.all_gathered = gathered
    weights = {name: whole(parameter) for name, parameter in trainer.named_parameters()}
    return {"losses": losses, "gradients": seen, "weights": weights, "received": sum(received)}


def own_rows(shape: GPTConfig, world: World, microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the embedding's gradient in the first step: mean of the ranks' magnitudes, and ranks that have each row."""
    stages = build_stages(shape, world, seq=SEQ, device=CPU, dtype=torch.float32, seed=SEED, sparse_embedding=True)
    config = TrainConfig(schedule=LrSchedule(peak=1e-3, floor=1e-4, warmup=0, steps=10), accumulate=microbatches)
    trainer = ParallelTrainer(stages, world, Drawn(distinct=False), config, device=CPU, rows=ROWS)
    trainer.sparse_embedding.exchange = lambda: None  # type: ignore[method-assign]
    trainer._gradients(1, lambda: False)
    table = stages[0].tokens
    assert table is not None
    assert table.weight.grad is not None
    own, group = table.weight.grad.abs(), world.replicas.get_group()
    ranks = (own != 0).any(1).long()
    dist.all_reduce(own, group=group)
    dist.all_reduce(ranks, group=group)
    return own / world.replicas.size(), ranks


def check(name: str) -> str:
    layout = Layout(**{part[:2]: int(part[2:]) for part in name.split("_")})
    microbatches = 4 if layout.pp > 1 else 2
    sizes = {"vocab_size": VOCAB, "max_seq": SEQ, "layers": 2, "hidden": HIDDEN, "heads": 4, "ffn": 64, "kv_heads": 4}
    shape = preset("tiny", variant="llama", **sizes)
    layout.check(shape, seq=SEQ, batch=ROWS, microbatches=microbatches)
    world = World.of(layout, "cpu")
    dense = train(shape, world, microbatches, sparse=False, distinct=False)
    sparse = train(shape, world, microbatches, sparse=True, distinct=False)
    again = train(shape, world, microbatches, sparse=True, distinct=False)
    assert sparse["losses"] == again["losses"], "the exchange is not the same in every run"
    replicas = world.replicas.size()
    if replicas == 2:
        assert sparse["losses"] == dense["losses"], (sparse["losses"], dense["losses"])
        for name_, weight in dense["weights"].items():
            assert torch.equal(sparse["weights"][name_], weight), name_
        return f"{name}: equal bit for bit"
    off = (sparse["gradients"]["tokens.weight"] - dense["gradients"]["tokens.weight"]).abs()
    size, ranks = own_rows(shape, world, microbatches)
    assert bool((ranks > 2).any())
    assert not off[ranks <= 2].any(), "a row of two ranks differs"
    bound = 2 * replicas * UNIT * size
    assert bool((off <= bound).all()), float((off / bound.clamp(min=1e-30)).max())
    assert sparse["losses"][0] == dense["losses"][0]
    for one, other in zip(sparse["losses"], dense["losses"], strict=True):
        assert abs(one / other - 1) <= BOUND, (sparse["losses"], dense["losses"])
    return f"{name}: equal within the bound"


def count(name: str) -> str:
    """Bytes that a rank received in three steps of distinct tokens, which are those of the arithmetic."""
    layout = Layout(**{part[:2]: int(part[2:]) for part in name.split("_")})
    sizes = {"vocab_size": VOCAB, "max_seq": SEQ, "layers": 2, "hidden": HIDDEN, "heads": 4, "ffn": 64, "kv_heads": 4}
    done = train(preset("tiny", variant="llama", **sizes), World.of(layout, "cpu"), 2, sparse=True, distinct=True)
    traffic = EmbeddingTraffic(
        rows=VOCAB,
        width=HIDDEN,
        tokens=2 * ROWS * SEQ // (layout.dp * layout.cp),
        ranks=layout.dp * layout.cp,
        element=4,
        gathered_element=4,
        gathers=2,
    )
    assert done["received"] == STEPS * traffic.sparse_bytes, (done["received"], STEPS * traffic.sparse_bytes)
    return f"{name}: {done['received']} bytes"


def unseen() -> None:
    """Rows that no rank has seen stay zero: of tensor parallelism a rank may have such a part of the vocabulary."""
    grad = torch.zeros(5, 3)
    embedding_gradients.mean_of_rows(grad, World.of(Layout(dp=dist.get_world_size()), "cpu").replicas.get_group())
    assert not grad.any()
    grad[2] = 3 * dist.get_rank()
    embedding_gradients.mean_of_rows(grad, dist.group.WORLD)
    assert grad.sum(1).tolist() == [0, 0, 9 * (dist.get_world_size() - 1) / 2, 0, 0]


def main() -> None:
    """Arguments: names of layouts."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    with join(CPU):
        unseen()
        for name in sys.argv[1:]:
            said = [check(name)] + ([count(name)] if "tp" not in name and "pp" not in name else [])
            dist.barrier()
            if dist.get_rank() == 0:
                print("\n".join(said), flush=True)


if __name__ == "__main__":
    main()
