"""The measured profile: bytes and FLOPs equal to arithmetic, times where they belong, the unmeasurable refused."""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path

import pytest
import torch
from activation_problems import plan_activations
from torch import nn

import memo
from memo.errors import UsageError
from memo.gpt import GPTConfig, Precision, preset
from memo.gpt.arithmetic import StepLayout, derive_profile
from memo.mip.activation import Budgets
from memo.mip.activation.proof import verify_by_simulation
from memo.mip.inputs import ALL, ATTENTION, Profile, Role, hardware_preset
from memo.profiling.layer_timer import time_step
from memo.record import Step, gpt_step
from memo.swap import comparing_nbytes

TOKENS, BATCH = 192, 2


def config() -> GPTConfig:
    return preset("tiny", hidden=128, heads=2, positions="rotary", layers=3)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    build = functools.partial(gpt_step, config(), batch=BATCH, tokens=TOKENS, precision=Precision.BF16)
    disk: Path = tmp_path_factory.mktemp("scratch")
    return memo.profile(build, name="tiny", batch=BATCH, tokens=TOKENS, repeats=2, disk=disk)


def test_bytes_and_flops_are_those_of_arithmetic(measured: Profile) -> None:
    (found,) = measured.classes
    (derived,) = derive_profile(config(), hardware_preset("a800"), StepLayout(tokens=TOKENS, batch=BATCH)).classes
    assert measured.role is Role.MEASURED
    assert measured.layers == ("Block",) * 3
    assert found.full_bytes == derived.full_bytes
    assert found.largest_storage_bytes == derived.largest_storage_bytes
    assert derived.storages <= found.storages <= derived.storages + 2, (
        "the rotary tables may be among the first layer's"
    )
    statistics = BATCH * TOKENS * 32  # bytes; a recompute makes them anew
    attention = derived.fixed_bytes + derived.at(ATTENTION).saved_bytes
    assert attention - statistics <= found.fixed_bytes + found.at(ATTENTION).saved_bytes <= attention
    assert found.forward_flops == derived.forward_flops
    assert found.attention_flops == derived.attention_flops
    assert found.at(ATTENTION).recompute_flops == pytest.approx(derived.at(ATTENTION).recompute_flops)


def test_what_is_repeated_takes_time_and_more_of_it_where_less_is_saved(measured: Profile) -> None:
    (found,) = measured.classes
    assert found.points[0].recompute_s == 0.0
    assert found.points[1].recompute_s > 0.0
    assert found.points[2].recompute_s > 0.0
    assert found.forward_s > 0.0
    assert found.backward_s > 0.0
    assert measured.optimizer_s > 0.0


def test_static_bytes_are_weight_gradient_and_two_moments(measured: Profile) -> None:
    static = sum(layer.static_bytes for layer in measured.classes for name in measured.layers if name == layer.name)
    weights = sum(parameter.numel() for parameter in gpt_step(config(), batch=1, tokens=8).model.parameters())
    assert static + measured.head.static_bytes == 4 * 2 * weights


def test_transients_are_less_than_what_a_layer_makes_in_all(measured: Profile) -> None:
    (found,) = measured.classes
    # The residual stream's gradient and those of the MLP's two wide tensors are alive together at some time.
    hidden = BATCH * TOKENS * config().hidden * 2
    assert 2 * 4 * hidden <= found.backward_transient_bytes <= 16 * hidden
    compared = comparing_nbytes(found.largest_storage_bytes)  # by the trial at the end of a layer's first forward
    assert compared < found.forward_transient_bytes <= compared + 16 * hidden


def test_a_plan_made_from_it_is_valid_and_simulated_as_predicted(measured: Profile) -> None:
    machine = hardware_preset("a800")
    static = sum(layer.static_bytes for layer in measured.layer_profiles()) + measured.head.static_bytes
    (layer,) = measured.classes
    buffers = 2 * layer.full_bytes + max(layer.transient_bytes, measured.head.transient_bytes)
    tight = static + measured.embedding.saved_bytes + buffers + layer.full_bytes // 2
    plan = plan_activations(measured, machine, Budgets(device_bytes=tight, host_bytes=1 << 30))
    assert plan.declined is None
    assert verify_by_simulation(plan).step_s == pytest.approx(plan.step_s)


class Slow(nn.Module):
    """One layer that sleeps in forward and one that sleeps in backward."""

    def __init__(self, *, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear, self.forward_s, self.backward_s = nn.Linear(8, 8), forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.forward_s)
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda _: time.sleep(self.backward_s))
        return torch.tanh(y)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sleeps = ((0.2, 0.0), (0.0, 0.3), (0.0, 0.0))
        self.layers = nn.ModuleList(Slow(forward_s=forward, backward_s=backward) for forward, backward in sleeps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        time.sleep(0.1)
        return x.sum()


def test_each_part_of_a_step_gets_its_own_time() -> None:
    model = Stack()
    given = torch.zeros(4, 8, requires_grad=True)
    begin = time.perf_counter()
    times = time_step(lambda: model(given), list(model.layers), torch.device("cpu"))
    whole = time.perf_counter() - begin
    longest_forward = max(range(3), key=lambda number: times.forward_s[number])
    longest_backward = max(range(3), key=lambda number: times.backward_s[number])
    assert (longest_forward, longest_backward) == (0, 1)
    assert times.forward_s[0] >= 0.2
    assert times.backward_s[1] >= 0.3
    assert times.head_forward_s >= 0.1
    parts = sum(times.forward_s) + sum(times.backward_s) + times.embedding_forward_s + times.embedding_backward_s
    assert 0.9 * whole < parts + times.head_forward_s + times.head_backward_s <= whole


class Mixing(nn.Module):
    """Mixes tokens by a plain product with the whole sequence: no part of its tokens can be recomputed alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        return x + y.cumsum(dim=1) / y.shape[1]


class Mixer(nn.Module):
    def __init__(self, *, runs: int = 1) -> None:
        super().__init__()
        self.first, self.runs = nn.Linear(64, 64), runs
        self.layers = nn.ModuleList(Mixing() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.runs):
            for layer in self.layers:
                x = layer(x)
        return x.sum()


def mixer_step(*, runs: int = 1) -> Step:
    model = Mixer(runs=runs)
    given = torch.zeros(1, 96, 64)
    return Step(model=model, loss=lambda: model(given), inputs=(given,))


def test_a_layer_whose_products_mix_its_tokens_can_recompute_too(tmp_path: Path) -> None:
    profile = memo.profile(mixer_step, name="mixer", batch=1, tokens=96, repeats=1, disk=tmp_path)
    (found,) = profile.classes
    assert [known.name for known in found.points] == [ALL, "attention"]
    assert found.points[1].saved_bytes < found.points[0].saved_bytes
    # Each layer saves its input and tanh's result, of 96 x 64 numbers each.
    assert found.full_bytes == 2 * 96 * 64 * 4


def test_layers_that_never_run_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="profile: "):
        memo.profile(lambda: mixer_step(runs=0), name="mixer", batch=1, tokens=96, repeats=1, disk=tmp_path)


def test_a_tiled_mlp_is_said_so_that_a_plan_made_of_it_can_be_carried_out_again(tmp_path: Path) -> None:
    tiled = dataclasses.replace(config(), mlp_tiles=4)
    build = functools.partial(gpt_step, tiled, batch=BATCH, tokens=TOKENS, precision=Precision.BF16)
    assert memo.profile(build, name="tiny", batch=BATCH, tokens=TOKENS, repeats=1, disk=tmp_path).mlp_tiles == 4
