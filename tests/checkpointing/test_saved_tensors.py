"""memo.saved_tensors around any code: the same bits, what moves and what stays, and bounds of memory."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import memo
from memo.errors import HostBudgetExceeded, ModifiedAfterSave, UsageError

WIDTH, LAYERS = 64, 6
STEP_BYTES = 256 * WIDTH * 4


@pytest.fixture(autouse=True)
def small_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of about one layer of `_model`."""
    monkeypatch.setattr("memo.checkpointing.context.REGION_BYTES", 2 * STEP_BYTES)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def _trained(context: Any = None, **autocast: Any) -> list[torch.Tensor]:
    model = _model()
    for step in range(3):
        model.zero_grad()
        torch.manual_seed(step)
        x = torch.randn(256, WIDTH, requires_grad=True)
        if context is None:
            loss = model(x).square().sum()
        else:
            with context:
                loss = model(x).square().sum()
        loss.backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]


def test_gradients_are_equal_and_device_memory_is_bounded_by_regions() -> None:
    context = memo.saved_tensors(host="8MiB", min_bytes=64)
    assert all(map(torch.equal, _trained(context), _trained()))
    report = context.report()
    # Each tanh's result, which the next layer saves as well, and the last square's input is the last tanh's result.
    assert report.saved_peak_bytes == LAYERS * STEP_BYTES
    assert report.tiers[-1].moved_bytes == 3 * LAYERS * STEP_BYTES
    assert report.tiers[0].peak_bytes <= 5 * STEP_BYTES  # one region that runs, one that leaves, part of a third
    assert report.live_entries == 0
    assert report.recompute is None
    context.close()


def test_no_region_means_all_stays_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memo.checkpointing.context.REGION_BYTES", 1 << 40)
    context = memo.saved_tensors(host="8MiB", min_bytes=64)
    assert all(map(torch.equal, _trained(context), _trained()))
    assert context.report().tiers[0].peak_bytes == LAYERS * STEP_BYTES
    context.close()


def test_leaves_parameters_and_their_casts_stay() -> None:
    model, x = _model(), torch.randn(256, WIDTH, requires_grad=True)
    context = memo.saved_tensors(host="8MiB", min_bytes=64)
    with context, torch.autocast("cpu", torch.bfloat16):
        loss = model(x).sum()
    loss.backward()
    # Inputs of the matrix products in bfloat16, and the results of tanh, which are the next product's input.
    assert context.report().saved_peak_bytes <= (LAYERS + 1) * STEP_BYTES // 2
    assert all(use.moved_bytes % (STEP_BYTES // 2) == 0 for use in context.report().tiers[1:])
    context.close()


def test_a_change_in_place_is_an_error() -> None:
    context = memo.saved_tensors(host="8MiB", min_bytes=64)
    x = torch.randn(256, WIDTH, requires_grad=True)
    with context:
        hidden = x * 2
        loss = hidden.square().sum()
        hidden.add_(1)
    with pytest.raises(ModifiedAfterSave):
        loss.backward()
    context.close()


def test_code_without_a_backward_frees_everything_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    context = memo.saved_tensors(host="8MiB", min_bytes=64)
    with caplog.at_level(logging.DEBUG, "memo"), context:
        value = _model()(torch.randn(256, WIDTH, requires_grad=True)).sum().item()
    assert value == value
    gc.collect()
    assert context.report().live_entries == 0
    assert "nothing of what was saved was asked for" in caplog.text
    context.close()


def test_a_full_tier_is_an_error_or_the_next_tier(tmp_path: Any) -> None:
    context = memo.saved_tensors(host=2 * STEP_BYTES, min_bytes=64, on_full="raise")
    with pytest.raises(HostBudgetExceeded):
        _trained(context)
    context.close()
    context = memo.saved_tensors(host=2 * STEP_BYTES, disk=tmp_path, min_bytes=64)
    assert all(map(torch.equal, _trained(context), _trained()))
    host, disk = context.report().tiers[1:]
    assert host.peak_bytes == 2 * STEP_BYTES
    assert disk.moved_bytes > 0
    context.close()


def test_a_device_budget_lets_reloads_run_ahead() -> None:
    context = memo.saved_tensors(host="8MiB", device="64GiB", min_bytes=64)
    assert all(map(torch.equal, _trained(context), _trained()))
    assert context.report().prefetch_hits == pytest.approx(1.0, abs=0.2)
    context.close()


def test_what_is_wrong_is_one_line() -> None:
    with pytest.raises(UsageError, match="on_full"):
        memo.saved_tensors(on_full="never")  # type: ignore[arg-type]
    for wrong in ({"host": "much"}, {"disk_budget": "-1"}, {"device": "x"}, {"min_bytes": "1 kb?"}, {"alpha": 2.0}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            memo.saved_tensors(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="nowhere to move"), memo.saved_tensors(host=0, disk=[]):
        pass
    context = memo.saved_tensors(host="8MiB")
    found: list[str] = []

    def enter() -> None:
        with pytest.raises(UsageError) as told, context:
            pass
        found.append(str(told.value))

    with context, context:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert "entered in another thread" in found[0]
    context.close()
    with pytest.raises(UsageError, match="closed"), context:
        pass
    assert "nothing has run" in str(copy.deepcopy(memo.saved_tensors()).report())


def test_of_threads_that_enter_at_once_one_is_within_and_the_others_are_told() -> None:
    def enter(context: memo.SavedTensors, barrier: threading.Barrier) -> bool:
        barrier.wait(timeout=60)
        try:
            with context:
                barrier.wait(timeout=60)  # all have tried
        except UsageError:
            barrier.wait(timeout=60)
            return False
        return True

    with ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            context, barrier = memo.saved_tensors(host="1MiB"), threading.Barrier(4)
            entered = [threads.submit(enter, context, barrier) for _ in range(4)]
            assert sorted(each.result() for each in entered) == [False, False, False, True]
            context.close()


def test_an_exception_inside_leaves_the_context_usable() -> None:
    context = memo.saved_tensors(host="8MiB", min_bytes=64)
    with pytest.raises(RuntimeError, match=r"size mismatch|shapes"), context:
        _model()(torch.randn(256, WIDTH, requires_grad=True)) @ torch.ones(1)
    assert all(map(torch.equal, _trained(context), _trained()))
    context.close()


def test_saved_tensors_come_back_after_the_context_is_gone() -> None:
    model, x = _model(), torch.randn(256, WIDTH, requires_grad=True)
    with memo.saved_tensors(host="8MiB", min_bytes=64):
        loss = model(x).sum()
    gc.collect()
    loss.backward()
    got, x.grad = x.grad, None
    model(x).sum().backward()
    assert got is not None
    assert x.grad is not None
    assert torch.equal(got, x.grad)


@pytest.mark.skipif(
    "respect_saved_tensors_hooks" not in inspect.signature(checkpoint).parameters, reason="torch 2.14 or newer"
)
def test_what_selective_checkpointing_saves_moves_where_torch_hands_it_on() -> None:
    def save_matmuls(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_matmul = operator is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE

    def trained(context: Any, **how: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        model = _model()
        x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
        contexts = partial(create_selective_checkpoint_contexts, save_matmuls)
        with context:
            loss = checkpoint(model, x, use_reentrant=False, context_fn=contexts, **how).square().sum()
        loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], x

    context = memo.saved_tensors(host="8MiB", min_bytes=64)
    moved, x = trained(context, respect_saved_tensors_hooks=True)
    plain, other = trained(nullcontext(), respect_saved_tensors_hooks=True)
    assert x.grad is not None
    assert other.grad is not None
    assert all(map(torch.equal, [*moved, x.grad], [*plain, other.grad]))
    # The results of the matmuls, the checkpoint's own input, and the square's.
    assert context.report().tiers[-1].moved_bytes >= LAYERS * STEP_BYTES
    context.close()
