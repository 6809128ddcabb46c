"""A trial finds every byte that a replay gives otherwise, names the earliest step at fault, and minds no gaps."""

from __future__ import annotations

import dataclasses
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import Block
from taped import Taped, record

import memo
from memo.errors import ModifiedAfterSave
from memo.swap.recompute.tape.replay import ReplayFailed
from memo.swap.recompute.trial import ReplayMismatch, try_out

if TYPE_CHECKING:
    from collections.abc import Callable

    from memo.swap.recompute.tape.plan import Plan


@dataclasses.dataclass
class Replayed:
    """A replay without an engine: what a plan gives of a recorded call, changed on the way."""

    taped: Taped
    plan: Plan
    change: Callable[[int, torch.Tensor], None] = lambda position, made: None

    def __post_init__(self) -> None:
        sources = [self.taped.sources[storage] for storage in self.plan.wanted]
        self.holds = [types.SimpleNamespace(saved=types.SimpleNamespace(source=source)) for source in sources]
        self.wanted = [types.SimpleNamespace(hold=lambda hold=hold: hold) for hold in self.holds]

    def run(self, take: Any) -> None:
        for position, made in enumerate(self.taped.replay(self.plan).values()):
            self.change(position, made)
            take(self.wanted[position], made)


def block(seed: int = 0) -> Taped:
    torch.manual_seed(seed)
    return record(Block(32, 2), torch.randn(2, 16, 32, requires_grad=True))


def test_equal_bytes_pass() -> None:
    taped = block()
    try_out(Replayed(taped, taped.plan()))  # type: ignore[arg-type]


def test_one_wrong_bit_anywhere_is_found_and_its_step_is_named() -> None:
    taped = block()
    plan = taped.plan()
    for position, storage in enumerate(plan.wanted):

        def flip(at: int, made: torch.Tensor, position: int = position) -> None:
            if at == position:
                made[made.numel() // 2] ^= 1

        writer = taped.tape.contents[taped.tape.last[storage]].writer
        with pytest.raises(
            ReplayMismatch, match=f"repeating {taped.tape.steps[writer].name} gave something else"
        ) as caught:
            try_out(Replayed(taped, plan, flip))  # type: ignore[arg-type]
        assert caught.value.step == writer


def test_of_several_wrong_results_the_earliest_step_is_named() -> None:
    taped = block()
    plan = taped.plan()
    with pytest.raises(ReplayMismatch) as caught:
        try_out(Replayed(taped, plan, lambda position, made: made.bitwise_not_()))  # type: ignore[arg-type]
    writers = [taped.tape.contents[taped.tape.last[storage]].writer for storage in plan.wanted]
    assert caught.value.step == min(writers)


def test_gaps_between_the_elements_that_autograd_saved_do_not_count() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x.cos()], -1).exp()[..., 4:].tanh().mul(2)[..., :8].sin()

    taped = record(layer, torch.randn(2, 16, 32, requires_grad=True))
    plan = taped.plan()
    storage = taped.step("aten.mul").out
    number = taped.tape.contents[storage.content].storage
    position = plan.wanted.index(number)
    width = taped.tape.geometry(storage.value)[2][-1] * 4

    def beyond(at: int, made: torch.Tensor) -> None:
        if at == position:
            made.view(-1, width)[:, 8 * 4 :] += 1

    def within(at: int, made: torch.Tensor) -> None:
        if at == position:
            made.view(-1, width)[:, 7 * 4] += 1

    try_out(Replayed(taped, plan, beyond))  # type: ignore[arg-type]
    with pytest.raises(ReplayMismatch):
        try_out(Replayed(taped, plan, within))  # type: ignore[arg-type]


def test_storages_that_died_meanwhile_are_not_compared() -> None:
    taped = block()
    replayed = Replayed(taped, taped.plan(), lambda position, made: made.bitwise_not_())
    for hold in replayed.holds:
        hold.saved.source = None
    try_out(replayed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "step", "reason"),
    [
        (ReplayFailed(3, "TypeError: no"), 3, r"it cannot run again \(TypeError: no\)"),
        (ModifiedAfterSave("changed in place"), None, "changed in place"),
    ],
)
def test_a_replay_that_fails_is_unlike(error: Exception, step: int | None, reason: str) -> None:
    class Fails:
        plan, wanted = types.SimpleNamespace(wanted=()), ()

        def run(self, take: Any) -> None:
            raise error

    with pytest.raises(ReplayMismatch, match=reason) as caught:
        try_out(Fails())  # type: ignore[arg-type]
    assert caught.value.step == step


def test_a_replay_without_memory_says_so() -> None:
    class Fails:
        plan, wanted = types.SimpleNamespace(wanted=()), ()

        def run(self, take: Any) -> None:
            raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        try_out(Fails())  # type: ignore[arg-type]


def test_a_function_that_differs_in_its_second_run_is_found() -> None:
    @memo.recomputable
    def fickle(x: torch.Tensor) -> torch.Tensor:
        return x.detach() * (1.0 if torch.is_grad_enabled() else 2.0)

    taped = record(lambda x: x * fickle(x.cos()).exp(), torch.randn(2, 16, 32, requires_grad=True))
    with pytest.raises(ReplayMismatch):
        try_out(Replayed(taped, taped.plan()))  # type: ignore[arg-type]
