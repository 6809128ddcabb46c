"""`memo plan --search --html`: the page's numbers are those of the answer, of the plans and of their simulated steps."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from searched import HOSTILE, Searched, searched
from small_clusters import random_space

from memo.cli.main import main
from memo.cli.planning import layouts, picture
from memo.errors import ExitCode
from memo.mip.activation import stage_memory
from memo.trace import render_page

SEARCH = ["plan", "--search", "--model", "125m", "--layers", "4", "--seq", "4k", "--gpu", "a100-80g"]
SEARCH += ["--gpus-per-node", "2", "--batch-tokens", "16k"]
TWO_CHUNKS, SPLIT_BACKWARD, ONE_GPU, MOVING = 22, 10, 1, 3
"""Seeds of clusters."""


@pytest.fixture(scope="module", params=[TWO_CHUNKS, SPLIT_BACKWARD, ONE_GPU, MOVING])
def one(request: pytest.FixtureRequest) -> Searched:
    return searched(random_space(request.param))


def embedded(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="memo-data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_has_the_answer_and_a_drawing_of_each_layout_it_shows(one: Searched) -> None:
    assert one.page["search"] == one.answer
    assert len(one.page["drawn"]) == len(one.shown)
    written = one.shown[one.page["written"]][0]
    assert written is (one.found.runnable or one.found.best[0])
    others = [planned for planned in one.found.planned if planned not in [shown for shown, _ in one.shown]]
    for other in others[:1]:  # the simulator agrees with none that is shown
        page = picture.search_page(one.answer, one.shown, space=one.found.space, written=other.candidate)
        assert page["written"] is None


def test_the_memory_of_each_stage_is_the_plan_s(one: Searched) -> None:
    entries = [*one.answer["best"], one.answer["runs"]]
    for (planned, _), drawing, entry in zip(one.shown, one.page["drawn"], entries, strict=False):
        stages = drawing["stages"]
        for number, stage in enumerate(stages):
            memory = stage_memory(planned.plan.problem.stages[number], planned.plan.layers)
            assert stage["memory"]["peak_bytes"] == memory.nbytes == sum(stage["memory"]["uses_bytes"].values())
            assert stage["memory"]["uses_bytes"].keys() == one.page["uses"].keys()
        fullest = max(stages, key=lambda stage: stage["memory"]["peak_bytes"])
        assert fullest["memory"] == entry["memory"]


def test_the_seconds_of_a_stage_add_up_to_the_simulated_step(one: Searched) -> None:
    for (_, simulation), drawing in zip(one.shown, one.page["drawn"], strict=True):
        assert drawing["simulated_step_s"] == simulation.step_s
        for stage, simulated in zip(drawing["stages"], simulation.stages, strict=True):
            assert sum(stage["seconds"].values()) == pytest.approx(simulation.step_s, rel=1e-9)
            assert stage["seconds"]["stall"] == simulated.stall_s
            work = sum(stage["seconds"][phase] for phase in ("forward", "backward", "optimizer"))
            assert work == pytest.approx(simulated.compute_s)


def of_spans(stage: dict[str, Any], step_s: float) -> dict[str, float]:
    """Seconds of a stage by what its spans say."""
    found = dict.fromkeys(("forward", "backward", "optimizer", "recompute", "stall", "communication"), 0.0)
    phases = {"F": "forward", "B": "backward", "I": "backward", "W": "backward", "O": "optimizer"}
    for start, end, turn, *shares in stage["spans"]:
        seconds = (end - start) / picture.UNITS * step_s
        for name, share in zip(("recompute", "stall", "communication"), shares, strict=False):
            found[name] += seconds * share / 1000
        found[phases[stage["turns"][turn][0]]] += seconds * (1 - sum(shares) / 1000)
    return found


def test_the_spans_are_the_simulation_s(one: Searched) -> None:
    for (planned, simulation), drawing in zip(one.shown, one.page["drawn"], strict=True):
        pipeline = planned.plan.problem.pipeline
        for stage in drawing["stages"]:
            spans, turns = stage["spans"], stage["turns"]
            assert all(before[1] <= after[0] and before[2] <= after[2] for before, after in itertools.pairwise(spans))
            assert spans[-1][1] <= picture.UNITS
            forwards = [turn for turn in turns if turn.startswith("F")]
            assert len(set(forwards)) == len(forwards) == pipeline.microbatches * pipeline.chunks
            assert len([turn for turn in turns if turn[0] in "BI"]) == len(forwards)
            halves = [{turn[1:] for turn in turns if turn[0] == half} for half in "IW"]
            assert halves[0] == halves[1]
            for name, seconds in of_spans(stage, simulation.step_s).items():
                near = simulation.step_s * (1e-6 * len(spans) + 1e-3)
                assert seconds == pytest.approx(stage["seconds"][name], abs=near), name


def test_groups_are_told_for_each_kind_of_parallelism(one: Searched) -> None:
    for (planned, simulation), drawing in zip(one.shown, one.page["drawn"], strict=True):
        shape = planned.candidate.shape
        sizes = {"tp": shape.tp, "cp": shape.cp, "ep": shape.ep, "dp": shape.dp * shape.cp, "pp": shape.pp}
        assert {group["kind"]: group["ranks"] for group in drawing["groups"]} == {
            kind: size for kind, size in sizes.items() if size > 1
        }
        alone = sizes["dp"] == 1  # then only the ends of a pipeline communicate beside the optimizer, over tied weights
        network = max(
            sum(
                span.seconds
                for span in stage.spans
                if span.lane == "network" and not (alone and span.phase == "optimizer")
            )
            for stage in simulation.stages
        )
        told = sum(group["seconds"] or 0.0 for group in drawing["groups"] if group["kind"] != "pp")
        assert told >= network * (1 - 1e-9)


def test_a_timeline_without_room_is_joined_within_passes_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = searched(random_space(MOVING)).page["drawn"]
    monkeypatch.setattr(picture, "MOST_SPANS", 1)
    page = searched(random_space(MOVING)).page
    first, before = page["drawn"][0]["stages"][0], whole[0]["stages"][0]
    assert len(first["spans"]) == len({span[2] for span in before["spans"]}) < len(before["spans"])
    there = [number for number, one in enumerate(page["drawn"]) if "spans" in one["stages"][0]]
    assert there == [0]
    step_s = page["drawn"][0]["simulated_step_s"]
    assert of_spans(first, step_s) == pytest.approx(of_spans(before, step_s), abs=2e-3 * step_s)


def test_names_reach_the_page_as_data_alone() -> None:
    page = searched(random_space(ONE_GPU), model=HOSTILE).page
    html = render_page(page, title=f"memo plan --search: {HOSTILE}", assets="search")
    assert not set("<>&") & set(html.split('id="memo-data">')[1].split("</script>")[0])
    assert "<b>" not in html
    assert html.count("</script>") == 3
    assert embedded(html) == page


def test_the_command_writes_the_page_of_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "page.html"
    assert main([*SEARCH, "--json", "--html", str(target)]) == ExitCode.OK
    answer = json.loads(capsys.readouterr().out)
    html = target.read_text(encoding="utf-8")
    assert embedded(html)["search"] == answer
    assert "http-equiv" in html
    assert not re.findall(r"(?:src|href)=", html.split("<script", 1)[0])
    monkeypatch.setattr(layouts, "search_layouts", None)  # an existing file is refused before the search
    assert main([*SEARCH, "--html", str(target)]) == ExitCode.FAILURE
    assert "-f to overwrite" in capsys.readouterr().err


def test_a_page_goes_with_a_search_only(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "125m", "--seq", "4k", "--gpu", "a100-80g", "--html", "page.html"]
    assert main(arguments) == ExitCode.USAGE
    assert "--html goes with --search only" in capsys.readouterr().err


def test_the_plan_and_the_page_are_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "both"
    arguments = [*SEARCH, "-o", str(target), "--html", str(tmp_path / "." / "both")]
    assert main(arguments) == ExitCode.USAGE
    assert "are two files" in capsys.readouterr().err
    assert not target.exists()


def test_a_cluster_that_holds_nothing_leaves_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    assert main([*SEARCH, "--device", "128MiB", "--html", str(target)]) == ExitCode.INFEASIBLE
    assert not target.exists()
