"""Settings of torch that operators heed, besides what they are given: a replay runs under those of its forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["Settings"]

_NAMES = (
    "cpu_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation", "cublas_allow_fp16_reduced_precision_reduction", "cudnn_allow_tf32",
    "cudnn_benchmark", "cudnn_deterministic", "cudnn_enabled", "mkldnn_deterministic", "mkldnn_enabled",
)  # fmt: skip


def _pair(name: str) -> tuple[Callable[[], Any], Callable[..., object]] | None:
    """Reads and writes of a setting of torch._C; None where this torch has it not."""
    read, write = (getattr(torch._C, f"_{does}_{name}", None) for does in ("get", "set"))
    return None if read is None or write is None else (read, write)


def _algorithms() -> tuple[bool, bool]:
    return torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()


_FLAGS = (
    *(pair for name in _NAMES if (pair := _pair(name)) is not None),
    (_algorithms, lambda mode, warn_only: torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)),
    (torch.get_num_threads, torch.set_num_threads),  # reductions are cut by threads
)


class Settings(NamedTuple):
    """Values of them all."""

    matmul: str | tuple[str, ...] | None
    """Precision of float32 products: one for all backends; one each where the program has set them by torch.backends, as
    torch refuses to name one then."""
    default: torch.dtype
    flags: tuple[Any, ...]
    """In the order of _FLAGS; None for one that torch refuses to tell, since the program has set it in another way."""

    @classmethod
    def now(cls) -> Settings:
        """Those in force."""
        matmul: str | tuple[str, ...] | None
        matmul = _told(torch.get_float32_matmul_precision)
        if matmul is None:
            matmul = tuple(backend.fp32_precision for backend in _matmul_backends())
        return cls(matmul, torch.get_default_dtype(), tuple([_told(read) for read, _ in _FLAGS]))

    def set(self, before: Settings) -> None:
        """Puts them in force, where `before` are."""
        if self.matmul != before.matmul and isinstance(self.matmul, str):
            torch.set_float32_matmul_precision(self.matmul)
        elif self.matmul != before.matmul:
            assert self.matmul is not None
            for backend, precision in zip(_matmul_backends(), self.matmul, strict=True):
                backend.fp32_precision = precision
        if self.default != before.default:
            torch.set_default_dtype(self.default)
        for (_, write), value, known in zip(_FLAGS, self.flags, before.flags, strict=True):
            if value is not None and value != known:
                write(*value) if isinstance(value, tuple) else write(value)


def _told(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:  # set by the newer of two ways, which this one cannot tell
        return None


def _matmul_backends() -> tuple[Any, ...]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
