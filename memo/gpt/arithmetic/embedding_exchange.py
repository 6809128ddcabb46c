"""Times and bytes of an embedding whose gradient data-parallel ranks exchange as rows, beside those of the dense exchange.

Owns what both take on a machine; the counts are embedding_traffic.py's, the times of collectives `Collectives`'. Needs no
torch. Every rank has the whole table then, of tensor parallelism its part: it gathers nothing, and updates every row.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memo.gpt.arithmetic.collectives import exchange_s
from memo.gpt.arithmetic.embedding_traffic import EmbeddingTraffic, reason_not_sparse
from memo.mip.inputs import EmbeddingExchange, StaticBytes

if TYPE_CHECKING:
    from memo.gpt.arithmetic.rank_weights import RankWeights
    from memo.gpt.config import GPTConfig


@dataclasses.dataclass(frozen=True, slots=True)
class RowExchange:
    """The sparse exchange of one rank's rows, once a step."""

    exchange: RankWeights
    traffic: EmbeddingTraffic
    held: StaticBytes
    """What a rank holds of the table under the dense exchange."""

    @classmethod
    def of(cls, config: GPTConfig, exchange: RankWeights, *, accumulate: int, held: StaticBytes) -> RowExchange | str:
        """The exchange, or why it is not possible.

        Args:
            config: the model.
            exchange: layout, machine and what data-parallel ranks share.
            accumulate: microbatches in a step.
            held: bytes that a rank holds of the table under the dense exchange.
        """
        layout, training = exchange.layout, exchange.training
        ranks = layout.replicas * layout.cp
        reason = reason_not_sparse(tied=config.tie_embeddings, ranks=ranks, zero=training.zero, lora=training.lora)
        if reason is not None:
            return reason
        traffic = EmbeddingTraffic(
            rows=-(-config.vocab_size // layout.tp),
            width=config.hidden,
            tokens=round(layout.rank_tokens * layout.tp) * accumulate,
            ranks=ranks,
            element=training.states.reduced,
            gathered_element=training.gathered_bytes if training.zero else 0,
            gathers=accumulate if exchange.gathers_each_pass else 1,
        )
        return cls(exchange, traffic, held)

    @property
    def received_bytes(self) -> int:
        """Bytes of the rows of all ranks, which are on the device at the exchange."""
        return self.traffic.ranks * self._row_bytes

    @property
    def rows_s(self) -> float:
        """Seconds of the exchange: three all-gathers, the search for rows that are not zero, and the sum of what came."""
        machine, traffic = self.exchange.machine, self.traffic
        gathers_s = exchange_s(traffic.row_collectives, machine, self.exchange.layout)
        passes = traffic.table * traffic.element + 3 * self.received_bytes  # a sum reads both and writes one
        return gathers_s + passes / machine.hbm_bytes_per_s

    @property
    def whole_update_s(self) -> float:
        """Seconds by which the update of all rows takes longer than that of a shard."""
        training, machine = self.exchange.training, self.exchange.machine
        states = training.end_states or training.states
        if training.optimizer_offload or training.zero == 0:
            return 0.0
        return states.passes * self.traffic.table * (1 - 1 / self.exchange.shards) / machine.hbm_bytes_per_s

    @property
    def dense_s(self) -> float:
        """Seconds in which the dense exchange reduces the table's gradient, and gathers the table."""
        exchange, table = self.exchange, self.traffic.table
        gathers_s = self.traffic.gathers * exchange.gather_s(table)
        return exchange.sync_s(table) + gathers_s + exchange.update_s(table)

    @property
    def static(self) -> StaticBytes:
        """Bytes that a rank holds of the table, its gradient and its optimizer state."""
        return self.exchange.training.static_bytes(self.traffic.table, 1, of_end=True)

    def figures(self, *, sparse: bool) -> EmbeddingExchange:
        """Both exchanges, for a profile of the sparse or of the dense one."""
        return EmbeddingExchange(
            sparse=sparse,
            dense_s=self.dense_s,
            sparse_s=self.rows_s + self.whole_update_s,
            dense_bytes=self.traffic.dense_bytes,
            sparse_bytes=self.traffic.sparse_bytes,
            resident_bytes=max(self.static.nbytes - self.held.nbytes, 0),
        )

    @property
    def _row_bytes(self) -> int:
        return self.traffic.distinct * self.traffic.width * self.traffic.element
