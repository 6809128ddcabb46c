"""Small steps whose every moment can be worked out on paper: whole bytes, whole seconds, links of a few bytes per second."""

from __future__ import annotations

from memo.events import TierName
from memo.mip.inputs.hardware import LaneRates
from memo.mip.simulate import StageSimulation
from memo.mip.simulate.result import LayerWork, Part
from memo.mip.simulate.stage import SimulatedStage


def rates(
    *, d2h: float = 10, h2d: float = 10, duplex: float | None = None, write: float = 5, read: float = 5
) -> LaneRates:
    """Links that, unless told otherwise, carry both directions at once."""
    return LaneRates(
        d2h_bytes_per_s=d2h,
        h2d_bytes_per_s=h2d,
        duplex_bytes_per_s=d2h + h2d if duplex is None else duplex,
        disk_write_bytes_per_s=write,
        disk_read_bytes_per_s=read,
    )


def layer(
    number: int,
    *,
    forward_s: float = 1,
    backward_s: float = 2,
    recompute_s: float = 0,
    kept: int = 0,
    host: int = 0,
    disk: int = 0,
    recomputed: int = 0,
    transient: tuple[int, int] = (0, 0),
    recompute_held: int = 0,
) -> LayerWork:
    """One layer by what becomes of its bytes."""
    return LayerWork(
        name=f"layers.{number}",
        forward_s=forward_s,
        backward_s=backward_s,
        recompute_s=recompute_s,
        nbytes={Part.KEPT: kept, Part.HOST: host, Part.DISK: disk, Part.RECOMPUTED: recomputed},
        forward_transient_nbytes=transient[0],
        backward_transient_nbytes=transient[1],
        recompute_held_nbytes=recompute_held,
    )


def step(
    layers: list[LayerWork], links: LaneRates | None = None, *, device: int | None = None, static_nbytes: int = 0
) -> StageSimulation:
    """One forward and one backward of the layers."""
    budgets = None if device is None else {TierName.DEVICE: device}
    stage = SimulatedStage(layers, rates=links or rates(), budgets=budgets, static_nbytes=static_nbytes)
    stage.forward()
    stage.backward()
    return stage.result()
