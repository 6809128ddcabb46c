"""Host cost of a managed layer: the step of a small GPT and of a small Llama against the same step without memo.

    python -m benchmarks.recompute_cost [--beside CHECKOUT] [--rounds N] [--tokens N] [--only SETTING ...] [--no-write]

A forward is noted operator by operator, and backward runs a part of it again along what was noted. With layers so
small that their kernels take next to nothing, what is left is the host's own work; copies are answered at once by the
stand-in tier of hook_cost. Told is the processor time of this thread, a layer, forward and backward apart: of the step
without memo, with all that is saved moved (the engine alone), and with cuts between two levels and three. The GPT is
of fused kernels; the Llama is written in torch's operators as transformers has it, and saves some forty tensors a layer.
`--beside` measures another checkout (with an environment in its `.venv`) in turn with this one, round by round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.hook_cost import KeepsTheSource
from benchmarks.results import write_result
from memo.gpt.config import preset
from memo.gpt.model.model import GPT
from memo.manager.manager import Manager
from memo.swap import find_layers, setting_of
from memo.swap.backends.cpu import CpuBackend
from memo.swap.engine.engine import Engine
from memo.swap.recompute.policy import RecomputePolicy

LAYERS = 16
TOKENS = 64
WARM_UP = 5
SETTINGS = {"alpha 1": 1.0, "alpha 1/2": 0.5, "three levels": (0.25, 0.5, 0.25)}

Times = dict[str, tuple[float, float]]
"""Setting -> milliseconds a layer, of forward and of backward."""


class Norm(nn.Module):
    """Root mean square norm, written out."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class LlamaLayer(nn.Module):
    """Grouped-query attention with rotary positions, and a gated MLP."""

    def __init__(self, hidden: int = 64, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.width = width = hidden // heads
        self.norm1, self.norm2 = Norm(hidden), Norm(hidden)
        self.q, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(hidden, groups * width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, 2 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (project(h).unflatten(-1, (-1, self.width)).transpose(1, 2) for project in (self.q, self.k, self.v))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Layers of a Llama, embedding and head."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(LAYERS))
        self.head = nn.Linear(64, 64, bias=False)
        angle = torch.arange(tokens)[:, None] * torch.logspace(0, -4, 8).repeat(2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _gpt(tokens: int) -> nn.Module:
    return GPT(preset("tiny", layers=LAYERS, hidden=64, heads=2, vocab_size=64, max_seq=tokens))


MODELS = {"gpt": _gpt, "llama": Llama}


class Steps:
    """One model of each kind, and a manager for each setting."""

    def __init__(self, settings: list[str], tokens: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._ids = torch.randint(0, 64, (1, tokens))
        self._arms: dict[str, tuple[nn.Module, Any]] = {}
        for kind, make in MODELS.items():
            model = make(tokens)
            self._arms[f"{kind}, without memo"] = model, contextlib.nullcontext()
            for name in settings:
                backend = CpuBackend()
                backend.empty = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)  # type: ignore[method-assign]
                engine = Engine(backend, [KeepsTheSource()], min_bytes=1)
                recompute_policy = RecomputePolicy(engine, setting_of(SETTINGS[name]))
                self._arms[f"{kind}, {name}"] = (
                    model,
                    Manager(model, find_layers(model), engine, recompute_policy=recompute_policy),
                )

    def round(self) -> Times:
        return {name: self._step(model, context) for name, (model, context) in self._arms.items()}

    def _step(self, model: nn.Module, context: Any) -> tuple[float, float]:
        begin = time.thread_time_ns()
        with context:
            loss = model(self._ids, self._ids)
        middle = time.thread_time_ns()
        loss.backward()
        end = time.thread_time_ns()
        return (middle - begin) / 1e6 / LAYERS, (end - middle) / 1e6 / LAYERS


class Beside:
    """The same in a process of another checkout, which this file need not be part of."""

    def __init__(self, checkout: Path, settings: list[str], tokens: int) -> None:
        source = Path(__file__).read_text()
        command = [str(checkout / ".venv/bin/python"), "-c", source, "--serve"]
        command += ["--tokens", str(tokens), "--only", *settings]
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


def serve(settings: list[str], tokens: int) -> None:
    """One round for each line of the standard input."""
    steps = Steps(settings, tokens)
    for _ in sys.stdin:
        print(json.dumps(steps.round()), flush=True)


def summary(rounds: list[Times]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name in rounds[0]:
        for half, way in enumerate(("forward", "backward")):
            times = [times[name][half] for times in rounds]
            told.setdefault(name, {})[f"{way}_ms"] = {"median": statistics.median(times), "min": min(times)}
    return told


def plain(arm: str) -> str:
    """The arm that tells what an arm's model takes alone."""
    return f"{arm.partition(',')[0]}, without memo"


def figures(ways: dict[str, Any], alone: dict[str, Any]) -> Iterator[str]:
    """Forward, backward, and both over the model alone."""
    for way, ms in ways.items():
        yield f"{way[:-3]} {ms['median']:.3f} ({ms['min']:.3f})"
    over = {kind: sum(ways[way][kind] - alone[way][kind] for way in ways) for kind in ("median", "min")}
    yield f"over plain {over['median']:.3f} ({over['min']:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="SETTING")
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.only, options.tokens)
    beside = None if options.beside is None else Beside(options.beside.resolve(), options.only, options.tokens)
    arms: dict[str, Any] = {
        "this": Steps(options.only, options.tokens),
        **({} if beside is None else {"beside": beside}),
    }
    rounds: dict[str, list[Times]] = {name: [] for name in arms}
    for number in range(options.rounds + WARM_UP):
        for name, arm in arms.items():
            times = arm.round()
            if number >= WARM_UP:
                rounds[name].append(times)
    if beside is not None:
        beside.close()
    told = {name: summary(times) for name, times in rounds.items()}
    for tree, arms_told in told.items():
        for arm, ways in arms_told.items():
            print(f"{tree:7} {arm:19} ms a layer, median (least): {', '.join(figures(ways, arms_told[plain(arm)]))}")
    result = {
        "torch": torch.__version__,
        "layers": LAYERS,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "ms_a_layer": told,
    }
    if not options.no_write:
        print(f"Wrote {write_result('recompute-cost', result)}")
    return None


if __name__ == "__main__":
    main()
