"""Token-wise swap and recompute of unmodified layers, decided anew at each layer call.

A layer's input and the results of attention move whole. Of every other saved tensor, whose rows each depend on one
token alone, the first tokens move (levels) and backward computes the rest again by running the layer's forward without
its attention. A layer is treated so only after two checks:

    proof     the token axis is carried through every operator of the call to each saved tensor (prover, token_split)
    trial     the recompute runs at once, and its tensors are compared with the saved ones; once more with checksums, to
              detect memory that kernels unseen by the dispatcher change (trial; trial_cache tells which calls need one)

A layer that fails one moves whole tensors, which is always right, or runs again whole where that is chosen and passes
its trial. It warns once with the reason, and the report lists it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from memo.errors import SwapError
from memo.lru import LRU
from memo.swap.recompute.axis.argument_axes import Shapes, TokenDims
from memo.swap.recompute.axis.operator_rules import Unproven
from memo.swap.recompute.forward_record import ForwardRecord
from memo.swap.recompute.guards.module_state import has_others, hooks_within, modules_of, parameters_of
from memo.swap.recompute.level_costs import Costs
from memo.swap.recompute.prover import TokenAxisProver
from memo.swap.recompute.rank_agreement import Hearing, Ranks
from memo.swap.recompute.record.dispatch_mode import Aside
from memo.swap.recompute.record.layer_arguments import argument_tensors, check_arguments, token_input
from memo.swap.recompute.record.operator_log import Script
from memo.swap.recompute.token_split import Division, divide
from memo.swap.recompute.trial import OutOfRoom, try_out
from memo.swap.recompute.trial_cache import Kind, TrialResult, Trials
from memo.swap.recompute.whole_layer import repeat_whole
from memo.swap.tensor_kinds import layer_input, local_part
from memo.swap.token_levels import LayerCosts, Level, Setting, TokenLevels

if TYPE_CHECKING:
    from memo.swap.engine.engine import Engine
    from memo.swap.engine.handles import Handle, Kept, Sharded
    from memo.swap.engine.layer_calls import Group
    from memo.swap.engine.saved_storage import SavedStorage
    from memo.swap.engine.token_prefix import TokenPrefix
    from memo.swap.layers import Layer

__all__ = ["TokenWise"]

_Parts = dict["SavedStorage", "TokenPrefix"]

MOST_READ_ANEW = 256
"""Kinds of calls."""
MOST_WARNED = 256
"""Reasons that are remembered as told: some name shapes, which may be ever new."""


class TokenWise:
    """Recompute policy of one manager's layers: proves, tries out and records each call.

    Args:
        engine: packs what moves; its `pack` is replaced by this object's while a forward runs.
        default: setting of layers that `choose` has not named.
        fallback: for layers whose tokens cannot be divided: SAVE_ALL moves whole tensors, SAVE_INPUT runs the layer again.
        repeats_when_full: runs a layer again whole when no tier has room for its tensors.
        exact: refuses a recompute that differs from the saved tensors by as much as a rounding.
    """

    def __init__(
        self,
        engine: Engine,
        default: Setting,
        *,
        fallback: Level = Level.SAVE_ALL,
        repeats_when_full: bool = False,
        exact: bool = False,
    ) -> None:
        self.default = default
        self.refused: dict[str, str] = {}
        """Layer -> reason, for layers that move whole tensors."""
        self.repeated: dict[str, str] = {}
        """Layer -> reason, for layers that run again whole, attention included."""
        self.deviation: dict[str, float] = {}
        """Divided layer -> largest difference found by its trials, in units of their bound; 0: equal bit for bit."""
        self.worst_deviation = 0.0
        """Largest difference of all passed trials, also of earlier lengths and settings."""
        self.trials_run = 0
        self._engine = engine
        self._chosen: dict[str, Setting] = {}
        self._fallback = fallback
        self._repeats_when_full = repeats_when_full
        self._exact = exact
        self._open: ForwardRecord | None = None
        self._position: dict[str, int] = {}
        self._unsuited: set[str] = set()
        self._own: dict[str, list[torch.Tensor]] = {}
        """Each layer's parameters when the forwards began."""
        self._warned: LRU[str, bool] = LRU(MOST_WARNED)
        self._costs: dict[str, Costs] = {}
        self._ranks = Ranks(engine.backend.device)
        self._trials = Trials(self._ranks)
        self._shapes = Shapes()
        self._other_reading: LRU[Kind, bool] = LRU(MOST_READ_ANEW)
        self._hearing: Hearing | None = None
        engine_pack = engine.pack

        def pack(tensor: torch.Tensor) -> Handle | Kept | Sharded:
            record = self._open
            if record is None:
                return engine_pack(tensor)
            with Aside(record.mode):
                record.saved(tensor)
                return engine_pack(tensor)

        self.pack = pack

    @property
    def is_idle(self) -> bool:
        """True where all tensors move whole anyway."""
        settings = (self.default, *self._chosen.values())
        return not self._repeats_when_full and all(_moves_all(setting) for setting in settings)

    @property
    def described(self) -> str:
        """Text for reports: how tokens are divided."""
        default = "whole layers" if isinstance(self.default, Level) else str(self.default)
        return f"{default}, {len(self._chosen)} layers with their own" if self._chosen else default

    def choose(self, settings: Mapping[str, Setting]) -> None:
        """Sets per-layer recompute levels from the next forward on; unnamed layers use the default. Clears refusals."""
        self._chosen = dict(settings)
        self.refused.clear()
        self.repeated.clear()
        self.deviation.clear()

    def costs(self) -> list[LayerCosts]:
        """Bytes and seconds of each level, for layers whose saved tensors have been counted."""
        return [told for costs in self._costs.values() if (told := costs.snapshot()) is not None]

    def begin_forwards(self, layers: Sequence[Layer]) -> None:
        """Prepares a forward of the managed layers."""
        self._own = {layer.name: parameters_of(layer.module) for layer in layers}
        self.look_at(layers)

    def look_at(self, layers: Sequence[Layer]) -> None:
        """Refuses layers by their modules (hooks, compiled parts), before a forward: a compiled layer cannot warn."""
        self._ranks.begin_forward()
        if self.is_idle and not self._ranks.several:
            return
        self._position = {layer.name: position for position, layer in enumerate(layers)}
        self._unsuited.clear()
        for layer in layers:
            reason = _unsuited(layer.module)
            if reason is not None:
                self._unsuited.add(layer.name)
                if not _moves_all(self._setting(layer.name)):
                    self._refuse(layer.name, reason)

    def begin(self, layer: Layer, group: Group, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Begins recording a layer's forward; `end` must follow."""
        if torch.compiler.is_compiling() or layer.name in self._unsuited:
            return
        if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
            return  # where tangents are computed, torch rounds otherwise below a dispatch mode; vmap's tensors have no bytes
        if self._open is not None:
            self._open.nested = True
            return
        if torch.is_grad_enabled() and self._hearing is None:
            if self._ranks.talks(layer.name):
                for other in self._ranks.agree(self._told, _shape_of_input(args, kwargs)):
                    self.refused.pop(other, None)
            self._hearing = self._ranks.listen(layer.name, _shape_of_input(args, kwargs))
            if self._hearing is not None:
                self._hearing.__enter__()  # type: ignore[no-untyped-call]
            self._open = self._record(layer, group, args, kwargs)
            if self._open is not None:
                group.held = True
                self._open.__enter__()

    def _record(self, layer: Layer, group: Group, args: Sequence[Any], kwargs: dict[str, Any]) -> ForwardRecord | None:
        """A record for this call; None where its tensors move whole."""
        setting = self._setting(layer.name)
        divides = isinstance(setting, TokenLevels) and not setting.repeats_nothing
        repeats = (
            self._repeats_when_full or setting is Level.SAVE_INPUT or (divides and self._fallback is Level.SAVE_INPUT)
        )
        if not divides and not repeats:
            return None
        if layer.name in self._ranks.disagreed:
            self._refuse(layer.name, self._ranks.disagreed[layer.name])
            return None
        if has_others(layer.module, self._own[layer.name]):
            self._refuse(layer.name, "it is called with other parameters than its own, as functional_call does")
            return None
        hooks = hooks_within(layer.module)
        if hooks is not None:  # put there since the forwards began
            self._refuse(layer.name, f"{hooks} would be called again")
            return None
        kind = Kind.of(layer, args, kwargs)
        if kind in self._other_reading:
            kind = kind.without_pairs
        divides = divides and self._trials.refusal(kind) is None
        repeats = repeats and self._trials.refusal(kind.repeated) is None
        if not divides and not repeats:
            return None
        try:
            given = check_arguments(args, kwargs)
        except Unproven as unproven:
            self._trials.refuse(kind, str(unproven))
            self._trials.refuse(kind.repeated, str(unproven))
            self._refuse(layer.name, str(unproven))
            return None
        tensors, hidden = argument_tensors(args, kwargs), local_part(given)
        tokens = hidden.size(-2) if hidden.ndim > 1 else 0
        dims = TokenDims(tokens, before=self._shapes.before(layer.name, tokens, tensors), no_pairs=kind.no_pairs)
        script = Script(tensors)
        prover = self._prover(layer, kind, setting, args, kwargs, dims=dims, script=script) if divides else None
        if prover is None and not repeats:
            return None
        return ForwardRecord(
            layer,
            group,
            args,
            kwargs,
            given=given,
            kind=kind,
            dims=dims,
            prover=prover,
            script=script,
            whole=repeats,
            device=self._engine.backend.device,
        )

    def _prover(
        self,
        layer: Layer,
        kind: Kind,
        setting: Setting,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        dims: TokenDims,
        script: Script,
    ) -> TokenAxisProver | None:
        assert isinstance(setting, TokenLevels)
        try:
            hidden = token_input(args, kwargs)
        except Unproven as unproven:
            self._trials.refuse(kind, str(unproven))
            self._refuse(layer.name, str(unproven))
            return None
        tokens = hidden.size(-2)
        ends = setting.ends(tokens)
        return TokenAxisProver(hidden, args, kwargs, dims=dims, ends=ends, script=script) if ends[0] < tokens else None

    def end(self, group: Group, output: Any) -> None:
        """Ends the record of a layer's forward, and hands its saved tensors to the engine."""
        record = self._open
        if record is not None:
            if record.group is not group:
                return
            self._open = None
            record.__exit__()
        parts: _Parts = {}
        try:
            self._heard(group.module, output)
            if record is not None and output is not None:  # None after an exception: nothing is to come back
                parts = self._decide(record, output)
        finally:
            if record is not None:
                record = None  # and with it what the layer made: sources go one by one as they are copied out
                self._engine.copy_out_held(group, parts)

    def end_forwards(self) -> None:
        """Ends a forward. A layer still open was interrupted where no hook is called (Ctrl-C); its tensors move whole."""
        self._own.clear()
        record, self._open = self._open, None
        hearing, self._hearing = self._hearing, None
        if record is not None:
            record.__exit__()
            self._engine.copy_out_held(record.group, {})
        if hearing is not None:
            hearing.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _heard(self, name: str, output: Any) -> None:
        """Stores the process groups recorded in the layer's first forward."""
        hearing = self._hearing
        if hearing is None or hearing.layer != name:
            return
        self._hearing = None
        hearing.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is not None:
            self._ranks.heard(hearing, self._told(name))

    def _has_room(self, record: ForwardRecord, parts: _Parts) -> bool:
        """True when what the layer moves has room on all ranks of its groups, so that it runs again on all or none."""
        room = self._engine.has_room(record.group, parts, besides=self._inputs_after(record))
        return self._ranks.all_have(record.layer.name, room)

    def _inputs_after(self, record: ForwardRecord) -> list[int]:
        """Bytes that the layers after this one need at least: one input each, as large as its own."""
        after = len(self._position) - 1 - self._position[record.layer.name]
        return [record.hidden.untyped_storage().nbytes()] * after

    def _decide(self, record: ForwardRecord, output: Any) -> _Parts:
        name = record.layer.name
        if name in self._ranks.disagreed:
            self._refuse(name, self._ranks.disagreed[name])
            return {}
        record.together = self._ranks.talks(name)
        parts = self._divided(record, output)
        if self._repeats_when_full and record.saves is not None and not self._has_room(record, parts):
            parts = self._repeat(record, output, "no tier has room for it") or parts
        return parts

    def _divided(self, record: ForwardRecord, output: Any) -> _Parts:
        """Applies the layer's setting: the storages that move in part."""
        name = record.layer.name
        if record.prover is not None:
            attempt = functools.partial(divide, record, output, self._engine, self._cost(name))
            try:
                divided = self._tried(record.kind, attempt, record.layer)
                if self._trials.found_room(name):
                    self.refused.pop(name, None)
                return divided
            except OutOfRoom as short:
                self._trials.ran_short(record.kind, str(short))
                self._refuse(name, str(short))
                return {}  # whole this once
            except Unproven as unproven:
                if record.dims.guessed_pairs and not record.kind.no_pairs:
                    self._other_reading[record.kind] = True
                    return {}  # whole this once
                self._trials.refuse(record.kind, str(unproven))
        setting = self._setting(name)
        why = "as chosen" if setting is Level.SAVE_INPUT else self._trials.refusal(record.kind)
        if why is None or _moves_all(setting):
            return {}
        if record.saves is not None and (setting is Level.SAVE_INPUT or self._fallback is Level.SAVE_INPUT):
            parts = self._repeat(record, output, why)
            if parts is not None:
                return parts
        else:
            self._refuse(name, why)
        return {}

    def _repeat(self, record: ForwardRecord, output: Any, why: str) -> _Parts | None:
        """Has the layer run again whole; None where it must not."""
        name, kind = record.layer.name, record.kind.repeated
        attempt = functools.partial(repeat_whole, record, output, self._engine, self._cost(name))
        try:
            parts = self._tried(kind, attempt, record.layer)
        except Unproven as unproven:
            if isinstance(unproven, OutOfRoom):
                self._trials.ran_short(kind, str(unproven))
            else:
                self._trials.refuse(kind, str(unproven))
            self._refuse(name, str(unproven) if why in ("as chosen", str(unproven)) else f"{why}, and {unproven}")
            return None
        if parts:
            record.drop_prover()
            self.repeated[name] = why
            self.deviation.pop(name, None)
            self.refused.pop(name, None)
            if why != "as chosen":
                self._warn(why, f"{name} runs again whole in backward, attention too: {why}")
        return parts

    def _tried(self, kind: Kind, attempt: Callable[[], Division | None], layer: Layer) -> _Parts:
        """Storages that move in part, after a trial where one is needed.

        Raises:
            Unproven: it must not be; on every rank that the layer talks to, or on none.
            SwapError: the layer talks to others and can be repeated no more, of which they know nothing.
        """
        division, reason = None, None
        try:
            division = attempt()
        except Unproven as unproven:
            reason = str(unproven)
        if reason is not None and self._ranks.talks(layer.name) and self._trials.were_of(kind):
            raise SwapError(
                f"{layer.name} was to be recomputed together with other ranks, and now must not be: {reason}; exclude it"
                f" with alpha=1"
            )
        shown = None if reason is not None else self._trials.find(kind, division)
        if shown is None:
            self._ranks.require(layer.name, reason, None if division is None else division.shared_form)
            shown = self._try_out(division, layer.name)
            self._trials.add(kind, division, layer.module, shown)
        if division is None:
            return {}
        self._cost(layer.name).took(shown.seconds_per_token)
        if not kind.is_whole:
            self.deviation[layer.name] = max(shown.deviation, self.deviation.get(layer.name, 0.0))
            self.worst_deviation = max(self.worst_deviation, shown.deviation)
        return division.parts

    def _try_out(self, division: Division | None, name: str) -> TrialResult:
        """Raises Unproven on every rank that the layer talks to, or on none."""
        worst, reason = 0.0, None
        if division is not None:
            self.trials_run += 1
            try:
                worst = try_out(division, self._engine.backend.device, exact=self._exact)
            except OutOfRoom:
                raise  # only where no other rank waits
            except Unproven as unproven:
                reason = str(unproven)
            self._ranks.require(name, reason)
        return TrialResult(deviation=worst, seconds_per_token=self._cost(name).seconds_per_token)

    def _told(self, name: str) -> str:
        """Text of all settings of a layer on this rank, compared between ranks."""
        besides = ["fallback recompute"] if self._fallback is Level.SAVE_INPUT else []
        besides += ["to recompute when full"] if self._repeats_when_full else []
        return ", ".join([str(self._setting(name)), *besides])

    def _setting(self, name: str) -> Setting:
        return self._chosen.get(name, self.default)

    def _cost(self, name: str) -> Costs:
        return self._costs.setdefault(name, Costs(name))

    def _refuse(self, name: str, reason: str) -> None:
        self.refused[name] = reason
        self.deviation.pop(name, None)
        self._warn(reason, f"{name} moves whole tensors instead of a part of the tokens: {reason}")

    def _warn(self, reason: str, message: str) -> None:
        if reason not in self._warned:
            self._warned[reason] = True
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _shape_of_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    hidden = layer_input(args, kwargs)
    return "no tensor" if hidden is None else str(tuple(hidden.shape))


def _moves_all(setting: Setting) -> bool:
    return isinstance(setting, TokenLevels) and setting.repeats_nothing


def _unsuited(module: torch.nn.Module) -> str | None:
    hooks = hooks_within(module)
    if hooks is not None:
        return f"{hooks} would be called again"
    for child in modules_of(module):
        if child._compiled_call_impl is not None or "_orig_mod" in child._modules:
            return "it is compiled, and a part of the tokens may be fused in another way"
        if child is not module and type(child).__name__.startswith("FSDP"):
            return "parts of it are sharded on their own; shard whole layers"
    return None
