r"""Trains on documents of a million tokens: the same script on a laptop, on one GPU and on many, by flags alone.

    CPU laptop      python examples/train_1m.py --preset laptop

    one H200        python examples/train_1m.py --preset 350m --data books/ --steps 1000 \
                        --checkpoint-dir run --checkpoint-minutes 30 --metrics run.jsonl

    eight GPUs      torchrun --nproc-per-node 8 examples/train_1m.py --preset 7b --data books/ --steps 1000 \
                        --checkpoint-dir /shared/run --checkpoint-minutes 30

    in stages       torchrun --nproc-per-node 8 examples/train_1m.py --preset 7b --tp 4 --pp 2 --accumulate 8 ...

    four nodes      torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 \
                        examples/train_1m.py --preset 7b --dp 4 --data books/ --steps 1000 ...

It prints the plan (what each layer keeps, moves and recomputes, and the predicted peaks), then one line per step. A row of a
batch is a million tokens of one book; shorter books are skipped. Without --data the books are packages of Python's standard
library. For short texts use --documents packed --mask-documents. Any flag of `memo train` may follow and overrides the
preset; after an interrupt, --resume continues.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawTextHelpFormatter

import torch

from memo.cli.main import main as memo
from memo.cli.tables.activation import activation_table
from memo.errors import MemoError
from memo.gpt import Precision, preset
from memo.gpt.arithmetic import StepLayout, derive_profile
from memo.mip.activation import (
    MLP_TILE_COUNTS,
    ActivationProblem,
    Budgets,
    Pipeline,
    plan_to_json,
    read_hardware,
    solve_mlp_tiles,
)
from memo.mip.address import write_file
from memo.mip.inputs import Hardware, PipelineSchedule, hardware_of
from memo.mip.simulate import verify_by_simulation
from memo.record import gpt_step, record_step
from memo.units import format_bytes, parse_bytes, parse_tokens

LAPTOP_ALPHA = 0.25  # most of what can be recomputed that goes to disk instead

LEADS = os.environ.get("RANK", "0") == "0"  # the first of torchrun's processes
# Heads of 128 are the fastest for the attention kernels of GPUs; rotary positions need no memory at any length.
PRESETS = {
    "laptop": ["--model", "tiny", "--seq", "32k", "--steps", "3", "--on", "cpu"],
    "350m": ["--model", "350m", "--variant", "llama", "--heads", "8", "--seq", "1m"],
    "7b": ["--model", "7b", "--variant", "llama", "--seq", "1m", "--tp", "8"],
}


def main() -> int:
    """Plans, trains and returns the exit code."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter, allow_abbrev=False)
    parser.add_argument("--preset", choices=PRESETS, required=True, help="model, sequence length and parallelism")
    parser.add_argument("--gpu", metavar="FILE", help="plan for this description of a machine (default: this GPU)")
    parser.add_argument("--plan-file", metavar="FILE", help="save the plan to FILE, for memo show and memo simulate")
    known, flags = parser.parse_known_args()
    flags = [*PRESETS[known.preset], "--documents", "whole", *flags]
    with tempfile.TemporaryDirectory(prefix="memo-plan-") as folder:
        file = known.plan_file if known.plan_file is not None and LEADS else f"{folder}/plan.json"
        try:
            asked = read(flags)
            offload = by_plan(asked, known.gpu, file) if known.gpu or asked.on_gpu else to_disk(asked)
        except MemoError as error:
            print(f"train_1m: {error}", file=sys.stderr)
            return error.exit_code
        return memo(["train", *([] if asked.says_where else offload), *flags])


def read(flags: list[str]) -> Namespace:
    """Sizes in the flags of `memo train`; the last of each flag counts, as it does there."""
    sizes = ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("model", "variant", "seq", "device", "host", "alpha", "offload", "on"):
        sizes.add_argument(f"--{name}")
    for name in ("layers", "hidden", "heads", "mlp-tiles", "batch", "accumulate", "dp", "tp", "cp", "pp"):
        sizes.add_argument(f"--{name}", type=int)
    sizes.add_argument("--precision", type=Precision)
    sizes.add_argument("--schedule", type=PipelineSchedule, default=PipelineSchedule.ONE_F_ONE_B)
    sizes.set_defaults(variant="gpt", batch=1, accumulate=1, dp=1, tp=1, cp=1, pp=1)
    asked, _ = sizes.parse_known_args(flags)
    tokens, ranks = parse_tokens(asked.seq), asked.dp * asked.tp * asked.cp * asked.pp
    shape = {name: getattr(asked, name) for name in ("layers", "hidden", "heads")}
    asked.config = preset(asked.model, variant=asked.variant, max_seq=tokens, **shape)
    ways = {name: getattr(asked, name) for name in ("tp", "cp", "pp")}
    asked.layout = StepLayout(tokens=tokens, batch=asked.batch, gpus=ranks, **ways)
    asked.on_gpu = asked.on != "cpu" and torch.cuda.is_available()
    asked.precision = asked.precision or (Precision.BF16_AUTOCAST if asked.on_gpu else Precision.FP32)
    asked.says_where = asked.alpha is not None or asked.offload is not None
    return asked


def by_plan(asked: Namespace, description: str | None, file: str) -> list[str]:
    """Solves for the shortest step within the machine's memory; returns the flags that run the plan."""
    machine = this_gpu() if description is None else read_hardware(description)
    device = int(0.95 * machine.device_bytes) if asked.device is None else parse_bytes(asked.device)
    host = int(0.8 * machine.host_bytes) if asked.host is None else parse_bytes(asked.host)
    together = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    budgets = Budgets(device_bytes=device, host_bytes=host, ranks_per_node=together)
    turns = {"microbatches": asked.accumulate, "schedule": asked.schedule}
    pipeline = Pipeline(stages=asked.pp, stage_ranks=asked.layout.gpus // asked.pp, **turns)

    def problem(tiles: int) -> ActivationProblem:
        config = dataclasses.replace(asked.config, mlp_tiles=tiles)
        profile = derive_profile(config, machine, asked.layout, precision=asked.precision, accumulate=asked.accumulate)
        return ActivationProblem(profile=profile, hardware=machine, budgets=budgets, pipeline=pipeline)

    plan = solve_mlp_tiles(problem, MLP_TILE_COUNTS if asked.mlp_tiles is None else [asked.mlp_tiles])
    verify_by_simulation(plan)
    write_file(file, plan_to_json(plan), overwrite=True)
    if LEADS:
        print(activation_table(plan), flush=True)
    return ["--offload", "auto", "--plan", file, "--host", str(host)]


def this_gpu() -> Hardware:
    """Description of this GPU: rates of the preset of its name, else of an H100, with the memory of this machine."""
    known = hardware_of(torch.cuda.get_device_name())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return dataclasses.replace(known, device_bytes=torch.cuda.get_device_properties(0).total_memory, host_bytes=memory)


def to_disk(asked: Namespace) -> list[str]:
    """Flags for a CPU, whose activations move to disk; simulates a step without bytes to predict_stages the peak."""
    batch, tokens = asked.layout.batch, asked.layout.tokens
    step = functools.partial(gpt_step, asked.config, batch=batch, tokens=tokens, precision=asked.precision)
    plain, ours = (record_step(step, alpha=alpha, exact=True) for alpha in (None, LAPTOP_ALPHA))
    state = 3 * plain.static_nbytes  # the weights, and AdamW's two moments of each
    peak, without = (format_bytes(state + played.trace.peak_nbytes) for played in (ours, plain))
    print(f"plan     alpha {LAPTOP_ALPHA}: {format_bytes(ours.moved_nbytes)} a step to disk, the rest computed again")
    print(
        f"plan     predicted peak of tensors {peak}, without memo {without}; the program adds some 300 MiB", flush=True
    )
    return ["--offload", "disk", "--alpha", str(LAPTOP_ALPHA)]


if __name__ == "__main__":
    sys.exit(main())
