"""Measures ways to hold a step's activations on one model at one length: one row after the other.

Ways run one after the other and not in turns, since the host memory of two need not fit at once: some steps to warm up, in
which kernels are chosen and recomputes tried, then the rounds, of which the median counts. A step is forward and backward,
and AdamW where asked for, at a learning rate of 0: every way starts from the same weights. A way that fails is a row that
says why. A GPU's attention adds gradients in any order, so that on a GPU those that are compared are of one more step,
by torch's deterministic algorithms.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

import memo
from benchmarks.peers.ways import Running, Way
from benchmarks.table import Row, Table
from memo.autoplan.device_budget import device_budget_of
from memo.gpt.config import GPTConfig
from memo.gpt.model.model import GPT
from memo.gpt.optim.optimizer import adamw
from memo.machine.link_bandwidth import LinkRates, measure_link
from memo.mip.inputs import peak_flops

LINK_SECONDS = 0.5
LINE = 400
"""Characters of an error that a row shows: what could not be allocated is among them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Device, model and number of steps that every way runs with."""

    model: str
    """Its name, for people."""
    device: torch.device
    rounds: int
    warm_up_steps: int = 2
    warm_up_tokens: int | None = None
    """Fewer than in a measured step, where that takes long."""
    optimizer: bool = False
    compares_bits: bool = True
    """On a GPU: runs one more step, by deterministic algorithms, whose gradients are compared; else the last measured step's
    are, which differ from run to run."""
    dtype: torch.dtype = torch.bfloat16

    def make(self, config: GPTConfig) -> tuple[GPT, torch.Tensor]:
        """The same weights and tokens every time."""
        torch.manual_seed(0)
        model = GPT(config, device=self.device, dtype=self.dtype)
        return model, torch.randint(0, config.vocab_size, (1, config.max_seq + 1), device=self.device)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step that ran."""

    seconds: float
    peak_bytes: int
    """Of the device."""
    loss: float


def now() -> str:
    """Date and time of day, UTC, to the second."""
    return datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")


def synchronize(device: torch.device) -> None:
    """Returns when the device has done all that it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def train_step(
    model: nn.Module, ids: torch.Tensor, running: Running, optimizer: torch.optim.Optimizer | None = None
) -> Step:
    """Forward, backward and the optimizer, if there is one; the gradients are new and are left."""
    memory = device_budget_of(ids.device, None)
    model.zero_grad(set_to_none=True)
    synchronize(ids.device)
    memory.restart()
    begin = time.perf_counter()
    with running.around():
        loss = model(ids[:, :-1], ids[:, 1:])
        if running.backward_inside:
            loss.backward()
    if not running.backward_inside:
        loss.backward()
    if optimizer is not None:
        optimizer.step()
    synchronize(ids.device)
    step = Step(seconds=time.perf_counter() - begin, peak_bytes=memory.peak_bytes(), loss=float(loss.detach()))
    running.done()
    return step


def guarded(run: Callable[[], Any]) -> Any:
    """The result of `run`, or one line that says why there is none. Shows where an error arose that is no lack of memory."""
    try:
        return run()
    except (torch.OutOfMemoryError, memo.MemoError) as error:
        return _first_line(error)
    except Exception as error:  # a peer's, or what only this machine shows: the other rows are still worth their time
        traceback.print_exc(file=sys.stderr)
        return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return line if len(line) <= LINE else f"{line[:LINE]}..."


def release_memory() -> None:
    """Gives back what torch keeps for later: device memory, and pinned memory in powers of two."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()


class Comparison:
    """A model, its batch, and the table that is made of them."""

    def __init__(self, setup: Setup, config: GPTConfig) -> None:
        self._setup = setup
        self._model, self._ids = setup.make(config)
        self._optimizer = (
            adamw(self._model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1) if setup.optimizer else None
        )
        self._gradients: dict[str, torch.Tensor] = {}
        self._reference: str | None = None
        self.table = Table(
            model=setup.model,
            config=config,
            rounds=setup.rounds,
            link=link_rates(setup.device),
            peak_flops=_peak_flops(setup.device),
        )

    def measure(self, way: Way) -> Row:
        """Adds the row of `way`; nothing of it is held afterwards."""
        found = guarded(lambda: self._measured(way))
        row = found if isinstance(found, Row) else self.failed(way, found)
        self._model.zero_grad(set_to_none=True)
        release_memory()
        self.table.rows.append(row)
        return row

    def failed(self, way: Way, why: str) -> Row:
        """The row of a way that did not run."""
        return Row(way=way.name, at=now(), compute=way.compute, failed=why)

    def _measured(self, way: Way) -> Row:
        setup = self._setup
        if setup.device.type == "cuda":
            torch.cuda.reset_peak_host_memory_stats()
        begin = time.perf_counter()
        with way.start(self._model) as running:
            start_s = time.perf_counter() - begin
            for _ in range(setup.warm_up_steps):
                self._step(running, setup.warm_up_tokens)
            before, waited = running.moved(), running.waited_s()
            steps = [self._step(running) for _ in range(setup.rounds)]
            moved, after = running.moved().since(before), running.waited_s()
            host = pinned_bytes(setup.device) if running.host_bytes is None else running.host_bytes()
            report = running.report()
            failed = guarded(lambda: self._repeatable_step(running))
            if failed:
                print(f"  {way.name}: gradients are not compared: {failed}", flush=True)
        difference = None if failed else self._difference(way.name)
        return Row(
            way=way.name,
            at=now(),
            compute=way.compute,
            start_s=start_s,
            step_s=statistics.median(step.seconds for step in steps),
            loss=steps[-1].loss,
            moved=moved.shared(setup.rounds),
            waited_s=None if after is None or waited is None else (after - waited) / setup.rounds,
            peak_device_bytes=max(step.peak_bytes for step in steps),
            peak_host_bytes=host,
            gradient_difference=difference,
            compared_with=self._reference,
            report=report,
        )

    def _repeatable_step(self, running: Running) -> None:
        if self._setup.compares_bits and self._setup.device.type == "cuda":
            with deterministic():
                self._step(running)

    def _step(self, running: Running, tokens: int | None = None) -> Step:
        ids = self._ids if tokens is None else self._ids[:, : tokens + 1]
        return train_step(self._model, ids, running, self._optimizer)

    def _difference(self, name: str) -> float:
        """To the gradients of the first way that came here, which are kept in host memory."""
        named = [(key, value.grad) for key, value in self._model.named_parameters() if value.grad is not None]
        if self._reference is None:
            self._gradients = {key: gradient.cpu() for key, gradient in named}
            self._reference = name
        return max(relative_norm(gradient, self._gradients[key]) for key, gradient in named)


def compare(
    setup: Setup, config: GPTConfig, ways: Iterable[Way], written: Callable[[Table], Any] = lambda table: None
) -> Table:
    """Measures each way, prints its row, and hands the table so far to `written`: what is cut off leaves what it had."""
    comparison = Comparison(setup, config)
    table = comparison.table
    print(table.heading(), flush=True)
    for way in ways:
        print(table.line(comparison.measure(way)), flush=True)
        written(table)
    return table


def relative_norm(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|; 0 for the same bits, and never otherwise."""
    expected = expected.to(found.device)
    if torch.equal(found, expected):
        return 0.0
    norm = float((found.double() - expected.double()).norm() / expected.double().norm())
    return norm if norm > 0 else float("inf")


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """torch's deterministic algorithms, without filling what is allocated, which takes time and finds nothing here."""
    settings = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]  # type: ignore[attr-defined]


def pinned_bytes(device: torch.device) -> int | None:
    """The most host memory that torch has pinned; None on a CPU."""
    return int(torch.cuda.host_memory_stats()["allocated_bytes.peak"]) if device.type == "cuda" else None


def _peak_flops(device: torch.device) -> float | None:
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


@functools.cache
def link_rates(device: torch.device) -> LinkRates | None:
    """Rates of the GPU's link, measured once in a process; None on a CPU."""
    return measure_link(device, seconds=LINK_SECONDS) if device.type == "cuda" else None
