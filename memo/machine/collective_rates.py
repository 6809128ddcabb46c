"""Rates of collectives among the ranks of a job: all-gather, reduce-scatter, all-to-all and messages, over sizes.

Measured for the ranks of each node by themselves, all nodes at the same time, and for all ranks where they are on several
nodes. To the times of each a line is fitted, a latency and a rate, which `memo.mip.inputs.doctor_rates` reads.

    size       1 KiB, 4 KiB, ... until a call takes too long or needs too much memory
    round      calls one after the other, as in training; its time is that of the slowest rank
    time       median of the rounds, a call
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from memo.machine.node_share import host_name
from memo.swap import available_host_bytes

SMALLEST_BYTES = 1 << 10
LARGEST_BYTES = 1 << 30
MOST_BYTES_PER_S = 1e15
FACTOR = 4
"""Ratio of each size to the one before."""
ROUNDS, FEWEST_ROUNDS = 7, 3
_MOST_CALLS = 1000  # in a round
_SLOWEST = 0.5  # of a collective's time may pass in the rounds of its largest size
_CLIPPED = (
    0.25  # logarithm of a ratio beyond which a time counts less: a host may be busy, and protocols change with size
)
_FRACTION = 1e-6  # of a time below which its fitted one counts as that
_FITTINGS = 50
# torch 2.13 has new names for these, and warns about the old ones.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """Time of a collective of one size."""

    message_bytes: int
    """Result of an all-gather on each rank, operand of a reduce-scatter or an all-to-all on each rank, or one message."""
    median_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFit:
    """Times of one collective among some ranks, and the line through them."""

    collective: str
    """`all_gather`, `reduce_scatter`, `all_to_all` or `send`."""
    within_node: bool
    """Whether its ranks are those of one node."""
    ranks: int
    nodes: int
    ranks_per_node: int
    """On the node with most of them."""
    fewest_ranks_per_node: int
    times: list[CollectiveTime]
    latency_s: float
    bytes_per_s: float
    """The time of n bytes is `latency_s` + n / `bytes_per_s`."""
    typical_error: float
    """Median over the sizes of how far the line is off, as a fraction of the time."""
    largest_error: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRates:
    """Result of `measure_collectives`."""

    world_size: int
    backend: str
    fits: list[CollectiveFit]
    problems: list[str]
    """Collectives that the backend does not have, with its words."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Ranks:
    """Ranks that a collective is measured among, of which this process is one."""

    group: dist.ProcessGroup
    nodes: list[int]
    """Node of each."""
    partner: int | None
    """Rank with which this one exchanges messages; None: it waits."""
    sends_first: bool

    @property
    def counts(self) -> list[int]:
        return [self.nodes.count(node) for node in sorted(set(self.nodes))]


def measure_collectives(
    device: torch.device, *, seconds: float = 0.0, sizes: Sequence[int] = (), node: str | None = None
) -> CollectiveRates:
    """Measures collectives. Every rank of the default process group must call it.

    Args:
        device: device of this rank, which the group has a backend for.
        seconds: length of one measurement: four for the ranks of a node, four more where there are several nodes.
        sizes: bytes of the messages, each measured in FEWEST_ROUNDS calls however long they take; none: as many as fit
            into `seconds`.
        node: name of this rank's node; None: the host's.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    names: list[str] = [""] * world
    dist.all_gather_object(names, node or host_name())
    numbers = [sorted(set(names), key=names.index).index(name) for name in names]
    fits, problems = [], []
    for within in (True, False):
        ranks = _ranks_of_nodes(numbers, rank) if within else _all_ranks(numbers, rank)
        if ranks is None:
            continue
        for collective in _CALLS:
            try:
                times = _times(collective, ranks, device, seconds, sizes)
            except RuntimeError as error:  # not in this version of the backend, on all ranks alike
                problems.append(f"{collective}: {str(error).splitlines()[0][:200]}")
                continue
            fits.append(_fit(collective, ranks, times, within=within))
        if ranks.group is not dist.group.WORLD:
            dist.destroy_process_group(ranks.group)
    return CollectiveRates(world_size=world, backend=_backend(device), fits=fits, problems=problems)


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _ranks_of_nodes(nodes: Sequence[int], rank: int) -> _Ranks | None:
    """Ranks of this node; None where a node has a single one, since all nodes measure together."""
    members = [[r for r, node in enumerate(nodes) if node == number] for number in sorted(set(nodes))]
    if min(map(len, members)) < 2:
        return None
    groups = [dist.new_group(each) for each in members] if len(members) > 1 else [dist.group.WORLD]
    here = members[nodes[rank]]
    index = here.index(rank) ^ 1  # neighbours in pairs; the last of an odd number waits
    return _Ranks(
        groups[nodes[rank]],  # type: ignore[arg-type]
        [nodes[rank]] * len(here),
        here[index] if index < len(here) else None,
        sends_first=here.index(rank) % 2 == 0,
    )


def _all_ranks(nodes: Sequence[int], rank: int) -> _Ranks | None:
    """All ranks; None where they are on one node."""
    if len(set(nodes)) < 2:
        return None
    members = [[r for r, node in enumerate(nodes) if node == number] for number in sorted(set(nodes))]
    place, neighbour = members[nodes[rank]].index(rank), nodes[rank] ^ 1
    beyond = members[neighbour] if neighbour < len(members) else []
    return _Ranks(
        dist.group.WORLD,  # type: ignore[arg-type]
        list(nodes),
        beyond[place] if place < len(beyond) else None,
        sends_first=nodes[rank] % 2 == 0,
    )


def _times(
    collective: str, ranks: _Ranks, device: torch.device, seconds: float, sizes: Sequence[int]
) -> list[CollectiveTime]:
    """Median times over sizes, the same on all ranks."""
    times: list[CollectiveTime] = []
    most = min(LARGEST_BYTES, _largest_bytes(device))
    begin = time.perf_counter()
    every = itertools.takewhile(lambda nbytes: nbytes <= most, (SMALLEST_BYTES * FACTOR**k for k in itertools.count()))
    parts = 1 if collective == "send" else len(ranks.nodes)
    for nbytes in sizes or every:
        share = max(nbytes // 4 // parts, 1)
        call = _CALLS[collective](ranks, share, device)
        if not (sizes and times):
            _slowest([_round(call, 1, device)], device)  # connects ranks that have not met
        calls, count = 1, FEWEST_ROUNDS
        if not sizes:
            (once,) = _slowest([_round(call, 1, device)], device)
            left = seconds - _slowest([time.perf_counter() - begin], device)[0]
            if times and once * FEWEST_ROUNDS > _SLOWEST * left:
                break
            # Leaves time for the large sizes, which take it for a round of one call.
            calls = min(max(int(seconds / 25 / ROUNDS / max(once, 1e-7)), 1), _MOST_CALLS)
            count = ROUNDS if calls > 1 else FEWEST_ROUNDS
        rounds = _slowest([_round(call, calls, device) for _ in range(count)], device)
        times.append(CollectiveTime(message_bytes=4 * share * parts, median_s=statistics.median(rounds) / calls))
    return times


def _largest_bytes(device: torch.device) -> int:
    """An eighth of the smallest free memory of any rank, of its own on a GPU, of its part of the host's else."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = available_host_bytes() // dist.get_world_size()
    return int(-_slowest([-float(free // 8)], device)[0])


def _round(call: Callable[[], None], calls: int, device: torch.device) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """Largest of each value over all ranks, which meet here."""
    together = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(together, op=dist.ReduceOp.MAX)
    found: list[float] = together.tolist()
    return found


def _all_gather(ranks: _Ranks, share: int, device: torch.device) -> Callable[[], None]:
    whole, part = _floats(share * len(ranks.nodes), device), _floats(share, device)
    return lambda: _ignore(_gather(whole, part, group=ranks.group))


def _reduce_scatter(ranks: _Ranks, share: int, device: torch.device) -> Callable[[], None]:
    whole, part = _floats(share * len(ranks.nodes), device), _floats(share, device)
    return lambda: _ignore(_scatter(part, whole, group=ranks.group))


def _all_to_all(ranks: _Ranks, share: int, device: torch.device) -> Callable[[], None]:
    source, target = (_floats(share * len(ranks.nodes), device) for _ in range(2))
    return lambda: _ignore(dist.all_to_all_single(target, source, group=ranks.group))


def _send(ranks: _Ranks, share: int, device: torch.device) -> Callable[[], None]:
    """Two messages of `share`, there and back: a call is as long as both."""
    message = _floats(share, device)
    partner = ranks.partner
    if partner is None:
        return lambda: None
    first, second = (dist.send, dist.recv) if ranks.sends_first else (dist.recv, dist.send)

    def exchange() -> None:
        first(message, partner)
        second(message, partner)

    return exchange


def _floats(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float32, device=device)


def _ignore(work: object) -> None:
    del work


_CALLS: dict[str, Callable[[_Ranks, int, torch.device], Callable[[], None]]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _send,
}


def _fit(collective: str, ranks: _Ranks, times: list[CollectiveTime], *, within: bool) -> CollectiveFit:
    if collective == "send":
        times = [dataclasses.replace(each, median_s=each.median_s / 2) for each in times]
    latency, rate = fit_line([(each.message_bytes, each.median_s) for each in times])
    errors = [abs((latency + each.message_bytes / rate) / each.median_s - 1) for each in times]
    counts = ranks.counts
    return CollectiveFit(
        collective=collective,
        within_node=within,
        ranks=len(ranks.nodes),
        nodes=len(counts),
        ranks_per_node=max(counts),
        fewest_ranks_per_node=min(counts),
        times=times,
        latency_s=latency,
        bytes_per_s=rate,
        typical_error=statistics.median(errors),
        largest_error=max(errors),
    )


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fits seconds = latency + nbytes / rate to (nbytes, seconds), by least squares of the logarithms of their ratios.

    Twice as long and half as long count alike, at each size. Neither result is negative, and outliers count less (Huber's
    weights).

    Returns:
        The latency in seconds and the rate in bytes per second, MOST_BYTES_PER_S if times do not grow.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    latency, pace = 0.0, 0.0
    for _ in range(_FITTINGS):
        latency, pace = _least_squares(points, weights)
        weights = [_weight(max(latency + pace * nbytes, _FRACTION * seconds), seconds) for nbytes, seconds in points]
    return latency, 1 / pace if pace * MOST_BYTES_PER_S > 1 else MOST_BYTES_PER_S


def _weight(fitted: float, seconds: float) -> float:
    """Weight of a squared difference whose slope is that of the squared logarithm."""
    off = math.log(fitted / seconds)
    ratio = off / (fitted - seconds) if abs(off) > 1e-9 else 1 / seconds
    return ratio / fitted * min(_CLIPPED / abs(off), 1.0) if off else ratio / fitted


def _least_squares(points: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope, neither negative."""
    one = sum(weights)
    x = sum(w * n for w, (n, _) in zip(weights, points, strict=True))
    xx = sum(w * n * n for w, (n, _) in zip(weights, points, strict=True))
    y = sum(w * t for w, (_, t) in zip(weights, points, strict=True))
    xy = sum(w * n * t for w, (n, t) in zip(weights, points, strict=True))
    determinant = one * xx - x * x
    if determinant > 0:
        latency, slope = (y * xx - x * xy) / determinant, (one * xy - x * y) / determinant
        if latency >= 0 and slope >= 0:
            return latency, slope
    else:
        slope = 1.0
    return (y / one, 0.0) if slope < 0 else (0.0, xy / xx)
