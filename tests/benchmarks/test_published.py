"""Published runs: the halves of the rows, the fit, what cannot be expressed, tables from elsewhere."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest

from benchmarks.published import fully_sharded, lengths, megatron_ci, megatron_papers
from benchmarks.published.__main__ import ALL, ELSEWHERE, main
from benchmarks.published.fit import PARAMETERS, fit_all, read_fitted
from benchmarks.published.framework_training import FrameworkTraining
from benchmarks.published.kernel_times import KernelRates
from benchmarks.published.report import compare, fittable
from benchmarks.published.rows import TABLES, Inexpressible, Row, read_rows
from benchmarks.published.run import Fitted, Run
from benchmarks.published.target import Table, Target
from memo.gpt import preset
from memo.gpt.arithmetic import StepLayout

RATES = Fitted(rates=KernelRates(matmul_efficiency=0.7, half_size=60, attention_efficiency=0.3))


def table(file: str) -> Table:
    return next(known for known in ALL if known.file == file)


def test_every_table_is_expressed_or_says_why() -> None:
    files = {path.name for path in TABLES.glob("*.csv")} - {"megatron_functional_cases.csv"}
    assert files == {known.file for known in ALL} | ELSEWHERE.keys()


def test_a_row_is_fitted_by_its_text_alone() -> None:
    rows = [Row(text=f"row {number}", cells={}) for number in range(1000)]
    assert 400 < sum(row.fitted for row in rows) < 600
    assert Row(text="row 7", cells={"a": "1"}).fitted == Row(text="row 7", cells={}).fitted


def test_lines_of_sources_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('# source: somewhere\n\nname,count\none,1\n# found: later\n"two, too",14 # of 61\n')
    first, second = read_rows(tmp_path, "a.csv")
    assert (first["name"], second["name"]) == ("one", "two, too")
    assert second.count("count") == 14
    assert read_rows(tmp_path, "none.csv") == []
    with pytest.raises(Inexpressible, match="no other"):
        first.count("other")


def run_of(tokens: int) -> Run:
    config = preset("350m", max_seq=tokens)
    return Run(gpu="a100-80g", config=config, layout=StepLayout(tokens=tokens, batch=8), training=FrameworkTraining())


def target_of(tokens: int, published: float) -> Target:
    run = run_of(tokens)
    return Target(
        table="t",
        label=str(tokens),
        quantity="step s",
        published=published,
        gpu="a100-80g",
        predict=lambda fitted: run.plan(fitted).step_s,
        work=run.work_s,
    )


def test_the_fit_finds_rates_that_rows_were_made_with() -> None:
    made = Fitted(rates=KernelRates(matmul_efficiency=0.62, half_size=130, attention_efficiency=0.25, memory_share=0.7))
    lengths_ = (512, 1024, 4096, 16384, 65536)
    targets = [target_of(tokens, run_of(tokens).plan(made).step_s) for tokens in lengths_]
    found = fit_all(targets)["kinds"]["a100"]["rates"]
    fitted = Fitted(
        rates=KernelRates(
            **{name: found[name] for name in ("matmul_efficiency", "half_size")}
            | {name: found[name] for name in ("attention_efficiency", "memory_share", "fp8_gain")}
        )
    )
    for target in targets:
        assert target.predict(fitted) == pytest.approx(target.published, rel=0.02)
    assert found["attention_efficiency"] == pytest.approx(0.25, rel=0.05)
    assert all(PARAMETERS[name][1] <= value <= PARAMETERS[name][2] for name, value in found.items())


def test_the_fit_sees_the_fitted_half_alone(tmp_path: Path) -> None:
    file = "megatron_ptdp_table1.csv"
    text = (TABLES / file).read_text()
    (tmp_path / file).write_text(text)
    seen = list(fittable([table(file)], tmp_path))
    assert {target.label for target in seen} == {"3.6B", "145.6B", "529.6B"}
    assert all(target.table == file for target in seen)


def test_rows_of_a_table_elsewhere_are_predicted_and_strange_ones_say_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that no table has, one on an unknown machine, one that is no number."""
    name = "mpt_llmfoundry_throughput.csv"
    lines = (TABLES / name).read_text().splitlines()
    header = next(line for line in lines if line.startswith("section"))
    known = next(line for line in lines if ",7b,2048,8,h100" in line)
    other = known.replace(",7b,2048,8,", ",7b,2048,16,")
    strange = known.replace("h100_80gb", "tpu"), known.replace(",7b,2048,", ",7b,long,")
    (tmp_path / name).write_text("\n".join((header, other, *strange)) + "\n")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert main(["--tables", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "7b s 2048 on 16 h100_80gb" in shown
    assert "unknown GPU 'tpu'" in shown
    assert "SeqLen (T) is 'long', no number" in shown
    assert not (tmp_path / "out").exists(), "results are of the tables that are here"


@pytest.mark.parametrize("known", ALL, ids=lambda known: known.file)
def test_no_row_stops_the_command(known: Table, tmp_path: Path) -> None:
    """Rows of which a cell is empty, text, nothing, negative or huge are predicted or refused."""
    rows = read_rows(TABLES, known.file)
    generator, lines = random.Random(20), [",".join(f'"{name}"' for name in rows[0].cells)]
    for _ in range(12):
        cells = dict(generator.choice(rows).cells)
        for name in generator.sample(sorted(cells), 2):
            cells[name] = generator.choice(("", "many", "0", "-3", "3", "7", "1e30", "64"))
        lines.append(",".join(f'"{cell}"' for cell in cells.values()))
    (tmp_path / known.file).write_text("\n".join(lines) + "\n")
    report = compare(known, tmp_path, read_fitted())
    assert report.comparisons or report.refused
    assert all(reason for reason in report.refused)


def test_rows_with_the_same_inputs_are_not_told_apart() -> None:
    report = compare(table("alst_recipes_maxlen.csv"), TABLES, read_fitted())
    (reason,) = (reason for reason in report.refused if "same inputs" in reason)
    assert len(report.refused[reason]) == 2


def test_a_case_without_flags_is_refused() -> None:
    (rows,) = (read_rows(TABLES, known.file)[:1] for known in megatron_ci.TABLES)
    unknown = Row(text="x", cells=rows[0].cells | {"case": "gpt/other"})
    with pytest.raises(Inexpressible, match="flags"):
        megatron_ci.TABLES[0].targets(unknown)


@pytest.mark.parametrize(
    ("file", "quantity", "median", "worst"),
    [
        ("megatron_ptdp_table1.csv", "step s", 0.10, 0.25),
        ("mtnlg_530b.csv", "step s", 0.15, 0.25),
        ("korthikanti_table3_5.csv", "step s", 0.10, 0.25),
        ("korthikanti_table4_layer_times.csv", "layer s", 0.10, 0.25),
        ("mpt_llmfoundry_throughput.csv", "step s", 0.15, 0.50),
        ("torchtitan_llama3_h100.csv", "step s", 0.15, 0.50),
        ("korthikanti_stage_memory.csv", "GB", 0.10, 0.20),
    ],
)
def test_the_half_that_was_not_fitted_is_within_its_bounds(
    file: str, quantity: str, median: float, worst: float
) -> None:
    report = compare(table(file), TABLES, read_fitted())
    errors = [
        abs(found.error) for found in report.comparisons if found.target.quantity == quantity and not found.fitted
    ]
    assert errors
    assert statistics.median(errors) <= median
    assert max(errors) <= worst


def test_peaks_of_megatron_cores_tests_are_within_five_percent_in_the_median() -> None:
    """On one row in eight, for time; `python -m benchmarks.published` has all."""
    (known,) = megatron_ci.TABLES
    errors = []
    for row in read_rows(TABLES, known.file)[::8]:
        try:
            (target,) = known.targets(row)
        except Inexpressible:
            continue
        errors.append(abs(target.predict(RATES) / target.published - 1))
    assert len(errors) > 30
    assert statistics.median(errors) < 0.05


def test_modules_list_their_tables() -> None:
    parts = (megatron_papers, fully_sharded, megatron_ci, lengths)
    assert tuple(known for part in parts for known in part.TABLES) == ALL
