"""The Manager that `memo.offload` returns: a context manager around a model's forwards, or attached to the model.

Owns the hooks on the model and its layers, and the order in which a forward's begin and end reach the engine, recompute and
planning; memo.swap moves the bytes. Invariant: layers have hooks only between `__enter__` and `__exit__`, the model also
between `attach` and `detach`. Tensors that were saved in between are restored in backward, inside or outside of it.
"""

from __future__ import annotations

import html
import logging
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from memo import forks
from memo.allocator import model_steps
from memo.errors import UsageError
from memo.events import Note
from memo.manager import claims, replaced_checkpoints as replaced_checkpoints
from memo.manager.arguments import LayerLevels, layer_at, settings_by_layer
from memo.manager.forwards import ForwardHooks, entries_of
from memo.manager.layer_hooks import LayerHooks
from memo.manager.memory_errors import MemoryWatch
from memo.manager.opening import OffloadOptions, Runtime
from memo.manager.report import DiskUse, Report
from memo.manager.step_ends import StepEnds
from memo.manager.unmanaged import ForgottenAttach
from memo.manager.unseen import Unseen
from memo.swap import (
    Engine,
    Layer,
    LayerCosts,
    LayerExplanation,
    LayerHook,
    Level,
    RecomputePolicy,
    SavingHooks,
    Stats,
    runs_as_written,
)
from memo.warn_user import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from memo.autoplan import PlanSource
    from memo.mip.activation import ActivationPlan
    from memo.swap.backends import Backend
    from memo.swap.disk import DiskStore
    from memo.swap.tiers import Tier
    from memo.trace import TraceRecorder

log = logging.getLogger("memo")


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
        engine: Engine | None = None,
        recorder: TraceRecorder | None = None,
        store: DiskStore | None = None,
        *,
        recompute_policy: RecomputePolicy | None = None,
        opening: OffloadOptions | None = None,
    ) -> None:
        self._name = type(model).__name__
        self._model = model
        self._layers = layers
        self._entries = entries_of(model, layers)
        self._made_s = time.monotonic()
        self._forks = forks.count()
        self._depth = 0
        self._thread = threading.get_ident()
        self._entering = threading.Lock()
        self._attached: ForwardHooks | None = None
        self._hooks: list[LayerHook | RemovableHandle] = []
        self._saving: SavingHooks | None = None
        self._layer_hooks = LayerHooks(layers)
        self._unseen = Unseen(layers)
        self._replaced: set[str] = set()
        self._step_ends = StepEnds(model)
        self.step = 0
        self._begun_steps = 0
        self._in_step = False
        self._is_told = False
        self._has_trained = False
        self._has_told_forked = False
        self._is_prepared = False
        self._is_closed = False
        self._logged_plan: ActivationPlan | None = None
        self._logged_progress = ""
        self._parts: Runtime | None = None
        self._opening = opening
        self._has_schedule = opening is not None and opening.order is not None
        self._watch: ForgottenAttach | None = None
        if opening is not None:
            if opening.device() is not None:
                self._open()
            self._watch = ForgottenAttach(model, layers)
        else:
            assert engine is not None
            tapes = RecomputePolicy(engine, Level.SAVE_ALL) if recompute_policy is None else recompute_policy
            self._use(Runtime(engine=engine, recompute_policy=tapes, recorder=recorder, store=store))

    def _open(self) -> None:
        """Opens what the manager works with, for the device that the model is on; anew where it has moved since."""
        opening = self._opening
        assert opening is not None
        device = opening.device()
        if device is None:
            raise UsageError(
                f"{self._name} is still on the meta device; give it memory, as by model.to_empty(device=...), before its "
                "first forward in the manager"
            )
        if self._parts is not None:
            opened = self._parts.engine.backend.device
            if opened == device or opened.type != "cpu":  # parameters that wait on the CPU are no move
                return
            self._parts.close()
        self._use(opening.open(device))
        log.info("%s: %d layers managed on %s", self._name, len(self._layers), device)

    def _use(self, parts: Runtime) -> None:
        self._parts = parts
        self._engine = engine = parts.engine
        self._recorder = parts.recorder
        self._sampler = parts.sampler
        self._memory_watch = MemoryWatch(engine, parts.owned, parts.recorder, parts.sampler)
        self._store = parts.store
        self._recompute_policy = parts.recompute_policy
        self._plan_source = parts.source
        self._steps = model_steps(self._model, engine.backend.device)
        engine.keep(self._model.parameters(), self._model.buffers())
        # Autograd graphs hold the engine and not this object, which may be collected before backward runs:
        # `with memo.offload(model): loss = model(x)`, then `loss.backward()`, is a valid program.
        self._closer = weakref.finalize(engine, abandon, engine.tiers, engine.backend, parts.recorder, self._forks)

    @property
    def stats(self) -> Stats:
        """Counters of the engine since construction; they change while copies are in flight."""
        return Stats() if self._parts is None else self._engine.stats

    @property
    def open_layer(self) -> str | None:
        """Name of a layer whose forward is under way; None between layers."""
        return self._layer_hooks.open_layer

    @property
    def layers(self) -> Sequence[Layer]:
        """The layers whose activations are managed, in the order of the model."""
        return self._layers

    def __enter__(self) -> Manager:
        if self._forks != forks.count():
            self._tell_forked()
            return self
        try:
            self._enter()
            return self
        except BaseException:
            self._leave()
            raise

    def _enter(self) -> None:
        with self._entering:
            if self._is_closed:
                raise UsageError("this manager is closed; call memo.offload again")
            if self._depth and self._thread != threading.get_ident():
                raise UsageError("this manager is entered in another thread; call memo.offload in each")
            if self._depth == 0:
                if self._opening is not None:
                    self._open()
                    self._opening = None
                self._thread = threading.get_ident()
                claims.enter(self)
            self._depth += 1
        if self._depth == 1:
            self._begin_forwards()

    def _tell_forked(self) -> None:
        if not self._has_told_forked:
            self._has_told_forked = True
            if self._watch is not None:
                self._watch.stop()
            warn_user(
                f"this process was forked from the one that manages {self._name}, and manages no forward of it: memo's "
                "threads are not here; call memo.offload in this process"
            )

    def _begin_forwards(self) -> None:
        if not runs_as_written() or self._engine.is_captured():
            return
        self._begin_forward()
        self._is_prepared = True
        if self._attached is None and not self._has_schedule:  # all microbatches of a schedule are one step
            hooks = ForwardHooks(self._entries, self._next_forward, lambda failed: None)
            self._hooks.append(hooks)
            hooks.install()
        if self._steps is not None:
            self._hooks.append(self._steps.hook(idle=self._is_idle))
        self._layer_hooks.install(self._engine, self._recompute_policy, lambda: self._plan_source)
        # Without recompute the engine packs directly, which saves one call per saved tensor.
        idle = self._recompute_policy.is_idle and self._plan_source is None  # a plan may change that at the first layer
        pack: Callable[[torch.Tensor], Any] = self._engine.pack if idle else self._recompute_policy.pack
        pack = self._unseen.watch(pack, lambda: self.open_layer)
        self._saving = SavingHooks(pack, self._engine.unpack)
        self._saving.install()

    def _begin_forward(self) -> None:
        """Prepares one forward of the model; a step that has ended is evaluated."""
        self._engine.recover()
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
            self._begun_steps += 1
            if self._recorder is not None:
                self._recorder.begin_step(self.step)
                if self._sampler is not None:
                    self._sampler.begin_step()
        if self._plan_source is not None:
            self._plan_source.before_forward(may_end=has_ended)
            self._log_plan(self._plan_source)
        self._engine.begin_forwards()
        self._recompute_policy.begin_forwards(self._layers)

    def _log_plan(self, source: PlanSource) -> None:
        """Logs the progress of planning where it has changed, as from step to step, and a new plan."""
        outcome = source.outcome() if log.isEnabledFor(logging.INFO) else None
        if outcome is None:
            return
        if outcome.progress and outcome.progress != self._logged_progress:
            log.info("%s: %s", self._name, outcome.progress)
        self._logged_progress = outcome.progress
        if source.plan is not self._logged_plan:
            self._logged_plan = source.plan
            for line in outcome.lines():
                log.info("%s: %s", self._name, line)

    def _next_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begins a forward of the model inside the manager: what an earlier one has left open is closed."""
        if self._saving is None:
            return
        claims.require_alone(self)
        if not self._is_prepared:
            self._recompute_policy.end_forwards()
            self._engine.end_forwards()
            self._layer_hooks.forget_open()
            self._begin_forward()
        self._is_prepared = False

    def _is_idle(self) -> bool:
        return self._engine.stats.live_entries == 0

    def attach(self) -> Manager:
        """Manages every training forward of the model from now on, without a `with`.

        Forwards without gradients are left alone: evaluation, generation, what a checkpoint runs again in backward. Those
        inside `with manager:` are managed as ever. Copies and files of the model have no hook of memo's.

        Returns:
            This manager, which the model keeps until `detach` or `close`. Attaching again changes nothing. Another manager
            that is attached to the same layers, or to fewer, is detached.

        Raises:
            UsageError: The manager is closed, the model is a bare ModuleList or itself the one layer, or a manager of more
                layers is attached.
        """
        if self._is_closed:
            raise UsageError("this manager is closed; call memo.offload again")
        if self._model not in self._entries or any(layer.module in self._entries for layer in self._layers):
            raise UsageError("attach: the model has no forward around its layers; use `with manager:` around theirs")
        if self._attached is None:
            ours = {layer.module for layer in self._layers}
            for other in claims.attached_to(self):
                if any(layer.module not in ours for layer in other.layers):
                    raise UsageError("attach: a manager of these and of more layers is attached; detach that one first")
                other.detach()
                log.info("%s: detached the manager that was attached to it before", self._name)
            self._attached = ForwardHooks(self._entries, self._begin_attached, self._end_attached)
            self._attached.install()
            claims.claim(self)
            log.info("%s: attached", self._name)
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
        try:
            self.__enter__()
            if self._depth == 1 and self._steps is not None:  # its own hook comes too late for this forward
                self._steps.forward_begins(args, kwargs, idle=self._is_idle())
            self._next_forward(args, kwargs)
        except BaseException:
            self._end_attached(failed=True)
            raise

    def _end_attached(self, failed: bool) -> None:
        error = sys.exc_info()[1] if failed else None  # the hook runs where torch has caught it
        self.__exit__(RuntimeError if failed else None, error)

    def __exit__(self, *exception: object) -> None:
        try:
            self._exit(exception)
        except BaseException:
            self._leave()  # what an interruption has kept from its end
            raise

    def _exit(self, exception: Sequence[object]) -> None:
        if self._depth > 1:
            self._depth -= 1
            return
        if not self._depth:
            return  # left already, or a fork has not entered it
        seen = self._layer_hooks.seen
        if len(exception) > 1 and isinstance(exception[1], Exception):
            self._memory_watch.explain(exception[1], where=self._layer_hooks.failed)
        self._leave()
        if exception[:1] in ((), (None,)):
            self._unseen.end(seen)
            if self._plan_source is not None:
                self._plan_source.after_forward()

    def _leave(self) -> None:
        """Takes out whatever is in place, whether all of it is or an interruption has left a part. Idempotent."""
        if self._depth and self._thread != threading.get_ident():
            return  # another thread's
        try:
            if self._parts is not None:
                self._end_forwards()
        finally:
            claims.leave(self)
            self._depth = 0

    def _end_forwards(self) -> None:
        if self._saving is not None:
            self._saving.remove()
            self._saving = None
        self._recompute_policy.end_forwards()
        self._layer_hooks.remove()
        while self._hooks:
            self._hooks[-1].remove()
            self._hooks.pop()
        self._engine.end_forwards()

    def replaces_checkpoint_of(self, modules: Sequence[nn.Module]) -> bool:
        """Tells whether a checkpoint that begins now, and runs `modules`, is a plain call: it is around managed layers."""
        if self._saving is None:
            return False
        around = self._layer_hooks.within(modules)
        if not around or not self._saving.are_topmost:
            self.notes_checkpoint(around)
            return False
        if not self._replaced:
            log.info("%s: activation checkpointing around its layers is replaced", self._name)
        self._replaced.update(around)
        return True

    def notes_checkpoint(self, around: Sequence[str]) -> None:
        """Notes that a checkpoint begins which stays; `around` layers, though hooks of others are set."""
        if self._saving is not None:
            self._unseen.checkpoint_begins(self.open_layer, around)

    def choose_levels(self, levels: Mapping[int | str, LayerLevels]) -> None:
        """Sets the recompute levels of single layers from the next forward on, and ends planning.

        A layer's first call at new levels compares a trial recompute with what was saved. Tensors that are saved
        already are restored as they were saved.

        Args:
            levels: Level of each named layer, by position or name: a fraction as `alpha` of `memo.offload`, three
                fractions, or a Level. Layers not named have the levels of `alpha`.

        Raises:
            UsageError: Unknown layer, invalid level, a forward is under way, or the model has had no memory yet. Levels are
                as before.
        """
        if self._depth > 0:
            raise UsageError("levels: choose them between forwards, not inside `with manager:`")
        if self._parts is None:
            raise UsageError("levels: the model is still on the meta device; give levels= to memo.offload")
        chosen = settings_by_layer(self._layers, levels)
        self._opening = None  # what is open stays open, with these levels
        if self._plan_source is not None:
            self._plan_source = None
            self._engine.place({})
            self._engine.listen(self._recorder)
        self._recompute_policy.choose(chosen)

    def levels_profile(self) -> list[LayerCosts]:
        """Returns the bytes moved and the recompute seconds of each layer at each level, as measured so far.

        Bytes are known for all levels once a layer has run with tokens to recompute. Seconds are known for the levels
        at which it ran; a step with `alpha=(1/3, 1/3, 1/3)` measures all of them.

        Returns:
            One LayerCosts for each layer that has run so, in bytes and seconds per token of one sequence.
        """
        return [] if self._parts is None else self._recompute_policy.costs()

    def explain(self, layer: int | str) -> LayerExplanation:
        """Explains what the last forward of a layer did, what of it is kept and what is replayed in backward.

        Args:
            layer: Position or name.

        Returns:
            A snapshot, in bytes and microseconds; `print` shows it as tables.

        Raises:
            UsageError: No such layer, or no forward of it was recorded: none has run yet, or all that it saves moves.
        """
        found = layer_at(self._layers, layer, argument="explain")
        if self._parts is None:
            raise UsageError(f"{found.name} has no tape: no forward of it has run in the manager yet")
        return self._recompute_policy.explain(found)

    def plan_with(self, source: PlanSource) -> None:
        """Sets the plan source that is asked at each forward from now on.

        Args:
            source: Takes the place of the present one; `choose_levels` removes it.
        """
        self._opening = None
        self._plan_source = source

    @property
    def plan(self) -> ActivationPlan | None:
        """The plan in use; None with a fixed `alpha`, and until a plan has been made."""
        return None if self._parts is None or self._plan_source is None else self._plan_source.plan

    @property
    def has_settled(self) -> bool:
        """True where no further plan is expected: it has settled, or there is none to make."""
        outcome = None if self._parts is None or self._plan_source is None else self._plan_source.outcome()
        return outcome is None or outcome.phase in ("settled", "given")

    def note(self, cause: str, message: str) -> None:
        """Adds a note on the step under way to the trace, where there is one."""
        if self._parts is not None and self._recorder is not None:
            self._recorder.emit(Note(t=self._recorder.now(), step=self.step, cause=cause, message=message))

    def step_done(self) -> None:
        """Ends a training step: in the trace, for the planned allocator, and in `step`, which is increased by one.

        Optional; call it after the optimizer's step, with no forward or backward under way. A program that calls it once
        tells all of its steps; else they are told apart by the optimizer, by changed parameters and by cleared gradients.
        """
        self._is_told = True
        self._step_ends.done()
        self._end_step()

    def _end_step(self) -> None:
        if self._parts is not None:
            self._engine.end_step(self.step)
            if self._steps is not None:
                self._steps.done()
            if self._recorder is not None and self._in_step:
                if self._sampler is not None:
                    self._sampler.stepped()
                self._recorder.end_step()
        self._in_step = False
        self.step += 1

    def report(self) -> Report:
        """Returns bytes moved, peaks, stalls and recomputes since construction.

        Waits for the device if times of its work are still to be read.

        Returns:
            A snapshot, in bytes and seconds, that later steps do not change; `print` shows it as a table.
        """
        if self._parts is not None:
            self._engine.settle_times()
        return self._report()

    def _report(self) -> Report:
        if self._parts is None:
            return Report(layers=len(self._layers), nothing="the model is still on the meta device")
        return Report.of(
            self._engine,
            layers=len(self._layers),
            steps=self._begun_steps,
            disk=self._disk_use(),
            recompute_policy=self._recompute_policy,
            plan=None if self._plan_source is None else self._plan_source.outcome(),
            unseen=self._unseen.reasons,
            replaced=len(self._replaced),
            spills=self._engine.spills(self.step),
        )

    def __repr__(self) -> str:
        how = "closed" if self._is_closed else "attached" if self._attached is not None else "not attached"
        if self._depth:
            how += ", entered"
        benefit = self._report().benefit
        return f"<memo.Manager of {self._name}: {len(self._layers)} layers, {how}, step {self.step}; {benefit}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        return f"<div>{html.escape(repr(self))}</div>{self.report()._repr_html_()}"

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
        if self._is_closed:
            return
        self._is_closed = True
        self._leave()
        self._end_attachment()
        if self._watch is not None:
            self._watch.stop()
        self._step_ends.close()
        if self._parts is None or self._forks != forks.count():
            return
        self._closer.detach()
        self._memory_watch.close()
        if self._steps is not None:
            self._steps.done()
        self._parts.close(self._end_step if self._in_step else None)


def abandon(tiers: Sequence[Tier], backend: Backend, recorder: TraceRecorder | None, of: int) -> None:
    """Closes everything once the engine is collected: no saved tensor can be asked for any more. `of`: forks before it."""
    if of != forks.count():
        return
    for tier in tiers:
        tier.close()
    backend.close()
    if recorder is not None:
        recorder.close()
