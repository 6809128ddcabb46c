"""Recording of one training step's allocations without a GPU and without the step's memory, for `memo record`.

Owns how the step runs: forward, backward and optionally the optimizer, of memo's GPT or a user's model, plain, checkpointed
or under the engine of `memo.offload`. memo.allocator records allocations on byteless tensors; this module adds the module
that made each of them, and sums up what autograd saved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from memo.allocator import AllocationRecorder, AllocationTrace, BytelessMode, Lifetime
from memo.errors import NoRepeatedLayers, RecordError, UsageError
from memo.record.allocation_sites import AllocationSites, is_in_backward
from memo.record.offload_without_bytes import OffloadWithoutBytes
from memo.record.optimizers import fill_state, make_optimizer, state_of
from memo.record.program_errors import users_errors
from memo.record.step import Step
from memo.swap import Layer, cast_of_parameter, find_layers, is_attention
from memo.torch_private import DYNAMO


class SavedRole(enum.StrEnum):
    """Kind of a saved tensor, by how a plan may treat it."""

    INPUT = "input"
    """A layer's input."""
    ATTENTION = "attention"
    """The result of a fused attention kernel."""
    RECOMPUTABLE = "recomputable"
    """Any other result in a layer that depends on one token only; queries, keys and values included."""
    STATISTICS = "statistics"
    """Statistics that norms and softmax save beside their results."""
    WEIGHTS = "weights"
    """Autocast's copies of parameters, which exist from their first use to their last."""
    OUTSIDE = "outside"
    """Saved or made outside of the layers: embedding, rotary tables, loss."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Allocations of one step, and sums of its bytes."""

    trace: AllocationTrace
    layers: int
    """Number of repeated layers; 0 if none were found."""
    static_nbytes: int
    """Parameters, buffers, optimizer state and inputs: they exist before the step and are not in the trace."""
    saved_nbytes: dict[SavedRole, int]
    """Bytes that forward saves for backward, each storage once, not rounded. Empty under offload."""
    moved_nbytes: int
    """Under offload: bytes copied out of the device."""
    peak_away_nbytes: int
    """Under offload: most bytes off the device at one time, which host and disk must hold."""
    whole_layers: dict[str, str]
    """Under offload with alpha below 1: layers that moved whole tensors, and the reason of each."""


def record_step(
    build: Callable[[], Step],
    *,
    alpha: float | None = None,
    checkpointed: bool = False,
    optimizer: str | None = None,
    exact: bool = False,
    real: bool = False,
    assume: float | None = None,
) -> Recording:
    """Builds a model on byteless tensors and records the allocations of one training step.

    Args:
        build: builds the step; called with every tensor byteless.
        alpha: records the step under the engine of `memo.offload` with this alpha. Default None: all tensors stay.
        checkpointed: True recomputes every layer whole in backward, as torch's checkpoint does.
        optimizer: ends the step with this optimizer and the release of the gradients: `adamw`, or as in
            memo.record.optimizers. Default None: the optimizers of the step; without one it ends after backward, with
            the gradients allocated.
        exact: True records the sizes of tensors; False rounds them as CUDA's allocator does.
        real: True uses real tensors and arithmetic on the CPU, for steps that depend on data; it needs the step's
            memory.
        assume: number that each element has where the step reads a tensor that is computed from weights. Default None:
            that is an error.

    Raises:
        RecordError: the step reads the contents of a tensor, or its loss is no scalar that depends on the parameters, or it
            raises an error.
        UsageError: options exclude each other.
        NoRepeatedLayers: `alpha` or `checkpointed` needs layers, and the model has none.
    """
    if alpha is not None and checkpointed:
        raise UsageError("a step is either offloaded (alpha) or checkpointed, not both")
    if alpha is not None and real:
        raise UsageError("an offloaded step (alpha) is recorded without bytes; leave out alpha or real")
    with torch.random.fork_rng(devices=[]), users_errors():
        torch.default_generator.manual_seed(0)  # drawn lengths and masks are the same in every recording
        with contextlib.nullcontext() if real else BytelessMode(assume=assume) as mode:
            step = build()
            if mode is not None:
                mode.forget(_contents_of_training(step.model))
            layers = _layers_of(step, needed=checkpointed or alpha is not None)
            if checkpointed:
                checkpoint_layers(layers)
            with _uncompiled():
                run = _Run(step, layers, optimizer=optimizer, alpha=alpha)
                run.warm_up()
                return run.record(exact=exact)


def _uncompiled() -> contextlib.AbstractContextManager[object]:
    """Runs what torch.compile made as it was written: a compiler would see the recorder, not the step."""
    return torch.compiler.set_stance("force_eager") if DYNAMO in sys.modules else contextlib.nullcontext()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Turns garbage collection off, which would free tensors in cycles at another event in each run."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Run:
    """One model and the treatment of its step."""

    def __init__(self, step: Step, layers: list[Layer], *, optimizer: str | None, alpha: float | None) -> None:
        self._step, self._layers = step, layers
        self._recorder = AllocationRecorder()
        self._is_whole = self._runs_backward()
        if self._is_whole and (optimizer is not None or step.optimizers):
            raise UsageError("the step runs backward and its optimizer itself; leave out the optimizer")
        self._optimizers = step.optimizers if optimizer is None else (make_optimizer(optimizer, step.model),)
        for own in self._optimizers:
            fill_state(own)
        self._offload = None if alpha is None else OffloadWithoutBytes(step.model, layers, alpha)
        if self._offload is not None and self._is_whole:
            self._offload.manager.attach()

    def _runs_backward(self) -> bool:
        """True if the step runs backward itself."""
        if self._step.whole is not None:
            return self._step.whole
        with no_collection(), self._recorder, AllocationSites(self._recorder, self._step.model, self._layers) as sites:
            loss = self._step.loss()
            return loss is None or sites.ran_backward

    def warm_up(self) -> None:
        """Runs the steps before the one that is recorded, in which lasting tensors are made.

        Under offload replays are tried in them, and the order of backward is learned. What a replay keeps and autograd does
        not save is held from the second call on.
        """
        for _ in range(0 if self._offload is None else 2):
            self._run(self._recorder if self._is_whole else AllocationRecorder())
            if not self._is_whole:
                self._step.model.zero_grad(set_to_none=True)

    def record(self, *, exact: bool) -> Recording:
        recorder = self._recorder
        step = self._step
        everything = (*step.model.parameters(), *step.model.buffers(), *state_of(self._optimizers), *step.inputs)
        static = [getattr(tensor, "_local_tensor", tensor) for tensor in everything]  # this rank's part of a DTensor
        recorder.begin_step()
        recorder.adopt(static)
        saved = _Saved(recorder, self._layers)
        offload = self._offload
        moved = 0 if offload is None else offload.moved_nbytes
        with no_collection():
            self._run(recorder, saved)
        lasting = {t.untyped_storage(): t.untyped_storage().nbytes() for t in static}
        lasting.update((storage, storage.nbytes()) for storage in recorder.standing())
        return Recording(
            trace=recorder.trace(exact=exact),
            layers=len(self._layers),
            static_nbytes=sum(lasting.values()),
            saved_nbytes=saved.nbytes_by_role() if offload is None else {},
            moved_nbytes=0 if offload is None else offload.moved_nbytes - moved,
            peak_away_nbytes=0 if offload is None else offload.peak_away_nbytes,
            whole_layers={} if offload is None else offload.whole_layers,
        )

    def _run(self, recorder: AllocationRecorder, saved: _Saved | None = None) -> None:
        with recorder, AllocationSites(recorder, self._step.model, self._layers) as sites:
            sites.phase("forward")
            with self._around_forward(saved):
                loss = self._step.loss()
            if self._is_whole:
                return
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise RecordError("the loss is no scalar that depends on the model's parameters")
            sites.phase("backward")
            loss.backward()
            del loss
            sites.phase("optimizer")
            for optimizer in self._optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def _around_forward(self, saved: _Saved | None) -> Iterator[None]:
        if self._offload is not None:
            with contextlib.nullcontext() if self._is_whole else self._offload.manager:
                yield
        elif saved is not None:
            with saved_tensors_hooks(saved.see, lambda tensor: tensor), saved.inputs():
                yield
        else:
            yield


class _Saved:
    """Bytes that autograd saves in a forward by role, each storage once."""

    def __init__(self, recorder: AllocationRecorder, layers: list[Layer]) -> None:
        self._recorder, self._layers = recorder, layers
        self._inputs: set[Lifetime] = set()
        self._roles: dict[Lifetime, SavedRole] = {}

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts a saved tensor; a pack hook that keeps the tensor as it is."""
        if is_in_backward():
            return tensor.detach()
        life = self._recorder.lifetime_of(tensor)
        if life is not None and life not in self._roles:
            self._roles[life] = SavedRole.WEIGHTS if cast_of_parameter(tensor) else self._role(life)
        return tensor.detach()

    @contextlib.contextmanager
    def inputs(self) -> Iterator[None]:
        """Notes the inputs of the layers."""

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
            life = None if given is None else self._recorder.lifetime_of(given)
            if life is not None:
                self._inputs.add(life)

        hooks = [layer.module.register_forward_pre_hook(note, with_kwargs=True) for layer in self._layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def nbytes_by_role(self) -> dict[SavedRole, int]:
        """Returns the bytes of each role, not rounded."""
        sums = dict.fromkeys(SavedRole, 0)
        for life, role in self._roles.items():
            sums[role] += life.nbytes
        return sums

    def _role(self, life: Lifetime) -> SavedRole:
        if life in self._inputs:
            return SavedRole.INPUT
        if not (life.site.group and self._recorder.site.group):
            return SavedRole.OUTSIDE
        if is_attention(life.operator):
            return SavedRole.ATTENTION if life.result == 0 else SavedRole.STATISTICS
        return (
            SavedRole.STATISTICS
            if life.result > 0 and life.operator.overloadpacket in _NORMS
            else SavedRole.RECOMPUTABLE
        )


_ATEN = torch.ops.aten
_NORMS = frozenset({_ATEN.native_layer_norm, _ATEN._fused_rms_norm})


def _layers_of(step: Step, *, needed: bool) -> list[Layer]:
    try:
        return find_layers(step.model, step.layers)
    except NoRepeatedLayers:
        if needed:
            raise
        return []


def checkpoint_layers(layers: list[Layer]) -> None:
    """Has torch's checkpoint recompute each layer whole, in place."""
    for layer in layers:
        # Saving the random state would allocate host memory on a GPU machine, and byteless tensors have no values.
        whole = functools.partial(checkpoint, layer.module.forward, use_reentrant=False, preserve_rng_state=False)
        layer.module.forward = whole


def _contents_of_training(model: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors whose contents training changes: no step may depend on those that the model begins with."""
    for parameter in model.parameters():
        yield getattr(parameter, "_local_tensor", parameter)
