"""docs/results.md, its plots, README's figures and tables of docs/search.md, gpu.md and accuracy.md, from result files.

    make plots          writes all of them anew: python -m benchmarks.pages
    python -m benchmarks.pages --check      exit 1 where a page is not what the files give; draws nothing

Nothing here measures. A number on these pages is a value of the file that stands beside it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.hf_table import hf_table, predicted_table
from benchmarks.results import ROOT
from benchmarks.searched import MEMO_MEAN_MFU, MISSING
from benchmarks.step_times import step_table
from memo.units import format_bytes

RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
BEGIN, END = "<!-- figures: make plots -->", "<!-- end of figures -->"
KEEP, CHECKPOINTING, ALPHA_0 = "keep everything", "full checkpointing", "memo, alpha 0"
MOVED, AUTOMATIC = "memo, all moved", "memo, automatic"
FAMILIES = {"gpt": "memo's GPT", "llama": "a Hugging Face Llama"}
SHOWN = {MOVED: "memo, all offloaded", "memo, inputs moved": "memo, inputs offloaded"}
"""Method of a result file -> name on the page, where they differ."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One result file."""

    path: Path
    body: dict[str, Any]

    @property
    def source(self) -> str:
        """Link, date, commit and machine, for the line under a table of a page in docs/."""
        body = self.body
        machine = body.get("device") or {}
        what = machine.get("gpu") or f"{body['hardware']['cores']} cores of {body['hardware']['cpu'].strip()}, no GPU"
        versions = ", ".join(f"{name} {number}" for name, number in body.get("versions", {}).items())
        told = [body["date"], f"commit {body['commit']}", what, *([versions] if versions else [])]
        return f"{self.link}: {'; '.join(told)}"

    @property
    def link(self) -> str:
        """Link to the file, for a page in docs/."""
        return f"[{self.path.name}](../benchmarks/results/{self.path.name})"


def newest(name: str, folder: Path | None = None, *, having: str | None = None) -> Result | None:
    """The file of this benchmark, with rows of this kind, that was begun last; None where there is none."""
    found = []
    for path in (folder or RESULTS).glob(f"*-{name}*.json"):
        body = json.loads(path.read_text())
        if body.get("benchmark") == name and (having is None or body.get(having)):
            found.append(Result(path=path, body=body))
    return max(found, key=lambda one: (one.body["date"], one.body.get("begun", "")), default=None)


def newest_lengths(folder: Path | None = None) -> list[Result]:
    """The longest sequences of each depth of model, of the file that was begun last; shallow models first."""
    files: dict[int, Result] = {}
    for path in (folder or RESULTS).glob("*-peers*.json"):
        body = json.loads(path.read_text())
        if body.get("benchmark") == "peers" and body.get("lengths"):
            layers, begun = body["options"]["layers"], (body["date"], body["begun"])
            if layers not in files or begun > (files[layers].body["date"], files[layers].body["begun"]):
                files[layers] = Result(path=path, body=body)
    return [files[layers] for layers in sorted(files)]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def prose(text: str) -> list[str]:
    """Lines of a paragraph."""
    return textwrap.wrap(text, 125, break_long_words=False, break_on_hyphens=False)


def ratio(value: dict[str, float] | None) -> str:
    """Median and half of the quartiles' range."""
    return "" if value is None else f"{value['median']:.2f} ± {value['spread']:.2f}"


def _steps(one: dict[str, Any]) -> list[str]:
    shape = one["shape"]
    title = f"{FAMILIES[shape['family']]}, {shape['layers']} layers of {shape['hidden']}, {shape['tokens']} tokens"
    rows = []
    unequal = any(row.get("gradient_difference") for row in one["rows"])
    for row in one["rows"]:
        if "failed" in row:
            rows.append([_method(row), f"did not run: {_why(row['failed'])}", *[""] * (6 if unequal else 5)])
            continue
        moved = row["out_bytes"] + row["back_bytes"]
        rows.append(
            [
                _method(row),
                ratio(row["to_keep"]),
                ratio(row["to_checkpointing"]),
                format_bytes(row["above_rest_bytes"]),
                _budget(row),
                format_bytes(moved) if moved else "",
                "" if row["hidden"] is None else f"{row['hidden']:.0%}",
                *([f"{row['gradient_difference']:.1e}"] if unequal else []),
            ]
        )
    heads = [
        "method",
        "step / keep",
        "step / checkpointing",
        "activation memory",
        "budget",
        "offloaded and reloaded",
        "hidden",
        *(["gradient difference"] if unequal else []),
    ]
    same = [] if unequal else ["Gradients of all methods are bit-identical.", ""]
    return [f"**{title[0].upper()}{title[1:]}**", "", *table(heads, rows), "", *same]


def _method(row: dict[str, Any]) -> str:
    return SHOWN.get(row["way"], row["way"])


def _budget(row: dict[str, Any]) -> str:
    """Budget of a plan above rest; empty where none was given or rest is not in the file."""
    known = row.get("budget_bytes") is not None and "rest_bytes" in row
    return format_bytes(row["budget_bytes"] - row["rest_bytes"]) if known else ""


def _why(failed: str, most: int = 100) -> str:
    return failed if len(failed) <= most else f"{failed[:most]}..."


def _lengths(rows: list[dict[str, Any]]) -> list[str]:
    columns = sorted({(row["family"], row["cap_bytes"]) for row in rows}, key=lambda one: (one[0], one[1]))
    found = {(row["way"], row["family"], row["cap_bytes"]): row for row in rows}
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        cells = [_length(found.get((way, *column))) for column in columns]
        if any(cells):
            lines.append([SHOWN.get(way, way), *cells])
    heads = ["method", *(f"{FAMILIES[family]}, {format_bytes(cap)}" for family, cap in columns)]
    return table(heads, lines)


def _length(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if not row["fits"]:
        why = (row["why"] or "").replace("pin_memory", "")
        return "none fits" if "memory" in why else "does not run"
    return f"{row['fits']:,}" if row["complete"] else f"{row['fits']:,} or more"


def _hooks(rows: list[dict[str, Any]]) -> list[str]:
    told = [
        [_method(row), f"{row['us_a_saved_tensor']['median']:.1f} ± {row['us_a_saved_tensor']['spread']:.1f}"]
        if "us_a_saved_tensor" in row
        else [_method(row), f"did not run: {_why(row['failed'])}"]
        for row in rows
        if row["way"] != KEEP
    ]
    return table(["hooks", "CPU time per saved tensor, µs"], told)


def _peers(peers: Result) -> list[str]:
    body, options = peers.body, peers.body["options"]
    lines = [
        "## Compared with other methods",
        "",
        *prose(
            f"`make peers`, on a CPU. Each method runs in its own process with {options['threads']} thread; they take steps "
            f"in turn for {options['rounds']} rounds. Ratios are within a round: median ± half of the interquartile range. "
            "Activation memory is the peak above the memory between steps. On a CPU, offloading to host memory frees "
            "nothing; memo offloads to a disk. Hidden: the share of disk time that compute covers. Budget of automatic "
            "plans: the given % of the activation memory of keeping everything, otherwise that of full checkpointing; if no "
            "plan fits, memo warns and uses as little as it can."
        ),
        "",
    ]
    for one in body["steps"]:
        lines += _steps(one)
    lines += [f"Source: {peers.source}.", "", "![step time against memory](images/step-against-memory.svg)", ""]
    lengths = newest_lengths()
    if lengths:
        lines += [
            *prose(
                "The longest sequence in tokens under a memory limit on the process, not counting what torch takes when it "
                'is loaded, but with weights, gradients and memo\'s own disk threads. "or more": the search ran out of time.'
            ),
            "",
            "![longest sequence against memory](images/longest.svg)",
            "",
        ]
    for one in lengths:
        source = one.link if one.path == peers.path else one.source
        told = f"{one.body['options']['layers']} layers of {one.body['options']['hidden']}"
        lines += [f"**{told}**", "", *_lengths(one.body["lengths"]), "", f"Source: {source}.", ""]
    emulated = newest("gpu-peers")
    if body["hooks"]:
        lines += ["Overhead of the hooks, copies of a few KiB included:", "", *_hooks(body["hooks"]), ""]
        lines += [f"Source: {peers.link}.", ""]
    if emulated is not None:
        told = (
            "The same on an emulated CUDA device, with TRL's hooks. Its copies and streams run on the processor whose time"
            " is counted, so compare rows within this table only."
        )
        lines += [*prose(told), "", *_hooks(emulated.body["hooks"]), "", f"Source: {emulated.source}.", ""]
    return lines


def _architectures(result: Result) -> list[str]:
    summary = result.body["summary"]
    most, least = summary["settings"]["1"], summary["settings"]["0"]
    return [
        "## Architectures",
        "",
        *prose(
            f"{summary['built']} of the {summary['examined']} causal, masked and sequence-to-sequence classes of "
            f"transformers {result.body['transformers']} were built at small size. Gradients with memo are bit-identical "
            f"for {most['equal']} of {most['compared']} at alpha 1 and {least['equal']} of {least['compared']} at alpha 0. "
            f"At alpha 0 the median architecture offloads {least['median_share']:.1%} of its saved bytes, and "
            f"{least['at_most_half']} of {least['shares']} at most half. [Table](architectures.md)."
        ),
        "",
        f"Source: {result.source}.",
        "",
    ]


def _rules(simulated: Result, carried_out: Result) -> list[str]:
    def cells(one: dict[str, Any]) -> list[str]:
        shown = ["" if one[key] is None else f"{one[key]:.3f}" for key in ("best", "median", "worst")]
        return [f"{one['fits']} of {one['of']}", *shown]

    body, carried, decided = simulated.body, carried_out.body["carried_rules"], simulated.body["deciding_rules"]
    of, of_carried = len(body["simulated"]), len(carried_out.body["carried"])
    rows = [
        [rule, *cells(one), "" if one["median_gap"] is None else f"{one['median_gap']:.1%}", *cells(carried[rule])]
        for rule, one in decided.items()
    ]
    sources = [f"Source: {simulated.source}."]
    if carried_out.path != simulated.path:
        sources = [f"Sources: simulated {simulated.source}; executed {carried_out.source}."]
    heads = ["rule", "simulated: fits", "best", "median", "worst", "above the bound", "executed: fits"]
    unlike = sum("unlike" in row["problem"] for row in body["simulated"])
    return [
        *prose(
            f"Step time relative to memo's linear program (LP), for the LP and six rules without a solver"
            f" (`benchmarks/solver/rules.py`), at equal budgets of device, host and disk: {of} problems simulated ({unlike}"
            f" of them with every other layer narrow), {of_carried} executed on the CPU engine with paced links (one with a"
            " disk). A plan fits if the independent checker accepts it. The bound is the LP's before rounding, below which"
            " no plan can be; the column has the median distance of predicted steps from it."
        ),
        "",
        *table([*heads, "best", "median", "worst"], rows),
        "",
        *prose(_simulated_rules(body)),
        "",
        *prose(_carried_rules(carried_out.body)),
        "",
        *sources,
        "",
    ]


def _least(rules: dict[str, Any]) -> float:
    """The least part of the LP's time that any rule takes in any problem."""
    return float(min(one["best"] for one in rules.values() if one["best"] is not None))


def _simulated_rules(body: dict[str, Any]) -> str:
    every, greedy, least = body["rules"], body["deciding_rules"]["greedy"], _least(body["rules"])
    solver, of = every["LP"], every["LP"]["of"]
    unbeaten = (
        "no rule is faster than the LP" if least > 0.999 else f"the fastest rule takes {least:.3f} of the LP's time"
    )
    return (
        f"In {of - body['deciding']} of the {of} problems every copy is hidden, and offloading everything is as good as the"
        f" LP. The table has the other {body['deciding']}: greedy is {greedy['median'] - 1:.1%} slower (median) and"
        f" {greedy['worst'] - 1:.1%} at worst, and in simulation {unbeaten}. Over all problems the LP's plans are"
        f" {solver['median_gap']:.2%} above the bound (median), {solver['worst_gap']:.2%} at worst. The LP takes"
        f" {solver['choosing_s'] * 1e3:.0f} ms (median), greedy, which tries all of its steps in turn,"
        f" {every['greedy']['choosing_s'] * 1e3:.0f} ms."
    )


def _carried_rules(body: dict[str, Any]) -> str:
    rules, (agreeing, pairs) = body["carried_rules"], body["pairs_in_order"]
    shares = [one["measured_over_simulated"] for one in rules.values() if one["measured_over_simulated"] is not None]
    return (
        f"Executed, {agreeing} of {pairs} pairs of rules whose simulated steps are more than 2 % apart came out in that"
        f" order (medians over the quieter half of the rounds, without time spent waiting for a processor). Measured steps"
        f" are {min(shares):.3f} to {max(shares):.3f} of the simulated ones (median of each rule); the fastest of any rule"
        f" took {_least(rules):.3f} of the LP's time."
    )


def _parts(body: dict[str, Any]) -> list[str]:
    planned = [
        [
            part,
            f"{one['fits']} of {one['of']}",
            f"{one['median']:.3f}",
            f"{one['worst']:.3f}",
            str(one["costs_more_than_1_percent"]),
        ]
        for part, one in body["planned_parts"].items()
        if part != "everything on"
    ]
    engine = [
        [part, *(ratio(row["over_on"][part]) for row in body["engine"])]
        for part in body["engine"][0]["over_on"]
        if part != "everything on"
    ]
    links = [f"link of {row['link_bytes_per_s'] / 1e6:.0f} MB/s" for row in body["engine"]]
    forwarded = [f"{row['forwarded_share']:.0%}" for row in body["engine"]]
    kinds = ("caching", "expandable", "planned")
    reserved = [
        [row["step"], *(f"{row[f'{kind}_bytes'] / row['live_bytes']:.3f}" for kind in kinds)]
        for row in body["addresses"]
    ]
    tiles = [[row["problem"], f"{row['least_over']:.3f}", f"{row['step_over']:.3f}"] for row in body["tiles"]]
    loss = newest("own-loss")
    return [
        "One part disabled at a time, on the thirty simulated problems above; step time relative to the full planner:",
        "",
        *table(["without", "fits", "median", "worst", "over 1 % slower in"], planned),
        "",
        "One part disabled at a time in the CPU engine, everything offloaded over paced links; relative step time:",
        "",
        *table(["without", *links], engine),
        "",
        *prose(
            f"Forwarding serves {' and '.join(forwarded)} of the bytes that backward reads from sources still on the device;"
            " without it they would be reloaded. Its effect on the step was not measured."
        ),
        "",
        "Memory that an allocator reserves, relative to the peak of live memory, in recorded steps:",
        "",
        *table(["step", "caching allocator", "expandable segments", "planned addresses"], reserved),
        "",
        "MLP in eight tiles relative to one: least device memory that has a plan, and the step where both have one:",
        "",
        *table(["model", "least memory", "step"], tiles),
        "",
        *([] if loss is None else [*prose(f"The loss without logits: [its page](loss.md), {loss.source}."), ""]),
    ]


NOT_MEASURED = (
    "This page has CPU results; [gpu.md](gpu.md) has what was measured on GPUs. Several GPUs, NCCL and GPUDirect Storage "
    "have not been measured. Steps of a million tokens are predicted ([accuracy](accuracy.md)), except for those in gpu.md."
)


def results_page() -> str:
    """docs/results.md."""
    lines = [
        "# Results",
        "",
        *prose(
            "Generated by `make plots` from the files in [benchmarks/results](../benchmarks/results/README.md). The "
            "machines are shared: compare ratios within a table, not times across tables."
        ),
        "",
    ]
    peers, architectures = newest("peers", having="steps"), newest("architectures")
    if peers is not None:
        lines += _peers(peers)
    simulated, carried = newest("solver", having="deciding_rules"), newest("solver", having="pairs_in_order")
    if simulated is not None and carried is not None:
        lines += ["## The solver against simpler rules", "", *_rules(simulated, carried)]
    parts = newest("parts", having="tiles")
    if parts is not None:
        lines += ["## Contribution of each part", "", *_parts(parts.body), f"Source: {parts.source}.", ""]
    if architectures is not None:
        lines += _architectures(architectures)
    return "\n".join([*lines, "## Not measured", "", *prose(NOT_MEASURED), ""])


def figures() -> list[str]:
    """README's: the table of flags on a GPU, and bit-equal architectures."""
    architectures = newest("architectures")
    if architectures is None:
        return []
    least = architectures.body["summary"]["settings"]["0"]
    told = (
        f"On a CPU at `alpha=0`, losses and gradients of {least['equal']} of the {least['compared']} architectures of "
        "transformers that could be built at small size are bit-identical to those without memo "
        f"([file](benchmarks/results/{architectures.path.name}))."
    )
    return [*hf_table(), "", *textwrap.wrap(told, 125, break_long_words=False)]


def searched() -> list[str]:
    """docs/search.md's published layouts beside those that were found: of steps, and of longest sequences."""
    result = newest("searched")
    if result is None:
        return []
    rows, failed = result.body["rows"], []
    steps, lengths = [], []
    grid = [row for row in rows if row.get("cell")]
    for row in rows:
        if row in grid:
            continue
        if "failed" in row["free"]:
            failed.append((row["name"], row["free"]["failed"]))
        elif row.get("published_tokens") is None:
            steps.append(_compared(row, key="step_s", published=row.get("published_s")))
        else:
            lengths.append(_compared(row, key="tokens", published=row["published_tokens"]))
    heads = ["", "published", "published layout", "predicted", "off by", "found", "predicted"]
    reasons = [f"- {what}: {why}." for what, why in [*failed, *MISSING]]
    told = [line for reason in reasons for line in textwrap.wrap(reason, 125, subsequent_indent="  ")]
    scaling = textwrap.wrap(_strong_scaling(rows), 125)
    body = ["", *table(heads, steps), "", *scaling, *([""] if scaling else [])]
    body += _memo_grid(grid) if grid else []
    body += ["Longest sequences, in tokens:", "", *table(heads, lengths), ""] if lengths else []
    source = [f"Source: {result.source}.", *_kept(rows)]
    return [*body, *source, "", "Not here:", "", *told, ""]


def _kept(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Sentence that names the rows of a former result."""
    counts = collections.Counter(row["commit"] for row in rows if "commit" in row)
    if not counts:
        return []
    told = " and ".join(f"{count} rows are of commit {commit}" for commit, count in counts.items())
    return textwrap.wrap(f"{told}; the others were searched again.", 125)


def _compared(row: dict[str, Any], *, key: str, published: float | None) -> list[str]:
    """Cells of a row: what was published, the published layout's prediction, and what was found."""
    fixed, free = row["fixed"], row["free"]

    def told(number: float) -> str:
        return f"{number:,.2f} s" if key == "step_s" else f"{round(number):,}"

    found = told(free[key])
    layout = predicted = off = ""
    if fixed is not None and "failed" in fixed:
        layout = fixed["failed"].removeprefix("memo plan: ")
    elif fixed is not None:
        layout, predicted = _layout(fixed), told(fixed[key])
        off = "" if published is None else f"{fixed[key] / published - 1:+.0%}"
        found += f", {free[key] / fixed[key]:.3f} of it"
    return [row["name"], "" if published is None else told(published), layout, predicted, off, _layout(free), found]


def _memo_grid(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Table of the layouts found for MEMO's models at its lengths: a row of each model, a column of each length."""
    lengths = sorted({row["cell"][1] for row in rows})
    found: dict[str, dict[int, str]] = {}
    utilisation = []
    for row in rows:
        (model, thousands), free = row["cell"], row["free"]
        if "failed" in free:
            cell = "does not fit"
        else:
            utilisation.append(free["mfu_causal"])
            cell = f"{_layout(free)}: {free['step_s']:,.1f} s, {free['mfu_causal']:.1%}"
        found.setdefault(model, {})[thousands] = cell
    mean = sum(utilisation) / len(utilisation)
    told = (
        "MEMO's models at its lengths, one sequence a step, of which no layout was published: what is found, its predicted "
        f"step and MFU (causal). Their mean is {mean:.1%}; published for MEMO's own runs: {MEMO_MEAN_MFU:.1%}."
    )
    cells = [[model, *(of_length.get(length, "") for length in lengths)] for model, of_length in found.items()]
    return [*textwrap.wrap(told, 125), "", *table(["", *(f"{length}k" for length in lengths)], cells), ""]


def _strong_scaling(rows: Sequence[dict[str, Any]]) -> str:
    """MT-NLG's step on more and more GPUs over that on the fewest; empty where a row lacks."""
    own = [row for row in rows if row["name"].startswith("MT-NLG")]
    if len(own) < 2 or any("failed" in side for row in own for side in (row["fixed"], row["free"])):
        return ""

    def ratios(seconds: Sequence[float]) -> str:
        return " : ".join(f"{one / seconds[0]:.3f}" for one in seconds)

    return (
        f"Strong scaling of MT-NLG, the step on each number of GPUs over that on the fewest: published "
        f"{ratios([row['published_s'] for row in own])}; predicted at its layout "
        f"{ratios([row['fixed']['step_s'] for row in own])}; at what is found "
        f"{ratios([row['free']['step_s'] for row in own])}."
    )


def _layout(one: dict[str, Any]) -> str:
    sizes = [f"{name} {one[name]}" for name in ("pp", "dp", "cp", "tp") if one[name] > 1] or ["one GPU"]
    ring = ["ring"] if one.get("cp_attention") == "ring" else []
    schedule = (
        [f"{one['schedule']} of {one['chunks']}" if one["chunks"] > 1 else one["schedule"]] if one["schedule"] else []
    )
    sharding = [f"ZeRO {one['zero']}"] if one["zero"] else []
    does = [one["does"]] if "does" in one else []
    return ", ".join([*sizes, *ring, *schedule, *sharding, f"{one['batch']} x {one['accumulate']}", *does])


def with_block(text: str, lines: Sequence[str]) -> str:
    """A page with these lines between its markers."""
    block = "\n".join([BEGIN, *lines, END])
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: block, text, flags=re.DOTALL)


def readme(text: str) -> str:
    """README with its figures as the files have them."""
    return with_block(text, figures())


def draw(peers: Result, lengths_of: Sequence[Result]) -> list[Path]:
    """Longest sequence against memory, and step time against memory with all ways."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "memo"
    from matplotlib import pyplot

    def written(figure: Any, name: str) -> Path:
        path = IMAGES / f"{name}.svg"
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        return path

    IMAGES.mkdir(exist_ok=True)
    tables = peers.body["steps"]
    figure, axes = pyplot.subplots(1, len(tables), figsize=(6.5 * len(tables), 5), squeeze=False)
    for one, plot in zip(tables, axes[0], strict=True):
        rows = [row for row in one["rows"] if "failed" not in row]
        ours = sorted(
            (
                (row["above_rest_bytes"] / 2**20, row["to_keep"]["median"])
                for row in rows
                if row["way"].startswith(AUTOMATIC)
            ),
        )
        plot.plot(*zip(*ours, strict=True), color="tab:blue", linewidth=1)
        for number, row in enumerate(rows):
            at = row["above_rest_bytes"] / 2**20, row["to_keep"]["median"]
            mine = row["way"].startswith("memo")
            plot.plot(*at, "o" if mine else "s", color="tab:blue" if mine else "tab:gray")
            plot.annotate(_method(row), at, fontsize=6, xytext=(4, 4 if number % 2 else -8), textcoords="offset points")
        shape = one["shape"]
        plot.set(xlabel="activation memory, MiB", ylabel="step time / keep everything")
        plot.set_title(f"{FAMILIES[shape['family']]}, {shape['tokens']} tokens", fontsize=9)
    paths = [written(figure, "step-against-memory")]
    shown = [
        (one.body, family) for one in lengths_of for family in dict.fromkeys(r["family"] for r in one.body["lengths"])
    ]
    lines = -(-len(shown) // 2)
    figure, axes = pyplot.subplots(lines, 2, figsize=(13, 4 * lines), squeeze=False)
    for plot in axes.flat[len(shown) :]:
        plot.axis("off")
    for (body, family), plot in zip(shown, axes.flat, strict=False):
        mine = [row for row in body["lengths"] if row["family"] == family and row["fits"]]
        caps = sorted({row["cap_bytes"] for row in mine})
        ways = list(dict.fromkeys(row["way"] for row in mine))
        height = 0.8 / len(caps)
        for place, cap in enumerate(caps):
            known = {row["way"]: row for row in mine if row["cap_bytes"] == cap}
            at = [number + place * height for number in range(len(ways))]
            fits = [known[way]["fits"] if way in known else 0 for way in ways]
            bars = plot.barh(at, fits, height=height, label=format_bytes(cap))
            plot.bar_label(bars, [_length(known.get(way)) for way in ways], fontsize=6, padding=2)
        plot.margins(x=0.15)
        names = [SHOWN.get(way, way) for way in ways]
        plot.set_yticks([number + 0.4 - height / 2 for number in range(len(ways))], names, fontsize=7)
        plot.invert_yaxis()
        plot.set(xlabel="longest sequence, tokens")
        plot.set_title(
            f"{FAMILIES[family]}, {body['options']['layers']} layers of {body['options']['hidden']}", fontsize=9
        )
        plot.legend(fontsize=7)
    return [*paths, written(figure, "longest")]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="pages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 where a page is not as the files say"
    )
    args = parser.parse_args(arguments)
    search, gpu, accuracy = (ROOT / "docs" / f"{name}.md" for name in ("search", "gpu", "accuracy"))
    pages = {
        ROOT / "docs" / "results.md": results_page(),
        ROOT / "README.md": readme((ROOT / "README.md").read_text()),
        search: with_block(search.read_text(), searched()),
        gpu: with_block(gpu.read_text(), predicted_table()),
        accuracy: with_block(accuracy.read_text(), step_table()),
    }
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    if args.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what the result files give: run `make plots`", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages[path])
    steps, lengths = newest("peers", having="steps"), newest_lengths()
    drawn = draw(steps, lengths) if steps is not None and lengths else []
    print("\n".join(f"Wrote {path.relative_to(ROOT)}" for path in [*stale, *drawn]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
