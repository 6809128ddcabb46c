"""Every language model of the installed transformers, built small: is it bit-equal with memo, and how much of it moves?

    make bench ARMS=architectures
    python -m benchmarks.architectures [--only NAME ...] [--limit N] [--part 2/4] [--settings 1,0.3,0,matmuls,input,bfloat16]
                                       [--dropout 0.1] [--attention eager] [--experts eager] [--workers 2] [--timeout 240]
                                       [--continue FILE.json [--again NAME ...]] [--list] [--device cuda]
    python -m benchmarks.architectures --page FILE.json

Each architecture runs in a process of its own: plain twice, which says whether it repeats itself, then with memo at each
setting. A run is two steps without an optimizer: one forward and backward, then two forwards of other tokens and one
backward of both. Losses, every gradient and every buffer are compared bit for bit.

moved         bytes that memo moved from the end of the second forward to the end of the third: one forward's worth, the last
              layer's included, whose copies wait for a layer that follows; as a share of those at alpha 1
not moved     architectures of which nothing moves at alpha 1: their layers' forward runs without hooks
reasons       at alpha 0 and 0.3 what layers keep whole, by operator, and why (architectures_reasons.py)

All 264 classes of transformers 5.23 take 20 minutes with one worker of the lowest priority beside other work on two cores,
3 of them for Rwkv; two workers, the default, divide that among two cores. The result file is written again every few
seconds, so a sweep that is cut off leaves what it had; `--continue` goes on from there, and examines classes of `--again`
anew. A whole sweep on a CPU writes docs/architectures.md and the figures in docs/recompute.md; `--page` does that from a
file (architectures_page.py). On a GPU torch's deterministic algorithms are used, where there are some. Exits 1 where a class
is not equal or none was built.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import difflib
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

import memo
from benchmarks.architectures_page import PAGE, RECOMPUTE, is_whole, page, with_figures
from benchmarks.architectures_reasons import reasons_of
from benchmarks.machine import DETERMINISTIC
from benchmarks.results import ROOT, write_result
from benchmarks.small_architectures import BATCH, SEQ, build, loss_of, names
from memo.errors import UsageError
from memo.swap import Level

if TYPE_CHECKING:
    from torch import nn

    from memo.manager import Manager

SETTINGS: dict[str, Any] = {
    "1": 1.0,
    "0.3": 0.3,
    "0": 0.0,
    "matmuls": (0.0, 1.0, 0.0),
    "input": Level.SAVE_INPUT,
    "bfloat16": 0.0,
}
"""Name of a setting to its alpha or level; the last one's model is in bfloat16."""
EXPLAINED = "0"
"""Setting of which it is recorded what is kept, and why."""
WHOLE = "1"
HALF = 0.5
WRITTEN_EACH_S = 10.0
"""Between two writings of the result file."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of an examination: settings and the model's variants."""

    settings: tuple[str, ...] = tuple(SETTINGS)
    dropout: float = 0.0
    attention: str | None = None
    experts: str | None = None
    device: str = "cpu"
    workers: int = 2
    timeout_s: float = 240.0


@dataclasses.dataclass(slots=True, kw_only=True)
class Run:
    """Two steps of a model: what they computed and, with memo, what they moved."""

    results: dict[str, torch.Tensor | None]
    """Losses, gradients and buffers by name; None for a parameter without a gradient."""
    moved_bytes: int = 0
    recomputed_bytes: int = 0
    refused: dict[str, int] = dataclasses.field(default_factory=dict)
    """Layers that were refused, by reason."""
    reasons: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def _train(model: nn.Module, buffers: dict[str, torch.Tensor], manager: Manager | None = None) -> Run:
    """Two steps from the same buffers and random numbers."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    run = Run(results={})

    def forward(step: int) -> torch.Tensor:
        _seed(step)
        if manager is None:
            return loss_of(model, step)
        with manager:
            return loss_of(model, step)

    def moved() -> int:
        return 0 if manager is None else manager.stats.bytes_host + manager.stats.bytes_disk

    for step, steps in enumerate([(10,), (11, 12)]):
        model.zero_grad()
        total = torch.zeros(())
        for number in steps:
            before = moved()
            loss = forward(number)
            run.moved_bytes = moved() - before
            run.results[f"loss of tokens {number}"] = loss.detach().clone()
            total = total + loss.float()
        total.backward()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            run.results[f"gradient of {name}, step {step}"] = None if gradient is None else gradient.clone()
    for name, buffer in model.named_buffers():
        run.results[f"buffer {name}"] = buffer.clone()
    if manager is not None:
        run.recomputed_bytes = manager.stats.bytes_recomputed
        run.refused = dict(collections.Counter(getattr(manager.report().recompute, "refused", {}).values()))
        run.reasons = reasons_of(manager)
    return run


def _train_deterministically(model: nn.Module, buffers: dict[str, torch.Tensor]) -> Run:
    """`_train`. On a GPU it leaves deterministic algorithms on, as warnings where the model has an operator without."""
    torch.use_deterministic_algorithms(model.device.type != "cpu")
    try:
        return _train(model, buffers)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
    torch.use_deterministic_algorithms(True, warn_only=True)
    return _train(model, buffers)


def differing(got: Run, want: Run) -> list[str]:
    """Names of the results whose bits differ; a NaN is equal to the same NaN."""
    return [name for name, ours in got.results.items() if not _same(ours, want.results[name])]


def _same(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    return torch.equal(ours, theirs) or torch.equal(_bits(ours), _bits(theirs))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


def examine(name: str, options: Options) -> dict[str, Any]:
    """Everything about one architecture, as it goes into the result file.

    `failed` says why it was not built or not compared; `settings` has, for each one, whether it is equal, what differs, an
    error, the bytes moved and their share, the bytes recomputed, and how many layers were refused for which reason.
    """
    begun = time.monotonic()
    found: dict[str, Any] = {"name": name, "settings": {}}
    try:
        model = build(name, dropout=options.dropout, attention=options.attention, experts=options.experts)
        model.to(options.device)
        buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
        want = _train_deterministically(model, buffers)
        again = _train(model, buffers)
    except Exception as error:
        return {**found, "failed": f"not built: {_told(error)}"}
    if unlike := differing(again, want):
        return {**found, "failed": f"without memo it does not repeat itself: {', '.join(unlike[:3])}"}
    found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    found["without_gradient"] = sum(parameter.grad is None for parameter in model.parameters())
    for setting in sorted(options.settings, key=lambda one: one == "bfloat16"):  # last: it changes the model
        if setting == "bfloat16":
            model.to(torch.bfloat16)
            try:
                buffers = {key: buffer.to(model.get_buffer(key).dtype) for key, buffer in buffers.items()}
                want = _train(model, buffers)
                unlike = differing(_train(model, buffers), want)
            except Exception as error:
                found["settings"][setting] = {"not_run": f"fails without memo: {_told(error)}"}
                continue
            if unlike:
                found["settings"][setting] = {"not_run": "without memo it does not repeat itself"}
                continue
        found["settings"][setting] = _compared(model, buffers, want, setting, found)
    whole = found["settings"].get(WHOLE, {}).get("moved_bytes", 0)
    for setting, row in found["settings"].items():
        if setting != "bfloat16" and whole and "moved_bytes" in row:
            row["share"] = round(row["moved_bytes"] / whole, 4)
    found["seconds"] = round(time.monotonic() - begun, 1)
    return found


def _compared(
    model: nn.Module, buffers: dict[str, torch.Tensor], want: Run, name: str, found: dict[str, Any]
) -> dict[str, Any]:
    setting = SETTINGS[name]
    try:
        manager = memo.offload(model, alpha=None if isinstance(setting, Level) else setting, host="2GiB", min_bytes=1)
    except memo.MemoError as error:
        return {"not_run": _told(error)}
    try:
        found.setdefault("layers", len(manager.layers))
        found.setdefault("layer_classes", sorted({type(layer.module).__name__ for layer in manager.layers}))
        if isinstance(setting, Level):
            manager.choose_levels(dict.fromkeys(range(len(manager.layers)), setting))
        run = _train(model, buffers, manager)
    except Exception as error:
        return {"equal": False, "error": _told(error), "where": traceback.format_exc(limit=-3)}
    finally:
        manager.close()
    unlike = differing(run, want)
    row: dict[str, Any] = {
        "equal": not unlike,
        "moved_bytes": run.moved_bytes,
        "recomputed_bytes": run.recomputed_bytes,
    }
    if name == EXPLAINED:
        row["reasons"] = run.reasons
    return {**row, **({"differs": unlike[:5]} if unlike else {}), **({"refused": run.refused} if run.refused else {})}


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def sweep(wanted: Iterable[str], options: Options) -> Generator[dict[str, Any], None, None]:
    """Examines each architecture in a process of its own, `options.workers` at a time, and yields them as they end."""
    _import_what_all_need()
    context = multiprocessing.get_context("fork")
    waiting = list(wanted)[::-1]
    running: dict[Connection, tuple[str, Any, float]] = {}
    try:
        yield from _examined(context, waiting, running, options)
    finally:
        for _, process, _ in running.values():
            process.kill()
            process.join()


def _examined(
    context: Any, waiting: list[str], running: dict[Connection, tuple[str, Any, float]], options: Options
) -> Iterator[dict[str, Any]]:
    while waiting or running:
        while waiting and len(running) < options.workers:
            name = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(sender, name, options))
            process.start()
            sender.close()
            running[receiver] = (name, process, time.monotonic() + options.timeout_s)
        patience = max(0.0, min(end for _, _, end in running.values()) - time.monotonic())
        for receiver in wait(list(running), timeout=patience):
            assert isinstance(receiver, Connection)
            name, process, _ = running.pop(receiver)
            try:
                yield receiver.recv()
            except EOFError:
                process.join()
                yield {"name": name, "settings": {}, "failed": f"its process ended with {process.exitcode}"}
            process.join()
        for receiver, (name, process, end) in list(running.items()):
            if time.monotonic() >= end:
                process.kill()
                process.join()
                del running[receiver]
                yield {"name": name, "settings": {}, "failed": f"took more than {options.timeout_s:.0f} s"}


def _import_what_all_need() -> None:
    """Once here and not in each child."""
    import transformers
    from transformers import AutoModel, LlamaForCausalLM  # noqa: F401

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def _send(sender: Connection, name: str, options: Options) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep ends its processes itself
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        sender.send(examine(name, options))
    sender.close()


def line_of(found: dict[str, Any], options: Options) -> str:
    """One row for people: a cell for each setting, `=` equal, `DIFFERS` or `RAISES`, with the share that moved."""
    if "failed" in found:
        return f"{found['name'][:44]:44} {found['failed'][:140]}"
    cells = [_cell(found["settings"].get(setting, {})).rjust(12) for setting in options.settings]
    reasons = collections.Counter(reason for row in found["settings"].values() for reason in row.get("refused", {}))
    why = f"  {reasons.most_common(1)[0][0][:90]}" if reasons else ""
    return f"{found['name'][:44]:44} {' '.join(cells)} {found['seconds']:5.1f} s{why}"


def _cell(row: dict[str, Any]) -> str:
    if not row or "not_run" in row:
        return "-"
    if "error" in row:
        return "RAISES"
    share = f" {row['share']:.2f}" if "share" in row else ""
    return ("=" if row["equal"] else "DIFFERS") + share


def summary(rows: Sequence[dict[str, Any]], settings: Sequence[str]) -> dict[str, Any]:
    """Counts over all architectures, by setting."""
    built = [row for row in rows if "failed" not in row]
    found: dict[str, Any] = {
        "examined": len(rows),
        "built": len(built),
        "nothing_moves": [row["name"] for row in built if row["settings"].get(WHOLE, {}).get("moved_bytes") == 0],
        "settings": {},
    }
    for setting in settings:
        cells = {row["name"]: row["settings"].get(setting, {}) for row in built}
        run = {name: cell for name, cell in cells.items() if "equal" in cell}
        shares = [cell["share"] for cell in run.values() if "share" in cell]
        found["settings"][setting] = {
            "compared": len(run),
            "equal": sum(cell["equal"] for cell in run.values()),
            "unequal": [name for name, cell in run.items() if not cell["equal"]],
            "not_run": [name for name, cell in cells.items() if "equal" not in cell],
            "at_most_half": sum(share <= HALF for share in shares),
            "at_most_a_fifth": sum(share <= 0.2 for share in shares),
            "shares": len(shares),
            "median_share": statistics.median(shares) if shares else None,
            "with_refused_layers": sum("refused" in cell for cell in run.values()),
        }
    return found


def _tell(totals: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    print(f"\n{totals['built']} of {totals['examined']} built")
    for setting, found in totals["settings"].items():
        text = f"{setting:>9}: {found['equal']} of {found['compared']} equal"
        if found["shares"]:
            text += (
                f"; of {found['shares']} at most half moves in {found['at_most_half']}, at most a fifth in "
                f"{found['at_most_a_fifth']}, median {found['median_share']:.3f}; "
                f"{found['with_refused_layers']} with refused layers"
            )
        print(text)
        for name in found["unequal"]:
            cell = next(row for row in rows if row["name"] == name)["settings"][setting]
            print(f"           {name}: {cell.get('error') or 'differs: ' + ', '.join(cell['differs'])}")
    if totals["nothing_moves"]:
        print(f"nothing moves: {', '.join(totals['nothing_moves'])}")
    reasons = collections.Counter(reason for row in rows for reason in row["settings"].get("0", {}).get("refused", {}))
    for reason, count in reasons.most_common(15):
        print(f"{count:4} refused at alpha 0: {reason[:150]}")


def _named(only: Sequence[str]) -> list[str]:
    """The classes of these names, else those whose names contain them; all where none is given. As `_chosen` raises."""
    known = names()
    found = set() if only else set(known)
    for text in only:
        matching = {name for name in known if text.lower() in name.lower()}
        if not matching:
            stems = {name.partition("For")[0].lower(): name for name in known}
            near = [stems[stem] for stem in difflib.get_close_matches(text.partition("For")[0].lower(), stems)]
            told = f"near it: {', '.join(near)}" if near else "--list prints all"
            raise UsageError(f"no class {text!r} in the installed transformers; {told}")
        found |= {text} if text in known else matching
    return [name for name in known if name in found]


def _chosen(only: Sequence[str], part: str | None, limit: int | None) -> list[str]:
    """Names of classes, in order; of each of `only` the class of that name, else all whose names contain it.

    Raises:
        UsageError: no class is of that name, or `part` is no i/n.
    """
    chosen = _named(only)
    if part is not None:
        index, _, count = part.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise UsageError(f"--part {part}: give i/n, such as 2/4 for the second of every four classes")
        chosen = chosen[int(index) - 1 :: int(count)]
    return chosen[:limit]


def _settings(text: str) -> tuple[str, ...]:
    """Raises UsageError for an unknown one."""
    given = tuple(text.split(","))
    for setting in given:
        if setting not in SETTINGS:
            raise UsageError(f"no setting {setting!r}; they are {', '.join(SETTINGS)}")
    return given


def _before(path: Path, head: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of a sweep to go on from, and what the new file says of it.

    A row that was taken over has the commit that it is of.

    Raises:
        UsageError: it is of other versions, shapes or options.
    """
    result = _read(path)
    unlike = [name for name in ("torch", "transformers", "shape") if result[name] != head[name]]
    before = {"device": "cpu", **result["options"]}
    unlike += [name for name in _OF_RESULTS if before[name] != head["options"][name]]
    if unlike:
        raise UsageError(f"--continue {path.name}: it is of another {', '.join(unlike)}")
    rows = [{"commit": result["commit"], **row} for row in result["architectures"]]
    told = {"file": path.name, "date": result["date"], "commit": result["commit"]}
    return rows, [*result.get("continues", []), told]


_OF_RESULTS = ("settings", "dropout", "attention", "experts", "device")
"""Options that results depend on."""


def _read(path: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        if "architectures" not in result:
            raise UsageError(f"{path} is no result of this sweep")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="names, or parts of names")
    parser.add_argument("--part", metavar="i/n", help="every n-th of the classes, from the i-th on")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N of them")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--attention", help="implementation of attention")
    parser.add_argument("--experts", help="implementation of routed experts")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time, of one thread each")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one architecture")
    parser.add_argument("--continue", dest="before", type=Path, metavar="FILE", help="examine what FILE does not have")
    parser.add_argument(
        "--again", nargs="+", default=[], metavar="NAME", help="with --continue: classes to examine anew"
    )
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write docs/architectures.md from FILE and end")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        return _main(args)
    except UsageError as error:
        print(f"architectures: {error}", file=sys.stderr)
        return 2


def _main(args: argparse.Namespace) -> int:
    if args.page is not None:
        _write_page(args.page)
        return 0
    if args.device == "cuda":  # this process must not initialise CUDA, or its forks could not use it
        os.environ.update(DETERMINISTIC, PYTORCH_NVML_BASED_CUDA_CHECK="1")
    import transformers

    options = Options(
        settings=_settings(args.settings),
        dropout=args.dropout,
        attention=args.attention,
        experts=args.experts,
        device=args.device,
        workers=args.workers,
        timeout_s=args.timeout,
    )
    wanted = _chosen(args.only, args.part, args.limit)
    if args.list:
        print("\n".join(wanted))
        return 0
    head: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shape": {"batch": BATCH, "seq": SEQ},
        "options": {**dataclasses.asdict(options), "settings": list(options.settings)},
        "classes": len(names()),
    }
    rows: list[dict[str, Any]] = []
    if args.before is not None:
        rows, head["continues"] = _before(args.before, head)
        known = {row["name"] for row in rows}.difference(_named(args.again) if args.again else ())
        wanted = [name for name in wanted if name not in known]
    ended = _run(wanted, options, rows, head)
    result = _result(rows, head)
    _tell(result["summary"], result["architectures"])
    path = _write(result)
    print(f"Wrote {path}")
    if not ended:
        print(f"Cut off; the rest: python -m benchmarks.architectures --continue {path}")
        return 130
    if is_whole(result) and path.parent == ROOT / "benchmarks" / "results":
        _write_page(path)
    totals = result["summary"]
    return 0 if totals["built"] and not any(found["unequal"] for found in totals["settings"].values()) else 1


def _run(wanted: Sequence[str], options: Options, rows: list[dict[str, Any]], head: dict[str, Any]) -> bool:
    """Adds the rows of a sweep in the place of older ones, prints them, writes what is known; False if interrupted."""
    print(f"{'':8}{'':44} {' '.join(setting.rjust(12) for setting in options.settings)}")
    written = time.monotonic()
    try:
        with contextlib.closing(sweep(wanted, options)) as found:
            for done, row in enumerate(found, 1):
                rows[:] = [*(other for other in rows if other["name"] != row["name"]), row]
                print(f"{done:3}/{len(wanted)} {line_of(row, options)}", flush=True)
                if time.monotonic() - written >= WRITTEN_EACH_S:
                    _write(_result(rows, head))
                    written = time.monotonic()
    except KeyboardInterrupt:
        return False
    return True


def _write(result: dict[str, Any]) -> Path:
    return write_result("architectures" if result["options"]["device"] == "cpu" else "architectures-gpu", result)


def _result(rows: Sequence[dict[str, Any]], head: dict[str, Any]) -> dict[str, Any]:
    known = sorted(rows, key=lambda row: row["name"].lower())
    return {**head, "summary": summary(known, head["options"]["settings"]), "architectures": known}


def _write_page(path: Path) -> None:
    result = _read(path)
    if result["options"].get("device", "cpu") != "cpu":
        raise UsageError(f"--page {path.name}: it is of a GPU, and the page is of a CPU")
    PAGE.write_text(page(result, path.name))
    RECOMPUTE.write_text(with_figures(RECOMPUTE.read_text(), result, path.name))
    print(f"Wrote {PAGE} and the figures in {RECOMPUTE}")


if __name__ == "__main__":
    sys.exit(main())
