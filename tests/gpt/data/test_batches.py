"""Batches: a function of seed, step and microbatch alone; evaluation data apart from training data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from memo.errors import DataError, UsageError
from memo.gpt.data.batches import Batches, Split
from memo.gpt.data.token_file import TokenFile


def _counting(count: int) -> TokenFile:
    """Tokens that are their own positions."""
    tokens = np.arange(count, dtype=np.uint32)
    return TokenFile(path=Path("none"), tokens=tokens, vocab_size=count, end_of_document=0, documents=1)


def _batches(count: int = 10_000, split: Split = "train", **changes: float) -> Batches:
    given = {"batch": 3, "seq": 16, "seed": 1} | changes
    return Batches(_counting(count), split=split, **given)  # type: ignore[arg-type]


def test_targets_are_the_next_tokens() -> None:
    tokens, targets = _batches().at(0)
    assert tokens.shape == targets.shape == (3, 16)
    assert tokens.dtype is targets.dtype is torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(16))


def test_a_step_is_the_same_in_any_order_and_any_instance() -> None:
    one, other = _batches(), _batches()
    forwards = [one.at(step, microbatch) for step in range(5) for microbatch in range(2)]
    backwards = [other.at(step, microbatch) for step in reversed(range(5)) for microbatch in reversed(range(2))]
    for (tokens, targets), (again, targets_again) in zip(forwards, reversed(backwards), strict=True):
        assert torch.equal(tokens, again)
        assert torch.equal(targets, targets_again)


def test_known_windows_stay_what_they_are() -> None:
    # A run resumed with a later version must see the same data: these numbers may never change.
    assert _batches().at(7, 1)[0][:, 0].tolist() == [3761, 228, 3309]


def test_seed_step_microbatch_and_row_each_matter() -> None:
    starts = {
        tuple(_batches(seed=seed).at(step, microbatch)[0][:, 0].tolist())
        for seed in range(3)
        for step in range(3)
        for microbatch in range(3)
    }
    assert len(starts) == 27
    assert all(len(set(rows)) == 3 for rows in starts)


def test_windows_reach_every_token_of_the_split() -> None:
    batches = _batches(count=60, seq=4, batch=50)
    seen: set[int] = set()
    for step in range(20):
        tokens, targets = batches.at(step)
        seen |= set(tokens.flatten().tolist()) | set(targets.flatten().tolist())
    assert seen == set(range(len(batches)))


@pytest.mark.parametrize(("count", "seq", "fraction"), [(60, 4, 0.1), (1000, 3, 0.01), (34, 16, 0.3), (35, 16, 0.5)])
def test_evaluation_shares_no_token_with_training(count: int, seq: int, fraction: float) -> None:
    def seen(split: Split) -> set[int]:
        batches = _batches(count=count, split=split, seq=seq, eval_fraction=fraction, batch=40)
        both = [value for step in range(10) for value in batches.at(step)]
        return {int(token) for value in both for token in value.flatten()}

    train, held_out = seen("train"), seen("eval")
    assert train
    assert held_out
    assert not train & held_out
    assert max(train) < min(held_out)


def test_the_fraction_is_held_out() -> None:
    assert len(_batches(count=10_000, split="eval", eval_fraction=0.05)) == 500
    assert len(_batches(count=10_000, eval_fraction=0.05)) == 9_500
    assert len(_batches(count=10_000, eval_fraction=0.0)) == 10_000


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.01, 0.3, 0.5])
@pytest.mark.parametrize("count", [4, 5, 20, 21, 101, 1000])
def test_the_longest_sequence_it_names_fits_and_one_more_does_not(count: int, fraction: float) -> None:
    longest = count // 2 - 1 if fraction else count - 1
    for split in ("train", "eval") if fraction else ("train",):
        _batches(count=count, split=split, seq=longest, eval_fraction=fraction).at(0)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=rf"{longest + 1} tokens .* holds {count} tokens.* possible is {longest}\b"):
        _batches(count=count, seq=longest + 1, eval_fraction=fraction)


def test_hardly_any_data_is_refused() -> None:
    with pytest.raises(DataError, match="holds 1 tokens, too few"):
        _batches(count=1, seq=1, eval_fraction=0.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"seq": 0}, "sequence length is 0"),
        ({"eval_fraction": -0.1}, "eval fraction"),
        ({"eval_fraction": 0.6}, "eval fraction"),
        ({"split": "test"}, "one of train, eval"),
        ({"split": "eval", "eval_fraction": 0.0}, "eval fraction above 0"),
    ],
)
def test_numbers_that_mean_nothing_are_usage_errors(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        _batches(**changes)  # type: ignore[arg-type]
