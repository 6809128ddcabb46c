"""Records what the operators of a step allocate: the storages that appear in their results, from then until they die.

`Recorder` is a dispatch mode that sees every operator's results. It works over real CPU tensors, under FakeTensorMode and
over hollow tensors alike. An allocation's death is its storage's finalizer, so lives are those of the reference counts and
not of any model of them. What existed before (parameters, inputs) is no allocation; workspaces inside a kernel are not seen.

    operator ──▶ results ──▶ a new storage: event "made" ... the storage's last reference goes: event "freed"

Where in the program an allocation was made is for the caller to say, through `where`.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memo.allocator.caching_model import round_size
from memo.allocator.trace import Allocation, AllocationTrace

__all__ = ["Life", "Recorder", "Where", "asked_for_shapes", "runs_itself"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A place in a training step."""

    phase: str = ""
    """Such as `forward`."""
    module: str = ""
    """The innermost module whose code runs, by name."""
    group: str = ""
    """The layer's pass, such as `layers.3.forward`, each pass by a name of its own; empty between layers."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Life:
    """One allocation, while the step runs."""

    lower: int
    upper: int | None = None
    nbytes: int
    operator: torch._ops.OpOverload
    result: int
    """Which of the operator's results it came in: 0 is the first."""
    where: Where
    died_in: str | None = None
    """The group in which it was freed."""


def asked_for_shapes() -> bool:
    """Whether operators run on fakes now, as a DTensor lets them to learn what it will give: nothing is allocated."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def runs_itself(types: Iterable[type]) -> bool:
    """Whether a tensor among the arguments has code of its own for operators, as a DTensor has."""
    return any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types)  # type: ignore[attr-defined]


class Recorder(TorchDispatchMode):
    """Enter it around a step; everything the step starts with should exist before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where = Where()
        self.lives: list[Life] = []
        self._clock = 0
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, Life | None] = weakref.WeakKeyDictionary()
        self._watched: set[_Watch] = set()

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Names tensors that exist before the step."""
        for tensor in tensors:
            self._known[tensor.untyped_storage()] = None

    def life_of(self, tensor: torch.Tensor) -> Life | None:
        """The allocation that `tensor` lies in; None for one that existed before."""
        return self._known.get(tensor.untyped_storage())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return (
            False  # torch.compile need not be kept out of this mode at every operator: that takes as long as the mode
        )

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if runs_itself(types) and not asked_for_shapes():
            return NotImplemented  # a DTensor's own code first: it comes back with the tensors that this rank holds
        out = func(*args, **(kwargs or {}))
        if asked_for_shapes():
            return out
        results = out if isinstance(out, (tuple, list)) else (out,)
        for place, result in enumerate(results):
            if isinstance(result, torch.Tensor) and result.untyped_storage() not in self._known:
                self._see(func, place, result, (args, kwargs))
        return out

    def trace(self, *, exact: bool = False) -> AllocationTrace:
        """What was recorded, in CUDA's sizes, or in those that were asked for (`exact`)."""
        size = int if exact else round_size
        allocations = tuple(
            Allocation(
                id=str(number),
                lower=life.lower,
                upper=self._clock if life.upper is None else life.upper,
                size=size(life.nbytes),
                tag=f"{life.where.module} {life.operator.overloadpacket.__name__}".strip(),
                phase=life.where.phase,
                group=life.where.group if life.where.group == life.died_in else "",
            )
            for number, life in enumerate(self.lives)
        )
        return AllocationTrace(allocations=allocations)

    def _see(self, func: torch._ops.OpOverload, place: int, tensor: torch.Tensor, given: Any) -> None:
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes == 0 or tensor.device.type == "meta":
            return
        if any(storage is other.untyped_storage() for other in _tensors_in(given)):
            self._known[storage] = None  # existed before the step: nobody made it here
            return
        life = Life(
            lower=self._clock,
            nbytes=nbytes,
            operator=func,
            result=place,
            where=self.where,
        )
        self._clock += 1
        self.lives.append(life)
        self._known[storage] = life
        self._watched.add(_Watch(storage, self._freed, life))

    def _freed(self, watch: _Watch) -> None:
        self._watched.discard(watch)
        life = watch.life
        life.upper, life.died_in = self._clock, self.where.group
        self._clock += 1


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(tuple(value.values()))


class _Watch(weakref.ref[torch.UntypedStorage]):
    """A weak reference that knows whose death it tells of."""

    __slots__ = ("life",)

    def __new__(cls, storage: torch.UntypedStorage, callback: Any, life: Life) -> _Watch:
        return super().__new__(cls, storage, callback)

    def __init__(self, storage: torch.UntypedStorage, callback: Any, life: Life) -> None:
        super().__init__(storage, callback)  # type: ignore[call-arg]
        self.life = life

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other
