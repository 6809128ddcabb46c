"""Rounding by place: on a CPU, numbers at the end of a tensor are computed one by one, and the others several at once.

Some functions round differently in these two ways, for some numbers alone: so a trial in which a part of the tokens is equal
says nothing about the next call. Such a step runs on a part only where no number ever is at an end: where what a tile of
tokens has, and what each sequence has, and each thread, fills whole vectors.
"""

from __future__ import annotations

import torch

from memo.swap.engine.token_prefix import Rows
from memo.swap.recompute.tape.log import Function
from memo.swap.recompute.tape.tape import Step, Tape, uses_in
from memo.swap.token_levels import tile_of

__all__ = ["rounds_by_place"]

_AT_ONCE = 128
"""Bytes of the widest loop over vectors: two of 512 bits."""
_GRAIN = 32768
"""Elements from which on threads share a tensor."""
_INEXACT = frozenset(
    name + suffix
    for name in (
        *("atan2", "atanh", "celu", "cosh", "digamma", "elu", "erfinv", "exp2", "gelu", "glu", "lgamma"),
        *("log_sigmoid_forward", "logaddexp", "logaddexp2", "logit", "mish", "pow", "selu", "sigmoid", "silu", "sinh"),
        "softplus",
    )
    for suffix in ("", "_")
)
_INEXACT_IN_HALF = frozenset(
    {"add", "add_", "addcdiv", "addcmul", "lerp", "rsqrt", "rsqrt_", "rsub", "special_i0e", "sub", "sub_"}
)
_HALF = frozenset({torch.bfloat16, torch.float16})


def rounds_by_place(tape: Tape, step: Step, rows: Rows, tokens: int) -> bool:
    """True where a step's result, of these rows, may have other bits if a part of the tokens is computed."""
    if not tape.is_by_vectors or isinstance(step.operator, Function) or not step.operator.is_overload:
        return False
    name = step.operator.func.overloadpacket.__name__
    types = {tape.geometry(use.value)[4] for use in uses_in((step.args, step.kwargs, step.out))}
    is_inexact = name in _INEXACT or (name in _INEXACT_IN_HALF and types & _HALF)
    if not is_inexact and not any(kind.is_complex for kind in types):
        return False
    tile = tile_of(tokens) * rows.width
    if tile % _AT_ONCE or tokens * rows.width % _AT_ONCE:
        return True
    nbytes, threads = rows.nbytes(tokens), torch.get_num_threads()
    if threads == 1 or nbytes // min(kind.itemsize for kind in types) <= _GRAIN:
        return False
    each = threads * _AT_ONCE
    return bool(nbytes % each or rows.rows * tile % each)
