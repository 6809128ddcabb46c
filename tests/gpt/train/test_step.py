"""A step of training: what it averages, what it clips, what it leaves alone when it cannot finish."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from memo.errors import TrainingDiverged
from memo.gpt import Precision, TrainConfig, preset
from memo.gpt.model import GPT
from memo.gpt.optim import LossGuardConfig, LrSchedule, OnNan, adamw
from memo.gpt.train import weight_dtype
from memo.gpt.train.step import Trainer

SEQ = 32
CPU = torch.device("cpu")


class Drawn:
    """Random tokens as a function of (step, microbatch)."""

    def __init__(self, batch: int = 1) -> None:
        self.batch = batch

    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        tokens = torch.randint(50, (self.batch, SEQ + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trainer(*, batch: int = 1, dropout: float = 0.0, seed: int = 0, lr: float = 1e-2, **changes: object) -> Trainer:
    torch.manual_seed(seed)
    shape = preset("tiny", vocab_size=50, max_seq=SEQ, layers=2, hidden=32, heads=2, dropout=dropout)
    schedule = LrSchedule(peak=lr, floor=lr / 10, warmup=2, steps=10)
    config = TrainConfig(schedule=schedule, **changes)  # type: ignore[arg-type]
    return Trainer(GPT(shape), Drawn(batch), config, device=CPU)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def steps(subject: Trainer, count: int) -> list[tuple[float, float]]:
    results = [subject.step(step) for step in range(1, count + 1)]
    return [(result.loss, result.grad_norm) for result in results if result is not None]


def test_two_runs_with_one_seed_are_equal_to_the_last_bit() -> None:
    a, b = trainer(accumulate=2, dropout=0.1), trainer(accumulate=2, dropout=0.1)
    first = steps(a, 3)
    torch.manual_seed(0)
    b = trainer(accumulate=2, dropout=0.1)
    assert first == steps(b, 3)
    assert same(weights(a.model), weights(b.model))


def test_loss_falls_on_a_batch_seen_again_and_again() -> None:
    subject = trainer()
    subject._batches = type("Fixed", (), {"at": lambda self, step, microbatch=0: Drawn().at(1)})()
    losses = [loss for loss, _ in steps(subject, 10)]
    assert losses[-1] < losses[0] - 0.3


def test_accumulation_averages_the_microbatches() -> None:
    """Three microbatches of one row give the mean of the three gradients and losses."""
    subject = trainer(accumulate=3, clip=None)
    reference = copy.deepcopy(subject.model)
    losses = [reference(*Drawn().at(1, microbatch)) for microbatch in range(3)]
    torch.stack(losses).mean().backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None]).norm()
    result = subject.step(1)
    assert result is not None
    assert result.tokens == 3 * SEQ
    # Sums of three float32 numbers in another order: a few units in the last place.
    assert result.loss == pytest.approx(float(torch.stack(losses).mean().detach()), rel=1e-6)
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)


def test_clipping_bounds_the_gradient_and_reports_the_norm_before() -> None:
    seen: list[float] = []
    subject = trainer(clip=0.01)

    def gradient_norm(*_: object) -> None:
        seen.append(
            float(torch.stack([p.grad.norm() for p in subject.model.parameters() if p.grad is not None]).norm())
        )

    subject.optimizer.register_step_pre_hook(gradient_norm)
    result = subject.step(1)
    assert result is not None
    assert result.grad_norm > 0.1
    assert seen == [pytest.approx(0.01, rel=1e-3)]


def test_only_matrices_decay() -> None:
    subject = trainer()
    optimizer = adamw(subject.model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.5)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == sum(1 for _ in subject.model.parameters())
    for parameter in subject.model.parameters():
        assert decay[id(parameter)] == (0.5 if parameter.dim() >= 2 else 0.0)


def test_a_loss_that_is_not_finite_stops_before_the_weights_change() -> None:
    subject = trainer()
    assert subject.step(1) is not None
    with torch.no_grad():
        next(iter(subject.model.parameters()))[0, 0] = float("inf")
    before = weights(subject.model)
    with pytest.raises(TrainingDiverged, match=r"step 2.*--lr"):
        subject.step(2)
    assert same(before, weights(subject.model))
    assert all(parameter.grad is None for parameter in subject.model.parameters())


def test_a_step_that_diverged_leaves_the_random_generator_of_the_step_before() -> None:
    subject = trainer(dropout=0.2)
    with torch.no_grad():
        next(iter(subject.model.parameters()))[0, 0] = float("inf")
    before = torch.get_rng_state()
    with pytest.raises(TrainingDiverged):
        subject.step(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_skipped_step_changes_no_weight_and_training_goes_on() -> None:
    """Step 2 is poisoned through its input, so that step 3 is sound again."""
    subject, straight = (trainer(loss_guard=LossGuardConfig(on_nan=OnNan.SKIP)) for _ in range(2))
    subject.step(1)
    before = weights(subject.model)
    embedding: nn.Module = subject.model.tokens  # type: ignore[assignment]
    poison = embedding.register_forward_hook(lambda module, args, output: output * float("nan"))
    result = subject.step(2)
    poison.remove()
    assert result is not None
    assert (result.skipped, result.alarm, subject.loss_guard.skipped) == (True, "the loss is nan", 1)
    assert same(before, weights(subject.model))
    straight.step(1)
    assert subject.step(3).loss == straight.step(3).loss  # type: ignore[union-attr]
    assert not same(before, weights(subject.model))


def test_a_stop_between_microbatches_changes_nothing() -> None:
    asked = iter([False, False, True])
    torch.manual_seed(0)
    straight = steps(trainer(accumulate=3, dropout=0.2), 1)
    subject = trainer(accumulate=3, dropout=0.2)
    before = weights(subject.model)
    assert subject.step(1, stop=lambda: next(asked)) is None
    assert same(before, weights(subject.model))
    assert all(parameter.grad is None for parameter in subject.model.parameters())
    assert steps(subject, 1) == straight


@pytest.mark.parametrize("precision", list(Precision))
def test_every_precision_trains_and_keeps_its_weights_type(precision: Precision) -> None:
    torch.manual_seed(0)
    shape = preset("tiny", vocab_size=50, max_seq=SEQ, layers=2, hidden=32, heads=2)
    schedule = LrSchedule(peak=1e-2, floor=1e-3, warmup=0, steps=10)
    model = GPT(shape, dtype=weight_dtype(precision))
    subject = Trainer(model, Drawn(), TrainConfig(schedule=schedule, precision=precision), device=CPU)
    before = weights(model)
    assert len(steps(subject, 2)) == 2
    assert {parameter.dtype for parameter in model.parameters()} == {weight_dtype(precision)}
    assert not same(before, weights(model))


def test_autocast_computes_in_bfloat16() -> None:
    seen: set[torch.dtype] = set()
    subject = trainer(precision=Precision.BF16_AUTOCAST)
    layer: nn.Module = subject.model.layers[0]  # type: ignore[index, assignment]
    linear = next(module for module in layer.modules() if isinstance(module, nn.Linear))
    linear.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    subject.step(1)
    assert seen == {torch.bfloat16}


def test_evaluation_leaves_no_mark() -> None:
    subject, straight = trainer(dropout=0.2), trainer(dropout=0.2)
    torch.manual_seed(5)
    subject.step(1)
    first = subject.evaluate(Drawn())
    assert first == subject.evaluate(Drawn())  # dropout is off, so it is a function
    assert subject.model.training
    after = subject.step(2)
    torch.manual_seed(5)
    straight.step(1)
    expected = straight.step(2)
    assert after is not None
    assert expected is not None
    assert after.loss == expected.loss


def test_the_state_of_a_run_not_begun_is_that_of_adamw_after_its_first_step() -> None:
    fresh, stepped = trainer(), trainer()
    stepped.step(1)

    def form(subject: Trainer) -> dict[str, dict[str, tuple[torch.Size, torch.dtype]]]:
        state = subject.state()["optimizer"]
        return {name: {key: (t.shape, t.dtype) for key, t in entry.items()} for name, entry in state.items()}

    assert form(fresh) == form(stepped)
