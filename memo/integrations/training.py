"""What adapters do to a model while it trains, and undo when training ends."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import memo
from memo.errors import UsageError
from memo.swap import setting_of
from memo.units import parse_bytes

if TYPE_CHECKING:
    from torch import nn


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options themselves.

    Raises:
        UsageError: one is no argument of `memo.offload`, or is no value of it.
    """
    known = inspect.signature(memo.offload).parameters.keys() - {"model"}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise UsageError(f"memo.offload has no argument {unknown[0]}; it has {', '.join(sorted(known))}")
    if options.get("alpha") is not None:
        setting_of(options["alpha"])
    for name in ("device", "host", "disk_budget"):
        if options.get(name) not in (None, "auto"):
            parse_bytes(options[name], what=name)
    return dict(options)


class ManagedTraining:
    """A manager of a model, and losses without logits if wanted, until `close`.

    Args:
        model: the model, or what has it within.
        loss_without_logits: as `memo.loss_without_logits`, of the outermost module with an output projection.
        attach: whether the manager is attached.
        **options: arguments of `memo.offload`.
    """

    def __init__(
        self, model: nn.Module, *, loss_without_logits: bool = False, attach: bool = True, **options: Any
    ) -> None:
        with contextlib.ExitStack() as undo:
            if loss_without_logits:
                undo.enter_context(memo.loss_without_logits(_with_projection(model)))
            self.manager = memo.offload(model, **options)
            undo.callback(self.manager.close)
            if attach:
                self.manager.attach()
                undo.callback(self.manager.detach)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Detaches and closes the manager, and reverts the model. Idempotent."""
        self._undo.close()


def _with_projection(model: nn.Module) -> nn.Module:
    for module in model.modules():
        find = getattr(module, "get_output_embeddings", None)
        if find is not None and find() is not None:
            return module
    raise UsageError(
        f"loss_without_logits: nothing in {type(model).__name__} has an output projection of transformers'"
    )
