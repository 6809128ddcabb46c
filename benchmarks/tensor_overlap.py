"""Where overlapped tensor parallelism pays: predicted steps with and without `--tp-overlap`.

    make bench ARMS=tensor_overlap
    python -m benchmarks.tensor_overlap

Predictions by the cost model that plans are made with, of one microbatch on one tensor-parallel group where everything is
kept, whether or not it fits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.results import write_result
from memo.gpt import preset
from memo.gpt.arithmetic import StepLayout, derive_profile
from memo.mip.inputs import Profile, hardware_preset

MODELS, TOKENS = ("7b", "13b", "llama3-70b"), 8192
LINKS = {"h100": "NVLink", "l40s": "PCIe"}
RANKS, ROWS = (2, 4, 8), (1, 2)


def rows() -> Iterator[dict[str, Any]]:
    """Seconds of each model, link, number of ranks and of sequences."""
    for model in MODELS:
        for ranks in RANKS:
            for machine in LINKS:
                for batch in ROWS:
                    plain, halves = (_profile(model, machine, ranks, batch, overlap=each) for each in (False, True))
                    yield {
                        "model": model,
                        "ranks": ranks,
                        "machine": machine,
                        "rows": batch,
                        "plain_s": _step_s(plain),
                        "overlapped_s": _step_s(halves),
                        "hidden": 1 - _exchange_s(halves) / _exchange_s(plain),
                    }


def _profile(model: str, machine: str, ranks: int, batch: int, *, overlap: bool) -> Profile:
    layout = StepLayout(tokens=TOKENS, batch=batch, gpus=ranks, tp=ranks, tp_overlap=overlap)
    return derive_profile(preset(model), hardware_preset(machine), layout)


def _step_s(profile: Profile) -> float:
    parts = (*profile.layer_profiles(), profile.embedding, profile.head)
    return profile.optimizer_s + sum(part.forward_s + part.backward_s for part in parts)


def _exchange_s(profile: Profile) -> float:
    """Seconds in which layers wait for collectives."""
    return sum(layer.forward_exchange_s + layer.backward_exchange_s for layer in profile.layer_profiles())


def table(found: Sequence[dict[str, Any]]) -> str:
    """Steps in seconds, a line for each model and number of ranks."""
    heads = [f"{LINKS[machine]}, {_sequences(batch)}" for machine in LINKS for batch in ROWS]
    lines = [f"| model, ranks | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for first in range(0, len(found), len(heads)):
        ours = found[first : first + len(heads)]
        cells = (
            f"{one['plain_s']:.2f} → {one['overlapped_s']:.2f} s, {one['hidden']:.0%} hidden".replace("%", " %")
            for one in ours
        )
        lines.append(f"| {ours[0]['model']}, {ours[0]['ranks']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _sequences(batch: int) -> str:
    return "1 sequence" if batch == 1 else f"{batch} sequences"


def main(arguments: Sequence[str]) -> int:
    """Prints the table and writes the result file."""
    argparse.ArgumentParser(
        prog="tensor_overlap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    found = list(rows())
    print(table(found))
    print(f"\nWrote {write_result('tensor-overlap', {'tokens': TOKENS, 'rows': found})}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
