"""Chunked cross entropy of a linear projection: one chunk of tokens' logits exists at a time.

Owns the model's last matrix product, its bias and the softmax; the scale and soft cap between them are
logit_transform_shape.py. Gradients are computed in forward, while the chunk's logits exist:

    forward    chunk: logits -> log softmax -> loss, d logits -> d hidden, d weight, d bias    (its logits are freed here)
    backward   these gradients times the incoming one

Invariants: memory beyond inputs and gradients does not depend on the number of tokens, and every reduction over tokens
or vocabulary is in float32 or wider, whatever the inputs are. In float16 no loss scale is known in forward: probabilities
are scaled in its products, these have float32 results, and the weight's gradient stays float32 until backward. Under tensor
parallelism each rank holds a shard of the vocabulary (output_rows.py) and computes the logits of that shard only.

torch 2.13 has F.linear_cross_entropy. It serves `keep_gradients=False` without bias or transform, with
reduction="none", since its own mean adds up bfloat16 losses in bfloat16. It is not the default: it computes the logits
a second time in backward, and adds up the chunks of a bfloat16 weight gradient in bfloat16. Against float64, 32,768
bfloat16 tokens in 512 chunks (benchmarks/loss.py): its mean is off by 65 % and its weight gradient by 4.5 %, this
one's by 0.001 % and 0.28 %; in float32 they are equally exact.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from memo.errors import UsageError
from memo.loss.chunks import chunk_tokens
from memo.loss.logit_transform_shape import PLAIN, LogitTransformShape
from memo.loss.output_rows import Vocabulary, WholeVocabulary

Reduction = Literal["mean", "sum"]

# Target of tokens that do not count, as in torch.nn.functional.cross_entropy.
IGNORE = -100

_WHOLE = WholeVocabulary()


def chunked_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    shape: LogitTransformShape = PLAIN,
    reduction: Reduction = "mean",
    ignore_index: int = IGNORE,
    chunk: int | None = None,
    vocabulary: Vocabulary = _WHOLE,
    keep_gradients: bool = True,
) -> torch.Tensor:
    """Cross entropy of a linear projection, a chunk of tokens at a time.

        loss = reduction over counted tokens of -log softmax(shape(hidden @ weight.T + bias))[target]

    Matrix products run in the autocast dtype where autocast is on, else in the dtype of `hidden`; everything after them
    in float32 or wider.

    Args:
        hidden: (..., h), floating point. With a `VocabularyShard` that divides tokens, this rank's tokens; else the same
            on all ranks.
        weight: (vocabulary, h); with a `VocabularyShard` this rank's rows.
        targets: (...), int64, `ignore_index` for tokens that do not count; divided like `hidden`.
        bias: (vocabulary), divided like the rows of `weight`.
        shape: scale and soft cap of the logits.
        reduction: "mean" over the counted tokens of all ranks, or "sum".
        ignore_index: target of tokens that do not count.
        chunk: tokens whose logits exist at a time; by default `chunk_tokens` of the vocabulary and of whether the weight
            requires a gradient.
        vocabulary: the rows of the projection that are on this rank.
        keep_gradients: computes gradients in forward. False saves the inputs only, and computes the logits twice.

    Returns:
        A scalar in float32 or wider, once differentiable, the same on every rank. Zero, with zero gradients, when no
        token counts. The gradient of `hidden` is that of the whole vocabulary.

    Raises:
        UsageError: `reduction` is neither "mean" nor "sum"; nothing was computed.
    """
    if reduction not in ("mean", "sum"):
        raise UsageError(f"reduction: {reduction!r} is neither 'mean' nor 'sum'")
    compute = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        compute = torch.get_autocast_dtype(hidden.device.type)
    chunk = chunk or chunk_tokens(vocabulary.widest(weight.shape[0]), trained=weight.requires_grad)
    options = _Options(
        chunk=max(1, chunk // vocabulary.token_shards),
        compute=compute,
        wide=torch.promote_types(hidden.dtype, torch.float32),
        vocabulary=vocabulary,
        shape=shape,
        mean=reduction == "mean",
        ignore_index=ignore_index,
    )
    flat, flat_targets = hidden.flatten(0, -2), targets.flatten()
    if keep_gradients or not torch.is_grad_enabled():
        return _loss_keeping_gradients(flat, weight, bias, flat_targets, options)
    if options.is_torchs and bias is None:
        return _torch_loss(flat, weight, flat_targets, options)
    arguments = (flat, weight, bias, flat_targets, options)
    again = checkpoint(_loss_keeping_gradients, *arguments, use_reentrant=False, preserve_rng_state=False)
    return cast("torch.Tensor", again)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """Arguments of the loss that are no tensors."""

    chunk: int
    """Tokens of this rank in one chunk."""
    compute: torch.dtype
    """Dtype of the matrix products."""
    wide: torch.dtype
    """Dtype of everything after them."""
    vocabulary: Vocabulary
    shape: LogitTransformShape
    mean: bool
    ignore_index: int

    @property
    def is_torchs(self) -> bool:
        """True where F.linear_cross_entropy computes the same: the whole vocabulary, without scale and soft cap."""
        here = isinstance(self.vocabulary, WholeVocabulary)
        return hasattr(F, "linear_cross_entropy") and here and self.shape == PLAIN

    @property
    def scale(self) -> float:
        """Factor of the gradient by logits: in float16 a probability of 2 ** -35 is not zero, and no gradient infinite."""
        return 2.0 ** (12 - max(0, math.frexp(self.shape.scale)[1])) if self.compute is torch.float16 else 1.0

    def divisor(self, targets: torch.Tensor) -> torch.Tensor:
        """Divisor of the summed losses: the number of counted tokens of all ranks, or one."""
        if not self.mean:
            return torch.ones((), device=targets.device, dtype=torch.int64)
        return self.vocabulary.counted((targets != self.ignore_index).sum()).clamp(min=1)


def _torch_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, options: _Options) -> torch.Tensor:
    chunking = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=options.chunk, chunking_method=None)
    x, matrix = hidden.to(options.compute), weight.to(options.compute)
    with torch.autocast(hidden.device.type, enabled=False):
        losses = F.linear_cross_entropy(
            x, matrix, targets, reduction="none", ignore_index=options.ignore_index, options=chunking
        )
    return losses.sum(dtype=options.wide) / options.divisor(targets)


def _loss_keeping_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, options: _Options
) -> torch.Tensor:
    loss = _LinearCrossEntropy.apply(hidden, weight, bias, targets, options, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return cast("torch.Tensor", loss)


class _LinearCrossEntropy(torch.autograd.Function):
    """The chunked loss; `with_grad` is grad mode at the call, which is always off inside a Function."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        options: _Options,
        with_grad: bool,
    ) -> torch.Tensor:
        wanted = [with_grad and needed for needed in ctx.needs_input_grad[:3]]
        with torch.autocast(hidden.device.type, enabled=False):
            loss, factor, gradients = _chunked(hidden, weight, bias, targets, options, wanted)
        # Not as attributes of ctx: saved tensors are freed after backward, even while the caller still holds the loss.
        ctx.save_for_backward(factor, *gradients)
        ctx.dtypes = [None if leaf is None else leaf.dtype for leaf in (hidden, weight, bias)]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        factor, *gradients = ctx.saved_tensors
        factors = (grad * factor, grad, grad)
        return *map(_scaled, gradients, factors, ctx.dtypes), None, None, None


def _scaled(tensor: torch.Tensor | None, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """`tensor` times a scalar that is not rounded to its dtype, as a factor without dimensions would be, in `dtype`."""
    return None if tensor is None else torch.mul(tensor, factor[None], out=torch.empty_like(tensor, dtype=dtype))


def _chunked(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    options: _Options,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor | None]]:
    """(loss, factor of the gradient of hidden, gradients of hidden, weight and bias; None where not `wanted`)."""
    matrix, divisor = weight.to(options.compute), options.divisor(targets)
    factor = divisor.to(options.wide).reciprocal_()
    total = torch.zeros((), device=hidden.device, dtype=torch.float64)
    gradients = _Gradients.of(hidden, weight, bias, options, wanted)
    for first in range(0, hidden.shape[0], options.chunk):
        tokens = slice(first, first + options.chunk)
        x = options.vocabulary.all_tokens(hidden[tokens].to(options.compute))
        target = options.vocabulary.all_tokens(targets[tokens])[:, None]
        logits, tanh = options.shape.over(_raw(x, matrix, bias, options))
        counted = target != options.ignore_index
        index = target.where(counted, 0)
        log_softmax, chosen = options.vocabulary.log_softmax_over(logits, index)
        del logits  # before the gradient is made
        total -= chosen.where(counted, 0).sum(dtype=torch.float64)
        grad = _by_logits(log_softmax, index, chosen, tanh, options) if any(wanted) else None
        del log_softmax, tanh
        if grad is not None:
            gradients.add(tokens, x, matrix, counted, grad)
        del grad  # before the next chunk's logits are made
    return (total / divisor).to(options.wide), factor, gradients.as_inputs(weight, bias, factor)


def _raw(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, options: _Options) -> torch.Tensor:
    """Output of the linear layer; the bias is added in the wide dtype."""
    product = (x @ matrix.T).to(options.wide)
    return product if bias is None else product.add_(bias)


def _by_logits(
    log_softmax: torch.Tensor,
    index: torch.Tensor,
    chosen: torch.Tensor,
    tanh: torch.Tensor | None,
    options: _Options,
) -> torch.Tensor:
    """Gradient of the summed losses by the raw logits, softmax - one-hot, of uncounted tokens too; may overwrite all.

    Times `scale`, of the dtype of products, but of a logit transform, whose gradient is computed in the wide one.
    """
    plain, scale = options.shape == PLAIN, options.scale
    if scale != 1:
        log_softmax.add_(math.log(scale))
    over = torch.empty_like(log_softmax, dtype=options.compute) if plain else log_softmax
    grad = torch.exp(log_softmax, out=log_softmax if over.dtype == log_softmax.dtype else over)
    at_target = chosen.expm1().mul_(scale)  # exact where the target is likely
    options.vocabulary.set_targets(grad, index, at_target.to(grad.dtype))
    return grad if plain else options.shape.gradient_over(grad, tanh)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Gradients:
    """Accumulators of the wanted gradients. Sums over tokens are accumulated in the wide dtype, times `scale`."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    options: _Options

    @classmethod
    def of(
        cls,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: _Options,
        wanted: Sequence[bool],
    ) -> _Gradients:
        for_hidden, for_weight, for_bias = wanted
        return cls(
            hidden=torch.empty_like(hidden) if for_hidden else None,
            weight=torch.zeros_like(weight, dtype=options.wide) if for_weight else None,
            bias=torch.zeros_like(bias, dtype=options.wide) if bias is not None and for_bias else None,
            options=options,
        )

    def add(
        self, tokens: slice, x: torch.Tensor, matrix: torch.Tensor, counted: torch.Tensor, grad: torch.Tensor
    ) -> None:
        """Adds a chunk, whose `grad` by the raw logits is right where `counted`, (tokens, 1), is true."""
        options = self.options
        if self.bias is not None:
            self.bias += _product(counted.to(grad.dtype).T, grad)[0]
        grad = grad.to(options.compute)
        if self.hidden is not None:
            product = _product(grad, matrix).mul_(counted / options.scale)
            self.hidden[tokens] = options.vocabulary.sum_over_ranks(product)
        if self.weight is not None:
            self.weight += _product(grad.T, x * counted)

    def as_inputs(
        self, weight: torch.Tensor, bias: torch.Tensor | None, factor: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of hidden, which wants `factor` yet, weight and bias, in the dtypes that hold them unscaled."""
        of_sums = factor / self.options.scale

        def held(gradient: torch.Tensor | None, leaf: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None or leaf is None:
                return None
            return gradient.mul_(of_sums).to(gradient.dtype if leaf.dtype is torch.float16 else leaf.dtype)

        return self.hidden, held(self.weight, weight), held(self.bias, bias)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Matrix product; of float16 in float32, whose range the sums over tokens want."""
    if a.dtype is not torch.float16:
        return a @ b
    on_nvidia = a.is_cuda and torch.version.hip is None  # others have no such product
    return torch.mm(a, b, out_dtype=torch.float32) if on_nvidia else a.float() @ b.float()
