"""FLOPs counted as a step runs are those of arithmetic, of layers with full and with local attention."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import memo
from memo.gpt import AttentionPattern, Precision, preset
from memo.gpt.arithmetic import StepLayout, derive_profile
from memo.mip.inputs import hardware_preset
from memo.profiling.layer_flops import _flash_flop, forward_flops
from memo.record import gpt_step
from memo.swap import find_layers

TOKENS, WINDOW = 192, 40
FLASH = torch.ops.aten._flash_attention_forward


def test_each_kind_of_layer_counts_its_own_pairs() -> None:
    config = preset("tiny", layers=3, max_seq=TOKENS, pattern=AttentionPattern(window=WINDOW, full_every=3))
    step = functools.partial(gpt_step, config, batch=2, tokens=TOKENS, precision=Precision.FP32)()
    found, whole = forward_flops(step, find_layers(step.model, step.layers))
    profile = derive_profile(
        config, hardware_preset("h100"), StepLayout(tokens=TOKENS, batch=2), precision=Precision.FP32
    )
    derived = profile.layer_profiles()
    assert [one.attention for one in found] == [one.attention_flops for one in derived]
    assert [one.whole for one in found] == [one.forward_flops for one in derived]
    assert whole.attention == sum(one.attention for one in found)


def test_a_measured_profile_has_a_class_for_each_kind(tmp_path: Path) -> None:
    config = preset("tiny", layers=4, hidden=32, heads=2, max_seq=64, pattern=AttentionPattern(window=16, full_every=2))
    build = functools.partial(gpt_step, config, batch=1, tokens=64, precision=Precision.FP32)
    profile = memo.profile(build, name="pattern", batch=1, tokens=64, repeats=1, disk=tmp_path)
    assert profile.layers == ("Block", "Block#2") * 2
    local, full = profile.classes
    assert local.attention_flops < full.attention_flops
    assert local.full_bytes == full.full_bytes


@pytest.mark.parametrize("before", [None, -1, 0, WINDOW - 1, TOKENS])
def test_a_gpus_flash_kernel_counts_its_window(before: int | None) -> None:
    tensors = [torch.empty(2, TOKENS, heads, 16, device="meta", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    sides = {} if before is None else {"window_size_left": before, "window_size_right": 0}
    with FlopCounterMode(display=False, custom_mapping={FLASH: _flash_flop}) as counter:
        FLASH(*tensors, None, None, TOKENS, TOKENS, 0.0, False, False, **sides)
    seen = TOKENS if before in (None, -1, TOKENS) else before + 1
    # Twice what is in the windows, as of full attention the whole square, of which causal attention is half.
    keys = 2 * seen - seen * seen / TOKENS
    assert counter.get_total_flops() == 4 * 2 * 4 * TOKENS * 16 * keys
