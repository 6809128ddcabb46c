"""Costs of each recompute level of a layer, counted and timed while it trains."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from memo.swap.token_levels import LayerCosts, Level, PointCost

__all__ = ["Costs", "now_s"]


def now_s(device: torch.device) -> float:
    """Host clock in seconds, after synchronising the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


class Costs:
    """Costs of one layer: bytes of its last forward, seconds of its recomputes at that length."""

    def __init__(self, layer: str) -> None:
        self._layer = layer
        self._tokens = 0
        self._input_bytes = 0
        self._always_bytes = 0
        self._bytes_per_token: dict[Level, float] = {}
        self._beside_per_token: dict[Level, float] = {}
        self._held_per_token: dict[Level, float] = {}
        self._piece_s = 0.0
        self._seconds_per_token: dict[Level, float] = {Level.SAVE_ALL: 0.0}
        self.points: tuple[PointCost, ...] = ()
        """The layer's curve, where its tokens cannot be divided."""

    def counted(
        self,
        *,
        tokens: int,
        input_bytes: int,
        always_bytes: int,
        bytes_per_token: dict[Level, float],
        beside_per_token: dict[Level, float] | None = None,
        held_per_token: dict[Level, float] | None = None,
        piece_s: float = 0.0,
    ) -> None:
        """Records the bytes of a forward; a new length drops the seconds."""
        if tokens != self._tokens:
            self._seconds_per_token = {Level.SAVE_ALL: 0.0}
        self._tokens = tokens
        self._input_bytes = input_bytes
        self._always_bytes = always_bytes
        self._bytes_per_token = bytes_per_token
        self._beside_per_token = beside_per_token or {}
        self._held_per_token = held_per_token or {}
        self._piece_s = piece_s

    def ran(self, level: Level, tokens: int, seconds: float) -> None:
        """Records the time of a recompute. The shortest per token counts: others waited for a copy or were the first."""
        each = seconds / tokens
        self._seconds_per_token[level] = min(each, self._seconds_per_token.get(level, each))

    @property
    def seconds_per_token(self) -> dict[Level, float]:
        """Seconds of the levels that have run at this length."""
        return dict(self._seconds_per_token)

    def took(self, seconds_per_token: Mapping[Level, float]) -> None:
        """Takes over times that a layer of the same class had, for levels that have not run."""
        for level, seconds in seconds_per_token.items():
            self._seconds_per_token.setdefault(level, seconds)

    def snapshot(self) -> LayerCosts | None:
        """The costs so far; None before the first counted forward."""
        if not self._bytes_per_token:
            return None
        return LayerCosts(
            layer=self._layer,
            tokens=self._tokens,
            input_bytes=self._input_bytes,
            always_bytes=self._always_bytes,
            bytes_per_token=dict(self._bytes_per_token),
            beside_per_token=dict(self._beside_per_token),
            held_per_token=dict(self._held_per_token),
            piece_s=self._piece_s,
            recompute_s_per_token=dict(self._seconds_per_token),
            points=self.points,
            divisible=not self.points,
        )
