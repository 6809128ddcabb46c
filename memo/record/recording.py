"""Recording of one training step's allocations without a GPU and without the step's memory, for `memo record`.

Owns the step: forward, backward and optionally the optimizer, of memo's GPT or a user's model, plain, checkpointed or
under the engine of `memo.offload`. memo.allocator records allocations on byteless tensors; this module adds the module
that made each of them, and sums up what autograd saved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import gc
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from memo.allocator import AllocationTrace, BytelessMode, Lifetime, Recorder
from memo.errors import NoRepeatedLayers, RecordError, UsageError
from memo.gpt import GPTConfig, Precision
from memo.gpt.model import GPT
from memo.gpt.optim import adamw, empty_state
from memo.gpt.train import weight_dtype
from memo.record.allocation_sites import AllocationSites
from memo.record.offload_without_bytes import OffloadWithoutBytes
from memo.swap import Layer, cast_of_parameter, find_layers, is_attention

__all__ = ["Recording", "Role", "Step", "gpt_step", "load_step", "record_step"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A model and its forward: all that a training step needs."""

    model: nn.Module
    loss: Callable[[], torch.Tensor]
    """Runs one forward; returns the scalar loss."""
    inputs: tuple[torch.Tensor, ...] = ()
    """Tensors that the forward reads beside the model's; they count as static memory."""
    layers: Sequence[nn.Module] | None = None
    """The repeated layers; None finds them in the model."""


class Role(enum.StrEnum):
    """Kind of a saved tensor, by how a plan may treat it."""

    INPUT = "input"
    """A layer's input."""
    ATTENTION = "attention"
    """The result of a fused attention kernel."""
    TOKEN_WISE = "token_wise"
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
    saved_nbytes: dict[Role, int]
    """Bytes that forward saves for backward, each storage once, not rounded. Empty under offload."""
    moved_nbytes: int
    """Under offload: bytes copied out of the device."""
    peak_away_nbytes: int
    """Under offload: most bytes off the device at one time, which host and disk must hold."""
    whole_layers: dict[str, str]
    """Under offload with alpha below 1: layers that moved whole tensors, and the reason of each."""


def gpt_step(config: GPTConfig, *, batch: int, tokens: int, precision: Precision = Precision.BF16) -> Step:
    """Builds a step of memo's GPT on the CPU, with uninitialised weights.

    Args:
        config: the model.
        batch: sequences of the microbatch.
        tokens: tokens of each sequence.
        precision: dtypes of weights and computation.
    """
    # Not initialised: random numbers need a seed read from a tensor, and byteless tensors have no contents.
    model = GPT(config, device="meta", dtype=weight_dtype(precision)).to_empty(device="cpu")
    ids = torch.zeros(batch, tokens, dtype=torch.int64)
    targets = torch.zeros(batch, tokens, dtype=torch.int64)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision is Precision.BF16_AUTOCAST):
            return model(ids, targets)  # type: ignore[no-any-return]

    return Step(model=model, loss=loss, inputs=(ids, targets))


def load_step(name: str) -> Callable[..., Step]:
    """Loads a user's function that builds a step.

    The function takes the keywords `batch` and `tokens` and returns (model, loss): a torch.nn.Module on the CPU, and a
    callable without arguments that runs one forward and returns the scalar loss.

    Args:
        name: `module:function`, importable from the working directory.

    Returns:
        A callable with the same keywords that returns a Step. It raises RecordError if the function returns anything
        else.

    Raises:
        UsageError: there is no such function, or it does not take these keywords.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"{name!r} is neither a model's name nor module:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function: Any = functools.reduce(getattr, attribute.split("."), importlib.import_module(module_name))
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{name}: {error}") from None

    try:
        inspect.signature(function).bind(batch=0, tokens=0)
    except (TypeError, ValueError) as error:  # ValueError: a C function without a signature
        raise UsageError(f"{name} cannot be called with the keywords batch and tokens: {error}") from None

    def build(*, batch: int, tokens: int) -> Step:
        made = function(batch=batch, tokens=tokens)
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
            raise RecordError(f"{name} returned {type(made).__name__}, not (model, callable that returns the loss)")
        return Step(model=made[0], loss=made[1])

    return build


def record_step(
    build: Callable[[], Step],
    *,
    alpha: float | None = None,
    checkpointed: bool = False,
    optimizer: bool = False,
    exact: bool = False,
    real: bool = False,
) -> Recording:
    """Builds a model on byteless tensors and records the allocations of one training step.

    Args:
        build: builds the step; called with every tensor byteless.
        alpha: records the step under the engine of `memo.offload` with this alpha. Default None: all tensors stay.
        checkpointed: True recomputes every layer whole in backward, as torch's checkpoint does.
        optimizer: True ends the step with AdamW's and the release of the gradients; False after backward, with the
            gradients allocated.
        exact: True records the sizes of tensors; False rounds them as CUDA's allocator does.
        real: True uses real tensors and arithmetic on the CPU, for steps that depend on data; it needs the step's
            memory.

    Raises:
        RecordError: the step reads the contents of a tensor, or its loss is no scalar that depends on the parameters.
        UsageError: options exclude each other.
        NoRepeatedLayers: `alpha` or `checkpointed` needs layers, and the model has none.
    """
    if alpha is not None and checkpointed:
        raise UsageError("a step is either offloaded (alpha) or checkpointed, not both")
    if alpha is not None and real:
        raise UsageError("an offloaded step (alpha) is recorded without bytes; leave out alpha or real")
    with contextlib.nullcontext() if real else BytelessMode():
        step = build()
        layers = _layers_of(step, needed=checkpointed or alpha is not None)
        if checkpointed:
            _checkpoint(layers)
        run = _Run(step, layers, adam=_adam(step.model) if optimizer else None, alpha=alpha)
        if run.offload is not None:
            run.warm_up()
        return run.record(exact=exact)


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

    def __init__(self, step: Step, layers: list[Layer], *, adam: torch.optim.AdamW | None, alpha: float | None) -> None:
        self._step, self._layers, self._adam = step, layers, adam
        self.offload = None if alpha is None else OffloadWithoutBytes(step.model, layers, alpha)

    def warm_up(self) -> None:
        """Runs two steps, in which replays are tried and the order of backward is learned.

        What a replay keeps and autograd does not save is held from the second call on.
        """
        for _ in range(2):
            self._run(Recorder())
            self._step.model.zero_grad(set_to_none=True)

    def record(self, *, exact: bool) -> Recording:
        recorder = Recorder()
        step = self._step
        everything = (*step.model.parameters(), *step.model.buffers(), *self._optimizer_state(), *step.inputs)
        static = [getattr(tensor, "_local_tensor", tensor) for tensor in everything]  # this rank's part of a DTensor
        recorder.adopt(static)
        saved = _Saved(recorder, self._layers)
        offload = self.offload
        moved = 0 if offload is None else offload.moved_nbytes
        with no_collection(), recorder:
            self._run(recorder, saved)
        return Recording(
            trace=recorder.trace(exact=exact),
            layers=len(self._layers),
            static_nbytes=sum({t.untyped_storage(): t.untyped_storage().nbytes() for t in static}.values()),
            saved_nbytes=saved.nbytes_by_role() if offload is None else {},
            moved_nbytes=0 if offload is None else offload.moved_nbytes - moved,
            peak_away_nbytes=0 if offload is None else offload.peak_away_nbytes,
            whole_layers={} if offload is None else offload.whole_layers,
        )

    def _run(self, recorder: Recorder, saved: _Saved | None = None) -> None:
        with AllocationSites(recorder, self._step.model, self._layers) as sites:
            sites.phase("forward")
            with self._around_forward(saved):
                loss = self._step.loss()
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise RecordError("the loss is no scalar that depends on the model's parameters")
            sites.phase("backward")
            loss.backward()
            del loss
            sites.phase("optimizer")
            if self._adam is not None:
                self._adam.step()
                self._adam.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def _around_forward(self, saved: _Saved | None) -> Iterator[None]:
        if self.offload is not None:
            with self.offload.manager:
                yield
        elif saved is not None:
            with saved_tensors_hooks(saved.see, lambda tensor: tensor), saved.inputs():
                yield
        else:
            yield

    def _optimizer_state(self) -> Iterator[torch.Tensor]:
        for state in () if self._adam is None else self._adam.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


class _Saved:
    """Bytes that autograd saves in a forward by role, each storage once."""

    def __init__(self, recorder: Recorder, layers: list[Layer]) -> None:
        self._recorder, self._layers = recorder, layers
        self._inputs: set[Lifetime] = set()
        self._roles: dict[Lifetime, Role] = {}

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts a saved tensor; a pack hook that keeps the tensor as it is."""
        life = self._recorder.lifetime_of(tensor)
        if life is not None and life not in self._roles:
            self._roles[life] = Role.WEIGHTS if cast_of_parameter(tensor) else self._role(life)
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

    def nbytes_by_role(self) -> dict[Role, int]:
        """Returns the bytes of each role, not rounded."""
        sums = dict.fromkeys(Role, 0)
        for life, role in self._roles.items():
            sums[role] += life.nbytes
        return sums

    def _role(self, life: Lifetime) -> Role:
        if life in self._inputs:
            return Role.INPUT
        if not (life.site.group and self._recorder.site.group):
            return Role.OUTSIDE
        if is_attention(life.operator):
            return Role.ATTENTION if life.result == 0 else Role.STATISTICS
        return Role.STATISTICS if life.result > 0 and life.operator.overloadpacket in _NORMS else Role.TOKEN_WISE


_ATEN = torch.ops.aten
_NORMS = frozenset({_ATEN.native_layer_norm, _ATEN._fused_rms_norm})


def _layers_of(step: Step, *, needed: bool) -> list[Layer]:
    try:
        return find_layers(step.model, step.layers)
    except NoRepeatedLayers:
        if needed:
            raise
        return []


def _checkpoint(layers: list[Layer]) -> None:
    for layer in layers:
        # Saving the random state would allocate host memory on a GPU machine, and byteless tensors have no values.
        whole = functools.partial(checkpoint, layer.module.forward, use_reentrant=False, preserve_rng_state=False)
        layer.module.forward = whole


def _adam(model: nn.Module) -> torch.optim.AdamW:
    """AdamW with its state allocated, as after its first step."""
    optimizer = adamw(model, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    empty_state(optimizer)
    return optimizer
