"""`memo.offload`: the context manager around a model's forward.

It owns the choice of layers, budgets and tiers, and nothing of how bytes move (memo.swap). Hooks are on the model only
between `__enter__` and `__exit__`; what was saved in between comes back in backward, wherever that runs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from memo.allocator import model_steps
from memo.autoplan import Actuator, AutoPlan, alone, device_memory, gradients_to_come
from memo.errors import MemoError, UsageError
from memo.machine import require_layer_within_norm_limit
from memo.manager.plan_source import FixedPlan, FixedSetting, Planning, checked_plan, own_part, read_plan
from memo.manager.report import DiskUse, Report
from memo.manager.resources import Room, device_of, link_rates, open_backend, open_recorder, open_tiers
from memo.manager.validate import require_kinds
from memo.mip.activation import lower_tier_nbytes
from memo.parallel import PipelineOrder, everyones, group_of
from memo.swap import (
    Around,
    Engine,
    Group,
    Layer,
    LayerCosts,
    Level,
    Setting,
    TokenLevels,
    TokenWise,
    find_layers,
    layer_input,
    setting_of,
    stand_around,
)
from memo.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn
    from torch.distributed import ProcessGroup

    from memo.autoplan import Everyones
    from memo.mip.activation import ActivationPlan
    from memo.swap import Stats
    from memo.swap.backends import Backend
    from memo.swap.disk import DiskStore
    from memo.swap.tiers import Tier
    from memo.trace import TraceRecorder

__all__ = ["Manager", "offload"]

_Path = str | os.PathLike[str]


def offload(
    model: nn.Module,
    *,
    plan: ActivationPlan | _Path | None = None,
    alpha: float | Sequence[float] | TokenLevels | None = None,
    levels: Mapping[int | str, Any] | None = None,
    fallback: str = "swap",
    exact: bool = False,
    device: int | str | None = None,
    host: int | str = "auto",
    disk: _Path | Sequence[_Path] | None = None,
    disk_budget: int | str | None = None,
    layers: nn.ModuleList | Sequence[nn.Module] | type[nn.Module] | None = None,
    min_bytes: int | str = "64KiB",
    on_full: str = "spill",
    verify: bool = False,
    trace: _Path | None = None,
    group: ProcessGroup | None = None,
    schedule: Any = None,
) -> Manager:
    """Keeps, moves or recomputes what the model's repeated layers save for backward, as a plan says.

    Gradients are bit-identical to the same model without memo: what moves always, what is computed again wherever a kernel
    gives a token the same bits however many are beside it (`exact`). With neither `plan` nor `alpha` nor `levels` the first
    steps of each batch shape are measured at the safest setting, and the rest run by the plan that is made of them: nothing
    is done where everything fits, and otherwise what costs the shortest step.

    Args:
        model: any module with repeated layers; it is not modified outside the `with`.
        plan: an activation plan, or the file of one, for all steps; its checker's complaint is an error. Of a plan for a
            pipeline's stages, `schedule` says which one is carried out here.
        alpha: instead of a plan, the same for every layer: the fraction of the tokens whose token-wise activations move;
            those of the rest are computed again in backward. The layers' inputs and attention's results move whole. 1.0
            moves everything, host memory first, then disk. A layer that is not proven to treat tokens apart moves whole
            tensors; the report says which, and why. Three fractions, or TokenLevels, divide the tokens among three levels:
            everything moves, the results of matrix products move and element-wise work is repeated, all but attention is
            repeated.
        levels: the same for single layers, by position or name; `Level.SAVE_INPUT` moves a layer's input alone and runs the
            layer again whole, attention too. `Manager.choose_levels` changes them between steps.
        fallback: "swap" moves whole tensors of a layer that is not proven to treat tokens apart; "recompute" runs it again
            whole, attention too.
        exact: a layer whose recompute is not found equal bit for bit to what it saved moves whole tensors. Otherwise a
            few roundings are let pass, such as matrix kernels make at another height; the report says of which layers.
        device: bytes of device memory that training may take in all, parameters included, as int or "80GiB"; None for all
            there is. It decides what a plan keeps; with a fixed `alpha`, how far ahead of backward is reloaded.
        host: bytes of host memory for activations on this node, shared by the ranks that run on it (with a process group
            initialised, every rank must make this call); "auto" takes a share of what is free when the model is on a GPU and
            nothing when it is on the CPU, where host memory is the device; 0 turns the tier off.
        disk: a directory or a list of them for an anonymous scratch file; None uses the system's temporary directory
            when the model is on the CPU and no disk otherwise.
        disk_budget: bytes of disk on this node, shared like `host`; None takes what the file system has free, as it
            is needed.
        layers: a ModuleList, a list of modules or a class, when the automatic choice is not wanted.
        min_bytes: smaller storages stay where they are.
        on_full: "spill" hands over to the next tier when one is full; "raise" raises at once; "recompute" hands over, and
            runs a layer again whole, attention too, where no tier has room for what it saved.
        verify: keep a checksum of each block on disk and compare it when it is read.
        trace: file, or directory (made, if the name ends in a slash), for `trace.rank0.jsonl`; links are measured first.
            None records nothing.
        group: the ranks that talk within this model's layers (tensor and context parallelism). Without `plan`, `alpha` and
            `levels` they agree on one plan, made for the slowest and narrowest of them, and on the step at which it changes;
            they must run the same forwards. A model that `memo.parallelize` divided knows its own.
        schedule: torch's pipeline schedule that runs the model, where one does: says from the first step on how many
            microbatches are in flight here, which plans and shares of a node's budgets follow, and in which order backward
            comes to them.

    Raises:
        UsageError: an argument that cannot mean anything.
        NoRepeatedLayers: no layers were found.
        ScratchUnusable, ScratchFull: the scratch directory cannot be used or has no room for `disk_budget`.
    """
    require_kinds(
        model, plan=plan, levels=levels, layers=layers, disk=disk, trace=trace, group=group, schedule=schedule
    )
    fixed = None if plan is None else read_plan(plan)
    if fixed is not None and (alpha is not None or levels is not None):
        raise UsageError("plan: a plan says what alpha and levels say; give one of them")
    if on_full not in ("spill", "raise", "recompute"):
        raise UsageError(f"on_full: {on_full!r} is neither 'spill' nor 'raise' nor 'recompute'")
    if fallback not in ("swap", "recompute"):
        raise UsageError(f"fallback: {fallback!r} is neither 'swap' nor 'recompute'")
    automatic = fixed is None and alpha is None and levels is None
    setting = setting_of(1.0 if alpha is None else alpha)
    found = find_layers(model, layers)
    where = device_of(model)
    memory = device_memory(where, None if device is None else parse_bytes(device, what="device"))
    smallest = parse_bytes(min_bytes, what="min_bytes")
    course = None if schedule is None else PipelineOrder.of(schedule, [layer.module for layer in found])
    fixed = None if fixed is None else own_part(fixed, course)
    room = Room.of(where, host=host, disk=disk, disk_budget=disk_budget, weights=_weights(fixed, course))
    recorder = None if trace is None else open_recorder(trace, model, room)
    backend = open_backend(where, timing=recorder is not None or automatic or fixed is not None)
    tiers, store = open_tiers(room, backend, verify=verify)
    engine = Engine(
        backend,
        tiers,
        min_bytes=smallest,
        spill=on_full != "raise",
        tracer=recorder,
    )
    if course is not None:
        engine.expect(course.backward)
    tokenwise = TokenWise(
        engine,
        setting,
        fallback=Level.SAVE_INPUT if fallback == "recompute" else Level.SAVE_ALL,
        repeats_when_full=on_full == "recompute",
        exact=exact,
    )
    manager = Manager(model, found, engine, recorder, store, tokenwise=tokenwise)
    with contextlib.ExitStack() as undo:
        undo.callback(manager.close)  # what the model's layers cannot follow leaves no file and no buffer behind
        if levels is not None:
            manager.choose_levels(levels)
        carrier = Actuator(
            engine,
            tokenwise,
            found,
            memory,
            tracer=recorder,
            link=functools.partial(link_rates, where),
            gradients_to_come=lambda: gradients_to_come(model.parameters()),
        )
        if automatic:
            planning = AutoPlan(
                carrier,
                checked_plan,
                everyones=_everyones(group or group_of(model)),
                held=None if course is None else course.held,
                turns=None if course is None else course.turns,
                beyond=recorder,
                model=type(model).__name__,
            )
            manager.plan_with(planning)
        elif fixed is not None:
            manager.plan_with(FixedPlan(carrier, fixed))
        elif device is not None:
            manager.plan_with(FixedSetting(carrier))
        undo.pop_all()
    return manager


class Manager:
    """A reusable context manager around forwards, of one thread at a time; made by `memo.offload`."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        engine: Engine,
        recorder: TraceRecorder | None = None,
        store: DiskStore | None = None,
        *,
        tokenwise: TokenWise | None = None,
    ) -> None:
        self._layers = layers
        self._engine = engine
        self._recorder = recorder
        self._store = store
        self._made_s = time.monotonic()
        self._depth = 0
        self._thread = threading.get_ident()
        self._hooks: list[Around] = []
        self._saving: saved_tensors_hooks | None = None
        self._running: dict[int, list[Group]] = {}
        self._tokenwise = TokenWise(engine, TokenLevels(all=1.0)) if tokenwise is None else tokenwise
        self._planning: Planning | None = None
        self._steps = model_steps(model, engine.backend.device)
        engine.keep(model.parameters(), model.buffers())
        # Graphs that are still to be backwarded hold the engine and not this object, so it may go first:
        # `with memo.offload(model): loss = model(x)` and then `loss.backward()` is a program that works.
        self._closer = weakref.finalize(engine, _abandon, engine.tiers, engine.backend, recorder)
        self.step = 0
        """Number of the step under way, for the trace; set it before the first forward to count from elsewhere."""
        self._in_step = False

    @property
    def stats(self) -> Stats:
        """Counters since construction."""
        return self._engine.stats

    @property
    def layers(self) -> Sequence[Layer]:
        """The layers whose activations are managed."""
        return self._layers

    def __enter__(self) -> Manager:
        if not self._closer.alive:
            raise MemoError("this manager is closed; call memo.offload again")
        if self._depth and self._thread != threading.get_ident():
            raise MemoError("this manager is entered in another thread; call memo.offload in each")
        self._thread = threading.get_ident()
        self._depth += 1
        if self._depth > 1:
            return self
        try:
            self._begin_forwards()
        except BaseException:
            self._depth = 0
            self._end_forwards()
            raise
        return self

    def _begin_forwards(self) -> None:
        if self._engine.is_captured():
            return
        if self._recorder is not None and not self._in_step:
            self._recorder.begin_step(self.step)
            self._in_step = True
        if self._planning is not None:
            self._planning.before_forward()
        self._engine.begin_forwards()
        self._tokenwise.begin_forwards(self._layers)
        if self._steps is not None:
            self._hooks.append(self._steps.hook(idle=lambda: self._engine.stats.live_entries == 0))
        for position, layer in enumerate(self._layers):
            self._hooks += self._hook(position, layer)
        # With nothing to note, one call less for each saved tensor.
        idle = self._tokenwise.is_idle and self._planning is None  # planning may change that at the first layer
        pack = self._engine.pack if idle else self._tokenwise.pack
        saving = saved_tensors_hooks(pack, self._engine.unpack)
        saving.__enter__()
        self._saving = saving

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._end_forwards()

    def _end_forwards(self) -> None:
        if self._saving is not None:
            self._saving.__exit__(None, None, None)
            self._saving = None
        self._tokenwise.end_forwards()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._running.clear()
        self._engine.end_forwards()

    def _is_elsewhere(self) -> bool:
        """True in a thread that has not entered, of which autograd hands us nothing. Backward's own threads have."""
        return threading.get_ident() != self._thread and torch._C._current_graph_task_id() < 0

    def _hook(self, position: int, layer: Layer) -> list[Around]:
        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._is_elsewhere():
                return
            hidden = layer_input(args, kwargs)
            if hidden is not None:
                require_layer_within_norm_limit(layer.name, module, hidden)
            if self._planning is not None:
                self._planning.before_layer(args, kwargs)
            group = self._engine.begin_layer(position, layer.name, args, kwargs, last=layer.last)
            self._running.setdefault(position, []).append(group)
            self._tokenwise.begin(layer, group, args, kwargs)

        def end(module: nn.Module, args: object, output: object) -> None:
            running = None if self._is_elsewhere() else self._running.get(position)
            if running:  # empty when an earlier hook of the module raised before ours began
                group = running.pop()
                self._tokenwise.end(group, output)
                self._engine.end_layer(group, between=not layer.last)

        return stand_around(layer.module, begin, end)

    def choose_levels(self, levels: Mapping[int | str, Any]) -> None:
        """From the next forward on these layers, by position or name, have these levels, and the others `alpha`'s.

        Each may be TokenLevels, a Level, a fraction as alpha, or three of them. A layer's first call at new levels tries
        the recompute out. What is saved already comes back as it was saved. Planning ends: the choice is the caller's now.

        Raises:
            UsageError: a layer that is not managed, levels that cannot mean anything, or a forward is under way.
        """
        if self._depth > 0:
            raise UsageError("levels: choose them between forwards, not inside `with manager:`")
        names = [layer.name for layer in self._layers]
        chosen: dict[str, Setting] = {}
        for key, value in levels.items():
            if isinstance(key, int) and not 0 <= key < len(names):
                raise UsageError(f"levels: no layer {key}; there are {len(names)}")
            if isinstance(key, str) and key not in names:
                raise UsageError(f"levels: no layer {key!r}; they are {names[0]!r} to {names[-1]!r}")
            chosen[names[key] if isinstance(key, int) else key] = setting_of(value)
        if self._planning is not None:
            self._planning = None
            self._engine.place({})
            self._engine.listen(self._recorder)
        self._tokenwise.choose(chosen)

    def levels_profile(self) -> list[LayerCosts]:
        """Bytes and recompute seconds of each level for each layer, as the steps so far had them.

        Bytes are there for all levels once a layer has run with tokens to recompute; seconds for the levels that it ran
        at, so a step with `alpha=(1/3, 1/3, 1/3)` measures all of them.
        """
        return self._tokenwise.costs()

    def plan_with(self, planning: Planning) -> None:
        """From now on `planning` decides what becomes of each layer's tensors."""
        self._planning = planning

    @property
    def plan(self) -> ActivationPlan | None:
        """In force now; None with a fixed alpha, and until one has been made."""
        return None if self._planning is None else self._planning.plan

    def step_done(self) -> None:
        """Marks the end of a training step, in the trace and for the planned allocator, and counts on."""
        self._engine.end_step()
        if self._steps is not None:
            self._steps.done()
        if self._recorder is not None and self._in_step:
            self._recorder.end_step()
        self._in_step = False
        self.step += 1

    def report(self) -> Report:
        """Bytes moved, peaks, waits and recomputes so far. Waits for the device where times are still to come."""
        self._engine.settle_times()
        return Report.of(
            self._engine,
            layers=len(self._layers),
            disk=self._disk_use(),
            tokenwise=self._tokenwise,
            plan=None if self._planning is None else self._planning.use(),
        )

    def _disk_use(self) -> DiskUse | None:
        if self._store is None:
            return None
        stats = self._store.stats
        return DiskUse(
            written_bytes=stats.bytes_written,
            read_bytes=stats.bytes_read,
            write_busy_s=stats.write_busy_s,
            read_busy_s=stats.read_busy_s,
            elapsed_s=time.monotonic() - self._made_s,
        )

    def close(self) -> None:
        """Waits for running copies, gives back every buffer and the scratch file, ends the trace. Idempotent."""
        if self._closer.detach() is None:
            return
        if self._steps is not None:
            self._steps.done()
        try:
            self._engine.close()
        finally:
            if self._recorder is not None:
                if self._in_step:
                    self.step_done()
                self._recorder.close()


def _weights(plan: ActivationPlan | None, course: PipelineOrder | None) -> tuple[int, int]:
    """This rank's needs of host and disk: what its plan says, else in proportion to the activations that it holds."""
    if plan is not None:
        host, disk = lower_tier_nbytes(plan)
        return max(host, 1), max(disk, 1)  # a tier that is on has some room
    return (1, 1) if course is None else (course.weight, course.weight)


def _everyones(group: ProcessGroup | None) -> Everyones:
    return alone if group is None or group.size() == 1 else functools.partial(everyones, group=group)


def _abandon(tiers: Sequence[Tier], backend: Backend, recorder: TraceRecorder | None) -> None:
    """Nobody holds the engine any more, so nothing it saved can be asked for."""
    for tier in tiers:
        tier.close()
    backend.close()
    if recorder is not None:
        recorder.close()
