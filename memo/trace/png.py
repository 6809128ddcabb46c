"""Picture of one step for a paper or an issue, by matplotlib: lanes above, bytes in each tier below.

Matplotlib is imported only when a picture is asked for (the `plot` extra).
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from memo.errors import MemoError
from memo.events import Lane, Span, Stall, Tier
from memo.trace.figures import TierPeak
from memo.trace.format import printable
from memo.trace.report import Report
from memo.trace.tensor_lifetimes import Lifetime, ResidencyChange, layer_of, residency_changes
from memo.units import format_bytes

__all__ = ["draw_step"]

# Okabe-Ito, as the page's lanes: told apart with the common kinds of colour blindness.
_COLOURS = {
    ("compute", "forward"): "#0072b2",
    ("compute", "backward"): "#e69f00",
    ("compute", "optimizer"): "#8a8f98",
    "compute": "#0072b2",
    "recompute": "#cc79a7",
    "network": "#d55e00",
    "d2h": "#009e73",
    "h2d": "#56b4e9",
    "nvme-write": "#b07d12",
    "nvme-read": "#8c7bd0",
    "stalls": "#d55e00",
}
_MAX_LAYERS = 64
"""Bands of a stack; of more layers neighbours are summed, since bands would be thinner than a printed line."""


def draw_step(report: Report, path: Path, *, rank: int, step: int | None, dpi: int = 150) -> None:
    """Draws one step of one rank to a file; the suffix chooses the format (.png, .pdf, .svg).

    Args:
        report: of the run.
        path: the file, which is replaced.
        rank: the rank to draw.
        step: the step to draw; None draws the whole trace.
        dpi: dots per inch.

    Raises:
        UsageError: the report has no such rank or step.
        MemoError: matplotlib is not installed.
    """
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError:
        raise MemoError("pictures need matplotlib: pip install 'memo-train[plot]'") from None
    one = report.of_rank(rank)
    figures = one.step(step)
    window = (figures.start_ns, figures.end_ns)
    changes = [change for change in residency_changes(one.lifetimes) if change.t <= window[1]]
    peaks = [peak for peak in figures.peaks if peak.saved_nbytes]
    rcParams["svg.hashsalt"] = "memo"  # the same trace gives the same file
    figure = Figure(figsize=(10, 2.4 + 1.6 * len(peaks)), dpi=dpi, layout="constrained")
    axes = figure.subplots(1 + len(peaks), 1, sharex=True, height_ratios=[1.5] + [1.0] * len(peaks), squeeze=False)
    _draw_lanes(axes[0][0], one.trace.events, window)
    for axis, peak in zip((row[0] for row in axes[1:]), peaks, strict=True):
        _draw_memory(axis, changes, one.lifetimes, peak, window)
    axes[-1][0].set_xlabel("ms since the step began")
    axes[-1][0].set_xlim(0, (window[1] - window[0]) / 1e6)
    sentences = one.verdicts[figures.step]
    if sentences:
        figure.suptitle(_literal(sentences[0].text), fontsize=9, x=0.01, ha="left")
    figure.savefig(path, metadata=_no_date(path))


def _no_date(path: Path) -> dict[str, Any]:
    return {"Date": None} if path.suffix == ".svg" else {"CreationDate": None} if path.suffix == ".pdf" else {}


def _literal(text: str) -> str:
    """Escapes `$`, which matplotlib reads as mathematics."""
    return printable(text, limit=200).replace("$", r"\$")


def _draw_lanes(axis: Any, events: Iterable[object], window: tuple[int, int]) -> None:
    bars: dict[str, dict[str, list[tuple[float, float]]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for event in events:
        if not isinstance(event, Span | Stall) or event.t > window[1] or event.t + event.d < window[0]:
            continue
        lane = "stalls" if isinstance(event, Stall) else event.lane.value
        phase = event.phase or "" if isinstance(event, Span) else ""
        colour = _COLOURS.get((lane, phase), _COLOURS[lane])
        bars[lane][colour].append(((event.t - window[0]) / 1e6, event.d / 1e6))
    names = [name for name in ("compute", "stalls", *[lane.value for lane in Lane][1:]) if name in bars]
    for place, name in enumerate(reversed(names)):
        for colour, found in bars[name].items():
            edge = 0.4 if name == "compute" and len(found) < 200 else 0  # a hairline between layers
            axis.broken_barh(found, (place - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=edge)
    axis.set_yticks(range(len(names)), list(reversed(names)), fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _draw_memory(
    axis: Any,
    changes: Sequence[ResidencyChange],
    lifetimes: Sequence[Lifetime],
    peak: TierPeak,
    window: tuple[int, int],
) -> None:
    tier: Tier = peak.tier
    times, stacks, layers = _series([change for change in changes if change.tier is tier], lifetimes, window)
    unit, name = _unit(peak.saved_nbytes)
    from matplotlib import colormaps

    palette = colormaps["viridis"]
    colours = [palette(0.08 + 0.87 * place / max(len(layers) - 1, 1)) for place in range(len(layers))]
    if layers:
        axis.stackplot(times, [[value / unit for value in stack] for stack in stacks], colors=colours, step="post")
    lines = [("plan", peak.predicted_nbytes, "black", "--"), ("budget", peak.budget_nbytes, "#c0392b", "-")]
    for text, nbytes, colour, style in lines:
        if nbytes and nbytes <= 2.5 * peak.saved_nbytes:
            axis.axhline(
                nbytes / unit, color=colour, linestyle=style, linewidth=1, label=f"{text} {format_bytes(nbytes)}"
            )
    axis.set_ylabel(f"{tier} [{name}]", fontsize=8)
    axis.set_ylim(0, axis.get_ylim()[1] * 1.12)  # room for the legend
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="upper right", fontsize=7, frameon=False)


def _unit(nbytes: int) -> tuple[int, str]:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return unit, name
    return 1, "B"


def _series(
    changes: Sequence[ResidencyChange], lifetimes: Sequence[Lifetime], window: tuple[int, int]
) -> tuple[list[float], list[list[int]], list[str]]:
    """Bytes by layer at every change within the window: (times, one list per layer, layers by first appearance)."""
    names = list(dict.fromkeys(layer_of(lifetimes[change.life].module) for change in changes))
    group = -(-len(names) // _MAX_LAYERS) or 1
    place = {name: index // group for index, name in enumerate(names)}
    layers = names[::group]
    held = [0] * len(layers)
    times: list[float] = [0.0]
    columns = [list(held)]
    for change in changes:
        held[place[layer_of(lifetimes[change.life].module)]] += change.delta
        t = max(change.t - window[0], 0) / 1e6
        if t == times[-1]:
            columns[-1] = list(held)
        else:
            times.append(t)
            columns.append(list(held))
    times.append((window[1] - window[0]) / 1e6)
    columns.append(list(held))
    return times, [list(stack) for stack in zip(*columns, strict=True)], layers
