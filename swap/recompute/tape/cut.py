"""The cut: which contents of a recorded forward are kept, and which operations backward replays to make the others.

Owns the problem as plain numbers, its exact solution for one price of time, and the curve over all prices. Knows no
tensor, no operator and no device, and imports no torch. Costs are integers and every comparison is exact, so that equal
problems have equal cuts on every machine.

Note: the network

Whoever wants a content either keeps it or runs the operation that makes it; who runs an operation wants what it reads.
Let an operation be on the source's side of a network if it is run. Then the cheapest choice is a minimum cut:

    source ──keep──▶ operation      of a content that is wanted anyway, to the operation that makes it
    reader ──keep──▶ operation      of a content that this reader alone wants if it runs
    reader ───∞────▶ content ──keep──▶ operation     of a content that several readers share: it is kept once
    operation ──replay──▶ sink      and, of a content that nothing can make: ──keep──▶ sink

Minimum cuts form a lattice. The one found is the smallest: what the source still reaches once the flow is maximal. It
runs a subset of what every other minimum cut runs, so at equal cost it replays least, and it is unique whatever the order
of the search. While time gets cheaper these smallest cuts only grow, so between two cuts of the curve only the
operations that one runs and the other does not are open.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

_SOURCE, _SINK = 0, 1
_NOTHING = -1
"""In place of an operation, where none makes a content."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CutNode:
    """What a storage holds between two writes."""

    keep: int | None
    """Bits that keeping it costs; None: it cannot be kept."""
    made_by: int | None
    """Index of the operation that writes it; None: no operation does."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A recorded operator, or several that are only replayed together. It is paid once for all that it writes."""

    cost: int | None
    """What replaying it costs, in picoseconds; None: it is never repeated."""
    reads: tuple[int, ...]
    """Indices of the contents it needs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CutProblem:
    """A record reduced to what the choice depends on.

    Raises:
        ValueError: a cost is negative, an index names nothing, or an operation reads what was not yet written.
    """

    contents: Sequence[CutNode]
    operations: Sequence[Operation]
    """In the order in which they ran."""
    wanted: Collection[int]
    """Contents that backward asks for."""

    def __post_init__(self) -> None:
        contents, operations = self.contents, self.operations
        for index, content in enumerate(contents):
            if content.keep is not None and content.keep < 0:
                raise ValueError(f"content {index}: keeping it costs {content.keep} bits")
            if content.made_by is not None and not 0 <= content.made_by < len(operations):
                raise ValueError(f"content {index}: there is no operation {content.made_by}")
        for index, operation in enumerate(operations):
            if operation.cost is not None and operation.cost < 0:
                raise ValueError(f"operation {index}: replaying it costs {operation.cost} ps")
            for read in operation.reads:
                if not 0 <= read < len(contents):
                    raise ValueError(f"operation {index}: there is no content {read}")
                maker = contents[read].made_by
                if maker is not None and maker >= index:
                    raise ValueError(
                        f"operation {index} reads content {read}, which operation {maker} writes only then"
                    )
        for index in self.wanted:
            if not 0 <= index < len(contents):
                raise ValueError(f"there is no content {index} that could be wanted")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A choice, with its two costs. What is needed is either kept or written by an operation that is replayed."""

    kept: frozenset[int]
    """Contents that are needed and kept."""
    replayed: frozenset[int]
    """Operations that backward runs."""
    keep_cost: int
    """Bits of all that is kept."""
    replay_cost: int
    """Picoseconds of all that is replayed."""


def cheapest(problem: CutProblem, bits_weight: int, time_weight: int) -> Cut:
    """Finds the cut of least `bits_weight * keep_cost + time_weight * replay_cost`.

    Of several it is the one that replays a subset of what the others replay. A weight of 0 leaves that cost to decide
    among the cuts that are best by the other.

    Raises:
        ValueError: a weight is negative or both are 0, or a content that is needed can neither be kept nor replayed.
    """
    if min(bits_weight, time_weight) < 0 or bits_weight == time_weight == 0:
        raise ValueError(f"weights of bits and time: {bits_weight} and {time_weight}")
    search = _Search(problem)
    if not bits_weight:
        return search.least_time()
    return search.cheapest(search.nothing_run, search.operations, bits_weight, time_weight)


def curve(problem: CutProblem) -> tuple[Cut, ...]:
    """Finds the corners of the convex hull of all cuts by their two costs.

    Returns:
        The cuts at the corners, from the least replayed to the least kept; between two neighbours nothing lies below
        their line. The first has the fewest bits among those of least time, the last the least time among those of
        fewest bits; they may be one.

    Raises:
        ValueError: a content that is needed can neither be kept nor replayed.
    """
    search = _Search(problem)
    corners = [search.least_time()]
    ahead = [search.cheapest(corners[-1], search.operations, 1, 0)]
    if ahead[-1].keep_cost == corners[-1].keep_cost:
        return tuple(corners)
    while ahead:
        corner = search.below(corners[-1], ahead[-1])
        if corner is None:
            corners.append(ahead.pop())
        else:
            ahead.append(corner)
    return tuple(corners)


class _Search:
    """A problem prepared for many cuts: only what can be replayed and may be needed is left of it."""

    def __init__(self, problem: CutProblem) -> None:
        self._keep = [content.keep for content in problem.contents]
        self._cost = [operation.cost for operation in problem.operations]
        self._reads = [operation.reads for operation in problem.operations]
        self._maker = self._makers(problem.contents)
        for content in sorted(problem.wanted):
            if self._keep[content] is None and self._maker[content] == _NOTHING:
                raise ValueError(f"content {content} is needed, and can be neither kept nor recomputed")
        self._all_bits = sum(keep or 0 for keep in self._keep)
        self._all_time = sum(cost or 0 for cost in self._cost)
        self.nothing_run = self._cut(frozenset(problem.wanted), frozenset())
        self.operations = self._reached(problem.wanted)

    def _makers(self, contents: Sequence[CutNode]) -> list[int]:
        """For each content the operation that makes it, if that can run: it is not banned, and can have what it reads."""
        makers = [_NOTHING if content.made_by is None else content.made_by for content in contents]
        runs = [False] * (len(self._reads) + 1)  # the last stays so: it is read as that of _NOTHING
        for operation, reads in enumerate(self._reads):
            runs[operation] = self._cost[operation] is not None and all(
                self._keep[read] is not None or runs[makers[read]] for read in reads
            )
        return [maker if runs[maker] else _NOTHING for maker in makers]

    def _reached(self, wanted: Collection[int]) -> list[int]:
        """The operations that may have to run for these contents, in the order of the record."""
        found: set[int] = set()
        open_contents = list(wanted)
        while open_contents:
            maker = self._maker[open_contents.pop()]
            if maker != _NOTHING and maker not in found:
                found.add(maker)
                open_contents += self._reads[maker]
        return sorted(found)

    def _cut(self, kept: frozenset[int], replayed: frozenset[int]) -> Cut:
        return Cut(
            kept=kept,
            replayed=replayed,
            keep_cost=sum(self._keep[content] or 0 for content in kept),
            replay_cost=sum(self._cost[operation] or 0 for operation in replayed),
        )

    def least_time(self) -> Cut:
        """Fewest bits among the cuts of least time: a picosecond weighs more than all bits."""
        return self.cheapest(self.nothing_run, self.operations, 1, self._all_bits + 1)

    def below(self, left: Cut, right: Cut) -> Cut | None:
        """The lowest corner under the line through two corners; None where nothing lies below it."""
        bits_weight = right.replay_cost - left.replay_cost
        time_weight = left.keep_cost - right.keep_cost
        between = sorted(right.replayed - left.replayed)
        if len(between) < 2:
            return None
        found = self.cheapest(left, between, bits_weight, time_weight)
        gain = bits_weight * (left.keep_cost - found.keep_cost) + time_weight * (left.replay_cost - found.replay_cost)
        return found if gain > 0 else None

    def cheapest(self, start: Cut, between: Sequence[int], bits_weight: int, time_weight: int) -> Cut:
        """The cheapest cut that replays what `start` does, and of other operations only some of `between`."""
        numbers = {operation: number for number, operation in enumerate(between, 2)}
        reached = self._network(start, numbers, bits_weight, time_weight).source_side()
        run = [operation for operation, number in numbers.items() if reached[number]]
        replayed = start.replayed.union(run)
        needed = start.kept.union(*(self._reads[operation] for operation in run))
        return self._cut(frozenset(content for content in needed if self._maker[content] not in replayed), replayed)

    def _network(self, start: Cut, numbers: dict[int, int], bits_weight: int, time_weight: int) -> _Network:
        """The network of the module's note, whose operations have these numbers; what `start` runs is its source."""
        network = _Network(2 + len(numbers))
        never = 1 + bits_weight * self._all_bits + time_weight * self._all_time  # more than any cut
        readers: dict[int, list[int]] = {}
        for operation, number in numbers.items():
            network.join(number, _SINK, (self._cost[operation] or 0) * time_weight)
            for read in self._reads[operation]:
                if read not in start.kept and self._maker[read] not in start.replayed:
                    readers.setdefault(read, []).append(number)
        for content in start.kept:
            number = numbers.get(self._maker[content], _SINK)
            if number != _SINK:
                readers[content] = [_SOURCE]
        for content, wanting in readers.items():
            keep = self._keep[content]
            room = never if keep is None else keep * bits_weight
            tail, head = wanting[0], numbers.get(self._maker[content], _SINK)
            if len(wanting) > 1 and room:
                tail = network.node(before=head)
                for number in wanting:
                    network.join(number, tail, never)
            network.join(tail, head, room)
        return network


class _Network:
    """A flow network with integer capacities, for its smallest minimum cut by Dinic's algorithm.

    Arcs lie in pairs: arc `e ^ 1` leads back over arc `e` and has as much room as flows over `e`.
    """

    def __init__(self, nodes: int) -> None:
        self._arcs: list[list[int]] = [[] for _ in range(nodes)]
        self._places = [-2 * number for number in range(nodes)]
        """Rising along every arc."""
        self._places[_SOURCE], self._places[_SINK] = -2 * nodes, 0
        self._heads: list[int] = []
        self._rooms: list[int] = []

    def node(self, *, before: int) -> int:
        """Adds a node for arcs to another one; returns its number."""
        self._arcs.append([])
        self._places.append(self._places[before] - 1)
        return len(self._arcs) - 1

    def join(self, tail: int, head: int, room: int) -> None:
        """Adds an arc, unless nothing could flow over it."""
        if room:
            self._arcs[tail].append(len(self._heads))
            self._arcs[head].append(len(self._heads) + 1)
            self._heads += (head, tail)
            self._rooms += (room, 0)

    def source_side(self) -> list[bool]:
        """Makes the flow maximal; returns for each node whether the source still reaches it.

        The first round is not bound to shortest paths, but to the order of the record; that fills a long chain at once.
        """
        self._fill(self._places)
        while True:
            depths = self._depths()
            if depths[_SINK] < 0:
                return [depth >= 0 for depth in depths]
            self._fill(depths)

    def _depths(self) -> list[int]:
        """Arcs with room from the source to each node; -1: none lead there."""
        depths = [-1] * len(self._arcs)
        depths[_SOURCE] = 0
        queue = [_SOURCE]
        for node in queue:
            for arc in self._arcs[node]:
                head = self._heads[arc]
                if depths[head] < 0 and self._rooms[arc]:
                    depths[head] = depths[node] + 1
                    queue.append(head)
        return depths

    def _fill(self, depths: list[int]) -> None:
        """Sends flow along arcs that lead deeper until each such path has a full arc."""
        arcs, heads, rooms = self._arcs, self._heads, self._rooms
        tried = [0] * len(arcs)
        path: list[int] = []
        node = _SOURCE
        while True:
            if node == _SINK:
                node = self._send(path)
            out, depth = arcs[node], depths[node]
            at = tried[node]
            while at < len(out) and not (rooms[out[at]] and depths[heads[out[at]]] > depth):
                at += 1
            tried[node] = at
            if at < len(out):
                path.append(out[at])
                node = heads[out[at]]
            elif path:
                node = heads[path.pop() ^ 1]
                tried[node] += 1
            else:
                return

    def _send(self, path: list[int]) -> int:
        """Fills a path to the sink and shortens it to before its first full arc; returns the node where it then ends."""
        rooms = self._rooms
        flow = min(rooms[arc] for arc in path)
        for arc in path:
            rooms[arc] -= flow
            rooms[arc ^ 1] += flow
        full = next(at for at, arc in enumerate(path) if not rooms[arc])
        node = self._heads[path[full] ^ 1]
        del path[full:]
        return node
