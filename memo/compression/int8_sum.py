"""Sum over ranks of values that travel as int8 codes, in float32: nothing is added as int8, so nothing overflows.

    rank r    values for rank 0 | values for rank 1 | ...    encode: 128 values, one scale
                     all-to-all of the codes and scales
    rank s    decode and add what came, in the order of the ranks, in float32

Each value is off by at most 1/254 of the largest of its 128 (memo.kernels.codec); there is no error feedback. A group with a
value that is not finite is NaN throughout where it arrives, and so is the sum. A shard of the sum is made by one rank, and
what all ranks need is decoded from the same bytes, so all have the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from memo.compression.traffic import GradientTraffic
from memo.kernels import ALIGNMENT, VALUES, Codec, coded_error, decode, encode

CODEC = Codec.INT8


class Int8ReduceScatter:
    """Reduce-scatter of FSDP2 (`FSDPModule.set_custom_reduce_scatter`) over int8 codes.

    Args:
        traffic: counts.
    """

    def __init__(self, traffic: GradientTraffic) -> None:
        self._traffic = traffic

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """New memory for FSDP's buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Writes this rank's shard of the sum. A collective call."""
        assert op == dist.ReduceOp.SUM, "compress_gradients has FSDP sum, and divide afterwards"
        output_tensor.copy_(summed_shard(input_tensor.view(group.size(), -1), group, self._traffic))


def summed_shard(parts: torch.Tensor, group: dist.ProcessGroup, traffic: GradientTraffic) -> torch.Tensor:
    """This rank's shard of the sum over the group, (n,), float32. A collective call.

    Args:
        parts: (ranks, n), a shard for each rank; of a floating-point type.
        group: the ranks.
        traffic: counts.
    """
    ranks, count = parts.shape
    values = parts if parts.dtype in VALUES else parts.float()
    block = block_bytes(count)
    sent = torch.empty(ranks * block, dtype=torch.uint8, device=parts.device)
    for row, codes in zip(values, sent.view(ranks, block), strict=True):
        encode(row, codes, CODEC)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    traffic.add_bytes((ranks - 1) * block, exact=(ranks - 1) * count * parts.itemsize)
    for row, codes in zip(values, sent.view(ranks, block), strict=True):
        traffic.note_error(coded_error(row.float(), codes, CODEC)[1])
    total = torch.zeros(count, device=parts.device)
    decoded = torch.empty_like(total)
    for codes in received.view(ranks, block):
        decode(codes, decoded, CODEC)
        total += decoded
    return total


def block_bytes(count: int) -> int:
    """Bytes of the codes and scales of a shard; the next shard's begin at a multiple of ALIGNMENT."""
    return -(-CODEC.nbytes(count) // ALIGNMENT) * ALIGNMENT
