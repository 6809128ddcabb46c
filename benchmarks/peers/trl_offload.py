"""TRL's OffloadActivations, from an installed `trl` or from its one file: a peer in the tables.

The file imports small things of accelerate, transformers and psutil. Where these are missing, stand-ins answer its imports
while it is loaded: a logger, a version comparison, "no NPU", and a memory reading that only a warning of its uses.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import operator
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.peers.moved import Moved
from benchmarks.results import ROOT
from memo.errors import UsageError

__all__ = ["PLACES", "Offloading", "load"]

PLACES = (Path(".gpu/trl_activation_offloading.py"), ROOT / ".gpu" / "trl_activation_offloading.py")
"""Paths at which the file is looked for if none is given."""


def load(path: Path | None = None) -> types.ModuleType:
    """The module `trl.models.activation_offloading`.

    Raises:
        UsageError: neither the file nor an installed `trl` is there.
    """
    places = PLACES if path is None else (path,)
    found = next((place for place in places if place.is_file()), None)
    if found is not None:
        return _loaded(found)
    if path is None and importlib.util.find_spec("trl") is not None:
        return importlib.import_module("trl.models.activation_offloading")
    raise UsageError(f"TRL's file is not there: looked for {', '.join(map(str, places))} and an installed trl")


def _loaded(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("trl_activation_offloading", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _stand_ins():
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Answers imports of packages that are missing, until it ends."""
    given = {name: _module(name, content) for name, content in _IMPORTED.items() if not _is_there(name)}
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
}


class Offloading:
    """TRL's hooks with its defaults, for one step after the other; counts what moves.

    Raises:
        UsageError: TRL's file is not there, or there is no accelerator, without which it does nothing.
    """

    def __init__(self, model: nn.Module, path: Path | None, *, counted: bool = True) -> None:
        if torch.accelerator.current_accelerator() is None:
            raise UsageError("TRL's OffloadActivations needs an accelerator")
        self.hooks = load(path).OffloadActivations()
        self.hooks.update_model_params(model)
        self.moved = Moved()
        if not counted:
            return
        self._pack, self._unpack = self.hooks.pack_hook, self.hooks.unpack_hook
        self.hooks.pack_hook, self.hooks.unpack_hook = self._counted_pack, self._counted_unpack

    def _counted_pack(self, tensor: torch.Tensor) -> int:
        number: int = self._pack(tensor)
        kept, moved, *_ = self.hooks.tracker[number]
        self.moved.out_bytes += kept.nbytes if moved else 0
        return number

    def _counted_unpack(self, number: int) -> torch.Tensor:
        kept, moved, *_ = self.hooks.tracker[number]
        self.moved.back_bytes += kept.nbytes if moved and number not in self.hooks.fwd_stash else 0
        tensor: torch.Tensor = self._unpack(number)
        return tensor
