"""Hooks on a manager's layers while it is entered.

They tell the engine, recompute and planning where a layer's forward begins and ends, in the thread that has entered the
manager and in those of backward; other threads are left alone.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from memo.machine import require_layer_within_norm_limit
from memo.swap import hook_forward, layer_input, runs_as_written
from memo.torch_private import current_graph_task_id
from memo.warn_user import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from memo.autoplan import PlanSource
    from memo.swap import Engine, Group, Layer, LayerHook, RecomputePolicy

_LARGE_BYTES = 1 << 20
"""Hidden states from which on a model's cache of keys and values matters."""
_CACHES = ("past_key_values", "cache")
"""Names by which transformers gives a layer the cache, before 5.24 and from then on."""


class LayerHooks:
    """Hooks on layers, between `install` and `remove`.

    Args:
        layers: the managed layers.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._thread = 0
        self._hooks: list[LayerHook] = []
        self._running: dict[int, list[Group]] = {}
        self._has_told_device = self._has_told_cache = False
        self.failed: str | None = None
        """The layer whose forward raised last."""

    @property
    def open_layer(self) -> str | None:
        """Name of a layer whose forward is under way; None between layers."""
        return next((groups[-1].module for groups in self._running.values() if groups), None)

    def within(self, modules: Sequence[nn.Module]) -> list[str]:
        """Names of the layers that `modules` are or contain, or of the open layer, where they are all of it."""
        parts = {part for module in modules for part in module.modules()}
        if (name := self.open_layer) is None:
            return [layer.name for layer in self._layers if layer.module in parts]
        own = next(layer.module for layer in self._layers if layer.name == name)
        has = set(own.parameters())
        return [name] if own in parts or (has and has <= {p for part in parts for p in part.parameters()}) else []

    @property
    def seen(self) -> list[str]:
        """Names of the layers whose forwards have begun since `install`."""
        return [self._layers[position].name for position in self._running]

    def install(
        self, engine: Engine, recompute_policy: RecomputePolicy, source: Callable[[], PlanSource | None]
    ) -> None:
        """Hooks all layers, for the calling thread."""
        self._thread = threading.get_ident()
        self.failed = None
        for position, layer in enumerate(self._layers):
            self._hooks.append(self._hook(position, layer, engine, recompute_policy, source))
            self._hooks[-1].install()

    def forget_open(self) -> None:
        """Forgets the layers that an earlier forward has left open."""
        for groups in self._running.values():
            groups.clear()

    def remove(self) -> None:
        """Removes the hooks. Idempotent, also where it is interrupted."""
        while self._hooks:
            self._hooks[-1].remove()
            self._hooks.pop()
        self._running.clear()

    def _is_elsewhere(self) -> bool:
        """True in a thread that has not entered the manager, and that is not one of backward's."""
        return threading.get_ident() != self._thread and current_graph_task_id() < 0

    def _hook(
        self,
        position: int,
        layer: Layer,
        engine: Engine,
        recompute_policy: RecomputePolicy,
        source: Callable[[], PlanSource | None],
    ) -> LayerHook:
        device = engine.backend.device

        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not runs_as_written() or self._is_elsewhere():
                return
            hidden = layer_input(args, kwargs)
            if hidden is not None:
                require_layer_within_norm_limit(layer.name, module, hidden)
                if hidden.nbytes >= _LARGE_BYTES and any(kwargs.get(name) is not None for name in _CACHES):
                    self._tell_cache()
                if hidden.device != device:
                    self._tell_device(layer.name, hidden.device, device)
            plan_source = source()
            if plan_source is not None:
                plan_source.before_layer(args, kwargs)
            group = engine.begin_layer(position, layer.name, args, kwargs, last=layer.last, modules=(module,))
            self._running.setdefault(position, []).append(group)
            recompute_policy.begin(layer, group, args, kwargs)

        def end(module: nn.Module, args: object, output: object) -> None:
            if not runs_as_written():
                return
            running = None if self._is_elsewhere() else self._running.get(position)
            if running:  # empty when an earlier hook of the module raised before ours began
                group = running.pop()
                if output is None:
                    self.failed = layer.name
                recompute_policy.end(group, output)
                engine.end_layer(group, between=not layer.last)

        return hook_forward(layer.module, begin, end)

    def _tell_cache(self) -> None:
        if not self._has_told_cache:
            self._has_told_cache = True
            warn_user(
                "the model caches keys and values (use_cache=True), which stay on the device as long as its output; give "
                "use_cache=False, or model.config.use_cache = False"
            )

    def _tell_device(self, name: str, device: torch.device, opened: torch.device) -> None:
        if not self._has_told_device:
            self._has_told_device = True
            warn_user(
                f"{name} runs on {device}, and its manager was opened on {opened}: nothing of it is managed; call "
                "memo.offload when the model is where it trains"
            )
