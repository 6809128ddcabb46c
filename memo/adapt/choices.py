"""Layouts that a run was, is or may be in, with the division of its step; and the state of adaptation in a checkpoint."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memo.errors import UsageError
from memo.gpt import EmbeddingGradients, OffloadMode
from memo.parallel import ContextAttention, Layout
from memo.search import Candidate, Setting, Shape

if TYPE_CHECKING:
    from memo.gpt import GPTConfig, RunConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """A layout, and the division of a step into microbatches."""

    layout: Layout
    batch: int
    """Sequences in a microbatch of all ranks together."""
    accumulate: int
    """Microbatches in a step."""

    @classmethod
    def of_run(cls, config: RunConfig) -> LayoutChoice:
        """The choice that a run is in."""
        return cls(layout=config.layout, batch=config.batch, accumulate=config.training.accumulate)

    @classmethod
    def of_candidate(cls, candidate: Candidate) -> LayoutChoice:
        """The choice of a search's candidate."""
        shape, schedule = candidate.shape, candidate.schedule
        layout = Layout(
            **{name: getattr(shape, name) for name in ("dp", "tp", "pp", "cp", "ep")},
            cp_attention=ContextAttention.RING if shape.ring else ContextAttention.AUTO,
            schedule=schedule,
            chunks=candidate.chunks if candidate.chunks != schedule.default_chunks else None,
            stage_layers=candidate.stage_layers,
        )
        setting = candidate.setting
        return cls(layout=layout, batch=setting.batch * shape.dp, accumulate=setting.accumulate)

    def candidate(self, shape: GPTConfig) -> Candidate:
        """The candidate of a search of the model."""
        layout = self.layout
        sizes = {name: getattr(layout, name) for name in ("dp", "tp", "pp", "cp", "ep")}
        return Candidate(
            shape=Shape(**sizes, ring=layout.rings(shape)),
            setting=Setting(self.batch // layout.dp, self.accumulate),
            schedule=layout.schedule,
            chunks=layout.stages_per_rank,
            stage_layers=layout.stage_layers,
        )

    def run(self, config: RunConfig) -> RunConfig:
        """The run in this layout."""
        training = dataclasses.replace(config.training, accumulate=self.accumulate)
        return dataclasses.replace(config, layout=self.layout, batch=self.batch, training=training, keeps_batch=False)

    @property
    def words(self) -> str:
        """Words of a log, such as `dp 2 x tp 2, 1 x 4`; equal ones differ in the layers of stages at most."""
        layout = self.layout
        parts = [f"{name} {getattr(layout, name)}" for name in ("dp", "tp", "pp", "cp") if getattr(layout, name) > 1]
        ring = " ring" * (layout.cp_attention is ContextAttention.RING)
        expert = f" ep {layout.ep}" * (layout.ep > 1)
        pipeline = f", {layout.schedule} of {layout.stages_per_rank}" * (layout.pp > 1)
        return f"{' x '.join(parts)}{ring}{expert}{pipeline}, {self.accumulate} x {self.batch}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeftLayout:
    """A layout that the run has left."""

    choice: LayoutChoice
    predicted_s: float
    """Its step as predicted with the links of then."""
    measured_s: float
    """Its step as measured then."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdaptationState:
    """State of adaptation that a checkpoint stores."""

    choice: LayoutChoice
    """The layout to go on in."""
    left: tuple[LeftLayout, ...] = ()
    cost_s: float | None = None
    """Measured seconds of the last change of layout, from the decision to the first step's begin; None: not measured."""
    decided_unix_s: float = 0.0
    """Time of the last change's decision."""


def require_adaptable(config: RunConfig, *, ranks: int, under_torchrun: bool) -> None:
    """Checks that a run can go on in any layout.

    Raises:
        UsageError: an option fixes the layout, or ranks cannot restart; the message says what works.
    """
    if ranks < 2 or not under_torchrun:
        raise UsageError("--adapt: one process has no other layout; start ranks with torchrun --nproc-per-node N")
    if config.checkpoint_dir is None:
        raise UsageError("--adapt needs --checkpoint-dir, from which ranks go on in another layout")
    offload, layout = config.offload, config.layout
    fixing = {
        f"--plan {offload.plan} is of one layout": offload.plan is not None,
        f"--alpha {offload.alpha} is not priced in other layouts": offload.alpha is not None,
        f"--offload {offload.mode} is not priced in other layouts": offload.mode
        in (OffloadMode.HOST, OffloadMode.DISK),
        f"--disk {offload.disk} is not priced in other layouts": offload.disk is not None,
        "--compress-gradients needs --dp or --cp": config.compress_gradients is not None,
        "--pipeline-dtype needs --pp": config.pipeline_dtype is not None,
        "--embedding-exchange sparse needs --dp or --cp": config.embedding_exchange is EmbeddingGradients.SPARSE,
        "--no-sequence-parallel is not priced": not layout.sequence_parallel,
        "--tp-overlap needs --tp": layout.tp_overlap,
    }
    for why, is_given in fixing.items():
        if is_given:
            raise UsageError(f"--adapt may choose any layout, and {why}; leave one of the two out")
