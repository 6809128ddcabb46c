"""Placement of host memory: what the system says is used, what it does not say is left alone."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import pytest
import torch

from memo.swap import node_of_pci_device
from memo.swap.memory.numa import prefer_node

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("\n", None)])
def test_the_node_of_a_device_is_read_from_the_system(text: str, node: int | None, tmp_path: Path) -> None:
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "numa_node").write_text(text)
    assert node_of_pci_device(0, 0x1B, 0, root=tmp_path) == node


def test_an_unknown_device_has_no_node(tmp_path: Path) -> None:
    assert node_of_pci_device(0, 1, 0, root=tmp_path) is None


def test_memory_preferred_on_the_first_node_is_usable_and_an_impossible_node_is_refused() -> None:
    mapping = mmap.mmap(-1, 1 << 16)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    prefer_node(memory.data_ptr(), 1 << 16, 0)  # a kernel without NUMA may refuse; the memory works either way
    memory.fill_(7)
    assert int(memory.sum()) == 7 << 16
    assert not prefer_node(memory.data_ptr(), 1 << 16, 1000)
