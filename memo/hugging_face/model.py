"""A model of Hugging Face's transformers as the planner reads it: profiles of it for any length, machine and layout.

Owns the profile: bytes and work that were recorded on one rank, the machine's rates, and the collectives of sharded weights
and of context parallelism. A step is recorded once for each length; what layouts change is arithmetic.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any

import torch

from memo.errors import UsageError
from memo.gpt import Precision
from memo.gpt.arithmetic import (
    AS_MEMO_TRAINS,
    NF4_BYTES,
    AdapterDtype,
    BaseFormat,
    Collective,
    Optimizer,
    RankWeights,
    RecomputeMethod,
    StepLayout,
    Training,
    TrainingMethod,
    exchange_s,
    orthogonalisation_flops,
)
from memo.hugging_face.configuration import INSTALL, LEAST_TRANSFORMERS, language_part, transformers_version
from memo.hugging_face.fused_attention import NAME as FUSED
from memo.hugging_face.layer_kinds import LayerKind, ShortModel, short_model
from memo.hugging_face.recorded_step import RecordedEnd, RecordedLayer, RecordedStep, recorded_step, with_more_sequences
from memo.mip.inputs import (
    Collectives,
    EmbeddingOrHeadProfile,
    Hardware,
    LayerProfile,
    Profile,
    Role,
    StaticBytes,
)
from memo.swap import comparing_nbytes

LARGE_TOKENS = 1 << 14
"""Tokens of a microbatch from which on kernels take as long for each more of them, experts' too."""
_DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP32: torch.float32}


_ADAPTER_DTYPES = {AdapterDtype.FP32: torch.float32, AdapterDtype.BF16: torch.bfloat16}


class HuggingFaceModel:
    """A model by its configuration.

    Args:
        config: configuration of transformers; it is changed.
        name: for error messages and profiles.
        precision: number format of weights and arithmetic: `bf16` or `fp32`.
        without_logits: whether the loss is that of `memo.loss_without_logits`.
        lora: rank of adapters on every linear map of the layers, which alone are trained; 0: everything is.
        lora_dtype: number format of the adapters.
        say: is told which kind of layers is recorded.

    Raises:
        UsageError: transformers cannot build it without memory or is too old, or it has another precision.
    """

    def __init__(
        self,
        config: Any,
        *,
        name: str,
        precision: Precision = Precision.BF16,
        without_logits: bool = False,
        lora: int = 0,
        lora_dtype: AdapterDtype = AdapterDtype.FP32,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        if precision not in _DTYPES:
            raise UsageError(f"{name}: a configuration is planned in bf16 or fp32, not in {precision}")
        version = transformers_version()
        if int(version.partition(".")[0]) < LEAST_TRANSFORMERS:
            raise UsageError(
                f"{name}: models of transformers {LEAST_TRANSFORMERS} and newer are planned, and this is {version}: "
                f"{INSTALL}, or give memo profile the model's module:function"
            )
        self.name = name
        self._precision = precision
        self._without_logits = without_logits
        self._lora, self._lora_dtype = lora, lora_dtype
        self._say = say
        self._whole, config = config, language_part(config)
        self._config = config
        build = functools.partial(
            short_model, name=name, dtype=_DTYPES[precision], lora=lora, adapter_dtype=_ADAPTER_DTYPES[lora_dtype]
        )
        self._build_again = functools.partial(build, copy.deepcopy(config))
        self._short: ShortModel = build(config)
        self._of_rank = {1: self._short}
        """The model that one of so many tensor-parallel ranks has."""
        self._recorded: dict[tuple[Hardware, int, int, int], RecordedStep] = {}
        self._with_logits: dict[tuple[Hardware, int, int, int], RecordedStep] = {}
        self._other: HuggingFaceModel | None = None

    def with_loss_without_logits(self) -> HuggingFaceModel | None:
        """Returns the model with the loss of `memo.loss_without_logits`; None where it has that loss, or none else."""
        if self._without_logits or not self._short.projection_parameters:
            return None
        if self._other is None:
            self._other = other = copy.copy(self)
            other._without_logits, other._recorded, other._with_logits = True, {}, self._recorded
        return self._other

    @property
    def vocabulary(self) -> int:
        """Rows of the output projection."""
        return self._short.vocabulary

    @property
    def hidden(self) -> int:
        """Columns of the output projection; 0 without one."""
        return self._short.projection_parameters // max(1, self._short.vocabulary)

    @property
    def layers(self) -> int:
        """Number of repeated layers."""
        return len(self._short.layers)

    @property
    def heads(self) -> int:
        """Attention heads that context parallelism may exchange; 0 where it cannot."""
        heads = int(getattr(self._config.get_text_config(), "num_attention_heads", 0) or 0)
        return heads if self._short.attention == FUSED else 0

    @functools.cached_property
    def why_no_context(self) -> str | None:
        """Reason why `memo.parallelize` does not divide the model's tokens; None where it does."""
        from memo.parallel.decoders import check_context

        try:
            check_context(self._short.model)
        except UsageError as error:
            return str(error)
        return None

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        by_name = {kind.name: kind.parameters for kind in self._short.kinds}
        inside = sum(by_name[name] for name in self._short.layers)
        return inside + self._short.embedding_parameters + self._short.head_parameters

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan of the model assumes, in sentences without a full stop."""
        found = []
        if not self._without_logits and self._short.projection_parameters:
            found.append("the loss is the model's own, with all logits in memory (--loss-without-logits is another)")
        if self._short.attention != FUSED:
            found.append(
                f"attention is transformers' {self._short.attention!r}, with the masks and scores that it makes"
            )
        if (published := getattr(self._whole, "quantization_config", None)) is not None:
            method = dict(published).get("quant_method", "codes")
            found.append(
                f"weights are published in {method}, and counted in {self._precision}, in which they are trained"
            )
        if self._whole is not self._config:
            found.append("the language model alone is planned")
        for name in sorted({name for step in self._recorded.values() for name in step.idle}):
            found.append(f"the {name}s do not run in a step on text, and count as parameters")
        for name in sorted({name for step in self._recorded.values() for name in step.slow}):
            found.append(f"{name} runs operator by operator, as it does where the package of its kernels is missing")
        if _has_experts(self._config):
            found.append("each expert gets as many tokens as the others")
        found += sorted({note for short in self._of_rank.values() for note in short.notes})
        return tuple(found)

    def recorded(self, machine: Hardware, *, tokens: int, batch: int, tp: int = 1) -> RecordedStep:
        """The step of one rank with so many tokens in each sequence, one of so many that divide the matrices.

        Raises:
            UsageError: the model's code cannot run without data, or `memo.parallelize` does not divide it so.
        """
        key = (machine, tokens, batch, tp)
        if key in self._recorded:
            return self._recorded[key]
        few = -(-LARGE_TOKENS // tokens)
        more = None
        if batch > 2 * few:
            few_and_twice = (self.recorded(machine, tokens=tokens, batch=size, tp=tp) for size in (few, 2 * few))
            more = with_more_sequences(*few_and_twice, times=Fraction(batch, few))
        if more is None:
            with self._rank(tp) as short:
                more = recorded_step(
                    short,
                    name=self.name,
                    tokens=tokens,
                    batch=batch,
                    machine=machine,
                    without_logits=self._without_logits,
                    with_logits=self._with_logits.get(key),
                    say=self._say,
                )
        self._recorded[key] = more
        return more

    @contextlib.contextmanager
    def _rank(self, tp: int) -> Iterator[ShortModel]:
        if tp == 1:
            yield self._short
            return
        from memo.hugging_face.tensor_parallel_rank import tensor_parallel_rank

        with contextlib.ExitStack() as stack:
            try:
                short = stack.enter_context(tensor_parallel_rank(self._build_again(), tp))
            except UsageError as error:
                raise UsageError(f"--tp {tp}: {self.name}: {error}") from error
            whole = self._short  # its modules, which other processes of a search can be sent
            kinds = tuple(
                dataclasses.replace(own, layer=kind.layer) for own, kind in zip(short.kinds, whole.kinds, strict=True)
            )
            self._of_rank[tp] = dataclasses.replace(short, model=whole.model, stacks=whole.stacks, kinds=kinds)
            yield short

    def profile(
        self,
        machine: Hardware,
        layout: StepLayout,
        method: TrainingMethod = AS_MEMO_TRAINS,
        *,
        accumulate: int = 1,
        name: str | None = None,
    ) -> Profile:
        """Profile of one rank's microbatch.

        Args:
            machine: rates and memories of the machine.
            layout: size of the step and its parallelism.
            method: training method, but for adapters, which are the model's.
            accumulate: microbatches in a step.
            name: in the profile; None is the model's.

        Raises:
            UsageError: the layout does not divide the model, or its code cannot run without data.
        """
        self._check(layout)
        matrices = [shape for kind in self._short.kinds for shape in kind.matrices()]
        smallest = min((min(shape) for shape in matrices), default=1)
        training = Training.of(
            dataclasses.replace(method, lora=self._lora, lora_dtype=self._lora_dtype),
            layout,
            precision=self._precision,
            accumulate=accumulate,
            smallest=smallest,
            smallest_of_ends=smallest,
        )
        weights = RankWeights(machine, layout, training)
        tokens = layout.tokens // layout.cp
        step = self.recorded(machine, tokens=tokens, batch=layout.batch, tp=layout.tp)
        of_rank = _Rank(self._of_rank[layout.tp], step, machine, layout, weights)
        classes = tuple(
            of_rank.layer(kind, method.recompute) for kind in of_rank.short.kinds if kind.name not in step.idle
        )
        whole = step if layout.tp == 1 else self.recorded(machine, tokens=tokens, batch=layout.batch)
        flops = dataclasses.replace(of_rank, short=self._short, step=whole).model_flops()
        return Profile(
            signature=layout.signature(model=name or self.name, dtype=str(self._precision), heads=0),
            role=Role.DERIVED,
            classes=classes,
            layers=of_rank.layers,
            embedding=of_rank.embedding(),
            head=of_rank.head(),
            optimizer_s=weights.optimizer_s(of_rank.trained)
            + (of_rank.orthogonalisation_s() if method.optimizer is Optimizer.MUON else 0.0),
            optimizer_exchange_s=weights.update_s(of_rank.trained),
            send_s=of_rank.send_s(),
            send_bytes=of_rank.send_bytes,
            link_share=of_rank.link_share(classes, accumulate),
            model_flops_causal_per_token=flops[0],
            model_flops_full_per_token=flops[1],
        )

    def _check(self, layout: StepLayout) -> None:
        if layout.ep > 1:
            raise UsageError(
                f"--ep {layout.ep}: the experts of {self.name} are not divided; use --zero 3, which shards their weights, "
                "or --pp"
            )
        if len(self._short.layers) < layout.pp:
            raise UsageError(
                f"{len(self._short.layers)} layers do not make {layout.pp} pipeline stages; use a smaller pp"
            )
        heads = self.heads // layout.tp
        if layout.tokens % (layout.tp * layout.cp):
            shards = f"tp {layout.tp} x cp {layout.cp}" if layout.tp > 1 else f"cp {layout.cp}"
            raise UsageError(f"{shards} does not divide {layout.tokens} tokens")
        if layout.cp > 1 and heads and heads % layout.cp:
            raise UsageError(f"cp {layout.cp} does not divide {heads} attention heads")
        if layout.cp > 1 and not heads:
            raise UsageError(f"--cp {layout.cp}: the attention of {self.name} is its own, and cannot exchange heads")


@dataclasses.dataclass(frozen=True, slots=True)
class _Rank:
    """One rank of a layout."""

    short: ShortModel
    step: RecordedStep
    machine: Hardware
    layout: StepLayout
    weights: RankWeights

    @property
    def layers(self) -> tuple[str, ...]:
        """The kind of each layer that runs."""
        idle = self.step.idle
        return tuple(name for name in self.short.layers if name not in idle)

    @property
    def _embedding_parameters(self) -> int:
        """With those of layers that do not run."""
        idle = sum(
            kind.parameters * self.short.layers.count(kind.name)
            for kind in self.short.kinds
            if kind.name in self.step.idle
        )
        return self.short.embedding_parameters + idle

    @property
    def stage_parameters(self) -> int:
        """Parameters of the largest stage, taken as its share of the layers and the larger end."""
        by_name = {kind.name: kind.parameters for kind in self.short.kinds}
        stages = self.layout.pp
        inside = sum(by_name[name] for name in self.layers)
        ends = (self._embedding_parameters, self._head_parameters)
        return self._of_stage(inside) + (sum(ends) if stages == 1 else max(ends))

    @property
    def trained(self) -> int:
        """Number of the `stage_parameters` that the optimizer updates."""
        if not self.weights.training.lora:
            return self.stage_parameters
        by_name = {kind.name: kind.trained for kind in self.short.kinds}
        return self._of_stage(sum(by_name[name] for name in self.layers))

    def _of_stage(self, count: int) -> int:
        """A stage's share of what all layers have."""
        if not self.layout.stage_layers:
            return -(-count // self.layout.pp)
        return -(-count * self.layout.stage_layers // len(self.layers))

    def orthogonalisation_s(self) -> float:
        """Seconds of Muon's products in a step."""
        by_name = {kind.name: orthogonalisation_flops(kind.matrices()) for kind in self.short.kinds}
        flops = sum(by_name[name] for name in self.layers) / self.layout.pp
        if self.layout.stage_layers:
            flops *= self.layout.pp * self.layout.stage_layers / len(self.layers)
        return self.weights.orthogonalisation_s(flops)

    @property
    def _head_parameters(self) -> int:
        """With a copy of a tied table, where the ends are on two stages."""
        copied = self.short.projection_parameters if self.short.is_tied and self.layout.pp > 1 else 0
        return self.short.head_parameters + copied

    def layer(self, kind: LayerKind, recompute: RecomputeMethod | None) -> LayerProfile:
        """A kind's profile."""
        own, parameters, weights = self.step.layers[kind.name], kind.parameters, self.weights
        context_s = self._context_s(own)
        forward_exchange_s = context_s + self._tensor_s(own.forward.collectives)
        backward_exchange_s = context_s + self._tensor_s(own.backward.collectives)
        # Which point repeats which collectives is not recorded; they go with the products.
        repeated_s = self._tensor_s(own.repeated) / max((point.recompute_flops for point in own.points), default=1.0)
        # Heads are exchanged for tokens: a rank's heads see all tokens, cp times those that were recorded.
        attention_s, backward_attention_s = (self.layout.cp * seconds for seconds in own.attention_s)
        attention_flops = self.layout.cp * own.attention_flops
        # Of a base in 4 bits each pass, and each recompute of products, makes the linear maps' weights anew, one by one.
        linear = kind.frozen_linear() if weights.training.base is BaseFormat.NF4 else []
        made_s = (NF4_BYTES + self.short.itemsize) * sum(linear) / self.machine.elementwise_bytes_per_s
        matrix = self.short.itemsize * max(linear, default=0)
        points = tuple(
            dataclasses.replace(
                point,
                recompute_s=point.recompute_s
                + made_s * (point.recompute_flops > 0)
                + repeated_s * point.recompute_flops,
            )
            for point in own.points
        )
        largest = max(own.storages, default=0)
        profile = LayerProfile(
            name=kind.name,
            always_bytes=0,
            other_bytes=max(own.saved_nbytes - own.points[0].saved_bytes, 0),
            points=points,
            forward_s=own.forward.with_attention_s(attention_s, self.machine) + made_s + forward_exchange_s,
            backward_s=own.backward.with_attention_s(backward_attention_s, self.machine) + made_s + backward_exchange_s,
            forward_flops=own.forward.product_flops + attention_flops,
            backward_flops=own.backward.product_flops + 2 * attention_flops,
            attention_flops=attention_flops,
            attention_s=attention_s,
            forward_exchange_s=forward_exchange_s,
            backward_exchange_s=backward_exchange_s,
            gather_s=weights.gather_s(parameters),
            sync_s=weights.sync_s(kind.trained),
            forward_transient_bytes=own.forward_transient_nbytes + comparing_nbytes(largest) + matrix,
            backward_transient_bytes=own.backward_transient_nbytes + matrix,
            static=weights.static(parameters, trained=kind.trained, coded=sum(linear))
            + StaticBytes(cast=own.weights_nbytes),
            storages=len(own.storages) + (2 if len(own.points) > 1 else 0),
            largest_storage_bytes=largest,
        )
        gathered, gradients = weights.gathered_bytes(parameters), weights.gathered_bytes(kind.trained)
        profile = weights.with_gathered(profile, weights=gathered, gradients=gradients)
        return profile if recompute is None else recompute.of(profile, input_bytes=own.input_nbytes)

    def embedding(self) -> EmbeddingOrHeadProfile:
        """The end before the layers; FSDP reduces both ends' gradients together where one rank has both."""
        parameters = self._embedding_parameters
        both = parameters + (self.short.head_parameters if self.layout.pp == 1 else 0)
        return self._end(self.step.embedding, parameters, sync=both)

    def head(self) -> EmbeddingOrHeadProfile:
        """The end behind the layers, with the loss."""
        parameters = self._head_parameters
        return self._end(self.step.head, parameters, sync=parameters if self.layout.pp > 1 else 0)

    def _end(self, own: RecordedEnd, parameters: int, *, sync: int) -> EmbeddingOrHeadProfile:
        waits_s = self.weights.end_gather_s(parameters) + self._tensor_s(own.forward.collectives)
        back_s = self._tensor_s(own.backward.collectives)
        return EmbeddingOrHeadProfile(
            forward_s=own.forward.with_attention_s(own.forward.attention_s, self.machine) + waits_s,
            backward_s=own.backward.with_attention_s(own.backward.attention_s, self.machine) + back_s,
            forward_flops=own.forward.product_flops,
            backward_flops=own.backward.product_flops,
            forward_exchange_s=waits_s,
            sync_s=self.weights.end_sync_s(sync),
            saved_bytes=own.saved_nbytes,
            transient_bytes=own.transient_nbytes,
            static=self.weights.end_static(parameters),
        )

    def _tensor_s(self, collectives: Iterable[Collective]) -> float:
        """Seconds of tensor parallelism's collectives."""
        return exchange_s(collectives, self.machine, self.layout)

    def _context_s(self, own: RecordedLayer) -> float:
        """Seconds of context parallelism's exchanges in one pass: queries, keys, values, and attention's result."""
        if self.layout.cp == 1:
            return 0.0
        group, collectives = self.layout.context_group(self.machine.gpus_per_node), Collectives(self.machine)
        there = collectives.all_to_all_s(own.entering_nbytes, group)
        return there + collectives.all_to_all_s(own.leaving_nbytes, group)

    @property
    def send_bytes(self) -> float:
        """Hidden states that go to the next pipeline stage."""
        return float(max(layer.input_nbytes for layer in self.step.layers.values())) if self.layout.pp > 1 else 0.0

    def send_s(self) -> float:
        """Seconds to send them."""
        if self.layout.pp == 1:
            return 0.0
        leaves = self.layout.leaves_node(self.machine.gpus_per_node)
        return Collectives(self.machine).send_s(self.send_bytes, beyond_node=leaves, gpus=self.layout.gpus)

    def link_share(self, classes: tuple[LayerProfile, ...], accumulate: int) -> float:
        """Fraction of a GPU's link to the host that collectives of the layers' passes take, in one direction."""
        rate = Collectives(self.machine).host_link_bytes_per_s(self.layout.context_group(self.machine.gpus_per_node))
        by_name = {layer.name: layer for layer in classes}
        layers = [by_name[name] for name in self.layers]
        exchanged = [(layer.forward_exchange_s + layer.backward_exchange_s) * rate for layer in layers]
        return self.weights.link_share(zip(layers, exchanged, strict=True), accumulate)

    def model_flops(self) -> tuple[float, float]:
        """FLOPs per token, forward and backward: 6N + attention, causal and of the full square.

        N are the weights that multiply a token: of experts those that it is routed to; 4N where adapters alone are trained.
        """
        tokens = self.layout.tokens // self.layout.cp * self.layout.batch
        layers = [self.step.layers[name] for name in self.layers]
        products = sum(layer.forward.product_flops for layer in layers)
        products += 2 * self.short.projection_parameters * tokens
        attention = self.layout.cp * sum(layer.attention_flops for layer in layers)
        passes, adapters = 3, 0
        if self.weights.training.lora:  # 4N, since frozen weights need no gradients, and those of the adapters
            passes = 2
            by_name = {kind.name: kind.trained for kind in self.short.kinds}
            adapters = 2 * sum(by_name[name] for name in self.layers) * tokens
        work = passes * products + adapters + 3 * attention
        return work / tokens, (work + 3 * attention) / tokens


def _has_experts(config: Any) -> bool:
    text = config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text, name, None) or 0) > 1 for name in names)
