"""Reads problems and plans that may come from anywhere, and writes plans: strict, versioned, bounded, atomic.

Owns the two formats of docs/plan-format.md. Invariants: what is read is exactly what the format allows, or a PlanError
says in one line what is not; a file appears under its name whole or not at all; equal plans make equal bytes.
"""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from memo.errors import OutputExists, PlanError
from memo.mip.address.problem import DEVICE, MAX_NBYTES, ArenaPlan, Buffer, Plan, Problem, Status
from memo.mip.strict_json import parse_json, read_as, require_format

__all__ = [
    "PROBLEM_FORMAT",
    "VERSION",
    "Notes",
    "address_plan_of",
    "plan_to_csv",
    "plan_to_json",
    "problem_to_json",
    "read_annotated",
    "read_plan",
    "read_problem",
    "write_bytes",
    "write_file",
]

PLAN_FORMAT, PROBLEM_FORMAT, VERSION = "memo-address-plan", "memo-address-problem", 1
MAX_BUFFERS = 250_000
MAX_NAME = 1000

CSV_REQUIRED = ("id", "lower", "upper", "size")
CSV_OPTIONAL = ("alignment", "fixed_offset", "gaps", "arena", "group", "offset")
NOTES = ("tag", "phase", "stream")
"""What a recorder says of a buffer beyond its place in the problem; the planner does not look at it."""


Path_ = str | os.PathLike[str]
Notes = Mapping[str, str]
"""The notes of one buffer, by name; those it does not have are absent or empty."""


def read_problem(path: Path_) -> Problem:
    """The problem in a CSV file, or in a JSON file of ours; a plan's problem is its problem, too. `-` is standard input.

    Raises:
        PlanError: the file cannot be read or is not in the format; the message names the line or the key.
    """
    return read_annotated(path)[0]


def read_annotated(path: Path_) -> tuple[Problem, tuple[Notes, ...]]:
    """The problem, and the notes of each of its buffers in the same order.

    Raises:
        PlanError: as `read_problem`.
    """
    return read_as(
        path, lambda text: _annotated(parse_json(text)) if text.lstrip()[:1] == "{" else _annotated_csv(text)
    )


def read_plan(path: Path_) -> Plan:
    """The plan in a JSON file. Only its form is checked; `memo.mip.address.checker` says whether it is valid.

    Raises:
        PlanError: as `read_problem`.
    """
    return read_as(path, lambda text: address_plan_of(parse_json(text)))


def write_file(path: Path_, text: str, *, overwrite: bool = False) -> None:
    """`write_bytes` for text."""
    write_bytes(path, text.encode(), overwrite=overwrite)


def write_bytes(path: Path_, content: bytes, *, overwrite: bool = False) -> None:
    """Writes the content under a temporary name beside `path`, then gives it its name.

    Raises:
        OutputExists: the file exists and may not be overwritten.
        PlanError: it cannot be written; nothing is left behind.
    """
    target = Path(path)
    try:
        handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:80]}-")
        try:
            with open(handle, "wb") as file:
                file.write(content)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(partial, 0o666 & ~mask)
            if overwrite:
                os.replace(partial, target)
            else:
                os.link(partial, target)  # fails if the name is taken, however late that happened
        finally:
            Path(partial).unlink(missing_ok=True)
    except FileExistsError:
        raise OutputExists(f"{str(path)!r} exists; give -f to overwrite it") from None
    except OSError as error:
        raise PlanError(f"{str(path)!r}: cannot write: {error.strerror}") from None


def problem_to_json(problem: Problem) -> str:
    """The problem as JSON, one buffer a line."""
    head = {
        "format": PROBLEM_FORMAT,
        "version": VERSION,
        "alignment": problem.alignment,
        "capacities": dict(sorted(problem.capacities.items())),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    lines.append(f'"buffers": {_lines(map(_buffer_to_json, problem.buffers))}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def plan_to_json(plan: Plan) -> str:
    """The plan as JSON, one buffer a line."""
    problem = plan.problem
    head = {
        "format": PLAN_FORMAT,
        "version": VERSION,
        "seed": plan.seed,
        "alignment": problem.alignment,
        "capacities": dict(sorted(problem.capacities.items())),
    }
    arenas = [
        {
            "name": arena.name,
            "nbytes": arena.nbytes,
            "lower_bound_nbytes": arena.lower_bound_nbytes,
            "status": arena.status.value,
            "method": arena.method,
        }
        for arena in sorted(plan.arenas, key=lambda arena: arena.name)
    ]
    pairs = zip(problem.buffers, plan.offsets, strict=True)
    buffers = [{**_buffer_to_json(buffer), "offset": offset} for buffer, offset in pairs]
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    lines += [f'"arenas": {_lines(arenas)}', f'"buffers": {_lines(buffers)}']
    return "{\n" + ",\n".join(lines) + "\n}\n"


def plan_to_csv(plan: Plan) -> str:
    """The plan as CSV: the columns of the input that are in use, and `offset`."""
    rows = []
    for buffer, offset in zip(plan.problem.buffers, plan.offsets, strict=True):
        gaps = " ".join(f"{start}-{end}" for start, end in buffer.gaps)
        fixed = "" if buffer.fixed_offset is None else buffer.fixed_offset
        optional = (buffer.alignment, fixed, gaps, buffer.arena, buffer.group)
        rows.append((buffer.id, buffer.start, buffer.end, buffer.nbytes, *optional, offset))
    defaults: tuple[object, ...] = (1, "", "", DEVICE, "")
    used = [True] * 4 + [any(row[4 + i] != value for row in rows) for i, value in enumerate(defaults)] + [True]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in ((*CSV_REQUIRED, *CSV_OPTIONAL), *rows):
        writer.writerow([value for value, wanted in zip(row, used, strict=True) if wanted])
    return text.getvalue()


def _lines(entries: Iterable[Mapping[str, object]]) -> str:
    return "[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]"


def _buffer_to_json(buffer: Buffer) -> dict[str, object]:
    entry: dict[str, object] = {
        "id": buffer.id,
        "start": buffer.start,
        "end": buffer.end,
        "nbytes": buffer.nbytes,
    }
    optional: dict[str, tuple[object, object]] = {
        "alignment": (buffer.alignment, 1),
        "fixed_offset": (buffer.fixed_offset, None),
        "gaps": ([list(gap) for gap in buffer.gaps], []),
        "arena": (buffer.arena, DEVICE),
        "group": (buffer.group, ""),
    }
    return entry | {key: value for key, (value, default) in optional.items() if value != default}


def address_plan_of(root: dict[str, Any]) -> Plan:
    """The plan in a file's JSON object. Raises as `read_plan`."""
    require_format(root, PLAN_FORMAT, version=VERSION)
    _only(root, "the file", {"format", "version", "alignment", "buffers", "arenas", "seed", "capacities"})
    offsets = []
    for index, entry in enumerate(_array(root, "buffers")):
        offsets.append(_integer(_object(entry, f"buffer {index}"), "offset", f"buffer {index}"))
    arenas = []
    for index, entry in enumerate(_array(root, "arenas")):
        where = f"arena {index}"
        arena = _object(entry, where)
        _only(arena, where, {"name", "nbytes", "lower_bound_nbytes", "status", "method"})
        status = _string(arena, "status", where)
        if status not in list(Status):
            raise PlanError(f"{where}: status {status!r} is none of {', '.join(Status)}")
        arenas.append(
            ArenaPlan(
                name=_string(arena, "name", where),
                nbytes=_integer(arena, "nbytes", where),
                lower_bound_nbytes=_integer(arena, "lower_bound_nbytes", where),
                status=Status(status),
                method=_string(arena, "method", where),
            )
        )
    seed = _integer(root, "seed", "the file", default=0)
    return Plan(problem=_problem_of(root), offsets=tuple(offsets), arenas=tuple(arenas), seed=seed)


def _problem_of(root: dict[str, Any]) -> Problem:
    require_format(root, PLAN_FORMAT, PROBLEM_FORMAT, version=VERSION)
    if root["format"] == PROBLEM_FORMAT:
        _only(root, "the file", {"format", "version", "alignment", "buffers", "capacities"})
    entries = _array(root, "buffers")
    if len(entries) > MAX_BUFFERS:
        raise PlanError(f"{len(entries)} buffers; {MAX_BUFFERS} are the most")
    capacities = _object(root.get("capacities", {}), "capacities")
    return Problem(
        buffers=tuple(_buffer_of(_object(entry, f"buffer {i}"), f"buffer {i}") for i, entry in enumerate(entries)),
        alignment=_integer(root, "alignment", "the file", default=1),
        capacities={_name(arena, "capacities"): _integer(capacities, arena, "capacities") for arena in capacities},
    )


def _annotated(root: dict[str, Any]) -> tuple[Problem, tuple[Notes, ...]]:
    problem = _problem_of(root)
    return problem, tuple(_notes_of(entry, f"buffer {i}") for i, entry in enumerate(_array(root, "buffers")))


def _notes_of(entry: dict[str, Any], where: str) -> Notes:
    notes = {name: _string(entry, name, where) for name in ("tag", "phase") if name in entry}
    return notes | ({"stream": str(_integer(entry, "stream", where))} if "stream" in entry else {})


def _buffer_of(entry: dict[str, Any], where: str) -> Buffer:
    keys = {"id", "start", "end", "nbytes", "alignment", "fixed_offset", "gaps", "arena", "group", "offset", *NOTES}
    _only(entry, where, keys)
    gaps = []
    for gap in _array(entry, "gaps") if "gaps" in entry else []:
        if not isinstance(gap, list) or len(gap) != 2:
            raise PlanError(f"{where}: a gap is not a pair")
        gaps.append((_whole(gap[0], "gaps", where), _whole(gap[1], "gaps", where)))
    return Buffer(
        id=_string(entry, "id", where),
        start=_integer(entry, "start", where),
        end=_integer(entry, "end", where),
        nbytes=_integer(entry, "nbytes", where),
        alignment=_integer(entry, "alignment", where, default=1),
        fixed_offset=_integer(entry, "fixed_offset", where) if "fixed_offset" in entry else None,
        gaps=tuple(gaps),
        arena=_string(entry, "arena", where) if "arena" in entry else DEVICE,
        group=_string(entry, "group", where) if "group" in entry else "",
    )


def _annotated_csv(text: str) -> tuple[Problem, tuple[Notes, ...]]:
    rows = csv.reader(io.StringIO(text), strict=True)
    buffers: list[Buffer] = []
    notes: list[Notes] = []
    try:
        header = [cell.strip() for cell in next(rows, [])]
        known = {*CSV_REQUIRED, *CSV_OPTIONAL, *NOTES}
        if not set(CSV_REQUIRED) <= set(header) <= known or len(set(header)) != len(header):
            wanted = f"{','.join(CSV_REQUIRED)} and any of {','.join(CSV_OPTIONAL)}"
            raise PlanError(f"the columns are {','.join(header)[:120]!r}, not {wanted}")
        for row in rows:
            if row:
                buffers.append(_buffer_of_row(header, row, f"line {rows.line_num}"))
                notes.append(_notes_of_row(header, row, f"line {rows.line_num}"))
            if len(buffers) > MAX_BUFFERS:
                raise PlanError(f"more than {MAX_BUFFERS} buffers")
    except csv.Error as error:
        raise PlanError(f"line {rows.line_num}: not CSV: {error}") from None
    return Problem(buffers=tuple(buffers)), tuple(notes)


def _notes_of_row(header: list[str], row: list[str], where: str) -> Notes:
    return {name: _name(cell, where) for name, cell in zip(header, row, strict=True) if name in NOTES}


def _buffer_of_row(header: list[str], row: list[str], where: str) -> Buffer:
    if len(row) != len(header):
        raise PlanError(f"{where}: {len(row)} cells under {len(header)} columns")
    cells = {name: cell.strip() for name, cell in zip(header, row, strict=True)}

    def number(text: str, name: str) -> int:
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
            raise PlanError(f"{where}: {name} is {text[:40]!r}, not a whole number below 2^62")
        return _whole(int(text), name, where)

    gaps = []
    for gap in cells.get("gaps", "").split():
        start, dash, end = gap.partition("-")
        if not dash:
            raise PlanError(f"{where}: gap {gap[:40]!r} is not start-end")
        gaps.append((number(start, "gaps"), number(end, "gaps")))
    fixed = cells.get("fixed_offset", "")
    try:
        return Buffer(
            id=_name(cells["id"], where),
            start=number(cells["lower"], "lower"),
            end=number(cells["upper"], "upper"),
            nbytes=number(cells["size"], "size"),
            alignment=number(cells.get("alignment") or "1", "alignment"),
            fixed_offset=number(fixed, "fixed_offset") if fixed else None,
            gaps=tuple(gaps),
            arena=_name(cells.get("arena") or DEVICE, where),
            group=_name(cells.get("group", ""), where),
        )
    except PlanError as error:
        raise PlanError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"{where} is not an object")
    return value


def _array(entry: dict[str, Any], key: str) -> list[Any]:
    value = entry.get(key)
    if not isinstance(value, list):
        raise PlanError(f"{key} is not an array")
    return value


def _integer(entry: dict[str, Any], key: str, where: str, *, default: int | None = None) -> int:
    if key not in entry and default is not None:
        return default
    return _whole(entry.get(key), key, where)


def _whole(value: object, key: str, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > MAX_NBYTES:
        raise PlanError(f"{where}: {key[:80]} is not a whole number below 2^62")
    return value


def _string(entry: dict[str, Any], key: str, where: str) -> str:
    return _name(entry.get(key), f"{where}: {key}")


def _name(value: object, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise PlanError(f"{where} is not a text of at most {MAX_NAME} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PlanError(f"{where} is not valid Unicode") from None
    return value


def _only(entry: dict[str, Any], where: str, keys: set[str]) -> None:
    for key in entry:
        if key not in keys:
            raise PlanError(f"{where} has the unknown key {key[:80]!r}")
