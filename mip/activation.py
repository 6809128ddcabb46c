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

By these rules one rank's copies out and in never run at the same time. What they share they share with other ranks:
`Hardware.lanes` gives each of a node's ranks its part of switches, host memory and disks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from memo.errors import PlanError
from memo.mip.hardware import Hardware
from memo.mip.profile import LayerProfile, Level, Profile, check_amounts

__all__ = [
    "ONE_STAGE",
    "PAGE",
    "ActivationPlan",
    "ActivationProblem",
    "Budgets",
    "LayerPlan",
    "Pipeline",
    "StagePrediction",
    "stage_layers",
]

PAGE = 4096
"""Bytes that a place in a tier is a multiple of."""

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
class Pipeline:
    """How a step's microbatches run; one stage is no pipeline, and its microbatches follow one another."""

    stages: int = 1
    microbatches: int = 1
    stages_per_node: int = 1
    """Consecutive stages whose ranks share a node, each with as many of its ranks as the others."""
    held: int | None = None
    """Microbatches in flight, where the one stage of this problem is a part of a pipeline whose stages plan each for
    itself; its schedule may be another than 1F1B. None is as many as 1F1B holds."""

    def __post_init__(self) -> None:
        if self.held is not None and not (self.stages == 1 and 1 <= self.held <= self.microbatches):
            raise PlanError(
                f"pipeline: {self.stages} stages of {self.microbatches} microbatches do not hold {self.held}"
            )
        if not 1 <= self.stages_per_node <= self.stages or self.stages % self.stages_per_node:
            raise PlanError(f"pipeline: {self.stages} stages cannot be {self.stages_per_node} to a node")
        if not (1 <= self.stages <= 4096 and 1 <= self.microbatches <= 1 << 20):
            raise PlanError(f"pipeline: {self.stages} stages with {self.microbatches} microbatches is none")

    def in_flight(self, stage: int) -> int:
        """Microbatches whose activations one stage holds at once."""
        return min(self.microbatches, self.stages - stage) if self.held is None else self.held

    def order(self, stage: int) -> Iterator[bool]:
        """1F1B: true for the forward, false for the backward of the next microbatch, as the stage runs them."""
        ahead = self.in_flight(stage)
        yield from [True] * ahead
        yield from [False, True] * (self.microbatches - ahead)
        yield from [False] * ahead


ONE_STAGE = Pipeline()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActivationProblem:
    """What a plan is asked for."""

    profile: Profile
    hardware: Hardware
    budgets: Budgets
    pipeline: Pipeline = ONE_STAGE

    def __post_init__(self) -> None:
        if self.pipeline.stages > len(self.profile.layers):
            raise PlanError(f"{len(self.profile.layers)} layers make no {self.pipeline.stages} stages")
        if self.budgets.ranks_per_node % self.pipeline.stages_per_node:
            raise PlanError(
                f"{self.pipeline.stages_per_node} stages cannot share {self.budgets.ranks_per_node} ranks evenly"
            )


def stage_layers(problem: ActivationProblem, stage: int) -> range:
    """The layers of one stage: as equal as can be, the earlier stages one more where it does not divide."""
    share, more = divmod(len(problem.profile.layers), problem.pipeline.stages)
    first = stage * share + min(stage, more)
    return range(first, first + share + (stage < more))


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
        """What stands beside all that autograd saves of the layer while it is whole on the device."""
        return sum(known.beside_bytes * self.fraction(known.level) for known in layer.levels)

    def recompute_s(self, layer: LayerProfile) -> float:
        """What backward spends on bringing back the rest."""
        return sum(known.recompute_s * self.fraction(known.level) for known in layer.levels)


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

    def __post_init__(self) -> None:
        check_amounts(self, "prediction")

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
    """A problem and its answer. `memo.mip.activation_check` says whether it keeps every rule."""

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

    @property
    def step_s(self) -> float:
        """Predicted."""
        pipeline = self.problem.pipeline
        ahead = max(pipeline.stages, pipeline.in_flight(0))
        shown = min(pipeline.microbatches, 4 * ahead)  # by then each one more takes the slowest stage's time
        pace = max(stage.microbatch_s for stage in self.stages)
        first = _one_forward_one_backward(dataclasses.replace(pipeline, microbatches=shown), self.stages)
        return first + (pipeline.microbatches - shown) * pace + self.problem.profile.optimizer_s


def _one_forward_one_backward(pipeline: Pipeline, stages: Sequence[StagePrediction]) -> float:
    """When the last backward ends: a forward waits for the stage before, a backward for the stage behind."""
    count = len(stages)
    clock, orders = [0.0] * count, [list(pipeline.order(stage)) for stage in range(count)]
    done: list[tuple[list[float], list[float]]] = [([], []) for _ in stages]  # ends of backwards, of forwards
    while any(len(backwards) < pipeline.microbatches for backwards, _ in done):
        for number, stage in enumerate(stages):
            backwards, forwards = done[number]
            while (at := len(backwards) + len(forwards)) < len(orders[number]):
                forward = orders[number][at]
                giver = number - 1 if forward else number + 1
                if 0 <= giver < count:
                    given, mine = done[giver][forward], done[number][forward]
                    if len(given) <= len(mine):
                        break
                    clock[number] = max(clock[number], given[len(mine)])
                clock[number] += stage.forward_s if forward else stage.microbatch_s - stage.forward_s
                done[number][forward].append(clock[number])
    return max(clock)
