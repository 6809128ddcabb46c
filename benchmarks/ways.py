"""The ways to hold a training step's activations that the tables compare: memo's and its peers'.

    keep everything            torch alone
    memo, alpha A              memo.offload at a fixed alpha, host tier
    save_on_cpu, pinned        torch.autograd.graph.save_on_cpu
    TRL OffloadActivations     streams and defaults as in TRL
    full checkpointing         torch's non-reentrant checkpoint around every layer
    offloaded checkpointing    likewise, inputs in page-locked host memory
    selective checkpointing    attention and every second matrix product saved, as torchtitan does

What the final norm and the loss save stays on the device in every way: TRL leaves the head out, and memo manages layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import memo
from benchmarks.checkpointing import OffloadedInputs, checkpointed, selectively_checkpointed
from benchmarks.moved import Moved
from benchmarks.trl_offload import Offloading
from memo.events import Tier

if TYPE_CHECKING:
    from memo.gpt.model.model import GPT

__all__ = ["CHECKPOINTING", "KEEP", "OFFLOADED", "Compute", "Running", "Way", "managed", "memo_way", "peers"]

KEEP = "keep everything"
CHECKPOINTING = "full checkpointing"
OFFLOADED = "offloaded checkpointing"


class Compute(enum.Enum):
    """Computation of a step; decides which step without copies a way is compared with."""

    ONCE = "each layer once"
    TWICE = "each layer's forward twice"
    OTHER = "something else"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A way in use on one model."""

    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Entered for each step."""
    backward_inside: bool = False
    """Backward belongs inside of `around`, too."""
    moved: Callable[[], Moved] = Moved
    """Copied so far."""
    host_bytes: Callable[[], int] | None = None
    """The most host memory that held activations; None: what torch page-locked."""
    waited_s: Callable[[], float | None] = lambda: None
    """Spent waiting for copies so far, where it is measured."""
    done: Callable[[], None] = lambda: None
    """Called behind each step."""
    report: Callable[[], str | None] = lambda: None
    """The way's own report, if it has one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to hold activations: a name, and a context in which it is in use on a model."""

    name: str
    start: Callable[[GPT], contextlib.AbstractContextManager[Running]]
    compute: Compute


def simple(name: str, around: Callable[[GPT], Any], compute: Compute) -> Way:
    """A way that needs nothing but a context around each forward."""

    @contextlib.contextmanager
    def start(model: GPT) -> Iterator[Running]:
        yield Running(around=lambda: around(model))

    return Way(name=name, start=start, compute=compute)


def memo_way(name: str, compute: Compute = Compute.OTHER, **options: Any) -> Way:
    """`memo.offload` with these options."""

    @contextlib.contextmanager
    def start(model: GPT) -> Iterator[Running]:
        manager = memo.offload(model, **options)
        try:
            yield managed(manager)
        finally:
            manager.close()

    return Way(name=name, start=start, compute=compute)


def managed(manager: memo.Manager) -> Running:
    """A manager's steps and its own figures."""
    stats = manager.stats

    def host_bytes() -> int:
        return sum(use.peak_bytes for use in manager.report().tiers if use.tier is not Tier.DEVICE)

    return Running(
        around=lambda: manager,
        moved=lambda: Moved(out_bytes=stats.bytes_host + stats.bytes_disk, back_bytes=stats.bytes_reloaded),
        host_bytes=host_bytes,
        waited_s=lambda: manager.stats.stall_s,
        done=manager.step_done,
        report=lambda: str(manager.report()),
    )


def peers(*, trl: Path | None = None) -> Sequence[Way]:
    """Every way but memo's, keep-everything and full checkpointing first: ratios are to these."""
    return (
        simple(KEEP, lambda model: contextlib.nullcontext(), Compute.ONCE),
        simple(CHECKPOINTING, checkpointed, Compute.TWICE),
        Way(name=OFFLOADED, start=_offloaded, compute=Compute.TWICE),
        simple("selective checkpointing", selectively_checkpointed, Compute.OTHER),
        Way(name="save_on_cpu, pinned", start=_saved_on_cpu, compute=Compute.ONCE),
        Way(name="TRL OffloadActivations", start=lambda model: _trl(model, trl), compute=Compute.ONCE),
    )


@contextlib.contextmanager
def _offloaded(model: GPT) -> Iterator[Running]:
    weight, config = model.tokens.weight, model.config
    inputs = OffloadedInputs(weight.device)
    inputs.reserve(config.layers, config.max_seq * config.hidden, weight.dtype)
    yield Running(
        around=lambda: inputs.around(model),
        moved=lambda: dataclasses.replace(inputs.moved),
        host_bytes=lambda: inputs.host_bytes,
    )


@contextlib.contextmanager
def _saved_on_cpu(model: GPT) -> Iterator[Running]:
    moved = Moved()

    def counted() -> saved_tensors_hooks:
        hooks = save_on_cpu(pin_memory=True)
        pack, unpack = hooks.pack_hook, hooks.unpack_hook

        def pack_counted(tensor: torch.Tensor) -> Any:
            moved.out_bytes += tensor.nbytes
            return pack(tensor)

        def unpack_counted(packed: Any) -> torch.Tensor:
            moved.back_bytes += packed[1].nbytes
            return unpack(packed)

        hooks.pack_hook, hooks.unpack_hook = pack_counted, unpack_counted
        return hooks

    yield Running(around=lambda: _but_the_head(model, counted()), moved=lambda: dataclasses.replace(moved))


@contextlib.contextmanager
def _trl(model: GPT, path: Path | None) -> Iterator[Running]:
    offloading = Offloading(model, path)
    yield Running(
        around=lambda: _but_the_head(model, offloading.hooks),
        backward_inside=True,
        moved=lambda: dataclasses.replace(offloading.moved),
    )


@contextlib.contextmanager
def _but_the_head(model: GPT, hooks: saved_tensors_hooks) -> Iterator[None]:
    """`hooks` from here on, except for what is saved behind the last layer."""
    with hooks, contextlib.ExitStack() as head:

        def begin(*_: Any) -> None:
            head.enter_context(saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor))

        def end(*_: Any) -> None:
            head.close()

        handles = [
            model.layers[-1].register_forward_hook(begin),
            model.register_forward_hook(end, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
