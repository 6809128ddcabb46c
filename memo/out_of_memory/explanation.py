"""Why memory ran out, or what held most of it: three sentences and the largest holders.

The sentences say what the device held, the largest part first; whether that is fragmentation, states or activations; and
what to change, with numbers. They are made of a `HeldMemory`, which comes from a trace, from a snapshot of torch's
allocator, or from a manager in whose step the error was raised.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any

from memo.events import OUT_OF_MEMORY, Event, Lane, Note, Span, TierName
from memo.trace import (
    OTHER,
    OWNED,
    TRANSIENT,
    Holder,
    RankReport,
    device_stack,
    largest_holders,
    residency_changes,
)
from memo.units import format_bytes

SAVED = "saved activations"
"""Group of what layers saved for backward."""
_STATES = tuple(OWNED.values())
_FRAGMENTED = 0.2
"""Share of reserved memory that is free and yet counts as fragmentation where no request is known."""
_LARGE_REQUEST = 1 / 8
"""Share of what is held from which a request outside the layers is taken for logits."""
_LOGITS = re.compile(r"logits|lm_head|cross_entropy|log_?softmax|nll_loss", re.IGNORECASE)
_VOCABULARY = 16_384
"""Last dimension from which a tensor outside the layers is taken for logits."""


class Cause(enum.StrEnum):
    """What most of the memory, or the error, is due to."""

    FRAGMENTATION = "fragmentation"
    STATES = "states"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    TRANSIENT = "transient"
    OTHER = "other"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldMemory:
    """What a device held when memory ran out, or at its peak."""

    where: str
    """The instant, as the begin of a sentence: "At the peak of step 3"."""
    ran_out: bool
    bands: Mapping[str, int]
    """Bytes by band of `memo.trace.device_memory`, saved storages together as SAVED."""
    holders: Sequence[Holder]
    """Largest first."""
    requested_nbytes: int | None = None
    """Size of the allocation that failed."""
    reserved_nbytes: int | None = None
    """That the allocator had from the device, in use or not."""
    capacity_nbytes: int | None = None
    """Memory of the device, or its budget."""
    moved_nbytes: int = 0
    """Saved bytes in host memory and on disk at that time."""
    outside_layers: bool = False
    """No layer was running: head, loss or optimizer were."""

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(self.bands.values())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAnswer:
    """Three sentences and the largest holders."""

    cause: Cause
    sentences: tuple[str, str, str]
    held: HeldMemory

    def __str__(self) -> str:
        return " ".join(self.sentences)

    def to_json(self) -> dict[str, Any]:
        """Converts to the object of `memo explain-oom --json`; sizes are bytes."""
        held = self.held
        return {
            "cause": self.cause.value,
            "sentences": list(self.sentences),
            "ran_out": held.ran_out,
            "held_nbytes": held.nbytes,
            "requested_nbytes": held.requested_nbytes,
            "reserved_nbytes": held.reserved_nbytes,
            "capacity_nbytes": held.capacity_nbytes,
            "moved_nbytes": held.moved_nbytes,
            "groups": dict(_ranked(held.bands)),
            "holders": [dataclasses.asdict(one) for one in held.holders],
        }


def explain_memory(held: HeldMemory) -> MemoryAnswer:
    """Says what held the memory, of which kind that is, and what to change."""
    cause = _cause(held)
    return MemoryAnswer(cause=cause, sentences=(_what(held), _kind(held, cause), _change(held, cause)), held=held)


def _ranked(bands: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(((band, nbytes) for band, nbytes in bands.items() if nbytes), key=lambda item: -item[1])


def _what(held: HeldMemory) -> str:
    parts = ", ".join(f"{band} {format_bytes(nbytes)}" for band, nbytes in _ranked(held.bands))
    asked = f" when {format_bytes(held.requested_nbytes)} more were asked for" if held.requested_nbytes else ""
    none = "" if held.ran_out else "Memory did not run out here. "
    return f"{none}{held.where} the device held {format_bytes(held.nbytes)}{asked}: {parts or 'nothing'}."


def _states(held: HeldMemory) -> int:
    return sum(held.bands.get(band, 0) for band in _STATES)


def _unused(held: HeldMemory) -> int:
    """Bytes reserved and not allocated."""
    return max(0, (held.reserved_nbytes or 0) - held.nbytes)


def _cause(held: HeldMemory) -> Cause:
    unused = _unused(held)
    enough = held.requested_nbytes if held.requested_nbytes else _FRAGMENTED * (held.reserved_nbytes or 0)
    if unused and held.ran_out and unused >= enough:
        return Cause.FRAGMENTATION
    sizes = {
        Cause.STATES: _states(held),
        Cause.ACTIVATIONS: held.bands.get(SAVED, 0),
        Cause.TRANSIENT: held.bands.get(TRANSIENT, 0),
        Cause.OTHER: held.bands.get(OTHER, 0),
    }
    logits = sum(one.nbytes for one in held.holders if _is_logits(one))
    largest = max(sizes, key=lambda cause: sizes[cause])
    if _asks_for_logits(held):
        return Cause.LOGITS
    if logits and logits >= sizes[largest] / 2:
        return Cause.LOGITS
    return Cause.LOGITS if largest is Cause.TRANSIENT and held.outside_layers else largest


def _asks_for_logits(held: HeldMemory) -> bool:
    """True for a request outside the layers that is too large for a weight's gradient or state."""
    asked = held.requested_nbytes or 0
    return held.ran_out and held.outside_layers and asked >= _LARGE_REQUEST * held.nbytes


def _is_logits(one: Holder) -> bool:
    if one.what in _STATES:
        return False
    named = any(_LOGITS.search(text or "") for text in (one.op, one.line, one.name))
    return named or (not one.name and one.shape is not None and one.shape[-1:] >= (_VOCABULARY,))


def _kind(held: HeldMemory, cause: Cause) -> str:
    if cause is Cause.FRAGMENTATION:
        return (
            f"It is fragmentation: {format_bytes(_unused(held))} were reserved and free, but not in one piece of the size "
            "asked for."
        )
    if cause is Cause.LOGITS and _asks_for_logits(held) and held.requested_nbytes:
        return (
            f"The {format_bytes(held.requested_nbytes)} are most likely for the logits or their loss: no other tensor "
            "outside the layers is as large."
        )
    free = "" if held.reserved_nbytes is None else f"not fragmentation ({format_bytes(_unused(held))} of it free), but "
    total = max(held.nbytes, 1)
    share = f"{100 * min(1.0, _of(held, cause) / total):.0f} %"
    said = {
        Cause.STATES: f"weights, gradients and optimizer state, {share} of it, which no sequence length changes",
        Cause.ACTIVATIONS: f"activations that layers saved for backward, {share} of it",
        Cause.LOGITS: f"most likely the logits and their loss, outside the layers, {share} of it",
        Cause.TRANSIENT: f"transient tensors, {share} of it: outputs and workspaces of the operators then running",
        Cause.OTHER: f"memory that memo does not see, {share} of it: the program itself, or other tensors and libraries",
    }
    return f"The largest part is {free}{said[cause]}."


def _of(held: HeldMemory, cause: Cause) -> int:
    if cause is Cause.STATES:
        return _states(held)
    if cause is Cause.ACTIVATIONS:
        return held.bands.get(SAVED, 0)
    if cause is Cause.LOGITS:
        return sum(one.nbytes for one in held.holders if _is_logits(one)) or held.bands.get(TRANSIENT, 0)
    return held.bands.get(TRANSIENT if cause is Cause.TRANSIENT else OTHER, 0)


def _change(held: HeldMemory, cause: Cause) -> str:
    if cause is Cause.FRAGMENTATION:
        return (
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or give every tensor a planned address "
            "(memo train --planned-allocator, memo.use_planned_allocator)."
        )
    if cause is Cause.STATES:
        states = _states(held)
        return (
            f"Shard them: over 8 GPUs (fully_shard, as memo plan --zero 3 counts it) each holds "
            f"{format_bytes(states / 8)}; or keep the optimizer's state in 8 bits or in host memory, or train fewer weights."
        )
    shorter = _shorter(held)
    if cause is Cause.LOGITS:
        return (
            "Compute the loss without logits: memo.loss_without_logits(model) once before training, the same loss with a "
            f"chunk of them at a time{shorter}."
        )
    if cause is Cause.ACTIVATIONS and not held.moved_nbytes:
        return (
            "Move them: memo.offload(model, host=...) or memo train --offload auto keeps about two layers of them on the "
            f"device{shorter}."
        )
    if cause is Cause.ACTIVATIONS:
        return (
            f"Another {format_bytes(held.moved_nbytes)} are in host memory or on disk already: lower alpha, so that more is "
            f"recomputed, or give a device budget to plan for (device=...){shorter}."
        )
    if cause is Cause.TRANSIENT:
        return (
            f"Give saved activations less of the device (memo.offload(model, device=...)), or a smaller batch{shorter}."
        )
    return f"End other programs on the device, or look for tensors that outlive their step{shorter}."


def _shorter(held: HeldMemory) -> str:
    """What half the sequence would save of what is held; what the rest of the step would have asked for is not known."""
    growing = held.bands.get(SAVED, 0) + held.bands.get(TRANSIENT, 0) + (held.requested_nbytes or 0)
    return f"; half the sequence would take about {format_bytes(growing / 2)} less" if growing else ""


def held_in_trace(one: RankReport, *, step: int | None = None) -> HeldMemory:
    """Finds what a rank's device held: where memory ran out, else at the peak of a step or of the whole trace.

    Args:
        one: the rank's report.
        step: the step; None: the error's, or else that of the largest total.

    Raises:
        UsageError: the trace has no such step.
    """
    events, lifetimes = one.trace.events, one.lifetimes
    memory = device_stack(events, lifetimes)
    errors = [event for event in events if isinstance(event, Note) and event.cause == OUT_OF_MEMORY]
    error = next((note for note in errors if step is None or note.step == step), None)
    figures = one.step(step)
    window = (figures.start_ns, figures.end_ns)
    numbers = TorchError()
    if error is None:
        t = memory.peak(window)
        number = next((each.step for each in one.stats.steps if each.start_ns <= t <= each.end_ns), None)
        where = "At the peak" if number is None else f"At the peak, in step {number},"
    else:
        begin = next((each.start_ns for each in one.stats.steps if each.step == error.step), 0)
        t = memory.peak((min(begin, error.t), error.t))
        where = f"When memory ran out in step {error.step}{f', in {error.module}' if error.module else ''},"
        numbers = parse_torch_error(error.message)
    held = memory.at(t)
    bands = {band: nbytes for band, nbytes in held.items() if band not in memory.layers}
    bands[SAVED] = sum(nbytes for band, nbytes in held.items() if band in memory.layers)
    budgets = one.trace.meta.get("budgets")
    budget = budgets.get("device") if isinstance(budgets, dict) else None
    moved = [
        change.delta for change in residency_changes(lifetimes) if change.tier is not TierName.DEVICE and change.t <= t
    ]
    return HeldMemory(
        where=where,
        ran_out=error is not None,
        bands=numbers.with_rest(bands),
        holders=largest_holders(events, lifetimes, memory, t),
        requested_nbytes=numbers.requested_nbytes,
        reserved_nbytes=numbers.reserved_nbytes,
        capacity_nbytes=numbers.capacity_nbytes or (budget if type(budget) is int else None),
        moved_nbytes=sum(moved),
        outside_layers=_is_outside_layers(events, t),
    )


def _is_outside_layers(events: Sequence[Event], t: int) -> bool:
    """True between two spans of layers that are not neighbours: the last forward and the first backward of a step."""
    spans = [event for event in events if isinstance(event, Span) and event.lane is Lane.COMPUTE and event.module]
    before = max((span for span in spans if span.t + span.d <= t), key=lambda span: span.t, default=None)
    after = min((span for span in spans if span.t >= t), key=lambda span: span.t, default=None)
    if any(span.t < t < span.t + span.d for span in spans):
        return False
    return before is not None and before.phase == "forward" and (after is None or after.phase == "backward")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TorchError:
    """Sizes in the message of torch's CUDA out-of-memory error; None where it does not say."""

    requested_nbytes: int | None = None
    capacity_nbytes: int | None = None
    allocated_nbytes: int | None = None
    unused_nbytes: int | None = None

    @property
    def reserved_nbytes(self) -> int | None:
        """Bytes that the allocator had from the device."""
        return None if self.allocated_nbytes is None else self.allocated_nbytes + (self.unused_nbytes or 0)

    def with_rest(self, bands: Mapping[str, int]) -> dict[str, int]:
        """Adds to `transient` what the error's total has beyond the bands: it is gone by the time one can look."""
        rest = (self.allocated_nbytes or 0) - sum(bands.values())
        return {**bands, TRANSIENT: bands.get(TRANSIENT, 0) + rest} if rest > 0 else dict(bands)


_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB|TiB)"
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SENTENCES = {
    "requested_nbytes": rf"[Tt]ried to allocate {_SIZE}",
    "capacity_nbytes": rf"total capacity of {_SIZE}",
    "allocated_nbytes": rf"memory {_SIZE} is allocated by PyTorch",
    "unused_nbytes": rf"{_SIZE} is reserved by PyTorch but unallocated",
}
_CPU_REQUEST = re.compile(r"you tried to allocate (\d+) bytes")


def parse_torch_error(message: str) -> TorchError:
    """Reads the sizes in the message of an allocator's error."""
    cpu = _CPU_REQUEST.search(message)
    if cpu is not None:
        return TorchError(requested_nbytes=int(cpu[1]))
    found = {name: re.search(pattern, message) for name, pattern in _SENTENCES.items()}
    return TorchError(
        **{name: int(float(match[1]) * _UNITS[match[2]]) for name, match in found.items() if match is not None}
    )
