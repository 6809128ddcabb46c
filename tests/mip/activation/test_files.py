"""Profiles, machines and plans on disk: whole round trips, and one line for whatever is not in the format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from activation_problems import random_problem, with_curves

from memo.errors import PlanError
from memo.mip.activation import (
    Pipeline,
    plan_to_json,
    profile_to_json,
    read_activation_plan,
    read_any_plan,
    read_hardware,
    read_profile,
    solve_problem,
)
from memo.mip.activation.files import hardware_to_json, plan_from_json
from memo.mip.address import AddressPlan, AddressProblem, plan_to_json as address_plan_to_json, read_plan
from memo.mip.inputs import PRESETS

PLAN = solve_problem(random_problem(2, layers=6, classes=2, pipeline=Pipeline(stages=2, microbatches=3)))
TEXT = plan_to_json(PLAN)


def test_a_plan_comes_back_as_it_was_and_equal_plans_are_equal_bytes() -> None:
    assert plan_from_json(TEXT) == PLAN
    assert plan_to_json(plan_from_json(TEXT)) == TEXT


CURVED = solve_problem(with_curves(random_problem(3, layers=9, classes=2), 8, seed=3, held=True))


def test_a_plan_of_many_points_comes_back_as_it_was() -> None:
    assert any(part.recomputes for part in CURVED.layers)
    assert plan_from_json(plan_to_json(CURVED)) == CURVED
    assert plan_to_json(plan_from_json(plan_to_json(CURVED))) == plan_to_json(CURVED)


@pytest.mark.parametrize("version", [1, 6])
def test_files_of_an_earlier_version_are_to_be_made_anew(version: int, tmp_path: Path) -> None:
    older = f'"version": {version}'
    words = f"version is {version}, of an earlier memo; this one reads 8: run memo plan anew"
    with pytest.raises(PlanError, match=words):
        plan_from_json(TEXT.replace('"version": 8', older))
    (tmp_path / "plan.json").write_text(TEXT.replace('"version": 8', older))
    with pytest.raises(PlanError, match=words):
        read_any_plan(tmp_path / "plan.json")
    (tmp_path / "profile.json").write_text(profile_to_json(PLAN.problem.profile).replace('"version": 7', older))
    with pytest.raises(PlanError, match="run memo profile anew"):
        read_profile(tmp_path / "profile.json")


def test_profiles_and_machines_come_back(tmp_path: Path) -> None:
    profile, machine = tmp_path / "profile.json", tmp_path / "machine.json"
    profile.write_text(profile_to_json(PLAN.problem.profile))
    assert read_profile(profile) == PLAN.problem.profile
    for preset in PRESETS.values():
        machine.write_text(hardware_to_json(preset))
        assert read_hardware(machine) == preset


def test_a_file_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(TEXT)
    assert read_any_plan(path) == read_activation_plan(path) == PLAN
    empty = AddressPlan(problem=AddressProblem(buffers=()), offsets=(), arenas=())
    path.write_text(address_plan_to_json(empty))
    assert read_any_plan(path) == empty
    with pytest.raises(PlanError, match="it is an address plan; an activation plan, written by memo plan, is needed"):
        read_activation_plan(path)
    path.write_text(TEXT)
    with pytest.raises(PlanError, match="names the format 'memo-activation-plan', not memo-address-plan"):
        read_plan(path)
    path.write_text("{}")
    with pytest.raises(PlanError, match="names no format, not memo-activation-plan or memo-address-plan"):
        read_any_plan(path)
    path.write_text(" \n")
    with pytest.raises(PlanError, match=r"/plan\.json: is empty"):
        read_any_plan(path)


def edited(edit: Callable[[dict[str, Any]], object]) -> str:
    root = json.loads(TEXT)
    edit(root)
    return json.dumps(root)


def at(*path: str | int, value: object) -> Callable[[dict[str, Any]], object]:
    def edit(root: Any) -> None:
        for key in path[:-1]:
            root = root[key]
        root[path[-1]] = value

    return edit


BUDGETS = ("problem", "budgets")
CLASS = ("problem", "profile", "classes", 0)
HOSTILE = {
    "nothing": ("", "not JSON"),
    "an array": ("[]", "not a JSON object"),
    "deep": ("[" * 100_000, "nested too deeply"),
    "a number beyond every float": (TEXT.replace('"version": 8', '"version": 8e999'), "is too large"),
    "a number of 5000 digits": (TEXT.replace('"version": 8', '"version": ' + "9" * 5000), "not JSON"),
    "NaN": (TEXT.replace('"version": 8', '"version": NaN'), "not a JSON number"),
    "a key twice": (TEXT.replace('"version": 8', '"version": 8, "version": 8'), "twice"),
    "another format": (edited(at("format", value="memo-profile")), "the format 'memo-profile', not"),
    "another version": (edited(at("version", value=9)), "version is 9"),
    "true as version": (edited(at("version", value=True)), "version is True"),
    "an unknown key": (edited(at("extra", value=1)), "unknown key 'extra'"),
    "an unknown key within": (edited(at(*BUDGETS, "gpu", value=1)), "unknown key 'gpu'"),
    "a missing key": (edited(lambda root: root.pop("layers")), "has no layers"),
    "a text for a number": (edited(at(*BUDGETS, "device_bytes", value="80GiB")), "not a whole number"),
    "true for a number": (edited(at(*BUDGETS, "device_bytes", value=True)), "not a whole number"),
    "a fraction of a byte": (edited(at(*BUDGETS, "device_bytes", value=0.5)), "not a whole number"),
    "a negative budget": (edited(at(*BUDGETS, "host_bytes", value=-1)), "is -1"),
    "more than 2^62 bytes": (edited(at(*BUDGETS, "host_bytes", value=1 << 63)), "below 2^62"),
    "negative time": (edited(at(*CLASS, "forward_s", value=-0.5)), "forward_s is -0.5"),
    "endless time": (edited(at(*CLASS, "forward_s", value=1e300)), "forward_s is 1e+300"),
    "no point": (edited(at(*CLASS, "points", value=[])), "'all' comes first"),
    "a point with a strange name": (edited(at(*CLASS, "points", 1, "name", value="a b")), "named 'a b'"),
    "points that save more and more": (
        edited(at(*CLASS, "points", 1, "saved_bytes", value=1 << 50)),
        "not fewer than all",
    ),
    "a fraction that is no number": (edited(at("layers", 0, "kept", value=True)), "kept is not a number"),
    "a layer at no point": (edited(at("layers", 0, "point", value=None)), "point is not a text"),
    "a layer at two points": (
        edited(at("layers", 0, "point", value={"all": 0.5, "input": 0.5})),
        "point is not a text",
    ),
    "a negative fraction": (edited(at("layers", 0, "kept", value=-0.5)), "are no fractions"),
    "an unknown class": (edited(at("problem", "profile", "layers", 0, value="ghost")), "'ghost'"),
    "a class twice": (
        edited(lambda root: root["problem"]["profile"]["classes"].append(root["problem"]["profile"]["classes"][0])),
        "one name",
    ),
    "fractions above one": (edited(at("layers", 0, "host", value=1.5)), "no fractions"),
    "fractions that do not add up": (edited(at("layers", 0, "kept", value=0.123)), "add up"),
    "a layer plan too few": (edited(lambda root: root["layers"].pop()), "layer plans for"),
    "a stage too few": (edited(lambda root: root["stages"].pop()), "predictions for"),
    "more stages than layers": (edited(at("problem", "pipeline", "stages", value=7)), "make no 7 stages"),
    "no ranks": (edited(at(*BUDGETS, "ranks_per_node", value=0)), "no rank"),
    "a long name": (edited(at(*CLASS, "name", value="x" * 2000)), "at most 1000"),
    "half a surrogate": (edited(at(*CLASS, "name", value="\ud800")), "Unicode"),
    "a million layers": (edited(at("problem", "profile", "layers", value=["a"] * 1_000_000)), "1000000 layers"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_in_the_format_is_one_line(name: str) -> None:
    text, words = HOSTILE[name]
    with pytest.raises(PlanError) as raised:
        plan_from_json(text)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_unreadable_files_are_named_without_quotes(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for path, words in (
        ("/dev/null", "not a regular file"),
        (tmp_path / "no", "cannot read"),
        (tmp_path / "a\nb", "cannot read"),
        (tmp_path / "bytes", "not UTF-8"),
    ):
        with pytest.raises(PlanError, match=words) as raised:
            read_activation_plan(path)
        assert str(raised.value).startswith(f"{path}: ".replace("\n", "\\n"))
