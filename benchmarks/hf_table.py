"""README's first table: a model of transformers on one GPU, by the flags that there are and by memo, from result files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu_hf import ALPHA_0, DEFAULTS, best_flag_s
from benchmarks.peers.ways import ATTENTION, AXOLOTL, CHECKPOINTING, KEEP, TRANSFORMERS_ATTENTION
from benchmarks.results import ROOT, newest_result
from memo.units import format_tokens

RESULTS = ROOT / "benchmarks" / "results"
MODEL, GPU, LENGTHS = "llama-3-8b+lora16", "H100", (32 << 10, 64 << 10)
METHODS = {
    KEEP: "keep everything",
    CHECKPOINTING: "full checkpointing",
    ATTENTION: "attention kept (TRL's `selective`)",
    TRANSFORMERS_ATTENTION: "attention kept, inputs on the host (transformers' `offload=True`)",
    AXOLOTL: "attention and inputs on the host (Axolotl's two flags)",
    ALPHA_0: "memo, `alpha=0`: attention and inputs on the host",
    DEFAULTS: "**memo, defaults**: `memo.offload(model)`",
}
"""In the table's order."""
BENCHMARKS = ("gpu-bench-hf", "gpu-bench-defaults")


def hf_table(folder: Path = RESULTS) -> list[str]:
    """Lines of Markdown: a row for each method, at each length step, device and host memory, and what was predicted."""
    rows = {(row["tokens"], row["way"]): row for row in _rows(folder)}
    predicted = {(row["tokens"], row["way"]): row for row in _predicted(folder)}
    lengths = [format_tokens(tokens) for tokens in LENGTHS]
    heads = [
        "method",
        *(f"step at {length} (predicted)" for length in lengths),
        *(f"GPU, host at {length}" for length in lengths),
    ]
    lines = [heads, ["---"] * len(heads)]
    for way, method in METHODS.items():
        each = [(rows.get((tokens, way)), predicted.get((tokens, way))) for tokens in LENGTHS]
        lines.append([method, *(_step(*pair) for pair in each), *(_memory(row) for row, _ in each)])
    return [f"| {' | '.join(cells)} |" for cells in lines]


def predicted_table(folder: Path = RESULTS) -> list[str]:
    """Lines of Markdown: a row for each model and length of the newest prediction, a column for each method.

    The last column is the step of memo's defaults over that of the best other method at no more device memory.
    """
    body = newest_result("hf-predicted", folder)
    heads = ["model, tokens", *METHODS, "defaults / best other"]
    lines = [heads, ["---"] * len(heads)]
    for case in [] if body is None else body["cases"]:
        rows = {row["way"]: row for row in case["ways"]}
        name = f"{case['model']}, {format_tokens(case['tokens'])}"
        lines.append([name, *(_predicted_cell(rows.get(way)) for way in METHODS), _over_best(rows)])
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _over_best(rows: dict[str, dict[str, Any]]) -> str:
    found = [
        {"way": way, "step_s": row["predicted_s"], "peak_device_bytes": row.get("predicted_device_bytes")}
        for way, row in rows.items()
        if row["predicted_s"] is not None
    ]
    own = next((row for row in found if row["way"] == DEFAULTS), None)
    best = None if own is None else best_flag_s(own, found)
    return "" if own is None or best is None else f"{own['step_s'] / best:.2f}"


def _predicted_cell(row: dict[str, Any] | None) -> str:
    if row is None or row["predicted_s"] is None:
        return "out of memory" if row is not None else ""
    host = row["predicted_host_bytes"]
    memory = f"{row['predicted_device_bytes'] / 2**30:.1f}" + (f" + {host / 2**30:.1f}" if host else "")
    return f"{row['predicted_s']:.2f} s, {memory} GiB"


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Rows that were measured on this GPU, oldest first, each with its length."""
    files = [json.loads(path.read_text()) for path in folder.glob("*-gpu-bench-*.json")]
    ours = [body for body in files if body["benchmark"] in BENCHMARKS and GPU in body["device"]["gpu"]]
    for body in sorted(ours, key=lambda body: (body["date"], body["begun"])):
        for case in body["cases"]:
            if (case["model"], case["layers"], case.get("fields") or {}) == (MODEL, None, {}):
                yield from ({**row, "tokens": case["tokens"]} for row in case["ways"] if _is_told(row))


def _is_told(row: dict[str, Any]) -> bool:
    """True for a step, and for keeping everything where it has no room: what failed of others is no figure of theirs."""
    return row["failed"] is None or row["way"] == KEEP


def _predicted(folder: Path) -> Iterator[dict[str, Any]]:
    for case in (newest_result("hf-predicted", folder) or {"cases": []})["cases"]:
        if (case["model"], case["layers"]) == (MODEL, None):
            yield from ({**row, "tokens": case["tokens"]} for row in case["ways"])


def _step(row: dict[str, Any] | None, predicted: dict[str, Any] | None) -> str:
    seconds = None if predicted is None else predicted["predicted_s"]
    told = "" if seconds is None else f" ({seconds:.2f})"
    if row is None:
        return f"not measured{told}"
    return "out of memory" if row["failed"] is not None else f"{row['step_s']:.2f} s{told}"


def _memory(row: dict[str, Any] | None) -> str:
    if row is None or row["failed"] is not None:
        return ""
    host = row["peak_host_bytes"] or 0
    return f"{row['peak_device_bytes'] / 2**30:.1f} GiB" + (f", {host / 2**30:.1f} GiB" if host else "")
