"""Random programs with streams of their own, with and without memo, bit for bit: the hunt on a device (tests/hunt)."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]


@pytest.mark.parametrize("seed", range(12))
def test_a_random_program_on_streams_is_equal_bit_for_bit(seed: int) -> None:
    from tests.hunt.comparison import compare
    from tests.hunt.drawing import drawn
    from tests.hunt.levels import levels_of

    program = drawn(seed)
    told = [f"{find.level}: {find.kind}: {find.told}" for find in compare(program, levels_of(seed, 2)).finds]
    assert not told, "\n".join([*told, program.text])


def test_each_statement_of_a_device_is_equal_bit_for_bit() -> None:
    from tests.hunt.comparison import compare
    from tests.hunt.drawing import catalogued, with_only

    of_a_device = [name for name in catalogued() if "stream" in name or "host" in name]
    assert len(of_a_device) > 17
    for name in of_a_device:
        outcome = compare(with_only(name.removeprefix("step: ")), ["1", "0.5", "0"])
        assert (name, outcome.discarded, outcome.finds) == (name, None, [])
