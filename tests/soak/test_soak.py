"""Training under injected faults equals the undisturbed run, and a soak finds what it should; `make soak` has an hour."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import memo
from memo.gpt.train.step import Trainer
from tests.soak.__main__ import figures, supervised, table
from tests.soak.faults import KINDS, PRESSED, Injector
from tests.soak.memory_group import MemoryGroup, remove_group_of
from tests.soak.resources import LIMITS, Sample, sample, trends
from tests.soak.run import Settings, soak


def _settings(**given: Any) -> Settings:
    return Settings(**({"minutes": 3, "fault_every": 4, "seed": 0, "checkpoint_minutes": 0.005} | given))


def test_steps_under_faults_equal_the_undisturbed_run() -> None:
    soaked = supervised(_settings(steps=60))
    assert soaked.find is None
    assert soaked.steps == 60
    assert soaked.planned_steps > 10
    assert soaked.moving_steps > 10
    assert soaked.evaluations >= 2
    assert soaked.checkpoints > 1
    assert sum(fault.met > 0 for fault in soaked.faults.values()) >= 8
    assert soaked.resumes == sum(sum(fault.raised.values()) for fault in soaked.faults.values()) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_minutes_of_faults_end_in_no_find_and_flat_resources() -> None:
    settings = Settings(steps=10_000, minutes=3, fault_every=8, seed=1)  # `make soak` is an hour of them
    soaked = supervised(settings)
    body = figures(settings, soaked)
    assert body["finds"] == [], table(body)
    assert body["trends"].keys() == LIMITS.keys()
    assert sum(fault.met > 0 for fault in soaked.faults.values()) >= 8, table(body)


def _only(name: str) -> None:
    """Leaves one kind of fault, in this process."""
    for other in KINDS.keys() - {name}:
        del KINDS[other]


def _soak_unverified(settings: Settings, undisturbed: Connection, control: Connection) -> None:
    """A soak whose flipped bits nobody sees."""
    _only("bit flipped on disk")
    offload = memo.offload
    memo.offload = lambda *args, **kwargs: offload(*args, **(kwargs | {"verify": False}))
    soak(settings, undisturbed, control)


def test_a_flipped_bit_that_memo_does_not_see_is_a_find() -> None:
    """A soak that can't find is worth nothing."""
    soaked = supervised(_settings(steps=60), _soak_unverified)
    assert soaked.find is not None
    assert "and undisturbed" in soaked.find


def _soak_greedy(settings: Settings, undisturbed: Connection, control: Connection) -> None:
    """A soak of which each step takes 24 MiB more than its budget counts."""
    _only(PRESSED)
    step_of, held = Trainer.step, list[Any]()

    def step(self: Trainer, *args: Any) -> Any:
        held.append(b"\1" * (24 << 20))
        return step_of(self, *args)

    Trainer.step = step  # type: ignore[method-assign]
    soak(settings, undisturbed, control)


def _groups_can_be_made() -> bool:
    """In a process of its own, since it stays in the group."""
    code = "from tests.soak.memory_group import MemoryGroup; MemoryGroup()"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL)
    made = process.wait() == 0
    remove_group_of(process.pid)
    return made


@pytest.mark.slow
def test_a_run_that_takes_more_than_its_budget_under_pressure_is_killed_and_a_find() -> None:
    if not _groups_can_be_made():
        pytest.skip("no memory cgroup can be made here")
    soaked = supervised(_settings(steps=60), _soak_greedy)
    assert soaked.find is not None
    assert soaked.find.endswith("the process ended with -9")


def test_where_no_group_can_be_made_that_fault_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.soak.memory_group._MOUNTS", tmp_path)
    with pytest.raises(OSError, match="there is no memory controller"):
        MemoryGroup()
    assert PRESSED not in Injector(0, lambda: None).told


def _leak_memory(held: list[Any], folder: Path) -> None:
    held.append(b"\1" * (4 << 20))


def _leak_descriptor(held: list[Any], folder: Path) -> None:
    held.append(Path(os.devnull).open())  # noqa: SIM115


def _leak_thread(held: list[Any], folder: Path) -> None:
    held.append(threading.Event())
    threading.Thread(target=held[-1].wait, daemon=True).start()


def _leak_scratch(held: list[Any], folder: Path) -> None:
    held.append(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
    held[-1].write(b"\1" * (1 << 20))
    held[-1].flush()


def _leak_checkpoint(held: list[Any], folder: Path) -> None:
    step = folder / f"step-{len(list(folder.iterdir()))}"
    step.mkdir()
    (step / "weights").write_bytes(b"\1" * (1 << 20))


LEAKS: dict[str, tuple[Callable[[list[Any], Path], None], str]] = {
    "memory": (_leak_memory, "rss_bytes"),
    "descriptor": (_leak_descriptor, "descriptors"),
    "thread": (_leak_thread, "threads"),
    "scratch": (_leak_scratch, "disk_bytes"),
    "checkpoint": (_leak_checkpoint, "disk_bytes"),
}


@pytest.fixture
def held() -> Iterator[list[Any]]:
    """What leaks, given back at the end."""
    kept: list[Any] = []
    yield kept
    for one in kept:
        if isinstance(one, threading.Event):
            one.set()
        elif not isinstance(one, bytes):
            one.close()


@pytest.mark.parametrize("name", LEAKS)
def test_what_leaks_is_sampled_and_not_flat(name: str, held: list[Any], tmp_path: Path) -> None:
    leak, resource = LEAKS[name]
    samples = []
    for step in range(100):
        leak(held, tmp_path)
        if step % 10 == 0:
            samples.append(sample(step, tmp_path))
    assert not trends(samples)[resource].flat


def _line(slope: float, mean: float) -> list[Sample]:
    values = [int(mean + slope * step) for step in range(0, 1000, 25)]
    return [
        Sample(steps=25 * index, rss_bytes=value, descriptors=value, threads=value, disk_bytes=value)
        for index, value in enumerate(values)
    ]


def test_only_a_rise_above_the_limit_is_not_flat() -> None:
    for name, limit in LIMITS.items():
        slope = limit(1e9) / 475  # over the 19 intervals of 25 steps in the second half
        assert trends(_line(0.9 * slope, 1e9))[name].flat
        assert not trends(_line(1.3 * slope, 1e9))[name].flat
        assert trends(_line(-10 * slope, 1e9))[name].flat


def _soak_leaking(settings: Settings, undisturbed: Connection, control: Connection) -> None:
    """A soak of which each step leaks one of everything."""
    _only("short writes")
    step_of, held = Trainer.step, list[Any]()
    folder = Path(tempfile.gettempdir())

    def step(self: Trainer, *args: Any) -> Any:
        for leak in (_leak_memory, _leak_descriptor, _leak_thread, _leak_scratch):
            leak(held, folder)
        return step_of(self, *args)

    Trainer.step = step  # type: ignore[method-assign]
    soak(settings, undisturbed, control)


@pytest.mark.slow
def test_a_soak_that_leaks_is_a_find() -> None:
    settings = _settings(steps=60)
    finds = figures(settings, supervised(settings, _soak_leaking))["finds"]
    assert finds == [f"{name} is not flat" for name in LIMITS]
