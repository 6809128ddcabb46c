"""AdamW on the host: the same bits as on the device, whatever is accumulated, clipped or dropped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from race_checker import CheckingBackend
from torch import nn

from memo.errors import TrainingDiverged, UsageError
from memo.gpt import Precision, TrainConfig, preset
from memo.gpt.model import GPT
from memo.gpt.optim import HostOptimizer, LrSchedule, host_optimizer, optimizer_host_bytes, require_optimizer_room
from memo.gpt.train import weight_dtype
from memo.gpt.train.step import Trainer
from memo.swap.backends import Backend, CpuBackend

SEQ = 32
SCHEDULE = LrSchedule(peak=1e-2, floor=1e-3, warmup=2, steps=10)


class Drawn:
    """Random tokens as a function of (step, microbatch)."""

    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        tokens = torch.randint(50, (1, SEQ + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gpt(*, precision: Precision = Precision.FP32, **shape: object) -> GPT:
    torch.manual_seed(0)
    return GPT(
        preset("tiny", vocab_size=50, max_seq=SEQ, layers=2, hidden=32, heads=2, **shape),
        dtype=weight_dtype(precision),
    )


@contextlib.contextmanager
def on_host(model: nn.Module, *, lr: float = SCHEDULE.peak, backend: Backend | None = None) -> Iterator[HostOptimizer]:
    made = HostOptimizer(model, backend or CpuBackend(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    with contextlib.closing(made):
        yield made


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    state = trainer.state()
    states = {f"{name}.{key}": one for name, of in state["optimizer"].items() for key, one in of.items()}
    return {name: tensor.clone() for name, tensor in (state["model"] | states).items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.01, 1e9])
def test_losses_weights_and_state_are_those_of_training_without_it(
    precision: Precision, accumulate: int, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_optimizer, "GROUP_BYTES", 3000)
    monkeypatch.setattr(host_optimizer, "IN_FLIGHT_BYTES", 5000)
    config = TrainConfig(schedule=SCHEDULE, accumulate=accumulate, clip=clip, precision=precision)
    plain = Trainer(gpt(precision=precision), Drawn(), config, device=torch.device("cpu"))
    model = gpt(precision=precision)
    with on_host(model) as optimizer:
        assert len(optimizer._groups) > 3
        there = Trainer(model, Drawn(), config, device=torch.device("cpu"), optimizer=optimizer)
        assert_equal(everything(there), everything(plain))
        for step in range(1, 5):
            a, b = plain.step(step), there.step(step)
            assert a is not None
            assert b is not None
            assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)
            assert_equal(everything(there), everything(plain))
            assert all(torch.equal(one.host, one.device) for one in optimizer._trained())


@pytest.mark.parametrize("in_flight", [20000, 1 << 30])
@pytest.mark.parametrize("policy", ["lazy", "eager", "random"])
def test_no_copy_races_whenever_it_runs(policy: str, in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_optimizer, "GROUP_BYTES", 3000)
    monkeypatch.setattr(host_optimizer, "IN_FLIGHT_BYTES", in_flight)
    config = TrainConfig(schedule=SCHEDULE, accumulate=3)
    plain = Trainer(gpt(), Drawn(), config, device=torch.device("cpu"))
    model, backend = gpt(), CheckingBackend(policy, seed=1)
    with on_host(model, backend=backend) as optimizer:
        there = Trainer(model, Drawn(), config, device=torch.device("cpu"), optimizer=optimizer)
        for step in (1, 2, 3):
            plain.step(step)
            there.step(step)
        assert_equal(everything(there), everything(plain))
        assert backend.races == []


def test_a_model_with_a_head_of_its_own_and_dropout_trains_alike() -> None:
    shape = {"tie_embeddings": False, "dropout": 0.1}
    config = TrainConfig(schedule=SCHEDULE, accumulate=2)
    plain = Trainer(gpt(**shape), Drawn(), config, device=torch.device("cpu"))
    expected = [plain.step(step) for step in (1, 2)]
    model = gpt(**shape)
    with on_host(model) as optimizer:
        there = Trainer(model, Drawn(), config, device=torch.device("cpu"), optimizer=optimizer)
        got = [there.step(step) for step in (1, 2)]
        assert [one and one.loss for one in got] == [one and one.loss for one in expected]
        assert_equal(everything(there), everything(plain))


def test_the_device_holds_no_gradients_but_those_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_optimizer, "IN_FLIGHT_BYTES", 8192)
    model = gpt()
    largest = max(parameter.nbytes for parameter in model.parameters())
    most = []
    with on_host(model) as optimizer:
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _: most.append(optimizer._leaving_bytes))
            for parameter in model.parameters()
        ]
        model(*Drawn().at(1)).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert 0 < max(most) <= max(8192, largest)
        assert sum(parameter.nbytes for parameter in model.parameters()) > 2 * max(most)
        for hook in hooks:
            hook.remove()


def test_an_interrupted_backward_leaves_the_step_before() -> None:
    """An exception in the second microbatch; then the step is made as if nothing had been."""
    config = TrainConfig(schedule=SCHEDULE, accumulate=2)
    plain = Trainer(gpt(), Drawn(), config, device=torch.device("cpu"))
    model = gpt()
    with on_host(model) as optimizer:
        there = Trainer(model, Drawn(), config, device=torch.device("cpu"), optimizer=optimizer)
        plain.step(1)
        there.step(1)
        before = everything(there)

        def failing(gradient: torch.Tensor) -> None:
            raise ValueError("broken")

        calls = iter([lambda gradient: None, failing])
        broken = model.layers[0].register_full_backward_pre_hook(lambda module, gradients: next(calls)(gradients[0]))
        with pytest.raises(ValueError, match="broken"):
            there.step(2)
        broken.remove()
        assert_equal(everything(there), before)
        optimizer.zero_grad()
        a, b = plain.step(2), there.step(2)
        assert a is not None
        assert b is not None
        assert a.loss == b.loss
        assert_equal(everything(there), everything(plain))


@pytest.mark.parametrize("stops", [True, False])
def test_a_stopped_or_diverged_step_drops_the_gradients_on_the_host(stops: bool) -> None:
    config = TrainConfig(schedule=SCHEDULE, accumulate=2)
    plain = Trainer(gpt(), Drawn(), config, device=torch.device("cpu"))
    model = gpt()
    with on_host(model) as optimizer:
        there = Trainer(model, Drawn(), config, device=torch.device("cpu"), optimizer=optimizer)
        if stops:
            asked = iter([False, True])
            assert there.step(1, stop=lambda: next(asked)) is None
        else:
            poison = model.tokens.register_forward_hook(lambda module, args, output: output * float("nan"))
            with pytest.raises(TrainingDiverged):
                there.step(1)
            poison.remove()
        assert all(one.host.grad is None and one.norm is None for one in optimizer._trained())
        a, b = plain.step(1), there.step(1)
        assert a is not None
        assert b is not None
        assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)
        assert_equal(everything(there), everything(plain))


def test_parameters_without_a_gradient_stay() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "frozen": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    model["frozen"].requires_grad_(False)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    with on_host(model, lr=0.1) as optimizer:
        assert optimizer.nbytes == optimizer_host_bytes([*model["used"].parameters(), *model["unused"].parameters()])
        model["used"](torch.ones(2, 4)).sum().backward()
        assert optimizer.clip(1.0) > 0
        optimizer.step()
        optimizer.wait()
        changed = {name for name, one in model.named_parameters() if not torch.equal(one, before[name])}
        assert changed == {"used.weight", "used.bias"}
        assert not any(optimizer.state[one]["step"] for one in model["unused"].parameters())


def test_too_little_host_memory_is_refused_with_what_it_takes_and_what_is_free() -> None:
    require_optimizer_room(1 << 30, 1 << 30)
    with pytest.raises(UsageError, match=r"takes 2 GiB of host memory .*, and 1 GiB are free") as error:
        require_optimizer_room(2 << 30, 1 << 30)
    assert "\n" not in str(error.value)
