"""TensorBoard's files hold the figures of the JSON lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memo.gpt.train.metrics import StepMetrics
from memo.gpt.train.tensorboard import GROUPS, TensorBoard


def metrics(step: int) -> StepMetrics:
    return StepMetrics(
        step=step, loss=2.5 - step, grad_norm=1.0, tokens_per_s=100.0, mfu_causal=None, mfu_full=None, hfu=None,
        peak_device_bytes=None, peak_rss_bytes=1 << 30, host_bytes=3, disk_bytes=4, d2h_bytes_per_s=7.0,
        h2d_bytes_per_s=6.0, disk_bytes_per_s=4.0, stall_s=0.25, recompute_s=0.5,
    )  # fmt: skip


def test_what_is_written_can_be_read_and_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for done, last in ((0, 3), (2, 4)):  # the first run wrote step 3, and its checkpoint was of step 2
        with TensorBoard(tmp_path, done=done) as board:
            for step in range(done + 1, last + 1):
                board.write(metrics(step))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("training/loss")] == [
        (1, 1.5), (2, 0.5), (3, -0.5), (4, -1.5),
    ]  # fmt: skip
    known = {name for name, value in metrics(1).to_json().items() if value is not None and name != "step"}
    assert set(events.Tags()["scalars"]) == {f"{GROUPS[name]}/{name}" for name in known}


def test_without_the_package_the_message_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['tensorboard'] = None; sys.modules['torch.utils.tensorboard'] = None; "
        "from memo.cli.main import main; "
        "sys.exit(main(['train', '--model', 'tiny', '--steps', '1', '--tensorboard', 'runs', '--on', 'cpu']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install tensorboard" in done.stderr
    assert done.stderr.count("\n") == 1
