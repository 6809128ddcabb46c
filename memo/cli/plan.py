"""`memo plan`: plans which activations of each layer are kept, moved and recomputed, without a GPU.

The input is a named model on a named GPU, or a profile measured by `memo profile`. A plan is written only after the
independent checker and the simulator have passed it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from memo.cli.inputs.batch_sizes import add_batch_flags, batch_sizes
from memo.cli.inputs.budgets import add_budget_flags, budgets_of
from memo.cli.inputs.planned_model import SHAPE_FLAGS, add_model_flags, planned_model
from memo.cli.planning.search import TILE_TOKENS, describe_longest, fewest_gpus, longest_sequence
from memo.cli.tables.activation import activation_summary, activation_table
from memo.cli.terminal.file_kinds import FileKind, require_kind
from memo.cli.terminal.output_files import display_name, file_name, refuse_existing, require_matplotlib
from memo.cli.terminal.progress import WaitingLine
from memo.errors import ExitCode, UsageError
from memo.gpt import GPTConfig, Precision
from memo.gpt.arithmetic import Layout, Recompute, derive_profile
from memo.mip.activation import (
    MLP_TILE_COUNTS,
    ActivationPlan,
    ActivationProblem,
    Budgets,
    Pipeline,
    plan_to_json,
    read_hardware,
    read_profile,
    solve_mlp_tiles,
)
from memo.mip.inputs import PRESETS, Hardware, PipelineSchedule, hardware_preset, parse_network, with_measured_rates
from memo.mip.simulate import prove
from memo.units import parse_tokens

if TYPE_CHECKING:
    from memo.hugging_face import HuggingFaceModel
    from memo.mip.inputs import Profile, Signature

__all__ = ["Request", "configure", "run"]

AUTO = "auto"
_EPILOG = """\
examples:
  memo plan --model 7b --seq 1m --gpu a800 --gpus 8 --tp 8 --host 2TiB --device 80GiB -o plan.json
  memo simulate plan.json -o trace.jsonl
  memo plan --model ./Qwen3-8B --max-seq --gpu h100 --gpus 8 --loss without-logits
  memo plan --model llama3-70b --seq 128k --gpu h100 --gpus auto
"""

_METHODS = {"none": Recompute.NONE, "selective": Recompute.SCORES, "full": Recompute.FULL}
_METHOD_WORDS = {"none": " without recompute", "selective": " selective recompute", "full": " full recompute"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `memo plan`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    what = parser.add_argument_group("model: either --model and --seq, or --profile")
    add_model_flags(what)
    length = what.add_mutually_exclusive_group()
    length.add_argument("--seq", metavar="TOKENS", help="sequence length in tokens, such as 128k or 1m")
    length.add_argument(
        "--max-seq",
        action="store_true",
        help=f"find the longest sequence that fits, in steps of {TILE_TOKENS:,} tokens for each rank of --cp, and plan it",
    )
    what.add_argument(
        "--mlp-tiles",
        metavar="N",
        default="auto",
        help="compute each MLP of a named model in N tiles; auto chooses the number with the shortest step (default auto)",
    )
    add_batch_flags(what)
    what.add_argument("--profile", metavar="FILE", help="profile measured by memo profile")
    how = parser.add_argument_group("training of a named model")
    how.add_argument(
        "--recompute",
        choices=("plan", *_METHODS),
        default="plan",
        help="what layers compute again: plan chooses; none, selective (scores: as none, since "
        "attention is fused) and full (the layer) are fixed methods, counted as compute, that move nothing unless --host "
        "says so (default plan)",
    )
    how.add_argument(
        "--zero",
        type=int,
        choices=range(4),
        default=3,
        help="what data-parallel ranks share out: 1 optimizer state, 2 gradients, too, 3 weights, too, as memo train does "
        "(default 3)",
    )
    how.add_argument("--optimizer-offload", action="store_true", help="optimizer state and its step are on the host")
    where = parser.add_argument_group("machine")
    where.add_argument(
        "--gpu",
        required=True,
        metavar="NAME|FILE",
        help=f"GPU: {', '.join(PRESETS)}, or a JSON description of a machine",
    )
    where.add_argument(
        "--gpus",
        type=_gpus,
        default=1,
        metavar="N",
        help="number of GPUs in all; auto finds the fewest that fit: 1, 2, 4, 8, then whole nodes (default 1)",
    )
    for name, words in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline")):
        where.add_argument(
            f"--{name}", type=int, default=1, metavar="N", help=f"ranks of {words} parallelism (default 1)"
        )
    where.add_argument(
        "--schedule",
        choices=[str(s) for s in PipelineSchedule],
        default=str(PipelineSchedule.ONE_F_ONE_B),
        help="with --pp: pipeline schedule (default 1f1b)",
    )
    where.add_argument(
        "--chunks",
        type=int,
        metavar="N",
        help="with an interleaved --schedule: runs of consecutive layers of each pipeline rank (default 2)",
    )
    where.add_argument(
        "--net",
        metavar="NICS",
        help="network between nodes: the NICs of a node, such as 8x400Gb, or none for one node (default: that of --gpu)",
    )
    where.add_argument(
        "--doctor",
        metavar="FILE",
        help="use the rates that memo doctor --json measured on the machine (default: the rates of --gpu)",
    )
    add_budget_flags(parser)
    out = parser.add_argument_group("output")
    out.add_argument("-o", "--output", type=file_name, metavar="FILE", help="write the plan to FILE as JSON")
    out.add_argument("-f", "--force", action="store_true", help="overwrite existing files")
    out.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    out.add_argument(
        "--sweep",
        choices=("seq", "device", "host"),
        help="plan for a range of sequence lengths up to --seq, or of budgets of device or host memory, and print one line "
        "for each",
    )
    out.add_argument(
        "--plot", type=file_name, metavar="FILE", help="with --sweep: draw it; FILE ends in .png, .svg or .pdf"
    )


def run(args: argparse.Namespace) -> ExitCode:
    """Plans, checks and simulates, writes the plan and prints it."""
    if args.max_seq and (args.gpus == AUTO or args.sweep is not None):
        other = "--gpus auto" if args.gpus == AUTO else f"--sweep {args.sweep}"
        raise UsageError(f"--max-seq and {other} each look for a size; give the number of one of them")
    if args.gpus == AUTO and args.sweep is not None:
        raise UsageError(f"--gpus auto and --sweep {args.sweep} exclude each other; give a number of GPUs")
    refuse_existing(args.output, args.plot, force=args.force)
    require_matplotlib(args.plot)
    if args.plot is not None and args.sweep is None:
        raise UsageError(
            "--plot draws a sweep only; add --sweep seq, device or host, or use memo simulate for a timeline"
        )
    what = " ".join(["planning", *(given for given in (args.model, args.seq and f"at {args.seq}") if given)])
    with WaitingLine("memo plan", what, quiet=args.json):
        request, found = _request(args)
        if args.sweep is None:
            plan = request.plan()
            simulation = prove(plan)
    if args.sweep is not None:
        from memo.cli.planning.sweep import run_sweep

        return run_sweep(request, args)
    if args.output:
        from memo.mip.address import write_file

        write_file(args.output, plan_to_json(plan), overwrite=args.force)
    if args.json:
        printed = {"simulated_step_s": simulation.step_s, "output": args.output, "assumed": list(request.assumed)}
        print(json.dumps({**activation_summary(plan), **found.summary, **printed}))
        return ExitCode.OK
    for line in found.lines:
        print(f"{line}\n")
    print(activation_table(plan))
    for sentence in request.assumed:
        print(f"assumed: {sentence}")
    off = abs(simulation.step_s / plan.step_s - 1) if plan.step_s else 0.0
    print(f"checked, and simulated event by event: {off:.2%} off the prediction")
    if args.output:
        print(f"Wrote {display_name(args.output)}")
    return ExitCode.OK


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What --max-seq or --gpus auto found, for people and for --json."""

    lines: tuple[str, ...] = ()
    summary: Mapping[str, object] = dataclasses.field(default_factory=dict)


def _request(args: argparse.Namespace) -> tuple[Request, _Found]:
    """The request of the flags, with what was searched for filled in."""
    if args.max_seq:
        longest = longest_sequence(Request.of(args))
        summary = {"max_seq": longest.request.layout.tokens, "binds": longest.binds, "proposal": longest.proposal}
        return longest.request, _Found(lines=(describe_longest(longest),), summary=summary)
    if args.gpus != AUTO:
        return Request.of(args), _Found()
    first = Request.of(argparse.Namespace(**{**vars(args), "gpus": args.tp * args.cp * args.pp}))

    def with_gpus(gpus: int) -> Request:
        return Request.of(argparse.Namespace(**{**vars(args), "gpus": gpus}), model=first.config)

    step, node = args.tp * args.cp * args.pp, first.machine.gpus_per_node
    request, tried = fewest_gpus(with_gpus, step=step, gpus_per_node=node)
    gpus = request.layout.gpus
    too_few = f"; {', '.join(map(str, tried))} {'is' if len(tried) == 1 else 'are'} too few" if tried else ""
    line = f"fewest GPUs: {gpus}{too_few}"
    return request, _Found(lines=(line,), summary={"gpus": gpus, "gpus_too_few": tried})


def _gpus(text: str) -> int | str:
    """A number of GPUs, or `auto`."""
    if text.lower() == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto") from None


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
    chunks: int | None
    """Of each pipeline rank; None is the schedule's own number."""

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
            recompute=_METHODS.get(args.recompute),
            zero=args.zero,
            optimizer_offload=args.optimizer_offload,
            chunks=args.chunks,
        )

    def plan(self) -> ActivationPlan:
        """Plan with the shortest step.

        Raises:
            Infeasible: no plan fits the budgets.
        """
        return solve_mlp_tiles(self.problem, self.tiles)

    def problem(self, tiles: int = 1) -> ActivationProblem:
        """Planning problem; `tiles` is the number of MLP tiles of a named model."""
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
                optimizer_offload=self.optimizer_offload,
                name=self.model,
            )
        elif config is not None:
            profile = config.profile(
                self.machine,
                self.layout,
                accumulate=self.accumulate,
                recompute=self.recompute,
                zero=self.zero,
                optimizer_offload=self.optimizer_offload,
                name=self.model,
            )
        assert profile is not None
        return ActivationProblem(
            profile=profile, hardware=self.machine, budgets=self.budgets, pipeline=self._pipeline()
        )

    @property
    def assumed(self) -> tuple[str, ...]:
        """What the profile of a model of transformers assumes."""
        return () if self.config is None or isinstance(self.config, GPTConfig) else self.config.notes

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
    given += ["--variant"] * (args.variant is not None)
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
