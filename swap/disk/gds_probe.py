"""Probe for GPUDirect Storage (GDS) on a directory: system look-ups first, then a trial transfer.

The look-ups are cheap, and each obstacle comes with its remedy. The trial runs only when they find none, in a
subprocess with a time limit: on some machines without GDS kvikio's driver call never returns.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TRIAL_LIMIT_S = 20.0
_TRIAL_BYTES = 64 << 20
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_NETWORK = frozenset({"nfs", "nfs4", "lustre", "beegfs", "gpfs", "wekafs"})


def in_memory(directory: Path) -> str | None:
    """Kind of the file system a directory is on, where that is memory and no disk; else None."""
    kind = mount_of(directory).kind
    return kind if kind in _IN_MEMORY else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """File system that holds a directory."""

    source: str
    kind: str
    options: str
    block_device: str | None
    """Name in /sys/block, such as nvme0n1; None when there is none."""


def mount_of(directory: Path, *, root: Path = Path("/")) -> Mount:
    """Returns the mount of a directory: the longest matching mount point of /proc/self/mountinfo."""
    best: tuple[int, Mount] | None = None
    resolved = directory.resolve()
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        number, point, options = left.split()[2], left.split()[4].replace("\\040", " "), left.split()[5]
        kind, source, super_options = [*right.split(), "", ""][:3]
        if resolved.is_relative_to(point) and (best is None or len(point) >= best[0]):
            mount = Mount(
                source=source,
                kind=kind,
                options=f"{options},{super_options}",
                block_device=_block_device(number, root),
            )
            best = (len(point), mount)
    if best is None:
        return Mount(source="unknown", kind="unknown", options="", block_device=None)
    return best[1]


def _block_device(number: str, root: Path) -> str | None:
    """Disk of `major:minor`. In sysfs a partition is a folder of its disk."""
    entry = root / "sys/dev/block" / number
    if not entry.exists():
        return None
    path = entry.resolve()
    return path.parent.name if (path / "partition").exists() else path.name


def obstacles(directory: Path, *, root: Path = Path("/")) -> list[str]:
    """Returns the known reasons why GDS cannot be used for a directory, each with its remedy."""
    found = _driver_obstacles(root)
    mount = mount_of(directory, root=root)
    if mount.kind in _IN_MEMORY:
        found.append(f"{mount.kind} is memory, not a disk: choose a directory on an NVMe drive")
    elif mount.kind == "overlay":
        found.append("overlay file system (a container's own root): mount a host directory on NVMe into the container")
    elif mount.kind == "ext4" and "data=ordered" not in mount.options.split(","):
        found.append("ext4 needs the explicit mount option data=ordered: mount -o remount,data=ordered, or in fstab")
    elif mount.kind not in ("ext4", "xfs") and mount.kind not in _NETWORK:
        found.append(f"GPUDirect Storage does not support file system {mount.kind}: use ext4 or xfs on NVMe")
    found += _device_obstacles(mount)
    if importlib.util.find_spec("kvikio") is None:
        found.append("kvikio is not installed: pip install kvikio-cu13")
    return found


def _driver_obstacles(root: Path) -> list[str]:
    if not (root / "proc/driver/nvidia/version").exists():
        return ["no NVIDIA driver is loaded"]
    found = []
    settings = Path(os.environ.get("CUFILE_ENV_PATH_JSON") or root / "etc/cufile.json")
    properties = _cufile_properties(settings)
    if properties.get("force_compat_mode"):
        found.append(f"{settings} has force_compat_mode: set it to false")
    if not os.access(root / "run/udev", os.R_OK):
        found.append("/run/udev cannot be read, which kvikio needs: start the container with -v /run/udev:/run/udev:ro")
    if (root / "proc/driver/nvidia-fs/version").exists() or properties.get("use_pci_p2pdma"):
        return found
    instead = f"or, from CUDA 12.8 and Linux 6.2 on, set properties.use_pci_p2pdma in {settings} to true"
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        how = "nvidia-fs is not visible in this container: load it on the host and pass /dev/nvidia-fs* through"
    else:
        how = "the kernel module nvidia-fs is not loaded: install nvidia-gds, then modprobe nvidia-fs"
    return [*found, f"{how}, {instead}"]


def _cufile_properties(settings: Path) -> dict[str, Any]:
    """Properties of cuFile's settings, JSON with comments; none where it cannot be read."""
    try:
        found = json.loads(re.sub(r"(^|\s)//.*", "", settings.read_text()))
        return dict(found.get("properties", {}))
    except (OSError, ValueError, AttributeError):
        return {}


def _device_obstacles(mount: Mount) -> list[str]:
    name = mount.block_device
    if name is None or name.startswith(("nvme", "md")):
        return []
    if name.startswith("vd"):
        return [f"{name} is a virtio disk of a virtual machine: pass an NVMe drive through to it"]
    if name.startswith("dm-"):
        return [f"{name} is a device-mapper volume (LVM or encryption): use the NVMe drive or a partition itself"]
    return [f"{name} is not an NVMe drive: choose a directory on one"]


def try_gds(directory: Path) -> list[str]:
    """Runs `trial` in a subprocess; returns what went wrong, or an empty list when the bytes came back.

    cuFile must not fall back to host memory there, by which they would come back, too.
    """
    code = "import sys; from memo.swap.disk.gds_probe import trial; trial(sys.argv[1])"
    try:
        result = subprocess.run(
            [sys.executable, "-c", code, os.fspath(directory)],
            capture_output=True,
            text=True,
            timeout=_TRIAL_LIMIT_S,
            check=False,
            env={**os.environ, "CUFILE_ALLOW_COMPAT_MODE": "false"},
        )
    except subprocess.TimeoutExpired:
        return [f"trial transfer did not return within {_TRIAL_LIMIT_S:.0f} s: the GDS driver hangs; run gdscheck -p"]
    lines = result.stdout.strip().splitlines()
    if result.returncode == 0 and lines and json.loads(lines[-1]) == {"equal": True}:
        return []
    reason = (result.stderr.strip().splitlines() or ["the bytes did not come back"])[-1]
    return [f"trial transfer failed: {reason}"]


def trial(directory: str) -> None:
    """Writes random bytes of the first GPU through a GdsDisk, reads them back and prints `{"equal": true}` or false."""
    import torch

    from memo.swap.backends.cuda import CudaBackend, copy_stream
    from memo.swap.disk.gds import GdsDisk

    device = torch.device("cuda", 0)
    backend = CudaBackend(device)
    disk = GdsDisk([directory], _TRIAL_BYTES, new_stream=lambda: copy_stream(device))
    source = torch.randint(0, 256, (_TRIAL_BYTES,), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    extent = disk.reserve(_TRIAL_BYTES)
    assert extent is not None, "the store was made of this size"
    ready = backend.compute_event()
    disk.write(extent, source, after=(ready,)).synchronize()
    disk.read(extent, target, after=(ready,)).synchronize()
    print(json.dumps({"equal": torch.equal(source, target)}))
    disk.close()
