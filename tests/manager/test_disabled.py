"""MEMO_DISABLE=1: the same program runs, and memo does nothing."""

from __future__ import annotations

import pytest
import torch
from small_models import assert_equal, ids, plain, stack, train

import memo
from memo.errors import UsageError
from memo.manager.plan_source import FixedSetting


@pytest.fixture(autouse=True)
def _disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMO_DISABLE", "1")


def test_nothing_is_hooked_opened_or_changed() -> None:
    model = stack()
    manager = memo.offload(model, disk="/nowhere/at/all")
    assert manager.attach() is manager
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain())
    assert isinstance(manager, memo.Manager)
    assert str(manager.report()) == "nothing is managed: memo is off (MEMO_DISABLE is set)"
    assert "off" in repr(manager)
    assert "MEMO_DISABLE" in manager._repr_html_()
    assert (manager.stats.packed, manager.plan, manager.levels_profile(), list(manager.layers)) == (0, None, [], [])
    manager.choose_levels({0: 0.5})
    manager.step_done()
    assert manager.step == 1
    with pytest.raises(UsageError, match="memo is off"):
        manager.explain(0)
    manager.detach()
    manager.close()


def test_every_method_of_a_manager_does_nothing() -> None:
    model = stack()
    manager = memo.offload(model)
    before = vars(manager).copy()
    with manager:
        manager.note("cause", "message")
        assert not manager.replaces_checkpoint_of([model])
        manager.notes_checkpoint(["layer"])
    manager.plan_with(FixedSetting(None))  # type: ignore[arg-type]
    assert manager.has_settled
    assert vars(manager) == before
    public = {name for name in vars(memo.Manager) if not name.startswith("_")} - {"open_layer"}
    inherited = {"stats", "layers", "plan", "has_settled", "note", "replaces_checkpoint_of", "notes_checkpoint"}
    assert public - set(vars(type(manager))) == inherited | {"levels_profile"}


@pytest.mark.parametrize("value", ["", "0"])
def test_nothing_and_0_leave_it_on(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMO_DISABLE", value)
    model = stack()
    manager = memo.offload(model, alpha=1.0, host="8MiB", min_bytes=512)
    with manager:
        loss: torch.Tensor = model(ids())
    loss.backward()
    assert manager.stats.packed > 0
    manager.close()
