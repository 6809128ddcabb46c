"""Replay: runs the steps of a plan in backward, for the saved tensors of one layer call that no tier holds.

A Replay owns what its plan keeps, packed by the engine, until it has run, and nothing of what it gives: a graph that dies
without backward frees itself.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memo.errors import MemoError, ModifiedAfterSave, SwapError, is_interruption
from memo.swap.checksum import checksum
from memo.swap.engine.handles import Guard, Handle, KeptTensor, Sharded
from memo.swap.generators import put_back
from memo.swap.recompute.tape.settings import Settings
from memo.swap.recompute.tape.uncounted_writes import uncounted_writes
from memo.swap.tensor_kinds import local_part

if TYPE_CHECKING:
    from memo.swap.engine.engine import Engine
    from memo.swap.engine.handles import Packed
    from memo.swap.engine.saved_storage import FillCallback, Hold
    from memo.swap.recompute.tape.plan import Plan


class ReplayFailed(Exception):
    """A step did not run again; the message is the reason, as a person reads it."""

    def __init__(self, step: int | None, reason: str) -> None:
        super().__init__(reason)
        self.step = step


class Wanted(NamedTuple):
    """A storage that the replay gives."""

    hold: weakref.ref[Hold]
    """Dead when backward is through with it."""
    nbytes: int


class Brought(NamedTuple):
    """Something that a plan keeps of one call."""

    packed: Packed
    nbytes: int
    """Bytes of its storage."""
    storage: weakref.ref[torch.UntypedStorage] | None = None
    """Storage of a parameter: its memory may be freed and come back, but another one would be another parameter."""
    beside: tuple[Guard, ...] = ()
    """Guards of other tensors in the same memory, each with a version counter of its own."""


class Replay:
    """The steps that one layer call has to run again.

    Args:
        engine: brings back what is kept.
        name: of the layer, for messages.
        plan: which steps.
        kept: what the plan keeps, in its order, and then what its functions have captured.
        carried: arguments of the call that the plan does not hold.
        precision: of products, where the call began.
        wanted: storages that it gives, in the plan's order.
        together: other ranks run it at the same place in their backward.
        verify: sums the bytes of what is kept now, and again when they are read.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        plan: Plan,
        kept: Sequence[Brought],
        *,
        carried: Sequence[Any],
        precision: tuple[Any, ...],
        wanted: Sequence[Wanted],
        together: bool = False,
        verify: bool = False,
    ) -> None:
        self.name = name
        self.plan = plan
        self.together = together
        self.wanted = wanted
        self._engine = engine
        self._kept = kept
        self._carried = carried
        self._settings = Settings.now().at_precision(precision)
        self._writes = uncounted_writes.begin()
        self._sums = [_sum_of(each) for each in kept] if verify else None
        self._lock = threading.Lock()

    def recompute(self, take: FillCallback) -> None:
        """Runs the steps unless all that they give is in place; `take` gets the bytes of each wanted storage.

        What the plan keeps is then given up, so that backward frees it as soon as it has used it itself.

        Raises:
            ModifiedAfterSave: what is kept was changed in place since the forward.
            SwapError: it could not run.
        """
        with self._lock:
            if self._is_filled():
                return
            try:
                self.run(take)
            except ReplayFailed as failure:
                raise SwapError(f"{self.name} could not be recomputed: {failure}") from failure.__cause__
            kept, self._kept = self._kept, ()
        del kept  # without the lock: it may be the last reference

    def _is_filled(self) -> bool:
        for want in self.wanted:
            hold = want.hold()
            if hold is not None and hold.saved.lacks_replay:
                return False
        return True

    def run(self, take: FillCallback) -> None:
        """Runs the steps, even where all of it is in place already.

        Raises:
            ReplayFailed: a step raised an error, or gave memory of another size.
            torch.OutOfMemoryError: there was no room.
        """

        def give(position: int, made: torch.Tensor) -> None:
            want = self.wanted[position]
            storage = made.untyped_storage()
            if storage.nbytes() != want.nbytes:
                raise ReplayFailed(None, f"it made {storage.nbytes()} bytes where there were {want.nbytes}")
            take(want, torch.empty(0, dtype=torch.uint8, device=made.device).set_(storage))

        device = self._engine.backend.device
        with _as_recorded(device, self._settings):
            try:
                for position in range(len(self.plan.kept), len(self._kept)):
                    self._bring(position)
                self.plan.replay(self._bring, self._carried, give, device)
            except (MemoError, ReplayFailed, torch.OutOfMemoryError):
                raise
            except Exception as error:
                if is_interruption(error):
                    raise
                raise ReplayFailed(self._failed_step(error), _first_line(error)) from error

    def _bring(self, position: int) -> torch.Tensor:
        """What the plan keeps at `position`, back on the device.

        Raises:
            ModifiedAfterSave: it was changed since the forward.
            SwapError: a parameter was replaced, or has no memory.
        """
        kept = self._kept[position]
        try:
            tensor = local_part(self._engine.unpack(kept.packed, by_backward=False))
            if any(other.is_changed for other in kept.beside):
                raise ModifiedAfterSave("another tensor in its memory, as `x.data` beside `x`, was changed in place")
        except ModifiedAfterSave as error:
            raise ModifiedAfterSave(
                f"{self.name} is recomputed from a tensor that was changed since its forward: {error}; or move all that"
                f' this layer saves: levels={{"{self.name}": 1.0}}'
            ) from error
        storage = tensor.untyped_storage()
        if kept.storage is not None and kept.storage() is not storage:
            raise SwapError(
                f"a parameter of {self.name} was replaced between forward and backward; exclude it with alpha=1"
            )
        if storage.nbytes() < kept.nbytes:
            raise SwapError(
                f"{self.name} needs a parameter in backward whose memory is not there: FSDP gathers it when a gradient"
                " reaches what a module returned; use that in the loss, shard whole layers, or exclude it with alpha=1"
            )
        if (writer := uncounted_writes.wrote(storage, since=self._writes)) is not None:
            raise ModifiedAfterSave(
                f"a tensor of shape {tuple(tensor.shape)} that {self.name} is recomputed from was changed by {writer}, which"
                " torch itself does not notice, as it does not a write through .data: write after backward, or exclude the"
                " layer with alpha=1, which mixes both values as torch does"
            )
        if self._sums is not None:
            self._verify(kept, self._sums[position], tensor)
        return tensor.detach()

    def _verify(self, kept: Brought, known: torch.Tensor | None, tensor: torch.Tensor) -> None:
        """Raises ModifiedAfterSave if bytes that came back are not those of the forward."""
        is_replayed = type(kept.packed) is Handle and kept.packed.hold.saved.replay is not None
        if known is not None and not is_replayed and checksum(tensor, kept.nbytes).item() != known.item():
            raise ModifiedAfterSave(
                f"{self.name} is recomputed from a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype} whose bytes"
                " changed since its forward, and nothing counted it: a write through .data, by NumPy or by a kernel, or"
                " memory that is damaged"
            )

    def _failed_step(self, error: BaseException) -> int | None:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<replay>"]
        return self.plan.line_steps.get(lines[0]) if lines and lines[0] is not None else None


def _sum_of(kept: Brought) -> torch.Tensor | None:
    """Checksum of something that was just packed; None where its bytes have left the device already."""
    packed = kept.packed.local if isinstance(kept.packed, Sharded) else kept.packed
    tensor = local_part(packed.tensor) if isinstance(packed, KeptTensor) else packed.hold.saved.source
    return None if tensor is None else checksum(tensor, kept.nbytes)


def _first_line(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


@contextmanager
def _as_recorded(device: torch.device, settings: Settings) -> Iterator[None]:
    """Below autograd and autocast, where the steps were recorded, and with the settings that were in force.

    Layers on a GPU may compute on the host, too.
    """
    with put_back() if settings.modes else nullcontext(), settings.in_force(), torch.no_grad(), ExitStack() as below:
        for kind in {device.type, "cpu"}:
            if torch.is_autocast_enabled(kind):  # the way out of it costs as much as several steps
                below.enter_context(torch.autocast(kind, enabled=False))
        yield
