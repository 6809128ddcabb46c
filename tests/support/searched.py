"""Searches of small clusters with the data of their pages."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from memo.cli.planning.picture import search_page
from memo.cli.tables.layouts import Answer, search_summary
from memo.mip.simulate import Simulation, verify_by_simulation
from memo.search import Found, Planned, Space, runs_under_memo_train, search_layouts

HOSTILE = "</script><b>model\u202e"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Searched:
    found: Found
    shown: list[tuple[Planned, Simulation]]
    answer: dict[str, Any]
    page: dict[str, Any]


def searched(space: Space, *, model: str = "small") -> Searched:
    """What `memo plan --search --html` makes of a space; the model and the machine have the name that is given."""
    request = space.request
    machine = dataclasses.replace(request.machine, name=model)
    space = dataclasses.replace(space, request=dataclasses.replace(request, model=model, machine=machine))
    found = search_layouts(space, runs=runs_under_memo_train)
    runs = [] if found.runnable is None or found.runnable in found.best else [found.runnable]
    shown = [(one, verify_by_simulation(one.plan)) for one in (*found.best, *runs)]
    written = found.runnable or found.best[0]
    steps = {one.candidate: simulation.step_s for one, simulation in shown}
    of_search = Answer(found=found, simulated_s=steps, launch=None, not_trained=f"it is {model}", written=written)
    answer = {
        **search_summary(of_search),
        "assumed": [f"a model of the name {model}"],
        "seconds": 1.5,
        "output": None,
    }
    page = search_page(answer, shown, space=space, written=written.candidate)
    return Searched(found=found, shown=shown, answer=json.loads(json.dumps(answer)), page=json.loads(json.dumps(page)))
