"""Two ranks of tensor parallelism, with and without memo; run by test_two_ranks.py, once for each rank."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import test_megatron as one
import torch
import torch.distributed as dist
from integrations import MIN_BYTES, STEPS, assert_divided, assert_same
from megatron.core import parallel_state

from memo.integrations.megatron import managed


def main(rank: int, port: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        one.without_cuda(patch)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        kind: dict[str, Any] = {"tensor_model_parallel_size": 2}
        want = one.trained(one.gpt(**kind), one.forward_step, batch=2)
        for alpha in (0.0, 0.25):
            step: Any = managed(one.forward_step, alpha=alpha, min_bytes=MIN_BYTES)
            assert_same(one.trained(one.gpt(**kind), step, batch=2), want)
            assert_divided(step.manager, one.LAYERS, forwards=2 * STEPS)
            step.manager.close()
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]))
