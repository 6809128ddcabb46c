"""Device backends: copy streams, events and memory of CUDA GPUs and of the CPU, behind one interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.swap.backends.cpu import CpuBackend as CpuBackend, Done as Done
    from memo.swap.backends.cuda import CudaBackend as CudaBackend, copy_stream as copy_stream, numa_node as numa_node
    from memo.swap.backends.protocol import (
        Backend as Backend,
        CopyStream as CopyStream,
        Disk as Disk,
        Event as Event,
        HostSlab as HostSlab,
        OneComputeStream as OneComputeStream,
        Timed as Timed,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)
