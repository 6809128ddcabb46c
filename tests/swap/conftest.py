"""Settings of the engine's tests: they collect garbage hundreds of times, to see what dies."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> Iterator[None]:
    """What earlier tests and imports left is not looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
