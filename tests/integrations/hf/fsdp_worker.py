"""Runs on each of two ranks: a loop of Accelerate's under FSDP, checkpointed in memo's ways, equals itself without.

Stand-ins on a CPU, where Accelerate has DDP only: the state says that the plugin applies, and has a device that FSDP takes.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.tensor import DTensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from integrations import MIN_BYTES, STEPS, Run, Texts, assert_divided, assert_same, llama

import memo
from memo.checkpointing import function
from memo.integrations.hf import checkpoint_with_memo

LAYERS = 3


def trained(
    version: int,
    *,
    before: Callable[[nn.Module], object] = id,
    after: Callable[[nn.Module, Any], object] = lambda model, plugin: None,
    checkpointed: bool = False,
) -> Run:
    """Five steps; `before` and `after` are called around `prepare`."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        activation_checkpointing=checkpointed,
        use_orig_params=True if version == 1 else None,
    )
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    state = accelerator.state
    state.distributed_type, state.fsdp_plugin, state.device = DistributedType.FSDP, plugin, torch.device("cpu")
    model: Any = llama(LAYERS)
    before(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared: Any = accelerator.prepare(model, optimizer)
    model, optimizer = prepared
    after(model, plugin)
    losses = []
    for batch in accelerator.prepare(torch.utils.data.DataLoader(Texts(4 * STEPS), batch_size=2)):
        loss = model(**batch, use_cache=False).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    shards = {name: each.detach().clone() for name, each in model.named_parameters()}
    local = {name: each.to_local() if isinstance(each, DTensor) else each for name, each in shards.items()}
    return Run(losses, {name.replace("_checkpoint_wrapped_module.", ""): each for name, each in local.items()})


def wrapped(model: nn.Module, **which: Any) -> None:
    """Does what the plugin does for `activation_checkpointing`, with memo's function."""
    ours = functools.partial(checkpoint_wrapper, checkpoint_fn=memo.checkpoint)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=ours, **which)


def assert_regions() -> None:
    """Each layer was a region, recomputed in part."""
    (context,) = function._thread.contexts.values()
    report = context.report()
    assert report.recompute is not None
    assert report.recompute.accepted == LAYERS, report
    assert not report.recompute.refused
    assert report.live_entries == 0
    assert report.tiers[-1].moved_bytes > 0
    context.close()
    function._thread.contexts.clear()


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)  # of FSDP1, and of transformers' names
    torch.set_num_threads(1)
    function.MIN_BYTES = 64
    for version in (1, 2):
        want = trained(version)
        assert_same(trained(version, before=checkpoint_with_memo), want)
        assert_regions()
        if version == 1:
            got = trained(1, after=lambda model, plugin: wrapped(model, auto_wrap_policy=plugin.auto_wrap_policy))
        else:
            got = trained(
                2, before=lambda model: wrapped(model, check_fn=lambda part: isinstance(part, LlamaDecoderLayer))
            )
        assert_same(got, want)
        assert_regions()
        managers: list[memo.Manager] = []

        def manage(model: nn.Module, plugin: Any, managers: list[memo.Manager] = managers) -> None:
            managers.append(memo.offload(model, alpha=0.0, host="64MiB", min_bytes=MIN_BYTES).attach())

        assert_same(trained(version, after=manage, checkpointed=True), want)
        assert_divided(managers[0], LAYERS)
        assert managers[0].report().replaced == LAYERS
        managers[0].close()
    print(f"rank {dist.get_rank()} done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
