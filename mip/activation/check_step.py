"""Checker's arithmetic for a stage of one chunk: one microbatch layer by layer, with a clock and a balance of bytes.

Shares no code with the planner. With one chunk, one microbatch stands for all of a step's; several chunks are walked
through turn by turn (`memo.mip.activation.check_pipeline`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memo.mip.activation.plan import ActivationPlan, LayerPlan
    from memo.mip.inputs.hardware import LaneRates
    from memo.mip.inputs.profile import EndProfile, LayerProfile

__all__ = [
    "Walk",
    "backward_transient_bytes",
    "coding_s",
    "copy_s",
    "is_divided",
    "moved",
    "recompute_s",
    "rounding_bytes",
    "saved_bytes",
    "sync_s",
    "waiting_bytes",
    "walk_microbatch",
    "whole_bytes",
]


@dataclasses.dataclass(slots=True, kw_only=True)
class Walk:
    """Time and bytes found on the walk through one stage; times are of one microbatch."""

    clock_s: float = 0.0
    recompute_s: float = 0.0
    communication_s: float = 0.0
    """Time in which compute waits for collectives."""
    sync_s: float = 0.0
    """Time after the last backward of a step until its gradients are reduced."""
    peak: float = 0.0
    peak_layer: int | None = None
    """None: the embedding or the head."""
    host: float = 0.0
    """Peak bytes in host memory."""
    disk: float = 0.0
    """Peak bytes on disk."""
    rounding: float = 0.0
    """Peak bytes that whole storages and pages may take of a tier beyond those."""
    written: float = 0.0
    """Bytes written to disk in one microbatch."""

    def runs(self, work_s: float, *, exchange_s: float = 0.0, network_s: float = 0.0, copy_s: float = 0.0) -> float:
        """Advances the clock by a layer's work, or by what its copies and collectives take longer; returns the seconds.

        Args:
            work_s: with the collectives that are a part of it.
            exchange_s: these.
            network_s: of other collectives that run meanwhile.
            copy_s: of a copy that runs meanwhile.
        """
        self.communication_s += exchange_s + max(network_s - work_s, 0.0)
        seconds = max(work_s, network_s, copy_s)
        self.clock_s += seconds
        return seconds

    def stands(self, nbytes: float, layer: int | None) -> None:
        """Records the bytes on the device while a layer runs."""
        if nbytes > self.peak:
            self.peak, self.peak_layer = nbytes, layer


def walk_microbatch(
    plan: ActivationPlan, first: int, last: int, *, flight: int, rates: LaneRates, message_bytes: int = 0
) -> Walk:
    """Walks forward and backward through layers `first` to `last`, with `flight` microbatches in flight.

    `message_bytes` stand all the time.
    """
    profile = plan.problem.profile
    known, starts, ends = profile.layer_profiles(), first == 0, last == len(plan.layers) - 1
    walk = Walk()
    others = (flight - 1) * sum(
        saved_bytes(known[i], plan.layers[i]) * plan.layers[i].kept for i in range(first, last + 1)
    )
    if flight > 1:  # the last layer of the latest forward has not moved yet
        others += (
            waiting_bytes(known[last], plan.layers[last])
            - saved_bytes(known[last], plan.layers[last]) * plan.layers[last].kept
        )
    held = message_bytes + others + sum(known[index].static_bytes for index in range(first, last + 1))
    if starts:
        held += profile.embedding.static_bytes + flight * profile.embedding.saved_bytes
    if ends:
        held += profile.head.static_bytes + (flight - 1) * profile.head.saved_bytes
    if starts:
        walk.stands(held + profile.embedding.transient_bytes, None)
        for seconds, exchange_s in _passes(profile.embedding):
            walk.runs(seconds, exchange_s=exchange_s)
    walk.runs(0.0, network_s=known[first].gather_s)
    out_s = 0.0
    for index in range(first, last + 1):
        layer = known[index]
        before = waiting_bytes(known[index - 1], plan.layers[index - 1]) if index > first else 0
        moving = max(layer.forward_transient_bytes, backward_transient_bytes(layer, plan.layers[index]))
        walk.stands(held + before + whole_bytes(layer, plan.layers[index]) + moving, index)
        if index > first:  # from here on the layer before has only its kept bytes
            held += saved_bytes(known[index - 1], plan.layers[index - 1]) * plan.layers[index - 1].kept
        gather_s = known[index + 1].gather_s if index < last else 0.0
        work_s = layer.forward_s + coding_s(layer, plan.layers[index])[0]
        walk.runs(work_s, exchange_s=layer.forward_exchange_s, network_s=gather_s, copy_s=out_s)
        host, disk = moved(layer, plan.layers[index])
        out_s = copy_s(host, disk, rates.d2h_bytes_per_s, rates.disk_write_bytes_per_s)
        walk.host += host
        walk.disk += disk
    if ends:
        stands = waiting_bytes(known[last], plan.layers[last]) + profile.head.saved_bytes + profile.head.transient_bytes
        walk.stands(held + stands, None)
        for seconds, exchange_s in _passes(profile.head):
            walk.runs(seconds, exchange_s=exchange_s)
    reduce_s = 0.0
    last_pass = [(profile.head.backward_s, profile.head.sync_s)] if ends else []
    for index in range(last, first - 1, -1):
        again_s = recompute_s(known[index], plan.layers[index])
        in_s = 0.0
        if index > first:
            host, disk = moved(known[index - 1], plan.layers[index - 1])
            in_s = copy_s(host, disk, rates.h2d_bytes_per_s, rates.disk_read_bytes_per_s)
        network_s = (known[index - 1].gather_s if index > first else 0.0) + reduce_s
        exchange_s, reduce_s = known[index].backward_exchange_s, known[index].reduce_s
        work_s = known[index].backward_s + again_s + coding_s(known[index], plan.layers[index])[1]
        seconds = walk.runs(work_s, exchange_s=exchange_s, network_s=network_s, copy_s=in_s)
        last_pass.append((seconds - network_s, known[index].sync_s))
        walk.recompute_s += again_s
    walk.runs(0.0, network_s=reduce_s)
    if starts:
        last_pass.append((profile.embedding.backward_s, profile.embedding.sync_s))
    walk.sync_s = sync_s(last_pass)
    walk.written = walk.disk
    walk.host *= flight
    walk.disk *= flight
    walk.rounding = flight * rounding_bytes(known[first:last], divided=is_divided(plan.layers[first:last]))
    return walk


def _passes(end: EndProfile) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of an end's two passes, each with those of its collectives."""
    return (end.forward_s, end.forward_exchange_s), (end.backward_s, end.backward_exchange_s)


def sync_s(steps: Sequence[tuple[float, float]]) -> float:
    """Seconds that reductions last beyond a pass; `steps` are of time on a free network and the reduction after it."""
    after = list(itertools.accumulate((work for work, _ in reversed(steps)), initial=0.0))[-2::-1]
    to_do = list(itertools.accumulate(seconds for _, seconds in reversed(steps)))[::-1]
    return max((reducing - working for reducing, working in zip(to_do, after, strict=True)), default=0.0)


def is_divided(plans: Sequence[LayerPlan]) -> bool:
    """Whether some layer goes to more than one tier."""
    return any(0 < max(plan.kept, plan.host, plan.disk) < 1 for plan in plans)


def rounding_bytes(known: Sequence[LayerProfile], *, divided: bool) -> float:
    """A page for each storage; and where some layer is divided, the largest storage, which goes to one tier whole."""
    largest = max((layer.largest_storage_bytes for layer in known), default=0)
    return sum(4096 * layer.storages for layer in known) + (largest if divided else 0)


def saved_bytes(layer: LayerProfile, plan: LayerPlan) -> float:
    """Bytes that a layer saves at the plan's points."""
    at = {point.name: point.saved_bytes for point in layer.points}
    return layer.always_bytes + layer.other_bytes + sum(at[name] * share for name, share in plan.points.items())


def whole_bytes(layer: LayerProfile, plan: LayerPlan) -> float:
    """Bytes of a layer while it runs: all that autograd saves, and where a part is recomputed the bytes beside."""
    given = {point.name: point.beside_bytes for point in layer.points}
    recomputed = any(share > 0 for name, share in plan.points.items() if name != "all")
    return layer.full_bytes + recomputed * sum(given[name] * share for name, share in plan.points.items())


def waiting_bytes(layer: LayerProfile, plan: LayerPlan) -> float:
    """Bytes of a layer right before and after it runs: whole if it can be divided, else without what it recomputes."""
    return whole_bytes(layer, plan) if layer.divisible else saved_bytes(layer, plan)


def backward_transient_bytes(layer: LayerProfile, plan: LayerPlan) -> float:
    """Peak bytes of a layer's backward, its recompute included, beside all that is saved."""
    held = {point.name: point.held_bytes for point in layer.points}
    at_once = [held[name] * min(share, plan.piece) for name, share in plan.points.items()]
    return layer.backward_transient_bytes + (max(at_once) if layer.divisible else sum(at_once))


def recompute_s(layer: LayerProfile, plan: LayerPlan) -> float:
    """Seconds of a layer's recompute: of each range its part of the point's, of pieces but its first, of dividing it."""
    again = {point.name: point.recompute_s for point in layer.points}
    seconds = layer.divided_s if sum(share > 0 for share in plan.points.values()) > 1 else 0.0
    for name, share in plan.points.items():
        seconds += again[name] * share
        if name != "all":
            seconds += layer.piece_s * max(0, int(share / plan.piece - 1e-6))
    return seconds


def moved(layer: LayerProfile, plan: LayerPlan) -> tuple[float, float]:
    """Bytes that a layer moves: (to the host, to the disk)."""
    moving = saved_bytes(layer, plan) - spared_bytes(layer, plan)
    return moving * plan.host, moving * plan.disk


def spared_bytes(layer: LayerProfile, plan: LayerPlan) -> float:
    """Bytes by which codes are fewer than what a layer saves; if a part is repeated, what all tokens have is no codes."""
    if layer.coding is None:
        return 0.0
    at = {point.name: point.spared_bytes or 0 for point in layer.points}
    there = [name for name in at if plan.points.get(name, 0) > 0]
    if there == ["all"]:
        return layer.coding.spared_bytes + at["all"]
    return sum(plan.points[name] * max(at[name] - at[there[-1]], 0) for name in there[:-1])


def coding_s(layer: LayerProfile, plan: LayerPlan) -> tuple[float, float]:
    """Seconds of coding and of decoding what a layer moves."""
    if layer.coding is None:
        return 0.0, 0.0
    most = layer.coding.spared_bytes + sum(point.spared_bytes or 0 for point in layer.points if point.name == "all")
    part = (plan.host + plan.disk) * spared_bytes(layer, plan) / most if most else 0.0
    return layer.coding.encode_s * part, layer.coding.decode_s * part


def copy_s(host: float, disk: float, link_rate: float, disk_rate: float) -> float:
    """Seconds of a copy: host and disk bytes share the link, each with half of it or its tier's rate."""
    if host + disk == 0:
        return 0.0
    disk_share = min(disk_rate, link_rate / 2) if host else min(disk_rate, link_rate)
    host_share = link_rate - disk_share if disk else link_rate
    first = min(host / host_share if host else 0.0, disk / disk_share if disk else 0.0) if host and disk else 0.0
    host, disk = host - first * host_share, disk - first * disk_share
    return first + max(host / link_rate if host > 0 else 0.0, disk / min(disk_rate, link_rate) if disk > 0 else 0.0)
