"""DeepSpeed's engine with and without memo: ZeRO-1, 2 and 3, with the optimizer on the device or in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from integrations import MIN_BYTES, SEQ, STEPS, VOCAB, Run, assert_divided, assert_same, llama, run_of
from torch import nn

import memo
from memo.checkpointing.function import _thread

deepspeed = pytest.importorskip("deepspeed", reason="deepspeed is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning:deepspeed"), pytest.mark.timeout(600)]
LAYERS = 3


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in (("LOCAL_RANK", "0"), ("RANK", "0"), ("WORLD_SIZE", "1")):
            environment.setenv(name, value)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def settings(stage: int, *, offload: bool, accumulate: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # partitions the smallest parameters, too
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulate,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,  # its own has to be compiled
        "zero_allow_untested_optimizer": True,
    }


def trained(
    config: dict[str, Any],
    alpha: float | None,
    accumulate: int = 1,
    *,
    leaves: bool = False,
    checkpoint: Callable[[Any], None] = lambda model: None,
) -> tuple[Run, memo.Manager | None, Any]:
    model = llama(LAYERS)
    checkpoint(model)
    if leaves:
        deepspeed.utils.set_z3_leaf_modules(model, [type(model.model.layers[0])])
    engine, *_ = deepspeed.initialize(model=model, config=config)
    manager = None if alpha is None else memo.offload(engine.module, alpha=alpha, min_bytes=MIN_BYTES).attach()
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS * accumulate):
        ids = torch.randint(VOCAB, (2, SEQ), generator=generator)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    whole = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(whole, enabled=config["zero_optimization"]["stage"] == 3):
        after = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    shown = manager.explain(0) if manager is not None else None
    engine.destroy()
    return Run(losses, after), manager, shown


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_an_engine_with_memo_computes_the_same_and_divides_every_layer(stage: int, offload: bool, alpha: float) -> None:
    accumulate = 1 + (stage == 2)
    config = settings(stage, offload=offload, accumulate=accumulate)
    want, _, _ = trained(config, None, accumulate)
    got, manager, shown = trained(config, alpha, accumulate)
    assert manager is not None
    assert_same(got, want, steps=STEPS * accumulate)
    assert_divided(manager, LAYERS, forwards=STEPS * accumulate)
    if alpha == 0 and stage < 3:
        assert shown.used.kept_fraction <= 0.2, shown
    if alpha == 0 and stage == 3:
        # What reads a partitioned parameter is kept: the parameter is not there when its layer is replayed.
        assert shown.used.kept_fraction <= 0.75, shown
        assert {row.fate for row in shown.rows if row.operator == "aten.mm" and row.is_saved} == {"moved"}, shown
    manager.close()


@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_layers_that_are_leaves_of_zero_3_move_as_little_as_any(alpha: float) -> None:
    config = settings(3, offload=False, accumulate=1)
    want, _, _ = trained(config, None, leaves=True)
    got, manager, shown = trained(config, alpha, leaves=True)
    assert manager is not None
    assert_same(got, want)
    assert_divided(manager, LAYERS)
    if alpha == 0:
        assert shown.used.kept_fraction <= 0.2, shown
    manager.close()


def test_the_engine_itself_may_be_given() -> None:
    config = settings(2, offload=False, accumulate=1)
    engine, *_ = deepspeed.initialize(model=llama(LAYERS), config=config)
    manager = memo.offload(engine, alpha=0.25, min_bytes=MIN_BYTES).attach()
    ids = torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(1))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    assert_divided(manager, LAYERS, forwards=1)
    manager.close()
    engine.destroy()


def regions() -> memo.Report:
    """What memo.checkpoint has done in this thread, whose context is then closed."""
    (context,) = _thread.contexts.values()
    _thread.contexts.clear()
    context.close()
    return context.report()


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_models_checkpoints_may_be_memos(stage: int, leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from memo.integrations.hf import checkpoint_with_memo

    monkeypatch.setattr("memo.checkpointing.function.MIN_BYTES", MIN_BYTES)
    config = settings(stage, offload=False, accumulate=1)
    want, _, _ = trained(config, None, leaves=leaves)
    assert_same(trained(config, None, leaves=leaves, checkpoint=checkpoint_with_memo)[0], want)
    report = regions()
    assert report.recompute is not None
    assert report.recompute.accepted == LAYERS
    assert report.recompute.refused == {}
    assert report.recompute.recomputed_bytes >= STEPS * LAYERS * MIN_BYTES


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))), 0.1)


@pytest.mark.parametrize("interval", [1, 2])
def test_a_pipelines_checkpoints_may_be_memos(interval: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memo.checkpointing.function.MIN_BYTES", MIN_BYTES)
    config = settings(1, offload=False, accumulate=2)

    def piped(**checkpoints: Any) -> Run:
        torch.manual_seed(0)
        layers = [nn.Embedding(VOCAB, 32), *(Block(32) for _ in range(LAYERS)), nn.Linear(32, VOCAB)]
        loss_of = lambda out, ids: nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten())  # noqa: E731
        deepspeed.init_distributed("gloo")
        model = deepspeed.pipe.PipelineModule(layers, num_stages=1, loss_fn=loss_of, **checkpoints)
        engine, *_ = deepspeed.initialize(model=model, config=config)
        generator = torch.Generator().manual_seed(1)
        ids = iter(torch.randint(VOCAB, (2 * STEPS, 2, SEQ), generator=generator))
        losses = [float(engine.train_batch((each, each) for each in ids)) for _ in range(STEPS)]
        engine.destroy()
        return run_of(engine.module, losses)

    want = piped()
    got = piped(activation_checkpoint_interval=interval, activation_checkpoint_func=memo.checkpoint)
    assert_same(got, want)
    report = regions()
    assert report.recompute is not None
    assert report.recompute.refused == {}
    assert report.recompute.recomputed_bytes >= STEPS * MIN_BYTES
