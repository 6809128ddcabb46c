"""Cost model of an activation plan: time by cause, and peaks by tier.

Plain arithmetic on one plan; the planner predicts with it after rounding. The simulator plays the same rules event by
event and shares with it only what a layer saves, holds and moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memo.errors import PlanError
from memo.mip.activation.memory_peaks import stage_memory
from memo.mip.activation.network_load import ExposedCommunication, exposed_sync_s, work_s
from memo.mip.activation.overlap_windows import Window, copies_in, copies_out
from memo.mip.activation.plan import PAGE, ActivationProblem, ChunkPrediction, LayerPlan, StagePrediction
from memo.mip.activation.stage_view import StageView
from memo.mip.inputs.hardware import LaneRates
from memo.mip.inputs.pipeline_schedules import Pass
from memo.mip.inputs.profile import LayerProfile
from memo.units import format_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of one layer that move in each direction."""

    host_bytes: float
    disk_bytes: float

    @classmethod
    def of(cls, layer: LayerProfile, plan: LayerPlan) -> Traffic:
        """Traffic of a layer under its plan."""
        host, disk = plan.moved_bytes(layer)
        return cls(host_bytes=host, disk_bytes=disk)

    def out_s(self, rates: LaneRates) -> tuple[float, float]:
        """Seconds of the copy out: (by the link, by the disk). The larger one counts."""
        return self._copy_s(rates.d2h_bytes_per_s, rates.disk_write_bytes_per_s)

    def in_s(self, rates: LaneRates) -> tuple[float, float]:
        """Seconds of the copy in, likewise."""
        return self._copy_s(rates.h2d_bytes_per_s, rates.disk_read_bytes_per_s)

    def _copy_s(self, link: float, disk: float) -> tuple[float, float]:
        by_link = _time(self.host_bytes + self.disk_bytes, link)
        if self.disk_bytes <= 0:
            return by_link, 0.0
        return by_link, _time(self.disk_bytes, min(link, disk)) + self.host_bytes * disk_delay(link, disk)


# Note [Two tiers share a link]: host bytes h and disk bytes d cross the link at once, in equal shares while both last; then
# disk bytes go on through the disk's lane. With L the link's rate and W <= L the disk's, a copy takes
# max((h + d) / L,  d / W + h max(0, 2 / L - 1 / W)).


def disk_delay(link: float, disk: float) -> float:
    """Seconds that each host byte delays the disk bytes that share the link with it."""
    return max(2 / link - 1 / min(link, disk), 0.0) if link and disk else 0.0


def predict_stages(problem: ActivationProblem, plans: Sequence[LayerPlan]) -> tuple[StagePrediction, ...]:
    """Predicts time and peaks of every stage under these layer plans.

    Raises:
        PlanError: the plans move bytes over a link that has no bandwidth.
    """
    return tuple(_predict_stage(stage, plans) for stage in problem.stages)


def predict_kept_times(problem: ActivationProblem) -> tuple[StagePrediction, ...]:
    """Predicts the time of every stage where everything is kept, without the device's peaks, which are 0.

    Stages of the same layers take equally long then, so that a long pipeline takes little more time than a short one.
    """
    plans = (LayerPlan(),) * len(problem.profile.layers)
    known: dict[tuple[object, ...], StagePrediction] = {}
    found = []
    for stage in problem.stages:
        key: tuple[object, ...] = (stage.number == 0, stage.has_head, stage.has_embedding)
        key += tuple(tuple(problem.profile.layers[index] for index in chunk) for chunk in stage.chunks)
        if len(stage.chunks) > 1:
            end = stage.pipeline.turns(stage.number)[-1]
            key += (end.chunk, end.kind)
        if key not in known:
            known[key] = _predict_stage(stage, plans, peaks=False)
        found.append(known[key])
    return tuple(found)


# Note [Whole storages]: a storage goes to one place whole, kept ones within the planned bytes, and a place in a tier is of
# whole pages. So a stage that moves leaves free, of each tier's budget and for each microbatch in flight, a page for each
# storage of layers that can move; and where it divides a layer, its largest storage.


def rounding_bytes(stage: StageView, *, divided: bool) -> int:
    """Bytes that one rank of a stage may take of a tier beyond the moved bytes, since storages and pages are whole.

    The last layer does not move. Where some layer is `divided` among tiers, the excess that each pass over a chunk
    carries from layer to layer is less than one storage.
    """
    of_chunks = []
    for own in stage.numbers:
        moving = stage.layers[own.start : min(own.stop, len(stage.layers) - 1)]
        largest = max((layer.largest_storage_bytes for layer in moving), default=0)
        of_chunks.append(PAGE * sum(layer.storages for layer in moving) + (largest if divided else 0))
    return max(
        sum(count * nbytes for count, nbytes in zip(held, of_chunks, strict=True))
        for held in stage.pipeline.peak_in_flight(stage.number)
    )


def _predict_stage(stage: StageView, plans: Sequence[LayerPlan], *, peaks: bool = True) -> StagePrediction:
    mine = [plans[index] for index in stage.indices]
    traffic = [Traffic.of(layer, plan) for layer, plan in zip(stage.layers, mine, strict=True)]
    host, disk = ([getattr(moved, name) for moved in traffic] for name in ("host_bytes", "disk_bytes"))
    network = ExposedCommunication.of(stage, mine)
    stalls = _Stalls.of(stage, mine, traffic, network)
    chunks = _predict_chunks(stage, mine, stalls, network)
    exchanging_s = stage.exchange_s
    return StagePrediction(
        compute_s=stage.compute_s - exchanging_s,
        communication_s=exchanging_s + sum(network.of_turns.values()),
        sync_s=exposed_sync_s(stage, mine, waits=[network.of_layers, stalls.within]),
        recompute_s=sum(plan.recompute_s(layer) for plan, layer in zip(mine, stage.layers, strict=True)),
        coding_s=_coding_s(stage, mine),
        forward_s=sum(chunk.forward_s for chunk in chunks),
        stall_d2h_s=stalls.d2h_s,
        stall_disk_write_s=stalls.disk_write_s,
        stall_h2d_s=stalls.h2d_s,
        stall_disk_read_s=stalls.disk_read_s,
        peak_device_bytes=stage_memory(stage, plans).nbytes if peaks else 0,
        peak_host_bytes=round(_most(stage, host)) if peaks else 0,
        peak_disk_bytes=round(_most(stage, disk)) if peaks else 0,
        disk_written_bytes=round(stage.pipeline.microbatches * sum(disk)),
        chunks=tuple(chunks) if len(chunks) > 1 else None,
    )


def _coding_s(stage: StageView, plans: Sequence[LayerPlan]) -> float | None:
    """Seconds of coding and decoding in a microbatch; None without a codec."""
    if stage.problem.profile.codec is None:
        return None
    seconds = 0.0
    for chunk, own in enumerate(stage.numbers):
        times = 2 if stage.splits(chunk) else 1
        for number in own:
            encode_s, decode_s = plans[number].coding_s(stage.layers[number])
            seconds += encode_s + times * decode_s
    return seconds


def _most(stage: StageView, nbytes: Sequence[float]) -> float:
    """Peak bytes of all microbatches in flight; `nbytes` are of the stage's layers."""
    of_chunks = [nbytes[own.start : own.stop] for own in stage.numbers]
    return max(
        sum(count * sum(of_chunk) for count, of_chunk in zip(moment.held, of_chunks, strict=True))
        - of_chunks[moment.chunk][-1]  # leaves beside the next forward
        for moment in stage.pipeline.moments(stage.number)
        if moment.kind is Pass.FORWARD
    )


@dataclasses.dataclass(slots=True)
class _Stalls:
    """Stalls of one microbatch, by cause and by the turn that waits."""

    d2h_s: float = 0.0
    disk_write_s: float = 0.0
    h2d_s: float = 0.0
    disk_read_s: float = 0.0
    of_turns: dict[tuple[int, Pass], float] = dataclasses.field(default_factory=dict)
    within: dict[tuple[int, Pass], float] = dataclasses.field(default_factory=dict)
    """Seconds by layer that runs meanwhile, and kind of its pass; without those between two passes."""

    @classmethod
    def of(
        cls, stage: StageView, plans: Sequence[LayerPlan], traffic: Sequence[Traffic], network: ExposedCommunication
    ) -> _Stalls:
        """Computes the stalls of a stage under these plans of its layers."""
        rates, layers, found = stage.machine.lanes, stage.layers, cls()
        if not any(moved.host_bytes or moved.disk_bytes for moved in traffic):
            return found
        for window in copies_out(stage):
            late_s, by_link = _late(window, traffic[window.moving].out_s(rates), layers, plans, network)
            found._wait(window, late_s, "d2h_s" if by_link else "disk_write_s")
        for window in copies_in(stage):
            late_s, by_link = _late(window, traffic[window.moving].in_s(rates), layers, plans, network)
            found._wait(window, late_s, "h2d_s" if by_link else "disk_read_s")
        return found

    def _wait(self, window: Window, seconds: float, cause: str) -> None:
        if seconds > 0:
            if window.within and window.hidden_by is not None:
                self.within[window.hidden_by, window.kind] = seconds
            setattr(self, cause, getattr(self, cause) + seconds)
            self.of_turns[window.waits] = self.of_turns.get(window.waits, 0.0) + seconds


def _late(
    window: Window,
    copy_s: tuple[float, float],
    layers: Sequence[LayerProfile],
    plans: Sequence[LayerPlan],
    network: ExposedCommunication,
) -> tuple[float, bool]:
    """Seconds by which a copy exceeds its window, and whether the link (not the disk) is slowest."""
    room_s = 0.0
    if window.hidden_by is not None:
        room_s = work_s(layers[window.hidden_by], plans[window.hidden_by], window.kind)
        room_s += network.of_layers[window.hidden_by, window.kind]
    link_s, disk_s = copy_s
    return window.times * (max(link_s, disk_s) - room_s), link_s >= disk_s


def _predict_chunks(
    stage: StageView, plans: Sequence[LayerPlan], stalls: _Stalls, network: ExposedCommunication
) -> list[ChunkPrediction]:
    found = []
    for chunk, own in enumerate(stage.numbers):
        forward_s = backward_s = recompute_s = decode_s = 0.0
        for number in own:
            layer, plan, ends_s = stage.layers[number], plans[number], stage.ends_s(stage.indices[number])
            forward_s += layer.forward_s + ends_s[0]
            backward_s += layer.backward_s + ends_s[1]
            recompute_s += plan.recompute_s(layer)
            coding_s = plan.coding_s(layer)
            forward_s, decode_s = forward_s + coding_s[0], decode_s + coding_s[1]
        half = 0.5 if stage.splits(chunk) else 1.0
        waits = {
            kind: stalls.of_turns.get((chunk, kind), 0.0) + network.of_turns.get((chunk, kind), 0.0) for kind in Pass
        }
        found.append(
            ChunkPrediction(
                forward_s=forward_s + waits[Pass.FORWARD],
                backward_s=half * backward_s + recompute_s + decode_s + waits[Pass.BACKWARD] + waits[Pass.INPUT],
                weight_s=(1 - half) * backward_s + (decode_s if half < 1 else 0.0) + waits[Pass.WEIGHT],
            )
        )
    return found


def _time(nbytes: float, bytes_per_s: float) -> float:
    if nbytes <= 0:
        return 0.0
    if not bytes_per_s:
        raise PlanError(f"the plan moves {format_bytes(nbytes)} over a link that has no bandwidth")
    return nbytes / bytes_per_s
