"""Events of worker threads."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from memo.errors import StoreWriteError
from memo.swap.backends.cpu import HostEvent, ThreadStream


@pytest.fixture
def no_collection() -> Iterator[None]:
    """No garbage collection, which would hide a cycle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _waits(event: HostEvent) -> weakref.ref[torch.Tensor]:
    tensor = torch.empty(4)
    with contextlib.suppress(StoreWriteError):
        event.synchronize()
    return weakref.ref(tensor)


def test_a_failure_keeps_nothing_of_those_who_wait_for_it(no_collection: None) -> None:
    event = HostEvent()
    event.finish(0, StoreWriteError("the disk is gone"))
    assert [_waits(event)() for _ in range(3)] == [None] * 3
    with pytest.raises(StoreWriteError, match="the disk is gone"):
        event.synchronize()


def test_a_copy_that_fails_keeps_neither_source_nor_target(
    no_collection: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ThreadStream, target: torch.Tensor, source: torch.Tensor) -> None:
        raise StoreWriteError("the disk is gone") from OSError(5, "an error")

    monkeypatch.setattr(ThreadStream, "_move", fail)
    stream, tensors = ThreadStream("test"), [torch.empty(4), torch.empty(4)]
    kept = [weakref.ref(tensor) for tensor in tensors]
    event = stream.copy(*tensors)
    tensors.clear()
    with pytest.raises(StoreWriteError) as raised:
        event.synchronize()
    assert isinstance(raised.value.__cause__, OSError)
    stream.close()
    assert [tensor() for tensor in kept] == [None, None]


class _Refusal(Exception):
    """An error that is not made of its arguments."""

    def __init__(self, *, device: str) -> None:
        super().__init__(f"no copy to {device}")
        self.device = device


def test_an_error_of_any_class_is_raised_as_itself() -> None:
    event = HostEvent()
    event.finish(0, _Refusal(device="nowhere"))
    with pytest.raises(_Refusal, match="no copy to nowhere") as raised:
        event.synchronize()
    assert raised.value.device == "nowhere"
