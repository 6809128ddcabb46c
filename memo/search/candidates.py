"""Candidates of a search: shapes, settings, and ways to run a step that have one of each. Pure data without times."""

from __future__ import annotations

import dataclasses

from memo.mip.cluster import StagePlace
from memo.mip.inputs import PipelineSchedule


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Ranks of each kind of parallelism."""

    pp: int
    dp: int
    cp: int
    tp: int
    ring: bool = False
    """Whether context-parallel ranks attend in a ring, instead of exchanging heads for tokens."""
    ep: int = 1
    """Ranks of data parallelism that divide the experts."""

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def columns(self) -> tuple[str, str, str, str]:
        """Its numbers of pp, dp, cp and tp as an answer shows them."""
        return (
            str(self.pp),
            f"{self.dp}{f' ep {self.ep}' * (self.ep > 1)}",
            f"{self.cp}{' ring' * self.ring}",
            str(self.tp),
        )

    @property
    def family(self) -> str:
        """The kinds of parallelism that it has, such as `pp+tp`."""
        return "+".join(name for name in ("pp", "dp", "cp", "tp", "ep") if getattr(self, name) > 1) or "one GPU"


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Setting:
    """Division of a step into microbatches."""

    batch: int
    """Sequences in a microbatch of each data-parallel rank."""
    accumulate: int
    """Microbatches in a step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run a step."""

    shape: Shape
    setting: Setting
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    chunks: int = 1
    """Runs of consecutive layers of each pipeline rank."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each run; empty: equal numbers."""
    zero: int = 3
    """0: data-parallel ranks hold everything; 1: the optimizer is sharded; 2: gradients, too; 3: weights, too."""
    sharded_over: int | None = None
    """Ranks that share one copy of what is sharded; None: all data-parallel ranks."""
    sparse_embedding: bool = False
    """Whether the embedding's gradient is exchanged as rows."""
    places: tuple[StagePlace, ...] = ()
    """Groups of nodes of each stage, where nodes are not alike."""

    @property
    def key(self) -> tuple[object, ...]:
        """Order among candidates that take equally long: as memo train runs it, and the simpler one first."""
        shape = self.shape
        schedules = (PipelineSchedule.ONE_F_ONE_B, *PipelineSchedule)
        return (
            not self.is_fully_sharded,
            shape.gpus,
            shape.pp,
            schedules.index(self.schedule),
            self.chunks,
            self.stage_layers,
            shape.cp,
            shape.ring,
            shape.tp,
            shape.ep,
            -self.setting.batch,
            -self.zero,
            self.sharded_over or 0,
            self.sparse_embedding,
            tuple((place.groups, place.replicas) for place in self.places),
        )

    @property
    def layout(self) -> tuple[object, ...]:
        """Key of a row of an answer: the ranks, the schedule and its chunks."""
        return (dataclasses.replace(self.shape, ring=False), self.schedule, self.chunks)

    @property
    def is_fully_sharded(self) -> bool:
        """Whether it shards as memo train does: everything over all data-parallel ranks."""
        return self.zero == 3 and self.sharded_over is None

    @property
    def sharding(self) -> str:
        """Sharding, in a word or two."""
        if self.shape.dp * self.shape.cp == 1:
            return "-"
        return f"ZeRO {self.zero}" if self.sharded_over is None else f"ZeRO {self.zero} by {self.sharded_over}"
