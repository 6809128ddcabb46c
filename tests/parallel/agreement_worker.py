"""Runs under torchrun: ranks of two groups that say different things, and what each hears."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from memo.errors import UsageError
from memo.parallel import gather_values
from memo.parallel.rank_agreement import agree, require_equal, require_same_batch, require_same_draws


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    first = rank // 2 * 2
    assert gather_values({"rank": rank}, pair) == [{"rank": first}, {"rank": first + 1}]
    assert agree(f"plan of {rank}", pair) == f"plan of {first}"
    assert agree(rank) == 0
    require_equal(first, pair, what="alpha")
    said = f"alpha: 0.0 on rank {first}, but 0.25 on rank {first + 1}, which must be equal"
    with pytest.raises(UsageError, match=f"^{said}$"):
        require_equal(rank % 2 / 4, pair, what="alpha")
    tokens = torch.arange(6).view(2, 3) + first
    require_same_batch(pair, tokens, tokens + 1)
    with pytest.raises(UsageError, match="the batch of ranks that compute each layer together: "):
        require_same_batch(pair, tokens[: 1 + rank % 2])
    with pytest.raises(UsageError, match="have other tokens or labels"):
        require_same_batch(pair, tokens, tokens.flip(1) if rank % 2 else tokens)
    torch.manual_seed(first)
    require_same_draws(torch.device("cpu"), pair)
    torch.rand(rank)
    with pytest.raises(UsageError, match="the ranks that compute each layer together draw other random numbers"):
        require_same_draws(torch.device("cpu"), pair)
    if rank == 0:
        print("agreed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
