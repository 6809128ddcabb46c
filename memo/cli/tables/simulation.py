"""Text tables of a simulated step: times beside the plan's prediction, stalls by cause, peaks beside budgets."""

from __future__ import annotations

from typing import Any

from memo.cli.tables.activation import rate_text, size_words
from memo.events import Lane, StallCause
from memo.mip.activation import ActivationPlan, ActivationProblem, StagePrediction
from memo.mip.simulate import Peak, Simulation, StageSimulation, Wait, agrees
from memo.trace import COPY_LANES, duration, percent, printable
from memo.units import format_bytes, format_tokens, text_table

DAY_S = 86_400


def print_simulation(plan: ActivationPlan, problem: ActivationProblem, simulation: Simulation) -> None:
    """Prints the tables of the slowest stage, and a line for each exceeded budget of any stage."""
    number = simulation.slowest
    stage, prediction = simulation.stages[number], plan.stages[number]
    print(_headline(problem, simulation, number))
    print(f"\n{_times(plan, problem, simulation, stage, prediction)}")
    if stage.stall_s:
        print(f"\n{_stalls(simulation, stage)}")
    print(f"\n{_peaks(stage, prediction)}")
    print(f"\n{_agreement(plan, problem, simulation)}")
    for broken, peak in simulation.overflows:
        print(f"DOES NOT FIT: {_overflow(simulation, broken, peak)}")


def simulation_summary(plan: ActivationPlan, problem: ActivationProblem, simulation: Simulation) -> dict[str, Any]:
    """Object that `--json` prints, in seconds and bytes; bytes are those of one rank."""
    return {
        "model": problem.profile.signature.model,
        "hardware": problem.hardware.name,
        "step_s": simulation.step_s,
        "predicted_step_s": plan.step_s,
        "off_percent": _off_percent(plan, simulation),
        "tokens_per_s": _tokens_per_s(problem, simulation),
        "fits": not simulation.overflows,
        "slowest_stage": simulation.slowest,
        "stages": [
            _stage_summary(problem, simulation, number, prediction) for number, prediction in enumerate(plan.stages)
        ],
    }


def _headline(problem: ActivationProblem, simulation: Simulation, number: int) -> str:
    signature = problem.profile.signature
    ways = size_words(problem)
    ways += ", tp overlapped" if signature.tp_overlap else ""
    ways += f", what moves as {problem.profile.codec} codes" if problem.profile.codec else ""
    stage = f"; stage {number}, the slowest, is shown" if len(simulation.stages) > 1 else ""
    return (
        f"{printable(signature.model)}, {signature.batch} x {format_tokens(signature.tokens)} tokens on "
        f"{printable(problem.hardware.name)}{ways}: {rate_text(problem, simulation.step_s)}{stage}"
    )


def _times(
    plan: ActivationPlan,
    problem: ActivationProblem,
    simulation: Simulation,
    stage: StageSimulation,
    prediction: StagePrediction,
) -> str:
    """Table of times; the stage's compute, communication, recompute, stalls and idle time add up to the step."""
    count = problem.pipeline.microbatches
    once_s = prediction.sync_s + problem.update.optimizer_exchange_s
    rows = [
        ("compute", stage.compute_s, prediction.compute_s * count + problem.update.optimizer_s),
        ("exposed communication", stage.communication_s, prediction.communication_s * count + once_s),
        ("recompute", stage.recompute_s, prediction.recompute_s * count),
        ("stalls", stage.stall_s, prediction.stall_s * count),
    ]
    if len(simulation.stages) > 1:
        rows.append(
            ("bubble", simulation.step_s - sum(row[1] for row in rows), plan.step_s - sum(row[2] for row in rows))
        )
    rows.append(("step", simulation.step_s, plan.step_s))
    rows = [row for row in rows if row[0] != "exposed communication" or max(row[1:]) > 0]
    return text_table(
        ("time", "simulated", "predicted", "of step"),
        [(name, _time(ours), _time(theirs), percent(_share(ours, simulation.step_s))) for name, ours, theirs in rows],
    )


def _stalls(simulation: Simulation, stage: StageSimulation) -> str:
    rows = []
    for (cause, lane), seconds in stage.stalls().items():
        by_layer = _by_layer(stage.waits, cause, lane)
        module = max(by_layer, key=by_layer.__getitem__)
        worst = f"{module} {_time(by_layer[module])}"
        share = percent(_share(seconds, simulation.step_s))
        rows.append((cause.value, lane.value, _time(seconds), share, f"{len(by_layer)}", worst))
    return text_table(("stalls", "behind", "time", "of step", "layers", "worst"), rows)


def _by_layer(waits: tuple[Wait, ...], cause: StallCause, lane: Lane) -> dict[str, float]:
    found: dict[str, float] = {}
    for wait in waits:
        if wait.cause is cause and wait.lane is lane:
            found[wait.module] = found.get(wait.module, 0.0) + wait.seconds
    return found


def _peaks(stage: StageSimulation, prediction: StagePrediction) -> str:
    predicted = prediction.peaks
    rows = [
        (
            peak.tier.value,
            format_bytes(peak.nbytes),
            format_bytes(predicted[peak.tier]),
            "-" if peak.budget_nbytes is None else format_bytes(peak.budget_nbytes),
            percent(_share(peak.nbytes, peak.budget_nbytes)),
            f"{_time(peak.t_s)}  {peak.where}",
        )
        for peak in stage.peaks
        if peak.nbytes or peak.budget_nbytes
    ]
    return text_table(("peak of a rank", "simulated", "predicted", "budget", "used", "at"), rows)


def _agreement(plan: ActivationPlan, problem: ActivationProblem, simulation: Simulation) -> str:
    off = _off_percent(plan, simulation)
    if problem is not plan.problem:
        own = plan.problem.hardware.name
        return f"The plan was made for {printable(own)} and predicts {_time(plan.step_s)} there: {off:+.1f} % here."
    verdict = "they agree" if agrees(plan, simulation) else "MORE than such plans may be: do not rely on it"
    return f"The simulated step is {off:+.2f} % off the plan's prediction: {verdict}."


def _overflow(simulation: Simulation, number: int, peak: Peak) -> str:
    stage = f"stage {number}, " if len(simulation.stages) > 1 else ""
    return (
        f"{stage}{peak.tier} in {peak.where}: {format_bytes(peak.nbytes)}, "
        f"{format_bytes(peak.over_nbytes)} more than its budget"
    )


def _off_percent(plan: ActivationPlan, simulation: Simulation) -> float:
    return round(100 * (simulation.step_s / plan.step_s - 1), 6) + 0.0 if plan.step_s else 0.0  # and no -0.0


def _time(seconds: float) -> str:
    """Duration; long ones in seconds, so that prediction and simulation can be compared."""
    return f"{seconds:,.1f} s" if seconds >= 100 else duration(seconds * 1e9)


def _tokens_per_s(problem: ActivationProblem, simulation: Simulation) -> float:
    return problem.step_tokens / simulation.step_s if simulation.step_s else 0.0


def _share(part: float, whole: float | None) -> float | None:
    return 100 * part / whole if whole else None


def _stage_summary(
    problem: ActivationProblem, simulation: Simulation, number: int, prediction: StagePrediction
) -> dict[str, Any]:
    stage = simulation.stages[number]
    predicted = prediction.peaks
    written = stage.moved_nbytes(Lane.DISK_WRITE)
    ranks = max(node.get(number, 0) for node in problem.nodes)
    return {
        "compute_s": stage.compute_s,
        "communication_s": stage.communication_s,
        "recompute_s": stage.recompute_s,
        "stall_s": stage.stall_s,
        "idle_s": simulation.step_s - stage.compute_s - stage.communication_s - stage.recompute_s - stage.stall_s,
        "stalls": [
            {
                "cause": cause.value,
                "lane": lane.value,
                "seconds": seconds,
                "seconds_by_layer": _by_layer(stage.waits, cause, lane),
            }
            for (cause, lane), seconds in stage.stalls().items()
        ],
        "peaks": [
            {
                "tier": peak.tier.value,
                "nbytes": peak.nbytes,
                "at_s": peak.t_s,
                "where": peak.where,
                "budget_nbytes": peak.budget_nbytes,
                "over_nbytes": peak.over_nbytes,
                "predicted_nbytes": predicted[peak.tier],
            }
            for peak in stage.peaks
        ],
        "moved_nbytes": {lane.value: stage.moved_nbytes(lane) for lane in COPY_LANES},
        "disk_written_bytes_per_day_and_node": ranks * written * DAY_S / simulation.step_s
        if simulation.step_s
        else 0.0,
    }
