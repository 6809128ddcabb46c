"""Runs under torchrun: ranks whose batches have other lengths than each other's, and other ones at each step.

Gradients with memo are those without, bit for bit, and no rank waits for one that does something else.
"""

from __future__ import annotations

import datetime
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from saved_tensors_machine import SavedTensorsMachine
from small_models import Block, Stack

import memo
from memo.errors import UsageError
from memo.manager import use_machine
from memo.parallel import gather_values
from memo.swap import recomputable

PATIENCE = datetime.timedelta(seconds=60)
LENGTHS = [[40, 40, 56, 24, 60, 40], [24, 56, 56, 40, 32, 56]]
"""Lengths of each data-parallel rank, by step."""
SPLIT: dict[str, Any] = {"alpha": 0.25, "host": "16MiB", "min_bytes": 256}
AUTO: dict[str, Any] = {"device": "640KiB", "host": "16MiB", "min_bytes": 256}
"""So little that a plan has to move and to recompute."""

Steps = list[list[torch.Tensor]]


def ids(step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + part)
    return torch.randint(0, 61, (2, LENGTHS[part][step]), generator=generator)


def run(model: nn.Module, part: int, manager: Any = None, steps: int = len(LENGTHS[0])) -> Steps:
    """The loss of each step and this rank's part of the gradients."""
    done = []
    for step in range(steps):
        if manager is None:
            loss = loss_of(model, ids(step, part))
        else:
            with manager:
                loss = loss_of(model, ids(step, part))
        loss.backward()
        done.append([loss.detach(), *(local(p.grad) for p in model.parameters() if p.grad is not None)])
        model.zero_grad()
    return done


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss if is_llama(model) else model(tokens)
    return loss


def is_llama(model: nn.Module) -> bool:
    return isinstance(model, LlamaForCausalLM)


def local(grad: torch.Tensor) -> torch.Tensor:
    return getattr(grad, "_local_tensor", grad).clone()


def require_equal(got: Steps, want: Steps) -> None:
    for step, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert len(ours) == len(theirs) > 10
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), f"step {step}"


def replicated() -> nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(Stack(layers=4))


def sharded() -> nn.Module:
    torch.manual_seed(0)
    model = Stack(layers=4)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def divided() -> nn.Module:
    """Two replicas of two ranks."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=61, num_key_value_heads=2, **shape))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    memo.parallelize(model, mesh)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def layers_of(model: nn.Module) -> list[nn.Module]:
    return list(next(module for module in model.modules() if isinstance(module, nn.ModuleList)))


def compare(make: Callable[[], nn.Module], part: int, options: Mapping[str, Any]) -> memo.Manager:
    want = run(make(), part)
    model = make()
    manager = memo.offload(model, layers=layers_of(model), **options)
    with closing(manager):
        require_equal(run(model, part, manager), want)
        use = manager.report().recompute
        assert use is None or use.refused == {}, use
        assert sum(gather_values(manager.stats.bytes_recomputed)) > 0
    return manager


def replicas(make: Callable[[], nn.Module], ranks_a_part: int = 1) -> None:
    part = dist.get_rank() // ranks_a_part
    compare(make, part, SPLIT)
    manager = compare(make, part, AUTO)
    assert manager.plan is not None, manager.report()
    signatures = gather_values(manager.plan.problem.profile.signature)
    assert len(set(signatures)) == 2, "each replica has its own"
    assert manager.stats.peak_device_bytes > 0


def ddp() -> None:
    replicas(replicated)


def fsdp() -> None:
    replicas(sharded)


def dp_tp() -> None:
    replicas(divided, ranks_a_part=2)


def one_plan() -> None:
    """Told that both talk, ranks carry out one plan for the longest of their batches."""
    manager = compare(sharded, dist.get_rank(), {**AUTO, "group": dist.group.WORLD})
    plans = gather_values(manager.plan)
    assert plans[0] == plans[1] is not None


@recomputable
def counted(x: torch.Tensor) -> torch.Tensor:
    """Talks to the other rank, of nothing that has the shape of a batch."""
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    return x * (ranks / dist.get_world_size())


class Talks(Block):
    def __init__(self) -> None:
        super().__init__(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(counted(x))


def talking() -> None:
    """Where ranks compute a layer together, one of them alone would try a new length out, and wait for ever."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Stack(layers=3, make=Talks)

    rank = dist.get_rank()
    want, model = run(make(), rank), make()
    with closing(memo.offload(model, **SPLIT)) as manager:
        got, reasons, recomputed = [], [], [0]
        for step in range(len(LENGTHS[0])):
            with manager:
                loss = model(ids(step, rank))
            loss.backward()
            got.append([loss.detach(), *(local(p.grad) for p in model.parameters())])
            model.zero_grad()
            use = manager.report().recompute
            assert use is not None
            reasons.append(set(use.refused.values()))
            recomputed.append(manager.stats.bytes_recomputed)
        require_equal(got, want)
    for step, (mine, theirs) in enumerate(zip(*LENGTHS, strict=True)):
        if mine == theirs:
            assert reasons[step] == set()
            assert recomputed[step + 1] > recomputed[step]
        else:
            line = f"rank 0 was given (2, {mine}, 32) and rank 1 (2, {theirs}, 32), and they compute it together"
            assert reasons[step] == {f"{line}; give all batches of one shape"}
            assert recomputed[step + 1] == recomputed[step]


def disagreeing() -> None:
    """Ranks that divide a model take the same batch, with memo or without."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=61, num_key_value_heads=2, **shape))
    memo.parallelize(model, init_device_mesh("cpu", (2,)))
    with closing(memo.offload(model, **SPLIT)) as manager, manager:
        tokens = ids(0, dist.get_rank())
        try:
            model(input_ids=tokens, labels=tokens)
        except UsageError as error:
            line = str(error)
        else:
            raise AssertionError("two lengths were taken for one batch")
    assert (
        gather_values(line)
        == [
            "the batch of ranks that compute each layer together: [(2, 40)] on rank 0, but [(2, 24)] on rank 1, which must "
            "be equal"
        ]
        * 2
    ), line


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", timeout=PATIENCE)
    for case in sys.argv[1:]:
        with use_machine(SavedTensorsMachine()):
            globals()[case]()
        if dist.get_rank() == 0:
            print(f"equal {case}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
