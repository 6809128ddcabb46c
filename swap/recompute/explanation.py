"""Explanation of one layer's recompute, for people and programs: its tape as a table, and the curve of its choices.

Pure data that knows no tensor; `explain.py` makes it. `str()` gives the tables, with views and steps of which backward
needs nothing folded; `rows` has every row.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterable, Sequence

from memo.units import format_bytes, text_table


class Fate(enum.StrEnum):
    """What becomes of a result until backward needs it."""

    STAYS = "stays"
    """It stays on the device: a parameter, an argument, a small tensor."""
    MOVED = "moved"
    """It is kept: the engine moves it to a tier, or leaves it on the device where the plan says so."""
    REPLAYED = "replayed"
    """It is dropped, and its operator runs again in backward."""
    VIEW = "view"
    """No memory of its own; it is taken again where it is read."""
    UNUSED = "not needed"
    """Backward does not need it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step of the tape, or memory that was there before the layer."""

    step: int | None
    """Number of the step; None for memory that was there before."""
    operator: str
    """Name of the operator; for memory that was there, where it is from."""
    shape: tuple[int, ...]
    """Shape of the first result."""
    dtype: str
    nbytes: int
    """Bytes of the memory that the step makes or writes into; 0 for a view."""
    is_saved: bool
    """Autograd saved it, or a view of it."""
    fate: Fate
    kept_nbytes: int
    """What is kept of it beside what stays on the device anyway; a mask takes one bit an element."""
    why: str
    """Reason of the fate."""
    replay_us: float | None
    """Derived time of repeating it; None where nothing could be repeated."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One choice of what is kept."""

    name: str
    """`all`, `matmuls`, `attention` and `input` as the levels; others p1, p2 ..."""
    kept_nbytes: int
    kept_fraction: float
    """Fraction of the bytes that autograd saved and that may move."""
    replay_us: float
    """Derived time of all that is replayed."""
    replayed_steps: int
    held_nbytes: int
    """The most that the replay holds at once above all that it gives, beside what is kept."""
    is_used: bool
    """The layer's last call was kept so."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerExplanation:
    """What one layer's forward did, what is kept of it and what is replayed; `str()` formats it as tables."""

    layer: str
    module: str
    """Name of its class."""
    setting: str
    refused: str | None
    """Why all of it moves; None: what can be replayed at this setting is."""
    saved_storages: int
    saved_nbytes: int
    """Bytes of the storages that autograd saved and that may move."""
    rows: tuple[Row, ...]
    points: tuple[Point, ...]
    """From the most kept to the least."""

    @property
    def used(self) -> Point:
        """The choice of the layer's last call."""
        return next(point for point in self.points if point.is_used)

    def __str__(self) -> str:
        used = self.used
        steps = [row for row in self.rows if row.step is not None]
        head = [
            f"{self.layer} ({self.module}), {self.setting}",
            f"saved: {_counted(self.saved_storages, 'storage')}, {format_bytes(self.saved_nbytes)}; kept: "
            f"{format_bytes(used.kept_nbytes)}, {100 * used.kept_fraction:.1f} %",
            f"replayed: {used.replayed_steps} of {_counted(len(steps), 'step')}, {_time(used.replay_us)} derived, "
            f"{format_bytes(used.held_nbytes)} held at once",
        ]
        if self.refused is not None:
            head.append(f"offloaded whole: {self.refused}")
        return "\n".join([*head, "", self._rows(), "", _table(_POINT_HEADER, map(_point, self.points))])

    def _rows(self) -> str:
        return _table(_ROW_HEADER, ([cells.get(name, "") for name in _ROW_HEADER] for cells in _folded(self.rows)))


_ROW_HEADER = ("step", "operator", "result", "dtype", "bytes", "saved", "treatment", "replay", "why")
_POINT_HEADER = ("point", "used", "kept", "share", "replay", "steps", "held")
_RIGHT = frozenset({"step", "bytes", "replay", "kept", "share", "steps", "held"})


def _folded(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Cells of the rows by column; what follows each other and nobody waits for is one line."""
    lines = []
    for kind, run in itertools.groupby(rows, _fold):
        group = list(run)
        if kind is None or len(group) == 1:
            lines += [_cells(row) for row in group]
        elif group[0].step is None:
            nbytes = format_bytes(sum(row.nbytes for row in group))
            lines.append({**_cells(group[0]), "operator": f"{len(group)} {group[0].operator}s", "bytes": nbytes})
            lines[-1].update(result="", dtype="")
        else:
            views = all(row.fate is Fate.VIEW for row in group)
            lines.append(
                {
                    "step": f"{group[0].step}-{group[-1].step}",
                    "operator": f"{len(group)} {'views' if views else 'steps'}",
                    "treatment": "" if views else Fate.UNUSED,
                }
            )
    return lines


def _fold(row: Row) -> object:
    """Equal for neighbours that are one line; None for a row of its own."""
    if row.step is None:
        return row.operator, row.fate, row.is_saved, row.why
    return "steps" if row.fate in (Fate.VIEW, Fate.UNUSED) and not row.is_saved else None


def _cells(row: Row) -> dict[str, str]:
    is_view = row.fate is Fate.VIEW
    return {
        "step": "-" if row.step is None else f"{row.step}",
        "operator": row.operator,
        "result": "x".join(map(str, row.shape)) or "scalar",
        "dtype": row.dtype,
        "bytes": "" if is_view else format_bytes(row.nbytes),
        "saved": _mark(row.is_saved),
        "treatment": "" if is_view else row.fate,
        "replay": "" if row.replay_us is None else _time(row.replay_us),
        "why": row.why,
    }


def _point(point: Point) -> tuple[str, ...]:
    return (
        point.name,
        "<-" if point.is_used else "",
        format_bytes(point.kept_nbytes),
        f"{100 * point.kept_fraction:.1f} %",
        _time(point.replay_us),
        f"{point.replayed_steps}",
        format_bytes(point.held_nbytes),
    )


def _mark(is_saved: bool) -> str:
    return "yes" if is_saved else ""


def _time(microseconds: float) -> str:
    return f"{microseconds:,.0f} us"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return text_table(header, [*rows], left=[at for at, name in enumerate(header) if name not in _RIGHT])
