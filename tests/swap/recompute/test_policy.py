"""Plans of one manager's layers: found by the whole log, tried out once, bounded in number; calls that are like no other
are right all the same."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import Block, Stack, assert_equal, gradients, ids, stack, train
from strange_layers import Layer
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

import memo
from memo.lru import LRU
from memo.swap import Level, Mix, comparing_nbytes, setting_of
from memo.swap.recompute import plans, trials
from memo.swap.recompute.tape.plan import Plan
from memo.swap.recompute.tape.recorder import Recorder
from memo.swap.recompute.trial import ReplayMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

LAYERS = 4


def offload(model: nn.Module, tmp_path: Path, **options: Any) -> memo.Manager:
    return memo.offload(model, **{"disk": tmp_path, "min_bytes": 64, "alpha": 0.0, **options})


def refused(manager: memo.Manager) -> dict[str, str]:
    use = manager.report().recompute
    assert use is not None
    return use.refused


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers that were tried out, in order."""
    names: list[str] = []
    try_out = trials.try_out

    def noted(replay: Any, **options: Any) -> None:
        names.append(replay.name)
        try_out(replay, **options)

    monkeypatch.setattr(trials, "try_out", noted)
    return names


def over(lengths: Sequence[int], module: Stack) -> Callable[[int], torch.Tensor]:
    return lambda step: module(ids(step, batch=1 + step % 3, seq=lengths[step]))


def equal_over(
    lengths: Sequence[int], tmp_path: Path, *, make: Callable[[], nn.Module] | None = None, **options: Any
) -> memo.Manager:
    """Trains over these lengths, with memo and without it; returns the manager, open."""
    model, reference = stack(layers=LAYERS, make=make), stack(layers=LAYERS, make=make)
    manager = offload(model, tmp_path, **options)
    got = train(model, over(lengths, model), manager, steps=len(lengths))
    assert_equal(got, train(reference, over(lengths, reference), steps=len(lengths)))
    assert manager.stats.bytes_recomputed > 0
    gc.collect()
    assert manager.stats.live_entries == 0
    return manager


@pytest.mark.parametrize("options", [{}, {"alpha": Level.SAVE_MATMULS}, {"levels": {0: Level.SAVE_INPUT}}], ids=str)
def test_each_layer_is_tried_once_and_not_again_at_another_length(
    options: dict[str, Any], tried: list[str], tmp_path: Path
) -> None:
    manager = equal_over([48, 48, 31, 64, 48, 57], tmp_path, **options)
    assert set(tried) == {f"layers.{number}" for number in range(LAYERS)}
    first = len(tried)
    model = stack(layers=LAYERS)
    manager.close()
    again = offload(model, tmp_path, **options)
    train(model, lambda step: model(ids(step, batch=2, seq=48)), again, steps=4)
    assert len(tried) - first <= 2 * LAYERS, "the first call keeps what it has, the next what it was recorded for"
    settled = len(tried)
    train(model, lambda step: model(ids(step, batch=2, seq=48)), again, steps=4)
    assert len(tried) == settled
    again.close()


def test_a_layer_of_another_width_has_a_plan_of_its_own(tried: list[str], tmp_path: Path) -> None:
    """Also where nothing that is saved tells of the width: the bottleneck's weights are frozen."""
    made = iter([8, 8, 16, 8] * 2)

    class Adapted(Block):
        def __init__(self) -> None:
            super().__init__(32, 2)
            width = next(made)
            self.adapter = nn.Sequential(nn.Linear(32, width), nn.Linear(width, 32)).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.adapter(x))

    equal_over([48, 31], tmp_path, make=Adapted).close()
    assert set(tried) == {f"layers.{number}" for number in range(LAYERS)}


def test_a_trial_that_fails_speaks_for_its_layer_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_out = trials.try_out

    def fails(replay: Any, **options: Any) -> None:
        if replay.name == "layers.0":
            raise ReplayMismatch(None, "it is fickle")
        try_out(replay, **options)

    monkeypatch.setattr(trials, "try_out", fails)
    with pytest.warns(RuntimeWarning, match="layers.0 moves whole tensors: it is fickle"):
        manager = equal_over([48, 48], tmp_path)
    assert set(refused(manager)) == {"layers.0"}
    manager.close()


def test_a_step_that_gives_something_else_is_kept_and_the_rest_is_still_divided(tmp_path: Path) -> None:
    @memo.recomputable
    def fickle(x: torch.Tensor) -> torch.Tensor:
        return x.detach() * (1.0 if torch.is_grad_enabled() else 2.0)

    class Fickle(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x).sin() * fickle(x)
            return x + self.down(F.gelu(self.up(y))) + self.gate  # type: ignore[no-any-return]

    manager = equal_over([48] * 4, tmp_path, make=Fickle)
    assert refused(manager) == {}
    manager.close()


def test_levels_that_a_layer_never_had_are_tried(tried: list[str], tmp_path: Path) -> None:
    model, reference = stack(layers=LAYERS), stack(layers=LAYERS)
    manager = offload(model, tmp_path, alpha=Level.SAVE_MATMULS)
    got = train(model, over([48] * 3, model), manager)
    assert {*tried} == {f"layers.{number}" for number in range(LAYERS)}
    tried.clear()
    manager.choose_levels(dict.fromkeys(range(LAYERS), Level.SAVE_ATTENTION))
    assert_equal(got, train(reference, over([48] * 3, reference)))
    assert_equal(train(model, over([48] * 3, model), manager), train(reference, over([48] * 3, reference)))
    assert {*tried} == {f"layers.{number}" for number in range(LAYERS)}
    manager.close()


@pytest.mark.parametrize(
    ("setting", "is_covered"),
    [(Level.SAVE_MATMULS, True), (Level.SAVE_INPUT, False)],
    ids=["of steps that have been tried", "of attention too"],
)
def test_a_trial_that_has_no_room_is_left_out_if_others_have_shown_all_its_steps(
    setting: Level, is_covered: bool, tried: list[str], tmp_path: Path
) -> None:
    def runs(room: Callable[[], int] | None) -> tuple[list[str], list[Plan]]:
        tried.clear()
        model, reference = stack(layers=2), stack(layers=2)
        manager = offload(model, tmp_path)
        tapes = manager._recompute_policy
        assert tapes is not None
        got = train(model, lambda step: model(ids(step)), manager, steps=1)
        assert tried == ["layers.0", "layers.1"]
        if room is not None:
            tapes.keep_within(room)
        tapes.choose({layer.name: setting_of(setting) for layer in manager.layers})
        optimized = [parameter.detach().clone() for parameter in model.parameters()]
        got += train(model, lambda step: model(ids(step)), manager, steps=1)
        assert_equal(got[:1], train(reference, lambda step: reference(ids(step)), steps=1))
        assert all(map(torch.equal, optimized, reference.parameters()))
        assert_equal(got[1:], train(reference, lambda step: reference(ids(step)), steps=1))
        assert manager.stats.bytes_recomputed > 0
        found = list(tapes._plans._latest.values())
        manager.close()
        return tried[2:], [plan for plan in found if isinstance(plan, Plan)]

    again = ["layers.0", "layers.1"]
    named, plans_made = runs(None)
    assert named == again
    assert len(plans_made) == 2
    (plan, _) = plans_made
    need = plan.trial_bytes + comparing_nbytes(max(plan.tape.storages[storage][1] for storage in plan.wanted))
    assert runs(lambda: need)[0] == again
    assert runs(lambda: need - 1)[0] == ([] if is_covered else again)


class Widens(nn.Module):
    """Autograd saves what is twice as wide as the product that it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)).double()).float())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "setting",
    [Level.SAVE_MATMULS, Level.SAVE_INPUT, Mix(points={"p1": 1.0})],
    ids=["matmuls", "input", "a point of the curve"],
)
def test_the_first_call_at_a_new_setting_holds_what_its_plan_keeps_and_no_more(
    setting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []
    begin = Recorder.__init__

    def noted(self: Recorder, *args: Any, **options: Any) -> None:
        held.append(options["holds"])
        begin(self, *args, **options)

    monkeypatch.setattr(Recorder, "__init__", noted)
    model, reference = (stack(layers=2, make=Widens) for _ in range(2))
    manager = offload(model, tmp_path)
    tapes = manager._recompute_policy
    assert tapes is not None
    got = train(model, lambda step: model(ids(step)), manager, steps=1)
    assert held == [None, None], "nothing is known"
    tapes.choose({layer.name: setting for layer in manager.layers})
    held.clear()
    kept = []
    for _ in range(2):
        got += train(model, lambda step: model(ids(step)), manager, steps=1)
        found = list(tapes._plans._latest.values())
        kept.append([plan.kept for plan in found if isinstance(plan, Plan)])
    assert held[:2] == held[2:] == [plan.holds for plan in found if isinstance(plan, Plan)]
    assert len(kept[0]) == 2
    assert kept[0] == kept[1], "the first call has kept all that later ones keep"
    assert any(held) == (setting is not Level.SAVE_INPUT), "results that autograd does not save"
    for step in got:
        assert_equal([step], train(reference, lambda step: reference(ids(step)), steps=1))
    manager.close()


def test_what_is_remembered_of_ever_new_lengths_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was forgotten is planned again when it comes back."""
    for bound in ("MOST_PLANS", "MOST_KINDS"):
        monkeypatch.setattr(plans, bound, 4)
    manager = equal_over([*range(30, 42), 41, 30], tmp_path)
    remembered = [value for value in vars(manager._recompute_policy._plans).values() if isinstance(value, LRU)]
    assert len(remembered) >= 4
    assert all(len(known) <= 4 for known in remembered)
    manager.close()


@pytest.mark.parametrize("short", [1, 5])
def test_a_trial_that_finds_no_memory_is_made_again_at_a_later_call_but_not_for_ever(
    short: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0
    try_out = trials.try_out

    def out_of_memory(replay: Any, **options: Any) -> None:
        nonlocal tries
        if replay.name == "layers.0":
            tries += 1
            if tries <= short:
                raise torch.OutOfMemoryError("no memory")
        try_out(replay, **options)

    monkeypatch.setattr(trials, "try_out", out_of_memory)
    model = stack(layers=LAYERS)
    manager = offload(model, tmp_path)
    alone = []
    for _ in range(6):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*no device memory to try")
            train(model, over([48], model), manager, steps=1)
        alone.append("layers.0" in refused(manager))
    assert alone[0]
    assert alone[-1] == (short > 3)
    assert tries <= 4
    manager.close()


def test_what_was_used_last_stays() -> None:
    recent: LRU[str, int] = LRU(2)
    recent["a"], recent["b"] = 1, 2
    assert recent.get("a") == 1
    recent["c"] = 3
    assert (recent.get("a"), recent.get("b"), recent.get("c"), len(recent)) == (1, None, 3, 2)


# Calls that take other paths, end early, or hold others.


class Branches(Layer):
    """Another path by the numbers of each call, and rows whose count no shape tells."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if y[0, 0, 0] > 0:
            y = y.sin()
        rows = y.flatten(0, 1)[(x > 0.3).flatten(0, 1).any(-1)]
        return x + self.down(F.gelu(self.up(y))) + self.gate * rows.tanh().sum(0)


def test_calls_that_take_other_paths_are_right(tmp_path: Path) -> None:
    equal_over([48] * 8, tmp_path, make=Branches).close()


def test_a_layer_called_several_times_in_a_forward(tmp_path: Path) -> None:
    """ALBERT's; each call has its own tensors and its own replay."""

    class Again(Stack):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for _ in range(3):
                for layer in self.layers:
                    x = layer(x)
            return x.square().mean()

    def make() -> Again:
        torch.manual_seed(0)
        return Again(layers=2)

    model, reference = make(), make()
    manager = offload(model, tmp_path)

    def steps(module: nn.Module, manager: Any) -> list[torch.Tensor | None]:
        for step in range(3):
            with manager:
                loss = module(ids(step))
            loss.backward()
        return [grad for grad in gradients(module) if grad is not None]

    got = steps(model, manager)
    assert all(map(torch.equal, got, steps(reference, contextlib.nullcontext())))  # type: ignore[arg-type]
    assert manager.stats.bytes_recomputed > 0
    manager.close()


class Raises(Layer):
    raises: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x).sin()
        if Raises.raises is not None:
            raise Raises.raises
        return x + self.down(F.gelu(self.up(y))) + self.gate


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raises_is_followed_by_normal_steps(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = stack(make=Raises), stack(make=Raises)
    manager = offload(model, tmp_path)
    train(model, lambda step: model(ids(step)), manager, steps=1)
    train(reference, lambda step: reference(ids(step)), steps=1)
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(Raises, "raises", error)
            with contextlib.suppress(error), manager:
                model(ids())
    assert _get_current_dispatch_mode() is None
    got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, train(reference, lambda step: reference(ids(step))))
    gc.collect()
    assert manager.stats.live_entries == 0
    manager.close()


class Catches(Layer):
    """Goes on in another way where one way raises."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        try:
            y = y.sin().view(7, 7)
        except RuntimeError:
            y = y.cos().sin()
        return x + self.down(F.gelu(self.up(y))) + self.gate


def test_a_layer_that_catches_its_errors(tmp_path: Path) -> None:
    equal_over([48] * 3, tmp_path, make=Catches).close()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_within_a_layer(reentrant: bool, tmp_path: Path) -> None:
    class Checkpoints(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(lambda x: F.gelu(self.up(self.norm(x))).sin(), x, use_reentrant=reentrant)
            return x + self.down(y.tanh()) + self.gate  # type: ignore[union-attr]

    equal_over([48] * 3, tmp_path, make=Checkpoints).close()


def test_layers_within_layers(tmp_path: Path) -> None:
    """Named by hand; the outer one moves whole, and says so once."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.down = Block(32, 2), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.inner(x).tanh())

    model, reference = stack(make=Outer), stack(make=Outer)
    layers = [module for layer in model.layers for module in (layer, layer.inner)]
    manager = offload(model, tmp_path, layers=layers)
    with pytest.warns(RuntimeWarning, match="contains another managed layer") as caught:
        got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, train(reference, lambda step: reference(ids(step))))
    assert len(caught) == 1
    manager.close()


@pytest.mark.parametrize("alpha", [0.0, (0.25, 0.5, 0.25), Level.SAVE_INPUT], ids=str)
def test_retained_graphs_and_autocast(alpha: Any, tmp_path: Path) -> None:
    def steps(module: nn.Module, manager: Any) -> list[Any]:
        done = []
        for step in range(3):
            with manager, torch.autocast("cpu", torch.bfloat16):
                loss = module(ids(step)) + module(ids(step + 1))
            loss.backward(retain_graph=True)
            loss.backward()
            done += [loss.detach(), *gradients(module)]
        return done

    model, reference = stack(), stack()
    manager = offload(model, tmp_path, alpha=alpha)
    got = steps(model, manager)
    assert all(map(torch.equal, got, steps(reference, contextlib.nullcontext())))
    assert manager.stats.bytes_recomputed > 0
    manager.close()


@pytest.mark.parametrize("alpha", [0.0, Level.SAVE_MATMULS, Level.SAVE_INPUT], ids=str)
def test_a_gradient_of_gradients(alpha: Any, tmp_path: Path) -> None:
    class Smooth(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.tanh(self.up(x)).exp()) + self.gate

    def second_order(manager: Any, model: Stack) -> list[torch.Tensor]:
        parameters = [p for layer in model.layers for p in layer.parameters() if p is not layer.norm.weight]  # type: ignore[union-attr]
        with manager:
            loss = model(ids())
        first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        total = sum((g * g).sum() for g in first if g is not None)
        return [g for g in torch.autograd.grad(total, parameters, allow_unused=True) if g is not None]  # type: ignore[arg-type]

    model = stack(make=Smooth)
    manager = offload(model, tmp_path, alpha=alpha)
    train(model, lambda step: model(ids(step)), manager, steps=2)
    reference = stack(make=Smooth)
    train(reference, lambda step: reference(ids(step)), steps=2)
    got = second_order(manager, model)
    assert all(map(torch.equal, got, second_order(contextlib.nullcontext(), reference)))
    assert manager.stats.bytes_recomputed > 0
    manager.close()


# What stays behind.


def test_plans_hold_no_tensor(tmp_path: Path) -> None:
    """Neither the model nor anything that a call saved; constants of the program are kept by each call itself."""
    manager = offload(model := stack(layers=LAYERS), tmp_path)
    for step in range(3):
        with manager:
            loss = model(ids(step))
        loss.backward()
    del loss
    gc.collect()
    plans = [plan for plan in manager._recompute_policy._plans._found._entries.values() if isinstance(plan, Plan)]
    assert len(plans) >= LAYERS
    seen: set[int] = set()

    def tensors_in(value: Any) -> list[torch.Tensor]:
        if id(value) in seen or isinstance(value, (type, str, int, float, torch.dtype)) or callable(value):
            return []
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            return [value]
        items = (
            [*value.keys(), *value.values()]
            if isinstance(value, dict)
            else value
            if isinstance(value, (tuple, list, set, frozenset))
            else [
                getattr(value, name)
                for name in (*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ()))
                if hasattr(value, name)
            ]
        )
        return [tensor for item in items for tensor in tensors_in(item)]

    for plan in plans:
        assert tensors_in(plan) == []
        assert tensors_in(list(plan.replay.__globals__.values())) == []
    weights = [weakref.ref(p) for p in model.parameters()]
    manager.close()
    del model, manager
    gc.collect()
    assert len(plans) >= LAYERS
    assert all(weight() is None for weight in weights)


def test_nothing_is_alive_after_a_step_and_no_cycle_is_left(tmp_path: Path) -> None:
    model = stack(layers=LAYERS)
    manager = offload(model, tmp_path)
    train(model, lambda step: model(ids(step)), manager)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        with manager:
            loss = model(ids())
        loss.backward()
        del loss
        assert manager.stats.live_entries == 0
        model.zero_grad()
        gc.collect()
        assert [kept for kept in gc.garbage if isinstance(kept, torch.Tensor)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    manager.close()


class SavesAView(nn.Module):
    """The last that autograd saves of its input is a view without tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.layer_norm(torch.cat([x[:, :0].sin(), x * 0.72], 1), (x.size(-1),))


@pytest.mark.parametrize("alpha", [0.5, 0.0, (0, 1, 0)])
def test_costs_are_of_the_inputs_tokens_whatever_view_of_it_is_saved(alpha: Any) -> None:
    layers = nn.ModuleList(SavesAView() for _ in range(2))
    manager = memo.offload(layers, layers=layers, alpha=alpha, host="8MiB", min_bytes=256)
    x = torch.randn(2, 48, 32, requires_grad=True)
    with manager:
        loss = layers[1](layers[0](x)).square().mean()
    loss.backward()
    assert {costs.tokens for costs in manager.levels_profile()} == {48}
    manager.close()


class _Two(nn.Module):
    """Whose recompute gives what both matrices read, the first one's from the input, the second one's from between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = self.up(self.norm(x))
        if between.requires_grad:
            between.register_hook(lambda _: self.seen())
        return self.down(F.gelu(between))

    def seen(self) -> None:
        """Called when backward has passed the second half."""


def test_a_recompute_that_has_run_gives_up_what_it_was_given(tmp_path: Path) -> None:
    model = nn.Sequential(*[_Two() for _ in range(3)])
    manager = offload(model, tmp_path, alpha=Level.SAVE_MATMULS, layers=list(model))
    x, held = torch.randn(512, 64), []
    model[0].seen = lambda: held.append(manager.stats.device_bytes)  # type: ignore[assignment, operator]
    for _ in range(3):
        with manager:
            loss = model(x.clone().requires_grad_()).sum()
        loss.backward()
    manager.close()
    assert manager.stats.bytes_recomputed > 0
    assert held[-1] < 2.5 * x.nbytes, "the input and its norm, without what is between the matrices"
