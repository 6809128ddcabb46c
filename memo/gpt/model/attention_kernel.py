"""Choice of the attention kernel, made once per kind of tensors and changed when the kernel refuses at run time.

Owns the order of preference, the refusals of this process and the memory check of the quadratic kernel. A kind is device,
dtype, heads and head size, not length: a kernel that refuses one length is excluded for every later call of that kind, so
that one model does not round in two ways. The refusal comes in the first forward at a length, before anything of that
forward is saved for backward.

    flash_attn 2, 3, 4  installed packages, on CUDA in half precision; each is compared with torch before its first use
    cudnn, flash        torch's
    efficient           torch's, in every precision
    math                holds the scores of all pairs of tokens; only where they fit

The order is that of published rates, not of rates measured at start: a resumed run, and each rank, must round alike. Local
attention, to a window, is by a package or torch's flash, else in blocks of queries (local_attention.py), which take every
precision.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from memo.allocator import memory_stats
from memo.errors import DeviceOutOfMemory, MemoError
from memo.swap import total_host_bytes
from memo.torch_private import disable_current_modes, fused_sdp_choice
from memo.units import format_bytes
from memo.warn_user import warn_user


class Kernel(enum.Enum):
    """Implementations of attention; the value is the name in messages."""

    FLASH_ATTN_4 = "FlashAttention 4, the flash_attn.cute package"
    FLASH_ATTN_3 = "FlashAttention 3, the flash_attn_interface package"
    FLASH_ATTN_2 = "FlashAttention 2, the flash_attn package"
    CUDNN = "cuDNN, through torch"
    FLASH = "flash, in torch"
    EFFICIENT = "memory-efficient, in torch"
    MATH = "torch's own of all pairs of tokens, quadratic in memory"
    BLOCKS = "blocks of queries, by torch"

    @property
    def backend(self) -> SDPBackend | None:
        """Backend of the kernel in torch; None for packages and for blocks."""
        return _BACKENDS.get(self)

    @property
    def package(self) -> str | None:
        """Module of the package that has the kernel; None for torch's and for blocks."""
        return _PACKAGES.get(self)


_BACKENDS = {
    Kernel.CUDNN: SDPBackend.CUDNN_ATTENTION,
    Kernel.FLASH: SDPBackend.FLASH_ATTENTION,
    Kernel.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    Kernel.MATH: SDPBackend.MATH,
}
_PACKAGES = {
    Kernel.FLASH_ATTN_4: "flash_attn.cute",
    Kernel.FLASH_ATTN_3: "flash_attn_interface",
    Kernel.FLASH_ATTN_2: "flash_attn",
}
_FASTEST_FIRST = {
    8: (Kernel.FLASH_ATTN_2, Kernel.FLASH, Kernel.CUDNN, Kernel.EFFICIENT),
    9: (
        Kernel.FLASH_ATTN_3,
        Kernel.FLASH_ATTN_4,
        Kernel.CUDNN,
        Kernel.FLASH_ATTN_2,
        Kernel.FLASH,
        Kernel.EFFICIENT,
    ),
    10: (Kernel.FLASH_ATTN_4, Kernel.CUDNN, Kernel.FLASH_ATTN_2, Kernel.FLASH, Kernel.EFFICIENT),
}
"""Order by compute capability. Hopper: 2407.08608, figures 5 and 6, both passes at 16k tokens; FlashAttention 4 there, and
all of Blackwell, by their authors' word."""
_TRIED_TOKENS, _TRIED_BACK = 256, 100
_ROUNDINGS = 2**-5
"""Bound for bfloat16 results of order one: some units in the last place, 2^-8 each."""


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
    packed: bool = False
    """Within documents, which packages take in one call."""
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
    grouped = kind.heads != kind.kv_heads
    if kind.device.type == "cuda" and not torch.cuda.is_available():
        # torch cannot be asked without a GPU: plans use the kernels that it documents.
        if kind.local:
            return KernelChoice(kernel=Kernel.FLASH if _is_half(kind) and kind.head_dim % 8 == 0 else Kernel.BLOCKS)
        return (
            KernelChoice(kernel=Kernel.FLASH)
            if _is_half(kind)
            else KernelChoice(kernel=Kernel.EFFICIENT, repeats=grouped)
        )
    order = [kernel for kernel in _fastest_first(kind) if kernel not in _refused.get(kind, ())]
    if kind.local:
        return KernelChoice(kernel=next((kernel for kernel in order if _has_window(kernel, kind)), Kernel.BLOCKS))
    for repeats in (False, True) if grouped else (False,):
        for kernel in order:
            if _is_supported(kernel, kind, repeats):
                return KernelChoice(kernel=kernel, repeats=repeats)
    return KernelChoice(kernel=Kernel.MATH)


def refuse(kind: AttentionKind, kernel: Kernel, error: Exception) -> None:
    """Excludes `kernel` for tensors of this kind, and warns with the reason and the kernel chosen instead."""
    _refused.setdefault(kind, set()).add(kernel)
    choose.cache_clear()
    warn_user(f"attention: {kernel.value} refused: {_first_line(error)}; instead: {choose(kind)}")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def is_refusal(error: Exception) -> bool:
    """True for a kernel's "not supported" error.

    False for errors that another kernel would not avoid: out of memory, memo's own errors, a lost device.
    """
    if isinstance(error, torch.AcceleratorError):
        return "no kernel image" in str(error)  # the package was built for other GPUs, and nothing ran
    if isinstance(error, torch.OutOfMemoryError | MemoError) or "allocate memory" in str(error):
        return False
    return isinstance(error, RuntimeError | ImportError | AssertionError)  # FlashAttention 4 asserts what it takes


@functools.cache
def installed(package: str) -> bool:
    """True if the package of kernels is installed; `flash_attn` alone may be but the folder that holds `flash_attn.cute`."""
    try:
        spec = importlib.util.find_spec(package)
    except ImportError:
        return False
    return spec is not None and spec.origin is not None


def by_package(
    kernel: Kernel, function: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **arguments: Any
) -> torch.Tensor:
    """Attention output, in the layout of `query`, by one of the functions that all three packages have."""
    assert kernel.package is not None
    found = getattr(importlib.import_module(kernel.package), function)(
        query, key, value, causal=True, deterministic=torch.are_deterministic_algorithms_enabled(), **arguments
    )
    result: torch.Tensor = found[0] if isinstance(found, tuple) else found  # some give the log-sum-exp, too
    return result


def _is_half(kind: AttentionKind) -> bool:
    return kind.dtype in (torch.float16, torch.bfloat16)


def _fastest_first(kind: AttentionKind) -> Sequence[Kernel]:
    """Installed packages and enabled kernels of torch."""
    if kind.device.type != "cuda":
        return [kernel for kernel in _FASTEST_FIRST[8] if kernel in kind.enabled]
    major, _ = torch.cuda.get_device_capability(kind.device)
    order = _FASTEST_FIRST[max(number for number in _FASTEST_FIRST if number <= max(major, 8))]
    found = [kernel for kernel in order if kernel in kind.enabled or (kernel.package and installed(kernel.package))]
    return sorted(found, key=lambda kernel: kernel.package is None) if kind.packed else found


def _has_window(kernel: Kernel, kind: AttentionKind) -> bool:
    """True if the kernel attends to a window for tensors of this kind; key/value heads may be fewer."""
    if kernel is Kernel.FLASH and kind.device.type == "cuda" and _is_half(kind) and kind.head_dim % 8 == 0:
        return _is_supported(kernel, kind, repeats=True)
    return kernel.package is not None and _is_supported(kernel, kind, repeats=False)


def _agrees(kernel: Kernel, kind: AttentionKind) -> bool:
    """True if a package's result and gradients over some tokens are torch's; warns where they are not.

    In a thread of its own, which no hooks, modes or autocast of the caller reach.
    """
    if not _is_half(kind) or kind.head_dim > 256:
        return False
    try:
        with ThreadPoolExecutor(1) as thread:
            off = thread.submit(_distance, kernel, kind).result()
        if off <= _ROUNDINGS:
            return True
        why = f"its result or gradients are {off:.2g} off torch's"
    except Exception as error:  # whatever a package raises that was built for another torch or GPU
        if isinstance(error, torch.OutOfMemoryError):
            raise
        why = _first_line(error)
    warn_user(f"attention: {kernel.value} is not used: {why}")
    return False


def _distance(kernel: Kernel, kind: AttentionKind) -> float:
    """Largest difference from torch's float32 attention, in units of the largest entry of each tensor."""
    numbers = torch.Generator(kind.device).manual_seed(0)
    *inputs, upstream = (
        torch.randn(1, _TRIED_TOKENS, heads, kind.head_dim, dtype=kind.dtype, device=kind.device, generator=numbers)
        for heads in (kind.heads, kind.kv_heads, kind.kv_heads, kind.heads)
    )
    exact = [tensor.float().requires_grad_() for tensor in inputs]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    at = torch.arange(_TRIED_TOKENS, device=kind.device)
    back = at[:, None] - at
    seen, options = back >= 0, dict[str, Any]()
    if kind.local:
        seen, options["window_size"] = seen & (back <= _TRIED_BACK), (_TRIED_BACK, 0)
    if kind.packed:
        ends = torch.tensor([0, _TRIED_BACK, _TRIED_TOKENS], dtype=torch.int32, device=kind.device)
        document = at >= _TRIED_BACK
        seen &= document[:, None] == document
        options |= {
            "cu_seqlens_q": ends,
            "cu_seqlens_k": ends,
            "max_seqlen_q": _TRIED_TOKENS,
            "max_seqlen_k": _TRIED_TOKENS,
        }
    with torch.cuda.device(kind.device):
        if kind.packed:
            flat = [tensor[0] for tensor in inputs]
            found = by_package(kernel, "flash_attn_varlen_func", *flat, **options)[None]
        else:
            found = by_package(kernel, "flash_attn_func", *inputs, **options)
        query, key, value = (tensor.transpose(1, 2) for tensor in exact)
        want = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True).transpose(1, 2)
        pairs = zip(
            (found.detach(), *torch.autograd.grad(found, inputs, upstream)),
            (want.detach(), *torch.autograd.grad(want, exact, upstream.float())),
            strict=True,
        )
        return max(float((got - of_torch).abs().max() / of_torch.abs().max()) for got, of_torch in pairs)


def _is_supported(kernel: Kernel, kind: AttentionKind, repeats: bool) -> bool:
    """True if torch would choose `kernel` for small tensors of this kind; hidden from the caller's dispatch modes."""
    if kernel.package is not None:
        return _agrees(kernel, kind)
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
