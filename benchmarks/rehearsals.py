"""Rehearsals of many trainings by memo's defaults on simulated GPUs: do they settle, within budgets, and how near the best?

    make rehearsals                                  # 200 drawn cases and the longest ones, and the result file and table
    make rehearsals REHEARSALS_ARGS="--cases 12"     # some, without writing

A case is a published model, trained whole or by LoRA, at a length, on a GPU with so much memory, host memory and disk. It is
rehearsed by memo's defaults until the plan has settled, and with full checkpointing; with --longest also each model that
fits 80 GiB, at the longest sequence that full checkpointing trains there. Properties of each:

    runs       no error where checkpointing runs within the budgets
    budgets    device, host and disk hold in every step, from the first one on
    faster     the settled step takes no longer than checkpointing's
    near       the settled plan's step over the least of the solver's linear program for the same profile (its bound)
    soon       seconds until the plan has settled beyond those of settled steps, in steps that keep everything

Results go to build/rehearsals.jsonl as they come; cases that are there are not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import multiprocessing
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import write_result
from memo.mip.inputs import Hardware, hardware_preset

ROOT = Path(__file__).parent.parent
LINES = ROOT / "build" / "rehearsals.jsonl"
GIB = 1 << 30
K = 1024
SEED = 42
CASE_SECONDS = 420
"""A case that takes longer is given up, and counted."""
SLOWER = 1.005
"""Ratio of step times up to which two are taken as equal."""
USABLE = 0.85
"""Share of a GPU that weights, gradients and optimizer state may take in a drawn case."""

# name -> (parameters in billions, layers, longest sequence that is drawn in thousands of tokens)
MODELS: dict[str, tuple[float, int, int]] = {
    "qwen2.5-0.5b": (0.49, 24, 512),
    "qwen3-0.6b": (0.6, 28, 512),
    "llama-3.2-1b": (1.24, 16, 512),
    "qwen3-1.7b": (1.72, 28, 512),
    "qwen3-4b": (4.0, 36, 256),
    "mistral-7b": (7.2, 32, 256),
    "qwen2.5-vl-7b": (7.6, 28, 256),
    "llama-3-8b": (8.0, 32, 256),
    "gemma-2-9b": (9.2, 42, 128),
    "qwen3-14b": (14.8, 40, 128),
    "gpt-oss-20b": (20.9, 24, 128),
    "qwen3-32b": (32.8, 64, 128),
    "llama-3-70b": (70.6, 80, 64),
}
GPUS = {24: "a100-80g", 40: "a100-80g", 80: "h100", 141: "h200"}
"""Memory in GiB -> the GPU whose rates are taken."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training."""

    model: str
    lora: bool
    gpu_gib: int
    host_share: float
    """Host memory that is free, in multiples of the device's."""
    disk: bool
    tokens: tuple[int, ...]
    """Lengths of the steps, in turn; none: the longest that full checkpointing trains within the device's budget."""
    logits: bool
    accumulate: int

    def __str__(self) -> str:
        lengths = "/".join(f"{one // K}k" for one in self.tokens) or "longest"
        ways = ["LoRA" if self.lora else "full", lengths, f"{self.gpu_gib} GiB", f"host x{self.host_share:g}"]
        more = (
            ["disk"] * self.disk + ["logits"] * self.logits + [f"accumulate {self.accumulate}"] * (self.accumulate > 1)
        )
        return f"{self.model} {', '.join([*ways, *more])}"


def drawn(count: int) -> list[Case]:
    """The first `count` cases, each a training of which weights and states fit."""
    chance, found = random.Random(SEED), []
    while len(found) < count:
        name, (billions, _, most) = chance.choice(list(MODELS.items()))
        lora, gib = chance.random() < 0.55, chance.choice(list(GPUS))
        static = billions * 1e9 * (2 if lora else 8)
        if static > USABLE * gib * GIB:
            continue
        lengths = [size * K for size in (4, 8, 16, 32, 64, 128, 256, 512) if size <= most]
        tokens = (chance.choice(lengths),)
        if chance.random() < 0.1:
            tokens = (tokens[0], max(4 * K, tokens[0] // 4), max(4 * K, tokens[0] // 2))
        found.append(
            Case(
                model=name,
                lora=lora,
                gpu_gib=gib,
                host_share=chance.choice((0.5, 1.0, 2.0, 4.0)),
                disk=chance.random() < 0.25,
                tokens=tokens,
                logits=chance.random() < 0.3,
                accumulate=chance.choice((1, 1, 1, 1, 4)),
            )
        )
    return found


def longest_cases() -> list[Case]:
    """Each model that fits 80 GiB, by LoRA and whole, at the longest sequence of checkpointing."""
    return [
        Case(model=name, lora=lora, gpu_gib=80, host_share=2.0, disk=False, tokens=(), logits=False, accumulate=1)
        for name, (billions, _, _) in MODELS.items()
        for lora in (True, False)
        if billions * 1e9 * (2 if lora else 8) <= USABLE * 80 * GIB
    ]


def longest(fits: Callable[[int], bool]) -> int:
    """The longest sequence that fits, to a sixteenth: a multiple of 1,024 tokens, 1,024 where none does."""
    low = K
    while low < 1024 * K and fits(2 * low):
        low *= 2
    step = low // 2
    while step >= max(K, low // 16):
        if fits(low + step):
            low += step
        step //= 2
    return low


def hardware_of(case: Case) -> Hardware:
    """The case's GPU."""
    return dataclasses.replace(hardware_preset(GPUS[case.gpu_gib]), device_bytes=case.gpu_gib * GIB)


def rehearsed(case: Case) -> dict[str, Any]:
    """Rehearses one case in both ways; returns a row of numbers."""
    from memo.mip.activation import relaxed_step_s
    from memo.rehearsal import SimulatedMachine, Way, hugging_face_step, rehearse

    build = hugging_face_step(case.model, lora=16 if case.lora else 0, without_logits=not case.logits)

    def run(way: Way, **options: Any) -> Any:
        gc.collect()
        machine = SimulatedMachine(
            hardware_of(case),
            host_bytes=int(case.host_share * case.gpu_gib * GIB),
            disk_bytes=2 << 40 if case.disk else 0,
            assume=0.0,
        )
        lengths = case.tokens if len(case.tokens) > 1 else ()
        return rehearse(
            lambda: build(batch=1, tokens=case.tokens[0]),
            machine,
            way=way,
            lengths=lengths,
            accumulate=case.accumulate,
            **options,
        )

    def fits(tokens: int) -> bool:
        nonlocal case
        case = dataclasses.replace(case, tokens=(tokens,))
        done = run(Way.CHECKPOINT, steps=1)
        return done.failure is None and not done.violations

    began, name = time.process_time(), str(case)
    if not case.tokens:
        case = dataclasses.replace(case, tokens=(longest(fits),))
    checkpointed = run(Way.CHECKPOINT, steps=len(case.tokens))
    found = run(Way.MEMO)
    row: dict[str, Any] = {
        **dataclasses.asdict(case),
        "name": name,
        "checkpoint_s": None if checkpointed.failure else checkpointed.step_s,
        "checkpoint_gib": max((step.device_bytes for step in checkpointed.steps), default=0) / GIB,
        "checkpoint_fits": checkpointed.failure is None
        and all(s.device_bytes <= found.device_budget for s in checkpointed.steps),
        "failure": found.failure,
        "violations": [str(one) for one in found.violations],
        "settled": found.settled,
        "steps_s": [round(step.seconds, 6) for step in found.steps],
        "device_gib": [round(step.device_bytes / GIB, 3) for step in found.steps],
        "host_gib": max((step.host_bytes for step in found.steps), default=0) / GIB,
        "disk_gib": max((step.disk_bytes for step in found.steps), default=0) / GIB,
        "budgets_gib": [one / GIB for one in (found.device_budget, found.host_budget, found.disk_budget)],
        "plans": found.plans_made,
        "decision": found.steps[-1].decision if found.steps else "",
        "warned": list(found.warned),
    }
    plan = found.plan
    if found.settled and plan is not None:
        settled, stage = found.steps[-1].seconds, plan.stages[0]
        kept_s = case.accumulate * (stage.microbatch_s - stage.recompute_s - stage.stall_s)
        first = found.settled_after or 0
        bound = relaxed_step_s(plan.problem)
        row |= {
            "settled_s": settled,
            "predicted_s": stage.microbatch_s,
            "bound_s": bound,
            "near": None if not bound else plan.step_s / bound,
            "first": first,
        }
        if kept_s and len(case.tokens) == 1:
            row["soon"] = (sum(step.seconds for step in found.steps[:first]) - first * settled) / kept_s
    return row | {"cpu_s": round(time.process_time() - began, 1)}


def verdicts(row: dict[str, Any]) -> dict[str, bool]:
    """Which properties a case has."""
    fits = row["checkpoint_fits"]
    same_length = len(row["tokens"]) == 1
    ran = row["failure"] is None
    return {
        "runs": ran or not fits,
        "budgets": not row["violations"] or not fits,
        "faster": not (fits and ran and same_length and row.get("settled_s"))
        or row["settled_s"] <= SLOWER * row["checkpoint_s"],
        "settles": not ran or row["settled"] or not same_length,
    }


def _run_one(case: Case) -> dict[str, Any]:
    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, CASE_SECONDS)
    try:
        return rehearsed(case)
    except TimeoutError:
        return {
            **dataclasses.asdict(case),
            "name": str(case),
            "error": f"took more than {CASE_SECONDS} s of processor time",
        }
    except Exception as error:
        return {**dataclasses.asdict(case), "name": str(case), "error": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _import_all() -> None:
    """Imports what every case needs, once, by a case of two layers; the processes of the cases begin with it."""
    import torch

    torch.set_num_threads(1)
    from memo.rehearsal import SimulatedMachine, hugging_face_step, rehearse

    build = hugging_face_step("qwen2.5-0.5b", lora=16, without_logits=True, layers=2)
    machine = SimulatedMachine(hardware_preset("h100"), assume=0.0)
    rehearse(lambda: build(batch=1, tokens=64 * K), machine, device="3GiB", host="8GiB")
    gc.collect()
    gc.freeze()


def run_all(cases: Sequence[Case], workers: int, lines: Path) -> Iterator[dict[str, Any]]:
    """Rows of all cases, those that are in the file first."""
    names = {str(case) for case in cases}
    known = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    done = {row["name"] for row in known}
    yield from (row for row in known if row["name"] in names)
    _import_all()
    lines.parent.mkdir(parents=True, exist_ok=True)
    rest = [case for case in cases if str(case) not in done]
    with multiprocessing.get_context("fork").Pool(workers, maxtasksperchild=1) as pool, lines.open("a") as out:
        for row in pool.imap_unordered(_run_one, rest):
            out.write(json.dumps(row) + "\n")
            out.flush()
            yield row


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts and ratios over all cases."""
    ran = [row for row in rows if "error" not in row]
    near = sorted(row["near"] for row in ran if row.get("near"))
    soon = sorted(row["soon"] for row in ran if "soon" in row)
    found: dict[str, Any] = {"cases": len(rows), "errors": len(rows) - len(ran)}
    for name in ("runs", "budgets", "faster", "settles"):
        found[name] = sum(verdicts(row)[name] for row in ran)
    fits = [row for row in ran if row["checkpoint_fits"]]
    found["checkpoint_fits"] = len(fits)
    found["only_memo_fits"] = sum(
        not row["checkpoint_fits"] and row["failure"] is None and not row["violations"] for row in ran
    )
    speedups = sorted(
        row["checkpoint_s"] / row["settled_s"] for row in fits if row.get("settled_s") and len(row["tokens"]) == 1
    )
    if speedups:
        found["over_checkpointing"] = [
            round(speedups[0], 3),
            round(statistics.median(speedups), 3),
            round(speedups[-1], 3),
        ]
    if near:
        found["near_median"], found["near_worst"] = round(statistics.median(near), 4), round(near[-1], 4)
    if soon:
        found["soon_median"], found["soon_worst"] = round(statistics.median(soon), 2), round(soon[-1], 2)
    found["corrections"] = {str(n): sum(max(0, row["plans"] - 1) == n for row in ran if row["plans"]) for n in range(4)}
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The Markdown table of docs/reliability.md."""
    head = (
        "| model | cases | checkpointing fits | only memo fits | checkpointing's step / memo's | worst step / bound |"
    )
    lines = [head, "|---|---|---|---|---|---|"]
    ran = [row for row in rows if "error" not in row]
    for model in dict.fromkeys([*MODELS, ""]):
        own = [row for row in ran if model in ("", row["model"])]
        if not own:
            continue
        fits = [row for row in own if row["checkpoint_fits"]]
        alone = sum(not row["checkpoint_fits"] and row["failure"] is None and not row["violations"] for row in own)
        ratios = [
            row["checkpoint_s"] / row["settled_s"] for row in fits if row.get("settled_s") and len(row["tokens"]) == 1
        ]
        near = [row["near"] for row in own if row.get("near")]
        ratio = f"{min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}" if ratios else "-"
        lines.append(
            f"| {model or 'all'} | {len(own)} | {len(fits)} | {alone} | {ratio} | {f'{max(near):.4f}' if near else '-'} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases and prints each, then the summary."""
    parser = argparse.ArgumentParser(
        prog="rehearsals", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--longest", action="store_true", help="and the longest sequences of checkpointing")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lines", type=Path, default=LINES)
    parser.add_argument("--write", action="store_true", help="write the result file")
    args = parser.parse_args(arguments)
    cases = [*drawn(args.cases), *(longest_cases() if args.longest else ())]
    cases = [case for case in cases if args.only in str(case)]
    rows = []
    for row in run_all(cases, args.workers, args.lines):
        rows.append(row)
        wrong = [row["error"]] if "error" in row else [name for name, holds in verdicts(row).items() if not holds]
        settled, near = row.get("settled_s"), row.get("near")
        seconds = (
            "" if not settled else f"{settled:.3f} s of {row['checkpoint_s'] or float('nan'):.3f}, near {near or 0:.4f}"
        )
        print(
            f"{len(rows):4} {row['name']}: {seconds} {row.get('failure') or ''} {' '.join(map(str, wrong)).upper()}",
            flush=True,
        )
    found = summary(rows)
    print(json.dumps(found, indent=1), table(rows), sep="\n")
    if args.write:
        write_result("rehearsals", {"machine": "simulated", "seed": SEED, "summary": found, "rows": rows})
    return 0 if all(found[name] == found["cases"] - found["errors"] for name in ("runs", "budgets", "faster")) else 1


if __name__ == "__main__":
    sys.exit(main())
