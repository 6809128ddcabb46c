"""Host cost of a divided layer: the step of a small GPT, layer by layer, against the same step without memo.

    python -m benchmarks.tokenwise_cost [--beside CHECKOUT] [--rounds N] [--no-write]

A forward of a divided layer is noted operator by operator, and backward runs it again along what was noted. With layers so
small that their kernels take next to nothing, what is left is the host's own work; copies are answered at once by the
stand-in tier of hook_cost. Told is the processor time of this thread, a layer, forward and backward apart: of the step
without memo, with whole tensors moved, and with tokens divided between two levels and three. `--beside` measures another
checkout (with an environment in its `.venv`) in turn with this one, round by round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.hook_cost import KeepsTheSource
from benchmarks.results import write_result
from memo.gpt.config import preset
from memo.gpt.model.model import GPT
from memo.manager.manager import Manager
from memo.swap.backends.cpu import CpuBackend
from memo.swap.engine.engine import Engine
from memo.swap.layers import find_layers
from memo.swap.recompute.token_wise import TokenWise
from memo.swap.token_levels import setting_of

LAYERS = 16
TOKENS = 64
WARM_UP = 5
SETTINGS = {"alpha 1": 1.0, "alpha 1/2": 0.5, "three levels": (0.25, 0.5, 0.25)}

Times = dict[str, tuple[float, float]]
"""Setting -> milliseconds a layer, of forward and of backward."""


class Steps:
    """One GPT, and a manager for each setting."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._model = GPT(preset("tiny", layers=LAYERS, hidden=64, heads=2, vocab_size=64, max_seq=TOKENS))
        self._ids = torch.randint(0, 64, (1, TOKENS))
        self._arms: dict[str, Any] = {"without memo": contextlib.nullcontext()}
        for name, setting in SETTINGS.items():
            backend = CpuBackend()
            backend.empty = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)  # type: ignore[method-assign]
            engine = Engine(backend, [KeepsTheSource()], min_bytes=1)
            tokenwise = TokenWise(engine, setting_of(setting))
            self._arms[name] = Manager(self._model, find_layers(self._model), engine, tokenwise=tokenwise)

    def round(self) -> Times:
        return {name: self._step(context) for name, context in self._arms.items()}

    def _step(self, context: Any) -> tuple[float, float]:
        begin = time.thread_time_ns()
        with context:
            loss = self._model(self._ids, self._ids)
        middle = time.thread_time_ns()
        loss.backward()
        end = time.thread_time_ns()
        return (middle - begin) / 1e6 / LAYERS, (end - middle) / 1e6 / LAYERS


class Beside:
    """The same in a process of another checkout, which this file need not be part of."""

    def __init__(self, checkout: Path) -> None:
        source = Path(__file__).read_text()
        command = [str(checkout / ".venv/bin/python"), "-c", source, "--serve"]
        self._process = subprocess.Popen(
            command, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def round(self) -> Times:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        times: Times = json.loads(self._process.stdout.readline())
        return times

    def close(self) -> None:
        self._process.communicate()


def serve() -> None:
    """One round for each line of the standard input."""
    steps = Steps()
    for _ in sys.stdin:
        print(json.dumps(steps.round()), flush=True)


def summary(rounds: list[Times]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name in rounds[0]:
        for half, way in enumerate(("forward", "backward")):
            times = [times[name][half] for times in rounds]
            told.setdefault(name, {})[f"{way}_ms"] = {"median": statistics.median(times), "min": min(times)}
    return told


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve()
    beside = None if options.beside is None else Beside(options.beside.resolve())
    arms: dict[str, Any] = {"this": Steps(), **({} if beside is None else {"beside": beside})}
    rounds: dict[str, list[Times]] = {name: [] for name in arms}
    for number in range(options.rounds + WARM_UP):
        for name, arm in arms.items():
            times = arm.round()
            if number >= WARM_UP:
                rounds[name].append(times)
    if beside is not None:
        beside.close()
    told = {name: summary(times) for name, times in rounds.items()}
    for tree, settings in told.items():
        for setting, ways in settings.items():
            figures = ", ".join(f"{way[:-3]} {ms['median']:.2f} ({ms['min']:.2f})" for way, ms in ways.items())
            print(f"{tree:7} {setting:13} ms a layer, median (least): {figures}")
    result = {
        "torch": torch.__version__,
        "layers": LAYERS,
        "tokens": TOKENS,
        "rounds": options.rounds,
        "ms_a_layer": told,
    }
    if not options.no_write:
        print(f"Wrote {write_result('tokenwise-cost', result)}")
    return None


if __name__ == "__main__":
    main()
