"""Hardware descriptions for planning: peaks, memories and links, with presets for GPUs known by name.

Owns the presets and their sources, and the division of a node's links and disks among its ranks. Rates measured on the
machine itself (`memo doctor --json`) replace a preset's.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from memo.errors import PlanError, UsageError
from memo.mip.inputs.network import Network
from memo.mip.inputs.profile import check_amounts

__all__ = ["PRESETS", "Hardware", "LaneRates", "hardware_of", "hardware_preset"]

GIB = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaneRates:
    """Rates of one rank while every rank of its node uses the same lanes. 0: there is no such lane."""

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    duplex_bytes_per_s: float
    """Sum of both directions at once."""
    disk_write_bytes_per_s: float
    disk_read_bytes_per_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of GPU in one kind of node."""

    name: str
    peak_flops: float
    """FLOP/s in dense bfloat16."""
    matmul_efficiency: float
    """Fraction of the peak that large matrix products reach."""
    attention_efficiency: float
    """Fraction of the peak that the fused attention kernel reaches."""
    device_bytes: int
    hbm_bytes_per_s: float
    d2h_bytes_per_s: float
    """One GPU alone to host memory."""
    h2d_bytes_per_s: float
    """One GPU alone from host memory."""
    duplex_bytes_per_s: float
    """One GPU alone, the sum of both directions at once."""
    node_d2h_bytes_per_s: float
    """All GPUs of a node together to host memory; switches, sockets and host memory may limit their sum."""
    node_h2d_bytes_per_s: float
    """All GPUs of a node together from host memory; switches, sockets and host memory may limit their sum."""
    nvlink_bytes_per_s: float
    """One GPU to its peers in the node, in one direction."""
    gpus_per_node: int
    host_bytes: int
    """Host memory of a node."""
    disk_write_bytes_per_s: float = 0.0
    """Writes to all disks of a node together; 0: there is none."""
    disk_read_bytes_per_s: float = 0.0
    """Reads from all disks of a node together; 0: there is none."""
    network: Network = dataclasses.field(default_factory=Network)
    """Links that collectives cross, within a node and between nodes."""

    def __post_init__(self) -> None:
        check_amounts(self, f"hardware {self.name[:80]!r}")
        for name in ("peak_flops", "matmul_efficiency", "attention_efficiency", "hbm_bytes_per_s", "gpus_per_node"):
            if not getattr(self, name) > 0:
                raise PlanError(f"hardware {self.name[:80]!r}: {name} is not positive")

    def lanes(self, ranks: int, *, taken: float = 0.0) -> LaneRates:
        """Divides the node's rates among `ranks` ranks, all of them busy at the same time.

        Args:
            ranks: number of the node's ranks.
            taken: fraction of each GPU's link that collectives take.
        """
        # Where both want more than the link has, it serves them in turn.
        free = max(1 - taken, 0.5)
        d2h = min(self.d2h_bytes_per_s * free, self.duplex_bytes_per_s * free, self.node_d2h_bytes_per_s / ranks)
        h2d = min(self.h2d_bytes_per_s * free, self.duplex_bytes_per_s * free, self.node_h2d_bytes_per_s / ranks)
        return LaneRates(
            d2h_bytes_per_s=d2h,
            h2d_bytes_per_s=h2d,
            duplex_bytes_per_s=min(self.duplex_bytes_per_s * free, d2h + h2d),
            disk_write_bytes_per_s=self.disk_write_bytes_per_s / ranks,
            disk_read_bytes_per_s=self.disk_read_bytes_per_s / ranks,
        )


# Peaks and memories: the makers' data sheets (NVIDIA A100, A800, H100, H200, B200 in the HGX form, GH200), dense
# bfloat16 without sparsity; memories are what nvidia-smi shows, 80 GB being 80 GiB there.
# Efficiencies: 0.64 of an A100's 312 TFLOP/s are the 200 that MEMO (SIGMOD 2025) and Megatron-LM reach in large layers;
# FlashAttention-2 reaches 0.6 of it forward at long sequences (Dao 2023), -3 0.65 on an H100 (Shah et al. 2024).
# PCIe: of generation 4's 31.5 and 5's 63 GB/s on 16 lanes, copies through page-locked memory reach 25 and 55 GB/s.
# A node of eight A100 or A800 has its GPUs in pairs behind switches; 13 GB/s for each of eight at once follows from the
# length from which MEMO (SIGMOD 2025) reports swap to be free. Elsewhere each GPU has a link of its own.
# Networks: a DGX A100 has eight 200 Gb/s NICs for computation, a DGX H100, H200 or B200 eight of 400 Gb/s (NVIDIA's
# reference architectures of the SuperPODs); A800 nodes as rented, four of 200; a GH200 one of 400.
# What rings of NCCL reach of a link, from busbw of nccl-tests: 232 of an A100's 300 GB/s (NVIDIA/nccl-tests issue 175;
# NCCL's tuning.cc caps it at 235), 154 to 159 of 200 where NVLink is cut to that (Galvatron's profile of eight GPUs),
# 365 to 370 of an H100's 450 (NVIDIA/nccl issue 1455, and NCCL's maintainer in nccl-tests issue 212). Of NICs: 85 to 96
# of 100 GB/s over four of 200 Gb/s (nccl-tests issues 119 and 175), 46 to 48 of 50 GB/s over one of 400 Gb/s (issue
# 290); 0.9 leaves room for a network with other traffic.
# Disks: four NVMe drives of a cloud node as DeepSpeed's DeepNVMe report (August 2024) measured them, 5 GB/s in, 10 out.
PCIE: dict[str, Any] = {"peers_through_pcie": True, "node_latency_s": 2.5e-6}
"""GPUs without NVLink; NCCL's tuning.cc gives a step of a ring 2.5 us over PCIe."""
PRESETS: dict[str, Hardware] = {
    preset.name: preset
    for preset in (
        Hardware(
            name="a100-80g",
            peak_flops=312e12,
            matmul_efficiency=0.64,
            attention_efficiency=0.60,
            device_bytes=80 * GIB,
            hbm_bytes_per_s=2.039e12,
            d2h_bytes_per_s=25e9,
            h2d_bytes_per_s=25e9,
            duplex_bytes_per_s=42e9,
            node_d2h_bytes_per_s=8 * 13e9,
            node_h2d_bytes_per_s=8 * 13e9,
            nvlink_bytes_per_s=300e9,
            gpus_per_node=8,
            host_bytes=2048 * GIB,
            disk_write_bytes_per_s=5e9,
            disk_read_bytes_per_s=10e9,
            network=Network(nics_per_node=8, nic_bytes_per_s=25e9, nic_efficiency=0.88, node_efficiency=0.78),
        ),
        Hardware(
            name="a800",  # an A100 whose NVLink is cut to 400 GB/s in sum
            peak_flops=312e12,
            matmul_efficiency=0.64,
            attention_efficiency=0.60,
            device_bytes=80 * GIB,
            hbm_bytes_per_s=2.039e12,
            d2h_bytes_per_s=25e9,
            h2d_bytes_per_s=25e9,
            duplex_bytes_per_s=42e9,
            node_d2h_bytes_per_s=8 * 13e9,
            node_h2d_bytes_per_s=8 * 13e9,
            nvlink_bytes_per_s=200e9,
            gpus_per_node=8,
            host_bytes=2048 * GIB,
            disk_write_bytes_per_s=5e9,
            disk_read_bytes_per_s=10e9,
            network=Network(nics_per_node=4, nic_bytes_per_s=25e9, nic_efficiency=0.88, node_efficiency=0.78),
        ),
        Hardware(
            name="h100",  # SXM5
            peak_flops=989e12,
            matmul_efficiency=0.60,
            attention_efficiency=0.55,
            device_bytes=80 * GIB,
            hbm_bytes_per_s=3.35e12,
            d2h_bytes_per_s=55e9,
            h2d_bytes_per_s=55e9,
            duplex_bytes_per_s=90e9,
            node_d2h_bytes_per_s=8 * 45e9,  # eight at once, bounded by the sockets' memory
            node_h2d_bytes_per_s=8 * 45e9,
            nvlink_bytes_per_s=450e9,
            gpus_per_node=8,
            host_bytes=2048 * GIB,
            disk_write_bytes_per_s=5e9,
            disk_read_bytes_per_s=10e9,
            network=Network(nics_per_node=8, nic_bytes_per_s=50e9, node_efficiency=0.82),
        ),
        Hardware(
            name="h200",  # an H100 with more and faster memory
            peak_flops=989e12,
            matmul_efficiency=0.60,
            attention_efficiency=0.55,
            device_bytes=141_000_000_000,
            hbm_bytes_per_s=4.8e12,
            d2h_bytes_per_s=55e9,
            h2d_bytes_per_s=55e9,
            duplex_bytes_per_s=90e9,
            node_d2h_bytes_per_s=8 * 45e9,
            node_h2d_bytes_per_s=8 * 45e9,
            nvlink_bytes_per_s=450e9,
            gpus_per_node=8,
            host_bytes=2048 * GIB,
            disk_write_bytes_per_s=5e9,
            disk_read_bytes_per_s=10e9,
            network=Network(nics_per_node=8, nic_bytes_per_s=50e9, node_efficiency=0.82),
        ),
        Hardware(
            name="b200",
            peak_flops=2250e12,
            matmul_efficiency=0.60,
            attention_efficiency=0.50,
            device_bytes=180_000_000_000,
            hbm_bytes_per_s=8.0e12,
            d2h_bytes_per_s=55e9,
            h2d_bytes_per_s=55e9,
            duplex_bytes_per_s=100e9,
            node_d2h_bytes_per_s=8 * 45e9,
            node_h2d_bytes_per_s=8 * 45e9,
            nvlink_bytes_per_s=900e9,
            gpus_per_node=8,
            host_bytes=4096 * GIB,
            disk_write_bytes_per_s=5e9,
            disk_read_bytes_per_s=10e9,
            network=Network(nics_per_node=8, nic_bytes_per_s=50e9, node_efficiency=0.82),
        ),
        Hardware(
            name="gh200",  # one Grace with one Hopper over NVLink-C2C; rates as measured in Megatron-LM issue 6491
            peak_flops=989e12,
            matmul_efficiency=0.60,
            attention_efficiency=0.55,
            device_bytes=96_000_000_000,
            hbm_bytes_per_s=4.0e12,
            d2h_bytes_per_s=170e9,
            h2d_bytes_per_s=410e9,
            duplex_bytes_per_s=450e9,
            node_d2h_bytes_per_s=170e9,
            node_h2d_bytes_per_s=410e9,
            nvlink_bytes_per_s=450e9,
            gpus_per_node=1,
            host_bytes=480 * GIB,
            disk_write_bytes_per_s=5e9,
            disk_read_bytes_per_s=10e9,
            network=Network(nics_per_node=1, nic_bytes_per_s=50e9),
        ),
        Hardware(
            # A rack of 36 Grace and 72 Blackwell, which NVLink connects, counted as one node; NVIDIA's data sheet of the
            # GB200 NVL72. Each Grace serves two GPUs: copies at what a GH200 reaches, half of it for each at once.
            name="gb200",
            peak_flops=2500e12,
            matmul_efficiency=0.60,
            attention_efficiency=0.50,
            device_bytes=186_000_000_000,
            hbm_bytes_per_s=8.0e12,
            d2h_bytes_per_s=170e9,
            h2d_bytes_per_s=200e9,  # a GPU's part of NVLink-C2C is 225 GB/s in each direction
            duplex_bytes_per_s=300e9,
            node_d2h_bytes_per_s=36 * 170e9,
            node_h2d_bytes_per_s=36 * 400e9,
            nvlink_bytes_per_s=900e9,
            gpus_per_node=72,
            host_bytes=36 * 480 * GIB,
            disk_write_bytes_per_s=18 * 5e9,
            disk_read_bytes_per_s=18 * 10e9,
            network=Network(nics_per_node=72, nic_bytes_per_s=50e9),
        ),
        Hardware(
            # Peaks of AMD's data sheet; 708 of its 1,307 TFLOP/s in large products (AMD, "Measuring Max-Achievable FLOPs").
            # Seven links of 64 GB/s to the peers, of which 48 are usable (AMD, "Understanding RCCL Bandwidth", 2025).
            name="mi300x",
            peak_flops=1307e12,
            matmul_efficiency=0.54,
            attention_efficiency=0.35,
            device_bytes=192 * GIB,
            hbm_bytes_per_s=5.3e12,
            d2h_bytes_per_s=55e9,
            h2d_bytes_per_s=55e9,
            duplex_bytes_per_s=90e9,
            node_d2h_bytes_per_s=8 * 45e9,
            node_h2d_bytes_per_s=8 * 45e9,
            nvlink_bytes_per_s=7 * 64e9,
            gpus_per_node=8,
            host_bytes=2048 * GIB,
            disk_write_bytes_per_s=5e9,
            disk_read_bytes_per_s=10e9,
            network=Network(nics_per_node=8, nic_bytes_per_s=50e9, node_efficiency=0.75),
        ),
        Hardware(
            # Without NVLink: peers over PCIe 4. A server of eight, with four NICs of 200 Gb/s, as NVIDIA certifies it.
            name="l40s",
            peak_flops=362e12,
            matmul_efficiency=0.60,
            attention_efficiency=0.45,
            device_bytes=48 * GIB,
            hbm_bytes_per_s=864e9,
            d2h_bytes_per_s=25e9,
            h2d_bytes_per_s=25e9,
            duplex_bytes_per_s=42e9,
            node_d2h_bytes_per_s=8 * 13e9,
            node_h2d_bytes_per_s=8 * 13e9,
            nvlink_bytes_per_s=31.5e9,
            gpus_per_node=8,
            host_bytes=1024 * GIB,
            disk_write_bytes_per_s=5e9,
            disk_read_bytes_per_s=10e9,
            network=Network(nics_per_node=4, nic_bytes_per_s=25e9, node_efficiency=0.6, **PCIE),
        ),
        Hardware(
            # NVIDIA's Ada whitepaper: 165 TFLOP/s where sums are float32, of which 158 are reached (n = 8192; issue 4 of
            # mli/transformers-benchmarks). The driver keeps peers apart, so they meet in host memory: half of the 26 of
            # 31.5 GB/s that a driver which does not reaches (tinygrad/open-gpu-kernel-modules issue 36). Seldom clustered.
            name="rtx4090",
            peak_flops=165e12,
            matmul_efficiency=0.90,
            attention_efficiency=0.70,
            device_bytes=24 * GIB,
            hbm_bytes_per_s=1.008e12,
            d2h_bytes_per_s=25e9,
            h2d_bytes_per_s=25e9,
            duplex_bytes_per_s=42e9,
            node_d2h_bytes_per_s=8 * 13e9,
            node_h2d_bytes_per_s=8 * 13e9,
            nvlink_bytes_per_s=31.5e9,
            gpus_per_node=8,
            host_bytes=512 * GIB,
            disk_write_bytes_per_s=5e9,
            disk_read_bytes_per_s=10e9,
            network=Network(node_efficiency=0.4, **PCIE),
        ),
    )
}
_VARIANTS = (
    # SXM4 in a DGX A100 of 320 GB.
    ("a100-80g", "a100-40g", {"device_bytes": 40 * GIB, "hbm_bytes_per_s": 1.555e12, "host_bytes": 1024 * GIB}),
    # HBM2e at 2.4 TB/s and 500 instead of 700 W, which is what torchtitan's tables were measured on: large products draw
    # all of the power, and the clock falls with it.
    (
        "h100",
        "h100-96g",
        {
            "device_bytes": 96 * GIB,
            "hbm_bytes_per_s": 2.4e12,
            "matmul_efficiency": 0.50,
            "attention_efficiency": 0.46,
        },
    ),
)
PRESETS |= {name: dataclasses.replace(PRESETS[base], name=name, **changes) for base, name, changes in _VARIANTS}


def hardware_preset(name: str) -> Hardware:
    """Returns the preset of this name, in any case and of the usual spellings, such as "H100" or "RTX 4090".

    Raises:
        UsageError: there is none; the message lists them.
    """
    called = _plain(name)
    for known in (name, *(preset for preset in PRESETS if called in _spellings(preset))):
        if known in PRESETS:
            return PRESETS[known]
    raise UsageError(f"unknown GPU {name[:80]!r}; one of {', '.join(PRESETS)}")


def hardware_of(device_name: str) -> Hardware:
    """Returns the preset for a driver's name of a GPU, such as "NVIDIA GH200 480GB"; an H100's where there is none."""
    called = _plain(device_name)
    # The longest: a GH200's name has an H200's in it.
    chip = max((chip for chip in _CHIPS if chip in called), key=len, default="h100")
    found = [preset for preset in PRESETS if _spellings(preset)[0].startswith(chip)]
    # Of one chip with several memories the one that is named, as in "A100-SXM4-40GB"; else the first.
    return PRESETS[next((preset for preset in found if _memory(preset) and _memory(preset) in called), found[0])]


_CHIPS = {re.sub(r"-\d+g$", "", preset) for preset in PRESETS}
_DEFAULTS = {"a100": "a100-80g"}
"""Presets that a chip's name alone stands for."""
_WORDS = re.compile(r"nvidia|geforce|tesla|amd|instinct|sxm\d?|hbm\de?|nvl72|[^a-z0-9]")


def _plain(name: str) -> str:
    return _WORDS.sub("", name.lower())


def _memory(preset: str) -> str:
    found = re.search(r"-(\d+)g$", preset)
    return f"{found[1]}gb" if found else ""


def _spellings(preset: str) -> tuple[str, ...]:
    """How people write a preset's name, without signs: first itself."""
    plain = _plain(preset)
    memory = round(PRESETS[preset].device_bytes / (GIB if PRESETS[preset].device_bytes % GIB == 0 else 1e9))
    spelled = [plain, f"{plain}b"] if _memory(preset) else [plain, f"{plain}{memory}g", f"{plain}{memory}gb"]
    spelled += [chip for chip, known in _DEFAULTS.items() if known == preset]
    return (*spelled, *(word[3:] for word in spelled if word.startswith("rtx")))
