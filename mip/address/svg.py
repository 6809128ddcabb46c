"""Pictures of an address plan: time across, address up, one rectangle for each span of a buffer, a line at the bound.

PNG by matplotlib; HTML as one file that needs no network, with the rectangles as one JSON array and a canvas that draws
them, so that thousands of buffers stay fast. Names from the plan reach the page only as JSON with <, > and & escaped,
and from there only as text.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from pathlib import Path

from memo.atomic_file import atomic_file
from memo.errors import UsageError
from memo.mip.address.files import write_file
from memo.mip.address.problem import AddressPlan, ArenaPlan
from memo.units import format_bytes

COLOURS = ("#4e79a7", "#f28e2b", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#9c755f", "#86bcb6", "#d4a6c8", "#8cd17d")
MAX_OUTLINED = 1500
"""Rectangles up to which outlines are drawn; of more, outlines would hide the fill."""


def write_picture(path: str, plan: AddressPlan, *, overwrite: bool = False) -> None:
    """Writes a picture of a plan; the suffix chooses the format.

    Raises:
        UsageError: the name ends in neither .png nor .html, or matplotlib is missing.
        OutputExists: the file exists and `overwrite` is False.
        MemoError: the file cannot be written.
    """
    if path.endswith(".html"):
        write_file(path, picture_html(plan), overwrite=overwrite)
    elif path.endswith(".png"):
        with atomic_file(path, overwrite=overwrite) as sibling:
            sibling.write_bytes(picture_png(plan))
    else:
        raise UsageError(f"{path!r}: a picture's name must end in .png or .html")


def picture_png(plan: AddressPlan) -> bytes:
    """Draws the plan as a PNG file, one panel per arena.

    Raises:
        UsageError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("a .png needs matplotlib: pip install matplotlib, or ask for .html") from None
    count = max(len(plan.arenas), 1)
    figure = Figure(figsize=(14, 7 * count), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(count, 1, squeeze=False)[:, 0]
    for panel, arena in zip(panels, plan.arenas, strict=False):
        boxes = _boxes(plan, arena)
        unit, name = _unit(arena.nbytes)
        corners = [
            [(a, low / unit), (b, low / unit), (b, (low + size) / unit), (a, (low + size) / unit)]
            for a, b, low, size, *_ in boxes
        ]
        outline = {"edgecolors": "#00000055", "linewidths": 0.3} if len(boxes) <= MAX_OUTLINED else {"linewidths": 0}
        panel.add_collection(PolyCollection(corners, facecolors=[COLOURS[box[4]] for box in boxes], **outline))
        bound = arena.lower_bound_nbytes / unit
        panel.axhline(arena.nbytes / unit, color="#222", linewidth=1.2, label=f"arena {arena.nbytes / unit:.5g} {name}")
        panel.axhline(bound, color="#c00", linewidth=1.2, linestyle="--", label=f"lower bound {bound:.5g} {name}")
        panel.set_xlim(min((box[0] for box in boxes), default=0), max((box[1] for box in boxes), default=1))
        panel.set_ylim(0, max(arena.nbytes, arena.lower_bound_nbytes, 1) / unit * 1.04)
        panel.set_xlabel("time")
        panel.set_ylabel(f"address, {name}")
        title = f"{arena.name}: {len(plan.problem.of(arena.name)):,} buffers, {arena.gap:.2%} above the lower bound"
        panel.set_title(title.replace("$", r"\$"), loc="left")
        panel.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def picture_html(plan: AddressPlan) -> str:
    """Draws the plan as an HTML page. Hover names a buffer, the wheel zooms, dragging pans, a double click resets."""
    arenas = [
        {
            "name": arena.name,
            "nbytes": arena.nbytes,
            "bound": arena.lower_bound_nbytes,
            "title": f"{len(plan.problem.of(arena.name)):,} buffers in {format_bytes(arena.nbytes)}, "
            f"{arena.gap:.2%} above the lower bound of {format_bytes(arena.lower_bound_nbytes)}",
            "boxes": _boxes(plan, arena),
        }
        for arena in plan.arenas
    ]
    data = json.dumps({"colours": COLOURS, "arenas": arenas}, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    script = Path(__file__).with_name("svg.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>memo: address plan</title><style>{STYLE}</style></head><body>"
        f'<div id="panels"></div><div id="tip" hidden></div>'
        f'<script type="application/json" id="data">{data}</script><script>{script}</script></body></html>\n'
    )


STYLE = (
    ":root{color-scheme:light dark;font:14px system-ui,sans-serif}body{margin:16px}h1{font-size:16px;margin:12px 0 4px}"
    "canvas{width:100%;height:70vh;display:block}p{margin:0 0 6px;opacity:.75}"
    "#tip{position:fixed;pointer-events:none;background:Canvas;color:CanvasText;border:1px solid;padding:4px 8px;"
    "max-width:60ch;overflow-wrap:anywhere;white-space:pre-line}"
)


def _boxes(plan: AddressPlan, arena: ArenaPlan) -> list[tuple[int, int, int, int, int, str]]:
    """(start, end, offset, nbytes, colour, id) of every span of an arena's buffers, coloured by size and group."""
    kinds = sorted({(buffer.nbytes, buffer.group) for buffer in plan.problem.of(arena.name)})
    colours = {kind: rank % len(COLOURS) for rank, kind in enumerate(kinds)}
    boxes = []
    for buffer, offset in zip(plan.problem.buffers, plan.offsets, strict=True):
        if buffer.arena == arena.name and buffer.nbytes:
            colour = colours[buffer.nbytes, buffer.group]
            boxes += [(start, end, offset, buffer.nbytes, colour, buffer.id) for start, end in buffer.spans()]
    return boxes


def _unit(nbytes: int) -> tuple[int, str]:
    """The largest unit that the size reaches."""
    for shift, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift:
            return 1 << shift, name
    return 1, "B"
