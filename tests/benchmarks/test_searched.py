"""The published layouts that searches are held against are those of the tables, and can be planned as they stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.published.galvatron import galvatron_rows
from benchmarks.searched import cases, kept_rows, search, told


def test_megatrons_step_time_is_that_of_its_own_formula() -> None:
    """Table 1: 137 TFLOP/s on each of 32 GPUs for 512 sequences of the 1.7B model."""
    case = next(iter(cases()))
    assert case.name == "Megatron 1.7B on 32 A100"
    assert case.published_s is not None
    flops = 4 * 2 * 1.7e9 * 512 * 2048  # four passes, attention and head left out
    assert case.published_s * 32 * 137e12 == pytest.approx(flops, rel=0.15)


def test_the_search_beats_galvatrons_layout_or_finds_it_and_says_why_it_cannot() -> None:
    case = next(case for case in cases() if "without swap" in case.name)
    layers = ("--layers", "4")
    fixed = search(*case.flags, *layers, *case.layout, seconds=300)
    free = search(*case.flags, *layers, seconds=300)
    assert free["step_s"] <= fixed["step_s"] * (1 + 1e-9)
    assert (fixed["pp"], fixed["dp"], fixed["tp"]) == (1, 8, 1)
    row = {"name": case.name, "fixed": fixed, "free": free}
    assert f"{free['step_s'] / fixed['step_s']:.3f} of it" in told(row)
    lacking = search(*case.flags, "--device", "1GiB", seconds=300)
    assert "failed" in lacking
    assert lacking["failed"] in told(row | {"free": lacking})


def test_by_galvatrons_own_costs_its_plan_fits_and_swap_makes_the_step_shorter_still() -> None:
    alone, with_swap = galvatron_rows()
    assert alone["fixed"] == with_swap["fixed"]
    assert alone["fixed"]["does"] == "20 of 32 layers checkpointed"  # as its file says
    assert alone["fixed"]["peak_device_bytes"] < 36 << 30
    assert with_swap["free"]["step_s"] < alone["free"]["step_s"] < alone["fixed"]["step_s"]
    assert "in host memory" in with_swap["free"]["does"]
    assert "in host memory" not in alone["free"]["does"]
    for row in (alone, with_swap):
        assert row["free"]["simulated_step_s"] == pytest.approx(row["free"]["step_s"], rel=0.02)


def test_kept_rows_say_the_commit_that_they_are_of(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps({"commit": "old", "rows": [{"name": "a"}, {"name": "b"}]}))
    second.write_text(json.dumps({"commit": "new", "rows": [{"name": "b"}, {"name": "c", "commit": "older"}]}))
    commits = {name: row["commit"] for name, row in kept_rows([first, second]).items()}
    assert commits == {"a": "old", "b": "new", "c": "older"}


def test_every_row_names_its_source_of_comparison_once() -> None:
    known = list(cases())
    assert len({case.name for case in known}) == len(known)
    for case in known:
        assert (case.published_tokens is None) == ("--max-seq" not in case.flags)
        published = case.published_s is not None or case.published_tokens is not None
        assert published or case.cell is not None or "Galvatron" in case.name
