"""Under tensor parallelism no rank makes anything as large as all tokens by the vocabulary, or the vocabulary by the width.

The fake process group stands for the other ranks: sizes are real, what they would send is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from live_bytes import LiveLocalBytes

from memo.errors import UsageError
from memo.gpt import preset
from memo.gpt.model.build_rank import build_stages
from memo.loss import chunks
from memo.parallel import Layout, World

VOCAB, HIDDEN, SEQ, CHUNK_LOGITS = 8192, 64, 512, 1 << 16
MATRIX, LOGITS = VOCAB * HIDDEN * 4, SEQ * VOCAB * 4


@pytest.fixture(autouse=True)
def _eight_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def largest(monkeypatch: pytest.MonkeyPatch, tied: bool, **sizes: Any) -> int:
    """Bytes of the largest tensor that a step makes."""
    monkeypatch.setattr(chunks, "TRAINED_CHUNK_LOGITS", CHUNK_LOGITS)
    layout = Layout(**sizes)
    shape = preset(
        "tiny", vocab_size=VOCAB, max_seq=SEQ, layers=1, hidden=HIDDEN, heads=8, ffn=HIDDEN, tie_embeddings=tied
    )
    world = World.of(layout, "cpu")
    (stage,) = build_stages(shape, world, seq=SEQ, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    tokens = torch.randint(VOCAB, (1, len(stage.own)))
    with LiveLocalBytes() as alive:
        stage(tokens, tokens).backward()
    for name, parameter in stage.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        assert name not in ("tokens.weight", "head.weight") or local.nbytes * 8 == MATRIX
    return alive.largest


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "replicated"])
def test_a_rank_holds_a_part_of_the_vocabulary_and_a_chunk_of_logits(
    monkeypatch: pytest.MonkeyPatch, sequence: bool, tied: bool
) -> None:
    # The gradient of its rows, or a chunk of logits: both are an eighth of the matrix here.
    assert CHUNK_LOGITS * 4 == MATRIX // 8 == LOGITS // 64
    assert largest(monkeypatch, tied, tp=8, sequence_parallel=sequence) == MATRIX // 8


def test_the_measure_sees_the_whole_matrix_where_a_rank_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert largest(monkeypatch, False, dp=8) >= MATRIX


def test_with_replicas_a_rank_gathers_its_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MATRIX // 4 <= largest(monkeypatch, True, dp=2, tp=4) < MATRIX // 2


def test_looking_up_takes_what_derived_plans_count_with() -> None:
    """In units of a rank's hidden states: all of the group's twice in backward, and the gradient that comes in."""
    world, unit = World.of(Layout(tp=8), "cpu"), 2 * SEQ // 8 * HIDDEN * 4
    shape = preset("tiny", vocab_size=256, max_seq=SEQ, layers=1, hidden=HIDDEN, heads=8)
    (stage,) = build_stages(shape, world, seq=SEQ, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    assert stage.tokens is not None
    tokens = torch.randint(256, (2, SEQ // 8))
    with LiveLocalBytes() as alive:
        out = stage.tokens(tokens)
        kept = alive.live
        out.backward(torch.ones_like(out))
    assert kept <= 1.3 * unit  # and what says which rows, 9 bytes for each of the group's tokens
    assert 16 * unit <= alive.peak <= 18.5 * unit


def test_more_ranks_than_tokens_are_refused() -> None:
    world = World.of(Layout(tp=8), "cpu")
    shape = preset("tiny", vocab_size=9, layers=1, hidden=HIDDEN, heads=8)
    with pytest.raises(UsageError, match="8 ranks leave one without any of the vocabulary's 9 tokens"):
        build_stages(shape, world, seq=64, device=torch.device("cpu"), dtype=torch.float32, seed=0)
