"""NeMo AutoModel's model, checkpointing and loss in a loop, with and without memo.

Its recipes need CUDA; the test takes their parts. Stand-in: CUDA's current device is the CPU, which `from_config` asks for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

if importlib.util.find_spec("nemo_automodel") is None:
    pytest.skip("nemo-automodel is not installed", allow_module_level=True)

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
    run_of,
)
from nemo_automodel import NeMoAutoModelForCausalLM
from nemo_automodel.components.distributed.config import DDPConfig
from nemo_automodel.components.distributed.ddp import parallelize_ddp
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy

import memo
from memo.integrations.hf import checkpoint_with_memo

LAYERS = 3


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def trained(checkpointing: bool | str, use: Callable[[Any], object] = id) -> Run:
    """Five steps of a Llama; `use` gets the model as the recipe would have it."""
    torch.manual_seed(0)
    model: Any = NeMoAutoModelForCausalLM.from_config(
        llama(LAYERS).config, dtype=torch.float32, use_liger_kernel=False, attn_implementation="sdpa"
    )
    config = DDPConfig(activation_checkpointing=checkpointing)
    model = parallelize_ddp(model, config, device=torch.device("cpu")).train()
    use(model)
    optimizer, loss_of = torch.optim.AdamW(model.parameters(), lr=1e-2), MaskedCrossEntropy()
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        ids = torch.randint(VOCAB, (2, SEQ), generator=generator)
        loss = loss_of(model(input_ids=ids, use_cache=False).logits, ids.roll(-1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return run_of(model, losses)


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_five_steps_are_as_without(checkpointing: bool | str) -> None:
    managers: list[memo.Manager] = []
    want = trained(checkpointing)
    got = trained(
        checkpointing,
        lambda model: managers.append(memo.offload(model, alpha=0.0, host="64MiB", min_bytes=MIN_BYTES).attach()),
    )
    assert_same(got, want)
    assert_divided(managers[0], LAYERS)
    assert managers[0].report().replaced == (LAYERS if checkpointing else 0)
    managers[0].close()


def test_its_checkpoints_may_be_memos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memo.checkpointing.function.MIN_BYTES", MIN_BYTES)
    assert_same(trained(True, checkpoint_with_memo), trained(True))
    assert_checkpointed_by_memo(LAYERS)
