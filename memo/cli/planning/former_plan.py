"""The layout of a plan that a run was started with, and what it costs to go on at another: `memo plan --from`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memo.cli.terminal.file_kinds import FileKind, require_kind
from memo.errors import UsageError
from memo.gpt import GPTConfig, Precision, preset_name
from memo.gpt.arithmetic import layout_of
from memo.gpt.checkpoint import reshard
from memo.mip.activation import read_activation_plan

if TYPE_CHECKING:
    from memo.gpt.checkpoint import Resharding
    from memo.mip.activation import ActivationProblem
    from memo.mip.inputs import Hardware

_NOT_OWN = "--from is for sizes of memo's GPT, which memo train trains"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """The plan of the run that wrote a checkpoint."""

    name: str
    """The file."""
    problem: ActivationProblem

    @classmethod
    def read(cls, path: str, *, model: str | None) -> CheckpointPlan:
        """Reads the plan, for a run of a model that a flag names.

        Raises:
            PlanError: the file cannot be read, or is not an activation plan.
            UsageError: memo train does not train the model.
        """
        if model is None or preset_name(model) is None:
            raise UsageError(_NOT_OWN)
        require_kind(path, FileKind.ACTIVATION_PLAN)
        return cls(name=path, problem=read_activation_plan(path).problem)

    def require_model(self, name: str, config: object) -> None:
        """Raises UsageError unless the plan is of this model."""
        if not isinstance(config, GPTConfig):
            raise UsageError(_NOT_OWN)
        was, layers = self.problem.profile, config.layers
        former = was.signature.model.partition(" ")[0]  # a fixed method of recompute follows
        if preset_name(former) != preset_name(name) or len(was.layers) != layers:
            raise UsageError(
                f"--from {self.name}: the plan is of {former} with {len(was.layers)} layers, and its checkpoint "
                f"cannot go on as {name} with {layers}"
            )

    def resharding_row(self, config: object, problem: ActivationProblem) -> tuple[str, dict[str, object]]:
        """The line of the tables, and the object of --json, in which seconds are None where no rate is known.

        Where nodes are not alike, all have the largest one's ranks and read as slowly as the slowest one.

        Args:
            config: the model, as `require_model` has it.
            problem: of the plan to go on with.

        Raises:
            UsageError: as `resharding`.
        """
        assert isinstance(config, GPTConfig)
        found = self.resharding(config, problem)
        machines = [problem.machine_of(stage).hardware for stage in range(problem.pipeline.stages)]
        ranks = max(machine.gpus_per_node for machine in machines)
        rate = min(checkpoint_bytes_per_s(machine, problem.gpus) for machine in machines)
        summary: dict[str, object] = {
            "most_read_bytes": max(found.read_bytes),
            "total_read_bytes": found.total_bytes,
            "read_bytes": list(found.read_bytes),
            "own_bytes": list(found.own_bytes),
            "node_bytes_per_s": rate,
            "seconds": found.seconds(ranks_per_node=ranks, node_bytes_per_s=rate) if rate else None,
        }
        return found.row(ranks_per_node=ranks, node_bytes_per_s=rate), summary

    def resharding(self, config: GPTConfig, problem: ActivationProblem) -> Resharding:
        """Bytes that the ranks of another plan of the model read of this plan's checkpoint.

        Args:
            config: the model.
            problem: of the other plan.

        Raises:
            UsageError: the model does not divide over a layout.
        """
        was, now = (known.profile for known in (self.problem, problem))
        whole = [profile.embedding_exchange is not None and profile.embedding_exchange.sparse for profile in (was, now)]
        return reshard(
            config,
            layout_of(self.problem),
            layout_of(problem),
            element=2 if was.signature.dtype == Precision.BF16 else 4,
            sparse_embedding=(whole[0], whole[1]),
        )


def checkpoint_bytes_per_s(machine: Hardware, gpus: int) -> float:
    """Rate at which a node reads a checkpoint: its disks', and where nodes share a file system at most its NICs'.

    The file system's own rate is not known, and taken to be that of a node's disks for each node. 0 without disks.
    """
    if gpus <= machine.gpus_per_node:
        return machine.disk_read_bytes_per_s
    network = machine.network
    nics = network.nics_per_node * network.nic_bytes_per_s * network.nic_efficiency / network.oversubscription
    return min(machine.disk_read_bytes_per_s, nics)
