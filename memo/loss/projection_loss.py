"""`memo.linear_cross_entropy`: the loss behind an output projection, of one rank or of a model that is divided over many.

Owns the question where the projection's rows are, and nothing of the arithmetic (memo.loss.chunked_cross_entropy): all
of them are here, or a part, in which case the ranks tell each other three numbers a token and no rank makes another's
logits.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memo.errors import UsageError
from memo.loss.chunked_cross_entropy import IGNORE, Reduction, chunked_linear_cross_entropy
from memo.loss.logit_transform_shape import LogitTransformShape
from memo.loss.output_rows import Vocabulary, VocabularyShard, WholeVocabulary
from memo.parallel import DividedRows, own_rows

__all__ = ["linear_cross_entropy"]


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
    """`cross_entropy(projection(hidden), targets)`, a chunk of tokens at a time: the logits of all never exist.

        hidden = model.base_model(ids).last_hidden_state
        loss = memo.linear_cross_entropy(hidden, model.get_output_embeddings(), targets)

    A scalar in float32 or wider, once differentiable. After `memo.parallelize` the same two lines are the same loss on every
    rank. A model that scales or caps its logits has the loss of `soft_cap * tanh(scale * logits / soft_cap)`. To
    have a model's own loss without looking up what it does, see `memo.loss_without_logits`.

    Args:
        hidden: (..., h), after the model's last norm.
        projection: an nn.Linear or the nn.Embedding tied to it, whose `weight` is (vocabulary, h), or that matrix. A
            bias of its own counts.
        targets: (...) of int64: the token that comes *next*, or `ignore_index` where none counts.
        bias: (vocabulary), of a projection that has none of its own.
        scale: logits are multiplied by it (Cohere's `logit_scale`, one divided by Granite's `logits_scaling`).
        soft_cap: and then bent to lie between its negative and it (Gemma-2's `final_logit_softcapping`).
        reduction: "mean" over the tokens that count, or "sum".
        chunk: tokens whose logits exist at a time; by the size of the vocabulary if not given.
        keep_gradients: they are made in forward, with the logits. False keeps nothing, and makes the logits twice.

    Raises:
        UsageError: something else than `memo.parallelize` divided the projection's rows, or an argument means nothing.
    """
    rows, vocabulary = _rows(projection)
    own = getattr(projection, "bias", None)
    if bias is not None and own is not None:
        raise UsageError(f"bias: the {type(projection).__name__} has one of its own")
    if bias is not None and len(bias) != len(rows):
        raise UsageError(f"bias: {len(bias)} numbers for the {len(rows)} rows that are here")
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
    """The rows that are here, and which of all rows they are."""
    weight = projection if isinstance(projection, Tensor) else projection.weight
    assert isinstance(weight, Tensor)
    if not isinstance(weight, DTensor) or all(placed.is_replicate() for placed in weight.placements):
        return own_rows(weight), WholeVocabulary()
    if not isinstance(projection, DividedRows):
        raise UsageError(
            f"rows divided as {list(weight.placements)} over {weight.device_mesh.size()} ranks are not known to belong to "
            f"the same tokens; give the module that memo.parallelize divided, or gather the matrix"
        )
    group, sequence = projection.ranks
    return own_rows(weight), VocabularyShard.of(weight.shape[0], group, divides_tokens=sequence)
