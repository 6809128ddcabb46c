"""The page docs/architectures.md, made from one result file of the sweep over architectures and from nothing else.

It also makes the figures of docs/recompute.md between two marks. A row a class: the bytes offloaded at each setting as a
share of those at alpha 1, and what is kept at alpha 0. Reasons are single words with a legend, so that a class stays a row.
"""

from __future__ import annotations

import collections
import json
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.architectures_reasons import MADE_OF
from benchmarks.results import ROOT
from memo.units import format_bytes

PAGE = ROOT / "docs" / "architectures.md"
RECOMPUTE = ROOT / "docs" / "recompute.md"
BEGIN, END = "<!-- figures of the newest sweep -->", "<!-- end of figures -->"
BEFORE = ROOT / "benchmarks" / "results" / "2026-11-22-architectures.json"
"""A sweep from when backward called a layer's forward again, which docs/recompute.md compares with."""

Entry = Mapping[str, Any]
"""Words of a result about one architecture, or about its layers that are alike."""

_WHOLE, _MIXED, _BFLOAT16 = "1", "0.3", "bfloat16"
_SHARES = (_MIXED, "matmuls", "0", "input")
"""Settings of the columns."""
_WORDS = {
    "attention is kept": ("attention", "outputs of fused attention"),
    "a product of two activations is kept": (
        "matmul",
        "matmuls of two activations that are not larger than both: unfused attention, the states of a recurrence",
    ),
    "convolution": ("convolution", "convolutions over several tokens"),
    "hidden states": ("input", "the layer's input"),
    "argument": ("argument", "other arguments of the layer: masks, an encoder's output, a second stream"),
    "other tensor": ("other", "memory that existed before the layer and is not an argument"),
    "sorting is kept": ("sort", "sorts and top-k, such as a router's choice of experts, and what is derived from them"),
    "a scatter is kept": ("scatter", "scatters: which row goes to which expert"),
    "a scan is kept": ("scan", "cumulative sums and Fourier transforms"),
    "it draws random numbers": ("random", "random numbers"),
    "its size depends on numbers": ("sized", "results whose size depends on data, such as the rows of one expert"),
    "it is the layer's result": ("result", "the layer's output, which the next layer saves too"),
    "repeating it gave something else": ("differs", "results that a trial recompute did not reproduce bit for bit"),
    "keeping it is cheapest": ("smaller", "results that are smaller than everything they could be recomputed from"),
    "": ("unseen", "writes that the dispatcher does not see, and all other reasons"),
}
"""Reason of `explain`, of what was there before where it is from -> its word on the page, and what that stands for."""
_CONVOLUTION = "convolution"
_WIDTH = 120
_WORDS_WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
_LEAST, _LEAST_SHOWN, _MOST_WORDS = 0.01, 0.05, 4
"""Share of the kept bytes from which a word counts for a class, and is shown in a cell, and most words of a cell."""
_STATES = ("convolution", "scan")
"""Words of layers that carry a state from token to token, where these take a share of what is kept."""


def page(result: Entry, file: str) -> str:
    """The text of the page.

    Args:
        result: what the sweep wrote.
        file: its name in benchmarks/results.
    """
    rows: Sequence[Entry] = result["architectures"]
    built = [row for row in rows if "failed" not in row]
    parts = (
        "# Architectures",
        f"<!-- Made by `python -m benchmarks.architectures --page {file}`; not to be edited. -->",
        *_head(result, file),
        "## Summary",
        *_summary(result, rows, built),
        "## What is offloaded at alpha 0",
        *_kept(built),
        "## Experts",
        *_experts(built),
        "## Convolutions and scans, alone and beside attention",
        *_states(built),
        "## Every class",
        *_classes(rows),
    )
    return "\n\n".join(map(_wrapped, parts)) + "\n"


def _wrapped(text: str) -> str:
    return text if text.startswith(("#", "<", "|", " ")) else "\n".join(textwrap.wrap(text, _WIDTH, **_WORDS_WHOLE))


def with_figures(text: str, result: Entry, file: str) -> str:
    """The text of docs/recompute.md with the figures of a sweep between its marks.

    Args:
        text: the page as it is.
        result: what the sweep wrote.
        file: its name in benchmarks/results.

    Raises:
        ValueError: the marks are not there.
    """
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return "\n\n".join((text[:begin], *map(_wrapped, _figures(result, file)), text[end:]))


def _figures(result: Entry, file: str) -> Iterator[str]:
    before = json.loads(BEFORE.read_text())
    now, then = result["summary"], before["summary"]
    older = sum("commit" in row for row in result["architectures"])
    yield (
        f"Every causal, masked and sequence-to-sequence class of transformers {result['transformers']}: {now['built']} of"
        f" {now['examined']} could be built small with random weights and repeat themselves without memo. Two steps, other"
        " tokens in the second; moved bytes as a share of those at `alpha=1`. Before: the layer's own forward ran again in"
        " backward." + (f" {_counted(older)} of the newer file are of commits before its own." if older else "")
    )

    def equal(found: Entry, *settings: str) -> str:
        told = [f"{found['settings'][name]['equal']} of {found['settings'][name]['compared']}" for name in settings]
        return "; ".join(dict.fromkeys(told))

    def below(found: Entry, name: str) -> str:
        return f"{found['settings']['0'][name]} of {found['settings']['0']['shares']}"

    def median(found: Entry, setting: str) -> str:
        return f"{found['settings'][setting]['median_share']:.3f}"

    exact = (_WHOLE, *_SHARES)
    sources = [f"[{one}](../benchmarks/results/{name})" for one, name in (("before", BEFORE.name), ("replays", file))]
    yield _table(
        ("", *sources),
        [
            ("equal bit for bit in float32, at each setting", equal(then, *exact), equal(now, *exact)),
            ("equal bit for bit in bfloat16 at alpha 0", equal(then, _BFLOAT16), equal(now, _BFLOAT16)),
            ("at most half of the bytes move at alpha 0", below(then, "at_most_half"), below(now, "at_most_half")),
            ("at most a fifth moves at alpha 0", below(then, "at_most_a_fifth"), below(now, "at_most_a_fifth")),
            *(
                (f"median share at {_named(setting)}", median(then, setting), median(now, setting))
                for setting in ("0", _MIXED, "matmuls", "input")
            ),
        ],
    )


def newest(folder: Path) -> Path:
    """The file of the newest whole sweep with reasons.

    Raises:
        FileNotFoundError: there is none.
    """
    found = {}
    for path in folder.glob("*-architectures.json"):
        result = json.loads(path.read_text() or "{}")
        if is_whole(result):
            found[result["date"], result["begun"]] = path
    if not found:
        raise FileNotFoundError(f"no result of a whole sweep in {folder}")
    return found[max(found)]


def is_whole(result: Entry) -> bool:
    """True for every class at every setting, as the defaults have it, with reasons."""
    rows, options = result.get("architectures", []), result.get("options", {})
    if len(rows) < result.get("classes", len(rows)) or any(options.get(name) for name in _VARIANTS):
        return False
    if options.get("device", "cpu") != "cpu":
        return False
    has = {setting for row in rows for setting in row["settings"]}
    return has >= {_WHOLE, *_SHARES, _BFLOAT16} and any(
        "reasons" in cell for row in rows for cell in row["settings"].values()
    )


_VARIANTS = ("dropout", "attention", "experts")


# -- head and summary


def _head(result: Entry, file: str) -> Iterator[str]:
    shape, machine = result["shape"], result["hardware"]
    yield (
        "Which transformers architectures memo was tested on: every causal, masked and sequence-to-sequence language model"
        f" class, built at small size with random weights ({shape['batch']} sequences of {shape['seq']} tokens), takes two"
        " training steps on different tokens, without memo and with it at each setting. Losses, gradients and buffers are"
        " compared bit for bit; offloaded bytes are those of one forward. Settings: [recompute.md](recompute.md)."
    )
    yield "\n".join(
        (
            "    make bench ARMS=architectures                              the whole sweep, then this page",
            "    python -m benchmarks.architectures --only Llama Mixtral    a part of it; `--help` has the rest",
        )
    )
    commits = collections.Counter(row["commit"] for row in result["architectures"] if "commit" in row)
    continued = "".join(f" {_counted(count)} of it: commit {commit}." for commit, count in commits.items())
    yield (
        f"Generated from [{file}](../benchmarks/results/{file}): {result['date']}, commit {result['commit']}, torch"
        f" {result['torch']}, transformers {result['transformers']}, {machine['cpu']} with {machine['cores']} cores and"
        f" {format_bytes(machine['memory_bytes'])}, no GPU.{continued} Shares are of small models; in"
        " wider layers and longer sequences other parts weigh more. Times are not compared."
    )


def _summary(result: Entry, rows: Sequence[Entry], built: Sequence[Entry]) -> Iterator[str]:
    totals = result["summary"]
    layered = [row for row in built if "layers" in row]
    without = [row["name"] for row in built if "layers" not in row]
    text = (
        f"{totals['built']} of {totals['examined']} classes were built and are reproducible bit for bit without memo, within"
        f" {result['options']['timeout_s']:.0f} s each; {len(layered)} have repeated layers."
    )
    if without:
        text += f" Without repeated layers: {_listed(without)}."
    if totals["nothing_moves"]:
        text += f" Nothing is offloaded in {_listed(totals['nothing_moves'])}, whose layers save nothing or never run."
    yield text
    header = (
        "setting",
        "what is kept",
        "bit-identical",
        "median share offloaded",
        "at most half",
        "at most a fifth",
    )
    kept = {
        _WHOLE: "all that autograd saves",
        "0.3": "the first 30 % of the tokens (now: of the bytes); attention outputs of the others",
        "matmuls": "outputs of matmuls and attention",
        "0": "attention outputs",
        "input": "the layers' inputs",
        _BFLOAT16: "as 0, the model in bfloat16",
    }
    lines = []
    for setting in (_WHOLE, *_SHARES, _BFLOAT16):
        found = totals["settings"][setting]
        shares = found["shares"]
        below = [f"{found[name]} of {shares}" if shares else "" for name in ("at_most_half", "at_most_a_fifth")]
        median = "" if found["median_share"] is None else f"{found['median_share']:.3f}"
        lines.append((_named(setting), kept[setting], f"{found['equal']} of {found['compared']}", median, *below))
    yield _table(header, lines)
    unequal = [
        f"{name} at {_named(setting)}" for setting, found in totals["settings"].items() for name in found["unequal"]
    ]
    if unequal:
        yield f"**Not equal: {_listed(unequal)}.**"
    not_run = [row["name"] for row in layered if "not_run" in row["settings"].get(_BFLOAT16, {})]
    if not_run:
        yield f"Not compared in bfloat16, where they fail or are not reproducible without memo: {_listed(not_run)}."
    failed = [row for row in rows if "failed" in row]
    if failed:
        yield _table(("not built or not compared", "reason"), ((_class(row), _reason(row["failed"])) for row in failed))


def _named(setting: str) -> str:
    return f"alpha {setting}" if setting[0].isdigit() else setting


# -- what is kept


def _weights(entries: Iterable[Entry]) -> dict[str, float]:
    """Word -> share of the bytes that layers keep, the largest first."""
    nbytes: collections.Counter[str] = collections.Counter()
    for entry in entries:
        for operator, why, kept, origin in entry.get("kept", ()):
            nbytes[_word(operator, why, origin)] += entry["layers"] * kept
    total = nbytes.total()
    return {word: count / total for word, count in nbytes.most_common() if count}


def _word(operator: str, why: str, origin: str) -> str:
    if why == MADE_OF and origin:
        operator, _, why = origin.partition(": ")
    if why == "it was there before the layer":
        why = operator
    elif _CONVOLUTION in operator:
        why = _CONVOLUTION
    return _WORDS.get(why, _WORDS[""])[0]


def _entries(row: Entry, setting: str) -> Sequence[Entry]:
    found: Sequence[Entry] = row["settings"].get(setting, {}).get("reasons", ())
    return found


def _kept(built: Sequence[Entry]) -> Iterator[str]:
    yield (
        "What is kept although this setting allows recompute, by reason. A result derived from one that is neither kept nor"
        " recomputed counts with the latter. The share is of the bytes offloaded at alpha 0, the median over the classes"
        " where the word appears."
    )
    of_class = {row["name"]: _weights(_entries(row, "0")) for row in built}
    lines = []
    for word, meaning in _WORDS.values():
        shares = [weights[word] for weights in of_class.values() if weights.get(word, 0) >= _LEAST]
        if shares:
            lines.append((f"`{word}`", meaning, str(len(shares)), _percent(statistics.median(shares))))
    yield _table(("word", "what is kept", "classes", "share"), lines)
    others = collections.Counter(
        why
        for row in built
        for entry in _entries(row, "0")
        for operator, why, _, origin in entry.get("kept", ())
        if _word(operator, why, origin) == "unseen"
    )
    if others:
        yield f"`unseen` is here: {'; '.join(f'{why} ({count})' for why, count in others.most_common(6))}."
    # `now` is a choice among what is still there: the best one would keep something that has gone.
    short = {row["name"]: None for row in built for entry in _entries(row, "0") if entry.get("point") == "now"}
    if short:
        yield (
            f"In {_counted(len(short))} the last forward took another path than the one before, and some tensors that a"
            f" layer would best keep no longer existed at its end; more is kept there instead: {_listed(list(short))}."
        )
    high = [row for row in built if row["settings"].get("0", {}).get("share", 0) > 0.2]
    if high:
        told = (f"{_class(row)} {row['settings']['0']['share']:.3f} ({_cell(of_class[row['name']])})" for row in high)
        yield f"More than a fifth is offloaded at alpha 0 in {_counted(len(high))}: {'; '.join(told)}."


def _cell(weights: Mapping[str, float]) -> str:
    shown = [(word, share) for word, share in weights.items() if share >= _LEAST_SHOWN][:_MOST_WORDS]
    return ", ".join(f"{word} {_percent(share)}" for word, share in shown)


# -- experts, convolutions and scans


def _experts(built: Sequence[Entry]) -> Iterator[str]:
    """Layers with experts, and what they keep at 0."""
    found = [(row, [entry for entry in _entries(row, "0") if entry.get("experts")]) for row in built]
    found = [(row, entries) for row, entries in found if entries]
    if not found:
        yield "None of the classes has experts."
        return
    shares = [row["settings"]["0"]["share"] for row, _ in found if "share" in row["settings"].get("0", {})]
    median = f" the median share offloaded is {statistics.median(shares):.3f}" if shares else ""
    yield (
        f"{_counted(len(found))} with layers that route rows to experts. At alpha 0{median}: matmuls of the router and the"
        " experts and element-wise operators are recomputed. The choice of experts (`sort`), the positions of their rows"
        " (`scatter`) and the cumulative counts of rows (`scan`) are kept, so that the replay takes the same path; where"
        " each expert's rows are selected by index, these are `sized`."
    )
    yield _table(
        ("class", "layers with experts", "kept at 0"),
        (
            (
                _class(row),
                _modules(entries),
                _cell(_weights(entries)),
            )
            for row, entries in found
        ),
    )


def _states(built: Sequence[Entry]) -> Iterator[str]:
    """Layers whose convolutions or scans take a share of what is kept at 0, and the other layers of their classes."""
    lines = []
    hybrid = 0
    for row in built:
        entries = _entries(row, "0")
        having = [entry for entry in entries if any(_weights([entry]).get(word, 0) >= _LEAST for word in _STATES)]
        if not having:
            continue
        others = [entry for entry in entries if entry not in having and "kept" in entry]
        hybrid += bool(others)
        cells = (_modules(having), _cell(_weights(having)), _modules(others), _cell(_weights(others)))
        lines.append((_class(row), *cells))
    if not lines:
        yield "None of the classes has such layers."
        return
    yield (
        f"{_counted(len(lines))} with layers in which convolutions over several tokens, cumulative sums or Fourier"
        f" transforms are part of what is kept; {hybrid} of them also have layers without these. Their results are kept at"
        " alpha 0, as those of attention are, and so are recurrent states from matmuls of two activations: recomputing these"
        " takes the most time per byte. Projections and element-wise operators are recomputed."
    )
    yield _table(("class", "layers", "kept at 0", "other layers", "kept at 0"), lines)


def _modules(entries: Sequence[Entry]) -> str:
    counts: collections.Counter[str] = collections.Counter()
    for entry in entries:
        counts[entry["module"]] += entry["layers"]
    return ", ".join(f"{count} {name}" for name, count in counts.items())


# -- every class


def _classes(rows: Sequence[Entry]) -> Iterator[str]:
    yield (
        "Column 1: bytes that one forward offloads at alpha 1; other settings: share of these, where a number means"
        " bit-identical; `bf16`: at alpha 0 in bfloat16, `=` means bit-identical. Words as above with their"
        " share of the bytes at alpha 0, from 5 %."
    )
    header = ("class", "1", *_SHARES, "bf16", "kept at 0")
    yield _table(header, map(_row, rows))


def _row(row: Entry) -> tuple[str, ...]:
    blank = [""] * (len(_SHARES) + 2)
    if "failed" in row:
        kind = "not built: " if row["failed"].startswith("not built: ") else ""
        return _class(row), *blank, f"{kind}{_reason(row['failed'])}"
    settings = row["settings"]
    whole = settings.get(_WHOLE, {})
    if "not_run" in whole:
        return _class(row), *blank, f"not run: {_reason(whole['not_run'])}"
    first = _state(whole) or format_bytes(whole.get("moved_bytes", 0))
    shares = [_state(cell := settings.get(name, {})) or _share(cell) for name in _SHARES]
    last = _state(settings.get(_BFLOAT16, {})) or "="
    return _class(row), first, *shares, last, _cell(_weights(_entries(row, "0")))


def _state(cell: Entry) -> str:
    """A word for what is not an equal run; empty for one."""
    if "equal" not in cell:
        return "not run"
    return "" if cell["equal"] else "**raises**" if "error" in cell else "**differs**"


def _share(cell: Entry) -> str:
    return f"{cell['share']:.3f}" if "share" in cell else "nothing"


def _class(row: Entry) -> str:
    return str(row["name"])


_LONGEST = 110


def _reason(text: str) -> str:
    """One line, which a cell of a table can hold."""
    plain = text.removeprefix("not built: ").replace("|", "/").replace("<", "(").replace(">", ")").replace("`", "'")
    return plain if len(plain) <= _LONGEST else f"{plain[: _LONGEST - 3].rstrip()}..."


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _counted(classes: int) -> str:
    return f"{classes} class{'' if classes == 1 else 'es'}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))
