"""Hardware descriptions for planning: peaks, memories and links, with presets for GPUs known by name.

Owns the presets and their sources, and the division of a node's links and disks among its ranks. Rates measured on the
machine itself (`memo doctor --json`) replace a preset's.
"""

from __future__ import annotations

import dataclasses

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
        free = 1 - taken
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
# Disks: four NVMe drives of a cloud node as DeepSpeed's DeepNVMe report (August 2024) measured them, 5 GB/s in, 10 out.
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
            network=Network(nics_per_node=8, nic_bytes_per_s=25e9),
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
            network=Network(nics_per_node=4, nic_bytes_per_s=25e9),
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
            network=Network(nics_per_node=8, nic_bytes_per_s=50e9),
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
            network=Network(nics_per_node=8, nic_bytes_per_s=50e9),
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
            network=Network(nics_per_node=8, nic_bytes_per_s=50e9),
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
    )
}


def hardware_preset(name: str) -> Hardware:
    """Returns the preset of this name.

    Raises:
        UsageError: there is none; the message lists them.
    """
    if name not in PRESETS:
        raise UsageError(f"unknown GPU {name!r}; one of {', '.join(PRESETS)}")
    return PRESETS[name]


def hardware_of(device_name: str) -> Hardware:
    """Returns the preset for a driver's name of a GPU, such as "NVIDIA GH200 480GB"; an H100's where there is none."""
    called = device_name.lower()
    chips = {name.split("-")[0]: name for name in PRESETS}
    # The longest: a GH200's name has an H200's in it.
    chip = max((chip for chip in chips if chip in called), key=len, default="h100")
    return PRESETS[chips[chip]]
