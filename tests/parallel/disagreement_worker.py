"""Runs under torchrun on two ranks that share their layers, and of which one differs: in what it was told, in what it does,
in the memory it has. Both must treat every layer alike, or one waits for ever in a collective of the other.
"""

from __future__ import annotations

import datetime
import sys
import warnings
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from equality_worker import CPU, ROWS, SEQ, Drawn, layout_of, training

import memo
import memo.machine.node_share
import memo.parallel.world
from memo.gpt import preset
from memo.gpt.model.build_rank import build_stages
from memo.gpt.train import ParallelTrainer
from memo.parallel import World, gather_values, join
from memo.swap import WhenFull

PATIENCE = datetime.timedelta(seconds=60)
"""Time that a rank waits for the other: less than the test's."""


class Training:
    """A divided GPT; with options, under a manager."""

    def __init__(self, options: dict[str, Any] | None) -> None:
        layout, _, _ = layout_of("tp2")
        shape = preset("tiny", vocab_size=61, max_seq=SEQ, layers=4, hidden=32, heads=4, ffn=64, kv_heads=4)
        world = World.of(layout, "cpu")
        stages = build_stages(shape, world, seq=SEQ, device=CPU, dtype=torch.float32, seed=7)
        self.layers = [layer for stage in stages for layer in stage.layers.values()]
        self.manager: Any = None
        if options is not None:
            model = torch.nn.ModuleList(stages)
            self.manager = memo.offload(model, **{"min_bytes": 256, "layers": self.layers, **options})
        config = training(1)
        self._trainer = ParallelTrainer(
            stages, world, Drawn(), config, device=CPU, rows=ROWS, around_forward=self.manager
        )
        self._trainer.optimizer.register_step_pre_hook(self._note)
        self._step = 0
        self._grads: list[torch.Tensor] = []

    def _note(self, *_: object) -> None:
        self._grads = [p.grad.full_tensor().clone() for _, p in self._trainer.named_parameters() if p.grad is not None]

    def step(self) -> list[torch.Tensor]:
        self._step += 1
        result = self._trainer.step(self._step)
        assert result is not None
        return [torch.tensor(result.loss), *self._grads]

    def use(self) -> Any:
        return self.manager.report().recompute


def assert_equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want) > 10
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def told_differently(rank: int) -> None:
    plain, managed = Training(None), Training({"host": "8MiB", "alpha": 1.0 if rank else 0.25})
    with closing(managed.manager) as manager:
        assert_equal(managed.step(), plain.step())
        reasons = set(() if rank else managed.use().refused.values())  # who was told alpha 1 moves everything anyway
        line = "rank 0 was told alpha 0.25 and rank 1 alpha 1, and they compute it together; tell all the same"
        assert gather_values(reasons) == [{line}, set()], reasons
        assert manager.stats.bytes_recomputed == 0

        manager.choose_levels(dict.fromkeys(range(4), 0.25))
        assert_equal(managed.step(), plain.step())
        assert managed.use().refused == {}, managed.use()
        recomputed = manager.stats.bytes_recomputed
        assert recomputed > 0

        if rank:
            manager.choose_levels({0: 0.25, 1: 0.5, 2: 0.25, 3: 0.25})
        assert_equal(managed.step(), plain.step())
        assert set(managed.use().refused) == {managed.manager.layers[1].name}, managed.use()
        assert recomputed < manager.stats.bytes_recomputed < 2 * recomputed

        if rank:
            manager.choose_levels(dict.fromkeys(range(4), 0.25))
        assert_equal(managed.step(), plain.step())
        assert managed.use().refused == {}, managed.use()


class Counting(torch.nn.Dropout):
    """In place of a layer's dropout."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


class Copy(torch.autograd.Function):
    """Copies by a kernel that torch does not see."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out.numpy()[:] = x.detach().numpy()
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Unseen(torch.nn.Dropout):
    """In place of a layer's dropout; copies once and again, from its second call on if it is `late`."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.left = int(late)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.left > 0:
            self.left -= 1
            return x
        return Copy.apply(x)  # type: ignore[no-untyped-call,no-any-return]


def computed_differently(rank: int) -> None:
    """One rank counts its calls, its own business, and has a layer whose sums it cannot repeat: nor does the other."""
    plain, managed = Training(None), Training({"host": "8MiB", "alpha": 0.0})
    if rank:
        managed.layers[1].dropout = Counting()
        managed.layers[2].dropout = Unseen(late=False)
    with closing(managed.manager):
        for _ in range(3):
            assert_equal(managed.step(), plain.step())
        assert gather_values(managed.use().refused) == [{}, {}]
        assert managed.use().accepted == 4
        moved = gather_values(managed.manager.stats.bytes_host)
        assert moved[0] == moved[1], moved
        if rank:
            assert managed.layers[1].dropout.calls == 6


def turned_different(rank: int) -> None:
    """A rank takes another way once all have agreed: it repeats the same collectives, with nothing exchanged."""
    plain, managed = Training(None), Training({"host": "8MiB", "alpha": 0.0})
    if rank:
        managed.layers[2].dropout = Unseen(late=True)
    with closing(managed.manager):
        for _ in range(3):
            assert_equal(managed.step(), plain.step())
        assert gather_values(managed.use().refused) == [{}, {}]


def less_memory(rank: int) -> None:
    """Two nodes as far as budgets go, one of which has room for some layers only."""
    memo.machine.node_share.host_name = lambda: f"node {rank}"
    options = {"host": "300KiB" if rank else "8MiB", "alpha": 1.0, "on_full": "recompute"}
    plain, managed = Training(None), Training(options)
    with closing(managed.manager):
        for _ in range(2):
            assert_equal(managed.step(), plain.step())
        said = gather_values(managed.use().repeated)
        assert said[0] == said[1] != {}, said
        assert len(said[0]) < 4, said
        assert set(said[0].values()) == {"no tier has room for it"}
        host = managed.manager.report().tiers[1]
        assert host.peak_bytes < host.budget_bytes
        assert gather_values(host.budget_bytes) == [8 << 20, 300 << 10]


def less_memory_before_a_plan(rank: int) -> None:
    """The same, as steps are measured: what has no room would stay on the device, which has none either."""
    memo.machine.node_share.host_name = lambda: f"node {rank}"
    plain, managed = Training(None), Training({"host": "120KiB" if rank else "8MiB", "alpha": 0.25})
    managed.manager._engine._tier_choice.when_full = WhenFull.STAY
    with closing(managed.manager):
        for _ in range(2):
            assert_equal(managed.step(), plain.step())
        said = gather_values(managed.use().repeated)
        assert said[0] == said[1] != {}, said
        assert len(said[0]) < 4, said


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    memo.parallel.world.TIMEOUT = PATIENCE
    with join(CPU):
        for case in (
            told_differently,
            computed_differently,
            turned_different,
            less_memory,
            less_memory_before_a_plan,
        ):
            if case.__name__ in sys.argv[1:]:
                case(dist.get_rank())
                print(f"equal though {case.__name__}", flush=True)


if __name__ == "__main__":
    main()
