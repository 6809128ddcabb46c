"""A program on two ranks of one job, replicated by DistributedDataParallel or divided by FSDP2, with and without memo.

Each rank has its own inputs, compares its own losses, gradients, buffers and random numbers as one process does, and both
go on together: where torch raises on one of them without memo, the program is discarded; a find of one is compared again.
A rank that waits for the other longer than `WAITS_S` ends in gloo's error, which is a find.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import multiprocessing
import random
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.hunt.comparison import Find, Outcome, compare
from tests.hunt.program import Program

RANKS = 2
WAITS_S = 60.0
ENDS_S = 300.0
"""Ranks that have sent nothing for this long are killed."""
LEVELS_ON_RANKS = ("1", "0.5", "0", "mix", "1, disk", "0, spilled", "0.5, ahead", "checkpoint")
"""Levels that are compared on two ranks."""
_CONTEXT = multiprocessing.get_context("forkserver")  # a process that has run backward can't be forked


class _Replicated(DistributedDataParallel):
    """DistributedDataParallel that also has the model's own attributes, which programs use."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, find_unused_parameters=True)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _divided(model: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


PLACEMENTS: dict[str, Callable[[nn.Module], nn.Module]] = {"replicated": _Replicated, "divided": _divided}
"""How a model is laid over the ranks, by name."""


def drawn_placement(seed: int) -> tuple[str, str]:
    """The placement and the level of the program of this seed."""
    draws = random.Random(seed + 2)
    return draws.choice([*PLACEMENTS]), draws.choice(LEVELS_ON_RANKS)


def compare_on_ranks(program: Program, placement: str, level: str) -> Outcome:
    """Outcome of both ranks: each find names its rank; bytes moved and recomputed are those of the first rank."""
    _CONTEXT.set_forkserver_preload([__name__, "torch.testing._internal.common_methods_invocations"])
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ended:
        pipes: list[Connection] = []
        for rank in range(RANKS):
            here, there = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_run, args=(rank, there, folder, program, placement, level))
            process.start()
            there.close()
            ended.callback(process.join)
            ended.callback(process.kill)
            pipes.append(here)
        outcomes = _answered(pipes)
    if isinstance(outcomes, Find):
        find = dataclasses.replace(outcomes, level=f"{level}, {placement}")
        return Outcome(finds=[find]) if find.kind == "dies" else Outcome(discarded=f"{find.told} {find.kind}")
    discarded = next((outcome.discarded for outcome in outcomes if outcome.discarded is not None), None)
    if discarded is not None:
        return Outcome(discarded=discarded)
    for outcome in outcomes[1:]:
        outcomes[0].finds += outcome.finds
        outcomes[0].refused |= outcome.refused
        outcomes[0].compared = {name: ended and outcome.compared[name] for name, ended in outcomes[0].compared.items()}
    return outcomes[0]


def _answered(pipes: list[Connection]) -> list[Outcome] | Find:
    """The outcome of each rank, or how one ended; questions between are answered with whether any rank says yes."""
    kind = "without memo"  # until the first question, which comes behind the steps that torch does alone
    while True:
        said: list[Any] = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(ENDS_S):
                return Find(level="", kind=kind, told=f"rank {rank} does not end")
            try:
                said.append(pipe.recv())
            except EOFError:
                return Find(level="", kind=kind, told=f"rank {rank} ended")
        if isinstance(said[0], Outcome):
            return said
        for pipe in pipes:
            pipe.send(any(said))
        kind = "dies"


def _run(rank: int, pipe: Connection, folder: str, program: Program, placement: str, level: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    waits = datetime.timedelta(seconds=WAITS_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=waits)

    def any_rank(here: bool) -> bool:
        pipe.send(here)
        return bool(pipe.recv())

    outcome = compare(program, [level], place=PLACEMENTS[placement], rank=rank, any_rank=any_rank)
    told = f"{level}, {placement}, rank {rank}"
    outcome.finds = [Find(level=told, kind=find.kind, told=find.told) for find in outcome.finds]
    pipe.send(outcome)
    pipe.close()
