"""`memo.checkpoint`: torch.utils.checkpoint's signature, with memo's engine under it.

    inside a manager                  a plain call where it is around, or within, a layer of the manager
    inside memo.saved_tensors         a region of that context
    elsewhere                         a region of a context of this thread and device, with automatic budgets

A region runs once: its operators are recorded, the cheapest set of tensors from which the rest can be recomputed moves to
host memory, and backward replays the operators without the function's Python code.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint, noop_context_fn

from memo.checkpointing.context import SavedTensors, current
from memo.errors import UsageError
from memo.manager import is_disabled, is_replaced, is_within_layer, modules_of
from memo.swap import WhenFull, runs_as_written, setting_of, tensors_within
from memo.torch_private import current_graph_task_id, top_saved_tensors_default_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_BYTES = 64 << 10


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    context_fn: Callable[..., Any] = noop_context_fn,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Calls a function, saves little of it for backward, in host memory, and recomputes the rest there, bit for bit.

    It takes the place of `torch.utils.checkpoint.checkpoint` wherever a stack takes a function for checkpointing. Results of
    attention are saved and never computed again; nor are random numbers drawn again. On a GPU what is saved moves to 70 % of
    the free host memory (the rank's share of it); where that is full, more is recomputed.

    Args:
        function: Called once, with the arguments; its tensors are recorded.
        *args: Its positional arguments.
        use_reentrant: Of either value the result is the same.
        context_fn: Must be left out: what is saved is memo's choice.
        preserve_rng_state: Of either value the result is the same.
        determinism_check: "default" or "none"; the first recompute is compared with the forward in any case.
        debug: No effect.
        early_stop: No effect.
        **kwargs: Its keyword arguments.

    Returns:
        What `function` returns.

    Raises:
        UsageError: `context_fn` is given, or `determinism_check` is another.
        ValueError: `use_reentrant` with keyword arguments of the function, as of torch's.

    Example:
        model.activation_checkpointing_enable()
        memo.integrations.hf.checkpoint_with_memo(model)  # transformers' layers call it

        x = memo.checkpoint(block, x)
    """
    if use_reentrant and kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    if context_fn is not noop_context_fn:
        raise UsageError("memo.checkpoint: leave context_fn out; memo chooses what is saved and what is recomputed")
    if determinism_check not in ("default", "none"):
        raise UsageError(f"memo.checkpoint: determinism_check {determinism_check!r} is neither 'default' nor 'none'")
    device = _device_of(args, kwargs)
    if device is None or is_disabled() or not runs_as_written():
        return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)
    if not torch.is_grad_enabled() or _is_torchs() or is_within_layer() or is_replaced(function, args):
        return function(*args, **kwargs)
    context = current()
    if context is None:
        context = _default(device)
    return context.run(function, list(dict.fromkeys(modules_of((function, *args)))), args, kwargs)


def _is_torchs() -> bool:
    """True where torch's own checkpoint is around, which runs this again, or a backward that does."""
    hooks = top_saved_tensors_default_hooks(False)
    within = hooks is not None and getattr(hooks[0], "__module__", "") == torch_checkpoint.__module__
    return within or current_graph_task_id() >= 0


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device of the arguments; None for one that memo does not manage, and while a CUDA graph is captured."""
    devices = {tensor.device.type: tensor.device for tensor in tensors_within((args, kwargs))}
    if devices.keys() - {"cpu", "cuda", "meta"} or ("cuda" in devices and torch.cuda.is_current_stream_capturing()):
        return None
    return devices.get("cuda", torch.device("cpu"))


def _default(device: torch.device) -> SavedTensors:
    """The context of this thread for a device."""
    context = _thread.contexts.get(device)
    if context is None or context.is_forked:
        context = SavedTensors(
            setting=setting_of(0.0), min_bytes=MIN_BYTES, when_full=WhenFull.RECOMPUTE, share=_share_of_node
        )
        _thread.contexts[device] = context
    context.open(device)
    return context


def _share_of_node(nbytes: int, *, weight: int = 1) -> int:
    """This rank's share, as the launcher tells it: not every rank may have something to checkpoint, so none is asked."""
    return nbytes // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class _Thread(threading.local):
    def __init__(self) -> None:
        self.contexts: dict[torch.device, SavedTensors] = {}


_thread = _Thread()
