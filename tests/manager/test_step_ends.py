"""Steps are told apart without the program's help: accumulated microbatches are one, an evaluation is none."""

from __future__ import annotations

import contextlib
import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Stack, assert_equal, ids, plain, stack, train
from torch.optim.optimizer import _global_optimizer_post_hooks

import memo
from memo.manager.step_ends import MOST_FORWARDS, WARNED_AFTER, StepEnds

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "adamw": lambda parameters: torch.optim.AdamW(parameters),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),  # counts no version of what it changes
}


def microbatch(model: Stack, step: int = 0) -> None:
    model(ids(step)).backward()


def ends(model: Stack, say: StepEnds, microbatches: int, steps: int, update: Callable[[], None]) -> list[int]:
    """Numbers of the forwards that find the step before ended."""
    found = []
    for number in range(steps * microbatches + 1):
        if say.has_ended(has_trained=number > 0):
            found.append(number)
        microbatch(model)
        if number % microbatches == microbatches - 1:
            update()
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("to_none", [True, False])
def test_accumulated_microbatches_are_one_step(name: str, *, to_none: bool) -> None:
    model = stack()
    optimizer = OPTIMIZERS[name](model.parameters())

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)

    assert ends(model, StepEnds(model), 3, 2, update) == [3, 6]


def test_changes_by_hand_and_cleared_gradients_end_a_step() -> None:
    model = stack()

    def by_hand() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]

    say = StepEnds(model)
    assert ends(model, say, 2, 2, by_hand) == [2, 4]
    model.zero_grad()
    assert ends(model, say, 2, 2, model.zero_grad) == [2, 4]


def test_where_nothing_shows_an_end_there_is_one_all_the_same() -> None:
    model = stack()
    found = ends(model, StepEnds(model), 1, MOST_FORWARDS + 1, lambda: None)
    assert found == [MOST_FORWARDS + 1]

    def unseen() -> None:  # as where a library writes through `.data` and takes the gradients away in backward
        for parameter in model.parameters():
            parameter.data -= 0.1
            parameter.grad = None

    model.zero_grad()
    assert ends(model, StepEnds(model), 1, 3, unseen) == [1, 2, 3]


def test_a_loop_without_ends_is_told_at_its_own_line() -> None:
    model = stack()
    manager = memo.offload(model, host="8MiB", min_bytes=512).attach()
    assert "plan: none yet (no step has ended yet; optimizer.step(), " in str(manager.report())

    def loop() -> None:
        for _ in range(3 * WARNED_AFTER):
            microbatch(model)

    with pytest.warns(
        RuntimeWarning, match=r"nothing showed where a training step ends .* or manager\.step_done\(\)"
    ) as told:
        loop()
    assert [(one.filename, one.category) for one in told] == [(__file__, RuntimeWarning)]
    manager.close()


def test_accumulation_is_not_taken_for_a_loop_without_ends() -> None:
    model = stack()
    say = StepEnds(model)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    ends(model, say, WARNED_AFTER, 2, optimizer.step)  # never sets gradients to zero


def test_nothing_is_left_behind() -> None:
    before = len(_global_optimizer_post_hooks)
    model = stack()
    manager = memo.offload(model, alpha=1.0, host="8MiB")
    assert len(_global_optimizer_post_hooks) == before + 2  # step ends, and optimizers whose state is counted
    manager.close()
    assert len(_global_optimizer_post_hooks) == before
    known = weakref.ref(memo.offload(model, alpha=1.0, host="8MiB").attach())
    del model, manager
    gc.collect()
    assert known() is None
    assert len(_global_optimizer_post_hooks) == before


@pytest.mark.parametrize("how", ["attach", "one with", "many with"])
def test_planning_leaves_warm_up(how: str) -> None:
    model = stack()
    manager = memo.offload(model, host="8MiB", min_bytes=512)
    if how == "attach":
        manager.attach()
    with manager if how == "one with" else contextlib.nullcontext():
        got = train(model, lambda step: model(ids(step)), manager if how == "many with" else None, steps=6)
    assert_equal(got, plain(steps=6))
    assert manager.plan is not None
    assert manager.step == 5  # the last one has not been seen to end
    manager.close()


def accumulate(model: Stack, optimizer: torch.optim.Optimizer, steps: int, manager: Any = None) -> torch.Tensor:
    """Three microbatches a step, and an evaluation after each step."""
    for step in range(steps):
        for micro in range(3):
            with manager or contextlib.nullcontext():
                loss = model(ids(3 * step + micro))
            (loss / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), manager or contextlib.nullcontext():
            model(ids(99))
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("how", ["attach", "one with", "many with"])
def test_the_trace_has_one_step_for_three_microbatches_and_none_for_an_evaluation(how: str, tmp_path: Path) -> None:
    model, reference = stack(), stack()
    manager = memo.offload(model, alpha=0.0, host="8MiB", min_bytes=512, trace=tmp_path / "t.jsonl")
    if how == "attach":
        manager.attach()
    with manager if how == "one with" else contextlib.nullcontext():
        got = accumulate(
            model, torch.optim.SGD(model.parameters(), lr=0.05), 3, manager if how == "many with" else None
        )
    assert torch.equal(got, accumulate(reference, torch.optim.SGD(reference.parameters(), lr=0.05), 3))
    manager.close()
    events = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    begun = [event["step"] for event in events if event.get("phase") == "begin" and event["k"] == "step"]
    # An evaluation through `with` begins the next step, in which it lies; the last one begins a step that has no training.
    assert begun == ([0, 1, 2] if how != "many with" else [0, 1, 2, 3])


def test_a_program_that_tells_its_steps_tells_all_of_them() -> None:
    model = stack()
    manager = memo.offload(model, alpha=1.0, host="8MiB", min_bytes=512).attach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    manager.step = 7
    for step in range(3):
        microbatch(model, step)
        optimizer.step()
        if step == 1:
            manager.step_done()
    assert manager.step == 9  # the first was found, the second told
    microbatch(model)
    assert manager.step == 9
    manager.close()
