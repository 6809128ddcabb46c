"""NUMA nodes by the PCI addresses that NVML writes."""

from __future__ import annotations

import pytest

from memo.machine.doctor import _numa_node


@pytest.mark.parametrize("bus", ["", "65:00.0", "none", "00000000:65"])
def test_an_address_of_another_form_has_no_node(bus: str) -> None:
    assert _numa_node(bus) is None
