"""Profiles, machines and activation plans as JSON: strict, versioned, bounded, the same bytes for the same value.

Owns the three formats of docs/activation-plan.md. A plan carries its whole problem, so a plan file alone can be checked,
shown and simulated.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeVar

from memo.errors import PlanError
from memo.mip.activation import ActivationPlan
from memo.mip.hardware import Hardware
from memo.mip.profile import Profile
from memo.mip.strict import decode, encode, parse_json, read_text

__all__ = [
    "is_activation_plan",
    "plan_from_json",
    "plan_to_json",
    "profile_to_json",
    "read_activation_plan",
    "read_hardware",
    "read_profile",
]

PLAN_FORMAT, PROFILE_FORMAT, HARDWARE_FORMAT = "memo-activation-plan", "memo-profile", "memo-hardware"
VERSION = 1

Path_ = str | os.PathLike[str]
T = TypeVar("T")


def read_activation_plan(path: Path_) -> ActivationPlan:
    """The plan in a file. Only its form is checked; `memo.mip.activation_check` says whether it keeps every rule.

    Raises:
        PlanError: the file cannot be read or is not in the format; the message names the key.
    """
    return _read(path, ActivationPlan, PLAN_FORMAT)


def read_profile(path: Path_) -> Profile:
    """The profile in a file. Raises as `read_activation_plan`."""
    return _read(path, Profile, PROFILE_FORMAT)


def read_hardware(path: Path_) -> Hardware:
    """The machine in a file. Raises as `read_activation_plan`."""
    return _read(path, Hardware, HARDWARE_FORMAT)


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


def is_activation_plan(path: Path_) -> bool:
    """Whether a file says that it is an activation plan; false for what cannot be read, too."""
    try:
        return parse_json(read_text(Path(path)), fractions=True).get("format") == PLAN_FORMAT
    except (OSError, PlanError):
        return False


def _document(name: str, value: object) -> str:
    lines = [f'"format": "{name}"', f'"version": {VERSION}']
    lines += [f"{json.dumps(key)}: {_value(entry)}" for key, entry in encode(value).items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _value(entry: Any) -> str:
    if isinstance(entry, list) and entry and isinstance(entry[0], dict):
        return "[\n" + ",\n".join(json.dumps(item) for item in entry) + "\n]"
    return json.dumps(entry)


def _read(path: Path_, kind: type[T], name: str) -> T:
    shown = repr(os.fspath(path))
    try:
        return _parse(read_text(Path(path)), kind, name)
    except PlanError as error:
        raise PlanError(f"{shown}: {error}") from None
    except OSError as error:
        raise PlanError(f"{shown}: cannot read: {error.strerror}") from None


def _parse(text: str, kind: type[T], name: str) -> T:
    root = parse_json(text, fractions=True)
    if root.pop("format", None) != name:
        raise PlanError(f"the file's format is not {name!r}")
    version = root.pop("version", None)
    if version != VERSION or isinstance(version, bool):
        raise PlanError(f"version {str(version)[:80]} of the format is not known, only {VERSION}")
    return decode(kind, root, "the file")
