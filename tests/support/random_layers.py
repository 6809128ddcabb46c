"""Random layers over torch's operators, as text, and three steps of a model of them with and without memo.

A seed gives a program: a class `Layer` whose forward has the shape of its input. Statements are drawn from TEMPLATES, one
text each, so that a new habit of layers is one more text. In a text

    bsh bsw rows heads bs1 b1h     a variable of that shape: (b, s, h), (b, s, 2h), (b·s, h), (b, 4, s, h/4), (b, s, 1), (b, 1, h)
    any                            a variable of any of them; `same` before the bar is its shape again
    o, t:NAME                      the statement's result; a name of its own
    P:SHAPE, M:MODULE, A:VALUE     a new parameter, module or attribute of the layer
    c, k, seed                     a constant, a number of tokens, a whole number
    block:V                        statements on the variable V, of shape (b, s, h), that end with `return`

stand in braces; a word with the same name behind a slash ({bsh/a}) is the same variable again.
"""

from __future__ import annotations

import dataclasses
import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint  # noqa: F401 (programs use it)

import memo
from memo.errors import ModifiedAfterSave
from memo.swap import Level

__all__ = ["POINTS", "Outcome", "Program", "compare", "program"]

HIDDEN, TOKENS, BATCH, LAYERS, STEPS = 16, 32, 2, 3, 3

POINTS: dict[str, Any] = {
    "1": 1.0,
    "0.5": 0.5,
    "0": 0.0,
    "matmuls": (0.0, 1.0, 0.0),
    "thirds": (0.25, 0.25, 0.5),
    "input": Level.SAVE_INPUT,
}
"""Name of a setting to its alpha or level."""
KINDS = (torch.float32, torch.bfloat16)

_SHAPES = {
    "bsh": "(B, S, H)",
    "bsw": "(B, S, 2 * H)",
    "rows": "(B * S, H)",
    "heads": "(B, 4, S, H // 4)",
    "bs1": "(B, S, 1)",
    "b1h": "(B, 1, H)",
}

_TO = {
    "bsh": "{v}",
    "bsw": "torch.cat([{v}, {v}.sin()], -1)",
    "rows": "{v}.reshape(B * S, H)",
    "heads": "{v}.view(B, S, 4, H // 4).transpose(1, 2)",
    "bs1": "{v}.mean(-1, keepdim=True)",
    "b1h": "{v}.mean(1, keepdim=True)",
}
"""A variable of shape (b, s, h) in another shape."""
_FROM = {
    "bsh": "{v}",
    "bsw": "{v}[..., :H] * {v}[..., H:].sigmoid()",
    "rows": "{v}.view(B, S, H)",
    "heads": "{v}.transpose(1, 2).reshape(B, S, H)",
    "bs1": "{v} * x",
    "b1h": "{v} + x",
}

TEMPLATES: dict[str, tuple[int, str]] = {
    # pointwise
    **{f"pointwise {name}": (1, f"same | {{o}} = {text}") for name, text in {
        "sin": "{any}.sin()", "tanh": "{any}.tanh()", "gelu": "F.gelu({any})", "silu": "F.silu({any})", "relu": "{any}.relu()",
        "exp": "{any}.tanh().exp()", "sigmoid": "{any}.sigmoid()", "square": "{any}.tanh().square()", "abs": "{any}.abs()",
        "softplus": "F.softplus({any})", "reciprocal": "1 / (2 + {any}.tanh())", "sqrt": "({any}.square() + 0.1).sqrt()",
        "clamp": "{any}.clamp(-0.7, {c})", "where": "torch.where({any/a} > {c}, {any/a}, {any/a}.cos())", "scale": "{any} * {c}",
        "pow": "({any}.abs() + 0.1) ** 1.5", "erf": "torch.erf({any})", "leaky": "F.leaky_relu({any}, {c})",
        "lerp": "torch.lerp({any/a}, {any/a}.sin(), {c})", "addcmul": "torch.addcmul({any/a}, {any/a}, {any/a}.cos(), value={c})",
        "half": "{any/a}.to(torch.bfloat16).to({any/a}.dtype)", "double": "({any/a}.double() * {c}).to({any/a}.dtype)",
        "clone": "{any}.clone()", "masked": "{any/a}.masked_fill({any/a} < 0, {c})", "detached": "{any/a} * {any/a}.detach().cos()",
        "maximum": "torch.maximum({any/a}, {any/a}.flip(-1))", "nan_to_num": "torch.nan_to_num({any})",
        "compared": "{any/a} * ({any/a} > {c})", "rounded": "{any/a} + ({any/a} * 4).round() / 8", "glu": "{any/a} * F.hardtanh({any/a})",
    }.items()},
    **{f"two {name}": (2, f"bsh | {{o}} = {text}") for name, text in {
        "add": "{bsh} + {bsh}", "mul": "{bsh} * {bsh}.sigmoid()", "row": "{bsh} * {bs1}", "mean": "{bsh} + {b1h}",
        "sub": "{bsh} - {c} * {bsh}", "div": "{bsh} / (1.5 + {bs1}.abs())", "atan2": "torch.atan2({bsh}, {bsh}.abs() + 1)",
        "glu": "F.glu({bsw}, -1)", "stack": "torch.stack([{bsh}, {bsh}, {bsh}]).sum(0)", "of rows": "{rows}.view(B, S, H).tanh()",
        "of heads": "{heads}.transpose(1, 2).reshape(B, S, H)", "parameter": "{bsh} * {P:H} + {P:H}",
        "of a parameter": "{bsh} + {P:H}.exp().cumsum(0)", "cat": "torch.cat([{bsh}[..., : H // 2], {bsh}[..., H // 2 :]], -1)",
    }.items()},
    # shapes
    **{f"shape {kind}": (2, f"{kind} | {{o}} = {text.replace('{v}', '{bsh/a}')}") for kind, text in _TO.items() if kind != "bsh"},
    "chunk": (2, "bsh | {t:a}, {t:b} = {bsw}.chunk(2, -1)\n{o} = F.silu({t:a}) * {t:b}"),
    "split, unbind": (1, "bsh | {t:a} = torch.stack({bsw}.split(H, -1), 2).unbind(2)\n{o} = {t:a}[0] - {t:a}[1].sin()"),
    "permute": (1, "bsh | {o} = {bsh}.permute(2, 0, 1).contiguous().sin().permute(1, 2, 0)"),
    "transpose": (1, "bsh | {o} = {bsh}.transpose(1, 2).tanh().transpose(1, 2)"),
    "sequence first": (1, "bsh | {t:a} = {bsh}.transpose(0, 1)\n{o} = F.linear({t:a}.contiguous(), {P:H, H}).transpose(0, 1)"),
    "expand": (1, "bsh | {o} = {bsh/a} * {bs1}.expand(B, S, H).cos()"),
    "broadcast": (1, "bsh | {o} = ({b1h}.expand(B, S, H) + {bsh}).tanh()"),
    "narrow": (1, "bsh | {o} = torch.cat([{bsh/a}.narrow(1, {k}, S - {k/1}), {bsh/a}.narrow(1, 0, {k/1})], 1)"
               .replace("{k}", "{k/1}")),
    "roll": (1, "bsh | {o} = {bsh/a} + torch.roll({bsh/a}, 1, 1)"),
    "flip": (1, "bsh | {o} = {bsh/a} * {bsh/a}.flip(1).sigmoid()"),
    "pad": (1, "bsh | {o} = F.pad({bsh}, (0, 0, 1, 0))[:, :-1]"),
    "select": (1, "b1h | {o} = {bsh}.select(1, {k}).unsqueeze(1)"),
    "strided": (1, "bsh | {t:a} = {bsh}\n{o} = torch.stack([{t:a}[..., ::2], -{t:a}[..., 1::2]], -1).flatten(-2)"),
    "repeat": (1, "bsh | {o} = {bsh}[:, :, : H // 2].repeat(1, 1, 2)"),
    "repeat_interleave": (1, "bsh | {o} = {bsh}[:, :, : H // 2].repeat_interleave(2, -1).sin()"),
    "diagonal": (1, "bsh | {o} = {bsh} + torch.diagonal({P:H, H})"),
    "unfold": (1, "bsh | {o} = F.pad({bsh}, (0, 0, 3, 0)).unfold(1, 4, 1).amax(-1)"),
    "tril": (1, "bsh | {o} = mask.to(x.dtype) @ {bsh} / S"),
    "movedim": (1, "heads | {o} = {heads}.movedim(1, 2).sin().movedim(2, 1)"),
    # reductions, norms
    "mean": (1, "b1h | {o} = {bsh}.mean(1, keepdim=True)"),
    "sum of features": (1, "bs1 | {o} = ({bsh}.sum(-1, keepdim=True) / H).tanh()"),
    "amax": (1, "bs1 | {o} = {bsh}.amax(-1, keepdim=True)"),
    "max": (1, "b1h | {o} = {bsh}.max(1, keepdim=True).values"),
    "variance": (1, "bs1 | {o} = ({bsh}.var(-1, keepdim=True) + 0.1).rsqrt()"),
    "logsumexp": (1, "bs1 | {o} = {bsh}.logsumexp(-1, keepdim=True).tanh()"),
    "softmax": (1, "bsh | {o} = {bsh}.softmax(-1)"),
    "softmax of tokens": (1, "bsh | {o} = {bsh}.softmax(1)"),
    "log_softmax": (1, "bsh | {o} = F.log_softmax({bsh}, -1).tanh()"),
    "norm": (1, "bsh | {o} = {bsh/a} / ({bsh/a}.norm(dim=-1, keepdim=True) + 1)"),
    "normalize": (1, "bsh | {o} = F.normalize({bsh}, dim=-1, eps=0.1)"),
    "layer_norm": (3, "bsh | {o} = F.layer_norm({bsh}, (H,), {P:H}, {P:H})"),
    "LayerNorm": (3, "bsh | {o} = {M:nn.LayerNorm(H)}({bsh})"),
    "RMSNorm": (2, "bsh | {o} = {M:nn.RMSNorm(H)}({bsh})"),
    "RMSNorm written out": (2, """bsh | {t:a} = {bsh/a}.float()
{t:a} = {t:a} * torch.rsqrt({t:a}.pow(2).mean(-1, keepdim=True) + 1e-6)
{o} = {P:H} * {t:a}.to({bsh/a}.dtype)"""),
    "group_norm": (1, "bsh | {o} = F.group_norm({rows}, 4, {P:H}, {P:H}).view(B, S, H)"),
    "batch_norm": (1, "bsh | {o} = {M:nn.BatchNorm1d(H)}({rows}).view(B, S, H)"),
    "instance_norm": (1, "bsh | {o} = F.instance_norm({bsh}.transpose(1, 2)).transpose(1, 2)"),
    # products
    "Linear": (4, "bsh | {o} = {M:nn.Linear(H, H)}({bsh})"),
    "linear": (3, "bsh | {o} = F.linear({bsh}, {P:H, H}, {P:H})"),
    "up": (3, "bsw | {o} = {M:nn.Linear(H, 2 * H)}({bsh})"),
    "down": (3, "bsh | {o} = F.linear({bsw}, {P:H, 2 * H})"),
    "MLP": (2, "bsh | {o} = {M:nn.Sequential(nn.Linear(H, 2 * H), nn.GELU(), nn.Linear(2 * H, H))}({bsh})"),
    "GLU": (2, "bsh | {o} = F.linear(F.silu(F.linear({bsh/a}, {P:2 * H, H})) * F.linear({bsh/a}, {P:2 * H, H}), {P:H, 2 * H})"),
    "shared weight": (1, "bsh | {t:w} = {P:H, H}\n{o} = F.linear(F.linear({bsh}, {t:w}).tanh(), {t:w}.t())"),
    "weight of a product": (1, "bsh | {o} = F.linear({bsh}, {P:H, 4} @ {P:4, H})"),
    "low rank": (1, "bsh | {o} = F.linear(F.linear({bsh}, {P:4, H}), {P:H, 4}) * {c}"),
    "mm": (1, "rows | {o} = torch.mm({rows}, {P:H, H})"),
    "addmm": (1, "rows | {o} = torch.addmm({P:H}, {rows}, {P:H, H})"),
    "bmm": (1, "bsh | {o} = torch.bmm({bsh}, {P:H, H}.expand(B, H, H))"),
    "baddbmm": (1, "bsh | {o} = torch.baddbmm({bsh}, {bsh}, {P:H, H}.expand(B, H, H), beta={c})"),
    "einsum": (1, "bsh | {o} = torch.einsum('bsh,hk->bsk', {bsh}, {P:H, H})"),
    "einsum of heads": (1, "heads | {o} = torch.einsum('bnsd,nde->bnse', {heads}, {P:4, H // 4, H // 4})"),
    "mixed tokens": (1, "bsh | {o} = torch.einsum('bsh,bth->bst', {bsh/a}, {bsh/a}).tanh() @ {bsh/a} / S"),
    "outer": (1, "bsh | {t:a} = {bsh}\n{o} = ({t:a}.unsqueeze(-1) * {t:a}.unsqueeze(-2)).sum(-1) / H"),
    "matmul of a vector": (1, "bs1 | {o} = ({bsh} @ {P:H}).unsqueeze(-1)"),
    "conv1d": (1, "bsh | {o} = F.conv1d(F.pad({bsh}.transpose(1, 2), (3, 0)), {P:H, 1, 4}, groups=H).transpose(1, 2)"),
    "conv of one": (1, "bsh | {o} = F.conv1d({bsh}.transpose(1, 2), {P:H, H, 1}, {P:H}).transpose(1, 2)"),
    # attention
    "sdpa": (3, "heads | {o} = F.scaled_dot_product_attention({heads}, {heads}, {heads}, is_causal=True)"),
    "sdpa with a mask": (1, "heads | {o} = F.scaled_dot_product_attention({heads}, {heads}, {heads}, attn_mask=mask)"),
    "sdpa with dropout": (1, "heads | {o} = F.scaled_dot_product_attention({heads}, {heads}, {heads}, dropout_p=0.1, is_causal=True)"),
    "sdpa of groups": (1, """heads | {t:k} = {heads}[:, :2]
{o} = F.scaled_dot_product_attention({heads}, {t:k}, {t:k}.sin(), is_causal=True, enable_gqa=True)"""),
    "attention": (3, """bsh | {t:q}, {t:k}, {t:v} = F.linear({bsh}, {P:3 * H, H}).view(B, S, 3, 4, H // 4).permute(2, 0, 3, 1, 4)
{o} = F.scaled_dot_product_attention({t:q}, {t:k}, {t:v}, is_causal=True).transpose(1, 2).reshape(B, S, H)"""),
    "attention written out": (2, """heads | {t:s} = {heads} @ {heads}.transpose(-1, -2) / 4
{t:s} = {t:s}.masked_fill(~mask, float('-inf')).softmax(-1)
{o} = {t:s} @ {heads}"""),
    "softcap": (1, """heads | {t:s} = ({heads} @ {heads}.transpose(-1, -2)).div(5).tanh() * 5
{o} = F.dropout(({t:s} + torch.where(mask, 0.0, -1e4)).float().softmax(-1), 0.1).to(x.dtype) @ {heads}"""),
    "rotary": (2, """heads | {t:a} = {heads}
{o} = {t:a} * rotary[0] + torch.cat([-{t:a}[..., H // 8 :], {t:a}[..., : H // 8]], -1) * rotary[1]"""),
    "MultiheadAttention": (1, "bsh | {o} = {M:nn.MultiheadAttention(H, 4, batch_first=True)}({bsh/a}, {bsh/a}, {bsh/a})[0]"),
    # indices
    "gather": (1, "bsh | {o} = {bsh/a}.gather(-1, {bsh/a}.argsort(-1))"),
    "sort": (1, "bsh | {o} = {bsh}.sort(-1).values"),
    "sort of tokens": (1, "bsh | {o} = {bsh}.sort(dim=1, stable=True).values * {c}"),
    "topk": (1, "bsh | {t:v}, {t:i} = {bsh/a}.topk(4, -1)\n{o} = torch.zeros_like({bsh/a}).scatter(-1, {t:i}, {t:v}.softmax(-1))"),
    "scatter_add": (1, "bsh | {o} = torch.zeros_like({bsh/a}).scatter_add(-1, {bsh/a}.argsort(-1), {bsh/a})"),
    "index_add": (1, "rows | {o} = {rows}.index_add(0, torch.arange(0, B * S, 2), {rows}[1::2])"),
    "index_select": (1, "rows | {o} = {rows}.index_select(0, torch.randperm(B * S))"),
    "index": (1, "rows | {t:a} = {rows}\n{o} = {t:a}[{t:a}[:, 0].argsort()]"),
    "boolean index": (1, "bsh | {t:a} = {rows}\n{t:m} = {t:a}[:, 0] > 0\n{t:b} = {t:a}[{t:m}].sin()\n"
                         "{t:c} = {t:a} * 1\n{t:c}[{t:m}] = {t:b}\n{o} = {t:c}.view(B, S, H)"),
    "masked_select": (1, "bsh | {t:a} = {bsh}\n{o} = {t:a} + torch.masked_select({t:a}, {t:a} > 0).sum() / 99"),
    "index_put": (1, "rows | {o} = {rows/a}.index_put((torch.arange({k}),), {rows}[: {k/1}])".replace("{k}", "{k/1}")),
    "accumulated": (1, "rows | {t:i} = torch.arange(B * S) % 7\n{o} = torch.zeros_like({rows/a}).index_put(({t:i},), {rows/a}, "
                       "accumulate=True)[{t:i}] / 9"),
    "embedding": (1, "bsh | {o} = {bsh/a} + F.embedding(({bsh/a}[..., 0].abs() * 9).long() % 11, {P:11, H})"),
    "one_hot": (1, "bsh | {o} = {bsh/a} + F.one_hot({bsh/a}.argmax(-1), H).to(x.dtype)"),
    "cumsum": (1, "bsh | {o} = {bsh}.cumsum(1) / S"),
    "cummax": (1, "bsh | {o} = {bsh}.cummax(1).values"),
    "cumprod": (1, "bsh | {o} = ({bsh}.tanh() / 4 + 1).cumprod(-1)"),
    "positions": (1, "bsh | {o} = {bsh} * torch.arange(S, dtype=x.dtype).div(S).view(S, 1)"),
    "searchsorted": (1, "bsh | {o} = {bsh/a} * (1 + torch.bucketize({bsh/a}.detach().float(), torch.linspace(-1, 1, 5)) / 8)"),
    # in place
    "in place, fresh": (3, "same | {o} = {any} * {c}\n{o}.add_({c}).mul_({c})"),
    "in place, as it is": (1, "same | {o} = {any}\n{o}.add_({c})"),
    "in place, relu": (1, "bsh | {o} = {M:nn.Linear(H, H)}({bsh}).relu_()"),
    "in place, sigmoid": (1, "bsh | {o} = F.linear({bsh}, {P:H, H}).sigmoid_()"),
    "in place, masked": (1, "same | {o} = {any} + 0\n{o}.masked_fill_({o}.detach() > {c}, {c})"),
    "in place, copy_": (1, "bsh | {o} = torch.zeros_like({bsh/a})\n{o}.copy_({bsh/a})\n{o}.mul_({bsh})"),
    "in place, view": (1, "bsh | {o} = {bsh} * {c}\n{o}.view(-1, H)[::2].mul_({c})"),
    "in place, transposed": (1, "bsh | {o} = {bsh} * {c}\n{o}.transpose(1, 2)[:, : H // 2].add_({c})"),
    "in place, after use": (1, "bsh | {t:a} = {bsh} + {c}\n{o} = {t:a}.clone()\n{t:a}.mul_(2)\n{o} = {o} + {t:a}"),
    "in place, noticed": (1, "bsh | {t:a} = {bsh} + {c}\n{o} = {t:a}.sin()\n{t:a}.mul_(2)"),
    "slices assigned": (2, "bsh | {o} = {bsh} * {c}\n{o}[:, : {k}] = {bsh}[:, : {k/1}]".replace("{k}", "{k/1}")),
    "features assigned": (1, "bsh | {o} = {bsh} * {c}\n{o}[..., ::2] = 0.5\n{o}[..., 1] += 0.25"),
    "empty, filled": (2, "bsh | {o} = torch.empty_like({bsh/a})\n{o}[:, : {k/1}] = {bsh/a}[:, : {k/1}] * 2\n"
                         "{o}[:, {k/1} :] = {bsh}[:, {k/1} :].sin()"),
    "empty, by features": (1, "bsh | {o} = torch.empty((B, S, H), dtype=x.dtype)\n{o}[..., : H // 2] = {bsh}[..., H // 2 :]\n"
                              "{o}[..., H // 2 :] = {bsh}[..., : H // 2]"),
    "zeros, accumulated": (1, "bsh | {o} = torch.zeros((B, S, H), dtype=x.dtype)\nfor {t:i} in range(3):\n"
                              "    {o}[:, {t:i} :] += {bsh/a}[:, : S - {t:i}] * {c}"),
    "out=": (1, "bsh | with torch.no_grad():\n    {t:a} = torch.empty_like({bsh/a})\n    torch.sigmoid({bsh/a}, out={t:a})\n"
                "{o} = {bsh/a} * {t:a}"),
    "out= of nothing": (1, "bsh | {t:a} = torch.empty(0, dtype=x.dtype)\ntorch.cumsum({bsh/a}.detach(), 1, out={t:a})\n"
                           "{o} = {bsh/a} * {t:a}.cos()"),
    "index_put_": (1, "rows | {o} = {rows} * 1\n{o}.index_put_((torch.arange(0, B * S, 3),), {rows}[::3], accumulate=True)"),
    "index_fill_": (1, "rows | {o} = {rows} * 1\n{o}.index_fill_(0, torch.tensor([1, 3]), {c})"),
    "index_add_": (1, "rows | {o} = torch.zeros_like({rows/a})\n{o}.index_add_(0, torch.arange(B * S) // 2, {rows/a})"),
    "scatter_": (1, "bsh | {o} = torch.zeros_like({bsh/a})\n{o}.scatter_(-1, {bsh/a}.argsort(-1), {bsh/a})"),
    "written over": (1, "bsh | {o} = {bsh/a}.sin()\n{t:a} = {o} * {o}.detach()\n{o} = {t:a}\n{o}.zero_().add_({bsh})"),
    "resized": (1, "bsh | {t:a} = torch.empty(0, dtype=x.dtype)\n{t:a}.resize_(B, S, H)\n{t:a}.copy_({bsh/a}.detach())\n"
                   "{o} = {bsh} * {t:a}"),
    "input in place": (1, "bsh | x.mul_({c})\n{o} = x.sin()"),
    # random numbers
    "dropout": (4, "bsh | {o} = F.dropout({bsh}, 0.2)"),
    "Dropout": (2, "bsh | {o} = {M:nn.Dropout(0.1)}({bsh})"),
    "alpha_dropout": (1, "bsh | {o} = F.alpha_dropout({bsh}, 0.2, True)"),
    "noise": (1, "bsh | {o} = {bsh/a} + torch.randn_like({bsh/a}) * {c}"),
    "noise of a shape": (1, "bsh | {o} = {bsh} * torch.rand((B, S, 1)).to(x.dtype)"),
    "bernoulli": (1, "bsh | {o} = {bsh/a} * torch.bernoulli(torch.full_like({bsh/a}, 0.7))"),
    "rrelu": (1, "bsh | {o} = F.rrelu({bsh}, training=True)"),
    "multinomial": (1, "bsh | {o} = {bsh/a} * torch.multinomial({bsh/a}.detach().float().softmax(-1).view(-1, H), 1).view(B, S, 1) / H"),
    "normal_": (1, "bsh | {o} = {bsh} * torch.empty((B, S, H), dtype=x.dtype).normal_().tanh()"),
    "generator": (1, "bsh | {o} = {bsh} * torch.rand((S, H), generator={A:torch.Generator().manual_seed(1)}).to(x.dtype)"),
    "Python's numbers": (1, "bsh | {o} = {bsh} * random.random()"),
    "NumPy's numbers": (1, "bsh | {o} = {bsh} * float(numpy.random.rand())"),
    # paths that data choose
    "if": (2, "bsh | {t:a} = {bsh}\nif {t:a}.mean() > 0:\n    {o} = {t:a}.sin()\nelse:\n    {o} = {t:a}.exp().tanh() * {c}"),
    "if of tokens": (1, "bsh | {t:a} = {bsh}\n{o} = F.gelu({t:a})\nif {t:a}[0, 0, 0] > 0:\n    {o} = {o} + {M:nn.Linear(H, H)}({o})"),
    "item": (2, "bsh | {o} = {bsh/a} * (1 + {bsh/a}.detach().abs().max().item())"),
    "item as a length": (1, "bsh | {t:a} = {bsh}\n{t:k} = int({t:a}.detach().float().abs().mean() * 20) % S\n"
                            "{o} = torch.cat([{t:a}[:, : {t:k}].sin(), {t:a}[:, {t:k} :] * {c}], 1)"),
    "tolist": (1, "bsh | {t:a} = {bsh}\n{o} = {t:a} * sum({t:a}[0, 0].detach().tolist())"),
    "experts": (3, """bsh | {t:a} = {rows}
{t:w} = {P:3, H, H}
{t:choice} = F.linear({t:a}, {P:3, H}).argmax(-1)
{o} = torch.zeros_like({t:a})
for {t:i} in range(3):
    {t:rows} = ({t:choice} == {t:i}).nonzero().squeeze(-1)
    {o} = {o}.index_add(0, {t:rows}, F.gelu(F.linear({t:a}[{t:rows}], {t:w}[{t:i}])))
{o} = {o}.view(B, S, H)"""),
    "experts in place": (2, """bsh | {t:a} = {rows}
{t:p}, {t:i} = F.linear({t:a}, {P:3, H}).softmax(-1).topk(2, -1)
{o} = torch.zeros_like({t:a})
for {t:n}, {t:expert} in enumerate({M:nn.ModuleList([nn.Linear(H, H) for _ in range(3)])}):
    {t:rows}, {t:k} = torch.where({t:i} == {t:n})
    if {t:rows}.numel():
        {o}.index_add_(0, {t:rows}, {t:expert}({t:a}[{t:rows}]) * {t:p}[{t:rows}, {t:k}, None])
{o} = {o}.view(B, S, H)"""),
    "experts sorted": (1, """bsh | {t:a} = {rows}
{t:choice} = F.linear({t:a}, {P:3, H}).argmax(-1)
{t:order} = {t:choice}.argsort(stable=True)
{t:counts} = {t:choice}.bincount(minlength=3).tolist()
{t:w} = {P:3, H, H}
{t:parts} = [{t:part} @ {t:w}[{t:i}] for {t:i}, {t:part} in enumerate({t:a}[{t:order}].split({t:counts}))]
{o} = torch.empty_like({t:a})
{o}[{t:order}] = torch.cat({t:parts})
{o} = {o}.view(B, S, H)"""),
    "loop": (1, "bsh | {o} = {bsh}\nfor {t:i} in range(3):\n    {o} = torch.tanh({o} + {c} * {o}.roll({t:i}, 1))"),
    "scan": (1, """bsh | {t:a} = {bsh}
{t:state} = torch.zeros_like({t:a}[:, 0])
{t:states} = []
for {t:i} in range(S):
    {t:state} = {t:state} * 0.5 + {t:a}[:, {t:i}]
    {t:states}.append({t:state})
{o} = torch.stack({t:states}, 1)"""),
    # side effects
    "books": (1, "bsh | {A:[]}.append(float({bsh/a}.detach().sum()))\n{o} = {bsh/a}.sin()"),
    "counter": (1, "bsh | self.calls += 1\n{o} = {bsh} * (1 + 0.1 * self.calls)"),
    "counter in a dictionary": (1, "bsh | {t:d} = {A:{'calls': 0}}\n{t:d}['calls'] += 1\n{o} = {bsh} / {t:d}['calls']"),
    "kept aside": (1, "bsh | self.aside = {bsh/a}.sin()\n{o} = {bsh} * self.aside"),
    "kept in a list": (1, "bsh | {t:l} = {A:[]}\n{t:l}.append({bsh/a}.detach())\n{o} = {bsh/a} + {t:l}[-1] * {c}"),
    "buffer": (1, """bsh | {t:b} = {B:H}
with torch.no_grad():
    {t:b}.mul_(0.9).add_({bsh/a}.detach().mean((0, 1)), alpha=0.1)
{o} = {bsh} - {t:b}.clone()"""),
    "buffer read": (1, "bsh | {o} = {bsh} + {B:H}.cos()"),
    "global": (1, "bsh | {o} = {bsh} * TABLE"),
    "hook that changes": (1, "bsh | {o} = {M:hooked(nn.Linear(H, H), 1.5)}({bsh})"),
    "hook that counts": (1, "bsh | {o} = {M:counted(nn.Linear(H, H))}({bsh})"),
    "hook of a gradient": (1, "bsh | {o} = {bsh} * {c}\nif {o}.requires_grad:\n    {o}.register_hook(lambda grad: grad * 0.5)"),
    # functions and operators of one's own
    "Function": (1, "bsh | {o} = Scaled.apply({bsh}, {P:H})"),
    "Function in place": (1, "bsh | {o} = DoubledInPlace.apply({bsh} * {c})"),
    "Function of two": (1, "bsh | {t:a}, {t:b} = Parted.apply({bsh})\n{o} = torch.cat([{t:b}, {t:a}], -1)"),
    "custom operator": (1, "bsh | {o} = torch.ops.memo_random.smooth({bsh})"),
    "custom operator in place": (1, "bsh | {t:a} = {bsh/a}.detach().clone()\ntorch.ops.memo_random.halve({t:a})\n{o} = {bsh/a} * {t:a}"),
    "custom operator of tokens": (1, "bsh | {o} = torch.ops.memo_random.carried({bsh})"),
    "opaque, empty": (1, "bsh | {o} = Opaque.apply({bsh}, torch.empty_like)"),
    "opaque, zeros": (1, "bsh | {o} = Opaque.apply({bsh}, torch.zeros_like)"),
    "opaque, copy": (1, "bsh | {o} = Opaque.apply({bsh}, torch.clone)"),
    "opaque, factor": (1, "bsh | {t:a} = torch.empty((B, S, H), dtype=x.dtype)\nfill({t:a}, {bsh/a})\n{o} = {bsh/a} * {t:a}"),
    "opaque, over zeros": (1, "bsh | {t:a} = torch.zeros((B, S, H), dtype=x.dtype)\nfill({t:a}, {bsh/a})\n{o} = {bsh/a} * {t:a}.sin()"),
    "opaque, over a value": (1, "bsh | {t:a} = {bsh/a}.detach() * 2\nfill({t:a}, {bsh/a})\n{o} = {bsh/a} * {t:a}"),
    "opaque, a part": (1, "bsh | {t:a} = {bsh/a}.detach().clone()\nfill({t:a}[:, 4:], {bsh/a}[:, 4:])\n{o} = {bsh/a}.cos() * {t:a}"),
    "opaque, then seen": (1, "bsh | {t:a} = torch.empty_like({bsh/a})\nfill({t:a}, {bsh/a})\n{t:a}.mul_(2)\n{o} = {bsh/a} * {t:a}.cos()"),
    "opaque, what autograd saves": (1, "bsh | {t:a} = {bsh} * {c}\n{o} = {t:a}.sin()\nfill({t:a}, {bsh/a})\n{o} = {o} + {t:a}"),
    # regions
    "checkpoint": (1, "bsh | def {t:f}({t:v}):\n    {block:{t:v}}\n{o} = checkpoint({t:f}, {bsh}, use_reentrant=False)"),
    "checkpoint, reentrant": (1, "bsh | def {t:f}({t:v}):\n    {block:{t:v}}\n{o} = checkpoint({t:f}, {bsh}, use_reentrant=True)"),
    "autocast": (2, "bsh | with torch.autocast('cpu', torch.bfloat16):\n    {t:a} = {M:nn.Linear(H, H)}({bsh})\n"
                    "    {t:b} = F.linear({t:a}, {P:H, H}).softmax(-1)\n{o} = {t:b}.to(x.dtype)"),
    "autocast off": (1, "bsh | with torch.autocast('cpu', enabled=False):\n    {t:a} = {bsh}.float() @ {P:H, H}.float()\n"
                        "{o} = {t:a}.to(x.dtype)"),
    "no_grad": (1, "bsh | with torch.no_grad():\n    {t:a} = F.linear({bsh/a}, {P:H, H}).softmax(-1)\n{o} = {bsh/a} * {t:a}"),
    "inner function": (2, "bsh | def {t:f}({t:v}):\n    {block:{t:v}}\n{o} = {t:f}({bsh}) + {t:f}({bsh})"),
    "either": (1, "bsh | def {t:f}({t:v}):\n    {block:{t:v}}\ndef {t:g}({t:w}):\n    {block:{t:w}}\n"
                  "{t:a} = {bsh}\n{o} = {t:f}({t:a}) if {t:a}.sum() > 0 else {t:g}({t:a})"),
    "vmap": (1, "bsh | {t:w} = {P:H, H}\n{o} = torch.vmap(lambda v: torch.tanh(v @ {t:w}))({bsh})"),
}  # fmt: skip


class Scaled(torch.autograd.Function):
    """tanh(exp(tanh(x)) · w), with what its backward needs saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        inner = x.tanh().exp()
        out = (inner * weight).tanh()
        ctx.save_for_backward(x, inner, out, weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, inner, out, weight = ctx.saved_tensors
        above = grad * (1 - out * out)
        return above * weight * inner * (1 - x.tanh() ** 2), (above * inner).sum((0, 1))


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Parted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = x.size(-1) // 2
        left, right = x[..., :half].sin(), x[..., half:].contiguous() * 1
        ctx.save_for_backward(x, right)
        return left, right

    @staticmethod
    def backward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        x, kept = ctx.saved_tensors
        return torch.cat([left * x[..., : left.size(-1)].cos(), right + 0 * kept], -1)


def fill(out: torch.Tensor, x: torch.Tensor) -> None:
    """Writes tanh(x) + 0.5 where torch's dispatcher does not see it."""
    value = numpy.tanh(x.detach().float().numpy()) + numpy.float32(0.5)
    if out.dtype is torch.bfloat16:
        out.detach().view(torch.int16).numpy()[...] = (value.astype(numpy.float32).view(numpy.uint32) >> 16).astype(
            numpy.int16
        )
    else:
        out.detach().numpy()[...] = value


class Opaque(torch.autograd.Function):
    """tanh(x) + 0.5 by a kernel that the dispatcher does not see, into memory that `make` gives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        out = make(x)
        fill(out, x)
        ctx.save_for_backward(out)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (out,) = ctx.saved_tensors
        return grad * (1 - (out - 0.5).square()), None


def _halve(x: torch.Tensor) -> None:
    x.mul_(0.5)


_LIBRARY = torch.library.Library("memo_random", "FRAGMENT")
_LIBRARY.define("smooth(Tensor x) -> Tensor")
_LIBRARY.define("halve(Tensor(a!) x) -> ()")
_LIBRARY.define("carried(Tensor x) -> Tensor")
_LIBRARY.impl("halve", _halve, "CPU")
_LIBRARY.impl("smooth", lambda x: torch.atan(x), "CPU")
_LIBRARY.impl("carried", lambda x: x.cumsum(1).div(x.size(1)), "CPU")


def _save_input(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_of_smooth(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return grad / (1 + x * x)


torch.library.register_autograd("memo_random::smooth", _backward_of_smooth, setup_context=_save_input, lib=_LIBRARY)
torch.library.register_autograd(
    "memo_random::carried",
    lambda ctx, grad: grad.flip(1).cumsum(1).flip(1).div(grad.size(1)),
    lib=_LIBRARY,
)


def hooked(module: nn.Module, factor: float) -> nn.Module:
    """With a forward hook that changes the output."""
    module.register_forward_hook(lambda _module, _args, out: out * factor)
    return module


def counted(module: nn.Module) -> nn.Module:
    """With a forward hook that counts calls."""
    module.calls = 0  # type: ignore[assignment]

    def count(inner: Any, _args: Any, _out: Any) -> None:
        inner.calls += 1

    module.register_forward_hook(count)
    return module


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One random layer."""

    seed: int
    text: str
    templates: tuple[str, ...]
    """Names of what its statements were drawn from."""

    def model(self, kind: torch.dtype) -> nn.Module:
        """A model of a few such layers with the same weights each time."""
        names: dict[str, Any] = {**globals(), "H": HIDDEN, "TABLE": torch.linspace(0.5, 1.5, HIDDEN).to(kind)}
        exec(compile(self.text, f"<random layer {self.seed}>", "exec"), names)
        torch.manual_seed(self.seed)
        return Stack(names["Layer"]).to(kind)


class Stack(nn.Module):
    """Layers on a learned offset of the step's input."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(HIDDEN) / 2)
        self.layers = nn.ModuleList([make() for _ in range(LAYERS)])

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        x = given + self.start
        tokens = x.size(1)
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        angles = torch.arange(tokens, dtype=torch.float32).view(-1, 1) / torch.arange(1, HIDDEN // 4 + 1)
        rotary = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        beside = x.new_zeros(())
        for layer in self.layers:
            x = layer(x, mask, rotary=rotary)
            if isinstance(x, tuple):
                x, more = x
                beside = beside + more.mean()
            if layer.aside is not None:
                beside = beside + layer.aside.square().mean()
                layer.aside = None
        out = F.layer_norm(x.float(), (HIDDEN,))
        return (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).mean() + out.sin().mean() + beside.float()


class _Writer:
    """Draws statements and keeps what they declare."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        self._number = 0
        self.declared: list[str] = []
        self.templates: list[str] = []

    def block(self, start: str, statements: int, depth: int) -> list[str]:
        """Statements on the variable `start` of shape (b, s, h) that end with a `return` of that shape."""
        pool = [(start, "bsh")]
        lines: list[str] = []
        for _ in range(statements):
            name = self._draw(depth)
            self.templates.append(name)
            lines += self._statement(TEMPLATES[name][1], pool, depth)
        recent = pool[-self._draws.choice((1, 2, 3)) :]
        result = " + ".join(f"({_FROM[kind].format(v=name)})" for name, kind in recent)
        if depth:
            return [*lines, f"return ({result}).tanh()"]
        return [*lines, *self._ending(result, pool)]

    def _ending(self, result: str, pool: list[tuple[str, str]]) -> list[str]:
        out = f"x + {self._constant()} * F.layer_norm({result}, (H,))"
        if self._draws.random() < 0.1:
            return [f"return {out}, {self._draws.choice(pool)[0]}"]
        return [f"return {out}"]

    def _draw(self, depth: int) -> str:
        names = [name for name, (_, text) in TEMPLATES.items() if not (depth and "{block" in text)]
        return self._draws.choices(names, [TEMPLATES[name][0] for name in names])[0]

    def _constant(self) -> str:
        return f"{self._draws.uniform(0.2, 0.9):.2f}"

    def _name(self, letter: str) -> str:
        self._number += 1
        return f"{letter}{self._number}"

    def _statement(self, template: str, pool: list[tuple[str, str]], depth: int) -> list[str]:
        kind, text = template.split(" | ", 1)
        known: dict[str, str] = {}
        before: list[str] = []

        def variable(wanted: str) -> str:
            nonlocal kind
            fitting = [(name, had) for name, had in pool if wanted in ("any", had)]
            if not fitting:
                source = self._draws.choice([name for name, had in pool if had == "bsh"])
                name = self._name("v")
                before.append(f"{name} = {_TO[wanted].format(v=source)}")
                return name
            name, had = self._draws.choice(fitting[-4:])
            if kind == "same" and wanted == "any":
                kind = had
            return name

        def value(word: str) -> str:
            head, _, rest = word.partition(":")
            head, _, tag = head.partition("/")
            if word in known:
                return known[word]
            if head in _SHAPES or head == "any":
                found = variable(head)
            elif head in ("o", "t"):
                found = self._name("v")
            elif head == "P":
                found = self._declare(f"nn.Parameter(torch.randn({rest}) * 0.3)")
            elif head == "B":
                found = self._declare_buffer(rest)
            elif head in ("M", "A"):
                found = self._declare(rest)
            elif head == "c":
                found = self._constant()
            elif head == "k":
                found = str(self._draws.randint(4, 12))
            else:
                raise AssertionError(word)
            if tag or head in ("o", "t"):
                known[word] = found
            return found

        text = re.sub(r"\{t:(\w+)\}", lambda match: value(f"t:{match[1]}"), text)
        for start in re.findall(r"\{block:(\w+)\}", text):
            lines = self.block(start, self._draws.randint(1, 4), depth + 1)
            text = text.replace(f"{{block:{start}}}", "\n    ".join(lines))
        # modules and attributes may hold braces of their own
        text = re.sub(r"\{A:(\{.*?\}|[^{}]*)\}", lambda match: value(f"A:{match[1]}"), text)
        text = re.sub(r"\{([A-Za-z0-9]+(?:[:/][^{}]*)?)\}", lambda match: value(match[1]), text)
        pool.append((known["o"], kind))
        return [*before, *text.split("\n")]

    def _declare(self, made: str) -> str:
        name = self._name("m")
        self.declared.append(f"self.{name} = {made}")
        return f"self.{name}"

    def _declare_buffer(self, shape: str) -> str:
        name = self._name("b")
        self.declared.append(f"self.register_buffer('{name}', torch.zeros({shape}))")
        return f"self.{name}"


def program(seed: int, *, statements: int = 10) -> Program:
    """The program of this seed, of up to so many statements."""
    draws = random.Random(seed)
    writer = _Writer(draws)
    body = writer.block("x", draws.randint(3, statements), 0)
    lines = [
        "class Layer(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.calls, self.aside = 0, None",
        *(f"        {line}" for line in writer.declared),
        "",
        "    def forward(self, x, mask, rotary):",
        "        B, S = x.shape[:2]",
        *(f"        {line}" for line in body),
    ]
    return Program(seed=seed, text="\n".join(lines) + "\n", templates=tuple(writer.templates))


@dataclasses.dataclass(slots=True, kw_only=True)
class Outcome:
    """A program compared with and without memo."""

    discarded: str | None = None
    """Why nothing was compared: torch alone raises, is not finite, or does not repeat itself."""
    failures: list[str] = dataclasses.field(default_factory=list)
    """Point and what was wrong there."""
    compared: int = 0
    """Points compared."""
    moved_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    recomputed_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    refused: list[str] = dataclasses.field(default_factory=list)
    """Reasons of layers that moved whole at alpha 0."""


def compare(made: Program, points: dict[str, Any] | None = None, kinds: tuple[torch.dtype, ...] = KINDS) -> Outcome:
    """Three steps of the program's model, plain and at each point, bit for bit."""
    found = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in kinds:
            if reason := _compare(made, POINTS if points is None else points, kind, found):
                found.discarded = found.discarded or f"{kind}: {reason}"
    return found


def _compare(made: Program, points: dict[str, Any], kind: torch.dtype, found: Outcome) -> str | None:
    raised = None
    want: dict[str, Any] = {}
    try:
        want = _train(made.model(kind), kind)
    except Exception as error:
        raised = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
        if "modified by an inplace operation" not in str(error):
            return raised
    else:
        if not all(torch.isfinite(value).all() for value in want.values() if isinstance(value, torch.Tensor)):
            return "not finite"
        if _unlike(_train(made.model(kind), kind), want):
            return "does not repeat itself"
    for name, point in points.items():
        at = f"{name}, {str(kind).removeprefix('torch.')}"
        model = made.model(kind)
        manager = memo.offload(model, alpha=1.0 if isinstance(point, Level) else point, host="64MiB", min_bytes=1)
        try:
            if isinstance(point, Level):
                manager.choose_levels(dict.fromkeys(range(LAYERS), point))
            got = _train(model, kind, manager)
        except ModifiedAfterSave as error:
            if raised is None:
                found.failures.append(f"{at}: {error}")
        except Exception as error:
            if raised is None:
                found.failures.append(f"{at}: {type(error).__name__}: {str(error)[:300]}")
        else:
            if raised is not None:
                found.failures.append(f"{at}: does not raise where torch does: {raised}")
            elif unlike := _unlike(got, want):
                found.failures.append(f"{at}: differs in {', '.join(unlike[:4])}{' ...' if len(unlike) > 4 else ''}")
        finally:
            manager.close()
        found.compared += 1
        stats = manager.stats
        found.moved_bytes[at] = stats.bytes_host + stats.bytes_disk
        found.recomputed_bytes[at] = stats.bytes_recomputed
        if name == "0":
            found.refused += getattr(manager.report().tokenwise, "refused", {}).values()
    return raised


def _train(model: nn.Module, kind: torch.dtype, manager: memo.Manager | None = None) -> dict[str, Any]:
    """Losses, gradients, buffers, and what the layers keep in Python, by name."""
    got: dict[str, Any] = {}
    for step in range(STEPS):
        tokens = TOKENS if step < 2 else TOKENS - 8
        given = torch.randn(BATCH, tokens, HIDDEN, generator=torch.Generator().manual_seed(step)).to(kind)
        given.requires_grad_()
        torch.manual_seed(step)
        random.seed(step)
        numpy.random.seed(step)
        if manager is None:
            loss = model(given)
        else:
            with manager:
                loss = model(given)
        loss.backward()
        got[f"loss of step {step}"] = loss.detach()
        got[f"gradient of the input, step {step}"] = given.grad
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                got[f"gradient of {name}, step {step}"] = parameter.grad
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.01)
                parameter.grad = None
    got.update(model.named_buffers())
    for name, layer in model.named_modules():
        for attribute, value in vars(layer).items():
            if (attribute.startswith("m") and isinstance(value, list | dict)) or attribute == "calls":
                got[f"{name}.{attribute}"] = value
    got["random numbers"] = torch.get_rng_state()
    got["Python's and NumPy's"] = (random.getstate(), str(numpy.random.get_state()))
    return got


def _unlike(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    return [name for name in {**want, **got} if not _same(got.get(name), want.get(name))]


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return not isinstance(ours, torch.Tensor) and not isinstance(theirs, torch.Tensor) and bool(ours == theirs)


def outcomes(seeds: range, **options: Any) -> Iterator[tuple[Program, Outcome]]:
    """Compares the programs of these seeds."""
    for seed in seeds:
        made = program(seed)
        yield made, compare(made, **options)
