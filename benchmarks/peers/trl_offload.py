"""TRL's OffloadActivations, from an installed `trl` or from its one file: a peer in the tables."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from benchmarks.peers.fetched import load, load_file
from benchmarks.peers.moved import Moved
from memo.errors import UsageError


class Offloading:
    """TRL's hooks with its defaults, for one step after the other; counts what moves.

    Raises:
        UsageError: TRL's file is not there, or there is no accelerator, without which it does nothing.
    """

    def __init__(self, model: nn.Module, path: Path | None, *, counted: bool = True) -> None:
        if torch.accelerator.current_accelerator() is None:
            raise UsageError("TRL's OffloadActivations needs an accelerator")
        module = load("trl.models.activation_offloading") if path is None else load_file(path)
        self.hooks = module.OffloadActivations()
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
