"""JSON files of profiles, hardware and activation plans: strict, versioned, equal bytes for equal values.

Owns the three formats of docs/activation-plan.md. A plan carries its whole problem, so that a plan file alone can be
checked, shown and simulated. Files of an earlier version are refused.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

from memo.errors import PlanError
from memo.mip.activation.plan import ActivationPlan
from memo.mip.address.files import PLAN_FORMAT as ADDRESS_PLAN_FORMAT, address_plan_of
from memo.mip.address.problem import AddressPlan
from memo.mip.inputs.hardware import Hardware
from memo.mip.inputs.profile import Profile
from memo.mip.strict_json import decode, encode, parse_json, read_as, require_format, write_json

PLAN_FORMAT, PROFILE_FORMAT, HARDWARE_FORMAT = "memo-activation-plan", "memo-profile", "memo-hardware"
VERSIONS = {PLAN_FORMAT: 8, PROFILE_FORMAT: 7, HARDWARE_FORMAT: 2}
_ANEW = {
    PLAN_FORMAT: "run memo plan anew",
    PROFILE_FORMAT: "run memo profile anew",
    HARDWARE_FORMAT: "write attention, rates by kernel, head size and direction, in place of attention_efficiency",
}

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


def read_any_plan(path: Path_) -> ActivationPlan | AddressPlan:
    """Reads an activation plan or an address plan. The file is read once, so it may be standard input.

    Raises:
        PlanError: as `read_activation_plan`.
    """

    def either(text: str) -> ActivationPlan | AddressPlan:
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
    version, reads = root.get("version"), VERSIONS[name]
    if root.get("format") == name and type(version) is int and 1 <= version < reads:
        raise PlanError(f"version is {version}, of an earlier memo; this one reads {reads}: {_ANEW[name]}")
    require_format(root, name, version=reads)
    return decode(kind, root, "the file", ignore=("format", "version"))
