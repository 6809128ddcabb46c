"""Published training runs beside memo's predictions of them.

python -m benchmarks.published                     every row of every table: published, predicted, error
python -m benchmarks.published --tables DIR        the same for tables of the same names and columns elsewhere
python -m benchmarks.published --fit               fits the rates of each GPU anew, on half of the rows
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.published import fully_sharded, lengths, megatron_ci, megatron_papers
from benchmarks.published.fit import FITTED, fit_all, read_fitted
from benchmarks.published.report import compare, fittable, print_report, result_body
from benchmarks.published.rows import TABLES
from benchmarks.results import write_result

ALL = (*megatron_papers.TABLES, *fully_sharded.TABLES, *megatron_ci.TABLES, *lengths.TABLES)
# Tables without a run to predict.
ELSEWHERE = {
    "alcf_longest_lengths.csv": "longest sequences without machine and layout; held by benchmarks.searched",
    "korthikanti_table2_formulas.csv": "formulas of bytes: held by tests/benchmarks/test_framework_layer.py",
    "galvatron_hardware_profile.csv": "collectives on a machine that the file does not name; held by benchmarks.searched",
    "galvatron_llama2_7b_compute_profile.csv": "forwards on a GPU that the file does not name; held by benchmarks.searched",
    "galvatron_llama2_7b_memory_profile.csv": "models of one and two layers, options not stated; benchmarks.searched",
    "galvatron_searched_plan_llama2_7b_8gpu_36GB.csv": "a plan without a measurement; held by benchmarks.searched",
    "memo_facts.csv": "MEMO's own results: what memo's presets were taken from is no test of them",
    "memo_models.csv": "shapes of models, without a measurement",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="benchmarks.published", description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=Path, default=TABLES, metavar="DIR", help="folder of the tables")
    parser.add_argument("--only", default="", metavar="TEXT", help="tables with this in their name")
    parser.add_argument("--fit", action="store_true", help=f"fit the rates of each GPU and write them to {FITTED.name}")
    parser.add_argument("--no-write", action="store_true", help="write no result file")
    asked = parser.parse_args(argv)
    if asked.fit:
        found = fit_all(list(fittable(ALL, asked.tables)))
        FITTED.write_text(json.dumps(found, indent=2) + "\n")
        print(f"Wrote {FITTED}")
    fitted, bodies = read_fitted(), []
    for table in ALL:
        if asked.only in table.file:
            report = compare(table, asked.tables, fitted)
            print_report(report)
            bodies.append(result_body(report))
    for name, reason in ELSEWHERE.items():
        if asked.only in name and (asked.tables / name).is_file():
            print(f"\n{name}: not expressed: {reason}")
    if asked.tables == TABLES and not asked.only and not asked.no_write:
        body = {"tables": bodies, "not_expressed": ELSEWHERE, "rates": json.loads(FITTED.read_text())["kinds"]}
        print(f"\nWrote {write_result('published', body)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
