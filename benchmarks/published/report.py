"""The comparison of published with predicted numbers: every row, and each table's median and worst.

Owns the statistics and their text. Errors are predicted / published - 1; medians and worst are of their size. Rows in the
half that rates were fitted on are marked with an f, and counted apart.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.published.fit import kind_of
from benchmarks.published.kernel_times import KernelRates
from benchmarks.published.rows import Inexpressible, Row, read_rows
from benchmarks.published.run import Fitted
from benchmarks.published.target import Table, Target
from memo.errors import MemoError
from memo.mip.inputs import hardware_preset

UNUSABLE = (Inexpressible, MemoError, ArithmeticError, ValueError)
"""Errors of a row that is no run, or an impossible one."""
SHOWN = 4  # rows that are named for each reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One number beside its prediction."""

    target: Target
    fitted: bool
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.target.published - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableReport:
    """All numbers of a table, and the rows that are none."""

    table: Table
    comparisons: Sequence[Comparison]
    refused: dict[str, list[str]]
    """Names of rows by the reason why they cannot be expressed."""

    def groups(self) -> Iterator[tuple[str, list[Comparison], list[Comparison]]]:
        """(name, comparisons of the fitted half, of the other half), by quantity and by kind of case."""
        quantities = dict.fromkeys(found.target.quantity for found in self.comparisons)
        for quantity in quantities:
            own = [found for found in self.comparisons if found.target.quantity == quantity]
            kinds = dict.fromkeys(found.target.kind for found in own)
            if len(kinds) > 1:
                for kind in kinds:
                    yield (f"{quantity}, {kind}", *_halves([found for found in own if found.target.kind == kind]))
            yield (quantity, *_halves(own))


def fittable(tables: Sequence[Table], folder: Path) -> Iterator[Target]:
    """Yields the numbers that depend on rates, of the rows that may be fitted."""
    for table in tables:
        for row in _expressible(table, read_rows(folder, table.file), {}):
            if row.fitted:
                yield from (
                    dataclasses.replace(target, table=table.file)
                    for target in _targets(table, row, {})
                    if target.work is not None
                )


def compare(table: Table, folder: Path, fitted: dict[str, Fitted]) -> TableReport:
    """Predicts every number of a table."""
    rows, refused = read_rows(folder, table.file), collections.defaultdict[str, list[str]](list)
    found = []
    for row in _expressible(table, rows, refused):
        for target in _targets(table, row, refused):
            try:
                predicted = target.predict(rates_of(target.gpu, fitted))
            except UNUSABLE as error:
                refused[str(error)].append(_name(row))
                continue
            found.append(Comparison(target=target, fitted=row.fitted, predicted=predicted))
    if table.whole is not None:
        try:
            for target in table.whole(rows):
                predicted = target.predict(rates_of(target.gpu, fitted))
                found.append(Comparison(target=target, fitted=False, predicted=predicted))
        except UNUSABLE as error:
            refused[f"the table as a whole: {error}"].append(table.title)
    return TableReport(table=table, comparisons=found, refused=dict(refused))


def rates_of(gpu: str, fitted: dict[str, Fitted]) -> Fitted:
    """Rates of a GPU: fitted, or of its description where no published time was on it."""
    kind = kind_of(gpu)
    return fitted[kind] if kind in fitted else Fitted(rates=KernelRates.of(hardware_preset(gpu)))


def print_report(report: TableReport) -> None:
    """Prints every row and the statistics of a table."""
    print(f"\n{report.table.title}  ({report.table.file})")
    width = max((len(found.target.label) for found in report.comparisons), default=0)
    for found in report.comparisons:
        target, mark = found.target, "f" if found.fitted else " "
        print(
            f"{mark} {target.label:{width}}  {target.quantity:10} {target.published:12.5g} {found.predicted:12.5g} "
            f"{100 * found.error:+7.1f} %"
        )
    for reason, names in report.refused.items():
        shown = ", ".join(dict.fromkeys(names[:SHOWN])) + (", ..." if len(names) > SHOWN else "")
        print(f"  not expressed, {len(names)} rows: {reason} ({shown})")
    for name, fitted, other in report.groups():
        print(f"  {name}: fitted half {_text(fitted)}; other half {_text(other)}")


def result_body(report: TableReport) -> dict[str, Any]:
    """The table's part of a result file."""
    return {
        "table": report.table.file,
        "title": report.table.title,
        "groups": [
            {"name": name, "fitted_half": _numbers(fitted), "other_half": _numbers(other)}
            for name, fitted, other in report.groups()
        ],
        "not_expressed": {reason: len(names) for reason, names in report.refused.items()},
        "rows": [
            {
                "label": found.target.label,
                "quantity": found.target.quantity,
                "fitted": found.fitted,
                "published": found.target.published,
                "predicted": float(f"{found.predicted:.6g}"),
                "error": round(found.error, 4),
            }
            for found in report.comparisons
        ],
    }


def _expressible(table: Table, rows: Sequence[Row], refused: dict[str, list[str]]) -> Iterator[Row]:
    """Rows that no other row of the table has the inputs of."""
    keys = [tuple(row[name] for name in table.inputs) for row in rows]
    counts = collections.Counter(keys)
    for row, key in zip(rows, keys, strict=True):
        if table.inputs and counts[key] > 1:
            reason = "another row has the same inputs, so they differ by what the table does not say"
            refused.setdefault(reason, []).append(_name(row))
        else:
            yield row


def _targets(table: Table, row: Row, refused: dict[str, list[str]]) -> Sequence[Target]:
    try:
        targets = table.targets(row)
        if not all(target.published > 0 for target in targets):
            raise Inexpressible("a published number is not above 0")
        return targets
    except UNUSABLE as reason:
        refused.setdefault(str(reason), []).append(_name(row))
        return ()


def _name(row: Row) -> str:
    return next(iter(row.cells.values()), "")


def _halves(found: Sequence[Comparison]) -> tuple[list[Comparison], list[Comparison]]:
    return [one for one in found if one.fitted], [one for one in found if not one.fitted]


def _numbers(found: Sequence[Comparison]) -> dict[str, Any]:
    errors = [abs(one.error) for one in found]
    if not errors:
        return {"rows": 0}
    return {"rows": len(errors), "median": round(statistics.median(errors), 4), "worst": round(max(errors), 4)}


def _text(found: Sequence[Comparison]) -> str:
    numbers = _numbers(found)
    if not numbers["rows"]:
        return "empty"
    return f"{numbers['rows']} rows, median {100 * numbers['median']:.1f} %, worst {100 * numbers['worst']:.1f} %"
