"""Steps that one GPU took beside what `memo plan` predicts of them: the first table of docs/accuracy.md.

    python -m benchmarks.step_times            writes a result file and prints the table; make plots writes it into the page

The rows are benchmarks/data/measured_steps.toml; their measured numbers are read from result files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, newest_result, write_result
from memo.cli import plan as plan_command
from memo.cli.inputs.planned_model import planned_model
from memo.cli.planning.request import parse_request
from memo.gpt import GPTConfig
from memo.hugging_face import PUBLISHED
from memo.loss import added_nbytes, chunk_tokens
from memo.search import Request
from memo.toml_tables import toml_tables
from memo.units import parse_tokens

RESULTS = ROOT / "benchmarks" / "results"
FORMER_LOGITS = 1 << 25
"""Logits of a chunk of the loss until 28 November 2026."""
FORMER_MORE_BYTES = 32
"""Bytes that it moved of a logit beyond those of today."""


def step_rows() -> dict[str, dict[str, Any]]:
    """Fields of each row, by what it is."""
    return toml_tables(str(ROOT / "benchmarks" / "data" / "measured_steps"), "measured_steps.toml")


def measured_s(row: dict[str, Any], folder: Path = RESULTS) -> float:
    """Seconds of a step, as the row's file says."""
    text, keys = (folder / row["file"]).read_text(), row["at"].split()
    if row["file"].endswith(".log"):
        return float(next(line for line in text.splitlines() if row["at"] in line).split(" s measured")[0].split()[-1])
    lines = row["file"].endswith(".jsonl")
    found: Any = [json.loads(line) for line in text.splitlines()] if lines else json.loads(text)
    for key in keys:
        found = found[int(key)] if isinstance(found, list) else found[key]
    if keys[-1] == "tokens_per_s":
        flags = row["plan"].split()
        return parse_tokens(flags[flags.index("--seq") + 1]) / float(found)
    return float(found)


def predicted_s(row: dict[str, Any]) -> float:
    """Seconds of the step by `memo plan`, the former loss's additional bytes with them."""
    request = _request(row)
    plan = request.plan()
    profile = plan.problem.profile
    seconds = plan.step_s if row.get("optimizer", True) else plan.step_s - profile.optimizer_s
    return seconds + _former_loss_s(request)


def _request(row: dict[str, Any]) -> Request:
    parser = argparse.ArgumentParser()
    plan_command.configure(parser)
    flags = [*row["plan"].split(), *row.get("flags", "").split()]
    with tempfile.TemporaryDirectory() as folder:
        if row.get("transformers"):
            at = flags.index("--model") + 1
            path = Path(folder, f"{flags[at]}.json")
            path.write_text(json.dumps(PUBLISHED[flags[at]].config))
            flags[at] = str(path)
        args = parser.parse_args(flags)
        args = argparse.Namespace(
            **{**vars(args), **{k: v for k, v in plan_command.DEFAULTS.items() if getattr(args, k) is None}}
        )
        model = planned_model(args)
        if isinstance(model, GPTConfig) and "heads" in row:
            heads = row["heads"]
            model = dataclasses.replace(model, heads=heads, kv_heads=heads, positions=row["positions"])
        return parse_request(args, model=model)


def _former_loss_s(request: Request) -> float:
    """Seconds by which memo's loss without logits took longer, by its bytes."""
    config, tokens = request.config, request.layout.tokens
    if isinstance(config, GPTConfig):
        vocabulary, hidden, trained = config.vocab_size, config.hidden, not request.lora
    else:
        assert config is not None
        vocabulary, hidden, trained = config.vocabulary, config.hidden, not request.lora
    nbytes = FORMER_MORE_BYTES * vocabulary * tokens
    if trained:
        former = 1 << ((FORMER_LOGITS // vocabulary).bit_length() - 1)
        chunks = tokens / former - tokens / chunk_tokens(vocabulary, trained=True)
        nbytes += chunks * added_nbytes(vocabulary * hidden, 2)
    return nbytes / request.machine.elementwise_bytes_per_s


def step_table(folder: Path = RESULTS) -> list[str]:
    """Lines of Markdown: each step, measured and predicted, from the newest result file."""
    body = newest_result("step-times", folder)
    lines = [["step", "measured", "predicted", "error"], ["---"] * 4]
    for row in [] if body is None else body["steps"]:
        error = row["predicted_s"] / row["measured_s"] - 1
        lines.append(
            [row["what"], f"{row['measured_s']:.2f} s", f"{row['predicted_s']:.2f} s", f"{100 * error:+.1f} %"]
        )
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _steps() -> Iterator[dict[str, Any]]:
    for what, row in step_rows().items():
        yield {"what": what, "file": row["file"], "measured_s": measured_s(row), "predicted_s": predicted_s(row)}


def main() -> int:
    """Predicts each row."""
    found: list[dict[str, Any]] = []
    for row in _steps():
        found.append(row)
        measured, predicted = row["measured_s"], row["predicted_s"]
        print(f"{row['what']:60} {measured:7.3f} {predicted:7.3f} {predicted / measured - 1:+.1%}", flush=True)
        write_result("step-times", {"steps": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
