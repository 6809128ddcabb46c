"""Runs under torchrun: layers that talk to other ranks, recomputed, against the same run without memo.

Says `equal <layout> <setting>` for each that was equal bit for bit, was treated as told, and moved less than whole tensors.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from equality_worker import CPU, ROWS, SEQ, Drawn, Step, layout_of, steps, training
from torch.distributed.device_mesh import init_device_mesh

import memo
from memo.gpt import GPTConfig, preset
from memo.gpt.model.build_rank import build_stages
from memo.gpt.train import ParallelTrainer
from memo.parallel import World, join
from memo.swap import Level
from memo.swap.recompute.plans import Plans

SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"alpha": 1.0},
    "quarter": {"alpha": 0.25},
    "levels": {"alpha": (0.25, 0.5, 0.25)},
    "middle": {"alpha": (0, 1, 0)},
    "nothing": {"alpha": 0.25, "levels": {0: Level.SAVE_INPUT}},
}
SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "max_seq": SEQ,
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "ffn": 64,
    "kv_heads": 4,
}


def ours(name: str, options: dict[str, Any] | None) -> tuple[list[Step], memo.Manager | None]:
    layout, model, _ = layout_of(name.replace("_autocast", ""))
    shape: GPTConfig = preset("tiny", **(SHAPE | model))
    world = World.of(layout, "cpu")
    autocast = torch.bfloat16 if "autocast" in name else None
    stages = build_stages(shape, world, seq=SEQ, device=CPU, dtype=torch.float32, seed=7, autocast=autocast)
    layers = [layer for stage in stages for layer in stage.layers.values()]
    manager = offload(torch.nn.ModuleList(stages), options, layers=layers)
    config = training(4 if layout.pp > 1 else 1)
    trainer = ParallelTrainer(stages, world, Drawn(), config, device=CPU, rows=ROWS, around_forward=manager)
    return steps(trainer), manager


def hugging_face(name: str, options: dict[str, Any] | None) -> tuple[list[Step], memo.Manager | None]:
    """A model that memo did not write, divided by memo.parallelize."""
    from hugging_face_worker import model_of

    model = model_of(name.split("_")[1], []).train()
    lower = torch.autocast("cpu", torch.bfloat16, enabled="autocast" in name)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    memo.parallelize(model, mesh, sequence_parallel="replicated" not in name)
    manager = offload(model, options)
    done: list[Step] = []
    for step in range(2):
        ids = torch.randint(0, 61, (2, 48), generator=torch.Generator().manual_seed(step))
        with manager or contextlib.nullcontext(), lower:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        model.zero_grad()
        loss.backward()
        grads = {name: parameter.grad.to_local().clone() for name, parameter in model.named_parameters()}
        done.append((loss.item(), 1.0, grads))
    return done, manager


def offload(model: torch.nn.Module, options: dict[str, Any] | None, **others: Any) -> memo.Manager | None:
    if options is None:
        return None
    return memo.offload(model, **{"host": "8MiB", "min_bytes": 256, **options, **others})


def moved(manager: memo.Manager, setting: str) -> int:
    """Bytes that were moved, once the report says what it should."""
    with closing(manager):
        use = manager.report().recompute
        if setting == "whole":
            assert use is None, use
        else:
            assert use is not None
            assert use.refused == {}, use
            assert use.accepted == len(manager.layers), use
            assert set(use.repeated.values()) <= {"as chosen"}, use
            assert use.recomputed_bytes > 0, use
        assert manager.stats.live_entries == 0, manager.stats
        return manager.stats.bytes_host


def assert_equal(got: list[Step], want: list[Step], what: str) -> None:
    for (loss, norm, grads), (loss0, norm0, grads0) in zip(got, want, strict=True):
        assert (loss, norm) == (loss0, norm0), f"{what}: {loss} {norm}, not {loss0} {norm0}"
        for parameter in grads0:
            assert torch.equal(grads[parameter], grads0[parameter]), f"{what}: {parameter}"


def check(name: str) -> None:
    run: Callable[..., tuple[list[Step], memo.Manager | None]] = hugging_face if name.startswith("hf") else ours
    want, _ = run(name, None)
    whole = None
    for setting, options in SETTINGS.items():
        got, manager = run(name, options)
        assert manager is not None
        assert_equal(got, want, f"{name}, {setting}")
        nbytes = moved(manager, setting)
        whole = nbytes if whole is None else whole
        assert nbytes < whole or setting == "whole", f"{name}, {setting}: {nbytes} bytes, not less than {whole}"
        if dist.get_rank() == 0:
            print(f"equal {name} {setting}", flush=True)


@contextlib.contextmanager
def together_checked() -> Iterator[None]:
    """Holds that other ranks take part in exactly the replays that repeat a collective."""
    of = Plans.of

    def checked(self: Plans, call: Any, recorded: Any, setting: Any) -> Any:
        found, together = of(self, call, recorded, setting)
        numbers = {collective.number for collective in call.recorder.collectives}
        repeats = not numbers.isdisjoint(getattr(found, "steps", ()))
        assert together == repeats, (call.layer.name, setting)
        return found, together

    Plans.of = checked  # type: ignore[method-assign]
    try:
        yield
    finally:
        Plans.of = of  # type: ignore[method-assign]


def main() -> None:
    """Arguments: names of layouts."""
    torch.set_num_threads(1)
    with join(CPU), together_checked():
        for name in sys.argv[1:]:
            check(name)


if __name__ == "__main__":
    main()
