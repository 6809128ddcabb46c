"""A plan within a device budget smaller than the buffers that the link is measured with."""

from __future__ import annotations

import warnings

import pytest
import torch

import memo
from memo.gpt import preset
from memo.gpt.model import GPT

pytestmark = pytest.mark.gpu

STEPS = 6
SEQ = 512
SPARE = 40 << 20
LINK_BUFFERS = 2 * (64 << 20)
"""What measuring the link takes."""


def test_what_measuring_the_link_takes_is_not_held_against_the_next_step() -> None:
    torch.manual_seed(0)
    config = preset("tiny", max_seq=SEQ, layers=12)
    model = GPT(config, device=torch.device("cuda"), dtype=torch.bfloat16)
    ids = torch.randint(0, config.vocab_size, (1, SEQ + 1), device="cuda")
    for _ in range(2):  # the libraries take their workspaces
        model(ids[:, :-1], ids[:, 1:]).backward()
        model.zero_grad(set_to_none=True)
    budget = torch.cuda.memory_allocated() + SPARE
    assert budget < LINK_BUFFERS
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*device memory than its budget")
        with_budget = memo.offload(model, device=budget, host="1GiB", disk=[])
        for _ in range(STEPS):
            with with_budget:
                loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
            model.zero_grad(set_to_none=True)
    assert with_budget.plan is not None
    with_budget.close()
