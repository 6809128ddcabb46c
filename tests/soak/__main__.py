"""Trains for hours while faults are injected: the losses of an undisturbed run, or one named error and a clean resume.

    python -m tests.soak [--steps 10000] [--minutes 60] [--fault-every 50] [--seed 0] [--json FILE] [--write]

A small GPT with dropout trains on the CPU by plans made at run time, its activations on disk with checksums, on sequences
of ever new lengths, with evaluations and checkpoints by the clock. Loss, norm of the gradients and all weights are compared
with those of the same training without memo, in another process, after every step. What the process holds is sampled;
the slope over the second half is told, with a limit. Exit 1 where anything was found.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.results import ROOT, write_result

sys.path.insert(0, str(ROOT / "tests" / "support"))

from tests.soak.memory_group import remove_group_of
from tests.soak.resources import trends
from tests.soak.run import Settings, Soaked, soak
from tests.soak.training import tell_records

SILENT_S = 180.0
"""A step that takes so long hangs."""
STOPPED_S = 1.0
_ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "OMP_NUM_THREADS": "1"}
"""oneDNN keeps a kernel for each shape: its cache of 1024 would grow for all of a run of ever new lengths."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so many")
    parser.add_argument("--fault-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--write", action="store_true", help="write a result file")
    args = parser.parse_args()
    settings = Settings(steps=args.steps, minutes=args.minutes, fault_every=args.fault_every, seed=args.seed)
    soaked = supervised(settings)
    body = figures(settings, soaked)
    print(table(body))
    if args.json is not None:
        args.json.write_text(json.dumps(body, indent=1))
    if args.write:
        print(f"Wrote {write_result('soak', body)}")
    return 1 if body["finds"] else 0


def supervised(settings: Settings, disturbed: Callable[[Settings, Connection, Connection], None] = soak) -> Soaked:
    """Runs the disturbed and the undisturbed training in two processes, and stops the first one when it asks for that."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    ours, theirs = context.Pipe()
    processes: list[BaseProcess] = [
        context.Process(target=tell_records, args=(sender, settings.seed, settings.steps), name="undisturbed"),
        context.Process(target=disturbed, args=(settings, receiver, theirs), name="disturbed"),
    ]
    try:
        with mock.patch.dict(os.environ, _ENVIRONMENT):
            for process in processes:
                process.start()
        for end in (receiver, sender, theirs):
            end.close()
        return _watched(processes[1], ours, random.Random(settings.seed))
    finally:
        for process in processes:
            process.kill()
            process.join()
            remove_group_of(process.pid or 0)


def _watched(process: BaseProcess, control: Connection, draw: random.Random) -> Soaked:
    step = 0
    try:
        while control.poll(SILENT_S):
            told = control.recv()
            if isinstance(told, Soaked):
                process.join(SILENT_S)
                if process.exitcode != 0:
                    told.find = told.find or f"the process ended with {process.exitcode} instead of 0"
                return told
            if told == "stop":
                time.sleep(draw.uniform(0, 0.1))
                _signal(process, signal.SIGSTOP)
                time.sleep(STOPPED_S)
                _signal(process, signal.SIGCONT)
                control.send("stopped")
            else:
                step = told
    except EOFError:
        process.join()
        return Soaked(steps=step, find=f"step {step}: the process ended with {process.exitcode}")
    _signal(process, signal.SIGABRT)  # faulthandler prints where each thread is
    process.join(SILENT_S)
    return Soaked(steps=step, find=f"step {step} does not end")


def _signal(process: BaseProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


def figures(settings: Settings, soaked: Soaked) -> dict[str, Any]:
    """For the result file; `finds` is empty where all was as it should be."""
    body = dataclasses.asdict(settings) | dataclasses.asdict(soaked)
    finds = [] if body["find"] is None else [body["find"]]
    del body["find"]
    if len(soaked.samples) >= 4:
        found = trends(soaked.samples)
        body["trends"] = {name: dataclasses.asdict(trend) for name, trend in found.items()}
        finds += [f"{name} is not flat" for name, trend in found.items() if not trend.flat]
    return body | {"finds": finds}


def table(body: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [
        f"{body['steps']:,} steps ({body['steps_run']:,} with those repeated) in {body['seconds'] / 60:.1f} min, "
        f"{body['planned_steps']:,} by plans, {body['moving_steps']:,} that wrote "
        f"{body['bytes_disk'] / 2**30:.2f} GiB to disk, {body['evaluations']} "
        f"evaluations, {body['checkpoints']} checkpoints, {body['resumes']} resumes, {body['managers']} managers"
    ]
    for name, fault in body["faults"].items():
        raised = ", ".join(f"{count} {error}" for error, count in fault["raised"].items()) or "no error"
        lines.append(f"  {name:30} {fault['injected']:4} injected  {fault['met']:4} met  {raised}")
    for name, trend in body.get("trends", {}).items():
        lines.append(
            f"  {name:12} mean {trend['mean']:14,.1f}  {trend['slope_per_1000_steps']:+14,.1f} per 1,000 steps  "
            f"rise {trend['rise']:+14,.1f} of at most {trend['limit']:,.1f}"
        )
    lines += [f"not run: {name}" for name in body["not_run"]]
    lines += [f"FOUND {find}" for find in body["finds"]] or ["nothing found"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
