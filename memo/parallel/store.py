"""Rendezvous store of a run, with the addresses of its ranks and their first failure.

Keys are prefixed by torchrun's attempt, and by how often its ranks have restarted themselves since. torch 2.13 keeps one
store for all attempts without telling them apart, so restarted ranks would find the addresses of ranks that ended.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch.distributed as dist

RESTARTS = "MEMO_RESTARTS"
"""Environment variable of ranks that have restarted themselves within torchrun's attempt: how often."""


def meeting_store(*, timeout: datetime.timedelta, serve: bool = False) -> Any:
    """The store at MASTER_ADDR and MASTER_PORT, with the keys of this attempt.

    Args:
        timeout: of connecting and of waiting for a key.
        serve: the first rank serves the store, where torchrun does not. torchrun's own outlives the ranks.
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
    attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{os.environ.get(RESTARTS, '0')}"
    return names(f"memo/attempt-{attempt}", store)
