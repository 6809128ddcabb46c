"""Exceptions of memo: one root, and one leaf for each cause a caller can act on.

A message says what happened, where (rank, tensor, bytes) and what to do. The command line prints the message as one
line on stderr and exits with the leaf's `exit_code`; a traceback is always a bug.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable

_LONGEST = 240


def one_line(error: BaseException) -> str:
    """An exception's text in one line of bounded length, or its class where it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rpartition(' ')[0] or text[:_LONGEST]} ..."


def is_interruption(error: BaseException) -> bool:
    """True for what a signal's handler raised (Ctrl-C, an alarm), and for all that is no `Exception`.

    Python gives the interrupted frame to the handler of a signal, and to a trace function: a frame of the traceback then
    holds its caller in a local variable.
    """
    if not isinstance(error, Exception):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        interrupted, trace = trace.tb_frame, trace.tb_next
        for value in trace.tb_frame.f_locals.values():
            if value is interrupted or (type(value) is tuple and any(each is interrupted for each in value)):
                return True
    return False


class ExitCode(enum.IntEnum):
    """Exit codes of the `memo` command; part of its public contract."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    INFEASIBLE = 3
    NO_PLAN_IN_TIME = 4
    PLAN_INVALID = 5
    INTERRUPTED = 130


class MemoError(RuntimeError):
    """Base class of all exceptions that memo raises on purpose.

    Attributes:
        exit_code: exit code of the `memo` command when this exception ends it.

    Example:
        try:
            loss.backward()
        except memo.MemoError as error:
            print(error)  # one or two sentences: what happened, and what to do
            raise
    """

    exit_code = ExitCode.FAILURE


class UsageError(MemoError, ValueError):
    """Invalid argument, such as an unknown preset, `8 gigs` or a negative budget."""

    @classmethod
    def unknown(cls, what: str, name: str, known: Iterable[str], *, otherwise: str = "") -> UsageError:
        """Error for a name that is none of those known; the nearest one, if any, comes before all of them."""
        known = list(known)
        near = difflib.get_close_matches(name.lower(), known, n=1)
        question = f"did you mean {near[0]}? It is" if near else "choose"
        return cls(f"unknown {what} {name!r}; {question} one of {', '.join(known)}{otherwise}")

    exit_code = ExitCode.USAGE


class DataError(MemoError):
    """Training data cannot be read or is too short, or a file of the run's data or metrics cannot be written."""


class CheckpointError(MemoError):
    """A checkpoint cannot be written or read, or does not fit the run."""


class TrainingDiverged(MemoError):
    """The loss or a gradient is not finite, or the loss jumped. The weights are those from before the step."""


class PeerLost(MemoError):
    """Another rank of the run has ended. The message contains its error if it reported one."""


class DeviceOutOfMemory(MemoError):
    """A training step needs more memory than the device has."""


class AllocatorError(MemoError):
    """The planned allocator cannot be built or installed, or its steps are nested wrongly."""


class PlanError(MemoError):
    """A plan or profile file has the wrong format, version or values, or does not fit the model or the schedule."""


class PlanInvalid(PlanError):
    """The independent checker rejected a plan. The message names the rule, the buffers and the bytes."""

    exit_code = ExitCode.PLAN_INVALID


class RecordError(MemoError):
    """A training step cannot be recorded without data: its shapes depend on values, or its loss is no scalar."""


class OutputExists(MemoError):
    """An output file exists and overwriting was not allowed. The file is unchanged."""


class Infeasible(MemoError):
    """No plan fits the budgets, by proof. The message names the tier, the bytes and the budget that would fit."""

    exit_code = ExitCode.INFEASIBLE


class SolverFailed(MemoError):
    """A MIP solver crashed or could not be started."""


class SolverTimeout(MemoError):
    """The time limit passed before any plan was found."""

    exit_code = ExitCode.NO_PLAN_IN_TIME


class TraceError(MemoError):
    """A trace file cannot be read or written."""


class SwapError(MemoError):
    """Base class of what the swap engine raises while it moves bytes."""


class NoRepeatedLayers(SwapError):
    """The model has no ModuleList with at least two children of one class; name its layers with `layers`."""


class ModifiedAfterSave(SwapError):
    """A tensor that backward needs was modified in place after autograd saved it. No gradient is computed from it."""


class HostBudgetExceeded(SwapError):
    """The host tier is full, and no other tier may take the bytes."""


class HostPoolUnusable(SwapError):
    """The file of a shared host budget cannot be opened for writing or locked."""


class ScratchUnusable(SwapError):
    """The scratch directory is missing, not a directory, not writable or unsafe. No file was made."""


class ScratchFull(SwapError):
    """The scratch file cannot be reserved, or is full and no other tier may take the bytes."""


class StoreWriteError(SwapError):
    """A write to disk failed. The bytes were still in memory when this was raised."""


class StoreReadError(SwapError):
    """A read from disk failed or returned other bytes than were written. This backward's gradients are incomplete."""


class CorruptBlock(StoreReadError):
    """A block read from disk does not match the checksum it was written with."""
