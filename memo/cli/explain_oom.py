"""`memo explain-oom`: says in three sentences what held a device's memory when it ran out, and what to change."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

from memo.cli.inputs.fields import refuse_given
from memo.cli.inputs.flag_types import Flag, Json
from memo.cli.terminal.file_kinds import FileKind, kind_of, require_kind
from memo.errors import ExitCode
from memo.out_of_memory import (
    HeldMemory,
    MemoryAnswer,
    explain_apart,
    explain_memory,
    held_in_trace,
)
from memo.trace import build_report, printable, read_traces
from memo.units import format_bytes, text_table

EPILOG = """\
examples:
  memo explain-oom trace.rank0.jsonl
  memo explain-oom snapshot.pickle --json

A snapshot is what torch.cuda.memory._dump_snapshot writes after torch.cuda.memory._record_memory_history(). Only plain data
is read from it.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `memo explain-oom`."""

    file: Annotated[str, Flag(flags="file", metavar="TRACE|SNAPSHOT")]
    """Trace of a run, or snapshot of torch's CUDA memory."""
    step: int | None = None
    """Step of a trace (default: that of the error or the peak)."""
    device: int | None = None
    """Device of a snapshot (default: that of the error)."""
    json: Json = False


def run(args: Options) -> ExitCode:
    """Prints the answer."""
    answer = explain_memory(_held(args))
    if args.json:
        print(json.dumps({"format": "memo-explain-oom", "version": 1, "file": args.file, **answer.to_json()}))
        return ExitCode.OK
    print("\n".join(answer.sentences))
    print(f"\n{_holders(answer)}")
    return ExitCode.OK


def _held(args: Options) -> HeldMemory:
    require_kind(args.file, FileKind.TRACE, FileKind.SNAPSHOT)
    if kind_of(args.file) is FileKind.SNAPSHOT:
        refuse_given(args, "--step", "chooses a step of a trace, and this is a snapshot; leave it out")
        return explain_apart(Path(args.file), device=args.device)
    refuse_given(args, "--device", "chooses a device of a snapshot, and this is no snapshot; leave it out")
    return held_in_trace(build_report(read_traces([args.file])).ranks[0], step=args.step)


def _holders(answer: MemoryAnswer) -> str:
    rows = [
        (
            format_bytes(one.nbytes),
            printable(one.what if one.what != "saved" or not one.op else f"saved, {one.op}"),
            printable(one.name or "-"),
            printable(f"{'×'.join(map(str, one.shape))} {one.dtype or ''}".strip()) if one.shape is not None else "-",
            printable(one.line or "-", limit=120),
        )
        for one in answer.held.holders
    ]
    return text_table(("size", "what", "layer or parameter", "shape", "Python lines"), rows)
