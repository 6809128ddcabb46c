"""Computes torch's CUDA operators by its CPU kernels, on the memory of the emulated device (cudart.cpp).

Importing it puts every CUDA kernel of torch's own operators aside, so it must come before the first of them is called.
"""

from __future__ import annotations

import ctypes
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, library as registry
from torch.utils._pytree import tree_leaves, tree_map

_RUNTIME = ctypes.CDLL("libcudart.so.13")
_RUNTIME.emulated_cuda_flush.argtypes = [ctypes.c_void_p]
_RUNTIME.cudaStreamSynchronize.argtypes = [ctypes.c_void_p]
_RUNTIME.cudaMemcpyAsync.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_ANY_WAY = 4  # cudaMemcpyDefault

CALLED: Counter[str] = Counter()
"""Calls of each operator, by name."""

# Memory, views and choices, which torch's own code for CUDA does on the emulated runtime.
_NATIVE = {
    "_fused_sdp_choice", "_local_scalar_dense", "_pin_memory", "_reshape_alias", "alias", "as_strided", "detach",
    "empty.memory_format", "empty_strided", "is_pinned", "is_set_to", "record_stream", "resize_", "set_",
    "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "unfold", "view",
    "view.dtype", "view_as_complex", "view_as_real",
}  # fmt: skip
_NEVER = ("cudnn", "miopen", "nested", "sparse", "_flash_", "efficient_attention")
_ONE_DEVICE = {"addmm", "bmm", "cat", "gather", "index_select", "mm"}
"""Operators that refuse any tensor on the host here; CUDA's own list is longer."""
_ANY_DEVICE = ("copy", "_copy", "_foreach_copy", "index", "_index", "_unsafe_index")
"""Operators that take tensors on the host; all others take numbers alone, of no dimension."""
_RANDOM = (
    "bernoulli",
    "cauchy",
    "dropout",
    "exponential",
    "geometric",
    "multinomial",
    "normal",
    "poisson",
    "rand",
    "uniform",
)


def _arrive() -> None:
    """What was queued on the current stream happens before the operator that is about to be computed."""
    _RUNTIME.emulated_cuda_flush(torch.cuda.current_stream().cuda_stream)


def on_host(tensor: Tensor) -> Tensor:
    """The same memory, as a CPU tensor."""
    if tensor.device.type != "cuda":
        return tensor
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    same = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    return torch.empty(0, dtype=tensor.dtype).set_(same, tensor.storage_offset(), tensor.shape, tensor.stride())


def on_device(tensor: Tensor) -> Tensor:
    """A copy in memory of the device's allocator."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
    if made.numel():
        on_host(made).copy_(tensor)
    return made


class _Drawing:
    """torch's CPU generator draws for a generator of the device, from where that one stands."""

    def __init__(self, arguments: Any) -> None:
        given = (value for value in tree_leaves(arguments) if isinstance(value, torch.Generator))
        self._generator = next(given, torch.cuda.default_generators[0])

    def __enter__(self) -> None:
        generator = self._generator
        self._state = torch.default_generator.get_state()
        torch.default_generator.manual_seed((generator.initial_seed() * 1_000_003 + generator.get_offset()) % (1 << 62))
        generator.set_offset(generator.get_offset() + 4)

    def __exit__(self, *_: object) -> None:
        torch.default_generator.set_state(self._state)


class _Call:
    """One operator's arguments on the host, and the way back."""

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def down(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type == "cuda":
            return self.pairs.setdefault(id(value), (value, on_host(value)))[1]
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        return None if isinstance(value, torch.Generator) else value

    def write_back(self) -> None:
        """What was resized or moved lies where the device has it, too."""
        for original, alias in self.pairs.values():
            if alias.shape != original.shape:
                original.resize_(alias.shape)
                on_host(original).copy_(alias)
            elif alias.numel() and alias.data_ptr() != original.data_ptr():
                on_host(original).copy_(alias)

    def up(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for original, alias in self.pairs.values():
            if value is alias:
                return original
            same = (
                value.numel()
                and alias.numel()
                and value.untyped_storage().data_ptr() == alias.untyped_storage().data_ptr()
            )
            if same:
                return original.as_strided(value.shape, value.stride(), value.storage_offset())
        return on_device(value)


def _emulated(op: Any, name: str) -> Any:
    schema = op._schema
    written = [n for n, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    returns_written = bool(written) and len(schema.returns) == 1 and schema.returns[0].alias_info is not None
    draws = any(word in name for word in _RANDOM) and "backward" not in name
    least = 0 if name in _ONE_DEVICE else 99 if name.startswith(_ANY_DEVICE) else 1

    def run(*args: Any, **kwargs: Any) -> Any:
        CALLED[name] += 1
        tensors = [given for given in tree_leaves(args) if isinstance(given, Tensor)]
        if any(given.device.type == "cpu" and given.dim() >= least for given in tensors):
            raise RuntimeError("Expected all tensors to be on the same device")
        _arrive()
        call = _Call()
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            given, named = tree_map(call.down, args), tree_map(call.down, kwargs)
            if draws:
                with _Drawing((args, kwargs)):
                    out = op(*given, **named)
            else:
                out = op(*given, **named)
            call.write_back()
            if returns_written and isinstance(out, Tensor):
                last = schema.arguments[written[-1]]
                return kwargs[last.name] if last.name in kwargs else args[written[-1]]
            return tree_map(call.up, out)

    return run


def _copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """A dense copy is the runtime's, and as late as any."""
    CALLED["copy_"] += 1
    alike = self.dtype == source.dtype and self.shape == source.shape
    alike = alike and self.is_conj() == source.is_conj() and self.is_neg() == source.is_neg()
    if alike and self.is_contiguous() and source.is_contiguous():
        stream = torch.cuda.current_stream().cuda_stream
        if self.numel():
            nbytes = self.numel() * self.element_size()
            if _RUNTIME.cudaMemcpyAsync(self.data_ptr(), source.data_ptr(), nbytes, _ANY_WAY, stream):
                raise RuntimeError("CUDA error: invalid argument")
        if not non_blocking and self.device != source.device:
            _RUNTIME.cudaStreamSynchronize(stream)
        return self
    _arrive()
    with torch._C._AutoDispatchBelowAutograd():
        on_host(self).copy_(on_host(source))
    return self


# Attention: each of the GPU's operators, with its own results, by the one kernel that a CPU has.


def _attend(
    name: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: Any, dropout: float
) -> Any:
    CALLED[name] += 1
    if dropout:
        raise NotImplementedError("emulated CUDA: no dropout in attention")
    _arrive()
    mask = None if bias is None else on_host(bias)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        on_host(q), on_host(k), on_host(v), 0.0, causal, attn_mask=mask, scale=scale
    )
    return on_device(out), on_device(lse.float())


def _attend_backward(name: str, tensors: tuple[Tensor, ...], bias: Tensor | None, causal: bool, scale: Any) -> Any:
    """`tensors`: gradient, query, key, value, result, log of the sums."""
    CALLED[name] += 1
    _arrive()
    mask = None if bias is None else on_host(bias)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *map(on_host, tensors), 0.0, causal, attn_mask=mask, scale=scale
    )
    return tuple(map(on_device, grads))


def _nothing(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def _word() -> Tensor:
    return torch.zeros((), dtype=torch.int64, device="cuda")


def _flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):  # type: ignore[no-untyped-def]
    out, lse = _attend("flash", q, k, v, None, is_causal, scale, dropout_p)
    none, state = (_nothing(0, dtype=torch.int32) for _ in range(2)), _nothing(2, dtype=torch.uint64)
    return out, lse, *none, q.shape[2], k.shape[2], state, _nothing(dtype=torch.uint64), _nothing(0, dtype=q.dtype)


def _flash_backward(grad, q, k, v, out, lse, cq, ck, mq, mk, dropout, causal, seed, offset, *, scale=None):  # type: ignore[no-untyped-def]
    return _attend_backward("flash_backward", (grad, q, k, v, out, lse), None, causal, scale)


def _cudnn(q, k, v, bias, lse_too, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):  # type: ignore[no-untyped-def]
    out, lse = _attend("cudnn", q, k, v, bias, is_causal, scale, dropout_p)
    return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], _word(), _word(), None


def _cudnn_backward(grad, q, k, v, out, lse, seed, offset, bias, cq, ck, mq, mk, dropout, causal, *, scale=None):  # type: ignore[no-untyped-def]
    return _attend_backward("cudnn_backward", (grad, q, k, v, out, lse.squeeze(-1)), bias, causal, scale)


def _efficient(q, k, v, bias, lse_too, dropout_p=0.0, is_causal=False, *, scale=None):  # type: ignore[no-untyped-def]
    out, lse = _attend("efficient", q, k, v, bias, is_causal, scale, dropout_p)
    return out, lse, _word().cpu(), _word().cpu()  # on the host unless a graph is captured


def _efficient_backward(grad, q, k, v, bias, out, lse, seed, offset, dropout, mask, causal=False, *, scale=None):  # type: ignore[no-untyped-def]
    return *_attend_backward("efficient_backward", (grad, q, k, v, out, lse), bias, causal, scale), None


# A GPU's fused RMSNorm, which the CPU has no kernel of.


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _rms_norm(x, normalized_shape, weight, eps):  # type: ignore[no-untyped-def]
    _arrive()
    wide, dims = _wide(on_host(x)), tuple(range(-len(normalized_shape), 0))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    rstd = torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    out = wide * rstd if weight is None else wide * rstd * on_host(weight)
    return on_device(out.to(x.dtype)), on_device(rstd)


def _rms_norm_backward(grad, x, normalized_shape, rstd, weight, output_mask):  # type: ignore[no-untyped-def]
    _arrive()
    wide, g, dims = _wide(on_host(x)), _wide(on_host(grad)), tuple(range(-len(normalized_shape), 0))
    scaled = wide * on_host(rstd)
    through = g if weight is None else g * on_host(weight)
    dx = (through - scaled * (through * scaled).mean(dims, keepdim=True)) * on_host(rstd)
    rows = tuple(range(x.dim() - len(normalized_shape)))
    dw = None if weight is None else on_device((g * scaled).sum(rows).to(weight.dtype))
    return on_device(dx.to(x.dtype)), dw


_BY_HAND = {
    "copy_": _copy_,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}


def _install(kernels: registry.Library) -> None:
    for full_name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        namespace, _, name = full_name.partition("::")
        packet, _, overload = name.partition(".")
        if namespace != "aten" or name in _NATIVE or name in _BY_HAND or any(word in packet for word in _NEVER):
            continue
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is not None:
            kernels.impl(name, _emulated(op, name), "CUDA", allow_override=True)
    for name, function in _BY_HAND.items():
        kernels.impl(name, function, "CUDA", allow_override=True)


_KERNELS = registry.Library("aten", "IMPL")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it is meant to override
    _install(_KERNELS)
