"""verl's FSDP2 engine, from its configuration to trained parameters, with and without memo.

Stand-in on a CPU: a platform for it, by verl's own extension point.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed", allow_module_level=True)

from integrations import (
    MIN_BYTES,
    SEQ,
    STEPS,
    VOCAB,
    Run,
    assert_checkpointed_by_memo,
    assert_divided,
    assert_same,
    llama,
    word_tokenizer,
)
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA

from memo.integrations.hf import checkpoint_with_memo

LAYERS = 3


class Cpu(PlatformCUDA):  # type: ignore[misc]
    """The CPU as a platform of verl's."""

    device_name, device_module = "cpu", torch.cpu

    def current_device(self) -> Any:
        return "cpu"

    def set_device(self, device_index: int) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def empty_cache(self) -> None:
        pass


set_platform(Cpu())  # before the engine asks for one

from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.utils.losses import sft_loss  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small Llama's folder; one rank of gloo is there meanwhile."""
    folder = tmp_path_factory.mktemp("model")
    llama(LAYERS).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    with pytest.MonkeyPatch.context() as environment:
        for name, value in (("LOCAL_RANK", "0"), ("RANK", "0"), ("WORLD_SIZE", "1")):
            environment.setenv(name, value)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield folder
        dist.destroy_process_group()


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def trained(
    model: Path, kind: Any, *, checkpointing: bool, use: Callable[[Any], None] = lambda engine: None
) -> tuple[Run, Any]:
    """Five steps of supervised training, and the engine."""
    engine = kind(
        HFModelConfig(
            path=str(model),
            use_remove_padding=False,
            enable_gradient_checkpointing=checkpointing,
            override_config={"attn_implementation": "sdpa"},
        ),
        FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            use_remove_padding=False,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        ),
        FSDPOptimizerConfig(lr=1e-2, total_training_steps=STEPS),
        CheckpointConfig(),
    )
    engine.initialize()
    use(engine)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        rows = [torch.randint(3, VOCAB, (length,), generator=generator) for length in (SEQ, SEQ - 16)]
        batch = {
            "input_ids": nested(rows),
            "position_ids": nested([torch.arange(len(row)) for row in rows]),
            "loss_mask": nested([torch.ones(len(row)) for row in rows]),
        }
        settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "temperature": 1.0}
        settings |= {"use_remove_padding": False, "global_batch_size": 2}
        with engine.train_mode():
            told = engine.train_batch(
                tensordict_utils.get_tensordict(batch, non_tensor_dict=settings), functools.partial(sft_loss, None)
            )
        losses += told["loss"]
    return Run(losses, {n: p.detach().to_local().clone() for n, p in engine.module.named_parameters()}), engine


@pytest.mark.parametrize("checkpointing", [True, False])
def test_five_steps_are_as_without(model: Path, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    importlib.import_module("memo_engine")
    want, _ = trained(model, FSDPEngineWithLMHead, checkpointing=checkpointing)
    kind = EngineRegistry.get_engine_cls("language_model", "fsdp2")
    got, engine = trained(model, kind, checkpointing=checkpointing)
    assert_same(got, want)
    assert_divided(engine.manager, LAYERS)
    assert engine.manager.report().replaced == (LAYERS if checkpointing else 0)
    engine.manager.close()


def test_its_checkpoints_may_be_memos(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memo.checkpointing.function.MIN_BYTES", MIN_BYTES)
    want, _ = trained(model, FSDPEngineWithLMHead, checkpointing=True)
    got, _ = trained(
        model, FSDPEngineWithLMHead, checkpointing=True, use=lambda engine: checkpoint_with_memo(engine.module)
    )
    assert_same(got, want)
    assert_checkpointed_by_memo(LAYERS)
