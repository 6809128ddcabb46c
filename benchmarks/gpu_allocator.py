"""Training steps under PyTorch's allocator, its expandable segments, and the planned one: memory taken, calls, time.

    python3 -m benchmarks.gpu_allocator [--model 350m] [--seq 64k] [--steps 20] [--rounds N]

An allocator is chosen once in a process, so each arm is one; arms run in turn, round by round. Every arm trains the same
model with `memo.offload` to host memory, AdamW included; the sums of its losses and weights must agree to the last bit. The
result file is written after each arm. Exits 3 without a GPU, 1 when an arm fails, arms disagree, or the planned one takes
memory from the device after it has planned.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.machine import DETERMINISTIC, describe, gpu, no_gpu
from benchmarks.results import ROOT, write_result
from memo.units import format_bytes, parse_tokens

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the older name still holds for torch 2.8 and before
ARMS = {"torch": "expandable_segments:False", "expandable segments": "expandable_segments:True", "planned": None}
LEARNING = 5
"""Steps before the measured ones: warm-up, recording, and plans that learn how late copies let go of memory."""


def train(arm: str, *, model_name: str, seq: int, steps: int, host: str) -> dict[str, Any]:
    """One arm, in this process."""
    import torch

    import memo

    allocator = memo.use_planned_allocator() if arm == "planned" else None
    from memo.gpt.config import preset
    from memo.gpt.model.model import GPT

    torch.use_deterministic_algorithms(True)  # with warn_only attention would still add by atomics
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(0)
    config = preset(model_name, max_seq=seq)
    model = GPT(config, device=torch.device("cuda"), dtype=torch.bfloat16)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4)
    manager = memo.offload(model, alpha=1.0, host=host)
    ids = torch.randint(0, config.vocab_size, (1, seq + 1), generator=torch.Generator().manual_seed(1)).cuda()
    seconds, losses = [], []
    before = memo.memory_stats()
    for number in range(LEARNING + steps):
        if number == LEARNING:
            before = memo.memory_stats(reset_peaks=True)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with manager:
            loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
        manager.step_done()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - begin)
        if allocator is not None and number < LEARNING:
            allocator.wait()
    after = memo.memory_stats()
    layouts = () if allocator is None else allocator.layouts()
    manager.close()
    return {
        "step_s": seconds[LEARNING:],
        "losses": losses,
        "weights": [float(p.detach().double().sum()) for p in model.parameters()],
        "reserved_bytes": after.peak_reserved_bytes,
        "allocated_bytes": after.peak_allocated_bytes,
        "device_mallocs_a_step": (after.device_mallocs - before.device_mallocs) / steps,
        "fallbacks_a_step": (after.fallbacks - before.fallbacks) / steps,
        "outside_a_step": (after.outside - before.outside) / steps,
        "arena_bytes": after.arena_bytes,
        "arena_lower_bound_bytes": max((layout.lower_bound_nbytes for layout in layouts), default=0),
    }


def run_arm(arm: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One arm in a process of its own; `failed` says why there is no result."""
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    setting = ARMS[arm]
    if setting is not None:
        environment |= dict.fromkeys(SETTINGS, setting)
    command = [sys.executable, "-m", "benchmarks.gpu_allocator", "--arm", arm, "--model", arguments.model]
    command += ["--seq", str(arguments.seq), "--steps", str(arguments.steps), "--host", arguments.host]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | DETERMINISTIC, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        return {"failed": f"ended with {done.returncode}, see above"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(rounds: list[dict[str, dict[str, Any]]]) -> tuple[dict[str, Any], list[str]]:
    """One row an arm, and what is not as it must be."""
    rows, faults = {}, [f"{arm}: {row['failed']}" for each in rounds for arm, row in each.items() if "failed" in row]
    by_arm = {arm: [each[arm] for each in rounds if "failed" not in each.get(arm, {"failed": ""})] for arm in ARMS}
    arms = {arm: results for arm, results in by_arm.items() if results}
    medians = {
        arm: statistics.median(s for result in results for s in result["step_s"]) for arm, results in arms.items()
    }
    plain = medians.get("torch")
    for arm, results in arms.items():
        first = {name: value for name, value in results[0].items() if name not in ("step_s", "losses", "weights")}
        rows[arm] = {"step_s": medians[arm], "ratio": medians[arm] / plain if plain else None, **first}
        reference = next(iter(arms.values()))[0]
        if any(result[name] != reference[name] for result in results for name in ("losses", "weights")):
            faults.append(f"{arm}: losses or weights differ from those under PyTorch's allocator")
    return rows, faults + (_faults_of_plan(rows["planned"]) if "planned" in rows else [])


def _faults_of_plan(ours: dict[str, Any]) -> list[str]:
    faults = []
    if ours["device_mallocs_a_step"]:
        faults.append(f"planned: {ours['device_mallocs_a_step']:.2f} cudaMalloc a step after planning")
    if ours["arena_bytes"] > 1.01 * ours["arena_lower_bound_bytes"]:
        faults.append("planned: the arena is more than 1 % above its lower bound")
    return faults


def line_of(arm: str, row: dict[str, Any]) -> str:
    """One arm's row of the table."""
    ratio = "      " if row["ratio"] is None else f"{row['ratio']:6.3f}x"
    return (
        f"  {arm:20} {row['step_s'] * 1e3:9.1f} ms {ratio}  reserved {format_bytes(row['reserved_bytes'])}, "
        f"allocated {format_bytes(row['allocated_bytes'])}, {row['device_mallocs_a_step']:.2f} cudaMalloc and "
        f"{row['fallbacks_a_step']:.2f} fallbacks a step"
    )


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_allocator")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="350m", metavar="NAME", help="default 350m")
    parser.add_argument("--seq", type=parse_tokens, default=64 << 10, metavar="TOKENS", help="default 64k")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="default 20")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument("--host", default="64GiB", metavar="SIZE", help="pinned memory, default 64GiB")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    if arguments.arm:
        sizes = {"model_name": arguments.model, "seq": arguments.seq, "steps": arguments.steps, "host": arguments.host}
        print(json.dumps(train(arguments.arm, **sizes)))
        return 0
    device = gpu()
    if device is None:
        return no_gpu("gpu-allocator")
    print(describe(device))
    print(f"\n{arguments.model} at {arguments.seq} tokens, offloaded, {arguments.steps} steps", flush=True)
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(arguments.rounds):
        rounds.append({})
        for arm in ARMS:
            rounds[-1][arm] = run_arm(arm, arguments)
            rows, faults = compare(rounds)
            print(
                f"round {number + 1}" + (line_of(arm, rows[arm]) if arm in rows else f"  {arm:20} failed"), flush=True
            )
            sizes = {"model": arguments.model, "seq": arguments.seq, "rounds": number + 1}
            path = write_result("gpu-allocator", {"device": device, **sizes, "arms": rows, "faults": faults})
    for fault in faults:
        print(f"  {fault}")
    print(f"Wrote {path}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
