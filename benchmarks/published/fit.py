"""The fit of each GPU's rates on half of the rows.

Owns the parameters, their bounds and the search. Rows are in the half by a hash of their text; the other half is never
looked at here. One set of rates serves all tables of a kind of GPU. What is minimal is the mean size of the errors'
logarithms, in which a row that is far off weighs no more than its distance, and a table by the root of its rows.

A step is in proportion to one microbatch's work while rates change a little. So the search runs on the work, and what a
step is of it is computed anew between rounds.
"""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.published.kernel_times import KernelRates
from benchmarks.published.rows import TABLES
from benchmarks.published.run import Fitted
from benchmarks.published.target import Target

FITTED = TABLES / "fitted.json"
"""Result of the fit."""

# Parameter: start, least, most. Physical bounds: nothing is above its peak.
PARAMETERS: dict[str, tuple[float, float, float]] = {
    "matmul_efficiency": (0.7, 0.3, 1.0),
    "half_size": (64.0, 0.0, 512.0),
    "attention_efficiency": (0.4, 0.05, 0.9),
    "memory_share": (0.8, 0.3, 1.0),
    "node_efficiency": (0.8, 0.4, 1.0),
    "nic_efficiency": (0.8, 0.4, 1.0),
    "fp8_gain": (1.4, 1.0, 2.0),
}
RATES = ("matmul_efficiency", "half_size", "attention_efficiency", "memory_share", "fp8_gain")
ROUNDS, STEPS = 4, 400


def kind_of(gpu: str) -> str:
    """Kind of GPU whose rates are one: cards that differ in memory alone are of one kind."""
    return {"a100-80g": "a100", "a100-40g": "a100"}.get(gpu, gpu)


def read_fitted(path: Path = FITTED) -> dict[str, Fitted]:
    """Rates by kind of GPU."""
    kinds: dict[str, dict[str, Any]] = json.loads(path.read_text())["kinds"]
    return {kind: _fitted(known["rates"]) for kind, known in kinds.items()}


def fit_all(targets: Sequence[Target]) -> dict[str, Any]:
    """Fits the rates of each kind of GPU.

    Args:
        targets: of the rows in the half that may be fitted.

    Returns:
        What `read_fitted` reads: parameters by kind, with the numbers of rows of each table that they come from.
    """
    by_kind: dict[str, list[Target]] = {}
    for target in targets:
        if target.work is not None:
            by_kind.setdefault(kind_of(target.gpu), []).append(target)
    kinds = {}
    for kind, own in sorted(by_kind.items()):
        counts = collections.Counter(target.table for target in own)
        kinds[kind] = {"rates": _fit(own), "numbers_by_table": dict(sorted(counts.items()))}
    return {"fitted_on": "rows whose text's SHA-256 begins with an even byte", "kinds": kinds}


def _fitted(values: dict[str, float]) -> Fitted:
    rates = KernelRates(**{name: values[name] for name in RATES})
    return Fitted(rates=rates, node_efficiency=values["node_efficiency"], nic_efficiency=values["nic_efficiency"])


def _fit(targets: Sequence[Target]) -> dict[str, float]:
    names = list(PARAMETERS)
    point = [_to_line(name, PARAMETERS[name][0]) for name in names]
    for _ in range(ROUNDS):
        now = _fitted(_values(names, point))
        scales = [target.predict(now) / _work(target, now) for target in targets]

        def loss(place: Sequence[float], scales: Sequence[float] = scales) -> float:
            fitted = _fitted(_values(names, place))
            errors: dict[str, list[float]] = {}
            for target, scale in zip(targets, scales, strict=True):
                error = abs(math.log(scale * _work(target, fitted) / target.published))
                errors.setdefault(target.table, []).append(error)
            mean = sum(sum(own) / math.sqrt(len(own)) for own in errors.values())
            mean /= sum(math.sqrt(len(own)) for own in errors.values())
            # A pull to the start, weaker than any row's: it settles what the rows leave open.
            away = sum((a - _to_line(name, PARAMETERS[name][0])) ** 2 for name, a in zip(names, place, strict=True))
            return mean + 1e-4 * away

        point = _simplex(loss, point, steps=STEPS)
    return {name: float(f"{value:.4g}") for name, value in _values(names, point).items()}


def _work(target: Target, fitted: Fitted) -> float:
    assert target.work is not None
    return target.work(fitted)


def _to_line(name: str, value: float) -> float:
    """A parameter within its bounds as any number."""
    _, least, most = PARAMETERS[name]
    share = min(max((value - least) / (most - least), 1e-6), 1 - 1e-6)
    return math.log(share / (1 - share))


def _values(names: Sequence[str], place: Sequence[float]) -> dict[str, float]:
    found = {}
    for name, number in zip(names, place, strict=True):
        _, least, most = PARAMETERS[name]
        found[name] = least + (most - least) / (1 + math.exp(-max(min(number, 30.0), -30.0)))
    return found


def _simplex(loss: Callable[[Sequence[float]], float], start: Sequence[float], *, steps: int) -> list[float]:
    """Minimum by the method of Nelder and Mead (1965)."""
    corners = [list(start)]
    for axis in range(len(start)):
        corners.append([value + (0.5 if at == axis else 0.0) for at, value in enumerate(start)])
    costs = [loss(corner) for corner in corners]
    for _ in range(steps):
        order = sorted(range(len(corners)), key=costs.__getitem__)
        corners, costs = [corners[at] for at in order], [costs[at] for at in order]
        middle = [sum(axis) / len(axis) for axis in zip(*corners[:-1], strict=True)]

        def moved(by: float, middle: Sequence[float] = middle, worst: Sequence[float] = corners[-1]) -> list[float]:
            return [m + by * (m - w) for m, w in zip(middle, worst, strict=True)]

        tried = moved(1.0)
        cost = loss(tried)
        if cost < costs[0]:
            further = moved(2.0)
            further_cost = loss(further)
            if further_cost < cost:
                tried, cost = further, further_cost
        elif cost >= costs[-2]:
            tried = moved(-0.5)
            cost = loss(tried)
            if cost >= costs[-1]:
                best = corners[0]
                corners = [best] + [[(a + b) / 2 for a, b in zip(best, corner, strict=True)] for corner in corners[1:]]
                costs = [costs[0]] + [loss(corner) for corner in corners[1:]]
                continue
        corners[-1], costs[-1] = tried, cost
    return corners[min(range(len(corners)), key=costs.__getitem__)]
