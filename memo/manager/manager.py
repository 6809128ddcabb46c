"""`memo.offload` and the Manager that it returns: a context manager around a model's forward.

Owns the choice of layers, budgets, tiers and plan source; memo.swap moves the bytes. Invariant: the model has hooks
only between `__enter__` and `__exit__`. Tensors that were saved in between are restored in backward, inside or outside
of it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch.autograd.graph import saved_tensors_hooks

from memo.allocator import model_steps
from memo.autoplan import Actuator, AutoPlan, device_budget_of, missing_gradient_bytes, single_rank
from memo.errors import UsageError
from memo.machine import require_layer_within_norm_limit
from memo.manager import claims
from memo.manager.forwards import ForwardHooks, entries_of
from memo.manager.layer_choices import Names, bans_by_layer, layer_at
from memo.manager.plan_source import FixedPlan, FixedSetting, PlanSource, checked_plan, own_part, read_plan
from memo.manager.report import DiskUse, Report
from memo.manager.resources import Room, device_of, measured_link, open_backend, open_recorder, open_tiers
from memo.manager.step_ends import StepEnds
from memo.manager.unmanaged import BackwardWatch
from memo.manager.unseen import Unseen
from memo.manager.validate import require_choice, require_kinds
from memo.mip.activation import lower_tier_nbytes
from memo.parallel import PipelineOrder, gather_values, group_of
from memo.swap import (
    Engine,
    Group,
    Layer,
    LayerCosts,
    LayerExplanation,
    LayerHook,
    Level,
    Setting,
    Tapes,
    TokenLevels,
    find_layers,
    hook_forward,
    layer_input,
    setting_of,
)
from memo.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn
    from torch.distributed import ProcessGroup

    from memo.autoplan import AllGather
    from memo.mip.activation import ActivationPlan
    from memo.swap import Stats
    from memo.swap.backends import Backend
    from memo.swap.disk import DiskStore
    from memo.swap.tiers import Tier
    from memo.trace import TraceRecorder

__all__ = ["Manager", "offload"]

_Path = str | os.PathLike[str]

OnFull = Literal["spill", "raise", "recompute"]
"""Response to a full tier: use the next tier, raise, or use the next tier and recompute layers when all are full."""
_LayerLevels = float | Sequence[float] | Level | TokenLevels


def offload(
    model: nn.Module,
    *,
    plan: ActivationPlan | _Path | None = None,
    alpha: float | Sequence[float] | TokenLevels | None = None,
    levels: Mapping[int | str, _LayerLevels] | None = None,
    exact: bool = True,
    keep: Names | None = None,
    repeat: Names | None = None,
    device: int | str | None = None,
    host: int | str = "auto",
    disk: _Path | Sequence[_Path] | None = None,
    disk_budget: int | str | None = None,
    layers: nn.ModuleList | Sequence[nn.Module] | type[nn.Module] | None = None,
    min_bytes: int | str = "64KiB",
    on_full: OnFull = "spill",
    verify: bool = False,
    trace: _Path | None = None,
    group: ProcessGroup | None = None,
    schedule: Any = None,
) -> Manager:
    """Manages the activations that a model's repeated layers save for backward: keeps, moves or recomputes them.

    Gradients are bit-identical to the same model without memo. Moved tensors always are; recomputed ones are where
    `exact` is True.

    Without `plan`, `alpha` and `levels`, the first three steps run at the safest setting and are measured. A solver
    then makes the plan with the shortest step that fits the budgets, and later steps run by it; another batch shape is
    planned from the same measurements. Where everything fits, nothing is moved or recomputed.

    Args:
        model: Module with repeated layers. It is modified only inside `with manager:`.
        plan: Activation plan, or the path of its JSON file, for all steps. Default None: no given plan. Excludes
            `alpha` and `levels`. A plan for several pipeline stages needs `schedule`, which says which stage is here.
        alpha: Fraction of what can be recomputed, 0 to 1, that is moved: of the tokens, where a layer's operators show
            which dimension they run over, else of its bytes. The rest is recomputed in backward by replaying operators.
            Layer inputs and attention outputs are always moved whole. 1.0 moves everything.
            Three fractions that sum to 1, or TokenLevels, divide the tokens among the levels SAVE_ALL (move
            everything), SAVE_MATMULS (move matrix products, recompute element-wise work) and SAVE_ATTENTION (recompute
            all but attention). Default None: planned, or 1.0 where `levels` is given.
        levels: Levels of single layers, by position or name; each value is a fraction or fractions as for `alpha`,
            TokenLevels, or a Level. `Level.SAVE_INPUT` moves the least, and recomputes attention too. Default None.
            `Manager.choose_levels` changes them between steps.
        exact: Default True recomputes whole tensors of a layer where a part of its tokens is not bit-identical to what it
            saved. False accepts differences within a few roundings, as matrix kernels make for another number of
            tokens; the report shows the largest one.
        keep: Names of operators whose results are never recomputed, such as "aten.mm" or "mm", or of groups: "attention",
            "matmul", "collective", "scan", "sort", "scatter". A list for all layers, or a dict from layers, by position or
            name, to lists. Default None: the level decides.
        repeat: Names, as for `keep`, of operators that may be recomputed although the level keeps their results. Random
            operators, and what memo cannot see, are kept all the same. Default None.
        device: Bytes of device memory for all of training, parameters included: an int, or text such as "80GiB". Plans
            keep within it; with a fixed `alpha` it limits how far reloads run ahead of backward. Default None: 94 % of
            the GPU's memory, which is also the most, or on a CPU what the process uses and 80 % of the free host memory.
        host: Bytes of host memory for activations on this node, shared by its ranks: an int, text such as "64GiB", or
            "auto". Default "auto": 70 % of the free memory for a model on a GPU, 0 for one on the CPU, where host
            memory is the device. 0 turns the tier off. With a process group this is a collective call of all ranks.
        disk: Directory for an anonymous scratch file, or a list of directories that share the load. Default None: the
            system's temporary directory for a model on the CPU without `host`, no disk otherwise.
        disk_budget: Bytes of disk on this node, shared by its ranks, as `host`. Default None: what the file systems
            have free, reserved as needed.
        layers: The repeated layers: a ModuleList, a list of modules, or their class. Default None: found automatically.
        min_bytes: Smallest storage that is moved, in bytes; smaller ones stay on the device. Default "64KiB".
        on_full: Response to a full tier. "spill" (default) uses the next tier, and raises where none has room; "raise"
            raises at once; "recompute" uses the next tier, runs a layer again whole where none has room for its
            tensors, and raises where none has room for its input.
        verify: True stores a checksum with each block on disk and compares it when the block is read. Default False.
        trace: File, or directory for `trace.rank{N}.jsonl`; a name that ends in a slash is a directory, made if
            missing. The links are measured first, for a fraction of a second. Default None: no trace.
        group: Ranks that communicate within the model's layers (tensor or context parallelism). Without `plan`, `alpha`
            and `levels` they agree on one plan, made for the slowest rank with the least room, and on the step at which
            it changes; they must run the same forwards. Default None: the group that `memo.parallelize` set, else none.
        schedule: Torch's pipeline schedule that runs the model. It gives, from the first step on, the number of
            microbatches in flight on this rank and the order of their backwards. Default None: no pipeline.

    Returns:
        A Manager, to be entered around each forward. `Manager.close` releases its memory and files.

    Raises:
        UsageError: An argument is invalid, or arguments exclude each other.
        NoRepeatedLayers: The model has no repeated layers, and `layers` names none.
        PlanError: `plan` cannot be read, breaks a rule, or does not fit the model or the schedule.
        ScratchUnusable, ScratchFull: The scratch directory cannot be used, or has no room for `disk_budget`.
        TraceError: The trace cannot be written.
        After any of them the model is unmodified, and no activations are managed.

    A forward inside `with manager:` raises:
        HostBudgetExceeded, ScratchFull: No tier has room (see `on_full`).
        StoreWriteError: A write to disk failed, and no other tier takes the bytes.
        SwapError: The system refuses host memory within the budget.
        After any of them what earlier forwards saved is still restored, and the manager can be entered again.

    A backward raises:
        ModifiedAfterSave: A tensor that it needs was modified in place after it was saved.
        StoreReadError: A read from disk failed; CorruptBlock, with `verify`: its checksum differs.
        SwapError: The manager is closed, a copy failed, or a recompute did something else than its forward.
        After any of them the gradients are incomplete: discard them, and run the forward again. Weights are unchanged.

    Example:
        manager = memo.offload(model, host="64GiB")
        for batch in data:
            with manager:
                loss = model(**batch).loss
            loss.backward()
    """
    require_kinds(
        model, plan=plan, levels=levels, layers=layers, disk=disk, trace=trace, group=group, schedule=schedule
    )
    fixed = None if plan is None else read_plan(plan)
    if fixed is not None and (alpha is not None or levels is not None):
        raise UsageError("plan: it excludes alpha and levels; give one of the three")
    require_choice("on_full", on_full, get_args(OnFull))
    automatic = fixed is None and alpha is None and levels is None
    setting = setting_of(1.0 if alpha is None else alpha)
    found = find_layers(model, layers)
    where = device_of(model)
    budget = device_budget_of(where, None if device is None else parse_bytes(device, what="device"))
    smallest = parse_bytes(min_bytes, what="min_bytes")
    bans = bans_by_layer(found, keep, repeat)
    order = None if schedule is None else PipelineOrder.of(schedule, [layer.module for layer in found])
    fixed = None if fixed is None else own_part(fixed, order)
    room = Room.of(where, host=host, disk=disk, disk_budget=disk_budget, weights=_weights(fixed, order))
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
    if order is not None:
        engine.expect(order.backward)
    tokenwise = Tapes(
        engine,
        setting,
        repeats_when_full=on_full == "recompute",
        exact=exact,
        bans=bans,
    )
    manager = Manager(model, found, engine, recorder, store, tokenwise=tokenwise, watch=BackwardWatch(model, found))
    with contextlib.ExitStack() as undo:
        undo.callback(manager.close)  # a plan or levels that do not fit the model leave no file or buffer behind
        if levels is not None:
            manager.choose_levels(levels)
        actuator = Actuator(
            engine,
            tokenwise,
            found,
            budget,
            tracer=recorder,
            link=functools.partial(measured_link, where),
            missing_gradient_bytes=lambda: missing_gradient_bytes(model.parameters()),
        )
        if automatic:
            source = AutoPlan(
                actuator,
                checked_plan,
                all_gather=_all_gather(group or group_of(model)),
                held=None if order is None else order.held,
                turns=None if order is None else order.turns,
                tracer=recorder,
                model=type(model).__name__,
            )
            manager.plan_with(source)
        elif fixed is not None:
            manager.plan_with(FixedPlan(actuator, fixed, name=_plan_name(plan)))
        elif device is not None:
            manager.plan_with(FixedSetting(actuator))
        undo.pop_all()
    return manager


class Manager:
    """Context manager around a model's forwards; made by `memo.offload`.

    It can be entered any number of times, by one thread at a time, and once more inside itself. Backward may run after
    the `with`, and also after the manager is gone.

    Attributes:
        step: Number of the training step under way, as the trace shows it; counted on where a step has ended. Set it
            before the first forward to begin at another number.

    Example:
        with memo.offload(model, alpha=1.0) as manager:
            loss = model(batch).loss
        loss.backward()
        print(manager.report())
        manager.close()
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        engine: Engine,
        recorder: TraceRecorder | None = None,
        store: DiskStore | None = None,
        *,
        tokenwise: Tapes | None = None,
        watch: BackwardWatch | None = None,
    ) -> None:
        self._watch = watch
        self._layers = layers
        self._entries = entries_of(model, layers)
        self._engine = engine
        self._recorder = recorder
        self._store = store
        self._made_s = time.monotonic()
        self._depth = 0
        self._thread = threading.get_ident()
        self._entering = threading.Lock()
        self._attached: ForwardHooks | None = None
        self._hooks: list[LayerHook] = []
        self._saving: saved_tensors_hooks | None = None
        self._running: dict[int, list[Group]] = {}
        self._tokenwise = Tapes(engine, TokenLevels(all=1.0)) if tokenwise is None else tokenwise
        self._plan_source: PlanSource | None = None
        self._steps = model_steps(model, engine.backend.device)
        engine.keep(model.parameters(), model.buffers())
        # Autograd graphs hold the engine and not this object, which may be collected before backward runs:
        # `with memo.offload(model): loss = model(x)`, then `loss.backward()`, is a valid program.
        self._closer = weakref.finalize(engine, _abandon, engine.tiers, engine.backend, recorder)
        self.step = 0
        self._step_ends = StepEnds(model)
        self._in_step = False
        self._is_told = False
        self._has_trained = False
        self._is_prepared = False
        self._unseen = Unseen(layers)

    @property
    def stats(self) -> Stats:
        """Counters of the engine since construction; they change while copies are in flight."""
        return self._engine.stats

    @property
    def open_layer(self) -> str | None:
        """Name of a layer whose forward is under way; None between layers."""
        return next((self._layers[position].name for position, groups in self._running.items() if groups), None)

    @property
    def layers(self) -> Sequence[Layer]:
        """The layers whose activations are managed, in the order of the model."""
        return self._layers

    def __enter__(self) -> Manager:
        with self._entering:
            if not self._closer.alive:
                raise UsageError("this manager is closed; call memo.offload again")
            if self._depth and self._thread != threading.get_ident():
                raise UsageError("this manager is entered in another thread; call memo.offload in each")
            if self._depth == 0:
                claims.enter(self)
                self._thread = threading.get_ident()
            self._depth += 1
        if self._depth > 1:
            return self
        try:
            self._begin_forwards()
        except BaseException:
            self._leave()
            raise
        return self

    def _begin_forwards(self) -> None:
        if self._engine.is_captured():
            return
        self._begin_forward()
        self._is_prepared = True
        if self._attached is None:
            self._hooks.append(ForwardHooks(self._entries, self._next_forward, lambda failed: None))
        if self._steps is not None:
            self._hooks.append(self._steps.hook(idle=self._is_idle))
        for position, layer in enumerate(self._layers):
            self._hooks += self._hook(position, layer)
        # Without recompute the engine packs directly, which saves one call per saved tensor.
        idle = self._tokenwise.is_idle and self._plan_source is None  # a plan may change that at the first layer
        pack: Callable[[torch.Tensor], Any] = self._engine.pack if idle else self._tokenwise.pack
        pack = self._unseen.watch(pack, self._open_layer)
        saving = saved_tensors_hooks(pack, self._engine.unpack)
        saving.__enter__()
        self._saving = saving

    def _begin_forward(self) -> None:
        """Prepares one forward of the model; a step that has ended is evaluated."""
        has_ended = self._is_idle() and self._step_ends.has_ended(has_trained=self._has_trained)
        if has_ended:
            self._has_trained = False
            if self._in_step and not self._is_told:
                self._end_step()
        if torch.is_grad_enabled():
            self._has_trained = True
            if self._watch is not None:
                self._watch.stop()
                self._watch = None
        if not self._in_step:
            self._in_step = True
            if self._recorder is not None:
                self._recorder.begin_step(self.step)
        if self._plan_source is not None:
            self._plan_source.before_forward(may_end=has_ended)
        self._engine.begin_forwards()
        self._tokenwise.begin_forwards(self._layers)

    def _next_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begins a forward of the model inside the manager: what an earlier one has left open is closed."""
        if self._saving is None:
            return
        claims.require_alone(self)
        if not self._is_prepared:
            self._tokenwise.end_forwards()
            self._engine.end_forwards()
            for groups in self._running.values():
                groups.clear()
            self._begin_forward()
        self._is_prepared = False

    def _is_idle(self) -> bool:
        return self._engine.stats.live_entries == 0

    def attach(self) -> Manager:
        """Manages every training forward of the model from now on, without a `with`.

        Forwards without gradients are left alone: evaluation, generation, what a checkpoint runs again in backward. Those
        inside `with manager:` are managed as ever. A copy of the model is not attached.

        Returns:
            This manager, which the model keeps until `detach` or `close`. Attaching again changes nothing. Another manager
            that is attached to the same layers, or to fewer, is detached.

        Raises:
            UsageError: The manager is closed, the model is itself the one layer, or a manager of more layers is attached.
        """
        if not self._closer.alive:
            raise UsageError("this manager is closed; call memo.offload again")
        if any(layer.module in self._entries for layer in self._layers):
            raise UsageError("attach: the model is its own only layer; use `with manager:` around its forward")
        if self._attached is None:
            ours = {layer.module for layer in self._layers}
            for other in claims.attached_to(self):
                if any(layer.module not in ours for layer in other.layers):
                    raise UsageError("attach: a manager of these and of more layers is attached; detach that one first")
                other.detach()
            self._attached = ForwardHooks(self._entries, self._begin_attached, self._end_attached)
            claims.claim(self)
        if self._watch is not None:
            self._watch.is_attached = True
        return self

    def detach(self) -> None:
        """Undoes `attach`: the model has no hook of memo's any more. What is saved comes back all the same.

        Raises:
            UsageError: A forward is under way.
        """
        attached = self._attached
        if attached is None:
            return
        if attached.is_within:
            raise UsageError("detach: a forward is under way; detach between forwards")
        self._end_attachment()

    def _end_attachment(self) -> None:
        if self._attached is not None:
            self._attached.remove()
            self._attached = None
            claims.release(self)
        if self._watch is not None:
            self._watch.is_attached = False

    def _begin_attached(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.__enter__()
        try:
            if self._depth == 1 and self._steps is not None:  # its own hook comes too late for this forward
                self._steps.forward_begins(args, kwargs, idle=self._is_idle())
            self._next_forward(args, kwargs)
        except BaseException:
            self._end_attached(failed=True)
            raise

    def _end_attached(self, failed: bool) -> None:
        self.__exit__(RuntimeError if failed else None)

    def __exit__(self, *exception: object) -> None:
        if self._depth > 1:
            self._depth -= 1
        else:
            seen = [self._layers[position].name for position in self._running]
            self._leave()
            if exception[:1] in ((), (None,)):
                self._unseen.end(seen)

    def _leave(self) -> None:
        try:
            self._end_forwards()
        finally:
            claims.leave(self)
            self._depth = 0

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

    def _open_layer(self) -> str | None:
        """Name of the layer that runs now."""
        return next((groups[-1].module for groups in self._running.values() if groups), None)

    def _is_elsewhere(self) -> bool:
        """True in a thread that has not entered the manager, and that is not one of backward's."""
        return threading.get_ident() != self._thread and torch._C._current_graph_task_id() < 0

    def _hook(self, position: int, layer: Layer) -> list[LayerHook]:
        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling() or self._is_elsewhere():
                return
            hidden = layer_input(args, kwargs)
            if hidden is not None:
                require_layer_within_norm_limit(layer.name, module, hidden)
            if self._plan_source is not None:
                self._plan_source.before_layer(args, kwargs)
            group = self._engine.begin_layer(position, layer.name, args, kwargs, last=layer.last)
            self._running.setdefault(position, []).append(group)
            self._tokenwise.begin(layer, group, args, kwargs)

        def end(module: nn.Module, args: object, output: object) -> None:
            if torch.compiler.is_compiling():
                return
            running = None if self._is_elsewhere() else self._running.get(position)
            if running:  # empty when an earlier hook of the module raised before ours began
                group = running.pop()
                self._tokenwise.end(group, output)
                self._engine.end_layer(group, between=not layer.last)

        return hook_forward(layer.module, begin, end)

    def choose_levels(self, levels: Mapping[int | str, _LayerLevels]) -> None:
        """Sets the recompute levels of single layers from the next forward on, and ends planning.

        A layer's first call at new levels compares a trial recompute with what was saved. Tensors that are saved
        already are restored as they were saved.

        Args:
            levels: Level of each named layer, by position or name: a fraction of the tokens as `alpha` of
                `memo.offload`, three fractions, TokenLevels, or a Level. Layers not named have the levels of `alpha`.

        Raises:
            UsageError: Unknown layer, invalid level, or a forward is under way. Levels are as before.
        """
        if self._depth > 0:
            raise UsageError("levels: choose them between forwards, not inside `with manager:`")
        chosen: dict[str, Setting] = {}
        for key, value in levels.items():
            layer = layer_at(self._layers, key, argument="levels")
            chosen[layer.name] = setting_of(value, argument=f"levels[{key!r}]")
        if self._plan_source is not None:
            self._plan_source = None
            self._engine.place({})
            self._engine.listen(self._recorder)
        self._tokenwise.choose(chosen)

    def levels_profile(self) -> list[LayerCosts]:
        """Returns the bytes moved and the recompute seconds of each layer at each level, as measured so far.

        Bytes are known for all levels once a layer has run with tokens to recompute. Seconds are known for the levels
        at which it ran; a step with `alpha=(1/3, 1/3, 1/3)` measures all of them.

        Returns:
            One LayerCosts for each layer that has run so, in bytes and seconds per token of one sequence.
        """
        return self._tokenwise.costs()

    def explain(self, layer: int | str) -> LayerExplanation:
        """Explains what the last forward of a layer did, what of it is kept and what is replayed in backward.

        Args:
            layer: Position or name.

        Returns:
            A snapshot, in bytes and microseconds; `print` shows it as tables.

        Raises:
            UsageError: No such layer, or no forward of it was recorded: none has run yet, or all that it saves moves.
        """
        return self._tokenwise.explain(layer_at(self._layers, layer, argument="explain"))

    def plan_with(self, source: PlanSource) -> None:
        """Sets the plan source that is asked at each forward from now on.

        Args:
            source: Takes the place of the present one; `choose_levels` removes it.
        """
        self._plan_source = source

    @property
    def plan(self) -> ActivationPlan | None:
        """The plan in use; None with a fixed `alpha`, and until a plan has been made."""
        return None if self._plan_source is None else self._plan_source.plan

    def step_done(self) -> None:
        """Ends a training step: in the trace, for the planned allocator, and in `step`, which is increased by one.

        Optional; call it after the optimizer's step, with no forward or backward under way. A program that calls it once
        tells all of its steps; else they are told apart by the optimizer, by changed parameters and by cleared gradients.
        """
        self._is_told = True
        self._step_ends.done()
        self._end_step()

    def _end_step(self) -> None:
        self._engine.end_step()
        if self._steps is not None:
            self._steps.done()
        if self._recorder is not None and self._in_step:
            self._recorder.end_step()
        self._in_step = False
        self.step += 1

    def report(self) -> Report:
        """Returns bytes moved, peaks, stalls and recomputes since construction.

        Waits for the device if times of its work are still to be read.

        Returns:
            A snapshot, in bytes and seconds, that later steps do not change; `print` shows it as a table.
        """
        self._engine.settle_times()
        return Report.of(
            self._engine,
            layers=len(self._layers),
            disk=self._disk_use(),
            tokenwise=self._tokenwise,
            plan=None if self._plan_source is None else self._plan_source.outcome(),
            unseen=self._unseen.reasons,
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
        """Waits for copies in flight, releases all buffers and the scratch file, and ends the trace. Idempotent.

        Afterwards a backward that needs moved tensors raises, and the manager cannot be entered again.

        Raises:
            SwapError: A copy in flight failed. The trace is ended all the same.
        """
        self._end_attachment()
        if self._watch is not None:
            self._watch.stop()
        if self._closer.detach() is None:
            return
        self._step_ends.close()
        if self._steps is not None:
            self._steps.done()
        try:
            self._engine.close()
        finally:
            if self._recorder is not None:
                if self._in_step:
                    self._end_step()
                self._recorder.close()


def _plan_name(plan: ActivationPlan | _Path | None) -> str:
    return os.fspath(plan) if isinstance(plan, str | os.PathLike) else "the plan"


def _weights(plan: ActivationPlan | None, order: PipelineOrder | None) -> tuple[int, int]:
    """Weights of this rank in sharing its node's host and disk budgets: its plan's bytes, else its calls in flight."""
    if plan is not None:
        host, disk = lower_tier_nbytes(plan)
        return max(host, 1), max(disk, 1)  # a tier that is turned on has some room
    return (1, 1) if order is None else (order.weight, order.weight)


def _all_gather(group: ProcessGroup | None) -> AllGather:
    return single_rank if group is None or group.size() == 1 else functools.partial(gather_values, group=group)


def _abandon(tiers: Sequence[Tier], backend: Backend, recorder: TraceRecorder | None) -> None:
    """Closes everything once the engine is collected: no saved tensor can be asked for any more."""
    for tier in tiers:
        tier.close()
    backend.close()
    if recorder is not None:
        recorder.close()
