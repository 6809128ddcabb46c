"""Operators of torch.library, one of each kind of kernel, and writes that nothing counts; programs call them.

`torch.ops.memo_hunt` has those without a formula for autograd, but for those that `_FORMULAS` names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.nn import functional as F

from tests.hunt.operators import DEVICE

_LIBRARY = torch.library.Library("memo_hunt", "FRAGMENT")


def _correlated(x: torch.Tensor) -> torch.Tensor:
    spectrum = torch.fft.rfft(x.float())
    return torch.fft.irfft(spectrum * spectrum.conj(), n=x.shape[-1]).to(x.dtype) / x.shape[-1]


def _projected(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast(DEVICE, torch.bfloat16):
        return F.linear(x, w).float().tanh()


def _without_autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast(DEVICE, enabled=False):
        return F.linear(x.float(), w.float()).sin()


def _without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.sigmoid().cumsum(-1)
    return x * scale.cos()


def _conjugated(z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return z.conj() @ w.conj().transpose(-1, -2)


def _written(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    out.copy_(x).mul_(0.5)
    return out.sin_()


def _sorted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, order = x.sort(stable=True, dim=-1)
    return values * 1, order


_KERNELS: dict[str, Callable[..., Any]] = {
    "wave(Tensor x) -> Tensor": lambda x: x * x.sin(),
    "calls(Tensor x) -> Tensor": lambda x: torch.ops.memo_hunt.wave(x.cos()) + torch.ops.memo_hunt.wave(x),
    "correlated(Tensor x) -> Tensor": _correlated,
    "projected(Tensor x, Tensor w) -> Tensor": _projected,
    "linear(Tensor x, Tensor w) -> Tensor": lambda x, w: F.linear(x, w).float().sin(),
    "exact(Tensor x, Tensor w) -> Tensor": _without_autocast,
    "scaled(Tensor x) -> Tensor": _without_gradients,
    "conjugated(Tensor z, Tensor w) -> Tensor": _conjugated,
    "turned(Tensor z, Tensor w) -> Tensor": lambda z, w: z * w.conj(),
    "real(Tensor z) -> Tensor": lambda z: z.real * z.conj().imag,
    "lazy(Tensor z) -> Tensor": lambda z: z.conj(),
    "written(Tensor x) -> Tensor": _written,
    "dropped(Tensor x) -> Tensor": lambda x: F.dropout(x, 0.2),
    "noisy(Tensor x, float c) -> Tensor": lambda x, c: x + c * torch.rand_like(x),
    "parted(Tensor x) -> (Tensor, Tensor)": lambda x: (x.sin(), x.cos()),
    "chunks(Tensor x, int n) -> Tensor[]": lambda x, n: [part * 1 for part in x.chunk(n, -1)],
    "ordered(Tensor x) -> (Tensor, Tensor)": _sorted,
    "optional(Tensor x, Tensor? y) -> Tensor": lambda x, y: x.sin() if y is None else x * y,
    "add_(Tensor(a!) x, Tensor y) -> ()": lambda x, y: _none(x.add_(y)),
    "act_(Tensor(a!) x) -> Tensor(a!)": lambda x: x.tanh_(),
    "kept(Tensor(a!) x, Tensor y) -> Tensor": lambda x, y: x.mul_(0.5).add(y),
    "first(Tensor(a) x) -> Tensor(a)": lambda x: x[..., : x.shape[-1] // 2],
    "turn(Tensor(a) x) -> Tensor(a)": lambda x: x.transpose(0, 1),
    "itself(Tensor(a) x) -> Tensor(a)": lambda x: x,
    "smooth(Tensor x) -> Tensor": lambda x: torch.atan(x),
    "gated(Tensor x, Tensor y) -> Tensor": lambda x, y: torch.sigmoid(x) * y,
    "split(Tensor x) -> (Tensor, Tensor)": lambda x: (x.tanh(), x.exp()),
    "product(Tensor x, Tensor w) -> Tensor": lambda x, w: F.linear(x, w).to(x.dtype),
    "phase(Tensor z, Tensor w) -> Tensor": lambda z, w: z * w.conj(),
    "summed(Tensor x) -> Tensor": lambda x: x.cumsum(1).div(x.size(1)),
}


def _none(_: object) -> None:
    return None


for _schema, _kernel in _KERNELS.items():
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], _kernel, DEVICE.upper())
_LIBRARY.define("composed(Tensor x, Tensor w) -> Tensor")
_LIBRARY.impl("composed", lambda x, w: F.linear(x, w).tanh().to(x.dtype), "CompositeImplicitAutograd")


@torch.library.custom_op("memo_hunt::halve_", mutates_args=("x",))
def _halve(x: torch.Tensor) -> None:
    x.mul_(0.5)


@torch.library.custom_op("memo_hunt::filled", mutates_args=())
def _filled(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if DEVICE == "cpu":
        out.numpy()[...] = numpy.tanh(x.detach().float().numpy())
    else:
        out.copy_(x.detach().tanh())
    return out.to(x.dtype, copy=True)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _save_both(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs, *((output,) if isinstance(output, torch.Tensor) else output))


def _of_gated(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, _y, out = ctx.saved_tensors
    return grad * out * (1 - torch.sigmoid(x)), grad * torch.sigmoid(x)


def _of_split(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    x, tanh, exp = ctx.saved_tensors
    return first * (1 - tanh * tanh) + second * exp + 0 * x


def _of_product(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, w = ctx.saved_tensors
    return (grad.to(w.dtype) @ w).to(x.dtype), (grad.flatten(0, -2).t() @ x.flatten(0, -2).to(grad.dtype)).to(w.dtype)


_FORMULAS: dict[str, tuple[Callable[..., Any], Callable[..., None] | None]] = {
    "smooth": (lambda ctx, grad: grad / (1 + ctx.saved_tensors[0].square()), _save),
    "gated": (_of_gated, _save_both),
    "split": (_of_split, _save_both),
    "product": (_of_product, _save),
    "phase": (lambda ctx, g: (g * ctx.saved_tensors[1], g.conj() * ctx.saved_tensors[0]), _save),
    "summed": (lambda ctx, grad: grad.flip(1).cumsum(1).flip(1).div(grad.size(1)), None),
    "filled": (lambda ctx, grad: grad * (1 - ctx.saved_tensors[1].square()), _save_both),
}
for _name, (_backward, _setup) in _FORMULAS.items():
    torch.library.register_autograd(f"memo_hunt::{_name}", _backward, setup_context=_setup, lib=_LIBRARY)


def rewritten(tensor: torch.Tensor, factor: float, way: int) -> torch.Tensor:
    """The same tensor, multiplied in one of four ways that nothing counts: `.data`, NumPy, DLPack, a storage's copy."""
    plain = tensor.detach()
    if way == 1 and DEVICE == "cpu" and tensor.dtype is torch.float32:
        plain.numpy()[...] *= numpy.float32(factor)
    elif way == 2:
        torch.from_dlpack(plain).mul_(factor)
    elif way == 3 and plain.is_contiguous() and plain.untyped_storage().nbytes() == plain.nbytes:
        plain.untyped_storage().copy_((plain * factor).untyped_storage())
    else:
        tensor.data.mul_(factor)
    return tensor


def hidden_write(out: torch.Tensor, x: torch.Tensor) -> None:
    """Adds x where the dispatcher does not see it, and torch counts it: a kernel whose schema hides that it writes."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        out.data.add_(x.detach().to(out.dtype))
    torch.autograd.graph.increment_version(out)
