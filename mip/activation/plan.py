"""Data types of activation planning: budgets, the problem, and the plan of each layer's tensors.

All are frozen and pure data, with no time and no order. A **problem** is a profile (classes of layers, each with a curve of
points: bytes saved and seconds of recompute), the machine of each pipeline stage, budgets of device, host and disk, and a
pipeline. A **plan** says for each layer at which point it is, and which fractions of the saved bytes stay on the device,
go to the host or to the disk; and for each stage which times and peaks follow.

What it means to run a plan is said twice in code, by the planner's rows and prediction and by the simulator
(`memo.mip.activation.simulator`, `memo.mip.simulate`), which the checker compares, and once in words, beside the planner's:

    memory_peaks       Note [One whole layer]           the running one, and what the one before it saves
                       Note [Transients]                of forward, backward and recompute
                       Note [Between the halves]        of a split backward
    overlap_windows    Note [A copy has a layer's work] as its window, and what exceeds it stalls compute
    cost               Note [Two tiers share a link]    seconds of a copy to host and disk at once
                       Note [Whole storages]            what rounding may take of a tier
    in_flight          Note [Microbatches in flight]    and layers that have not left, or are back
    network_load       Note [Collectives beside layers] gathers and reductions
    pipeline_time      Note [Stages wait]               for messages, and for the slowest optimizer
    here               Note [Codes]

By these rules one rank's copies out and in never run at the same time. What they share with other ranks is divided by
`Hardware.lanes`: each of a node's ranks gets its part of switches, host memory and disks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from memo.errors import PlanError
from memo.events import TierName
from memo.mip.activation.in_flight import SchedulePoint, moments_of, peak_in_flight, split_chunks
from memo.mip.activation.pipeline_time import microbatches_s
from memo.mip.inputs.hardware import Hardware, LaneRates
from memo.mip.inputs.pipeline_schedules import Pass, PipelineSchedule, Turn, one_chunk_turns, rank_turns
from memo.mip.inputs.profile import ALL, MAX_LAYERS, LayerProfile, Profile, check_amounts

if TYPE_CHECKING:
    from memo.mip.activation.stage_view import StageView

PAGE = 4096
"""Bytes; a place in a tier is a multiple of this."""

MAX_TURNS = 1 << 17
"""Largest product of stages, chunks and microbatches for schedules that are followed turn by turn."""

MAX_RANKS = 1 << 20
"""Largest number of ranks of all stages."""

TOLERANCE = 1e-6
"""Deviation from 1 that a sum of fractions may have."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Memory and disk that a plan may use."""

    device_bytes: int
    """Memory of one GPU, for everything that training holds there, parameters included."""
    host_bytes: int = 0
    """Host memory of a node, shared by its ranks; 0 turns the tier off."""
    disk_bytes: int = 0
    """Disk space of a node, shared by its ranks; 0 turns the tier off."""
    disk_wear_bytes_per_day: float | None = None
    """Bytes that a node may write in a day of training without stalls; None is without limit."""
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        check_amounts(self, "budgets")
        if self.ranks_per_node < 1:
            raise PlanError("budgets: a node has no rank")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageTurns:
    """Turns of a stage that is planned alone and has more than one chunk."""

    layers: tuple[int, ...]
    """Number of layers of each chunk, in order."""
    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        before: dict[Pass, set[Pass | None]] = {
            Pass.FORWARD: {None},
            Pass.BACKWARD: {Pass.FORWARD},
            Pass.INPUT: {Pass.FORWARD},
            Pass.WEIGHT: {Pass.INPUT},
        }
        state: dict[tuple[int, int], Pass] = {}
        for turn in self.turns:
            if state.get(turn.call) not in before[turn.kind] or not 0 <= turn.chunk < len(self.layers):
                raise PlanError(f"pipeline: turn {turn.chunk}{turn.kind}{turn.microbatch} is out of order")
            state[turn.call] = turn.kind
        if not all(count > 0 for count in self.layers) or len(self.layers) < 2:
            raise PlanError(
                f"pipeline: a rank of chunks needs at least two, of at least one layer each, not {self.layers}"
            )
        counts = [sum(chunk == own for own, _ in state) for chunk in range(len(self.layers))]
        if len(set(counts)) > 1 or not all(kind in (Pass.BACKWARD, Pass.WEIGHT) for kind in state.values()):
            raise PlanError("pipeline: some microbatches are not in every chunk, or have no backward")

    @property
    def microbatches(self) -> int:
        """Number of microbatches in the step."""
        return sum(turn.kind is Pass.FORWARD for turn in self.turns) // len(self.layers)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Microbatches and pipeline stages of a step. With one stage, microbatches run one after the other."""

    stages: int = 1
    microbatches: int = 1
    stage_ranks: int = 0
    """Ranks of each stage, which fill the nodes one stage after another; 0: as many as a node has."""
    held: int | None = None
    """Microbatches in flight of a single stage that is part of a pipeline planned stage by stage; None is the number
    under 1F1B."""
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    own: StageTurns | None = None
    """Turns of such a stage, instead of `held`, where it has more than one chunk."""
    chunks: int = 0
    """Number of chunks of each stage; 0 is replaced by the schedule's own number, or that of `own`."""
    layers: tuple[int, ...] = ()
    """Numbers of layers of all chunks of all stages, in the order of the layers; without them chunks have equal numbers,
    earlier ones one more if need be."""

    def __post_init__(self) -> None:
        own_chunks = self.schedule.default_chunks if self.own is None else len(self.own.layers)
        object.__setattr__(self, "chunks", self.chunks or own_chunks)
        if self.held is not None and not (self.stages == 1 and 1 <= self.held <= self.microbatches):
            raise PlanError(
                f"pipeline: {self.stages} stages of {self.microbatches} microbatches do not hold {self.held}"
            )
        if not 0 <= self.stages * self.stage_ranks <= MAX_RANKS:
            raise PlanError(f"pipeline: {self.stages} stages of {self.stage_ranks} ranks are out of range")
        if not (1 <= self.stages <= 4096 and 1 <= self.microbatches <= 1 << 20):
            raise PlanError(f"pipeline: {self.stages} stages with {self.microbatches} microbatches are out of range")
        if self.own is None:
            self._check_schedule()
        elif self.chunks != own_chunks:
            raise PlanError(f"pipeline: turns of {own_chunks} chunks are not of {self.chunks}")
        if self.own is not None and (self.stages > 1 or self.held or self.own.microbatches != self.microbatches):
            raise PlanError(f"pipeline: turns of {self.own.microbatches} microbatches on one stage are of another step")
        self._check_layers()

    def _check_layers(self) -> None:
        if not self.layers:
            return
        if self.own is not None:
            raise PlanError("pipeline: a stage that is planned alone has the layers of its turns")
        if len(self.layers) != self.stages * self.chunks:
            raise PlanError(
                f"pipeline: {len(self.layers)} numbers of layers for {self.stages * self.chunks} runs of layers"
            )
        if not all(1 <= count <= MAX_LAYERS for count in self.layers):
            raise PlanError(f"pipeline: a run of {min(self.layers)} layers; each has from 1 to {MAX_LAYERS}")

    def _check_schedule(self) -> None:
        wrong = self.schedule.reason_not_chunks(self.chunks)
        if wrong is not None:
            raise PlanError(f"pipeline: {self.chunks} chunks to a stage {wrong}")
        if self.chunks == 1:
            return
        if self.stages == 1:
            raise PlanError(f"pipeline: {self.schedule} has no meaning for one stage")
        wrong = self.schedule.reason_unsupported(self.microbatches, self.stages)
        if wrong is not None:
            raise PlanError(f"pipeline: a step of {self.microbatches} microbatches {wrong}")
        if self.stages * self.chunks * self.microbatches > MAX_TURNS:
            raise PlanError(
                f"pipeline: {self.stages} stages of {self.chunks} chunks times {self.microbatches} microbatches are too "
                "many to follow"
            )

    def chunk_positions(self, stage: int) -> list[int]:
        """Position of each of a stage's chunks in the pipeline's order of layers."""
        if self.own is not None:
            return list(range(self.chunks))
        return self.schedule.stages_of(stage, self.stages, chunks=self.chunks)

    @property
    def most_layers(self) -> int:
        """Layers of the largest stage, where their numbers are given."""
        return max(sum(self.layers[run] for run in self.chunk_positions(stage)) for stage in range(self.stages))

    def turns(self, stage: int) -> tuple[Turn, ...]:
        """Turns of a stage, in order."""
        if self.own is not None:
            return self.own.turns
        if self.chunks == 1:
            return one_chunk_turns(self.microbatches, self.in_flight(stage))
        return rank_turns(
            self.schedule, ranks=self.stages, rank=stage, microbatches=self.microbatches, chunks=self.chunks
        )

    def in_flight(self, stage: int) -> int:
        """Number of microbatches whose activations a stage of one chunk holds at once."""
        if self.schedule is PipelineSchedule.GPIPE:
            return self.microbatches
        return min(self.microbatches, self.stages - stage) if self.held is None else self.held

    def order(self, stage: int) -> Iterator[Pass]:
        """Passes of a stage of one chunk, in order: the forward of the next microbatch, or its backward."""
        yield from (turn.kind for turn in self.turns(stage))

    def moments(self, stage: int) -> tuple[SchedulePoint, ...]:
        """Moments at which the stage may hold most. With one chunk, those are passes with all others in flight."""
        if self.chunks > 1:
            return moments_of(self.turns(stage), self.chunks)
        others = self.in_flight(stage) - 1
        return tuple(
            SchedulePoint(chunk=0, kind=kind, waiting=(others,), between=(0,), whole_chunk=0 if others else None)
            for kind in (Pass.FORWARD, Pass.BACKWARD)
        )

    def peak_in_flight(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """Maximal numbers of microbatches in flight, by chunk; several where no moment has most of every chunk."""
        return peak_in_flight(self.turns(stage), self.chunks) if self.chunks > 1 else ((self.in_flight(stage),),)

    def results_held(self, stage: int) -> int:
        """The most results that a stage holds at once: each from its forward to its backward, or the first half of that.

        The last chunk of the pipeline has none: the loss is one number.
        """
        last = self.stages * self.chunks - 1
        sends = [place < last for place in self.chunk_positions(stage)]
        return max(
            sum(count for count, one in zip(moment.waiting, sends, strict=True) if one)
            + (moment.kind is not Pass.WEIGHT and sends[moment.chunk])
            for moment in self.moments(stage)
        )

    def splits(self, stage: int, chunk: int) -> bool:
        """Whether a chunk's backward is split into two halves."""
        return self.chunks > 1 and chunk in split_chunks(self.turns(stage))


ONE_STAGE = Pipeline()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageMachine:
    """Machine of one pipeline stage, and what a profile says once for all stages where they are alike."""

    hardware: Hardware
    budgets: Budgets
    link_share: float = 0.0
    """Fraction of a GPU's link to the host that collectives take."""
    send_s: float = 0.0
    """Time of sending a microbatch's activations to the next stage, or their gradients back; the last stage's is between
    it and the first one, which schedules with several chunks need."""
    optimizer_s: float = 0.0
    """Seconds per step."""
    optimizer_exchange_s: float = 0.0
    """Seconds per step in which updated weights are gathered and nothing else runs."""
    new_node: bool = False
    """Whether its ranks begin with a node of their own, which no earlier stage has ranks on."""
    node_ranks: int = 0
    """Ranks of the stage that fill nodes before the next stage's do, where the others are in another group of nodes; 0:
    all of them."""

    def __post_init__(self) -> None:
        check_amounts(self, "stage machine")
        if self.link_share >= 1:
            raise PlanError(f"stage machine: collectives take {self.link_share:g} of the link to the host")

    @property
    def lanes(self) -> LaneRates:
        """Rates of one rank's copies: its part of the node's, less what collectives take."""
        return self.hardware.lanes(self.budgets.ranks_per_node, taken=self.link_share)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationProblem:
    """Input of the activation planner."""

    profile: Profile
    hardware: Hardware
    """Machine of every stage; where `machines` is given, the one that is shown."""
    budgets: Budgets
    """Budgets of every stage's ranks; where `machines` is given, of the one that is shown."""
    pipeline: Pipeline = ONE_STAGE
    machines: tuple[StageMachine, ...] = ()
    """Machine of each stage, where they are not alike. The seconds of a layer are those on its stage's machine."""
    overlap: bool = True
    """Whether copies run beside the next layer's work; else compute waits for each, and only one layer is on the device."""

    @property
    def replicas(self) -> int:
        """Ranks of data parallelism; 1 where the plan does not know how many GPUs a stage has."""
        signature = self.profile.signature
        return max(self.pipeline.stage_ranks // (signature.tp * signature.cp), 1)

    @property
    def gpus(self) -> int:
        """GPUs of the whole job."""
        signature = self.profile.signature
        return self.replicas * signature.tp * signature.cp * self.pipeline.stages

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, of all replicas."""
        signature = self.profile.signature
        return self.replicas * signature.batch * signature.tokens * self.pipeline.microbatches

    @functools.cached_property
    def stages(self) -> tuple[StageView, ...]:
        """Its pipeline stages."""
        from memo.mip.activation.stage_view import StageView

        return tuple(StageView(self, number) for number in range(self.pipeline.stages))

    @property
    def without_overlap(self) -> ActivationProblem:
        """The problem in which compute waits for copies, which needs least memory; itself with several chunks a stage."""
        if not self.overlap or self.pipeline.chunks > 1:
            return self
        return dataclasses.replace(self, overlap=False)

    def machine_of(self, stage: int) -> StageMachine:
        """Machine of one stage."""
        if self.machines:
            return self.machines[stage]
        profile = self.profile
        return StageMachine(
            hardware=self.hardware,
            budgets=self.budgets,
            link_share=profile.link_share,
            send_s=profile.send_s,
            optimizer_s=profile.optimizer_s,
            optimizer_exchange_s=profile.optimizer_exchange_s,
        )

    def send_s(self, giver: int, taker: int) -> float:
        """Seconds of a message from one stage to another one, which comes before or after it, or between the ends."""
        if not self.machines:
            return self.profile.send_s
        return self.machine_of(min(giver, taker) if abs(giver - taker) == 1 else max(giver, taker)).send_s

    @property
    def update(self) -> StageMachine:
        """The machine whose optimizer takes longest, with its exchange; every stage waits for it."""
        machines = self.machines or (self.machine_of(0),)
        return max(machines, key=lambda machine: machine.optimizer_s + machine.optimizer_exchange_s)

    def __post_init__(self) -> None:
        pipeline, layers = self.pipeline, len(self.profile.layers)
        if not self.overlap and pipeline.chunks > 1:
            raise PlanError("problem: copies overlap where a stage has several chunks; overlap cannot be false")
        if pipeline.stages * pipeline.chunks > layers:
            chunks = "" if pipeline.chunks == 1 else f" of {pipeline.chunks} chunks"
            raise PlanError(f"{layers} layers make no {pipeline.stages} stages{chunks}")
        if pipeline.own is not None and sum(pipeline.own.layers) != layers:
            raise PlanError(f"chunks of {sum(pipeline.own.layers)} layers are not {layers} layers")
        if pipeline.layers and sum(pipeline.layers) != layers:
            raise PlanError(f"stages of {sum(pipeline.layers)} layers are not {layers} layers")
        if self.machines and len(self.machines) != pipeline.stages:
            raise PlanError(f"{len(self.machines)} machines for {pipeline.stages} stages")
        ranks = sum(
            machine.node_ranks or pipeline.stage_ranks or machine.budgets.ranks_per_node for machine in self.machines
        )
        if ranks > MAX_RANKS:
            raise PlanError(f"machines of {ranks} ranks are out of range; at most {MAX_RANKS} are possible")

    def message_bytes(self, stage: int) -> int:
        """Bytes that a stage keeps for messages: all that it receives in a step, and the most results at once.

        Buffers of received messages stand all the time: of each microbatch, from each chunk's neighbours on other ranks.
        """
        pipeline = self.pipeline
        if pipeline.own is not None or not self.profile.send_bytes:
            return 0
        rank_of = {place: rank for rank in range(pipeline.stages) for place in pipeline.chunk_positions(rank)}
        beside = [place + step for place in pipeline.chunk_positions(stage) for step in (-1, 1)]
        senders = sum(rank_of.get(place, stage) != stage for place in beside)
        messages = senders * pipeline.microbatches + pipeline.results_held(stage)
        return messages * round(self.profile.send_bytes)

    @property
    def nodes(self) -> tuple[Mapping[int, int], ...]:
        """Number of each stage's ranks on a node, once for all nodes that are alike.

        At most three kinds of nodes have ranks of a stage: its first, its last, and those between.
        """
        found: dict[tuple[tuple[int, int], ...], None] = {}
        for stages in self._node_runs:
            machine = self.machine_of(stages[0])
            size = machine.budgets.ranks_per_node
            each = machine.node_ranks or self.pipeline.stage_ranks or size
            bounds = [(place * each // size, ((place + 1) * each - 1) // size) for place in range(len(stages))]
            for node in sorted({node for first, last in bounds for node in (first, min(first + 1, last), last)}):
                begin, end = node * size, min((node + 1) * size, len(stages) * each)
                own = range(begin // each, (end - 1) // each + 1)
                counts = ((of, min(end, (of + 1) * each) - max(begin, of * each)) for of in own)
                found[tuple((stages[of], ranks) for of, ranks in counts)] = None
        return tuple(dict(node) for node in found)

    @property
    def _node_runs(self) -> list[range]:
        """Stages that fill the same nodes, one after another."""
        stages = self.pipeline.stages
        starts = [0, *(stage for stage in range(1, len(self.machines)) if self.machines[stage].new_node), stages]
        return [range(first, end) for first, end in itertools.pairwise(starts)]


def layers_of_runs(problem: ActivationProblem) -> tuple[int, ...]:
    """Numbers of layers of the pipeline's runs of consecutive layers, in the order of the layers."""
    runs = [chunk for stage in problem.stages for chunk in stage.chunks]
    return tuple(len(run) for run in sorted(runs, key=lambda run: run.start))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """Plan of one layer: a point of its class, and a fraction of the saved bytes for each tier."""

    point: str = ALL
    kept: float = 1.0
    host: float = 0.0
    disk: float = 0.0

    def __post_init__(self) -> None:
        parts = (self.kept, self.host, self.disk)
        shown = ", ".join(f"{part:g}" for part in parts)
        if not all(math.isfinite(part) and 0 <= part <= 1 + TOLERANCE for part in parts):
            raise PlanError(f"layer plan: ({shown}) are no fractions of its bytes")
        if abs(sum(parts) - 1) > TOLERANCE:
            raise PlanError(f"layer plan: ({shown}), the fractions of its bytes, do not add up to 1")

    @property
    def recomputes(self) -> bool:
        """Whether the layer is at another point than `all`."""
        return self.point != ALL

    @property
    def divided(self) -> bool:
        """Whether its storages go to more than one tier."""
        return sum(part > 0 for part in (self.kept, self.host, self.disk)) > 1

    def saved_bytes(self, layer: LayerProfile) -> int:
        """Bytes that the layer saves at its point, in all tiers together."""
        return layer.fixed_bytes + layer.at(self.point).saved_bytes

    # Note [Codes]: of a layer at point `all` that moves, so many bytes less than it saves are on links and in tiers as its
    # class says; at any other point what moves moves whole. Coding takes its time in forward, decoding in backward, and in
    # both halves of a split one, in proportion to what is coded.

    def coded_share(self, layer: LayerProfile) -> float:
        """Fraction by which codes make what moves fewer bytes than it saves; 0 without a codec."""
        return layer.coded_share if self.point == ALL else 0.0

    def moved_bytes(self, layer: LayerProfile) -> tuple[float, float]:
        """Bytes that the layer moves, as they are in the tier: (to the host, to the disk)."""
        moving = self.saved_bytes(layer) * (1 - self.coded_share(layer))
        return moving * self.host, moving * self.disk

    def coding_s(self, layer: LayerProfile) -> tuple[float, float]:
        """Seconds of coding what moves: (in forward, in each backward that it comes back for)."""
        if layer.coding is None or not self.coded_share(layer):
            return 0.0, 0.0
        moving = self.host + self.disk
        return layer.coding.encode_s * moving, layer.coding.decode_s * moving

    def beside_bytes(self, layer: LayerProfile) -> int:
        """Bytes that its recompute is given beside all that autograd saves."""
        return layer.at(self.point).beside_bytes

    def held_bytes(self, layer: LayerProfile) -> int:
        """Bytes that the recompute holds at once, on top of backward's transient; at least what forward holds."""
        return max(layer.at(self.point).held_bytes, layer.repeated_bytes) if self.recomputes else 0

    def absent_bytes(self, layer: LayerProfile) -> int:
        """Bytes of the whole layer that are not there at the peak of a backward in one piece."""
        return layer.at(self.point).absent_bytes

    def recompute_s(self, layer: LayerProfile) -> float:
        """Seconds of recompute in backward."""
        return layer.at(self.point).recompute_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPrediction:
    """Predicted time of one chunk for one microbatch, recompute and stalls included; the mean over a step."""

    forward_s: float
    backward_s: float
    """The first half of a split backward, or all of it."""
    weight_s: float = 0.0
    """The second half of a split backward."""

    def __post_init__(self) -> None:
        check_amounts(self, "prediction")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    """Predicted time of one stage for one microbatch, and its peak memory. Host and disk bytes are of one rank."""

    compute_s: float
    recompute_s: float
    forward_s: float
    """Time of the forward, stalls and exposed communication included."""
    coding_s: float | None = None
    """Coding and decoding what moves; None is 0."""
    communication_s: float = 0.0
    """Exposed communication: compute waiting for collectives."""
    sync_s: float = 0.0
    """Seconds a step after the last backward until its gradients are reduced."""
    stall_d2h_s: float = 0.0
    """Compute waiting for a copy out, where the link is slowest."""
    stall_disk_write_s: float = 0.0
    """Compute waiting for a copy out, where the disk is slowest."""
    stall_h2d_s: float = 0.0
    """Compute waiting for a copy in, where the link is slowest."""
    stall_disk_read_s: float = 0.0
    """Compute waiting for a copy in, where the disk is slowest."""
    peak_device_bytes: int
    peak_host_bytes: int = 0
    """For all microbatches in flight."""
    peak_disk_bytes: int = 0
    """For all microbatches in flight."""
    disk_written_bytes: int = 0
    """Per step."""
    chunks: tuple[ChunkPrediction, ...] | None = None
    """Where there is more than one chunk; together they take as long as the stage."""

    @property
    def peaks(self) -> dict[TierName, int]:
        """Peak bytes of each tier."""
        return dict(zip(TierName, (self.peak_device_bytes, self.peak_host_bytes, self.peak_disk_bytes), strict=True))

    def __post_init__(self) -> None:
        check_amounts(self, "prediction")

    def turn_s(self, chunk: int, kind: Pass) -> float:
        """Seconds of one turn."""
        if self.chunks is None:
            return self.forward_s if kind is Pass.FORWARD else self.microbatch_s - self.forward_s
        own = self.chunks[chunk]
        return {Pass.FORWARD: own.forward_s, Pass.WEIGHT: own.weight_s}.get(kind, own.backward_s)

    @property
    def stall_s(self) -> float:
        """Stalls of all causes."""
        return self.stall_d2h_s + self.stall_disk_write_s + self.stall_h2d_s + self.stall_disk_read_s

    @property
    def microbatch_s(self) -> float:
        """Time from one microbatch to the next while the pipeline is full."""
        return self.compute_s + self.communication_s + self.recompute_s + (self.coding_s or 0.0) + self.stall_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPlan:
    """A problem, the plan of each layer, and predictions. `memo.mip.activation.checker` decides whether it is valid."""

    problem: ActivationProblem
    layers: tuple[LayerPlan, ...]
    """In forward order, over all stages."""
    stages: tuple[StagePrediction, ...]
    declined: str | None = None
    """Reason why nothing is moved or recomputed, where everything fits as it is."""
    binding: tuple[str, ...] = ()
    """Limits that keep the plan from being faster, the most valuable first, for display."""
    run: Mapping[str, object] | None = None
    """Training run that the plan is for, as far as the problem does not say it, in JSON values read by their maker. None:
    unknown."""

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
        """Predicted time of a step."""
        passes_s = microbatches_s(self.problem.pipeline, self.stages, send_s=self.problem.send_s)
        last = self.problem.update
        return passes_s + last.optimizer_s + last.optimizer_exchange_s
