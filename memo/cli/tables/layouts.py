"""Text tables and the JSON object of `memo plan --search`: the best layouts, why the first one wins, what was proven.

docs/search.md has the object's keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from memo.cli.tables.activation import (
    activation_summary,
    activation_table,
    memory_summary,
    step_time,
    use_name,
    utilisation,
)
from memo.cli.tables.searched_cluster import cluster_summary, cluster_words, used_share
from memo.mip.activation import highest_memory
from memo.search import (
    Bound,
    Candidate,
    Closed,
    Found,
    Item,
    Launch,
    LongestFit,
    Planned,
    Rival,
    Shape,
    Shares,
    Smallest,
    Space,
    rivals,
    runs_under_memo_train,
    step_items,
)
from memo.units import format_bytes, format_tokens, text_table

FORMAT, VERSION = "memo-search", 1
ZERO_3_NODES = 64
"""Nodes from which ZeRO 3 over all of them is warned about."""
CLOSE = 1e-3
"""Fraction of a step below which an item's difference is not told."""
_WORDS = {
    Bound.COMPUTE: "work alone",
    Bound.COMMUNICATION: "work and collectives",
    Bound.BUBBLE: "these and the pipeline's waits",
    Bound.BUDGET: "and what must be moved or recomputed",
    Bound.MEMORY: "does not fit",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Findings of a search and what is told of them."""

    found: Found
    """Not without a plan."""
    simulated_s: Mapping[Candidate, float]
    """Simulated seconds of a step of each plan that is shown."""
    launch: Launch | None
    """Launch lines of `written`."""
    not_trained: str | None
    """Reason why memo train does not train what is planned."""
    written: Planned
    """The plan that -o writes."""


def search_table(answer: Answer, *, output: str | None, seconds: float) -> str:
    """The answer as text.

    Args:
        answer: the answer.
        output: the file of -o; None: the plan is not written.
        seconds: of the search.
    """
    found, written = answer.found, answer.written
    parts = [_headline(found.space), _best_table(found, answer.simulated_s), _memory_table(found), _why_table(found)]
    parts += [_proof(found, seconds), f"plan of {_name(found, written)}:\n\n{activation_table(written.plan)}"]
    parts += [f"warning: {words}" for words in search_warnings(found)]
    parts.append(_launch_words(answer, output))
    return "\n\n".join(parts)


def search_summary(answer: Answer) -> dict[str, Any]:
    """The answer as an object."""
    found, written, launch, simulated_s = answer.found, answer.written, answer.launch, answer.simulated_s
    space = found.space
    return {
        "format": FORMAT,
        "version": VERSION,
        "status": "optimal",
        **cluster_summary(space),
        "space": {
            "layouts": len(space.shapes),
            "candidates": found.candidates,
            "moved": found.moved,
            "left_out": space.left_out,
            "fixed": {name: value if isinstance(value, int) else str(value) for name, value in space.fixed.items()},
        },
        "proof": {
            "planned": len(found.planned),
            "without_plan": len(found.without_plan),
            "pruned": {str(bound): found.pruned.get(bound, 0) for bound in Bound},
            "smallest_bound_s": found.smallest_bound_s,
        },
        "best": [_entry(found, one, simulated_s) for one in found.best],
        "runs": None if found.runnable is None else _entry(found, found.runnable, simulated_s),
        "written": _candidate_summary(written.candidate, space),
        "plan": activation_summary(written.plan),
        "why": [_rival_summary(rival, space) for rival in rivals(found)],
        "launch": None
        if launch is None
        else {"torchrun": launch.torchrun, "slurm": launch.slurm, "train": list(launch.train)},
        "not_trained": answer.not_trained,
        "warnings": search_warnings(found),
        "points": _points(found),
    }


def search_warnings(found: Found) -> list[str]:
    """Sentence on ZeRO 3 over more nodes than it is published to be fast on, where the best layout has it."""
    best = found.best[0].candidate
    nodes = -(-(best.sharded_over or best.shape.dp * best.shape.cp) * best.shape.tp // found.space.gpus_per_node)
    words = (
        f"number 1 has ZeRO 3 over {nodes} nodes; published are 173 to 186 TFLOP/s a GPU for 175B on 128 to 512 A100, "
    )
    words += "at most 64 nodes (PyTorch FSDP, arXiv 2304.11277); jitter between ranks is not modelled"
    return [words] if best.zero == 3 and nodes > ZERO_3_NODES else []


def longest_words(longest: LongestFit) -> str:
    """Two sentences: the longest sequence with a layout that holds it, and what binds."""
    tokens, layout = longest.tokens, _shape_words(longest.candidate.shape)
    words = f"longest sequence that fits: {format_tokens(tokens)} tokens ({tokens:,}), with {layout}"
    if longest.binds is None:
        return f"{words}\nlonger ones were not tried"
    return f"{words}\n{longest.tile:,} tokens more do not fit it: {longest.binds.replace('no plan fits: ', '')}"


def smallest_table(space: Space, smallest: Smallest | None) -> tuple[str, dict[str, Any]]:
    """Message for a cluster that holds none of its layouts, and what `--json` adds to it."""
    tokens = format_tokens(space.request.layout.tokens)
    words = f"no layout of {space.request.model} at {tokens} tokens fits on {cluster_words(space)}"
    summary: dict[str, Any] = cluster_summary(space)
    if smallest is None:
        return f"{words}: the host has no room for the optimizer's state", summary
    memory = smallest.misfit.memory
    use = max(memory.uses, key=lambda use: memory.uses[use])
    budget = smallest.misfit.problem.budgets.device_bytes
    shown = _shape_words(smallest.candidate.shape)
    words += (
        f": {shown} lacks least, needs {format_bytes(memory.nbytes, up=True)} of a GPU whose budget is "
        f"{format_bytes(budget, down=True)}, and {format_bytes(memory.uses[use])} of it are {use_name(use)}"
    )
    options = []
    if smallest.nodes is not None:
        options.append(f"--nodes {smallest.nodes}")
    flags = {"host": "--host", "disk": "--disk-budget", "device": "--device"}
    for tier, flag in flags.items():
        nbytes = smallest.least_bytes.get(tier)
        if nbytes is not None and (tier != "device" or nbytes <= space.request.machine.device_bytes):
            options.append(f"{flag} {format_bytes(nbytes, up=True).replace(' ', '')}")
    words += f"; it fits with {' or '.join(options)}" if options else "; no number of nodes that was tried fits"
    least = {"nodes": smallest.nodes, "least_budgets_bytes": dict(smallest.least_bytes)}
    binding = {"use": str(use), "bytes": memory.uses[use], "where": memory.where}
    return words, {**summary, **least, "binds": binding, "layout": _candidate_summary(smallest.candidate, space)}


# The cluster and its layouts in words.


def _headline(space: Space) -> str:
    request = space.request
    step = f"{space.global_batch} x {format_tokens(request.layout.tokens)} tokens a step"
    return f"{request.model}, {step} in {request.precision} on {cluster_words(space)}"


def _shape_words(shape: Shape) -> str:
    named = [f"{name} {getattr(shape, name)}" for name in ("pp", "dp", "cp", "tp", "ep") if getattr(shape, name) > 1]
    return (", ".join(named) or "one GPU") + " in a ring" * shape.ring


def _schedule_words(candidate: Candidate) -> str:
    if candidate.shape.pp == 1:
        return "-"
    chunks = f" of {candidate.chunks}" if candidate.chunks > 2 else ""
    return f"{candidate.schedule}{chunks}{', uneven' * bool(candidate.stage_layers)}"


def _name(found: Found, planned: Planned) -> str:
    """Place among the best, such as `number 1`; of a plan that is not among them its ranks and sharding."""
    best = [one.candidate for one in found.best]
    if planned.candidate in best:
        return f"number {best.index(planned.candidate) + 1}"
    return (
        f"{_shape_words(planned.candidate.shape)} with {planned.candidate.sharding}, which is not among the best above"
    )


# Tables.


def _best_table(found: Found, simulated_s: Mapping[Candidate, float]) -> str:
    placed = [found.space.placement(one.candidate) for one in found.best]
    header = (
        "layout",
        "pp",
        "dp",
        "cp",
        "tp",
        "schedule",
        "sharding",
        "microbatch",
        "step",
        "simulated",
        "tokens/s",
        "mfu_causal",
        "bubble",
        "communication",
        "does",
        *(["placement"] if placed[0] else []),
    )
    rows = []
    for number, (one, placement) in enumerate(zip(found.best, placed, strict=True), 1):
        shape, setting, items = one.candidate.shape, one.candidate.setting, step_items(one.plan)
        figures = utilisation(one.plan)
        rows.append(
            (
                f"{number}",
                *shape.columns,
                _schedule_words(one.candidate),
                one.candidate.sharding,
                f"{setting.batch} x {setting.accumulate}",
                step_time(one.step_s),
                step_time(simulated_s[one.candidate]),
                f"{figures['tokens_per_s']:,.0f}",
                f"{figures['mfu_causal'] * used_share(found.space, one):.1%}",
                _share(items[Item.BUBBLE], one.step_s),
                _share(items[Item.COMMUNICATION] + items[Item.REDUCTION], one.step_s),
                _does(one),
                *([placement.describe()] if placement else []),
            )
        )
    return text_table(header, rows)


def _does(one: Planned) -> str:
    """Fate of the bytes that layers save, in a few words."""
    if one.plan.declined:
        words = "keeps all"
    else:
        shares = Shares.of(one.plan)
        again = max(1 - shares.kept - shares.host - shares.disk, 0.0)
        parts = {"kept": shares.kept, "host": shares.host, "disk": shares.disk, "again": again}
        words = ", ".join(f"{name} {100 * part:.0f} %" for name, part in parts.items() if part >= 0.005)
    tiles = one.plan.problem.profile.mlp_tiles
    return words + (f", MLPs in {tiles} tiles" if tiles > 1 else "")


def _memory_table(found: Found) -> str:
    uses: dict[Any, None] = {}
    memories = []
    for one in found.best:
        memory = highest_memory(one.plan.problem, one.plan.layers)
        memories.append(memory)
        uses.update(dict.fromkeys(memory.uses))
    header = ("memory of a GPU, GiB", *map(use_name, uses), "peak", "budget", "host, a node", "disk, a node")
    rows = []
    for number, (one, memory) in enumerate(zip(found.best, memories, strict=True), 1):
        gib = [f"{memory.uses.get(use, 0) / (1 << 30):,.1f}" for use in uses]
        budget = one.plan.problem.machine_of(memory.stage).budgets.device_bytes
        sizes = [f"{nbytes / (1 << 30):,.1f}" for nbytes in (memory.nbytes, budget)]
        rows.append((str(number), *gib, *sizes, *map(format_bytes, _of_node(one))))
    return text_table(header, rows)


def _of_node(one: Planned) -> tuple[int, int]:
    """Bytes of host memory and disk on the node that has most."""
    stages, nodes = one.plan.stages, one.plan.problem.nodes
    host = max(sum(ranks * stages[stage].peak_host_bytes for stage, ranks in node.items()) for node in nodes)
    disk = max(sum(ranks * stages[stage].peak_disk_bytes for stage, ranks in node.items()) for node in nodes)
    return host, disk


def _why_table(found: Found) -> str:
    rows = []
    best = found.best[0]
    for rival in rivals(found):
        name = "runner-up" if rival.planned in found.best[1:2] else f"best of {rival.family}"
        cells = [_difference(rival.items.get(item, math.nan), best.step_s) for item in Item]
        least = "" if rival.planned is not None else "at least "
        why = "" if rival.kind is None else f"{rival.kind} bound"
        rows.append((f"{name}: {_shape_words(rival.shape)}", f"{least}+{step_time(rival.slower_s)}", *cells, why))
    if not rows:
        return "nothing else fits"
    return text_table(("why number 1 wins: a step of", "takes longer by", *Item, "proven by"), rows)


def _difference(seconds: float, step_s: float) -> str:
    if math.isnan(seconds) or abs(seconds) < CLOSE * step_s:
        return "-"
    return f"{'+' if seconds > 0 else '-'}{step_time(abs(seconds))}"


def _proof(found: Found, seconds: float) -> str:
    space = found.space
    lines = [
        f"{found.candidates:,} ways to run the step in {len(space.shapes):,} layouts"
        + f", and {found.moved:,} with other numbers of layers" * bool(found.moved)
        + f": {len(found.planned):,} planned in {seconds:,.1f} s, {len(found.without_plan):,} found to have no plan, all "
        "others proven by bounds to be slower than those above, or not to fit:"
    ]
    rows = [(f"{kind}: {_WORDS[kind]}", f"{count:,}") for kind, count in found.pruned.items()]
    if rows:
        lines.append(text_table(("bound", "ways"), rows))
    if found.smallest_bound_s is not None:
        lines.append(f"smallest bound of what was not planned: {step_time(found.smallest_bound_s)}")
    if space.left_out:
        out = ", ".join(f"{why} ({count:,})" for why, count in space.left_out.items())
        lines.append(f"layouts left out: {out}")
    return "\n".join(lines)


def _launch_words(answer: Answer, output: str | None) -> str:
    found, launch, not_trained, written = answer.found, answer.launch, answer.not_trained, answer.written
    if launch is None:
        return f"no launch line: {not_trained}" if not_trained else "no launch line: memo train shards by ZeRO 3 alone"
    lines = []
    if written.candidate != found.best[0].candidate:
        lines.append(
            f"number 1 shards by {found.best[0].candidate.sharding}, and memo train by ZeRO 3 alone: the fastest that it "
            f"runs is {_shape_words(written.candidate.shape)}, in {step_time(written.step_s)}"
        )
    first = "" if output else "no plan was written; add -o plan.json, then "
    if launch.slurm is None:
        lines += [f"{first}run it:", launch.torchrun]
    else:
        lines += [f"{first}run it: {launch.torchrun}", f"by Slurm: {launch.slurm}"]
    return "\n".join(lines)


def _share(part: float, whole: float) -> str:
    return f"{abs(part) / whole:.1%}" if whole and abs(part) >= 5e-4 * whole else "-"


# The object.


def _shape_summary(shape: Shape) -> dict[str, Any]:
    attention = None if shape.cp == 1 else "ring" if shape.ring else "ulysses"
    sizes = {name: getattr(shape, name) for name in ("pp", "dp", "cp", "tp", "ep", "gpus")}
    return {**sizes, "cp_attention": attention}


def _candidate_summary(candidate: Candidate, space: Space) -> dict[str, Any]:
    placement = space.placement(candidate)
    placed = {} if placement is None else {"placement": placement.describe(), "places": placement.named_places}
    return {
        **_shape_summary(candidate.shape),
        "family": candidate.shape.family,
        "schedule": str(candidate.schedule) if candidate.shape.pp > 1 else None,
        "chunks": candidate.chunks,
        "stage_layers": list(candidate.stage_layers) or None,
        "zero": candidate.zero if candidate.shape.dp * candidate.shape.cp > 1 else None,
        "sharded_over": candidate.sharded_over,
        "sparse_embedding": candidate.sparse_embedding,
        "batch": candidate.setting.batch,
        "accumulate": candidate.setting.accumulate,
        "memo_train": runs_under_memo_train(candidate),
        **placed,
    }


def _entry(found: Found, one: Planned, simulated_s: Mapping[Candidate, float]) -> dict[str, Any]:
    plan = one.plan
    figures = utilisation(plan)
    host, disk = _of_node(one)
    used = used_share(found.space, one)
    shares = Shares.of(plan)
    return {
        **_candidate_summary(one.candidate, found.space),
        "mlp_tiles": plan.problem.profile.mlp_tiles,
        "step_s": one.step_s,
        "simulated_step_s": simulated_s[one.candidate],
        "bound_s": one.bound_s,
        "tokens_per_s": figures["tokens_per_s"],
        **{name: figures[name] * used for name in ("mfu_causal", "mfu_full", "hfu")},
        "time_s": {str(item): seconds for item, seconds in step_items(plan).items()},
        "memory": memory_summary(plan.problem, highest_memory(plan.problem, plan.layers)),
        "host_bytes": host,
        "disk_bytes": disk,
        "does": {
            "declined": plan.declined,
            "kept": shares.kept,
            "host": shares.host,
            "disk": shares.disk,
            "recomputed": max(1 - shares.kept - shares.host - shares.disk, 0.0),
            "alpha": shares.alpha,
        },
        "stages": [
            {
                "microbatch_s": stage.microbatch_s,
                "peak_device_bytes": stage.peak_device_bytes,
                "peak_host_bytes": stage.peak_host_bytes,
                "peak_disk_bytes": stage.peak_disk_bytes,
            }
            for stage in plan.stages
        ],
    }


def _rival_summary(rival: Rival, space: Space) -> dict[str, Any]:
    of = _shape_summary(rival.shape) if rival.planned is None else _candidate_summary(rival.planned.candidate, space)
    return {
        **of,
        "family": rival.family,
        "planned": rival.planned is not None,
        "slower_s": rival.slower_s,
        "time_s": {str(item): seconds for item, seconds in rival.items.items()},
        "bound": None if rival.kind is None else str(rival.kind),
    }


def _points(found: Found) -> list[dict[str, Any]]:
    """One point for every layout, or for each of its placements: its best plan, or the lowest bound that closed it."""
    planned: dict[Shape, dict[object, Planned]] = {}
    for one in found.planned:
        planned.setdefault(one.candidate.shape, {}).setdefault(one.candidate.places, one)
    closed: dict[Shape, Closed] = {}
    for part in found.closed:
        for shape in part.shapes:
            if shape not in closed or part.bound_s < closed[shape].bound_s:
                closed[shape] = part
    vain = {candidate.shape for candidate in found.without_plan}
    points = []
    for shape in found.space.shapes:
        point: dict[str, Any] = {**_shape_summary(shape), "family": shape.family}
        if shape in planned:
            points += [_planned_point(point, one, found.space) for one in planned[shape].values()]
            continue
        if shape in closed and math.isfinite(closed[shape].bound_s):
            part = closed[shape]
            point |= {"status": "slower", "bound_s": part.bound_s, "bound": str(part.kind)}
        elif shape in closed or shape in vain:
            point |= {"status": "does not fit", "bound": str(Bound.MEMORY)}
        points.append(point)
    return points


def _planned_point(shape: dict[str, Any], one: Planned, space: Space) -> dict[str, Any]:
    placement = space.placement(one.candidate)
    placed = {} if placement is None else {"placement": placement.describe()}
    peak = max(stage.peak_device_bytes for stage in one.plan.stages)
    return {**shape, "status": "planned", "step_s": one.step_s, "peak_device_bytes": peak, "bound": None, **placed}
