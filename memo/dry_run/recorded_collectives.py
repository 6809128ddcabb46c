"""Collectives that a rank issues, recorded one by one from the operators of torch's process groups.

Owns the meaning of these operators: kind, ranks, bytes. Runs inside a simulated rank (memo.parallel.solo_rank), where they
return at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist

from memo.allocator import LocalTensorMode
from memo.errors import RecordError
from memo.gpt.arithmetic import CollectiveKind
from memo.torch_private import OpOverload, resolve_process_group

COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of torch's collectives."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One collective, or one side of a message, as a rank issues it."""

    kind: CollectiveKind
    ranks: tuple[int, ...]
    """Global numbers of the group's ranks, in the order of the group."""
    nbytes: int
    """As `memo.gpt.arithmetic.Collective.nbytes`."""
    shape: tuple[int, ...]
    """Shape of this rank's operand, or of what it receives."""
    dtype: str
    peer: int | None = None
    """Global number of the rank that a message goes to or comes from."""

    def __str__(self) -> str:
        over = f"{len(self.ranks)} ranks" if self.peer is None else f"rank {self.peer}"
        way = {CollectiveKind.SEND: "to", CollectiveKind.RECEIVE: "from"}.get(self.kind, "over")
        return f"{self.kind} of {self.dtype} {list(self.shape)}, {self.nbytes:,} bytes, {way} {over}"


class IssuedCollectives(LocalTensorMode):
    """Dispatch mode that appends each collective to `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[CollectiveCall] = []

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator, and records it if it communicates.

        Raises:
            RecordError: it is a collective that memo's training step does not have.
        """
        result = func(*args, **kwargs)
        call = collective_of(func, args)
        if call is not None:
            self.calls.append(call)
        return result


def collective_of(func: OpOverload, args: tuple[Any, ...]) -> CollectiveCall | None:
    """The collective that an operator is; None for others, and for those that only wait.

    Raises:
        RecordError: it is a collective that memo's training step does not have.
    """
    if func.namespace not in COLLECTIVES:
        return None
    name = func._schema.name.partition("::")[2]
    if name in _SILENT or _votes(name, args):
        return None
    read = _READ.get(name)
    if read is None:
        raise RecordError(f"the step issues {name}, a collective that a dry run does not know")
    return read(args)


def _votes(name: str, args: tuple[Any, ...]) -> bool:
    """True for the messages by which stages agree, once, that all gave their shapes, as all stages of memo do."""
    if name not in ("send", "recv_") or args[0][0].dtype != torch.int32:
        return False
    if name == "recv_":
        args[0][0].fill_(1)
    return True


def _group(value: Any) -> tuple[int, ...]:
    """Global ranks of a process group, given as an object of its C++ class or by its name."""
    if isinstance(value, str):
        group = resolve_process_group(value)
    else:
        group = dist.ProcessGroup.unbox(value)
    return tuple(dist.get_process_group_ranks(group))


def _call(kind: CollectiveKind, tensor: torch.Tensor, whole: torch.Tensor, group: Any, **more: Any) -> CollectiveCall:
    return CollectiveCall(
        kind=kind,
        ranks=_group(group),
        nbytes=whole.numel() * whole.element_size(),
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        **more,
    )


def _message(kind: CollectiveKind, args: tuple[Any, ...]) -> CollectiveCall:
    tensor, group, place = args[0][0], args[1], args[2]
    return _call(kind, tensor, tensor, group, peer=_group(group)[place])


def _all_to_all(tensor: torch.Tensor, group: Any, sent: list[int]) -> CollectiveCall:
    """An all-to-all of equal parts, as far as their rows divide, or of one part that is the whole: a rotation."""
    ranks, parts = _group(group), [part for part in sent if part]
    if len(parts) == 1 < len(ranks):
        peer = ranks[next(place for place, part in enumerate(sent) if part)]
        return dataclasses.replace(_call(CollectiveKind.ROTATE, tensor, tensor, group), peer=peer)
    if not sent or max(sent) - min(sent) <= 1:
        return _call(CollectiveKind.ALL_TO_ALL, tensor, tensor, group)
    raise RecordError(f"the step issues an all-to-all of unequal parts {sent}, which a dry run does not know")


def _functional_gather(args: tuple[Any, ...]) -> CollectiveCall:
    call = _call(CollectiveKind.ALL_GATHER, args[0], args[0], args[2])
    return dataclasses.replace(call, nbytes=call.nbytes * cast("int", args[1]))


_SILENT = frozenset({"wait_tensor", "_wrap_tensor_autograd", "monitored_barrier_", "barrier"})
_READ: dict[str, Callable[[tuple[Any, ...]], CollectiveCall]] = {
    "_allgather_base_": lambda args: _call(CollectiveKind.ALL_GATHER, args[1], args[0], args[2]),
    "_reduce_scatter_base_": lambda args: _call(CollectiveKind.REDUCE_SCATTER, args[1], args[1], args[2]),
    "allreduce_": lambda args: _call(CollectiveKind.ALL_REDUCE, args[0][0], args[0][0], args[1]),
    "alltoall_base_": lambda args: _all_to_all(args[1], args[2], list(args[4])),
    "send": lambda args: _message(CollectiveKind.SEND, args),
    "recv_": lambda args: _message(CollectiveKind.RECEIVE, args),
    "all_gather_into_tensor": _functional_gather,
    "reduce_scatter_tensor": lambda args: _call(CollectiveKind.REDUCE_SCATTER, args[0], args[0], args[3]),
    "all_reduce": lambda args: _call(CollectiveKind.ALL_REDUCE, args[0], args[0], args[2]),
    "all_to_all_single": lambda args: _all_to_all(args[0], args[3], list(args[2])),
}
