"""Planned allocator: records the allocations of a training step and serves later steps from one arena by a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.allocator.byteless_tensors import (
        BytelessMode as BytelessMode,
        byteless_storage as byteless_storage,
    )
    from memo.allocator.caching_model import (
        CachedBlock as CachedBlock,
        CachingAllocator as CachingAllocator,
        CachingUse as CachingUse,
        Segments as Segments,
        simulate_caching as simulate_caching,
        unsplit_nbytes as unsplit_nbytes,
    )
    from memo.allocator.contents import is_users as is_users, place as place
    from memo.allocator.local_mode import LocalTensorMode as LocalTensorMode
    from memo.allocator.pluggable import (
        active_allocator as active_allocator,
        allocated_bytes as allocated_bytes,
        memory_share as memory_share,
        memory_stats as memory_stats,
        model_steps as model_steps,
        peak_allocated_bytes as peak_allocated_bytes,
        restart_peaks as restart_peaks,
        use_planned_allocator as use_planned_allocator,
    )
    from memo.allocator.record_step import (
        AllocationRecorder as AllocationRecorder,
        AllocationSite as AllocationSite,
        Lifetime as Lifetime,
    )
    from memo.allocator.segments import use_expandable_segments as use_expandable_segments
    from memo.allocator.trace import (
        Allocation as Allocation,
        AllocationTrace as AllocationTrace,
        trace_of as trace_of,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)
