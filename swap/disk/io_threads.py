"""I/O thread pool of the disk tier.

Owns the queues, and every operation from submit to done. Reads have priority over writes: backward waits for reads,
nothing waits for writes. An operation is queued only when its `after` events are done, so no I/O thread waits while
another operation could run. Operations whose events are still pending at submit go through a gate: one thread for reads
and one for writes that waits for them in submission order. An event depends only on work issued before it, so this
order cannot deadlock.

No error ends a thread before the pool closes, or what it had in hand would never be done. One that is met outside a
transfer (memory that runs out, an exception that another thread raises in it) fails the operation in hand, if there is one.
Such an exception comes where a function is entered and where a call returns; so a change of two fields has no call within,
and the lock itself is the context manager, since a condition's is a function.

    submit ──▶ gate (only if `after` is not done) ──▶ queue of reads / of writes ──▶ I/O threads, piece by piece
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from memo import forks
from memo.errors import MemoError
from memo.swap.backends.protocol import drop_frames
from memo.swap.disk.operation import DiskOperation, OperationKind, OperationStage, Piece
from memo.swap.memory.page_aligned import Bounce
from memo.threads import start_thread

_log = logging.getLogger("memo")
_STACK_BYTES = 1 << 20  # the system's 8 MiB count against a limit of the process's data (RLIMIT_DATA), touched or not
_GATE_JOIN_S = 1.0  # a gate thread may wait for an event that never fires; as a daemon it can be abandoned


class IoPool:
    """Pool of daemon threads that run the pieces of operations.

    Args:
        threads: Number of I/O threads.
        transfer: Called as `transfer(operation, piece, bounce)` on an I/O thread; moves one piece.
        bounce_bytes: Size of each thread's aligned bounce buffer.
    """

    def __init__(
        self, threads: int, transfer: Callable[[DiskOperation, Piece, Bounce], None], *, bounce_bytes: int
    ) -> None:
        self.busy_ns = dict.fromkeys(OperationKind, 0)
        self._transfer = transfer
        self._bounce_bytes = bounce_bytes
        self._lock = forks.free_in_child(threading.RLock())
        self._changed = threading.Condition(self._lock)  # of the queues
        self._gated = threading.Condition(self._lock)  # of the gates
        self._queues: dict[OperationKind, deque[DiskOperation]] = {
            OperationKind.READ: deque(),
            OperationKind.WRITE: deque(),
        }
        self._open: set[DiskOperation] = set()
        self._held: dict[int, DiskOperation] = {}  # thread -> operation of its piece
        self._active_since_ns = dict.fromkeys(OperationKind, 0)
        self._closing = False
        self.forks = forks.count()
        """Number of forks before the process that has the threads."""
        self._gates: dict[OperationKind, deque[DiskOperation]] = {}
        self._gate_threads: list[threading.Thread] = []
        self._threads: list[threading.Thread] = []
        try:
            for index in range(threads):
                self._threads.append(self._start(self._work, f"memo-disk-{index}"))
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """False once closed."""
        return not self._closing

    def submit(self, operation: DiskOperation) -> None:
        """Queues the operation; it runs once its `after` events are done. The caller has checked `alive`."""
        ready = all(event.query() for event in operation.after)
        with self._lock:
            gate = None if ready or self._closing else self._gate(operation.kind)
            self._open.add(operation)
            operation.extent.pending += 1
            if self._closing:  # closed by another thread after the caller's check
                self._refuse(operation)
            elif gate is None:
                self._enqueue(operation)
            else:
                gate.append(operation)
                self._gated.notify_all()

    def cancel(self, operation: DiskOperation) -> bool:
        """Cancels an operation of which no piece has started; False if one has."""
        with self._lock:
            if operation.stage not in (OperationStage.WAITING, OperationStage.QUEUED):
                return False
            self._finish(operation)
            return True

    def close(self, timeout_s: float | None = None) -> bool:
        """Completes running operations, fails the others and joins the threads; True when all I/O threads ended."""
        if self.forks != forks.count():
            return True
        with self._lock:
            self._closing = True
            for operation in list(self._open):
                if operation.stage in (OperationStage.WAITING, OperationStage.QUEUED):
                    self._refuse(operation)
            self._changed.notify_all()
            self._gated.notify_all()
        me = threading.current_thread()
        if me in self._threads:  # the store is closed by a garbage collection on an I/O thread
            return False
        for thread in self._threads:
            thread.join(timeout_s)
        for thread in self._gate_threads:
            if thread is not me:
                thread.join(_GATE_JOIN_S)
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self, target: Callable[..., None], name: str, *args: object) -> threading.Thread:
        thread = threading.Thread(target=self._go_on, name=name, args=(target, *args), daemon=True)
        start_thread(thread, stack_bytes=_STACK_BYTES)
        return thread

    def _go_on(self, work: Callable[..., None], *args: object) -> None:
        """Runs `work` until it returns, anew after each error that it raises."""
        while True:
            try:
                return work(*args)
            except BaseException as error:
                self._met(error)

    def _met(self, error: BaseException) -> None:
        """Fails the operation in hand, and wakes all threads: this one may have had a notification to give or to take."""
        with self._lock:
            held = self._held.get(threading.get_ident())
            if held is not None:
                self._piece_done(held, error)
            self._changed.notify_all()
        _log.warning("%s met %r and goes on", threading.current_thread().name, error)

    # Gates

    def _gate(self, kind: OperationKind) -> deque[DiskOperation]:
        if kind not in self._gates:
            gate: deque[DiskOperation] = deque()
            self._gate_threads.append(self._start(self._run_gate, f"memo-disk-gate-{kind.value}", gate))
            self._gates[kind] = gate
        return self._gates[kind]

    def _run_gate(self, gate: deque[DiskOperation]) -> None:
        while (operation := self._first(gate)) is not None:
            failure = _wait_for(operation)
            with self._lock:
                if operation.stage is OperationStage.WAITING:  # else cancelled, or the pool is closing
                    if failure is None:
                        operation.after = ()
                        self._enqueue(operation)
                    else:
                        self._fail(operation, failure)
                gate.popleft()

    def _first(self, gate: deque[DiskOperation]) -> DiskOperation | None:
        """The gate's first operation, which stays there; None once the pool is closing."""
        with self._lock:
            while not gate and not self._closing:
                self._gated.wait()
            return None if self._closing else gate[0]

    def _enqueue(self, operation: DiskOperation) -> None:
        queue = self._queues[operation.kind]
        operation.stage = OperationStage.QUEUED
        queue.append(operation)
        self._changed.notify(len(operation.pieces))

    # I/O threads

    def _work(self) -> None:
        bounce = Bounce(self._bounce_bytes)
        while (task := self._take()) is not None:
            operation, piece = task
            failure: BaseException | None = None
            try:
                # The events are done, so this does not block; it returns the failure of an event's operation.
                failure = _wait_for(operation)
                if failure is None:
                    self._transfer(operation, piece, bounce)
            except BaseException as error:
                failure = error
            self._piece_done(operation, failure)
            del task, operation, piece, failure  # a thread that waits holds no tensor and no extent

    def _take(self) -> tuple[DiskOperation, Piece] | None:
        with self._lock:
            while True:
                for kind in (OperationKind.READ, OperationKind.WRITE):
                    task = self._next_piece(self._queues[kind])
                    if task is not None:
                        return task
                if self._closing:
                    return None
                self._changed.wait()

    def _next_piece(self, queue: deque[DiskOperation]) -> tuple[DiskOperation, Piece] | None:
        while queue:
            operation = queue[0]
            if operation.stage is OperationStage.DONE or operation.next_piece == len(operation.pieces):
                queue.popleft()
                continue
            piece = operation.pieces[operation.next_piece]
            me, now = threading.get_ident(), time.monotonic_ns()
            if operation.stage is OperationStage.QUEUED:
                operation.stage = OperationStage.RUNNING
                operation.start_ns = now
            if not self._runs(operation.kind):
                self._active_since_ns[operation.kind] = now
            # Nothing is called between these two, so that no exception of another thread comes between them.
            self._held[me] = operation
            operation.next_piece += 1
            return operation, piece
        return None

    def _runs(self, kind: OperationKind) -> bool:
        """True while a piece of this kind is in hand."""
        return any(operation.kind is kind for operation in self._held.values())

    def _piece_done(self, operation: DiskOperation, failure: BaseException | None) -> None:
        with self._lock:
            me, now = threading.get_ident(), time.monotonic_ns()
            if failure is not None:
                self._fail(operation, failure)
            if operation.unfinished == 1:
                operation.end_ns = now
                self._finish(operation)
            # Last, and without a call between them: a thread that is ended before has the piece in hand.
            del self._held[me]
            operation.unfinished -= 1
            if not self._runs(operation.kind):
                self.busy_ns[operation.kind] += now - self._active_since_ns[operation.kind]

    def _fail(self, operation: DiskOperation, failure: BaseException) -> None:
        """Keeps the first failure and skips the pieces that have not started."""
        if operation.failure is None:
            drop_frames(failure)
            if isinstance(failure, MemoError):
                operation.failure = (type(failure), str(failure), failure.__cause__)
            else:
                operation.failure = (operation.kind.error, f"{operation.describe()} failed: {failure!r}", failure)
        end = len(operation.pieces)
        operation.unfinished -= end - operation.next_piece
        operation.next_piece = end
        if operation.stage is OperationStage.WAITING:
            self._finish(operation)

    def _refuse(self, operation: DiskOperation) -> None:
        message = f"{operation.describe()} was still {operation.stage.value} when the store was closed"
        operation.failure = (operation.kind.error, message, None)
        self._finish(operation)

    def _finish(self, operation: DiskOperation) -> None:
        if operation.stage is OperationStage.DONE:
            return
        self._open.discard(operation)
        operation.finish()


def _wait_for(operation: DiskOperation) -> BaseException | None:
    """Waits for the operation's events; returns the failure of one, or None."""
    for event in operation.after:
        if operation.stage is OperationStage.DONE:
            return None
        try:
            event.synchronize()
        except BaseException as error:
            return error
    return None
