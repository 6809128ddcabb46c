"""Rehearsal: the first steps of a training on a simulated machine, by the code that would run there.

    build ──▶ model on tensors without bytes ──▶ memo.offload ──▶ forward, backward, optimizer ──▶ a RehearsedStep each

The engine, its tiers, the measuring steps, the solver and the plans are those of a run. The machine alone is simulated
(memo.rehearsal.machine): kernels take what their FLOPs and bytes take at its rates, copies what its link takes, and each
storage counts in its memory. Of several ranks the first runs, in torch's fake process group; its collectives take what the
machine's network takes. Not simulated: the time that solving takes, and Python's own time beyond a launch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import gc
import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from memo.dry_run import storages_without_memory
from memo.errors import (
    DeviceOutOfMemory,
    HostBudgetExceeded,
    Infeasible,
    MemoError,
    RecordError,
    ScratchFull,
    UsageError,
)
from memo.events import TierName
from memo.gpt.optim import HostOptimizer, optimizer_host_bytes, require_optimizer_room
from memo.manager import offload, use_machine
from memo.parallel import fake_group
from memo.record import checkpoint_layers, make_optimizer, users_errors
from memo.rehearsal.machine import SimulatedMachine
from memo.rehearsal.streams import streams_on
from memo.rehearsal.turns import RankTimes, TurnMeter
from memo.swap import Totals, find_layers
from memo.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from memo.manager import Manager
    from memo.mip.activation import ActivationPlan
    from memo.record import Step

SETTLED_STEPS = 1
"""Steps that are run with a settled plan."""
MOST_STEPS = 24
STEPS_OF_A_LENGTH = 4
"""Steps that each further length may take."""
NO_ROOM = (torch.OutOfMemoryError, DeviceOutOfMemory, HostBudgetExceeded, Infeasible, ScratchFull)
"""Errors of a training that does not fit."""


class Way(enum.StrEnum):
    """Treatment of the activations in a rehearsal."""

    MEMO = "memo"
    CHECKPOINT = "checkpoint"
    """Every layer is recomputed whole by torch's checkpoint."""
    KEEP = "keep"
    """Everything stays on the device."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedStep:
    """One step."""

    number: int
    tokens: int
    seconds: float
    """From its first forward until the device has done its last work."""
    device_bytes: int
    """Most bytes of device memory in use in it, trials, recording and the optimizer included."""
    is_settled: bool
    """True where its plan, or a fixed setting, is the last one."""
    decision: str
    """Planning's state, and why."""
    host_bytes: int
    """Most bytes of the host tier so far, as `disk_bytes` of the disk."""
    disk_bytes: int
    moved_bytes: int
    recompute_s: float
    stall_s: float
    trials: int
    """Trial replays."""
    times: RankTimes | None = None
    """Times of its turns, in a pipeline."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BudgetViolation:
    """A step that used more of a tier than its budget."""

    step: int
    tier: TierName
    used_bytes: int
    budget_bytes: int

    def __str__(self) -> str:
        used, budget = format_bytes(self.used_bytes, up=True), format_bytes(self.budget_bytes)
        return f"step {self.step} took {used} of {budget} of {self.tier}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """A rehearsed training."""

    steps: tuple[RehearsedStep, ...]
    static_bytes: int
    """Device memory before the first step."""
    optimizer_host_bytes: int = 0
    """Host memory of an optimizer there, which is not the host tier's."""
    device_budget: int
    host_budget: int
    disk_budget: int
    failure: str | None
    """The error that ended it; None where it ran."""
    has_room: bool
    """False where the error is one of a full device, host tier or disk."""
    settled: bool
    """True where the last step of each length ran by a settled plan, or the setting was fixed."""
    plan: ActivationPlan | None = None
    """The plan in use at the end."""
    plans_made: int = 0
    report: str
    warned: tuple[str, ...]
    took_s: float
    """Seconds that the rehearsal itself took."""

    @property
    def step_s(self) -> float | None:
        """Seconds of the usual step of the last one's length; None where none ended."""
        return None if self.usual_step is None else self.usual_step.seconds

    @property
    def usual_step(self) -> RehearsedStep | None:
        """The last step, of those by a settled plan one without trial replays; None where none ended."""
        return self._usual_by_tokens()[self.steps[-1].tokens] if self.steps else None

    def _usual_by_tokens(self) -> dict[int, RehearsedStep]:
        """Usual step of each length. At the 10th call of a layer, the 100th and so on, its replay is tried again."""
        usual = (step for step in self.steps if self.settled and step.is_settled and not step.trials)
        return {step.tokens: step for step in self.steps} | {step.tokens: step for step in usual}

    @property
    def violations(self) -> tuple[BudgetViolation, ...]:
        """Steps in which a budget was exceeded, in their order."""
        return tuple(
            BudgetViolation(step=step.number, tier=tier, used_bytes=used, budget_bytes=budget)
            for step in self.steps
            for tier, used, budget in (
                (TierName.DEVICE, step.device_bytes, self.device_budget),
                (TierName.HOST, step.host_bytes, self.host_budget),
                (TierName.DISK, step.disk_bytes, self.disk_budget),
            )
            if used > budget
        )

    @property
    def fits(self) -> bool:
        """True where every step ran within all budgets."""
        return self.failure is None and not self.violations

    @property
    def settled_after(self) -> int | None:
        """Number of steps before those by the settled plan; None where none settled."""
        if not self.settled:
            return None
        return max((step.number + 1 for step in self.steps if not step.is_settled), default=0)

    @property
    def settling_s(self) -> float | None:
        """Seconds of the steps before the settled plan, beyond what they would have taken by it; None where none settled."""
        after = self.settled_after
        if after is None:
            return None
        usual = self._usual_by_tokens()
        return sum(step.seconds - usual[step.tokens].seconds for step in self.steps[:after])


def rehearse(
    build: Callable[[], Step],
    machine: SimulatedMachine | str,
    *,
    way: Way = Way.MEMO,
    device: int | str | None = None,
    host: int | str = "auto",
    disk_budget: int | str | None = None,
    lengths: Sequence[int] = (),
    accumulate: int = 1,
    optimizer: str | None = "adamw",
    optimizer_offload: bool = False,
    attach: bool = False,
    steps: int | None = None,
    trace: str | None = None,
    on_step: Callable[[RehearsedStep], None] = lambda step: None,
    **options: Any,
) -> Rehearsal:
    """Rehearses the first steps of a training.

    Args:
        build: builds the step, a model on the CPU and its loss; called where every tensor is without bytes.
        machine: the machine, which serves one rehearsal, or the name of a GPU's preset, such as "h100".
        way: what is done with the activations.
        device: as of `memo.offload`.
        host: as of `memo.offload`.
        disk_budget: as of `memo.offload`; None: the machine's disk, where it has one.
        lengths: tokens of the steps, one after another, again and again; empty: what the step has. The step's loss then
            takes `tokens`.
        accumulate: microbatches of a step.
        optimizer: that ends each step (memo.record.optimizers); None: those of the step.
        optimizer_offload: AdamW's state and step are on the host, as with `memo train --optimizer-offload`.
        attach: attaches the manager to the model, instead of entering it around each forward.
        steps: number of steps; None: until two have run by a settled plan, at most 24.
        trace: path for a trace of the rehearsal.
        on_step: called with each step that has ended.
        **options: further arguments of `memo.offload`.

    Returns:
        The steps, and the error that ended them, if one did.

    Raises:
        RecordError: the step reads the contents of a tensor, or cannot run without bytes.
        UsageError: an argument is invalid.
    """
    if accumulate < 1 or (steps is not None and steps < 1):
        raise UsageError("a rehearsal has at least one step, of at least one microbatch")
    if optimizer_offload and optimizer != "adamw":
        raise UsageError("on the host there is AdamW alone: optimizer_offload goes with optimizer='adamw'")
    began = time.perf_counter()
    machine = SimulatedMachine(machine) if isinstance(machine, str) else machine
    if optimizer_offload and machine.ranks > 1:
        raise UsageError("the optimizer is on the host for one GPU alone")
    budget = machine.device_budget(None if device is None else parse_bytes(device, what="device")).total_bytes
    run = _Run(machine, way, budget, accumulate=accumulate, lengths=lengths, attach=attach, on_step=on_step)
    with (
        users_errors(),
        use_machine(machine),
        ranks_of(machine),
        machine.kernels,
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        disk = ["/"] if machine.disk_bytes else []
        if machine.disk_bytes and disk_budget is None:
            disk_budget = machine.disk_bytes
        given = {"device": device, "host": host, "disk": disk, "disk_budget": disk_budget, "trace": trace, **options}
        try:
            run.open(build(), optimizer, given, on_host=optimizer_offload)
            run.go(steps)
        except (RecordError, UsageError):
            raise
        except (MemoError, torch.OutOfMemoryError) as error:
            if not run.has_begun and not isinstance(error, NO_ROOM):
                raise
            run.failure, run.has_room = str(error), not isinstance(error, NO_ROOM)
        finally:
            result = run.result(time.perf_counter() - began)
            run.close()
        texts = [str(one.message) for one in warned if issubclass(one.category, RuntimeWarning)]
        return dataclasses.replace(result, warned=tuple(dict.fromkeys(texts)))


@contextlib.contextmanager
def ranks_of(machine: SimulatedMachine) -> Iterator[None]:
    """Makes this process the machine's rank; nothing for one rank."""
    if machine.ranks == 1:
        yield
        return
    with fake_group(machine.ranks, machine.rank), streams_on(machine.clock), storages_without_memory(machine.memory):
        yield


class _Run:
    """One rehearsal under way."""

    def __init__(
        self,
        machine: SimulatedMachine,
        way: Way,
        device_budget: int,
        *,
        accumulate: int,
        lengths: Sequence[int],
        attach: bool,
        on_step: Callable[[RehearsedStep], None],
    ) -> None:
        self._machine, self._way, self._device_budget = machine, way, device_budget
        self._accumulate, self._lengths, self._attach = accumulate, lengths, attach
        self._on_step = on_step
        self._steps: list[RehearsedStep] = []
        self._totals, self._trials = Totals(), 0
        self._manager: Manager | None = None
        self._static_bytes = self._optimizer_host_bytes = 0
        self._optimizers: tuple[torch.optim.Optimizer | HostOptimizer, ...] = ()
        self._plans: list[ActivationPlan] = []
        self.has_begun, self.has_room = False, True
        self.failure: str | None = None

    def open(self, step: Step, optimizer: str | None, given: dict[str, Any], *, on_host: bool) -> None:
        """Prepares the model."""
        machine = self._machine
        if self._lengths and not _takes_tokens(step.loss):
            raise UsageError("the step takes no tokens: lengths need a loss with an argument `tokens`")
        machine.kernels.forget(_own_part(parameter) for parameter in step.model.parameters())
        self._step = step
        self._sharded = [module for module in step.model.modules() if isinstance(module, FSDPModule)]
        if on_host:
            self._optimizers = (self._host_optimizer(step.model),)
        else:
            self._optimizers = step.optimizers if optimizer is None else (make_optimizer(optimizer, step.model),)
        if self._way is Way.CHECKPOINT:
            checkpoint_layers(find_layers(step.model, step.layers))
        elif self._way is Way.MEMO:
            manager = offload(step.model, layers=step.layers, group=step.group, schedule=step.schedule, **given)
            self._manager = manager
            if self._attach:
                manager.attach()
        self._static_bytes = machine.memory.used
        self._meter = None if step.schedule is None else TurnMeter(machine, step.schedule)

    def _host_optimizer(self, model: torch.nn.Module) -> HostOptimizer:
        machine = self._machine
        self._optimizer_host_bytes = optimizer_host_bytes(one for one in model.parameters() if one.requires_grad)
        require_optimizer_room(self._optimizer_host_bytes, machine.free_host_bytes())
        machine.take_host_bytes(self._optimizer_host_bytes)
        return HostOptimizer(model, machine.backend(timing=False), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def go(self, steps: int | None) -> None:
        """Runs so many steps, or until the plan has settled."""
        self.has_begun = True
        lengths = max(1, len(self._lengths))
        enough = SETTLED_STEPS + lengths
        most = MOST_STEPS + STEPS_OF_A_LENGTH * (lengths - 1) if steps is None else steps
        for number in range(most):
            self._run(number)
            if steps is None and number >= enough and all(step.is_settled for step in self._steps[-enough:]):
                break

    def _is_settled(self) -> bool:
        if self._manager is None:
            return True
        outcome = self._manager.report().plan
        return outcome is None or outcome.phase in ("settled", "given")

    def _has_settled(self) -> bool:
        """True where the last step of each length was a settled one."""
        return all({step.tokens: step.is_settled for step in self._steps}.values())

    def _run(self, number: int) -> None:
        machine, clock, manager = self._machine, self._machine.clock, self._manager
        tokens = self._lengths[number % len(self._lengths)] if self._lengths else 0
        machine.memory.begin_step()
        begin_ns = clock.host_ns
        if self._meter is not None:
            self._meter.begin_step()
        for microbatch in range(self._accumulate):
            for module in self._sharded:
                module.set_requires_gradient_sync(microbatch == self._accumulate - 1, recurse=False)
            self._forward_backward(tokens)
        for one in self._optimizers:
            one.step()
            one.zero_grad(set_to_none=True)
        if not self._optimizers:
            self._step.model.zero_grad(set_to_none=True)
        clock.finish()
        peaks: dict[TierName, int] = {}
        totals, trials = self._totals, self._trials
        if manager is not None:
            report = manager.report()
            peaks = {tier.tier: tier.peak_bytes for tier in report.tiers}
            totals = Totals.of(manager.stats)
            trials = trials if report.recompute is None else report.recompute.trials  # None: nothing is recomputed
        added = totals.since(self._totals)
        step = RehearsedStep(
            number=number,
            tokens=tokens,
            seconds=(clock.host_ns - begin_ns) / 1e9,
            device_bytes=machine.memory.step_peak,
            is_settled=self._is_settled(),
            decision="" if manager is None else _decision(manager),
            host_bytes=peaks.get(TierName.HOST, 0),
            disk_bytes=peaks.get(TierName.DISK, 0),
            moved_bytes=added.moved_bytes,
            recompute_s=added.recompute_s or 0.0,
            stall_s=added.stall_s or 0.0,
            trials=trials - self._trials,
            times=None if self._meter is None else self._meter.end_step(),
        )
        self._totals, self._trials = totals, trials
        self._steps.append(step)
        plan = None if manager is None else manager.plan
        if plan is not None and plan not in self._plans[-1:]:
            self._plans.append(plan)
        self._on_step(step)

    def close(self) -> None:
        """Closes the manager, and the trace with it."""
        if self._manager is not None:
            self._manager.close()
        gc.collect()

    def _forward_backward(self, tokens: int) -> None:
        given = {"tokens": tokens} if tokens else {}
        manager = self._manager
        if manager is None or self._attach or self._step.whole:
            loss = self._step.loss(**given)
        else:
            with manager:
                loss = self._step.loss(**given)
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.backward()

    def result(self, took_s: float) -> Rehearsal:
        """What was found."""
        manager, report = self._manager, ""
        budgets = (self._device_budget, 0, 0)
        if manager is not None:
            found = manager.report()
            tiers = {tier.tier: tier.budget_bytes or 0 for tier in found.tiers}
            budgets = (self._device_budget, tiers.get(TierName.HOST, 0), tiers.get(TierName.DISK, 0))
            report = str(found)
        device, host, disk = budgets
        return Rehearsal(
            steps=tuple(self._steps),
            static_bytes=self._static_bytes,
            optimizer_host_bytes=self._optimizer_host_bytes,
            device_budget=device,
            host_budget=host,
            disk_budget=disk,
            failure=self.failure,
            has_room=self.has_room,
            settled=self.failure is None and bool(self._steps) and self._has_settled(),
            plan=None if manager is None else manager.plan,
            plans_made=len(self._plans),
            report=report,
            warned=(),
            took_s=took_s,
        )


def _own_part(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _takes_tokens(loss: Callable[..., Any]) -> bool:
    """True where a loss can be called with the keyword `tokens`."""
    try:
        inspect.signature(loss).bind(tokens=1)
    except (TypeError, ValueError):  # ValueError: a C function without a signature
        return False
    return True


def _decision(manager: Manager) -> str:
    """What planning has come to."""
    outcome = manager.report().plan
    if outcome is None:
        return "fixed setting"
    if outcome.plan is None:
        return outcome.phase if outcome.why_not is None else f"{outcome.phase}: {outcome.why_not}"
    why = "; ".join(outcome.plan.binding) if outcome.plan.declined is None else "everything fits and is kept"
    seconds = f"{outcome.plan.stages[0].microbatch_s:.3f} s predicted"
    return f"{outcome.phase}: {seconds}{why and f'; {why}'}"
