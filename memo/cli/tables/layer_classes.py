"""Text table of an activation plan by class of layers, where a model has several: what each takes, and is treated to."""

from __future__ import annotations

from collections.abc import Callable

from memo.mip.activation import ActivationPlan, LayerPlan
from memo.mip.inputs import LayerProfile
from memo.trace import printable
from memo.units import format_bytes, text_table

LEAST = 5e-4  # a share that is shown as 0.1 %


def classes_table(plan: ActivationPlan) -> str:
    """Table with a row for each class: time and saved bytes of one layer, and the means of its layers' treatment.

    Returns:
        The table; empty where all layers are of one class, or nothing is moved or repeated.
    """
    profile = plan.problem.profile
    if plan.declined or len(profile.classes) == 1:
        return ""
    rows = []
    for known in profile.classes:
        own = [layer for layer, name in zip(plan.layers, profile.layers, strict=True) if name == known.name]
        if own:
            rows.append(_row(known, own))
    head = (
        "class",
        "layers",
        "forward of one",
        "saved",
        "recompute",
        "of the saved bytes: kept",
        "host",
        "disk",
        "recomputed",
    )
    return text_table(head, rows)


def _row(known: LayerProfile, layers: list[LayerPlan]) -> tuple[str, ...]:
    def mean(figure: Callable[[LayerPlan], float]) -> float:
        return sum(map(figure, layers)) / len(layers)

    whole = known.full_bytes or 1
    tiers = [
        mean(lambda layer, tier=tier: getattr(layer, tier) * layer.saved_bytes(known) / whole)  # type: ignore[misc]
        for tier in ("kept", "host", "disk")
    ]
    return (
        printable(known.name),
        f"{len(layers)}",
        f"{1e3 * known.forward_s:.3g} ms",
        format_bytes(whole),
        f"{1e3 * mean(lambda layer: layer.recompute_s(known)):.3g} ms",
        *(f"{share:.1%}" if share > LEAST else "-" for share in (*tiers, 1 - sum(tiers))),
    )
