"""Choice of the attention kernel, made once per kind of tensors and changed when the kernel refuses at run time.

Owns the order of preference, the refusals of this process and the memory check of the quadratic kernel. A kind is device,
dtype, heads and head size, not length: a kernel that refuses one length is excluded for every later call of that kind, so
that one model does not round in two ways. The refusal comes in the first forward at a length, before anything of that
forward is saved for backward.

    flash_attn    the flash_attn package, on CUDA in half precision
    cudnn, flash  torch's, the faster one on this GPU first
    efficient     torch's, in every precision
    math          holds the scores of all pairs of tokens; only where they fit

Local attention, to a window, is by flash_attn or torch's flash, else in blocks of queries (local_attention.py), which take
every precision.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.util
import warnings
from collections.abc import Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from memo.allocator import memory_stats
from memo.errors import DeviceOutOfMemory, MemoError
from memo.swap import total_host_bytes
from memo.torch_private import disable_current_modes, fused_sdp_choice
from memo.units import format_bytes
from memo.warn_user import warn_user


class Kernel(enum.Enum):
    """Implementations of attention; the value is the name in messages."""

    FLASH_ATTN = "flash_attn, the package"
    CUDNN = "cuDNN, through torch"
    FLASH = "flash, in torch"
    EFFICIENT = "memory-efficient, in torch"
    MATH = "torch's own of all pairs of tokens, quadratic in memory"
    BLOCKS = "blocks of queries, by torch"

    @property
    def backend(self) -> SDPBackend | None:
        """Backend of the kernel in torch; None for the flash_attn package and for blocks."""
        return _BACKENDS.get(self)


_BACKENDS = {
    Kernel.CUDNN: SDPBackend.CUDNN_ATTENTION,
    Kernel.FLASH: SDPBackend.FLASH_ATTENTION,
    Kernel.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    Kernel.MATH: SDPBackend.MATH,
}


def _enabled() -> tuple[Kernel, ...]:
    """Kernels that torch's settings allow, which apply to the CPU, too."""
    cuda = torch.backends.cuda
    allowed = {
        Kernel.CUDNN: cuda.cudnn_sdp_enabled(),
        Kernel.FLASH: cuda.flash_sdp_enabled(),
        Kernel.EFFICIENT: cuda.mem_efficient_sdp_enabled(),
    }
    return tuple(kernel for kernel, yes in allowed.items() if yes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """Properties that decide the kernel. The last two are torch's current settings; a change of them is another kind."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    local: bool = False
    """To a window, shorter than the sequence."""
    deterministic: bool = dataclasses.field(default_factory=torch.are_deterministic_algorithms_enabled)
    enabled: tuple[Kernel, ...] = dataclasses.field(default_factory=_enabled)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """Chosen kernel, and whether it needs key/value heads repeated to the number of query heads."""

    kernel: Kernel
    repeats: bool = False

    def __str__(self) -> str:
        return self.kernel.value + (", key/value heads repeated to the query heads" if self.repeats else "")


_refused: dict[AttentionKind, set[Kernel]] = {}
"""Kernels that refused at run time, by kind. Only grows."""


@functools.lru_cache(maxsize=256)
def choose(kind: AttentionKind) -> KernelChoice:
    """Fastest kernel that supports tensors of this kind, in forward and backward, and has not refused any."""
    half = kind.dtype in (torch.float16, torch.bfloat16)
    refused = _refused.get(kind, ())
    if (
        kind.device.type == "cuda"
        and half
        and kind.head_dim <= 256
        and installed()
        and Kernel.FLASH_ATTN not in refused
    ):
        return KernelChoice(kernel=Kernel.FLASH_ATTN)
    if kind.local:
        return KernelChoice(kernel=Kernel.FLASH if _has_window(kind) and Kernel.FLASH not in refused else Kernel.BLOCKS)
    grouped = kind.heads != kind.kv_heads
    if kind.device.type == "cuda" and not torch.cuda.is_available():
        # torch cannot be asked without a GPU: plans use the kernels that it documents.
        return KernelChoice(kernel=Kernel.FLASH) if half else KernelChoice(kernel=Kernel.EFFICIENT, repeats=grouped)
    for repeats in (False, True) if grouped else (False,):
        for kernel in _fastest_first(kind):
            if kernel not in refused and _is_supported(kernel, kind, repeats):
                return KernelChoice(kernel=kernel, repeats=repeats)
    return KernelChoice(kernel=Kernel.MATH)


def refuse(kind: AttentionKind, kernel: Kernel, error: Exception) -> None:
    """Excludes `kernel` for tensors of this kind, and warns with the reason and the kernel chosen instead."""
    _refused.setdefault(kind, set()).add(kernel)
    choose.cache_clear()
    why = next(iter(str(error).splitlines()), "") or type(error).__name__
    warn_user(f"attention: {kernel.value} refused: {why}; instead: {choose(kind)}")


def is_refusal(error: Exception) -> bool:
    """True for a kernel's "not supported" error.

    False for errors that another kernel would not avoid: out of memory, memo's own errors, a lost device.
    """
    if isinstance(error, torch.AcceleratorError):
        return "no kernel image" in str(error)  # the package was built for other GPUs, and nothing ran
    if isinstance(error, torch.OutOfMemoryError | MemoError) or "allocate memory" in str(error):
        return False
    return isinstance(error, RuntimeError | ImportError)


@functools.cache
def installed() -> bool:
    """True if the flash_attn package is installed."""
    return importlib.util.find_spec("flash_attn") is not None


def _fastest_first(kind: AttentionKind) -> Sequence[Kernel]:
    """Enabled kernels of torch, fastest first: the cuDNN kernels on Hopper and later, flash on older GPUs."""
    order = [Kernel.FLASH, Kernel.CUDNN, Kernel.EFFICIENT]
    if kind.device.type == "cuda" and torch.cuda.get_device_capability(kind.device) >= (9, 0):
        order = [Kernel.CUDNN, Kernel.FLASH, Kernel.EFFICIENT]
    return [kernel for kernel in order if kernel in kind.enabled]


def _has_window(kind: AttentionKind) -> bool:
    """True if torch's flash kernel, which alone has a window, takes tensors of this kind."""
    if kind.device.type != "cuda" or kind.dtype not in (torch.float16, torch.bfloat16) or kind.head_dim % 8:
        return False
    # torch cannot be asked without a GPU: plans use the kernel that it documents. Key/value heads may be fewer.
    return not torch.cuda.is_available() or (
        Kernel.FLASH in kind.enabled and _is_supported(Kernel.FLASH, kind, repeats=True)
    )


def _is_supported(kernel: Kernel, kind: AttentionKind, repeats: bool) -> bool:
    """True if torch would choose `kernel` for small tensors of this kind; hidden from the caller's dispatch modes."""
    assert kernel.backend is not None
    kv_heads = kind.heads if repeats else kind.kv_heads
    with disable_current_modes(), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")  # torch warns why a kernel is not supported
        query, key, value = (
            torch.empty(1, heads, 128, kind.head_dim, dtype=kind.dtype, device=kind.device, requires_grad=True)
            for heads in (kind.heads, kv_heads, kv_heads)
        )
        with sdpa_kernel(kernel.backend):
            try:
                chosen = fused_sdp_choice(query, key, value, is_causal=True, enable_gqa=kv_heads != kind.heads)
            except RuntimeError:  # no allowed kernel supports them
                return False
    return bool(chosen == kernel.backend.value)


def score_bytes(*, batch: int, heads: int, seq: int, dtype: torch.dtype) -> int:
    """Bytes of the scores and probabilities of all pairs of tokens, which the quadratic kernel holds at once."""
    wide = torch.promote_types(dtype, torch.float32)  # torch computes half precision in float32 there
    return 2 * batch * heads * seq * seq * wide.itemsize


def require_scores_fit(kind: AttentionKind, *, batch: int, seq: int) -> None:
    """Checks that the quadratic kernel's scores fit; to be called where no other kernel is left.

    Raises:
        DeviceOutOfMemory: they exceed the free memory of the GPU, or all memory of the machine on a CPU.
    """
    if kind.device.type not in ("cpu", "cuda"):
        return  # the meta device holds no bytes
    needed, limit = score_bytes(batch=batch, heads=kind.heads, seq=seq, dtype=kind.dtype), _memory_limit(kind.device)
    if needed > limit:
        wide = torch.promote_types(kind.dtype, torch.float32)
        raise DeviceOutOfMemory(
            f"attention over {seq} tokens: no fused kernel takes {kind.heads} heads of {kind.head_dim} in {kind.dtype} "
            f"with {kind.kv_heads} key/value heads on {kind.device}, and the quadratic kernel needs scores and "
            f"probabilities of all pairs, 2 x {batch} x {kind.heads} x {seq}^2 x {wide.itemsize} bytes = "
            f"{format_bytes(needed)}, more than the {format_bytes(limit)} that "
            f"{'are free' if kind.device.type == 'cuda' else 'the machine has'}; use bfloat16, heads of at most 256, and "
            f"leave torch's fused kernels on"
        )


def _memory_limit(device: torch.device) -> int:
    """Most bytes an allocation can get: free memory of a GPU, which is known exactly; all memory of a CPU's machine."""
    if device.type != "cuda":
        return total_host_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    stats = memory_stats(device)
    return free + stats.reserved_bytes - stats.allocated_bytes
