"""Report of the first rank that failed to the other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from memo.errors import HostBudgetExceeded, PeerLost
from memo.parallel import first_cause


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As torchrun keeps one for the ranks."""
    kind: Any = dist.TCPStore  # type: ignore[attr-defined]
    served = kind("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(served.port))
    monkeypatch.setenv("RANK", "0")
    return served


def fail_in_a_stage(cause: Exception) -> None:
    """As torch's pipelining does."""
    raise RuntimeError("Failed to run stage backward: Stage output: (...)") from cause


def heard() -> str:
    """By rank 0, which finds the other gone."""
    with pytest.raises(PeerLost) as lost, first_cause(0):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:2")
    return str(lost.value)


def test_they_hear_the_cause_and_not_what_a_pipeline_wraps_it_in() -> None:
    with pytest.raises(RuntimeError, match="Failed to run stage backward"), first_cause(3):
        fail_in_a_stage(IndexError("index 7 is out of bounds"))
    assert heard() == "rank 0: rank 3: IndexError: index 7 is out of bounds"


def test_an_error_of_ours_is_told_as_it_is_and_raised_without_the_wrapping() -> None:
    with pytest.raises(HostBudgetExceeded, match=r"^rank 3: no room$"), first_cause(3):
        fail_in_a_stage(HostBudgetExceeded("no room"))
    assert heard() == "rank 0: rank 3: no room"


def test_the_first_to_fail_is_the_one_they_hear_of() -> None:
    for rank in (2, 1):
        with pytest.raises(ValueError, match=f"of {rank}"), first_cause(rank):
            raise ValueError(f"fault of {rank}")
    assert heard() == "rank 0: rank 2: ValueError: fault of 2"


def test_a_rank_that_was_killed_left_no_word() -> None:
    assert heard() == "rank 0: another rank exited without an error message; torchrun names it"
