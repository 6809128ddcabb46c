"""Cross-entropy of a linear projection, without ever holding the logits of the whole sequence.

Owns the last matrix product of the model, its bias, and the softmax behind it; what happens to the logits in between is
logit_transform_shape.py. Tokens are taken a chunk at a time; one chunk's logits exist at a time, and gradients are
made on the way, while they do:

    forward    chunk: logits -> loss, d logits -> d hidden, d weight, d bias     (chunk's logits die here)
    backward   these gradients times the incoming one

The invariant: what is alive beyond inputs and gradients does not depend on the number of tokens, and every reduction
over tokens or vocabulary is in float32 at least, whatever the inputs are. Under tensor parallelism each rank holds a shard
of the vocabulary (see output_rows.py) and never another's logits.

torch 2.13 has F.linear_cross_entropy. It is the path of `keep_gradients=False` where a matrix is all there is, without
reduction, since its own mean adds up bfloat16 losses in bfloat16. It is not the default: it makes the logits a second time
in backward, and adds up the chunks of a bfloat16 weight gradient in bfloat16. Against float64, 32,768 bfloat16 tokens in
512 chunks (benchmarks/loss.py): its mean is off by 65 % and its weight gradient by 4.5 %, this one's by 0.001 % and 0.28 %;
in float32 they are equally exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from memo.errors import UsageError
from memo.loss.logit_transform_shape import PLAIN, LogitTransformShape
from memo.loss.output_rows import Vocabulary, WholeVocabulary

__all__ = ["IGNORE", "Reduction", "chunk_tokens", "chunked_linear_cross_entropy"]

Reduction = Literal["mean", "sum"]

# Targets that do not count, as in torch.nn.functional.cross_entropy.
IGNORE = -100

# Logits alive at one time: 2^25 elements are 128 MiB in float32.
CHUNK_LOGITS = 1 << 25
MAX_CHUNK_TOKENS = 8192

_WHOLE = WholeVocabulary()


def chunk_tokens(vocab_size: int) -> int:
    """Tokens per chunk: a power of two, so that matrix tiles stay full, within the budget of logits."""
    fitting = max(1, CHUNK_LOGITS // vocab_size)
    return min(MAX_CHUNK_TOKENS, 1 << (fitting.bit_length() - 1))


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
    """Mean or sum over the counted tokens of -log softmax(shape(hidden @ weight.T + bias))[target].

    A scalar in float32 or wider. `hidden` is (..., h), `weight` (vocabulary, h), `bias` (vocabulary), `targets` (...) of
    int64 with `ignore_index` where a token does not count. When no token counts the loss and its gradients are zero. Matrix
    products run in the autocast dtype where autocast is on, else in the inputs' dtype, and all behind them in float32 or
    wider; the gradient is once differentiable.

    With a `VocabularyShard`, `weight` and `bias` are this rank's rows, `hidden` and `targets` are the same on all ranks or,
    where it divides tokens, this rank's; the loss is that of all of them, on every rank, and the gradient of `hidden` is
    that of the whole. With `keep_gradients=False` nothing is kept between forward and backward but the inputs, for one more
    matrix product.
    """
    if reduction not in ("mean", "sum"):
        raise UsageError(f"reduction: {reduction!r} is neither 'mean' nor 'sum'")
    compute = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        compute = torch.get_autocast_dtype(hidden.device.type)
    how = _How(
        rows=max(1, (chunk or chunk_tokens(vocabulary.widest(weight.shape[0]))) // vocabulary.token_shards),
        compute=compute,
        wide=torch.promote_types(hidden.dtype, torch.float32),
        vocabulary=vocabulary,
        shape=shape,
        mean=reduction == "mean",
        ignore_index=ignore_index,
    )
    flat, flat_targets = hidden.flatten(0, -2), targets.flatten()
    if keep_gradients or not torch.is_grad_enabled():
        return _kept_gradients(flat, weight, bias, flat_targets, how)
    if how.is_torchs and bias is None:
        return _torchs(flat, weight, flat_targets, how)
    arguments = (flat, weight, bias, flat_targets, how)
    again = checkpoint(_kept_gradients, *arguments, use_reentrant=False, preserve_rng_state=False)
    return cast("torch.Tensor", again)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    """All but the tensors."""

    rows: int
    """Tokens of a chunk."""
    compute: torch.dtype
    """Of matrix products."""
    wide: torch.dtype
    """Of everything behind them."""
    vocabulary: Vocabulary
    shape: LogitTransformShape
    mean: bool
    ignore_index: int

    @property
    def is_torchs(self) -> bool:
        """torch has a function for it: all rows are here, and logits are taken as they are."""
        here = isinstance(self.vocabulary, WholeVocabulary)
        return hasattr(F, "linear_cross_entropy") and here and self.shape == PLAIN

    def divisor(self, targets: torch.Tensor) -> torch.Tensor:
        """What the sum of all losses is divided by."""
        if not self.mean:
            return torch.ones((), device=targets.device, dtype=torch.int64)
        return self.vocabulary.counted((targets != self.ignore_index).sum()).clamp(min=1)


def _torchs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, how: _How) -> torch.Tensor:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=how.rows, chunking_method=None)
    x, matrix = hidden.to(how.compute), weight.to(how.compute)
    with torch.autocast(hidden.device.type, enabled=False):
        losses = F.linear_cross_entropy(
            x, matrix, targets, reduction="none", ignore_index=how.ignore_index, options=options
        )
    return losses.sum(dtype=how.wide) / how.divisor(targets)


def _kept_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, how: _How
) -> torch.Tensor:
    loss = _LinearCrossEntropy.apply(hidden, weight, bias, targets, how, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return cast("torch.Tensor", loss)


class _LinearCrossEntropy(torch.autograd.Function):
    """See the module; `with_grad` is grad mode at the call, which is always off inside a Function."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        how: _How,
        with_grad: bool,
    ) -> torch.Tensor:
        wanted = [with_grad and needed for needed in ctx.needs_input_grad[:3]]
        with torch.autocast(hidden.device.type, enabled=False):
            loss, gradients = _chunked(hidden, weight, bias, targets, how, wanted)
        # Through save_for_backward, not as attributes: they are freed when backward has used them, even while the
        # caller still holds the loss.
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *(_times(tensor, grad) for tensor in ctx.saved_tensors), None, None, None


def _times(tensor: torch.Tensor | None, grad: torch.Tensor) -> torch.Tensor | None:
    return None if tensor is None else tensor * grad.to(tensor.dtype)


def _chunked(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    how: _How,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor, Sequence[torch.Tensor | None]]:
    """The loss, and the gradients of hidden, weight and bias that are wanted, at an incoming gradient of one."""
    matrix, divisor = weight.to(how.compute), how.divisor(targets)
    total = torch.zeros((), device=hidden.device, dtype=torch.float64)
    gradients = _Gradients.of(hidden, weight, bias, how, wanted)
    for first in range(0, hidden.shape[0], how.rows):
        own = slice(first, first + how.rows)
        x, target = how.vocabulary.all_tokens(hidden[own].to(how.compute)), how.vocabulary.all_tokens(targets[own])
        if not any(wanted):
            total += _losses(how.shape.over(_raw(x, matrix, bias, how))[0], target, how)[0]
            continue
        chunk_total, slope = _losses_and_slope(_raw(x, matrix, bias, how), target, divisor, how)
        total += chunk_total
        gradients.add_bias(slope)
        slope = slope.to(how.compute)
        gradients.add_product(own, x, matrix, slope)
        del slope  # before the next chunk's logits are made
    return (total / divisor).to(how.wide), gradients.as_inputs(weight, bias)


def _raw(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, how: _How) -> torch.Tensor:
    """The linear layer's output; the bias is added to what is already wide."""
    product = (x @ matrix.T).to(how.wide)
    return product if bias is None else product.add_(bias)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Gradients:
    """Those that are wanted. A sum over all tokens is added up wide."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    vocabulary: Vocabulary

    @classmethod
    def of(
        cls,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        how: _How,
        wanted: Sequence[bool],
    ) -> _Gradients:
        for_hidden, for_weight, for_bias = wanted
        return cls(
            hidden=torch.empty_like(hidden) if for_hidden else None,
            weight=torch.zeros_like(weight, dtype=how.wide) if for_weight else None,
            bias=torch.zeros_like(bias, dtype=how.wide) if bias is not None and for_bias else None,
            vocabulary=how.vocabulary,
        )

    def add_bias(self, slope: torch.Tensor) -> None:
        if self.bias is not None:
            self.bias += slope.sum(dim=0)

    def add_product(self, own: slice, x: torch.Tensor, matrix: torch.Tensor, slope: torch.Tensor) -> None:
        if self.hidden is not None:
            self.hidden[own] = self.vocabulary.sum_over_ranks(slope @ matrix)
        if self.weight is not None:
            self.weight += slope.T @ x

    def as_inputs(self, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Each in the dtype of its input."""
        return (
            self.hidden,
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )


def _losses(
    logits: torch.Tensor, target: torch.Tensor, how: _How
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of a chunk's losses; and for the slope: the normaliser, which tokens count, and the index of their targets."""
    counted = (target != how.ignore_index)[:, None]
    index = target[:, None].where(counted, 0)
    normaliser, chosen = how.vocabulary.reduce(logits, index)
    losses = (normaliser - chosen).where(counted, 0)
    return losses.sum(dtype=torch.float64), normaliser, counted, index


def _losses_and_slope(
    raw: torch.Tensor, target: torch.Tensor, divisor: torch.Tensor, how: _How
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of a chunk's losses, and d loss / d raw: softmax minus one-hot, written over the logits."""
    logits, bent = how.shape.over(raw)
    total, normaliser, counted, index = _losses(logits, target, how)
    slope = logits.sub_(normaliser).exp_()
    how.vocabulary.subtract_targets(slope, index)
    return total, how.shape.slope_over(slope.mul_(counted.to(slope.dtype) / divisor), bent)
