"""The page without a browser: what it embeds, that nothing foreign can act in it, and that thinning is honest."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memo.events import (
    CounterEvent,
    Event,
    Lane,
    Note,
    Span,
    Stall,
    StallCause,
    StateChange,
    StepMark,
    TensorState,
    TierName,
)
from memo.trace import Trace, build_report, device_stack, page_data, read_traces, render_page, residency_changes
from memo.trace.format import printable, without_folders
from memo.trace.html import embedded_json

VIEWER = Path(__file__).parent.parent.parent / "memo" / "trace"
MakeTrace = Callable[..., Trace]
HOSTILE_NAMES = [
    "</script><script>alert(1)</script>",
    "</SCRIPT ><img src=x onerror=alert(1)>",
    "<!--<script>",
    "]]><svg onload=alert(1)>",
    "a\u2028b\u2029c",
    "${alert(1)}`",
    "javascript:alert(1)",
    '"onmouseover="alert(1)',
    "&lt;b&gt;",
    "\u202egnp.exe",
    "\ud800",
    "__proto__",
    "x" * 60_000,
]


def hostile_events() -> list[Event]:
    """A step in which every text field there is carries a hostile name."""
    events: list[Event] = [StepMark(t=0, step=0, phase="begin"), StepMark(t=1000, step=0, phase="end")]
    for i, name in enumerate(HOSTILE_NAMES):
        t = 10 * i + 1
        events += [
            StateChange(t=t, step=0, id=i, to=TensorState.LIVE, nbytes=8, module=name, shape=(2, 2), dtype=name),
            Span(t=t, d=5, step=0, lane=Lane.COMPUTE, module=name, phase=name),
            Span(t=t, d=5, step=0, lane=Lane.D2H, id=i, nbytes=8),
            Stall(t=t, d=2, step=0, cause=StallCause.DRAIN, module=name, id=i),
            Note(t=t, step=0, cause=name, message=name),
        ]
    return events


class _Page(html.parser.HTMLParser):
    """Elements and the text of scripts and styles, as a parser of its own sees them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag in ("script", "style")
        if self._inside:
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[-1] += data


def page_of(*traces: Trace, **options: Any) -> str:
    return render_page(page_data(build_report(traces), **options), title="memo trace: <b>&")


def test_hostile_names_add_no_element_and_survive_as_data(make_trace: MakeTrace) -> None:
    plain = _Page(page_of(make_trace([])))
    meta = {name[:40]: name for name in HOSTILE_NAMES}
    page = _Page(page_of(make_trace(hostile_events(), meta=meta)))
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
    data = json.loads(next(text for text in page.texts if text.startswith("{")))
    assert set(HOSTILE_NAMES) <= set(data["names"])


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_embedded_json_holds_no_character_that_markup_reads(name: str) -> None:
    text = embedded_json({name[:40]: name})
    assert not set(text) & set("<>&\u2028\u2029")
    assert text.isascii()
    assert json.loads(text) == {name[:40]: name}


def test_the_policy_allows_the_inlined_script_and_style_and_nothing_else(make_trace: MakeTrace) -> None:
    page = _Page(page_of(make_trace([])))
    policy = next(
        attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    style, *_, script = page.texts
    for rule, text in (("style-src", style), ("script-src", script)):
        assert rules[rule] == "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def test_the_page_refers_to_nothing_outside_itself(make_trace: MakeTrace) -> None:
    for tag, attrs in _Page(page_of(make_trace([]))).elements:
        assert not attrs.keys() & {"src", "href", "srcset", "action", "data"}, tag


def test_no_source_parses_markup_or_text_as_code() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc"
    )
    scripts = [*(VIEWER / "assets").glob("*.js")]
    sources = [*(VIEWER / "viewer" / "src").rglob("*.*"), *scripts]
    assert len(scripts) == 1
    assert len(sources) > 10
    for source in sources:
        assert not forbidden.search(source.read_text(encoding="utf-8")), source.name


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/jane/env/bin/memo train --disk=/mnt/nvme/jane/", "…/memo train --disk=…/jane/"),
        ("'/Users/jane/a.py', line 3", "'…/a.py', line 3"),
        ("--data /home/jane", "--data …"),
        ("../../env/bin/memo", "…/memo"),
        ("runs/a/trace.jsonl at 5 GiB/s, https://a.b/c/d", "runs/a/trace.jsonl at 5 GiB/s, https://a.b/c/d"),
    ],
)
def test_a_path_of_the_author_is_shortened_to_its_last_part(make_trace: MakeTrace, text: str, shown: str) -> None:
    assert without_folders({"a": [text]}) == {"a": [shown]}
    note = Note(t=1, step=0, cause="fallback", message=text)
    page = page_of(make_trace([note], meta={"command": text}, path=text, remarks=(text,)))
    assert text == shown or text not in page


def test_a_long_text_is_cut_between_words() -> None:
    text = "all layers are alike, at alpha 0.125, which measured steps have room for on this device"
    assert printable(text, limit=60) == "all layers are alike, at alpha 0.125, … for on this device"
    assert printable("x" * 90, limit=10) == "xxxxxx…xxx"


def test_a_hostile_title_is_text(make_trace: MakeTrace) -> None:
    assert "<title>memo trace: &lt;b&gt;&amp;</title>" in page_of(make_trace([]))


def test_the_page_without_its_data_is_under_three_megabytes(make_trace: MakeTrace) -> None:
    assert len(page_of(make_trace([])).encode()) < 3 << 20


def test_the_licences_of_what_is_inlined_travel_with_it() -> None:
    text = (VIEWER / "assets" / "LICENSES.txt").read_text(encoding="utf-8")
    pinned = json.loads((VIEWER / "viewer" / "package.json").read_text(encoding="utf-8"))["dependencies"]
    for package, version in pinned.items():
        assert f"{package} {version}\n" in text


@pytest.fixture(scope="module")
def run(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("page") / "t.jsonl"
    synthetic.write(path, synthetic.Workload(layers=8, tensors=8, steps=3))
    return read_traces([path])[0]


def decoded(differences: list[int]) -> list[int]:
    total, values = 0, []
    for difference in differences:
        total += difference
        values.append(total)
    return values


def test_columns_decode_to_the_events(run: Trace) -> None:
    (rank,) = page_data(build_report([run]))["ranks"]
    spans = [event for event in run.events if isinstance(event, Span)]
    drawn = [
        (list(Lane)[row["lane"]], t, d)
        for row in rank["rows"]
        for t, d in zip(decoded(row["t"]), row["d"], strict=True)
    ]
    assert sorted(drawn) == sorted((span.lane, span.t, span.d) for span in spans)
    assert rank["thinned"] is None
    for tier, columns in zip(TierName, rank["tiers"], strict=True):
        counters = [event for event in run.events if isinstance(event, CounterEvent) and event.tier is tier]
        assert decoded(columns["counter_t"]) == [counter.t for counter in counters]


def test_every_copy_points_at_its_tensor(run: Trace) -> None:
    data = page_data(build_report([run]))
    (rank,) = data["ranks"]
    ids = {(event.t, event.lane): event.id for event in run.events if isinstance(event, Span)}
    for row in rank["rows"]:
        for t, life in zip(decoded(row["t"]), row["life"], strict=True):
            expected = ids[t, list(Lane)[row["lane"]]]
            assert (None if life < 0 else rank["lives"]["id"][life]) == expected


def test_rows_of_a_lane_never_overlap(make_trace: MakeTrace) -> None:
    spans = [Span(t=t, d=10, step=0, lane=Lane.DISK_WRITE, nbytes=1) for t in (0, 5, 7, 12, 30)]
    (rank,) = page_data(build_report([make_trace(spans)]))["ranks"]
    assert len(rank["rows"]) == 3
    for row in rank["rows"]:
        t = decoded(row["t"])
        assert all(start + d <= after for start, d, after in zip(t, row["d"], t[1:], strict=False))


def test_a_large_trace_is_thinned_said_and_keeps_its_figures_bytes_and_stalls(run: Trace) -> None:
    whole = page_data(build_report([run]))
    thin = page_data(build_report([run]), max_items=1000)
    (rank,) = thin["ranks"]
    assert "thinned" in rank["thinned"]
    assert "can be selected" in rank["thinned"]
    assert thin["stats"] == whole["stats"]
    assert len(embedded_json(thin["ranks"])) < len(embedded_json(whole["ranks"])) / 3
    assert len(rank["lives"]["id"]) < len(whole["ranks"][0]["lives"]["id"])
    assert rank["stalls"]["t"] == whole["ranks"][0]["stalls"]["t"]
    moved = sum(span.nbytes or 0 for span in run.events if isinstance(span, Span))
    assert sum(sum(row["nbytes"]) for row in rank["rows"]) == moved
    for tier, columns in zip(TierName, rank["tiers"], strict=True):
        lifetimes = build_report([run]).ranks[0].lifetimes
        changes = [change.delta for change in residency_changes(lifetimes) if change.tier is tier]
        if tier is TierName.DEVICE:
            changes = [change.delta for change in device_stack(run.events, lifetimes).changes]
        assert sum(columns["delta"]) == sum(changes)


def test_a_lanes_queue_has_copies_from_their_issue_to_their_end(make_trace: MakeTrace) -> None:
    events: list[Event] = []
    for number, (issued, begun, d) in enumerate(((0, 4, 6), (2, 10, 5), (30, 30, 1))):
        events += [
            StateChange(t=issued, step=0, id=number, to=TensorState.LEAVING, nbytes=8),
            Span(t=begun, d=d, step=0, lane=Lane.DISK_WRITE, nbytes=8, id=number),
        ]
    report = build_report([make_trace(sorted(events, key=lambda event: event.t))])
    queues = {list(Lane)[one["lane"]]: one for one in page_data(report)["ranks"][0]["queues"]}
    written = queues[Lane.DISK_WRITE]
    assert list(zip(decoded(written["t"]), written["nbytes"], strict=True)) == [
        (0, 8), (2, 16), (10, 8), (15, 0), (30, 8), (31, 0),
    ]  # fmt: skip
    assert queues[Lane.D2H]["t"] == []


def test_a_thinned_queue_keeps_its_peak_and_its_end(run: Trace) -> None:
    whole, thin = (page_data(build_report([run]), max_items=most)["ranks"][0] for most in (400_000, 1000))
    assert thin["thinned"]
    for exact, drawn in zip(whole["queues"], thin["queues"], strict=True):
        assert max(drawn["nbytes"], default=0) == max(exact["nbytes"], default=0)
        assert drawn["nbytes"][-1:] == exact["nbytes"][-1:]


def test_ranks_stand_on_one_axis(make_trace: MakeTrace) -> None:
    span = Span(t=7, d=1, step=0, lane=Lane.COMPUTE)
    data = page_data(
        build_report([make_trace([span], origin_unix_ns=100), make_trace([span], rank=1, origin_unix_ns=150)])
    )
    assert [rank["rows"][0]["t"] for rank in data["ranks"]] == [[7], [57]]
