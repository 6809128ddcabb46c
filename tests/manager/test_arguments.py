"""Invalid arguments of `memo.offload`: each gives one line of its own, and nothing is left open."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from activation_problems import random_problem
from torch import nn

import memo
from memo.errors import MemoError, NoRepeatedLayers, UsageError
from memo.mip.activation import plan_to_json, solve_problem


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.inner(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"alpha": "x"}, "alpha: 'x' is neither a fraction"),
        ({"alpha": float("nan")}, "alpha: nan is no fraction"),
        ({"levels": 5}, "levels: 5 is not a dict"),
        ({"alpha": (0.5, 0.5, 0.5)}, "alpha: 0.5, 0.5, 0.5 are not fractions that sum to 1"),
        ({"levels": {0: "x"}}, "levels[0]: 'x' is neither a fraction"),
        ({"levels": {"layers.1": 2.0}}, "levels['layers.1']: 2.0 is no fraction"),
        ({"levels": {0: (0.5, 0.5, 0.5)}}, "levels[0]: 0.5, 0.5, 0.5 are not fractions that sum to 1"),
        ({"keep": "mm"}, "keep: 'mm' is no list of names such as ['aten.mm', 'attention']"),
        ({"keep": [5]}, "keep: [5] is no list of names"),
        ({"keep": {0: "mm"}}, "keep[0]: 'mm' is no list of names"),
        ({"keep": {3: ["mm"]}}, "keep: no layer 3; there are 3"),
        ({"keep": ["m m"]}, "keep: no operator 'm m'; give names such as 'aten.mm' or 'mm', or one of the groups"),
        ({"repeat": {"layers.1": ["aten.no"]}}, "repeat: no operator 'aten.no'"),
        ({"keep": ["mm"], "repeat": {1: ["mm"]}}, "keep and repeat: 'mm' is in both"),
        ({"device": "cuda:0"}, "device: 'cuda:0' is no budget of memory, such as device='70GiB'"),
        ({"host": 64}, "host: 64 is 64 bytes; write '64GiB'"),
        ({"device": 80}, "device: 80 is 80 bytes; write '80GiB'"),
        ({"disk_budget": 1000}, "disk_budget: 1000 is 1000 bytes"),
        ({"plan": 5}, "plan: 5 is not an activation plan or the name of its file"),
        ({"plan": {"layers": "x" * 99}}, "plan: a dict is not an activation plan"),
        ({"layers": 5}, "layers: 5 is not a ModuleList"),
        ({"layers": "layers.0"}, "layers: 'layers.0' is a name; give the modules: model.get_submodule('layers.0')"),
        ({"plan": "nope.json", "alpha": 0.5}, "plan: it excludes alpha and levels"),
        ({"plan": "nope.json", "on_full": "no"}, "on_full: 'no' is none of"),
        ({"host": "1GiB", "disk_budget": "1GiB"}, "disk_budget: there is no disk; give disk='/scratch', too"),
        ({"layers": nn.Conv2d}, "layers: no module of Model is a Conv2d"),
        ({"layers": []}, "layers: the list is empty"),
        ({"layers": [nn.Linear(2, 2)]}, "layers: Linear is not a part of the model"),
        ({"disk": 5}, "disk: 5 is not the name of a directory, or a list of them"),
        ({"disk": ["/tmp", 5]}, "disk: 5 is not the name of a directory"),
        ({"disk": ""}, "disk: an empty text"),
        ({"trace": 5}, "trace: 5 is not the name of a file"),
        ({"trace": ""}, "trace: an empty text"),
        ({"group": 5}, "group: 5 is not a torch.distributed process group"),
        ({"schedule": "1f1b"}, "schedule: '1f1b' is not one of"),
        ({"host": 1.5}, "host: 1.5 is not a size"),
        ({"host": "1GiB", "host_pool": 5}, "host_pool: 5 is not the name of a file"),
        ({"host_pool": "/dev/shm/memo-host"}, "host_pool needs host=SIZE, such as host='64GiB'"),
        ({"device": "80 gigs"}, "device: cannot read '80 gigs'"),
        ({"min_bytes": None}, "min_bytes: None is not a size"),
        ({"on_full": None}, "on_full: None is none of 'spill', 'raise', 'recompute'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_an_argument_of_no_meaning_is_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    before = open_files()
    with pytest.raises(MemoError) as error:
        memo.offload(Model(), **arguments)
    assert isinstance(error.value, (UsageError, NoRepeatedLayers))
    assert words in str(error.value)
    assert str(error.value).isprintable()
    assert open_files() == before


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("hots", "did you mean 'host'?"),
        ("gpu_memory", "did you mean 'device'?"),
        ("host_budget", "did you mean 'host'?"),
        ("max_memory", "it has model, plan, alpha, levels, "),
    ],
)
def test_an_unknown_argument_names_the_nearest(name: str, instead: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"memo.offload has no argument '{name}'; {instead}")):
        memo.offload(Model(), **{name: "1GiB"})  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [None, lambda x: x, {"layers": 3}])
def test_a_model_is_a_module(model: Any) -> None:
    with pytest.raises(UsageError, match=r"^model: .* is no torch\.nn\.Module$"):
        memo.offload(model)


def test_a_layer_that_is_named_twice_is_one_layer() -> None:
    model = Model()
    manager = memo.offload(model, layers=[model.layers[0], model.layers[1], model.layers[0]], alpha=1.0)
    assert [layer.name for layer in manager.layers] == ["layers.0", "layers.1"]
    manager.close()


def test_a_disk_budget_of_less_than_a_block_holds_nothing() -> None:
    model = Model()
    manager = memo.offload(model, alpha=1.0, disk_budget="1B", min_bytes=0)
    with pytest.raises(MemoError, match="no room for"), manager:
        model(torch.ones(4, 8, requires_grad=True))
    manager.close()


def test_a_plan_for_another_model_leaves_nothing_open(tmp_path: Path) -> None:
    plan = solve_problem(random_problem(2, layers=6, classes=1))
    before = open_files()
    with pytest.raises(MemoError, match=r"^the plan is for 6 layers; the model has 3$"):
        memo.offload(Model(), plan=plan, trace=tmp_path / "trace.jsonl")
    file = tmp_path / "plan.json"
    file.write_text(plan_to_json(plan))
    with pytest.raises(MemoError, match=r"plan\.json is for 6 layers; the model has 3$"):
        memo.offload(Model(), plan=file)
    assert open_files() == before


def test_a_trace_has_a_directory_made_for_it_and_replaces_nothing_but_a_trace(tmp_path: Path) -> None:
    for _ in range(2):  # the second run's takes the place of the first one's
        memo.offload(Model(), alpha=1.0, trace=f"{tmp_path}/runs/a/").close()
    assert [path.name for path in (tmp_path / "runs" / "a").iterdir()] == ["trace.rank0.jsonl"]
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(MemoError, match="exists and is not a trace"):
        memo.offload(Model(), alpha=1.0, trace=notes)
    with pytest.raises(MemoError, match="cannot make the directory"):
        memo.offload(Model(), alpha=1.0, trace=f"{notes}/a/")
    assert notes.read_text() == "mine"


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_parameter_is_refused_by_name() -> None:
    model = Model()
    model.layers[1].inner = nn.LazyLinear(8)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=r"layers\.1\.inner\.weight has no shape before the first forward"):
        memo.offload(model, alpha=0.5, host="1MiB")
    model(torch.ones(2, 8))
    memo.offload(model, alpha=0.5, host="1MiB").close()


def test_budgets_that_cannot_be_met_are_told(caplog: pytest.LogCaptureFixture) -> None:
    on_memory = {"host": "1MiB", "disk": "/dev/shm"}
    with caplog.at_level("WARNING", logger="memo"), memo.offload(Model(), alpha=1.0, **on_memory) as manager:
        pass
    manager.close()
    assert "disk: /dev/shm is tmpfs, which is memory" in caplog.text


def test_a_host_budget_above_the_machines_memory_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memo.manager.machine.total_host_bytes", lambda: 100 << 30)
    monkeypatch.setattr("memo.manager.machine.available_host_bytes", lambda **_: 50 << 30)
    said = "host: 1000 TiB is more than the machine's 100 GiB of memory; give host='70GiB' or less"
    with pytest.raises(UsageError, match=f"^{re.escape(said)}$"):
        memo.offload(Model(), alpha=1.0, host="1000TiB")
    memo.offload(Model(), alpha=1.0, host="100GiB").close()
    # A machine that grows as it is used shows less than its control group leaves.
    monkeypatch.setattr("memo.manager.machine.available_host_bytes", lambda **_: 1001 << 40)
    memo.offload(Model(), alpha=1.0, host="1000TiB").close()
