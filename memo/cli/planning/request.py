"""Request of `memo plan`: a parsed command line, from which problems and plans are made, and which searches vary."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from memo.cli.inputs.batch_sizes import batch_sizes
from memo.cli.inputs.budgets import budgets_of
from memo.cli.inputs.planned_model import SHAPE_FLAGS, planned_model
from memo.cli.terminal.file_kinds import FileKind, require_kind
from memo.errors import UsageError
from memo.gpt import EmbeddingGradients, GPTConfig, Precision, preset_name
from memo.gpt.arithmetic import Layout, Optimizer, Recompute, derive_profile
from memo.mip.activation import (
    MLP_TILE_COUNTS,
    ActivationPlan,
    ActivationProblem,
    Budgets,
    DoesNotFit,
    Pipeline,
    read_hardware,
    read_profile,
    solve_mlp_tiles,
    stage_static,
)
from memo.mip.inputs import Hardware, PipelineSchedule, hardware_preset, parse_network, with_measured_rates
from memo.units import format_bytes, parse_tokens

if TYPE_CHECKING:
    from memo.hugging_face import HuggingFaceModel
    from memo.mip.inputs import Profile, Signature

__all__ = ["AUTO", "METHODS", "TILE_TOKENS", "Request"]

AUTO = "auto"
METHODS = {"none": Recompute.NONE, "selective": Recompute.SCORES, "full": Recompute.FULL}
"""Fixed methods of recompute by their flag."""
TILE_TOKENS = 1024
"""Tokens of each context-parallel rank by which lengths differ."""
_METHOD_WORDS = {"none": " without recompute", "selective": " selective recompute", "full": " full recompute"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Parsed command line, with files read and sizes converted to bytes and tokens; a sweep varies it."""

    config: GPTConfig | HuggingFaceModel | None
    """None where a profile is given."""
    model: str
    precision: Precision
    tiles: tuple[int, ...]
    """Numbers of MLP tiles to choose from, ascending."""
    layout: Layout
    profile: Profile | None
    machine: Hardware
    budgets: Budgets
    accumulate: int
    schedule: PipelineSchedule
    recompute: Recompute | None
    """A fixed method; None is the plan's choice."""
    zero: int
    optimizer_offload: bool
    optimizer: Optimizer
    lora: int
    """Rank of adapters; 0: everything is trained."""
    chunks: int | None
    """Of each pipeline rank; None is the schedule's own number."""
    embedding: EmbeddingGradients = EmbeddingGradients.DENSE
    """How the embedding's gradient is exchanged."""

    @classmethod
    def of(cls, args: argparse.Namespace, *, model: GPTConfig | HuggingFaceModel | None = None) -> Request:
        """Parses the arguments and reads the files.

        Args:
            args: the parsed flags; with --max-seq the request is of one tile of tokens.
            model: the model, where it has been built.

        Raises:
            UsageError: an argument is invalid or contradicts another.
            PlanError: a file cannot be read.
        """
        if args.lora < 0:
            raise UsageError(f"--lora {args.lora} is no rank; give a number of at least 1")
        machine = _hardware(args.gpu) if args.gpu.endswith(".json") or "/" in args.gpu else hardware_preset(args.gpu)
        for path, kind in ((args.doctor, FileKind.MACHINE_REPORT), (args.profile, FileKind.PROFILE)):
            if path is not None:
                require_kind(path, kind)
        if args.doctor is not None:
            machine = with_measured_rates(machine, args.doctor)
        if args.net is not None:
            machine = dataclasses.replace(machine, network=parse_network(args.net, machine.network))
        if (args.profile is None) == (args.model is None):
            raise UsageError("give either --model and --seq, or --profile")
        if args.profile is not None:
            _require_named_model(args)
        profile = None if args.profile is None else read_profile(args.profile)
        if args.profile is not None and (args.max_seq or args.gpus == AUTO):
            flag = "--max-seq" if args.max_seq else "--gpus auto"
            raise UsageError(f"{flag} needs --model; a measured profile is of one length and rank")
        if args.model is not None and args.seq is None and not args.max_seq:
            raise UsageError("--model needs --seq, such as 128k, or --max-seq")
        embedding = _embedding(args)
        config = None if args.model is None else planned_model(args) if model is None else model
        layout, accumulate = _layout(args, profile)
        return cls(
            config=config,
            model=(args.model or "") + _METHOD_WORDS.get(args.recompute, ""),
            precision=Precision(args.precision),
            tiles=_tiles(args, profile, config),
            layout=layout,
            profile=profile,
            machine=machine,
            budgets=budgets_of(args, machine),
            accumulate=accumulate,
            schedule=_schedule(args, layout, accumulate),
            recompute=METHODS.get(args.recompute),
            zero=args.zero,
            optimizer_offload=args.optimizer_offload,
            optimizer=Optimizer(args.optimizer),
            lora=args.lora,
            chunks=args.chunks,
            embedding=embedding,
        )

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
        """Bytes of optimizer state and gradients in a node's host memory; 0 for fixed methods, without a budget there."""
        if not self.optimizer_offload or self.recompute is not None or self.config is None:
            return 0
        without = self._problem(tiles, optimizer_offload=False)
        moved = (
            stage_static(without, stage).nbytes - stage_static(problem, stage).nbytes
            for stage in range(problem.pipeline.stages)
        )
        return max(moved) * problem.budgets.ranks_per_node

    def _problem(self, tiles: int, *, optimizer_offload: bool) -> ActivationProblem:
        profile, config = self.profile, self.config
        if isinstance(config, GPTConfig):
            profile = derive_profile(
                dataclasses.replace(config, mlp_tiles=tiles),
                self.machine,
                self.layout,
                precision=self.precision,
                accumulate=self.accumulate,
                recompute=self.recompute,
                zero=self.zero,
                optimizer_offload=optimizer_offload,
                optimizer=self.optimizer,
                lora=self.lora,
                sparse_embedding=self.embedding is EmbeddingGradients.SPARSE,
                name=self.model,
            )
        elif config is not None:
            profile = config.profile(
                self.machine,
                self.layout,
                accumulate=self.accumulate,
                recompute=self.recompute,
                zero=self.zero,
                optimizer_offload=optimizer_offload,
                optimizer=self.optimizer,
                name=self.model,
            )
        assert profile is not None
        return ActivationProblem(
            profile=profile, hardware=self.machine, budgets=self.budgets, pipeline=self._pipeline()
        )

    @property
    def assumed(self) -> tuple[str, ...]:
        """Assumptions about training that are not the default, and those of a model of transformers."""
        found = [f"the optimizer is {self.optimizer}"] if self.optimizer is not Optimizer.ADAMW else []
        found += [f"adapters of rank {self.lora} alone are trained"] if self.lora else []
        found += ["optimizer state and its step are on the host"] if self.optimizer_offload else []
        found += (
            [f"data-parallel ranks share by ZeRO {self.zero}"] if self.zero < 3 and self.layout.replicas > 1 else []
        )
        own = () if self.config is None or isinstance(self.config, GPTConfig) else self.config.notes
        return (*found, *own)

    def without_logits(self) -> Request | None:
        """The request with `memo.loss_without_logits`; None where its loss has no logits in memory already."""
        if self.config is None or isinstance(self.config, GPTConfig):
            return None
        other = self.config.with_loss_without_logits()
        return None if other is None else dataclasses.replace(self, config=other)

    def _pipeline(self) -> Pipeline:
        """Pipeline of the layout."""
        return Pipeline(
            stages=self.layout.pp,
            microbatches=self.accumulate,
            stage_ranks=self.layout.gpus // self.layout.pp,
            schedule=self.schedule,
            chunks=self.chunks or 0,
        )


def _require_named_model(args: argparse.Namespace) -> None:
    """Refuses flags that describe a named model where a profile is given."""
    given = [f"--{name}" for name in SHAPE_FLAGS if getattr(args, name.replace("-", "_")) is not None]
    given += ["--recompute"] * (args.recompute != "plan") + ["--zero"] * (args.zero != 3)
    given += ["--optimizer-offload"] * args.optimizer_offload + ["--loss"] * (args.loss is not None)
    given += ["--optimizer"] * (args.optimizer != Optimizer.ADAMW) + ["--lora"] * (args.lora != 0)
    given += ["--variant"] * (args.variant is not None)
    given += ["--embedding-exchange"] * (args.embedding_exchange == EmbeddingGradients.SPARSE)
    if given:
        raise UsageError(f"{given[0]} applies to a named model only; a profile has the step that was measured")


def _schedule(args: argparse.Namespace, layout: Layout, accumulate: int) -> PipelineSchedule:
    schedule = PipelineSchedule(args.schedule)
    if layout.pp == 1 and schedule is not PipelineSchedule.ONE_F_ONE_B:
        raise UsageError(f"--schedule {schedule} has no meaning without --pp")
    wrong = None if args.chunks is None else schedule.reason_not_chunks(args.chunks)
    if wrong is not None:
        raise UsageError(f"--chunks {args.chunks} {wrong}")
    wrong = schedule.reason_unsupported(accumulate, layout.pp) if schedule.default_chunks > 1 else None
    if wrong is not None:
        raise UsageError(f"--accumulate {accumulate} {wrong}")
    return schedule


def _embedding(args: argparse.Namespace) -> EmbeddingGradients:
    asked = EmbeddingGradients(args.embedding_exchange)
    if asked is EmbeddingGradients.SPARSE and args.model is not None and preset_name(args.model) is None:
        raise UsageError(
            f"--embedding-exchange sparse applies to sizes of memo's GPT only; {args.model} exchanges its own gradients"
        )
    return EmbeddingGradients.DENSE if args.recompute != "plan" and asked is EmbeddingGradients.AUTO else asked


def _tiles(
    args: argparse.Namespace, profile: Profile | None, config: GPTConfig | HuggingFaceModel | None
) -> tuple[int, ...]:
    text: str = args.mlp_tiles
    if profile is None and not isinstance(config, GPTConfig):
        if text not in ("auto", "1"):
            raise UsageError(
                f"--mlp-tiles {text} applies to sizes of memo's GPT only; {args.model} computes its own MLPs"
            )
        return (1,)
    if args.recompute != "plan":
        if text not in ("auto", "1"):
            raise UsageError(f"--mlp-tiles {text} has no meaning with --recompute {args.recompute}")
        return (1,)
    if text == "auto":
        return MLP_TILE_COUNTS if profile is None else (profile.mlp_tiles,)
    if profile is not None:
        raise UsageError("--mlp-tiles applies to a named model only; a profile has the tiles it was measured with")
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--mlp-tiles {text}: give auto, or a whole number of at least 1")
    return (int(text),)


def _layout(args: argparse.Namespace, profile: Profile | None) -> tuple[Layout, int]:
    """The layout, and the number of microbatches in a step."""
    batch, sizes = args.batch, {"tp": args.tp, "cp": args.cp, "pp": args.pp}
    if profile is not None:
        known = profile.signature
        _require_agreement(args, known)
        batch, sizes = known.batch, {name: getattr(known, name) for name in sizes}
    if profile is not None:
        tokens = profile.signature.tokens
    else:
        tokens = TILE_TOKENS * args.cp if args.max_seq else parse_tokens(args.seq, what="--seq")
    layout = Layout(tokens=tokens, gpus=args.gpus, **sizes)
    batch, accumulate = batch_sizes(batch, args.accumulate, args.global_batch, replicas=layout.replicas)
    return dataclasses.replace(layout, batch=batch), accumulate


def _require_agreement(args: argparse.Namespace, known: Signature) -> None:
    """Refuses flags that contradict the measured step, which would have no effect."""
    asked = {name: getattr(args, name) for name in ("tp", "cp", "pp") if getattr(args, name) != 1}
    if args.batch is not None:
        asked["batch"] = args.batch
    if args.seq is not None:
        asked["seq"] = parse_tokens(args.seq, what="--seq")
    for name, given in asked.items():
        measured = known.tokens if name == "seq" else getattr(known, name)
        if given != measured:
            raise UsageError(
                f"--{name} {given}: the profile is of {measured}; leave out --{name}, or measure another profile"
            )


def _hardware(path: str) -> Hardware:
    require_kind(path, FileKind.HARDWARE)
    return read_hardware(path)
