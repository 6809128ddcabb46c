"""Page-aligned tensors: exact sizes, safe padding, mappings returned with their storage."""

from __future__ import annotations

import re
import threading

import pytest
import torch

from memo.swap import aligned_empty
from memo.swap.memory import page_aligned
from memo.swap.memory.page_aligned import PAGE_BYTES, padded_bytes


@pytest.mark.parametrize("nbytes", [1, 64, 4095, 4096, 4097, 1 << 20, (1 << 20) + 3])
def test_a_tensor_has_exactly_the_bytes_asked_for_on_a_page(nbytes: int) -> None:
    tensor = aligned_empty(nbytes)
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (nbytes,)
    assert tensor.untyped_storage().nbytes() == nbytes
    assert tensor.data_ptr() % PAGE_BYTES == 0
    tensor.fill_(7)
    assert int(tensor.sum(dtype=torch.int64)) == 7 * nbytes


def test_zero_bytes_are_an_empty_tensor() -> None:
    assert aligned_empty(0).shape == (0,)


def test_padding_belongs_to_whole_tensors_only() -> None:
    tensor = aligned_empty(5000)
    address = tensor.data_ptr()
    assert padded_bytes(address, 5000) == 8192
    assert padded_bytes(address, 4999) == 4999
    assert padded_bytes(address + 4096, 904) == 904
    del tensor
    assert padded_bytes(address, 5000) == 5000


def test_a_mapping_lives_as_long_as_any_view_of_the_storage() -> None:
    tensor = aligned_empty(8192)
    view = tensor.view(torch.float32)[100:]
    address = tensor.data_ptr()
    del tensor
    assert padded_bytes(address, 8192) == 8192
    assert aligned_empty(8192).data_ptr() != address
    assert address in page_aligned._live
    del view
    assert address not in page_aligned._live


def test_mappings_return_to_the_system() -> None:
    def mapped_kib() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmSize"))

    before = mapped_kib()
    for _ in range(20):
        aligned_empty(64 << 20)
    assert mapped_kib() - before < 2 * 64 << 10


def test_threads_never_share_a_mapping() -> None:
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(200):
            tensor = aligned_empty(PAGE_BYTES)
            tensor.fill_(mark)
            if int(tensor.min()) != mark or int(tensor.max()) != mark:
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("nbytes", [4096, (4 << 20) + 5])
def test_memory_is_private_and_asks_for_huge_pages_where_they_fit(nbytes: int) -> None:
    tensor = aligned_empty(nbytes)
    tensor.fill_(1)
    with open("/proc/self/smaps") as maps:
        text = maps.read()
    regions = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.M)
    spans = {region: [int(end, 16) for end in region.split(" ", 1)[0].split("-")] for region in regions if region}
    mine = next(region for region, (low, high) in spans.items() if low <= tensor.data_ptr() < high)
    assert re.match(r"\S+ rw-p ", mine)
    flags = next(line for line in mine.splitlines() if line.startswith("VmFlags")).split()
    assert ("hg" in flags) == (nbytes > 2 << 20)
