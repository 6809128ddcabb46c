"""Token-wise swap and recompute of unmodified layers: what MEMO does in its own layer, for any layer that allows it.

Of what a layer saves, its input and the results of attention move whole; of everything else, which each token's own
numbers determine, the first tokens move (levels), and backward computes the rest again by running the layer's forward,
which never repeats attention. Two checks stand before a layer is treated so, and both must pass:

    proof     the token axis, carried through every operator of the call, reaches each saved tensor (noting, division)
    trial     at the first call of a kind the recompute runs at once, and what it gives is compared with what was saved

A layer that fails moves whole tensors, which is always right, or runs again whole where that is wanted and passes the
trial; it says so once, with the reason, and the report lists it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from memo.swap.arguments import check_arguments, describe, token_input
from memo.swap.aside import Aside
from memo.swap.division import Division, divide
from memo.swap.levelcosts import Costs
from memo.swap.levels import LayerCosts, Level, Setting, TokenLevels
from memo.swap.noting import Noting
from memo.swap.surroundings import Precision
from memo.swap.tokenrules import Unproven, tensors_in
from memo.swap.trial import try_out
from memo.swap.watch import Watch
from memo.swap.wholelayer import repeat_whole

if TYPE_CHECKING:
    from memo.swap.engine import Engine
    from memo.swap.layers import Layer
    from memo.swap.partial import Partial
    from memo.swap.saved import Group, Handle, Kept, SavedStorage, Sharded

__all__ = ["TokenWise"]

_Parts = dict["SavedStorage", "Partial"]


class TokenWise:
    """The layers of one manager.

    `default` is for layers that `choose` has not named. `fallback` says what becomes of a layer whose tokens cannot be
    divided: ALL moves whole tensors, NOTHING runs it again whole. With `repeats_when_full` a layer that no tier has room
    for runs again whole too.
    """

    def __init__(
        self,
        engine: Engine,
        default: Setting,
        *,
        fallback: Level = Level.ALL,
        repeats_when_full: bool = False,
    ) -> None:
        self.default = default
        self.refused: dict[str, str] = {}
        """Layers that move whole tensors, and why."""
        self.repeated: dict[str, str] = {}
        """Layers that run again whole, attention included, and why."""
        self.deviation: dict[str, float] = {}
        """Divided layers, and the largest difference their trial found (0: equal bit for bit), in units of its bound."""
        self._engine = engine
        self._chosen: dict[str, Setting] = {}
        self._fallback = fallback
        self._repeats_when_full = repeats_when_full
        self._open: Watch | None = None
        self._position: dict[str, int] = {}
        self._unsuited: set[str] = set()
        self._verdicts: dict[tuple[Any, ...], str] = {}  # kinds of calls that must not be treated so, and why
        self._trials: dict[tuple[Any, ...], float] = {}  # kinds of calls that were tried out, and what was found
        self._warned: set[str] = set()
        self._costs: dict[str, Costs] = {}
        engine_pack = engine.pack

        def pack(tensor: torch.Tensor) -> Handle | Kept | Sharded:
            watch = self._open
            if watch is None:
                return engine_pack(tensor)
            noting = watch.noting
            if noting is None:
                watch.saved(tensor)
                return engine_pack(tensor)
            with Aside(noting):
                watch.saved(tensor)
                return engine_pack(tensor)

        self.pack = pack

    @property
    def is_idle(self) -> bool:
        """True where all tensors move whole anyway."""
        settings = (self.default, *self._chosen.values())
        return not self._repeats_when_full and all(_moves_all(setting) for setting in settings)

    @property
    def described(self) -> str:
        """For people: how tokens are divided."""
        default = "whole layers" if isinstance(self.default, Level) else str(self.default)
        return f"{default}, {len(self._chosen)} layers with their own" if self._chosen else default

    def choose(self, settings: Mapping[str, Setting]) -> None:
        """From the next forward on these layers have these settings, and the others the default."""
        self._chosen = dict(settings)
        self.refused.clear()
        self.repeated.clear()
        self.deviation.clear()

    def costs(self) -> list[LayerCosts]:
        """What each level costs, of every layer whose saved tensors have been looked at."""
        return [told for costs in self._costs.values() if (told := costs.snapshot()) is not None]

    def look_at(self, layers: Sequence[Layer]) -> None:
        """Before a forward: what modules are made of decides already. Inside a compiled layer it could not be said."""
        if self.is_idle:
            return
        self._position = {layer.name: position for position, layer in enumerate(layers)}
        self._unsuited.clear()
        for layer in layers:
            reason = _unsuited(layer.module)
            if reason is not None:
                self._unsuited.add(layer.name)
                if not _moves_all(self._setting(layer)):
                    self._refuse(layer.name, reason)

    def begin(self, layer: Layer, group: Group, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A layer's forward begins; `end` must follow."""
        if torch.compiler.is_compiling() or layer.name in self._unsuited:
            return
        if self._open is not None:
            self._open.nested = True
            return
        if torch.is_grad_enabled():
            self._open = self._watch(layer, group, args, kwargs)
            if self._open is not None:
                group.held = True
                self._open.__enter__()

    def _watch(self, layer: Layer, group: Group, args: Sequence[Any], kwargs: dict[str, Any]) -> Watch | None:
        """None where the layer's tensors move whole without more ado."""
        setting = self._setting(layer)
        divides = isinstance(setting, TokenLevels) and not setting.repeats_nothing
        repeats = self._repeats_when_full or setting is Level.NOTHING or (divides and self._fallback is Level.NOTHING)
        if not divides and not repeats:
            return None
        kind = _kind(layer, args, kwargs)
        divides = divides and kind not in self._verdicts
        repeats = repeats and (Level.NOTHING, *kind) not in self._verdicts
        if not divides and not repeats:
            return None
        try:
            hidden = check_arguments(args, kwargs)
        except Unproven as unproven:
            self._verdicts[kind] = self._verdicts[Level.NOTHING, *kind] = str(unproven)
            self._refuse(layer.name, str(unproven))
            return None
        noting = self._noting(layer, kind, setting, args, kwargs) if divides else None
        if noting is None and not repeats:
            return None
        return Watch(
            layer,
            group,
            args,
            kwargs,
            hidden=hidden,
            kind=kind,
            noting=noting,
            whole=repeats,
            device=self._engine.backend.device,
        )

    def _noting(
        self, layer: Layer, kind: tuple[Any, ...], setting: Setting, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Noting | None:
        assert isinstance(setting, TokenLevels)
        try:
            hidden = token_input(args, kwargs)
        except Unproven as unproven:
            self._verdicts[kind] = str(unproven)
            self._refuse(layer.name, str(unproven))
            return None
        tokens = hidden.size(-2)
        ends = setting.ends(tokens)
        return Noting(hidden, args, kwargs, ends=ends) if ends[0] < tokens else None

    def end(self, group: Group, output: Any) -> None:
        """The layer's forward has ended; what it saved may move now."""
        watch = self._open
        if watch is None or watch.group is not group:
            return
        self._open = None
        watch.__exit__()
        parts: _Parts = {}
        can_repeat = False
        try:
            if output is not None:  # None after an exception: nothing is to come back
                parts = self._decide(watch, output)
                can_repeat = self._repeats_when_full and watch.saves is not None
        finally:
            if can_repeat and not self._engine.has_room(group, parts, besides=self._inputs_after(watch)):
                parts = self._repeat(watch, output, "no tier has room for it") or parts
            self._engine.settle(group, parts)

    def _inputs_after(self, watch: Watch) -> list[int]:
        """Bytes that layers after this one need at the least: their inputs are as large as its own."""
        after = len(self._position) - 1 - self._position[watch.layer.name]
        return [watch.hidden.untyped_storage().nbytes()] * after

    def _decide(self, watch: Watch, output: Any) -> _Parts:
        name = watch.layer.name
        if watch.noting is not None:
            try:
                return self._tried(watch.kind, divide(watch, output, self._engine, self._cost(name)), name)
            except Unproven as unproven:
                self._verdicts[watch.kind] = str(unproven)
        setting = self._setting(watch.layer)
        why = "as chosen" if setting is Level.NOTHING else self._verdicts.get(watch.kind)
        if why is None or _moves_all(setting):
            return {}
        if watch.saves is not None and (setting is Level.NOTHING or self._fallback is Level.NOTHING):
            parts = self._repeat(watch, output, why)
            if parts is not None:
                return parts
        else:
            self._refuse(name, why)
        return {}

    def _repeat(self, watch: Watch, output: Any, why: str) -> _Parts | None:
        """Lets the layer run again whole; None where it must not."""
        name, kind = watch.layer.name, (Level.NOTHING, *watch.kind)
        try:
            parts = self._tried(kind, repeat_whole(watch, output, self._engine, self._cost(name)), name)
        except Unproven as unproven:
            self._verdicts[kind] = str(unproven)
            self._refuse(name, str(unproven) if why in ("as chosen", str(unproven)) else f"{why}, and {unproven}")
            return None
        if parts:
            watch.noting = None  # what a division kept for its own recompute is not needed
            self.repeated[name] = why
            self.deviation.pop(name, None)
            self.refused.pop(name, None)
            if why != "as chosen":
                self._warn(why, f"{name} runs again whole in backward, attention too: {why}")
        return parts

    def _tried(self, kind: tuple[Any, ...], division: Division | None, name: str) -> _Parts:
        """What is computed again, after a trial of this kind of call. Raises Unproven."""
        if division is None:
            return {}
        trial = (*kind, division.form)
        if trial not in self._trials:
            self._trials[trial] = try_out(division, self._engine.backend.device)
        if kind[0] is not Level.NOTHING:
            self.deviation[name] = max(self._trials[trial], self.deviation.get(name, 0.0))
        return division.parts

    def _setting(self, layer: Layer) -> Setting:
        return self._chosen.get(layer.name, self.default)

    def _cost(self, name: str) -> Costs:
        return self._costs.setdefault(name, Costs(name))

    def _refuse(self, name: str, reason: str) -> None:
        self.refused[name] = reason
        self.deviation.pop(name, None)
        self._warn(reason, f"{name} moves whole tensors instead of a part of the tokens: {reason}")

    def _warn(self, reason: str, message: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _moves_all(setting: Setting) -> bool:
    return isinstance(setting, TokenLevels) and setting.repeats_nothing


def _kind(layer: Layer, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Calls of one kind are treated alike: same layer, same mode, same arguments but for the tensors' content."""
    device = next((tensor.device.type for tensor in tensors_in((args, kwargs))), "cpu")
    described = tuple(describe(value) for value in tree_leaves((tuple(args), kwargs)))
    return layer.name, layer.module.training, Precision.now(device), described


def _unsuited(module: torch.nn.Module) -> str | None:
    for child in module.modules():
        if child._compiled_call_impl is not None or hasattr(child, "_orig_mod"):
            return "it is compiled, and a part of the tokens may be fused in another way"
        if child is not module and type(child).__name__.startswith("FSDP"):
            return "parts of it are sharded on their own; shard whole layers"
    return None
