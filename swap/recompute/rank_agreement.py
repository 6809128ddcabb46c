"""Agreement among the ranks that a layer talks to: a recompute repeats its collectives, so all ranks run it or none.

Owns the groups of each layer's collectives, recorded in its first forward, and the exchanges that decide. Every
exchange happens at a point that all ranks of a group pass: a layer's first call, the first layer of a forward, a
trial. No rank decides by its own memory or measurements alone. Without a process group nothing is exchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from memo.swap.recompute.tape.operators import call, group_of, operator_of
from memo.swap.tensor_kinds import are_wrapped
from memo.torch_private import OpOverload, TorchDispatchMode

_T = TypeVar("_T")
_Told = Mapping[str, tuple[str, str | None]]  # by layer: what this rank was told of it, and what is known against it


def gather_values(value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Gathers one value of each rank, in the order of the group (None: all ranks). Values are pickled. A collective call."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    if _is_fake(group):
        return [value] * dist.get_world_size(group)
    said: list[_T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, value, group=group)
    return cast("list[_T]", said)


def equal_on_all_ranks(
    value: object, group: dist.ProcessGroup, device: torch.device, integers: torch.Tensor | None = None
) -> bool:
    """True when `value` has the same text, and `integers` the same values, on every rank. A collective call.

    Ranks exchange one hash of each; that of the integers, a sum with weights modulo 2^64, is computed on the device.
    """
    if _is_fake(group):
        return True
    digest = _digest(value)
    hashes = torch.tensor([digest], device=device)
    if integers is not None:
        weights = torch.arange(1, 2 * integers.numel(), 2, device=device)
        hashes = torch.cat((hashes, (integers.flatten().long() * weights).sum(0, keepdim=True)))
    bounds = torch.cat((hashes, -hashes))
    dist.all_reduce(bounds, op=dist.ReduceOp.MIN, group=group)
    least, most = torch.tensor(bounds.tolist()).chunk(2)
    return bool(torch.equal(least, -most))


def _is_fake(group: dist.ProcessGroup | None) -> bool:
    """True for torch's fake group, whose collectives return no meaningful values."""
    return bool(dist.get_backend(group) == "fake")


class CollectiveRecorder(TorchDispatchMode):
    """Dispatch mode that records the process groups of the collectives in a layer's first forward.

    Operators on the local parts of sharded tensors do not count: each rank can compute those again by itself.
    """

    def __init__(self, layer: str, given: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer = layer
        self.given = given
        """The shape of its input."""
        self.groups: dict[str, dist.ProcessGroup] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and are_wrapped(types):
            return NotImplemented
        self._note(group_of(func, args))
        return call(operator_of(func), args, kwargs or {})

    def _note(self, group: dist.ProcessGroup | None) -> None:
        if group is not None and group.size() > 1:
            self.groups.setdefault(group.group_name, group)


class AgreeingRanks:
    """The process groups that each layer of one manager talks to, and their decisions."""

    def __init__(self, device: torch.device) -> None:
        self.disagreed: dict[str, str] = {}
        """Layers with different settings on different ranks -> description; they move whole."""
        self._device = device
        self._groups: dict[str, tuple[dist.ProcessGroup, ...]] = {}  # of each layer that was heard
        self._agreed = False

    def begin_forward(self) -> None:
        """Makes the next forward compare settings again."""
        self._agreed = False

    @property
    def several(self) -> bool:
        """True when the run has more than one rank."""
        return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def listen(self, layer: str, given: str) -> CollectiveRecorder | None:
        """A recorder of the layer's collectives for its first forward; None once they are known."""
        return CollectiveRecorder(layer, given) if layer not in self._groups and self.several else None

    def heard(self, hearing: CollectiveRecorder, told: str) -> None:
        """A layer's first forward has ended; `told` is what this rank was told to do with it. A collective call."""
        layer = hearing.layer
        self._groups[layer] = tuple(hearing.groups.values())
        for group in self._groups[layer]:
            self._compare({layer: (told, self.disagreed.get(layer))}, hearing.given, group)

    def talks(self, layer: str) -> bool:
        """True for a layer known to run collectives."""
        return bool(self._groups.get(layer))

    def partners(self, layer: str) -> tuple[str, ...]:
        """Names of the groups of the layer's collectives."""
        return tuple(group.group_name for group in self._groups.get(layer, ()))

    def agree(self, told: Callable[[str], str], given: str) -> set[str]:
        """Compares levels and input shapes across ranks, once a forward. A collective call.

        Returns:
            Layers on which the ranks agree again; those on which they do not are in `disagreed`.
        """
        if self._agreed:
            return set()
        self._agreed = True
        before = set(self.disagreed)
        self.disagreed.clear()
        groups = {group.group_name: group for groups in self._groups.values() for group in groups}
        for group in groups.values():
            ours = {
                layer: (told(layer), self.disagreed.get(layer))
                for layer, groups_ in self._groups.items()
                if group in groups_
            }
            if not equal_on_all_ranks((sorted(ours.items()), given), group, self._device):
                self._compare(ours, given, group)
        return before - set(self.disagreed)

    def all_have(self, layer: str, room: bool) -> bool:
        """True when `room` is true on all ranks of the layer's groups. A collective call."""
        groups = [group for group in self._groups.get(layer, ()) if not _is_fake(group)]
        if not groups:
            return room
        have = torch.tensor(int(room), device=self._device)
        for group in groups:
            dist.all_reduce(have, op=dist.ReduceOp.MIN, group=group)
        return bool(have)

    def all_of(self, layer: str, said: tuple[bool, ...]) -> tuple[bool, ...]:
        """At each position: true when all ranks of the layer's groups have said so. A collective call."""
        for group in self._groups.get(layer, ()):
            answers = gather_values(said, group)
            alike = all(len(theirs) == len(said) for theirs in answers)
            said = tuple(alike and all(theirs[at] for theirs in answers) for at in range(len(said)))
        return said

    def _compare(self, ours: _Told, given: str, group: dist.ProcessGroup) -> None:
        """Records layers whose settings differ between ranks of the group or of their other groups; all if shapes differ."""
        answers = gather_values((dict(ours), given), group)
        ranks = dist.get_process_group_ranks(group)
        shapes = _difference([shape for _, shape in answers], ranks, "was given", "give all batches of one shape")
        for layer in ours:
            said = [theirs[layer] for theirs, _ in answers]
            reason = next((theirs for _, theirs in said if theirs is not None), None)
            reason = reason or _difference([told for told, _ in said], ranks, "was told", "tell all the same") or shapes
            if reason is not None:
                self.disagreed[layer] = reason


def _difference(said: Sequence[str], ranks: Sequence[int], how: str, what_to_do: str) -> str | None:
    """Message naming the first rank that differs from rank 0 of the group; None if none does."""
    other = next((number for number, theirs in enumerate(said) if theirs != said[0]), None)
    if other is None:
        return None
    others = f"rank {ranks[other]} {said[other]}"
    return f"rank {ranks[0]} {how} {said[0]} and {others}, and they compute it together; {what_to_do}"


def _digest(value: object) -> int:
    """Hash of a value's text, equal in all processes."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest())
