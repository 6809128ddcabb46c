"""The ways that the benchmarks compare, on a GPU: streams and all, each gives plain training's gradients."""

from __future__ import annotations

import pytest
import torch
from cuda_sanitizer import assert_clean

from benchmarks import gpu_hf
from benchmarks.comparison import Setup, compare
from benchmarks.gpu_plans import at_alphas
from benchmarks.longest import capped
from benchmarks.peers.ways import (
    ATTENTION,
    ATTENTION_OFFLOADED,
    AXOLOTL,
    KEEP,
    OFFLOADED,
    SAVE_ON_CPU,
    TRANSFORMERS_ATTENTION,
    peers,
)
from memo.gpt import preset

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device("cuda", torch.cuda.current_device())


def test_each_way_gives_the_gradients_of_plain_training_bit_for_bit(device: torch.device) -> None:
    config = preset("tiny", hidden=128, max_seq=1024, positions="rotary")
    table = compare(
        Setup(model="tiny", device=device, rounds=2), config, [*peers(), *at_alphas((0.0, 1.0), "64MiB", device=None)]
    )
    ran = [row for row in table.rows if row.failed is None]
    lacking = [row.failed for row in table.rows if row.failed is not None]
    assert lacking == [] or lacking[0].startswith("trl_activation_offloading.py is not there")  # type: ignore[union-attr]
    differences = {row.way: row.gradient_difference for row in ran}
    # torch's save_on_cpu gives backward contiguous copies: other strides, which some kernels round another way.
    assert (differences.pop(SAVE_ON_CPU) or 0) < 0.05
    assert differences == dict.fromkeys(differences, 0.0)
    assert table.rows[0].way == KEEP
    moved = {row.way: row.moved for row in ran}
    hidden_bytes = config.layers * 1024 * 128 * 2
    for way in (OFFLOADED, ATTENTION_OFFLOADED):
        assert (moved[way].out_bytes, moved[way].back_bytes) == (hidden_bytes, hidden_bytes)


def test_the_cap_is_kept_and_taken_away_again(device: torch.device) -> None:
    torch.cuda.empty_cache()  # else what tests before this one have left is large enough
    with capped(device, 64 << 20), pytest.raises(torch.OutOfMemoryError):
        torch.empty(128 << 20, dtype=torch.uint8, device=device)
    torch.empty(128 << 20, dtype=torch.uint8, device=device)


SANITIZED = """
import torch
from benchmarks.comparison import train_step
from benchmarks.peers.ways import peers
from memo.gpt.config import preset
from memo.gpt.model.model import GPT
model = GPT(preset("tiny", layers=3, hidden=64, max_seq=256), device="cuda", dtype=torch.bfloat16)
ids = torch.randint(0, 100, (1, 257), device="cuda")
way = next(way for way in peers() if way.name == "offloaded checkpointing")
with way.start(model) as running:
    for _ in range(3):
        train_step(model, ids, running)
print("clean")
"""


@pytest.mark.usefixtures("device")
def test_the_cuda_sanitizer_is_clean_of_offloaded_checkpointing() -> None:
    assert_clean("-c", SANITIZED)


def test_flags_of_libraries_give_the_gradients_of_plain_training_bit_for_bit(device: torch.device) -> None:
    pytest.importorskip("peft")
    task = gpu_hf.Task(model="llama-3-8b+lora4", tokens=512, fields=gpu_hf.SMALL)
    rows = gpu_hf.measure(task, device, gpu_hf.ways(), 1, lambda body: None)["ways"]
    lacking = {row["way"]: row["failed"] for row in rows if row["failed"] is not None}
    assert set(lacking) <= {AXOLOTL}, lacking
    assert all("is not there: looked in" in why for why in lacking.values())
    ran = [row for row in rows if row["way"] not in lacking]
    assert {row["gradient_difference"] for row in ran} == {0.0}
    inputs = 3 * 512 * gpu_hf.SMALL["hidden_size"] * 2
    pinned = {row["way"]: row["peak_host_bytes"] for row in ran}
    assert pinned[TRANSFORMERS_ATTENTION] >= pinned[ATTENTION] + inputs
    if AXOLOTL in pinned:
        assert pinned[AXOLOTL] >= pinned[ATTENTION] + inputs  # attention's results are below its least size here
