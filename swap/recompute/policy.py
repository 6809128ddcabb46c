"""Recompute of one manager's layers by their tapes: records each call, chooses what is kept, and has the rest replayed.

    forward    the layer runs once under a Recorder
    its end    the call's log is looked up; a new one is read as a tape, cut, planned, and tried out at once
    backward   the engine asks for a storage that no tier has; its Replay runs the plan's steps

A plan is found by the whole log of a call, so a call that took another path has another plan, made then and there of what
is left in memory: what the plan that was expected would have kept is held as well.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.autograd import forward_ad
from torch.utils.weak import WeakIdKeyDictionary

from memo.errors import SwapError, UsageError
from memo.lru import LRU
from memo.swap.engine.handles import Guard, Kept, Sharded
from memo.swap.engine.token_prefix import Rows, TokenPrefix
from memo.swap.recompute.agreement import Agreed, Agreements, Shared
from memo.swap.recompute.choice import beside_nbytes, choose, cut_at, points_of, problem_at, single_level
from memo.swap.recompute.explain import NAMED_POINTS, explain
from memo.swap.recompute.level_costs import Costs, now_s
from memo.swap.recompute.ranges.ranged_plan import RangedPlan, ranged_costs_of, ranged_plan_of
from memo.swap.recompute.ranges.rows import readings_of
from memo.swap.recompute.rank_agreement import Hearing, Ranks
from memo.swap.recompute.recorded_call import OpenCall, Parts, RecordedCall, tensors_within
from memo.swap.recompute.tape.bans import NO_BANS, Bans, banned
from memo.swap.recompute.tape.checksums import Checksums
from memo.swap.recompute.tape.cut import cheapest, curve
from memo.swap.recompute.tape.plan import Plan, Sources, plan_of, problem_of
from memo.swap.recompute.tape.recorder import Aside, Recorder, is_recordable
from memo.swap.recompute.tape.step_costs import step_costs
from memo.swap.recompute.tape.tape import Tape
from memo.swap.recompute.trial import Unlike, try_out, try_out_ranges
from memo.swap.tensor_kinds import has_storage, is_sharded, layer_input, local_part
from memo.swap.token_levels import LayerCosts, Level, Mix, PointCost, Setting, TokenLevels, setting_of
from memo.units import format_bytes

if TYPE_CHECKING:
    from memo.swap.engine.engine import Engine
    from memo.swap.engine.handles import Handle
    from memo.swap.engine.layer_calls import Group
    from memo.swap.layers import Layer
    from memo.swap.recompute.explanation import LayerExplanation
    from memo.swap.recompute.tape.recorder import Key

__all__ = ["Tapes"]

MOST_PLANS = 512
"""Plans that are remembered, over all layers, settings and lengths."""
MOST_KINDS = 512
MOST_WARNED = 256
MOST_TRIALS = 12
"""Trials of one call until it moves whole."""
MOST_SHORT = 3
"""Trials of one layer that find no memory until its call moves whole for good."""
MOST_OVER = 9 / 8
"""Bytes that token ranges may keep, over what whole storages keep at the same setting; above, these are used."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Refused:
    """A log whose call moves whole."""

    reason: str | None
    wrong: frozenset[int] = frozenset()
    for_now: bool = False
    """The next call is tried out again."""


class Tapes:
    """Recompute policy of one manager's layers.

    Args:
        engine: packs what moves; its `pack` is replaced by this object's while a forward runs.
        default: setting of layers that `choose` has not named.
        repeats_when_full: repeats all that can be where no tier has room for a layer's tensors.
        bans: layer -> operators that the user keeps or repeats by name.
        exact: refuses token ranges whose replay differs by as much as a rounding; whole storages never do.
        piece: most tokens that a replay of token ranges computes at once; None: by `most_held`.
        most_held: bytes that a replay should hold at most beside what is kept: it runs in pieces of tokens where the rules
            prove a token axis; None: no bound.
        verify: compares by checksums what replays read with what it was in the forward.
    """

    def __init__(
        self,
        engine: Engine,
        default: Setting,
        *,
        repeats_when_full: bool = False,
        exact: bool = False,
        bans: Mapping[str, Bans] | None = None,
        piece: int | None = None,
        most_held: int | None = None,
        verify: bool = False,
    ) -> None:
        self.default = default
        self.refused: dict[str, str] = {}
        """Layer -> reason, for layers that move whole tensors though they should not."""
        self.repeated: dict[str, str] = {}
        """Layer -> reason, for layers of which all is repeated for lack of room."""
        self.deviation: dict[str, float] = {}
        """Divided layer -> largest difference found by its trial, in units of its bound; 0: equal bit for bit."""
        self.worst_deviation = 0.0
        """Largest difference of all passed trials, also of earlier lengths and settings."""
        self.trials_run = 0
        self._engine = engine
        self._chosen: dict[str, Setting] = {}
        self._bans = dict(bans or {})
        self._repeats_when_full = repeats_when_full
        self._exact = exact
        self._piece = piece
        self._most_held = most_held
        self._verify = verify
        self._open: OpenCall | None = None
        self._position: dict[str, int] = {}
        self._warned: LRU[str, bool] = LRU(MOST_WARNED)
        self._plans: LRU[tuple[Any, ...], Plan | RangedPlan | _Refused] = LRU(MOST_PLANS)
        self._tapes: LRU[tuple[Any, ...], Tape] = LRU(MOST_PLANS)
        self._opaque: LRU[tuple[Any, ...], frozenset[int]] = LRU(MOST_PLANS)
        self._short: dict[str, int] = {}
        """Layer -> trials that found no memory."""
        self._written_unseen: set[str] = set()
        """Layers in which something unseen has written: each of their calls is recorded with checksums."""
        self._shown: LRU[tuple[Any, ...], bool] = LRU(MOST_PLANS)
        self._expected: LRU[tuple[Any, ...], Plan | RangedPlan | _Refused] = LRU(MOST_KINDS)
        self._last: dict[str, tuple[Any, ...]] = {}  # layer -> key of its last call's plan
        self._costs: dict[str, Costs] = {}
        self._inputs: dict[str, Guard] = {}
        """Layer -> the input of its last call, which was copied to find out if the program changes it after the layer."""
        self._changing: set[str] = set()
        """Layers whose input the program changes after them, though autograd does not save it: `x += layer(x)`."""
        self._ranks = Ranks(engine.backend.device)
        self._agreements = Agreements(self._ranks)
        self._gathered: Collection[torch.nn.Parameter] = ()
        """Parameters that had no memory before the first forward: something else gathers them, and releases them."""
        self._hearing: Hearing | None = None
        engine_pack = engine.pack

        def pack(tensor: torch.Tensor) -> Handle | Kept | Sharded:
            now = self._open
            if now is None:
                return engine_pack(tensor)
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                local_part(tensor)  # that it waits for a collective is an operator of the layer
            with Aside(now.recorder):
                now.recorder.save(tensor)
                return engine_pack(tensor)

        self.pack = pack

    @property
    def is_idle(self) -> bool:
        """True where all tensors move whole anyway."""
        return not self._repeats_when_full and all(
            _moves_all(setting) for setting in (self.default, *self._chosen.values())
        )

    @property
    def described(self) -> str:
        """Text for reports."""
        default = str(self.default.name) if isinstance(self.default, Level) else str(self.default)
        return f"{default}, {len(self._chosen)} layers with their own" if self._chosen else default

    def choose(self, settings: Mapping[str, Setting]) -> None:
        """Sets per-layer settings from the next forward on; unnamed layers use the default. Clears refusals."""
        self._chosen = dict(settings)
        self.refused.clear()
        self.repeated.clear()
        self.deviation.clear()

    def costs(self) -> list[LayerCosts]:
        """Bytes and seconds of each level, for layers that have been recorded."""
        return [told for costs in self._costs.values() if (told := costs.snapshot()) is not None]

    def explain(self, layer: Layer) -> LayerExplanation:
        """Explains what the last recorded call of a layer keeps and replays, and what it could.

        Raises:
            UsageError: no call was recorded.
        """
        name, key = layer.name, self._last.get(layer.name)
        if key is None:
            raise UsageError(f"{name} has no tape: {self._why_no_tape(name)}")
        _, log, opaque, sources, wanted, stuck, setting = key
        tape, found = self._tape_of(log, opaque), self._plans.get(key)
        wrong: frozenset[int] = getattr(found, "wrong", frozenset())
        bans = self._bans.get(name, NO_BANS)
        level = (single_level(setting) if isinstance(setting, TokenLevels) else setting) or Level.SAVE_ATTENTION
        ranged = isinstance(found, RangedPlan)
        if ranged and isinstance(setting, TokenLevels) and not setting.attention:
            level = Level.SAVE_MATMULS
        problem = problem_at(tape, level, sources, wanted, stuck, wrong, bans)
        moves = isinstance(found, _Refused)  # all of it
        free = dataclasses.replace(sources, everything=True)  # as a call that was recorded for a plan
        at_attention = problem_at(tape, Level.SAVE_ATTENTION, free, wanted, stuck, wrong, bans)
        points = {
            "all": cheapest(at_attention, 0, 1),
            **{called: cut_at(tape, at, free, wanted, stuck, wrong, bans) for called, at in NAMED_POINTS.items()},
        }
        settings = [setting.name if isinstance(setting, Level) else str(setting), str(bans)]
        if isinstance(found, RangedPlan):  # the tables tell of the tokens that are replayed
            settings.append(f"in ranges of tokens, {format_bytes(found.nbytes)} kept; below, as if all were replayed")
        return explain(
            layer,
            setting="; ".join(filter(None, settings)),
            refused=self.refused.get(name),
            tape=tape,
            reasons=banned(tape, level, chosen=bans, also=wrong),
            sources=sources,
            wanted=wanted,
            stuck=stuck,
            used=cheapest(problem, 0, 1)
            if moves
            else cut_at(tape, level, free, wanted, stuck, wrong, bans)
            if ranged
            else choose(tape, setting, sources, wanted, stuck, wrong, bans),
            named=points,
            curve=curve(at_attention),
        )

    def _why_no_tape(self, name: str) -> str:
        if name in self.refused:
            return f"it moves whole tensors: {self.refused[name]}"
        if _moves_all(self._chosen.get(name, self.default)) and not self._repeats_when_full:
            return "all that it saves is moved, so its forward is not recorded"
        return "no forward of it has run in the manager yet"

    def begin_forwards(self, layers: Sequence[Layer]) -> None:
        """Prepares a forward of the managed layers."""
        self.look_at(layers)

    def look_at(self, layers: Sequence[Layer]) -> None:
        """Notes the layers of the forward that begins."""
        self._ranks.begin_forward()
        if not self._position:
            self._gathered = _without_memory(layers)
        self._position = {layer.name: position for position, layer in enumerate(layers)}

    def begin(self, layer: Layer, group: Group, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Begins recording a layer's forward; `end` must follow."""
        if torch.compiler.is_compiling():
            return
        if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
            return  # tangents are computed below the recorder; vmap's tensors have no bytes
        if self._open is not None:
            self._open.nested = True
            return
        if not torch.is_grad_enabled() or self._hearing is not None:
            return
        setting = self._chosen.get(layer.name, self.default)
        given = _shape_of_input(args, kwargs)
        if self._ranks.talks(layer.name):
            for other in self._ranks.agree(self._told, given):
                self.refused.pop(other, None)
        self._hearing = self._ranks.listen(layer.name, given)
        if self._hearing is not None:
            self._hearing.__enter__()  # type: ignore[no-untyped-call]
        if _moves_all(setting) and not self._repeats_when_full:
            return
        if layer.name in self._ranks.disagreed:
            self._refuse(layer.name, self._ranks.disagreed[layer.name])
            return
        hidden = layer_input(args, kwargs)
        if hidden is None or not is_recordable(local_part(hidden)):
            return
        arguments = tensors_within((args, kwargs))
        tensors = [part for tensor in arguments if is_recordable(part := local_part(tensor))]
        kind = (layer.name, type(layer.module), layer.module.training, setting, _described(tensors))
        expected = self._expected.get(kind)
        recorder = Recorder(
            local_part(hidden),
            tensors,
            holds=expected.holds if isinstance(expected, (Plan, RangedPlan)) else None if expected is None else {},
            checksums=Checksums(self._engine.backend.device)
            if expected is None or layer.name in self._written_unseen
            else None,
            here=self._engine.backend.current_stream,
            all_bits=self._ranks.talks(layer.name),
        )
        for tensor in arguments:
            if type(tensor) is not torch.Tensor and tensor is not hidden and is_sharded(tensor):
                recorder.sharded[ref(local_part(tensor).untyped_storage())] = tensor
        guard = self._inputs.pop(layer.name, None)
        if guard is not None and guard.is_changed:
            self._changing.add(layer.name)
        copies = expected is None or layer.name in self._changing
        self._open = OpenCall(layer, group, recorder, setting, kind, hidden, copies_input=copies, verify=self._verify)
        group.held = True
        recorder.__enter__()  # type: ignore[no-untyped-call]

    def end(self, group: Group, output: Any) -> None:
        """Ends the recording of a layer's forward, and hands its saved tensors to the engine."""
        call = self._open
        if call is not None:
            if call.group is not group:
                return
            self._open = None
            call.recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        parts: Parts = {}
        try:
            self._heard(group.module, output)
            if call is not None and output is not None:  # None after an exception: nothing is to come back
                parts = self._decide(call, output)
        finally:
            if call is not None:
                call = None  # and with it what the recorder holds: sources go one by one as they are copied out
                self._engine.copy_out_held(group, parts)

    def end_forwards(self) -> None:
        """Ends a forward. A layer still open was interrupted where no hook is called (Ctrl-C); its tensors move whole."""
        call, self._open = self._open, None
        hearing, self._hearing = self._hearing, None
        if call is not None:
            call.recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._engine.copy_out_held(call.group, {})
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

    def _decide(self, call: OpenCall, output: Any) -> Parts:
        name = call.layer.name
        if name in self._ranks.disagreed:
            self._refuse(name, self._ranks.disagreed[name])
            return {}
        if call.nested:
            self._refuse(name, "it contains another managed layer")
            return {}
        recorded = RecordedCall.of(call, output, self._engine, self._gathered)
        parts = self._planned(call, recorded, call.setting)
        if recorded.has_copied and name not in self._changing and has_storage(local_part(call.hidden)):
            self._inputs[name] = Guard(call.hidden)
        if parts and call.setting is Level.SAVE_INPUT:
            self.repeated[name] = "as chosen"
        if self._repeats_when_full:
            room = self._engine.has_room(call.group, parts, besides=self._inputs_after(call))
            if not self._ranks.all_have(name, room):
                least = self._planned(call, recorded, Level.SAVE_INPUT)
                if least:
                    self.repeated[name] = reason = "no tier has room for it"
                    self._warn(reason, f"{name} runs again whole in backward, attention too: {reason}")
                parts = least or parts
        return parts

    def _inputs_after(self, call: OpenCall) -> list[int]:
        """Bytes that the layers after this one need at least: one input each, as large as its own."""
        after = len(self._position) - 1 - self._position[call.layer.name]
        return [call.recorder.storages[0][1]] * after

    def _planned(self, call: OpenCall, recorded: RecordedCall, setting: Setting) -> Parts:
        """The storages that are replayed instead of moved."""
        if _moves_all(setting):
            return {}
        name = call.layer.name
        opaque = self._opaque_in(call, recorded)
        kind = (setting, call.recorder.values[0][2])
        shared = self._agreements.shared(name, kind, call.recorder.collectives)
        # Each layer has its own: what the dispatcher does not see may differ between layers of one log.
        key = (name, recorded.key, opaque, recorded.sources, recorded.wanted, recorded.stuck, setting)
        self._last[name] = key
        found = self._plans.get(key)
        if found is None or not shared.allow(_steps_of(found)):
            trials = self.trials_run
            tape = self._tape(recorded, opaque)
            found, shared = self._made(call, recorded, tape, setting, shared)
            if not (isinstance(found, _Refused) and found.for_now):
                self._plans[key] = found
            if call.kind not in self._expected or self.trials_run > trials:
                self._expected[call.kind] = self._next(call, recorded, tape, setting, shared, found)
        if isinstance(found, _Refused):
            if found.reason is not None:
                self._refuse(name, found.reason)
            return {}
        self.deviation[name] = 0.0 if isinstance(found, Plan) else found.deviation
        self.refused.pop(name, None)
        together = any(shared.repeated_by(_steps_of(found)))
        if isinstance(found, RangedPlan):
            return recorded.parts(found, recorded.ranges(found, self._engine, together=together), self._engine)
        replay = recorded.replay(found, self._engine, together=together)
        return {
            saved: TokenPrefix(replay, Rows(rows=1, width=saved.nbytes), tokens=1, first=0)
            for storage in found.wanted
            if (saved := recorded.saved.get(storage)) is not None
        }

    def _opaque_in(self, call: OpenCall, recorded: RecordedCall) -> frozenset[int]:
        """Storages that something unseen writes into, as a call of this log showed that was recorded with checksums."""
        key = (call.layer.name, recorded.key)
        opaque = self._opaque[key] = call.recorder.changed_unseen() | (self._opaque.get(key) or frozenset())
        if opaque:
            self._written_unseen.add(call.layer.name)
        return opaque

    def _made(
        self, call: OpenCall, recorded: RecordedCall, tape: Tape, setting: Setting, shared: Shared
    ) -> tuple[Plan | RangedPlan | _Refused, Shared]:
        """The plan of a new log, or why there is none, and what was agreed with other ranks.

        Raises:
            SwapError: other ranks repeat a collective that this one cannot repeat, of which they know nothing.
        """
        if shared.numbers and shared.agreed is None:
            settled = self._settled_ranges(call, recorded, tape, setting, shared)
            if settled is not None:
                return settled
            plan, shared = self._settled(call, recorded, tape, setting, shared)
            if plan is not None:
                return plan, shared
        if not shared.numbers:
            ranged = self._in_ranges(call, recorded, tape, setting, recorded.sources, shared)
            if ranged is not None and (shown := self._shown_ranges(call, recorded, ranged)) is not None:
                return shown, shared
        elif shared.agreed is not None and shared.agreed.ranges is not None:
            ranged = self._in_ranges(call, recorded, tape, setting, recorded.sources, shared)
            if ranged is None or ranged.form != shared.agreed.ranges:
                raise SwapError(
                    f"{call.layer.name} was to be recomputed together with other ranks in ranges of tokens, and cannot be"
                    " divided alike in this call; exclude it with alpha=1"
                )
            return ranged, shared
        if not shared.always:
            return self._tried(call, recorded, tape, setting, shared), shared
        assert shared.agreed is not None
        wrong, opaque = shared.agreed.known_of(tape)
        tape = self._tape(recorded, opaque)
        plan = self._plan(call, recorded, tape, setting, shared, wrong)
        if plan is None:
            raise SwapError(
                f"{call.layer.name} was to be recomputed together with other ranks, and now must not be: a collective"
                " that they repeat cannot be repeated here; exclude it with alpha=1"
            )
        return plan, shared

    def _plan(
        self, call: OpenCall, recorded: RecordedCall, tape: Tape, setting: Setting, shared: Shared, wrong: Iterable[int]
    ) -> Plan | None:
        """A plan that repeats the collectives that were agreed on; None if there is none."""
        try:
            chosen = self._bans.get(call.layer.name, NO_BANS)
            cut = choose(tape, setting, recorded.sources, recorded.wanted, recorded.stuck, wrong, chosen, shared)
        except ValueError:
            return None
        plan = plan_of(tape, cut, recorded.sources, recorded.wanted)
        return plan if plan.wanted else None

    def _settled(
        self, call: OpenCall, recorded: RecordedCall, tape: Tape, setting: Setting, shared: Shared
    ) -> tuple[Plan | None, Shared]:
        """Agrees with other ranks on the collectives of a new kind of call, and tries the plan out with them.

        All that decides here is exchanged, so that all ranks take the same way. A plan that repeats no collective is
        left to this rank alone.
        """
        name, ranks = call.layer.name, self._ranks
        wrong: set[int] = set()
        for _ in range(MOST_TRIALS):
            settled = self._agreements.settle(
                name, shared, self._proposed(call, recorded, tape, setting, shared, wrong)
            )
            plan = self._plan(call, recorded, tape, setting, settled, wrong) if settled.always else None
            if not ranks.all_have(name, plan is not None):
                break
            assert plan is not None
            unlike = self._unlike(call, recorded, plan)
            if ranks.all_have(name, unlike is None):
                assert settled.agreed is not None
                agreed = Agreed(
                    repeats=settled.agreed.repeats,
                    operators=tuple(step.operator for step in tape.steps),
                    wrong=frozenset(wrong),
                    opaque=self._opaque_in(call, recorded),
                )
                return plan, self._agreements.add(name, shared, agreed)
            if unlike is not None:
                wrong |= {step.number for step in tape.steps} if unlike.step is None else {unlike.step}
        return None, self._agreements.add(name, shared, Agreed((False,) * len(shared.numbers)))

    def _proposed(
        self, call: OpenCall, recorded: RecordedCall, tape: Tape, setting: Setting, shared: Shared, wrong: Iterable[int]
    ) -> tuple[bool, ...]:
        """Which collectives this rank would repeat, in this call and in the ones that are held for."""
        proposed, bans = (True,) * len(shared.numbers), self._bans.get(call.layer.name, NO_BANS)
        for sources in (recorded.sources, dataclasses.replace(recorded.sources, everything=True)):
            cut = choose(tape, setting, sources, recorded.wanted, recorded.stuck, shared.apart.union(wrong), bans)
            repeated = shared.repeated_by(cut.replayed)
            proposed = tuple(one and other for one, other in zip(proposed, repeated, strict=True))
        return proposed

    def _tried(
        self, call: OpenCall, recorded: RecordedCall, tape: Tape, setting: Setting, shared: Shared
    ) -> Plan | _Refused:
        """A plan that other ranks have no part in, tried out; or why there is none."""
        bans = self._bans.get(call.layer.name, NO_BANS)
        wrong: set[int] = set()
        reason = None
        for _ in range(MOST_TRIALS):
            cut = choose(tape, setting, recorded.sources, recorded.wanted, recorded.stuck, wrong, bans, shared)
            if not cut.replayed:
                return _Refused(reason, frozenset(wrong))
            plan = plan_of(tape, cut, recorded.sources, recorded.wanted)
            # The same operators in the same order have passed a trial at other sizes: routed rows differ in each call.
            form = (call.layer.name, setting, *(word for word in recorded.key.log if type(word) is not int), plan.steps)
            if form in self._shown:
                return plan
            try:
                unlike = self._unlike(call, recorded, plan)
            except torch.OutOfMemoryError:
                self._short[call.layer.name] = short = self._short.get(call.layer.name, 0) + 1
                return _Refused(
                    "there was no device memory to try its replay out", frozenset(wrong), for_now=short < MOST_SHORT
                )
            if unlike is None:
                self._shown[form] = True
                return dataclasses.replace(plan, wrong=frozenset(wrong)) if wrong else plan
            reason = str(unlike)
            if unlike.step is None:
                return _Refused(reason, frozenset(wrong))
            wrong.add(unlike.step)
        return _Refused(reason, frozenset(wrong))

    def _settled_ranges(
        self, call: OpenCall, recorded: RecordedCall, tape: Tape, setting: Setting, shared: Shared
    ) -> tuple[RangedPlan, Shared] | None:
        """Agrees with other ranks on ranges of tokens, which are the same on all of them, and tries them out together.

        All that decides here is exchanged; None on every rank or on none.
        """
        name, ranks = call.layer.name, self._ranks
        both = (recorded.sources, dataclasses.replace(recorded.sources, everything=True))
        plans = [self._in_ranges(call, recorded, tape, setting, sources, shared) for sources in both]
        repeated = [shared.repeated_by(plan.steps) for plan in plans if plan is not None]
        if not ranks.all_have(name, len(repeated) == len(both)):
            return None
        settled = self._agreements.settle(name, shared, tuple(map(all, zip(*repeated, strict=True))))
        plans = [self._in_ranges(call, recorded, tape, setting, sources, settled) for sources in both]
        forms = [None if plan is None or not settled.allow(plan.steps) else plan.form for plan in plans]
        same = ranks.say_the_same(name, forms)
        plan = plans[0]
        if not ranks.all_have(name, same and None not in forms and forms[0] == forms[1]):
            return None
        assert plan is not None
        assert settled.agreed is not None
        shown = self._shown_ranges(call, recorded, plan, together=any(settled.agreed.repeats))
        if not ranks.all_have(name, shown is not None):
            return None
        assert shown is not None
        agreed = dataclasses.replace(settled.agreed, opaque=self._opaque_in(call, recorded), ranges=plan.form)
        return shown, self._agreements.add(name, shared, agreed)

    def _in_ranges(
        self,
        call: OpenCall,
        recorded: RecordedCall,
        tape: Tape,
        setting: Setting,
        sources: Sources,
        shared: Shared | None = None,
    ) -> RangedPlan | None:
        """Token ranges for a setting; None where it names whole tokens, or whole storages do better."""
        if setting is Level.SAVE_INPUT or isinstance(setting, Mix):
            return None
        levels = setting if isinstance(setting, TokenLevels) else setting_of(setting)
        assert isinstance(levels, TokenLevels)
        if tape.readings is None:
            tape.readings = list(readings_of(tape, call.recorder.carried))
        chosen = self._bans.get(call.layer.name, NO_BANS)
        never = frozenset() if shared is None else shared.never
        bans = {
            level: banned(tape, level, chosen=chosen, also=never)
            for level in (Level.SAVE_MATMULS, Level.SAVE_ATTENTION)
        }
        least = {
            level: cheapest(problem_of(tape, bans[level], sources, recorded.wanted, recorded.stuck, tape.costs), 1, 0)
            for level in bans
        }
        every = sum(8 * tape.storages[storage][1] for storage in (*recorded.wanted, *recorded.stuck))
        for rows in tape.readings:
            first, second = ends = levels.ends(rows.tokens)
            is_mixed = 0 < first < rows.tokens or 0 < second < rows.tokens
            if first == rows.tokens or not (is_mixed or self._piece or self._most_held):
                continue
            plan = ranged_plan_of(
                rows,
                ends,
                bans.__getitem__,
                sources,
                recorded.wanted,
                recorded.stuck,
                piece=self._piece,
                most_held=self._most_held,
                always=() if shared is None else shared.always,
            )
            bits = first * every + (second - first) * least[Level.SAVE_MATMULS].keep_cost
            bits += (rows.tokens - second) * least[Level.SAVE_ATTENTION].keep_cost
            if plan is not None and 8 * plan.nbytes * rows.tokens <= MOST_OVER * bits:
                return plan
        return None

    def _shown_ranges(
        self, call: OpenCall, recorded: RecordedCall, plan: RangedPlan, *, together: bool = False
    ) -> RangedPlan | None:
        """A plan of token ranges after its trial; None where it fails and whole storages are to be used."""
        device = self._engine.backend.device
        try:
            self.trials_run += 1
            began = now_s(device)
            worst = try_out_ranges(recorded.ranges(plan, self._engine), exact=self._exact)
            seconds = now_s(device) - began
            if plan.whole is not None:
                try_out(recorded.replay(plan.whole, self._engine))
        except Unlike:
            return None
        except torch.OutOfMemoryError:
            if together:
                raise  # of this rank alone, and the others wait for it in a collective
            return None
        self.worst_deviation = max(self.worst_deviation, worst)
        self._count(call, recorded, plan.rows.tape, plan.cost, seconds)
        return dataclasses.replace(plan, deviation=worst)

    def _unlike(self, call: OpenCall, recorded: RecordedCall, plan: Plan) -> Unlike | None:
        """Tries a plan out; None if it gave what autograd saved."""
        self.trials_run += 1
        began = now_s(self._engine.backend.device)
        try:
            try_out(recorded.replay(plan, self._engine))
        except Unlike as unlike:
            return unlike
        self._count(call, recorded, plan.tape, plan.cost, now_s(self._engine.backend.device) - began)
        return None

    def _next(
        self,
        call: OpenCall,
        recorded: RecordedCall,
        tape: Tape,
        setting: Setting,
        shared: Shared,
        found: Plan | RangedPlan | _Refused,
    ) -> Plan | RangedPlan | _Refused:
        """The plan that the next call is recorded for: as if all that this one made could be kept."""
        sources = dataclasses.replace(recorded.sources, everything=True)
        bans = self._bans.get(call.layer.name, NO_BANS)
        if isinstance(found, RangedPlan):
            return self._in_ranges(call, recorded, tape, setting, sources, shared) or found
        try:
            cut = choose(tape, setting, sources, recorded.wanted, recorded.stuck, (), bans, shared)
        except ValueError:
            return found
        return plan_of(tape, cut, sources, recorded.wanted) if cut.replayed else found

    def _count(self, call: OpenCall, recorded: RecordedCall, tape: Tape, replayed: int, seconds: float) -> None:
        """Records bytes and seconds of the named levels; one replay was measured, the others follow by their operators."""
        costs = self._costs.setdefault(call.layer.name, Costs(call.layer.name))
        hidden = call.recorder.tensors[0]
        tokens = hidden.size(-2) if hidden.ndim > 1 else 1
        sources = dataclasses.replace(recorded.sources, everything=True)
        bans = self._bans.get(call.layer.name, NO_BANS)
        at = {
            level: cut_at(tape, level, sources, recorded.wanted, recorded.stuck, (), bans)
            for level in (Level.SAVE_MATMULS, Level.SAVE_ATTENTION, Level.SAVE_INPUT)
        }
        least = at[Level.SAVE_ATTENTION].keep_cost // 8
        every = sum(tape.storages[storage][1] for storage in (*recorded.wanted, *recorded.stuck))
        saved = set(recorded.saved)
        beside = beside_nbytes(tape, at[Level.SAVE_MATMULS], saved | recorded.sources.free)
        costs.counted(
            tokens=tokens,
            input_bytes=at[Level.SAVE_INPUT].keep_cost // 8,
            always_bytes=least,
            bytes_per_token={
                Level.SAVE_ALL: (every - least) / tokens,
                Level.SAVE_MATMULS: (at[Level.SAVE_MATMULS].keep_cost // 8 - least) / tokens,
                Level.SAVE_ATTENTION: 0.0,
            },
            beside_per_token={Level.SAVE_MATMULS: beside / tokens},
        )
        half = self._in_ranges(call, recorded, tape, TokenLevels.of_alpha(0.5), sources)
        if half is not None:
            tokens = half.rows.tokens
            counts = ranged_costs_of(
                half.rows, lambda level: banned(tape, level, chosen=bans), sources, recorded.wanted, recorded.stuck
            )
            costs.counted(input_bytes=at[Level.SAVE_INPUT].keep_cost // 8, tokens=tokens, **counts)
        else:
            known = points_of(tape, sources, recorded.wanted, recorded.stuck, (), bans)
            costs.points = tuple(
                PointCost(
                    name=point,
                    saved_bytes=cut.keep_cost // 8,
                    recompute_s=seconds * cut.replay_cost / max(1, replayed),
                    beside_bytes=beside_nbytes(tape, cut, saved | recorded.sources.free),
                )
                for point, cut in known.items()
            )
        for level, other in at.items():
            costs.ran(level, tokens, seconds * other.replay_cost / max(1, replayed))

    def _tape(self, recorded: RecordedCall, opaque: frozenset[int]) -> Tape:
        return self._tape_of(recorded.key, opaque)

    def _tape_of(self, log: Key, opaque: frozenset[int]) -> Tape:
        key = (log, opaque)
        tape = self._tapes.get(key)
        if tape is None:
            tape = self._tapes[key] = Tape(log, opaque)
            tape.costs = step_costs(tape, self._engine.backend.device.type)
        return tape

    def _told(self, name: str) -> str:
        """Text of all settings of a layer on this rank, compared between ranks."""
        besides = ["to recompute when full"] if self._repeats_when_full else []
        bans = [str(self._bans[name])] if name in self._bans else []
        return ", ".join([str(self._chosen.get(name, self.default)), *bans, *besides])

    def _refuse(self, name: str, reason: str) -> None:
        self.refused[name] = reason
        self.deviation.pop(name, None)
        self._warn(reason, f"{name} moves whole tensors: {reason}")

    def _warn(self, reason: str, message: str) -> None:
        """Warns once of each reason."""
        if reason not in self._warned:
            self._warned[reason] = True
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _steps_of(found: Plan | RangedPlan | _Refused) -> tuple[int, ...]:
    """Steps that it repeats; none for ranges, which layers without collectives alone are given."""
    return found.steps if isinstance(found, Plan) else ()


def _without_memory(layers: Sequence[Layer]) -> Collection[torch.nn.Parameter]:
    own = (parameter for layer in layers for parameter in layer.module.parameters())
    # A set by identity: tensors compare by their numbers.
    return WeakIdKeyDictionary({each: True for each in own if local_part(each).numel() == 0})


def _moves_all(setting: Setting) -> bool:
    return setting is Level.SAVE_ALL or (isinstance(setting, TokenLevels) and setting.repeats_nothing)


def _shape_of_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    hidden = layer_input(args, kwargs)
    return "no tensor" if hidden is None else str(tuple(hidden.shape))


def _described(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return tuple((tensor.size(), tensor.stride(), tensor.dtype, tensor.requires_grad) for tensor in tensors)
