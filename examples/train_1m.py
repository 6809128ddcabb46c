"""Trains on sequences of a million tokens: the same script on a laptop, on one GPU and on many, by flags alone.

    CPU laptop      python examples/train_1m.py --preset laptop

    one H200        python examples/train_1m.py --preset 350m --data books/ --steps 1000 \\
                        --checkpoint-dir run --checkpoint-minutes 30 --metrics run.jsonl

    eight GPUs      torchrun --nproc-per-node 8 examples/train_1m.py --preset 7b --data books/ --steps 1000 \\
                        --checkpoint-dir /shared/run --checkpoint-minutes 30

    four nodes      torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 \\
                        examples/train_1m.py --preset 7b --dp 4 --batch 4 --data books/ --steps 1000 ...

Before anything runs it prints what will be kept, moved and recomputed, and the peaks this leads to; then a line a step. A
row of a batch is `seq` tokens in succession, so a book of a million tokens is one; without --data the text is the source
of Python's standard library. Any flag of `memo train` may follow and has the last word; after a stop, --resume goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys

import torch

from memo.cli.activation_tables import activation_table
from memo.cli.main import main as memo
from memo.errors import Infeasible
from memo.gpt.config import GPTConfig, preset
from memo.gpt.derive import Layout, derive_profile
from memo.gpt.train_config import Precision
from memo.mip.activation import ActivationPlan, ActivationProblem, Budgets
from memo.mip.activation_solve import solve_problem
from memo.mip.hardware import PRESETS as GPUS
from memo.mip.hardware import Hardware
from memo.recording import gpt_step, record_step
from memo.units import format_bytes, parse_bytes, parse_tokens

# Of the host budget: the profile counts two bytes for each element, and autocast keeps a layer's input in four.
PLANNED_HOST = 2 / 3
LAPTOP_ALPHA = 0.25  # of the tokens, whose activations go to disk; those of the rest are computed again

# Heads of 128 are what the GPUs' attention kernels are fastest at; rotary positions cost no memory at any length.
PRESETS = {
    "laptop": ["--model", "tiny", "--seq", "32k", "--steps", "3", "--device", "cpu"],
    "350m": ["--model", "350m", "--variant", "llama", "--heads", "8", "--seq", "1m"],
    "7b": ["--model", "7b", "--seq", "1m", "--tp", "8"],
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the flags of `memo train` say about size; the plan needs no more."""

    config: GPTConfig
    tokens: int
    batch: int
    dp: int
    tp: int
    host: str | None
    on_gpu: bool
    gives_alpha: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, required=True)
    known, flags = parser.parse_known_args()
    flags = PRESETS[known.preset] + flags
    asked = read(flags)
    try:
        offload = plan_on_gpu(asked) if asked.on_gpu else plan_on_cpu(asked)
    except Infeasible as error:
        print(f"train_1m: {error}; a shorter --seq, such as 512k, needs less", file=sys.stderr)
        return error.exit_code
    return memo(["train", *offload, *flags])


def read(flags: list[str]) -> Asked:
    """The last of each flag counts, as it does for `memo train`."""
    sizes = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("model", "variant", "seq", "host-budget", "alpha", "offload", "device"):
        sizes.add_argument(f"--{name}")
    for name in ("layers", "hidden", "heads", "batch", "dp", "tp"):
        sizes.add_argument(f"--{name}", type=int)
    given, _ = sizes.parse_known_args(flags)
    tokens = parse_tokens(given.seq)
    config = preset(
        given.model, variant=given.variant or "gpt", max_seq=tokens, layers=given.layers, hidden=given.hidden,
        heads=given.heads,
    )  # fmt: skip
    return Asked(
        config=config, tokens=tokens, batch=given.batch or 1, dp=given.dp or 1, tp=given.tp or 1,
        host=given.host_budget, on_gpu=given.device != "cpu" and torch.cuda.is_available(),
        gives_alpha=given.alpha is not None or given.offload is not None,
    )  # fmt: skip


def plan_on_gpu(asked: Asked) -> list[str]:
    """Solves for the shortest step within this machine's memory; the flags that carry the plan out."""
    machine = this_gpu()
    host = int(0.8 * machine.host_bytes) if asked.host is None else parse_bytes(asked.host)
    ranks, together = asked.dp * asked.tp, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    layout = Layout(tokens=asked.tokens, batch=asked.batch // asked.dp, gpus=ranks, tp=asked.tp)
    device, planned = int(0.95 * machine.device_bytes), int(PLANNED_HOST * host)
    budgets = Budgets(device_bytes=device, host_bytes=planned, ranks_per_node=together)
    profile = derive_profile(asked.config, machine, layout)
    plan = solve_problem(ActivationProblem(profile=profile, hardware=machine, budgets=budgets))
    if os.environ.get("RANK", "0") == "0":
        print(activation_table(plan), flush=True)
    return [] if asked.gives_alpha else flags_for(plan, host)


def flags_for(plan: ActivationPlan, host: int) -> list[str]:
    """One fraction for all layers: the least of theirs, so that no memory holds more than the plan says."""
    if plan.declined:
        return []  # everything fits
    alpha = min(layer.all_tokens for layer in plan.layers)
    return ["--offload", "host", "--host-budget", str(host), "--alpha", f"{alpha:.4f}"]


def this_gpu() -> Hardware:
    """The preset by its name, an H100's rates where there is none, with the memories that are really here."""
    name = torch.cuda.get_device_name().lower()
    known = next((gpu for key, gpu in GPUS.items() if key.split("-")[0] in name), GPUS["h100"])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return dataclasses.replace(known, device_bytes=torch.cuda.get_device_properties(0).total_memory, host_bytes=memory)


def plan_on_cpu(asked: Asked) -> list[str]:
    """Where host memory is the device there is one choice, the disk: plays a step without memory to foretell the peak."""
    step = functools.partial(gpt_step, asked.config, batch=asked.batch, tokens=asked.tokens, precision=Precision.FP32)
    plain, ours = (record_step(step, alpha=alpha, exact=True) for alpha in (None, LAPTOP_ALPHA))
    state = 3 * plain.static_nbytes  # the weights, and AdamW's two moments of each
    peak, without = (format_bytes(state + played.trace.peak_nbytes) for played in (ours, plain))
    print(f"plan     alpha {LAPTOP_ALPHA}: {format_bytes(ours.moved_nbytes)} a step to disk, the rest computed again")
    print(
        f"plan     predicted peak of tensors {peak}, without memo {without}; the program adds some 300 MiB", flush=True
    )
    return [] if asked.gives_alpha else ["--offload", "disk", "--alpha", str(LAPTOP_ALPHA)]


if __name__ == "__main__":
    sys.exit(main())
