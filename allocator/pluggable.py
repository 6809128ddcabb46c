"""`memo.use_planned_allocator` and `memo.memory_stats`: the planned allocator in torch's place.

Owns the one installed allocator of the process and where a managed model's steps begin and end; how steps are planned and
served is memo.allocator's. torch takes another allocator only before its first use of CUDA, and once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from memo.allocator.native import FREE, MALLOC, RECORD_STREAM, Native
from memo.allocator.planned_allocator import PlannedAllocator
from memo.errors import AllocatorError, UsageError
from memo.units import format_bytes

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

__all__ = [
    "MemoryStats",
    "ModelSteps",
    "active_allocator",
    "allocated_bytes",
    "memory_share",
    "memory_stats",
    "model_steps",
    "peak_allocated_bytes",
    "restart_peaks",
    "use_planned_allocator",
]

PLAN_SECONDS = 10.0  # for one plan, in the background; most steps are planned in well under a second

_installed: PlannedAllocator | None = None
_pluggable: Any = None  # what torch keeps a pointer into


def use_planned_allocator(*, plan_seconds: float = PLAN_SECONDS) -> PlannedAllocator:
    """Serves every training step's memory from one arena, at addresses planned from the step before it.

    Call it once, before anything touches the GPU. `memo.offload`'s steps are then found without further ado; other steps
    are named with the answer's `step`:

        allocator = memo.use_planned_allocator()
        for batch in data:
            with allocator.step(("train", batch.shape)):
                ...

    The first step of a kind warms up, the second is recorded, and from when its plan is ready (in the background, from the
    fourth on as a rule) steps take no memory from the driver. A step that does something else is served from the driver's
    pool and counted, never refused. A second call gives the same allocator.

    Raises:
        AllocatorError: this torch has no CUDA, there is no GPU, CUDA is in use already, or there is no C++ compiler. Nothing
            is changed then.
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
    """The allocator that `use_planned_allocator` installed; None without one."""
    return _installed


def _require_untouched_cuda() -> None:
    if torch.version.cuda is None:
        raise AllocatorError("the planned allocator needs a torch that is built for CUDA; this one is not")
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
    if record_stream is None:  # without it, memory would be reused under the streams that still read it
        raise AllocatorError(f"torch {torch.__version__} does not tell allocators which streams use a block")
    record_stream(native.address_of(RECORD_STREAM))
    try:
        torch.cuda.memory.change_current_allocator(pluggable)
    except RuntimeError as error:
        raise AllocatorError(f"{_TOO_LATE} ({error})") from None
    _pluggable = pluggable


def _cuda_runtime() -> str:
    """The runtime library that torch has loaded: both must speak to the same one."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith("libcudart"):
            return f"/{path}"
    return f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """Device memory of this process, whichever allocator serves it."""

    allocator: str
    """`planned`; `torch` for torch's own; `none` where there is no GPU, and then everything is 0."""
    allocated_bytes: int = 0
    peak_allocated_bytes: int = 0
    reserved_bytes: int = 0
    """Taken from the device."""
    peak_reserved_bytes: int = 0
    device_mallocs: int = 0
    """cudaMalloc calls."""
    arena_bytes: int = 0
    arena_used_bytes: int = 0
    peak_arena_used_bytes: int = 0
    planned: int = 0
    """Requests served at their planned place; so are the next four numbers of requests."""
    outside: int = 0
    """By plan from the pool: they outlive their step, or several streams use them."""
    fallbacks: int = 0
    """Against the plan from the pool."""
    rescues: int = 0
    """From what the arena did not need, when the device was full."""
    fallback_bytes: int = 0
    divergent_steps: int = 0

    def __str__(self) -> str:
        if self.allocator == "none":
            return "no CUDA device: tensors are in host memory, which memo does not count"
        text = (
            f"{self.allocator} allocator: {format_bytes(self.allocated_bytes)} allocated "
            f"(peak {format_bytes(self.peak_allocated_bytes)}), {format_bytes(self.reserved_bytes)} reserved "
            f"(peak {format_bytes(self.peak_reserved_bytes)}), {self.device_mallocs} cudaMalloc"
        )
        if self.allocator != "planned":
            return text
        return (
            f"{text}; arena {format_bytes(self.arena_bytes)}, {self.planned} requests planned, {self.outside} outside, "
            f"{self.fallbacks} fallbacks ({format_bytes(self.fallback_bytes)}) in {self.divergent_steps} steps"
        )


def memory_stats(device: torch.device | int | None = None, *, reset_peaks: bool = False) -> MemoryStats:
    """Device memory now and at its peak; `reset_peaks` starts the peaks anew after they were read.

    In place of `torch.cuda.memory_stats`, which refuses to answer under any allocator but torch's own.
    """
    if torch.version.cuda is None or not torch.cuda.is_available():
        return MemoryStats(allocator="none")
    stats = _torch_stats(device) if _installed is None else _planned_stats(_installed.native, device)
    if reset_peaks:
        restart_peaks(device)
    return stats


def allocated_bytes(device: torch.device) -> int:
    """Bytes of a GPU that are allocated now, by whichever allocator serves it."""
    if _installed is not None:
        return _installed.native.counters(_index(device)).allocated
    return _figure(_torch_counters(device), "allocated_bytes", "current")


def peak_allocated_bytes(device: torch.device) -> int:
    """Largest `allocated_bytes` of a GPU since `restart_peaks`.

    Cheap enough for every edge of a layer: `torch.cuda.max_memory_allocated` names, sorts and copies some hundred figures to
    give this one.
    """
    if _installed is not None:
        return _installed.native.counters(_index(device)).allocated_peak
    return _figure(_torch_counters(device), "allocated_bytes", "peak")


def restart_peaks(device: torch.device | int | None = None) -> None:
    """Starts the peaks of device memory anew, whichever allocator serves it. Reads nothing."""
    if _installed is not None:
        _installed.native.reset_peaks()
    else:
        torch.cuda.reset_peak_memory_stats(device)


def _planned_stats(native: Native, device: torch.device | int | None) -> MemoryStats:
    counters = native.counters(_index(device))
    return MemoryStats(
        allocator="planned",
        allocated_bytes=counters.allocated,
        peak_allocated_bytes=counters.allocated_peak,
        reserved_bytes=counters.reserved,
        peak_reserved_bytes=counters.reserved_peak,
        device_mallocs=counters.device_mallocs,
        arena_bytes=counters.arena,
        arena_used_bytes=counters.arena_used,
        peak_arena_used_bytes=counters.arena_used_peak,
        planned=counters.planned,
        outside=counters.outside,
        fallbacks=counters.fallbacks,
        rescues=counters.rescues,
        fallback_bytes=counters.fallback_nbytes,
        divergent_steps=counters.divergent_steps,
    )


def memory_share(device: torch.device) -> float:
    """The part of a GPU's memory that this process may take of torch's allocator; the planned one has no such bound."""
    return 1.0 if _installed is not None else torch.cuda.get_per_process_memory_fraction(device)


def _torch_stats(device: torch.device | int | None) -> MemoryStats:
    counters = _torch_counters(device)
    return MemoryStats(
        allocator="torch",
        allocated_bytes=_figure(counters, "allocated_bytes", "current"),
        peak_allocated_bytes=_figure(counters, "allocated_bytes", "peak"),
        reserved_bytes=_figure(counters, "reserved_bytes", "current"),
        peak_reserved_bytes=_figure(counters, "reserved_bytes", "peak"),
        device_mallocs=counters.get("num_device_alloc", 0),
    )


def _torch_counters(device: torch.device | int | None) -> dict[str, Any]:
    """The counters of torch's allocator as it keeps them; empty before the first use of CUDA."""
    return torch.cuda.memory.memory_stats_as_nested_dict(device)


def _figure(counters: dict[str, Any], name: str, moment: str) -> int:
    return counters[name]["all"][moment] if counters else 0


def _index(device: torch.device | int | None) -> int:
    index = device.index if isinstance(device, torch.device) else device
    return torch.cuda.current_device() if index is None else index


def model_steps(model: nn.Module, device: torch.device) -> ModelSteps | None:
    """Finds this model's steps for the planned allocator; None where it does not serve the model's memory."""
    return ModelSteps(_installed, model, device) if _installed is not None and device.type == "cuda" else None


class ModelSteps:
    """Finds the steps of a managed model: from its forward on, until it is said to be done or another step begins.

    A forward begins a step unless activations of an earlier one are still out, as between the microbatches of a pipeline.
    Steps that the program names itself (`PlannedAllocator.step`) are left alone.
    """

    def __init__(self, allocator: PlannedAllocator, model: nn.Module, device: torch.device) -> None:
        self._allocator, self._model, self._device = allocator, model, device
        self._ours = False

    def hook(self, idle: Callable[[], bool]) -> RemovableHandle:
        """Watches the model's forwards; `idle` says whether nothing of an earlier one is still needed."""

        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.forward_begins(args, kwargs, idle=idle())

        return self._model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)

    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, idle: bool) -> None:
        """Called before the model's forward."""
        if self._ours and not idle:
            return
        self.done()
        if not self._allocator.in_step:
            self._allocator.begin_step(self._signature(args, kwargs), device=_index(self._device))
            self._ours = True

    def done(self) -> None:
        """Ends the step, if it is one that this found."""
        if self._ours:
            self._ours = False
            self._allocator.end_step()

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """Key of steps that ask for the same memory, as far as can be seen at their start."""
        shapes = tuple((tuple(x.shape), x.dtype) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        # Accumulating into gradients that are there asks for other memory than making them.
        has_gradients = any(parameter.grad is not None for parameter in self._model.parameters())
        return shapes, self._model.training, torch.is_grad_enabled(), has_gradients
