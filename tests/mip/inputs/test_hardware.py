"""Presets by the names that drivers give to GPUs."""

from __future__ import annotations

import pytest

from memo.mip.inputs.hardware import PRESETS, hardware_of


@pytest.mark.parametrize(
    ("called", "preset"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 4090", "h100"),
    ],
)
def test_a_gpu_is_known_by_its_name(called: str, preset: str) -> None:
    assert hardware_of(called) is PRESETS[preset]
