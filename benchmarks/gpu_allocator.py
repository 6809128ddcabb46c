"""Training steps under PyTorch's allocator, its expandable segments, and the planned one: memory taken, calls, time.

    python3 -m benchmarks.gpu_allocator [--model 350m] [--seq 64k] [--steps 20] [--rounds N]

An allocator is chosen once in a process, so each arm is one; arms run in turn, round by round. Every arm trains the same
model with `memo.offload` to host memory, AdamW included; the sums of its losses and weights must agree to the last bit.
Exits 3 without a GPU, 1 when the arms disagree or the planned one takes memory from the device after it has planned.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.results import write_result
from memo.units import format_bytes, parse_tokens

ROOT = Path(__file__).parent.parent
NO_GPU = 3
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the older name still holds for torch 2.8 and before
ARMS = {"torch": None, "expandable segments": "expandable_segments:True", "planned": None}
LEARNING = 5
"""Steps before the measured ones: warm-up, recording, and plans that learn how late copies let go of memory."""


def train(arm: str, *, model_name: str, seq: int, steps: int) -> dict[str, Any]:
    """One arm, in this process."""
    import torch

    import memo

    allocator = memo.use_planned_allocator() if arm == "planned" else None
    from memo.gpt.config import preset
    from memo.gpt.model import GPT

    torch.use_deterministic_algorithms(True)  # with warn_only attention would still add by atomics
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(0)
    config = preset(model_name, max_seq=seq)
    model = GPT(config, device=torch.device("cuda"), dtype=torch.bfloat16)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4)
    manager = memo.offload(model, alpha=1.0, host="64GiB")
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
        losses.append(float(loss))
        seconds.append(time.perf_counter() - begin)
        if allocator is not None and number < LEARNING:
            allocator.wait()
    after = memo.memory_stats()
    layouts = () if allocator is None else allocator.layouts()
    manager.close()
    return {
        "step_s": seconds[LEARNING:],
        "losses": losses,
        "weights": [float(p.double().sum()) for p in model.parameters()],
        "reserved_bytes": after.peak_reserved_bytes,
        "allocated_bytes": after.peak_allocated_bytes,
        "device_mallocs_a_step": (after.device_mallocs - before.device_mallocs) / steps,
        "fallbacks_a_step": (after.fallbacks - before.fallbacks) / steps,
        "outside_a_step": (after.outside - before.outside) / steps,
        "arena_bytes": after.arena_bytes,
        "arena_lower_bound_bytes": max((layout.lower_bound_nbytes for layout in layouts), default=0),
    }


def run_arm(arm: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One arm in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    setting = ARMS[arm]
    if setting is not None:
        environment |= dict.fromkeys(SETTINGS, setting)
    command = [sys.executable, "-m", "benchmarks.gpu_allocator", "--arm", arm, "--model", arguments.model]
    command += ["--seq", str(arguments.seq), "--steps", str(arguments.steps)]
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"gpu-allocator: {arm} failed\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(rounds: list[dict[str, dict[str, Any]]]) -> tuple[dict[str, Any], list[str]]:
    """One row an arm, and what is not as it must be."""
    rows, faults = {}, []
    plain = statistics.median(s for each in rounds for s in each["torch"]["step_s"])
    for arm in ARMS:
        results = [each[arm] for each in rounds]
        step_s = statistics.median(s for result in results for s in result["step_s"])
        first = {name: value for name, value in results[0].items() if name not in ("step_s", "losses", "weights")}
        rows[arm] = {"step_s": step_s, "ratio": step_s / plain, **first}
        same = all(result[name] == rounds[0]["torch"][name] for result in results for name in ("losses", "weights"))
        if not same:
            faults.append(f"{arm}: losses or weights differ from those under PyTorch's allocator")
    ours = rows["planned"]
    if ours["device_mallocs_a_step"]:
        faults.append(f"planned: {ours['device_mallocs_a_step']:.2f} cudaMalloc a step after planning")
    if ours["arena_bytes"] > 1.01 * ours["arena_lower_bound_bytes"]:
        faults.append("planned: the arena is more than 1 % above its lower bound")
    return rows, faults


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_allocator")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="350m", metavar="NAME", help="default 350m")
    parser.add_argument("--seq", type=parse_tokens, default=64 << 10, metavar="TOKENS", help="default 64k")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="default 20")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="default 1")
    arguments = parser.parse_args(argv)
    if arguments.arm:
        print(json.dumps(train(arguments.arm, model_name=arguments.model, seq=arguments.seq, steps=arguments.steps)))
        return 0
    from benchmarks.gpu_check import gpu

    device = gpu()
    if device is None:
        print("gpu-allocator: no CUDA GPU that this interpreter's torch can use; nothing was run", file=sys.stderr)
        return NO_GPU
    rounds = [{arm: run_arm(arm, arguments) for arm in ARMS} for _ in range(arguments.rounds)]
    rows, faults = compare(rounds)
    print(f"\n{arguments.model} at {arguments.seq} tokens, offloaded, {arguments.steps} steps")
    for arm, row in rows.items():
        print(
            f"  {arm:20} {row['step_s'] * 1e3:9.1f} ms {row['ratio']:6.3f}x  "
            f"reserved {format_bytes(row['reserved_bytes'])}, allocated {format_bytes(row['allocated_bytes'])}, "
            f"{row['device_mallocs_a_step']:.2f} cudaMalloc and {row['fallbacks_a_step']:.2f} fallbacks a step"
        )
    for fault in faults:
        print(f"  {fault}")
    body = {"device": device, "model": arguments.model, "seq": arguments.seq, "arms": rows, "faults": faults}
    print(f"Wrote {write_result('gpu-allocator', body)}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
