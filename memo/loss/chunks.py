"""Chunks of the loss without logits: how many tokens one has, what it holds and what it moves. Needs no torch.

Every chunk is added to the weight's gradient, which reads and writes that whole, so chunks are larger where the
projection is trained. On an H100 (600 TFLOP/s, 3.35 TB/s) that takes 360 / (tokens of a chunk) of the products' time.
"""

from __future__ import annotations

CHUNK_LOGITS = 1 << 25
"""Most elements of a chunk's logits where the projection is frozen; in float32 128 MiB."""
TRAINED_CHUNK_LOGITS = 1 << 27
"""Most where its weight's gradient is wanted; in float32 512 MiB."""
MAX_CHUNK_TOKENS = 8192
LOGIT_NBYTES = 2 * 4
"""Bytes of a logit at a chunk's peak: itself and its log softmax, in float32."""


def chunk_tokens(vocab_size: int, *, trained: bool) -> int:
    """Tokens of a chunk: the largest power of two, for full matrix tiles, within its logits and MAX_CHUNK_TOKENS.

    Args:
        vocab_size: rows of the projection; of the largest shard where ranks share it.
        trained: the gradient of the projection's weight is wanted.
    """
    fitting = max(1, (TRAINED_CHUNK_LOGITS if trained else CHUNK_LOGITS) // vocab_size)
    return min(MAX_CHUNK_TOKENS, 1 << (fitting.bit_length() - 1))


def moved_nbytes(tokens: int, vocab_size: int, hidden: int, *, product_nbytes: int, trained: bool) -> int:
    """Bytes that the loss of `tokens` reads and writes in a GPU's memory; with bfloat16 products 34 a logit.

    Of a logit: its product, the cast, the log softmax, which reads twice, the exponential that becomes its gradient,
    and the products that read this.

    Args:
        tokens: whose logits are made.
        vocab_size: rows of the projection on the rank.
        hidden: its columns.
        product_nbytes: bytes of an element in matrix products.
        trained: the gradient of the projection's weight is wanted.
    """
    narrow = product_nbytes < 4
    exponential = 4 + product_nbytes
    logit = product_nbytes + (product_nbytes + 4) * narrow + 12 + exponential + product_nbytes * (1 + trained)
    chunks = -(-tokens // chunk_tokens(vocab_size, trained=trained))
    return logit * tokens * vocab_size + chunks * added_nbytes(vocab_size * hidden, product_nbytes) * trained


def added_nbytes(elements: int, product_nbytes: int) -> int:
    """Bytes that adding a chunk to the gradient of a weight of `elements` moves: its product, and the float32 sum."""
    return 2 * (product_nbytes + 4) * elements
