"""From a step's figures to a profile and a machine, by arithmetic."""

from __future__ import annotations

import dataclasses

import pytest

from memo.autoplan.limits import Limits
from memo.autoplan.profile_from_step import beside_layers, measured_hardware, measured_profile, scaled_profile
from memo.autoplan.step_evidence import StepEvidence, worst
from memo.autoplan.step_timeline import LaneUse, LayerTimes, StepTimes
from memo.errors import PlanError
from memo.events import Lane, StallCause
from memo.machine import LinkRates
from memo.mip.inputs import ALL, ATTENTION, INPUT, MATMULS, PointProfile, Profile, Role, Signature
from memo.swap import LayerCosts, PointCost

MS = 1_000_000
SIGNATURE = Signature(model="m", batch=2, tokens=100, dtype="float32")


def layer(forward_ms: float, backward_ms: float, *, added_ms: float = 0, calls: int = 1) -> LayerTimes:
    return LayerTimes(
        calls=calls,
        forward_ns=round(forward_ms * MS),
        backward_ns=round(backward_ms * MS),
        recomputes=[(0, round(added_ms * MS))],
        saved_bytes=4000 * calls,
    )


def times(
    layers: dict[str, LayerTimes],
    lanes: dict[Lane, LaneUse] | None = None,
    *,
    between_ms: tuple[int, int] = (0, 0),
    stalls_ns: dict[StallCause, int] | None = None,
) -> StepTimes:
    turn = 3 * MS + sum(one.forward_ns for one in layers.values()) + between_ms[0] * MS
    return StepTimes(
        layers=layers,
        lanes=lanes or {},
        begin_ns=0,
        first_layer_ns=3 * MS,
        turn_ns=(turn, turn + 7 * MS),
        end_ns=turn + 7 * MS + sum(one.backward_ns for one in layers.values()) + between_ms[1] * MS,
        stalls_ns=stalls_ns or {},
    )


def costs(name: str, saved: int = 1000) -> LayerCosts:
    """A layer of three points, of which the last one saves so many bytes."""
    points = (
        PointCost(name=ALL, saved_bytes=saved + 3000),
        PointCost(name=MATMULS, saved_bytes=saved + 1200, beside_bytes=500, recompute_s=1e-3),
        PointCost(name=ATTENTION, saved_bytes=saved, recompute_s=4e-3),
    )
    return LayerCosts(
        layer=name,
        tokens=100,
        points=points,
    )


def test_recomputes_take_what_they_took_in_the_step_and_not_in_their_trial() -> None:
    wait = [(8 * MS, 10 * MS)]
    found = {
        name: LayerTimes(
            calls=1, forward_ns=10 * MS, backward_ns=30 * MS, recomputes=[(0, 4 * MS)], waits=[(1 * MS, 2 * MS), *wait]
        )
        for name in ("a", "b")
    }
    known = {name: costs(name) for name in found}
    (tried,) = measured_profile(times(found), known, SIGNATURE).classes
    (seen,) = measured_profile(times(found), known, SIGNATURE, is_measuring=True).classes
    assert [point.recompute_s for point in tried.points] == pytest.approx([0.0, 1e-3, 4e-3])
    assert [point.recompute_s for point in seen.points] == pytest.approx([0.0, 0.75e-3, 3e-3])  # 1 of 4 ms was a wait


def test_like_layers_are_one_class_with_their_median_times() -> None:
    layers = {"a": layer(10, 30, added_ms=10), "b": layer(11, 20), "c": layer(90, 20)}
    profile = measured_profile(times(layers), {name: costs(name) for name in layers}, SIGNATURE)
    assert profile.role is Role.MEASURED
    assert profile.layers == ("layer",) * 3
    (known,) = profile.classes
    assert known.forward_s == pytest.approx(0.011)
    assert known.backward_s == pytest.approx(0.020), "of 30 ms, 4 were recompute and 6 waiting"
    assert known.always_bytes == 0
    assert [(one.name, one.saved_bytes, one.beside_bytes) for one in known.points] == [
        (ALL, 4000, 0),
        (MATMULS, 2200, 500),
        (ATTENTION, 1000, 0),
    ]
    assert [one.recompute_s for one in known.points] == pytest.approx([0, 1e-3, 4e-3])
    assert profile.embedding.forward_s == pytest.approx(0.003)
    assert profile.head.forward_s == pytest.approx(0.007)


def test_what_runs_between_layers_is_time_of_the_ends() -> None:
    """FSDP's copies of gathered weights and of gradients, for instance; without it a plan's step was 11 % too short."""
    layers = {name: layer(10, 20) for name in ("a", "b")}
    known = {name: costs(name) for name in layers}

    def ends_ms(found: StepTimes) -> tuple[float, float]:
        profile = measured_profile(found, known, SIGNATURE)
        assert [one.forward_s for one in profile.classes] == [0.010]
        return profile.embedding.forward_s * 1e3, profile.head.forward_s * 1e3

    assert ends_ms(times(layers)) == pytest.approx((3, 7))
    assert ends_ms(times(layers, between_ms=(4, 10))) == pytest.approx((7, 17))
    waited = {StallCause.DRAIN: 4 * MS, StallCause.RELOAD: 5 * MS}  # reloads are waited for within layers
    assert ends_ms(times(layers, between_ms=(4, 10), stalls_ns=waited)) == pytest.approx((3, 17))
    several = {name: layer(20, 40, calls=2) for name in layers}
    assert ends_ms(times(several, between_ms=(4, 10))) == pytest.approx((3, 7))


def curved(name: str, *, held: int = 7) -> LayerCosts:
    """A layer with a curve of more points."""
    points = (
        PointCost(name=ALL, saved_bytes=4000),
        PointCost(name="p1", saved_bytes=3000, held_bytes=held, recompute_s=0.001, beside_bytes=20),
        PointCost(name="p2", saved_bytes=3000, held_bytes=0, recompute_s=0.002),
        PointCost(name=INPUT, saved_bytes=400, held_bytes=900, recompute_s=0.01, recompute_flops=5.0),
        PointCost(name="p3", saved_bytes=390, recompute_s=0.02),
    )
    return dataclasses.replace(costs(name), points=points)


def test_a_curve_is_the_profiles_and_says_all_that_is_saved() -> None:
    layers = {"a": layer(10, 30), "b": layer(10, 30)}
    known_costs = {name: curved(name) for name in layers}
    profile = measured_profile(times(layers), known_costs, SIGNATURE)
    (known,) = profile.classes
    assert (known.fixed_bytes, known.full_bytes) == (0, 4000)
    assert known.points == (
        PointProfile(name=ALL, saved_bytes=4000),
        PointProfile(name="p1", saved_bytes=3000, held_bytes=7, recompute_s=0.001, beside_bytes=20),
        PointProfile(name=INPUT, saved_bytes=400, held_bytes=900, recompute_s=0.01, recompute_flops=5.0),
        PointProfile(name="p3", saved_bytes=390, recompute_s=0.02),
    ), "p2 saves no less than p1"
    shorter = scaled_profile(profile, Signature(model="m", batch=1, tokens=100, dtype="float32")).classes[0]
    assert (shorter.points[1].saved_bytes, shorter.points[1].held_bytes) == (1500, 4)
    assert shorter.points[2].recompute_flops == 2.5
    few = scaled_profile(profile, Signature(model="m", batch=1, tokens=1, dtype="float32")).classes[0]
    assert [one.name for one in few.points] == [ALL, "p1", INPUT], "2 bytes at p3, as at input"


def test_layers_of_other_curves_are_other_classes() -> None:
    layers = {"a": layer(10, 30), "b": layer(10, 30)}
    profile = measured_profile(times(layers), {"a": curved("a"), "b": curved("b", held=8)}, SIGNATURE)
    assert profile.layers == ("layer", "layer#2")


def test_ranks_agree_on_the_points_that_all_have_with_the_most_bytes_and_seconds() -> None:
    def evidence(*points: PointCost) -> StepEvidence:
        own = dataclasses.replace(costs("a"), points=points)
        return StepEvidence(profile=measured_profile(times({"a": layer(10, 30)}), {"a": own}, SIGNATURE))

    whole = PointCost(name=ALL, saved_bytes=100)
    merged = worst(
        [
            evidence(whole, PointCost(name="p1", saved_bytes=50, held_bytes=3, recompute_s=1.0)),
            evidence(
                whole,
                PointCost(name="p1", saved_bytes=40, held_bytes=9, recompute_s=2.0),
                PointCost(name="p2", saved_bytes=0, recompute_s=3.0),
            ),
        ]
    )
    assert merged.profile is not None
    (known,) = merged.profile.classes
    assert known.points[1:] == (PointProfile(name="p1", saved_bytes=50, held_bytes=9, recompute_s=2.0),)


def holding_points(name: str) -> LayerCosts:
    points = (
        PointCost(name=ALL, saved_bytes=4000),
        PointCost(name="p1", saved_bytes=3000, held_bytes=50, recompute_s=0.001),
        PointCost(name=ATTENTION, saved_bytes=1000, held_bytes=300, recompute_s=0.01, beside_bytes=120),
        PointCost(name=INPUT, saved_bytes=400, held_bytes=900, recompute_s=0.02),
    )
    return dataclasses.replace(costs(name), points=points)


@pytest.mark.parametrize(
    ("recomputing", "backward", "held"),
    [
        # The recompute at `attention` held 300 of 5600: others begin with 5300. After it, 120 that it was given stand beside
        # the 5000: 5120.
        pytest.param(5600, 5120, (0, 230, 480, 1080), id="measured"),
        pytest.param(4700, 5120, (0, 0, 0, 180), id="below the rest of backward"),
        # Not told apart, the 300 are among the 5000.
        pytest.param(0, 4700, (0, 50, 300, 900), id="not recomputed"),
    ],
)
def test_a_plan_counts_what_recomputes_hold_above_the_rest_of_backward(
    recomputing: int, backward: int, held: tuple[int, ...]
) -> None:
    layers = {"a": layer(10, 30), "b": layer(10, 30)}
    measured = measured_profile(times(layers), {name: holding_points(name) for name in layers}, SIGNATURE)
    found, always = beside_layers(measured, limits(5000, 5000, around=100, recomputes=(recomputing, recomputing)))
    (known,) = found.classes
    assert always == 100
    assert known.forward_transient_bytes == 5000 - always
    assert known.backward_transient_bytes == backward - always
    assert tuple(point.held_bytes for point in known.points) == held


def test_what_is_absent_at_a_backwards_peak_is_taken_off_at_the_measured_point_alone() -> None:
    layers = {"a": layer(10, 30), "b": layer(10, 30)}
    measured = measured_profile(times(layers), {name: holding_points(name) for name in layers}, SIGNATURE)
    known = limits(5000, 5000, around=100, recomputes=(5400, 5400), absent=(600, 590))
    found, _ = beside_layers(measured, known)
    before, _ = beside_layers(measured, dataclasses.replace(known, absent_layers=()))
    assert len(found.classes) == 1, "a plan treats alike what differs by little"
    assert [(each.name, each.absent_bytes) for each in found.classes[0].points if each.absent_bytes] == [
        (ATTENTION, 590)
    ]
    bare = tuple(dataclasses.replace(each, absent_bytes=0) for each in found.classes[0].points)
    assert bare == before.classes[0].points


def test_layers_whose_recomputes_hold_another_amount_are_other_classes() -> None:
    layers = {"a": layer(10, 30), "b": layer(10, 30)}
    measured = measured_profile(times(layers), {name: holding_points(name) for name in layers}, SIGNATURE)
    alike, _ = beside_layers(measured, limits(5000, 5000, around=100, recomputes=(5400, 5600)))
    assert [known.points[1].held_bytes for known in alike.layer_profiles()] == [230, 230], "a twentieth of a layer"
    other, _ = beside_layers(measured, limits(5000, 5000, around=100, recomputes=(5300, 5600)))
    assert [known.points[1].held_bytes for known in other.layer_profiles()] == [0, 230]


def test_layers_that_save_other_bytes_are_other_classes() -> None:
    layers = {"a": layer(10, 30), "b": layer(10, 30)}
    profile = measured_profile(times(layers), {"a": costs("a"), "b": costs("b", saved=1001)}, SIGNATURE)
    assert profile.layers == ("layer", "layer#2")


def test_a_layer_without_token_levels_moves_whole() -> None:
    profile = measured_profile(times({"a": layer(20, 40, calls=2)}), {}, SIGNATURE)
    (known,) = profile.classes
    assert [one.name for one in known.points] == [ALL]
    assert known.full_bytes == 4000
    assert known.forward_s == pytest.approx(0.010), "of one call"


def test_a_layer_that_was_not_backwarded_is_an_error() -> None:
    with pytest.raises(PlanError, match="b ran 1 forwards and no backward"):
        measured_profile(times({"a": layer(1, 2), "b": layer(1, 0)}), {}, SIGNATURE)


def profile() -> Profile:
    return measured_profile(times({"a": layer(10, 30)}), {"a": costs("a")}, SIGNATURE)


def test_another_length_takes_attention_by_the_square() -> None:
    longer = scaled_profile(profile(), Signature(model="m", batch=2, tokens=200, dtype="float32"))
    known = longer.classes[0]
    assert (longer.role, known.always_bytes, known.points[0].saved_bytes) == (Role.DERIVED, 0, 8000)
    assert (known.points[1].saved_bytes, known.points[1].beside_bytes) == (4400, 1000)
    # 4 of 10 ms are of single tokens and double, 6 are attention's and quadruple
    assert known.forward_s == pytest.approx(2 * 0.004 + 4 * 0.006)
    assert known.points[2].recompute_s == pytest.approx(0.008)


def test_another_batch_takes_everything_in_proportion() -> None:
    known = scaled_profile(profile(), Signature(model="m", batch=6, tokens=100, dtype="float32")).classes[0]
    assert (known.forward_s, known.backward_s) == (pytest.approx(0.030), pytest.approx(0.090))
    assert known.full_bytes == 3 * 4000


def test_lanes_are_as_fast_as_their_copies_were() -> None:
    lanes = {
        Lane.D2H: LaneUse(nbytes=1000, busy_ns=100),
        Lane.DISK_WRITE: LaneUse(nbytes=500, busy_ns=1000),
        Lane.DISK_READ: LaneUse(nbytes=500, busy_ns=500),
    }
    machine = measured_hardware(times({"a": layer(1, 2)}, lanes), device_bytes=1, host_bytes=2)
    rates = machine.lanes(1)
    assert rates.d2h_bytes_per_s == pytest.approx(1e10)
    assert rates.disk_write_bytes_per_s == pytest.approx(5e8)
    assert rates.disk_read_bytes_per_s == pytest.approx(1e9)
    assert rates.h2d_bytes_per_s >= 1e15, "nothing crossed it, so it bounds nothing"


def test_a_link_that_was_measured_alone_is_believed() -> None:
    lanes = {Lane.D2H: LaneUse(nbytes=1000, busy_ns=100)}
    link = LinkRates(
        d2h_bytes_per_s=7e9, h2d_bytes_per_s=8e9, d2h_together_bytes_per_s=4e9, h2d_together_bytes_per_s=5e9
    )
    machine = measured_hardware(times({"a": layer(1, 2)}, lanes), device_bytes=1, host_bytes=2, link=link)
    rates = machine.lanes(1)
    assert (rates.d2h_bytes_per_s, rates.h2d_bytes_per_s, rates.duplex_bytes_per_s) == (7e9, 8e9, 9e9)


@pytest.mark.parametrize(
    ("rate", "nbytes", "expected"),
    [(2e9, 1 << 30, (7e9, 2e9, 7e9)), (4e9, 1 << 30, (7e9, 8e9, 9e9)), (2e9, 1 << 20, (7e9, 8e9, 9e9))],
    ids=["others use it", "copies both ways", "few bytes"],
)
def test_a_link_that_others_use_in_the_step_is_as_fast_as_its_copies_back(
    rate: float, nbytes: int, expected: tuple[float, ...]
) -> None:
    """FSDP's parameters on the host come over it, too; copies out, which pinning may delay, say nothing."""
    lanes = {
        Lane.D2H: LaneUse(nbytes=nbytes, busy_ns=nbytes),
        Lane.H2D: LaneUse(nbytes=nbytes, busy_ns=round(nbytes / rate * 1e9)),
    }
    link = LinkRates(
        d2h_bytes_per_s=7e9, h2d_bytes_per_s=8e9, d2h_together_bytes_per_s=4e9, h2d_together_bytes_per_s=5e9
    )
    machine = measured_hardware(times({"a": layer(1, 2)}, lanes), device_bytes=1, host_bytes=2, link=link)
    rates = machine.lanes(1)
    assert (rates.d2h_bytes_per_s, rates.h2d_bytes_per_s, rates.duplex_bytes_per_s) == pytest.approx(expected)


def limits(*beside: int, around: int, recomputes: tuple[int, ...] = (), absent: tuple[int, ...] = ()) -> Limits:
    return Limits(
        device_bytes=0,
        others_bytes=max(around, *beside, *recomputes),
        around_bytes=around,
        beside_layers=beside,
        beside_recomputes=recomputes,
        absent_layers=absent,
        host_bytes=0,
        disk_bytes=0,
    )


def test_gradients_that_come_layer_by_layer_stand_beside_the_layers_that_run_then() -> None:
    names = ("a", "b", "c")
    profile = measured_profile(times({name: layer(10, 30) for name in names}), {}, SIGNATURE)
    found, always = beside_layers(profile, limits(2900, 2500, 2100, around=2000))
    assert always == 2000
    assert [known.transient_bytes for known in found.layer_profiles()] == [900, 500, 100]
    assert (found.embedding.transient_bytes, found.head.transient_bytes) == (0, 0)
    assert [known.full_bytes for known in found.layer_profiles()] == [4000] * 3

    found, always = beside_layers(profile, limits(2100, 2000, 2000, around=3000))
    assert always == 2100
    assert set(found.layers) == {found.layers[0]}, "a plan treats alike what differs by a fortieth of a layer"
    assert found.head.transient_bytes == 900

    assert beside_layers(profile, Limits(device_bytes=0, others_bytes=7, host_bytes=0, disk_bytes=0)) == (profile, 7)


def test_codes_spare_the_share_that_they_spare_of_what_was_saved() -> None:
    own = layer(10, 30)
    own.saved_bytes = 0
    own.saved(3000, 900)
    own.saved(1000)
    exact = measured_profile(times({"a": own}), {"a": costs("a")}, SIGNATURE)
    (known,) = measured_profile(times({"a": own}), {"a": costs("a")}, SIGNATURE, codec="int8").classes
    assert exact.codec is None
    assert exact.classes[0].coding is None
    assert known.coding is not None
    assert known.coding.spared_bytes == int(0.525 * 4000)
    longer = scaled_profile(
        measured_profile(times({"a": own}), {"a": costs("a")}, SIGNATURE, codec="int8"),
        dataclasses.replace(SIGNATURE, tokens=200),
    )
    assert longer.classes[0].coding is not None
    assert longer.classes[0].coding.spared_bytes == pytest.approx(2 * 0.525 * 4000, abs=4)
