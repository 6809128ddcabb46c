"""Bytes of the dense and of the sparse exchange of an embedding's gradient, by vocabulary, width, tokens and ranks.

Owns the counts and the rule by which one exchange is chosen without knowing a network's rates; times are of
`profile_by_arithmetic`. Needs no torch. N ranks share a table of V rows and h columns, and see d distinct tokens each:

    dense     (N - 1) / N x V x h elements are reduced, as many gathered each time that the sharded table is needed whole
    sparse    (N - 1) x (8 + d (4 + h elements)): a count, a number of 4 bytes and a row for each distinct token

Without the numbers of the rows, sparse is less below d = 2 V / N for a table gathered once a step: the density of 2 / N
at which all-gathers of sparse gradients and all-reduces of dense ones meet (Li et al. 2021, "EmbRace", section 3).
"""

from __future__ import annotations

import dataclasses

from memo.gpt.arithmetic.collectives import Collective, CollectiveKind, Ranks

COUNT_BYTES = 8
"""Bytes in which a rank says how many rows it sends."""
NUMBER_BYTES = 4
"""Bytes of a row's number."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTraffic:
    """What one rank receives in a step."""

    rows: int
    """Rows of the table, of tensor parallelism the rank's part."""
    width: int
    """Columns of the table."""
    tokens: int
    """Tokens that a rank looks up in its rows in a step, over all microbatches."""
    ranks: int
    """Ranks that have the same rows and other tokens."""
    element: int
    """Bytes of an element of the gradient as it is exchanged."""
    gathered_element: int = 0
    """Bytes of an element of the table as it is gathered; 0 where every rank has it."""
    gathers: int = 1
    """Times in a step that a sharded table is gathered."""

    @property
    def distinct(self) -> int:
        """Distinct tokens of a rank in a step, at most."""
        return min(self.tokens, self.rows)

    @property
    def table(self) -> int:
        """Elements of the table."""
        return self.rows * self.width

    @property
    def dense_bytes(self) -> int:
        """Bytes that a rank receives as the table is reduced, and gathered where it is sharded.

        Where every rank has the table, the reduced parts are gathered instead.
        """
        there = self.gathered_element * self.gathers or self.element
        return (self.ranks - 1) * self.table * (self.element + there) // self.ranks

    def sparse_bytes_of(self, distinct: int) -> int:
        """Bytes that a rank receives where the rank with most distinct tokens has so many."""
        return (self.ranks - 1) * (COUNT_BYTES + distinct * (NUMBER_BYTES + self.width * self.element))

    @property
    def sparse_bytes(self) -> int:
        """Bytes that a rank receives as rows, at most."""
        return self.sparse_bytes_of(self.distinct)

    @property
    def row_collectives(self) -> tuple[Collective, ...]:
        """Collectives of the sparse exchange where a rank's tokens are all distinct: counts, rows' numbers, rows."""
        parts = (COUNT_BYTES, self.distinct * NUMBER_BYTES, self.distinct * self.width * self.element)
        return tuple(
            Collective(kind=CollectiveKind.ALL_GATHER, ranks=Ranks.REPLICAS, nbytes=self.ranks * part)
            for part in parts
            if part and self.ranks > 1
        )

    @property
    def sparse_is_less(self) -> bool:
        """Whether the sparse exchange is of fewer bytes, whatever the tokens are."""
        return self.sparse_bytes < self.dense_bytes


def reason_not_sparse(*, tied: bool, ranks: int, zero: int = 3, lora: int = 0) -> str | None:
    """Why an embedding's gradient cannot be exchanged as rows; None where it can.

    Args:
        tied: the table is the output projection, too.
        ranks: ranks of data and context parallelism, which exchange it.
        zero: what those share, as `Training.zero`.
        lora: rank of adapters that alone are trained; 0: everything is.
    """
    if ranks == 1:
        return "no other rank has the embedding's rows; it takes data or context parallelism"
    if lora:
        return "adapters alone are trained, and the embedding has no gradient"
    if tied:
        return "the embedding is the output projection, too, whose gradient has every row"
    if zero in (1, 2):
        return f"under ZeRO {zero} the rows' optimizer state is on one rank each; it takes 0 or 3"
    return None
