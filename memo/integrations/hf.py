"""Hugging Face's Trainer, and the trainers that are made of it (TRL's, Axolotl's): a callback, a mixin, and options.

    Trainer(..., callbacks=[MemoCallback(host="64GiB")]).train()

Owns one manager for each `train()`: it is made when training begins and closed when it ends. Evaluation and generation are
left alone. Invariant: outside of training the model has no hook of ours.

    callback    the model's own forwards are managed: nearly always what one wants
    mixin       all of `compute_loss` is: for trainers that call parts of the model themselves
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import re
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import TrainerCallback

import memo
from memo.errors import UsageError
from memo.integrations.figures import Counters
from memo.integrations.training import ManagedTraining, checked

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

_log = logging.getLogger("memo")

_WITHOUT_LOGITS = (
    "Computes the model's loss without its logits, which at 64k tokens are the first thing that does not fit."
)


def _argument(name: str) -> Any:
    """The field of an argument of `memo.offload`: its default, and its paragraph of the docstring as help."""
    (words,) = re.findall(
        rf"^    {name}: (.*?)(?=^    \w)", inspect.getdoc(memo.offload) or "", re.MULTILINE | re.DOTALL
    )
    default = inspect.signature(memo.offload).parameters[name].default
    return dataclasses.field(default=default, metadata={"help": " ".join(words.split()).replace("%", "%%")})


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoArguments:
    """Options of MemoCallback for `HfArgumentParser((TrainingArguments, MemoArguments))`; `--memo_alpha 0.25` and so on.

    Each field but the last is the argument of `memo.offload` of that name, with its meaning and its default.
    """

    memo_plan: str | None = _argument("plan")
    memo_alpha: float | None = _argument("alpha")
    memo_keep: list[str] | None = _argument("keep")  # noqa: RUF009
    memo_repeat: list[str] | None = _argument("repeat")  # noqa: RUF009
    memo_device: str | None = _argument("device")
    memo_host: str = _argument("host")
    memo_host_pool: str | None = _argument("host_pool")
    memo_disk: str | None = _argument("disk")
    memo_disk_budget: str | None = _argument("disk_budget")
    memo_min_bytes: str = _argument("min_bytes")
    memo_codec: Literal["int8", "fp8"] | None = _argument("codec")
    memo_on_full: Literal["spill", "raise", "recompute"] = _argument("on_full")
    memo_verify: bool = _argument("verify")
    memo_trace: str | None = _argument("trace")
    memo_loss_without_logits: bool = dataclasses.field(default=False, metadata={"help": _WITHOUT_LOGITS})

    def options(self) -> dict[str, Any]:
        """The arguments of `memo.offload`."""
        given = {field.name.removeprefix("memo_"): getattr(self, field.name) for field in dataclasses.fields(self)}
        given.pop("loss_without_logits")
        return given


class MemoCallback(TrainerCallback):  # type: ignore[misc]
    """Trainer callback that manages the training forwards of its model.

    Figures of memory and copies are added to Trainer's logs. Trainer calls callbacks in the order of their list, those of
    wandb, TensorBoard and other reporters first: `callbacks=[MemoCallback()]` shows figures in `state.log_history` and on
    the terminal; `add_to` puts the callback in front, and the reporters have them, too.

    Args:
        arguments: Options as parsed by HfArgumentParser. Default None: those of `memo.offload`.
        loss_without_logits: Computes the model's loss without its logits while it trains, as `memo.loss_without_logits`
            does: at 64k tokens they are the first thing that does not fit. Default None: as `arguments` say, else not.
        **options: Arguments of `memo.offload`, which take precedence.

    Raises:
        UsageError: `memo.offload` has no such argument.

    Attributes:
        manager: Of the training under way, or of the last one, which is closed and still reports; None before.

    Example:
        trainer = Trainer(model, arguments, train_dataset=texts)
        callback = MemoCallback(host="64GiB").add_to(trainer)
        trainer.train()
        print(callback.manager.report())
    """

    def __init__(
        self, arguments: MemoArguments | None = None, *, loss_without_logits: bool | None = None, **options: Any
    ) -> None:
        self.manager: memo.Manager | None = None
        self._training: ManagedTraining | None = None
        if arguments is not None:
            options = {**arguments.options(), **options}
            loss_without_logits = (
                arguments.memo_loss_without_logits if loss_without_logits is None else loss_without_logits
            )
        self._options = {**checked(options), "loss_without_logits": bool(loss_without_logits)}
        self._logged = Counters()

    def add_to(self, trainer: Trainer) -> MemoCallback:
        """Adds the callback to a trainer in front of those that report, and returns it."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **others: Any,
    ) -> None:
        """Makes the manager, and attaches it to the model."""
        assert model is not None
        self._end()  # of a training that an exception ended
        self._begin(model)
        self._logged = Counters(step=state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Ends the step."""
        if self.manager is not None:
            self.manager.step_done()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """Adds figures of the steps since the last log, and planning's progress, to the logs that have these steps' loss."""
        if self.manager is None or logs is None or "loss" not in logs or state.global_step == self._logged.step:
            return
        now = Counters.of(self.manager, state.global_step)
        figures: dict[str, float | str] = {**now.since(self._logged, prefix="memo_")}
        if now.progress:
            figures["memo_progress"] = now.progress
        self._logged = now
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Logs the report, detaches from the model, and releases memory and files."""
        if self.manager is not None and _log.isEnabledFor(logging.INFO):
            _log.info("%s", self.manager.report())
        self._end()

    def _begin(self, model: nn.Module, *, attach: bool = True) -> None:
        self._training = ManagedTraining(model, attach=attach, **self._options)
        self.manager = self._training.manager

    def _end(self) -> None:
        if self._training is not None:
            self._training.close()


def checkpoint_with_memo(model: nn.Module) -> None:
    """Turns a transformers model's activation checkpointing on, with `memo.checkpoint` as its function.

    Args:
        model: A PreTrainedModel, or an adapter library's model around one; checkpointing may be on already. Where Trainer
            turns it on again (`gradient_checkpointing=True`), torch's function is back.

    Raises:
        UsageError: Its layers have no activation checkpointing of transformers'.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or getattr(
        model, "gradient_checkpointing_enable", None
    )
    if enable is not None:
        enable()
    given = [module for module in model.modules() if hasattr(module, "_gradient_checkpointing_func")]
    if not given:
        raise UsageError(f"{type(model).__name__} has no activation checkpointing of transformers'")
    for module in given:
        module._gradient_checkpointing_func = memo.checkpoint  # type: ignore[assignment]


class MemoTrainerMixin:
    """Mixin for subclasses of Trainer, whose training losses are then computed inside a manager.

    It is needed where `compute_loss` calls parts of the model instead of the model.

    Args:
        *positional: Of the trainer.
        memo_options: Arguments of `memo.offload`, or MemoArguments. Default None: those of `memo.offload`.
        **named: Of the trainer.

    Attributes:
        memo_callback: Has the manager.

    Example:
        class MyTrainer(MemoTrainerMixin, Trainer):
            def compute_loss(self, model, inputs, **kwargs): ...

        MyTrainer(model, arguments, memo_options={"host": "64GiB"}).train()
    """

    def __init__(
        self, *positional: Any, memo_options: Mapping[str, Any] | MemoArguments | None = None, **named: Any
    ) -> None:
        super().__init__(*positional, **named)
        options = memo_options.options() if isinstance(memo_options, MemoArguments) else dict(memo_options or {})
        self.memo_callback = _Entered(**options).add_to(self)

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """Trainer's contexts, and within them the manager, where gradients are wanted."""
        stack: contextlib.ExitStack = super().compute_loss_context_manager()  # type: ignore[misc]
        if self.memo_callback.is_training and torch.is_grad_enabled():
            assert self.memo_callback.manager is not None
            stack.enter_context(self.memo_callback.manager)
        return stack


class _Entered(MemoCallback):
    """Callback of the mixin, which enters the manager itself."""

    is_training = False

    def _begin(self, model: nn.Module, *, attach: bool = False) -> None:
        super()._begin(model, attach=attach)
        self.is_training = True

    def _end(self) -> None:
        self.is_training = False
        super()._end()
