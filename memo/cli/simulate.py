"""`memo simulate`: simulates one training step under an activation plan, without a GPU, and reports its time and bytes.

The machine and the profile are the plan's, unless others are given. The trace has the format of a real run and is written by
the same writer, one file per pipeline stage.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

from memo.atomic_file import atomic_file
from memo.cli.inputs.fields import refuse_given
from memo.cli.inputs.flag_types import Flag, Force, InputFile, Json
from memo.cli.inputs.machine import Gpu, Nics, hardware_named, measured
from memo.cli.tables.simulation import print_simulation, simulation_summary
from memo.cli.terminal.file_kinds import FileKind, require_kind
from memo.cli.terminal.output_files import file_path, print_written, refuse_existing
from memo.cli.terminal.progress import WaitingLine
from memo.errors import ExitCode, UsageError
from memo.events import TierName
from memo.mip.activation import ActivationPlan, ActivationProblem, read_activation_plan, read_profile
from memo.mip.simulate import Simulation, simulate, stage_events
from memo.trace import TraceRecorder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `memo simulate`."""

    plan: Annotated[str, Flag(flags="plan", metavar=None)]
    """Activation plan in JSON, written by memo plan."""
    profile: InputFile | None = None
    """Simulate this profile, written by memo profile (default: the plan's)."""
    hardware: Gpu | None = None
    """Simulate this machine: {names}, or a JSON description (default: the plan's)."""
    doctor: InputFile | None = None
    """Simulate with the links and disks that memo doctor --json measured (default: the machine's)."""
    net: Nics | None = None
    output: Annotated[Path | None, Flag(flags="-o --output", type=file_path)] = None
    """Write the trace to FILE; for a plan of several pipeline stages FILE is an existing directory."""
    force: Force = False
    json: Json = False


def run(args: Options) -> ExitCode:
    """Simulates, writes the traces and prints; exit code 5 when the step exceeds a budget."""
    require_kind(args.plan, FileKind.ACTIVATION_PLAN)
    plan = read_activation_plan(args.plan)
    problem = _problem(plan, args)
    if args.output is not None:
        refuse_existing(*_paths(args.output, plan.problem.pipeline.stages), force=args.force)
    what = f"simulating a step of {plan.problem.profile.signature.model}"
    with WaitingLine("memo simulate", what, quiet=args.json):
        simulation = simulate(plan, problem)
    written = [] if args.output is None else _write(args.output, plan, problem, simulation, force=args.force)
    if args.json:
        summary = simulation_summary(plan, problem, simulation)
        print(json.dumps({**summary, "traces": [str(path) for path in written]}, allow_nan=False))
    else:
        print_simulation(plan, problem, simulation)
        for path in written:
            print_written(path)
        if written:
            print(f"Open the timeline: memo trace html {' '.join(map(str, written))} -o report.html")
    return ExitCode.PLAN_INVALID if simulation.overflows else ExitCode.OK


def _problem(plan: ActivationPlan, args: Options) -> ActivationProblem:
    """The plan's problem, with the profile and the hardware of the arguments."""
    problem = plan.problem
    if problem.machines:
        why = "does not go with this plan: the plan's stages are on machines that differ; plan again with another --cluster"
        refuse_given(args, "--profile --hardware --doctor --net", why)
    if args.profile is not None:
        require_kind(args.profile, FileKind.PROFILE)
        problem = dataclasses.replace(problem, profile=read_profile(args.profile))
    machine = problem.hardware if args.hardware is None else hardware_named(args.hardware)
    machine = measured(machine, args.doctor, args.net)
    return problem if machine is problem.hardware else dataclasses.replace(problem, hardware=machine)


def _paths(output: Path, count: int) -> list[Path]:
    """Trace files of a plan of `count` stages.

    Raises:
        UsageError: several stages, and `output` is no directory.
    """
    if count > 1 and not output.is_dir():
        raise UsageError(
            f"-o {str(output)!r}: the plan has {count} stages, each with its own trace; name an existing directory"
        )
    return [output / f"trace.rank{rank}.jsonl" if output.is_dir() else output for rank in range(count)]


def _write(
    output: Path, plan: ActivationPlan, problem: ActivationProblem, simulation: Simulation, *, force: bool
) -> list[Path]:
    count = len(simulation.stages)
    paths = _paths(output, count)
    for rank, path in enumerate(paths):
        events = stage_events(simulation.stages[rank], end_s=simulation.step_s)
        with atomic_file(path, overwrite=force) as sibling:
            recorder = TraceRecorder(
                sibling, rank=rank, world_size=count, meta=_meta(plan, problem, simulation, rank), capacity=len(events)
            )
            for event in events:
                recorder.emit(event)
            recorder.close()
    return paths


def _meta(plan: ActivationPlan, problem: ActivationProblem, simulation: Simulation, stage: int) -> dict[str, Any]:
    signature, prediction = problem.profile.signature, plan.stages[stage]
    simulated = simulation.stages[stage]
    rates = problem.machine_of(stage).lanes
    return {
        "command": "memo simulate",
        "simulated": True,
        "model": signature.model,
        "hardware": problem.hardware.name,
        "signature": dataclasses.asdict(signature),
        "budgets": {peak.tier: peak.budget_nbytes for peak in simulated.peaks},
        "link_bytes_per_s": {
            "d2h": rates.d2h_bytes_per_s,
            "h2d": rates.h2d_bytes_per_s,
            "nvme-write": rates.disk_write_bytes_per_s,
            "nvme-read": rates.disk_read_bytes_per_s,
        },
        # The plan predicts all bytes of the device, the trace has only those of saved tensors: not comparable.
        "plan": {
            "predicted_peak_nbytes": {
                TierName.HOST: prediction.peak_host_bytes,
                TierName.DISK: prediction.peak_disk_bytes,
            },
            "limits": "; ".join(plan.binding) or "no limit",
        },
    }
