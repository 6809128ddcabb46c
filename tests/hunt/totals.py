"""Counts of a hunt, added up over the pieces that it ran in; the next piece goes on from the result file."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from tests.hunt.comparison import Find, Outcome
from tests.hunt.drawing import catalogued
from tests.hunt.levels import LEVELS
from tests.hunt.operators import sampled_names
from tests.hunt.program import Program

_MOST_REASONS = 20
"""Reasons that a result file names; the others are counted together."""
_OTHERS = "others"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A find, and the smallest program that shows it."""

    seed: int
    find: Find
    program: Program

    def __str__(self) -> str:
        lines = (f"seed {self.seed} at level {self.find.level!r}: {self.find.kind}", self.find.told, self.program.text)
        return "\n".join(lines)

    def body(self) -> dict[str, Any]:
        """Entry of the result file."""
        return {"seed": self.seed, **dataclasses.asdict(self.find), "text": self.program.text}


@dataclasses.dataclass(slots=True, kw_only=True)
class Piece:
    """Programs whose seeds follow each other, examined in one go."""

    commit: str
    torch: str
    seed: int
    """Of the first program."""
    levels_each: int
    programs: int = 0
    comparisons: int = 0
    finds: int = 0
    seconds: int = 0


@dataclasses.dataclass(slots=True)
class Totals:
    """Counts of a hunt over all its pieces; those by level have the level's name as key."""

    pieces: list[Piece] = dataclasses.field(default_factory=list)
    discarded: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    compared: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    to_the_end: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    moved: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    recomputed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    refused: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    whole: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    on_ranks: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Programs that ran on two ranks as well, by placement and level, and those discarded there."""
    statements: set[str] = dataclasses.field(default_factory=set)
    operators: set[str] = dataclasses.field(default_factory=set)
    finds: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Totals:
        """Totals that `body` wrote."""
        levels: Mapping[str, Mapping[str, int]] = body["levels"]

        def counted(what: str) -> collections.Counter[str]:
            return collections.Counter({name: row[what] for name, row in levels.items()})

        return cls(
            pieces=[Piece(**piece) for piece in body["pieces"]],
            discarded=collections.Counter(body["discarded_for"]),
            compared=counted("compared"),
            to_the_end=counted("to_the_end"),
            moved=counted("moved_bytes"),
            recomputed=counted("recomputed_bytes"),
            refused=collections.Counter(body["refused_loudly"]),
            whole=collections.Counter(body["whole_at_0"]),
            on_ranks=collections.Counter(body["on_ranks"]),
            statements=set(catalogued()) - set(body["never_drawn"]),
            operators=_operators() - set(body["operators_never_drawn"]),
            finds=list(body["finds"]),
        )

    @property
    def examined(self) -> int:
        """Number of programs."""
        return sum(piece.programs for piece in self.pieces)

    @property
    def comparisons(self) -> int:
        """Number of comparisons of a program with and without memo at one level."""
        return sum(piece.comparisons for piece in self.pieces)

    @property
    def next_seed(self) -> int:
        """The seed after the last one that was examined."""
        return max((piece.seed + piece.programs for piece in self.pieces), default=0)

    def add(self, program: Program, outcome: Outcome) -> None:
        """Counts one program of the last piece."""
        piece = self.pieces[-1]
        piece.programs += 1
        if outcome.discarded is not None:
            self.discarded[outcome.discarded[:80]] += 1
            return
        piece.comparisons += len(outcome.compared)
        self.compared.update([*outcome.compared])
        self.to_the_end.update(name for name, ended in outcome.compared.items() if ended)
        self.moved.update(outcome.moved_bytes)
        self.recomputed.update(outcome.recomputed_bytes)
        self.refused.update(outcome.refused)
        self.whole.update(outcome.whole)
        self.statements |= program.statements
        self.operators |= program.operators

    def add_on_ranks(self, placement: str, outcome: Outcome) -> None:
        """Counts a program that ran on ranks as well."""
        if outcome.discarded is not None:
            self.on_ranks["discarded"] += 1
        self.on_ranks.update(f"{placement}, {name}" for name in outcome.compared)

    def found(self, found: Found) -> None:
        """Keeps a find of the last piece."""
        self.pieces[-1].finds += 1
        self.finds.append(found.body() | {"commit": self.pieces[-1].commit})

    def body(self) -> dict[str, Any]:
        """Object of the result file, which `of` reads."""
        return {
            "programs": self.examined,
            "discarded": self.discarded.total(),
            "discarded_for": _foremost(self.discarded),
            "comparisons": self.comparisons,
            "operators": len(self.operators),
            "operators_never_drawn": sorted(_operators() - self.operators),
            "never_drawn": sorted(set(catalogued()) - self.statements),
            "levels": {
                name: {
                    "compared": self.compared[name],
                    "to_the_end": self.to_the_end[name],
                    "moved_bytes": self.moved[name],
                    "recomputed_bytes": self.recomputed[name],
                }
                for name in LEVELS
                if self.compared[name]
            },
            "refused_loudly": dict(self.refused),
            "whole_at_0": _foremost(self.whole),
            "on_ranks": dict(self.on_ranks),
            "pieces": [dataclasses.asdict(piece) for piece in self.pieces],
            "finds": self.finds,
        }

    def told(self) -> str:
        """A line of figures."""
        return (
            f"{self.examined} programs, {self.discarded.total()} discarded, {self.comparisons} comparisons at "
            f"{len(self.compared)} levels, {len(self.operators)} operators, {self.refused.total()} refused; "
            f"{len(self.finds)} finds"
        )


def _operators() -> set[str]:
    return {name for name, _ in sampled_names()}


def _foremost(counts: collections.Counter[str]) -> dict[str, int]:
    """The most frequent, and the sum of the others."""
    named = collections.Counter({name: count for name, count in counts.items() if name != _OTHERS})
    found = dict(named.most_common(_MOST_REASONS))
    rest = counts.total() - sum(found.values())
    return found | ({_OTHERS: rest} if rest else {})
