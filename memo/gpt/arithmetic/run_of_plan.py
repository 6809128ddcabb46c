"""The run of `memo train` that a plan is for: the model from the plan's `run`, the rest from its problem.

Owns what `run` of a plan's file holds. Imports no torch, so that a plan that cannot be run is refused before anything
starts.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memo.errors import PlanError, UsageError
from memo.gpt.arithmetic.collectives import Collective
from memo.gpt.arithmetic.layout import StepLayout
from memo.gpt.arithmetic.step_collectives import ChunkOfLayers, StepCollectives
from memo.gpt.config import GPTConfig
from memo.gpt.train_config import Precision
from memo.mip import decode, encode
from memo.mip.activation import layers_of_runs
from memo.parallel import ContextAttention, Layout

if TYPE_CHECKING:
    from memo.mip.activation import ActivationPlan, ActivationProblem

_MODEL, _SHAPE, _UNTRAINED, _OPTIMIZER_OFFLOAD = "model", "shape", "untrained", "optimizer_offload"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A training run without data."""

    model: str = ""
    """The size's name."""
    config: GPTConfig
    precision: Precision
    layout: Layout
    tokens: int
    """Tokens of a sequence, over all ranks that share it."""
    rows: int
    """Sequences of a microbatch, over all ranks."""
    microbatches: int
    sparse_embedding: bool = False
    """The embedding's gradient is exchanged as rows."""
    optimizer_offload: bool = False
    """The optimizer's state and step are on the host."""
    plan: ActivationPlan | None = None

    @property
    def planned_layout(self) -> StepLayout:
        """The layout as the arithmetic reads it."""
        return StepLayout(
            tokens=self.tokens,
            batch=self.rows // self.layout.dp,
            gpus=self.layout.ranks,
            tp=self.layout.tp,
            cp=self.layout.cp,
            ring=self.layout.cp_attention is ContextAttention.RING,
            pp=self.layout.pp,
            ep=self.layout.ep,
            tp_overlap=self.layout.tp_overlap,
        )

    @property
    def collectives(self) -> StepCollectives:
        """The plan's model of the step's collectives."""
        return StepCollectives(
            config=self.config,
            layout=self.planned_layout,
            precision=self.precision,
            sparse_embedding=self.sparse_embedding,
        )

    def chunks_of(self, stage: int) -> list[ChunkOfLayers]:
        """The runs of layers of one pipeline rank, by the plan's model."""
        layout = self.layout
        return self.collectives.chunks_of(
            stage, schedule=layout.schedule, chunks=layout.chunks, layers=layout.stage_layers
        )

    def collectives_of(self, *, stage: int, tp_rank: int, replica: int) -> list[Collective]:
        """The plan's list of the collectives of one rank in a step, without recompute.

        Args:
            stage: its pipeline stage.
            tp_rank: its place among tensor-parallel ranks.
            replica: its place among the ranks with the same parameters.
        """
        return self.collectives.step(
            stage=stage,
            tp_rank=tp_rank,
            replica=replica,
            microbatches=self.microbatches,
            schedule=self.layout.schedule,
            chunks=self.layout.chunks,
            layers=self.layout.stage_layers,
        )

    def check(self) -> None:
        """Raises UsageError where the model or the batch does not divide over the ranks."""
        self.layout.check(self.config, seq=self.tokens, batch=self.rows, microbatches=self.microbatches)


def run_of(model: str, config: GPTConfig, *, optimizer_offload: bool = False) -> dict[str, object]:
    """Entry `run` of a plan's file: the size's name and its shape, and where the optimizer is on the host, that it is."""
    return {_MODEL: model, _SHAPE: encode(config), **({_OPTIMIZER_OFFLOAD: True} if optimizer_offload else {})}


def untrained(reason: str) -> dict[str, object]:
    """Entry `run` of a plan that `memo train` cannot run; `reason` is a sentence without a full stop."""
    return {_UNTRAINED: reason}


def is_of_gpt(plan: ActivationPlan) -> bool:
    """Whether a plan is of memo's GPT, as far as it says what it is of."""
    return plan.run is not None and _SHAPE in plan.run


def planned_run(plan: ActivationPlan) -> PlannedRun:
    """The run of a plan, checked.

    Raises:
        PlanError: the plan does not say what it is of, or is not of a run of `memo train`.
        UsageError: the layout does not divide the model.
    """
    problem, said = plan.problem, plan.run
    name = repr(problem.profile.signature.model[:80])
    if said is None:
        raise PlanError(
            f"the plan is of {name} and does not say how that is trained; memo plan --model of a size of memo's GPT writes "
            "one that does"
        )
    if _UNTRAINED in said:
        raise PlanError(f"the plan is of {name}: {str(said[_UNTRAINED])[:200]}")
    try:
        shape = decode(GPTConfig, said.get(_SHAPE), "run: shape")
    except UsageError as error:
        raise PlanError(f"run: {error}") from None
    if not isinstance(said.get(_MODEL), str) or shape.layers != len(problem.profile.layers):
        raise PlanError(
            f"run: {shape.layers} layers of {str(said.get(_MODEL))[:80]!r} are not those of the plan's profile"
        )
    signature, exchange = problem.profile.signature, problem.profile.embedding_exchange
    if signature.dtype not in tuple(Precision):
        raise PlanError(f"run: memo train has no precision {signature.dtype[:20]!r}")
    run = PlannedRun(
        model=str(said[_MODEL]),
        # As memo train: a learned table has a row for each token.
        config=dataclasses.replace(shape, max_seq=signature.tokens, mlp_tiles=problem.profile.mlp_tiles),
        precision=Precision(signature.dtype),
        layout=layout_of(problem),
        tokens=signature.tokens,
        rows=signature.batch * problem.replicas,
        microbatches=problem.pipeline.microbatches,
        sparse_embedding=exchange is not None and exchange.sparse,
        optimizer_offload=said.get(_OPTIMIZER_OFFLOAD) is True,
        plan=plan,
    )
    run.check()
    return run


def layout_of(problem: ActivationProblem) -> Layout:
    """The ranks of a problem, as `memo train` divides them."""
    signature, pipeline, layers = problem.profile.signature, problem.pipeline, layers_of_runs(problem)
    return Layout(
        dp=problem.replicas,
        tp=signature.tp,
        cp=signature.cp,
        ep=signature.ep,
        tp_overlap=signature.tp_overlap,
        pp=pipeline.stages,
        cp_attention=ContextAttention.RING if signature.ring else ContextAttention.AUTO,
        schedule=pipeline.schedule,
        chunks=pipeline.chunks if pipeline.chunks != pipeline.schedule.default_chunks else None,
        stage_layers=layers if len(set(layers)) > 1 else (),
    )
