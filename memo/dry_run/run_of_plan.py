"""The run of `memo train` that a plan is for: model, layout and batch, read from the plan's own problem.

Imports no torch, so that a plan that cannot be run is refused before anything starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memo.errors import PlanError, UsageError
from memo.gpt import GPTConfig, Precision, preset, preset_name
from memo.gpt.arithmetic import ChunkOfLayers, Collective, Layout as PlannedLayout, StepCollectives, derive_profile
from memo.mip.activation import layers_of_runs
from memo.mip.inputs import Profile, Role, StaticBytes
from memo.parallel import ContextAttention, Layout

if TYPE_CHECKING:
    from memo.dry_run.places import Place
    from memo.mip.activation import ActivationPlan

__all__ = ["MOST_RANKS", "PlannedRun", "planned_run"]

MOST_RANKS = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A training run without data."""

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
    plan: ActivationPlan | None = None

    @property
    def planned_layout(self) -> PlannedLayout:
        """The layout as the arithmetic reads it."""
        return PlannedLayout(
            tokens=self.tokens,
            batch=self.rows // self.layout.dp,
            gpus=self.layout.ranks,
            tp=self.layout.tp,
            cp=self.layout.cp,
            ring=self.layout.cp_attention is ContextAttention.RING,
            pp=self.layout.pp,
            ep=self.layout.ep,
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

    def collectives_of(self, place: Place) -> list[Collective]:
        """The plan's list of the collectives of one rank in a step, without recompute."""
        return self.collectives.step(
            stage=place.pp,
            tp_rank=place.tp,
            replica=place.replica,
            microbatches=self.microbatches,
            schedule=self.layout.schedule,
            chunks=self.layout.chunks,
            layers=self.layout.stage_layers,
        )

    def derive(self, config: GPTConfig) -> Profile:
        """Profile of a model in this run by arithmetic, on one node of the plan's machine: its bytes, not its seconds."""
        assert self.plan is not None
        return derive_profile(
            config,
            dataclasses.replace(self.plan.problem.hardware, gpus_per_node=self.layout.ranks),
            self.planned_layout,
            precision=self.precision,
            accumulate=self.microbatches,
            sparse_embedding=self.sparse_embedding,
            name=self.plan.problem.profile.signature.model,
        )

    def check_ranks(self) -> None:
        """Raises UsageError where there are too many ranks, or one."""
        if self.layout.ranks == 1:
            raise UsageError("the plan is for one rank, which talks to no other; memo simulate plays its step")
        if self.layout.ranks > MOST_RANKS:
            raise UsageError(f"the plan is for {self.layout.ranks:,} ranks; a dry run is of at most {MOST_RANKS:,}")

    def check(self) -> None:
        """Raises UsageError where the model or the batch does not divide over the ranks."""
        self.layout.check(self.config, seq=self.tokens, batch=self.rows, microbatches=self.microbatches)


def planned_run(plan: ActivationPlan, *, config: GPTConfig | None = None) -> PlannedRun:
    """The run of a plan, checked.

    Args:
        plan: made by `memo plan` for a size of memo's GPT.
        config: the model, where the plan's name of it does not say its shape; None is the size of this name.

    Raises:
        PlanError: the plan is of a measured profile, of a model or a way of training that `memo train` does not have, or of
            another shape than the model's.
        UsageError: the layout does not divide the model, or has too many ranks.
    """
    problem, profile = plan.problem, plan.problem.profile
    signature, pipeline = profile.signature, problem.pipeline
    name = signature.model[:80]
    if profile.role is Role.MEASURED:
        raise PlanError(
            f"the plan is of a measured profile ({name!r}), which does not say what to run; plan a named model (memo plan "
            "--model)"
        )
    if signature.dtype not in tuple(Precision) or (config is None and preset_name(name) is None):
        raise PlanError(
            f"the plan is of {name!r} in {signature.dtype[:20]}, and memo train runs sizes of memo's GPT alone, with "
            "recompute as the plan chooses it"
        )
    exchange, layers = profile.embedding_exchange, layers_of_runs(problem)
    run = PlannedRun(
        config=_NAMELESS if config is None else config,
        precision=Precision(signature.dtype),
        layout=Layout(
            dp=problem.replicas,
            tp=signature.tp,
            pp=pipeline.stages,
            cp=signature.cp,
            ep=signature.ep,
            cp_attention=ContextAttention.RING if signature.ring else ContextAttention.AUTO,
            schedule=pipeline.schedule,
            chunks=pipeline.chunks if pipeline.schedule.default_chunks > 1 else None,
            stage_layers=layers if len(set(layers)) > 1 else (),
        ),
        tokens=signature.tokens,
        rows=signature.batch * problem.replicas,
        microbatches=pipeline.microbatches,
        sparse_embedding=exchange is not None and exchange.sparse,
        plan=plan,
    )
    run.check_ranks()
    shapes = _shapes(name, profile) if config is None else [config]
    run = dataclasses.replace(run, config=_shape_of(run, shapes, profile))
    run.check()
    return run


_NAMELESS = preset("tiny")


def _shapes(name: str, profile: Profile) -> list[GPTConfig]:
    """The architectures that a size has."""
    found = []
    for variant in (None, "llama"):
        try:
            shape = preset(name, variant=variant, layers=len(profile.layers))
        except UsageError:
            continue
        # As memo train: a learned table has a row for each token.
        found.append(dataclasses.replace(shape, max_seq=profile.signature.tokens))
    return found


def _shape_of(run: PlannedRun, shapes: Sequence[GPTConfig], profile: Profile) -> GPTConfig:
    """The shape whose arithmetic gives the plan's bytes.

    Raises:
        PlanError: none of them does.
    """
    for shape in shapes:
        shape = dataclasses.replace(shape, mlp_tiles=profile.mlp_tiles)
        derived = run.derive(shape)
        if _work(derived) != _work(profile):
            continue
        if _states(derived) != _states(profile):
            raise PlanError(
                f"the plan has {_states(profile)[0].nbytes:,} bytes of each layer's states on a rank, and memo train "
                f"{_states(derived)[0].nbytes:,}; plan without --zero, --optimizer, --optimizer-offload and --lora"
            )
        return shape
    raise PlanError(
        f"the plan's layers do not save the bytes of {profile.signature.model[:80]!r} by this version's arithmetic; give "
        "the flags that shaped the model (--variant, --hidden, ...), or plan it again"
    )


def _work(profile: Profile) -> object:
    """Numbers that only one shape gives. Classes of layers on different machines differ in their seconds only."""
    layers = {(each.always_bytes, each.points[0].saved_bytes, each.forward_flops) for each in profile.classes}
    return layers, len(profile.layers), len(profile.classes[0].points) > 1, profile.head.forward_flops


def _states(profile: Profile) -> list[StaticBytes]:
    layers = dict.fromkeys(each.static for each in profile.classes)
    return [*layers, profile.embedding.static, profile.head.static]
