"""Communication hook of DistributedDataParallel over int8 codes.

No `from __future__ import annotations` here: DistributedDataParallel compares the hook's annotations with classes.
"""

import torch
import torch.distributed as dist

from memo.compression.int8_sum import CODEC, block_bytes, summed_shard
from memo.compression.traffic import GradientTraffic
from memo.kernels import coded_error, decode, encode
from memo.parallel import all_gathered


def int8_mean_hook(
    state: tuple[dist.ProcessGroup, GradientTraffic],
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Communication hook of DistributedDataParallel: the mean of a bucket, summed and then gathered as int8 codes.

    Args:
        state: the ranks, and counters.
        bucket: gradients of some parameters.
    """
    group, traffic = state
    buffer, ranks = bucket.buffer(), group.size()
    count = -(-buffer.numel() // ranks)
    parts = torch.nn.functional.pad(buffer, (0, ranks * count - buffer.numel())).view(ranks, count)
    own = summed_shard(parts, group, traffic) / ranks
    codes = torch.empty(block_bytes(count), dtype=torch.uint8, device=buffer.device)
    encode(own, codes, CODEC)
    traffic.note_error(coded_error(own, codes, CODEC)[1])
    traffic.add_bytes((ranks - 1) * codes.numel(), exact=(ranks - 1) * count * buffer.itemsize)
    decoded = torch.empty(ranks, count, device=buffer.device)
    for row, theirs in zip(decoded, all_gathered(codes, group, 0).view(ranks, -1), strict=True):
        decode(theirs, row, CODEC)
    buffer.copy_(decoded.view(-1)[: buffer.numel()])
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done
