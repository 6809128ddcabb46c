"""Single files of other packages: peers in the tables that are fetched (`make gpu-hour-prepare`) and never committed.

Such a file imports small things of packages that a machine may lack. While it is loaded, stand-ins answer those imports: a
logger, a version comparison, "no NPU", and a memory reading that only a warning of TRL's uses.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import operator
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import ROOT
from memo.errors import UsageError

FOLDERS = (Path(".gpu"), ROOT / ".gpu")
"""Folders that may hold the files."""


def load(module: str, others: Mapping[str, types.ModuleType] | None = None) -> types.ModuleType:
    """A module from its one file, named `package_module.py`, or else of an installed package.

    Args:
        module: full name in its package.
        others: modules that its imports find under these names.

    Raises:
        UsageError: neither the file nor the package is there.
    """
    package = module.partition(".")[0]
    name = f"{package}_{module.rpartition('.')[2]}.py"
    found = next((folder / name for folder in FOLDERS if (folder / name).is_file()), None)
    if found is not None:
        return load_file(found, others)
    if _is_there(package):
        return importlib.import_module(module)
    raise UsageError(f"{name} is not there: looked in {', '.join(map(str, FOLDERS))} and for an installed {package}")


def load_file(path: Path, others: Mapping[str, types.ModuleType] | None = None) -> types.ModuleType:
    """The module that one file makes.

    Raises:
        UsageError: there is no such file.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"{path} is not there, or no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    with _stand_ins(others or {}):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _stand_ins(others: Mapping[str, types.ModuleType]) -> Iterator[None]:
    """Answers imports of packages that are missing, until it ends."""
    given = {name: _module(name, content) for name, content in _IMPORTED.items() if not _is_there(name)}
    given |= {name: module for name, module in others.items() if not _is_there(name)}
    sys.modules.update(given)
    try:
        yield
    finally:
        for name in given:
            del sys.modules[name]


def _is_there(name: str) -> bool:
    return importlib.util.find_spec(name.partition(".")[0]) is not None


def _module(name: str, content: dict[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(content)
    return module


def _is_torch_version(operation: str, version: str) -> bool:
    compare = {">=": operator.ge, ">": operator.gt, "<": operator.lt, "<=": operator.le, "==": operator.eq}[operation]
    return bool(compare(torch.torch_version.TorchVersion(torch.__version__), version))


_IMPORTED: dict[str, dict[str, Any]] = {
    "psutil": {"virtual_memory": lambda: types.SimpleNamespace(percent=0.0)},
    "accelerate": {},
    "accelerate.logging": {"get_logger": logging.getLogger},
    "accelerate.utils": {},
    "accelerate.utils.versions": {"is_torch_version": _is_torch_version},
    "transformers": {"is_torch_npu_available": lambda: False},
    "axolotl": {},
    "axolotl.monkeypatch": {},
    "axolotl.utils": {},
    "axolotl.utils.logging": {"get_logger": logging.getLogger},
}
