"""`memo train` whose collectives take longer each while a file is there: a link whose messages are under way for longer.

torchrun ... throttled_train.py FILE train ...
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

LATENCY_S = 0.08
COLLECTIVES = (
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "recv",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "send",
)


def throttle(file: Path) -> None:
    """Wraps torch's collectives, before memo takes them."""
    for name in COLLECTIVES:
        call = getattr(dist, name, None)  # of names that torch 2.13 has changed one
        if call is None:
            continue

        def slowed(*args: Any, _call: Any = call, **kwargs: Any) -> Any:
            if file.exists():
                time.sleep(LATENCY_S)
            return _call(*args, **kwargs)

        for module in (dist, dist.distributed_c10d):
            setattr(module, name, slowed)


if __name__ == "__main__":
    throttle(Path(sys.argv[1]))
    from memo.cli.main import main

    sys.exit(main(sys.argv[2:]))
