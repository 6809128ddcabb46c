"""The ways to hold a training step's activations that the tables compare: memo's and its peers'.

    keep everything            torch alone
    memo, alpha A              memo.offload at a fixed alpha, host tier
    memo.saved_tensors         the context alone, without a plan
    save_on_cpu, pinned        torch.autograd.graph.save_on_cpu
    TRL OffloadActivations     streams and defaults as in TRL
    full checkpointing         torch's non-reentrant checkpoint around every layer
    offloaded checkpointing    likewise, inputs in pinned host memory
    attention kept             checkpointing but for attention's results, as TRL's `selective`; likewise inputs offloaded
    selective checkpointing    attention and every second matrix product saved, as torchtitan does
    sac_ilp                    selective checkpointing with what torch's own solver saves in half of a layer's memory
    DeepSpeed checkpointing    its own, on a GPU with inputs on the CPU
    transformers, offload=True its own, likewise; likewise with attention kept
    Axolotl                    attention's results and inputs on the host, by its two mechanisms

What the final norm and the loss save stays on the device in every way: TRL leaves the head out, and memo manages layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import memo
from benchmarks.peers.axolotl_offload import AxolotlOffload
from benchmarks.peers.checkpointing import OffloadedInputs, checkpointed, keep_attention, selectively_checkpointed
from benchmarks.peers.libraries import deepspeed_checkpointed, transformers_checkpointed
from benchmarks.peers.models import layers_of
from benchmarks.peers.moved import Moved
from benchmarks.peers.sac_ilp import ByIlp
from benchmarks.peers.trl_offload import Offloading
from memo.events import TierName

KEEP = "keep everything"
CHECKPOINTING = "full checkpointing"
OFFLOADED = "offloaded checkpointing"
ATTENTION = "attention kept"
ATTENTION_OFFLOADED = "attention kept, inputs offloaded"
SELECTIVE = "selective checkpointing"
SAVE_ON_CPU = "save_on_cpu, pinned"
TRL = "TRL OffloadActivations"
DEEPSPEED = "DeepSpeed checkpointing"
TRANSFORMERS = "transformers, offload=True"
TRANSFORMERS_ATTENTION = "attention kept, offload=True"
AXOLOTL = "Axolotl, attention and inputs offloaded"


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
    """The most host memory that held activations; None: what torch pinned."""
    waited_s: Callable[[], float | None] = lambda: None
    """Spent waiting for copies so far, where it is measured."""
    hidden: Callable[[], float | None] = lambda: None
    """Share of the disk's busy time that compute has covered so far, where it is measured."""
    done: Callable[[], None] = lambda: None
    """Called behind each step."""
    settled: Callable[[], bool] = lambda: True
    """Whether the next step will be as those behind it."""
    report: Callable[[], str | None] = lambda: None
    """The way's own report, if it has one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to hold activations: a name, and a context in which it is in use on a model."""

    name: str
    start: Callable[[nn.Module], contextlib.AbstractContextManager[Running]]
    compute: Compute


def simple(name: str, around: Callable[[nn.Module], Any], compute: Compute) -> Way:
    """A way that needs nothing but a context around each forward."""

    @contextlib.contextmanager
    def start(model: nn.Module) -> Iterator[Running]:
        yield Running(around=lambda: around(model))

    return Way(name=name, start=start, compute=compute)


def memo_way(name: str, compute: Compute = Compute.OTHER, **options: Any) -> Way:
    """`memo.offload` with these options."""

    @contextlib.contextmanager
    def start(model: nn.Module) -> Iterator[Running]:
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
        return sum(use.peak_bytes for use in manager.report().tiers if use.tier is not TierName.DEVICE)

    def settled() -> bool:
        plan = manager.report().plan
        return plan is None or plan.phase in ("settled", "given")

    return Running(
        around=lambda: manager,
        moved=lambda: Moved(out_bytes=stats.bytes_host + stats.bytes_disk, back_bytes=stats.bytes_reloaded),
        host_bytes=host_bytes,
        waited_s=lambda: manager.stats.stall_s,
        hidden=lambda: manager.report().overlap,
        done=manager.step_done,
        settled=settled,
        report=lambda: str(manager.report()),
    )


def saved_tensors_way(name: str, **options: Any) -> Way:
    """`memo.saved_tensors` with these options."""

    @contextlib.contextmanager
    def start(model: nn.Module) -> Iterator[Running]:
        with contextlib.closing(memo.saved_tensors(**options)) as saved:

            def moved() -> Moved:
                report = saved.report()
                out = sum(use.moved_bytes for use in report.tiers if use.tier is not TierName.DEVICE)
                return Moved(out_bytes=out, back_bytes=report.reloaded_bytes)

            yield Running(around=lambda: _but_the_head(model, saved), moved=moved, report=lambda: str(saved.report()))

    return Way(name=name, start=start, compute=Compute.ONCE)


def peers(*, trl: Path | None = None, counted: bool = True) -> Sequence[Way]:
    """Every way but memo's, keep-everything and full checkpointing first: ratios are to these.

    Where hooks are timed themselves, `counted` is False: bytes moved are not counted then.
    """
    return (
        simple(KEEP, lambda model: contextlib.nullcontext(), Compute.ONCE),
        simple(CHECKPOINTING, checkpointed, Compute.TWICE),
        Way(name=OFFLOADED, start=_offloaded, compute=Compute.TWICE),
        simple(ATTENTION, lambda model: checkpointed(model, context_fn=keep_attention), Compute.OTHER),
        Way(
            name=ATTENTION_OFFLOADED,
            start=lambda model: _offloaded(model, context_fn=keep_attention),
            compute=Compute.OTHER,
        ),
        simple(SELECTIVE, selectively_checkpointed, Compute.OTHER),
        Way(name=SAVE_ON_CPU, start=lambda model: _saved_on_cpu(model, counted), compute=Compute.ONCE),
        Way(name=TRL, start=lambda model: _trl(model, trl, counted), compute=Compute.ONCE),
    )


def libraries() -> Sequence[Way]:
    """Further ways, some of which need more than torch or more than our GPT."""
    return (
        simple("checkpointing, every 2nd", lambda model: checkpointed(model, every=2), Compute.OTHER),
        Way(name="sac_ilp, half", start=lambda model: _around(ByIlp(0.5), model), compute=Compute.OTHER),
        simple(DEEPSPEED, deepspeed_checkpointed, Compute.TWICE),
        *offloading_libraries(),
    )


def offloading_libraries() -> Sequence[Way]:
    """Libraries' own flags for models of transformers that hold checkpoints on the host."""
    return (
        transformers_way(TRANSFORMERS, Compute.TWICE, offload=True),
        transformers_way(TRANSFORMERS_ATTENTION, Compute.OTHER, offload=True, context_fn=keep_attention),
        Way(name=AXOLOTL, start=_axolotl, compute=Compute.OTHER),
    )


def transformers_way(name: str, compute: Compute, **options: Any) -> Way:
    """Checkpointing by transformers' own switch."""

    @contextlib.contextmanager
    def start(model: nn.Module) -> Iterator[Running]:
        with transformers_checkpointed(model, **options):
            yield Running()

    return Way(name=name, start=start, compute=compute)


@contextlib.contextmanager
def _around(around: Callable[[nn.Module], Any], model: nn.Module) -> Iterator[Running]:
    yield Running(around=lambda: around(model))


@contextlib.contextmanager
def _axolotl(model: nn.Module) -> Iterator[Running]:
    offload = AxolotlOffload(model)
    with offload.on():
        yield Running(around=offload.around, backward_inside=True, moved=lambda: offload.moved)


@contextlib.contextmanager
def _offloaded(model: nn.Module, **options: Any) -> Iterator[Running]:
    inputs = OffloadedInputs(next(model.parameters()).device, **options)
    yield Running(
        around=lambda: inputs.around(model),
        moved=lambda: dataclasses.replace(inputs.moved),
        host_bytes=lambda: inputs.host_bytes,
    )


@contextlib.contextmanager
def _saved_on_cpu(model: nn.Module, counted: bool) -> Iterator[Running]:
    moved = Moved()

    def counting() -> saved_tensors_hooks:
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

    hooks = counting if counted else lambda: save_on_cpu(pin_memory=True)
    yield Running(around=lambda: _but_the_head(model, hooks()), moved=lambda: dataclasses.replace(moved))


@contextlib.contextmanager
def _trl(model: nn.Module, path: Path | None, counted: bool) -> Iterator[Running]:
    offloading = Offloading(model, path, counted=counted)
    yield Running(
        around=lambda: _but_the_head(model, offloading.hooks),
        backward_inside=True,
        moved=lambda: dataclasses.replace(offloading.moved),
    )


@contextlib.contextmanager
def _but_the_head(model: nn.Module, hooks: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """`hooks` from here on, except for what is saved behind the last layer."""
    with hooks, contextlib.ExitStack() as head:

        def begin(*_: Any) -> None:
            head.enter_context(saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor))

        def end(*_: Any) -> None:
            head.close()

        handles = [
            layers_of(model)[-1].register_forward_hook(begin),
            model.register_forward_hook(end, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
