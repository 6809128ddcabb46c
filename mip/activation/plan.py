"""The nouns of activation planning: budgets, the problem, and the plan that says what becomes of each layer's tensors.

All frozen, all pure data, all checkable without a device. What running a plan means is fixed here, since planner,
checker, simulator and runtime must mean the same. One rank, one microbatch, layers 0 to n-1; F, B, R are a layer's
forward, backward and recompute time (zero where nothing is recomputed):

    device     while layer i runs, in either direction:  static + saved by the embedding
               + sum of kept bytes of layers j < i-1  +  whole bytes of layers i-1 and i (the two rounding buffers): all
               that autograd saves, and what the recompute of their tokens is given besides
               + transient bytes of layer i; while the head runs: layer n-1 is the buffer in use, and the head's own
               bytes come on top
    copy out   of layer i starts when layer i+1 starts forward and must be over before layer i+2 (or the head) starts:
               a window of F(i+1). The last layer is never moved: it is needed next
    copy in    of layer i starts when layer i+1 starts backward, with its recompute, and must be over before layer i
               starts: a window of R(i+1) + B(i+1); recompute of layer i runs between that and its backward
    lanes      host bytes h and disk bytes d cross the link at once, in equal shares while both last, and disk bytes stream
               on through the disk's lane. With L the link's rate and W <= L the disk's, a copy takes
               max((h + d) / L,  d / W + h max(0, 2 / L - 1 / W)). What exceeds its window stalls the compute
    rounding   a storage goes to one place whole, kept ones within what is planned, and a place in a tier is of whole pages.
               So a stage that moves leaves, of each tier's budget and for each microbatch in flight, a page for each
               storage of layers that can move; and where it divides a layer, its largest storage
    pipeline   stage p of P, M microbatches (1F1B): min(M, P - p) of them are in flight, each with its own kept, host and
               disk bytes, and where that is more than one, the last layer of one of them stands whole; a forward waits
               for the stage before, a backward for the one behind. A stage that is planned alone says how many it holds
    chunks     under schedules that give a rank two runs of consecutive layers, a stage is both of these chunks, and how
               many microbatches it holds of each is counted moment by moment (memo.mip.activation.in_flight). The
               first chunk's last layer moves, too: out beside the first layer of the next forward, back in beside the
               last of the backward before, whichever chunk's that is; it is then there a turn early
    halves     where backward is split, each half takes half of B, the first one R too. Between them a call holds on the
               device what has not moved, computed again or not, and gradients of its results; what has moved goes
               again, and in again for the second half, which runs from the first layer on

By these rules one rank's copies out and in never run at the same time. What they share they share with other ranks:
`Hardware.lanes` gives each of a node's ranks its part of switches, host memory and disks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from memo.errors import PlanError
from memo.mip.activation.in_flight import Moment, moments_of, peak_in_flight
from memo.mip.activation.pipeline_time import microbatches_s
from memo.mip.inputs.hardware import Hardware
from memo.mip.inputs.pipeline_schedules import Kind, PipelineSchedule, Turn, rank_turns
from memo.mip.inputs.profile import LayerProfile, Level, Profile, check_amounts

__all__ = [
    "ONE_STAGE",
    "PAGE",
    "ActivationPlan",
    "ActivationProblem",
    "Budgets",
    "ChunkPrediction",
    "LayerPlan",
    "Pipeline",
    "StagePrediction",
    "StageTurns",
    "chunk_layers",
    "stage_layers",
]

PAGE = 4096
"""Bytes that a place in a tier is a multiple of."""

MAX_TURNS = 1 << 16
"""Stages times microbatches of schedules that are followed turn by turn."""

TOLERANCE = 1e-6
"""How far fractions of one whole may be from a sum of 1."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What a plan may use at most."""

    device_bytes: int
    """Of one GPU: everything that training holds there, parameters included."""
    host_bytes: int = 0
    """Of one node, shared by its ranks; so are the next two. 0 turns the tier off."""
    disk_bytes: int = 0
    disk_wear_bytes_per_day: float | None = None
    """What may be written in a day of training without stalls; None is without limit."""
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        check_amounts(self, "budgets")
        if self.ranks_per_node < 1:
            raise PlanError("budgets: a node has no rank")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageTurns:
    """What a stage that is planned alone does in a step, where its rank has more than one chunk."""

    layers: tuple[int, ...]
    """Of each chunk, in their order."""
    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        before: dict[Kind, set[Kind | None]] = {
            Kind.FORWARD: {None},
            Kind.BACKWARD: {Kind.FORWARD},
            Kind.INPUT: {Kind.FORWARD},
            Kind.WEIGHT: {Kind.INPUT},
        }
        state: dict[tuple[int, int], Kind] = {}
        for turn in self.turns:
            if state.get(turn.call) not in before[turn.kind] or not 0 <= turn.chunk < len(self.layers):
                raise PlanError(f"pipeline: turn {turn.chunk}{turn.kind}{turn.microbatch} is out of order")
            state[turn.call] = turn.kind
        if not all(count > 0 for count in self.layers) or len(self.layers) < 2:
            raise PlanError(f"pipeline: chunks of {self.layers} layers are none")
        counts = [sum(chunk == own for own, _ in state) for chunk in range(len(self.layers))]
        if len(set(counts)) > 1 or not all(kind in (Kind.BACKWARD, Kind.WEIGHT) for kind in state.values()):
            raise PlanError("pipeline: some microbatches have no end")

    @property
    def microbatches(self) -> int:
        return sum(turn.kind is Kind.FORWARD for turn in self.turns) // len(self.layers)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How a step's microbatches run; one stage is no pipeline, and its microbatches follow one another."""

    stages: int = 1
    microbatches: int = 1
    stages_per_node: int = 1
    """Consecutive stages whose ranks share a node, each with as many of its ranks as the others."""
    held: int | None = None
    """Microbatches in flight, where the one stage of this problem is a part of a pipeline whose stages plan each for
    itself; its schedule may be another than 1F1B. None is as many as 1F1B holds."""
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    own: StageTurns | None = None
    """Instead of `held`, of such a stage with more than one chunk."""

    def __post_init__(self) -> None:
        if self.held is not None and not (self.stages == 1 and 1 <= self.held <= self.microbatches):
            raise PlanError(
                f"pipeline: {self.stages} stages of {self.microbatches} microbatches do not hold {self.held}"
            )
        if not 1 <= self.stages_per_node <= self.stages or self.stages % self.stages_per_node:
            raise PlanError(f"pipeline: {self.stages} stages cannot be {self.stages_per_node} to a node")
        if not (1 <= self.stages <= 4096 and 1 <= self.microbatches <= 1 << 20):
            raise PlanError(f"pipeline: {self.stages} stages with {self.microbatches} microbatches is none")
        if self.schedule.stages_per_rank > 1:
            self._check_schedule()
        if self.own is not None and (self.stages > 1 or self.held or self.own.microbatches != self.microbatches):
            raise PlanError(f"pipeline: turns of {self.own.microbatches} microbatches on one stage are of another step")

    def _check_schedule(self) -> None:
        if self.stages == 1:
            raise PlanError(f"pipeline: {self.schedule} has no meaning for one stage")
        wrong = self.schedule.reason_unsupported(self.microbatches, self.stages)
        if wrong is not None:
            raise PlanError(f"pipeline: a step of {self.microbatches} microbatches {wrong}")
        if self.stages * self.microbatches > MAX_TURNS:
            raise PlanError(
                f"pipeline: {self.stages} stages times {self.microbatches} microbatches are too many to follow"
            )

    @property
    def chunks(self) -> int:
        """Of each stage."""
        return self.schedule.stages_per_rank if self.own is None else len(self.own.layers)

    def places(self, stage: int) -> list[int]:
        """Of a stage's chunks, in the whole pipeline's order."""
        return list(range(self.chunks)) if self.own is not None else self.schedule.stages_of(stage, self.stages)

    def turns(self, stage: int) -> tuple[Turn, ...]:
        """What a stage of several chunks does in a step."""
        if self.own is not None:
            return self.own.turns
        return rank_turns(self.schedule, ranks=self.stages, rank=stage, microbatches=self.microbatches)

    def in_flight(self, stage: int) -> int:
        """Microbatches whose activations one stage of one chunk holds at once."""
        if self.schedule is PipelineSchedule.GPIPE:
            return self.microbatches
        return min(self.microbatches, self.stages - stage) if self.held is None else self.held

    def order(self, stage: int) -> Iterator[bool]:
        """Of one chunk: true for the forward, false for the backward of the next microbatch, as the stage runs them."""
        ahead = self.in_flight(stage)
        yield from [True] * ahead
        yield from [False, True] * (self.microbatches - ahead)
        yield from [False] * ahead

    def moments(self, stage: int) -> tuple[Moment, ...]:
        """While what runs, and what else the stage holds then. One chunk is fullest with all others in flight."""
        if self.chunks > 1:
            return moments_of(self.turns(stage), self.chunks)
        others = self.in_flight(stage) - 1
        return (Moment(chunk=0, kind=Kind.BACKWARD, waiting=(others,), between=(0,), standing=0 if others else None),)

    def peak_in_flight(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """Microbatches that a stage holds at one time, by chunk, wherever no other time has as many of each."""
        return peak_in_flight(self.turns(stage), self.chunks) if self.chunks > 1 else ((self.in_flight(stage),),)

    def splits(self, stage: int, chunk: int) -> bool:
        """Whether a chunk's backward comes in two halves."""
        return self.chunks > 1 and any(turn.kind is Kind.WEIGHT and turn.chunk == chunk for turn in self.turns(stage))


ONE_STAGE = Pipeline()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActivationProblem:
    """What a plan is asked for."""

    profile: Profile
    hardware: Hardware
    budgets: Budgets
    pipeline: Pipeline = ONE_STAGE

    def __post_init__(self) -> None:
        pipeline, layers = self.pipeline, len(self.profile.layers)
        if pipeline.stages * pipeline.chunks > layers:
            chunks = "" if pipeline.chunks == 1 else f" of {pipeline.chunks} chunks"
            raise PlanError(f"{layers} layers make no {pipeline.stages} stages{chunks}")
        if pipeline.own is not None and sum(pipeline.own.layers) != layers:
            raise PlanError(f"chunks of {sum(pipeline.own.layers)} layers are not {layers} layers")
        if self.budgets.ranks_per_node % self.pipeline.stages_per_node:
            raise PlanError(
                f"{self.pipeline.stages_per_node} stages cannot share {self.budgets.ranks_per_node} ranks evenly"
            )


def chunk_layers(problem: ActivationProblem, stage: int) -> tuple[range, ...]:
    """The layers of one stage, by chunk: as equal as can be, the earlier chunks one more where it does not divide."""
    pipeline, count = problem.pipeline, len(problem.profile.layers)
    if pipeline.own is not None:
        sizes: Sequence[int] = pipeline.own.layers
    else:
        share, more = divmod(count, pipeline.stages * pipeline.chunks)
        sizes = [share + (place < more) for place in range(pipeline.stages * pipeline.chunks)]
    ends = list(itertools.accumulate(sizes))
    return tuple(range(ends[place] - sizes[place], ends[place]) for place in pipeline.places(stage))


def stage_layers(problem: ActivationProblem, stage: int) -> tuple[int, ...]:
    """The layers of one stage, chunk after chunk."""
    return tuple(index for chunk in chunk_layers(problem, stage) for index in chunk)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One layer: levels are fractions of its tokens, tiers are fractions of the bytes that it saves at those levels.

    Tokens come in consecutive ranges in the order all, matmuls, attention.
    """

    all_tokens: float = 1.0
    matmul_tokens: float = 0.0
    attention_tokens: float = 0.0
    kept: float = 1.0
    host: float = 0.0
    disk: float = 0.0

    def __post_init__(self) -> None:
        for what, parts in (("tokens", self.token_fractions), ("bytes", (self.kept, self.host, self.disk))):
            if not all(math.isfinite(part) and 0 <= part <= 1 + TOLERANCE for part in parts):
                raise PlanError(f"layer plan: {parts} are no fractions of its {what}")
            if abs(sum(parts) - 1) > TOLERANCE:
                raise PlanError(f"layer plan: {parts}, the fractions of its {what}, do not add up to 1")

    @property
    def token_fractions(self) -> tuple[float, float, float]:
        """At the levels all, matmuls, attention."""
        return self.all_tokens, self.matmul_tokens, self.attention_tokens

    def fraction(self, level: Level) -> float:
        """Of the tokens, at this level."""
        return dict(zip(Level, self.token_fractions, strict=True))[level]

    @property
    def divided(self) -> bool:
        """Whether its storages go to more than one place."""
        return sum(part > 0 for part in (self.kept, self.host, self.disk)) > 1

    def saved_bytes(self, layer: LayerProfile) -> float:
        """What the layer saves at these levels, in all tiers together."""
        return layer.fixed_bytes + sum(known.saved_bytes * self.fraction(known.level) for known in layer.levels)

    def beside_bytes(self, layer: LayerProfile) -> float:
        """What stands beside all that autograd saves of the layer while it is whole on the device.

        Where its tokens are not divided nothing is gathered to move, and nothing given to a recompute.
        """
        if not self.matmul_tokens and not self.attention_tokens:
            return 0.0
        return sum(known.beside_bytes * self.fraction(known.level) for known in layer.levels)

    def recompute_s(self, layer: LayerProfile) -> float:
        """What backward spends on bringing back the rest."""
        return sum(known.recompute_s * self.fraction(known.level) for known in layer.levels)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPrediction:
    """What one of a stage's chunks takes for one microbatch, recompute and stalls included; the mean of a step's."""

    forward_s: float
    backward_s: float
    """Of a split one, the first half."""
    weight_s: float = 0.0
    """The second half."""

    def __post_init__(self) -> None:
        check_amounts(self, "prediction")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    """What one stage does with one microbatch, and what it holds; bytes of host and disk are of one rank."""

    compute_s: float
    recompute_s: float
    forward_s: float
    """The part of the microbatch's time, stalls included, that passes before its backward begins."""
    stall_d2h_s: float = 0.0
    """Compute waiting for a copy out over the link; the next three likewise for the lane that is slowest."""
    stall_disk_write_s: float = 0.0
    stall_h2d_s: float = 0.0
    stall_disk_read_s: float = 0.0
    peak_device_bytes: int
    peak_host_bytes: int = 0
    """Of all microbatches in flight."""
    peak_disk_bytes: int = 0
    disk_written_bytes: int = 0
    """In a step, by one rank."""
    chunks: tuple[ChunkPrediction, ...] | None = None
    """Where there is more than one; together they take as long as the stage."""

    def __post_init__(self) -> None:
        check_amounts(self, "prediction")

    def turn_s(self, chunk: int, kind: Kind) -> float:
        """What one of the stage's turns takes."""
        assert self.chunks is not None
        own = self.chunks[chunk]
        return {Kind.FORWARD: own.forward_s, Kind.WEIGHT: own.weight_s}.get(kind, own.backward_s)

    @property
    def stall_s(self) -> float:
        """All causes together."""
        return self.stall_d2h_s + self.stall_disk_write_s + self.stall_h2d_s + self.stall_disk_read_s

    @property
    def microbatch_s(self) -> float:
        """From one microbatch to the next while the pipeline is full."""
        return self.compute_s + self.recompute_s + self.stall_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPlan:
    """A problem and its answer. `memo.mip.activation.checker` says whether it keeps every rule."""

    problem: ActivationProblem
    layers: tuple[LayerPlan, ...]
    """In forward order, over all stages."""
    stages: tuple[StagePrediction, ...]
    declined: str | None = None
    """Why nothing is done at all: everything fits as it is."""
    binding: tuple[str, ...] = ()
    """The rules that keep the plan from being faster, the weightiest first, in words."""

    def __post_init__(self) -> None:
        wanted = len(self.problem.profile.layers)
        if len(self.layers) != wanted:
            raise PlanError(f"{len(self.layers)} layer plans for {wanted} layers")
        if len(self.stages) != self.problem.pipeline.stages:
            raise PlanError(f"{len(self.stages)} predictions for {self.problem.pipeline.stages} stages")
        chunks = self.problem.pipeline.chunks
        if any(len(stage.chunks or (0,)) != chunks for stage in self.stages):
            raise PlanError(f"a stage has {chunks} chunks, and there are not as many predictions of them")

    @property
    def step_s(self) -> float:
        """Predicted."""
        return microbatches_s(self.problem.pipeline, self.stages) + self.problem.profile.optimizer_s
