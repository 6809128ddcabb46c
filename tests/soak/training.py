"""The training that a soak disturbs, and the record of each step; without memo it is what the disturbed run must equal."""

from __future__ import annotations

import math
import struct
import zlib
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from memo.gpt import TrainConfig, preset
from memo.gpt.model import GPT
from memo.gpt.optim import LrSchedule
from memo.gpt.train.step import Trainer

LONGEST, SHORTEST = 448, 64
"""Tokens in a sequence."""
EVAL_EVERY = 25
_VOCAB = 211
_EVAL = 1 << 40
"""Added to the seed of evaluation's batches."""


class Record(NamedTuple):
    """One step, to the bit."""

    loss: float
    grad_norm: float
    weights: int
    """CRC-32 of all weights after the update."""
    eval_loss: float
    """NaN for a step without evaluation."""


_RECORD = struct.Struct("<ddId")


class _Batches:
    """Two rows of random tokens, of a length that changes with each step."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets, each int64 of shape (2, length)."""
        generator = torch.Generator().manual_seed(self._seed + step)
        length = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=generator))
        rows = torch.randint(0, _VOCAB, (2, length + 1), generator=generator)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def trainer_of(seed: int, around_forward: AbstractContextManager[Any] | None = None) -> Trainer:
    """Trainer of a GPT of four layers, the same for the same seed, with dropout."""
    torch.manual_seed(seed)
    model = GPT(preset("tiny", layers=4, hidden=64, heads=2, max_seq=LONGEST, vocab_size=_VOCAB, dropout=0.1))
    schedule = LrSchedule(peak=1e-3, floor=1e-3, warmup=0, steps=1)
    config = TrainConfig(schedule=schedule, eval_steps=1)
    return Trainer(model, _Batches(seed), config, device=torch.device("cpu"), around_forward=around_forward)


def step_of(trainer: Trainer, step: int, seed: int) -> Record:
    """Runs step `step`, counted from 1, and the evaluation after it where one is due."""
    result = trainer.step(step)
    assert result is not None
    weights = 0
    for parameter in trainer.model.parameters():
        weights = zlib.crc32(parameter.detach().numpy(), weights)
    eval_loss = trainer.evaluate(_Batches(seed + _EVAL + step)) if step % EVAL_EVERY == 0 else math.nan
    return Record(result.loss, result.grad_norm, weights, eval_loss)


def tell_records(sender: Connection, seed: int, steps: int) -> None:
    """Sends the record of each step of the run without memo; in a process of its own."""
    torch.set_num_threads(1)
    trainer = trainer_of(seed)
    try:
        for step in range(1, steps + 1):
            sender.send_bytes(_RECORD.pack(*step_of(trainer, step, seed)))
    except BrokenPipeError:  # the disturbed run has ended by the clock
        pass


def packed(record: Record) -> bytes:
    """Bytes that are equal where two records are, NaN included."""
    return _RECORD.pack(*record)


def unpacked(record: bytes) -> Record:
    """The record of its bytes."""
    return Record(*_RECORD.unpack(record))
