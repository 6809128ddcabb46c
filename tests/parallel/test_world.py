"""A process that was a rank ends in good order."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

# torch holds on to a group where collectives ran under a dispatch mode, so that its threads outlive it.
SENDS_TO_THE_END = """
import torch, torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from memo.parallel.world import join

class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))

with join(torch.device("cpu")):
    with Nothing():
        dist.all_reduce(torch.ones(1))
    dist.all_reduce_coalesced([torch.ones(1) for _ in range(30_000)])
"""


def test_gloo_lets_go_of_what_it_sent_before_the_interpreter_ends() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-c", SENDS_TO_THE_END],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **alone},
    )
    assert done.returncode == 0, done.stderr
