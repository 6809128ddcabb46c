"""The sweep over architectures: two classes end to end, what a cut-off run leaves, and the page that a file gives."""

from __future__ import annotations

import copy
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import ids, stack
from torch import nn

import memo
from benchmarks import architectures, results
from benchmarks.architectures import main
from benchmarks.architectures_page import BEGIN, END, PAGE, RECOMPUTE, is_whole, newest, page, with_figures
from benchmarks.architectures_reasons import reasons_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SETTINGS = ["1", "0.3", "0", "matmuls", "input", "bfloat16"]


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of results of its own."""
    monkeypatch.setenv("OUT", str(tmp_path))
    results._claim.cache_clear()
    yield tmp_path
    results._claim.cache_clear()


def kept(*what: tuple[str, str, int, str]) -> dict[str, Any]:
    nbytes = sum(one[2] for one in what)
    entry = {"layers": 2, "module": "SmallLayer", "saved_nbytes": 1000, "kept_nbytes": nbytes, "point": "attention"}
    return {**entry, "kept": [list(one) for one in what]}


def cell(share: float, **more: Any) -> dict[str, Any]:
    return {"equal": True, "moved_bytes": int(2048 * share), "share": share, **more}


ATTENTION = ("aten._scaled_dot_product_flash_attention_for_cpu", "attention is kept", 60, "")
INPUT = ("hidden states", "it was there before the layer", 40, "")
CHOICE = ("aten._softmax", "what it is made of is not kept", 100, "aten.topk: sorting is kept")


def row(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "layers": 2,
        "settings": {
            "1": cell(1.0),
            "0.3": cell(0.4),
            "0": cell(0.1, reasons=[entry]),
            "matmuls": cell(0.5),
            "input": cell(0.05),
            "bfloat16": {"equal": True, "moved_bytes": 3},
        },
    }


def result_of(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "date": "2026-01-02",
        "begun": "03:04:05",
        "commit": "abcdef0123",
        "hardware": {"cpu": "A processor", "cores": 2, "memory_bytes": 1 << 34, "kernel": "1"},
        "torch": "2.0",
        "transformers": "5.0",
        "shape": {"batch": 2, "seq": 160},
        "options": {"settings": SETTINGS, "dropout": 0.0, "attention": None, "experts": None, "timeout_s": 60.0},
        "summary": architectures.summary(rows, SETTINGS),
        "architectures": list(rows),
        **more,
    }


DENSE = row("DenseForCausalLM", kept(ATTENTION, INPUT))
EXPERTS = row("RoutedForCausalLM", {**kept(INPUT, CHOICE), "experts": True})
FAILED = {"name": "UnmadeForCausalLM", "settings": {}, "failed": "not built: ValueError: a | b <c>"}


def line(text: str, begins: str) -> str:
    (found,) = [line for line in text.splitlines() if line.startswith(begins)]
    return found


def test_a_class_is_a_row_with_shares_and_reasons() -> None:
    text = page(result_of(DENSE, EXPERTS, FAILED), "some.json")
    every = text[text.index("## Every class") :]
    shares = "2 KiB | 0.400 | 0.500 | 0.100 | 0.050 | = "
    assert line(every, "| DenseForCausalLM") == f"| DenseForCausalLM | {shares}| attention 60 %, input 40 % |"
    assert line(every, "| RoutedForCausalLM") == f"| RoutedForCausalLM | {shares}| sort 71 %, input 29 % |"
    assert line(every, "| UnmadeForCausalLM").endswith("| not built: ValueError: a / b (c) |")
    experts = text[text.index("## Experts") : text.index("## Convolutions")]
    assert line(experts, "| RoutedForCausalLM")
    assert "DenseForCausalLM" not in experts


def test_the_page_says_what_it_is_made_from_and_sums_up() -> None:
    text = page(result_of(DENSE, EXPERTS, FAILED), "some.json")
    plain = " ".join(text.split())
    for told in ("some.json", "2026-01-02", "abcdef0123", "torch 2.0", "transformers 5.0", "A processor", "16 GiB"):
        assert told in plain
    assert "2 of 3 classes were built" in plain
    assert line(text, "| alpha 0 |") == "| alpha 0 | attention outputs | 2 of 2 | 0.100 | 2 of 2 | 2 of 2 |"
    assert "Not equal" not in text
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith(("|", "<", " ")))


def test_what_differs_or_raises_stands_out() -> None:
    differs, raises = copy.deepcopy(DENSE), copy.deepcopy(EXPERTS)
    differs["settings"]["0"].update(equal=False, differs=["gradient of x"])
    raises["settings"]["bfloat16"] = {"equal": False, "error": "ValueError: x"}
    text = page(result_of(differs, raises), "some.json")
    assert "**Not equal: DenseForCausalLM at alpha 0 and RoutedForCausalLM at bfloat16.**" in " ".join(text.split())
    every = text[text.index("## Every class") :]
    assert "| **differs** |" in line(every, "| DenseForCausalLM")
    assert "| **raises** |" in line(every, "| RoutedForCausalLM")


def test_the_committed_page_is_made_of_the_newest_committed_sweep() -> None:
    path = newest(RESULTS)
    result, anew = json.loads(path.read_text()), f"make it anew: python -m benchmarks.architectures --page {path}"
    assert PAGE.read_text() == page(result, path.name), anew
    text = RECOMPUTE.read_text()
    assert text == with_figures(text, result, path.name), anew


def test_figures_are_put_between_their_marks() -> None:
    text = f"before\n\n{BEGIN}\n\nold figures\n\n{END}\n\nbehind\n"
    made = with_figures(text, result_of(DENSE, EXPERTS, FAILED), "some.json")
    assert made.startswith(f"before\n\n{BEGIN}\n\nEvery causal")
    assert made.endswith(f"|\n\n{END}\n\nbehind\n")
    assert "old figures" not in made
    assert "| at most a fifth moves at alpha 0 | 108 of 208 | 2 of 2 |" in made
    assert "(../benchmarks/results/some.json)" in made
    assert with_figures(made, result_of(DENSE, EXPERTS, FAILED), "some.json") == made
    with pytest.raises(ValueError, match="substring not found"):
        with_figures("no marks", result_of(DENSE), "some.json")


def test_the_newest_whole_sweep_is_taken(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        newest(tmp_path)
    made = {
        "b": result_of(DENSE),
        "a": result_of(DENSE, begun="03:04:06"),
        "part": result_of(DENSE, begun="09:00:00", classes=2),
        "variant": result_of(DENSE, begun="09:00:01", options={"dropout": 0.1}),
        "older": result_of(DENSE, date="2025-12-31", begun="23:00:00"),
    }
    for name, result in made.items():
        (tmp_path / f"{name}-architectures.json").write_text(json.dumps(result))
    (tmp_path / "claimed-architectures.json").touch()
    assert newest(tmp_path).name == "a-architectures.json"
    assert not is_whole(result_of(FAILED)), "without any reason"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "LlamaForCausalLM", "Lllama"], "no class 'Lllama' in the installed transformers; near it: Llama"),
        (["--only", "%"], "no class '%' in the installed transformers; --list prints all"),
        (["--settings", "1,2"], "no setting '2'; they are 1, 0.3, 0, "),
        (["--part", "3/2"], "--part 3/2: give i/n"),
        (["--page", "none.json"], "none.json: [Errno 2]"),
    ],
)
def test_what_is_unknown_is_one_line(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"architectures: {told}")
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_parts_are_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*arguments: str) -> list[str]:
        assert main([*arguments, "--list"]) == 0
        return capsys.readouterr().out.split()

    parts = [listed("--part", f"{number}/3") for number in (1, 2, 3)]
    assert sorted(itertools.chain(*parts), key=str.lower) == listed()
    assert listed("--only", "LlamaForCausalLM", "mixtral", "--limit", "2") == ["LlamaForCausalLM", "MixtralForCausalLM"]


def test_a_sweep_that_is_cut_off_leaves_what_it_had_and_goes_on(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def sweep(wanted: list[str], options: Any) -> Iterator[dict[str, Any]]:
        asked.append(list(wanted))
        for number, name in enumerate(wanted):
            if number == 1:
                raise KeyboardInterrupt
            yield {**copy.deepcopy(DENSE), "name": name, "seconds": 1.0}

    monkeypatch.setattr(architectures, "sweep", sweep)
    chosen = ["--only", "LlamaForCausalLM", "MistralForCausalLM"]
    assert main(chosen) == 130
    (path,) = out.glob("*-architectures.json")
    assert [row["name"] for row in json.loads(path.read_text())["architectures"]] == ["LlamaForCausalLM"]
    assert f"--continue {path}" in capsys.readouterr().out
    results._claim.cache_clear()  # as another process
    assert main([*chosen, "--continue", str(path)]) == 0
    (other,) = set(out.glob("*-architectures.json")) - {path}
    result = json.loads(other.read_text())
    assert asked[1] == ["MistralForCausalLM"]
    assert [row["name"] for row in result["architectures"]] == ["LlamaForCausalLM", "MistralForCausalLM"]
    assert [one["file"] for one in result["continues"]] == [path.name]
    assert ["commit" in row for row in result["architectures"]] == [True, False]
    assert not is_whole(result)
    assert main([*chosen, "--limit", "1", "--again", "LlamaForCausalLM", "--continue", str(other)]) == 0
    assert asked[2] == ["LlamaForCausalLM"]
    (last,) = set(out.glob("*-architectures.json")) - {path}
    assert last == other, "of one process"
    rows = json.loads(last.read_text())["architectures"]
    assert [(row["name"], "commit" in row) for row in rows] == [
        ("LlamaForCausalLM", False),
        ("MistralForCausalLM", True),
    ]
    assert main([*chosen, "--dropout", "0.1", "--continue", str(path)]) == 2
    assert "it is of another dropout" in capsys.readouterr().err


def test_each_row_is_written_while_the_sweep_runs(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def sweep(wanted: list[str], options: Any) -> Iterator[dict[str, Any]]:
        for name in wanted:
            yield {**copy.deepcopy(DENSE), "name": name, "seconds": 1.0}
            (path,) = out.glob("*-architectures.json")
            seen.append(json.loads(path.read_text())["summary"]["examined"])

    monkeypatch.setattr(architectures, "sweep", sweep)
    monkeypatch.setattr(architectures, "WRITTEN_EACH_S", 0.0)
    assert main(["--limit", "3"]) == 0
    assert seen == [1, 2, 3]


def test_two_classes_end_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.architectures", "--only", "LlamaForCausalLM", "MixtralForCausalLM"]
    environment = {**os.environ, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--workers", "1"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    (path,) = tmp_path.glob("*-architectures.json")
    result = json.loads(path.read_text())
    assert line(done.stdout, "  1/2 LlamaForCausalLM").count("=") == len(SETTINGS)
    assert {name: found["equal"] for name, found in result["summary"]["settings"].items()} == dict.fromkeys(SETTINGS, 2)
    dense, routed = result["architectures"]
    for found in (dense["settings"], routed["settings"]):
        assert 1 == found["1"]["share"] > found["0.3"]["share"] > found["0"]["share"] > found["input"]["share"] > 0
    (entry,) = dense["settings"]["0"]["reasons"]
    assert {why for _, why, _, _ in entry["kept"]} == {"attention is kept", "it was there before the layer"}
    assert sum(nbytes for _, _, nbytes, _ in entry["kept"]) == entry["kept_nbytes"]
    assert not entry["experts"]
    assert entry["layers"] * entry["kept_nbytes"] == dense["settings"]["0"]["moved_bytes"]
    assert all(entry["experts"] for entry in routed["settings"]["0"]["reasons"])
    text = page(result, path.name)
    assert line(text[text.index("## Experts") :], "| MixtralForCausalLM | 2 Mixtral")
    assert line(text[text.index("## Every") :], "| LlamaForCausalLM").endswith("| attention 52 %, input 48 % |")


class WrittenOut(nn.Module):
    """Attention as products and a softmax: the product with the values is kept as its copy."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(((q @ k.transpose(2, 3)).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_what_is_made_of_something_that_stays_names_that() -> None:
    model = stack(layers=2, make=WrittenOut)
    manager = memo.offload(model, alpha=0.0, host="64MiB", min_bytes=1)
    assert [entry["whole"] for entry in reasons_of(manager)] == ["no forward of it has run in the manager yet"]
    for step in range(2):
        with manager:
            loss = model(ids(step))
        loss.backward()
    (entry,) = reasons_of(manager)
    manager.close()
    assert (entry["layers"], entry["module"]) == (2, "WrittenOut")
    origins = {origin for operator, _, _, origin in entry["kept"] if operator == "aten.clone"}
    assert origins == {"aten.bmm: a product of two activations is kept"}
