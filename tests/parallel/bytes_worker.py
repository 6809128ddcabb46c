"""Runs under torchrun: the most bytes each pipeline stage holds saved at a time, against what the schedule says it must."""

from __future__ import annotations

import collections
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

sys.path.insert(0, str(Path(__file__).parent))

from equality_worker import CPU, SEED, SEQ, Drawn, training
from launching import SCHEDULES

import memo
from memo.gpt import GPTConfig, preset
from memo.gpt.model.build_rank import build_stages
from memo.gpt.model.pipeline_stage import PipelineStage
from memo.gpt.train import ParallelTrainer
from memo.parallel import Layout, PipelineOrder, PipelineSchedule, World, join

ROWS, MICROBATCHES, LAYERS, HIDDEN, HEADS = 4, 8, 8, 32, 4
UNIT = ROWS * SEQ * HIDDEN * 4
# One layer: norm in 1, qkv in 1, q k v 3, attention out 1, norm in 1, up in 1, gelu in 4, down in 4.
LAYER = 16 * UNIT
# What is smaller is not counted: statistics of norms and attention, a few floats for each token, and the tokens themselves.
SMALLEST = UNIT // 2 + 1


class Held:
    """Bytes of the storages that autograd holds for layers, each counted once while any of its handles lives."""

    def __init__(self, stages: list[PipelineStage]) -> None:
        self.now = self.most = 0
        self._inside = False
        self._handles: collections.Counter[torch.UntypedStorage] = collections.Counter()
        self._never = {parameter.untyped_storage() for stage in stages for parameter in stage.parameters()}
        for stage in stages:
            for layer in stage.layers.values():
                layer.register_forward_pre_hook(lambda *_: self._set(True))
                layer.register_forward_hook(lambda *_: self._set(False))

    def _set(self, inside: bool) -> None:
        self._inside = inside

    def pack(self, tensor: torch.Tensor) -> _Handle | torch.Tensor:
        storage = tensor.untyped_storage()
        if not self._inside or storage in self._never or storage.nbytes() < SMALLEST:
            return tensor.detach()
        self._handles[storage] += 1
        if self._handles[storage] == 1:
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
        return _Handle(tensor.detach(), self)

    @staticmethod
    def unpack(handle: _Handle | torch.Tensor) -> torch.Tensor:
        return handle.tensor if isinstance(handle, _Handle) else handle

    def dropped(self, storage: torch.UntypedStorage) -> None:
        self._handles[storage] -= 1
        if not self._handles[storage]:
            del self._handles[storage]
            self.now -= storage.nbytes()


class _Handle:
    def __init__(self, tensor: torch.Tensor, held: Held) -> None:
        self.tensor, self._held = tensor, held

    def __del__(self) -> None:
        self._held.dropped(self.tensor.untyped_storage())


def plain(world: World) -> tuple[int, PipelineOrder]:
    """Peak of what one rank holds, and what the schedule's own order says of it."""
    stages = build_stages(shape(), world, seq=SEQ, device=CPU, dtype=torch.float32, seed=SEED)
    held = Held(stages)
    around = saved_tensors_hooks(held.pack, held.unpack)
    trainer = ParallelTrainer(
        stages, world, Drawn(), training(MICROBATCHES), device=CPU, rows=ROWS, around_forward=around
    )
    for step in (1, 2):
        assert trainer.step(step) is not None
        assert held.now == 0
    order = PipelineOrder.of(trainer.schedule, [layer for stage in stages for layer in stage.layers.values()])
    assert order is not None
    return held.most, order


def managed(world: World) -> tuple[int, int]:
    """The same with everything moved: bytes saved at a time wherever they are, and of these on the device."""
    stages = build_stages(shape(), world, seq=SEQ, device=CPU, dtype=torch.float32, seed=SEED)
    layers = [layer for stage in stages for layer in stage.layers.values()]
    trainer = ParallelTrainer(stages, world, Drawn(), training(MICROBATCHES), device=CPU, rows=ROWS)
    manager = trainer.around_forward = memo.offload(
        nn.ModuleList(stages),
        alpha=1.0,
        host="64MiB",
        min_bytes=SMALLEST,
        layers=layers,
        schedule=trainer.schedule,
    )
    most = 0

    def count(*_: object) -> None:
        nonlocal most
        groups = manager._engine._layer_calls
        most = max(most, sum(saved.nbytes for group in groups for saved in group.living()))

    for layer in layers:
        layer.register_forward_hook(count)
    for step in (1, 2):
        assert trainer.step(step) is not None
    assert manager.stats.live_entries == 0
    device = manager.stats.peak_device_bytes
    manager.close()
    return most, device


def shape() -> GPTConfig:
    return preset("tiny", vocab_size=61, max_seq=SEQ, layers=LAYERS, hidden=HIDDEN, heads=HEADS)


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    with join(CPU):
        for schedule in SCHEDULES:
            layout = Layout(pp=dist.get_world_size(), schedule=schedule)
            world = World.of(layout, "cpu")
            most, order = plain(world)
            if schedule is PipelineSchedule.GPIPE:
                assert order.held == MICROBATCHES
            if schedule is PipelineSchedule.ONE_F_ONE_B:
                assert order.held == min(MICROBATCHES, layout.pp - world.pp)
            # Two stages of a rank are seldom full at one time: what they hold together is counted turn by turn.
            assert most == order.weight * LAYER, (schedule, world.pp, most / LAYER, order.weight)
            assert order.weight <= order.held * LAYERS // layout.pp
            saved, device = managed(world)
            assert saved == most, (schedule, world.pp, saved, most)
            # One layer computes, one leaves or is read ahead, one may wait for the next microbatch, one for its weights'
            # half where backward is split.
            assert device <= 4 * LAYER, (schedule, world.pp, device / LAYER, saved / LAYER)
            everyone: list[tuple[float, ...]] = [()] * dist.get_world_size()
            dist.all_gather_object(everyone, (most / LAYER, device / LAYER))
            if world.rank == 0:
                print(
                    f"{schedule}: layers' worth held per rank, and of it on the device with memo: {everyone}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
