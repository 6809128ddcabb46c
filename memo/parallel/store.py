"""Where the ranks of a run meet: the store that their addresses, and their first failure, are left in.

Each attempt of torchrun has names of its own in it. torch 2.13 keeps one store for all attempts and does not tell them
apart, so that restarted ranks would find the addresses of those that ended.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch.distributed as dist

__all__ = ["meeting_store"]


def meeting_store(*, timeout: datetime.timedelta, serve: bool = False) -> Any:
    """The store at MASTER_ADDR and MASTER_PORT, as this attempt sees it.

    torchrun serves it from its own process, so it outlives the ranks. Without torchrun the first rank does, when `serve`.
    """
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    kind: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = kind(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=serve and not served and os.environ["RANK"] == "0",
        timeout=timeout,
        wait_for_workers=False,
    )
    names: Any = dist.PrefixStore  # type: ignore[attr-defined]
    return names(f"memo/attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
