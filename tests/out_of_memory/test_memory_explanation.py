"""The three sentences: what held the memory, of which kind that is, and what to change."""

from __future__ import annotations

import dataclasses

import pytest

from memo.out_of_memory import SAVED, HeldMemory, explain_memory, parse_torch_error
from memo.out_of_memory.explanation import Cause
from memo.trace import Holder

GIB = 1 << 30
HELD = HeldMemory(
    where="In layers.3,",
    ran_out=True,
    bands={SAVED: 40 * GIB, "weights": 8 * GIB, "transient": 2 * GIB},
    holders=[],
    requested_nbytes=4 * GIB,
    reserved_nbytes=51 * GIB,
    capacity_nbytes=52 * GIB,
)


def test_activations_are_moved_and_what_half_the_sequence_saves_is_said() -> None:
    answer = explain_memory(HELD)
    assert answer.cause is Cause.ACTIVATIONS
    assert answer.sentences == (
        "In layers.3, the device held 50 GiB when 4 GiB more were asked for: saved activations 40 GiB, weights 8 GiB, "
        "transient 2 GiB.",
        "The largest part is not fragmentation (1 GiB of it free), but activations that layers saved for backward, 80 % of "
        "it.",
        "Move them: memo.offload(model, host=...) or memo train --offload auto keeps about two layers of them on the "
        "device; half the sequence would take about 23 GiB less.",
    )


@pytest.mark.parametrize(
    ("changes", "cause", "advice"),
    [
        ({"reserved_nbytes": 60 * GIB}, Cause.FRAGMENTATION, "expandable_segments:True"),
        ({"bands": {"weights": 10 * GIB, "optimizer state": 20 * GIB}}, Cause.STATES, "each holds 3.75 GiB"),
        (
            {"moved_nbytes": 90 * GIB},
            Cause.ACTIVATIONS,
            "Another 90 GiB are in host memory or on disk already: lower alpha",
        ),
        ({"bands": {"transient": 20 * GIB}}, Cause.TRANSIENT, "device=..."),
        ({"bands": {"transient": 20 * GIB}, "outside_layers": True}, Cause.LOGITS, "memo.loss_without_logits(model)"),
        (
            {"holders": [Holder(what="saved", name="", nbytes=30 * GIB, line="model.py:9 cross_entropy")]},
            Cause.LOGITS,
            "memo.loss_without_logits(model)",
        ),
        (
            {"bands": {"weights": 16 * GIB, "optimizer state": 10 * GIB}, "outside_layers": True},
            Cause.LOGITS,
            "memo.loss_without_logits(model)",
        ),
        (
            {
                "bands": {"weights": 16 * GIB},
                "outside_layers": True,
                "requested_nbytes": GIB,
            },  # a state of an embedding
            Cause.STATES,
            "each holds 2 GiB",
        ),
        ({"bands": {"other": 20 * GIB}}, Cause.OTHER, "End other programs"),
    ],
)
def test_each_cause_has_its_cure(changes: dict[str, object], cause: Cause, advice: str) -> None:
    answer = explain_memory(dataclasses.replace(HELD, **({"reserved_nbytes": None} | changes)))  # type: ignore[arg-type]
    assert answer.cause is cause
    assert advice in answer.sentences[2]


def test_a_peak_without_an_error_is_no_fragmentation() -> None:
    answer = explain_memory(dataclasses.replace(HELD, ran_out=False, requested_nbytes=None, reserved_nbytes=90 * GIB))
    assert answer.cause is Cause.ACTIVATIONS
    assert answer.sentences[2].endswith("half the sequence would take about 21 GiB less.")


def test_the_sizes_of_torchs_message_are_read() -> None:
    numbers = parse_torch_error(
        "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 12.00 MiB is "
        "free. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but "
        "unallocated."
    )
    assert numbers.requested_nbytes == 3 * GIB // 2
    assert numbers.capacity_nbytes == int(79.1 * GIB)
    assert numbers.reserved_nbytes == 70 * GIB + (512 << 20)
    assert parse_torch_error("DefaultCPUAllocator: you tried to allocate 77 bytes.").requested_nbytes == 77
    assert numbers.with_rest({"weights": 50 * GIB}) == {"weights": 50 * GIB, "transient": 20 * GIB}
