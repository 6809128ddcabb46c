"""One step of a short model on tensors without bytes: what each kind of layer saves, computes, recomputes and holds.

Three forwards and backwards: one is counted kernel by kernel, with what autograd saves; one is recorded allocation by
allocation; and one runs under the engine of `memo.offload`, which finds the points of recompute. Saved bytes are those of
`memo record`, storage by storage.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memo.allocator import AllocationTrace, BytelessMode
from memo.autoplan import points_of
from memo.errors import MemoError, UsageError, one_line
from memo.gpt.arithmetic import Collective
from memo.hugging_face.configuration import quiet
from memo.hugging_face.fused_attention import attended_in, register
from memo.hugging_face.kernel_clock import EMBEDDING, HEAD, MOST_OPERATORS, KernelClock, PassCost, TooManyOperators
from memo.hugging_face.layer_kinds import ShortModel
from memo.loss import LOGIT_NBYTES, added_nbytes, chunk_tokens, loss_without_logits
from memo.machine import replay_rates
from memo.mip.inputs import ALL, Hardware, PointProfile
from memo.record import AllocationSites, LayerPeaks, OffloadWithoutBytes, Step, peak_of, record_step
from memo.swap import Layer, LayerCosts, argument_storages, cast_of_parameter, find_layers, layer_input, local_part
from memo.units import format_tokens

_MANY_OPERATORS = 500
"""In one forward of a layer; those with a kernel for what they do have about a hundred."""
_CHUNKS = 4
"""Chunks of the loss without logits as it is recorded; as it runs it has so many that each has few logits."""
_WARM_UPS = 2
"""Steps under the engine: what a plan keeps and autograd does not save is held from the second on."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLayer:
    """One layer. Bytes are of one microbatch, seconds predicted."""

    input_nbytes: int
    storages: tuple[int, ...]
    """Bytes of each storage that autograd saves in it, its input included; as `memo record` counts them."""
    weights_nbytes: int
    """Bytes of converted copies of parameters, which are saved, too, and stay."""
    points: tuple[PointProfile, ...]
    forward: PassCost
    backward: PassCost
    attention_share: float
    entering_nbytes: int
    leaving_nbytes: int
    forward_transient_nbytes: int
    backward_transient_nbytes: int
    repeated: tuple[Collective, ...] = ()
    """Collectives that a recompute of the whole layer repeats."""

    @property
    def saved_nbytes(self) -> int:
        """Bytes of all that autograd saves, without copies of parameters."""
        return sum(self.storages)

    @property
    def attention_flops(self) -> float:
        """FLOPs of attention's scores in one forward, with its window."""
        return self.forward.attention_flops * self.attention_share

    @property
    def attention_s(self) -> tuple[float, float]:
        """Seconds of attention's kernel in forward and in backward, with its window."""
        return self.forward.attention_s * self.attention_share, self.backward.attention_s * self.attention_share


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEnd:
    """Embedding or head."""

    forward: PassCost
    backward: PassCost
    saved_nbytes: int
    transient_nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """All kinds of layers, by name, and the ends."""

    layers: Mapping[str, RecordedLayer]
    embedding: RecordedEnd
    head: RecordedEnd

    @property
    def idle(self) -> frozenset[str]:
        """Kinds that do not run: of an image's encoder, in a step on text."""
        return frozenset(name for name, layer in self.layers.items() if not layer.forward.operators)

    @property
    def slow(self) -> frozenset[str]:
        """Kinds with so many operators that their own code loops, for lack of a kernel."""
        return frozenset(name for name, layer in self.layers.items() if layer.forward.operators > _MANY_OPERATORS)


def recorded_step(
    short: ShortModel,
    *,
    name: str,
    tokens: int,
    batch: int,
    machine: Hardware,
    without_logits: bool,
    with_logits: RecordedStep | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> RecordedStep:
    """Runs a step on tensors without bytes.

    Args:
        short: the model; its tensors are replaced.
        name: of the model in error messages.
        tokens: of each sequence.
        batch: sequences.
        machine: rates of its kernels.
        without_logits: whether the loss is that of `memo.loss_without_logits`.
        with_logits: the same step with the model's own loss, of which all but the head is the same.
        say: is told which kind of layers runs.

    Raises:
        UsageError: the model's code cannot run so; the message says what failed.
    """
    register()  # a model may come from another process
    recording = _Recording(short, tokens=tokens, batch=batch, machine=machine, without_logits=without_logits)
    try:
        with quiet(), recording.told(say):
            return recording.run(with_logits)
    except TooManyOperators:
        raise UsageError(
            f"{name}: its layers loop over tokens, as their own code does where a package of kernels is missing; plan it"
            " from a profile that memo profile measures"
        ) from None
    except MemoError as error:
        raise UsageError(f"{name}: its step cannot be recorded without data: {one_line(error)}") from error
    except Exception as error:  # of the model's own code
        said = f"{type(error).__name__}: {one_line(error)}"
        raise UsageError(f"{name}: its step cannot be recorded without data: {said}") from error


def with_more_sequences(few: RecordedStep, twice: RecordedStep, *, times: Fraction) -> RecordedStep | None:
    """The step of more sequences: each adds the bytes, operators and seconds that one more adds between two recorded steps.

    Which points a layer has depends on what launches take, too; those of the larger recorded step are enlarged.

    Args:
        few: step of some sequences, large enough for its kernels to take as long for each more of them.
        twice: step of twice as many.
        times: sequences of the result, in those of `few`.

    Returns:
        The step; None where the two do not have the same storages, or a number would fall below 0.
    """
    try:
        step: RecordedStep = _on_the_line(few, twice, times - 1)
    except ValueError:
        return None
    return step


def _on_the_line(first: Any, second: Any, steps: Fraction) -> Any:
    """Each number so many steps from the second's to the first's beyond the first's."""
    if isinstance(first, (int, float)):
        reached = first + (second - first) * (steps if isinstance(first, int) else float(steps))
        if reached < 0:
            raise ValueError(f"{first} and {second} lead to {reached}")
        return type(first)(reached)
    if isinstance(second, PointProfile):
        nbytes = {
            n: math.ceil(getattr(second, n) * (steps + 1) / 2) for n in ("saved_bytes", "beside_bytes", "held_bytes")
        }
        nbytes["absent_bytes"] = math.floor(second.absent_bytes * (steps + 1) / 2)
        times = float(steps + 1) / 2
        work = {n: getattr(second, n) * times for n in ("recompute_s", "recompute_flops")}
        return dataclasses.replace(second, **nbytes, **work)
    if isinstance(first, tuple):
        if second and isinstance(second[0], PointProfile):
            return tuple(_on_the_line(point, point, steps) for point in second)
        return tuple(_on_the_line(*pair, steps) for pair in zip(first, second, strict=True))
    if isinstance(first, Mapping):
        return {name: _on_the_line(one, second[name], steps) for name, one in first.items()}
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return type(first)(**{n: _on_the_line(getattr(first, n), getattr(second, n), steps) for n in names})
    if first != second:
        raise ValueError(f"{first} is {second}")
    return first


@contextmanager
def _one_thread() -> Iterator[None]:
    """Runs operators on one thread: counts and masks alone are computed, and threads wait for each other for longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Recording:
    def __init__(self, short: ShortModel, *, tokens: int, batch: int, machine: Hardware, without_logits: bool) -> None:
        self._short = short
        self._shape = (batch, tokens)
        self._machine = machine
        self._without_logits = without_logits
        flat = [layer for stack in short.stacks for layer in stack]
        self._layers = find_layers(short.model, flat)
        of_module = {layer.module: layer for layer in self._layers}
        self._of_kind = {kind.name: of_module[kind.layer] for kind in short.kinds}

    @contextmanager
    def told(self, say: Callable[[str], None]) -> Iterator[None]:
        """Says which kind of layers runs, while it is entered."""
        kinds, tokens = self._short.kinds, format_tokens(self._shape[1])
        hooks = []
        for number, kind in enumerate(kinds, 1):
            words = f"recording {kind.name} at {tokens} tokens, kind {number} of {len(kinds)}"
            hooks.append(kind.layer.register_forward_pre_hook(lambda *_, words=words: say(words)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def run(self, with_logits: RecordedStep | None) -> RecordedStep:
        with torch.random.fork_rng(devices=[]), _one_thread(), ExitStack() as stack:
            stack.callback(self._short.model.to, "meta")  # the model goes to other processes without its tensors
            if self._without_logits:
                chunk = -(-self._shape[0] * self._shape[1] // _CHUNKS)
                stack.enter_context(loss_without_logits(self._short.model, chunk=chunk))
            with BytelessMode() as mode:
                loss = self._step().loss
                mode.forget(self._short.model.parameters())
                saved, clock = self._counted(loss)
                if self._without_logits and with_logits is not None:
                    return dataclasses.replace(with_logits, head=self._end(HEAD, saved, clock, self._chunked_nbytes()))
                again, costs = self._recomputed(loss)
            trace = record_step(self._step, exact=True).trace
        peaks = LayerPeaks.of(trace)
        layers = {
            name: self._layer(layer, saved, clock, again, costs.get(layer.name), peaks)
            for name, layer in self._of_kind.items()
        }
        ends = _peaks_of_ends(trace, peaks.spans)
        transients = {end: max(0, ends[end] - saved.made_outside[end]) for end in (EMBEDDING, HEAD)}
        if self._without_logits:
            transients[HEAD] = self._chunked_nbytes()
        embedding, head = (self._end(end, saved, clock, transients[end]) for end in (EMBEDDING, HEAD))
        return RecordedStep(layers=layers, embedding=embedding, head=head)

    def _end(self, end: str, saved: _Saved, clock: KernelClock, transient_nbytes: int) -> RecordedEnd:
        forward = clock.spent[f"{end}.forward"]
        if self._without_logits and end == HEAD:
            forward = dataclasses.replace(forward, seconds=forward.seconds + self._chunks_s())
        return RecordedEnd(
            forward=forward,
            backward=clock.spent[f"{end}.backward"],
            saved_nbytes=sum(saved.outside[end]),
            transient_nbytes=transient_nbytes,
        )

    def _chunks_s(self) -> float:
        """Seconds of adding the chunks that are not recorded to the gradient of the projection's weight."""
        short = self._short
        if not short.trains_projection:
            return 0.0
        chunks = -(-math.prod(self._shape) // chunk_tokens(short.vocabulary, trained=True))
        each = added_nbytes(short.projection_parameters, next(short.model.parameters()).element_size())
        return (chunks - _CHUNKS) * each / self._machine.elementwise_bytes_per_s

    def _chunked_nbytes(self) -> int:
        """Transient bytes of the loss without logits: a chunk's, and the gradient of the projection's weight, twice."""
        short, tokens = self._short, math.prod(self._shape)
        chunk = min(tokens, chunk_tokens(short.vocabulary, trained=short.trains_projection))
        hidden = short.projection_parameters // max(1, short.vocabulary)
        width = next(short.model.parameters()).element_size()
        weight = (4 + width) * short.projection_parameters if short.trains_projection else 0
        return LOGIT_NBYTES * chunk * short.vocabulary + width * tokens * hidden + weight

    def _step(self) -> Step:
        """The step, with every tensor byteless."""
        model = self._short.model
        model.zero_grad(set_to_none=True)  # of a step that was recorded before
        model.to_empty(device="cpu")
        model.tie_weights()  # type: ignore[operator]
        ids = torch.zeros(self._shape, dtype=torch.int64)
        return Step(
            model=model,
            loss=lambda: model(input_ids=ids, labels=ids).loss,
            inputs=(ids,),
            layers=[layer.module for layer in self._layers],
        )

    def _counted(self, loss: Callable[[], torch.Tensor]) -> tuple[_Saved, KernelClock]:
        clock, saved = KernelClock(self._machine, most=MOST_OPERATORS), _Saved(self._short.model, self._layers)
        with clock, AllocationSites(clock, self._short.model, self._layers) as sites:
            sites.phase("forward")
            with saved.watching():
                value = loss()
            sites.phase("backward")
            value.backward()
        self._short.model.zero_grad(set_to_none=True)
        return saved, clock

    def _recomputed(self, loss: Callable[[], torch.Tensor]) -> tuple[KernelClock, dict[str, LayerCosts]]:
        """Kernels of a step that recomputes all but attention, and the layers' costs."""
        rates = replay_rates(self._machine)
        offload = OffloadWithoutBytes(self._short.model, self._layers, 0.0, min_bytes=0, rates=rates)
        clock = KernelClock(self._machine)
        try:
            for step in range(_WARM_UPS):
                with ExitStack() as stack:
                    if step == _WARM_UPS - 1:
                        stack.enter_context(clock)
                    sites = stack.enter_context(AllocationSites(clock, self._short.model, self._layers))
                    sites.phase("forward")
                    with offload.manager:
                        value = loss()
                    sites.phase("backward")
                    value.backward()
                self._short.model.zero_grad(set_to_none=True)
            return clock, {cost.layer: cost for cost in offload.manager.levels_profile()}
        finally:
            offload.manager.close()

    def _layer(
        self,
        layer: Layer,
        saved: _Saved,
        clock: KernelClock,
        again: KernelClock,
        costs: LayerCosts | None,
        peaks: LayerPeaks,
    ) -> RecordedLayer:
        forward, backward = (clock.spent[f"{layer.name}.{way}"] for way in ("forward", "backward"))
        replayed = again.spent[f"{layer.name}.backward"]
        repeated = replayed.product_flops - backward.product_flops
        attended = attended_in(layer.module)
        storages = saved.inside[layer.name]
        points = () if costs is None else points_of(costs, again_flops=max(repeated, 0.0))
        return RecordedLayer(
            input_nbytes=saved.inputs[layer.name],
            storages=tuple(storages),
            weights_nbytes=sum(saved.weights[layer.name]),
            points=points or (PointProfile(name=ALL, saved_bytes=sum(storages)),),
            forward=forward,
            backward=backward,
            attention_share=max((one.share for one in attended), default=1.0),
            entering_nbytes=sum(one.entering_nbytes for one in attended),
            leaving_nbytes=sum(one.leaving_nbytes for one in attended),
            forward_transient_nbytes=peaks.forward.get(layer.name, 0),
            backward_transient_nbytes=peaks.backward.get(layer.name, 0),
            repeated=tuple((Counter(replayed.collectives) - Counter(backward.collectives)).elements()),
        )


class _Saved:
    """Storages that autograd saves in one forward, each once, by the layer or the end that saves it first."""

    def __init__(self, model: nn.Module, layers: Iterable[Layer]) -> None:
        self._layers = list(layers)
        self.inside: dict[str, list[int]] = {layer.name: [] for layer in self._layers}
        self.weights: dict[str, list[int]] = {layer.name: [] for layer in self._layers}
        self.inputs: dict[str, int] = dict.fromkeys(self.inside, 0)
        self.outside: dict[str, list[int]] = {EMBEDDING: [], HEAD: []}
        self.made_outside = {EMBEDDING: 0, HEAD: 0}
        """Bytes of those that the end itself made."""
        self._running: list[tuple[str, set[torch.UntypedStorage]]] = []
        self._end = EMBEDDING
        self._entered: set[torch.UntypedStorage] = set()
        """Results of layers, which the head may save."""
        # Storage objects compare by identity, and are kept here, so that none is reused for another storage.
        self._seen = {local_part(tensor).untyped_storage() for tensor in (*model.parameters(), *model.buffers())}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches one forward."""
        hooks = []
        for layer in self._layers:
            hooks.append(layer.module.register_forward_pre_hook(self._entering(layer.name), with_kwargs=True))
            hooks.append(layer.module.register_forward_hook(self._leaving, always_call=True))
        try:
            with saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = layer_input(args, kwargs)
            self.inputs[name] = 0 if hidden is None else hidden.untyped_storage().nbytes()
            self._running.append((name, argument_storages(args, kwargs)))
            self._end = HEAD

        return enter

    def _leaving(self, _: nn.Module, __: object, output: Any) -> None:
        self._running.pop()
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor):
                self._entered.add(tensor.untyped_storage())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided and (storage := tensor.untyped_storage()) not in self._seen:
            self._seen.add(storage)
            self._add(storage, is_weight=cast_of_parameter(tensor))
        return tensor.detach()

    def _add(self, storage: torch.UntypedStorage, *, is_weight: bool) -> None:
        name, given = self._running[-1] if self._running else ("", set())
        if name and storage not in given:
            (self.weights if is_weight else self.inside)[name].append(storage.nbytes())
            return
        end = EMBEDDING if name else self._end
        self.outside[end].append(storage.nbytes())
        if storage not in self._entered:
            self.made_outside[end] += storage.nbytes()


def _peaks_of_ends(trace: AllocationTrace, spans: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Peaks of transient memory before and behind the layers."""
    within = [one for one in trace.allocations if one.upper < trace.end]
    forwards = [span for key, span in spans.items() if key.endswith(".forward")]
    backwards = [span for key, span in spans.items() if key.endswith(".backward")]
    first, last = min(span[0] for span in forwards), max(span[1] for span in forwards)
    turn, back = min(span[0] for span in backwards), max(span[1] for span in backwards)
    return {
        EMBEDDING: max(
            peak_of(one for one in within if one.lower < first), peak_of(one for one in within if one.lower >= back)
        ),
        HEAD: peak_of(one for one in within if last <= one.lower < turn),
    }
