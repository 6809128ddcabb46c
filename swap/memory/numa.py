"""NUMA placement of host memory on the GPU's own node: copies across nodes run at a third of the speed on some machines.

Only Linux has the calls. On other systems, and where the kernel refuses, the placement is the system's default.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1  # <numaif.h>: from this node while it has room, from others then
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def node_of_pci_device(domain: int, bus: int, device: int, *, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Returns the NUMA node of a PCI device; None where the system does not report one.

    Args:
        domain: of the PCI address.
        bus: of the PCI address.
        device: of the PCI address; the function is 0.
        root: directory of the devices in sysfs.
    """
    try:
        node = int((root / f"{domain:04x}:{bus:02x}:{device:02x}.0" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Asks the kernel to take the pages of [address, address + nbytes) from `node` when they are first touched.

    Args:
        address: page-aligned.
        nbytes: length of the range.
        node: NUMA node; other nodes serve when it is full.

    Returns:
        True if the kernel agreed.
    """
    number = _SYS_MBIND.get(os.uname().machine)
    if number is None:
        return False
    try:
        call = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return False
    words = node // _BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _BITS] = 1 << (node % _BITS)
    call.restype = ctypes.c_long
    result = call(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(words * _BITS + 1),
        ctypes.c_uint(0),
    )
    return int(result) == 0
