"""The table of peers: a process a way, limits that the kernel enforces, gradients compared, reasons in one line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import pages
from benchmarks.hf_table import predicted_table
from benchmarks.pages import newest, readme, results_page, searched
from benchmarks.peers.__main__ import Options, Steps, _peak, main, parsed, quartiles
from benchmarks.peers.models import Shape
from benchmarks.peers.process import Process
from benchmarks.peers.request import ALPHAS, AUTOMATIC, INPUTS, SAVED_TENSORS
from benchmarks.peers.sac_ilp import decisions_of
from benchmarks.peers.ways import ATTENTION, ATTENTION_OFFLOADED, CHECKPOINTING, KEEP, TRL
from benchmarks.results import ROOT
from benchmarks.step_times import step_table

pytest.importorskip("transformers", reason="the Llama of the table is transformers'")
SMALL = ["--layers", "3", "--hidden", "64", "--tokens", "256", "--rounds", "2"]


def options(tmp_path: Path, *more: str) -> Options:
    return parsed([*SMALL, "--disk-dir", str(tmp_path), *more])


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_every_way_steps_in_turn_to_the_same_gradients(tmp_path: Path, family: Any) -> None:
    ours = [f"memo, {name}" for name in ALPHAS] + [INPUTS, AUTOMATIC, SAVED_TENSORS]
    given = options(tmp_path, "--only", "; ".join([*ours, "sac_ilp, half", ATTENTION, ATTENTION_OFFLOADED, TRL]))
    (rows,) = Steps(given, given.shape(family, given.tokens)).run()
    by_way = {row["way"]: row for row in rows}
    assert "accelerator" in by_way.pop(TRL)["failed"]
    assert not {way: row["failed"] for way, row in by_way.items() if "failed" in row}
    assert {row["gradient_difference"] for row in by_way.values()} == {0.0}
    assert by_way[KEEP]["to_keep"] == {"median": 1.0, "spread": 0.0}
    assert by_way[SAVED_TENSORS]["out_bytes"] > 0 == by_way[SAVED_TENSORS]["back_bytes"]  # all is in the last region
    assert by_way["memo, all moved"]["out_bytes"] > by_way["memo, alpha 0"]["out_bytes"] > 0
    assert by_way[KEEP]["out_bytes"] == by_way[ATTENTION]["out_bytes"] == 0
    inputs = given.layers * given.tokens * given.hidden * 4
    assert by_way[ATTENTION_OFFLOADED]["out_bytes"] == inputs


def test_a_gradient_of_other_weights_is_seen(tmp_path: Path) -> None:
    given = options(tmp_path)
    shape = given.shape("gpt", 128)
    for heads, expected in ((1, 0.0), (2, None)):
        with Process(given.request(KEEP, dataclasses.replace(shape, heads=heads)), threads=1) as process:
            process.step()
            found = process.gradients(tmp_path / "gradients.pt")["difference"]
        assert found == expected if expected is not None else found > 0


def test_a_length_above_the_limit_is_a_reason_and_one_below_a_peak(tmp_path: Path) -> None:
    given = options(tmp_path)
    assert isinstance(_peak(given, "gpt", KEEP, 192 << 20, 1, 256), int)
    why = _peak(given, "gpt", KEEP, 64 << 20, 1, 16 << 10)
    assert isinstance(why, str)
    assert "memory" in why


def test_a_process_that_cannot_start_leaves_its_last_words(tmp_path: Path) -> None:
    given = options(tmp_path)
    with Process(given.request("a way that nobody knows", given.shape("gpt", 64)), threads=1) as process:
        assert "StopIteration" in process.started["failed"]


def test_unknown_ways_and_parts_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--only", "TRL"], ["--parts", "speed"], ["--families", "bert"]):
        with pytest.raises(SystemExit) as ended:
            parsed(flags)
        assert ended.value.code == 2
        assert "unknown" in capsys.readouterr().err.splitlines()[-1]


def test_without_a_gpu_the_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["--device", "cuda"]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_ilp_saves_more_operators_with_more_memory() -> None:
    shape = Shape(family="gpt", layers=1, hidden=64, heads=1, tokens=128)
    model, _ = shape.make(torch.device("cpu"))
    seen: list[Any] = []
    layer = model.layers[0]  # type: ignore[index]
    handle = layer.register_forward_pre_hook(lambda layer, args, named: seen.append((args, named)), with_kwargs=True)
    _, ids = shape.make(torch.device("cpu"))
    shape.loss(model, ids)
    handle.remove()
    args, named = seen[0]
    saved = [sum(decisions_of(layer, args, named, share)) for share in (0.0, 0.5, 1.0)]
    assert saved[0] == 0
    assert saved[0] < saved[1] < saved[2]


def test_quartiles() -> None:
    assert quartiles([1.0]) == {"median": 1.0, "spread": 0.0}
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == {"median": 3.0, "spread": 1.0}


def test_the_page_and_readme_are_what_the_result_files_give() -> None:
    assert (ROOT / "docs" / "results.md").read_text() == results_page(), "run `make plots`"
    text = (ROOT / "README.md").read_text()
    assert text == readme(text), "run `make plots`"
    for name, lines in (("gpu", predicted_table()), ("search", searched()), ("accuracy", step_table())):
        page = (ROOT / "docs" / f"{name}.md").read_text()
        assert page == pages.with_block(page, lines), "run `make plots`"
    assert pages.BEGIN in text


def test_the_newest_file_is_the_one_begun_last(tmp_path: Path) -> None:
    for name, date, begun in (
        ("a", "2026-11-22", "23:00:00"),
        ("b", "2026-11-23", "01:00:00"),
        ("c", "2026-11-23", "00:30:00"),
    ):
        body = {"benchmark": "peers", "date": date, "begun": begun}
        (tmp_path / f"{name}-peers.json").write_text(json.dumps(body))
    (tmp_path / "d-peers.json").write_text(
        json.dumps({"benchmark": "gpu-peers", "date": "2027-01-01", "begun": "00:00:00"})
    )
    found = newest("peers", tmp_path)
    assert found is not None
    assert found.path.name == "b-peers.json"
    assert newest("solver", tmp_path) is None
    assert CHECKPOINTING == pages.CHECKPOINTING
