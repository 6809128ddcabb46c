"""Compression of a model's gradients: its FSDP2 modules or its DistributedDataParallel get another exchange.

FSDP then sums and divides afterwards, so that an exchange is always a sum. Parameters are gathered as before, exactly.
"""

from __future__ import annotations

import hashlib
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from memo.compression.ddp_hook import int8_mean_hook
from memo.compression.int8_sum import Int8ReduceScatter
from memo.compression.method import CompressionMethod, GradientCompression
from memo.compression.powersgd import PowerSgdReduceScatter
from memo.compression.traffic import ExchangeFigures, GradientTraffic
from memo.errors import UsageError
from memo.units import format_bytes


def compress_gradients(model: nn.Module, compression: GradientCompression | str) -> CompressedGradients:
    """Has data-parallel ranks exchange the gradients of a model in fewer bytes, which are then not exact.

    Args:
        model: FSDP2 modules (`fully_shard`) or DistributedDataParallel, with its weights on their device; every rank calls
            this alike.
        compression: the method, or its text: `int8`, `powersgd`, `powersgd:RANK`.

    Returns:
        Counters and state. Loops that skip a step call its `drop` then, and `commit` after the others.

    Raises:
        UsageError: the model is neither, or the method is not for it; it is then unchanged.
    """
    if isinstance(compression, str):
        compression = GradientCompression.parse(compression)
    traffic = GradientTraffic()
    if isinstance(model, DistributedDataParallel):
        if compression.method is not CompressionMethod.INT8:
            raise UsageError(f"{compression}: DistributedDataParallel has torch's own powerSGD_hook; use that, or int8")
        if model.process_group.size() > 1:
            model.register_comm_hook((model.process_group, traffic), int8_mean_hook)
        return CompressedGradients(compression, traffic, {})
    sharded = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not sharded:
        raise UsageError(f"{compression}: the model has no module of fully_shard and is no DistributedDataParallel")
    groups = {name: _reduced_group(name, module, compression) for name, module in sharded.items()}
    names = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    exchanges: dict[str, PowerSgdReduceScatter] = {}
    for name, group in groups.items():
        if group is None:
            continue
        if compression.method is CompressionMethod.INT8:
            comm: Any = Int8ReduceScatter(traffic)
        else:
            comm = exchanges[name] = _powersgd(name, group, names, compression, traffic)
        sharded[name].set_custom_reduce_scatter(comm)
        sharded[name].set_force_sum_reduction_for_comms(True)
    return CompressedGradients(compression, traffic, exchanges)


def _reduced_group(name: str, module: FSDPModule, compression: GradientCompression) -> Any:
    """FSDP's group of the parameters of a module; None where no rank reduces their gradients with another.

    There FSDP must stay as it is: made to sum, it divides by a divide factor of the user's twice.
    """
    state = cast("Any", module)._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch before 2.12 has one at most
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    where = f"{compression}: {name or 'the model'}"
    if len(groups) > 1:
        raise UsageError(f"{where} has parameters on several meshes; shard those of each mesh as a module of their own")
    if not groups:
        return None
    shards = getattr(groups[0].mesh_info, "shard_mesh_size", None)
    if shards is None:
        raise UsageError(
            f"{where} is of replicate, which sums whole gradients; use DistributedDataParallel or fully_shard"
        )
    return groups[0] if shards > 1 else None


def _powersgd(
    name: str, group: Any, names: dict[int, str], compression: GradientCompression, traffic: GradientTraffic
) -> PowerSgdReduceScatter:
    """Exchange of a module's group of parameters; `names` are prefixes of modules by their id."""

    def trained() -> dict[str, Any]:
        found = {}
        for one in group.fsdp_params:
            if one.sharded_param.requires_grad:
                info = one._module_info
                found[names[id(info.module)] + info.param_name] = one
        return found

    parameters = trained()
    first = next((one.sharded_param for one in parameters.values()), None)
    assert compression.rank is not None
    return PowerSgdReduceScatter(
        name,
        {parameter: one.padded_sharded_param_size for parameter, one in parameters.items()},
        members=dist.get_process_group_ranks(group.mesh_info.shard_process_group),
        rank=compression.rank,
        itemsize=4 if first is None else first.itemsize,
        device=group.device,  # FSDP reduces there, also what it keeps on the CPU
        traffic=traffic,
        trained=trained,
    )


class CompressedGradients:
    """Counters and state of a model's compressed exchanges on this rank."""

    def __init__(
        self, compression: GradientCompression, traffic: GradientTraffic, exchanges: dict[str, PowerSgdReduceScatter]
    ) -> None:
        self.compression = compression
        self.total = ExchangeFigures()
        """Figures of all that was taken."""
        self._traffic = traffic
        self._exchanges = exchanges

    def take_figures(self, device: torch.device) -> ExchangeFigures:
        """Figures since the last call. A collective call of all ranks."""
        figures = self._traffic.take(device)
        self.total += figures
        return figures

    def commit(self) -> None:
        """Keeps the error feedback of a step that is applied."""
        for exchange in self._exchanges.values():
            exchange.commit()

    def drop(self) -> None:
        """Forgets the error feedback of a step that is not applied."""
        for exchange in self._exchanges.values():
            exchange.drop()

    def state(self) -> dict[str, torch.Tensor]:
        """State of this rank under names that no other rank has; a checkpoint is read into the same tensors."""
        rank = dist.get_rank()
        return {
            f"rank{rank}.{name}": tensor
            for exchange in self._exchanges.values()
            for name, tensor in exchange.state().items()
        }

    def state_digest(self) -> str:
        """Digest of all ranks' states, of their names, shapes and the ranks that sum them. A collective call."""
        own = [
            (name, tuple(tensor.shape), exchange.members)
            for exchange in self._exchanges.values()
            for name, tensor in exchange.state().items()
        ]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        return hashlib.sha256(repr(every).encode()).hexdigest()[:16]

    @property
    def state_nbytes(self) -> int:
        """Bytes of the state between two steps; a step holds a second one of them."""
        return sum(tensor.nbytes for tensor in self.state().values())

    def __str__(self) -> str:
        if self.compression.method is CompressionMethod.INT8:
            return "int8, 128 values a scale, summed in float32, no error feedback"
        counts = [one.counts for one in self._exchanges.values()]
        compressed, exact = sum(count for count, _ in counts), sum(count for _, count in counts)
        return (
            f"powersgd of rank {self.compression.rank} for {compressed} parameters of this rank, {exact} exact; "
            f"error feedback {format_bytes(self.state_nbytes)}, twice that in a step"
        )
