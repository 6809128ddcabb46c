"""States of optimizers as torch's own keep them; what is trained with adapters, beside a recorded model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from memo.errors import UsageError
from memo.gpt import Precision, preset
from memo.gpt.arithmetic import (
    ADAM_FP32,
    ADAM_PURE,
    Optimizer,
    StepLayout,
    TrainingMethod,
    derive_profile,
    layer_states,
    orthogonalisation_flops,
    parameter_count,
)
from memo.gpt.arithmetic.flops import adapter_parameter_count, layer_matrices, layer_parameter_count
from memo.gpt.model import GPT
from memo.hugging_face import HuggingFaceModel, configuration_from
from memo.mip.inputs import LayerProfile, Profile, hardware_preset

H100 = hardware_preset("h100")
MADE = {
    Optimizer.ADAMW: torch.optim.AdamW,
    Optimizer.SGD: torch.optim.SGD,
    Optimizer.ADAFACTOR: torch.optim.Adafactor,
    Optimizer.MUON: torch.optim.Muon,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", MADE)
def test_a_layers_states_are_as_many_bytes_as_torch_keeps(optimizer: Optimizer, dtype: torch.dtype) -> None:
    config = preset("tiny", variant="llama", hidden=512, heads=8, ffn=1024, layers=1)
    layer = GPT(config, device=torch.device("cpu"), dtype=dtype).layers[0]
    matrices = [parameter for parameter in layer.parameters() if parameter.dim() == 2]
    for parameter in matrices:
        parameter.grad = torch.ones_like(parameter)
    made = MADE[optimizer](matrices, lr=1e-3)
    made.step()
    state = [value for one in made.state.values() for value in one.values() if torch.is_tensor(value) and value.dim()]
    held = sum(value.numel() * value.element_size() for value in state)
    adam = ADAM_FP32 if dtype is torch.float32 else ADAM_PURE
    smallest = min(min(shape) for shape in layer_matrices(config))
    counted = layer_states(optimizer, adam, smallest=smallest).optimizer * sum(p.numel() for p in matrices)
    if (
        optimizer is Optimizer.ADAFACTOR
    ):  # torch keeps means in the gradient's format; counted are float32's, and no fewer
        assert held * (4 // dtype.itemsize) <= counted <= 2 * held * (4 // dtype.itemsize)
    else:
        assert counted == held


def test_eight_bits_are_two_bytes_and_a_scale_for_each_block() -> None:
    assert layer_states(Optimizer.ADAMW_8BIT, ADAM_FP32, smallest=512).optimizer == 2 * (1 + 4 / 256)


def test_muons_products_are_counted_as_torch_runs_them() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    weight = torch.nn.Parameter(torch.ones(64, 192))
    weight.grad = torch.ones_like(weight)
    with FlopCounterMode(display=False) as counter:
        torch.optim.Muon([weight], lr=1e-3).step()
    assert orthogonalisation_flops([(192, 64)]) == counter.get_total_flops()


def profile(*, lora: int = 0, optimizer: Optimizer = Optimizer.ADAMW, layout: StepLayout | None = None) -> Profile:
    return derive_profile(
        preset("llama3-8b"),
        H100,
        layout or StepLayout(tokens=4096, gpus=8),
        TrainingMethod(lora=lora, optimizer=optimizer),
    )


def test_adapters_alone_have_gradients_and_states() -> None:
    config, whole, adapted = preset("llama3-8b"), profile(), profile(lora=16)
    adapters = adapter_parameter_count(config, 16)
    assert adapters == 16 * sum(rows + columns for columns, rows in layer_matrices(config))
    (layer,), (before,) = adapted.classes, whole.classes
    assert layer.static.gradients == pytest.approx(4 * adapters / 8, abs=1)  # PEFT makes adapters float32
    assert layer.static.optimizer == pytest.approx(8 * adapters / 8, abs=1)
    assert layer.static.weights == pytest.approx((2 * layer_parameter_count(config) + 4 * adapters) / 8, abs=1)
    for end in (adapted.embedding, adapted.head):
        assert (end.static.gradients, end.static.optimizer, end.sync_s) == (0, 0, 0)
    assert layer.full_bytes > before.full_bytes  # what is between two products of an adapter is saved, too
    assert layer.backward_s < before.backward_s
    assert adapted.optimizer_s < 0.02 * whole.optimizer_s
    assert adapted.model_flops_causal_per_token < 0.75 * whole.model_flops_causal_per_token


def recorded(lora: int) -> Profile:
    config = preset("llama3-8b")
    fields = {
        "model_type": "llama",
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": 4,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
    }
    model = HuggingFaceModel(configuration_from(fields, name="it"), name="it", lora=lora)
    return model.profile(H100, StepLayout(tokens=4096, gpus=8))


@pytest.mark.parametrize("lora", [0, 16])
def test_arithmetic_and_a_recorded_model_of_the_same_shape_agree(lora: int) -> None:
    (by_arithmetic,), (by_record,) = profile(lora=lora).classes, recorded(lora).classes
    assert by_record.backward_flops == pytest.approx(by_arithmetic.backward_flops, rel=0.01)
    assert by_record.forward_flops == pytest.approx(by_arithmetic.forward_flops, rel=0.01)
    # The fused matrices of memo's GPT share an adapter's first half; transformers has three and two there.
    share = 0.25 if lora else 0.001

    def states(layer: LayerProfile) -> tuple[int, int]:
        return layer.static.gradients, layer.static.optimizer

    assert states(by_record) == pytest.approx(states(by_arithmetic), rel=share)
    assert by_record.static.weights == pytest.approx(by_arithmetic.static.weights, rel=0.01)


def test_a_rank_below_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="rank of adapters"):
        derive_profile(preset("7b"), H100, StepLayout(tokens=4096), TrainingMethod(lora=-1), precision=Precision.BF16)


def test_an_optimizer_is_cheaper_where_it_keeps_less() -> None:
    held = [profile(optimizer=one).classes[0].static.optimizer for one in Optimizer]
    adamw, eight, adafactor, sgd, muon = held
    assert adamw > muon > eight / 2 > adafactor > sgd == 0
    assert profile(optimizer=Optimizer.MUON).optimizer_s > profile().optimizer_s
    (layer,) = profile(optimizer=Optimizer.MUON).classes
    ends = profile(optimizer=Optimizer.MUON)
    assert layer.static.optimizer == pytest.approx(layer.static.weights, abs=1)
    assert ends.head.static.optimizer == pytest.approx(2 * ends.head.static.weights, abs=1)


def test_an_optimizer_on_the_host_needs_a_link_to_it() -> None:
    links = dict.fromkeys(("d2h_bytes_per_s", "h2d_bytes_per_s", "duplex_bytes_per_s"), 0.0)
    machine = dataclasses.replace(H100, node_d2h_bytes_per_s=0.0, node_h2d_bytes_per_s=0.0, **links)
    with pytest.raises(UsageError, match="h100 has no link to host memory"):
        derive_profile(preset("350m"), machine, StepLayout(tokens=1024), TrainingMethod(optimizer_offload=True))


def test_an_update_on_the_host_of_one_gpu_hides_the_copies_beside_it() -> None:
    config = preset("llama3-8b")
    parameters = parameter_count(config)

    def update_s(tokens: int, accumulate: int = 1) -> float:
        layout = StepLayout(tokens=tokens)
        given = {"precision": Precision.BF16, "accumulate": accumulate}
        return derive_profile(config, H100, layout, TrainingMethod(optimizer_offload=True), **given).optimizer_s

    host_s = 14 * parameters / H100.node_d2h_bytes_per_s
    out_s, back_s = (2 * parameters / rate for rate in (H100.d2h_bytes_per_s, H100.h2d_bytes_per_s))
    last_s = (1 << 30) / H100.d2h_bytes_per_s + (256 << 20) / H100.h2d_bytes_per_s
    assert update_s(32 << 10) == pytest.approx(host_s + last_s)
    assert update_s(32 << 10, accumulate=3) == pytest.approx(host_s + last_s)
    assert update_s(256) > host_s + 0.8 * out_s  # backward is too short for the copies
    assert update_s(256, accumulate=3) > update_s(256) + 2 * 0.8 * back_s
