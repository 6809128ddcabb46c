"""torchtitan's Llama with memo in place of its activation checkpointing: configured, sharded and trained as it does.

Stand-ins on a CPU: the device type is "cpu" where torchtitan would take CUDA, gloo is the one rank's backend, and attention
is `ScaledDotProductAttention`, as FlexAttention and varlen attention have no backward there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from integrations import MIN_BYTES, STEPS, Run, assert_checkpointed_by_memo, assert_divided, assert_same
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import memo

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

from torchtitan.config.override import apply_overrides
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.llama3.parallelize import parallelize_llama

from memo.integrations.torchtitan import Offload, manager_of

OVERRIDE = "memo.integrations.torchtitan.offload"
LAYERS, SEQ, VOCAB = 3, 64, 2048


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_dims, "device_type", "cpu")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def configured(options: dict[str, Any] | None) -> Any:
    """The trainer's configuration of its debug model, smaller; None: without activation checkpointing."""
    config = llama3_debugmodel()
    shape = config.model_spec.model
    del shape.layers[LAYERS:]
    for layer in shape.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if options is None:
        config.activation_checkpoint = None
    else:
        config.override.imports.append((OVERRIDE, options))
    apply_overrides(config.override, config)
    return config


class Checkpointed(ActivationCheckpointing):  # type: ignore[misc]
    """The policy of docs/integrations/torchtitan.md."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):  # type: ignore[misc]
        pass

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        wrapped: nn.Module = checkpoint_wrapper(module, checkpoint_fn=memo.checkpoint)
        return wrapped


def built(config: Any, backend: str) -> Any:
    config.parallelism.spmd_backend = backend
    dims = ParallelDims.from_config(config.parallelism, 1)
    with torch.device("meta"):
        shape = config.model_spec.model
        shape.update_from_config(config=config)
        model = shape.build()
    model = parallelize_llama(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model.train()


def trained(model: Any) -> Run:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    positions, losses = torch.arange(SEQ).expand(2, SEQ).contiguous(), []
    for step in range(STEPS):
        ids = torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(step))
        logits = model(ids, positions=positions)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    after = {name: parameter.detach().to_local().clone() for name, parameter in model.named_parameters()}
    return Run(losses, after)


@pytest.mark.parametrize("backend", ["partial_dtensor", "spmd_types"])
@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_the_override_changes_no_loss_and_divides_every_layer(alpha: float, backend: str) -> None:
    """Layers assert on their positions, which does not keep them whole."""
    want = trained(built(configured(None), backend))
    config = configured({"alpha": alpha, "min_bytes": MIN_BYTES})
    assert isinstance(config.activation_checkpoint, Offload.Config)
    model = built(config, backend)
    got = trained(model)
    assert_same(got, want)
    manager = manager_of(model)
    assert_divided(manager, LAYERS)
    if alpha == 0:
        shown = manager.explain(0)
        assert shown.used.kept_fraction <= 0.12, shown
    manager.close()


@pytest.mark.parametrize("backend", ["partial_dtensor", "spmd_types"])
def test_a_policy_may_wrap_blocks_with_memos_checkpoint(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memo.checkpointing.function.MIN_BYTES", MIN_BYTES)
    want = trained(built(configured(None), backend))
    config = configured(None)
    config.activation_checkpoint = Checkpointed.Config()
    got = trained(built(config, backend))
    plain = {name.replace("_checkpoint_wrapped_module.", ""): each for name, each in got.parameters.items()}
    assert_same(Run(got.losses, plain), want)
    assert_checkpointed_by_memo(LAYERS)


def test_the_override_keeps_what_the_configuration_says_of_all_policies() -> None:
    config = llama3_debugmodel()
    config.activation_checkpoint.debug = True
    config.override.imports.append((OVERRIDE, {"host": "1GiB"}))
    apply_overrides(config.override, config)
    assert config.activation_checkpoint.debug
    assert config.activation_checkpoint.options == {"host": "1GiB"}


def test_layers_that_torchtitan_compiles_have_no_break_and_the_same_losses() -> None:
    """Each is one graph, which moves whole."""

    def compiled(options: dict[str, Any] | None) -> Any:
        torch._dynamo.reset()
        counters.clear()
        config = configured(options)
        config.compile.enable, config.compile.components, config.compile.backend = True, ["model"], "aot_eager"
        return built(config, "partial_dtensor")

    want = trained(compiled(None))
    graphs = counters["stats"]["unique_graphs"]
    model = compiled({"alpha": 0.25, "min_bytes": MIN_BYTES})
    got = trained(model)
    assert counters["graph_break"] == {}
    assert counters["stats"]["unique_graphs"] == graphs
    assert_same(got, want)
    manager = manager_of(model)
    assert sum(use.moved_bytes for use in manager.report().tiers[1:]) > 0
    manager.close()
