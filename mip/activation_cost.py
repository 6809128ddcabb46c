"""What a plan costs, by the rules of `memo.mip.activation` written out: time by cause, and the peak of every tier.

Plain arithmetic on one plan, without any model; the planner predicts with it after it has rounded. The simulator plays
the same rules event by event and shares no code with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memo.errors import PlanError
from memo.mip.activation import PAGE, ActivationProblem, LayerPlan, StagePrediction, stage_layers
from memo.mip.hardware import LaneRates
from memo.mip.profile import LayerProfile

__all__ = [
    "Position",
    "Traffic",
    "device_positions",
    "disk_delay",
    "predict",
    "rounding_bytes",
    "stage_compute_s",
    "stage_ends_s",
    "stage_static_bytes",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place in a stage at which the device's bytes have a peak of their own."""

    name: str
    resident_bytes: int
    """What stands there whatever the plan is: rounding buffers, transients, what the ends hold."""
    behind: int
    """The first so many layers of the stage have only their kept bytes there."""
    whole: int
    """So many after those are the rounding buffers: there is also what their recomputes are given."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of one layer that move, each way."""

    host_bytes: float
    disk_bytes: float

    @classmethod
    def of(cls, layer: LayerProfile, plan: LayerPlan) -> Traffic:
        """What a plan moves of a layer."""
        saved = plan.saved_bytes(layer)
        return cls(host_bytes=saved * plan.host, disk_bytes=saved * plan.disk)

    def out_s(self, rates: LaneRates) -> tuple[float, float]:
        """Time by the link, and by the disk; the later of the two counts."""
        return self._copy_s(rates.d2h_bytes_per_s, rates.disk_write_bytes_per_s)

    def in_s(self, rates: LaneRates) -> tuple[float, float]:
        """The same on the way back."""
        return self._copy_s(rates.h2d_bytes_per_s, rates.disk_read_bytes_per_s)

    def _copy_s(self, link: float, disk: float) -> tuple[float, float]:
        by_link = _time(self.host_bytes + self.disk_bytes, link)
        if self.disk_bytes <= 0:
            return by_link, 0.0
        return by_link, _time(self.disk_bytes, min(link, disk)) + self.host_bytes * disk_delay(link, disk)


def disk_delay(link: float, disk: float) -> float:
    """Seconds by which a byte of host's holds up those of the disk's that cross the link in equal shares with it."""
    return max(2 / link - 1 / min(link, disk), 0.0) if link and disk else 0.0


def predict(problem: ActivationProblem, plans: Sequence[LayerPlan]) -> tuple[StagePrediction, ...]:
    """What each stage does and holds under these layer plans.

    Raises:
        PlanError: they move bytes where there is no link.
    """
    return tuple(_predict_stage(problem, stage, plans) for stage in range(problem.pipeline.stages))


def stage_static_bytes(problem: ActivationProblem, stage: int) -> int:
    """Parameters, gradients and optimizer state of one rank of a stage."""
    layers = problem.profile.layer_profiles()
    static = sum(layers[index].static_bytes for index in stage_layers(problem, stage))
    if stage == 0:
        static += problem.profile.embedding.static_bytes
    if stage == problem.pipeline.stages - 1:
        static += problem.profile.head.static_bytes
    return static


def rounding_bytes(problem: ActivationProblem, stage: int, *, divided: bool) -> int:
    """What one rank of a stage may take of a tier beyond the bytes that move; `divided`: some layer goes to two places.

    The last layer does not move. Of what the others keep too little because storages are whole, each pass carries less
    than one storage on to the next layer.
    """
    layers = problem.profile.layer_profiles()
    moving = [layers[index] for index in stage_layers(problem, stage)[:-1]]
    pages = PAGE * sum(layer.storages for layer in moving)
    largest = max((layer.largest_storage_bytes for layer in moving), default=0)
    return problem.pipeline.in_flight(stage) * (pages + (largest if divided else 0))


def stage_ends_s(problem: ActivationProblem, stage: int) -> tuple[float, float]:
    """Forward and backward of what stands before the first and behind the last layer, where the stage has it."""
    ends = [problem.profile.embedding] if stage == 0 else []
    if stage == problem.pipeline.stages - 1:
        ends.append(problem.profile.head)
    return sum(end.forward_s for end in ends), sum(end.backward_s for end in ends)


def stage_compute_s(problem: ActivationProblem, stage: int) -> float:
    """Forward and backward of a stage's microbatch with everything in place."""
    layers = problem.profile.layer_profiles()
    parts = [layers[index].forward_s + layers[index].backward_s for index in stage_layers(problem, stage)]
    return sum(parts) + sum(stage_ends_s(problem, stage))


def device_positions(problem: ActivationProblem, stage: int) -> list[Position]:
    """In forward order: the embedding, each layer, the head."""
    profile, pipeline = problem.profile, problem.pipeline
    layers = profile.layer_profiles()
    mine = [layers[index] for index in stage_layers(problem, stage)]
    static = stage_static_bytes(problem, stage)
    positions = []
    if stage == 0:
        static += profile.embedding.saved_bytes * pipeline.in_flight(0)
        positions.append(
            Position(name="the embedding", resident_bytes=static + profile.embedding.transient_bytes, behind=0, whole=0)
        )
    before = 0
    for number, layer in enumerate(mine):
        positions.append(
            Position(
                name=f"layer {stage_layers(problem, stage)[number]}",
                resident_bytes=static + before + layer.full_bytes + layer.transient_bytes,
                behind=max(number - 1, 0),
                whole=min(number + 1, 2),
            )
        )
        before = layer.full_bytes
    if stage == pipeline.stages - 1:
        head = profile.head.saved_bytes + profile.head.transient_bytes
        positions.append(
            Position(name="the head", resident_bytes=static + before + head, behind=len(mine) - 1, whole=1)
        )
    return positions


def _predict_stage(problem: ActivationProblem, stage: int, plans: Sequence[LayerPlan]) -> StagePrediction:
    rates = problem.hardware.lanes(problem.budgets.ranks_per_node)
    indices = stage_layers(problem, stage)
    layers = [problem.profile.layer_profiles()[index] for index in indices]
    mine = [plans[index] for index in indices]
    traffic = [Traffic.of(layer, plan) for layer, plan in zip(layers, mine, strict=True)]
    kept = [plan.saved_bytes(layer) * plan.kept for layer, plan in zip(layers, mine, strict=True)]
    beside = [plan.beside_bytes(layer) for layer, plan in zip(layers, mine, strict=True)]
    in_flight = problem.pipeline.in_flight(stage)
    elsewhere = (in_flight - 1) * sum(kept)
    if in_flight > 1:
        elsewhere += layers[-1].full_bytes + beside[-1] - kept[-1]  # of the microbatch whose forward ran last
    forward_s = sum(layer.forward_s for layer in layers) + stage_ends_s(problem, stage)[0]
    stall_out = stall_write = stall_in = stall_read = 0.0
    for number in range(len(layers) - 1):
        link, disk = traffic[number].out_s(rates)
        late = max(link, disk) - layers[number + 1].forward_s
        if late > 0:
            stall_out, stall_write = (
                (stall_out + late, stall_write) if link >= disk else (stall_out, stall_write + late)
            )
        link, disk = traffic[number].in_s(rates)
        late = max(link, disk) - layers[number + 1].backward_s - mine[number + 1].recompute_s(layers[number + 1])
        if late > 0:
            stall_in, stall_read = (stall_in + late, stall_read) if link >= disk else (stall_in, stall_read + late)
    peak = max(
        position.resident_bytes
        + elsewhere
        + sum(kept[: position.behind])
        + sum(beside[position.behind : position.behind + position.whole])
        for position in device_positions(problem, stage)
    )
    disk_bytes = sum(moved.disk_bytes for moved in traffic)
    return StagePrediction(
        compute_s=stage_compute_s(problem, stage),
        recompute_s=sum(plan.recompute_s(layer) for plan, layer in zip(mine, layers, strict=True)),
        forward_s=forward_s + stall_out + stall_write,
        stall_d2h_s=stall_out,
        stall_disk_write_s=stall_write,
        stall_h2d_s=stall_in,
        stall_disk_read_s=stall_read,
        peak_device_bytes=round(peak),
        peak_host_bytes=round(in_flight * sum(moved.host_bytes for moved in traffic)),
        peak_disk_bytes=round(in_flight * disk_bytes),
        disk_written_bytes=round(problem.pipeline.microbatches * disk_bytes),
    )


def _time(nbytes: float, bytes_per_s: float) -> float:
    if nbytes <= 0:
        return 0.0
    if not bytes_per_s:
        raise PlanError(f"the plan moves {nbytes:.0f} bytes over a link that has no bandwidth")
    return nbytes / bytes_per_s
