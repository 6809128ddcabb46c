"""Expandable segments of torch's CUDA allocator, switched on where nobody has chosen.

Without them tensors leave gaps that the next ones do not fit into: 4 to 11 GiB of an H100's 80 where a step of an 8B model
holds 65 to 73 (rehearsed; on an H100 the first step by a plan ran out of memory there).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch

from memo.torch_private import accelerator_setAllocatorSettings, snapshot

_NAME = "expandable_segments"
_VIRTUAL_MEMORY = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"""
_log = logging.getLogger("memo")


@functools.cache
def use_expandable_segments(device: torch.device) -> bool:
    """Makes the segments of torch's allocator expandable from now on; returns whether memory stays free of gaps.

    What PYTORCH_ALLOC_CONF or the program has set about them stays, as another allocator does: the planned one and
    cudaMallocAsync have no segments.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return True
    torch.cuda.init()
    given: str = _settings()["PYTORCH_CUDA_ALLOC_CONF"]
    if _NAME not in given and _has_virtual_memory(device):
        accelerator_setAllocatorSettings(",".join(filter(None, (given, f"{_NAME}:True"))))
        _log.info(
            "torch's allocator: %s:True from now on; PYTORCH_ALLOC_CONF=%s:False keeps it as it was", _NAME, _NAME
        )
    return bool(_settings()[_NAME])


def _settings() -> dict[str, Any]:
    return snapshot()["allocator_settings"]  # type: ignore[no-any-return]


def _has_virtual_memory(device: torch.device) -> bool:
    """True where the driver maps memory to addresses, which some shared GPUs lack."""
    value = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(
            ctypes.byref(value), _VIRTUAL_MEMORY, device.index or 0
        )
    except (OSError, AttributeError):
        return False
    return not failed and bool(value.value)
