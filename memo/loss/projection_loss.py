"""`memo.linear_cross_entropy`: cross entropy of an output projection, whole or divided over ranks.

Finds the rows of the projection that are on this rank; the arithmetic is memo.loss.chunked_cross_entropy.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memo.errors import UsageError
from memo.loss.chunked_cross_entropy import IGNORE, Reduction, chunked_linear_cross_entropy
from memo.loss.logit_transform_shape import LogitTransformShape
from memo.loss.output_rows import Vocabulary, VocabularyShard, WholeVocabulary
from memo.parallel import DividedRows, own_rows


def linear_cross_entropy(
    hidden: Tensor,
    projection: nn.Module | Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = IGNORE,
    chunk: int | None = None,
    keep_gradients: bool = True,
) -> Tensor:
    """Cross entropy of an output projection, computed a chunk of tokens at a time: the full logits never exist.

        hidden = model.base_model(ids).last_hidden_state
        loss = memo.linear_cross_entropy(hidden, model.get_output_embeddings(), targets)

        logits = soft_cap * tanh(scale * (hidden @ weight.T + bias) / soft_cap)
        loss = reduction of -log softmax(logits)[target] over the tokens with target != ignore_index

    After `memo.parallelize` the same two lines give the same loss on every rank. Matrix products run in the autocast
    dtype where autocast is on, else in the dtype of `hidden`; everything after them in float32 or wider. For a model's own
    loss, with its shift, scale and cap, see `memo.loss_without_logits`.

    Args:
        hidden: (..., h), floating point: hidden states after the model's last norm.
        projection: an nn.Linear or the nn.Embedding tied to it, whose `weight` is (vocabulary, h), or that matrix. Its
            own bias, if any, is added.
        targets: (...), int64: the *next* token of each position, or `ignore_index` where it does not count.
        bias: (vocabulary), for a projection that has none of its own; this rank's rows where they are divided.
        scale: factor of the logits (Cohere's `logit_scale`, the inverse of Granite's `logits_scaling`).
        soft_cap: bound of the scaled logits' absolute value (Gemma-2's `final_logit_softcapping`); None: no bound.
        reduction: "mean" over the tokens that count, or "sum".
        ignore_index: target of tokens that do not count.
        chunk: tokens whose logits exist at a time. By default as many as have 2^25 logits (128 MiB in float32), at most
            8192.
        keep_gradients: computes the gradients in forward, while the logits exist, and keeps them until backward. False
            keeps the inputs only, and computes the logits a second time.

    Returns:
        A scalar in float32 or wider, once differentiable; zero, with zero gradients, when no token counts.

    Raises:
        UsageError: `targets` has not one number for each token of `hidden`; the projection's rows are divided by other
            means than `memo.parallelize`; `bias` is given twice or has another length than the rows; `scale`, `soft_cap`
            or `reduction` is out of range. Nothing was computed.
    """
    if targets.numel() != hidden.shape[:-1].numel():
        raise UsageError(f"targets: shape {tuple(targets.shape)}, hidden has {tuple(hidden.shape[:-1])} tokens")
    rows, vocabulary = _rows(projection)
    own = getattr(projection, "bias", None)
    if bias is not None and own is not None:
        raise UsageError(f"bias: the {type(projection).__name__} has a bias of its own; leave this one out")
    if bias is not None and len(bias) != len(rows):
        raise UsageError(f"bias: {len(bias)} numbers for {len(rows)} rows of the projection on this rank")
    return chunked_linear_cross_entropy(
        hidden,
        rows,
        targets,
        bias=bias if own is None else own_rows(own),
        shape=LogitTransformShape(scale=scale, soft_cap=soft_cap),
        reduction=reduction,
        ignore_index=ignore_index,
        chunk=chunk,
        vocabulary=vocabulary,
        keep_gradients=keep_gradients,
    )


def _rows(projection: nn.Module | Tensor) -> tuple[Tensor, Vocabulary]:
    """(this rank's rows of the weight, their position in the vocabulary)."""
    weight = projection if isinstance(projection, Tensor) else projection.weight
    assert isinstance(weight, Tensor)
    if not isinstance(weight, DTensor) or all(placed.is_replicate() for placed in weight.placements):
        return own_rows(weight), WholeVocabulary()
    if not isinstance(projection, DividedRows):
        raise UsageError(
            f"projection: its rows are divided as {list(weight.placements)} over {weight.device_mesh.size()} ranks, "
            f"which may hold different tokens; give the module that memo.parallelize divided, or gather the matrix"
        )
    group, sequence = projection.ranks
    return own_rows(weight), VocabularyShard.of(weight.shape[0], group, divides_tokens=sequence)
