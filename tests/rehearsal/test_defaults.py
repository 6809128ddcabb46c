"""Defaults of `memo.offload` rehearsed at real sizes: every budget holds from the first step on, and a plan settles."""

from __future__ import annotations

import pytest

from memo.mip.inputs import hardware_preset
from memo.rehearsal import Rehearsal, SimulatedMachine, Way, hugging_face_step, rehearse

GIB = 1 << 30
LLAMA_8B = "llama-3-8b"
SMALL_LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 128256,
}


def rehearsed(
    model: object,
    tokens: int,
    *,
    lora: int = 0,
    layers: int | None = None,
    logits: bool = False,
    way: Way = Way.MEMO,
    disk_gib: int = 0,
    **options: object,
) -> Rehearsal:
    build = hugging_face_step(model, lora=lora, layers=layers, without_logits=not logits)  # type: ignore[arg-type]
    machine = SimulatedMachine(hardware_preset("h100"), host_bytes=124 * GIB, disk_bytes=disk_gib * GIB, assume=0.0)
    return rehearse(lambda: build(batch=1, tokens=tokens), machine, way=way, **options)  # type: ignore[arg-type]


def require_settled(found: Rehearsal) -> None:
    assert found.failure is None
    assert found.settled, found.steps[-1].decision
    assert not found.violations, [str(one) for one in found.violations]
    assert found.plan is not None
    assert found.plan.step_s == pytest.approx(found.steps[-1].seconds, rel=0.05), "as predicted, but for the optimizer"


def test_half_an_8b_in_the_budgets_that_an_h100_exceeded_twice() -> None:
    require_settled(rehearsed(LLAMA_8B, 32768, lora=16, layers=8, device="27GiB", host="22GiB"))


def test_copies_out_of_whole_storages_hide_behind_compute_as_planned() -> None:
    found = rehearsed(LLAMA_8B, 16384, lora=16, layers=8, device="20GiB", host="40GiB")
    require_settled(found)
    assert found.steps[-1].stall_s < 0.005 * found.steps[-1].seconds


def test_a_1b_whose_host_memory_is_what_binds() -> None:
    require_settled(rehearsed(SMALL_LLAMA, 65536, device="22GiB", host="32GiB"))


@pytest.mark.promise("P2")
def test_an_8b_with_lora_at_32k_by_defaults_settles_where_it_once_raised() -> None:
    found = rehearsed(LLAMA_8B, 32768, lora=16, host="86.73GiB")
    require_settled(found)
    checkpointed = rehearsed(LLAMA_8B, 32768, lora=16, way=Way.CHECKPOINT, steps=1)
    assert found.steps[-1].seconds < 0.8 * checkpointed.steps[-1].seconds
    assert sum(step.seconds for step in found.steps[:3]) < 3 * found.steps[-1].seconds + 4 * 4.4, (
        "plain steps take 4.4 s"
    )


@pytest.mark.parametrize(
    ("model", "lora", "tokens", "layers", "options"),
    [
        ("qwen3-0.6b", 0, 32768, 6, {"device": "12GiB", "host": "4GiB"}),
        ("qwen3-0.6b", 8, 131072, 4, {"device": "30GiB", "host": "6GiB"}),
        ("llama-3.2-1b", 0, 16384, 4, {"device": "28GiB", "host": "8GiB", "logits": True}),
        ("mistral-7b", 16, 16384, 4, {"device": "14GiB", "host": "0.5GiB", "disk_gib": 64}),
        ("gemma-2-9b", 16, 16384, 4, {"device": "24GiB", "host": "8GiB", "attach": True}),
        ("gpt-oss-20b", 16, 4096, 4, {"device": "14GiB", "host": "2GiB"}),
        ("qwen2.5-vl-7b", 16, 16384, 4, {"device": "16GiB", "host": "8GiB"}),
        ("qwen2.5-0.5b", 0, 16384, 6, {"device": "9GiB", "host": "4GiB", "accumulate": 2}),
    ],
)
def test_defaults_keep_every_budget_and_are_no_slower_than_checkpointing(
    model: str, lora: int, tokens: int, layers: int, options: dict[str, object]
) -> None:
    found = rehearsed(model, tokens, lora=lora, layers=layers, **options)  # type: ignore[arg-type]
    assert found.failure is None
    assert found.settled, found.steps[-1].decision
    assert not found.violations, [str(one) for one in found.violations]
    logits, accumulate = bool(options.get("logits")), options.get("accumulate", 1)
    checkpointed = rehearsed(
        model, tokens, lora=lora, layers=layers, logits=logits, accumulate=accumulate, way=Way.CHECKPOINT, steps=1
    )
    assert found.steps[-1].seconds <= 1.005 * checkpointed.steps[-1].seconds


def test_lengths_that_change_keep_the_budgets() -> None:
    found = rehearsed(
        "qwen3-0.6b", 32768, lora=8, layers=4, lengths=(32768, 8192, 12288), device="7GiB", host="2GiB", steps=12
    )
    assert found.failure is None
    assert not found.violations, [str(one) for one in found.violations]


def test_what_no_plan_can_do_is_one_error_before_the_first_backward() -> None:
    found = rehearsed(LLAMA_8B, 131072, lora=16, layers=2, device="20GiB")
    assert found.failure is not None
    assert "no plan fits" in found.failure
    assert "layers.0 alone saves" in found.failure or "layers.1 alone saves" in found.failure
    assert not found.steps
    assert not found.has_room
