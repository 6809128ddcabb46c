"""`memo.saved_tensors`: the engine as a context around any code, without a model, layers or plans.

Owns the regions of a forward, which are what layers are elsewhere: a region's copies are issued as it runs, its device
memory is freed when the next one has ended, and backward reaches regions in the reverse order, one ahead. Without layers a
region ends once it has saved REGION_BYTES, between two operators; a call of `memo.checkpoint` within is a region of its own,
which is recorded and, as by a manager's fixed `alpha`, recomputed in part. No region holds the module that it runs.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import nn

from memo import forks
from memo.errors import UsageError
from memo.manager import OnFull, Report, TierBudgets, abandon, machine_of, open_tiers, require_choice
from memo.swap import Engine, KeptTensor, Layer, RecomputePolicy, SavingHooks, WhenFull, runs_as_written, setting_of
from memo.torch_private import get_sequence_nr
from memo.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from memo.swap import Group, Setting

REGION_BYTES = 128 << 20
"""Bytes that a region saves: 5 ms of PCIe 4, and up to twice as many are on the device beside what is running."""

log = logging.getLogger("memo")

_Path = str | os.PathLike[str]


def saved_tensors(
    *,
    host: int | str = "auto",
    disk: _Path | Sequence[_Path] | None = None,
    disk_budget: int | str | None = None,
    device: int | str | None = None,
    alpha: float | Sequence[float] = 0.0,
    min_bytes: int | str = "64KiB",
    on_full: OnFull = "spill",
    verify: bool = False,
) -> SavedTensors:
    """Moves what autograd saves inside `with` to host memory or disk, and back before backward needs it.

    The twin of `torch.autograd.graph.save_on_cpu(pin_memory=True)`: copies overlap with compute in both directions, each
    storage moves once, host memory is a budget, and a saved tensor that is changed in place is an error. Parameters, their
    views and casts, leaves, small tensors and those of another device stay. Gradients are bit-identical.

    Args:
        host: Bytes of host memory on this node, shared by its ranks, as of `memo.offload`. Default "auto": 70 % of what is
            free, 0 on a CPU, where the disk is used.
        disk: Directory for an anonymous scratch file, or several, as of `memo.offload`. Default None: none on a GPU.
        disk_budget: Bytes of disk on this node. Default None: what the file systems have free.
        device: Bytes of device memory for all of training, parameters included: reloads run ahead of backward as far as the
            last step has left of it. Default None: reloads run one region ahead.
        alpha: Of the regions of `memo.checkpoint` inside, as of `memo.offload`; what else is saved moves whole. Default 0.0:
            attention's results and the region's inputs move, the rest is recomputed.
        min_bytes: Smallest storage that is moved, in bytes. Default "64KiB".
        on_full: As of `memo.offload`. Default "spill".
        verify: As of `memo.offload`. Default False.

    Returns:
        A context that may be entered again and again, by one thread at a time. Its `report()` has bytes and times; `close`
        releases its memory. Backward may run after the `with`.

    Raises:
        UsageError: An argument is invalid.

    The code inside and its backward raise what those of `memo.offload` do.

    Example:
        offload = memo.saved_tensors(host="64GiB")
        with offload:
            loss = model(batch)
        loss.backward()
    """
    require_choice("on_full", on_full, get_args(OnFull))
    if host != "auto":
        parse_bytes(host, what="host")
    if disk_budget is not None:
        parse_bytes(disk_budget, what="disk_budget")
    return SavedTensors(
        host=host,
        disk=disk,
        disk_budget=disk_budget,
        device_bytes=None if device is None else parse_bytes(device, what="device"),
        setting=setting_of(alpha),
        min_bytes=parse_bytes(min_bytes, what="min_bytes", bare=True),
        when_full=WhenFull[on_full.upper()],
        verify=verify,
    )


class SavedTensors:
    """Context that moves what autograd saves inside; made by `memo.saved_tensors`."""

    def __init__(
        self,
        *,
        host: int | str = "auto",
        disk: _Path | Sequence[_Path] | None = None,
        disk_budget: int | str | None = None,
        device_bytes: int | None = None,
        setting: Setting,
        min_bytes: int,
        when_full: WhenFull,
        verify: bool = False,
        share: Callable[..., int] | None = None,
    ) -> None:
        self._budgets = functools.partial(
            TierBudgets.of, host=host, host_pool=None, disk=disk, disk_budget=disk_budget, share=share
        )
        self._device_bytes, self._setting = device_bytes, setting
        self._min_bytes, self._when_full, self._verify = min_bytes, when_full, verify
        self._engine: Engine | None = None
        self._thread: int | None = None
        self._hooks: SavingHooks | None = None
        self._layers: list[Layer] = []
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._group: Group | None = None
        self._nodes = -1
        self._regions = self._last = self._depth = 0
        self._is_closed = self._is_within = False
        self._forks = forks.count()

    @property
    def is_forked(self) -> bool:
        """True in a process that was forked from the one that made the context, and has none of its threads."""
        return self._forks != forks.count()

    def open(self, device: torch.device) -> None:
        """Opens tiers and engine for a device, once."""
        if self._is_closed or self.is_forked:
            why = "closed" if self._is_closed else "another process's"
            raise UsageError(f"this context is {why}; call memo.saved_tensors again")
        if self._engine is not None:
            return
        machine = machine_of(device)
        room = self._budgets(machine)
        backend = machine.backend(timing=False)
        tiers, _ = open_tiers(room, backend, verify=self._verify)
        engine = Engine(backend, tiers, min_bytes=self._min_bytes, when_full=self._when_full, verify=self._verify)
        engine.keep_unknown()
        self._budget = machine.device_budget(self._device_bytes)
        self._recompute_policy = RecomputePolicy(engine, self._setting, verify=self._verify)
        self._closer = weakref.finalize(engine, abandon, tiers, backend, None, self._forks)
        self._engine = engine  # last: a context that is interrupted here opens anew

    def __enter__(self) -> SavedTensors:
        with _ENTERING:
            if self._thread == threading.get_ident():
                self._depth += 1
                return self
            if self._thread is not None:
                raise UsageError("memo.saved_tensors: this context is entered in another thread; make one for each")
            self._thread = threading.get_ident()
        _thread.entered.append(self)
        try:
            on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
            self.open(torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))
            assert self._engine is not None
            if runs_as_written() and not self._engine.is_captured():
                self._begin_step()
                self._begin_region()
                self._set_hooks()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self._depth:
            self._depth -= 1
            return
        try:
            self._remove_hooks()
            engine = self._engine
            if engine is None:
                return  # it could not be opened
            if self._group is not None:
                engine.end_layer(self._group, between=False)
            self._recompute_policy.end_forwards()
            engine.end_forwards()
            stats = engine.stats
            if stats.packed and not stats.live_entries and not any(stats.uses.values()):
                log.debug("memo.saved_tensors: nothing of what was saved was asked for; all of it is freed")
        finally:
            self._group = self._thread = None
            if self in _thread.entered:
                _thread.entered.remove(self)

    def run(self, function: Callable[..., Any], modules: Sequence[nn.Module], args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls `function(*args, **kwargs)` as a region of its own.

        Args:
            function: the function.
            modules: that it calls; the first one, or else its code, tells it from others.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        engine = self._engine
        assert engine is not None
        if self._is_within:
            return function(*args, **kwargs)  # a part of the region that runs
        is_alone = self._group is None  # hooks are set for this region only
        number = self._number_of(function, modules)
        layers = list(self._layers)
        layer = layers[number] = dataclasses.replace(layers[number], module=modules[0] if modules else _NO_MODULE)
        if is_alone:
            self._begin_step()
            self._set_hooks()
        elif self._group is not None:
            engine.end_layer(self._group, between=False)
        self._is_within, output = True, None
        self._recompute_policy.begin_forwards(layers)
        last = is_alone and number == self._last
        group = engine.begin_layer(number, layer.name, args, kwargs, last=last, modules=modules)
        try:
            self._recompute_policy.begin(layer, group, args, kwargs)
            output = function(*args, **kwargs)
            return output
        finally:
            self._is_within = False
            try:
                self._recompute_policy.end(group, output)
                engine.end_layer(group, between=False)
            finally:
                if is_alone:
                    self._regions = number
                    self._remove_hooks()
                else:
                    self._begin_region()

    def _number_of(self, function: Callable[..., Any], modules: Sequence[nn.Module]) -> int:
        """The region's number: the same for each call of one function."""
        assert self._engine is not None
        owner: Any = modules[0] if modules else getattr(function, "__code__", type(function))
        number = self._numbers.get(owner)
        if number is None:
            number = self._numbers[owner] = len(self._layers)
            words = type(owner).__name__ if modules else getattr(function, "__qualname__", type(function).__name__)
            self._layers.append(Layer(module=_NO_MODULE, name=f"{words} {number}", last=False))
            for each in modules:
                self._engine.keep(each.parameters(), each.buffers())
        return number

    def _begin_step(self) -> None:
        """Begins a forward; a new step where nothing is saved."""
        engine = self._engine
        assert engine is not None
        if engine.stats.live_entries == 0:
            self._last, self._regions = self._regions, 0
            if self._device_bytes is not None:
                engine.reload_ahead(max(0, self._budget.total_bytes - self._budget.peak_bytes()))
            engine.begin_forwards()

    def _begin_region(self) -> None:
        """Begins a region of what is saved outside of `memo.checkpoint`."""
        assert self._engine is not None
        self._group = self._engine.begin_layer(_BETWEEN, "saved tensors", (), {}, last=False)

    def _set_hooks(self) -> None:
        assert self._engine is not None
        self._hooks = SavingHooks(self._pack, self._engine.unpack)
        self._hooks.install()

    def _remove_hooks(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None

    def _pack(self, tensor: torch.Tensor) -> Any:
        engine, group = self._engine, self._group
        assert engine is not None
        if threading.get_ident() != self._thread and self._thread is not None:
            return KeptTensor(tensor)  # of another thread, in which backward computes gradients of gradients
        if tensor.is_leaf and tensor.requires_grad:
            return KeptTensor(tensor)
        if not self._is_within and group is not None:
            nodes = get_sequence_nr()
            if nodes != self._nodes and group.nbytes >= REGION_BYTES:  # no operator is cut in two
                engine.end_layer(group, between=False)
                self._begin_region()
            self._nodes = nodes
        return self._recompute_policy.pack(tensor)

    def report(self) -> Report:
        """Returns bytes moved, peaks, stalls and recomputes so far; `print` shows it as a table."""
        if self._engine is None:
            return Report(layers=0, nothing="nothing has run in it yet")
        self._engine.settle_times()
        policy = self._recompute_policy if self._layers else None
        return Report.of(self._engine, layers=len(self._layers), recompute_policy=policy)

    def close(self) -> None:
        """Waits for copies in flight, and releases all memory and files. Idempotent.

        Afterwards a backward that needs moved tensors raises, and the context cannot be entered again.
        """
        if not self._is_closed and self._engine is not None and not self.is_forked:
            self._closer.detach()
            self._engine.close()
        self._is_closed = True


_ENTERING = threading.Lock()
_NO_MODULE = nn.Module()
_BETWEEN = 1 << 30
"""Number of the regions outside of `memo.checkpoint`."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entered: list[SavedTensors] = []


_thread = _Thread()


def current() -> SavedTensors | None:
    """The context that this thread has entered last; None outside of all."""
    return _thread.entered[-1] if _thread.entered else None
