"""Adapters of a planned model beside PEFT's: the bytes that a layer saves, and what a 4-bit base takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from memo.errors import UsageError
from memo.gpt import preset
from memo.gpt.arithmetic import AdapterDtype, BaseFormat, Optimizer, StepLayout, TrainingMethod, derive_profile
from memo.hugging_face import HuggingFaceModel, built_model, configuration_from, model_class
from memo.hugging_face.adapters import adapt
from memo.mip.inputs import hardware_preset
from memo.swap import find_layers

SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
H100 = hardware_preset("h100")
DTYPES = {AdapterDtype.FP32: torch.float32, AdapterDtype.BF16: torch.bfloat16}


def model() -> Any:
    config = configuration_from(SMALL, name="small")
    made: Any = built_model(model_class(config, name="small"), config, name="small", dtype=torch.bfloat16)
    return made.to_empty(device="cpu")


def saved_bytes(model: nn.Module) -> int:
    """Bytes of all storages that autograd saves in one forward, parameters left out."""
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage
        return tensor

    inputs = torch.zeros(1, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(inputs_embeds=inputs, use_cache=False).logits
    assert result.requires_grad
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("dtype", list(AdapterDtype))
def test_a_layer_saves_what_it_saves_with_pefts_adapters(dtype: AdapterDtype) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(model(), config, autocast_adapter_dtype=dtype is AdapterDtype.FP32)
    ours = model()
    adapt(ours, [layer.module for layer in find_layers(ours)], 4, name="small", dtype=DTYPES[dtype])
    assert saved_bytes(ours.train()) == saved_bytes(theirs.train())


def layer_of(*, lora_dtype: AdapterDtype = AdapterDtype.FP32, base: BaseFormat = BaseFormat.FULL) -> Any:
    config = configuration_from(SMALL, name="small")
    planned = HuggingFaceModel(config, name="small", lora=4, lora_dtype=lora_dtype)
    return planned.profile(H100, StepLayout(tokens=256), TrainingMethod(base=base)).classes[0]


def test_float32_adapters_save_each_input_again() -> None:
    wide, narrow = layer_of(), layer_of(lora_dtype=AdapterDtype.BF16)
    inputs = 6 * 64 + 128  # of seven maps, six as wide as the model
    once = 2 * 64 + 128  # results of two norms and the last map's input, which frozen maps do not save
    assert wide.full_bytes - narrow.full_bytes == 256 * (4 * inputs - 2 * once + 2 * 7 * 4)
    assert wide.static.optimizer == 2 * narrow.static.optimizer


def test_a_base_in_four_bits_takes_half_a_byte_a_weight_and_time_to_make_anew() -> None:
    full, coded = layer_of(), layer_of(base=BaseFormat.NF4)
    weights = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
    assert full.static.weights - coded.static.weights == pytest.approx((2 - 0.5 - 1 / 64) * weights, rel=0.02)
    assert coded.static.optimizer == full.static.optimizer
    made_s = (0.5 + 1 / 64 + 2) * weights / H100.elementwise_bytes_per_s  # read, and written in two bytes
    assert coded.forward_s - full.forward_s == pytest.approx(made_s)
    assert coded.backward_s - full.backward_s == pytest.approx(made_s)
    assert coded.forward_transient_bytes - full.forward_transient_bytes == 2 * 64 * 128


def test_sizes_of_memos_gpt_count_adapters_alike() -> None:
    config, layout = preset("llama3-8b"), StepLayout(tokens=1 << 15)
    wide = derive_profile(config, H100, layout, TrainingMethod(lora=16))
    narrow = derive_profile(config, H100, layout, TrainingMethod(lora=16, lora_dtype=AdapterDtype.BF16))
    coded = derive_profile(config, H100, layout, TrainingMethod(lora=16, base=BaseFormat.NF4))
    (one,), (other,), (third,) = wide.classes, narrow.classes, coded.classes
    inputs = 4096 + 4096 + 2 * 4096 + 14336  # the fused map, attention's, both of the MLP, and the last
    assert one.full_bytes - other.full_bytes == (1 << 15) * (4 * inputs - 2 * (2 * 4096 + 14336) + 5 * 16 * 2)
    assert one.forward_s > other.forward_s
    assert third.static.weights < 0.3 * one.static.weights
    assert third.backward_s > one.backward_s


def test_a_base_in_four_bits_is_of_adapters() -> None:
    with pytest.raises(UsageError, match="--base 4bit has no meaning without --lora"):
        derive_profile(preset("llama3-8b"), H100, StepLayout(tokens=1024), TrainingMethod(base=BaseFormat.NF4))


@pytest.mark.parametrize("dtype", list(AdapterDtype))
def test_the_optimizer_is_the_adapters(dtype: AdapterDtype) -> None:
    def state_bytes(optimizer: Optimizer) -> int:
        asked = TrainingMethod(lora=64, lora_dtype=dtype, optimizer=optimizer)
        return derive_profile(preset("llama3-8b"), H100, StepLayout(tokens=4096), asked).classes[0].static.optimizer

    adamw, small, none = (state_bytes(one) for one in (Optimizer.ADAMW, Optimizer.ADAMW_8BIT, Optimizer.SGD))
    assert none == 0 < small < adamw


def test_a_base_in_four_bits_is_planned_on_one_gpu() -> None:
    with pytest.raises(UsageError, match="--base 4bit is planned on one GPU"):
        derive_profile(
            preset("llama3-8b"), H100, StepLayout(tokens=1024, gpus=8), TrainingMethod(lora=4, base=BaseFormat.NF4)
        )


def test_fused_experts_are_no_linear_maps() -> None:
    fields = {**SMALL, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    planned = HuggingFaceModel(configuration_from(fields, name="moe"), name="moe", lora=4)
    full, coded = (
        planned.profile(H100, StepLayout(tokens=256), TrainingMethod(base=base)).classes[0].static.weights
        for base in BaseFormat
    )
    linear = 2 * 64 * 64 + 2 * 64 * 32
    assert full - coded == pytest.approx((2 - 0.5 - 1 / 64) * linear, rel=0.1)


def test_adapters_beside_are_whole_on_every_tensor_parallel_rank() -> None:
    def beside(tp: int) -> int:
        layout, config = StepLayout(tokens=8192 * tp, tp=tp, gpus=tp), preset("llama3-8b")
        with_lora, without = (
            derive_profile(config, H100, layout, TrainingMethod(lora=rank)).classes[0] for rank in (16, 0)
        )
        return with_lora.forward_transient_bytes - without.forward_transient_bytes

    assert beside(2) == beside(4)


def test_a_tiled_mlp_saves_nothing_for_its_adapters() -> None:
    def added(tiles: int) -> int:
        config = dataclasses.replace(preset("llama3-8b"), mlp_tiles=tiles)
        with_lora, without = (
            derive_profile(config, H100, StepLayout(tokens=8192), TrainingMethod(lora=rank)).classes[0]
            for rank in (16, 0)
        )
        return with_lora.full_bytes - without.full_bytes

    assert 0 < added(4) < added(1)
