"""Presets by the names that people and drivers give to GPUs, and the division of a node's links."""

from __future__ import annotations

import pytest

from memo.errors import UsageError
from memo.mip.inputs import PRESETS, hardware_of, hardware_preset


@pytest.mark.parametrize(
    ("called", "preset"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 96GB HBM2e", "h100-96g"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Tesla T4", "h100"),
    ],
)
def test_a_gpu_is_known_by_its_name(called: str, preset: str) -> None:
    assert hardware_of(called) is PRESETS[preset]


@pytest.mark.parametrize(
    ("written", "preset"),
    [
        ("H100", "h100"),
        ("H100-80GB", "h100"),
        ("H100 SXM5", "h100"),
        ("h100-96GB", "h100-96g"),
        ("A100", "a100-80g"),
        ("A100-80GB", "a100-80g"),
        ("a100_40gb", "a100-40g"),
        ("A800 80GB", "a800"),
        ("H200-141GB", "h200"),
        ("GB200 NVL72", "gb200"),
        ("RTX 4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("MI300X", "mi300x"),
        ("L40S", "l40s"),
    ],
)
def test_a_preset_is_found_by_the_usual_spellings(written: str, preset: str) -> None:
    assert hardware_preset(written) is PRESETS[preset]


def test_each_preset_is_found_by_its_name_and_says_so() -> None:
    for name in PRESETS:
        assert hardware_preset(name) is hardware_preset(name.upper()) is PRESETS[name]
        assert PRESETS[name].name == name


@pytest.mark.parametrize("written", ["", "-", "nvidia", "h", "100", "H100 PCIe", "a100-60g", "200"])
def test_other_names_are_refused_with_the_list(written: str) -> None:
    with pytest.raises(UsageError, match="one of a100-80g, "):
        hardware_preset(written)


def test_gpus_without_nvlink_reach_their_peers_no_faster_than_the_host() -> None:
    for name in ("l40s", "rtx4090"):
        machine = PRESETS[name]
        assert machine.network.peers_through_pcie
        assert machine.nvlink_bytes_per_s * machine.network.node_efficiency <= machine.d2h_bytes_per_s
    assert [name for name in PRESETS if PRESETS[name].network.peers_through_pcie] == ["l40s", "rtx4090"]


def test_copies_keep_half_of_a_link_that_collectives_would_fill() -> None:
    machine = PRESETS["h100"]
    free = machine.lanes(1).d2h_bytes_per_s
    assert machine.lanes(1, taken=0.25).d2h_bytes_per_s == pytest.approx(0.75 * free)
    assert machine.lanes(1, taken=3.0).d2h_bytes_per_s == pytest.approx(0.5 * free)


# Shah et al. 2024 (2407.08608), figures 5 and 6: causal, 16k tokens, TFLOP/s of an H100 forward and backward.
PUBLISHED_ATTENTION = {
    ("cuDNN", 64): (413, 433), ("FlashAttention 2", 64): (324, 291), ("FlashAttention 3", 64): (497, 474),
    ("cuDNN", 128): (595, 516), ("FlashAttention 2", 128): (370, 322), ("FlashAttention 3", 128): (648, 561),
}  # fmt: skip


@pytest.mark.parametrize(("kernel", "head"), PUBLISHED_ATTENTION)
def test_attention_has_the_published_rates_of_its_kernel_head_size_and_direction(kernel: str, head: int) -> None:
    machine = PRESETS["h100"].with_attention(kernel)
    forward, backward = PUBLISHED_ATTENTION[kernel, head]
    assert 1e12 / machine.attention_s(1e12, head=head, keys=16384) == pytest.approx(1e12 * forward, rel=5e-3)
    seconds = machine.attention_s(1e12, head=head, keys=16384, backward=True)
    assert 2.5e12 / seconds == pytest.approx(1e12 * backward, rel=5e-3)


@pytest.mark.parametrize(("head", "published"), [(64, 171), (128, 189)])
def test_attention_of_an_a100_has_the_published_rate_of_both_passes(head: int, published: int) -> None:
    """Dao 2023 (2307.08691), figure 4: causal, 16k tokens, TFLOP/s."""
    passes = [PRESETS["a100-80g"].attention_s(1e12, head=head, keys=16384, backward=back) for back in (False, True)]
    assert 3.5 / sum(passes) == pytest.approx(published, rel=5e-3)


def test_attention_whose_keys_and_values_exceed_the_cache_is_slower_and_other_heads_lie_between() -> None:
    machine = PRESETS["h100"]
    near, far = (machine.attention_s(1e12, head=128, keys=keys) for keys in (97_000, 98_000))
    assert near / far == pytest.approx(507 / 536, rel=1e-3)  # both passes of an H200 at 256k tokens over those at 16k
    at = {head: machine.attention_s(1e12, head=head, keys=16384) for head in (32, 64, 96, 128, 256)}
    assert at[32] == 2 * at[64]
    assert 2 / at[96] == pytest.approx(1 / at[64] + 1 / at[128])
    assert at[256] == at[128]
