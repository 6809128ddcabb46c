"""Request of a plan: a model, a step and a machine, from which planning problems and plans are made.

Pure data beside the model; `memo plan` parses it from flags, searches vary it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from memo.errors import UsageError
from memo.gpt import EmbeddingGradients, GPTConfig
from memo.gpt.arithmetic import (
    STATES,
    BaseFormat,
    StepLayout,
    TrainingMethod,
    adapter_states,
    derive_profile,
    layer_states,
)
from memo.mip.activation import ActivationProblem, DoesNotFit, Pipeline, fits, solve_mlp_tiles
from memo.units import format_bytes

if TYPE_CHECKING:
    from memo.gpt import Precision
    from memo.hugging_face import HuggingFaceModel
    from memo.mip.activation import ActivationPlan, Budgets
    from memo.mip.inputs import Hardware, PipelineSchedule, Profile

GPT_WORDS = (
    "the model is memo's GPT, whose loss holds no logits and whose MLPs may be in tiles (--mlp-tiles 1: whole); "
    "transformers' own saves the input of each norm in float32, too"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request(TrainingMethod):
    """Model, step, layout and machine with its budgets. Searches vary it."""

    config: GPTConfig | HuggingFaceModel | None
    """None where a profile is given."""
    model: str
    precision: Precision
    tiles: tuple[int, ...]
    """Numbers of MLP tiles to choose from, ascending."""
    layout: StepLayout
    profile: Profile | None
    machine: Hardware
    budgets: Budgets
    accumulate: int
    schedule: PipelineSchedule
    chunks: int | None
    """Chunks of each pipeline rank; None is the schedule's own number."""
    shares_host: bool = False
    """Whether the host budget is what a node's memory has for as many GPUs, and grows with their number."""
    stage_layers: tuple[int, ...] = ()
    """Numbers of layers of the runs of consecutive layers; without them equal ones."""

    @property
    def leanest_tiles(self) -> tuple[int, ...]:
        """Numbers of MLP tiles of which one holds least: the most, or where an MLP is narrow the fewest."""
        return tuple(dict.fromkeys((self.tiles[-1], self.tiles[0])))

    def on(self, **layout: Any) -> Request:
        """The request on another layout, whose fields are given."""
        other, had = dataclasses.replace(self.layout, **layout), self.budgets
        ranks = min(other.gpus, self.machine.gpus_per_node)
        host = had.host_bytes * ranks // had.ranks_per_node if self.shares_host else had.host_bytes
        budgets = dataclasses.replace(had, host_bytes=host, ranks_per_node=ranks)
        return dataclasses.replace(self, layout=other, budgets=budgets)

    def fits(self) -> bool:
        """Whether some plan fits.

        Raises:
            UsageError: the layout does not divide the model, or the host has no room for what is there in any case.
        """
        return any(fits(self.problem(tiles)) for tiles in self.leanest_tiles)

    def plan(self) -> ActivationPlan:
        """Plan with the shortest step.

        Raises:
            Infeasible: no plan fits the budgets.
        """
        plan = solve_mlp_tiles(self.problem, self.tiles)
        exchange = plan.problem.profile.embedding_exchange
        if self.embedding is not EmbeddingGradients.AUTO or exchange is None or exchange.sparse_s >= exchange.dense_s:
            return plan
        # It takes memory that the dense exchange leaves to activations, so only a plan shows which is faster.
        other = dataclasses.replace(self, embedding=EmbeddingGradients.SPARSE)
        try:
            sparse = solve_mlp_tiles(other.problem, (plan.problem.profile.mlp_tiles,))
        except DoesNotFit:
            return plan
        return sparse if sparse.step_s < plan.step_s else plan

    def problem(self, tiles: int = 1) -> ActivationProblem:
        """Planning problem; `tiles` is the number of MLP tiles of a named model.

        Raises:
            UsageError: the layout does not divide the model, or the host has no room for the optimizer that is to be there.
        """
        problem = self._problem(tiles, optimizer_offload=self.optimizer_offload)
        there = self._optimizer_host_bytes(problem, tiles)
        if not there:
            return problem
        host = problem.budgets.host_bytes - there
        if host < 0:
            most = format_bytes(problem.budgets.host_bytes, down=True)
            raise UsageError(
                f"--optimizer-offload puts {format_bytes(there)} of optimizer state and gradients into a node's host "
                f"memory, and its budget is {most}; give more --host, or more nodes"
            )
        return dataclasses.replace(problem, budgets=dataclasses.replace(problem.budgets, host_bytes=host))

    def _optimizer_host_bytes(self, problem: ActivationProblem, tiles: int) -> int:
        """Bytes of optimizer state and gradients in a node's host memory; 0 for fixed methods, without a budget there.

        On one GPU a copy of the trained parameters, too, which are as large as their gradients.
        """
        if not self.optimizer_offload or self.recompute is not None or self.config is None:
            return 0
        without = self._problem(tiles, optimizer_offload=False)
        if self.layout.gpus == 1:
            (static,) = (stage.static for stage in without.stages)
            return 2 * static.gradients + static.optimizer
        pairs = zip(without.stages, problem.stages, strict=True)
        return max(kept.static.nbytes - stage.static.nbytes for kept, stage in pairs) * problem.budgets.ranks_per_node

    def _problem(self, tiles: int, *, optimizer_offload: bool) -> ActivationProblem:
        layout = self.layout
        if self.stage_layers:
            layout = dataclasses.replace(layout, stage_layers=self.pipeline.most_layers)
        profile = self.profile_on(self.machine, layout, tiles=tiles, optimizer_offload=optimizer_offload)
        return ActivationProblem(profile=profile, hardware=self.machine, budgets=self.budgets, pipeline=self.pipeline)

    def profile_on(
        self, machine: Hardware, layout: StepLayout, *, tiles: int = 1, optimizer_offload: bool = False
    ) -> Profile:
        """Profile of a rank on a machine; a measured one is of its own machine.

        Raises:
            UsageError: the layout does not divide the model.
        """
        profile, config = self.profile, self.config
        method = TrainingMethod(**{**self.choices, "optimizer_offload": optimizer_offload})
        if isinstance(config, GPTConfig):
            derived = functools.partial(
                derive_profile,
                machine=machine,
                layout=layout,
                method=method,
                precision=self.precision,
                accumulate=self.accumulate,
                name=self.model,
            )
            profile = derived(dataclasses.replace(config, mlp_tiles=tiles))
            if tiles > 1:
                profile = _with_tiling(profile, derived(dataclasses.replace(config, mlp_tiles=1)))
        elif config is not None:
            profile = config.profile(machine, layout, method, accumulate=self.accumulate, name=self.model)
        assert profile is not None
        return profile

    @property
    def assumed(self) -> tuple[str, ...]:
        """Assumptions about training: always its numbers of bytes and the model, and what is not the default."""
        found = [f"{format_bytes(self.budgets.host_bytes)} of host memory a node"]
        is_gpt = isinstance(self.config, GPTConfig)
        if self.config is not None:
            # The width matters to Adafactor's means alone, by hundredths of a byte.
            states = layer_states(self.optimizer, STATES[self.precision], smallest=4096)
            if self.lora:
                states = adapter_states(self.optimizer, self.lora_dtype, STATES[self.precision], rank=self.lora)
            state = f"{states.optimizer:.2g} of {self.optimizer}'s state"
            kept = f"{states.gradient} of gradient and {state} a {'trained ' * bool(self.lora)}parameter"
            kernel = f"attention by {self.machine.attention[0].name}"
            found = [
                f"{self.precision}; {states.weight} bytes of weight, {kept}; {kernel}; {found[0]}",
                GPT_WORDS if is_gpt else "the model is transformers' own, with whole MLPs",
            ]
        if self.lora:
            frozen = f"on a base in {self.base}" if self.base is not BaseFormat.FULL else ""
            found.append(f"adapters of rank {self.lora} alone are trained, in {self.lora_dtype} {frozen}".rstrip())
        if self.optimizer_offload:
            where = "the optimizer's state and update are on the host"
            where = f"{where} ({self.offload_note})" if self.offload_note else f"{where}, with a copy of the parameters"
            found.append(f"{where}; published runs took several times the predicted update")
        found += [f"what moves is coded as {self.codec}: gradients are near, not bit-identical"] if self.codec else []
        found += (
            [f"data-parallel ranks share by ZeRO {self.zero}"] if self.zero < 3 and self.layout.replicas > 1 else []
        )
        own = () if self.config is None or isinstance(self.config, GPTConfig) else self.config.notes
        return (*found, *own)

    @property
    def offload_note(self) -> str:
        """Why `memo train` has no optimizer on the host here; empty where it has one."""
        if not isinstance(self.config, GPTConfig):
            return "memo train has it for memo's GPT"
        return "memo train has it for one GPU" if self.layout.gpus > 1 else ""

    def without_logits(self) -> Request | None:
        """The request with `memo.loss_without_logits`; None where its loss has no logits in memory already."""
        if self.config is None or isinstance(self.config, GPTConfig):
            return None
        other = self.config.with_loss_without_logits()
        return None if other is None else dataclasses.replace(self, config=other)

    @property
    def pipeline(self) -> Pipeline:
        """Pipeline of the layout."""
        return Pipeline(
            stages=self.layout.pp,
            microbatches=self.accumulate,
            stage_ranks=self.layout.gpus // self.layout.pp,
            schedule=self.schedule,
            chunks=self.chunks or 0,
            layers=self.stage_layers,
        )


@functools.lru_cache(maxsize=1024)
def _with_tiling(profile: Profile, whole: Profile) -> Profile:
    """The profile with what MLPs in tiles add to its layers, beside the same layers with whole MLPs."""
    classes = tuple(
        dataclasses.replace(
            layer,
            tiled_s=max(layer.forward_s + layer.backward_s - plain.forward_s - plain.backward_s, 0.0),
            tiled_flops=max(layer.backward_flops - plain.backward_flops, 0.0),
        )
        for layer, plain in zip(profile.classes, whole.classes, strict=True)
    )
    return dataclasses.replace(profile, classes=classes)
