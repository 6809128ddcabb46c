"""Every error memo raises on purpose: one root, one leaf for each cause a caller can act on.

A message says what happened, where (rank, tensor, bytes), and what to do. The command line prints the message as one
line on stderr and exits with the leaf's `exit_code`; a traceback is always a bug.
"""

from __future__ import annotations

import enum

__all__ = [
    "AllocatorError",
    "CheckpointError",
    "CorruptBlock",
    "DataError",
    "DeviceOutOfMemory",
    "ExitCode",
    "HostBudgetExceeded",
    "Infeasible",
    "MemoError",
    "ModifiedAfterSave",
    "NoRepeatedLayers",
    "OutputExists",
    "PeerLost",
    "PlanError",
    "PlanInvalid",
    "RecordError",
    "ScratchFull",
    "ScratchUnusable",
    "SolverFailed",
    "SolverTimeout",
    "StoreReadError",
    "StoreWriteError",
    "SwapError",
    "TraceError",
    "TrainingDiverged",
    "UsageError",
]


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
    """Root of everything memo raises on purpose."""

    exit_code = ExitCode.FAILURE


class UsageError(MemoError, ValueError):
    """An argument that cannot mean anything: unknown preset, `8 gigs`, a negative budget."""

    exit_code = ExitCode.USAGE


class DataError(MemoError):
    """Training data that cannot be read or is too short."""


class CheckpointError(MemoError):
    """A checkpoint that cannot be written, read, or does not fit the run."""


class TrainingDiverged(MemoError):
    """The loss or a gradient is not finite, or the loss jumped; the weights are those before the step."""


class PeerLost(MemoError):
    """Another rank of the run has ended; the message has its error, where it left one."""


class DeviceOutOfMemory(MemoError):
    """A training step does not fit into the device's memory."""


class AllocatorError(MemoError):
    """The planned allocator cannot be built, installed, or used in this way; the message says which."""


class PlanError(MemoError):
    """A plan or profile file that is not what it says: wrong format, version, or values."""


class PlanInvalid(PlanError):
    """A plan that the independent checker refuses; the message names rule, buffers and bytes."""

    exit_code = ExitCode.PLAN_INVALID


class RecordError(MemoError):
    """A training step that cannot be recorded: its shapes depend on data, or it is not what it must be."""


class OutputExists(MemoError):
    """A file that would be written exists, and nobody said that it may be overwritten."""


class Infeasible(MemoError):
    """Proven: no plan fits; the message names the tier, the instant, the bytes, and what would fit."""

    exit_code = ExitCode.INFEASIBLE


class SolverFailed(MemoError):
    """A MIP solver crashed or could not be run."""


class SolverTimeout(MemoError):
    """The time limit passed without any plan."""

    exit_code = ExitCode.NO_PLAN_IN_TIME


class TraceError(MemoError):
    """A trace file that cannot be read."""


class SwapError(MemoError):
    """Root of what the swap engine raises while it moves bytes."""


class NoRepeatedLayers(SwapError):
    """No ModuleList with at least two children of one class was found in the model."""


class ModifiedAfterSave(SwapError):
    """A tensor that backward needs was changed in place after autograd saved it."""


class HostBudgetExceeded(SwapError):
    """The host arena is full and no further tier may take the bytes."""


class ScratchUnusable(SwapError):
    """The scratch directory is missing, not a directory, not writable, or unsafe."""


class ScratchFull(SwapError):
    """The scratch file cannot be reserved, or is full and no further tier may take the bytes."""


class StoreWriteError(SwapError):
    """The disk refused a write; the bytes were still in memory when this was raised."""


class StoreReadError(SwapError):
    """The disk did not give back what was written to it."""


class CorruptBlock(StoreReadError):
    """A block read back does not have the checksum it was written with."""
