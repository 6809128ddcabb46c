"""Megatron-Core's GPTModel with and without memo, (sequence, batch, hidden), through its own forward-backward function.

Stand-ins for what Megatron asks of CUDA: the current device is the CPU, its random states are those of CUDA, and the
counter of tokens that the forward-backward function allocates lies on it, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from integrations import MIN_BYTES, STEPS, Run, assert_checkpointed_by_memo, assert_divided, assert_same, run_of
from torch import nn

import memo
from memo.errors import UsageError

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.tensor_parallel import random as states
from megatron.core.transformer import TransformerConfig

from memo.integrations.megatron import managed, offload

LAYERS, SEQ, VOCAB = 3, 64, 96
KINDS: dict[str, dict[str, Any]] = {
    "gelu": {},
    "dropout": {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    "swiglu": {"gated_linear_unit": True, "activation_func": nn.functional.silu, "normalization": "RMSNorm"},
    "grouped queries": {"num_query_groups": 2, "add_bias_linear": False},
}


class TorchWithoutCuda:
    """The module torch, whose `zeros` are on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, device: Any = None, **named: Any) -> torch.Tensor:
        return torch.zeros(*size, **named)


def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the stand-ins in place."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "manual_seed", torch.manual_seed)
    monkeypatch.setattr(states, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    monkeypatch.setattr(states, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
    monkeypatch.setattr(schedules, "torch", TorchWithoutCuda())


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    without_cuda(monkeypatch)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def gpt(**kind: Any) -> Any:
    tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    torch.manual_seed(0)
    shape = {"num_layers": LAYERS, "hidden_size": 32, "num_attention_heads": 4}
    none = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    config = TransformerConfig(**shape, use_cpu_initialization=True, **{**none, **kind})
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=kind.get("normalization")),
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        position_embedding_type="rope",
    ).train()


def forward_step(batches: Iterator[torch.Tensor], model: nn.Module) -> Any:
    ids = next(batches)
    positions = torch.arange(SEQ).expand_as(ids)
    mask = torch.ones(1, 1, SEQ, SEQ).tril() < 0.5
    losses = model(ids, positions, mask, labels=ids.roll(-1, 1))
    return losses, lambda out: (out.mean(), {"loss": out.detach().mean()})


def trained(model: Any, step: Any, *, batch: int, microbatches: int = 2) -> Run:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run, losses = get_forward_backward_func(), []
    for _ in range(STEPS):
        batches = iter([torch.randint(VOCAB, (batch, SEQ), generator=generator) for _ in range(microbatches)])
        told = run(
            forward_step_func=step,
            data_iterator=batches,
            model=[model],
            num_microbatches=microbatches,
            seq_length=SEQ,
            micro_batch_size=batch,
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(float(part["loss"]) for part in told))
    return run_of(model, losses)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_a_managed_forward_step_changes_no_loss_and_divides_every_layer(kind: str, batch: int, alpha: float) -> None:
    want = trained(gpt(**KINDS[kind]), forward_step, batch=batch)
    step: Any = managed(forward_step, alpha=alpha, min_bytes=MIN_BYTES)
    got = trained(gpt(**KINDS[kind]), step, batch=batch)
    assert_same(got, want)
    assert_divided(step.manager, LAYERS, forwards=2 * STEPS)
    if alpha == 0:
        shown = step.manager.explain(0)
        assert shown.used.kept_fraction <= 0.5, shown


def test_a_manager_is_entered_around_each_forward_step() -> None:
    want = trained(gpt(), forward_step, batch=2)
    model = gpt()
    manager = offload(model, alpha=0.25, min_bytes=MIN_BYTES)
    assert_same(trained(model, managed(forward_step, manager), batch=2), want)
    assert_divided(manager, LAYERS, forwards=2 * STEPS)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_in_memos_checkpoint_change_no_loss(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's own `tensor_parallel.checkpoint` around each layer has the same bits, too."""
    monkeypatch.setattr("memo.checkpointing.function.MIN_BYTES", MIN_BYTES)

    def checkpointed(by: Any) -> Run:
        model = gpt(**KINDS[kind])
        for layer in model.decoder.layers:
            layer.forward = functools.partial(by, layer.forward)
        return trained(model, forward_step, batch=2)

    want = trained(gpt(**KINDS[kind]), forward_step, batch=2)
    assert_same(checkpointed(memo.checkpoint), want)
    assert_checkpointed_by_memo(LAYERS)
    assert_same(
        checkpointed(
            lambda forward, hidden_states, **named: tensor_parallel.checkpoint(
                lambda x: forward(x, **named), False, hidden_states
            )
        ),
        want,
    )


def test_tokens_come_first_and_are_not_taken_for_the_batch() -> None:
    """An eighth of the tokens moves of what is divided, whatever the batch."""
    moved = []
    for batch in (1, 2):
        model = gpt(add_bias_linear=False)
        manager = offload(model, alpha=0.125, min_bytes=1)
        trained(model, managed(forward_step, manager), batch=batch, microbatches=1)
        moved.append(sum(use.moved_bytes for use in manager.report().tiers[1:]))
        manager.close()
    assert moved[1] == pytest.approx(2 * moved[0], rel=0.1)


def test_all_chunks_of_an_interleaved_model_have_one_manager() -> None:
    chunks = [gpt(), gpt()]
    assert len(offload(chunks, alpha=0.0).layers) == 2 * LAYERS


def test_a_second_model_is_refused() -> None:
    step: Any = managed(forward_step, alpha=0.0, min_bytes=MIN_BYTES)
    first, second = gpt(), gpt()
    trained(first, step, batch=1)
    with pytest.raises(UsageError, match="offload\\(chunks\\)"):
        trained(second, step, batch=1)


def test_megatrons_own_recompute_and_other_models_are_refused() -> None:
    model = gpt(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    with pytest.raises(UsageError, match="--recompute-granularity"):
        offload(model)
    with pytest.raises(UsageError, match="TransformerBlock"):
        offload(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="not both"):
        managed(forward_step, offload(gpt()), alpha=0.0)


def test_options_are_memo_offloads() -> None:
    assert isinstance(offload(gpt(), levels={0: 0.5}), memo.Manager)
