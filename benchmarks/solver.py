"""The solver that plans need, which a bare machine may lack. Import this before a model is made.

pulp keeps errors of solvers that it did not find, and with these the frames of whoever imported it first: within a training
step, that would hold the model for ever.
"""

from __future__ import annotations

import importlib
import importlib.util

__all__ = ["LACKING"]


def _lacking() -> str | None:
    missing = [name for name in ("pulp", "highspy") if importlib.util.find_spec(name) is None]
    if missing:
        return f"a plan needs {' and '.join(missing)}, not installed here"
    importlib.import_module("memo.mip.activation_solve")
    return None


LACKING = _lacking()
"""Why there are no plans here; None where there are."""
