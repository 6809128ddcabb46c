"""PEFT's LoRA on whole, int8 and 4-bit bases, with and without memo; what such models save, and what a planner knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from integrations import STEPS, VOCAB, Run, assert_divided, compare, llama, run_of
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import memo

peft = pytest.importorskip("peft", reason="peft is not installed")

LAYERS = 3
ROWS, SEQ = 2, 64
HALF = ("q_proj", "v_proj")
ALL = "all-linear"
LEAST = 4096
"""Bytes: more than the tables of rotary embeddings, which all layers share."""


class Int8Linear(nn.Linear):
    """A frozen linear layer that keeps its weight as int8 and a scale per row, and widens it in each forward."""

    @classmethod
    def of(cls, whole: nn.Linear) -> Int8Linear:
        made = cls(whole.in_features, whole.out_features, bias=False)
        scale = whole.weight.detach().abs().amax(1, keepdim=True) / 127
        made.weight = nn.Parameter((whole.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        made.register_buffer("scale", scale)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def quantized(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                setattr(module, name, Int8Linear.of(child))
    return model


def four_bit(model: nn.Module) -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                made = bitsandbytes.nn.Linear4bit(
                    child.in_features, child.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
                )
                made.weight = bitsandbytes.nn.Params4bit(child.weight.detach(), requires_grad=False, quant_type="nf4")
                setattr(module, name, made.to("cpu"))
    return model


BASES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "whole": lambda model: model,
    "int8": quantized,
    "4-bit": four_bit,
}


def adapted(base: str = "whole", targets: Any = ALL, **shape: Any) -> Any:
    model = BASES[base](llama(LAYERS, **shape))
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=targets, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).train()


def ids_of(step: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(step))


def training(make: Callable[[], Any], steps: int = STEPS) -> Callable[[Any], Run]:
    """Trains what `make` makes; the managers are attached."""

    def train(offload: Callable[[nn.Module], memo.Manager] | None) -> Run:
        model = make()
        manager = None if offload is None else offload(model).attach()
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        losses = []
        for step in range(steps):
            torch.manual_seed(step)  # dropout
            loss = model(input_ids=ids_of(step), labels=ids_of(step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if manager is not None:
            manager.detach()
        return run_of(model, losses)

    return train


@pytest.mark.covering(2)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("targets", [ALL, HALF], ids=["all", "q and v"])
@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_adapters_train_as_without_memo(base: str, targets: Any, alpha: float) -> None:
    manager = compare(training(lambda: adapted(base, targets)), alpha)
    assert_divided(manager, LAYERS)
    manager.close()


def test_a_disabled_adapter_in_between_changes_nothing() -> None:
    """As DPO computes the reference: the same model without its adapters, without gradients."""

    def train(offload: Any) -> Run:
        model = adapted()
        manager = None if offload is None else offload(model).attach()
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
        losses = []
        for step in range(STEPS):
            torch.manual_seed(step)
            with torch.no_grad(), model.disable_adapter():
                reference = model(input_ids=ids_of(step)).logits
            loss = (model(input_ids=ids_of(step)).logits - reference).square().mean() - 1e-3 * reference.mean()
            loss = loss + model(input_ids=ids_of(step), labels=ids_of(step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if manager is not None:
            manager.detach()
        return run_of(model, losses)

    manager = compare(train, 0.25)
    assert_divided(manager, LAYERS, forwards=2 * STEPS)
    manager.close()


def saved_in_layers(model: Any) -> int:
    """Bytes that autograd saves in all layers but the last, storages once, without parameters, buffers and small ones."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    seen: dict[int, torch.UntypedStorage] = {}
    inside = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in known and storage.nbytes() >= LEAST:
            seen[storage.data_ptr()] = storage  # held, so that no address comes twice
        return tensor

    def count(change: int) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            nonlocal inside
            inside += change

        return hook

    layers = [module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer"][:-1]
    hooks = [layer.register_forward_pre_hook(count(1)) for layer in layers]
    hooks += [layer.register_forward_hook(count(-1)) for layer in layers]
    torch.manual_seed(0)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids_of(0), labels=ids_of(0)).loss
    for hook in hooks:
        hook.remove()
    del loss
    return sum(storage.nbytes() for storage in seen.values())


def reported(model: Any) -> int:
    """Bytes that the report of one step says were moved; what the last layer saves is needed at once."""
    manager = memo.offload(model, alpha=1.0, min_bytes=LEAST)
    torch.manual_seed(0)
    with manager:
        loss = model(input_ids=ids_of(0), labels=ids_of(0)).loss
    loss.backward()
    model.zero_grad()
    report = manager.report()
    manager.close()
    return sum(tier.moved_bytes for tier in report.tiers[1:])


def test_the_report_shows_what_autograd_saves_of_a_frozen_base() -> None:
    whole, frozen = llama(LAYERS), adapted(targets=HALF)
    assert reported(whole) == saved_in_layers(whole)
    assert reported(frozen) == saved_in_layers(frozen)
    bare = adapted(targets=HALF).merge_and_unload()
    for parameter in bare.parameters():
        parameter.requires_grad_(False)
    bare.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    assert saved_in_layers(bare) < 0.8 * saved_in_layers(whole), "frozen weights need no inputs for their own gradient"
    assert reported(bare) == saved_in_layers(bare)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # torch's, of the frozen layer's inputs
def test_a_profile_has_the_optimizer_state_of_trained_parameters_only() -> None:
    from memo.record import Step

    def build() -> Step:
        model = adapted(targets=HALF)
        return Step(model=model, loss=lambda: model(input_ids=ids_of(0), labels=ids_of(0)).loss)

    profile = memo.profile(build, name="lora", batch=ROWS, tokens=SEQ, repeats=1)
    model = adapted(targets=HALF)
    layers = [module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer"]
    weights = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    trained = [sum(p.nbytes for p in layer.parameters() if p.requires_grad) for layer in layers]
    by_class = {kind.name: kind for kind in profile.classes}
    static = [by_class[name].static_bytes for name in profile.layers]
    assert static == [whole + 3 * own for whole, own in zip(weights, trained, strict=True)]  # gradient, two moments


def test_a_plan_leaves_room_for_the_gradients_of_trained_parameters_only() -> None:
    from memo.autoplan import missing_gradient_bytes

    model = adapted(targets=HALF)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert missing_gradient_bytes(model.parameters(), torch.device("cpu")) == trained


def test_planning_leaves_warm_up() -> None:
    manager = compare(training(adapted, steps=6), None, steps=6)
    assert manager.plan is not None
    manager.close()
