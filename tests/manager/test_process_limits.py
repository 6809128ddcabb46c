"""Limits of the process, on the size of files and the number of threads: the error names its cause, and nothing is left."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import memo
from memo.errors import MemoError

MODEL = """
    import sys, resource, torch, memo
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(3)))
"""


def run(program: str, *arguments: object) -> str:
    """Runs a program in a process of its own, and returns what it prints."""
    command = [sys.executable, "-c", textwrap.dedent(MODEL) + textwrap.dedent(program), *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def limited(budget: str | None, most: int, tmp_path: Path) -> str:
    """The error of a training step whose files may take `most` bytes."""
    return run(
        f"""
        resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))
        try:
            layers, disk, room = list(model), sys.argv[1], {budget!r}
            manager = memo.offload(model, layers=layers, alpha=1, host=0, disk=disk, disk_budget=room, min_bytes=0)
            with manager:
                loss = model(torch.randn(4096, 64)).sum()
            loss.backward()
        except memo.MemoError as error:
            print(type(error).__name__, error)
        """,
        tmp_path,
    )


@pytest.mark.parametrize("budget", [None, "64MiB"])
@pytest.mark.parametrize("most", [0, 1 << 20])
def test_a_limit_of_file_sizes_is_named(budget: str | None, most: int, tmp_path: Path) -> None:
    told = limited(budget, most, tmp_path)
    assert told.startswith("ScratchFull")
    assert "ulimit -f" in told


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(3)))


def gradients(built: nn.Module, manager: memo.Manager | None) -> list[torch.Tensor]:
    built.zero_grad()
    given = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    if manager is None:
        loss = built(given).square().sum()
    else:
        with manager:
            loss = built(given).square().sum()
    loss.backward()
    return [parameter.grad.clone() for parameter in built.parameters() if parameter.grad is not None]


def left() -> tuple[set[str], int]:
    """Threads of memo's, and the number of open files."""
    gc.collect()
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("memo")}
    return threads, len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("tier", [{"host": "8MiB"}, {"host": 0}])
def test_where_no_thread_can_be_started_the_error_is_memos_and_nothing_is_left(
    tier: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, before = gradients(model(), None), left()
    start, allowed = threading.Thread.start, 0

    def limited_start(thread: threading.Thread) -> None:
        nonlocal allowed
        if allowed == 0:
            raise RuntimeError("can't start new thread")
        allowed -= 1
        start(thread)

    def offload(built: nn.Module) -> memo.Manager:
        layers = list(built.children())
        return memo.offload(built, layers=layers, alpha=1.0, disk=tmp_path, disk_budget="8MiB", min_bytes=0, **tier)

    errors = []
    for first in range(20):
        allowed = first
        built = model()
        manager = None
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", limited_start)
            try:
                manager = offload(built)
                got = gradients(built, manager)
            except MemoError as error:
                errors.append(str(error))
        if manager is not None:
            assert all(map(torch.equal, gradients(built, manager), want))
            manager.close()
        del manager
        assert left() == before
        if len(errors) <= first:
            break
    assert all(map(torch.equal, got, want))
    assert errors
    assert all("could not be started" in error and "ulimit -u" in error for error in errors)
