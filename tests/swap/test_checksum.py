"""Checksums tell bytes and their order apart."""

from __future__ import annotations

import pytest
import torch

from memo.swap.checksum import checksum


@pytest.mark.parametrize("nbytes", [2, 7, 8, 100, 8 * 4093, 8 * 4093 + 8, 40001, 1 << 20])
def test_any_two_bytes_that_change_places_are_seen(nbytes: int) -> None:
    draws = torch.Generator().manual_seed(nbytes)
    content = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=draws)
    known = checksum(content)
    assert checksum(content.clone()) == known
    for _ in range(100):
        one, other = torch.randint(0, nbytes, (2,), generator=draws).tolist()
        changed = content.clone()
        changed[one], changed[other] = content[other], content[one]
        assert (checksum(changed) == known) == torch.equal(changed, content)


@pytest.mark.parametrize(
    "content",
    [torch.eye(2048), torch.where(torch.arange(1 << 20) % 5 == 1, 1.0, -1.0), torch.arange(5000.0)],
    ids=["ones and zeros", "signs", "numbers"],
)
def test_rows_that_change_places_are_seen(content: torch.Tensor) -> None:
    assert checksum(content.flip(0)) != checksum(content)
    assert checksum(content.roll(1, 0)) != checksum(content)


def test_of_a_storage_the_first_bytes_alone_may_count() -> None:
    content = torch.arange(6000.0)
    other = content.clone()
    other[3000:] = 0
    assert checksum(content, 12000) == checksum(other, 12000)
    assert checksum(content, 12004) != checksum(other, 12004)


def test_no_bytes_have_one_too() -> None:
    assert checksum(torch.empty(0)) == checksum(torch.empty(0, dtype=torch.int8))
