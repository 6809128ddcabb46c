"""Plan of token ranges: of each storage the first tokens are kept, and the others are replayed, range by range.

    tokens        0              k1                k2              T
    moved         |  everything  |  of MATMULS     |  of ATTENTION  |
    replayed                     |  span of MATMULS | span of ATTENTION |      in pieces of tokens, the last ones first

A span is a cut of its own, in which steps that mix tokens are never repeated (rows.py), and the same generated code as a
plan's, over the parts of the storages that those tokens have. What mixes tokens is kept. A plan of ranges holds no tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from memo.swap.recompute.ranges.rows import TokenRows
from memo.swap.recompute.tape.bans import groups_of
from memo.swap.recompute.tape.cut import Cut, cheapest
from memo.swap.recompute.tape.log import Geometry
from memo.swap.recompute.tape.plan import Plan, Sources, Writer, mask_of, plan_of, problem_of
from memo.swap.recompute.tape.tape import Step
from memo.swap.token_levels import LEAST_TOKENS, Level, tile_of

__all__ = ["Piece", "RangedPlan", "Span", "kept_nbytes_of", "ranged_costs_of", "ranged_plan_of"]

STEP_S = 2e-5
"""Seconds that a step takes which has next to nothing to do; each piece runs all steps."""

Bans = Callable[[Level], Collection[int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that are replayed at once."""

    first: int
    stop: int


class Span:
    """The tokens from `first` to `stop`, which are replayed by one cut.

    Args:
        rows: of the tape.
        cut: what is kept for them, and which steps run again.
        sources: what can be kept.
        wanted: storages that the span may give.
        first: first token.
        stop: token after the last.
        piece: most tokens that are replayed at once; None: all of them. Of fewer than two of LEAST_TOKENS a piece may have
            up to one more.
    """

    def __init__(
        self,
        rows: TokenRows,
        cut: Cut,
        sources: Sources,
        wanted: Iterable[int],
        *,
        first: int,
        stop: int,
        piece: int | None,
    ) -> None:
        self.rows = rows
        self.cut = cut
        self.first = first
        self.stop = stop
        self.sources = sources
        self._candidates = tuple(wanted)
        self._plans: dict[tuple[int, int], Plan] = {}
        self._is_shifted = not rows.shifted.isdisjoint(cut.replayed)
        self.piece = stop - first if piece is None else min(stop - first, piece)

    @property
    def wanted(self) -> tuple[int, ...]:
        """Storages that it gives."""
        return self.plan.wanted

    @property
    def plan(self) -> Plan:
        """The plan of the span as one piece."""
        return self.plan_for(self.stop - self.first, self.first)

    @property
    def held_bytes(self) -> int:
        """Most bytes that a replay of one piece holds at once beside what is kept, and beside where its results go."""
        return max(self.plan_for(piece.stop - piece.first, piece.first).held_bytes for piece in self.pieces)

    @property
    def pieces(self) -> list[Piece]:
        """The last tokens first. None has fewer than LEAST_TOKENS, as far as the span has them."""
        found, stop, tile = [], self.stop, tile_of(self.rows.tokens)
        while stop > self.first:
            first = -(-max(self.first, stop - self.piece) // tile) * tile
            if stop - first < LEAST_TOKENS:
                first = (stop - LEAST_TOKENS) // tile * tile
            if 0 < first - self.first < LEAST_TOKENS:  # the rest has as many, if this piece can spare them
                first = self.first + -(-LEAST_TOKENS // tile) * tile
            if stop - first < LEAST_TOKENS or first < self.first:
                first = self.first
            found.append(Piece(first, stop))
            stop = first
        return found

    def plan_for(self, count: int, first: int = 0) -> Plan:
        """The plan of a piece of `count` tokens from `first` on, which few steps depend on."""
        key = count, first if self._is_shifted else 0
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _RangedWriter(self.rows, self.cut, self.sources, self._candidates, *key).plan()
        return plan

    def kept_nbytes(self) -> Iterator[tuple[int, int]]:
        """Content and bytes of each thing that is kept for the span besides what autograd saves, as it is packed."""
        return _besides(self.rows, self.plan, self.sources, self.stop - self.first)


def _besides(rows: TokenRows, plan: Plan, sources: Sources, count: int) -> Iterator[tuple[int, int]]:
    """Content and bytes of each thing that a plan of `count` tokens keeps besides what autograd saves."""
    tape = rows.tape
    for kept in plan.kept:
        if kept.storage in sources.free:
            continue
        if kept.bits_of >= 0:
            made = tape.steps[kept.bits_of].makes
            content = next(content for content in made if tape.contents[content].storage == kept.storage)
            use = mask_of(tape, content)
            assert use is not None
            yield content, -(-tape.geometry(use.value)[2].numel() * count // rows.tokens // 8)
        elif kept.storage not in tape.saved_storages:
            yield tape.last[kept.storage], rows.nbytes(tape.last[kept.storage], count)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RangedPlan:
    """What is moved, kept and replayed of the calls with one log.

    Args:
        rows: of the tape.
        replays: in the order in which they run: what is the same for all tokens, then the ranges, the last tokens first.
        heads: storage -> position of its last replay to run, tokens that move.
        kept_nbytes: content, and bytes of it that are kept, for all that moves or stays for backward.
        deviation: largest difference that its trial found, in units of its bound.
        wrong: as a Plan's; a plan of ranges of which a trial finds a step wrong is not used.
    """

    rows: TokenRows
    replays: tuple[Span | Plan, ...]
    heads: Mapping[int, tuple[int, int]]
    kept_nbytes: tuple[tuple[int, int], ...]
    deviation: float = 0.0
    wrong: frozenset[int] = frozenset()

    @property
    def spans(self) -> tuple[Span, ...]:
        """Replays of ranges of tokens."""
        return tuple(replay for replay in self.replays if isinstance(replay, Span))

    @property
    def wholes(self) -> tuple[Plan, ...]:
        """Replays of what is not divided."""
        return tuple(replay for replay in self.replays if isinstance(replay, Plan))

    @property
    def divided(self) -> tuple[int, ...]:
        """Storages of which the first tokens move and the others are replayed."""
        return tuple(storage for storage, (at, _) in self.heads.items() if isinstance(self.replays[at], Span))

    @property
    def divided_nbytes(self) -> int:
        """Bytes of all tokens of `divided`."""
        return sum(self.rows.tape.storages[storage][1] for storage in self.divided)

    @property
    def never(self) -> Mapping[int, str]:
        """Steps that no replay repeats because they mix tokens, and why."""
        return self.rows.mixes

    @property
    def holds(self) -> Mapping[int, tuple[Any, tuple[int, ...], bool]]:
        """What the recorder of the next call must hold."""
        found: dict[int, tuple[Any, tuple[int, ...], bool]] = {}
        for plan in self._plans:
            for maker, (operator, positions, as_bits) in plan.holds.items():
                others = found[maker][1] if maker in found else ()
                found[maker] = operator, tuple(dict.fromkeys((*others, *positions))), as_bits
        return found

    @property
    def steps(self) -> frozenset[int]:
        """Numbers of the steps that run again."""
        return frozenset(number for plan in self._plans for number in plan.steps)

    @property
    def divided_steps(self) -> frozenset[int]:
        """Steps that run again on a part of the tokens."""
        return frozenset(number for span in self.spans for number in span.cut.replayed)

    @property
    def form(self) -> tuple[Any, ...]:
        """What must be equal on all ranks that take part in the replays."""
        return self.rows.tokens, *((piece.first, piece.stop) for span in self.spans for piece in span.pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(nbytes for _, nbytes in self.kept_nbytes)

    @property
    def cost(self) -> int:
        """Derived, in picoseconds."""
        tokens = self.rows.tokens
        spans = sum(span.cut.replay_cost * (span.stop - span.first) // tokens for span in self.spans)
        return spans + sum(plan.cost for plan in self.wholes)

    @property
    def held_bytes(self) -> int:
        """Most bytes that a replay holds at once beside what is kept and what it gives."""
        return max((replay.held_bytes for replay in self.replays), default=0)

    @property
    def _plans(self) -> tuple[Plan, ...]:
        return tuple(replay.plan if isinstance(replay, Span) else replay for replay in self.replays)


def ranged_plan_of(
    rows: TokenRows,
    ends: tuple[int, int],
    bans: Bans,
    sources: Sources,
    wanted: Sequence[int],
    stuck: Sequence[int],
    *,
    piece: int | None = None,
    always: Iterable[int] = (),
) -> RangedPlan | None:
    """The plan of ranges that end at `ends`; None where nothing can be divided.

    Args:
        rows: of the tape.
        ends: of the ranges of which everything and of which matrix products are kept.
        bans: level -> steps that are never repeated.
        sources: what can be kept.
        wanted: storages that autograd saved, and which backward may replay.
        stuck: storages that autograd saved and that move in any case.
        piece: most tokens that are replayed at once; None: all of a range.
        always: steps that the last tokens repeat, needed or not.
    """
    planner = _Planner(rows, ends, bans, sources, piece, tuple(always))
    try:
        return planner.plan(wanted, stuck)
    except ValueError:  # a step that other ranks repeat cannot run
        return None


class _Planner:
    """Makes the replays of one plan."""

    def __init__(
        self,
        rows: TokenRows,
        ends: tuple[int, int],
        bans: Bans,
        sources: Sources,
        piece: int | None,
        always: tuple[int, ...],
    ) -> None:
        self._rows, self._tape, self._ends, self._bans = rows, rows.tape, ends, bans
        self._sources, self._piece, self._always = sources, piece, always
        self._replays: list[Span | Plan] = []
        self._heads: dict[int, tuple[int, int]] = {}

    def plan(self, wanted: Sequence[int], stuck: Sequence[int]) -> RangedPlan | None:
        rows, tape = self._rows, self._tape
        same = [storage for storage in wanted if tape.last[storage] in rows.same]
        others = [storage for storage in wanted if storage not in same]
        divided = [storage for storage in others if tape.last[storage] in rows.rows]
        moving = [*stuck, *(storage for storage in others if storage not in divided)]
        if same:
            self._add_same(same, moving, divided)
        self._add_spans(divided, [*moving, *(storage for storage in same if tape.last[storage] in rows.whole)])
        if not any(isinstance(replay, Span) for replay in self._replays):
            return None
        saved = [*wanted, *stuck]
        kept = tuple(kept_nbytes_of(rows, self._sources, self._replays, self._heads, saved))
        return RangedPlan(rows=rows, replays=tuple(self._replays), heads=self._heads, kept_nbytes=kept)

    def _add_same(self, same: Sequence[int], moving: Sequence[int], divided: Iterable[int]) -> None:
        """The replay of what is the same for all tokens, a cast weight or the keys; it reads nothing that comes later."""
        tape = self._tape
        undivided = dataclasses.replace(self._sources, lent=self._sources.lent.union(divided))
        talking = (step.number for step in tape.steps if "collective" in groups_of(step.operator))
        banned = {*self._bans(Level.SAVE_ATTENTION), *talking}
        cut = cheapest(problem_of(tape, banned, undivided, same, moving, tape.costs), 1, 0)
        plan = plan_of(tape, cut, undivided, same)
        if plan.wanted:
            self._heads.update((storage, (0, 0)) for storage in plan.wanted)
            self._replays.append(plan)

    def _add_spans(self, storages: Sequence[int], there: Sequence[int]) -> None:
        """The ranges of tokens."""
        rows, tape, given = self._rows, self._tape, set(storages)
        ranges = (
            (Level.SAVE_ATTENTION, self._ends[1], rows.tokens),
            (Level.SAVE_MATMULS, self._ends[0], self._ends[1]),
        )
        for level, first, stop in ranges:
            open_ = [storage for storage in storages if storage in given]
            if first >= stop:
                continue
            closed = [*there, *(storage for storage in storages if storage not in given)]
            banned = {*self._bans(level), *rows.mixes}
            repeated = self._always if level is Level.SAVE_ATTENTION else ()
            cut = cheapest(problem_of(tape, banned, self._sources, open_, closed, tape.costs, repeated), 1, 0)
            span = Span(rows, cut, self._sources, open_, first=first, stop=stop, piece=self._piece)
            if not span.wanted:
                break
            self._heads.update((storage, (len(self._replays), first)) for storage in span.wanted)
            self._replays.append(span)
            given &= set(span.wanted)


def ranged_costs_of(
    rows: TokenRows, bans: Bans, sources: Sources, wanted: Sequence[int], stuck: Sequence[int]
) -> dict[str, Any]:
    """Bytes of each level and seconds of a piece, by the names of LayerCosts."""
    tape, tokens = rows.tape, rows.tokens
    last, middle = (ranged_plan_of(rows, (0, end), bans, sources, wanted, stuck) for end in (0, tokens))
    assert last is not None
    divided = {storage: rows.rows[tape.last[storage]] for storage in last.divided}
    slices = _sliced(last)
    always = last.nbytes - slices
    each = sum(part.nbytes(1) for part in divided.values())
    gathered = sum(part.nbytes(1) for part in divided.values() if part.rows > 1)
    kept, held = float(each), 0.0
    if middle is not None:
        kept = (middle.nbytes - always) / tokens
        moving = [part for storage, part in divided.items() if storage not in middle.heads]
        held = _sliced(middle) / tokens + sum(part.nbytes(1) for part in moving if part.rows > 1)
    return {
        "always_bytes": always,
        "bytes_per_token": {
            Level.SAVE_ALL: each,
            Level.SAVE_MATMULS: kept,
            Level.SAVE_ATTENTION: slices / tokens,
        },
        "beside_per_token": {
            Level.SAVE_ALL: gathered,
            Level.SAVE_MATMULS: held,
            Level.SAVE_ATTENTION: slices / tokens,
        },
        "held_per_token": {
            Level.SAVE_MATMULS: 0.0 if middle is None else middle.spans[0].held_bytes / tokens,
            Level.SAVE_ATTENTION: last.spans[0].held_bytes / tokens,
        },
        "piece_s": STEP_S * len(last.spans[0].plan.steps),
    }


def _sliced(plan: RangedPlan) -> int:
    """Bytes that ranges keep of some tokens besides what autograd saves."""
    return sum(nbytes for span in plan.spans for content, nbytes in span.kept_nbytes() if content in plan.rows.rows)


def kept_nbytes_of(
    rows: TokenRows,
    sources: Sources,
    replays: Sequence[Span | Plan],
    heads: Mapping[int, tuple[int, int]],
    saved: Iterable[int],
) -> Iterator[tuple[int, int]]:
    """Content and bytes of each thing that moves or stays for backward, where autograd saved storages `saved`."""
    tape = rows.tape
    found: dict[int, int] = {}
    for storage in saved:
        at, first = heads.get(storage, (-1, 0))
        if at < 0:
            found[tape.last[storage]] = tape.storages[storage][1]
        elif isinstance(replays[at], Span):
            found[tape.last[storage]] = rows.nbytes(tape.last[storage], first)
    for replay in replays:
        besides = replay.kept_nbytes() if isinstance(replay, Span) else _besides(rows, replay, sources, rows.tokens)
        for content, nbytes in besides:
            found[content] = found.get(content, 0) + nbytes
    yield from found.items()


class _RangedWriter(Writer):
    """Writes the replay of `count` tokens of a span, from `first` on."""

    gives_memory = False

    def __init__(
        self, rows: TokenRows, cut: Cut, sources: Sources, wanted: Iterable[int], count: int, first: int
    ) -> None:
        super().__init__(rows.tape, cut, sources, wanted)
        self._token_rows = rows
        self._count = count
        self._first = first
        self.env.update(within=_within)

    def _geometry(self, value: int, content: int) -> Geometry:
        return self._token_rows.geometry(value, content, self._count)

    def _nbytes(self, content: int) -> int:
        return self._token_rows.nbytes(content, self._count)

    def _args(self, step: Step) -> Sequence[Any]:
        return self._token_rows.args_of(step, self._count, self._first)

    def _give(self, at: int, name: str) -> None:
        shown = self._shown[name]
        lies = "None" if shown is None else repr((shown[0], tuple(shown[1]), shown[2]))
        self._line(f"give({at}, {name}, {lies})")

    def _brings(self, content: int, name: str) -> None:
        rows = self._token_rows.rows.get(content)
        if rows is not None and rows.rows > 1:  # gathered, in memory of its own
            self._held[name] = rows.nbytes(self._count)


def _within(
    block: torch.Tensor, offset: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor of that geometry over the bytes of `block`, which may begin within a storage."""
    begin = block.storage_offset() * block.itemsize // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=block.device).set_(block.untyped_storage(), begin + offset, size, stride)
