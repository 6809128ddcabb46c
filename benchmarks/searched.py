"""The layouts that others published beside those that `memo plan --search` finds for the same model, cluster and step.

    make bench ARMS=searched
    python -m benchmarks.searched [--only TEXT [--keep RESULT ...]] [--seconds 600]

Every row is two searches as a user runs them: one with the published dimensions fixed and the rest free, one with everything
free. Rows of steps compare their seconds, rows of lengths the longest sequence that fits (`--max-seq`). Both are predictions
by the same cost model, so their ratio says what the search gains by it; what was published beside the first says how far the
model is off. Where a system moves nothing, neither may the search: layers are recomputed whole, as there. Galvatron's plan
is also held against plans by its own measurements. What lacks is in MISSING, with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.published.galvatron import galvatron_rows
from benchmarks.published.lengths import HOST_BYTES, MODELS
from benchmarks.published.megatron_papers import ARTIFACT
from benchmarks.published.rows import TABLES, Row, read_rows
from benchmarks.results import write_result
from memo.gpt import preset
from memo.gpt.arithmetic.flops import flops_per_token
from memo.mip.inputs import hardware_preset

GPUS_PER_NODE = 8
K = 1024
MISSING = (
    (
        "MEMO's layouts but for 7B, its step times but for two, its sizes of a step",
        "they are in none of the paper's text that was found",
    ),
    (
        "Argonne's layouts for 25B and 33B",
        "the figure with their longest sequences has no layout, machine or time; the page's table has A100 of 40 GB and "
        "tensor parallelism",
    ),
    (
        "Galvatron's own step time of its plan",
        "the file of the plan has none; memory and seconds in its rows are of its profile",
    ),
)
MEMO_MFU = (("7b", 8, 1024, 0.5230), ("65b", 64, 1408, 0.5145))
"""Zhao et al.: model, GPUs, thousands of tokens, utilisation of one sequence a step. memo_facts.csv has their sources."""
MEMO_GRID = (("7b", 8), ("13b", 16), ("30b", 32), ("65b", 64))
"""Zhao et al.: models, and the GPUs of each."""
MEMO_LENGTHS = (64, 128, 256, 512, 1024, 1408)
"""Thousands of tokens of one sequence; Zhao et al. reach the last one with 65B alone."""
MEMO_MEAN_MFU = 0.5133
"""Zhao et al.: mean utilisation of MEMO's runs. memo_facts.csv has the source."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A published run."""

    name: str
    flags: tuple[str, ...]
    """Model, step and cluster, for `memo plan --search`."""
    layout: tuple[str, ...] | None = None
    """The published dimensions, by the same flags; None where they were not published."""
    published_s: float | None = None
    """Step time that was published."""
    published_tokens: int | None = None
    """Longest sequence that was published; the row is of lengths then."""
    cell: tuple[str, int] | None = None
    """Model and thousands of tokens of a row that stands in MEMO's grid, of which no layout was published."""


def cases() -> Iterator[Case]:
    """The published runs of the tables in benchmarks/data/published."""
    yield from map(_megatron, read_rows(TABLES, "megatron_ptdp_table1.csv"))
    yield from map(_megatron_turing, read_rows(TABLES, "mtnlg_530b.csv"))
    yield from _memo()
    yield from _memo_grid()
    yield from _galvatron()
    yield from map(_argonne, read_rows(TABLES, "alcf_longest_lengths.csv"))
    for row in read_rows(TABLES, "alst_recipes_maxlen.csv"):
        if all(
            row.flag(part) for part in ("ckpt_offload", "tiled_mlp", "liger")
        ):  # the others are without a part of it
            yield _alst(row)


def _megatron(row: Row) -> Case:
    """A row of Megatron's weak scaling: FLOPs as its paper counts them, all layers computed twice."""
    hidden, layers, batch, gpus = (row.count(name) for name in ("hidden", "layers", "global_batch", "gpus"))
    tp, pp = row.count("tp"), row.count("pp")
    s, v = 2048, 51200
    flops = 96 * batch * s * layers * hidden**2 * (1 + s / (6 * hidden) + v / (16 * layers * hidden))
    microbatch, of_chunk = ARTIFACT[tp, pp]
    chunks = layers // pp // of_chunk if of_chunk else 1
    schedule = {"schedule": "interleaved-1f1b", "chunks": chunks} if chunks > 1 else {}
    return Case(
        name=f"Megatron {row['params_B']}B on {gpus:,} A100",
        flags=_megatron_flags(layers=layers, hidden=hidden, heads=row.count("heads"), gpus=gpus, batch=batch),
        layout=_flags(tp=tp, pp=pp, dp=gpus // (tp * pp), cp=1, zero=0, batch=microbatch, **schedule),
        published_s=flops / (row.number("tflops_per_gpu") * 1e12 * gpus),
    )


def _megatron_turing(row: Row) -> Case:
    """A row of Megatron-Turing NLG's strong scaling."""
    gpus = row.count("gpus")
    return Case(
        name=f"MT-NLG 530B on {gpus:,} A100",
        flags=_megatron_flags(layers=105, hidden=20480, heads=128, gpus=gpus, batch=1920),
        layout=_flags(tp=8, pp=35, dp=row.count("dp"), cp=1, zero=0, batch=1, schedule="1f1b"),
        published_s=row.number("iter_s"),
    )


def _megatron_flags(*, layers: int, hidden: int, heads: int, gpus: int, batch: int) -> tuple[str, ...]:
    shape = {"model": "7b", "layers": layers, "hidden": hidden, "heads": heads, "ffn": 4 * hidden, "vocab": 51200}
    step = {"seq": "2k", "recompute": "full", "gpu": "a100-80g", "nodes": gpus // GPUS_PER_NODE, "global-batch": batch}
    return _flags(**shape, **step)


def _memo() -> Iterator[Case]:
    """MEMO's two published utilisations, as seconds of one sequence, and its longest sequence of 7B."""
    of_7b = _flags(tp=8, cp=1, pp=1, dp=1)
    for model, gpus, thousands, mfu in MEMO_MFU:
        tokens = thousands * K
        flops = flops_per_token(preset(model, max_seq=tokens), tokens) * tokens
        yield Case(
            name=f"MEMO {model.upper()} at {thousands}k tokens on {gpus} A800",
            flags=_memo_flags(model, gpus, thousands),
            layout=of_7b if model == "7b" else None,
            published_s=flops / (mfu * gpus * hardware_preset("a800").peak_flops),
        )
    flags = (*_flags(model="7b", gpu="a800", nodes=1, host="2TiB"), "--max-seq")
    yield Case(name="MEMO 7B on 8 A800", flags=flags, layout=of_7b, published_tokens=1024 * K)


def _memo_grid() -> Iterator[Case]:
    """MEMO's models at its lengths, one sequence a step."""
    for model, gpus in MEMO_GRID:
        for thousands in MEMO_LENGTHS:
            yield Case(
                name=f"MEMO's grid: {model.upper()} at {thousands}k tokens on {gpus} A800",
                flags=_memo_flags(model, gpus, thousands),
                cell=(f"{model.upper()} on {gpus} A800", thousands),
            )


def _memo_flags(model: str, gpus: int, thousands: int) -> tuple[str, ...]:
    step = {"model": model, "gpu": "a800", "nodes": gpus // GPUS_PER_NODE, "host": "2TiB", "global-batch": 1}
    return _flags(**step, seq=f"{thousands}k")


def _galvatron() -> Iterator[Case]:
    """Galvatron's layout by memo's costs."""
    llama = {
        "model": "7b",
        "variant": "llama",
        "ffn": 11008,
        "vocab": 32000,
        "seq": "2k",
        "gpu": "a100-40g",
        "nodes": 1,
    }
    step = {**llama, "device": "36GB", "global-batch": 16}
    layout = _flags(pp=1, dp=8, tp=1, cp=1, zero=3)
    name = "Galvatron LLaMA2-7B on 8 GPUs of 36 GB"
    yield Case(name=f"{name}, without swap", flags=_flags(**step, host="0"), layout=layout)
    yield Case(name=f"{name}, with swap", flags=_flags(**step, host="512GiB"), layout=layout)


def _argonne(row: Row) -> Case:
    """A longest sequence of Argonne's Megatron-DeepSpeed, which moves nothing."""
    hidden, gpus = row.count("hidden"), row.count("gpus")
    shape = {"model": "7b", "layers": row.count("layers"), "hidden": hidden, "heads": row.count("heads")}
    shape |= {"ffn": 4 * hidden, "vocab": 53248, "recompute": "full", "gpu": "a100-40g", "nodes": gpus // GPUS_PER_NODE}
    name = f"Argonne {row['model']} on {gpus} A100 of 40 GB"
    return Case(name=name, flags=(*_flags(**shape), "--max-seq"), published_tokens=K * row.count("longest_k"))


def _alst(row: Row) -> Case:
    """A recipe of ALST: one sequence over all ranks, inputs of layers and the optimizer on the host."""
    gpu, gpus, name = row["gpu"], row.count("n_gpus_sp"), row["model"].partition("/")[2]
    hidden, layers, heads, kv_heads, head_size, ffn, vocabulary = MODELS[row["model"]]
    if heads * head_size == hidden:
        model = {"model": "7b", "variant": "llama", "layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn}
        flags = _flags(**model, **{"kv-heads": kv_heads, "vocab": vocabulary})
    else:  # memo's GPT has heads of hidden / heads
        flags = (*_flags(model=name), "--loss-without-logits")
    nodes = {"nodes": 1, "gpus-per-node": gpus} if gpus < GPUS_PER_NODE else {"nodes": gpus // GPUS_PER_NODE}
    flags += _flags(gpu=gpu, host=int(HOST_BYTES.get(gpu, hardware_preset(gpu).host_bytes)), **nodes)
    return Case(
        name=f"ALST {name.removesuffix('-Instruct')} on {gpus} {gpu.upper()}",
        flags=(*flags, "--optimizer-offload", "--max-seq"),
        layout=_flags(cp=gpus, tp=1, pp=1, dp=1),
        published_tokens=int(row.number("max_len")),
    )


def _flags(**values: object) -> tuple[str, ...]:
    return tuple(word for name, value in values.items() for word in (f"--{name}", str(value)))


def search(*flags: str, seconds: float) -> dict[str, Any]:
    """The best layout and the search's own figures; under "failed" the reason why there is none."""
    command = [sys.executable, "-m", "memo.cli.main", "plan", "--search", "--json", "--precision", "bf16", *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"the search was ended after {seconds:g} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    body = json.loads(done.stdout)
    names = ("pp", "dp", "cp", "cp_attention", "tp", "schedule", "chunks", "zero", "batch", "accumulate")
    best = {name: body["best"][0][name] for name in (*names, "step_s", "simulated_step_s", "mfu_causal")}
    return best | {"tokens": body["tokens"], "seconds": body["seconds"], "proof": body["proof"]}


def told(row: dict[str, Any]) -> str:
    """One line of the table."""
    fixed, free = row["fixed"], row["free"]
    failed = next((side["failed"] for side in (fixed, free) if side is not None and "failed" in side), None)
    if failed is not None:
        return f"  {row['name']:56} {failed}"
    key, unit = ("step_s", "s") if row.get("published_tokens") is None else ("tokens", "tokens")
    published = row.get("published_s" if key == "step_s" else "published_tokens")
    words = [] if published is None else [f"published {published:,.2f} {unit}"]
    words += [] if fixed is None else [f"predicted {fixed[key]:,.2f} {unit}"]
    words.append(f"found pp {free['pp']} dp {free['dp']} cp {free['cp']} tp {free['tp']} {free[key]:,.2f} {unit}")
    words += [] if fixed is None else [f"{free[key] / fixed[key]:.3f} of it"]
    return f"  {row['name']:56} {', '.join(words)}"


def searched_row(case: Case, *, seconds: float) -> dict[str, Any]:
    """Both searches of a case."""
    row = dataclasses.asdict(case)
    row["fixed"] = None if case.layout is None else search(*case.flags, *case.layout, seconds=seconds)
    return row | {"free": search(*case.flags, seconds=seconds)}


def kept_rows(results: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """The rows of former results by name, each with the commit that it is of."""
    bodies = [json.loads(path.read_text()) for path in results]
    return {row["name"]: {"commit": body["commit"], **row} for body in bodies for row in body["rows"]}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="searched", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose names have this in them")
    parser.add_argument(
        "--keep",
        type=Path,
        nargs="+",
        default=[],
        metavar="RESULT",
        help="former results, whose rows are kept that --only leaves out; of a row in several the last one's",
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="a search is ended after so long")
    args = parser.parse_args(arguments)
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        case.name: functools.partial(searched_row, case, seconds=args.seconds) for case in cases()
    }
    makers |= {row["name"]: functools.partial(dict, row) for row in galvatron_rows()}
    if not any(args.only in name for name in makers):
        parser.error(f"--only {args.only!r}: no row has it; rows: {', '.join(makers)}")
    former = kept_rows(args.keep)
    rows: list[dict[str, Any]] = []
    for name, make in makers.items():
        if args.only in name:
            rows.append(make())
            print(told(rows[-1]), flush=True)
        elif name in former:
            rows.append(former[name])
        path = write_result("searched", {"rows": rows})
    print(f"\nWrote {path}")
    return 0 if all("failed" not in row["free"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
