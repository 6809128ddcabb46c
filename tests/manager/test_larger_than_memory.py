"""A sequence whose activations exceed what the process may have trains with alpha and a disk, and does not without."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.larger_than_ram import Shape, in_a_process

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 416 << 20


def test_it_trains_where_the_run_without_memo_runs_out_of_memory(tmp_path: Path) -> None:
    shape = Shape(seq=2048, layers=12, hidden=256, steps=1)
    assert shape.saved_nbytes == 384 << 20
    ours = in_a_process(shape, alpha=0.25, limit=LIMIT, disk_dir=str(tmp_path), threads=1)
    plain = in_a_process(shape, alpha=None, limit=LIMIT, disk_dir=str(tmp_path), threads=1)
    free = in_a_process(shape, alpha=None, limit=None, disk_dir=str(tmp_path), threads=1)
    assert "can't allocate memory" in plain["failed"]
    assert "failed" not in ours, ours
    assert ours["losses_and_gradients_sha256"] == free["losses_and_gradients_sha256"]
    # Input and attention of eleven layers, at most a quarter of the other fourteen units, and the statistics.
    unit = 2048 * 256 * 4
    assert 11 * 2 * unit < ours["disk_bytes_per_step"] < 11 * 5.6 * unit
    assert list(tmp_path.iterdir()) == []
