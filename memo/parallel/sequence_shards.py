"""Sequence shards: the tokens of a sequence that a rank holds, and their order.

    one range     [8, 12)              of four ranks the third, of 16 tokens
    two ranges    [4, 6) then [10, 12) the same under ring attention: an early and a late part, so that causal attention is
                                       as much work on every rank

Arithmetic on positions; ranges never overlap.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SequenceShards:
    """Positions in a sequence, in the order of `ranges`."""

    ranges: tuple[range, ...]

    @classmethod
    def whole(cls, seq: int) -> SequenceShards:
        """All `seq` tokens."""
        return cls(ranges=(range(seq),))

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def shard(self, index: int, count: int) -> SequenceShards:
        """Part `index` of `count` equal parts, in order."""
        part = len(self) // count
        first, last = index * part, (index + 1) * part
        kept, before = [], 0
        for one in self.ranges:
            inside = one[max(0, first - before) : max(0, last - before)]
            if inside:
                kept.append(inside)
            before += len(one)
        return SequenceShards(ranges=tuple(kept))

    def early_and_late(self, index: int, count: int) -> SequenceShards:
        """Part `index` from the beginning and part `index` from the end, of 2 * `count` equal parts."""
        parts = (self.shard(index, 2 * count), self.shard(2 * count - 1 - index, 2 * count))
        return SequenceShards(ranges=parts[0].ranges + parts[1].ranges)

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """These tokens of `rows` (batch, tokens): a view for one range, else a copy."""
        parts = [rows[:, one.start : one.stop] for one in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def positions(self, device: torch.device) -> torch.Tensor:
        """The positions, (tokens) int64."""
        return torch.cat([torch.arange(one.start, one.stop, device=device) for one in self.ranges])
