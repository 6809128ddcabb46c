"""PyTorch Lightning: a callback that manages the training forwards of a LightningModule.

    Trainer(callbacks=[MemoCallback(host="64GiB")]).fit(module)

Owns one manager for each `fit`: it is made when training begins, after the strategy has set the module up, and closed when
training ends or fails. Validation, test and prediction are left alone. Invariant: outside of training the module has no hook
of ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import memo
from memo.integrations.figures import Counters
from memo.integrations.training import ManagedTraining, checked

try:
    from lightning.pytorch import Callback
except ImportError:  # the same package under its older name
    from pytorch_lightning import Callback

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class MemoCallback(Callback):  # type: ignore[misc]
    """Lightning callback that manages the activations of a module while it trains.

    The module's repeated layers must be reached through the forward of the module or of a part of it: `self(batch)` or
    `self.model(batch)` in `training_step`. With manual optimization any number of forwards and backwards may follow.

    Args:
        loss_without_logits: Computes the loss of a transformers model within the module without its logits while it
            trains, as `memo.loss_without_logits` does. Default False.
        **options: Arguments of `memo.offload`.

    Raises:
        UsageError: There is no such argument.

    Attributes:
        manager: Of the training under way, or of the last one, which is closed and still reports; None before.

    Example:
        callback = MemoCallback(host="64GiB")
        Trainer(callbacks=[callback]).fit(module)
        print(callback.manager.report())
    """

    def __init__(self, *, loss_without_logits: bool = False, **options: Any) -> None:
        self.manager: memo.Manager | None = None
        self._training: ManagedTraining | None = None
        self._options = {**checked(options), "loss_without_logits": loss_without_logits}
        self._step = 0
        self._logged = Counters()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the manager, and attaches it to the module."""
        self._end()
        self._training = ManagedTraining(pl_module, **self._options)
        self.manager = self._training.manager
        self._step = trainer.global_step
        self._logged = Counters(step=self._step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends a step once the optimizer has stepped, and logs figures as often as Lightning's loggers write."""
        if self.manager is None or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self.manager.step_done()
        if trainer.logger is not None and trainer.global_step % trainer.log_every_n_steps == 0:
            now = Counters.of(self.manager, self._step)
            self.log_dict(now.since(self._logged, prefix="memo/"), on_step=True, on_epoch=False)
            self._logged = now

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detaches from the module, and releases memory and files."""
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Does as `on_train_end`."""
        self._end()

    def _end(self) -> None:
        if self._training is not None:
            self._training.close()
