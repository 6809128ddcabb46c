"""Why memory ran out: what held it, from a trace, a snapshot of torch's allocator or a running step. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.out_of_memory.explanation import (
        SAVED as SAVED,
        HeldMemory as HeldMemory,
        MemoryAnswer as MemoryAnswer,
        explain_memory as explain_memory,
        held_in_trace as held_in_trace,
        parse_torch_error as parse_torch_error,
    )
    from memo.out_of_memory.snapshot import (
        SnapshotBlocks as SnapshotBlocks,
        blocks_apart as blocks_apart,
        explain_apart as explain_apart,
        held_in_snapshot as held_in_snapshot,
        read_snapshot as read_snapshot,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)
