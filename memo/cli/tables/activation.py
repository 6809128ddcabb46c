"""Text tables of activation plans, shared by `memo plan`, `memo show` and `memo check`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from memo.cli.tables.layer_classes import classes_table
from memo.gpt.arithmetic import is_of_gpt
from memo.mip.activation import (
    ActivationPlan,
    ActivationProblem,
    DeviceMemory,
    LayerPlan,
    MemoryUse,
    StageMachine,
    StagePrediction,
    highest_memory,
)
from memo.mip.inputs import Profile, Role, free_swap_tokens
from memo.trace import printable
from memo.units import format_bytes, format_duration, format_tokens, format_wear, text_table

T = TypeVar("T")
_RUNS = 6  # runs of layers of one plan that its row names
_REASON = 300  # characters of a reason, which a plan's file has in words
USES = {
    MemoryUse.GRADIENTS: "gradients of the weights",
    MemoryUse.OPTIMIZER: "optimizer state",
    MemoryUse.GATHERED: "gathered weights",
    MemoryUse.CAST: "weights cast for matmuls",
    MemoryUse.HEAD: "head and logits",
    MemoryUse.SAVED: "saved tensors kept",
    MemoryUse.MESSAGES: "messages in flight",
    MemoryUse.OTHER: "not told apart",
}
"""Names of uses in the memory table, where they differ from those in JSON."""

_CAUSES = ("d2h", "disk_write", "h2d", "disk_read")
MUCH = 0.2
"""Fraction of the layers' time in collectives from which parallelism across nodes is warned about."""
DEVICE_SHARE = 0.95
"""Fraction of a GPU's memory that is the default budget."""
MOST_HOST = 0.8
"""Fraction of a node's host memory from which its use is warned about: the default budget."""
_CAUSE_WORDS = ("copy to host", "disk write", "copy from host", "disk read")


def activation_table(plan: ActivationPlan) -> str:
    """Tables of the tiers, a GPU's memory, the step's time and the treatment of the layers, and what binds."""
    memory = memory_table(plan.problem, highest_memory(plan.problem, plan.layers))
    parts = [_headline(plan), _tiers(plan), _stages(plan), memory, _times(plan)]
    parts += [_layers(plan), classes_table(plan), _reasons(plan)]
    return "\n\n".join(part for part in parts if part)


def activation_summary(plan: ActivationPlan) -> dict[str, Any]:
    """Object that `--json` prints, in seconds and bytes; host and disk bytes are those of one rank."""
    problem = plan.problem
    return {
        "model": problem.profile.signature.model,
        "hardware": problem.hardware.name,
        "tokens": problem.profile.signature.tokens,
        "layers": len(plan.layers),
        "mlp_tiles": problem.profile.mlp_tiles,
        "codec": problem.profile.codec,
        "status": "declined" if plan.declined else "optimal",
        "declined": plan.declined,
        "step_s": plan.step_s,
        **utilisation(plan),
        "full_swap_is_free_from_tokens": _free_swap_tokens(problem),
        "budgets": {key: value for key, value in dataclasses.asdict(problem.budgets).items() if value is not None},
        "stages": [
            {
                **dataclasses.asdict(stage),
                "stall_s": stage.stall_s,
                "microbatch_s": stage.microbatch_s,
                "layers": len(view.indices),
                "hardware": view.machine.hardware.name,
                "device_budget_bytes": view.machine.budgets.device_bytes,
            }
            for view, stage in zip(problem.stages, plan.stages, strict=True)
        ],
        "memory": memory_summary(problem, highest_memory(problem, plan.layers)),
        "embedding_exchange": None
        if problem.profile.embedding_exchange is None
        else dataclasses.asdict(problem.profile.embedding_exchange),
        "binding": list(plan.binding),
        "warnings": _warnings(plan),
        "layer_plans": [
            {"first": first, "last": last, **dataclasses.asdict(layer)} for first, last, layer in _runs(plan.layers)
        ],
    }


def memory_summary(problem: ActivationProblem, memory: DeviceMemory) -> dict[str, Any]:
    """Object of a GPU's memory at its peak: bytes by use, which add up to `peak_bytes`."""
    return {
        "stage": memory.stage,
        "where": memory.where,
        "phase": memory.phase or None,
        "uses_bytes": {str(use): memory.uses.get(use, 0) for use in MemoryUse},
        "peak_bytes": memory.nbytes,
        "budget_bytes": problem.machine_of(memory.stage).budgets.device_bytes,
        "device_bytes": problem.machine_of(memory.stage).hardware.device_bytes,
    }


def memory_table(problem: ActivationProblem, memory: DeviceMemory) -> str:
    """Table of a GPU's memory at its peak by use; the rows, as rounded, add up to the peak."""
    machine = problem.machine_of(memory.stage)
    budget, there = machine.budgets.device_bytes, machine.hardware.device_bytes
    unit, size = ("GiB", 1 << 30) if memory.nbytes >= 1 << 30 else ("MiB", 1 << 20)
    peak, rows = _rounded(memory.uses, size)
    of = f" of stage {memory.stage}" if problem.pipeline.stages > 1 else ""
    instant = f"at {memory.where}" + (f", {memory.phase}" if memory.phase else "")
    lines = [(use_name(use), f"{hundredths / 100:,.2f}") for use, hundredths in rows.items()]
    lines.append(("peak", f"{peak / 100:,.2f}"))
    left = budget - memory.nbytes
    lines.append(("left of the budget" if left >= 0 else "above the budget", f"{abs(left) / size:,.2f}"))
    if budget < there:
        why = ": CUDA, the allocator's gaps" if budget == int(DEVICE_SHARE * there) else ""
        lines.append((f"outside the budget{why}", f"{(there - budget) / size:,.2f}"))
    return text_table((f"memory of a GPU{of} at its peak, {instant}", unit), lines)


def use_name(use: MemoryUse) -> str:
    """Name of a use in tables and sentences."""
    return USES.get(use, str(use).replace("_", " "))


def _rounded(uses: Mapping[MemoryUse, int], size: int) -> tuple[int, dict[MemoryUse, int]]:
    """Hundredths of a unit of the sum, and of each use, so rounded that they add up; without those that are 0."""
    exact = {use: 100 * nbytes / size for use, nbytes in uses.items()}
    peak = round(100 * sum(uses.values()) / size)
    rows = {use: int(hundredths) for use, hundredths in exact.items()}
    for use in sorted(rows, key=lambda use: rows[use] - exact[use])[: peak - sum(rows.values())]:
        rows[use] += 1
    return peak, {use: hundredths for use, hundredths in rows.items() if hundredths}


def utilisation(plan: ActivationPlan) -> dict[str, float]:
    """Tokens per second of the job and of a GPU, and mfu_causal, mfu_full and hfu as fractions of the machines' peak."""
    problem, profile = plan.problem, plan.problem.profile
    rate = problem.step_tokens / plan.step_s if plan.step_s else 0.0
    peak = problem.gpus * problem.hardware.peak_flops
    layers = zip(profile.layer_profiles(), plan.layers, strict=True)
    repeated = sum(layer.at(own.point).recompute_flops + layer.tiled_flops for layer, own in layers)
    repeated *= problem.gpus / problem.pipeline.stages * problem.pipeline.microbatches
    causal = profile.model_flops_causal_per_token * rate / peak
    return {
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": rate / problem.gpus,
        "mfu_causal": causal,
        "mfu_full": profile.model_flops_full_per_token * rate / peak,
        "hfu": causal + (repeated / plan.step_s / peak if plan.step_s else 0.0),
    }


def rate_text(problem: ActivationProblem, step_s: float) -> str:
    """Tokens per second of the job, and of one of its GPUs."""
    rate = problem.step_tokens / step_s if step_s else 0.0
    each = f" on {problem.gpus} GPUs, {rate / problem.gpus:,.0f} each" if problem.gpus > 1 else ""
    return f"{rate:,.0f} tokens/s{each}"


def size_words(problem: ActivationProblem) -> str:
    """Sizes of the layout above 1, each after a comma: `, dp 2, tp 4`."""
    signature, pipeline = problem.profile.signature, problem.pipeline
    sizes = {
        "dp": problem.replicas,
        "tp": signature.tp,
        "cp": signature.cp,
        "ep": signature.ep,
        "pp": pipeline.stages,
        "microbatches": pipeline.microbatches,
    }
    return "".join(f", {name} {size}" for name, size in sizes.items() if size > 1)


def _headline(plan: ActivationPlan) -> str:
    signature, pipeline = plan.problem.profile.signature, plan.problem.pipeline
    named = size_words(plan.problem)
    tiles = plan.problem.profile.mlp_tiles
    chunks = f" of {pipeline.chunks} chunks" if pipeline.chunks > 2 else ""
    named += f" ({pipeline.schedule}{chunks})" if pipeline.chunks > 1 else ""
    named += ", tp overlapped" if signature.tp_overlap else ""
    named += f", MLPs in {tiles} tiles" if tiles > 1 else ""
    named += "" if plan.problem.overlap else ", compute waits for copies"
    codec = plan.problem.profile.codec
    named += f", what moves as {codec} codes" if codec else ""
    own = "memo's GPT, " if is_of_gpt(plan) else ""
    role = plan.problem.profile.role
    profile = "times by arithmetic" if role is Role.DERIVED else f"profile: {role}"
    return (
        f"{printable(signature.model)}, {len(plan.layers)} layers, {signature.batch} x "
        f"{format_tokens(signature.tokens)} tokens in {signature.dtype} on {printable(plan.problem.hardware.name)}{named} "
        f"({own}{profile})"
    )


def _of_node(
    plan: ActivationPlan, figure: Callable[[StagePrediction], int], there: Callable[[StageMachine], int]
) -> tuple[int, int]:
    """Bytes that a node has and that are used, of the node with the smallest part left."""
    stages = plan.problem.stages
    nodes = (
        (there(stages[min(node)].machine), sum(ranks * figure(plan.stages[stage]) for stage, ranks in node.items()))
        for node in plan.problem.nodes
    )
    return max(nodes, key=lambda pair: (pair[1] / pair[0] if pair[0] else 0.0, pair[1]))


def _tiers(plan: ActivationPlan) -> str:
    problem = plan.problem
    machines = [stage.machine for stage in problem.stages]
    devices = [
        (machine.budgets.device_bytes, stage.peak_device_bytes)
        for machine, stage in zip(machines, plan.stages, strict=True)
    ]
    rows = [("device, a GPU", *max(devices, key=lambda pair: pair[1] / pair[0] if pair[0] else 0.0))]
    rows.append(("host, a node", *_of_node(plan, lambda one: one.peak_host_bytes, lambda one: one.budgets.host_bytes)))
    rows.append(("disk, a node", *_of_node(plan, lambda one: one.peak_disk_bytes, lambda one: one.budgets.disk_bytes)))
    lines = [
        (name, format_bytes(budget), format_bytes(peak), f"{100 * (1 - peak / budget):.1f} %" if budget else "-")
        for name, budget, peak in rows
        if budget
    ]
    shown = text_table(("tier", "budget", "peak", "headroom"), lines)
    _, written = _of_node(plan, lambda stage: stage.disk_written_bytes, lambda _: 0)
    if written:
        a_day = written / plan.step_s * 86400
        limit = problem.budgets.disk_wear_bytes_per_day
        shown += f"\ndisk wear: {format_bytes(written)} a step and node, {format_wear(a_day)}"
        shown += "" if limit is None else f" (allowed {limit / 1e12:.3g} TB a day)"
    return shown


def _stages(plan: ActivationPlan) -> str:
    """Table of the stages, where they are not alike."""
    problem = plan.problem
    if not (problem.machines or problem.pipeline.layers):
        return ""
    rows = []
    for view, stage in zip(problem.stages, plan.stages, strict=True):
        machine, sizes = view.machine, " + ".join(str(len(chunk)) for chunk in view.chunks)
        peak, budget = stage.peak_device_bytes, machine.budgets.device_bytes
        rows.append(
            (
                f"{view.number}",
                sizes,
                printable(machine.hardware.name),
                step_time(stage.microbatch_s),
                step_time(machine.send_s) if view.number + 1 < len(plan.stages) else "-",
                f"{format_bytes(peak)} of {format_bytes(budget)}",
            )
        )
    return text_table(("stage", "layers", "GPU", "a microbatch", "message to the next", "device"), rows)


def _times(plan: ActivationPlan) -> str:
    number, stage = max(enumerate(plan.stages), key=lambda pair: pair[1].microbatch_s)
    microbatches = plan.problem.pipeline.microbatches
    causes = [
        (f"stall: {word}", getattr(stage, f"stall_{cause}_s"))
        for cause, word in zip(_CAUSES, _CAUSE_WORDS, strict=True)
    ]
    causes.insert(0, ("exposed communication", stage.communication_s))
    causes.insert(0, ("coding and decoding", stage.coding_s or 0.0))
    rows = [("compute", stage.compute_s), ("recompute", stage.recompute_s), *((n, s) for n, s in causes if s > 0)]
    rows = [(name, seconds * microbatches) for name, seconds in rows]
    rows.append(("optimizer", plan.problem.update.optimizer_s))
    once = [
        ("exposed reduction of gradients", stage.sync_s),
        ("gather of updated weights", plan.problem.update.optimizer_exchange_s),
    ]
    rows += [(name, seconds) for name, seconds in once if seconds > 0]
    if len(plan.stages) > 1:
        rows.append(("bubble: waiting for other stages", max(plan.step_s - sum(seconds for _, seconds in rows), 0.0)))
    rows.append(("step", plan.step_s))
    of = f"time of stage {number}, the slowest" if len(plan.stages) > 1 else "time"
    lines = [(name, step_time(seconds), _share(seconds, plan.step_s)) for name, seconds in rows]
    figures = utilisation(plan)
    shown = (
        f"{text_table((of, 'predicted', 'of step'), lines)}\n{_embedding(plan.problem.profile)}"
        f"{rate_text(plan.problem, plan.step_s)}; mfu_causal {figures['mfu_causal']:.1%}, "
        f"mfu_full {figures['mfu_full']:.1%}"
    )
    if figures["mfu_full"] > 1:
        shown += " (above 100 %: it counts attention's masked half, too, which no kernel computes)"
    if _is_fixed(plan):
        return f"{shown}; a fixed method's recompute counts as compute"
    return f"{shown}, hfu {figures['hfu']:.1%}; saving memory adds {added(plan):.2%} to the computation"


def _embedding(profile: Profile) -> str:
    """Line on the exchange of the embedding's gradient, where there are two ways."""
    exchange = profile.embedding_exchange
    if exchange is None:
        return ""
    ways = [("dense", exchange.dense_s), ("sparse", exchange.sparse_s)]
    (way, seconds), (other, other_s) = reversed(ways) if exchange.sparse else ways
    memory = "" if not exchange.resident_bytes else f"; sparse holds {format_bytes(exchange.resident_bytes)} more"
    return f"embedding gradients: {way} exchange, {_short(seconds)} ({other} {_short(other_s)}{memory})\n"


def _short(seconds: float) -> str:
    """A time that may be below a millisecond."""
    return f"{1e3 * seconds:.2g} ms" if seconds < 0.01 else format_duration(seconds)


def _is_fixed(plan: ActivationPlan) -> bool:
    """Whether layers recompute by a fixed method, which leaves a plan no choice."""
    profile = plan.problem.profile
    return profile.role is Role.DERIVED and all(len(layer.points) == 1 for layer in profile.classes)


def _layers(plan: ActivationPlan) -> str:
    if plan.declined:
        kept = "every layer keeps what its fixed method saves" if _is_fixed(plan) else "every layer keeps everything"
        return f"nothing to move: {printable(plan.declined, limit=_REASON)}; {kept}"
    numbers: dict[tuple[str, ...], list[str]] = {}
    for first, last, row in _runs([_layer_row(layer) for layer in plan.layers]):
        numbers.setdefault(row, []).append(f"{first}" if first == last else f"{first} to {last}")
    rows = [(", ".join(runs[:_RUNS]) + (", ..." if len(runs) > _RUNS else ""), *row) for row, runs in numbers.items()]
    return text_table(("layers", "point", "bytes: kept", "host", "disk"), rows)


def _layer_row(layer: LayerPlan) -> tuple[str, ...]:
    shares = (f"{100 * share:.1f} %" if share else "-" for share in (layer.kept, layer.host, layer.disk))
    return (layer.point, *shares)


def _reasons(plan: ActivationPlan) -> str:
    problem = plan.problem
    lines = [f"why not faster: {printable(reason, limit=_REASON)}" for reason in plan.binding]
    lines += [f"warning: {words}" for words in _warnings(plan)]
    length = _free_swap_tokens(problem)
    if length is not None and not _is_fixed(plan):
        lines.append(f"full swap hides behind compute {f'from {length:,} tokens' if length else 'at any length'}")
    return "\n".join(lines)


def _warnings(plan: ActivationPlan) -> list[str]:
    there, used = _of_node(plan, lambda one: one.peak_host_bytes, lambda one: one.hardware.host_bytes)
    full = (
        f"{format_bytes(used)} of a node's {format_bytes(there)} of host memory are used, more than {MOST_HOST:.0%}; "
    )
    full += "the program and the page cache need the rest"
    return [*_beyond_nodes(plan), *([full] if used > MOST_HOST * there else [])]


def _beyond_nodes(plan: ActivationPlan) -> list[str]:
    """Sentences on tensor and context parallelism whose ranks are on several nodes, where that costs much of the step."""
    problem = plan.problem
    signature, per_node = problem.profile.signature, problem.hardware.gpus_per_node
    ranks = signature.tp * signature.cp
    exchanged = sum(layer.forward_exchange_s + layer.backward_exchange_s for layer in problem.profile.layer_profiles())
    worked = sum(layer.forward_s + layer.backward_s for layer in problem.profile.layer_profiles())
    if ranks <= per_node or exchanged < MUCH * worked:
        return []
    named = " and ".join(f"{name} {size}" for name, size in (("tp", signature.tp), ("cp", signature.cp)) if size > 1)
    return [
        f"{named} {'leave' if min(signature.tp, signature.cp) > 1 else 'leaves'} the node of {per_node} GPUs: its "
        f"collectives take {exchanged / worked:.0%} of the layers' time; use at most {per_node} ranks for them, "
        "and pipelines or data parallelism between nodes"
    ]


def _free_swap_tokens(problem: ActivationProblem) -> int | None:
    """Length from which a full swap is free; None also where the stages' machines are not alike."""
    if problem.machines:
        return None
    return free_swap_tokens(problem.profile, problem.hardware, ranks_per_node=problem.budgets.ranks_per_node)


def _runs(layers: Sequence[T]) -> list[tuple[int, int, T]]:
    """Runs of equal neighbours: number of the first, of the last, and what they are."""
    runs, first = [], 0
    for layer, members in itertools.groupby(layers):
        last = first + sum(1 for _ in members) - 1
        runs.append((first, last, layer))
        first = last + 1
    return runs


def added(plan: ActivationPlan) -> float:
    """Seconds of recompute, MLPs in tiles, coding and stalls on the slowest stage, over its computation's without them."""
    view, stage = max(zip(plan.problem.stages, plan.stages, strict=True), key=lambda pair: pair[1].microbatch_s)
    tiled = sum(layer.tiled_s for layer in view.layers)
    more = stage.recompute_s + tiled + (stage.coding_s or 0.0) + stage.stall_s
    return more / (stage.compute_s - tiled) if stage.compute_s > tiled else 0.0


def step_time(seconds: float) -> str:
    """A duration; long ones in seconds, so that two can be compared."""
    return f"{seconds:,.1f} s" if seconds >= 100 else format_duration(seconds)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
