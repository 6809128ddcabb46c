"""The solver that plans need, which a bare machine may lack."""

from __future__ import annotations

import importlib.util

__all__ = ["LACKING"]


def _lacking() -> str | None:
    missing = [name for name in ("pulp", "highspy") if importlib.util.find_spec(name) is None]
    return f"a plan needs {' and '.join(missing)}, not installed here" if missing else None


LACKING = _lacking()
"""Why there are no plans here; None where there are."""
