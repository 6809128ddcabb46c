"""One layer call while its forward runs: what it was given, what it ran under, and what it saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from memo.swap.engine.saved_storage import content_of, version_of
from memo.swap.recompute.axis.operator_rules import Unproven, tensors_in
from memo.swap.recompute.guards.module_state import ModuleState
from memo.swap.recompute.guards.python_rng import drawn_by_python
from memo.swap.recompute.guards.rng_and_autocast import Precision, RandomState
from memo.swap.recompute.guards.side_effects import SideEffects
from memo.swap.recompute.record.layer_arguments import Arguments
from memo.swap.recompute.record.operator_log import Script, Scripted
from memo.swap.tensor_kinds import local_part

if TYPE_CHECKING:
    from memo.swap.engine.saved_storage import Content, Group
    from memo.swap.layers import Layer
    from memo.swap.recompute.axis.argument_axes import TokenDims
    from memo.swap.recompute.prover import TokenAxisProver
    from memo.swap.recompute.record.dispatch_mode import SleepingMode
    from memo.swap.recompute.trial_cache import Kind

__all__ = ["ForwardRecord"]


class ForwardRecord:
    """Made before a layer's forward, whose input is `given`. `noting` is there where tokens may be divided, `saves` where
    the layer may run again whole; at least one of them is."""

    def __init__(
        self,
        layer: Layer,
        group: Group,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        given: torch.Tensor,
        kind: Kind,
        dims: TokenDims,
        noting: TokenAxisProver | None,
        script: Script,
        whole: bool,
        device: torch.device,
    ) -> None:
        self.layer = layer
        self.group = group
        self.given = given
        self.hidden = hidden = local_part(given)
        """What this rank has of the input."""
        self.tokens = hidden.size(-2) if hidden.ndim > 1 else 1
        self.kind = kind
        self.dims = dims
        self.noting = noting
        self.script = script
        self.mode: SleepingMode = Scripted(script) if noting is None else noting
        self.saves: list[tuple[torch.Tensor, Content]] | None = [] if whole else None
        """All that autograd saved, in order."""
        self.random = RandomState(device) if whole else None
        self.state = ModuleState(layer.module)
        self._belongings = SideEffects(layer.module)
        self._drawn = drawn_by_python()
        self.precision = Precision.now(hidden.device.type)
        self.arguments = Arguments(args, kwargs, given, dims)
        self.together = False
        """It talks to other ranks, and a recompute does so again."""
        self.nested = False
        """Another managed layer ran within it."""
        self._version = version_of(given)

    def __enter__(self) -> ForwardRecord:
        self.mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def drop_noting(self) -> None:
        """What a division kept for its own recompute is not needed."""
        self.noting, self.mode = None, Scripted(self.script)

    def saved(self, tensor: torch.Tensor) -> None:
        """Autograd saves `tensor`. The mode must be aside."""
        if self.noting is not None:
            self.noting.save(tensor)
        if self.saves is not None:
            self.saves.append((local_part(tensor).detach(), content_of(tensor)))

    def kept_whole(self, output: Any) -> set[torch.UntypedStorage]:
        """Storages that are the next layer's as much as this one's: its input and its output."""
        storages = {local_part(tensor).untyped_storage() for tensor in tensors_in(tree_leaves(output))}
        return storages | {self.hidden.untyped_storage()}

    def check_unchanged(self) -> None:
        """Raises Unproven where the forward changed what a second one would start from."""
        if self.nested:
            raise Unproven("it contains another managed layer")
        if version_of(self.given) != self._version:
            raise Unproven("it changes its input in place")
        changed = self.state.changed_tensor()
        if changed is not None:
            raise Unproven(f"it changes a parameter or buffer of shape {tuple(changed.shape)} in place")
        attribute = self.state.changed_attribute()
        if attribute is not None:
            raise Unproven(f"its forward changes {attribute}")
        belonging = self._belongings.changed()
        if belonging is not None:
            raise Unproven(f"its forward changes {belonging}")
        if drawn_by_python() != self._drawn:
            raise Unproven("it draws random numbers of Python's or NumPy's")
        self.arguments.check()
