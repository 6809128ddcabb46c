"""Rows of whole documents: each within one document, from its start, each once an epoch, the same wherever it is asked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from memo.errors import DataError, UsageError
from memo.gpt.data import token_file as tokens_module
from memo.gpt.data.batches import Split
from memo.gpt.data.document_batches import DocumentBatches
from memo.gpt.data.token_file import TokenFile

END = 0
LENGTHS = (3, 9, 4, 13, 1, 5, 8)
"""With rows of 4 these make 0, 2, 1, 3, 0, 1 and 2."""


def _documents(*lengths: int) -> TokenFile:
    """Tokens that count on from 1 through all documents, with an end after each."""
    parts, first = [], 1
    for length in lengths:
        parts += [np.arange(first, first + length), [END]]
        first += length
    tokens = np.concatenate(parts).astype(np.uint32)
    return TokenFile(
        path=Path("none"), tokens=tokens, vocab_size=first, end_of_document=END, documents=len(lengths)
    )  # fmt: skip


def _batches(*lengths: int, split: Split = "train", **changes: float) -> DocumentBatches:
    given = {"batch": 1, "seq": 4, "seed": 1, "eval_fraction": 0.0} | changes
    return DocumentBatches(_documents(*(lengths or LENGTHS)), split=split, **given)  # type: ignore[arg-type]


def _epoch(batches: DocumentBatches, first: int = 1) -> list[list[int]]:
    """The rows of one epoch, each with the token that follows it."""
    rows = []
    for step in range(first, first + len(batches)):
        tokens, targets = batches.at(step)
        rows.append([*tokens[0].tolist(), int(targets[0, -1])])
    return rows


def test_rows_are_cut_from_the_start_of_each_document() -> None:
    assert sorted(_epoch(_batches())) == [
        [4, 5, 6, 7, 8],  # of the second: 4 to 12, whose last token is left out
        [8, 9, 10, 11, 12],
        [13, 14, 15, 16, END],  # exactly as long as a row: its last target is its end
        [17, 18, 19, 20, 21],
        [21, 22, 23, 24, 25],
        [25, 26, 27, 28, 29],
        [31, 32, 33, 34, 35],
        [36, 37, 38, 39, 40],
        [40, 41, 42, 43, END],
    ]


def test_targets_are_the_next_tokens() -> None:
    tokens, targets = _batches(batch=3).at(1)
    assert tokens.shape == targets.shape == (3, 4)
    assert tokens.dtype is targets.dtype is torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert not (tokens == END).any()  # no row goes on behind an end


def test_every_row_comes_once_an_epoch_in_another_order() -> None:
    batches = _batches()
    first, second = _epoch(batches), _epoch(batches, first=1 + len(batches))
    assert len(set(map(tuple, first))) == len(batches) == 9
    assert sorted(first) == sorted(second)
    assert first != second
    assert first != _epoch(_batches(seed=2))


@pytest.mark.parametrize(("batch", "accumulate"), [(3, 3), (3, 1), (1, 3)])
def test_rows_and_microbatches_share_one_epoch(batch: int, accumulate: int) -> None:
    batches = _batches(batch=batch, accumulate=accumulate)
    steps = range(1, 1 + 9 // (batch * accumulate))
    drawn = [
        row for step in steps for microbatch in range(accumulate) for row in batches.at(step, microbatch)[0].tolist()
    ]
    assert drawn == [row[:-1] for row in _epoch(_batches())]


def test_a_step_is_the_same_in_any_order_and_any_instance() -> None:
    one, other = _batches(batch=2), _batches(batch=2)
    forwards = [one.at(step)[0] for step in range(1, 20)]
    backwards = [other.at(step)[0] for step in reversed(range(1, 20))]
    assert all(map(torch.equal, forwards, reversed(backwards)))


def test_known_rows_stay_what_they_are() -> None:
    # A run resumed with a later version must see the same data: these numbers may never change.
    assert [row[0] for row in _epoch(_batches())] == [4, 31, 36, 25, 8, 17, 21, 13, 40]


@pytest.mark.parametrize(("fraction", "starts"), [(0.01, [31]), (0.12, [13, 31]), (0.3, [13, 31, 36, 40])])
def test_evaluation_has_documents_of_its_own_those_of_fewest_rows(fraction: float, starts: list[int]) -> None:
    train = _epoch(_batches(eval_fraction=fraction))
    evaluated = _epoch(_batches(split="eval", eval_fraction=fraction), first=0)
    assert sorted(train + evaluated) == sorted(_epoch(_batches()))
    assert sorted(row[0] for row in evaluated) == starts
    shared = {token for row in train for token in row} & {token for row in evaluated for token in row}
    assert shared <= {END}


def test_the_only_long_document_is_for_training() -> None:
    assert len(_batches(2, 9, eval_fraction=0.5)) == 2
    with pytest.raises(DataError, match="only one document has 4 tokens, and training has it"):
        _batches(2, 9, eval_fraction=0.5, split="eval")


def test_no_document_long_enough_is_one_clear_line() -> None:
    with pytest.raises(DataError, match=r"no document has 14 tokens: the longest of 7 has 13; .*packed") as caught:
        _batches(seq=14)
    assert "\n" not in str(caught.value)


def test_it_tells_what_is_left_out() -> None:
    assert _batches(batch=2, eval_fraction=0.01).description == (
        "4 tokens of one document; 5 of 7 have as many, the longest 13; an epoch is 8 rows of 4 documents, 74% of all tokens"
    )


def test_ends_are_found_across_the_parts_of_a_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "TOKENS_PER_SCAN", 4)
    assert _documents(*LENGTHS).ends().tolist() == [3, 13, 18, 32, 34, 40, 49]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"seq": 0}, "sequence length is 0"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"split": "eval"}, "eval fraction above 0"),
    ],
)
def test_numbers_that_mean_nothing_are_usage_errors(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        _batches(**changes)  # type: ignore[arg-type]
