"""Plan of a replay: what of a tape is kept, which steps run again, and the Python that runs them.

A plan holds no tensor and fits every call with the same log. Its replay is one generated function: a line for each step, a
view where a step reads one, a `del` after a content's last use.

    def replay(kept, carried, give, device):
        k0 = kept(0)                                    # the layer's input, back from its tier
        k1 = kept(1)                                    # a weight
        c5 = f0(view(k0, ...), view(k1, ...))           # aten.mm
        give(0, c5)                                     # autograd saved it

A plan may be divided into several (parts.py).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from memo.kernels import unpack_mask
from memo.swap.recompute.tape import cut as cuts
from memo.swap.recompute.tape.log import Function, Holds
from memo.swap.recompute.tape.operators import NON_BLOCKING
from memo.swap.recompute.tape.tape import Carried, ContentUse, uses_in
from memo.torch_private import OpOverload

if TYPE_CHECKING:
    from memo.swap.recompute.tape.cut import Cut, CutProblem
    from memo.swap.recompute.tape.tape import Tape, TapeStep

_MASKS = frozenset({"bernoulli_", "bernoulli", "native_dropout"})
"""Random operators of zeros and ones."""
MOST_COMPILED = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What can be kept of one call, in bits by storage.

    Args:
        free: storages that stay on the device anyway: arguments, parameters, small ones.
        saved: storages that autograd saved and the engine may move.
        held: other storages that are still there.
        bits: steps of which zeros and ones are held.
        lent: storages that parameters had while the layer ran; never kept.
        everything: any content that is the last of its storage may be kept: for the next call, which will hold it.
    """

    free: frozenset[int]
    saved: frozenset[int]
    held: frozenset[int]
    bits: frozenset[int]
    lent: frozenset[int] = frozenset()
    everything: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """One thing that a plan keeps."""

    storage: int
    bits_of: int = -1
    """Number of the step whose zeros and ones are kept, one bit each, instead of the storage."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What is kept and replayed of the calls with one log."""

    tape: Tape
    kept: tuple[Kept, ...]
    wanted: tuple[int, ...]
    """Storages that the replay gives, in order."""
    steps: tuple[int, ...]
    """Numbers of the steps that run again."""
    replay: Callable[..., None]
    code: str
    kept_bits: int
    cost: int
    """Derived, in picoseconds."""
    held_bytes: int
    """Most bytes that the replay has made and holds at once, what it has given by then included, above all that it gives."""
    trial_bytes: int
    """Most bytes that it has made and still reads at once, what it has given included: what a trial of it takes."""
    line_steps: Mapping[int, int]
    """Line of the code -> number of the step that it runs."""
    cut: Cut
    sources: Sources
    candidates: tuple[int, ...]
    """Storages that the replay could have given."""
    wrong: frozenset[int] = frozenset()
    """Steps that a trial found to give something else, and that are not repeated."""
    parts: dict[frozenset[int], tuple[Plan, ...]] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """The parts that parts.py has made, by the steps that run together."""

    @property
    def given_nbytes(self) -> int:
        """Bytes of the storages that it gives."""
        return sum(self.tape.storages[storage][1] for storage in self.wanted)

    @property
    def holds(self) -> Holds:
        """What the recorder of the next call must hold for this plan."""
        found: dict[int, tuple[Any, tuple[int, ...], bool]] = {}
        for kept in self.kept:
            maker = kept.bits_of if kept.bits_of >= 0 else self.tape.storages[kept.storage][2]
            if maker < 0 or (kept.bits_of < 0 and kept.storage in self.tape.saved_storages):
                continue
            step = self.tape.steps[maker]
            results = [self.tape.geometry(use.value)[0] for use in uses_in(step.out)]
            others = found[maker][1] if maker in found else ()
            found[maker] = (step.operator, (*others, results.index(kept.storage)), kept.bits_of >= 0)
        return found


def problem_of(
    tape: Tape,
    bans: Collection[int],
    sources: Sources,
    wanted: Iterable[int],
    stuck: Iterable[int],
    costs: Sequence[int],
    always: Iterable[int] = (),
) -> CutProblem:
    """The cut of a tape.

    Args:
        tape: of the call.
        bans: numbers of steps that are never repeated.
        sources: what can be kept.
        wanted: storages whose last content autograd saved, and which backward may replay.
        stuck: storages that autograd saved and that move in any case.
        costs: of repeating each step, in picoseconds.
        always: numbers of steps that are replayed, needed or not.

    Raises:
        ValueError: by `cheapest`: a step of `always` cannot run again.
    """
    stay = {tape.last[storage] for storage in stuck}
    contents = [
        cuts.CutNode(
            keep=keep_bits(tape, number, sources),
            made_by=None if content.writer < 0 or number in stay else content.writer,
        )
        for number, content in enumerate(tape.contents)
    ]
    operations = [
        cuts.Operation(cost=None if step.number in bans else costs[step.number], reads=step.reads)
        for step in tape.steps
    ]
    asked = [tape.last[storage] for storage in wanted] + sorted(stay)
    for step in _with_waits(tape, always):  # something that only this step can make
        asked.append(len(contents))
        contents.append(cuts.CutNode(keep=None, made_by=step))
    return cuts.CutProblem(contents=contents, operations=operations, wanted=asked)


def _with_waits(tape: Tape, steps: Iterable[int]) -> list[int]:
    """These steps, and those that wait for what they give."""
    found = list(steps)
    made = {content for number in found for content in tape.steps[number].makes}
    waits = (step for step in tape.steps if getattr(step.operator, "awaits", False)) if made else ()
    return found + [step.number for step in waits if not made.isdisjoint(step.reads)]


def keep_bits(tape: Tape, number: int, sources: Sources) -> int | None:
    """Bits that keeping a content costs; None where it cannot be kept."""
    content = tape.contents[number]
    storage = content.storage
    if storage in sources.lent:
        return None
    is_last = number == tape.last[storage]
    if storage in sources.free:
        return 0 if is_last and storage not in tape.opaque else None
    if _is_mask(tape, number, sources):
        mask = mask_of(tape, number)
        assert mask is not None
        return -(-tape.geometry(mask.value)[2].numel() // 8) * 8
    if not is_last or (storage in tape.opaque and storage not in sources.saved):
        return None
    there = sources.everything or storage in sources.saved or storage in sources.held
    return 8 * tape.storages[storage][1] if there else None


def _is_mask(tape: Tape, number: int, sources: Sources) -> bool:
    """True for zeros and ones that are kept as bits."""
    writer = tape.contents[number].writer
    return (sources.everything or writer in sources.bits) and mask_of(tape, number) is not None


def mask_of(tape: Tape, number: int) -> ContentUse | None:
    """The value of zeros and ones that is this content; None for any other content."""
    content = tape.contents[number]
    if content.writer < 0:
        return None
    step = tape.steps[content.writer]
    if isinstance(step.operator, Function) or not step.operator.is_overload:
        return None
    uses = uses_in(step.out)
    if step.operator.func.overloadpacket.__name__ not in _MASKS or len(uses) != 1 or uses[0].content != number:
        return None
    _, _, size, stride, dtype = tape.geometry(uses[0].value)
    covers = size.numel() * dtype.itemsize == tape.storages[content.storage][1] and 0 not in stride
    return uses[0] if covers else None


def plan_of(tape: Tape, cut: Cut, sources: Sources, wanted: Iterable[int]) -> Plan:
    """The plan of a cut."""
    return _Writer(tape, cut, sources, wanted).plan()


def plan_on(tape: Tape, plan: Plan) -> Plan | None:
    """A plan's cut of another tape of the same form; None where something that it keeps cannot be kept there."""
    bits = [keep_bits(tape, content, plan.sources) for content in plan.cut.kept]
    if None in bits:
        return None
    cut = dataclasses.replace(plan.cut, keep_cost=sum(filter(None, bits)))
    other = plan_of(tape, cut, plan.sources, plan.candidates)
    if (other.kept, other.wanted, other.steps) != (plan.kept, plan.wanted, plan.steps):
        return None
    return dataclasses.replace(other, wrong=plan.wrong)


class _Writer:
    """Writes the replay of a cut. What it gives is not held besides: whoever takes it has it as it is."""

    def __init__(self, tape: Tape, cut: Cut, sources: Sources, wanted: Iterable[int]) -> None:
        self._tape = tape
        self._cut = cut
        self._sources = sources
        self._candidates = tuple(wanted)
        self._wanted = [
            storage
            for storage in self._candidates
            if tape.last[storage] not in cut.kept or _is_mask(tape, tape.last[storage], sources)
        ]
        self._finals = {tape.last[storage]: at for at, storage in enumerate(self._wanted)}
        self._steps = [step for step in tape.steps if step.number in cut.replayed]
        self._lines: list[str] = []
        self._names: dict[int, str] = {}  # content -> its variable
        self._shown: dict[str, Any] = {}  # variable -> geometry of its tensor
        self.env: dict[str, Any] = {"view": _view, "fresh": _fresh, "mask": _mask, "blank": _blank}
        self._objects: dict[int, str] = {}
        self._kept: list[Kept] = []
        self._held: dict[str, int] = {}  # variable -> bytes that stand beside what is given and kept
        self._given = 0  # bytes that are handed over as they are
        self._lent: dict[str, int] = {}  # variable -> bytes that are handed over and are still read
        self._peak = self._trial_peak = 0

    def plan(self) -> Plan:
        """Writes the replay."""
        tape = self._tape
        last_use: dict[int, int] = {}
        for step in self._steps:
            for content in step.reads:
                last_use[content] = step.number
        line_steps: dict[int, int] = {}
        for step in self._steps:
            first = len(self._lines) + 2
            made = self._step(step)
            line_steps.update(dict.fromkeys(range(first, len(self._lines) + 2), step.number))
            self._note_peak()
            for content, name in made.items():
                if content in self._finals:
                    self._give(self._finals.pop(content), name)
                    self._lent[name] = self._held.pop(name, 0)
                    self._given += self._lent[name]
            for content in sorted({*step.reads, *made}):
                if content in self._names and last_use.get(content, -1) <= step.number:
                    name = self._names.pop(content)
                    self._held.pop(name, None)
                    self._lent.pop(name, None)
                    self._line(f"del {name}")
        for content in list(self._finals):  # zeros and ones that no step reads
            self._line(f"del {self._variable(content)}")
        self._note_peak()
        body = "".join(f"    {line}\n" for line in self._lines) or "    pass\n"
        code = f"def replay(kept, carried, give, device):\n{body}"
        exec(_compiled(code), self.env)
        return Plan(
            tape=tape,
            kept=tuple(self._kept),
            wanted=tuple(self._wanted),
            steps=tuple(step.number for step in self._steps),
            replay=self.env["replay"],
            code=code,
            kept_bits=self._cut.keep_cost,
            cost=self._cut.replay_cost,
            held_bytes=self._peak - self._given,
            trial_bytes=self._trial_peak,
            line_steps=line_steps,
            cut=self._cut,
            sources=self._sources,
            candidates=self._candidates,
        )

    def _note_peak(self) -> None:
        held = sum(self._held.values())
        self._peak = max(self._peak, self._given + held)
        self._trial_peak = max(self._trial_peak, held + sum(self._lent.values()))

    def _nbytes(self, content: int) -> int:
        """Bytes of a content's storage."""
        return self._tape.storage(content)[1]

    def _give(self, at: int, name: str) -> None:
        """Hands over a wanted storage."""
        self._line(f"give({at}, {name})")

    def _line(self, line: str) -> None:
        self._lines.append(line)

    def _step(self, step: TapeStep) -> dict[int, str]:
        """Writes a step; returns the contents that it makes, with their variables."""
        tape = self._tape
        changes = {
            tape.contents[content].storage: content for content in step.makes if tape.contents[content].version > 0
        }
        made: dict[int, str] = {}
        for storage, content in changes.items():
            before = next(at for at in range(content - 1, -1, -1) if tape.contents[at].storage == storage)
            if before in step.reads:
                made[content] = self._variable(before)
                del self._names[before]
            else:  # all of it is overwritten
                nbytes = self._nbytes(content)
                made[content] = f"c{content}"
                self._line(f"c{content} = fresh({self._object(nbytes)}, {self._device(content)})")
                self._shown[f"c{content}"] = None
                self._held[f"c{content}"] = nbytes
        self._names.update(made)
        operator = step.operator
        function = self._object(_callable_of(operator))
        args = [self._argument(value, step, changes) for value in step.args]
        named = {name: self._argument(value, step, changes) for name, value in step.kwargs.items()}
        if NON_BLOCKING in named:  # what the program waits by for a copy to the host is no step
            named[NON_BLOCKING] = "False"
        if operator.non_blocking_at is not None and operator.non_blocking_at < len(args):
            args[operator.non_blocking_at] = "False"
        args += [f"{name}={value}" for name, value in named.items()]
        results = self._results(step.out, step, made)
        call = f"{function}({', '.join(args)})"
        self._line(call if results == "_" else f"{results} = {call}")
        if results != "_" and re.search(r"\b_\b", results):
            self._line("del _")  # else what nothing reads is held until the next such result
        for content, name in made.items():
            if content in self._cut.kept:  # what is kept is read from its tier
                self._names.pop(content, None)
            else:
                self._names[content] = name
        return {content: name for content, name in made.items() if content not in self._cut.kept}

    def _results(self, out: Any, step: TapeStep, made: dict[int, str]) -> str:
        """The left side of a call: a variable for each storage that it makes."""
        if isinstance(out, list):
            return f"[{', '.join(self._results(item, step, made) for item in out)}]" if out else "_"
        if not isinstance(out, ContentUse) or out.content not in step.makes or out.content in made:
            return "_"
        name = made[out.content] = f"c{out.content}"
        self._shown[name] = self._tape.geometry(out.value)[1:]
        if out.content not in self._cut.kept:
            self._held[name] = self._nbytes(out.content)
        return name

    def _argument(self, value: Any, step: TapeStep, changes: Mapping[int, int]) -> str:
        if isinstance(value, ContentUse):
            content = changes.get(self._tape.geometry(value.value)[0], value.content)
            _, offset, size, stride, dtype = self._tape.geometry(value.value)
            if content not in step.reads and content not in step.makes:  # its shape is read, and no number of it
                lies = ", ".join(self._object(part) for part in (size, stride, dtype))
                return f"blank({lies}, {self._device(content)})"
            name = self._variable(content)
            shown = self._shown[name]
            if shown == (offset, size, stride, dtype):
                return name
            is_made = shown is not None and name.startswith("c")
            if is_made and shown[3] is dtype and not isinstance(step.operator, Function):
                return f"{name}.as_strided({self._object(size)}, {self._object(stride)}, {offset})"  # in half the time
            lies = ", ".join(self._object(part) for part in (size, stride, dtype))
            return f"view({name}, {offset}, {lies})"
        if isinstance(value, list) and value and all(type(item) is int for item in value):
            return self._object(value)
        if isinstance(value, list):
            return f"[{', '.join(self._argument(item, step, changes) for item in value)}]"
        if isinstance(value, Carried):
            return f"carried[{value.position}]"
        return repr(value) if value is None or type(value) in (int, bool, str) else self._object(value)

    def _variable(self, content: int) -> str:
        """The variable of a content; what is kept is brought where it is first read."""
        name = self._names.get(content)
        if name is not None:
            return name
        tape = self._tape
        storage, writer = tape.contents[content].storage, tape.contents[content].writer
        assert content in self._cut.kept, f"content {content} is read before it is made"
        name = self._names[content] = f"k{content}"
        use = mask_of(tape, content) if _is_mask(tape, content, self._sources) else None
        at = len(self._kept)
        if use is None:
            self._kept.append(Kept(storage))
            self._line(f"{name} = kept({at})")
            self._shown[name] = None
        else:
            self._kept.append(Kept(storage, writer))
            _, offset, size, stride, dtype = tape.geometry(use.value)
            lies = ", ".join(self._object(part) for part in (size, stride, dtype))
            self._line(f"{name} = mask(kept({at}), {lies}, {self._device(content)})")
            self._shown[name] = (offset, size, stride, dtype)
            if content in self._finals:  # autograd saved it, and it moves as bits alone
                self._give(self._finals.pop(content), name)
                self._given += self._nbytes(content)
            else:
                self._held[name] = self._nbytes(content)
        return name

    def _device(self, content: int) -> str:
        """The device of a content's memory: the engine's, but for what a layer has on the host."""
        elsewhere = _ELSEWHERE.get(self._tape.storage(content)[3])
        return "device" if elsewhere is None else self._object(elsewhere)

    def _object(self, value: Any) -> str:
        name = self._objects.get(id(value))
        if name is None:
            name = self._objects[id(value)] = f"x{len(self._objects)}"
            self.env[name] = value
        return name


_ELSEWHERE = {kind: torch.device(kind) for kind in ("cpu", "meta")}


@functools.lru_cache(maxsize=MOST_COMPILED)
def _compiled(code: str) -> CodeType:
    """Sizes are not in the text, so that calls which differ in them alone share it."""
    return compile(code, "<replay>", "exec")


def _callable_of(operator: Any) -> Any:
    if isinstance(operator, Function):
        return operator.function
    return operator.func._op if type(operator.func) is OpOverload else operator.func  # its call adds a frame


def _view(
    tensor: torch.Tensor, offset: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor of that geometry over the storage of `tensor`."""
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage(), offset, size, stride)


def _fresh(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _blank(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _mask(
    bits: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Zeros and ones of `dtype`, from one bit each."""
    out = torch.empty_strided(size, stride, dtype=dtype, device=device)
    if out.is_contiguous():
        return unpack_mask(bits, out)
    return out.copy_(unpack_mask(bits, torch.empty(size, dtype=dtype, device=device)))
