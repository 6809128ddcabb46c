"""Every language model of the installed transformers, built small and divided by memo.parallelize, against one process.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.parallel_architectures --tp 2
    python -m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks.parallel_architectures --tp 2 --pp 2
    python -m benchmarks.parallel_architectures --page FILE.json ...

Loss and every gradient of one step in float64, whole, are compared with those of one process: `equal` within 1e-6 (the
models' own losses are computed in float32), `refused` with the reason, or what went wrong. With tp each model is divided
with sequence parallelism, and without it where that is refused. One process group runs all models (`--part 1/2` for every
second); two ranks take some 15 minutes on two cores. `--page` writes docs/parallel-architectures.md from result files.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import gc
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import memo
from benchmarks import small_architectures
from benchmarks.results import ROOT, write_result
from benchmarks.small_architectures import BATCH, VOCAB, build, names
from memo.errors import UsageError
from memo.parallel import Layout

BOUND, TOKENS = 1e-6, 64
PAGE = ROOT / "docs" / "parallel-architectures.md"


def model_of(name: str) -> Any:
    """The model in float64, whose experts then need the loop that takes it."""
    return build(name, experts="eager").double()


def tokens(rows: int) -> torch.Tensor:
    """One batch of (rows, TOKENS)."""
    return torch.randint(3, VOCAB, (rows, TOKENS), generator=torch.Generator().manual_seed(1))


def examine(name: str, layout: Layout) -> dict[str, Any]:
    """One row of the result: its `outcome`, and `off` or `reason`."""
    ids = tokens(2 * BATCH * layout.dp)
    try:
        model = model_of(name)
        want = model(input_ids=ids, labels=ids, use_cache=False).loss
        want.backward()
        grads = {key: p.grad for key, p in model.named_parameters(remove_duplicate=False)}
    except Exception as error:
        return {"name": name, "outcome": "not built", "reason": one_line(error)}
    first: dict[str, Any] = {}
    for sequence in (True, False) if layout.tp > 1 else (False,):
        row = {"name": name, **_divided(name, layout, sequence, ids, float(want.detach()), grads)}
        if layout.tp > 1 and row["outcome"] == "equal":
            row["sequence"] = sequence
        if row["outcome"] != "refused":
            return row
        first = first or row
    return first


def _divided(
    name: str, layout: Layout, sequence: bool, ids: torch.Tensor, want: float, grads: dict[str, Any]
) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            model: Any = memo.parallelize(
                model_of(name),
                tp=layout.tp,
                pp=layout.pp,
                dp=layout.dp,
                cp=layout.cp,
                sequence_parallel=sequence,
                microbatches=4 if layout.pp > 1 else None,
            )
        except UsageError as error:
            return {"outcome": "refused", "reason": one_line(error)}
    whole = [str(one.message).split(": ", 1)[1] for one in told if "stays whole" in str(one.message)]
    replica = dist.get_rank() // (layout.cp * layout.tp) % layout.dp
    own = ids.unflatten(0, (layout.dp, -1))[replica]
    failed = ""
    off = 0.0
    try:
        if layout.pp > 1:
            loss = model.step(input_ids=own, labels=own)
        else:
            loss = model(input_ids=own, labels=own, use_cache=False).loss
            loss.backward()
            loss = loss.detach().double() / dist.get_world_size()
            dist.all_reduce(loss)
        off = abs(float(loss) / want - 1)
        for key, parameter in model.named_parameters():
            got: Any = parameter.grad
            got = got.full_tensor() if hasattr(got, "full_tensor") else got
            off = max(off, distance(got, grads[key]))
    except Exception as error:
        failed = one_line(error)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (failed, off))
    failed = next((one for one, _ in every if one), "")
    off = max(one for _, one in every)
    if failed:
        return {"outcome": "failed", "reason": failed}
    found: dict[str, Any] = {"outcome": "equal" if off <= BOUND else "differs", "off": off}
    return {**found, "whole": sorted(set(whole))} if whole else found


def distance(got: torch.Tensor | None, want: torch.Tensor | None) -> float:
    """Largest difference of two gradients relative to the largest value; one that is missing is zero."""
    if got is None or want is None:
        given = want if got is None else got
        return 0.0 if given is None or not given.any() else float("inf")
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-8)) if want.numel() else 0.0


def one_line(error: BaseException) -> str:
    """An error in at most 240 characters."""
    told = " ".join(str(error).split())
    return (told if isinstance(error, UsageError) else f"{type(error).__name__}: {told}")[:240]


def page(results: Sequence[dict[str, Any]]) -> str:
    """docs/parallel-architectures.md."""
    layouts = list(dict.fromkeys(result["layout"] for result in results))
    rows: dict[str, dict[str, dict[str, Any]]] = collections.defaultdict(dict)
    for result in results:
        for row in result["architectures"]:
            rows[row["name"]][result["layout"]] = row
    known = [
        name for name in sorted(rows, key=str.lower) if any(r["outcome"] != "not built" for r in rows[name].values())
    ]
    head = results[0]
    lines = [
        "# Architectures over ranks",
        "",
        f"What `memo.parallelize` does with each language model of transformers {head['transformers']}, built small, on "
        f"torch {head['torch']}: one step in float64 on gloo ranks, loss and every gradient compared with one process. "
        "[parallel.md](parallel.md#hugging-face-models) has the counts. Written by `python -m "
        "benchmarks.parallel_architectures --page`.",
        "",
        "- `=`: equal within 1e-6; `= s`: with sequence parallelism; `= p`: parts of its layers stay whole on every rank",
        "- `-`: refused before anything is communicated, with the reason below; `?`: an error while it ran",
        "",
        f"| model | {' | '.join(layouts)} |",
        f"|---|{'---|' * len(layouts)}",
    ]
    lines += [f"| {name} | {' | '.join(_cell(rows[name].get(one)) for one in layouts)} |" for name in known]
    lines += ["", "## Reasons", ""]
    reasons = collections.defaultdict(list)
    for name in known:
        for layout, row in rows[name].items():
            if row["outcome"] in ("refused", "failed", "differs"):
                reasons[row.get("reason", f"off by {row.get('off', 0):.2g}").replace(name, "MODEL")].append(
                    f"{name} ({layout})"
                )
    lines += [f"- `{reason}`: {', '.join(models)}" for reason, models in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or row["outcome"] == "not built":
        return ""
    if row["outcome"] != "equal":
        return {"refused": "-", "differs": "DIFFERS"}.get(row["outcome"], "?")
    return "=" + (" s" if row.get("sequence") else "") + (" p" if row.get("whole") else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sweep on this rank, or writes the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("tp", "pp", "dp", "cp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="classes")
    parser.add_argument("--decoders", action="store_true", help="causal language models alone")
    parser.add_argument("--part", default="1/1", metavar="i/n", help="every n-th of the classes, from the i-th on")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="result that ended early, to go on from")
    parser.add_argument(
        "--page", nargs="+", type=Path, metavar="FILE", help="write docs/parallel-architectures.md and end"
    )
    args = parser.parse_args(arguments)
    if args.page:
        PAGE.write_text(page([json.loads(path.read_text()) for path in args.page]))
        return 0
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    # Where one stage fails, the others end their waits.
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=3))
    layout = Layout(tp=args.tp, pp=args.pp, dp=args.dp, cp=args.cp)
    small_architectures.use_key_heads(max(2, args.tp))
    index, _, count = args.part.partition("/")
    chosen = [name for name in names() if not args.decoders or name.endswith(("ForCausalLM", "LMHeadModel"))]
    wanted = args.only or chosen[int(index) - 1 :: int(count)]
    leads = dist.get_rank() == 0
    shape = " ".join(
        f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "dp", "cp") if getattr(layout, name) > 1
    )
    head = {"torch": torch.__version__, "transformers": transformers.__version__, "layout": shape, "part": args.part}
    rows: list[dict[str, Any]] = json.loads(args.resume.read_text())["architectures"] if args.resume else []
    known = {row["name"] for row in rows}
    for name in (one for one in wanted if one not in known):
        rows.append(examine(name, layout))
        gc.collect()
        if leads:
            print(json.dumps(rows[-1]), flush=True)
            if not args.only:
                write_result(f"parallel-architectures-{shape.replace(' ', '')}", {**head, "architectures": rows})
    if leads:
        print(dict(collections.Counter(row["outcome"] for row in rows)))
    dist.destroy_process_group()
    return int(any(row["outcome"] == "differs" for row in rows))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
