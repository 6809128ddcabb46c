"""Steps interrupted at some lines of memo's own files; `make interrupt` has every place."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import memo
from tests.interrupt.interrupting import CASES, Alarm, Model, draw_places, interrupt

PLACES = 300


@pytest.mark.filterwarnings("ignore:no plan:RuntimeWarning")  # the step that planning measured was cut
def test_an_interrupted_step_leaves_nothing_and_the_next_one_is_right(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    drawn, _ = draw_places(PLACES, seed, random.Random(seed).sample(list(CASES), 6), str(tmp_path))
    reached = sum(interrupt(place, str(tmp_path)) is not None for place in drawn)
    assert reached >= 0.95 * len(drawn), seed  # a step has a few lines more or less, by what its threads have done


class Interrupted(nn.Module):
    """Raises once, in a forward."""

    def __init__(self, model: Model, error: BaseException) -> None:
        super().__init__()
        self.model = model
        self.errors = [error]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hook = self.model.layers[1].up.register_forward_pre_hook(self.fail)
        try:
            return self.model(x)
        finally:
            hook.remove()

    def fail(self, *_: object) -> None:
        if self.errors:
            raise self.errors.pop()


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_ctrl_c_in_an_attached_forward_takes_out_recorder_and_hooks_with_it(alpha: float) -> None:
    model = Model()
    manager = memo.offload(model, alpha=alpha, min_bytes=1).attach()
    with pytest.raises(KeyboardInterrupt):
        Interrupted(model, KeyboardInterrupt())(torch.ones(2, 8, 32))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)
    manager.close()


def test_an_alarm_within_a_trial_replay_is_not_taken_for_a_failed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def ring(number: int, frame: FrameType | None) -> None:
        raise Alarm("time is up")

    def rings(*_: object) -> None:
        signal.raise_signal(signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, ring)
    monkeypatch.setattr("memo.swap.recompute.tape.replay.Replay._bring", rings)
    model = Model()
    manager = memo.offload(model, alpha=0.0, min_bytes=1)
    try:
        with pytest.raises(Alarm, match="time is up"), manager:
            model(torch.ones(2, 8, 32))
    finally:
        signal.signal(signal.SIGALRM, before)
        manager.close()
