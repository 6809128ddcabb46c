"""Explanations say what was done: their bytes are the engine's, their steps those that run, and each fate has its reason."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from small_models import Block, ids, stack
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import memo
from memo.errors import UsageError
from memo.manager import Manager
from memo.swap import LayerExplanation, Level
from memo.swap.recompute import trials
from memo.swap.recompute.explanation import Fate, Row
from memo.swap.recompute.tape.replay import Replay
from memo.swap.recompute.tape.settings import Settings
from memo.swap.recompute.trial import ReplayMismatch

LEVELS = {"matmuls": Level.SAVE_MATMULS, "attention": Level.SAVE_ATTENTION, "input": Level.SAVE_INPUT}


class Calls(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


class Dropping(Block):
    """A block with dropout, which keeps masks of one bit an element."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(x, 0.25))


@contextmanager
def managed(model: nn.Module, **choice: Any) -> Iterator[Manager]:
    """A manager whose two forwards have run, and their backwards."""
    manager = memo.offload(model, host="64MiB", min_bytes=1, **choice)
    for step in range(2):
        with manager:
            loss = model(ids(step))
        loss.backward()
    yield manager
    manager.close()


def explained(model: nn.Module, layer: int | str = 0, **choice: Any) -> LayerExplanation:
    with managed(model, **choice) as manager:
        return manager.explain(layer)


def steps(explanation: LayerExplanation, operator: str) -> list[Row]:
    return [row for row in explanation.rows if row.operator == operator]


@pytest.mark.parametrize("make", [Block, Dropping])
@pytest.mark.parametrize("level", LEVELS)
def test_kept_bytes_are_those_that_the_engine_moves(level: str, make: type[Block]) -> None:
    model = stack(layers=2, make=lambda: make(32, 2))
    with managed(model, levels=dict.fromkeys(range(2), LEVELS[level])) as manager:
        before = manager.stats.bytes_host
        with manager:
            loss = model(ids())
        loss.backward()
        found = manager.explain(0)
        moved = manager.stats.bytes_host - before
    assert moved == found.used.kept_nbytes
    assert found.used.kept_nbytes == sum(row.kept_nbytes for row in found.rows)
    assert found.used.name == level


def test_steps_that_are_replayed_are_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "in_force", lambda settings: nullcontext())  # runs in the mode of backward
    model = stack()  # backward of its last layer finds all in place

    def backward(**choice: Any) -> collections.Counter[str]:
        with managed(model, **choice) as manager:
            with manager:
                loss = model(ids())
            with Calls() as calls:
                loss.backward()
            for found in map(manager.explain, range(2) if choice["alpha"] < 1 else ()):
                expected.update(row.operator for row in found.rows if row.fate is Fate.REPLAYED)
        return calls.count

    expected: collections.Counter[str] = collections.Counter()
    plain, replayed = backward(alpha=1.0), backward(alpha=0.0)
    assert (expected["aten.gelu"], expected["aten.native_layer_norm"], expected["aten.addmm"]) == (2, 4, 6)
    for operator, count in expected.items():
        assert replayed[operator] - plain[operator] == count, operator


def test_each_fate_has_its_reason() -> None:
    found = explained(stack(make=lambda: Dropping(32, 2)), alpha=0.0)
    (attention,) = [row for row in found.rows if "scaled_dot_product" in row.operator]
    assert (attention.fate, attention.why, attention.is_saved) == (Fate.MOVED, "attention is kept", True)
    (mask,) = steps(found, "aten.bernoulli_")
    assert (mask.fate, mask.why) == (Fate.MOVED, "it draws random numbers")
    assert mask.kept_nbytes * 32 == mask.nbytes
    (gelu,) = steps(found, "aten.gelu")
    assert (gelu.fate, gelu.why, gelu.kept_nbytes) == (Fate.REPLAYED, "backward needs it", 0)
    assert not steps(found, "hidden states")  # autograd saves what dropout leaves of them
    down = steps(found, "aten.addmm")[-1]
    assert (down.fate, down.why) == (Fate.UNUSED, "")
    assert all(row.fate is Fate.VIEW and row.replay_us is None for row in steps(found, "aten.t"))
    assert {row.fate for row in steps(found, "parameter")} == {Fate.STAYS}


def test_points_go_from_all_to_the_input() -> None:
    found = explained(stack(), alpha=0.0)
    kept = [point.kept_nbytes for point in found.points]
    assert found.points[0].name == "all"
    assert kept == sorted(kept, reverse=True)
    assert kept[0] == found.saved_nbytes
    named = {point.name: point for point in found.points}
    assert named.keys() >= LEVELS.keys() | {"p1"}
    assert (named["all"].replay_us, named["all"].replayed_steps, named["all"].held_nbytes) == (0.0, 0, 0)
    assert named["matmuls"].replay_us < named["attention"].replay_us < named["input"].replay_us
    assert [point.name for point in found.points if point.is_used] == ["attention"] == [found.used.name]
    assert sum(row.replay_us or 0.0 for row in found.rows if row.fate is Fate.REPLAYED) == pytest.approx(
        found.used.replay_us
    )


def test_text_folds_views_and_what_is_not_needed() -> None:
    found = explained(stack(), "layers.1", alpha=0.0)
    text = str(found)
    assert text.startswith("layers.1 (Block), alpha 0\nsaved: ")
    (used,) = [line for line in text.splitlines() if " <- " in line]
    assert used.startswith("attention")
    assert "views" in text
    assert "not needed" in text
    assert len(text.splitlines()) < len(found.rows) + len(found.points)
    assert max(map(len, text.splitlines())) <= 150


def test_the_last_call_is_explained() -> None:
    model = stack()
    with managed(model, alpha=0.0) as manager:
        saved = manager.explain(0).saved_nbytes
        with manager:
            model(ids(seq=24)).backward()
        assert manager.explain(0).saved_nbytes * 2 == saved


class WrittenOut(nn.Module):
    """Attention as products and a softmax, with dropout: its keys are replayed for all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        weights = F.dropout((q @ k.transpose(2, 3)).softmax(-1), 0.1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("make", [lambda: Dropping(32, 2), WrittenOut], ids=["dropout", "attention written out"])
@pytest.mark.parametrize("alpha", [0.5, (0.25, 0.25, 0.5), (0.0, 0.5, 0.5)], ids=str)
def test_kept_bytes_between_points_are_those_that_the_engine_moves(alpha: Any, make: Callable[[], nn.Module]) -> None:
    model = stack(layers=2, make=make)
    with managed(model, alpha=alpha) as manager:
        before = manager.stats.bytes_host
        with manager:
            loss = model(ids())
        loss.backward()
        found = manager.explain(0)
        moved = manager.stats.bytes_host - before  # of the first layer: the last one's copies are not made
    assert moved == found.used.kept_nbytes == sum(row.kept_nbytes for row in found.rows)
    assert found.used.replay_us == pytest.approx(
        sum(row.replay_us or 0.0 for row in found.rows if row.fate is Fate.REPLAYED), rel=1e-3
    )


def test_a_step_that_a_trial_found_wrong_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_out(replay: Replay, **options: Any) -> None:
        for number in replay.plan.steps:
            if replay.plan.tape.steps[number].name == "aten.gelu":
                raise ReplayMismatch(number, "it gave something else")

    monkeypatch.setattr(trials, "try_out", try_out)
    found = explained(stack(), alpha=0.0)
    (gelu,) = steps(found, "aten.gelu")
    assert (gelu.fate, gelu.why) == (Fate.MOVED, "repeating it gave something else")
    assert found.refused is None
    assert found.used.name == "attention"


def test_a_layer_that_moves_whole_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_out(replay: Replay, **options: Any) -> None:
        raise ReplayMismatch(None, "a parameter has gone")

    monkeypatch.setattr(trials, "try_out", try_out)
    with pytest.warns(RuntimeWarning, match="a parameter has gone"):
        found = explained(stack(), alpha=0.0)
    assert found.refused == "a parameter has gone"
    assert (found.used.name, found.used.kept_nbytes) == ("all", found.saved_nbytes)
    assert not [row for row in found.rows if row.fate is Fate.REPLAYED]
    assert "offloaded whole: a parameter has gone" in str(found)


def test_what_has_no_tape_is_one_clear_line() -> None:
    manager = memo.offload(stack(), alpha=0.0, host="64MiB")
    with pytest.raises(UsageError, match=r"layers\.0 has no tape: no forward of it has run"):
        manager.explain(0)
    with pytest.raises(UsageError, match="explain: no layer 3; there are 3"):
        manager.explain(3)
    with pytest.raises(UsageError, match=r"explain: no layer 'x'; they are 'layers\.0' to 'layers\.2'"):
        manager.explain("x")
    manager.close()
    with managed(stack(), alpha=1.0) as whole, pytest.raises(UsageError, match="all that it saves is offloaded"):
        whole.explain(0)


@pytest.mark.parametrize("name", ["addmm", "aten.addmm", "matmul"])
def test_what_the_user_keeps_is_not_repeated(name: str) -> None:
    found = explained(stack(), alpha=0.0, keep=[name])
    fates = {(row.fate, row.why) for row in steps(found, "aten.addmm") if row.is_saved}
    assert fates == {(Fate.MOVED, "kept, as chosen")}
    assert f"keep {name}" in found.setting
    assert found.used.kept_nbytes > explained(stack(), alpha=0.0).used.kept_nbytes


def test_what_the_user_repeats_is_not_kept() -> None:
    found = explained(stack(), alpha=0.0, repeat=["attention"])
    (attention,) = [row for row in found.rows if "scaled_dot_product" in row.operator]
    assert attention.fate is Fate.REPLAYED
    assert found.used.kept_nbytes == explained(stack(), levels={0: Level.SAVE_INPUT}).used.kept_nbytes


def test_layers_may_differ_in_what_is_kept() -> None:
    with managed(stack(), alpha=0.0, keep={1: ["matmul"], "layers.2": []}, repeat={1: ["attention"]}) as manager:
        first, second, third = (manager.explain(layer) for layer in range(3))
    assert first.used.kept_nbytes == third.used.kept_nbytes < second.used.kept_nbytes
    assert second.setting == "alpha 0; keep matmul; repeat attention"
    assert first.setting == "alpha 0"
