"""Recorder of a step's allocations: the storages that appear in operators' results, and their lifetimes.

`AllocationRecorder` is a dispatch mode over real or byteless CPU tensors. An allocation ends with its storage's finalizer,
so lifetimes are those of the actual reference counts. Storages that existed before the step (parameters, inputs) are not
allocations; workspaces inside a kernel are not seen.

    operator ──▶ results ──▶ new storage: event "allocated" ... last reference dropped: event "freed"

The caller sets `site`, the place in the program that allocations are attributed to.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from memo.allocator.caching_model import round_size
from memo.allocator.local_mode import LocalTensorMode
from memo.allocator.trace import Allocation, AllocationTrace
from memo.nested import leaves_of
from memo.torch_private import OpOverload


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllocationSite:
    """Place in a training step."""

    phase: str = ""
    """Such as `forward`."""
    module: str = ""
    """Name of the innermost module whose code runs."""
    group: str = ""
    """Pass of a layer, such as `layers.3.forward`, with a name unique to the pass; empty between layers."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Lifetime:
    """One allocation, from its event `lower` to its event `upper`; mutable while the step runs."""

    lower: int
    upper: int | None = None
    nbytes: int
    operator: OpOverload
    result: int
    """Index among the operator's results."""
    site: AllocationSite
    freed_in: str | None = None
    """Group of the site at which it was freed."""
    is_older: bool = False
    """True if it was allocated before the step, and by one like it."""


class AllocationRecorder(LocalTensorMode):
    """Dispatch mode that records a step. Parameters and inputs of the step must exist before it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.site = AllocationSite()
        self.lifetimes: list[Lifetime] = []
        self._clock = 0
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, Lifetime | None] = weakref.WeakKeyDictionary()
        self._watched: set[_Watch] = set()

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Declares that tensors existed before the step."""
        for tensor in tensors:
            self._known[tensor.untyped_storage()] = None

    def begin_step(self) -> None:
        """Starts again at event 0, with what is alive; what stays alive to the end is then no allocation of the step."""
        self.lifetimes = [life for life in self.lifetimes if life.upper is None]
        for number, life in enumerate(self.lifetimes):
            life.lower, life.is_older = number, True
        self._clock = len(self.lifetimes)

    def standing(self) -> list[torch.UntypedStorage]:
        """Storages that are alive since before `begin_step`."""
        return [storage for storage, life in self._known.items() if life is not None and life.is_older]

    def lifetime_of(self, tensor: torch.Tensor) -> Lifetime | None:
        """Returns the allocation of a tensor's storage; None for one that existed before the step."""
        return self._known.get(tensor.untyped_storage())

    def emptied(self, storage: torch.UntypedStorage) -> None:
        """Declares that a storage has given up its memory and lives on, as by `resize_(0)`."""
        life = self._known.get(storage)
        if life is not None and life.upper is None:
            self._end(life)

    def refilled(self, storage: torch.UntypedStorage) -> None:
        """Declares that an emptied storage has memory again."""
        former = self._known.get(storage)
        if former is None or former.upper is None:
            return
        again = dataclasses.replace(
            former, lower=self._clock, upper=None, site=self.site, freed_in=None, is_older=False
        )
        self._begin(storage, again)

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator and records the new storages of its results."""
        out = func(*args, **kwargs)
        results = out if isinstance(out, (tuple, list)) else (out,)
        for index, result in enumerate(results):
            if isinstance(result, torch.Tensor) and result.untyped_storage() not in self._known:
                self._record(func, index, result, (args, kwargs))
        return out

    def trace(self, *, exact: bool = False) -> AllocationTrace:
        """Returns the recorded allocations.

        Args:
            exact: Keep requested sizes; by default they are rounded as by PyTorch's CUDA allocator.
        """
        size = int if exact else round_size
        allocations = tuple(
            Allocation(
                id=str(number),
                lower=life.lower,
                upper=self._clock if life.upper is None else life.upper,
                size=size(life.nbytes),
                tag=f"{life.site.module} {life.operator.overloadpacket.__name__}".strip(),
                phase=life.site.phase,
                group=life.site.group if life.site.group == life.freed_in else "",
            )
            for number, life in enumerate(self.lifetimes)
            if not (life.is_older and life.upper is None)
        )
        return AllocationTrace(allocations=allocations)

    def _record(self, func: OpOverload, index: int, tensor: torch.Tensor, arguments: Any) -> None:
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes == 0 or tensor.device.type == "meta":
            return
        if any(isinstance(one, torch.Tensor) and storage is one.untyped_storage() for one in leaves_of(arguments)):
            self._known[storage] = None  # existed before the step
            return
        self._begin(storage, Lifetime(lower=self._clock, nbytes=nbytes, operator=func, result=index, site=self.site))

    def _begin(self, storage: torch.UntypedStorage, life: Lifetime) -> None:
        self._clock += 1
        self.lifetimes.append(life)
        self._known[storage] = life
        self._watched.add(_Watch(storage, self._freed, life))

    def _freed(self, watch: _Watch) -> None:
        self._watched.discard(watch)
        if watch.life.upper is None:
            self._end(watch.life)

    def _end(self, life: Lifetime) -> None:
        life.upper, life.freed_in = self._clock, self.site.group
        self._clock += 1


class _Watch(weakref.ref[torch.UntypedStorage]):
    """Weak reference to a storage, with the lifetime that ends with it."""

    __slots__ = ("life",)

    def __new__(cls, storage: torch.UntypedStorage, callback: Any, life: Lifetime) -> _Watch:
        return super().__new__(cls, storage, callback)

    def __init__(self, storage: torch.UntypedStorage, callback: Any, life: Lifetime) -> None:
        super().__init__(storage, callback)  # type: ignore[call-arg]
        self.life = life

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other
