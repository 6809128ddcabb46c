"""Files of address problems and plans: JSON and CSV.

Owns the formats of docs/plan-format.md. Input may come from anywhere: what is read is exactly what the format allows,
or a PlanError says in one line what is not. Output is atomic, and equal plans give equal bytes.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memo.atomic_file import atomic_file
from memo.errors import PlanError
from memo.mip.address.problem import DEVICE, AddressPlan, AddressProblem, ArenaPlan, Buffer
from memo.mip.strict_json import decode, decode_value, encode, parse_json, read_as, require_format, write_json

PLAN_FORMAT, PROBLEM_FORMAT, VERSION = "memo-address-plan", "memo-address-problem", 1
MAX_BUFFERS = 250_000

CSV_REQUIRED = ("id", "lower", "upper", "size")

Path_ = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _ProblemHead:
    """Keys of a problem besides its buffers."""

    alignment: int = 1
    capacities: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _PlanHead:
    """Keys of a plan that a problem does not have."""

    arenas: tuple[ArenaPlan, ...]
    seed: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """Key of a buffer's entry in a plan that is no field of the buffer."""

    offset: int


def _field_names(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))


_HEAD_KEYS = {"format", "version", "buffers"}
_BUFFER_KEYS = _field_names(Buffer)
_DEFAULTS = {"alignment": 1, "arena": DEVICE, "tag": "", "phase": "", "group": "", "stream": 0}
"""Fields of a buffer that a file leaves out where they have this value."""
CSV_OPTIONAL = (*_DEFAULTS, "offset")


def read_problem(path: Path_) -> AddressProblem:
    """Reads a problem from a CSV file, a problem file or a plan file; `-` is standard input.

    Raises:
        PlanError: the file cannot be read or is not in the format; the message names the line or the key.
    """
    return read_as(
        path, lambda text: _problem_of(parse_json(text)) if text.lstrip()[:1] == "{" else _problem_of_csv(text)
    )


def read_plan(path: Path_) -> AddressPlan:
    """Reads a plan. Only the format is checked; `memo.mip.address.checker` decides whether the plan is valid.

    Raises:
        PlanError: as `read_problem`.
    """
    return read_as(path, lambda text: address_plan_of(parse_json(text)))


def write_file(path: Path_, text: str, *, overwrite: bool = False) -> None:
    """Writes a text file atomically.

    Raises:
        OutputExists: the file exists and `overwrite` is False.
        MemoError: it cannot be written; nothing is left behind.
    """
    with atomic_file(path, overwrite=overwrite) as sibling:
        sibling.write_bytes(text.encode())


def problem_to_json(problem: AddressProblem) -> str:
    """Writes a problem as JSON, one buffer a line."""
    buffers = [_encode_buffer(buffer) for buffer in problem.buffers]
    return write_json(PROBLEM_FORMAT, VERSION, {**_encode_head(problem), "buffers": buffers})


def plan_to_json(plan: AddressPlan) -> str:
    """Writes a plan as JSON, one buffer a line. Equal plans give equal text."""
    arenas = [encode(arena) for arena in sorted(plan.arenas, key=lambda arena: arena.name)]
    pairs = zip(plan.problem.buffers, plan.offsets, strict=True)
    buffers = [{**_encode_buffer(buffer), "offset": offset} for buffer, offset in pairs]
    entries = {"seed": plan.seed, **_encode_head(plan.problem), "arenas": arenas, "buffers": buffers}
    return write_json(PLAN_FORMAT, VERSION, entries)


def problem_to_csv(problem: AddressProblem) -> str:
    """Writes a problem as CSV, without capacities: optional columns that no buffer uses are left out."""
    return _to_csv(problem, None)


def plan_to_csv(plan: AddressPlan) -> str:
    """Writes a plan as CSV: the columns of the input that are in use, and `offset`."""
    return _to_csv(plan.problem, plan.offsets)


def _to_csv(problem: AddressProblem, offsets: Sequence[int] | None) -> str:
    optional = [name for name, value in _DEFAULTS.items() if any(getattr(b, name) != value for b in problem.buffers)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*CSV_REQUIRED, *optional, *(() if offsets is None else ("offset",))))
    for index, buffer in enumerate(problem.buffers):
        values = (getattr(buffer, name) for name in ("id", "start", "end", "nbytes", *optional))
        writer.writerow((*values, *(() if offsets is None else offsets[index : index + 1])))
    return text.getvalue()


def _encode_head(problem: AddressProblem) -> dict[str, Any]:
    return encode(_ProblemHead(alignment=problem.alignment, capacities=problem.capacities))  # type: ignore[no-any-return]


def _encode_buffer(buffer: Buffer) -> dict[str, Any]:
    return {name: value for name, value in encode(buffer).items() if value != _DEFAULTS.get(name)}


def address_plan_of(root: dict[str, Any]) -> AddressPlan:
    """Decodes the plan in a parsed JSON document.

    Raises:
        PlanError: as `read_plan`.
    """
    require_format(root, PLAN_FORMAT, version=VERSION)
    head = decode(_PlanHead, root, "the file", ignore={*_HEAD_KEYS, *_field_names(_ProblemHead)})
    offsets = [decode(_Placed, entry, where, ignore=_BUFFER_KEYS).offset for where, entry in _buffer_entries(root)]
    arenas = tuple(sorted(head.arenas, key=lambda arena: arena.name))
    return AddressPlan(problem=_problem_of(root), offsets=tuple(offsets), arenas=arenas, seed=head.seed)


def _problem_of(root: dict[str, Any]) -> AddressProblem:
    require_format(root, PLAN_FORMAT, PROBLEM_FORMAT, version=VERSION)
    plan_keys = _field_names(_PlanHead) if root["format"] == PLAN_FORMAT else ()
    head = decode(_ProblemHead, root, "the file", ignore={*_HEAD_KEYS, *plan_keys})
    buffers = tuple(decode(Buffer, entry, where, ignore={"offset"}) for where, entry in _buffer_entries(root))
    return AddressProblem(buffers=buffers, alignment=head.alignment, capacities=head.capacities)


def _buffer_entries(root: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Each entry of `buffers`, after its place in the document."""
    entries = root.get("buffers")
    if not isinstance(entries, list):
        raise PlanError("buffers is not an array")
    if len(entries) > MAX_BUFFERS:
        raise PlanError(f"{len(entries)} buffers; {MAX_BUFFERS} are the most")
    for index, entry in enumerate(entries):
        if isinstance(entry, dict) and None in entry.values():
            raise PlanError(f"buffer {index}: a key is null; leave it out")
        yield f"buffer {index}", entry


def _problem_of_csv(text: str) -> AddressProblem:
    rows = csv.reader(io.StringIO(text), strict=True)
    buffers: list[Buffer] = []
    try:
        header = [cell.strip() for cell in next(rows, [])]
        _check_header(header)
        for row in rows:
            if row:
                buffers.append(_buffer_of_row(header, row, f"line {rows.line_num}"))
            if len(buffers) > MAX_BUFFERS:
                raise PlanError(f"more than {MAX_BUFFERS} buffers")
    except csv.Error as error:
        raise PlanError(f"line {rows.line_num}: not CSV: {error}") from None
    return AddressProblem(buffers=tuple(buffers))


def _check_header(header: list[str]) -> None:
    for name in CSV_REQUIRED:
        if name not in header:
            raise PlanError(f"column {name!r} is missing")
    for name in header:
        if name not in (*CSV_REQUIRED, *CSV_OPTIONAL):
            known = ", ".join((*CSV_REQUIRED, *CSV_OPTIONAL))
            raise PlanError(f"column {name[:80]!r} is unknown; the columns are {known}")
        if header.count(name) > 1:
            raise PlanError(f"column {name!r} appears twice")


def _buffer_of_row(header: list[str], row: list[str], where: str) -> Buffer:
    if len(row) != len(header):
        raise PlanError(f"{where}: {len(row)} cells under {len(header)} columns")
    cells = {name: cell.strip() for name, cell in zip(header, row, strict=True)}

    def number(text: str, name: str) -> int:
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
            raise PlanError(f"{where}: {name} is {text[:40]!r}, not a whole number below 2^62")
        return decode_value(int, int(text), f"{where}: {name}")  # type: ignore[no-any-return]

    try:
        return Buffer(
            id=decode_value(str, cells["id"], where),
            start=number(cells["lower"], "lower"),
            end=number(cells["upper"], "upper"),
            nbytes=number(cells["size"], "size"),
            alignment=number(cells.get("alignment") or "1", "alignment"),
            arena=decode_value(str, cells.get("arena") or DEVICE, where),
            stream=number(cells.get("stream") or "0", "stream"),
            **{name: decode_value(str, cells.get(name, ""), where) for name in ("group", "tag", "phase")},
        )
    except PlanError as error:
        raise PlanError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
