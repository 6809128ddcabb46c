"""README's table of flags: the newest row of each method counts, what was not measured says so, predictions stand beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu_hf import ALPHA_0, DEFAULTS
from benchmarks.hf_table import METHODS, MODEL, hf_table, predicted_table
from benchmarks.peers.ways import ATTENTION, AXOLOTL, CHECKPOINTING, KEEP

GIB = 1 << 30


def write(
    path: Path, benchmark: str, begun: str, rows: list[dict[str, Any]], model: str = MODEL, gpu: str = "H100"
) -> None:
    case = {"model": model, "tokens": 32 << 10, "layers": None, "ways": rows}
    body = {
        "benchmark": benchmark,
        "date": "2026-11-27",
        "begun": begun,
        "written": begun,
        "device": {"gpu": gpu},
        "cases": [case],
    }
    path.write_text(json.dumps(body))


def ran(way: str, seconds: float, host: int = 0) -> dict[str, Any]:
    return {"way": way, "failed": None, "step_s": seconds, "peak_device_bytes": 3 * GIB, "peak_host_bytes": host}


def test_rows_are_the_newest_and_what_is_not_measured_says_so(tmp_path: Path) -> None:
    failed = {"way": KEEP, "failed": "CUDA out of memory"}
    write(
        tmp_path / "a-gpu-bench-hf.json",
        "gpu-bench-hf",
        "09:00:00",
        [ran(DEFAULTS, 2.0, 5 * GIB), {"way": AXOLOTL, "failed": "x"}],
    )
    write(
        tmp_path / "b-gpu-bench-defaults.json",
        "gpu-bench-defaults",
        "08:00:00",
        [failed, ran(CHECKPOINTING, 4.0), ran(DEFAULTS, 3.0)],
    )
    write(tmp_path / "c-gpu-bench-hf.json", "gpu-bench-hf", "10:00:00", [ran(DEFAULTS, 1.0)], model="another")
    write(tmp_path / "d-gpu-bench-hf.json", "gpu-bench-hf", "10:00:00", [ran(DEFAULTS, 1.0)], gpu="A100")
    write(tmp_path / "e-hf-predicted.json", "hf-predicted", "07:00:00", [{"way": AXOLOTL, "predicted_s": 2.5}])
    lines = dict(zip(["heads", "rule", *METHODS], hf_table(tmp_path), strict=True))
    assert lines[DEFAULTS].split(" | ")[1:] == ["2.00 s", "not measured", "3.0 GiB, 5.0 GiB", " |"]
    assert lines[CHECKPOINTING].split(" | ")[1:] == ["4.00 s", "not measured", "3.0 GiB", " |"]
    assert lines[KEEP].split(" | ")[1:3] == ["out of memory", "not measured"]
    assert lines[AXOLOTL].split(" | ")[1:3] == ["not measured (2.50)", "not measured"]


def test_what_is_predicted_is_a_row_for_each_model_and_length(tmp_path: Path) -> None:
    numbers = {"predicted_s": 2.5, "predicted_device_bytes": 3 * GIB, "predicted_host_bytes": 0}
    rows = [
        {"way": KEEP, "predicted_s": None},
        {"way": DEFAULTS, **numbers},
        {"way": AXOLOTL, **numbers, "predicted_host_bytes": GIB},
        {"way": CHECKPOINTING, "predicted_s": 5.0, "predicted_device_bytes": 2 * GIB, "predicted_host_bytes": 0},
        {"way": ATTENTION, "predicted_s": 1.0, "predicted_device_bytes": 4 * GIB, "predicted_host_bytes": 0},
    ]
    write(tmp_path / "e-hf-predicted.json", "hf-predicted", "07:00:00", rows)
    _, _, line = predicted_table(tmp_path)
    cells = dict(zip(["case", *METHODS, "ratio"], line.strip("| ").split(" | "), strict=True))
    assert cells["case"] == f"{MODEL}, 32k"
    assert cells[KEEP] == "out of memory"
    assert cells[DEFAULTS] == "2.50 s, 3.0 GiB"
    assert cells[AXOLOTL] == "2.50 s, 3.0 + 1.0 GiB"
    assert cells[ALPHA_0] == ""
    assert cells["ratio"] == "1.00", "the fastest other method has more memory"
