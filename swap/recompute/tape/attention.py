"""Operators that are attention, whatever package they come from, and those calls of them that draw random numbers.

Kernels are registered under many names, some with the hash of their build (`_flash_attn2_cuda_f12afc9::varlen_fwd`), so the
name's words decide: attention anywhere in an operator's own name, or a package named after attention and a forward in it.
A wrong answer costs bytes or time, never a gradient: a replay is tried out like any other.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from memo.torch_private import HigherOrderOperator, OpOverload

_SAYS_ATTENTION = re.compile(r"attn|attention|sdpa|fmha|(^|_)mha(_|$)|flash_(fwd|forward)")
_PACKAGE_OF_ATTENTION = re.compile(r"attn|attention|flash|sdpa|fmha|(^|_)v?fa\d(_|$)")
_SAYS_FORWARD = re.compile(r"(^|_)(fwd|forward)$")
_SOMETHING_ELSE = re.compile(r"backward|bwd|grad|rotary|rope|norm|combine|(mask|bias|metadata|choice)_*$")
_DROPS = {"dropout_p": 0.0, "p_dropout": 0.0, "dropout": 0.0, "dropout_prob": 0.0, "p": 0.0, "keep_prob": 1.0}
"""Names of the argument that says how much is dropped, and the value that drops nothing."""


@functools.cache
def is_attention(func: Any) -> bool:
    """True for a fused attention operator: torch's own, FlexAttention, flash-attn, xformers, cuDNN, the kernels hub's.

    Args:
        func: An OpOverload or a HigherOrderOperator.
    """
    if isinstance(func, OpOverload):
        package, name = func.namespace.lower(), func.overloadpacket.__name__.lower()
    elif isinstance(func, HigherOrderOperator):
        package, name = "", func.name().lower()
    else:
        return False
    if _SOMETHING_ELSE.search(name):
        return False
    if _SAYS_ATTENTION.search(name):
        return True
    return bool(_PACKAGE_OF_ATTENTION.search(package) and _SAYS_FORWARD.search(name))


@functools.cache
def drops_by(func: Any) -> tuple[int, str, float, float] | None:
    """Dropout argument of an attention operator: its position and name, its default, and the value that drops nothing.

    Returns:
        None for one that never drops.
    """
    schema = getattr(func, "_schema", None)
    for position, declared in enumerate(() if schema is None else schema.arguments):
        nothing = _DROPS.get(declared.name)
        if nothing is not None:
            default = declared.default_value if declared.has_default_value() else None
            return position, declared.name, nothing if default is None else float(default), nothing
    return None
