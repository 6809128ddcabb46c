"""Megatron-Core with tensor parallelism over two ranks: the worker compares the runs, and counts divided layers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

HERE = Path(__file__).parent


@pytest.mark.timeout(600)
def test_two_ranks_of_one_layer_agree_and_divide_it() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join((str(HERE), str(HERE.parents[1] / "support")))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "two_ranks_worker.py"), str(rank), str(port)],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=500)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(said)
