"""A manager as its user holds it: around compiled models, reused, refused, closed, full."""

from __future__ import annotations

import gc
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import Stack, assert_equal, gradients, ids, lives, plain, stack, train
from torch import nn
from torch._dynamo.utils import counters

import memo
from memo.errors import MemoError, NoRepeatedLayers, SwapError
from memo.swap import hook_forward
from memo.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize(("budget", "ahead"), [(None, 1), ("1KiB", 1), ("1MiB", 2), ("1GiB", 6)])
def test_prefetch_depth_is_bounded_by_bytes(
    offload: Callable[..., memo.Manager], budget: str | None, ahead: int
) -> None:
    """One layer of 16 units is 196,608 bytes and some; a budget of zero layers still allows the one that overlaps."""
    model = stack(layers=9)
    manager = offload(model, min_bytes=4096)
    engine = manager._engine
    engine.reload_ahead(None if budget is None else parse_bytes(budget))
    deepest = 0
    reach = engine._reload.reach

    def watch(group: Any) -> None:
        nonlocal deepest
        reach(group)
        waiting = {saved.group.index for saved in lives(manager) if saved.state.value in ("returning", "back")}
        deepest = max(deepest, len(waiting - {group.index}))

    engine._reload.reach = watch  # type: ignore[method-assign]
    got = train(model, lambda step: model(ids(step)), manager, steps=2)
    assert_equal(got, plain(lambda: stack(layers=9), steps=2))
    if budget == "1MiB":
        assert deepest >= ahead
        assert deepest * 16 * 2 * 48 * 32 * 4 <= (1 << 20) + 2 * 16 * 2 * 48 * 32 * 4
    elif budget == "1GiB":
        assert deepest >= ahead
    else:
        assert deepest == ahead


@pytest.mark.covering(1)
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_layers(offload: Callable[..., memo.Manager], backend: str, fullgraph: bool) -> None:
    def make() -> Stack:
        model = stack()
        for layer in model.layers:
            layer.compile(backend=backend, fullgraph=fullgraph)
        return model

    model = make()
    manager = offload(model)
    got = train(model, lambda step: model(ids(step)), manager)
    torch._dynamo.reset()
    assert_equal(got, plain(make))
    assert manager.stats.bytes_disk > 0


def test_compiled_layers_are_left_as_they_were_whoever_leaves_first(offload: Callable[..., memo.Manager]) -> None:
    model = stack()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    compiled = [layer._compiled_call_impl for layer in model.layers]
    with offload(model):
        assert [layer._compiled_call_impl for layer in model.layers] != compiled
    assert [layer._compiled_call_impl for layer in model.layers] == compiled
    told: list[str] = []
    first, second = (
        hook_forward(model.layers[0], lambda *_, name=name: told.append(name), lambda *_: None) for name in "12"
    )
    for hook in (first, second):
        hook.install()
    for hook in (first, second):
        hook.remove()
    model(ids())
    assert not told, "nobody is told of a forward outside"


def test_device_memory_holds_two_layers_and_the_last(offload: Callable[..., memo.Manager]) -> None:
    model = stack(layers=12)
    manager = offload(model)
    train(model, lambda step: model(ids(step)), manager, steps=1)
    moved = manager.stats.bytes_disk + manager.stats.bytes_forwarded
    assert manager.stats.peak_device_bytes <= 0.25 * moved


def test_the_last_layer_is_not_moved_when_backward_follows_at_once(offload: Callable[..., memo.Manager]) -> None:
    model = stack(layers=4)
    manager = offload(model)
    train(model, lambda step: model(ids(step)), manager, steps=1)
    b, s, h = 2, 48, 32
    statistics = 2 * 2 * b * s * 4  # mean and rstd of two norms
    moved = manager.stats.bytes_disk / 3
    assert 16 * b * s * h * 4 <= moved <= 16 * b * s * h * 4 + statistics + 2 * b * s * 4


def test_backward_works_after_the_manager_itself_is_gone(tmp_path: Path) -> None:
    model, reference = stack(), stack()
    with memo.offload(model, alpha=1.0, disk=tmp_path, min_bytes=512):
        loss = model(ids())
    gc.collect()
    descriptors = set(os.listdir("/proc/self/fd"))
    loss.backward()
    reference(ids()).backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(reference), strict=True))
    del loss
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) < descriptors, "the scratch file is closed with the last graph"


def test_a_model_compiled_as_a_whole_is_one_graph_and_the_report_says_why_nothing_is_managed(
    offload: Callable[..., memo.Manager],
) -> None:
    model, reference = stack(), stack()
    compiled, plain_compiled = torch.compile(model, backend="aot_eager"), torch.compile(reference, backend="aot_eager")
    manager = offload(model, alpha=0.25)
    torch._dynamo.reset()
    counters.clear()
    with pytest.warns(RuntimeWarning, match=r"layers.0 and \d more ran without hooks.*compiled as a whole"):
        got = train(model, lambda step: compiled(ids(step)), manager)
    assert counters["graph_break"] == {}
    assert counters["stats"]["unique_graphs"] == 1
    assert "not managed: layers.0 and" in str(manager.report())
    torch._dynamo.reset()
    assert_equal(got, train(reference, lambda step: plain_compiled(ids(step))))


def test_nesting_and_reuse_of_one_manager(offload: Callable[..., memo.Manager]) -> None:
    model = stack()
    manager = offload(model)
    with manager:
        with manager:
            loss = model(ids())
        loss = loss + model(ids(1))
    loss.backward()
    reference = stack()
    (reference(ids()) + reference(ids(1))).backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(reference), strict=True))


@pytest.mark.parametrize("alpha", [1.0, 0.25])
def test_another_thread_may_run_the_model_and_may_not_enter(offload: Callable[..., memo.Manager], alpha: float) -> None:
    """In the middle of a layer's forward: of what the other thread saves autograd tells nobody."""
    model, reference = stack(), stack()
    manager = offload(model, alpha=alpha)
    beside: list[list[torch.Tensor]] = []

    def run_beside() -> None:
        with pytest.raises(MemoError, match="another thread"), manager:
            pass
        beside.append(list(torch.autograd.grad(model(ids(7)), list(model.parameters()))))

    def start(module: nn.Module, args: tuple[Any, ...]) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=run_beside)
            thread.start()
            thread.join()

    first = model.layers[0].register_forward_pre_hook(start)
    assert_equal(
        train(model, lambda step: model(ids(step)), manager), train(reference, lambda step: reference(ids(step)))
    )
    first.remove()
    assert len(beside) == 3
    assert manager._recompute_policy.refused == {}
    fresh = stack()
    want = torch.autograd.grad(fresh(ids(7)), list(fresh.parameters()))
    assert all(map(torch.equal, beside[0], want))


def test_a_context_that_could_not_be_entered_is_entered_next_time(
    offload: Callable[..., memo.Manager], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses() -> None:
        raise MemoryError

    model = stack()
    manager = offload(model)
    with monkeypatch.context() as patch:
        patch.setattr(manager._engine, "begin_forwards", refuses)
        with pytest.raises(MemoryError), manager:
            raise AssertionError("not entered")
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain())
    assert manager.stats.bytes_disk > 0


def test_hooks_are_off_the_model_outside_the_context(offload: Callable[..., memo.Manager]) -> None:
    model = stack()
    with offload(model):
        pass
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)


def test_a_model_without_repeated_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoRepeatedLayers, match="layers="):
        memo.offload(nn.Linear(3, 3), disk=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "8 gigs"}, "8 gigs"),
        ({"host": -1}, "negative"),
        ({"host": 0, "disk": []}, "nowhere"),
        ({"on_full": "explode"}, "explode"),
        ({"alpha": 2.0}, "alpha"),
        ({"disk": "/nonexistent/place"}, "/nonexistent/place"),
        ({"layers": [nn.Linear(1, 1)]}, "not a part"),
    ],
)
def test_bad_arguments_get_one_clear_line(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(MemoError, match=message) as caught:
        memo.offload(stack(), **{"disk": tmp_path, **options})
    assert "\n" not in str(caught.value)


def test_backward_after_close_raises(offload: Callable[..., memo.Manager]) -> None:
    model = stack()
    manager = offload(model)
    with manager:
        loss = model(ids())
    manager.close()
    with pytest.raises(SwapError, match="closed"):
        loss.backward()
    del loss
    with pytest.raises(MemoError, match="closed"), manager:
        pass


@pytest.mark.parametrize("full", ["spill", "raise"])
def test_a_full_host_tier_spills_or_raises_and_the_next_step_works(
    offload: Callable[..., memo.Manager], full: str
) -> None:
    model = stack()
    manager = offload(model, host="100KiB", on_full=full)
    if full == "raise":
        with pytest.raises(MemoError, match=r"host .* used of"), manager:
            model(ids())
        gc.collect()
        with manager, torch.no_grad():
            model(ids())
        return
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain())
    assert manager.stats.spilled > 0
    assert manager.report().tiers[1].peak_bytes <= 100 << 10
