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
from memo.manager.direct_calls import DirectCalls
from memo.manager.layer_choices import Names, bans_by_layer, layer_at
from memo.manager.plan_source import FixedPlan, FixedSetting, PlanSource, checked_plan, own_part, read_plan
from memo.manager.report import DiskUse, Report
from memo.manager.resources import Room, device_of, measured_link, open_backend, open_recorder, open_tiers
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


"""Treatment of a layer whose recompute by tokens is not proven: move whole tensors, or run the layer again."""
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
        verify: True stores a checksum with each block on disk and compares it when the block is read. It also sums the bytes
            that recomputes read, parameters among them, in forward and again in backward, and so finds changes that no
            version counter shows, at the cost of reading them twice more. Default False.
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
        ModifiedAfterSave: A tensor that it needs was modified in place after it was saved; with `verify` also where nothing
            counted it.
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
        verify=verify,
    )
    manager = Manager(model, found, engine, recorder, store, tokenwise=tokenwise)
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
        step: Number of the training step under way, as the trace shows it; `step_done` counts on. Set it before the
            first forward to begin at another number.

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
    ) -> None:
        self._layers = layers
        self._engine = engine
        self._recorder = recorder
        self._store = store
        self._made_s = time.monotonic()
        self._depth = 0
        self._thread = threading.get_ident()
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
        self._in_step = False
        self._direct_calls = DirectCalls(layers)

    @property
    def stats(self) -> Stats:
        """Counters of the engine since construction; they change while copies are in flight."""
        return self._engine.stats

    @property
    def layers(self) -> Sequence[Layer]:
        """The layers whose activations are managed, in the order of the model."""
        return self._layers

    def __enter__(self) -> Manager:
        if not self._closer.alive:
            raise UsageError("this manager is closed; call memo.offload again")
        if self._depth and self._thread != threading.get_ident():
            raise UsageError("this manager is entered in another thread; call memo.offload in each")
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
        if self._plan_source is not None:
            self._plan_source.before_forward()
        self._engine.begin_forwards()
        self._tokenwise.begin_forwards(self._layers)
        if self._steps is not None:
            self._hooks.append(self._steps.hook(idle=lambda: self._engine.stats.live_entries == 0))
        for position, layer in enumerate(self._layers):
            self._hooks += self._hook(position, layer)
        # Without recompute the engine packs directly, which saves one call per saved tensor.
        idle = self._tokenwise.is_idle and self._plan_source is None  # a plan may change that at the first layer
        pack: Callable[[torch.Tensor], Any] = self._engine.pack if idle else self._tokenwise.pack
        pack = self._direct_calls.watch(pack, is_open=lambda: any(self._running.values()))
        saving = saved_tensors_hooks(pack, self._engine.unpack)
        saving.__enter__()
        self._saving = saving

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            seen = [self._layers[position].name for position in self._running]
            self._end_forwards()
            if exception[:1] in ((), (None,)):
                self._direct_calls.end(seen)

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
        """True in a thread that has not entered the manager, and that is not one of backward's."""
        return threading.get_ident() != self._thread and torch._C._current_graph_task_id() < 0

    def _hook(self, position: int, layer: Layer) -> list[LayerHook]:
        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._is_elsewhere():
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

        Optional; call it after the optimizer's step, with no forward or backward under way.
        """
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
