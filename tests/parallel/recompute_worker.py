"""Runs under torchrun: layers that talk to other ranks, recomputed token by token, against the same run without memo.

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
from torch.utils._python_dispatch import TorchDispatchMode

import memo
from memo.gpt.config import GPTConfig, preset
from memo.gpt.model.build_rank import build_stages
from memo.gpt.train.parallel_step import ParallelTrainer
from memo.parallel.collectives import exchange, gather, scatter_sum, sum_out
from memo.parallel.world import World, join
from memo.swap.levels import AT_ONCE, Level, TokenLevels
from memo.swap.recompute.axis.token_axis import Axis
from memo.swap.recompute.plans import Plans
from memo.swap.recompute.ranges.ranged_plan import RangedPlan
from memo.swap.recompute.tape.declared import TokenLocalCall

SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"alpha": 1.0},
    "quarter": {"alpha": 0.25},
    "levels": {"alpha": TokenLevels(all=0.25, matmuls=0.5, attention=0.25, piece=AT_ONCE)},
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


class Claims(TorchDispatchMode):
    """Follows what token-local functions say of the axis."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axis: Axis | None = axis

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    def token_local(self, call: TokenLocalCall) -> torch.Tensor:
        assert self.axis is not None
        self.axis = call.after(self.axis)
        return call.run()


def check_axes() -> None:
    """Every entry is the number of its token, and still is where the marks say."""
    tokens, group = 8, dist.group.WORLD
    numbers = torch.arange(tokens)[None, :, None, None].expand(2, tokens, 4, 3).double()
    mean = 1 / dist.get_world_size()
    paths: list[list[Callable[[torch.Tensor], torch.Tensor]]] = [
        [lambda x: gather(x, group, 1), lambda x: scatter_sum(x * mean, group, 1)],
        [lambda x: gather(x, group, 1), lambda x: sum_out(x * mean, group)],
        [lambda x: gather(x, group, 3), lambda x: scatter_sum(x * mean, group, 2)],
        [
            lambda x: exchange(x, group, scatter=2, gather=1),
            lambda x: gather(x, group, 1),
            lambda x: scatter_sum(x * mean, group, 1),
            lambda x: exchange(x, group, scatter=1, gather=2),
        ],
        [lambda x: exchange(x, group, scatter=2, gather=3)],
    ]
    for path in paths:
        x, claims = numbers, Claims(Axis(dim=1))
        for step in path:
            with claims:
                x = step(x)
            axis = claims.axis
            assert axis is not None
            apart = x.unflatten(axis.dim, (axis.outer, tokens, axis.inner)).movedim(axis.dim + 1, 0)
            assert torch.equal(
                apart, apart.new_tensor(range(tokens)).view(-1, *[1] * (apart.ndim - 1)).expand_as(apart)
            )
    with claims:
        claims.axis = Axis(dim=1)
        scatter_sum(numbers, group, 1)
    assert claims.axis is None, "a part of one rank's tokens is no prefix of them"


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
    """Holds that other ranks take part in exactly the replays that repeat a collective, and that these are made once."""
    of, in_ranges, repeated = Plans.of, 0, False

    def checked(self: Plans, call: Any, recorded: Any, setting: Any) -> Any:
        nonlocal in_ranges, repeated
        trials = self.trials.run
        found, together = of(self, call, recorded, setting)
        numbers = {collective.number for collective in call.recorder.collectives}
        repeats = not numbers.isdisjoint(getattr(found, "steps", ()))
        assert together == repeats, (call.layer.name, setting)
        if repeats and isinstance(found, RangedPlan):
            in_ranges += 1
            repeated |= self.trials.run == trials and of(self, call, recorded, setting)[0] is found
        return found, together

    Plans.of = checked  # type: ignore[method-assign]
    try:
        yield
    finally:
        Plans.of = of  # type: ignore[method-assign]
    assert repeated or not in_ranges


def main() -> None:
    """Arguments: names of layouts."""
    torch.set_num_threads(1)
    with join(CPU), together_checked():
        check_axes()
        for name in sys.argv[1:]:
            check(name)


if __name__ == "__main__":
    main()
