"""Parts switched off are off: the plan or the engine no longer has them, and gradients stay what they were."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from benchmarks.parts import ENGINE, PLANNED, _without
from benchmarks.plan_accuracy import LAYERS, Bench, Case
from benchmarks.solver.problems import Named, problems
from benchmarks.solver.rules import lp
from memo.mip.inputs import MATMULS
from memo.swap import Level
from memo.swap.engine import h2d

BINDING = 6
"""Of the thirty: 1.3b at 16k tokens, whose link hides a part of the copies."""


@pytest.fixture(scope="module")
def binding() -> Named:
    return next(itertools.islice(problems(), BINDING, None))


def test_a_step_with_a_part_off_is_no_shorter_and_some_are_longer(binding: Named) -> None:
    steps = {part: off(binding.problem) for part, off in PLANNED.items()}
    on = steps["everything on"]
    assert on is not None
    assert all(step is None or step >= on * (1 - 1e-6) for step in steps.values())
    assert any(step is not None and step > on * 1.01 for step in steps.values())


def test_a_level_that_is_off_is_in_no_layers_plan(binding: Named) -> None:
    found, off = lp(binding.problem), lp(_without(binding.problem, MATMULS))
    assert found is not None
    assert off is not None
    assert any(plan.point == MATMULS for plan in found.plan.layers)
    assert not any(plan.point == MATMULS for plan in off.plan.layers)


def test_reloads_are_not_ahead_where_that_is_off_and_gradients_are_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead = 0
    original = h2d.Reload._fetch_group

    def counted(self: h2d.Reload, group: Any, away: Any) -> bool:
        nonlocal ahead
        ahead += bool(away) and group is not self._layer_calls.reading
        return original(self, group, away)

    monkeypatch.setattr(h2d.Reload, "_fetch_group", counted)
    bench = Bench(Case(tokens=64, link_bytes_per_s=480e6, device_layers=LAYERS, host_layers=LAYERS))
    bench.step(None)
    plain = [parameter.grad.clone() for parameter in bench.model.parameters() if parameter.grad is not None]
    of_part = {}
    for part, off in ENGINE.items():
        manager, _, tapes = bench.manager()
        tapes.choose({layer.name: Level.SAVE_ALL for layer in manager.layers})
        ahead = 0
        with off():
            for _ in range(2):
                bench.step(manager)
        of_part[part] = ahead
        found = [parameter.grad for parameter in bench.model.parameters() if parameter.grad is not None]
        assert len(found) == len(plain)
        assert all(map(torch.equal, found, plain)), part
        manager.close()
    assert of_part["no reload ahead of its layer"] == 0
    assert of_part["everything on"] > 0
