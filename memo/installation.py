"""Files of another package that is imported by the same name: PyPI's `memo`, a cache of results.

pip installs both into one folder: whichever came last has `memo/__init__.py`, and the removal of either takes it away.
"""

from __future__ import annotations

import sys

AGAIN = "pip uninstall memo, then install memo-train again with --force-reinstall"
_OTHERS_FILES = ("_runner.py", "_grid.py")


def conflict() -> str | None:
    """Says what is wrong with the installed package; None where nothing is. Needs no package."""
    package = sys.modules["memo"]
    folder = next(iter(package.__path__))
    here = getattr(package, "_HERE", None)
    if here is None:
        lost = package.__file__ is None
        what = (
            f"{folder}/__init__.py is missing" if lost else f"{package.__file__} is another package's, named memo, too"
        )
        return f"{what}; {AGAIN}"
    if all((here / name).exists() for name in _OTHERS_FILES):
        return f"another package named memo is installed in {folder}, and its removal would take memo-train's files; {AGAIN}"
    return None
