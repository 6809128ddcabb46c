"""One training step with an exception raised at a chosen executed line of memo's own files, and what must hold after it.

A place is the k-th line event of memo's files in the step: its forward, its backward, and the finalizers that run in it.
Not counted is the way out of a `with` block: Python looks for signals at calls, jumps back and the begin of functions, so
that no signal's exception ever comes between the last call of a block and its `__exit__`.
"""

from __future__ import annotations

import collections
import dataclasses
import dis
import functools
import gc
import itertools
import pathlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer
from torch.utils import _python_dispatch

import memo
from memo.manager import claims

HIDDEN, LAYERS, ROWS = 32, 3, 8
_OWN = str(pathlib.Path(memo.__file__).parent)  # the root folders lie below it, or are linked there
_REPLAY = "<replay>"


class Alarm(Exception):
    """What the handler of an alarm raises: an ordinary exception that is none of memo's."""


KINDS: dict[str, type[BaseException]] = {"KeyboardInterrupt": KeyboardInterrupt, "Alarm": Alarm}


class Find(AssertionError):
    """Something that an interruption must not leave behind, or change."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How the step is managed."""

    name: str
    arguments: dict[str, Any]
    attached: bool
    before: int
    """Steps before the interrupted one."""


def _cases() -> Iterator[Case]:
    tiers = {"host": 1 << 20, "min_bytes": 1}
    managed: dict[str, dict[str, Any]] = {
        "alpha 1": {"alpha": 1.0, **tiers},
        "alpha 1, disk": {"alpha": 1.0, "disk": "{disk}", "min_bytes": 1},
        "alpha 0": {"alpha": 0.0, **tiers},
        "automatic": dict(tiers),
    }
    for name, arguments in managed.items():
        for before in (0, 2, 3) if name == "automatic" else (0, 2):
            yield Case(name=f"{name}, step {before}", arguments=arguments, attached=False, before=before)
    for name in ("alpha 1", "alpha 0", "automatic"):
        yield Case(name=f"{name}, attached", arguments=managed[name], attached=True, before=1)


CASES = {case.name: case for case in _cases()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An executed line of memo's files in the interrupted step of a case."""

    case: str
    kind: str
    number: int


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(self.up(self.norm(x)))
        return x + nn.functional.dropout(self.down(inner), 0.1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@functools.cache
def _input() -> torch.Tensor:
    return torch.randn(2, ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))


def _step(model: Model, manager: memo.Manager | None = None) -> None:
    """One step; `manager` is entered around its forward."""
    model.zero_grad()
    torch.manual_seed(2)
    if manager is None:
        loss = model(_input()).sum()
    else:
        with manager:
            loss = model(_input()).sum()
    loss.backward()


@functools.cache
def _reference() -> list[torch.Tensor]:
    model = _model()
    with memo.offload(
        model, alpha=0.0, min_bytes=1
    ) as manager:  # leaves one hook of optimizers, which is the process's
        model(_input())
    manager.close()
    _step(model)
    return _gradients(model)


def _model() -> Model:
    torch.manual_seed(0)
    return Model()


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@functools.cache
def _ways_out(code: CodeType) -> frozenset[int]:
    """Offsets at which the way out of a `with` block begins."""
    found, steps = set(), [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "PRECALL")]
    for first, *rest in zip(steps, steps[1:], steps[2:], steps[3:], strict=False):
        is_none = [each.opname == "LOAD_CONST" and each.argval is None for each in (first, *rest)]
        if is_none == [True, True, True, False] and rest[-1].opname == "CALL" and rest[-1].arg == 2:
            found.add(first.offset)
    for swap, following in itertools.pairwise(steps):
        if following.offset in found and swap.opname == "SWAP":
            found.add(swap.offset)
    return frozenset(found)


def _lines(frame: FrameType | None) -> Iterator[str]:
    """This line and those of memo's that have led to it."""
    while frame is not None:
        code = frame.f_code
        if _is_own(code):
            yield f"{code.co_filename.removeprefix(_OWN)}:{frame.f_lineno} {code.co_qualname}"
        frame = frame.f_back


def _is_own(code: CodeType) -> bool:
    return code.co_filename.startswith(_OWN) or code.co_filename == _REPLAY


class _Interrupter:
    """Notes executed lines of memo's files while it traces; raises at one of them."""

    def __init__(self, at: int | None, kind: type[BaseException]) -> None:
        self.lines: list[tuple[CodeType, int]] = []
        self.where: str | None = None
        self._at = at
        self._kind = kind

    def __enter__(self) -> _Interrupter:
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if _is_own(frame.f_code) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and frame.f_lasti not in _ways_out(frame.f_code):
            self.lines.append((frame.f_code, frame.f_lineno))
            if len(self.lines) - 1 == self._at:
                self.where = " < ".join(_lines(frame))
                raise self._kind("at a place")
        return self._line


def draw_places(count: int, seed: int, names: Sequence[str], disk: str) -> tuple[list[Place], int]:
    """Draws places of these cases, each line of the code once before any is drawn twice; with them how many there are."""
    draw, turns = random.Random(seed), collections.Counter[tuple[str, object]]()
    ordered = list[tuple[int, float, Place]]()
    for name in names:
        lines = _interrupted(CASES[name], None, KeyboardInterrupt, disk).lines
        for number in draw.sample(range(len(lines)), len(lines)):
            for kind in draw.sample(list(KINDS), len(KINDS)):
                turns[name, lines[number]] += 1
                place = Place(case=name, kind=kind, number=number)
                ordered.append((turns[name, lines[number]], draw.random(), place))
    return [place for *_, place in sorted(ordered, key=lambda each: each[:2])][:count], len(ordered)


def interrupt(place: Place, disk: str) -> str | None:
    """Interrupts a step at a place, and returns the line that it is; None where the step has fewer places.

    Raises:
        Find: a gradient differs, or something is left.
    """
    tracing = _interrupted(CASES[place.case], place.number, KINDS[place.kind], disk)
    return tracing.where


def _interrupted(case: Case, at: int | None, kind: type[BaseException], disk: str) -> _Interrupter:
    _reference()
    model, before = _model(), _State.now()
    arguments = {name: disk if value == "{disk}" else value for name, value in case.arguments.items()}
    manager = memo.offload(model, **arguments)
    entered = None if case.attached else manager
    if case.attached:
        manager.attach()
    for _ in range(case.before):
        _step(model, entered)
    hooked = _hooks(model)
    tracing, raised = _Interrupter(at, kind), list[type[BaseException]]()
    unraisable = sys.unraisablehook
    sys.unraisablehook = lambda args: raised.append(kind) if args.exc_type is kind else unraisable(args)
    try:
        with tracing:
            _step(model, entered)
    except BaseException as error:
        raised.append(type(error))
    finally:
        sys.unraisablehook = unraisable
    try:
        _require(raised == [kind] * (tracing.where is not None), f"it was raised as {raised}")
        _check(model, manager, entered, before, hooked, is_entered=_is_before_exit(tracing.where))
    except Exception as error:
        raise Find(f"{tracing.where}, {kind.__name__}, {case.name}: {_told(error)}") from error
    finally:
        _tidy(manager, before)
    return tracing


def _check(
    model: Model,
    manager: memo.Manager,
    entered: memo.Manager | None,
    before: _State,
    hooked: dict[str, int],
    *,
    is_entered: bool,
) -> None:
    """What must hold after the interruption; with `is_entered` the manager still is."""
    if not is_entered:
        left = _State.now().within_forward
        _require(left == before.within_forward, f"left after the step: {left}")
        _require(_hooks(model) == hooked, f"hooks after the step: {_hooks(model)}, not {hooked}")
    _step(model, entered)
    _require(_same(model), "gradients of the next step differ")
    engine = manager._engine
    held = [engine._stats.live_entries, engine._stats.device_bytes, *(tier.used for tier in engine.tiers)]
    held += [tier._space.used if hasattr(tier, "_space") else tier.disk.stats.used_bytes for tier in engine.tiers]
    _require(not any(held), f"held after the next step: {held}")
    _require(not engine._lock._is_owned(), "the engine is locked")
    manager.close()
    _require(not any(_hooks(model).values()), f"hooks after close: {_hooks(model)}")
    after = _State.now()
    _require(after == before, f"left after close: {after}, not {before}")
    _step(model)
    _require(_same(model), "gradients without memo differ")


def _tidy(manager: memo.Manager, before: _State) -> None:
    """Ends what a find has left, so that the next place is judged by itself."""
    while torch._C._len_torch_dispatch_stack() > 0:
        torch._C._pop_torch_dispatch_stack(None)
    while torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    claims._entered.managers.clear()
    manager._depth = 0
    manager.close()
    for number in list(optimizer._global_optimizer_post_hooks)[before.optimizer_hooks :]:
        del optimizer._global_optimizer_post_hooks[number]


def _is_before_exit(where: str | None) -> bool:
    """True for the one line of `Manager.__exit__` that no `try` of its own can hold: before the first one."""
    code = memo.Manager.__exit__.__code__
    first = f"/manager/manager.py:{code.co_firstlineno + 1} {code.co_qualname}"
    return where is not None and where.split(" < ")[0] == first


def _same(model: nn.Module) -> bool:
    found, wanted = _gradients(model), _reference()
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def _require(holds: bool, told: str) -> None:
    if not holds:
        raise Find(told)


def _told(error: BaseException) -> str:
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    at = (
        "" if trace is None or isinstance(error, Find) else f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    )
    return f"{'' if isinstance(error, Find) else type(error).__name__ + ': '}{error}{at}"


def _hooks(model: nn.Module) -> dict[str, int]:
    """Hooks of the modules and parameters, and wrapped calls."""
    modules = list(model.modules())
    return {
        "before": sum(len(module._forward_pre_hooks) for module in modules),
        "before, kwargs": sum(len(module._forward_pre_hooks_with_kwargs) for module in modules),
        "after": sum(len(module._forward_hooks) for module in modules),
        "after, always": sum(len(module._forward_hooks_always_called) for module in modules),
        "calls": sum(module._compiled_call_impl is not None for module in modules),
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What memo may change of the process."""

    within_forward: tuple[int, bool, int]
    """Dispatch modes and saved-tensor hooks on their stacks, and torch's own account of modes."""
    optimizer_hooks: int
    run_backward: Callable[..., Any]
    threads: tuple[str, ...]
    entered: int

    @classmethod
    def now(cls) -> _State:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return cls(
            within_forward=(
                torch._C._len_torch_dispatch_stack(),
                hooks is None,
                _python_dispatch._is_in_torch_dispatch_mode,
            ),
            optimizer_hooks=len(optimizer._global_optimizer_post_hooks),
            run_backward=torch.autograd._engine_run_backward,  # type: ignore[attr-defined]
            threads=tuple(sorted(each.name for each in threading.enumerate() if each.name.startswith("memo"))),
            entered=len(claims._entered.managers),
        )


def collect() -> None:
    """Collects what earlier places have left in cycles."""
    gc.collect()
