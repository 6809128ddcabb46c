"""Lightning's Trainer with and without memo: five steps to the same losses and parameters, and what its loggers get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from integrations import MIN_BYTES, STEPS, Run, assert_divided, assert_same, run_of
from small_models import Block
from torch import nn

pytest.importorskip("lightning", reason="lightning is not installed")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from memo.integrations.lightning import MemoCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]
LAYERS = 3


class Module(LightningModule):  # type: ignore[misc]
    """A stack of blocks; `by_hand` steps its optimizer itself, twice in each training step."""

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block(32, 2) for _ in range(LAYERS)))
        self.automatic_optimization = not by_hand
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor | None:
        if self.automatic_optimization:
            self.losses.append(self.model(batch).square().mean())
            return self.losses[-1]
        optimizer = self.optimizers()
        for half in batch.chunk(2):
            loss = self.model(half).square().mean()
            self.manual_backward(loss)
        self.losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
        return None

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        assert not self.model(batch).requires_grad

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches(count: int = STEPS) -> torch.utils.data.DataLoader[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    data: Any = [torch.randn(2, 48, 32, generator=generator) for _ in range(count)]
    return torch.utils.data.DataLoader(data, batch_size=None)


def trained(module: Module, callback: MemoCallback | None, folder: Path, count: int = STEPS, **more: Any) -> Run:
    more = {"logger": False, "max_epochs": 1, **more}
    trainer = Trainer(
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[callback] if callback else [],
        **more,
    )
    trainer.fit(module, batches(count), batches(2))
    return run_of(module, [loss.detach() for loss in module.losses])


def hooks_of(module: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2, "max_epochs": 1},
    "validated within": {"val_check_interval": 2},
    "mixed": {"precision": "bf16-mixed"},
    "by hand": {},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_a_callback_changes_no_loss_and_divides_every_layer(mode: str, alpha: float, tmp_path: Path) -> None:
    by_hand = mode == "by hand"
    want = trained(Module(by_hand=by_hand), None, tmp_path, **MODES[mode])
    callback = MemoCallback(alpha=alpha, min_bytes=MIN_BYTES)
    module = Module(by_hand=by_hand)
    got = trained(module, callback, tmp_path, **MODES[mode])
    assert_same(got, want)
    assert callback.manager is not None
    assert_divided(callback.manager, LAYERS)
    assert hooks_of(module) == 0


def test_without_alpha_the_plan_leaves_warm_up(tmp_path: Path) -> None:
    callback = MemoCallback(min_bytes=MIN_BYTES)
    trained(Module(), callback, tmp_path, count=8)
    assert callback.manager is not None
    assert callback.manager.plan is not None
    assert callback.manager.step == 8


def test_figures_go_to_lightnings_logger(tmp_path: Path) -> None:
    callback = MemoCallback(alpha=0.25, min_bytes=MIN_BYTES, host="64MiB")
    trained(Module(), callback, tmp_path, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    (file,) = tmp_path.rglob("metrics.csv")
    header, *rows = file.read_text().splitlines()
    names = header.split(",")
    assert {"memo/host_peak_gib", "memo/moved_gib_per_step", "memo/recomputed_gib_per_step"} <= set(names)
    moved = [float(value) for row in rows if (value := row.split(",")[names.index("memo/moved_gib_per_step")])]
    assert len(moved) == STEPS
    assert all(value > 0 for value in moved)


class Failing(Module):
    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor | None:
        if number == 1:
            raise RuntimeError("no more")
        return super().training_step(batch, number)


def test_after_an_exception_nothing_is_left(tmp_path: Path) -> None:
    module, callback = Failing(), MemoCallback(alpha=0.0, min_bytes=MIN_BYTES)
    with pytest.raises(RuntimeError, match="no more"):
        trained(module, callback, tmp_path)
    assert hooks_of(module) == 0
    want = trained(Module(), None, tmp_path)
    assert_same(trained(Module(), callback, tmp_path), want)  # the callback serves again
