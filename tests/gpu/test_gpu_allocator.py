"""The allocators' table, as far as no GPU is needed: arms that are not there yet, that failed, or that disagree."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_allocator import compare, line_of


def arm(**others: Any) -> dict[str, Any]:
    """A result as `train` returns it."""
    figures = ("reserved_bytes", "allocated_bytes", "device_mallocs_a_step", "fallbacks_a_step", "outside_a_step")
    arena = {"arena_bytes": 100, "arena_lower_bound_bytes": 100}
    return {
        "step_s": [2.0, 1.0, 3.0],
        "losses": [1.5],
        "weights": [2.5],
        **dict.fromkeys(figures, 0),
        **arena,
        **others,
    }


def test_arms_that_have_not_run_yet_are_no_rows_and_no_faults() -> None:
    rows, faults = compare([{"torch": arm()}])
    assert (list(rows), rows["torch"]["ratio"], faults) == (["torch"], 1.0, [])


def test_an_arm_that_failed_is_a_fault_and_the_others_have_rows() -> None:
    rows, faults = compare([{"torch": {"failed": "ended with 1"}, "planned": arm()}])
    assert (list(rows), faults) == (["planned"], ["torch: ended with 1"])
    assert "2000.0 ms" in line_of("planned", rows["planned"])


def test_what_is_not_as_it_must_be_is_named() -> None:
    planned = arm(losses=[1.25], device_mallocs_a_step=0.5, arena_bytes=102)
    _, faults = compare([{"torch": arm(), "planned": planned}])
    assert [fault.partition(":")[0] for fault in faults] == ["planned"] * 3
    assert "differ" in faults[0]
    assert "0.50 cudaMalloc" in faults[1]
    assert "1 % above" in faults[2]
