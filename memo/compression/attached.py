"""Compression of a model's gradients: its FSDP2 modules or its DistributedDataParallel get another exchange.

FSDP then sums and divides afterwards, so that an exchange is always a sum. Parameters are gathered as before, exactly.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from memo.compression.ddp_hook import int8_mean_hook
from memo.compression.int8_sum import Int8ReduceScatter
from memo.compression.method import GradientCompression, Method
from memo.compression.powersgd import PowerSgdReduceScatter
from memo.compression.traffic import ExchangeFigures, GradientTraffic
from memo.errors import UsageError
from memo.units import format_bytes

__all__ = ["CompressedGradients", "compress_gradients"]


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
    sharded = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    traffic = GradientTraffic()
    if isinstance(model, DistributedDataParallel):
        if compression.method is not Method.INT8:
            raise UsageError(f"{compression}: DistributedDataParallel has torch's own powerSGD_hook; use that, or int8")
        model.register_comm_hook((model.process_group, traffic), int8_mean_hook)
        return CompressedGradients(compression, traffic, {})
    if not sharded:
        raise UsageError(f"{compression}: the model has no module of fully_shard and is no DistributedDataParallel")
    exchanges: dict[str, PowerSgdReduceScatter] = {}
    for name, module in sharded.items():
        if compression.method is Method.INT8:
            comm: Any = Int8ReduceScatter(traffic)
        else:
            comm = _powersgd(name, module, compression, traffic)
            exchanges[name] = comm
        module.set_custom_reduce_scatter(comm)
        module.set_force_sum_reduction_for_comms(True)
    return CompressedGradients(compression, traffic, exchanges)


def _powersgd(
    name: str, module: FSDPModule, compression: GradientCompression, traffic: GradientTraffic
) -> PowerSgdReduceScatter:
    group = cast("Any", module)._get_fsdp_state()._fsdp_param_group
    parameters = [] if group is None else [one for one in group.fsdp_params if one.sharded_param.requires_grad]
    assert compression.rank is not None
    return PowerSgdReduceScatter(
        name,
        [one.padded_sharded_param_size for one in parameters],
        ranks=1 if group is None else group.mesh_info.shard_mesh_size,
        rank=compression.rank,
        itemsize=parameters[0].sharded_param.itemsize if parameters else 4,
        device=parameters[0].sharded_param.device if parameters else torch.device("cpu"),
        traffic=traffic,
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
            f"rank{rank}.{module}.{name}": tensor
            for module, exchange in self._exchanges.items()
            for name, tensor in exchange.state().items()
        }

    @property
    def state_nbytes(self) -> int:
        """Bytes of the state between two steps; a step holds a second one of them."""
        return sum(tensor.nbytes for tensor in self.state().values())

    def __str__(self) -> str:
        if self.compression.method is Method.INT8:
            return "int8, 128 values a scale, summed in float32, no error feedback"
        compressed, exact = (
            sum(column) for column in zip(*(one.counts for one in self._exchanges.values()), strict=True)
        )
        return (
            f"powersgd of rank {self.compression.rank} for {compressed} parameters of this rank, {exact} exact; "
            f"error feedback {format_bytes(self.state_nbytes)}, twice that in a step"
        )
