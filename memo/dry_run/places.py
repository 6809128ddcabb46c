"""Places of ranks in a layout, by arithmetic: coordinates, and the groups that they belong to.

Independent of torch's meshes, with which a dry run compares it: rank = ((pp * dp_size + dp) * cp_size + cp) * tp_size + tp.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memo.gpt.arithmetic import Ranks

if TYPE_CHECKING:
    from memo.parallel import Layout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Coordinates of a rank."""

    layout: Layout
    pp: int
    dp: int
    cp: int
    tp: int

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Place:
        """Place of a rank."""
        rest, tp = divmod(rank, layout.tp)
        rest, cp = divmod(rest, layout.cp)
        pp, dp = divmod(rest, layout.dp)
        return cls(layout=layout, pp=pp, dp=dp, cp=cp, tp=tp)

    @property
    def replica(self) -> int:
        """Rank among those with the same parameters."""
        return self.dp * self.layout.cp + self.cp

    @property
    def rank(self) -> int:
        """Global number."""
        return ((self.pp * self.layout.dp + self.dp) * self.layout.cp + self.cp) * self.layout.tp + self.tp

    def at(self, **coordinates: int) -> int:
        """Global number of the rank that differs in these coordinates."""
        at = {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp} | coordinates
        return Place(layout=self.layout, **at).rank

    def group(self, ranks: Ranks) -> tuple[int, ...]:
        """Global numbers of the ranks of one of this rank's groups, in the order of the group."""
        layout = self.layout
        if ranks is Ranks.TENSOR:
            return tuple(self.at(tp=tp) for tp in range(layout.tp))
        if ranks is Ranks.CONTEXT:
            return tuple(self.at(cp=cp) for cp in range(layout.cp))
        if ranks is Ranks.STAGES:
            return tuple(self.at(pp=pp) for pp in range(layout.pp))
        if ranks is Ranks.ENDS:
            last = next(pp for pp in range(layout.pp) if layout.stages - 1 in layout.stages_of(pp))
            return tuple(self.at(pp=pp) for pp in (0, last))
        if ranks is Ranks.ALL:
            return tuple(range(layout.ranks))
        if ranks is Ranks.TOKENS:
            size = layout.dp * layout.cp * layout.tp
            return tuple(range(self.pp * size, (self.pp + 1) * size))
        outer, inner = divmod(self.dp, layout.ep)
        if ranks is Ranks.EXPERTS:
            return tuple(self.at(dp=outer * layout.ep + other) for other in range(layout.ep))
        if ranks is Ranks.EXPERT_COPIES:
            same = range(inner, layout.dp, layout.ep)
            return tuple(
                self.at(dp=dp, cp=cp, tp=tp) for dp in same for cp in range(layout.cp) for tp in range(layout.tp)
            )
        return tuple(self.at(dp=dp, cp=cp) for dp in range(layout.dp) for cp in range(layout.cp))
