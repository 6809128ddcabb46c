"""Runs under torchrun: equality_worker.py, with overlapped collectives as late as NCCL's may be.

Each runs when it is waited for, with what its input is then; until then its result is not a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equality_worker
import torch
import torch.distributed as dist

from memo.parallel import collectives
from memo.torch_private import resolve_process_group

_pending: dict[int, Callable[[], None]] = {}
_launched = 0


def launch(x: torch.Tensor, rows: int, group: str, act: Callable[[torch.Tensor, Any], None]) -> torch.Tensor:
    """Notes a collective, and returns its result to come, of so many rows."""
    global _launched
    _launched += 1
    result, given = x.new_full((rows, *x.shape[1:]), float("nan")), x.clone()

    def run() -> None:
        assert torch.equal(x, given), "an input was changed in flight"
        act(result, resolve_process_group(group))

    _pending[result.untyped_storage()._cdata] = run
    return result


def gather(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return launch(x, len(x) * ranks, group, lambda y, on: collectives._all_gather(y, x, group=on))


def scatter(x: torch.Tensor, op: str, ranks: int, group: str) -> torch.Tensor:
    return launch(x, len(x) // ranks, group, lambda y, on: collectives._reduce_scatter(y, x, group=on))


def reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return launch(x, len(x), group, lambda y, on: dist.all_reduce(y.copy_(x), group=on))


def wait(x: torch.Tensor) -> torch.Tensor:
    _pending.pop(x.untyped_storage()._cdata, lambda: None)()
    return x


def main() -> None:
    """Arguments as equality_worker's."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    for name, function in {
        "all_gather_into_tensor": gather,
        "reduce_scatter_tensor": scatter,
        "all_reduce": reduce,
        "wait_tensor": wait,
    }.items():
        library.impl(name, function, "CPU", allow_override=True)  # type: ignore[no-untyped-call]
    collectives._launched = lambda result, group: result
    equality_worker.main()
    assert _launched
    assert not _pending, "a collective was not waited for"


if __name__ == "__main__":
    main()
