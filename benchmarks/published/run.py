"""A published run in the terms of the planner, and what the planner's own cost model predicts for it.

Owns the fixed plan: every layer keeps what the run's method of recompute saves, and nothing moves. The step's time and the
peaks are the plan's (`predict_stages`, `ActivationPlan.step_s`), as `memo plan` prints them.
"""

from __future__ import annotations

import dataclasses
import functools

from benchmarks.published.framework_profile import profile_of_training
from benchmarks.published.framework_training import FrameworkTraining
from benchmarks.published.kernel_times import KernelRates
from memo.gpt.arithmetic import StepLayout
from memo.gpt.config import GPTConfig
from memo.mip.activation import ActivationPlan, ActivationProblem, Budgets, LayerPlan, Pipeline, predict_stages
from memo.mip.inputs import Hardware, PipelineSchedule, Profile, hardware_preset


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """Rates of one kind of GPU, as fitted."""

    rates: KernelRates
    node_efficiency: float = 0.8
    """Share of the GPU's link to its peers that the framework reaches."""
    nic_efficiency: float = 0.8
    """Share of the NICs' rate that it reaches."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A training run."""

    gpu: str
    config: GPTConfig
    layout: StepLayout
    training: FrameworkTraining
    microbatches: int = 1
    chunks: int = 1

    def machine(self, fitted: Fitted) -> Hardware:
        """The machine with the links that the framework reaches."""
        machine = hardware_preset(self.gpu)
        network = dataclasses.replace(
            machine.network, node_efficiency=fitted.node_efficiency, nic_efficiency=fitted.nic_efficiency
        )
        return dataclasses.replace(machine, network=network)

    def profile(self, fitted: Fitted) -> Profile:
        """Profile of one rank's microbatch."""
        machine = self.machine(fitted)
        return profile_of_training(
            self.config, machine, self.layout, self.training, rates=fitted.rates, name="published"
        )

    @functools.cached_property
    def pipeline(self) -> Pipeline:
        """The run's pipeline."""
        stages = self.layout.pp
        if stages == 1 or self.chunks == 1:
            return Pipeline(stages=stages, microbatches=self.microbatches)
        return Pipeline(
            stages=stages,
            microbatches=self.microbatches,
            schedule=PipelineSchedule.INTERLEAVED,
            chunks=self.chunks,
        )

    def work_s(self, fitted: Fitted) -> float:
        """Seconds of a microbatch on all stages, which the step's are in proportion to where rates change a little."""
        profile = self.profile(fitted)
        layers = sum(layer.forward_s + layer.backward_s for layer in profile.layer_profiles())
        ends = (profile.embedding, profile.head)
        return layers + sum(end.forward_s + end.backward_s for end in ends)

    def plan(self, fitted: Fitted) -> ActivationPlan:
        """The fixed plan with its predictions."""
        machine = self.machine(fitted)
        problem = ActivationProblem(
            profile=self.profile(fitted),
            hardware=machine,
            budgets=Budgets(device_bytes=machine.device_bytes),
            pipeline=self.pipeline,
        )
        layers = (LayerPlan(),) * self.config.layers
        return ActivationPlan(problem=problem, layers=layers, stages=predict_stages(problem, layers))
