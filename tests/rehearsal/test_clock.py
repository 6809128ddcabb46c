"""Clocks of a simulated GPU, by hand."""

from __future__ import annotations

from memo.rehearsal.clock import Clock


def test_the_host_runs_ahead_of_the_kernels() -> None:
    clock = Clock(10)
    start = clock.host_ns
    clock.run(100)
    clock.run(100)
    assert clock.host_ns == start + 20
    assert clock.compute_ns == start + 10 + 100 + 100


def test_a_short_kernel_waits_for_its_launch() -> None:
    clock = Clock(10)
    start = clock.host_ns
    clock.run(1)
    clock.run(1)
    assert clock.compute_ns == start + 20 + 1


def test_waiting_moves_the_host_forward_only() -> None:
    clock = Clock(10)
    start = clock.host_ns
    clock.wait(start + 50)
    clock.wait(start + 20)
    assert clock.host_ns == start + 50


def test_finish_waits_for_the_compute_stream() -> None:
    clock = Clock(10)
    clock.run(100)
    clock.finish()
    assert clock.host_ns == clock.compute_ns


def test_a_stream_runs_beside_the_compute_stream() -> None:
    clock = Clock(10)
    start = clock.host_ns
    other = clock.new_stream()
    clock.run(100)
    clock.current = other
    clock.run(300)
    clock.current = clock.compute
    assert (clock.compute_ns, other.end_ns) == (start + 110, start + 320)
    clock.finish()
    assert clock.host_ns == start + 320


def test_collectives_of_the_same_ranks_follow_one_another() -> None:
    clock = Clock(10)
    start = clock.host_ns
    assert clock.communicate(100, "all") == start + 110
    assert clock.communicate(100, "all") == start + 210
    assert clock.compute_ns == start
    clock.await_until(start + 210)
    assert clock.compute_ns == start + 210


def test_a_collective_beside_another_has_half_of_the_links_while_both_run() -> None:
    clock = Clock(10)
    start = clock.host_ns
    assert clock.communicate(1000, "all") == start + 1010
    assert clock.communicate(100, "some") == start + 20 + 200
    assert clock.communicate(2000, "some") == start + 220 + 2000 + (1010 - 220)
