"""Byteless tensors count for nothing where memory is limited."""

from __future__ import annotations

import subprocess
import sys


def test_a_limit_of_the_processs_data_does_not_count_byteless_tensors() -> None:
    program = """
import resource
from memo.allocator.byteless_tensors import byteless_storage
limit = 2 << 30  # room for the program, and for a thousandth of what follows
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
held = [byteless_storage(1 << 40) for _ in range(2)]
print(sum(storage.nbytes() for storage in held))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(2 << 40)], done.stderr
