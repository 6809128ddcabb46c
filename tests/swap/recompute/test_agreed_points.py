"""Points of a layer whose ranks exchange tokens: what all ranks agreed to repeat does not rename the layer's points."""

from __future__ import annotations

import functools

import memo
from memo.gpt import preset
from memo.manager import use_machine
from memo.parallel import Layout
from memo.rehearsal import SimulatedMachine, gpt_step_of_rank
from memo.rehearsal.run import ranks_of
from memo.swap import setting_of

LAYOUT = Layout(cp=2)


def moved(point: str) -> tuple[int, dict[str, int]]:
    """Bytes that a step moves with all layers at a point, and the bytes that each point of a layer keeps."""
    machine = SimulatedMachine("h100", ranks=LAYOUT.ranks)
    build = functools.partial(gpt_step_of_rank(preset("tiny"), LAYOUT), batch=1, tokens=4096)
    with use_machine(machine), ranks_of(machine), machine.kernels:
        step = build()
        machine.kernels.forget(parameter.to_local() for parameter in step.model.parameters())
        manager = memo.offload(
            step.model, layers=step.layers, group=step.group, alpha=setting_of({point: 1.0}), host="1GiB", min_bytes=1
        )
        before = 0
        for _ in range(
            3
        ):  # replays are agreed on, and tried; the order of backward is learned; a step as all that follow
            before = manager.stats.bytes_host
            with manager:
                loss = step.loss()
            loss.backward()
        points = {each.name: each.kept_nbytes for each in manager.explain(0).points}
        manager.close()
        return manager.stats.bytes_host - before, points


def test_each_point_keeps_what_its_name_says() -> None:
    """A planner that asks for p5 once got the layer's input alone, and attention was repeated."""
    layers = preset("tiny").layers - 1  # what the last one saves stays
    _, points = moved("p1")
    inner = [name for name in points if name.startswith("p")]
    assert len(inner) > 4
    assert {name: moved(name)[0] for name in inner} == {name: layers * points[name] for name in inner}


def test_a_point_beyond_the_last_repeats_no_attention() -> None:
    nbytes, points = moved("p11")
    assert nbytes == (preset("tiny").layers - 1) * points["attention"]
