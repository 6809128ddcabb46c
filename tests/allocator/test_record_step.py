"""Byteless tensors behave as real ones in all but their bytes; the recorder sees every allocation's birth and death."""

from __future__ import annotations

import gc
import resource
import weakref
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from memo.allocator import (
    Allocation,
    AllocationRecorder,
    AllocationSite,
    AllocationTrace,
    BytelessMode,
    trace_of,
)
from memo.errors import PlanError, RecordError
from memo.mip.address import problem_to_csv, problem_to_json, read_problem


def lives(recorder: AllocationRecorder) -> list[tuple[int, int, int]]:
    return [(a.lower, a.upper, a.size) for a in recorder.trace(exact=True).allocations]


def test_births_and_deaths_are_events_in_order() -> None:
    with AllocationRecorder() as recorder:
        a = torch.empty(100, dtype=torch.uint8)  # event 0
        b = torch.empty(200, dtype=torch.uint8)  # event 1
        view = a[10:]
        del a
        c = b + 1  # event 2; `a` lives on in its view
        del view  # event 3
        del b  # event 4
    assert lives(recorder) == [(0, 3, 100), (1, 4, 200), (2, 5, 200)]
    assert recorder.lifetime_of(c) is recorder.lifetimes[2]
    assert [a.size for a in recorder.trace().allocations] == [512, 512, 512]
    assert recorder.trace(exact=True).peak_nbytes == 500


def test_what_existed_before_is_no_allocation() -> None:
    before, named = torch.zeros(8), torch.zeros(8)
    with AllocationRecorder() as recorder:
        recorder.adopt([named])
        views = before.view(2, 4), before.add_(1), torch.add(before, 1, out=named), named.t()
        del views
    assert lives(recorder) == []


def test_results_of_one_operator_are_told_apart() -> None:
    x = torch.randn(4, 8)
    with AllocationRecorder() as recorder:
        recorder.site = AllocationSite(phase="forward", module="norm")
        F.layer_norm(x, (8,))
    assert [(life.result, life.nbytes) for life in recorder.lifetimes] == [(0, 128), (1, 16), (2, 16)]
    assert {a.tag for a in recorder.trace().allocations} == {"norm native_layer_norm"}
    assert {a.phase for a in recorder.trace().allocations} == {"forward"}


def test_only_what_dies_in_the_pass_that_made_it_belongs_to_that_pass() -> None:
    with AllocationRecorder() as recorder:
        recorder.site = AllocationSite(group="layers.0.forward")
        inside, outlives, again = (torch.empty(1) for _ in range(3))
        del inside
        recorder.site = AllocationSite(group="layers.0.forward.2")
        del again
        recorder.site = AllocationSite()
        del outlives
    assert [a.group for a in recorder.trace().allocations] == ["layers.0.forward", "", ""]


def test_byteless_tensors_are_ordinary_cpu_tensors_without_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with BytelessMode():
        x = torch.randn(1 << 20, 1 << 20, dtype=torch.bfloat16, requires_grad=True)  # 2 TiB
        y = (x.t() @ x).relu_()
        y.sum().backward()
        assert type(y) is torch.Tensor
        assert y.device.type == "cpu"
        assert x.grad is not None
        assert x.grad.untyped_storage().nbytes() == 2 << 40
        assert x.grad.stride() == (1 << 20, 1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB


def test_a_byteless_storage_dies_with_its_last_reference_and_not_at_a_collection() -> None:
    gc.disable()
    try:
        with BytelessMode():
            x = torch.randn(300, 300)
            y = x.view(-1)[7:]
            assert y.untyped_storage() is x.untyped_storage()
            alive = weakref.ref(x.untyped_storage())
            del x
            assert alive() is not None
            del y
            assert alive() is None
    finally:
        gc.enable()


def test_the_same_operator_on_other_shapes_or_types_is_asked_again() -> None:
    with BytelessMode():
        a, b = torch.ones(3, 5), torch.ones(5, 7)
        assert (a @ b).shape == (3, 7)
        assert (a[:2] @ b).shape == (2, 7)
        assert (a.double() * 2).dtype == torch.float64
        assert (torch.arange(3) * 2).dtype == torch.int64
        assert (torch.arange(3) * 2.0).dtype == torch.float32
        assert torch.full((2,), True).dtype == torch.bool
        assert torch.full((2,), 1).dtype == torch.int64
        assert a.t().contiguous().stride() == (3, 1)
        square = torch.ones(4, 4)
        assert (square * 2).stride() == (4, 1)
        assert (square.t() * 2).stride() == (1, 4)


def test_in_place_operators_return_their_argument_and_raise_its_version() -> None:
    with BytelessMode():
        x = torch.zeros(4)
        version = x._version
        assert x.mul_(2) is x
        assert torch.ops.aten.add_.Tensor(x, 1) is x
        assert x._version == version + 2
        saved = torch.ones(4, requires_grad=True).exp()
        saved.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()


def test_what_needs_contents_is_refused_in_one_line() -> None:
    with BytelessMode():
        x = torch.randn(4)
        for question in (lambda: x.sum().item(), lambda: bool(x[0] > 0), lambda: x.nonzero(), lambda: x[x > 0]):
            with pytest.raises(RecordError, match="needs the contents of a tensor") as caught:
                question()
            assert "\n" not in str(caught.value)


def test_more_than_the_address_space_is_an_error_and_no_crash() -> None:
    with BytelessMode(), pytest.raises(RecordError, match="no address space for a tensor of"):
        torch.empty(1 << 60)


TRACE = AllocationTrace(
    allocations=(
        Allocation(id="b", lower=1, upper=4, size=200, tag="layers.0 mm", phase="forward", group="layers.0.forward"),
        Allocation(id="a", lower=0, upper=2, size=100),
        Allocation(id="c", lower=3, upper=4, size=0, stream=1, tag='comma, "quote"'),
    )
)


def test_a_trace_is_in_order_and_frees_make_room_first() -> None:
    assert [a.id for a in TRACE.allocations] == ["a", "b", "c"]
    assert [(a.id, freed) for a, freed in TRACE.events()] == [
        ("a", False),
        ("b", False),
        ("a", True),
        ("c", False),
    ]
    assert TRACE.peak_nbytes == 300
    touching = [Allocation(id="x", lower=0, upper=1, size=5), Allocation(id="y", lower=1, upper=2, size=5)]
    assert AllocationTrace(allocations=tuple(touching)).peak_nbytes == 5


def test_a_trace_round_trips_through_csv_and_json(tmp_path: Path) -> None:
    for name, text in (("t.csv", problem_to_csv(TRACE.problem())), ("t.json", problem_to_json(TRACE.problem()))):
        path = tmp_path / name
        path.write_text(text)
        assert trace_of(read_problem(path)) == TRACE
    assert problem_to_csv(TRACE.problem()).splitlines()[0] == "id,lower,upper,size,tag,phase,group,stream"


@pytest.mark.parametrize(
    "row", ["a,0,0,5,,,,0", "a,0,1,-5,,,,0", "a,0,1,5,,,,-1", "a,0,1,5,,,,x", "a,0,1,5,,,,1.5", "a,0,1,5,,,,²"]
)
def test_hostile_traces_are_refused(row: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"id,lower,upper,size,tag,phase,group,stream\n{row}\n")
    with pytest.raises(PlanError):
        trace_of(read_problem(path))
