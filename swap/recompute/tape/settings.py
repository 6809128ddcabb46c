"""State of torch that operators heed, besides what they are given: a replay runs under that of its forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from memo.torch_private import (
    disable_current_modes,
    found,
    get_deterministic_algorithms,
    get_deterministic_algorithms_warn_only,
    get_dispatch_stack_at,
    get_fp32_precision_getter,
    len_torch_dispatch_stack,
    pop_mode,
    push_mode,
    set_deterministic_algorithms,
    set_fp32_precision_setter,
)

_NAMES = (
    "blas_preferred_backend", "cpu_allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction", "cublas_allow_fp16_accumulation",
    "cublas_allow_fp16_reduced_precision_reduction", "cudnn_allow_tf32", "cudnn_benchmark", "cudnn_deterministic",
    "cudnn_enabled", "float32_matmul_precision", "linalg_preferred_backend", "mkldnn_deterministic", "mkldnn_enabled",
    "nnpack_enabled",
)  # fmt: skip


def _pair(name: str) -> tuple[Callable[[], Any], Callable[..., object]] | None:
    """Reads and writes of a setting of torch's; None where this torch has it not."""
    read, write = (found(f"{does}_{name}") for does in ("get", "set"))
    return None if read is None or write is None else (read, write)


def _algorithms() -> tuple[bool, bool]:
    return get_deterministic_algorithms(), get_deterministic_algorithms_warn_only()


_LEAST = 2.2250738585072014e-308
"""The least normal number in float64."""


def _flushes_denormals() -> bool:
    """Whether this thread does; Python computes by the same unit."""
    return _LEAST / 2 == 0.0


_FLAGS: tuple[tuple[Callable[[], Any], Callable[..., object]], ...] = (
    *(pair for name in _NAMES if (pair := _pair(name)) is not None),
    (_algorithms, lambda mode, warn_only: set_deterministic_algorithms(mode, warn_only=warn_only)),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),  # reductions are cut by threads
    (_flushes_denormals, torch.set_flush_denormal),
)
_PRECISIONS = tuple((backend, kind) for backend in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn"))
"""Float32 precisions by torch.backends: each inherits its backend's, and that the one of all, where it is "none"."""
_precision: Callable[[str, str], str] = get_fp32_precision_getter
_set_precision: Callable[[str, str, str], object] = set_fp32_precision_setter
_REDUCED_AT = tuple(at for at, name in enumerate(filter(_pair, _NAMES)) if name.startswith("cublas_"))
"""Positions in _FLAGS of the switches that reduce matmul precision."""
_REDUCED = tuple(_FLAGS[at][0] for at in _REDUCED_AT)


def precision_of_products() -> tuple[Any, ...]:
    """Settings that decide the precision of matmuls and convolutions; reading them takes about a microsecond."""
    return (*[_precision(*each) for each in _PRECISIONS], *[read() for read in _REDUCED])


class Settings(NamedTuple):
    """Values of them all."""

    flags: tuple[Any, ...]
    """In the order of _FLAGS; None for one that torch refuses to tell, since the program has set it in a newer way."""
    precisions: tuple[str, ...]
    """In the order of _PRECISIONS, as they hold."""
    modes: tuple[Any, ...]
    """Dispatch modes of the program, the outermost first, but for counters of FLOPs, which change nothing."""

    @classmethod
    def now(cls) -> Settings:
        """Returns the settings in force."""
        return cls(
            tuple([_told(read) for read, _ in _FLAGS]),
            tuple([_precision(*each) for each in _PRECISIONS]),
            _modes() if len_torch_dispatch_stack() else (),
        )

    def at_precision(self, products: tuple[Any, ...]) -> Settings:
        """These with another precision of products, as `precision_of_products` told it."""
        if products == (*self.precisions, *[self.flags[at] for at in _REDUCED_AT]):
            return self
        flags = list(self.flags)
        for at, value in zip(_REDUCED_AT, products[len(_PRECISIONS) :], strict=True):
            flags[at] = value
        return self._replace(flags=tuple(flags), precisions=products[: len(_PRECISIONS)])

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Puts them in force, and what was in force before, as the program had set it, back."""
        now = Settings.now()
        if now == self:
            yield
            return
        own = [_own(*each) for each in _PRECISIONS] if now[:2] != self[:2] else None
        try:
            self._set_flags(now)
            for each, value in zip(_PRECISIONS, self.precisions, strict=True):
                if _precision(*each) != value:
                    _set_precision(*each, value)
            with _under(self.modes, now.modes):
                yield
        finally:
            now._set_flags(self)
            if own is not None:
                for each, value, held in zip(_PRECISIONS, own, now.precisions, strict=True):
                    _set_precision(*each, value)
                    if _precision(*each) != held:  # torch's own default, which is none of the values that can be set
                        _set_precision(*each, held)

    def _set_flags(self, before: Settings) -> None:
        for (_, write), value, known in zip(_FLAGS, self.flags, before.flags, strict=True):
            if value is not None and value != known:
                write(*value) if isinstance(value, tuple) else write(value)


def _modes() -> tuple[Any, ...]:
    stack = [get_dispatch_stack_at(at) for at in range(len_torch_dispatch_stack())]
    return tuple(mode for mode in stack if type(mode).__module__ != "torch.utils.flop_counter")


def _told(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        return None


def _own(backend: str, kind: str) -> str:
    """The precision that is set for this one, "none" where it inherits, which torch does not tell."""
    held = _precision(backend, kind)
    if backend == "generic":
        return held
    above = ("generic", "all") if kind == "all" else (backend, "all")
    own_above = _own(*above)
    other = "tf32" if held == "ieee" else "ieee"
    _set_precision(*above, other)
    inherits = _precision(backend, kind) == other
    _set_precision(*above, own_above)
    return "none" if inherits else held


@contextmanager
def _under(modes: tuple[Any, ...], now: tuple[Any, ...]) -> Iterator[None]:
    """Within these dispatch modes alone, without entering them again, which may do more than to push them."""
    if modes == now:
        yield
        return
    with disable_current_modes():
        for mode in modes:
            push_mode(mode)
        try:
            yield
        finally:
            for mode in reversed(modes):
                pop_mode(getattr(mode, "_mode_key", None))
