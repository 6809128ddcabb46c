"""Small activation problems: hand-sized layers, and random ones from a seed."""

from __future__ import annotations

import dataclasses
import random

from memo.mip.activation import (
    ActivationPlan,
    ActivationProblem,
    Budgets,
    LayerPlan,
    Pipeline,
    device_peak_candidates,
    predict_stages,
    solve_problem,
)
from memo.mip.activation.plan import ONE_STAGE
from memo.mip.inputs import (
    ALL,
    ATTENTION,
    MATMULS,
    AttentionKernel,
    Coding,
    EmbeddingOrHeadProfile,
    Hardware,
    LayerProfile,
    PointProfile,
    Profile,
    Role,
    Signature,
    StaticBytes,
)

MIB = 1 << 20


def plan_activations(
    profile: Profile, hardware: Hardware, budgets: Budgets, pipeline: Pipeline = ONE_STAGE
) -> ActivationPlan:
    return solve_problem(ActivationProblem(profile=profile, hardware=hardware, budgets=budgets, pipeline=pipeline))


def machine(**changes: float) -> Hardware:
    """One GPU a node; every link moves 10 bytes a second, and 1 GFLOP/s is its peak."""
    rates = {
        "peak_flops": 1e9,
        "matmul_efficiency": 1.0,
        "attention": (AttentionKernel.alike(1.0),),
        "device_bytes": 1 << 40,
        "hbm_bytes_per_s": 1e12,
        "d2h_bytes_per_s": 10.0,
        "h2d_bytes_per_s": 10.0,
        "duplex_bytes_per_s": 20.0,
        "node_d2h_bytes_per_s": 1e30,
        "node_h2d_bytes_per_s": 1e30,
        "nvlink_bytes_per_s": 0.0,
        "gpus_per_node": 1,
        "host_bytes": 1 << 40,
        "disk_write_bytes_per_s": 4.0,
        "disk_read_bytes_per_s": 5.0,
    }
    return Hardware(name="by hand", **(rates | changes))


def layer(
    name: str = "block",
    *,
    always: int = 20,
    all: int = 140,
    matmuls: tuple[int, float] | None = (80, 1.0),
    attention: float | None = 4.0,
    beside: int = 0,
    **rest: float,
) -> LayerProfile:
    """`matmuls`: bytes and recompute time of that point; `attention`: recompute time of that one. None: not possible.

    `beside`: of the bytes of `matmuls`, what autograd does not save.
    """
    points = [PointProfile(name=ALL, saved_bytes=all)]
    if matmuls is not None:
        points.append(PointProfile(name=MATMULS, saved_bytes=matmuls[0], beside_bytes=beside, recompute_s=matmuls[1]))
    if attention is not None:
        points.append(PointProfile(name=ATTENTION, saved_bytes=0, recompute_s=attention))
    times = {"forward_s": 10.0, "backward_s": 20.0}
    return LayerProfile(name=name, always_bytes=always, points=tuple(points), **(times | rest))


def with_curves(
    problem: ActivationProblem, points: int, *, seed: int, held: bool = False, room: float = 0.5
) -> ActivationProblem:
    """The same problem with so many points of a random convex curve for each class, and device bytes that fit them.

    `room`: of what the points' recomputes hold at most, the part that the device gets in addition.
    """
    draw = random.Random(seed)
    classes = tuple(
        dataclasses.replace(known, points=_curve(draw, points, known.points[0].saved_bytes, held=held))
        for known in problem.profile.classes
    )
    most = max(point.held_bytes for known in classes for point in known.points)
    budgets = dataclasses.replace(problem.budgets, device_bytes=problem.budgets.device_bytes + int(room * most))
    return dataclasses.replace(problem, profile=dataclasses.replace(problem.profile, classes=classes), budgets=budgets)


def coded(known: LayerProfile, *, spared: int, **seconds: float) -> LayerProfile:
    """The class with the bytes that codes spare where everything is saved, and seconds of coding."""
    return dataclasses.replace(known, coding=Coding(spared_bytes=spared, **seconds))  # type: ignore[arg-type]


def with_codes(problem: ActivationProblem, seed: int) -> ActivationProblem:
    """The problem with a codec, of which codes spare random parts."""
    draw = random.Random(seed)

    def one(known: LayerProfile) -> LayerProfile:
        share, seconds = draw.uniform(0.2, 0.75), draw.choice([0.0, 0.3 * known.forward_s])
        return coded(known, spared=int(share * known.full_bytes), encode_s=seconds, decode_s=seconds / 2)

    profile = problem.profile
    profile = dataclasses.replace(profile, classes=tuple(one(known) for known in profile.classes), codec="fp8")
    return dataclasses.replace(problem, profile=profile)


def _curve(draw: random.Random, count: int, nbytes: int, *, held: bool) -> tuple[PointProfile, ...]:
    """Points p1, p2, ... after `all`, each dearer by the byte than the one before it; the last saves nothing."""
    shares = sorted((draw.uniform(0.02, 0.98) for _ in range(count - 2)), reverse=True)
    prices = sorted(draw.uniform(0.5, 12.0) for _ in range(count - 1))
    points, before, seconds = [PointProfile(name=ALL, saved_bytes=nbytes)], 1.0, 0.0
    for number, (share, price) in enumerate(zip([*shares, 0.0], prices, strict=True), start=1):
        seconds += price * (before - share)
        before = share
        held_bytes = int(draw.uniform(0.0, 0.5) * nbytes) if held else 0
        points.append(
            PointProfile(
                name=f"p{number}",
                saved_bytes=int(share * nbytes),
                recompute_s=seconds,
                held_bytes=held_bytes,
                absent_bytes=held_bytes * number // (2 * count),
            )
        )
    return tuple(points)


def profile_of(*layers: LayerProfile, tokens: int = 1000, **rest: object) -> Profile:
    """A profile of these layers in this order; equal names mean the same class."""
    classes = {known.name: known for known in layers}
    return Profile(
        signature=Signature(model="by hand", batch=1, tokens=tokens, dtype="bf16"),
        role=Role.DERIVED,
        classes=tuple(classes.values()),
        layers=tuple(known.name for known in layers),
        **rest,
    )


def random_problem(seed: int, *, layers: int, classes: int = 1, pipeline: Pipeline | None = None) -> ActivationProblem:
    """Budgets and rates at which not everything fits and the decision is not plain; most of them can be solved."""
    draw, given = random.Random(seed), random.Random(seed + 1_000)
    kinds = [
        layer(
            f"block{number}",
            always=draw.randint(5 * MIB, 40 * MIB),
            all=draw.randint(60 * MIB, 200 * MIB),
            matmuls=(draw.randint(20 * MIB, 60 * MIB), draw.uniform(0.1, 3.0)),
            attention=draw.uniform(2.0, 9.0),
            beside=given.choice([0, given.randint(0, 20 * MIB)]),
            forward_s=draw.uniform(4.0, 12.0),
            backward_s=draw.uniform(8.0, 24.0),
            forward_transient_bytes=draw.randint(0 * MIB, 50 * MIB),
            backward_transient_bytes=draw.randint(0 * MIB, 50 * MIB),
            between_bytes=10 * MIB * (number + 1),
            static=StaticBytes(other=draw.randint(0 * MIB, 20 * MIB)),
        )
        for number in range(classes)
    ]
    chosen = [draw.choice(kinds) for _ in range(layers)]
    ends = EmbeddingOrHeadProfile(
        forward_s=1.0, backward_s=2.0, saved_bytes=draw.randint(0 * MIB, 30 * MIB), transient_bytes=draw.randint(0, 60)
    )
    everything = sum(kind.full_bytes for kind in chosen)
    problem = ActivationProblem(
        profile=profile_of(*chosen, embedding=ends, head=ends, tokens=draw.choice([1000, 1 << 20])),
        hardware=machine(
            d2h_bytes_per_s=draw.uniform(2.0, 16.0) * MIB,
            h2d_bytes_per_s=draw.uniform(2.0, 16.0) * MIB,
            duplex_bytes_per_s=60.0 * MIB,
            disk_write_bytes_per_s=draw.uniform(1.0, 8.0) * MIB,
            disk_read_bytes_per_s=draw.uniform(1.0, 8.0) * MIB,
        ),
        budgets=Budgets(
            device_bytes=1 << 60,
            host_bytes=int(draw.choice([0.1, 0.3, 1.0]) * everything),
            disk_bytes=draw.choice([0, everything]),
            disk_wear_bytes_per_day=draw.choice([None, draw.uniform(0.0, 1.0) * 86400 * MIB]),
        ),
        pipeline=pipeline or Pipeline(),
    )
    least = max(
        place.resident_bytes
        for stage in range(problem.pipeline.stages)
        for place in device_peak_candidates(problem.stages[stage])
    )
    most = max(stage.peak_device_bytes for stage in predict_stages(problem, [LayerPlan()] * layers))
    device = least + int(draw.uniform(0.0, 0.8) * (most - least))
    return dataclasses.replace(problem, budgets=dataclasses.replace(problem.budgets, device_bytes=device))


def with_collectives(problem: ActivationProblem, seed: int) -> ActivationProblem:
    """The same problem with random collectives of every kind, some longer than the work beside them."""
    draw = random.Random(seed)
    profile = problem.profile
    classes = tuple(
        dataclasses.replace(
            known,
            forward_exchange_s=draw.uniform(0, 0.5) * known.forward_s,
            backward_exchange_s=draw.uniform(0, 0.5) * known.backward_s,
            gather_s=draw.choice([0.0, draw.uniform(0, 15)]),
            reduce_s=draw.choice([0.0, draw.uniform(0, 15)]),
            sync_s=draw.choice([0.0, draw.uniform(0, 40)]),
        )
        for known in profile.classes
    )
    ends = [
        dataclasses.replace(end, forward_exchange_s=0.25, backward_exchange_s=0.5, sync_s=draw.uniform(0, 9))
        for end in (profile.embedding, profile.head)
    ]
    profile = dataclasses.replace(
        profile,
        classes=classes,
        embedding=ends[0],
        head=ends[1],
        optimizer_s=1.0,
        optimizer_exchange_s=draw.uniform(0, 5),
        send_s=draw.uniform(0, 3),
        link_share=draw.uniform(0, 0.5),
    )
    return dataclasses.replace(problem, profile=profile)
