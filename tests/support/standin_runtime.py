"""The stand-in CUDA runtime of tests/allocator/standin_runtime.cpp, and steps of requests to drive an allocator with."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from memo.allocator.native import Native
from memo.mip import build

SOURCE = Path(__file__).parent.parent / "allocator" / "standin_runtime.cpp"
FLAGS = ("-O1", "-std=c++20", "-shared", "-fPIC")
EVERYTHING = 1 << 62


class Standin:
    """A machine with one GPU that is not there."""

    def __init__(self) -> None:
        self.path = build(SOURCE, flags=FLAGS)
        self._library = ctypes.CDLL(str(self.path))
        for name in ("calls", "held", "live_events", "damaged", "misuses"):
            getattr(self._library, f"standin_{name}").restype = ctypes.c_int64

    def reset(self, *, nbytes: int = EVERYTHING, pools: bool = True) -> None:
        """A new machine with so much memory, with or without stream-ordered pools."""
        self._library.standin_reset(ctypes.c_size_t(nbytes), ctypes.c_int(pools))

    def limit(self, nbytes: int) -> None:
        """The machine has so much memory from now on."""
        self._library.standin_limit(ctypes.c_size_t(nbytes))

    def stall(self, stream: int, stalled: bool = True) -> None:
        """The stream's work stands still until something waits for it."""
        self._library.standin_stall(ctypes.c_void_p(stream), ctypes.c_int(stalled))

    def destroy(self, stream: int) -> None:
        """The stream's handle is no longer one."""
        self._library.standin_destroy(ctypes.c_void_p(stream))

    def write(self, stream: int, at: int, nbytes: int, tag: int) -> None:
        """A kernel on the stream that fills the memory with the tag."""
        self._library.standin_write(ctypes.c_void_p(stream), ctypes.c_void_p(at), ctypes.c_size_t(nbytes), tag)

    def verify(self, stream: int, at: int, nbytes: int, tag: int) -> None:
        """A kernel on the stream that counts damage if the memory is not full of the tag."""
        self._library.standin_verify(ctypes.c_void_p(stream), ctypes.c_void_p(at), ctypes.c_size_t(nbytes), tag)

    def calls(self, name: str) -> int:
        """How often a function of the runtime was called."""
        return int(self._library.standin_calls(name.encode()))

    @property
    def held(self) -> int:
        """Bytes not given back."""
        return int(self._library.standin_held())

    @property
    def live_events(self) -> int:
        """Events not destroyed."""
        return int(self._library.standin_live_events())

    @property
    def damaged(self) -> int:
        """Verifications that failed."""
        return int(self._library.standin_damaged())

    @property
    def misuses(self) -> int:
        """Calls that a real runtime would refuse."""
        return int(self._library.standin_misuses())


def open_standin(**machine: object) -> Iterator[tuple[Native, Standin]]:
    """The allocator on a fresh stand-in; afterwards, that everything was given back and nothing was damaged."""
    standin = Standin()
    standin.reset(**machine)  # type: ignore[arg-type]
    native = Native()
    native.open(standin.path)
    yield native, standin
    assert standin.damaged == 0
    assert native.close() == 0, "blocks are left"
    assert (standin.held, standin.live_events, standin.misuses) == (0, 0, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One malloc (`nbytes` given) or free of a step."""

    block: str
    nbytes: int | None = None
    stream: int = 0


class Driver:
    """Makes a step's calls, and holds every block against all the others that are live."""

    def __init__(self, native: Native) -> None:
        self._library = native.arena
        self._malloc = self._library.memo_arena_try_malloc
        self._malloc.restype = ctypes.c_void_p
        self.live: dict[str, tuple[int, int]] = {}

    def malloc(self, block: str, nbytes: int, stream: int = 0, device: int = 0) -> int | None:
        """The address, or None without memory; fails if it meets a live block."""
        at = self._malloc(ctypes.c_size_t(nbytes), ctypes.c_int(device), ctypes.c_void_p(stream))
        if at is None:
            return None
        assert at % 512 == 0, f"{block} is not aligned"
        for other, (begin, size) in self.live.items():
            assert at + max(nbytes, 1) <= begin or begin + max(size, 1) <= at, f"{block} meets {other}"
        self.live[block] = (at, nbytes)
        return int(at)

    def free(self, block: str) -> None:
        """Frees the block."""
        at, nbytes = self.live.pop(block)
        self.free_address(at, nbytes)

    def free_address(self, at: int, nbytes: int = 0) -> None:
        """Frees whatever is said to be there."""
        self._library.memo_arena_free(ctypes.c_void_p(at), ctypes.c_size_t(nbytes), ctypes.c_int(0), None)

    def record_stream(self, block: str, stream: int) -> None:
        """Another stream uses the block."""
        self._library.memo_arena_record_stream(ctypes.c_void_p(self.live[block][0]), ctypes.c_void_p(stream))

    def run(self, calls: Sequence[Call]) -> None:
        """Makes the calls in order; a block that was never made is not freed."""
        for call in calls:
            if call.nbytes is not None:
                assert self.malloc(call.block, call.nbytes, call.stream) is not None, f"no memory for {call.block}"
            elif call.block in self.live:
                self.free(call.block)

    def free_all(self) -> None:
        """Frees what is live."""
        for block in list(self.live):
            self.free(block)
