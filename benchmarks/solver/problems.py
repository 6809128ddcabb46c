"""Thirty planning problems: models, links, lengths and budgets between what nothing fits under and what everything does.

In one of the models layers are unlike: every other one has a narrow MLP, and saves fewer bytes for the same attention.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from memo.errors import Infeasible
from memo.gpt.arithmetic.profile_by_arithmetic import StepLayout, derive_profile
from memo.gpt.config import preset
from memo.mip.activation.plan import ActivationProblem, Budgets, LayerPlan
from memo.mip.activation.solver import DoesNotFit, find_plan, misfit_of
from memo.mip.inputs.hardware import Hardware, hardware_preset
from memo.mip.inputs.profile import Profile

MODELS = (("350m", 65536), ("1.3b", 16384), ("1.3b", 131072), ("7b", 32768), ("7b", 262144))
UNLIKE = ("7b", 32768)
"""The model whose layers are unlike."""
NARROW = 8
"""Its narrow MLPs are narrower by this factor."""
LINKS = ("a100-80g", "gh200", "rtx4090")
ROOM = (0.15, 0.55)
"""Device budgets, from the least that has a plan (0) to what keeps everything (1)."""
HUGE = 1 << 50
TENSOR_PARALLEL = {"7b": 8}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A problem and what it is called."""

    name: str
    problem: ActivationProblem


def with_budget(problem: ActivationProblem, device_bytes: int) -> ActivationProblem:
    """The same with another budget of device memory, on a device that has as much."""
    budgets = dataclasses.replace(problem.budgets, device_bytes=device_bytes)
    machine = dataclasses.replace(problem.hardware, device_bytes=device_bytes)
    return dataclasses.replace(problem, budgets=budgets, hardware=machine)


def problems() -> Iterator[Named]:
    """Five models at their lengths, on three machines, each with two budgets; every third host has no room for all."""
    for number, ((model, tokens), link) in enumerate(itertools.product(MODELS, LINKS)):
        ranks = TENSOR_PARALLEL.get(model, 1)
        machine, profile = derived(model, tokens, link)
        if (model, tokens) == UNLIKE:
            profile, model = (
                unlike(profile, derived(model, tokens, link, narrower=NARROW)[1]),
                f"{model} of unlike layers",
            )
        saved = round(sum(LayerPlan().saved_bytes(layer) for layer in profile.layer_profiles()))
        host = saved * ranks if number % 3 else saved * ranks // 3
        disk = 0 if number % 2 else 4 * saved * ranks
        budgets = Budgets(device_bytes=HUGE, host_bytes=host, disk_bytes=disk, ranks_per_node=ranks)
        whole = ActivationProblem(profile=profile, hardware=machine, budgets=budgets)
        least, most = least_bytes(whole), _most(whole)
        for room in ROOM:
            device = round(least + room * (most - least))
            tiers = "host for a third, disk" if disk and not number % 3 else "host" if not disk else "host, disk"
            yield Named(
                name=f"{model}, {tokens >> 10}k tokens, {link}, {tiers}, room {room:.0%}",
                problem=with_budget(whole, device),
            )


def unlike(wide: Profile, narrow: Profile) -> Profile:
    """The first profile with every other layer, the second, fourth and so on, from the other one."""
    (one,), (other,) = wide.classes, narrow.classes
    other = dataclasses.replace(other, name="narrow")
    layers = tuple((other if number % 2 else one).name for number in range(len(wide.layers)))
    return dataclasses.replace(wide, classes=(one, other), layers=layers)


def derived(model: str, tokens: int, link: str, *, tiles: int = 1, narrower: int = 1) -> tuple[Hardware, Profile]:
    """A machine without a limit of device memory, and the profile of one rank on it, from the model's arithmetic.

    Args:
        model: a preset's name.
        tokens: the sequence's length.
        link: the machine's name.
        tiles: of the MLP.
        narrower: factor by which the MLP is narrower than the preset's.
    """
    config = preset(model, max_seq=tokens, positions="rotary", mlp_tiles=tiles)
    config = dataclasses.replace(config, ffn=config.ffn // narrower)
    ranks = TENSOR_PARALLEL.get(model, 1)
    machine = dataclasses.replace(hardware_preset(link), device_bytes=HUGE)
    return machine, derive_profile(config, machine, StepLayout(gpus=ranks, tokens=tokens, tp=ranks), name=model)


def least_bytes(problem: ActivationProblem) -> int:
    """The least device memory that has a plan."""
    tight = with_budget(problem, 1 << 20)
    misfit = misfit_of(tight)
    assert isinstance(misfit, DoesNotFit)
    return int(misfit.least_bytes["device"])


def _most(problem: ActivationProblem) -> int:
    """The least budget in which everything stays on the device."""
    low, high = least_bytes(problem), 1 << 46
    while high - low > low // 256:
        middle = (low + high) // 2
        try:
            kept = (plan := find_plan(with_budget(problem, middle))) is not None and plan.declined is not None
        except Infeasible:
            kept = False
        low, high = (low, middle) if kept else (middle, high)
    return high
