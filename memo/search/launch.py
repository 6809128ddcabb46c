"""Launch lines: the commands that carry a layout out with `memo train`, by torchrun and by Slurm.

Owns the flags of `memo train` that a layout needs, and the reasons why there is no such command. A test gives every line to
memo train's own parser.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memo.gpt import GPTConfig
from memo.gpt.arithmetic import Optimizer

if TYPE_CHECKING:
    from memo.mip.activation import ActivationPlan
    from memo.search.candidates import Candidate
    from memo.search.request import Request

__all__ = ["PORT", "Launch", "launch_of", "runs_under_memo_train", "train_arguments", "why_not_trained"]

PORT = 29500
"""Port of the first node, where torchrun's processes meet."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Commands that run one layout."""

    torchrun: str
    """To be started on every node; on several, HOST is the first one's name. Where nodes are not alike, a line for each
    run of equal ones."""
    slurm: str | None
    """None where nodes are not alike."""
    train: tuple[str, ...]
    """Arguments of `memo train`."""


def why_not_trained(request: Request) -> str | None:
    """Reason why `memo train` does not train what is planned, as a sentence without a full stop; None where it does."""
    if not isinstance(request.config, GPTConfig):
        return f"memo train builds memo's GPT alone; {request.model} trains under memo.offload"
    if request.recompute is not None:
        return "memo train has no fixed method of recompute"
    if request.optimizer is not Optimizer.ADAMW:
        return f"memo train has no optimizer but AdamW, not {request.optimizer}"
    if request.lora:
        return "memo train trains all weights, not adapters"
    if request.optimizer_offload:
        return "memo train keeps the optimizer's state on the GPU"
    return None


def runs_under_memo_train(candidate: Candidate) -> bool:
    """Whether `memo train` shards as the candidate does."""
    return candidate.is_fully_sharded


def launch_of(
    plan: ActivationPlan, candidate: Candidate, *, gpus_per_node: int, model_flags: Sequence[str], plan_file: str
) -> Launch:
    """Launch lines of a candidate.

    Args:
        plan: its plan.
        candidate: what is run.
        gpus_per_node: GPUs of a node.
        model_flags: flags of `memo train` that name and shape the model.
        plan_file: where the plan is.
    """
    train = train_arguments(plan, candidate, model_flags=model_flags, plan_file=plan_file)
    gpus = candidate.shape.gpus
    nodes, per_node = max(gpus // gpus_per_node, 1), min(gpus, gpus_per_node)
    inner = f"-m memo.cli.main train {shlex.join(train)}"
    one = f"torchrun --nproc-per-node {per_node} {inner}"
    many = f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint"
    first = f'"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{PORT}"'
    under = one if nodes == 1 else f"srun {many} {first} {inner}"
    allocated = f"sbatch --nodes {nodes} --ntasks-per-node 1 --gpus-per-node {per_node} --wrap {shlex.quote(under)}"
    return Launch(torchrun=one if nodes == 1 else f"{many} HOST:{PORT} {inner}", slurm=allocated, train=train)


def train_arguments(
    plan: ActivationPlan, candidate: Candidate, *, model_flags: Sequence[str], plan_file: str, stage: int = 0
) -> tuple[str, ...]:
    """Arguments of `memo train` that carry a candidate's plan out.

    Args:
        plan: its plan.
        candidate: what is run.
        model_flags: flags of `memo train` that name and shape the model.
        plan_file: where the plan is.
        stage: pipeline stage whose machine's budgets are given.
    """
    shape, setting, budgets = candidate.shape, candidate.setting, plan.problem.machine_of(stage).budgets
    signature = plan.problem.profile.signature
    sizes = (("dp", shape.dp), ("tp", shape.tp), ("pp", shape.pp), ("cp", shape.cp), ("ep", shape.ep))
    train = [*model_flags, "--seq", str(signature.tokens), "--precision", signature.dtype]
    for name, size in sizes:
        train += [f"--{name}", str(size)] if size > 1 else []
    if shape.cp > 1:
        train += ["--cp-attention", "ring" if shape.ring else "ulysses"]
    if shape.pp > 1:
        train += ["--schedule", str(candidate.schedule)]
    if candidate.stage_layers:
        train += ["--stage-layers", ",".join(map(str, candidate.stage_layers))]
    if candidate.chunks > 2:
        train += ["--chunks", str(candidate.chunks)]
    train += ["--batch", str(setting.batch), "--accumulate", str(setting.accumulate)]
    train += ["--offload", "auto", "--plan", plan_file]
    if any(stage.peak_host_bytes for stage in plan.stages):
        train += ["--host", str(budgets.host_bytes)]
    if any(stage.peak_disk_bytes for stage in plan.stages):
        train += ["--disk", "/scratch", "--disk-budget", str(budgets.disk_bytes)]
    return tuple(train)
