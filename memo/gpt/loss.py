"""Cross-entropy of a linear projection, without ever holding the logits of the whole sequence.

Owns the last matrix product of the model and the softmax behind it. Tokens are taken a chunk at a time; one chunk's
logits exist at a time, and gradients are made on the way, while they do:

    forward    chunk: logits -> loss, d logits -> d hidden, d weight     (chunk's logits die here)
    backward   d hidden and d weight times the incoming gradient

The invariant: what is alive beyond inputs and gradients does not depend on the number of tokens, and every reduction
over tokens or vocabulary is in float32 at least, whatever the inputs are. Under tensor parallelism each rank holds a shard
of the vocabulary (see vocabulary.py) and never another's logits.

torch 2.13 has F.linear_cross_entropy. It is the path of `keep_gradients=False`, without reduction, since its own mean adds
up bfloat16 losses in bfloat16. It is not the default: it makes the logits a second time in backward, and adds up the chunks
of a bfloat16 weight gradient in bfloat16. Against float64, 32,768 bfloat16 tokens in 512 chunks (benchmarks/loss.py): its
mean is off by 65 % and its weight gradient by 4.5 %, this one's by 0.001 % and 0.28 %; in float32 they are equally exact.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from memo.gpt.vocabulary import Vocabulary, WholeVocabulary

__all__ = ["IGNORE", "chunk_tokens", "linear_cross_entropy"]

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


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    chunk: int | None = None,
    vocabulary: Vocabulary = _WHOLE,
    keep_gradients: bool = True,
) -> torch.Tensor:
    """Mean over the counted tokens of -log softmax(hidden @ weight.T)[target], a scalar in float32 or wider.

    `hidden` is (..., h), `weight` (vocabulary, h), `targets` (...) of int64 with IGNORE where a token does not count.
    When no token counts the loss and its gradients are zero. Matrix products run in the autocast dtype where
    autocast is on, else in the inputs' dtype; the gradient is once differentiable.

    With a `VocabularyShard`, `weight` is this rank's rows, `hidden` and `targets` are the same on all ranks or, where it
    divides tokens, this rank's; the loss is the mean over all of them, on every rank, and the gradient of `hidden` is that
    of the whole. With `keep_gradients=False` nothing is kept between forward and backward but the inputs, for one more
    matrix product.
    """
    compute = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        compute = torch.get_autocast_dtype(hidden.device.type)
    rows = max(1, (chunk or chunk_tokens(vocabulary.widest(weight.shape[0]))) // vocabulary.token_shards)
    flat, flat_targets = hidden.flatten(0, -2), targets.flatten()
    if not keep_gradients and torch.is_grad_enabled():
        return _kept_nothing(flat, weight, flat_targets, rows, compute, vocabulary)
    return _kept_gradients(flat, weight, flat_targets, rows, compute, vocabulary)


def _kept_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    rows: int,
    compute: torch.dtype,
    vocabulary: Vocabulary,
) -> torch.Tensor:
    with_grad = torch.is_grad_enabled()
    loss = _LinearCrossEntropy.apply(hidden, weight, targets, rows, compute, vocabulary, with_grad)  # type: ignore[no-untyped-call]
    return cast("torch.Tensor", loss)


def _kept_nothing(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    rows: int,
    compute: torch.dtype,
    vocabulary: Vocabulary,
) -> torch.Tensor:
    """torch's own implementation where it has one and all rows are here, else ours run again in backward."""
    if not hasattr(F, "linear_cross_entropy") or not isinstance(vocabulary, WholeVocabulary):
        arguments = (hidden, weight, targets, rows, compute, vocabulary)
        return cast(
            "torch.Tensor", checkpoint(_kept_gradients, *arguments, use_reentrant=False, preserve_rng_state=False)
        )
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows, chunking_method=None)
    with torch.autocast(hidden.device.type, enabled=False):
        losses = F.linear_cross_entropy(
            hidden.to(compute), weight.to(compute), targets, reduction="none", ignore_index=IGNORE, options=options
        )
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return losses.sum(dtype=wide) / (targets != IGNORE).sum().clamp(min=1)


class _LinearCrossEntropy(torch.autograd.Function):
    """See the module; `with_grad` is grad mode at the call, which is always off inside a Function."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        rows: int,
        compute: torch.dtype,
        vocabulary: Vocabulary,
        with_grad: bool,
    ) -> torch.Tensor:
        for_hidden = with_grad and ctx.needs_input_grad[0]
        for_weight = with_grad and ctx.needs_input_grad[1]
        with torch.autocast(hidden.device.type, enabled=False):
            loss, grad_hidden, grad_weight = _chunked(
                hidden, weight, targets, rows, compute, vocabulary, for_hidden, for_weight
            )
        # Through save_for_backward, not as attributes: they are freed when backward has used them, even while the
        # caller still holds the loss.
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return _times(grad_hidden, grad), _times(grad_weight, grad), None, None, None, None, None


def _times(tensor: torch.Tensor | None, grad: torch.Tensor) -> torch.Tensor | None:
    return None if tensor is None else tensor * grad.to(tensor.dtype)


def _chunked(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    rows: int,
    compute: torch.dtype,
    vocabulary: Vocabulary,
    for_hidden: bool,
    for_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The loss, and the gradients that are asked for, at an incoming gradient of one."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    matrix = weight.to(compute)
    count = vocabulary.counted((targets != IGNORE).sum()).clamp(min=1)
    total = torch.zeros((), device=hidden.device, dtype=torch.float64)
    grad_hidden = torch.empty_like(hidden) if for_hidden else None
    grad_weight = torch.zeros_like(weight, dtype=wide) if for_weight else None
    for first in range(0, hidden.shape[0], rows):
        own = slice(first, first + rows)
        x, target = vocabulary.all_tokens(hidden[own].to(compute)), vocabulary.all_tokens(targets[own])
        if grad_hidden is None and grad_weight is None:
            total += _losses((x @ matrix.T).to(wide), target, vocabulary)[0]
            continue
        chunk_total, slope = _losses_and_slope((x @ matrix.T).to(wide), target, count, vocabulary, compute)
        total += chunk_total
        if grad_hidden is not None:
            grad_hidden[own] = vocabulary.sum_over_ranks(slope @ matrix)
        if grad_weight is not None:
            grad_weight += slope.T @ x
        del slope  # before the next chunk's logits are made
    mean = (total / count).to(wide)
    return mean, grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def _losses(
    logits: torch.Tensor, target: torch.Tensor, vocabulary: Vocabulary
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of a chunk's losses; and for the slope: the normaliser, which tokens count, and the index of their targets."""
    counted = (target != IGNORE)[:, None]
    index = target[:, None].where(counted, 0)
    normaliser, chosen = vocabulary.reduce(logits, index)
    losses = (normaliser - chosen).where(counted, 0)
    return losses.sum(dtype=torch.float64), normaliser, counted, index


def _losses_and_slope(
    logits: torch.Tensor, target: torch.Tensor, count: torch.Tensor, vocabulary: Vocabulary, compute: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of a chunk's losses, and d loss / d logits: softmax minus one-hot, written over the logits."""
    total, normaliser, counted, index = _losses(logits, target, vocabulary)
    slope = logits.sub_(normaliser).exp_()
    vocabulary.subtract_targets(slope, index)
    return total, slope.mul_(counted.to(slope.dtype) / count).to(compute)
