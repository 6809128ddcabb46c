"""A model on the meta device is opened at its first forward, one that moves where it trains; other devices are refused."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Stack, assert_equal, ids, plain, stack, train
from torch import nn

import memo
from memo.autoplan import Actuator, device_budget_of
from memo.errors import HostBudgetExceeded, HostPoolUnusable, PlanError, ScratchUnusable, UsageError
from memo.manager import Machine
from memo.manager.resources import TierBudgets
from memo.swap import HostPool


def on_meta() -> Stack:
    with torch.device("meta"):
        return Stack()


def with_memory(model: Stack) -> Stack:
    model.to_empty(device="cpu")
    model.load_state_dict(stack().state_dict())
    return model


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ["attach", "with"])
@pytest.mark.parametrize("options", [{"alpha": 1.0}, {"alpha": 0.0}, {"levels": {0: 0.5}}, {}], ids=str)
def test_a_model_on_the_meta_device_is_opened_at_its_first_forward(options: dict[str, Any], how: str) -> None:
    model = on_meta()
    manager = memo.offload(model, host="8MiB", min_bytes=512, **options)
    if how == "attach":
        manager.attach()
    assert manager.report().benefit == "nothing is managed: the model is still on the meta device"
    assert "meta" in repr(manager)
    assert manager.stats.packed == 0
    assert manager.plan is None
    assert manager.levels_profile() == []
    with_memory(model)
    got = train(model, lambda step: model(ids(step)), manager if how == "with" else None, steps=6)
    assert_equal(got, plain(steps=6))
    assert manager.stats.packed > 0
    manager.close()


def test_a_forward_on_the_meta_device_is_refused_in_one_line() -> None:
    model = on_meta()
    manager = memo.offload(model, alpha=1.0, host="8MiB").attach()
    with pytest.raises(UsageError, match=r"^Stack is still on the meta device; give it memory, as by model.to_empty\("):
        model(torch.zeros(1, 4, dtype=torch.int64, device="meta"))
    with pytest.raises(UsageError, match=r"give levels= to memo\.offload"):
        manager.choose_levels({0: 0.5})
    with pytest.raises(UsageError, match="no forward of it has run"):
        manager.explain(0)
    manager.step_done()
    with_memory(model)
    model(ids()).backward()
    manager.close()
    on = memo.offload(on_meta(), alpha=1.0, host="8MiB")
    on.close()
    with pytest.raises(UsageError, match="closed"), on:
        pass


def test_what_can_be_refused_on_the_meta_device_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no layer 9"):
        memo.offload(on_meta(), levels={9: 0.5})
    with pytest.raises(PlanError):
        memo.offload(on_meta(), plan=tmp_path / "none.json")


def test_a_model_that_moves_before_its_first_forward_is_opened_where_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has no second device; here it has a second name."""
    where = torch.device("cpu", 0)
    model = stack()
    manager = memo.offload(model, alpha=1.0, host="8MiB", min_bytes=512)
    first = manager._engine
    monkeypatch.setattr("memo.manager.opening.device_of", lambda model: where)
    with manager:
        assert manager._engine is not first
        assert manager._engine.backend.device.type == "cpu"
    assert first.tiers[0].used == 0
    del first
    gc.collect()
    manager.close()


def test_a_layer_that_runs_elsewhere_is_told_once() -> None:
    model = stack()
    manager = memo.offload(model, alpha=1.0, host="8MiB", min_bytes=512)
    with manager:
        assert manager._engine.backend.device == torch.device("cpu")
        with pytest.warns(RuntimeWarning, match=r"layers.0 runs on meta, and its manager was opened on cpu") as told:
            [model.layers[0].to("meta")(torch.zeros(1, 8, 32, device="meta")) for _ in range(2)]
    assert len(told) == 1
    manager.close()


class _Elsewhere(Stack):
    """A model whose parameters say that they are on another device, which this machine does not have."""

    kinds = ("xpu",)

    def parameters(self, recurse: bool = True) -> Any:
        class Parameter:
            requires_grad = False

            def __init__(self, kind: str) -> None:
                self.device = torch.device(kind)

        return iter([Parameter(kind) for kind in self.kinds])


@pytest.mark.parametrize("kind", ["xpu", "mps", "hpu"])
def test_a_device_that_is_neither_cpu_nor_cuda_is_refused_in_one_line(kind: str) -> None:
    model = _Elsewhere()
    for kinds in ((kind,), ("cpu", kind)):
        model.kinds = kinds  # type: ignore[assignment]
        with pytest.raises(
            UsageError, match=f"^the model is on {kind}; memo manages models on a CPU or on a CUDA GPU$"
        ):
            memo.offload(model)


def test_a_model_over_several_gpus_is_refused_in_one_line() -> None:
    model = _Elsewhere()
    model.kinds = ("cuda:0", "cuda:1")  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"^the model is spread over cuda:0, cuda:1; memo manages one GPU a process$"):
        memo.offload(model)


def test_data_parallel_over_several_gpus_is_refused_and_on_one_device_is_managed() -> None:
    model = nn.DataParallel(stack())
    manager = memo.offload(model, alpha=0.0, host="8MiB", min_bytes=512).attach()
    assert_equal(train(model, lambda step: model(ids(step))), plain())
    assert manager.stats.bytes_recomputed > 0
    manager.close()
    model.device_ids = [0, 1]
    with pytest.raises(UsageError, match=r"give the model inside, model.module, and use DistributedDataParallel"):
        memo.offload(model)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_model_is_refused() -> None:
    scripted = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(1, 4))
    with pytest.raises(UsageError, match="give the model that it was made from"):
        memo.offload(scripted)


def test_a_host_pool_that_others_have_is_a_full_tier(tmp_path: Path) -> None:
    """The error says what others leave; a plan is made for that; what they free is taken."""
    pool, model, need = tmp_path / "pool", stack(), 4 << 20
    other = HostPool(pool, need)
    assert other.resize(need - (64 << 10))
    manager = memo.offload(model, alpha=1.0, host=need, host_pool=pool, min_bytes=512)
    says = r"\(host .* used of 4 MiB, of which other jobs leave 64 KiB\); raise the host budget, or give disk="
    with pytest.raises(HostBudgetExceeded, match=says), manager:
        model(ids())
    budget = device_budget_of(torch.device("cpu"), None)
    actuator = Actuator(
        manager._engine, manager._recompute_policy, manager.layers, budget, tracer=None, link=lambda _: None
    )
    assert actuator.limits().host_bytes == 64 << 10
    other.close()
    assert actuator.limits().host_bytes == need
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain())
    manager.close()


def test_a_pool_that_cannot_be_used_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(HostPoolUnusable):
        memo.offload(stack(), alpha=1.0, host="1MiB", host_pool=tmp_path)
    with pytest.raises(ScratchUnusable):
        memo.offload(stack(), alpha=1.0, host="1MiB", host_pool=tmp_path / "pool", disk=tmp_path / "none")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rank_has_its_share_of_what_all_jobs_have_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memo.manager.machine.share_of_node", lambda nbytes, *, weight: nbytes // 4)
    room = TierBudgets.of(Machine(torch.device("cpu")), host="8GiB", host_pool="pool", disk=None, disk_budget=None)
    assert room.host_bytes == 2 << 30
    assert room.pool == ("pool", 8 << 30)
