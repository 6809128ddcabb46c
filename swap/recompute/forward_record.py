"""Record of one layer's forward: its arguments, settings and saved tensors, and the replay that is made of them.

It exists from the beginning of the forward until `token_split` or `whole_layer` has decided what moves.
"""

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
from memo.swap.recompute.replay import LayerCall
from memo.swap.tensor_kinds import local_part
from memo.swap.token_levels import Level

if TYPE_CHECKING:
    from memo.swap.engine.engine import Engine
    from memo.swap.engine.handles import Handle, Kept, Sharded
    from memo.swap.engine.layer_calls import Group
    from memo.swap.engine.saved_storage import Content, SavedStorage
    from memo.swap.layers import Layer
    from memo.swap.recompute.axis.argument_axes import TokenDims
    from memo.swap.recompute.level_costs import Costs
    from memo.swap.recompute.prover import TokenAxisProver
    from memo.swap.recompute.record.dispatch_mode import SleepingMode
    from memo.swap.recompute.replay import Span
    from memo.swap.recompute.trial_cache import Kind

__all__ = ["ForwardRecord"]


class ForwardRecord:
    """Record of one layer call; a context manager around its forward.

    Args:
        layer: whose forward begins.
        group: of the engine, for the tensors saved by this call.
        args: positional arguments of the forward.
        kwargs: its keyword arguments.
        given: the layer's input, as passed; `hidden` is its local part (..., tokens, features).
        kind: of this call, for the record of trials.
        dims: token dimensions of the arguments.
        prover: present where tokens may be divided.
        script: the operator log that is written.
        whole: the layer may run again whole, so all saved tensors and the RNG state are recorded.
        device: of the layer.
    """

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
        prover: TokenAxisProver | None,
        script: Script,
        whole: bool,
        device: torch.device,
    ) -> None:
        self.layer = layer
        self.group = group
        self.given = given
        self.hidden = hidden = local_part(given)
        """This rank's part of the input."""
        self.tokens = hidden.size(-2) if hidden.ndim > 1 else 1
        self.kind = kind
        self.dims = dims
        self.prover = prover
        self.script = script
        self.mode: SleepingMode = Scripted(script) if prover is None else prover
        self.saves: list[tuple[torch.Tensor, Content]] | None = [] if whole else None
        """All that autograd saved, in order."""
        self.random = RandomState(device) if whole else None
        self.state = ModuleState(layer.module)
        self._side_effects = SideEffects(layer.module)
        self._drawn = drawn_by_python()
        self.precision = Precision.now(hidden.device.type)
        self.arguments = Arguments(args, kwargs, given, dims)
        self.together = False
        """The layer runs collectives, which a recompute repeats."""
        self.nested = False
        """Another managed layer ran within it."""
        self._version = version_of(given)

    def __enter__(self) -> ForwardRecord:
        self.mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def drop_prover(self) -> None:
        """Releases results kept for a token-wise recompute; the layer runs again whole."""
        self.prover, self.mode = None, Scripted(self.script)

    def saved(self, tensor: torch.Tensor) -> None:
        """Records a tensor saved by autograd. The mode must be suspended (`Aside`)."""
        if self.prover is not None:
            self.prover.save(tensor)
        if self.saves is not None:
            self.saves.append((local_part(tensor).detach(), content_of(tensor)))

    def kept_whole(self, output: Any) -> set[torch.UntypedStorage]:
        """Storages shared with neighbouring layers, which are never recomputed: those of the input and the output."""
        storages = {local_part(tensor).untyped_storage() for tensor in tensors_in(tree_leaves(output))}
        return storages | {self.hidden.untyped_storage()}

    def saved_storage(self, engine: Engine, storage: torch.UntypedStorage) -> SavedStorage | None:
        """The engine's record of a storage; None if it is too small to move or belongs to another layer."""
        saved = engine.saved_as(storage)
        return saved if saved is not None and saved.group is self.group else None

    def input_nbytes(self, engine: Engine) -> int:
        """Bytes of the layer's input in the engine."""
        source = engine.saved_as(self.hidden.untyped_storage())
        return 0 if source is None else source.nbytes

    def saved_nbytes(self) -> int:
        """Bytes of all storages that this call saved."""
        return sum(saved.nbytes for saved in self.group.living())

    def replay(
        self, engine: Engine, costs: Costs, span: Span, hidden: Handle | Kept | Sharded, **divided: Any
    ) -> LayerCall:
        """The recompute of a span, from the packed input; `divided` are LayerCall's arguments for a part of the tokens."""
        return LayerCall(
            engine,
            self.layer.module,
            self.layer.name,
            hidden=hidden,
            hidden_grad=self.given.requires_grad,
            arguments=self.arguments,
            state=self.state,
            precision=self.precision,
            span=span,
            tokens=self.tokens,
            costs=costs,
            together=self.together,
            script=self.script,
            random=self.random if span.level is Level.SAVE_INPUT else None,
            **divided,
        )

    def check_unchanged(self) -> None:
        """Checks for side effects of the forward, which a recompute would repeat.

        Raises:
            Unproven: there are some; the layer must move whole.
        """
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
        side_effect = self._side_effects.changed()
        if side_effect is not None:
            raise Unproven(f"its forward changes {side_effect}")
        if drawn_by_python() != self._drawn:
            raise Unproven("it draws random numbers of Python's or NumPy's")
        self.arguments.check()
