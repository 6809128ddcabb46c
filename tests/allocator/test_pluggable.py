"""The planned allocator in torch's place: how it is installed, found steps, memory figures. torch's own part is replaced."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import ids, stack
from standin_runtime import Call, Driver, Standin, open_standin

import memo
from memo.allocator import (
    allocated_bytes,
    memory_stats,
    peak_allocated_bytes,
    pluggable,
    restart_peaks,
    use_planned_allocator,
)
from memo.allocator.native import FREE, MALLOC, RECORD_STREAM, Native
from memo.allocator.planned_allocator import AllocatorStage, PlannedAllocator
from memo.allocator.pluggable import ModelSteps
from memo.autoplan import device_budget_of
from memo.cli.main import main
from memo.errors import AllocatorError, ExitCode, UsageError
from memo.gpt import Precision, preset
from memo.gpt.model import attention_kernel
from memo.gpt.train.step import StepResult
from memo.gpt.train.step_metrics import StepMeter
from memo.manager import Machine
from memo.mip import build
from memo.units import format_bytes

KIB = 1024


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Native, Standin]]:
    """A torch that believes in a GPU, and the stand-in as its runtime; no allocator is installed."""
    monkeypatch.setattr(pluggable, "_installed", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for native, standin in open_standin():
        monkeypatch.setattr(pluggable, "_cuda_runtime", lambda path=standin.path: str(path))
        yield native, standin


@pytest.fixture
def installed(machine: object, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What torch was given."""
    given = SimpleNamespace(path=None, functions=None, record_stream=None, current=None)

    class Pluggable:
        def __init__(self, path: str, malloc: str, free: str) -> None:
            given.path, given.functions = path, (malloc, free)

        def allocator(self) -> object:
            return SimpleNamespace(set_record_stream_fn=lambda address: setattr(given, "record_stream", address))

    monkeypatch.setattr(torch.cuda.memory, "CUDAPluggableAllocator", Pluggable)
    monkeypatch.setattr(
        torch.cuda.memory, "change_current_allocator", lambda allocator: setattr(given, "current", allocator)
    )
    return given


def test_torch_is_given_the_three_functions_of_the_compiled_library(installed: SimpleNamespace) -> None:
    allocator = use_planned_allocator()
    assert installed.functions == (MALLOC, FREE)
    library = ctypes.CDLL(installed.path)
    assert installed.record_stream == ctypes.cast(getattr(library, RECORD_STREAM), ctypes.c_void_p).value
    assert installed.current is not None
    assert use_planned_allocator() is allocator is memo.use_planned_allocator()


def test_cuda_in_use_is_refused_before_anything_changes(
    installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(AllocatorError, match="at the start of the program"):
        use_planned_allocator()
    assert installed.path is None


def test_torchs_own_refusal_is_one_line(installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(allocator: object) -> None:
        raise RuntimeError("Can't swap an already initialized allocator")

    monkeypatch.setattr(torch.cuda.memory, "change_current_allocator", refuse)
    with pytest.raises(AllocatorError, match="already initialized"):
        use_planned_allocator()
    assert pluggable.active_allocator() is None


def test_a_torch_that_keeps_streams_to_itself_is_refused(
    installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.memory.CUDAPluggableAllocator, "allocator", lambda self: object())
    with pytest.raises(AllocatorError, match="which streams use a block"):
        use_planned_allocator()
    assert installed.current is None


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pluggable, "_installed", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(AllocatorError, match="built for CUDA"):
        use_planned_allocator()
    assert str(memory_stats()).startswith("no CUDA device")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AllocatorError, match="sees none"):
        use_planned_allocator()


def test_a_time_limit_that_means_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="plan_seconds"):
        use_planned_allocator(plan_seconds=0)


def test_memory_figures_are_those_of_the_requests(machine: tuple[Native, Standin], installed: SimpleNamespace) -> None:
    native, _ = machine
    use_planned_allocator()
    driver = Driver(native)
    driver.malloc("a", 3 * KIB)
    driver.malloc("b", 5 * KIB)
    driver.free("b")
    stats = memory_stats(reset_peaks=True)
    assert (stats.allocator, stats.allocated_bytes, stats.peak_allocated_bytes) == ("planned", 3 * KIB, 8 * KIB)
    assert stats.reserved_bytes == 8 * KIB
    assert memory_stats(torch.device("cuda", 0)).peak_allocated_bytes == 3 * KIB
    assert "3 KiB allocated (peak 8 KiB)" in str(stats)
    driver.free_all()


def step_meter() -> StepMeter:
    return StepMeter(
        preset("tiny"), seq=64, device=torch.device("cuda", 0), precision=Precision.FP32, peak=None, manager=None
    )


def peak_metric(meter: StepMeter) -> int | None:
    result = StepResult(step=1, loss=1.0, grad_norm=1.0, lr=1e-3, duration_s=1.0, tokens=64)
    metrics, usage = meter.measure(result)
    assert usage.memory_bytes == metrics.peak_device_bytes
    assert f"memory {format_bytes(usage.memory_bytes)} " in metrics.to_line(usage)
    return metrics.peak_device_bytes


def test_the_metric_of_peak_memory_counts_the_arena_whenever_planning_restarts_the_peaks(
    machine: tuple[Native, Standin], installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1 << 30))
    allocator, driver, meter = use_planned_allocator(), Driver(machine[0]), step_meter()
    driver.malloc("weights", 3 * KIB)
    for _ in range(4):
        with allocator.step():
            driver.run(CALLS)
            restart_peaks(torch.device("cuda", 0))  # as at each layer boundary of a measured step
        allocator.wait()
    assert allocator.stage() is AllocatorStage.REPLAY
    stats = memory_stats()
    assert (stats.arena_bytes, stats.allocated_bytes, stats.peak_allocated_bytes) == (4 * KIB, 3 * KIB, 3 * KIB)
    assert stats.device_bytes == stats.peak_device_bytes == peak_metric(meter) == 7 * KIB
    assert "7 KiB of the device (peak 7 KiB)" in str(stats)
    driver.free_all()
    allocator.close()


def test_the_metric_of_peak_memory_under_torchs_allocator_is_the_runs_whenever_planning_restarts_the_peaks(
    machine: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, figures = torch.device("cuda", 0), {"allocated_bytes": {"all": {"current": 1, "peak": 9}}}
    figures["reserved_bytes"] = figures["allocated_bytes"]
    monkeypatch.setattr(pluggable, "_largest_read", {})
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", lambda device: figures)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1 << 30))
    assert peak_allocated_bytes(device) == 9
    restart_peaks(device)
    figures["allocated_bytes"]["all"]["peak"] = 2
    assert peak_allocated_bytes(device) == 2
    assert memory_stats(device).device_bytes == 1
    assert memory_stats(device).peak_device_bytes == peak_metric(step_meter()) == 9
    figures["allocated_bytes"]["all"]["peak"] = 12
    assert memory_stats(device).peak_device_bytes == 12


def test_nothing_that_training_asks_of_memory_is_asked_of_torch(
    machine: tuple[Native, Standin], installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under any allocator but its own torch raises for statistics, peaks and shares of memory."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDAPluggableAllocator does not yet support it")

    for name in ("memory_stats", "reset_peak_memory_stats", "get_per_process_memory_fraction", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", refuse)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1 << 30))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 20, 1 << 30))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    use_planned_allocator()
    device, driver = torch.device("cuda", 0), Driver(machine[0])
    driver.malloc("a", 3 * KIB)
    driver.free("a")
    memory = device_budget_of(device, None)
    assert memory.peak_bytes() == 3 * KIB
    memory.restart()
    assert memory.peak_bytes() == memory.used_bytes() == 0
    assert Machine(device).device_bytes == 1 << 30
    assert attention_kernel._memory_limit(device) == (1 << 20) + memory_stats(device).reserved_bytes


def test_without_the_planned_allocator_the_figures_are_torchs(machine: object, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {
        "allocated_bytes": {"all": {"current": 1, "peak": 2}},
        "reserved_bytes": {"all": {"current": 3, "peak": 4}},
        "num_device_alloc": 7,
    }
    resets: list[object] = []
    monkeypatch.setattr(pluggable, "_largest_read", {})
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", lambda device: figures)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    stats = memory_stats(reset_peaks=True)
    assert (stats.allocator, stats.allocated_bytes, stats.peak_reserved_bytes, stats.device_mallocs) == (
        "torch",
        1,
        4,
        7,
    )
    assert resets == [None]
    device = torch.device("cuda", 0)
    assert (allocated_bytes(device), peak_allocated_bytes(device)) == (1, 2)
    assert resets == [None]
    assert memory_stats().peak_device_bytes == 2
    figures.clear()  # as before the first use of CUDA
    pluggable._largest_read.clear()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("that would initialise CUDA"))
    assert memory_stats() == memory_stats(reset_peaks=True)
    assert (memory_stats().allocated_bytes, allocated_bytes(device), peak_allocated_bytes(device)) == (0, 0, 0)


def test_the_runtime_that_is_loaded_is_the_one_used(tmp_path: Path) -> None:
    library = tmp_path / "libcudart-1a2b.so.13"
    shutil.copy(Standin().path, library)
    code = (
        "import ctypes, os, sys, torch, memo.allocator.pluggable as a\n"
        "ctypes.CDLL(sys.argv[1])\n"
        "found = a._cuda_runtime()\n"  # with torch for CUDA, which has loaded its own, one of the two
        "assert found == sys.argv[1] or (torch.version.cuda and os.path.isabs(found) and os.path.exists(found)), found"
    )
    subprocess.run([sys.executable, "-c", code, str(library)], check=True)


THROWS = """
#include <cstddef>
#include <cstdio>
#include <stdexcept>
extern "C" const char* said(void* (*malloc)(std::size_t, int, void*), std::size_t nbytes) {
  static char text[500];
  try {
    malloc(nbytes, 0, nullptr);
  } catch (const std::runtime_error& error) {
    std::snprintf(text, sizeof text, "%s", error.what());
    return text;
  }
  return "nothing";
}
"""


def test_out_of_memory_is_thrown_as_torch_expects_it(machine: tuple[Native, Standin], tmp_path: Path) -> None:
    native, standin = machine
    standin.limit(1 << 20)
    source = tmp_path / "throws.cpp"
    source.write_text(THROWS)
    library = ctypes.CDLL(str(build(source)))
    library.said.restype = ctypes.c_char_p
    malloc = ctypes.cast(getattr(native.arena, MALLOC), ctypes.c_void_p)
    text = library.said(malloc, ctypes.c_size_t(2 << 20)).decode()
    assert text.startswith("CUDA out of memory: tried to allocate 2097152 bytes; 0 are allocated")


# Steps of managed models.

CALLS = tuple(call for n in range(4) for call in (Call(block=f"{n}", nbytes=4 * KIB), Call(block=f"{n}")))


@pytest.fixture
def planned(machine: tuple[Native, Standin]) -> Iterator[PlannedAllocator]:
    allocator = PlannedAllocator(machine[0], plan_seconds=5.0)
    yield allocator
    allocator.close()


@pytest.fixture
def offload(planned: PlannedAllocator, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """memo.offload of a model on the CPU whose device memory is said to be the planned allocator's."""
    monkeypatch.setattr(
        "memo.manager.manager.model_steps", lambda model, device: ModelSteps(planned, model, torch.device("cuda", 0))
    )
    return lambda model: memo.offload(model, alpha=1.0, host="64MiB", min_bytes=512)


def began(planned: PlannedAllocator, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The signatures of the steps as they begin."""
    signatures: list[Any] = []
    begin = planned.begin_step

    def note(signature: Any, *, device: int) -> None:
        signatures.append(signature)
        begin(signature, device=device)

    monkeypatch.setattr(planned, "begin_step", note)
    return signatures


def test_a_managed_step_is_from_its_forward_to_step_done(
    machine: tuple[Native, Standin], planned: PlannedAllocator, offload: Callable[..., Any]
) -> None:
    model = stack()
    manager = offload(model)
    driver = Driver(machine[0])
    model.register_forward_hook(lambda *_: driver.run(CALLS))  # what the model's kernels would ask for
    for number in range(4):
        assert not planned.in_step
        with manager:
            assert not planned.in_step
            loss = model(ids(number))
            assert planned.in_step
        loss.backward()
        model.zero_grad()
        assert planned.in_step
        manager.step_done()
        if number == 2:
            planned.wait()
    assert planned.last is not None
    assert (planned.last.requests, planned.last.planned) == (4, 4)
    manager.close()


def test_without_step_done_a_step_ends_where_the_next_one_begins(
    planned: PlannedAllocator, offload: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    signatures = began(planned, monkeypatch)
    model = stack()
    manager = offload(model)
    for number in range(3):
        with manager:
            loss = model(ids(number))
        loss.backward()
        model.zero_grad()
    assert planned.in_step
    assert len(signatures) == 3
    assert len(set(signatures)) == 1
    manager.close()
    assert not planned.in_step


def test_microbatches_in_flight_are_one_step(
    planned: PlannedAllocator, offload: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    signatures = began(planned, monkeypatch)
    model = stack()
    manager = offload(model)
    with manager:
        first = model(ids(0))
    with manager:
        second = model(ids(1))
    first.backward()
    second.backward()
    manager.step_done()
    assert len(signatures) == 1
    manager.close()


def test_lengths_modes_and_gradients_make_signatures(
    planned: PlannedAllocator, offload: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    signatures = began(planned, monkeypatch)
    model = stack()
    manager = offload(model)

    def step(inputs: torch.Tensor) -> None:
        with manager:
            loss = model(inputs)
        if torch.is_grad_enabled():
            loss.backward()
        manager.step_done()

    step(ids(0))
    step(ids(0))  # into gradients that are there
    model.zero_grad()
    step(ids(0)[:, :8])
    model.zero_grad()
    model.eval()
    with torch.no_grad():
        step(ids(0))
    assert len(set(signatures)) == len(signatures) == 4
    model.train()
    step(ids(1))
    assert signatures[4] == signatures[0]
    manager.close()


def test_steps_that_the_program_names_are_left_alone(
    planned: PlannedAllocator, offload: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    signatures = began(planned, monkeypatch)
    model = stack()
    manager = offload(model)
    with planned.step("mine"):
        with manager:
            loss = model(ids(0))
        loss.backward()
        manager.step_done()
        assert planned.in_step
    assert signatures == ["mine"]
    assert planned.stage("mine") is AllocatorStage.RECORD
    manager.close()


def test_a_model_on_the_cpu_has_no_steps_to_plan(installed: SimpleNamespace) -> None:
    use_planned_allocator()
    assert pluggable.model_steps(stack(), torch.device("cpu")) is None
    assert pluggable.model_steps(stack(), torch.device("cuda", 0)) is not None


# memo train.


def test_train_refuses_what_cannot_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--planned-allocator", "--on", "cpu"]) == ExitCode.USAGE
    assert "needs a GPU" in capsys.readouterr().err


def test_train_brackets_its_steps_and_evaluations(
    planned: PlannedAllocator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    signatures = began(planned, monkeypatch)
    asked = []
    monkeypatch.setattr("memo.gpt.train.run.use_planned_allocator", lambda: asked.append("before CUDA"))
    monkeypatch.setattr("memo.gpt.train.run.active_allocator", lambda: planned)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    data = tmp_path / "text.txt"
    data.write_text("all work and no play " * 2000)
    command = (
        "train --planned-allocator --model tiny --layers 1 --seq 64 --steps 3 --eval-every 2 --eval-steps 1 --data"
    )
    assert main([*command.split(), str(data)]) == ExitCode.OK
    assert asked == ["before CUDA"]
    assert signatures == ["train", "train", "eval", "train", "eval"]
    assert not planned.in_step
