"""Installation of the planned allocator as torch's CUDA allocator: `memo.use_planned_allocator`, `memo.memory_stats`.

Owns the one installed allocator of the process, and finds where a managed model's steps begin and end. Planning and
serving of steps is planned_allocator's. torch accepts another allocator once, and only before its first use of CUDA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from memo.allocator.native import FREE, MALLOC, RECORD_STREAM, Native
from memo.allocator.planned_allocator import PlannedAllocator
from memo.allocator.step import MemoryCounters
from memo.errors import AllocatorError, UsageError
from memo.module_hooks import own_hook
from memo.nested import leaves_of
from memo.units import format_bytes

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

PLAN_SECONDS = 10.0  # limit for one plan; most steps are planned in well under a second

_installed: PlannedAllocator | None = None
_pluggable: Any = None  # kept alive: torch holds a pointer into it
_largest_read: dict[int, int] = {}  # largest peak of torch's allocator that was read, by device: restarts lose it


def use_planned_allocator(*, plan_seconds: float = PLAN_SECONDS) -> PlannedAllocator:
    """Serves the memory of training steps from one arena, at addresses planned from earlier steps.

    Call it once, before the first use of CUDA. Steps of models under `memo.offload` are found automatically; mark
    others with `step` of the returned allocator:

        allocator = memo.use_planned_allocator()
        for batch in data:
            with allocator.step(("train", batch.shape)):
                ...

    The first step of a kind warms up and the second is recorded. Once its plan is ready (made in the background,
    usually from the fourth step on) steps take no memory from the driver. Requests outside the plan are served by the
    driver's pool and counted, never refused.

    Args:
        plan_seconds: Time limit for one plan.

    Returns:
        The process's allocator; the same one at every call.

    Raises:
        AllocatorError: torch has no CUDA, there is no GPU, CUDA is in use already, or there is no C++ compiler. Nothing
            is changed.
        UsageError: `plan_seconds` is not positive.
    """
    global _installed
    if not plan_seconds > 0:
        raise UsageError(f"plan_seconds={plan_seconds} is not positive")
    if _installed is None:
        _require_untouched_cuda()
        native = Native()
        native.open(_cuda_runtime())
        _install(native)
        _installed = PlannedAllocator(native, plan_seconds=plan_seconds)
    return _installed


def active_allocator() -> PlannedAllocator | None:
    """Returns the allocator that `use_planned_allocator` installed; None without one."""
    return _installed


def _require_untouched_cuda() -> None:
    if torch.version.cuda is None:
        raise AllocatorError("the planned allocator needs a torch built for CUDA; install one")
    if not torch.cuda.is_available():
        raise AllocatorError("the planned allocator needs a CUDA GPU; torch sees none on this machine")
    if torch.cuda.is_initialized():
        raise AllocatorError(_TOO_LATE)


_TOO_LATE = (
    "CUDA is in use already; call memo.use_planned_allocator() at the start of the program, before the first tensor, "
    "stream or query of the GPU"
)


def _install(native: Native) -> None:
    global _pluggable
    pluggable = torch.cuda.memory.CUDAPluggableAllocator(str(native.path), MALLOC, FREE)
    inner = pluggable.allocator()
    record_stream = getattr(inner, "set_record_stream_fn", None)
    if record_stream is None:  # without it memory would be reused while other streams still read it
        raise AllocatorError(
            f"torch {torch.__version__} does not tell allocators which streams use a block; use torch 2.11 or later"
        )
    record_stream(native.address_of(RECORD_STREAM))
    try:
        torch.cuda.memory.change_current_allocator(pluggable)
    except RuntimeError as error:
        raise AllocatorError(f"{_TOO_LATE} ({error})") from None
    _pluggable = pluggable


def _cuda_runtime() -> str:
    """Path of the CUDA runtime that torch has loaded; the allocator must use the same one."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith("libcudart"):
            return f"/{path}"
    return f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats(MemoryCounters):
    """Device memory of this process, under torch's or the planned allocator; torch's has no arena and no plan."""

    allocator: Literal["planned", "torch", "none"]
    """`none` without a GPU; all numbers are then 0."""

    def __str__(self) -> str:
        if self.allocator == "none":
            return "no CUDA device; memo does not count host memory"
        text = (
            f"{self.allocator} allocator: {format_bytes(self.allocated_bytes)} allocated "
            f"(peak {format_bytes(self.peak_allocated_bytes)}), {format_bytes(self.reserved_bytes)} reserved "
            f"(peak {format_bytes(self.peak_reserved_bytes)}), {self.device_mallocs} cudaMalloc"
        )
        if self.allocator != "planned":
            return text
        return (
            f"{text}; {format_bytes(self.device_bytes)} of the device (peak {format_bytes(self.peak_device_bytes)}), of "
            f"which the arena {format_bytes(self.arena_bytes)}; {self.planned} requests planned, {self.outside} outside, "
            f"{self.fallbacks} fallbacks ({format_bytes(self.fallback_bytes)}) in {self.divergent_steps} steps"
        )


def memory_stats(device: torch.device | int | None = None, *, reset_peaks: bool = False) -> MemoryStats:
    """Returns current and peak device memory, whichever allocator is installed.

    Replaces `torch.cuda.memory_stats`, which works with torch's own allocator only.

    Args:
        device: GPU; the current one by default.
        reset_peaks: Restart the peaks after reading them, except `peak_device_bytes`.

    Returns:
        A snapshot in bytes. Without CUDA or a GPU its `allocator` is "none" and all counts are 0.
    """
    if torch.version.cuda is None or not torch.cuda.is_available():
        return MemoryStats(allocator="none")
    stats = _torch_stats(device) if _installed is None else _planned_stats(_installed.native, device)
    if reset_peaks:
        restart_peaks(device)
    return stats


def allocated_bytes(device: torch.device) -> int:
    """Returns the bytes of a GPU that are allocated now, whichever allocator is installed."""
    if _installed is not None:
        return _installed.native.counters(_index(device)).allocated_bytes
    return _figure(_torch_counters(device), "allocated_bytes", "current")


def peak_allocated_bytes(device: torch.device) -> int:
    """Returns the largest `allocated_bytes` of a GPU since `restart_peaks`.

    Cheap enough for every layer boundary, unlike `torch.cuda.max_memory_allocated`, which flattens and sorts some
    hundred counters to return one.
    """
    if _installed is not None:
        return _installed.native.counters(_index(device)).peak_allocated_bytes
    peak = _figure(_torch_counters(device), "allocated_bytes", "peak")
    _largest(device, peak)
    return peak


def _largest(device: torch.device | int | None, peak: int) -> int:
    """Notes a peak that was read, and returns the largest one of the device."""
    if not peak and not _largest_read:
        return 0  # as before the first use of CUDA, which the device's index must not be
    index = _index(device)
    largest = _largest_read[index] = max(_largest_read.get(index, 0), peak)
    return largest


def restart_peaks(device: torch.device | int | None = None) -> None:
    """Restarts the peaks of device memory, whichever allocator is installed. Reads nothing."""
    if _installed is not None:
        _installed.native.reset_peaks()
    else:
        torch.cuda.reset_peak_memory_stats(device)


def _planned_stats(native: Native, device: torch.device | int | None) -> MemoryStats:
    return MemoryStats(allocator="planned", **dataclasses.asdict(native.counters(_index(device))))


def memory_share(device: torch.device) -> float:
    """Returns the fraction of a GPU's memory that torch's allocator may take; 1 under the planned allocator."""
    return 1.0 if _installed is not None else torch.cuda.get_per_process_memory_fraction(device)


def _torch_stats(device: torch.device | int | None) -> MemoryStats:
    counters = _torch_counters(device)
    allocated, peak = (_figure(counters, "allocated_bytes", moment) for moment in ("current", "peak"))
    return MemoryStats(
        allocator="torch",
        device_bytes=allocated,
        peak_device_bytes=_largest(device, peak),
        allocated_bytes=allocated,
        peak_allocated_bytes=peak,
        reserved_bytes=_figure(counters, "reserved_bytes", "current"),
        peak_reserved_bytes=_figure(counters, "reserved_bytes", "peak"),
        device_mallocs=counters.get("num_device_alloc", 0),
    )


def _torch_counters(device: torch.device | int | None) -> dict[str, Any]:
    """Counters of torch's allocator, nested; empty before the first use of CUDA."""
    return torch.cuda.memory.memory_stats_as_nested_dict(device)


def _figure(counters: dict[str, Any], name: str, moment: str) -> int:
    return counters[name]["all"][moment] if counters else 0


def _index(device: torch.device | int | None) -> int:
    index = device.index if isinstance(device, torch.device) else device
    return torch.cuda.current_device() if index is None else index


def model_steps(model: nn.Module, device: torch.device) -> ModelSteps | None:
    """Returns the step finder of a model; None where the planned allocator does not serve its device."""
    return ModelSteps(_installed, model, device) if _installed is not None and device.type == "cuda" else None


class ModelSteps:
    """Opens and closes steps of a managed model: each begins at a forward and ends at `done` or at the next step.

    A forward begins a step unless activations of an earlier one are still needed, as between microbatches of a
    pipeline. Steps that the program marks itself (`PlannedAllocator.step`) are left alone.
    """

    def __init__(self, allocator: PlannedAllocator, model: nn.Module, device: torch.device) -> None:
        self._allocator, self._model, self._device = allocator, model, device
        self._ours = False

    def hook(self, idle: Callable[[], bool]) -> RemovableHandle:
        """Registers a forward pre-hook; `idle()` returns True when no activation of an earlier forward is needed."""

        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.forward_begins(args, kwargs, idle=idle())

        return self._model.register_forward_pre_hook(own_hook(self._model, begin), prepend=True, with_kwargs=True)

    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, idle: bool) -> None:
        """Begins a step before the model's forward, unless one is to continue."""
        if self._ours and not idle:
            return
        self.done()
        if not self._allocator.in_step:
            self._allocator.begin_step(self._signature(args, kwargs), device=_index(self._device))
            self._ours = True

    def done(self) -> None:
        """Ends the step, if this object began it."""
        if self._ours:
            self._ours = False
            self._allocator.end_step()

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """Key of steps that request the same memory, from what is known at their start."""
        shapes = tuple((tuple(x.shape), x.dtype) for x in leaves_of((args, kwargs)) if isinstance(x, torch.Tensor))
        # Accumulating into existing gradients requests other memory than creating them.
        has_gradients = any(parameter.grad is not None for parameter in self._model.parameters())
        return shapes, self._model.training, torch.is_grad_enabled(), has_gradients
