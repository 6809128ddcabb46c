"""Hardware descriptions for planning: peaks, memories and links, with presets for GPUs known by name.

Owns the presets (gpus.toml, with their sources) and the division of a node's links and disks among its ranks. Rates
measured on the machine itself (`memo doctor --json`) replace a preset's.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

from memo.errors import PlanError, UsageError
from memo.mip.inputs.network import Network
from memo.mip.inputs.profile import check_amounts
from memo.toml_tables import toml_tables
from memo.units import parse_bytes

GIB = 1 << 30
ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward over its forward's: five products of the scores' size for two (Dao et al. 2022)."""
MEMORY_SHARE = 0.9
"""Share of a GPU's memory bandwidth that element-wise kernels reach: a copy's, 3.0 of an H100's 3.35 TB/s."""
LAUNCH_S = 8e-6
"""Launch of a kernel where none was measured: 6 to 10 us on the machines that were."""
NEAR_BYTES = 50_000_000
"""Keys and values of a head beyond so many bytes, an H100's L2 cache, slow attention down, perhaps for that reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeadShares:
    """Shares of a GPU's peak that attention reaches with heads of a size, in long sequences."""

    head: int
    forward: float
    backward: float

    def __post_init__(self) -> None:
        if not (self.head > 0 and self.forward > 0 and self.backward > 0):
            raise PlanError(f"attention with heads of {self.head}: its shares of the peak are not positive")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """Fused causal attention."""

    name: str
    heads: tuple[HeadShares, ...]
    """Its rates, the smallest heads first."""
    far: float = 1.0
    """Share of its rates that is left where the keys and values of a head take more than 50 MB."""

    def __post_init__(self) -> None:
        sizes = [known.head for known in self.heads]
        if not sizes or sizes != sorted(set(sizes)):
            raise PlanError(f"attention {self.name[:80]!r}: no head sizes, or not in order")
        if not 0 < self.far <= 1:
            raise PlanError(f"attention {self.name[:80]!r}: far is {self.far}, not a share")

    @classmethod
    def alike(cls, share: float, *, name: str = "fused") -> AttentionKernel:
        """One share of the peak for every head size and both passes."""
        return cls(name=name, heads=(HeadShares(64, share, share),))

    def share(self, head: int, *, backward: bool = False) -> float:
        """Share of the peak at a head size: between two known ones in proportion, below the smallest proportional to it."""
        shares = [(known.head, known.backward if backward else known.forward) for known in self.heads]
        (low, least), (high, most) = shares[0], shares[-1]
        if len(shares) == 1 or head >= high:
            return most
        if head <= low:
            return least * head / low
        (low, least), (high, most) = next(pair for pair in itertools.pairwise(shares) if pair[1][0] >= head)
        return least + (most - least) * (head - low) / (high - low)


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
    attention: tuple[AttentionKernel, ...]
    """Kernels of attention; the first one runs."""
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
    launch_s: float = LAUNCH_S
    """Seconds in which PyTorch calls an operator and launches its kernel; a layer takes no less than all of its launches."""
    network: Network = dataclasses.field(default_factory=Network)
    """Links that collectives cross, within a node and between nodes."""

    def __post_init__(self) -> None:
        check_amounts(self, f"hardware {self.name[:80]!r}")
        for name in ("peak_flops", "matmul_efficiency", "hbm_bytes_per_s", "gpus_per_node"):
            if not getattr(self, name) > 0:
                raise PlanError(f"hardware {self.name[:80]!r}: {name} is not positive")
        if not self.attention:
            raise PlanError(f"hardware {self.name[:80]!r}: it has no kernel of attention")

    @property
    def product_flops_per_s(self) -> float:
        """FLOP/s of large matrix products in bfloat16."""
        return self.peak_flops * self.matmul_efficiency

    @property
    def elementwise_bytes_per_s(self) -> float:
        """Bytes that element-wise kernels read and write in a second."""
        return self.hbm_bytes_per_s * MEMORY_SHARE

    @property
    def most_flops_per_s(self) -> float:
        """FLOP/s that neither matrix products nor attention exceed."""
        shares = (max(known.forward, known.backward) for known in self.attention[0].heads)
        return self.peak_flops * max(self.matmul_efficiency, *shares)

    def attention_s(self, flops: float, *, head: int, keys: float, backward: bool = False) -> float:
        """Seconds of fused attention in bfloat16.

        Args:
            flops: of its forward, of the scores that are computed.
            head: size of a head.
            keys: that a head reads.
            backward: the seconds of backward, whose FLOPs are 2.5 times as many.
        """
        kernel = self.attention[0]
        far = kernel.far if 2 * 2 * head * keys > NEAR_BYTES else 1.0
        rate = self.peak_flops * kernel.share(head, backward=backward) * far
        return (ATTENTION_BACKWARD if backward else 1.0) * flops / rate

    def with_attention(self, kernel: str) -> Hardware:
        """Returns the hardware with another of its kernels of attention, by name or the beginning of it, in any case.

        Raises:
            UsageError: it has none of that name.
        """
        found = [one for one in self.attention if _called(one.name).startswith(_called(kernel))]
        if not _called(kernel) or not found:
            names = ", ".join(one.name for one in self.attention)
            raise UsageError(f"no attention {kernel[:40]!r} is known for {self.name}; one of {names}")
        others = tuple(one for one in self.attention if one is not found[0])
        return dataclasses.replace(self, attention=(found[0], *others))

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


_TABLES = toml_tables(__file__, "gpus.toml")
_PEAKS: dict[str, float] = _TABLES.pop("peaks")


def _preset(name: str, table: dict[str, Any]) -> Hardware:
    fields = {
        key: value for key, value in table.items() if key not in ("chip", "device", "host", "network", "attention")
    }
    kernels = [_kernel(kernel, shares) for kernel, shares in table["attention"].items()]
    return Hardware(
        name=name,
        peak_flops=_PEAKS[table["chip"]],
        device_bytes=parse_bytes(table["device"]),
        host_bytes=parse_bytes(table["host"]),
        network=Network(**table["network"]),
        attention=tuple(kernels),
        **fields,
    )


def _called(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _kernel(name: str, shares: dict[str, Any]) -> AttentionKernel:
    heads = sorted((int(key), both) for key, both in shares.items() if key.isdecimal())
    return AttentionKernel(
        name=name, far=shares.get("far", 1.0), heads=tuple(HeadShares(head, *both) for head, both in heads)
    )


PRESETS: dict[str, Hardware] = {name: _preset(name, table) for name, table in _TABLES.items()}


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 peak in FLOP/s of the device with torch's name for it; None when it is not known."""
    return next((flops for name, flops in _PEAKS.items() if name in device_name), None)


def hardware_preset(name: str) -> Hardware:
    """Returns the preset of this name, in any case and of the usual spellings, such as "H100" or "RTX 4090".

    Raises:
        UsageError: there is none; the message lists them.
    """
    called = _plain(name)
    for known in (name, *(preset for preset in PRESETS if called in _spellings(preset))):
        if known in PRESETS:
            return PRESETS[known]
    raise UsageError.unknown("GPU", name[:80], PRESETS)


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
