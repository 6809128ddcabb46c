"""Compares a program with and without memo, bit for bit: losses, gradients, buffers, random numbers, Python's lists.

Where torch raises memo must raise as well; where torch finds a saved tensor changed in place, memo too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import nn

from benchmarks.results import ROOT
from memo import Manager
from memo.errors import HostBudgetExceeded, Infeasible, ModifiedAfterSave, ScratchFull
from memo.swap import local_part
from tests.hunt.levels import LEVELS, VERIFIED, Managed
from tests.hunt.names import BATCH, DEVICE, HIDDEN, Replaced, on_device
from tests.hunt.program import Program


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Find:
    """What is wrong at one level."""

    level: str
    kind: str
    """`differs in ...`, `does not raise`, `races`, or the error that memo raises and torch does not."""
    told: str


@dataclasses.dataclass(slots=True, kw_only=True)
class Outcome:
    """A program, compared."""

    discarded: str | None = None
    """Why nothing was compared: torch alone raises, or does not repeat itself."""
    finds: list[Find] = dataclasses.field(default_factory=list)
    compared: dict[str, bool] = dataclasses.field(default_factory=dict)
    """Level -> whether all steps were run."""
    moved_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    recomputed_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    refused: dict[str, int] = dataclasses.field(default_factory=dict)
    """Level -> 1 where a replay refused to read what was changed or is not there, and torch alone does not read it."""
    whole: list[str] = dataclasses.field(default_factory=list)
    """Reasons of layers that moved whole at alpha 0."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Run:
    results: dict[str, Any] = dataclasses.field(default_factory=dict)
    raised: BaseException | None = None
    """Ends the run."""
    where: str = ""

    @property
    def kind(self) -> str | None:
        """The error, where torch's own check of saved tensors is memo's."""
        error = self.raised
        told = ("modified by an inplace operation", "has been modified inplace")  # of a saved tensor; of a view
        if isinstance(error, ModifiedAfterSave) or any(text in str(error) for text in told):
            return "ModifiedAfterSave"
        return None if error is None else type(error).__name__


_REPEATS = 1 if DEVICE == "cpu" else 12
"""Runs without memo that a find has to repeat: a program's own streams may race, in some of its runs."""
_Manage = Callable[[nn.Module], Managed]


def compare(
    program: Program,
    levels: Sequence[str],
    *,
    place: Callable[[nn.Module], nn.Module] | None = None,
    rank: int = 0,
    any_rank: Callable[[bool], bool] = bool,
) -> Outcome:
    """The program's steps without memo and at each level.

    Args:
        program: the program.
        levels: names of levels.
        place: lays a model over the ranks of a job; None: this process is alone.
        rank: of this process.
        any_rank: whether any rank says yes, each being asked.
    """
    found = Outcome()
    wanted: dict[tuple[int, bool], _Run] = {}

    def train(rounds: int, manage: _Manage | None = None, *, replaces: bool = False) -> _Run:
        with on_device():
            return _train(program, manage, rounds, place, rank, replaces)

    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as scratch:
        warnings.simplefilter("ignore")
        for name in _promised(program, levels):
            like = LEVELS[name].rounds, LEVELS[name].replaces
            if like not in wanted:
                wanted[like] = train(like[0], replaces=like[1])
                reason = _unfit(wanted[like], alone=place is None)
                if any_rank(reason is not None):
                    found.discarded = reason or "another rank raises"
                    return found
            _compare_at(program, name, wanted[like], train, found, scratch)
        if any_rank(any(find.kind != "races" for find in found.finds)):
            for _ in range(_REPEATS):
                again = {like: train(like[0], replaces=like[1]) for like in wanted}
                if any_rank(any(_unlike(again[like], wanted[like]) for like in wanted)):
                    return Outcome(discarded="does not repeat itself")
    return found


def _unfit(run: _Run, *, alone: bool) -> str | None:
    if run.kind and not alone:  # another rank may wait for this one
        return f"{run.kind} on ranks"
    if run.kind not in (None, "ModifiedAfterSave") and not any("gradient of" in name for name in run.results):
        return f"{run.kind}: {str(run.raised).splitlines()[0][:80] if str(run.raised) else ''}"
    losses = [value for name, value in run.results.items() if "loss" in name]
    return None if all(torch.isfinite(loss).all() for loss in losses) else "the loss is not finite"


def _compare_at(
    program: Program, name: str, want: _Run, train: Callable[[int, _Manage], _Run], found: Outcome, scratch: str
) -> None:
    way = LEVELS[name]
    managed: list[Managed] = []

    def manage(model: nn.Module) -> Managed:
        managed.append(way.make(model, program.seed, scratch))
        return managed[0]

    got = train(way.rounds, manage)
    try:
        if managed:
            managed[0].manager.close()
    except Exception as error:
        got = _Run(results=got.results, raised=error, where=_trace(3))
    found.compared[name] = got.raised is None
    if managed:
        found.moved_bytes[name], found.recomputed_bytes[name] = managed[0].counts
        if name == "0":
            found.whole += getattr(managed[0].manager.report().recompute, "refused", {}).values()
    if way.may_be_full and isinstance(got.raised, HostBudgetExceeded | Infeasible | ScratchFull):
        return
    refused = _is_refused(program, name, got.raised)
    if refused and (got.kind != want.kind or len(got.results) < len(want.results)):
        found.refused[name] = 1
        want = _Run(results={key: want.results.get(key) for key in got.results}, raised=got.raised)
    if got.kind != want.kind:
        if got.raised is None:
            found.finds.append(Find(level=name, kind="does not raise", told=f"{want.kind}: {want.raised}"))
        else:
            told = f"{got.raised}\n{got.where}" if want.raised is None else f"{got.raised}; torch: {want.raised}"
            found.finds.append(Find(level=name, kind=str(got.kind), told=told))
    elif unlike := _unlike(got, want):
        found.finds.append(Find(level=name, kind=f"differs in {_part(unlike[0])}", told=", ".join(unlike[:6])))
    if managed and (races := managed[0].races()):
        found.finds.append(Find(level=name, kind="races", told="\n".join(races[:2])))


def _is_uncounted(program: Program) -> bool:
    return any(name.startswith("uncounted") for name in program.statements)


def _promised(program: Program, levels: Sequence[str]) -> Sequence[str]:
    """The levels at which something is promised of the program: writes that nothing counts are seen with `verify` alone."""
    return VERIFIED if _is_uncounted(program) else levels


def _is_refused(program: Program, level: str, error: BaseException | None) -> bool:
    """Whether a replay says that it cannot read something: docs/recompute.md, "What is seen, and what is not"."""
    said = str(error)
    if _is_uncounted(program) and level in VERIFIED and isinstance(error, ModifiedAfterSave):
        return True
    # FSDP gathers no parameters for a loss that uses only what a layer has kept aside.
    is_not_gathered = "whose memory is not there" in said and "kept aside" in program.statements
    is_replaced = "was replaced between forward and backward" in said and "late, other weights" in program.statements
    return is_not_gathered or is_replaced or "is recomputed from a tensor that was changed" in said


def _train(
    program: Program,
    manage: _Manage | None,
    rounds: int,
    place: Callable[[nn.Module], nn.Module] | None,
    rank: int,
    replaces: bool,
) -> _Run:
    """Runs the steps `rounds` times, with a step of gradient descent after each.

    Without memo, `replaces` has checkpoints around layers be plain calls, as they are in the manager of the run compared.
    """
    run = _Run()
    Replaced.always = replaces and program.attached
    try:
        model, steps = program.made()
        inner, model = model, model if place is None else place(model)
        managed = None if manage is None else manage(inner)
        managing: Callable[[], Any] = Replaced if replaces and not program.attached else contextlib.nullcontext
        if managed is not None and program.attached and isinstance(managed.manager, Manager):
            managed.manager.attach()
        elif managed is not None:
            managing = lambda: managed.manager  # noqa: E731
        for number in range(rounds * len(steps)):
            if managed is not None:
                managed.before_step(number)
            at = f"step {number}"
            step, drawn = steps[number % len(steps)], program.steps[number % len(steps)]
            draws = torch.Generator().manual_seed(number + 1000 * rank)
            given = torch.randn(BATCH, drawn.tokens, HIDDEN, generator=draws, device="cpu")
            given = given.to(DEVICE, program.dtype).requires_grad_()
            _seed(number)

            def note(name: str, tensor: torch.Tensor, at: str = at) -> None:
                told = f"{name}, {at}"
                while told in run.results:
                    told += ", again"
                run.results[told] = local_part(tensor.detach()).clone()

            step(model, given, managing, note)
            if DEVICE != "cpu":
                torch.cuda.synchronize()  # gradients of several streams are read on one
                run.results[f"the device's random numbers, {at}"] = torch.cuda.get_rng_state()
            run.results[f"gradient of the input, {at}"] = given.grad
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    run.results[f"gradient of {name}, {at}"] = (
                        None if parameter.grad is None else local_part(parameter.grad)
                    )
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad, alpha=-0.01)
                    parameter.grad = None
            run.results[f"random numbers, {at}"] = torch.get_rng_state()
            run.results[f"Python's and NumPy's, {at}"] = _states()
    except Exception as error:
        run.where, run.raised = _trace(4), error.with_traceback(None)
        return run
    run.results.update({name: local_part(buffer) for name, buffer in model.named_buffers()})
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if (attribute.startswith("m") and isinstance(value, list | dict)) or attribute == "calls":
                run.results[f"{name}.{attribute}"] = value
    return run


def _trace(frames: int) -> str:
    """The innermost frames of the error that is handled, with files named from the root of the tree."""
    return traceback.format_exc(limit=-frames).replace(f"{ROOT}/", "")


def _part(name: str) -> str:
    """What of a program's results one of them belongs to."""
    head = name.partition(", ")[0]
    return next((part for part in ("gradient", "loss", "random numbers") if part in head), "buffers")


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def _states() -> Any:
    """Of Python's random numbers and of NumPy's."""
    kind, key, *rest = numpy.random.get_state(legacy=True)
    return random.getstate(), kind, bytes(key), rest


def _unlike(got: _Run, want: _Run) -> list[str]:
    names = {**want.results, **got.results}
    return [name for name in names if not _same(got.results.get(name), want.results.get(name))]


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return False
        return torch.equal(ours, theirs) or torch.equal(_bits(ours), _bits(theirs))
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return not isinstance(ours, torch.Tensor) and not isinstance(theirs, torch.Tensor) and bool(ours == theirs)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: a NaN is equal to the same NaN."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor
