"""A user's step is recorded as it runs: Hugging Face models, adapters, optimizers, and steps that do all themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memo.errors import RecordError, UsageError
from memo.record import Step, load_step, record_step

OPTIMIZERS = [None, "adamw", "sgd,momentum=0.9"]


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def plain() -> Step:
    model, ids = llama(), torch.arange(96).view(2, 48) % 50
    return Step(model=model, loss=lambda: model(ids, labels=ids, use_cache=False).loss, inputs=(ids,))


def padded() -> Step:
    model, ids = llama(), torch.arange(96).view(2, 48) % 50
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    return Step(model=model, loss=lambda: model(ids, labels=ids, attention_mask=mask, use_cache=False).loss)


def packed() -> Step:
    model, lengths = llama(), torch.tensor([20, 50, 26])
    positions = torch.cat([torch.arange(int(length)) for length in lengths])[None]
    bounds = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = bounds.diff().max().item()
    varlen = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    ids = positions % 50
    return Step(
        model=model,
        loss=lambda: model(ids, labels=ids, position_ids=positions, use_cache=False, **varlen).loss,
    )


class Adapter(nn.Module):
    """LoRA on one linear layer, as peft computes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.1)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.base(x)
        return base + 2.0 * self.up(self.down(self.dropout(x).to(self.down.weight.dtype))).to(base.dtype)


def lora() -> Step:
    model, ids = llama(), torch.arange(96).view(2, 48) % 50
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)
    return Step(model=model, loss=lambda: model(ids, labels=ids, use_cache=False).loss)


@pytest.mark.covering(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("build", [plain, padded, packed, lora])
def test_the_trace_is_that_of_a_real_run(build: Callable[[], Step], optimizer: str | None) -> None:
    byteless, real = (record_step(build, exact=True, optimizer=optimizer, real=real) for real in (False, True))
    assert len(byteless.trace.allocations) > 200
    assert byteless == real


STATIC_NBYTES = 3 * 2 * (64 + 8) * 4
"""Parameters and two moments of Trainer's model."""


class Trainer:
    """A step of each kind, over one model."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.x = torch.ones(2, 8)
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def __call__(self) -> None:
        loss = self.model(self.x).mean()
        loss.backward()
        del loss
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self()

    def late(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).mean().backward()
        self.optimizer.step()


def loaded(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]) -> Callable[[], Step]:
    monkeypatch.setattr(f"{__name__}.made_by_user", lambda *, batch, tokens: make(), raising=False)
    return functools.partial(load_step(f"{__name__}:made_by_user"), batch=1, tokens=1)


KINDS: dict[str, Callable[[], Any]] = {
    "object": Trainer,
    "method": lambda: Trainer().step,
    "partial": lambda: functools.partial(Trainer.step, Trainer()),
    "function": lambda: (lambda trainer: lambda: trainer())(Trainer()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_does_all_itself_is_that_of_its_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def parts() -> Any:
        trainer = Trainer()
        return trainer.model, lambda: trainer.model(trainer.x).mean(), trainer.optimizer

    whole, apart = (record_step(loaded(monkeypatch, make), exact=True) for make in (KINDS[kind], parts))
    assert [a.size for a in whole.trace.allocations] == [a.size for a in apart.trace.allocations]
    assert whole.trace.peak_nbytes == apart.trace.peak_nbytes
    assert whole.static_nbytes == STATIC_NBYTES
    # Adam's step counters come from torch.tensor, which is no allocation: seen only where the optimizer is known.
    assert apart.static_nbytes == STATIC_NBYTES + 4 * 4


def test_gradients_of_the_step_before_are_freed_in_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = record_step(loaded(monkeypatch, lambda: Trainer().late), exact=True)
    older, new = recording.trace.allocations[:4], recording.trace.allocations[4:]
    assert sorted(a.size for a in older) == [32, 32, 256, 256]
    assert max(a.upper for a in older) < min(a.lower for a in new)
    assert recording.static_nbytes == STATIC_NBYTES


def test_a_profile_refuses_a_step_that_runs_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.made_by_user", lambda *, batch, tokens: Trainer(), raising=False)
    step = load_step(f"{__name__}:made_by_user", needs_loss=True)(batch=1, tokens=1)
    with pytest.raises(RecordError, match="runs backward itself"):
        step.loss()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("lion", "choose one of"),
        ("sgd,momentum", "not name=value"),
        ("sgd,speed=1", "speed"),
        ("collections:Counter", "not a torch.optim.Optimizer"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_a_usage_error(spec: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        record_step(plain, optimizer=spec)


def test_an_error_of_the_step_names_its_place() -> None:
    def build() -> Step:
        model = nn.Linear(3, 4)
        return Step(model=model, loss=lambda: model(torch.ones(2, 5)).sum())

    with pytest.raises(RecordError, match=r"the step raised RuntimeError at .*test_users_steps\.py:\d+ \(<lambda>\): "):
        record_step(build)


def test_what_is_compiled_is_recorded_as_written() -> None:
    def build(compiled: bool) -> Step:
        model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.ones(2, 8)
        run = torch.compile(model) if compiled else model
        return Step(model=model, loss=lambda: run(x).sum())

    assert record_step(lambda: build(True)) == record_step(lambda: build(False))
