"""JSON files of profiles, hardware and activation plans: strict, versioned, equal bytes for equal values.

Owns the three formats of docs/activation-plan.md. A plan carries its whole problem, so that a plan file alone can be
checked, shown and simulated. Plans and profiles of version 1, which spoke of three levels instead of points, and of
versions 2 and 3, which knew no pieces and no collectives, of version 4, which did not tell weights, gradients and
optimizer state apart, and of version 5, whose stages had one machine and equal numbers of layers, are read, too.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

from memo.errors import PlanError
from memo.mip.activation.plan import ActivationPlan
from memo.mip.address.files import PLAN_FORMAT as ADDRESS_PLAN_FORMAT, address_plan_of
from memo.mip.address.problem import Plan
from memo.mip.inputs.hardware import Hardware
from memo.mip.inputs.profile import ALL, ATTENTION, MATMULS, Profile
from memo.mip.strict_json import decode, encode, parse_json, read_as, require_format, write_json

__all__ = [
    "plan_from_json",
    "plan_to_json",
    "profile_to_json",
    "read_activation_plan",
    "read_any_plan",
    "read_hardware",
    "read_profile",
]

PLAN_FORMAT, PROFILE_FORMAT, HARDWARE_FORMAT = "memo-activation-plan", "memo-profile", "memo-hardware"
VERSIONS = {PLAN_FORMAT: 6, PROFILE_FORMAT: 6, HARDWARE_FORMAT: 1}
_LEVELS = {"all_tokens": ALL, "matmul_tokens": MATMULS, "attention_tokens": ATTENTION}
"""Keys of a layer plan of version 1, and the points that they were fractions of."""

Path_ = str | os.PathLike[str]
T = TypeVar("T")


def read_activation_plan(path: Path_) -> ActivationPlan:
    """Reads an activation plan. Only the format is checked; `memo.mip.activation.checker` decides whether it is valid.

    Raises:
        PlanError: the file cannot be read or is not in the format; the message names the key.
    """
    return read_as(path, plan_from_json)


def read_profile(path: Path_) -> Profile:
    """Reads a profile.

    Raises:
        PlanError: as `read_activation_plan`.
    """
    return read_as(path, lambda text: _parse(text, Profile, PROFILE_FORMAT))


def read_hardware(path: Path_) -> Hardware:
    """Reads a hardware description.

    Raises:
        PlanError: as `read_activation_plan`.
    """
    return read_as(path, lambda text: _parse(text, Hardware, HARDWARE_FORMAT))


def plan_to_json(plan: ActivationPlan) -> str:
    """Writes a plan as JSON, one layer a line."""
    return _document(PLAN_FORMAT, plan)


def profile_to_json(profile: Profile) -> str:
    """Writes a profile as JSON, one layer class a line."""
    return _document(PROFILE_FORMAT, profile)


def hardware_to_json(machine: Hardware) -> str:
    """Writes a hardware description as JSON."""
    return _document(HARDWARE_FORMAT, machine)


def plan_from_json(text: str) -> ActivationPlan:
    """Parses a plan.

    Raises:
        PlanError: it is not in the format; the message names the key.
    """
    root = parse_json(text)
    if root.get("format") == ADDRESS_PLAN_FORMAT:
        raise PlanError("it is an address plan; an activation plan, written by memo plan, is needed")
    return _decode_root(root, ActivationPlan, PLAN_FORMAT)


def read_any_plan(path: Path_) -> ActivationPlan | Plan:
    """Reads an activation plan or an address plan. The file is read once, so it may be standard input.

    Raises:
        PlanError: as `read_activation_plan`.
    """

    def either(text: str) -> ActivationPlan | Plan:
        root = parse_json(text)
        if root.get("format") == ADDRESS_PLAN_FORMAT:
            return address_plan_of(root)
        require_format(root, PLAN_FORMAT, ADDRESS_PLAN_FORMAT)
        return _decode_root(root, ActivationPlan, PLAN_FORMAT)

    return read_as(path, either)


def _document(name: str, value: object) -> str:
    return write_json(name, VERSIONS[name], encode(value))


def _parse(text: str, kind: type[T], name: str) -> T:
    return _decode_root(parse_json(text), kind, name)


def _decode_root(root: dict[str, Any], kind: type[T], name: str) -> T:
    if name != HARDWARE_FORMAT and root.get("format") == name and type(root.get("version")) is int:
        root = _upgraded(root, name)
    require_format(root, name, version=VERSIONS[name])
    return decode(kind, root, "the file", ignore=("format", "version"))


def _upgraded(root: dict[str, Any], name: str) -> dict[str, Any]:
    """A plan or profile of an earlier version as one of the latest; what is not in the format stays, to be refused."""
    if root["version"] not in (1, 2, 3, 4, 5):
        return root
    problem = root.get("problem")
    profile = problem.get("profile") if isinstance(problem, dict) else root
    if isinstance(problem, dict) and root["version"] < 4:
        _name_stage_ranks(problem)
    if isinstance(profile, dict):
        _keep_static_whole(profile)
    if root["version"] != 1:  # in one piece and without collectives, which are the defaults
        return {**root, "version": VERSIONS[name]}
    classes = profile.get("classes") if isinstance(profile, dict) else None
    for layer in _objects(classes):
        if isinstance(layer.get("levels"), list) and "points" not in layer:
            layer["points"] = layer.pop("levels")
            for point in _objects(layer["points"]):
                if "level" in point and "name" not in point:
                    point["name"] = point.pop("level")
    for plan in _objects(root.get("layers")):
        if "points" not in plan:
            defaults = {ALL: 1.0, MATMULS: 0.0, ATTENTION: 0.0}
            plan["points"] = {name: plan.pop(key, defaults[name]) for key, name in _LEVELS.items()}
    return {**root, "version": VERSIONS[name]}


def _keep_static_whole(profile: dict[str, Any]) -> None:
    """Takes the one number of static bytes of a layer or an end as bytes that are not told apart."""
    for part in (*_objects(profile.get("classes")), *_objects([profile.get("embedding"), profile.get("head")])):
        if "static_bytes" in part and "static" not in part:
            part["static"] = {"other": part.pop("static_bytes")}


def _name_stage_ranks(problem: dict[str, Any]) -> None:
    """Says the ranks of a stage where a plan before version 4 says the stages of a node."""
    pipeline, budgets = problem.get("pipeline"), problem.get("budgets")
    if isinstance(pipeline, dict) and isinstance(budgets, dict) and "stage_ranks" not in pipeline:
        together, ranks = pipeline.get("stages_per_node"), budgets.get("ranks_per_node", 1)
        if type(together) is int and type(ranks) is int and together > 0 and ranks % together == 0:
            del pipeline["stages_per_node"]
            pipeline["stage_ranks"] = ranks // together


def _objects(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
