"""Merak's shifted critical path schedule beside the schedules that memo has: the table of docs/simulate.md.

    make bench ARMS=critical_path
    python -m benchmarks.critical_path [--only 8.3B]

Lai et al. 2022 (arXiv 2206.04959): 1F1B whose last stage recomputes nothing, whose last stage but one runs its third forward
before its first backward, and which recomputes while it waits for a gradient. A lower bound of its step stands for it: with
what is planned for 1F1B every stage recomputes ahead of every backward, and neither that nor the order takes memory. Other
steps are simulated, of memo's GPT without host memory; each schedule has the microbatch that is best for it.

The paper's abstract names models of 1.5B to 20B, 64 GPUs and speedups; its layouts, microbatches and machine are in no text
that was found. So layouts are those of 4 and 8 stages that fit, on eight nodes of eight RTX 3090 (24 GB; 71 TFLOP/s by
NVIDIA's GA102 whitepaper, links as a 4090's) with one NIC of 100 Gb/s each.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.results import write_result
from memo.errors import MemoError
from memo.gpt import GPTConfig, Precision
from memo.gpt.arithmetic import RecomputeMethod, StepLayout
from memo.mip.activation import ActivationPlan, Budgets, Pipeline
from memo.mip.inputs import Hardware, Pass, PipelineSchedule, hardware_preset
from memo.mip.simulate import simulate
from memo.search import Request

SEQ, GPUS = 1024, 64
MODELS = {"1.5B": (48, 1600, 16), "2.5B": (54, 1920, 20), "8.3B": (72, 3072, 32), "20B": (44, 6144, 64)}
"""Layers, hidden size and heads: GPT-2's with heads that divide, Megatron-LM's two, GPT-NeoX-20B's."""
PUBLISHED = {"1.5B": 1.42, "2.5B": 1.39, "8.3B": 1.43, "20B": 1.61}
"""Speedups of Merak over its peers, up to; of all that it does, not of the schedule alone."""
LAYOUTS = {
    "1.5B": ((1, 4), (2, 4), (1, 8)),
    "2.5B": ((2, 4), (1, 8), (2, 8)),
    "8.3B": ((4, 4), (2, 8), (4, 8)),
    "20B": ((8, 4), (4, 8), (8, 8)),
}
"""(tp, pp)."""
SEQUENCES = (32, 128)
"""Sequences of a step, for each data-parallel rank."""
MICROBATCHES = (1, 2, 4, 8, 16)
"""Sequences of a microbatch."""
SCHEDULES = (
    (PipelineSchedule.GPIPE, None),
    (PipelineSchedule.ONE_F_ONE_B, None),
    (PipelineSchedule.INTERLEAVED, 2),
    (PipelineSchedule.INTERLEAVED, 3),
    (PipelineSchedule.ZERO_BUBBLE, 2),
    (PipelineSchedule.ZERO_BUBBLE_V, 2),
)
"""With numbers of chunks."""
NAMES = tuple(dict.fromkeys(str(schedule) for schedule, _ in SCHEDULES))
SHIFTED = "shifted"
DEVICE_SHARE = 0.95
"""Share of the memory that a plan may take."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of one stage's passes over a microbatch."""

    forward_s: float
    backward_s: float
    recompute_s: float


def shifted_order(pipeline: Pipeline, stage: int) -> list[Pass]:
    """Order of a stage's passes: 1F1B's, but the last stage but one's first backward and third forward change places."""
    order = list(pipeline.order(stage))
    if stage == pipeline.stages - 2 and pipeline.microbatches > 2:
        order[2], order[3] = order[3], order[2]
    return order


def passes_s(orders: Sequence[Sequence[Pass]], stages: Sequence[StageSeconds], send_s: float, *, ahead: bool) -> float:
    """Seconds until every stage has run its passes.

    Args:
        orders: of each stage, of one chunk.
        stages: seconds of their passes.
        send_s: seconds of a message between neighbours.
        ahead: whether a stage recomputes while it waits for a gradient, instead of when it has arrived.
    """
    count = len(stages)
    clock, at = [0.0] * count, [0] * count
    # Of forwards and of backwards: when what they send has arrived.
    arrived: list[dict[Pass, list[float]]] = [{Pass.FORWARD: [], Pass.BACKWARD: []} for _ in stages]
    while any(done < len(order) for done, order in zip(at, orders, strict=True)):
        for number, own in enumerate(stages):
            while at[number] < len(orders[number]):
                kind = orders[number][at[number]]
                step = 1 if kind is Pass.FORWARD else -1
                sent, now_s, given_s = arrived[number][kind], clock[number], 0.0
                if 0 <= number - step < count:
                    given = arrived[number - step][kind]
                    if len(given) <= len(sent):
                        break
                    given_s = given[len(sent)]
                if kind is Pass.FORWARD:
                    now_s = max(now_s, given_s) + own.forward_s
                elif ahead:
                    now_s = max(now_s + own.recompute_s, given_s) + own.backward_s
                else:
                    now_s = max(now_s, given_s) + own.recompute_s + own.backward_s
                clock[number] = now_s
                at[number] += 1
                if 0 <= number + step < count:
                    now_s = max(now_s, sent[-1] if sent else 0.0) + send_s
                sent.append(now_s)
    return max(clock)


def shifted_s(plan: ActivationPlan, stages: Sequence[StageSeconds]) -> float:
    """Lower bound of a step under the shifted critical path, given a plan under 1F1B and what its stages take."""
    problem = plan.problem
    pipeline, last = problem.pipeline, problem.update
    orders = (
        [list(pipeline.order(stage)) for stage in range(pipeline.stages)],
        [shifted_order(pipeline, stage) for stage in range(pipeline.stages)],
    )
    seconds = min(passes_s(order, stages, problem.profile.send_s, ahead=True) for order in orders)
    sync_s = min(stage.sync_s for stage in plan.stages)
    return seconds + sync_s + last.optimizer_s + last.optimizer_exchange_s


def planned_stages(plan: ActivationPlan) -> list[StageSeconds]:
    """Stages' seconds under a plan."""
    return [
        StageSeconds(
            forward_s=stage.forward_s,
            backward_s=stage.microbatch_s - stage.forward_s - stage.recompute_s,
            recompute_s=stage.recompute_s,
        )
        for stage in plan.stages
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model in a layout, with the step of a data-parallel rank."""

    model: str
    tp: int
    pp: int
    sequences: int

    def request(
        self, batch: int, schedule: PipelineSchedule, chunks: int | None, method: RecomputeMethod | None
    ) -> Request:
        """Request of a plan with so many sequences in a microbatch."""
        layers, hidden, heads = MODELS[self.model]
        config = GPTConfig(
            vocab_size=50304, hidden=hidden, layers=layers, heads=heads, kv_heads=heads, ffn=4 * hidden, max_seq=SEQ
        )
        machine = _machine()
        return Request(
            config=config,
            model=self.model,
            precision=Precision.BF16_AUTOCAST,
            tiles=(1,),
            layout=StepLayout(tokens=SEQ, batch=batch, gpus=GPUS, tp=self.tp, pp=self.pp),
            profile=None,
            machine=machine,
            budgets=Budgets(
                device_bytes=int(machine.device_bytes * DEVICE_SHARE), ranks_per_node=machine.gpus_per_node
            ),
            accumulate=self.sequences // batch,
            schedule=schedule,
            chunks=chunks,
            recompute=method,
            zero=0,
        )

    def row(self) -> dict[str, Any]:
        """Steps by schedule and microbatch, with full recompute and with memo's plans."""
        steps: dict[str, dict[str, dict[int, float]]] = {}
        for way, method in (("full", RecomputeMethod.FULL), ("planned", None)):
            found = steps.setdefault(way, {})
            for batch in MICROBATCHES:
                if self.sequences // batch >= self.pp:
                    for name, seconds in self._steps(batch, method):
                        found.setdefault(name, {})[batch] = seconds
        return dataclasses.asdict(self) | {"step_s": steps}

    def _steps(self, batch: int, method: RecomputeMethod | None) -> Iterator[tuple[str, float]]:
        for schedule, chunks in SCHEDULES:
            try:
                plan = self.request(batch, schedule, chunks, method).plan()
            except MemoError:  # it does not fit, or the schedule cannot run so few microbatches
                continue
            yield f"{schedule}-{chunks}" if chunks else str(schedule), simulate(plan).step_s
            if schedule is PipelineSchedule.ONE_F_ONE_B:
                stages = planned_stages(plan) if method is None else self._recomputed_stages(plan, batch)
                yield SHIFTED, shifted_s(plan, stages)

    def _recomputed_stages(self, plan: ActivationPlan, batch: int) -> list[StageSeconds]:
        """Stages' seconds under full recompute, which a plan counts as part of backward; the last one has none."""
        none = self.request(batch, PipelineSchedule.ONE_F_ONE_B, None, RecomputeMethod.NONE).problem().profile
        full, kept = plan.problem.profile.layer_profiles(), none.layer_profiles()
        again = [one.backward_s + one.backward_exchange_s for one in full]
        once = [one.backward_s + one.backward_exchange_s for one in kept]
        stages = []
        for stage, view in zip(planned_stages(plan), plan.problem.stages, strict=True):
            recompute_s = sum(again[index] - once[index] for index in view.indices)
            left_s = stage.backward_s - recompute_s
            is_last = view.number == self.pp - 1
            stages.append(dataclasses.replace(stage, backward_s=left_s, recompute_s=0.0 if is_last else recompute_s))
        return stages


@functools.cache
def _machine() -> Hardware:
    base = hardware_preset("rtx4090")
    network = dataclasses.replace(base.network, nics_per_node=1, nic_bytes_per_s=12.5e9)
    return dataclasses.replace(base, name="rtx3090", peak_flops=71e12, hbm_bytes_per_s=936e9, network=network)


def best_s(steps: dict[str, dict[int, float]], *names: str) -> float | None:
    """The shortest step of the schedules whose names begin so, at any microbatch."""
    return min((min(found.values()) for name, found in steps.items() if name.startswith(names)), default=None)


def gain(steps: dict[str, dict[int, float]]) -> float:
    """The best step of memo's schedules over the shifted critical path's bound; above 1 the latter may be faster."""
    best, shifted = best_s(steps, *NAMES), best_s(steps, SHIFTED)
    assert best is not None
    assert shifted is not None
    return best / shifted


def gain_at_one_microbatch(steps: dict[str, dict[int, float]]) -> float:
    """The largest such ratio where every schedule has to run the same microbatch."""
    return max(
        gain({name: {batch: found[batch]} for name, found in steps.items() if batch in found})
        for batch in steps[SHIFTED]
    )


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of Markdown; in each cell the step with full recompute and that of memo's plan."""
    columns = (*NAMES, SHIFTED)
    lines = [["model", "tp x pp", "sequences", *columns, "gain", "published"]]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        both = tuple(row["step_s"].values())
        cells = [[best_s(steps, name) for steps in both] for name in columns]
        lines.append(
            [
                row["model"],
                f"{row['tp']} x {row['pp']}",
                str(row["sequences"]),
                *(" / ".join("-" if step is None else f"{step:.2f}" for step in cell) for cell in cells),
                " / ".join(f"{gain(steps):.2f}" for steps in both),
                f"{PUBLISHED[row['model']]:.2f}",
            ]
        )
    return [f"| {' | '.join(cells)} |" for cells in lines]


def main(arguments: Sequence[str]) -> int:
    """Simulates each case."""
    parser = argparse.ArgumentParser(
        prog="critical_path", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="models whose name has this text")
    only = parser.parse_args(arguments).only
    cases = [
        Case(model=model, tp=tp, pp=pp, sequences=sequences)
        for model, layouts in LAYOUTS.items()
        for tp, pp in layouts
        for sequences in SEQUENCES
        if only in model
    ]
    rows: list[dict[str, Any]] = []
    for case in cases:
        rows.append(case.row())
        print(table(rows)[-1], flush=True)
        path = write_result("critical-path", {"published": PUBLISHED, "rows": rows})
    print("\n".join(table(rows)))
    most = max(gain_at_one_microbatch(row["step_s"]["planned"]) for row in rows)
    print(f"Largest gain of memo's plans where all schedules have the same microbatch: {most:.2f}")
    print(f"\nWrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
