"""torch's own solver of selective checkpointing: which operators of a layer are saved under a share of the layer's memory.

`torch.distributed._tools.sac_ilp` decides from each operator's time and bytes. Its own estimator needs a GPU's tables; here
both are measured, on one call of the first layer as it stands. The layers are alike, so that one decision serves all.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from benchmarks.peers.checkpointing import checkpointed
from benchmarks.peers.models import layers_of
from memo.errors import UsageError


class _Measured(TorchDispatchMode):
    """Name, milliseconds and new bytes of every operator that selective checkpointing asks about."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.functions: list[Any] = []
        self.milliseconds: list[float] = []
        self.bytes: list[int] = []
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SAC_IGNORED_OPS:
            return func(*args, **(kwargs or {}))
        self._synchronize()
        begin = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        self._synchronize()
        self.functions.append(func)
        self.milliseconds.append((time.perf_counter() - begin) * 1e3)
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        made = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in _tensors(out)}
        self.bytes.append(sum(nbytes for storage, nbytes in made.items() if storage not in given))
        return out

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


def decisions_of(layer: nn.Module, args: Sequence[Any], named: dict[str, Any], share: float) -> list[int]:
    """For each operator of a call in turn: 1 saved, 0 computed again; saved bytes at most `share` of all that it makes.

    Raises:
        UsageError: an operator writes in place, which needs the estimator's own look, or the solver found nothing.
    """
    from torch.distributed._tools.sac_estimator import SACStats
    from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module

    device = next(layer.parameters()).device
    for _ in range(2):  # the first call has what is made once in it
        measured = _Measured(device)
        with measured:
            layer(*args, **named)
    odd = [str(func) for func in measured.functions if func._schema.is_mutable]
    if odd:
        raise UsageError(f"sac_ilp: {odd[0]} in the layer")
    random = torch.Tag.nondeterministic_seeded
    stats = SACStats(
        func_names=[str(func) for func in measured.functions],
        runtimes=measured.milliseconds,
        memory=measured.bytes,
        view_like_ops=[index for index, nbytes in enumerate(measured.bytes) if nbytes == 0],
        rand_ops=[index for index, func in enumerate(measured.functions) if random in func.tags],
        saved_autograd_ops=[],
        inplace_ops=[],
        force_store_random=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's use of PuLP
        found = get_optimal_checkpointing_policy_per_module(stats, share)
    if not found:
        raise UsageError("sac_ilp: its solver found no solution")
    return found


class _Decided:
    """The policy of one call: its operators in their order, forward and recompute counted apart."""

    def __init__(self, decisions: Sequence[int]) -> None:
        self._decisions = decisions
        self._next = {False: 0, True: 0}

    def __call__(self, context: SelectiveCheckpointContext, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        place = self._next[context.is_recompute]
        self._next[context.is_recompute] += 1
        saved = place < len(self._decisions) and self._decisions[place]
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class ByIlp:
    """Checkpoints by torch's solver; decides in the first forward, where the layer's arguments are seen."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._decisions: list[int] | None = None

    @contextlib.contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as hooks:
            if self._decisions is None:
                first = layers_of(model)[0]

                def decide(layer: nn.Module, args: Any, named: dict[str, Any]) -> None:
                    handle.remove()
                    self._decisions = decisions_of(layer, args, named, self._share)

                handle = first.register_forward_pre_hook(decide, with_kwargs=True)
                hooks.callback(handle.remove)
            with checkpointed(model, context_fn=self._contexts):
                yield

    def _contexts(self) -> Any:
        return create_selective_checkpoint_contexts(_Decided(self._decisions or ()))
