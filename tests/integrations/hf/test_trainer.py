"""Hugging Face's Trainer with and without memo: five steps to the same losses and parameters, and what the logs then say."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations import MIN_BYTES, STEPS, Run, Texts, assert_divided, assert_same, llama, run_of
from torch import nn

import memo

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")

from memo.autoplan import AutoPlan, PlanOutcome  # noqa: E402
from memo.checkpointing.function import _thread  # noqa: E402
from memo.errors import UsageError  # noqa: E402
from memo.integrations.hf import MemoArguments, MemoCallback, MemoTrainerMixin, checkpoint_with_memo  # noqa: E402

LAYERS = 3


class MemoTrainer(MemoTrainerMixin, transformers.Trainer):  # type: ignore[misc,name-defined]
    pass


def arguments(folder: Path, **more: Any) -> Any:
    told = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "use_cpu": True}
    sizes = {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    return transformers.TrainingArguments(str(folder), **{**told, **sizes, **more})


def trainer_of(folder: Path, kind: Any = transformers.Trainer, model: Any = None, **more: Any) -> Any:
    named = {name: more.pop(name) for name in ("callbacks", "memo_options") if name in more}
    model = llama(LAYERS) if model is None else model
    return kind(model, arguments(folder, **more), train_dataset=Texts(), eval_dataset=Texts(4), **named)


def trained(trainer: Any) -> Run:
    trainer.train()
    return run_of(trainer.model, logged(trainer, "loss"))


def logged(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def callback(alpha: float | None, **more: Any) -> MemoCallback:
    return MemoCallback(alpha=alpha, min_bytes=MIN_BYTES, **more)


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1},
    "bf16": {"bf16": True},
    "workers": {"dataloader_num_workers": 1},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_callback_leaves_the_losses_as_they_are(alpha: float, mode: str, tmp_path: Path) -> None:
    want = trained(trainer_of(tmp_path, **MODES[mode]))
    ours = callback(alpha)
    trainer = trainer_of(tmp_path, callbacks=[ours], **MODES[mode])
    assert_same(trained(trainer), want)
    assert ours.manager is not None
    assert_divided(ours.manager, LAYERS, forwards=STEPS * (2 if mode == "accumulated" else 1))
    assert ours.manager.step == STEPS
    assert hooks_of(trainer.model) == 0
    if mode == "evaluated":
        assert len(logged(trainer, "eval_loss")) == STEPS


def test_mixin_leaves_the_losses_as_they_are(tmp_path: Path) -> None:
    want = trained(trainer_of(tmp_path, eval_strategy="steps", eval_steps=2))
    options = MemoArguments(memo_alpha=0.25, memo_min_bytes=str(MIN_BYTES))
    trainer = trainer_of(tmp_path, MemoTrainer, memo_options=options, eval_strategy="steps", eval_steps=2)
    assert_same(trained(trainer), want)
    assert_divided(trainer.memo_callback.manager, LAYERS)
    assert hooks_of(trainer.model) == 0
    assert len(logged(trainer, "memo_moved_gib_per_step")) == STEPS


class CallsLayers(transformers.Trainer):  # type: ignore[misc,name-defined]
    """Computes the loss without calling the model."""

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], **others: Any) -> torch.Tensor:
        inner = model.model
        hidden = inner.embed_tokens(inputs["input_ids"])
        places = torch.arange(hidden.shape[1])[None]
        for layer in inner.layers:
            hidden = layer(hidden, position_embeddings=inner.rotary_emb(hidden, places))
        logits = model.lm_head(inner.norm(hidden))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


class MemoCallsLayers(MemoTrainerMixin, CallsLayers):
    pass


def test_mixin_manages_what_is_no_forward_of_the_model(tmp_path: Path) -> None:
    want = trained(trainer_of(tmp_path, CallsLayers))
    trainer = trainer_of(tmp_path, MemoCallsLayers, memo_options={"alpha": 0.0, "min_bytes": MIN_BYTES})
    assert_same(trained(trainer), want)
    assert_divided(trainer.memo_callback.manager, LAYERS)


def test_figures_reach_those_that_report(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder))
        trainer = trainer_of(tmp_path, report_to=["tensorboard"])
        ours = callback(0.25).add_to(trainer)
        trainer.train()
    events = EventAccumulator(str(folder)).Reload()
    steps = events.Scalars("train/memo_recomputed_gib_per_step")
    assert [event.step for event in steps] == [*range(1, STEPS + 1)]
    assert ours.manager is not None
    report = ours.manager.report()
    assert report.recompute is not None
    assert sum(event.value for event in steps) * 2**30 == pytest.approx(report.recompute.recomputed_bytes, rel=1e-4)
    moved = sum(event.value for event in events.Scalars("train/memo_moved_gib_per_step")) * 2**30
    assert moved == pytest.approx(sum(use.moved_bytes for use in report.tiers[1:]), rel=1e-4)
    assert logged(trainer, "memo_disk_peak_gib")[-1] * 2**30 == report.tiers[-1].peak_bytes


@pytest.mark.parametrize("when", ["arguments", "before", "during"])
def test_gradient_checkpointing_is_replaced(when: str, tmp_path: Path) -> None:
    class TurnsOn(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
            if state.global_step == 2:
                model.gradient_checkpointing_enable()

    def made(*callbacks: Any) -> Any:
        more = {"gradient_checkpointing": True} if when == "arguments" else {}
        more["callbacks"] = [*callbacks, TurnsOn()] if when == "during" else [*callbacks]
        trainer = trainer_of(tmp_path, **more)
        if when == "before":
            trainer.model.gradient_checkpointing_enable()
        return trainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # gradient_checkpointing is the name that people know
        want = trained(made())
        moved = []
        for trainer, ours in ((trainer_of(tmp_path), callback(0.0)), (made(), callback(0.0))):
            ours.add_to(trainer)
            assert_same(trained(trainer), want)
            assert ours.manager is not None
            moved.append(sum(use.moved_bytes for use in ours.manager.report().tiers[1:]))
    assert moved[0] == moved[1] > 0
    assert ours.manager.report().replaced == len(ours.manager.layers)


@pytest.mark.parametrize("given", ["option", "arguments"])
def test_the_loss_is_computed_without_logits(given: str, tmp_path: Path) -> None:
    want = trained(trainer_of(tmp_path))
    more: dict[str, Any] = {"alpha": 0.0, "host": "64MiB", "min_bytes": MIN_BYTES}
    if given == "option":
        ours = MemoCallback(loss_without_logits=True, **more)
    else:
        ours = MemoCallback(MemoArguments(memo_loss_without_logits=True), **more)
    trainer = trainer_of(tmp_path, callbacks=[ours])
    seen: list[type] = []
    trainer.model.register_forward_hook(lambda module, args, output: seen.append(type(output.logits)))
    got = trained(trainer)
    assert torch.Tensor not in seen
    assert "forward" not in vars(trainer.model.lm_head)
    for ours_, theirs in zip(got.losses, want.losses, strict=True):
        assert ours_ == pytest.approx(theirs, rel=1e-4)


def test_an_unknown_option_is_refused_when_it_is_given() -> None:
    with pytest.raises(UsageError, match=r"memo\.offload has no argument hots; it has alpha, codec, device"):
        MemoCallback(hots="64GiB")
    with pytest.raises(UsageError, match="alpha: 3 is no fraction"):
        MemoCallback(alpha=3)
    with pytest.raises(UsageError, match="device: 70 is 70 bytes"):
        MemoCallback(device=70)


def test_memos_checkpoint_is_given_to_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memo.checkpointing.function.MIN_BYTES", 64)
    monkeypatch.setattr(_thread, "contexts", {})
    want = trained(trainer_of(tmp_path))
    trainer = trainer_of(tmp_path)
    checkpoint_with_memo(trainer.model)
    assert_same(trained(trainer), want)
    (context,) = _thread.contexts.values()
    use = context.report().recompute
    assert use is not None
    assert use.accepted == len(trainer.model.model.layers)
    context.close()
    with pytest.raises(UsageError, match="Linear has no activation checkpointing"):
        checkpoint_with_memo(torch.nn.Linear(1, 1))


def test_arguments_are_parsed_beside_trainers(tmp_path: Path) -> None:
    parser = transformers.HfArgumentParser((transformers.TrainingArguments, MemoArguments))
    told = [
        "--output_dir",
        str(tmp_path),
        "--memo_alpha",
        "0.5",
        "--memo_host",
        "1GiB",
        "--memo_keep",
        "attention",
        "mm",
    ]
    _, ours = parser.parse_args_into_dataclasses([*told, "--memo_on_full", "recompute"])
    assert ours.options()["keep"] == ["attention", "mm"]
    assert (ours.memo_alpha, ours.memo_host, ours.memo_on_full) == (0.5, "1GiB", "recompute")
    manager = memo.offload(llama(), **ours.options())
    manager.close()
    known = inspect.signature(memo.offload).parameters
    assert MemoArguments().options() == {name: known[name].default for name in MemoArguments().options()}


def test_training_again_makes_a_new_manager(tmp_path: Path) -> None:
    ours = callback(0.25)
    trainer = trainer_of(tmp_path, callbacks=[ours])
    trainer.train()
    first = ours.manager
    trainer.train()
    assert ours.manager is not first
    assert ours.manager is not None
    assert_divided(ours.manager, LAYERS)


def test_training_goes_on_after_an_exception(tmp_path: Path) -> None:
    class Stops(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        is_armed = True

        def on_substep_end(self, *positional: Any, **named: Any) -> None:
            if self.is_armed:
                raise KeyError("stop")

    ours, stops = callback(0.25), Stops()
    trainer = trainer_of(tmp_path, callbacks=[ours, stops], gradient_accumulation_steps=2)
    with pytest.raises(KeyError, match="stop"):
        trainer.train()
    first = ours.manager
    assert first is not None
    stops.is_armed = False
    trainer.train()
    assert hooks_of(trainer.model) == 0
    with pytest.raises(memo.MemoError, match="closed"):
        first.attach()


def test_a_manager_that_is_left_unused_says_so(tmp_path: Path) -> None:
    want = trained(trainer_of(tmp_path))
    trainer = trainer_of(tmp_path)
    manager = memo.offload(trainer.model, alpha=0.25, min_bytes=MIN_BYTES)
    with pytest.warns(RuntimeWarning, match="no forward of LlamaForCausalLM was managed"):
        assert_same(trained(trainer), want)
    manager.close()


def test_the_report_is_logged_when_training_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = callback(0.25)
    with caplog.at_level("INFO", logger="memo"):
        trainer_of(tmp_path, callbacks=[ours]).train()
    assert ours.manager is not None
    assert f"{LAYERS} layers" in caplog.text


def test_progress_of_planning_is_in_the_logs_until_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = AutoPlan.outcome

    def outcome(self: AutoPlan) -> PlanOutcome:
        known = real(self)
        return dataclasses.replace(known, progress="" if known.phase == "settled" else f"planning: {known.phase}")

    monkeypatch.setattr(AutoPlan, "outcome", outcome)
    trainer = trainer_of(tmp_path, callbacks=[MemoCallback(min_bytes=MIN_BYTES)])
    with caplog.at_level("INFO", logger="memo"):
        trainer.train()
    told = [record.getMessage() for record in caplog.records if "planning: " in record.getMessage()]
    assert [line.partition("planning: ")[2] for line in told] == ["warm up", "profiling"]
    rows = [row.get("memo_progress") for row in trainer.state.log_history if "loss" in row]
    assert rows == [*(f"planning: {phase}" for phase in ("warm up", "profiling")), None, None, None]
    assert min(logged(trainer, "memo_recomputed_gib_per_step")) == 0, "none while nothing is recomputed any more"


@pytest.mark.parametrize("how", ["attached", "callback", "one with"])
def test_planning_leaves_warm_up(how: str, tmp_path: Path) -> None:
    want = trained(trainer_of(tmp_path, max_steps=6))
    ours = MemoCallback(min_bytes=MIN_BYTES)
    trainer = trainer_of(tmp_path, max_steps=6, callbacks=[ours] if how == "callback" else [])
    if how == "callback":
        got, manager = trained(trainer), ours.manager
    elif how == "attached":
        manager = memo.offload(trainer.model, min_bytes=MIN_BYTES).attach()
        got = trained(trainer)
        manager.detach()
    else:
        manager = memo.offload(trainer.model, min_bytes=MIN_BYTES)
        with manager:
            got = trained(trainer)
    assert_same(got, want, steps=6)
    assert manager is not None
    assert manager.plan is not None
    assert "plan: none yet" not in str(manager.report())
