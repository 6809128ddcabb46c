"""A loop of Accelerate's with and without memo, as docs/integrations/accelerate.md writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from integrations import STEPS, Run, Texts, assert_divided, compare, llama, run_of
from torch import nn

import memo

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("transformers", reason="transformers is not installed, whose model this trains")

LAYERS = 3


@pytest.mark.covering(2)
@pytest.mark.parametrize("alpha", [0.0, 0.25])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_losses_are_as_without_memo(alpha: float, precision: str, accumulated: int) -> None:
    def train(offload: Callable[[nn.Module], memo.Manager] | None) -> Run:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # a process has one precision
        accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulated
        )
        model = llama(LAYERS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = torch.utils.data.DataLoader(Texts(2 * accumulated * STEPS), batch_size=2)
        prepared: Any = accelerator.prepare(model, optimizer, data)
        model, optimizer, data = prepared
        if offload is not None:
            offload(accelerator.unwrap_model(model)).attach()
        losses = []
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        return run_of(accelerator.unwrap_model(model), losses[::accumulated])

    manager = compare(train, alpha)
    assert_divided(manager, LAYERS, forwards=accumulated * STEPS)
    manager.close()
