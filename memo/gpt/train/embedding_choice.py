"""Choice of the exchange of the embedding's gradient: as a whole table by FSDP, or as rows by embedding_gradients.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.errors import UsageError
from memo.gpt.arithmetic.embedding_traffic import EmbeddingTraffic, reason_not_sparse
from memo.gpt.run_config import EmbeddingGradients
from memo.units import format_bytes

if TYPE_CHECKING:
    from memo.gpt.config import GPTConfig
    from memo.gpt.run_config import RunConfig


def require_possible(config: RunConfig, shape: GPTConfig) -> None:
    """Raises UsageError where the sparse exchange is asked for and not possible."""
    reason = _reason_not(config, shape)
    if reason is not None and config.embedding_exchange is EmbeddingGradients.SPARSE:
        raise UsageError(f"--embedding-exchange sparse: {reason}; use --embedding-exchange dense")


def choose_exchange(config: RunConfig, shape: GPTConfig, *, element: int) -> tuple[bool, str | None]:
    """Chooses how the embedding's gradient is exchanged.

    Args:
        config: the run, whose choice may be left to the bytes that a rank receives.
        shape: the model.
        element: bytes of a weight.

    Returns:
        True for the sparse exchange, and a line about the choice, None where nobody asked.
    """
    layout, asked = config.layout, config.embedding_exchange
    if asked is EmbeddingGradients.DENSE:
        return False, None
    reason = _reason_not(config, shape)
    if reason is not None:
        return False, f"embedding gradients: dense exchange, since {reason}"
    accumulate = config.training.accumulate
    traffic = EmbeddingTraffic(
        rows=-(-shape.vocab_size // layout.tp),
        width=shape.hidden,
        tokens=config.batch // layout.dp * config.seq * accumulate // layout.cp,
        ranks=layout.dp * layout.cp,
        element=element,
        gathered_element=element,
        gathers=1 if layout.pp > 1 else accumulate,
    )
    sparse = asked is EmbeddingGradients.SPARSE or traffic.sparse_is_less
    way, other = ("sparse", "dense") if sparse else ("dense", "sparse")
    received = {"dense": format_bytes(traffic.dense_bytes), "sparse": f"at most {format_bytes(traffic.sparse_bytes)}"}
    return sparse, f"embedding gradients: {way} exchange, {received[way]} a step and rank ({other} {received[other]})"


def _reason_not(config: RunConfig, shape: GPTConfig) -> str | None:
    return reason_not_sparse(tied=shape.tie_embeddings, ranks=config.layout.dp * config.layout.cp)
