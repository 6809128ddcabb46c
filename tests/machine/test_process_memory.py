"""Resident memory is what is in use: freed blocks leave it at once, and its peak can be restarted."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from memo.machine import peak_rss_bytes, restart_peak_rss, rss_bytes, run_peak_rss_bytes
from memo.machine.process_memory import largest_host_users

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and sets glibc's thresholds")

PROGRAM = """
import ctypes
from memo.machine.process_memory import *

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]


def keeps(nbytes, count):
    '''Bytes that stay resident of blocks that are freed, below one that is not.'''
    before = rss_bytes()
    blocks = [libc.malloc(nbytes) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, nbytes)
    libc.malloc(nbytes)
    for block in blocks:
        libc.free(block)
    return rss_bytes() - before


large = libc.malloc(30 << 20)
libc.free(large)  # glibc takes smaller blocks from its heap from now on
kept = keeps(1 << 20, 64)
returned = return_freed_memory()
resident = rss_bytes()
in_the_hole = keeps(1 << 20, 64)
trim_heap()
print(kept, int(returned), resident, in_the_hole, rss_bytes(), keeps(1 << 20, 128), int(freed_memory_returns()))
"""


def test_freed_blocks_stay_in_glibcs_heap_until_they_are_told_to_leave() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    kept, returned, resident, in_the_hole, trimmed, beside_the_hole, measured = map(int, done.stdout.split())
    assert kept > 60 << 20, "else nothing was tested"
    assert returned
    assert resident < 64 << 20, "what was free before has left, too"
    assert in_the_hole > 60 << 20, "its addresses are used first, and their pages stay"
    assert trimmed < 64 << 20
    assert beside_the_hole < 68 << 20, "of 128 blocks 64 have mappings of their own"
    assert measured


def test_the_peak_begins_anew_where_it_is_restarted() -> None:
    block = bytearray(64 << 20)
    ctypes.memset((ctypes.c_char * len(block)).from_buffer(block), 1, len(block))
    resident = rss_bytes()
    del block
    assert restart_peak_rss()
    assert peak_rss_bytes() < rss_bytes() + (32 << 20)
    assert run_peak_rss_bytes() >= resident - (4 << 20), "the run's own peak does not"


def test_the_processes_that_hold_most_host_memory_are_named() -> None:
    """What an offloaded optimizer or a data loader's worker holds, and what of it is locked; others are left out."""
    program = """
import ctypes, mmap, sys
held, locked = bytearray(64 << 20), mmap.mmap(-1, 4 << 20)  # a mapping without a file is shared memory
address = ctypes.addressof(ctypes.c_char.from_buffer(locked))
print(ctypes.CDLL(None).mlock(ctypes.c_void_p(address), 1 << 16), flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"0\n", "mlock failed"
        users = largest_host_users(1000, least_bytes=64 << 20)
        assert users == sorted(users, key=lambda user: -user.held_bytes)
        (own,) = (user for user in users if user.pid == child.pid)
        assert 64 << 20 <= own.held_bytes < 96 << 20
        assert own.locked_bytes == 1 << 16
        assert own.command.startswith("python")
        assert child.pid not in {user.pid for user in largest_host_users(1000, least_bytes=own.held_bytes + (8 << 20))}
        child.communicate()
