"""memo: trains transformers on sequences whose activations do not fit into GPU memory.

    import memo

    manager = memo.offload(model)
    for batch in data:
        with manager:  # around the forward; backward may run outside
            loss = model(**batch).loss
        loss.backward()

    memo.offload(model).attach()  # instead, where the loop is a trainer's

Names are resolved on first use, so that `import memo`, `memo.mip`, the command line's help and the trace viewer work
without importing torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

# In a checkout the subpackages swap, allocator, mip and kernels are beside this folder; installed, they are in it. So a
# source tree works without installation, and is never mixed with the subpackages of an installed copy.
_HERE = Path(__file__).parent
if not (_HERE / "swap").is_dir() and (_HERE.parent / "swap").is_dir():
    __path__.append(str(_HERE.parent))

__version__ = "0.1.0"
__all__ = [
    "Manager",
    "MemoError",
    "__version__",
    "checkpoint",
    "keep",
    "linear_cross_entropy",
    "loss_without_logits",
    "memoize",
    "memory_stats",
    "offload",
    "parallelize",
    "profile",
    "recomputable",
    "rehearse",
    "saved_tensors",
    "use_planned_allocator",
]


if TYPE_CHECKING:
    from memo.allocator.pluggable import memory_stats, use_planned_allocator
    from memo.checkpointing.context import saved_tensors
    from memo.checkpointing.function import checkpoint
    from memo.errors import MemoError
    from memo.loss.projection_loss import linear_cross_entropy
    from memo.loss.without_logits import loss_without_logits
    from memo.manager.manager import Manager
    from memo.manager.offloading import offload
    from memo.parallel.decoders.parallel_model import parallelize
    from memo.profiling.measure import profile
    from memo.rehearsal.run import rehearse
    from memo.swap.kept import keep
    from memo.swap.recompute.tape.declared import memoize, recomputable
else:
    from memo.lazy import attach

    __getattr__, __dir__, _ = attach(__name__)
