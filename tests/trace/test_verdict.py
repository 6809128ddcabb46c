"""Each rule of the verdict, on the smallest trace that makes it speak and on one that keeps it silent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from memo.events import (
    CounterEvent,
    Event,
    Lane,
    Note,
    Span,
    Stall,
    StallCause,
    StateChange,
    StepMark,
    StorageUse,
    TensorState,
    TierName,
    UseKind,
)
from memo.trace import Trace, build_report
from memo.trace.verdict import RULES

MakeTrace = Callable[..., Trace]
S = TensorState
MS = 1_000_000


@pytest.fixture
def say(make_trace: MakeTrace) -> Callable[..., dict[str, str]]:
    """What the verdict says of one step of 1000 ms with the given events, by rule."""

    def verdict_of(*events: Event, **fields: Any) -> dict[str, str]:
        ends: list[Event] = [StepMark(t=0, step=0, phase="begin"), StepMark(t=1000 * MS, step=0, phase="end")]
        report = build_report([make_trace([*ends, *events], **fields)])
        return {sentence.rule: sentence.text for sentence in report.ranks[0].verdicts[0]}

    return verdict_of


Say = Callable[..., dict[str, str]]


def compute(t: int, d: int, module: str, phase: str) -> Span:
    return Span(t=t * MS, d=d * MS, step=0, lane=Lane.COMPUTE, module=module, phase=phase)


def copy(t: int, d: int, lane: Lane, *, id: int = 1, nbytes: int = 1 << 30) -> Span:
    return Span(t=t * MS, d=d * MS, step=0, lane=lane, id=id, nbytes=nbytes)


def state(t: int, to: TensorState, *, id: int = 1, module: str | None = None, nbytes: int = 1 << 30) -> StateChange:
    return StateChange(t=t * MS, step=0, id=id, to=to, nbytes=nbytes, module=module)


def reload_stall(t: int, d: int, *, module: str = "layers.1", id: int = 1) -> Stall:
    return Stall(t=t * MS, d=d * MS, step=0, cause=StallCause.RELOAD, module=module, id=id)


# Three layers of 100 ms forward and 200 ms backward; layer 1's reload takes 60 ms and its backward begins at 700 ms.
LAYERS: list[Event] = [
    *(compute(100 * i, 100, f"layers.{i}", "forward") for i in range(3)),
    compute(400, 200, "layers.2", "backward"),
    compute(700, 200, "layers.1", "backward"),
    state(150, S.LIVE, module="layers.1.mlp"),
    copy(200, 50, Lane.D2H),
]


def recompute(t: int, d: int, module: str = "layers.1") -> Span:
    return Span(t=t * MS, d=d * MS, step=0, lane=Lane.RECOMPUTE, module=module, phase="backward")


def test_step_time_names_waits_and_recompute_and_compares_with_nothing(say: Say) -> None:
    said = say(reload_stall(700, 10), recompute(600, 40))["step-time"]
    assert said == "Step 0 took 1.00 s; it waited 10 ms for copies and recomputed for 40 ms."


def test_step_time_says_when_nothing_was_added(say: Say) -> None:
    assert say(*LAYERS)["step-time"] == "Step 0 took 1.00 s; it waited for no copy and recomputed nothing."


def test_a_simulated_step_is_predicted(say: Say) -> None:
    said = say(
        *LAYERS,
        reload_stall(700, 10),
        copy(0, 100, Lane.H2D),
        meta={"simulated": True, "link_bytes_per_s": {"h2d": 20e9}},
    )
    assert said["step-time"] == "Step 0 is predicted to take 1.00 s; it waits 10 ms for copies."
    assert "measured" not in " ".join(said.values())
    assert say(meta={"simulated": True})["step-time"].endswith("; it waits for no copy and recomputes nothing.")


@pytest.mark.parametrize(
    ("plain", "said"), [(1.0, "0 % longer than the 1.00 s"), (1.25, "within the noise of the 1.25 s")]
)
def test_a_measured_plain_step_is_compared_with(plain: float, said: str, make_trace: MakeTrace) -> None:
    ends: list[Event] = [StepMark(t=0, step=0, phase="begin"), StepMark(t=1000 * MS, step=0, phase="end")]
    report = build_report([make_trace([*ends, *LAYERS])], plain_s=plain)
    assert report.ranks[0].verdicts[0][0].text == (
        f"Step 0 took 1.00 s, {said} measured without memo; it waited for no copy and recomputed nothing."
    )
    assert "without memo" not in report.ranks[0].verdicts[None][0].text


@pytest.mark.parametrize(
    ("plain", "waited", "said"),
    [
        (
            0.8,
            99,
            "Waits and recompute explain 99 ms of the 200 ms more; the trace does not show the reason of the rest",
        ),
        (0.8, 0, "Waits and recompute explain none of the 200 ms more; the trace does not show the reason of the rest"),
        (0.8, 100, None),
    ],
)
def test_a_step_is_said_to_be_unexplained_where_waits_and_recompute_are_less_than_half_of_what_it_took_longer(
    plain: float, waited: int, said: str | None, make_trace: MakeTrace
) -> None:
    ends: list[Event] = [StepMark(t=0, step=0, phase="begin"), StepMark(t=1000 * MS, step=0, phase="end")]
    stalls = [reload_stall(700, waited)] if waited else []
    text = build_report([make_trace([*ends, *LAYERS, *stalls])], plain_s=plain).ranks[0].verdicts[0][0].text
    assert text.startswith("Step 0 took 1.00 s, 25 % longer than the 800 ms measured without memo; it waited ")
    assert text.endswith(
        "." if said is None else f"{said}, such as other programs or memory touched for the first time."
    )
    assert ("explain" in text) is (said is not None)


def test_plain_steps_of_the_same_bytes_in_the_trace_are_what_is_compared_with(make_trace: MakeTrace) -> None:
    def step(number: int, took: int, *, nbytes: int = 100, moves: bool = False) -> list[Event]:
        at = number * 10_000
        found: list[Event] = [
            StepMark(t=at * MS, step=number, phase="begin"),
            StateChange(t=(at + 1) * MS, step=number, id=number, to=S.LIVE, nbytes=nbytes, module="layers.0"),
            StateChange(t=(at + 2) * MS, step=number, id=number, to=S.GONE, nbytes=nbytes),
            StepMark(t=(at + took) * MS, step=number, phase="end"),
        ]
        if moves:
            found.append(Span(t=(at + 1) * MS, d=MS, step=number, lane=Lane.D2H, id=number, nbytes=nbytes))
        return found

    # The first one warms up, the third is of another size.
    steps = [step(0, 900), step(1, 400), step(2, 100, nbytes=7), step(3, 500, moves=True)]
    verdicts = build_report([make_trace([event for one in steps for event in one])]).ranks[0].verdicts
    assert "25 % longer than the 400 ms measured without memo" in verdicts[3][0].text
    assert all("without memo" not in verdicts[number][0].text for number in (0, 1, 2))


def test_one_pass_far_longer_than_its_like_is_named(make_trace: MakeTrace) -> None:
    def step(number: int, slow: int) -> list[Event]:
        at = number * 10_000 * MS
        spans = [
            Span(
                t=at + i * 1000 * MS, d=100 * MS, step=number, lane=Lane.COMPUTE, module=f"layers.{i}", phase="backward"
            )
            for i in range(5)
        ]
        spans[2] = dataclasses.replace(spans[2], d=slow * MS)
        marks = [StepMark(t=at, step=number, phase="begin"), StepMark(t=at + 5000 * MS, step=number, phase="end")]
        return [*marks, *spans]

    def outlier(events: list[Event], number: int | None) -> str | None:
        said = build_report([make_trace(events)]).ranks[0].verdicts[number]
        return {sentence.rule: sentence.text for sentence in said}.get("outlier")

    events = [*step(0, 900), *step(1, 90)]
    assert outlier(events, 0) == (
        "layers.2's backward took 900 ms, 9.0 times the median of its like (100 ms); in other steps 90 ms."
    )
    assert (
        outlier(events, None)
        == "layers.2's backward took 900 ms, 9.0 times the median of its like (100 ms), in step 0."
    )
    assert outlier(events, 1) is None
    assert outlier(step(0, 290), 0) is None  # not three times
    assert outlier(step(0, 340), 0) is None  # less than a twentieth of the step
    waits = Stall(t=2000 * MS, d=850 * MS, step=0, cause=StallCause.RELOAD, module="layers.2", id=1)
    assert outlier([*step(0, 900), waits], 0) is None  # it waited, which is another sentence


def test_no_advice_contradicts_a_plan_and_its_limits_are_said(say: Say) -> None:
    busy = copy(400, 290, Lane.H2D, id=2)
    late = [*LAYERS, busy, state(690, S.RETURNING), copy(690, 60, Lane.H2D), reload_stall(700, 50)]
    drained: list[Event] = [
        compute(0, 100, "layers.0", "forward"),
        copy(0, 400, Lane.D2H, nbytes=4 << 30),
        Stall(t=100 * MS, d=300 * MS, step=0, cause=StallCause.DRAIN, module="layers.0", id=1),
    ]
    idle = [*LAYERS, copy(450, 100, Lane.H2D), recompute(640, 40)]
    plan = Note(t=0, step=0, cause="plan", message="host memory: a GiB more saves 2 ms a step; the disk")
    for events, advice in ((late, "move fewer bytes"), (drained, "would hide"), (idle, "could be moved instead")):
        assert advice in " ".join(say(*events).values())
        planned = say(*events, plan)
        assert advice not in " ".join(planned.values())
        assert planned["plan-limits"] == (
            "A solver planned this step. What limits it (and others): host memory: a GiB more saves 2 ms a step."
        )
        assert planned == say(*events, meta={"plan": {"limits": plan.message}})
    later = dataclasses.replace(plan, t=2000 * MS)
    assert "plan-limits" not in say(*late, later)


def test_declined_only_when_nothing_moved(say: Say) -> None:
    assert "all 1 GiB of saved activations stayed" in say(state(0, S.LIVE))["declined"]
    assert "declined" not in say(*LAYERS)
    leaving = dataclasses.replace(state(1, S.LEAVING), tier=TierName.HOST)
    assert "declined" not in say(state(0, S.LIVE), leaving)
    assert "declined" not in say()


def test_copies_out_hide_when_nothing_waited_for_them(say: Say) -> None:
    assert say(*LAYERS)["copies-out"] == "D2H is busy 17 % of the forward and hides fully."


def test_copies_out_cost_what_drains_waited(say: Say) -> None:
    drain = Stall(t=300 * MS, d=20 * MS, step=0, cause=StallCause.DRAIN, module="layers.2", id=1)
    assert say(*LAYERS, drain)["copies-out"] == "D2H is busy 17 % of the forward and costs 20 ms of waiting."


def test_without_a_host_tier_the_disks_lanes_are_the_copies(say: Say) -> None:
    disk = [copy(0, 30, Lane.DISK_WRITE), copy(400, 50, Lane.DISK_READ)]
    said = say(*(event for event in LAYERS if getattr(event, "lane", None) is not Lane.D2H), *disk)
    assert said["copies-out"] == "NVMe write is busy 10 % of the forward and hides fully."
    assert said["copies-in"] == "NVMe read is busy 12 % of the backward and hides fully."


def test_copies_in_cost_what_reloads_waited(say: Say) -> None:
    said = say(*LAYERS, copy(620, 100, Lane.H2D), reload_stall(700, 20))["copies-in"]
    assert said == "H2D is busy 5.0 % of the backward and costs 20 ms of waiting."


def test_a_late_prefetch_is_the_reason_of_a_wait(say: Say) -> None:
    events = [*LAYERS, state(660, S.RETURNING), copy(660, 60, Lane.H2D), reload_stall(700, 20)]
    assert say(*events)["worst-stall"] == ("layers.1's reload waits 20 ms because its prefetch began late.")


def test_a_reload_that_nothing_asked_for_says_so(say: Say) -> None:
    events = [*LAYERS, state(700, S.RETURNING), copy(700, 60, Lane.H2D), reload_stall(700, 60)]
    assert "because nothing asked for it earlier" in say(*events)["worst-stall"]


def test_a_late_prefetch_says_what_is_free_of_the_device(say: Say) -> None:
    events = [*LAYERS, state(660, S.RETURNING), copy(660, 60, Lane.H2D), reload_stall(700, 20)]
    full = CounterEvent(t=1, step=0, tier=TierName.DEVICE, nbytes=7 << 29)
    said = say(*events, full, meta={"budgets": {"device": 4 << 30}})["worst-stall"]
    assert said.endswith("its prefetch began late, with 512 MiB of the device budget free.")


def test_a_saturated_link_advises_fewer_bytes(say: Say) -> None:
    busy = copy(400, 290, Lane.H2D, id=2)
    events = [*LAYERS, busy, state(690, S.RETURNING), copy(690, 60, Lane.H2D), reload_stall(700, 50)]
    said = say(*events)["worst-stall"]
    assert (
        said
        == "layers.1's reload waits 50 ms because H2D was never idle long enough since backward began: move fewer bytes."
    )


def test_the_waits_of_one_layer_are_one_wait(say: Say) -> None:
    stalls = [reload_stall(700, 10), reload_stall(710, 10, id=2), reload_stall(800, 15, module="layers.0", id=3)]
    assert say(*LAYERS, *stalls)["worst-stall"].startswith("layers.1's reload waits 20 ms")


def test_a_drain_names_the_share_that_would_hide(say: Say) -> None:
    events: list[Event] = [
        compute(0, 100, "layers.0", "forward"),
        copy(0, 400, Lane.D2H, nbytes=4 << 30),
        Stall(t=100 * MS, d=300 * MS, step=0, cause=StallCause.DRAIN, module="layers.0", id=1),
    ]
    assert say(*events)["worst-stall"] == (
        "layers.0 waits 300 ms for its copy out to end: forward saves 4 GiB and D2H carries 10.7 GB/s;"
        " moving 25 % of that would hide."
    )


@pytest.mark.parametrize(
    ("cause", "advice"),
    [(StallCause.HOST_FULL, "of 2 GiB is full until"), (StallCause.DISK_QUEUE, "the disk is behind")],
)
def test_waits_for_the_lower_tiers_say_which(cause: StallCause, advice: str, say: Say) -> None:
    stall = Stall(t=100 * MS, d=30 * MS, step=0, cause=cause, module="layers.0")
    assert advice in say(stall, meta={"budgets": {"host": 2 << 30}})["worst-stall"]


def test_a_wait_too_short_to_matter_is_not_a_sentence(say: Say) -> None:
    short = Stall(t=100 * MS, d=MS // 2, step=0, cause=StallCause.RELOAD, module="layers.0")
    assert "worst-stall" not in say(short)


def test_missed_prefetches_are_counted_against_all_reloads(say: Say) -> None:
    uses = [
        StorageUse(t=t, step=0, id=t, how=how)
        for t, how in enumerate([UseKind.FETCHED, UseKind.PREFETCHED, UseKind.LIVE])
    ]
    assert say(*uses)["missed-prefetch"] == "1 of 2 reloads began only when backward asked for them."
    assert "missed-prefetch" not in say(uses[1], uses[2])


def test_a_link_far_below_its_measured_rate_is_said(say: Say) -> None:
    span = copy(0, 100, Lane.H2D, nbytes=10**9)
    said = say(span, meta={"link_bytes_per_s": {"h2d": 20e9}})
    assert said["slow-link"] == "H2D ran at 10 GB/s, 50 % of the 20 GB/s measured alone."
    assert "slow-link" not in say(span, meta={"link_bytes_per_s": {"h2d": 12e9}})


def test_a_budget_is_said_when_tight_and_when_broken(say: Say) -> None:
    saved = state(0, S.LIVE, nbytes=96)
    assert say(saved, meta={"budgets": {"device": 100}})["budget"] == "Device peaks at 96 % of its budget of 100 B."
    assert say(saved, meta={"budgets": {"device": 90}})["budget"] == "Device is 6 B over its budget of 90 B."
    assert "budget" not in say(saved, meta={"budgets": {"device": 200}})


def test_recompute_while_the_links_are_idle_is_said(say: Say) -> None:
    events = [*LAYERS, copy(450, 100, Lane.H2D), recompute(640, 40)]
    assert say(*events)["recompute"] == (
        "Recompute takes 40 ms while D2H is idle 83 % of the forward and H2D 77 % of the backward: "
        "a larger share could be moved instead."
    )
    assert "recompute" not in say(*events, reload_stall(700, 20))


def test_recompute_is_no_waste_where_there_is_no_room_to_move_more_to(say: Say) -> None:
    away = [state(100, S.LEAVING, nbytes=100, id=9), state(300, S.AWAY, nbytes=100, id=9)]
    in_host = [dataclasses.replace(one, tier=TierName.HOST) for one in away]
    events = [*LAYERS, copy(450, 100, Lane.H2D), recompute(640, 40), state(50, S.LIVE, nbytes=100, id=9), *in_host]
    assert "recompute" in say(*events, meta={"budgets": {"host": 200}})
    assert "recompute" not in say(*events, meta={"budgets": {"host": 100}})
    used = 100 + (1 << 30)  # on the device, with the layer's own tensor
    assert "recompute" in say(*events, meta={"budgets": {"host": 200, "device": 2 * used}})
    assert "recompute" not in say(*events, meta={"budgets": {"host": 200, "device": used}})


def test_the_plan_is_said_where_it_was_off_by_more_than_a_twentieth(say: Say) -> None:
    meta = {"plan": {"predicted_peak_nbytes": {"device": 80}}}
    assert say(state(0, S.LIVE, nbytes=100), meta=meta)["plan"] == "Against the plan, device peaks 25 % above its 80 B."
    assert "plan" not in say(state(0, S.LIVE, nbytes=82), meta=meta)


def test_uneven_ranks_are_said_by_the_slowest(make_trace: MakeTrace) -> None:
    def rank(number: int, end: int) -> Trace:
        use = StorageUse(t=1, step=0, id=1, how=UseKind.LIVE)
        marks = [StepMark(t=0, step=0, phase="begin"), StepMark(t=end * MS, step=0, phase="end")]
        return make_trace([*marks, use], rank=number)

    report = build_report([rank(0, 100), rank(1, 100), rank(2, 112)])
    assert report.rank == 2
    said = {sentence.rule: sentence.text for sentence in report.ranks[0].verdicts[0]}
    assert said["uneven-ranks"] == "Rank 2 is the slowest with 112 ms, 12 % above the median rank."
    even = build_report([rank(0, 100), rank(1, 101)])
    assert "uneven-ranks" not in {sentence.rule for sentence in even.ranks[0].verdicts[0]}


def test_what_the_reader_remarked_is_said_last(say: Say) -> None:
    assert list(say(remarks=("3 events were dropped.",)).items())[-1] == ("health", "3 events were dropped.")


def test_hostile_names_are_inert_in_sentences(say: Say) -> None:
    stall = Stall(
        t=100 * MS, d=30 * MS, step=0, cause=StallCause.DISK_QUEUE, module="\x1b]0;x\x07\u202e\u2028" + "y" * 5000
    )
    said = say(stall)["worst-stall"]
    assert "\\x1b" in said
    assert "\\u202e" in said
    assert "\\u2028" in said
    assert len(said) < 400


def test_every_rule_is_documented() -> None:
    from pathlib import Path

    text = (Path(__file__).parent.parent.parent / "docs" / "verdict.md").read_text(encoding="utf-8")
    for rule in RULES:
        assert f"### {rule}\n" in text
