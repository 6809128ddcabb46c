"""The process of one way: builds the model, takes steps when told so, answers in JSON lines.

Requests come on stdin, one a line, answers go to stdout; what libraries print goes to stderr.

    {"do": "start", ...Request}      the model with its way around it
    {"do": "step", "steps": n}       n steps, the last of which counts
    {"do": "gradients", "file": F}   writes the last step's gradients to F, or compares them with F where it is there

A step is one forward and backward. `seconds` is by the clock, `processor_s` of all of the process's threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.comparison import guarded, relative_norm, synchronize
from benchmarks.limited import taken_bytes, use_at_most
from benchmarks.peers.libraries import load
from benchmarks.peers.models import Shape
from benchmarks.peers.request import ALPHAS, AUTOMATIC, IDENTITY, INPUTS, SAVED_TENSORS, Request
from benchmarks.peers.ways import Compute, Running, Way, libraries, memo_way, peers, saved_tensors_way, simple
from memo.autoplan import device_budget
from memo.machine.process_memory import return_freed_memory, rss_bytes
from memo.swap import Level

NEVER_RESIDENT_BYTES = 24 << 20
"""Limited data of a process that no plan counts: stacks of threads, blocks of the heap that are not touched, and arenas
that the C library sets up. A plan's budget is resident memory."""


def way_of(request: Request) -> Way:
    """The way of this name with its tiers.

    Raises:
        StopIteration: there is none of this name.
    """
    tiers: dict[str, Any] = {"host": request.host_bytes, "disk": [] if request.disk is None else request.disk}
    if request.min_bytes is not None:
        tiers["min_bytes"] = request.min_bytes
    levels = dict.fromkeys(range(request.shape.layers), Level.SAVE_INPUT)
    ways = [
        *peers(trl=None if request.trl is None else Path(request.trl), counted=request.counted),
        *libraries(),
        simple(IDENTITY, lambda model: saved_tensors_hooks(torch.Tensor.detach, lambda x: x), Compute.ONCE),
        *(memo_way(f"memo, {name}", alpha=alpha, **tiers) for name, alpha in ALPHAS.items()),
        saved_tensors_way(SAVED_TENSORS, **tiers),
        memo_way(INPUTS, levels=levels, **tiers),
        memo_way(AUTOMATIC, device=request.device_bytes, **tiers),
    ]
    return next(way for way in ways if way.name == request.way)


class _Peak:
    """The most memory in use since `restart`, also where memo restarts the system's counter between two layers."""

    def __init__(self, device: torch.device) -> None:
        self._most = 0
        self.budget = device_budget.device_budget_of(device, None)
        if device.type == "cpu":  # what is made from here on takes the function by this name
            original = device_budget.restart_peak_rss

            def noted() -> bool:
                self._most = max(self._most, self.budget.peak_bytes())
                return original()

            device_budget.restart_peak_rss = noted

    def restart(self) -> None:
        self.budget.restart()
        self._most = 0

    def peak_bytes(self) -> int:
        return max(self._most, self.budget.peak_bytes())


class _Process:
    """Model, way and counters between requests."""

    def __init__(self, kept: contextlib.ExitStack) -> None:
        self._kept = kept

    def start(self, request: Request) -> dict[str, Any]:
        self._device = torch.device(request.device)
        load(request.way)
        if self._device.type == "cpu":
            return_freed_memory()
        loaded = rss_bytes()
        if request.limit_bytes is not None:
            self._limit(request.limit_bytes)
            if request.way == AUTOMATIC and request.device_bytes is None:
                on_cpu = self._device.type == "cpu"
                budget = request.limit_bytes + (loaded - NEVER_RESIDENT_BYTES if on_cpu else 0)
                request = dataclasses.replace(request, device_bytes=budget)
        self._shape: Shape = request.shape
        self._model, self._ids = request.shape.make(self._device)
        self._memory = _Peak(self._device)
        self._rest = self._memory.budget.used_bytes()
        way = way_of(request)
        self._running: Running = self._kept.enter_context(way.start(self._model))
        return {
            "rest_bytes": self._rest,
            "loaded_bytes": loaded,
            "saved": self._saved_tensors() if request.count else None,
        }

    def _limit(self, nbytes: int) -> None:
        if self._device.type == "cuda":
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(nbytes / total, 1.0), self._device)
        else:
            use_at_most(taken_bytes() + nbytes)

    def _saved_tensors(self) -> int:
        """Tensors that autograd saves in a step, before anything is around the model."""
        number = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal number
            number += 1
            return tensor.detach()

        with saved_tensors_hooks(count, lambda tensor: tensor):
            self._shape.loss(self._model, self._ids)
        return number

    def step(self, steps: int) -> dict[str, Any]:
        for _ in range(steps):
            found = self._step()
        return found

    def _step(self) -> dict[str, Any]:
        running, moved = self._running, self._running.moved()
        self._model.zero_grad(set_to_none=True)
        synchronize(self._device)
        self._memory.restart()
        began, processor = time.perf_counter(), time.process_time()
        with running.around():
            loss = self._shape.loss(self._model, self._ids)
            if running.backward_inside:
                loss.backward()
        if not running.backward_inside:
            loss.backward()
        synchronize(self._device)
        processor_s, seconds = time.process_time() - processor, time.perf_counter() - began
        peak = self._memory.peak_bytes()
        running.done()
        copied = running.moved().since(moved)
        return {
            "seconds": seconds,
            "processor_s": processor_s,
            "peak_bytes": peak,
            "above_rest_bytes": peak - self._rest,
            "out_bytes": copied.out_bytes,
            "back_bytes": copied.back_bytes,
            "hidden": running.hidden(),
            "loss": float(loss.detach()),
        }

    def gradients(self, file: Path) -> dict[str, Any]:
        found = {name: value.grad for name, value in self._model.named_parameters() if value.grad is not None}
        if not file.exists():
            torch.save({name: gradient.cpu() for name, gradient in found.items()}, file)
            return {"difference": 0.0}
        expected = torch.load(file, weights_only=True)
        if set(expected) != set(found):
            return {"difference": float("inf")}
        return {"difference": max(relative_norm(gradient, expected[name]) for name, gradient in found.items())}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        do = asked.pop("do")
        if do == "start":
            return self.start(Request.from_json(asked))
        if do == "step":
            return self.step(asked["steps"])
        return self.gradients(Path(asked["file"]))


@contextlib.contextmanager
def _answers() -> Iterator[Any]:
    """stdout as it was given; whatever else is printed goes to stderr."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        yield answers


def main() -> None:
    with _answers() as answers, contextlib.ExitStack() as kept:
        process = _Process(kept)
        for line in sys.stdin:
            asked = json.loads(line)
            found = guarded(lambda asked=asked: process.answer(asked))
            print(json.dumps({"failed": found} if isinstance(found, str) else found), file=answers, flush=True)
            if isinstance(found, str):
                break
        # A step that failed under a limit leaves nothing that can be closed in the memory that is left.
        if isinstance(found, str):
            os._exit(0)


if __name__ == "__main__":
    main()
