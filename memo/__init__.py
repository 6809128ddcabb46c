"""memo: train transformers on sequences far longer than GPU memory holds.

    import memo

    manager = memo.offload(model)
    for batch in data:
        with manager:
            loss = model(**batch).loss
        loss.backward()

Names are resolved on first use, so that `import memo`, `memo.mip`, the command line's help and the trace viewer work
without importing torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memo.errors import MemoError

if TYPE_CHECKING:
    from memo.allocator.pluggable import memory_stats, use_planned_allocator
    from memo.loss.projection_loss import linear_cross_entropy
    from memo.loss.without_logits import loss_without_logits
    from memo.manager.manager import Manager, offload
    from memo.parallel.hugging_face import parallelize
    from memo.profiling.measure import measure_profile as profile
    from memo.swap.recompute.record.memoized import memoize

# In a checkout the subpackages swap, allocator, mip and kernels lie beside this folder, installed they lie in it. So a tree
# that was only unpacked works, and a checkout is never mixed with the subpackages of another that is installed.
_HERE = Path(__file__).parent
if not (_HERE / "swap").is_dir() and (_HERE.parent / "swap").is_dir():
    __path__.append(str(_HERE.parent))

__version__ = "0.1.0"
__all__ = [
    "Manager",
    "MemoError",
    "__version__",
    "linear_cross_entropy",
    "loss_without_logits",
    "memoize",
    "memory_stats",
    "offload",
    "parallelize",
    "profile",
    "use_planned_allocator",
]

_HOME = {
    "offload": "memo.manager.manager:offload",
    "Manager": "memo.manager.manager:Manager",
    "linear_cross_entropy": "memo.loss.projection_loss:linear_cross_entropy",
    "loss_without_logits": "memo.loss.without_logits:loss_without_logits",
    "memoize": "memo.swap.recompute.record.memoized:memoize",
    "memory_stats": "memo.allocator.pluggable:memory_stats",
    "parallelize": "memo.parallel.hugging_face:parallelize",
    "profile": "memo.profiling.measure:measure_profile",
    "use_planned_allocator": "memo.allocator.pluggable:use_planned_allocator",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOME:
        module, attribute = _HOME[name].split(":")
        value = getattr(importlib.import_module(module), attribute)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'memo' has no attribute {name!r}")
