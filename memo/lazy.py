"""Package faces: names that are resolved on first use, so that importing a package imports none of its modules."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from memo.installation import conflict

__all__ = ["attach"]


def attach(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Makes a package's `__getattr__`, `__dir__` and `__all__` (PEP 562).

    A face lists each name twice: here, and for type checkers in an import under `if TYPE_CHECKING`. A test holds the
    two lists equal. No name may be that of a module of the package, which would hide it once imported.

    Args:
        package: `__name__` of the package.
        homes: public names by module, separated by spaces; modules are named relative to the package, `.other.module` one
            of the package around it.

    Returns:
        The functions `__getattr__` and `__dir__`, and the list `__all__`.
    """
    home = {name: f".{module}" for module, names in homes.items() for name in names.split()}

    def resolve(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home[name], package), name)

    return resolve, lambda: sorted(home), sorted(home)


_CONFLICT = conflict()
if _CONFLICT is not None and not hasattr(sys.modules["memo"], "_HERE"):
    raise ImportError(_CONFLICT)
if _CONFLICT is not None:
    warnings.warn(_CONFLICT, RuntimeWarning, stacklevel=2)
