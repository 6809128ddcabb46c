"""Profiles of transformers' models: bytes as memo record's, parameters and FLOPs as published, refusals in one line."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch

import memo.hugging_face.model as model_module
from memo.cli.planning.request import unheard
from memo.errors import UsageError
from memo.gpt.arithmetic import RecomputeMethod, StepLayout, TrainingMethod
from memo.hugging_face import PUBLISHED, HuggingFaceModel, configuration_from, model_class, published_name
from memo.hugging_face.fused_attention import NAME as FUSED
from memo.hugging_face.recorded_step import with_more_sequences
from memo.mip.inputs import ALL, ATTENTION, INPUT, Profile, hardware_preset
from memo.record import SavedRole, Step, record_step

pytest.importorskip("transformers", minversion="5")
from transformers import AttentionInterface, AttentionMaskInterface

MACHINE = hardware_preset("h100")
TOKENS = 256
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen3": {},
    "olmo2": {},
    "phi3": {"pad_token_id": 0},
    "gemma2": {},
    "gpt_neox": {},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "gpt_oss": {**EXPERTS, "sliding_window": 64},
    "gemma3_text": {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}
AS_RECORDED = ("llama", "qwen3", "olmo2", "phi3", "gpt_neox", "mixtral", "qwen3_moe")
"""Whose attention has no window, so that their own implementation is fused on a CPU, too."""


def small(kind: str) -> dict[str, Any]:
    """A small configuration of an architecture."""
    return {"model_type": kind, **SMALL, **KINDS[kind]}


def profile(kind: str, **options: Any) -> Profile:
    model = HuggingFaceModel(configuration_from(small(kind)), name=kind)
    return model.profile(MACHINE, StepLayout(tokens=TOKENS), TrainingMethod(**options))


@pytest.mark.parametrize("kind", AS_RECORDED)
def test_saved_bytes_are_those_of_memo_record(kind: str) -> None:
    config = configuration_from(small(kind))
    config.use_cache = False

    def build() -> Step:
        made: Callable[..., Any] = model_class(config, name=kind)
        model = made(config).to(torch.bfloat16)
        ids = torch.zeros(1, TOKENS, dtype=torch.int64)
        return Step(model=model, loss=lambda: model(input_ids=ids, labels=ids).loss, inputs=(ids,))

    roles = record_step(build, exact=True).saved_nbytes
    recorded = sum(
        roles[role] for role in (SavedRole.INPUT, SavedRole.ATTENTION, SavedRole.RECOMPUTABLE, SavedRole.STATISTICS)
    )
    assert sum(layer.full_bytes for layer in profile(kind).layer_profiles()) == recorded


def test_a_model_is_recorded_by_a_process_that_has_not_built_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HuggingFaceModel(configuration_from(small("qwen3_moe")), name="any", say=unheard)
    written = pickle.dumps(model)
    for known in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.delitem(known._global_mapping, FUSED)
    layout = StepLayout(tokens=TOKENS)
    assert pickle.loads(written).profile(MACHINE, layout) == model.profile(MACHINE, layout)


def test_a_recorded_model_goes_to_another_process_without_its_tensors() -> None:
    model = HuggingFaceModel(configuration_from(small("qwen3_moe")), name="any", say=unheard)
    threads, layout = torch.get_num_threads(), StepLayout(tokens=TOKENS)
    found = model.profile(MACHINE, layout)
    assert torch.get_num_threads() == threads
    written = pickle.dumps(model)
    assert len(written) < 1 << 16
    assert pickle.loads(written).profile(MACHINE, layout) == found  # of the recording that it takes along


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_layer_has_points_and_work(kind: str) -> None:
    found = profile(kind)
    assert len(found.layers) == 3
    for layer in found.classes:
        assert layer.points[0].name == ALL
        assert layer.points[-1].name in (ATTENTION, INPUT)  # where the input alone saves less than attention needs
        attention = layer.point(ATTENTION)
        assert attention is not None
        assert 0 < attention.recompute_s <= layer.points[-1].recompute_s
        assert 0 < attention.recompute_flops < layer.forward_flops
        assert layer.backward_s > layer.forward_s > layer.attention_s > 0


def test_a_window_leaves_few_scores() -> None:
    window, full = profile("gpt_oss").classes
    reach = 64 / TOKENS
    assert window.attention_flops == pytest.approx(full.attention_flops * (2 * reach - reach**2))


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("qwen3-0.6b", 0.596, 0.596),
        ("qwen3-8b", 8.191, 7.568),
        ("qwen3-30b-a3b", 30.532, 3.04),
        ("gpt-oss-20b", 20.915, 3.61),
        ("mixtral-8x7b", 46.703, 12.75),
        ("llama-3-8b", 8.030, 7.505),
        ("llama-3.2-1b", 1.236, 1.236),
        ("mistral-7b", 7.242, 7.111),
        ("gemma-2-9b", 9.242, 9.242),
        ("gemma-3-1b", 1.000, 1.000),
        ("qwen2.5-0.5b", 0.494, 0.494),
        ("qwen2.5-7b", 7.616, 7.071),
    ],
)
def test_published_models_have_their_parameters_and_multiply_the_active_ones(
    name: str, billions: float, active: float
) -> None:
    model = HuggingFaceModel(configuration_from(PUBLISHED[name].config), name=name)
    assert model.parameters / 1e9 == pytest.approx(billions, abs=0.001)
    tokens = 128  # so few that attention is next to nothing
    causal = model.profile(MACHINE, StepLayout(tokens=tokens)).model_flops_causal_per_token
    assert causal / 6e9 == pytest.approx(active, rel=0.02)


def test_names_are_found_by_any_case_and_by_repository() -> None:
    assert published_name("Qwen/Qwen3-30B-A3B") == "qwen3-30b-a3b"
    assert published_name("mistralai/Mixtral-8x7B-Instruct-v0.1") == "mixtral-8x7b"
    assert published_name("meta-llama/Llama-3.2-1B-Instruct") == "llama-3.2-1b"
    assert published_name("meta-llama/Meta-Llama-3-8B") == "llama-3-8b"
    assert published_name("Llama-3.1-8B") == "llama-3.1-8b"
    assert published_name("google/gemma-2-9b-it") == published_name("gemma-2-9b") == "gemma-2-9b"
    assert published_name("mistralai/Mistral-7B-v0.3") is None  # has another vocabulary, and no window
    assert published_name("qwen9-8b") is None


def test_full_recompute_saves_the_input_alone_and_repeats_the_layer() -> None:
    plain, whole = profile("llama", recompute=RecomputeMethod.NONE), profile("llama", recompute=RecomputeMethod.FULL)
    (kept,), (again,) = plain.classes, whole.classes
    assert again.full_bytes == TOKENS * SMALL["hidden_size"] * 2
    assert [point.name for point in kept.points] == [point.name for point in again.points] == [ALL]
    assert again.backward_s == pytest.approx(kept.backward_s + kept.forward_s)


def test_context_parallelism_divides_bytes_and_attention() -> None:
    config = configuration_from(small("llama"))
    model = HuggingFaceModel(config, name="llama")
    (alone,) = model.profile(MACHINE, StepLayout(tokens=1024)).classes
    (shared,) = model.profile(MACHINE, StepLayout(tokens=1024, gpus=4, cp=4)).classes
    assert alone.full_bytes == 4 * shared.full_bytes
    assert alone.attention_flops == 4 * shared.attention_flops
    assert shared.forward_exchange_s > 0


def test_the_loss_without_logits_takes_the_logits_from_the_head() -> None:
    config = {**small("llama"), "vocab_size": 32768}
    own = HuggingFaceModel(configuration_from(config), name="llama")
    without = own.with_loss_without_logits()
    assert without is not None
    assert without.with_loss_without_logits() is None
    tokens = 4096
    logits = 4 * tokens * 32768
    head, short = (model.profile(MACHINE, StepLayout(tokens=tokens)).head for model in (own, without))
    assert head.saved_bytes + head.transient_bytes > 2 * logits
    assert short.saved_bytes < logits / 64


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_a_step_recorded_with_one_loss_and_then_the_other_is_that_of_the_other_alone(kind: str) -> None:
    def model(**options: Any) -> HuggingFaceModel:
        return HuggingFaceModel(configuration_from(small(kind)), name=kind, **options)

    own = model()
    own.recorded(MACHINE, tokens=TOKENS, batch=1)
    without = own.with_loss_without_logits()
    assert without is not None
    alone = model(without_logits=True)
    steps = [each.recorded(MACHINE, tokens=TOKENS, batch=1) for each in (without, alone)]
    assert steps[0] == steps[1]


def test_a_step_is_recorded_without_checksums_and_says_which_kind_of_layer_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_checksum(*_: object) -> torch.Tensor:
        raise AssertionError("tensors without bytes have nothing to sum")

    monkeypatch.setattr("memo.swap.recompute.tape.checksums.checksum", no_checksum)
    said: list[str] = []
    HuggingFaceModel(configuration_from(small("gpt_oss")), name="gpt_oss", say=said.append).profile(
        MACHINE, StepLayout(tokens=TOKENS)
    )
    kinds = ("sliding_attention", "full_attention")
    words = [f"recording {kind} at 256 tokens, kind {number} of 2" for number, kind in enumerate(kinds, 1)]
    assert set(said) == set(words)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_size": 64}, "no model_type"),
        ({"model_type": "no_such_thing"}, "no architecture 'no_such_thing'"),
        ({"model_type": "bert", "num_hidden_layers": 2, "max_position_embeddings": 16}, "cannot be recorded"),
        ({"model_type": "clip"}, "belongs to no language model"),
        ({"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 64}, "one fused scan"),
        (
            {"model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 64, "num_heads": 4, "head_dim": 32},
            "one fused scan",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        HuggingFaceModel(configuration_from(fields), name="it").profile(MACHINE, StepLayout(tokens=4096))
    assert "\n" not in str(caught.value)


def test_operators_of_memos_own_are_no_loop_over_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first recorded step sums what each operator reads; Gemma 3n was refused for it."""
    monkeypatch.setattr("memo.hugging_face.recorded_step.MOST_OPERATORS", 700)
    HuggingFaceModel(configuration_from(small("llama")), name="llama").profile(MACHINE, StepLayout(tokens=TOKENS))


def test_weights_published_in_fp8_are_counted_as_they_are_trained_and_it_is_said() -> None:
    config = {**small("llama"), "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    notes = HuggingFaceModel(configuration_from(config), name="llama").notes
    assert any("published in fp8, and counted in bf16" in note for note in notes)


def test_experts_of_transformers_are_not_divided() -> None:
    model = HuggingFaceModel(configuration_from(small("mixtral")), name="mixtral")
    with pytest.raises(UsageError, match=r"--ep 2.*--zero 3.*--pp"):
        model.profile(MACHINE, StepLayout(tokens=TOKENS, gpus=2, ep=2))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_tensor_parallel_rank_has_its_part_and_the_collectives(kind: str) -> None:
    model = HuggingFaceModel(configuration_from(small(kind)), name=kind, without_logits=True, say=unheard)
    whole = model.profile(MACHINE, StepLayout(tokens=4096))
    part = model.profile(MACHINE, StepLayout(tokens=4096, gpus=2, tp=2))
    assert part.model_flops_causal_per_token == whole.model_flops_causal_per_token
    assert part.signature.tp == 2
    alone, own = whole.classes[0], part.classes[0]
    experts = kind == "qwen3_moe"  # which take all tokens, in whole numbers of columns
    assert 0.5 <= own.full_bytes / alone.full_bytes < (0.8 if experts else 0.51)
    assert own.attention_flops == alone.attention_flops / 2
    assert 0.5 <= own.forward_flops / alone.forward_flops < 0.51  # a router is whole
    assert 0.5 < own.static.nbytes / alone.static.nbytes < 0.51  # norms are
    assert own.forward_exchange_s > 0 < own.backward_exchange_s
    assert own.points[-1].recompute_s > own.points[0].recompute_s == 0
    assert part.head.static.nbytes < 0.51 * whole.head.static.nbytes
    pickle.dumps(model)  # a search sends it to other processes


def test_ranks_that_do_not_divide_a_model_are_refused_with_those_that_would() -> None:
    model = HuggingFaceModel(configuration_from(small("llama")), name="llama")
    with pytest.raises(UsageError, match=r"--tp 3: llama: 3 ranks do not divide the model's \d+ heads; .* 2 would"):
        model.profile(MACHINE, StepLayout(tokens=3072, gpus=3, tp=3))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_step_of_many_sequences_is_what_each_adds_between_two_that_were_recorded(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are exact; points are those of the larger recorded step, for whose replays launches count a little more."""
    monkeypatch.setattr(model_module, "LARGE_TOKENS", 512)
    model = HuggingFaceModel(configuration_from(small(kind)), name=kind)
    derived = model.recorded(MACHINE, tokens=TOKENS, batch=9)
    assert sorted(batch for _, _, batch, _ in model._recorded) == [2, 4, 9]
    monkeypatch.setattr(model_module, "LARGE_TOKENS", 1 << 30)
    model._recorded.clear()
    recorded = model.recorded(MACHINE, tokens=TOKENS, batch=9)
    assert list(model._recorded) == [(MACHINE, TOKENS, 9, 1)]
    for name, layer in recorded.layers.items():
        more = derived.layers[name]
        assert dataclasses.replace(more, points=(), forward=layer.forward, backward=layer.backward) == (
            dataclasses.replace(layer, points=())
        )
        assert (more.forward.operators, more.backward.kernels) == (layer.forward.operators, layer.backward.kernels)
        assert more.forward.product_flops == pytest.approx(layer.forward.product_flops, rel=1e-9)
        assert more.points[0].saved_bytes == pytest.approx(layer.points[0].saved_bytes, rel=1e-2)
    assert derived.head.saved_nbytes == recorded.head.saved_nbytes
    assert derived.embedding.transient_nbytes == recorded.embedding.transient_nbytes


def test_a_step_with_other_storages_is_no_measure_of_more_sequences() -> None:
    model = HuggingFaceModel(configuration_from(small("llama")), name="llama")
    step = model.recorded(MACHINE, tokens=TOKENS, batch=1)
    other = dataclasses.replace(
        step, layers={name: dataclasses.replace(layer, storages=(1,)) for name, layer in step.layers.items()}
    )
    assert with_more_sequences(step, other, times=Fraction(3)) is None
