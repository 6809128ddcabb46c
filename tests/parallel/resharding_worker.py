"""Runs under torchrun: writes checkpoints of small models, and counts what the ranks of other layouts read of them."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save

from memo.gpt import GPTConfig, TrainConfig, preset
from memo.gpt.checkpoint import reshard
from memo.gpt.checkpoint.directory import Checkpoint
from memo.gpt.checkpoint.distributed import load_distributed
from memo.gpt.model.build_rank import build_stages
from memo.gpt.optim import LrSchedule
from memo.gpt.train import ParallelTrainer
from memo.parallel import Layout, World, join

SEQ, SEED = 48, 7
CPU = torch.device("cpu")


def shape_of(name: str) -> GPTConfig:
    sizes = {"vocab_size": 61, "max_seq": SEQ, "layers": 4, "hidden": 40, "heads": 4, "ffn": 72, "kv_heads": 4}
    return preset("tiny", variant="llama" if "llama" in name else "gpt", **sizes)


def layout_of(name: str) -> tuple[Layout, bool]:
    """`dp2_tp2`, `dp4_sparse`: the layout, and whether the embedding is whole on every replica."""
    parts = [part for part in name.split("_") if part not in ("llama", "gpt", "sparse")]
    return Layout(**{part[:2]: int(part[2:]) for part in parts}), "sparse" in name


def trainer_of(name: str) -> ParallelTrainer:
    layout, sparse = layout_of(name)
    world, shape = World.of(layout, "cpu"), shape_of(name)
    stages = build_stages(shape, world, seq=SEQ, device=CPU, dtype=torch.float32, seed=SEED, sparse_embedding=sparse)
    config = TrainConfig(schedule=LrSchedule(peak=1e-3, floor=1e-4, warmup=0, steps=10), accumulate=4)
    batches: Any = None
    return ParallelTrainer(stages, world, batches, config, device=CPU, rows=12)


def write(name: str, folder: Path) -> None:
    save(trainer_of(name).state(), checkpoint_id=folder / name)


def read(old: str, new: str, folder: Path) -> str:
    """Loads the checkpoint, and compares the bytes of the parts that were read with the arithmetic's."""
    trainer, counted = trainer_of(new), [0]
    original = FileSystemReader.read_data

    def counting(self: FileSystemReader, plan: Any, planner: Any) -> Any:
        known = planner.metadata.state_dict_metadata
        for item in plan.items:
            of = known[item.storage_index.fqn]
            chunk = next(part for part in of.chunks if part.offsets == item.storage_index.offset)
            counted[0] += chunk.sizes.numel() * of.properties.dtype.itemsize
        return original(self, plan, planner)

    FileSystemReader.read_data = counting  # type: ignore[method-assign]
    for state in trainer.states():
        load_distributed(Checkpoint(path=folder / old, step=1, settings={}), state)
    FileSystemReader.read_data = original  # type: ignore[method-assign]
    (layout, sparse), (former, was_sparse) = layout_of(new), layout_of(old)
    known = reshard(shape_of(new), former, layout, element=4, sparse_embedding=(was_sparse, sparse))
    found: list[int] = [0] * layout.ranks
    dist.all_gather_object(found, counted[0])
    assert tuple(found) == known.read_bytes, f"{old} to {new}: read {found}, not {known.read_bytes}"
    held = sum(
        tensor.numel() * tensor.element_size()
        for state in trainer.states()
        for tensor in (getattr(value, "_local_tensor", value) for value in flat(state))
    )
    owned: list[int] = [0] * layout.ranks
    dist.all_gather_object(owned, held)
    if len(trainer.states()) == 1:
        assert tuple(owned) == known.own_bytes, f"{new}: has {owned}, not {known.own_bytes}"
    return f"{old} to {new}: {sum(found)} bytes"


def flat(state: Any) -> list[torch.Tensor]:
    return [tensor for value in state.values() for tensor in flat(value)] if isinstance(state, dict) else [state]


def main() -> None:
    """Arguments: a folder, then `write:NAME` or `read:OLD:NEW`."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with join(CPU):
        for task in sys.argv[2:]:
            verb, *names = task.split(":")
            if verb == "write":
                write(*names, Path(sys.argv[1]))
            else:
                said = read(*names, Path(sys.argv[1]))
                if dist.get_rank() == 0:
                    print(said, flush=True)
            dist.barrier()


if __name__ == "__main__":
    main()
