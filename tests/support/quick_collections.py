"""For tests that collect garbage again and again, to see what dies."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """What earlier tests and imports left is not looked at each time, nor by the next module's: what was frozen stays so."""
    gc.collect()
    gc.freeze()
