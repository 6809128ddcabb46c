"""The solver that plans need, which a bare machine may lack."""

from __future__ import annotations

from benchmarks.machine import SOLVER, missing

__all__ = ["LACKING"]

_absent = missing(SOLVER)
LACKING = f"a plan needs {' and '.join(_absent)}, not installed here" if _absent else None
"""Reason why no plan can be made here; None where one can."""
