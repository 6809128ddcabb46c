"""Package faces: names that are resolved on first use, so that importing a package imports none of its modules."""

from __future__ import annotations

import ast
import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memo.installation import conflict


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Makes a package's `__getattr__`, `__dir__` and `__all__` (PEP 562) from its imports under `if TYPE_CHECKING:`.

    A type checker reads these imports, and here they are read from the package's source, so each name stands once.
    No name may be that of a module of the package, which would hide it once imported.

    Args:
        package: `__name__` of the package, whose `__init__.py` calls this.

    Returns:
        The functions `__getattr__` and `__dir__`, and the list `__all__`.
    """
    file = sys.modules[package].__file__
    assert file is not None
    (block,) = [node for node in ast.parse(Path(file).read_bytes()).body if isinstance(node, ast.If) and node.orelse]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    home = {alias.name: str(node.module) for node in imports for alias in node.names}

    def resolve(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(home[name])
        except AttributeError as error:  # Python would say that this package has no such name
            raise ImportError(f"{home[name]}: {error}") from error
        return getattr(module, name)

    return resolve, lambda: sorted(home), sorted(home)


_CONFLICT = conflict()
if _CONFLICT is not None and not hasattr(sys.modules["memo"], "_HERE"):
    raise ImportError(_CONFLICT)
if _CONFLICT is not None:
    warnings.warn(_CONFLICT, RuntimeWarning, stacklevel=2)
