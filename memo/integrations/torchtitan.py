"""torchtitan: memo in place of its activation checkpointing, chosen in a configuration or on the command line.

    --override.imports 'memo.integrations.torchtitan.offload={"alpha": 0.25}'

Owns the policy that torchtitan applies to each part of the model before it shards it; the manager is made then, on the meta
device, and opens its tiers at the first training forward. The layers are the model's `layers`, wherever they are sharded.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from torchtitan.config import override
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

import memo

if TYPE_CHECKING:
    from torch import nn

_managers: weakref.WeakKeyDictionary[nn.Module, memo.Manager] = weakref.WeakKeyDictionary()


class Offload(ActivationCheckpointing):  # type: ignore[misc]
    """Activation-checkpointing policy that attaches a manager and wraps no block."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):  # type: ignore[misc]
        """Configuration: `activation_checkpoint=Offload.Config(options={"alpha": 0.25})`."""

        options: dict[str, Any] = field(default_factory=dict)
        """Arguments of `memo.offload`."""

    def apply(self, model: nn.Module) -> None:
        """Attaches a manager of the model's layers, which `manager_of` returns."""
        layers = list(model.get_submodule("layers").children())
        _managers[model] = memo.offload(model, layers=layers, **self.config.options).attach()


def manager_of(model: nn.Module) -> memo.Manager:
    """The manager that the policy attached to a model, or to a stage's part of one.

    Raises:
        KeyError: The policy was not applied to it.
    """
    return _managers[model]


@override(target=ActivationCheckpointing.Config, description="memo.offload in place of activation checkpointing")  # type: ignore[untyped-decorator]
def offload(config: ActivationCheckpointing.Config, **options: Any) -> Offload.Config:
    """Override of whatever activation checkpointing a configuration has; `options` are those of `memo.offload`."""
    inherited = {item.name: getattr(config, item.name) for item in fields(ActivationCheckpointing.Config)}
    return Offload.Config(**inherited, options=options)
