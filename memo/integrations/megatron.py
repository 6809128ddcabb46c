"""Megatron-Core: a manager of a GPT's transformer layers, and a forward step that manages what it is given.

    pretrain(datasets, model_provider, ModelType.encoder_or_decoder, managed(forward_step, host="64GiB"))

Megatron's activations have the tokens first, (sequence, batch, hidden); nothing has to be said about it. Ranks of tensor and
context parallelism, which talk within layers, are told to memo. Megatron's own recompute and offloading stay off.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn

import memo
from memo.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def offload(model: nn.Module | Sequence[nn.Module], **options: Any) -> memo.Manager:
    """A manager of the transformer layers of a model, or of all chunks of an interleaved pipeline's model.

    Args:
        model: What `get_model` or a model provider returns: a GPTModel, within Float16Module and DistributedDataParallel or
            not, or a list of them.
        options: Arguments of `memo.offload`. `group` is that of tensor and context parallelism by default.

    Returns:
        The manager, to be attached or entered. A list of several chunks can only be entered.

    Raises:
        UsageError: There is no transformer block in the model, or Megatron's own recompute or offloading is on.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    blocks = [part for chunk in chunks for part in chunk.modules() if isinstance(part, TransformerBlock)]
    layers = [layer for block in blocks for layer in block.layers]
    if not layers:
        raise UsageError("the model has no TransformerBlock; give memo.offload its layers")
    config = blocks[0].config
    if config.recompute_granularity is not None or getattr(config, "cpu_offloading", False):
        raise UsageError(
            "turn Megatron's recompute and offloading off (--recompute-granularity, --cpu-offloading): memo replaces them"
        )
    options.setdefault("group", _ranks_within_layers())
    return memo.offload(chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks), layers=layers, **options)


def _ranks_within_layers() -> Any:
    """The group of tensor and context parallelism; None where every rank is on its own."""
    tensor, context = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
    )
    if tensor == context == 1:
        return None
    if context == 1:
        return parallel_state.get_tensor_model_parallel_group()
    if tensor == 1:
        return parallel_state.get_context_parallel_group()
    return parallel_state.get_tensor_and_context_parallel_group()


def managed(
    forward_step: Callable[..., Any], manager: memo.Manager | None = None, **options: Any
) -> Callable[..., Any]:
    """A forward step for `pretrain` or `get_forward_backward_func()` whose model is managed.

    Args:
        forward_step: Called as `forward_step(data_iterator, model, ...)`.
        manager: Entered around each call. Default None: one is made for the model of the first call, and attached.
        options: Arguments of `memo.offload`, without `manager`.

    Returns:
        A function with the same signature. Its attribute `manager` is the manager; None before the first call.

    Raises:
        UsageError: Both `manager` and options are given. In a call: the pipeline is interleaved, so that there are several
            models; make their manager with `offload` and give it.
    """
    if manager is not None and options:
        raise UsageError("managed: give a manager or options of memo.offload, not both")
    attached: weakref.WeakKeyDictionary[nn.Module, memo.Manager] = weakref.WeakKeyDictionary()

    @functools.wraps(forward_step)
    def step(data_iterator: Any, model: nn.Module, *others: Any, **named: Any) -> Any:
        if manager is not None:
            with manager:
                return forward_step(data_iterator, model, *others, **named)
        if model not in attached:
            if attached:
                raise UsageError(
                    "managed: this is a second model (a chunk of an interleaved pipeline?); give managed() the manager that "
                    "memo.integrations.megatron.offload(chunks) returns"
                )
            step.manager = attached[model] = offload(model, **options).attach()  # type: ignore[attr-defined]
        return forward_step(data_iterator, model, *others, **named)

    step.manager = manager  # type: ignore[attr-defined]
    return step
