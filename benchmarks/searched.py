"""The layouts that others published beside those that `memo plan --search` finds for the same model, cluster and step.

    make bench ARMS=searched
    python -m benchmarks.searched [--only TEXT] [--seconds 600]

Every row is two searches as a user runs them: one with the published dimensions fixed and the rest free, one with everything
free. Both steps are predictions by the same cost model, so their ratio says what the search gains by it; what was published
beside the first says how far the model is off. Where a system moves nothing, neither may the search: layers are recomputed
whole, as there. Rows that cannot be searched are in MISSING, with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.published.rows import TABLES, read_rows
from benchmarks.results import write_result

__all__ = ["MISSING", "Case", "cases"]

GPUS_PER_NODE = 8
MISSING = (
    (
        "MT-NLG's 530B on 2,240 to 3,360 GPUs",
        "with its layout given a search had not ended after two minutes of processor time: 35 stages of 240 microbatches; "
        "the layout's own step is predicted in accuracy.md",
    ),
    (
        "Argonne's longest lengths (25B, 33B), ALST's ladder",
        "a search is for the shortest step at a length; the lengths of the published layouts are predicted in accuracy.md",
    ),
    (
        "MEMO's other sizes and lengths",
        "neither their layouts nor their step times are in the paper's text; the table that has them was not found",
    ),
    (
        "Galvatron by its own costs",
        "its profile has no time of attention apart and no times of copies, of which the cost model is made",
    ),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A published layout."""

    name: str
    flags: tuple[str, ...]
    """Model, step and cluster, for `memo plan --search`."""
    layout: tuple[str, ...]
    """The published dimensions, by the same flags."""
    published_s: float | None = None
    """Step time that was published."""


def cases() -> Iterator[Case]:
    """The published layouts of the tables in benchmarks/data/published."""
    for row in read_rows(TABLES, "megatron_ptdp_table1.csv")[:4]:
        yield _megatron(row)
    memo = {"model": "7b", "seq": "1m", "gpu": "a800", "nodes": 1, "host": "2TiB", "global-batch": 1}
    yield Case(name="MEMO 7B at 1m tokens on 8 A800", flags=_flags(**memo), layout=_flags(tp=8, cp=1, pp=1))
    llama = {
        "model": "7b",
        "variant": "llama",
        "ffn": 11008,
        "vocab": 32000,
        "seq": "2k",
        "gpu": "a100-40g",
        "nodes": 1,
    }
    galvatron = {**llama, "device": "36GB", "global-batch": 16}
    layout = _flags(pp=1, tp=1, cp=1, zero=3)
    name = "Galvatron LLaMA2-7B on 8 GPUs of 36 GB"
    yield Case(name=f"{name}, without swap", flags=_flags(**galvatron, host="0"), layout=layout)
    yield Case(name=f"{name}, with swap", flags=_flags(**galvatron, host="512GiB"), layout=layout)


def _megatron(row: Any) -> Case:
    """A row of Megatron's weak scaling: FLOPs as its paper counts them, all layers computed twice."""
    hidden, layers, batch, gpus = (row.count(name) for name in ("hidden", "layers", "global_batch", "gpus"))
    s, v = 2048, 51200
    flops = 96 * batch * s * layers * hidden**2 * (1 + s / (6 * hidden) + v / (16 * layers * hidden))
    shape = {"model": "7b", "layers": layers, "hidden": hidden, "heads": row["heads"], "ffn": 4 * hidden, "vocab": v}
    step = {"seq": "2k", "recompute": "full", "gpu": "a100-80g", "nodes": gpus // GPUS_PER_NODE, "global-batch": batch}
    return Case(
        name=f"Megatron {row['params_B']}B on {gpus} A100",
        flags=_flags(**shape, **step),
        layout=_flags(tp=row["tp"], pp=row["pp"], cp=1, zero=0),
        published_s=flops / (row.number("tflops_per_gpu") * 1e12 * gpus),
    )


def _flags(**values: object) -> tuple[str, ...]:
    return tuple(word for name, value in values.items() for word in (f"--{name}", str(value)))


def search(*flags: str, seconds: float) -> dict[str, Any]:
    """The best layout and the search's own figures; under "failed" the reason why there is none."""
    command = [sys.executable, "-m", "memo.cli.main", "plan", "--search", "--json", *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"the search was ended after {seconds:g} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    body = json.loads(done.stdout)
    names = ("pp", "dp", "cp", "tp", "schedule", "chunks", "zero", "batch", "accumulate", "step_s", "simulated_step_s")
    best = body["best"][0]
    return {name: best[name] for name in names} | {"seconds": body["seconds"], "proof": body["proof"]}


def told(case: dict[str, Any]) -> str:
    """One line of the table."""
    fixed, free = case["fixed"], case["free"]
    if "failed" in fixed or "failed" in free:
        return f"  {case['name']:48} {fixed.get('failed') or free.get('failed')}"
    published = "" if case["published_s"] is None else f"published {case['published_s']:8.2f} s, "
    return (
        f"  {case['name']:48} {published}predicted {fixed['step_s']:8.2f} s; found pp {free['pp']} dp {free['dp']} "
        f"cp {free['cp']} tp {free['tp']} {free['step_s']:8.2f} s, {free['step_s'] / fixed['step_s']:.3f} of it"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="searched", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose names have this in them")
    parser.add_argument("--seconds", type=float, default=600.0, help="a search is ended after so long")
    args = parser.parse_args(arguments)
    chosen = [case for case in cases() if args.only in case.name]
    if not chosen:
        parser.error(f"--only {args.only!r}: no row has it; rows: {', '.join(case.name for case in cases())}")
    rows: list[dict[str, Any]] = []
    body = {"rows": rows}
    for case in chosen:
        row = {"name": case.name, "flags": case.flags, "layout": case.layout, "published_s": case.published_s}
        fixed = search(*case.flags, *case.layout, seconds=args.seconds)
        rows.append(row | {"fixed": fixed, "free": search(*case.flags, seconds=args.seconds)})
        print(told(rows[-1]), flush=True)
        path = write_result("searched", body)
    print(f"\nWrote {path}")
    return 0 if all("failed" not in row["free"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
