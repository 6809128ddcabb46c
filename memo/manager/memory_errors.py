"""Errors for want of memory in a managed step: the message gets the reason and the cure, the trace where it happened.

Owns the message alone: the error keeps its type, and is raised by whoever raised it. A forward's error is seen by the
manager that it leaves. A backward runs outside of it, so that the function through which `backward` and
`torch.autograd.grad` enter torch's engine is wrapped while a manager is open; torch offers no hook there. The wrapper
does nothing but look at the errors that pass.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from memo.allocator import allocated_bytes, memory_stats
from memo.errors import HostBudgetExceeded, ScratchFull, StoreWriteError, is_interruption
from memo.events import OUT_OF_MEMORY, Note, Owner
from memo.out_of_memory import SAVED, HeldMemory, explain_memory, parse_torch_error
from memo.torch_private import place
from memo.trace import OWNED, TRANSIENT, Holder

if TYPE_CHECKING:
    from collections.abc import Callable

    from memo.manager.device_memory import MemorySampler, OwnedMemory
    from memo.swap import Engine
    from memo.trace import TraceRecorder

log = logging.getLogger("memo")

_OWNER, _ENTRY = place("engine_run_backward")
"""The function through which backward and grad run; where a torch has none, backwards go unexplained."""
_SIGN = "\nmemo: "
_TIERS = (HostBudgetExceeded, ScratchFull, StoreWriteError)
"""Errors of full lower tiers, which say themselves what would help."""


class MemoryWatch:
    """Explains errors for want of memory in one manager's steps, until `close`.

    Args:
        engine: of the manager, held weakly.
        owned: the model's weights, gradients and optimizer state; None: not counted.
        recorder: the trace, which gets a note and is flushed; None: no trace.
        sampler: of the trace.
    """

    def __init__(
        self, engine: Engine, owned: OwnedMemory | None, recorder: TraceRecorder | None, sampler: MemorySampler | None
    ) -> None:
        self._engine = weakref.ref(engine)
        self._owned = owned
        self._recorder = recorder
        self._sampler = sampler
        _open[self] = None
        weakref.finalize(self, _unwrap).atexit = False  # of a manager that is collected without being closed
        _wrap()

    def close(self) -> None:
        """Ends the watch. Idempotent."""
        _open.pop(self, None)
        _unwrap()

    def explain(self, error: Exception, *, where: str | None = None) -> None:
        """Adds to an error for want of memory what held it; to others, and to one explained already, nothing.

        Args:
            error: the error, whose message is changed in place.
            where: the layer whose forward raised it; None: the layer entered last.
        """
        engine = self._engine()
        message = str(error) or "out of memory"
        if engine is None or not (_is_for_memory(error) or isinstance(error, _TIERS)) or _SIGN in message:
            return
        place = where or engine.entered_layer
        try:
            self._note(engine, message, place)
            if not isinstance(error, _TIERS):
                error.args = (f"{message}{_SIGN}{explain_memory(self._held(engine, message, place))}",)
        except Exception as failure:  # the error itself must reach the user, whatever befalls its explanation
            if is_interruption(failure):
                raise
            log.exception("an error for want of memory could not be explained")

    def explain_backward(self, error: Exception) -> None:
        """As `explain`, where tensors of this manager's wait for a backward."""
        engine = self._engine()
        if engine is not None and engine.stats.live_entries:
            self.explain(error)

    def _note(self, engine: Engine, message: str, place: str | None) -> None:
        if self._recorder is None:
            return
        if self._sampler is not None:
            self._sampler.sample()
        recorder = self._recorder
        note = Note(t=recorder.now(), step=recorder.step, cause=OUT_OF_MEMORY, message=message[:2000], module=place)
        recorder.emit(note)
        engine.end_step()  # spans that have ended
        recorder.flush()

    def _held(self, engine: Engine, message: str, place: str | None) -> HeldMemory:
        """What the device holds now, and what the error says of then."""
        numbers = parse_torch_error(message)
        saved = engine.saved_on_device()
        bands = {SAVED: sum(nbytes for _, nbytes in saved)}
        holders = [Holder(what="saved", name=module, nbytes=nbytes) for module, nbytes in saved]
        for owner in (Owner.WEIGHTS, Owner.GRADIENTS, Owner.OPTIMIZER) if self._owned is not None else ():
            assert self._owned is not None
            bands[OWNED[owner]] = self._owned.nbytes(owner)
            holders += [
                Holder(what=OWNED[owner], name=one.module or "", nbytes=one.nbytes, shape=one.shape, dtype=one.dtype)
                for one in self._owned.largest(owner)
            ]
        device = engine.backend.device
        reserved = capacity = None
        if device.type == "cuda":
            bands[TRANSIENT] = max(0, allocated_bytes(device) - sum(bands.values()))
            reserved = memory_stats(device).reserved_bytes
            capacity = torch.cuda.get_device_properties(device).total_memory
        stats = engine.stats
        return HeldMemory(
            where=f"In {place}," if place else "In this step, outside the layers,",
            ran_out=True,
            bands=numbers.with_rest(bands),
            holders=sorted(holders, key=lambda one: -one.nbytes)[:10],
            requested_nbytes=numbers.requested_nbytes,
            reserved_nbytes=numbers.reserved_nbytes or reserved,
            capacity_nbytes=numbers.capacity_nbytes or capacity,
            moved_nbytes=max(0, stats.saved_bytes - stats.device_bytes),
            outside_layers=place is None,
        )


def _is_for_memory(error: BaseException) -> bool:
    """True for torch's error of a GPU, and for what the CPU's and other allocators raise."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error) for text in ("can't allocate memory", "CUDA out of memory")
    )


_open: weakref.WeakKeyDictionary[MemoryWatch, None] = weakref.WeakKeyDictionary()
"""Iterated by `keyrefs`, which makes a list at once; a WeakSet cannot be iterated while other threads add to it."""
_wrapping = threading.RLock()  # a garbage collection may close another watch meanwhile
_original: Callable[..., Any] | None = None
_is_wrapped = False


def _wrap() -> None:
    global _original, _is_wrapped
    with _wrapping:
        found = getattr(_OWNER, _ENTRY, None)
        if not _is_wrapped and found is not None:
            _original, _is_wrapped = found, True
            setattr(_OWNER, _ENTRY, _run_backward)


def _unwrap() -> None:
    """Takes the wrapper out when the last manager is closed, if it is still the outermost one.

    `_original` stays, for a thread that has got hold of the wrapper and not called it yet.
    """
    global _is_wrapped
    with _wrapping:
        if not _open and _is_wrapped and getattr(_OWNER, _ENTRY) is _run_backward:
            setattr(_OWNER, _ENTRY, _original)
            _is_wrapped = False


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    assert _original is not None
    try:
        return _original(*args, **kwargs)
    except Exception as error:
        for known in _open.keyrefs():
            if (watch := known()) is not None:
                watch.explain_backward(error)
        raise
