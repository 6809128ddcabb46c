"""Recording of one training step's allocations, without a GPU and without the step's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.record.allocation_sites import AllocationSites as AllocationSites
    from memo.record.layer_peaks import LayerPeaks as LayerPeaks, peak_of as peak_of
    from memo.record.offload_without_bytes import OffloadWithoutBytes as OffloadWithoutBytes
    from memo.record.optimizers import make_optimizer as make_optimizer
    from memo.record.program_errors import users_errors as users_errors
    from memo.record.record_rank import rank_step as rank_step
    from memo.record.recording import (
        Recording as Recording,
        SavedRole as SavedRole,
        checkpoint_layers as checkpoint_layers,
        record_step as record_step,
    )
    from memo.record.step import Step as Step, gpt_step as gpt_step, load_step as load_step
else:
    __getattr__, __dir__, __all__ = attach(__name__)
