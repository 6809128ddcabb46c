"""Programs with several compute streams: gradients equal to the last bit, and no access that nothing orders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_sanitizer import assert_clean
from stream_programs import PROGRAMS, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
    # Each stream of a program's own makes the accumulation of its gradients another's; the programs order that themselves.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]
SUPPORT = Path(__file__).parent.parent / "support"


@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_equal_on_several_streams(name: str, alpha: float) -> None:
    want, again = run(name), run(name)
    assert all(map(torch.equal, again, want))  # the comparison means something only where the plain run repeats itself
    whole: list[str] = []
    got = run(name, whole=whole, alpha=alpha, host="64MiB")
    assert whole == []  # streams are no reason not to divide a layer
    assert len(got) == len(want)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_cuda_sanitizer_is_clean_on_several_streams(name: str) -> None:
    assert_clean("-m", "stream_programs", name)
