"""Levels: how memo manages a program's model, each a name and what makes the manager.

Those over the checking backend have copies as late or as early as their order allows, and report races; `automatic` plans
from its first steps for a device that has room for a part of what is saved.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import tempfile
from collections.abc import Callable
from typing import Any

from race_checker import CheckingBackend, CheckingDisk
from throttled_backend import PacedBackend

import memo
from memo.autoplan import Actuator, AutoPlan, DeviceBudget
from memo.checkpointing import SavedTensors, context
from memo.manager import Manager
from memo.manager.plan_source import checked_plan
from memo.swap import Engine, Level, Placement, RecomputePolicy, WhenFull, find_layers, setting_of
from memo.swap.tiers import DiskTier, HostTier
from tests.hunt.names import DEVICE, Stack

ROOM = 1 << 29
SETTINGS: dict[str, Any] = {
    "1": 1.0,
    "0.5": 0.5,
    "0": 0.0,
    "matmuls": (0.0, 1.0, 0.0),
    "mix": (0.25, 0.25, 0.5),
    "input": Level.SAVE_INPUT,
}
"""Name of a setting to its alpha or level."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Managed:
    """A manager, and what is found out about its run beside its results."""

    manager: Manager | SavedTensors
    before_step: Callable[[int], None] = lambda step: None
    races: Callable[[], list[str]] = list

    @property
    def counts(self) -> tuple[int, int]:
        """Bytes moved and bytes recomputed so far."""
        report = self.manager.report()
        recomputed = 0 if report.recompute is None else report.recompute.recomputed_bytes
        return sum(use.moved_bytes for use in report.tiers[1:]), recomputed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One level: how a model is managed."""

    make: Callable[[Stack, int, str], Managed]
    """Of a model, the program's seed and a scratch directory."""
    rounds: int = 1
    """How often the program's steps run."""
    replaces: bool = True
    """Whether checkpoints around layers are plain calls."""
    may_be_full: bool = False
    """Whether tiers or the device may be too small for a program, which is then an error."""


def _offloaded(setting: str, *, disk: bool = False, **options: Any) -> Way:
    def make(model: Stack, seed: int, scratch: str) -> Managed:
        value = SETTINGS[setting]
        how: dict[str, Any] = {"levels": _all(model, value)} if isinstance(value, Level) else {"alpha": value}
        if disk:
            how |= {"disk": scratch, "disk_budget": ROOM}
        return Managed(manager=memo.offload(model, layers=[*model.layers], min_bytes=1, **how, **options))

    return Way(make=make, may_be_full=options.get("on_full") == "recompute")


def _all(model: Stack, value: Any) -> dict[int | str, Any]:
    return dict.fromkeys(range(len(find_layers(model, model.layers))), value)


def _each_its_own(model: Stack, seed: int, scratch: str) -> Managed:
    draws = random.Random(seed)
    number = len(find_layers(model, model.layers))

    def levels() -> dict[int | str, Any]:
        return {layer: draws.choice([*SETTINGS.values(), 0.25, 0.75]) for layer in range(number)}

    manager = memo.offload(
        model, layers=[*model.layers], levels=levels(), host="256MiB", min_bytes=draws.choice((1, 1024, 4096))
    )
    return Managed(manager=manager, before_step=lambda step: manager.choose_levels(levels()) if step == 1 else None)


def _checked(setting: str, policy: Any, *, tier: str = "host", kept: float = 0.0) -> Way:
    def make(model: Stack, seed: int, scratch: str) -> Managed:
        backend = CheckingBackend(policy, seed=seed)
        disk = DiskTier(CheckingDisk(backend, ROOM), ROOM)
        tiers = [disk] if tier == "disk" else [HostTier(backend, ROOM, segment_bytes=1 << 20), disk]
        engine = Engine(backend, tiers, min_bytes=512)
        layers = find_layers(model, model.layers)
        manager = Manager(
            model, layers, engine, recompute_policy=RecomputePolicy(engine, setting_of(SETTINGS[setting]))
        )
        if kept:
            late = random.Random(seed).choice((0, 4096, ROOM))
            part = Placement(kept=kept, host=1 - kept, late_nbytes=late)
            engine.place(dict.fromkeys(range(len(layers)), part))
        return Managed(manager=manager, races=lambda: [str(race) for race in backend.races])

    return Way(make=make)


def _automatic(model: Stack, seed: int, scratch: str) -> Managed:
    backend = PacedBackend(d2h_bytes_per_s=200e6, h2d_bytes_per_s=200e6)
    tiers = [HostTier(backend, ROOM, segment_bytes=1 << 20)]
    engine = Engine(backend, tiers, min_bytes=512, when_full=WhenFull.STAY)
    tapes = RecomputePolicy(engine, Level.SAVE_ALL)
    manager = Manager(model, find_layers(model, model.layers), engine, recompute_policy=tapes)
    memory = DeviceBudget(
        total_bytes=int(2 ** random.Random(seed).uniform(15, 20)), peak_bytes=lambda: 0, restart=lambda: None
    )
    manager.plan_with(AutoPlan(Actuator(engine, tapes, manager.layers, memory, tracer=None), checked_plan))
    return Managed(manager=manager)


def _around(*, checkpointed: bool = False, **options: Any) -> Way:
    """memo.saved_tensors around each step's forward, in small regions; with `checkpointed` layers are memo.checkpoint's."""

    def make(model: Stack, seed: int, scratch: str) -> Managed:
        context.REGION_BYTES = random.Random(seed).choice((256, 8192, 1 << 27))
        for layer in model.layers if checkpointed else ():
            if not isinstance(layer.forward, functools.partial):  # one module may be several layers
                layer.forward = functools.partial(memo.checkpoint, layer.forward)
        return Managed(manager=memo.saved_tensors(min_bytes=1, **options))

    return Way(make=make, replaces=False)


_ANYWHERE: dict[str, Way] = {
    "1": _offloaded("1", host="256MiB"),
    "0.5": _offloaded("0.5", host="256MiB"),
    "0": _offloaded("0", host="256MiB"),
    "matmuls": _offloaded("matmuls", host="256MiB"),
    "mix": _offloaded("mix", host="256MiB"),
    "input": _offloaded("input", host="256MiB"),
    "1, disk": _offloaded("1", host=0, disk=True),
    "0.5, disk, verified": _offloaded("0.5", host=0, disk=True, verify=True),
    "0, spilled": _offloaded("0", host="16KiB", disk=True),
    "1, spilled": _offloaded("1", host="64KiB", disk=True),
    "1, full": _offloaded("1", host="96KiB", on_full="recompute"),
    "0.5, ahead": _offloaded("0.5", host="256MiB", device="64GiB"),
    "1, verified": _offloaded("1", host="256MiB", verify=True),
    "0, verified": _offloaded("0", host="256MiB", verify=True),
    "each its own": Way(make=_each_its_own),
    "saved tensors": _around(host="256MiB"),
    "saved tensors, spilled": _around(host="16KiB", disk=tempfile.gettempdir()),
    "checkpoint": _around(host="256MiB", checkpointed=True),
    "checkpoint, half": _around(host="256MiB", alpha=0.5, checkpointed=True),
}
_ON_A_CPU: dict[str, Way] = {
    "1, late": _checked("1", "lazy"),
    "1, at once": _checked("1", "eager"),
    "0.5, at once": _checked("0.5", "eager"),
    "0.5, late": _checked("0.5", "lazy", kept=0.5),
    "0.5, at random": _checked("0.5", "random"),
    "0, late, disk": _checked("0", "lazy", tier="disk"),
    "mix, at random": _checked("mix", "random", kept=0.3),
    "automatic": Way(make=_automatic, rounds=3, may_be_full=True),
}
LEVELS = _ANYWHERE | (_ON_A_CPU if DEVICE == "cpu" else {})
"""By name."""

VERIFIED = ("1, verified", "0, verified")
"""Those in memory at which memo compares checksums of what it keeps and of what replays read."""


def levels_of(seed: int, number: int) -> list[str]:
    """The levels that a program of this seed is compared at."""
    return random.Random(seed + 1).sample([*LEVELS], min(number, len(LEVELS)))
