"""Profiles, machines and activation plans as JSON: strict, versioned, bounded, the same bytes for the same value.

Owns the three formats of docs/activation-plan.md. A plan carries its whole problem, so a plan file alone can be checked,
shown and simulated.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

from memo.mip.activation.plan import ActivationPlan
from memo.mip.address.files import PLAN_FORMAT as ADDRESS_PLAN_FORMAT, address_plan_of
from memo.mip.address.problem import Plan
from memo.mip.inputs.hardware import Hardware
from memo.mip.inputs.profile import Profile
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
VERSION = 1

Path_ = str | os.PathLike[str]
T = TypeVar("T")


def read_activation_plan(path: Path_) -> ActivationPlan:
    """The plan in a file. Only its form is checked; `memo.mip.activation.checker` says whether it keeps every rule.

    Raises:
        PlanError: the file cannot be read or is not in the format; the message names the key.
    """
    return read_as(path, lambda text: _parse(text, ActivationPlan, PLAN_FORMAT))


def read_profile(path: Path_) -> Profile:
    """The profile in a file. Raises as `read_activation_plan`."""
    return read_as(path, lambda text: _parse(text, Profile, PROFILE_FORMAT))


def read_hardware(path: Path_) -> Hardware:
    """The machine in a file. Raises as `read_activation_plan`."""
    return read_as(path, lambda text: _parse(text, Hardware, HARDWARE_FORMAT))


def plan_to_json(plan: ActivationPlan) -> str:
    """The plan as JSON, one layer a line."""
    return _document(PLAN_FORMAT, plan)


def profile_to_json(profile: Profile) -> str:
    """The profile as JSON, one layer class a line."""
    return _document(PROFILE_FORMAT, profile)


def hardware_to_json(machine: Hardware) -> str:
    """The machine as JSON."""
    return _document(HARDWARE_FORMAT, machine)


def plan_from_json(text: str) -> ActivationPlan:
    """The plan in a text. Raises as `read_activation_plan`."""
    return _parse(text, ActivationPlan, PLAN_FORMAT)


def read_any_plan(path: Path_) -> ActivationPlan | Plan:
    """The activation plan, or the address plan, in a file, which is read once: it may be standard input.

    Raises:
        PlanError: as `read_activation_plan`.
    """

    def either(text: str) -> ActivationPlan | Plan:
        root = parse_json(text)
        require_format(root, PLAN_FORMAT, ADDRESS_PLAN_FORMAT, version=VERSION)
        return (
            address_plan_of(root) if root["format"] == ADDRESS_PLAN_FORMAT else _of(root, ActivationPlan, PLAN_FORMAT)
        )

    return read_as(path, either)


def _document(name: str, value: object) -> str:
    return write_json(name, VERSION, encode(value))


def _parse(text: str, kind: type[T], name: str) -> T:
    return _of(parse_json(text), kind, name)


def _of(root: dict[str, Any], kind: type[T], name: str) -> T:
    require_format(root, name, version=VERSION)
    return decode(kind, root, "the file", ignore=("format", "version"))
