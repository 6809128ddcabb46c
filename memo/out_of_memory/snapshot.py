"""Reader of snapshots of torch's CUDA allocator (`torch.cuda.memory._dump_snapshot`), without torch.

A snapshot is a pickle of dicts, lists, tuples, strings and numbers; the reader takes nothing else, so that a file from a
stranger runs no code. It has the blocks that the allocator held when it was written, and the events before, the newest
last. A snapshot is often written after the error, when most tensors are gone: so the events are undone, newest first,
back to the first state (`_first_state`), and then replayed to the error or to the largest total.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import pickle
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from memo.bounded_files import Refused, open_file, shown_name
from memo.errors import TraceError
from memo.events import Owner
from memo.out_of_memory.explanation import SAVED, HeldMemory
from memo.trace import OTHER, OWNED, TRANSIENT, Holder

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_FORK = multiprocessing.get_context("fork")
_LEAST_S, _S_PER_MIB = 2, 2  # processor seconds that a file may take
_LEAST_NBYTES, _NBYTES_PER_BYTE = (
    512 << 20,
    64,
)  # memory likewise, beside what the process has; plain data takes 20 a byte

MOST_BYTES = 4 << 30
_MOST_HOLDERS = 10
_FREED = ("free_completed",)
_MADE_BY = frozenset({"_apply", "to", "__init__", "from_pretrained", "to_empty", "load_state_dict"})
"""Functions that allocate weights."""
_NO_BLOCK = "no block was ever in use; record with torch.cuda.memory._record_memory_history() first"
T = TypeVar("T")
_SHOWN = 3  # lines of a stack


class _Plain(pickle.Unpickler):
    """Unpickler of builtin containers, strings and numbers."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside of it")


def read_snapshot(path: Path) -> dict[str, Any]:
    """Reads a snapshot.

    Raises:
        TraceError: the file cannot be read, is no snapshot, or holds more than plain data.
    """
    name = shown_name(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise TraceError(f"{name} has more than {MOST_BYTES >> 30} GiB")
        with open_file(path) as file:
            found = _Plain(file).load()
    except OSError as error:
        raise TraceError(f"{name}: cannot read: {error.strerror}") from error
    except Refused as error:
        raise TraceError(f"{name}: {error}") from error
    except TraceError:
        raise
    except Exception as error:  # pickle raises errors of many types on damaged files
        raise TraceError(f"{name} is no snapshot of torch's memory: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("segments"), list):
        raise TraceError(f"{name} is no snapshot of torch's memory: it has no list of segments")
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    nbytes: int
    frames: Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotBlocks:
    """Blocks of one device by their lifetimes, in events of the allocator, and what it reserved at most."""

    blocks: tuple[tuple[int, int, int], ...]
    """First event, event of the end, and bytes."""
    reserved_nbytes: int


def explain_apart(path: Path, *, device: int | None = None) -> HeldMemory:
    """Memory that a snapshot of anyone's held, as `held_in_snapshot` finds it.

    Raises:
        TraceError: as `read_snapshot` and `held_in_snapshot`; or the other process died, or took too long.
    """
    return _apart(path, functools.partial(held_in_snapshot, device=device))


def blocks_apart(path: Path) -> SnapshotBlocks:
    """The blocks of a snapshot of anyone's.

    Raises:
        TraceError: as `explain_apart`.
    """
    return _apart(path, functools.partial(_read, _lifetimes, device=None))


def _apart(path: Path, find: Callable[[Mapping[str, Any]], T]) -> T:
    """Reads a snapshot of anyone's in a process of its own, and returns what is found in it.

    Plain data can still be nested so deeply, or shared so often, that hashing it ends or stops the interpreter.
    """
    there, here = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_answer, args=(here, path, find))
    child.start()
    here.close()
    try:
        found: T | TraceError = there.recv()
    except EOFError:
        raise TraceError(f"{shown_name(path)} is no snapshot of torch's memory: reading it does not end") from None
    finally:
        child.join()
    if isinstance(found, TraceError):
        raise found
    return found


def _answer(pipe: Connection, path: Path, find: Callable[[Mapping[str, Any]], object]) -> None:
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)  # CPython itself writes there of some damaged pickles
        size = path.stat().st_size
        seconds = max(_LEAST_S, (size * _S_PER_MIB) >> 20)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        room = _address_space() + max(_LEAST_NBYTES, size * _NBYTES_PER_BYTE)
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        pipe.send(find(read_snapshot(path)))
    except OSError as error:
        pipe.send(TraceError(f"{shown_name(path)}: cannot read: {error.strerror}"))
    except TraceError as error:
        pipe.send(error)
    except MemoryError:
        pipe.send(TraceError(f"{shown_name(path)} is no snapshot of torch's memory: reading it takes too much memory"))


def _address_space() -> int:
    """Bytes of addresses that this process has."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


def held_in_snapshot(snapshot: Mapping[str, Any], *, device: int | None = None) -> HeldMemory:
    """Finds what a device held at the last out-of-memory error in the snapshot, else at the largest total.

    Args:
        snapshot: by `read_snapshot`.
        device: its number; None: the one with an error, else the one that holds most.

    Raises:
        TraceError: a field is missing or of another type, or the snapshot has no such device.
    """
    return _read(_held, snapshot, device=device)


def _read(find: Callable[[Mapping[str, Any], int], T], snapshot: Mapping[str, Any], *, device: int | None) -> T:
    try:
        return find(snapshot, _device(snapshot) if device is None else device)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, ArithmeticError) as error:
        raise TraceError(f"the snapshot is damaged: {type(error).__name__} {error}") from None


def _device(snapshot: Mapping[str, Any]) -> int:
    traces = snapshot.get("device_traces") or []
    failed = [number for number, events in enumerate(traces) if any(one["action"] == "oom" for one in events)]
    if failed:
        return failed[0]
    reserved: dict[int, int] = {}
    for segment in snapshot["segments"]:
        number = segment.get("device", 0)
        reserved[number] = reserved.get(number, 0) + segment["total_size"]
    return max(reserved, key=lambda number: reserved[number], default=0)


def _last_state(snapshot: Mapping[str, Any], device: int) -> tuple[Sequence[Mapping[str, Any]], dict[int, _Block], int]:
    """A device's events, and its blocks and reserved bytes after them."""
    segments = [one for one in snapshot["segments"] if one.get("device", 0) == device]
    traces = snapshot.get("device_traces") or []
    events = traces[device] if device < len(traces) else []
    for event in events:
        _nbytes(event["size"])
    return events, _blocks(segments), sum(_nbytes(one["total_size"]) for one in segments)


def _lifetimes(snapshot: Mapping[str, Any], device: int) -> SnapshotBlocks:
    events, last, reserved = _last_state(snapshot, device)
    first, reserved = _first_state(events, last, reserved)
    begun = {address: (0, block.nbytes) for address, block in first.items()}
    blocks, most = [], reserved
    for at, event in enumerate(events, 1):
        action, size = event["action"], event["size"]
        if action == "alloc":
            begun[event["addr"]] = (at, size)
        elif action in _FREED and event["addr"] in begun:
            start, nbytes = begun.pop(event["addr"])
            blocks.append((start, at, nbytes))
        reserved += size * _GROWTH.get(action, 0)
        most = max(most, reserved)
    blocks += [(start, len(events) + 1, nbytes) for start, nbytes in begun.values()]
    if not blocks:
        raise ValueError(_NO_BLOCK)
    return SnapshotBlocks(blocks=tuple(sorted(blocks)), reserved_nbytes=most)


def _held(snapshot: Mapping[str, Any], device: int) -> HeldMemory:
    events, blocks, reserved = _last_state(snapshot, device)
    errors = [number for number, event in enumerate(events) if event["action"] == "oom"]
    error = events[errors[-1]] if errors else None
    blocks, reserved = _replayed(events, blocks, reserved, until=errors[-1] if errors else None)
    if not blocks and error is None:
        raise ValueError(_NO_BLOCK)
    bands: dict[str, int] = {}
    for block in blocks.values():
        band = _band(block.frames)
        bands[band] = bands.get(band, 0) + block.nbytes
    largest = sorted(blocks.values(), key=lambda block: -block.nbytes)[:_MOST_HOLDERS]
    free = None if error is None or error.get("device_free") is None else _nbytes(error["device_free"])
    return HeldMemory(
        where="When memory ran out" if errors else "At the peak of the snapshot",
        ran_out=bool(errors),
        bands=bands,
        holders=[_holder(block) for block in largest],
        requested_nbytes=None if error is None else _nbytes(error["size"]),
        reserved_nbytes=reserved,
        capacity_nbytes=None if free is None else free + reserved,
    )


def _nbytes(size: object) -> int:
    """A size of the snapshot.

    Raises:
        ValueError: it is no number of bytes.
    """
    if type(size) is not int or not 0 <= size < 1 << 62:
        raise ValueError(f"{str(size)[:40]} is no size")
    return size


def _blocks(segments: Iterable[Mapping[str, Any]]) -> dict[int, _Block]:
    """Blocks in use, by address."""
    found = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                frames = block.get("frames") or []
                found[block.get("address", address)] = _Block(nbytes=_nbytes(block["size"]), frames=frames)
            address += block["size"]
    return found


def _replayed(
    events: Sequence[Mapping[str, Any]], last: dict[int, _Block], reserved: int, *, until: int | None
) -> tuple[dict[int, _Block], int]:
    """Blocks and reserved bytes at event `until`, or for None where most bytes were in use."""
    blocks, reserved = _first_state(events, last, reserved)
    total = most = sum(block.nbytes for block in blocks.values())
    best, at = dict(blocks), reserved
    for number, event in enumerate(events):
        if number == until:
            return blocks, reserved
        action, size = event["action"], event["size"]
        if action == "alloc":
            blocks[event["addr"]] = _Block(nbytes=size, frames=event.get("frames") or [])
            total += size
            if total > most and until is None:
                most, best, at = total, dict(blocks), reserved
        elif action in _FREED:
            gone = blocks.pop(event["addr"], None)
            total -= 0 if gone is None else gone.nbytes
        reserved += size * _GROWTH.get(action, 0)
    return best, at


_GROWTH = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def _first_state(
    events: Sequence[Mapping[str, Any]], last: Mapping[int, _Block], reserved: int
) -> tuple[dict[int, _Block], int]:
    """Blocks and reserved bytes before the first event: the events undone, newest first."""
    blocks = dict(last)
    for event in reversed(events):
        action, size = event["action"], event["size"]
        if action == "alloc":
            blocks.pop(event["addr"], None)
        elif action in _FREED:
            blocks[event["addr"]] = _Block(
                nbytes=size, frames=[]
            )  # made before the first event, if still there at the end
        reserved -= size * _GROWTH.get(action, 0)
    return blocks, reserved


def _band(frames: Sequence[Mapping[str, Any]]) -> str:
    """The band of a block, by the stack that allocated it, innermost frame first."""
    files = [str(frame.get("filename", "")).replace("\\", "/") for frame in frames]
    names = [str(frame.get("name", "")) for frame in frames]
    if not frames:
        return OTHER
    if any("torch/optim/" in file for file in files) or any("optim" in name.lower() for name in names):
        return OWNED[Owner.OPTIMIZER]
    if "backward" in names or any("torch/autograd/graph.py" in file for file in files):
        return OWNED[Owner.GRADIENTS] if any("AccumulateGrad" in name for name in names) else TRANSIENT
    if "forward" not in names and not _MADE_BY.isdisjoint(names):
        return OWNED[Owner.WEIGHTS]
    return SAVED if "forward" in names else TRANSIENT


def _holder(block: _Block) -> Holder:
    """The block with its innermost Python lines outside torch."""
    lines = []
    for frame in block.frames:
        file = str(frame.get("filename", "")).replace("\\", "/")
        if not file.endswith(".py") or "/torch/" in file:
            continue
        short = "/".join(file.split("/")[-2:])
        lines.append(f"{short}:{frame.get('line', 0)} {frame.get('name', '')}")
    band = _band(block.frames)
    op = next((str(frame["name"]) for frame in block.frames if str(frame.get("name", "")).startswith("at::")), None)
    return Holder(
        what="saved" if band == SAVED else band,
        name="",
        nbytes=block.nbytes,
        op=op,
        line=" < ".join(lines[:_SHOWN]) or None,
    )
