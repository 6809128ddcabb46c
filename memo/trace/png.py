"""Picture of one step for a paper or an issue, by matplotlib: lanes above, bytes in each tier below.

Matplotlib is imported only when a picture is asked for (the `plot` extra).
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from memo.errors import MemoError
from memo.events import CounterEvent, Lane, Owner, Span, Stall, TierName
from memo.trace.device_memory import OTHER, OWNED, TRANSIENT, MemoryChange, MemoryPeak, TracedDeviceMemory, device_stack
from memo.trace.figures import TierPeak
from memo.trace.format import printable
from memo.trace.report import TraceReport
from memo.trace.tensor_lifetimes import TensorLifetime, layer_of, residency_changes
from memo.units import format_bytes

# Okabe-Ito, as the page's lanes: told apart with the common kinds of colour blindness.
_MEASURED = "#0072b2"  # as on the page
_COLOURS = {
    ("compute", "forward"): "#0072b2",
    ("compute", "backward"): "#e69f00",
    ("compute", "optimizer"): "#8a8f98",
    "compute": "#0072b2",
    "recompute": "#cc79a7",
    "network": "#808a9a",
    "d2h": "#009e73",
    "h2d": "#56b4e9",
    "nvme-write": "#b07d12",
    "nvme-read": "#8c7bd0",
    "stalls": "#d55e00",
}
# As the page's memory.
_BAND_COLOURS = {
    OTHER: "#c3c8d0",
    OWNED[Owner.STATES]: "#56606f",
    OWNED[Owner.WEIGHTS]: "#56606f",
    OWNED[Owner.GRADIENTS]: "#a9745b",
    OWNED[Owner.OPTIMIZER]: "#8f8578",
    TRANSIENT: "#eba6b8",
}
_MAX_LAYERS = 64
"""Bands of a stack; of more layers neighbours are summed, since bands would be thinner than a printed line."""


def draw_step(report: TraceReport, path: Path, *, rank: int, step: int | None, dpi: int = 150) -> None:
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
        raise MemoError("pictures need matplotlib: pip install matplotlib") from None
    one = report.of_rank(rank)
    figures = one.step(step)
    window = (figures.start_ns, figures.end_ns)
    memory = device_stack(one.trace.events, one.lifetimes)
    changes = {tier: _layer_changes(one.lifetimes, tier) for tier in TierName} | {TierName.DEVICE: memory.changes}
    top = memory.peak(window) if memory.below or memory.above else None
    peaks = [peak for peak in figures.peaks if peak.saved_nbytes or (peak.tier is TierName.DEVICE and top is not None)]
    shades = _shades(layer_of(life.module) for life in one.lifetimes)
    rcParams["svg.hashsalt"] = "memo"  # the same trace gives the same file
    figure = Figure(figsize=(10, 2.4 + 1.6 * len(peaks)), dpi=dpi, layout="constrained")
    axes = figure.subplots(1 + len(peaks), 1, sharex=True, height_ratios=[1.5] + [1.0] * len(peaks), squeeze=False)
    _draw_lanes(axes[0][0], one.trace.events, window)
    counters = [
        event for event in one.trace.events if isinstance(event, CounterEvent) and window[0] <= event.t <= window[1]
    ]
    for axis, peak in zip((row[0] for row in axes[1:]), peaks, strict=True):
        within = [change for change in changes[peak.tier] if change.t <= window[1]]
        of_device = peak.tier is TierName.DEVICE
        _draw_memory(
            axis,
            within,
            peak,
            window,
            shades=shades,
            memory=memory if of_device else None,
            top=top if of_device else None,
            counted=[(event.t, event.nbytes) for event in counters if event.tier is peak.tier],
        )
    axes[-1][0].set_xlabel(
        "seconds since the step began" if figures.step is not None else "seconds since the trace began"
    )
    axes[-1][0].set_xlim(0, (window[1] - window[0]) / 1e9)
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
    phases: dict[str, str] = {}
    for event in events:
        if not isinstance(event, Span | Stall) or event.t > window[1] or event.t + event.d < window[0]:
            continue
        lane = "stalls" if isinstance(event, Stall) else event.lane.value
        phase = event.phase or "" if isinstance(event, Span) else ""
        colour = _COLOURS.get((lane, phase), _COLOURS[lane])
        bars[lane][colour].append(((event.t - window[0]) / 1e9, event.d / 1e9))
        if lane == "compute" and phase:
            phases[phase] = colour
        elif lane == "recompute":
            phases[lane] = colour
    names = [name for name in ("compute", "stalls", *[lane.value for lane in Lane][1:]) if name in bars]
    for place, name in enumerate(reversed(names)):
        for colour, found in bars[name].items():
            # A hairline between layers; elsewhere an edge, without which spans shorter than a pixel would not be seen.
            edge = ("white", 0.4 if len(found) < 200 else 0) if name == "compute" else (colour, 0.5)
            axis.broken_barh(found, (place - 0.4, 0.8), facecolors=colour, edgecolors=edge[0], linewidth=edge[1])
    axis.set_yticks(range(len(names)), list(reversed(names)), fontsize=8)
    for name in ("forward", "backward", "recompute", "optimizer"):
        if name in phases:
            axis.fill_between([], [], color=phases[name], label=name)
    if phases:
        axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _layer_changes(lifetimes: Sequence[TensorLifetime], tier: TierName) -> list[MemoryChange]:
    return [
        MemoryChange(t=change.t, band=layer_of(lifetimes[change.life].module), delta=change.delta)
        for change in residency_changes(lifetimes)
        if change.tier is tier
    ]


def _shades(layers: Iterable[str]) -> dict[str, Any]:
    """One colour a layer, first to last by number, as the page has them; the same in every tier."""
    names = sorted(set(layers), key=lambda name: [(part.isdecimal(), part.zfill(9)) for part in name.split(".")])
    first, wide = (0.08, 0.87) if len(names) > 1 else (0.5, 0.0)
    return {name: _palette()(first + wide * place / max(len(names) - 1, 1)) for place, name in enumerate(names)}


def _palette() -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"]


def _draw_memory(
    axis: Any,
    changes: Sequence[MemoryChange],
    peak: TierPeak,
    window: tuple[int, int],
    *,
    shades: dict[str, Any],
    memory: TracedDeviceMemory | None,
    top: MemoryPeak | None,
    counted: Sequence[tuple[int, int]] = (),
) -> None:
    """Stacks a tier's bytes.

    Of the device all bands of `memory`, with its peak `top` marked; elsewhere with a line of all bytes `counted`.
    """
    tier: TierName = peak.tier
    below, above = (memory.below, memory.above) if memory is not None else ((), ())
    times, stacks, layers = _series(changes, window, below=below, above=above)
    highest = peak.saved_nbytes if top is None else top.nbytes
    unit, name = _unit(highest)
    if layers:
        colours = [shades[layer] if layer in shades else _BAND_COLOURS[layer] for layer in layers]
        axis.stackplot(times, [[value / unit for value in stack] for stack in stacks], colors=colours, step="post")
    if top is not None:
        _mark_peak(axis, top, unit, window, shade=_palette()(0.5))
    if top is None and counted:
        steps = [((t - window[0]) / 1e9, nbytes / unit) for t, nbytes in counted]
        label = f"all {format_bytes(max(nbytes for _, nbytes in counted))}"
        axis.step(*zip(*steps, strict=True), where="post", color=_MEASURED, linewidth=1, label=label)
    predicted = peak.predicted_nbytes if top is None else None  # of the saved bytes alone
    lines = [("plan", predicted, "black", "--"), ("budget", peak.budget_nbytes, "#c0392b", "-")]
    for text, nbytes, colour, style in lines:
        if nbytes and nbytes <= 2.5 * highest:
            axis.axhline(
                nbytes / unit, color=colour, linestyle=style, linewidth=1, label=f"{text} {format_bytes(nbytes)}"
            )
    axis.set_ylabel(f"{tier} [{name}]", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _mark_peak(axis: Any, top: MemoryPeak, unit: int, window: tuple[int, int], *, shade: Any) -> None:
    """A triangle above the largest total, and a legend of what held it."""
    t = (top.t - window[0]) / 1e9
    label = f"peak {format_bytes(top.nbytes)}"
    axis.plot([t], [top.nbytes / unit], marker="v", markersize=5, color="black", linestyle="none", label=label)
    saved = top.nbytes - sum(nbytes for band, nbytes in top.by_band.items() if band in _BAND_COLOURS)
    parts = {"saved by layer": saved, **{band: n for band, n in top.by_band.items() if band in _BAND_COLOURS}}
    for band, nbytes in sorted(parts.items(), key=lambda part: -part[1]):
        if nbytes:
            axis.fill_between([], [], color=_BAND_COLOURS.get(band, shade), label=f"{band} {format_bytes(nbytes)}")


def _unit(nbytes: int) -> tuple[int, str]:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return unit, name
    return 1, "B"


def _series(
    changes: Sequence[MemoryChange], window: tuple[int, int], *, below: Sequence[str] = (), above: Sequence[str] = ()
) -> tuple[list[float], list[list[int]], list[str]]:
    """Bytes by band at every change within the window: (times, one list a band, bands from the bottom up)."""
    names = [name for name in dict.fromkeys(change.band for change in changes) if name not in (*below, *above)]
    group = -(-len(names) // _MAX_LAYERS) or 1
    bands = [*below, *names[::group], *above]
    place = {name: len(below) + index // group for index, name in enumerate(names)}
    place |= {name: bands.index(name) for name in (*below, *above)}
    held = [0] * len(bands)
    times: list[float] = [0.0]
    columns = [list(held)]
    for change in changes:
        held[place[change.band]] += change.delta
        t = max(change.t - window[0], 0) / 1e9
        if t == times[-1]:
            columns[-1] = list(held)
        else:
            times.append(t)
            columns.append(list(held))
    times.append((window[1] - window[0]) / 1e9)
    columns.append(list(held))
    return times, [list(stack) for stack in zip(*columns, strict=True)], bands
