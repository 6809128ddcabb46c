"""The manager of a program that runs with MEMO_DISABLE=1: it does nothing, so that a run with memo has its twin without."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from memo.errors import UsageError
from memo.manager.manager import Manager
from memo.manager.report import Report

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from memo.autoplan import PlanSource
    from memo.manager.arguments import LayerLevels
    from memo.swap import LayerExplanation

VARIABLE = "MEMO_DISABLE"


def is_disabled() -> bool:
    """True where the environment variable MEMO_DISABLE is set to anything but nothing or 0."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


class DisabledManager(Manager):
    """A Manager that has opened nothing and opens nothing, and whose report says so."""

    def __init__(self, model: nn.Module) -> None:
        self._name = type(model).__name__
        self._layers = ()
        self._parts = self._plan_source = self._saving = None
        self.step = 0

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def attach(self) -> Manager:
        """Returns this manager."""
        return self

    def detach(self) -> None:
        """Does nothing."""

    def choose_levels(self, levels: Mapping[int | str, LayerLevels]) -> None:
        """Does nothing."""

    def explain(self, layer: int | str) -> LayerExplanation:
        """Raises UsageError."""
        raise UsageError(f"explain: memo is off ({VARIABLE} is set)")

    def plan_with(self, source: PlanSource) -> None:
        """Does nothing."""

    def step_done(self) -> None:
        """Counts the step."""
        self.step += 1

    def report(self) -> Report:
        """Returns a report of nothing."""
        return Report(layers=0, nothing=f"memo is off ({VARIABLE} is set)")

    def close(self) -> None:
        """Does nothing."""

    def __repr__(self) -> str:
        return f"<memo.Manager of {self._name}: off ({VARIABLE} is set)>"
