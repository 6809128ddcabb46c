"""Launch lines: the commands that carry a plan out with `memo train`, or lay a model of transformers out as planned.

Owns the reasons why there is no such command. Tests give every line to the parsers of memo train and of the example.
"""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memo.gpt import GPTConfig
from memo.gpt.arithmetic import Optimizer, run_of, untrained
from memo.mip.inputs import PipelineSchedule

if TYPE_CHECKING:
    from memo.mip.activation import ActivationPlan
    from memo.mip.cluster import ClusterPlacement
    from memo.search.candidates import Candidate
    from memo.search.request import Request

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
    """Arguments of `memo train`, or of examples/finetune_hf.py."""


def why_not_trained(request: Request, candidate: Candidate | None = None) -> str | None:
    """Reason why `memo train` does not train what is planned, as a sentence without a full stop; None where it does.

    Args:
        request: what is planned.
        candidate: the way that a search has found for it.
    """
    if not isinstance(request.config, GPTConfig):
        return f"memo train builds memo's GPT alone; {request.model} trains under memo.offload"
    if request.recompute is not None:
        return "memo train has no fixed method of recompute"
    if request.optimizer is not Optimizer.ADAMW:
        return f"memo train has no optimizer but AdamW, not {request.optimizer}"
    if request.lora:
        return "memo train trains all weights, not adapters"
    layout = request.layout
    if request.optimizer_offload and layout.gpus > 1:
        return "memo train has an optimizer on the host for one GPU alone"
    sharded = request.zero == 3 and request.sharded_over is None if candidate is None else candidate.is_fully_sharded
    if not sharded and (candidate is not None or layout.replicas * layout.cp > 1):
        return "memo train shards weights, gradients and optimizer state over all data-parallel ranks (ZeRO 3)"
    return None


def why_not_finetuned(request: Request, candidate: Candidate) -> str | None:
    """Reason why examples/finetune_hf.py does not run a layout of a configuration, as `why_not_trained`."""
    if not Path(request.model).is_dir():
        return f"{request.model} is no folder of a model, which examples/finetune_hf.py trains"
    if request.optimizer is not Optimizer.ADAMW or request.recompute is not None or request.optimizer_offload:
        return "examples/finetune_hf.py has AdamW on the device, and plans its own recompute"
    config: Any = request.config
    if candidate.shape.cp > 1 and config.why_no_context is not None:
        return f"memo.parallelize: {config.why_no_context}"
    if not runs_under_parallelize(candidate):
        schedules = ", ".join(one for one in PipelineSchedule if not one.splits_backward)
        return f"memo.parallelize has ZeRO 3 over all data-parallel ranks, and of schedules {schedules}"
    return None


def runs_under_parallelize(candidate: Candidate) -> bool:
    """Whether `memo.parallelize` divides a model of transformers as the candidate does."""
    scheduled = candidate.shape.pp == 1 or (not candidate.schedule.splits_backward and candidate.chunks <= 2)
    return candidate.is_fully_sharded and scheduled


def finetune_arguments(request: Request, candidate: Candidate) -> tuple[str, ...]:
    """Arguments of examples/finetune_hf.py for a layout of a configuration."""
    shape, setting = candidate.shape, candidate.setting
    flags = {"model": request.model, "seq": str(request.layout.tokens)}
    flags |= {name: str(size) for name in ("tp", "pp", "dp", "cp") if (size := getattr(shape, name)) > 1}
    if setting.accumulate > 1:
        flags["microbatches"] = str(setting.accumulate)
    if shape.pp > 1:
        flags["schedule"] = str(candidate.schedule)
        if candidate.stage_layers:
            flags["stage-layers"] = ",".join(map(str, candidate.stage_layers))
    flags["rows"] = str(shape.dp * setting.accumulate * setting.batch)
    if request.lora:
        flags["lora"] = str(request.lora)
    return tuple(word for name, value in flags.items() for word in (f"--{name}", value))


def with_run(plan: ActivationPlan, request: Request, candidate: Candidate | None = None) -> ActivationPlan:
    """The plan with what it says of its run; arguments as `why_not_trained` has them."""
    reason = why_not_trained(request, candidate)
    if request.config is None:
        return plan
    run = {}
    if isinstance(request.config, GPTConfig):
        run = run_of(request.model, request.config, optimizer_offload=request.optimizer_offload)
    return dataclasses.replace(plan, run=run if reason is None else {**run, **untrained(reason)})


def runs_under_memo_train(candidate: Candidate) -> bool:
    """Whether `memo train` shards as the candidate does."""
    return candidate.is_fully_sharded


def launch_of(
    plan: ActivationPlan,
    *,
    gpus_per_node: int,
    plan_file: str,
    placement: ClusterPlacement | None = None,
    finetune: tuple[str, ...] = (),
) -> Launch | None:
    """Launch lines of a plan; None where a node would hold ranks that do not follow one another.

    Args:
        plan: what is run.
        gpus_per_node: GPUs of a node.
        plan_file: where the plan is.
        placement: on nodes that are not alike, its placement: a line for each run of equal nodes, in the order of ranks.
        finetune: arguments of examples/finetune_hf.py, which is then run in place of memo train.
    """
    train, gpus = finetune or train_arguments(plan, plan_file), plan.problem.gpus
    inner = f"{'examples/finetune_hf.py' if finetune else '-m memo.cli.main train'} {shlex.join(train)}"
    if placement is not None:
        lines = _lines(placement, inner)
        return Launch(torchrun="\n".join(lines), slurm=None, train=train) if lines else None
    nodes, per_node = max(gpus // gpus_per_node, 1), min(gpus, gpus_per_node)
    one = f"torchrun --nproc-per-node {per_node} {inner}"
    many = f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint"
    first = f'"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{PORT}"'
    under = one if nodes == 1 else f"srun {many} {first} {inner}"
    allocated = f"sbatch --nodes {nodes} --ntasks-per-node 1 --gpus-per-node {per_node} --wrap {shlex.quote(under)}"
    return Launch(torchrun=one if nodes == 1 else f"{many} HOST:{PORT} {inner}", slurm=allocated, train=train)


def _lines(placement: ClusterPlacement, inner: str) -> list[str]:
    """For each run of nodes which they are, and the command to start on each, by its rank among them."""
    runs, lines, first = _runs_of_nodes(placement), [], 0
    for group, count, ranks in runs:
        last = first + count - 1
        which = f"node {first}" if first == last else f"nodes {first} to {last}"
        command = (
            f"torchrun --nnodes {sum(nodes for _, nodes, _ in runs)} --node-rank {first if count == 1 else 'RANK'}"
        )
        command += f" --nproc-per-node {ranks} --master-addr HOST --master-port {PORT} {inner}"
        lines.append(f"{which}, of {placement.cluster.groups[group].name}: {command}")
        first = last + 1
    return lines


def _runs_of_nodes(placement: ClusterPlacement) -> list[tuple[int, int, int]]:
    """Groups by their ranks, each with the number of nodes that follow one another and the ranks on each of them.

    None where a node would hold ranks that do not follow one another. Ranks are numbered by stage, then replica.
    """
    runs: list[list[int]] = []  # group, ranks
    for place in placement.places:
        for group, replicas in zip(place.groups, place.replicas, strict=True):
            ranks = replicas * placement.tp * placement.cp
            if runs and runs[-1][0] == group:
                runs[-1][1] += ranks
            else:
                runs.append([group, ranks])
    found = []
    for group, ranks in runs:
        per_node = placement.cluster.groups[group].machine.gpus_per_node
        alone = sum(one[0] == group for one in runs) == 1
        if ranks % per_node and not (alone and ranks < per_node):
            return []
        found.append((group, max(ranks // per_node, 1), min(ranks, per_node)))
    return found


def train_arguments(plan: ActivationPlan, plan_file: str) -> tuple[str, ...]:
    """Arguments of `memo train` that carry a plan out; where its scratch file is, no plan says."""
    on_disk = any(stage.peak_disk_bytes for stage in plan.stages)
    return ("--plan", plan_file, *(("--disk", "/scratch") if on_disk else ()))
