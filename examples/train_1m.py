"""Trains on documents of a million tokens: the same script on a laptop, on one GPU and on many, by flags alone.

    CPU laptop      python examples/train_1m.py --preset laptop

    one H200        python examples/train_1m.py --preset 350m --data books/ --steps 1000 \\
                        --checkpoint-dir run --checkpoint-minutes 30 --metrics run.jsonl

    eight GPUs      torchrun --nproc-per-node 8 examples/train_1m.py --preset 7b --data books/ --steps 1000 \\
                        --checkpoint-dir /shared/run --checkpoint-minutes 30

    in stages       torchrun --nproc-per-node 8 examples/train_1m.py --preset 7b --tp 4 --pp 2 --accumulate 8 ...

    four nodes      torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 \\
                        examples/train_1m.py --preset 7b --dp 4 --batch 4 --data books/ --steps 1000 ...

It prints what each layer will keep, move and recompute, and the peaks this leads to; then a line a step. A row of a batch is
the first million tokens of a book, or the next of the same one; what is shorter is left out. Without --data the books are
packages of Python's standard library. For short texts: --documents packed --mask-documents. Any flag of `memo train` may
follow and has the last word; after a stop, --resume goes on.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawTextHelpFormatter

import torch

from memo.cli.activation_tables import activation_table
from memo.cli.main import main as memo
from memo.errors import MemoError
from memo.gpt.arithmetic.profile_by_arithmetic import Layout, derive_profile
from memo.gpt.config import preset
from memo.gpt.train_config import Precision
from memo.mip.activation.files import plan_to_json, read_hardware
from memo.mip.activation.mlp_tiles import MLP_TILE_COUNTS, solve_mlp_tiles
from memo.mip.activation.plan import ActivationProblem, Budgets, Pipeline
from memo.mip.address.files import write_file
from memo.mip.inputs.hardware import Hardware, hardware_of
from memo.mip.inputs.pipeline_schedules import PipelineSchedule
from memo.mip.simulate.proof import prove
from memo.record.recording import gpt_step, record_step
from memo.units import format_bytes, parse_bytes, parse_tokens

LAPTOP_ALPHA = 0.25  # of the tokens, whose activations go to disk; those of the rest are computed again

LEADS = os.environ.get("RANK", "0") == "0"  # among the processes that torchrun started
# Heads of 128 are what the GPUs' attention kernels are fastest at; rotary positions cost no memory at any length.
PRESETS = {
    "laptop": ["--model", "tiny", "--seq", "32k", "--steps", "3", "--device", "cpu"],
    "350m": ["--model", "350m", "--variant", "llama", "--heads", "8", "--seq", "1m"],
    "7b": ["--model", "7b", "--variant", "llama", "--seq", "1m", "--tp", "8"],
}


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter, allow_abbrev=False)
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--gpu", metavar="FILE", help="a machine's description, to plan for instead of this GPU")
    parser.add_argument("--plan-file", metavar="FILE", help="keep the plan here, for memo show and memo simulate")
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
    """What the flags of `memo train` say about size; the last of each counts, as it does there."""
    sizes = ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("model", "variant", "seq", "device-budget", "host-budget", "alpha", "offload", "device"):
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
    rows, ways = max(asked.batch // asked.dp, 1), {name: getattr(asked, name) for name in ("tp", "cp", "pp")}
    asked.layout = Layout(tokens=tokens, batch=rows, gpus=ranks, **ways)
    asked.on_gpu = asked.device != "cpu" and torch.cuda.is_available()
    asked.precision = asked.precision or (Precision.BF16_AUTOCAST if asked.on_gpu else Precision.FP32)
    asked.says_where = asked.alpha is not None or asked.offload is not None  # its activations go
    return asked


def by_plan(asked: Namespace, description: str | None, file: str) -> list[str]:
    """Solves for the shortest step within the machine's memory, stage by stage; the flags that carry the plan out."""
    machine = this_gpu() if description is None else read_hardware(description)
    device = int(0.95 * machine.device_bytes) if asked.device_budget is None else parse_bytes(asked.device_budget)
    host = int(0.8 * machine.host_bytes) if asked.host_budget is None else parse_bytes(asked.host_budget)
    together = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    budgets = Budgets(device_bytes=device, host_bytes=host, ranks_per_node=together)
    neighbours = max(together * asked.pp // asked.layout.gpus, 1)  # stages whose ranks share a node
    turns = {"microbatches": asked.accumulate, "schedule": asked.schedule}
    pipeline = Pipeline(stages=asked.pp, stages_per_node=neighbours, **turns)

    def problem(tiles: int) -> ActivationProblem:
        config = dataclasses.replace(asked.config, mlp_tiles=tiles)
        profile = derive_profile(config, machine, asked.layout, precision=asked.precision)
        return ActivationProblem(profile=profile, hardware=machine, budgets=budgets, pipeline=pipeline)

    plan = solve_mlp_tiles(problem, MLP_TILE_COUNTS if asked.mlp_tiles is None else [asked.mlp_tiles])
    prove(plan)
    write_file(file, plan_to_json(plan), overwrite=True)
    if LEADS:
        print(activation_table(plan), flush=True)
    return ["--offload", "auto", "--plan", file, "--host-budget", str(host)]


def this_gpu() -> Hardware:
    """The preset by its name, an H100's rates where there is none, with the memories that are really here."""
    known = hardware_of(torch.cuda.get_device_name())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return dataclasses.replace(known, device_bytes=torch.cuda.get_device_properties(0).total_memory, host_bytes=memory)


def to_disk(asked: Namespace) -> list[str]:
    """Where host memory is the device there is one choice, the disk: plays a step without memory to foretell the peak."""
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
