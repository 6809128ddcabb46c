"""Every language model of the installed transformers, built small: is it bit-equal with memo, and how much of it moves?

    python -m benchmarks.architectures [--only NAME ...] [--limit N] [--settings 1,0.3,0,matmuls,input,bfloat16]
                                       [--dropout 0.1] [--attention eager] [--experts eager] [--workers 2] [--list]

Each architecture runs in a process of its own: plain twice, which says whether it repeats itself, then with memo at each
setting. A run is two steps without an optimizer: one forward and backward, then two forwards of other tokens and one
backward of both. Losses, every gradient and every buffer are compared bit for bit.

moved         bytes that memo moved from the end of the second forward to the end of the third: one forward's worth, the last
              layer's included, whose copies wait for a layer that follows; as a share of those at alpha 1
not moved     architectures of which nothing moves at alpha 1: their layers' forward runs without hooks
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import multiprocessing
import os
import random
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import numpy
import torch

import memo
from benchmarks.architectures_reasons import reasons_of
from benchmarks.results import write_result
from benchmarks.small_architectures import BATCH, SEQ, build, loss_of, names
from memo.swap import Level

if TYPE_CHECKING:
    from torch import nn

    from memo.manager import Manager

__all__ = ["Options", "examine", "sweep"]

SETTINGS: dict[str, Any] = {
    "1": 1.0,
    "0.3": 0.3,
    "0": 0.0,
    "matmuls": (0.0, 1.0, 0.0),
    "input": Level.SAVE_INPUT,
    "bfloat16": 0.0,
}
"""Name of a setting to its alpha or level; the last one's model is in bfloat16."""
EXPLAINED = ("0", "0.3")
"""Settings of which reasons are recorded: what is kept whole where all may be repeated, and where tokens are divided."""
WHOLE = "1"
HALF = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of an examination: settings and the model's variants."""

    settings: tuple[str, ...] = tuple(SETTINGS)
    dropout: float = 0.0
    attention: str | None = None
    experts: str | None = None
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
        run.refused = dict(collections.Counter(getattr(manager.report().tokenwise, "refused", {}).values()))
        run.reasons = reasons_of(manager)
    return run


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
        buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
        want = _train(model, buffers)
        again = _train(model, buffers)
    except Exception as error:
        return {**found, "failed": f"not built: {_told(error)}"}
    if unlike := differing(again, want):
        return {**found, "failed": f"without memo it does not repeat itself: {', '.join(unlike[:3])}"}
    found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    found["without_gradient"] = sum(parameter.grad is None for parameter in model.parameters())
    for setting in (*(one for one in options.settings if one != "bfloat16"), *options.settings[-1:]):
        if setting in found["settings"]:
            continue
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
    row = {"equal": not unlike, "moved_bytes": run.moved_bytes, "recomputed_bytes": run.recomputed_bytes}
    if name in EXPLAINED:
        row["reasons"] = run.reasons
    return {**row, **({"differs": unlike[:5]} if unlike else {}), **({"refused": run.refused} if run.refused else {})}


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def sweep(wanted: Iterable[str], options: Options) -> Iterator[dict[str, Any]]:
    """Examines each architecture in a process of its own, `options.workers` at a time, and yields them as they end."""
    _import_what_all_need()
    context = multiprocessing.get_context("fork")
    waiting = list(wanted)[::-1]
    running: dict[Connection, tuple[str, Any, float]] = {}
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


def summary(rows: list[dict[str, Any]], options: Options) -> dict[str, Any]:
    """Counts over all architectures, by setting."""
    built = [row for row in rows if "failed" not in row]
    found: dict[str, Any] = {
        "examined": len(rows),
        "built": len(built),
        "nothing_moves": [row["name"] for row in built if row["settings"].get(WHOLE, {}).get("moved_bytes") == 0],
        "settings": {},
    }
    for setting in options.settings:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names, or parts of names")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--attention")
    parser.add_argument("--experts")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one architecture")
    parser.add_argument("--list", action="store_true", help="print the names")
    args = parser.parse_args()
    wanted = [name for name in names() if not args.only or any(part.lower() in name.lower() for part in args.only)]
    wanted = [name for name in wanted if name in args.only] or wanted
    wanted = wanted[: args.limit]
    if args.list:
        print("\n".join(wanted))
        return 0
    options = Options(
        settings=tuple(args.settings.split(",")),
        dropout=args.dropout,
        attention=args.attention,
        experts=args.experts,
        workers=args.workers,
        timeout_s=args.timeout,
    )
    import transformers

    print(f"{'':44} {' '.join(setting.rjust(12) for setting in options.settings)}")
    rows: list[dict[str, Any]] = []
    head = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shape": {"batch": BATCH, "seq": SEQ},
        "options": dataclasses.asdict(options),
    }
    for found in sweep(wanted, options):
        rows.append(found)
        print(f"{len(rows):3}/{len(wanted)} {line_of(found, options)}", flush=True)
        if len(rows) % 5 == 0:
            known = sorted(rows, key=lambda row: row["name"].lower())
            write_result("architectures", {**head, "summary": summary(known, options), "architectures": known})
    rows.sort(key=lambda row: row["name"].lower())
    totals = summary(rows, options)
    _tell(totals, rows)
    print(f"Wrote {write_result('architectures', {**head, 'summary': totals, 'architectures': rows})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
