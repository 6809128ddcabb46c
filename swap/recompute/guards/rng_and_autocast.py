"""RNG state, autocast and attention kernels of a layer's forward, restored while its recompute runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["Precision", "RandomState"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Autocast and the allowed attention kernels during a forward."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    attention: tuple[bool, bool, bool, bool]
    """Whether flash, memory-efficient, cuDNN and plain attention were allowed."""

    @classmethod
    def now(cls, device_type: str) -> Precision:
        """Reads the settings in force."""
        return cls(
            device_type=device_type,
            enabled=torch.is_autocast_enabled(device_type),
            dtype=torch.get_autocast_dtype(device_type),
            attention=_attention_allowed(),
        )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Runs the block under these settings."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(torch.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=False))
            if self.attention != _attention_allowed():  # a choice of kernels that ended before backward
                backends = [name for name, allowed in zip(_BACKENDS, self.attention, strict=True) if allowed]
                undo.enter_context(sdpa_kernel(backends))
            yield


_BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)


def _attention_allowed() -> tuple[bool, bool, bool, bool]:
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.math_sdp_enabled()


class RandomState:
    """States of the host's and one device's default generators at construction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = self._read()

    def _read(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        on_device = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return torch.get_rng_state(), on_device

    def _write(self, states: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1], self._device)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Runs the block on the recorded states, then puts the current ones back."""
        now = self._read()
        self._write(self._states)
        try:
            yield
        finally:
            self._write(now)

    def restore(self) -> None:
        """Sets the generators to the recorded states."""
        self._write(self._states)

    def is_now(self) -> bool:
        """True while no random number was drawn since construction."""
        return all(
            was is None or (now is not None and torch.equal(was, now))
            for was, now in zip(self._states, self._read(), strict=True)
        )
