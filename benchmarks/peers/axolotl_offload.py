"""Axolotl's `selective_checkpointing: {save: [attention], offload: true}` with `activation_offloading: hidden_states`.

Attention's results and each layer's input are in pinned host memory, all else is computed again. From an installed
`axolotl` or from three files of its wheel (benchmarks.peers.fetched), with their defaults: a peer in the tables.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from benchmarks.peers.fetched import load
from benchmarks.peers.libraries import checkpointing_switch
from benchmarks.peers.moved import Moved
from memo.errors import UsageError

POLICY = "axolotl.monkeypatch.selective_checkpointing"


class AxolotlOffload:
    """Its two mechanisms on one model of transformers, for one step after the other; counts what moves.

    Raises:
        UsageError: its files are not there, the model is none of transformers', or there is no accelerator, without which
            it moves nothing.
    """

    def __init__(self, model: Any) -> None:
        self._enable, self._disable = (checkpointing_switch(model, to) for to in ("enable", "disable"))
        if torch.accelerator.current_accelerator() is None:
            raise UsageError("Axolotl's offload needs an accelerator")
        results, inputs = _modules()
        self._results = results.SacOffloadEngine()
        self._contexts = results.build_sac_offload_context_fn(["attention"], engine=self._results)
        self._inputs = inputs.get_checkpoint_hidden_states_offloading_ctx_manager()
        self._inputs_bytes = 0

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Checkpointing with its contexts, until it ends."""
        self._enable({"use_reentrant": False, "context_fn": self._contexts})
        try:
            yield
        finally:
            self._disable()

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """One step, its backward included."""
        with self._inputs:
            yield
        self._inputs_bytes += self._inputs.stats.offloaded_bytes  # which begin anew with each step

    @property
    def moved(self) -> Moved:
        """Out so far; back as much, as backward takes each once."""
        nbytes = self._results.stats.offloaded_bytes + self._inputs_bytes
        return Moved(out_bytes=nbytes, back_bytes=nbytes)


@functools.cache
def _modules() -> tuple[ModuleType, ModuleType]:
    """Loaded once: the second patches transformers' layers."""
    results = load("axolotl.monkeypatch.selective_checkpointing_offload", {POLICY: load(POLICY)})
    return results, load("axolotl.monkeypatch.checkpoint_activation_offload")
