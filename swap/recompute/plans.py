"""The plans of a manager's layers: looked up by the log of a call, or made, tried out, and agreed on with other ranks.

A plan is found by the whole log of a call, so a call that took another path has another plan, made then and there of what
is left in memory: what the plan that was expected would have kept is held as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from memo.errors import SwapError
from memo.lru import LRU
from memo.swap.levels import LayerCosts, Level, PointCost, Setting
from memo.swap.recompute.agreement import Agreements, CollectiveAgreement, Shared
from memo.swap.recompute.alike import PlanReuse
from memo.swap.recompute.choice import Choice
from memo.swap.recompute.parts import held_and_absent
from memo.swap.recompute.tape.bans import NO_BANS, Bans
from memo.swap.recompute.tape.plan import Plan
from memo.swap.recompute.tape.step_costs import step_costs
from memo.swap.recompute.tape.tape import Tape
from memo.swap.recompute.trials import Case, Trials
from memo.warn_user import warn_user

if TYPE_CHECKING:
    from memo.swap.engine.engine import Engine
    from memo.swap.recompute.rank_agreement import AgreeingRanks
    from memo.swap.recompute.recorded_call import Ended, OpenCall, RecordedCall
    from memo.swap.recompute.tape.log import Holds, Key
    from memo.swap.recompute.tape.work import Rates

MOST_PLANS = 512
"""Plans that are remembered, over all layers, settings and lengths."""
MOST_KINDS = 512
MOST_TRIALS = 12
"""Trials of one call until it moves whole."""
MOST_SHORT = 3
"""Trials of one layer that find no memory until its call moves whole for good."""


@dataclasses.dataclass(frozen=True, slots=True)
class RefusedPlan:
    """A log whose call moves whole."""

    reason: str | None
    """None: its cut says that this is cheapest."""
    wrong: frozenset[int] = frozenset()
    for_now: bool = False
    """The next call is tried out again."""


Found = Plan | RefusedPlan


class Plans:
    """Plans of one manager's layers.

    Args:
        engine: packs what is kept.
        ranks: the ranks that layers talk to.
        bans: layer -> operators that the user keeps or repeats by name.
        rates: of a device that is not here: replays take what follows from them, and are not tried out.
    """

    def __init__(
        self,
        engine: Engine,
        ranks: AgreeingRanks,
        bans: Mapping[str, Bans],
        *,
        rates: Rates | None = None,
    ) -> None:
        self._engine = engine
        self._ranks = ranks
        self._bans = bans
        self._rates = rates
        self.trials = Trials(engine, rates=rates)
        self._agreements = Agreements(ranks)
        self._found: LRU[tuple[Any, ...], Found] = LRU(MOST_PLANS)
        self._tapes: LRU[tuple[Any, ...], Tape] = LRU(MOST_PLANS)
        self._opaque: LRU[tuple[Any, ...], frozenset[int]] = LRU(MOST_PLANS)
        self._holds: LRU[tuple[Any, ...], Holds] = LRU(MOST_KINDS)
        self._recorded: LRU[tuple[Any, ...], bool] = LRU(MOST_KINDS)
        """Kinds, without their setting, of calls that have been recorded."""
        self._alike_calls = PlanReuse()
        self._last: dict[str, tuple[str, Ended, frozenset[int], Setting]] = {}  # layer -> key of its last call's plan
        self._others_nbytes: dict[str, int] = {}
        """Layer -> bytes that autograd saved in it and that its tape does not have."""
        self._latest: dict[str, Found] = {}
        """Layer -> plan of its last call."""
        self._short: dict[str, int] = {}
        """Layer -> trials that found no memory."""
        self._written_unseen: set[str] = set()
        """Layers in which something unseen has written: each of their calls is recorded with checksums."""
        self._counted: LRU[tuple[Any, ...], LayerCosts] = LRU(MOST_PLANS)
        """Costs of a layer's points by its plan's key; used with the plan, so that both are forgotten together."""
        self._alike: LRU[tuple[Any, ...], LayerCosts] = LRU(MOST_PLANS)
        """Costs by what calls share whose rows are routed to other experts: these are not counted again."""
        self._least: LRU[tuple[Any, ...], tuple[int, ...]] = LRU(MOST_PLANS)
        """Sizes of what a call moves at SAVE_INPUT, by its log and what was agreed on it."""
        self._costs: dict[str, LayerCosts] = {}
        """Layer -> costs of its last call of which any are known."""

    def costs(self) -> list[LayerCosts]:
        """Bytes and seconds of each level in the last call, for layers of which a replay has passed its trial."""
        return list(self._costs.values())

    def moved_nbytes(self, layer: str, setting: Setting) -> list[int]:
        """Bytes of the storages that a layer's last recorded call would have moved at a setting, in about their order."""
        last = self.last(layer)
        if last is None:
            return []
        choice = last[0].for_next
        if setting is Level.SAVE_ALL:
            moved = {*choice.wanted, *choice.stuck}
        else:
            moved = choice.moved_by(choice.plan(choice.cut(setting)))
        others = self._others_nbytes.get(layer, 0)
        return [*(choice.tape.storages[storage][1] for storage in sorted(moved)), *([others] if others else [])]

    def least_nbytes(self, call: OpenCall, recorded: RecordedCall) -> tuple[int, ...]:
        """Bytes of the storages that a call that has just ended moves at SAVE_INPUT, by its cut; nothing is tried out."""
        layer, opaque = call.layer.name, self._opaque_in(call, recorded)
        shared = self._agreements.shared(
            layer, (Level.SAVE_INPUT, call.recorder.values[0][2]), call.recorder.collectives
        )
        key = (layer, recorded.ended, opaque, shared.agreed)
        known = self._least.get(key)
        if known is None:
            case = self._case(call, recorded, Level.SAVE_INPUT, opaque)
            plan = self._plan(case, case.choice.under(shared, self.trials.wrong_of(case)))
            moved = case.choice.moved_by(plan) if plan is not None else {*recorded.wanted, *recorded.stuck}
            sizes = [case.choice.tape.storages[storage][1] for storage in sorted(moved)]
            known = self._least[key] = tuple(filter(None, (*sizes, recorded.others_nbytes)))
        return known

    def expected(self, layer: str, kind: tuple[Any, ...], setting: Setting) -> tuple[Ended | None, Holds | None]:
        """How the layer's last call ended, and what a call of this kind holds for its plan; None where nothing is known.

        At a setting that is new, it holds what the last call's plan at this setting would have kept.
        """
        last, holds = self._last.get(layer), self._holds.get(kind)
        if last is not None and holds is None:
            found = self.last(layer)
            assert found is not None
            choice = found[0].for_next
            try:
                plan = choice.plan(choice.cut(setting))
            except ValueError:
                return last[1], None
            holds = self._holds[kind] = plan.holds
        return None if last is None else last[1], holds

    def has_recorded(self, kind: tuple[Any, ...], setting: Setting) -> bool:
        """True if a call of this kind, at any setting, has been recorded: how it treats its input and memory is known."""
        return _without(setting, kind) in self._recorded

    def is_written_unseen(self, layer: str) -> bool:
        """True for a layer in which something unseen has written: each of its calls is recorded with checksums."""
        return layer in self._written_unseen

    def last(self, layer: str) -> tuple[Choice, Setting, Found | None] | None:
        """What the last recorded call of a layer left to choose, its setting, and what was found for it."""
        key = self._last.get(layer)
        if key is None:
            return None
        _, (log, sources, wanted, stuck), opaque, setting = key
        choice = Choice(self._tape_of(log, opaque), sources, wanted, stuck, self._bans.get(layer, NO_BANS))
        found = self._latest.get(layer)
        if isinstance(found, (Plan, RefusedPlan)):
            choice = dataclasses.replace(choice, never=found.wrong)
        return choice, setting, found

    def of(self, call: OpenCall, recorded: RecordedCall, setting: Setting) -> tuple[Found, bool]:
        """The plan of a call that has just ended, and whether other ranks take part in its replay.

        A log that is new, or that other ranks have not agreed on, is tried out at once.

        Raises:
            SwapError: other ranks repeat a collective that this one cannot repeat, of which they know nothing.
        """
        layer = call.layer.name
        self._recorded[_without(call.setting, call.kind)] = True
        opaque = self._opaque_in(call, recorded)
        shared = self._agreements.shared(layer, (setting, call.recorder.values[0][2]), call.recorder.collectives)
        # Each layer has its own: what the dispatcher does not see may differ between layers of one log.
        key = (layer, recorded.ended, opaque, setting)
        self._last[layer] = key
        found, counted = self._found.get(key), self._counted.get(key)
        if found is None or not shared.allow(_steps_of(found)):
            alike = self._alike_calls.plan_of(call, recorded, setting, opaque)
            found, counted = (None, None) if alike is None else alike
        if call.untried is not None and found is not None and not self._passes_again(call, recorded, found, key):
            self._alike_calls.drop(call, recorded, setting, opaque)
            found = counted = None
        if found is None or not shared.allow(_steps_of(found)):
            case = self._case(call, recorded, setting, opaque)
            trials = self.trials.run
            found, shared = self._made(case, shared)
            tries_again = isinstance(found, RefusedPlan) and found.for_now
            if self.trials.run != trials and not self.trials.proves(call):
                tries_again = True
            if not tries_again:
                self._found[key] = found
            if call.kind not in self._holds or self.trials.run != trials:
                following = self._next(case, shared, found)
                self._holds[call.kind] = {} if isinstance(following, RefusedPlan) else following.holds
            if layer in self.trials.unit_s and not isinstance(found, RefusedPlan):
                alike = (layer, call.recorder.values[0][2], opaque, *case.operators)
                counted = self._alike.get(alike)
                if counted is None:
                    counted = self._alike[alike] = self._counts(case)
                self._counted[key] = counted
            if not tries_again:
                self._alike_calls.add(call, recorded, setting, opaque, case.tape, found, counted)
        self._latest[layer] = found
        if counted is not None:
            self._costs[layer] = counted
        return found, any(shared.repeated_by(_steps_of(found)))

    def _case(self, call: OpenCall, recorded: RecordedCall, setting: Setting, opaque: frozenset[int]) -> Case:
        tape, bans = self._tape_of(recorded.key, opaque), self._bans.get(call.layer.name, NO_BANS)
        choice = Choice(tape, recorded.sources, recorded.wanted, recorded.stuck, bans)
        return Case(call, recorded, setting, choice, self._engine.backend.current_stream())

    def _tape_of(self, log: Key, opaque: frozenset[int]) -> Tape:
        tape = self._tapes.get((log, opaque))
        if tape is None:
            tape, device = Tape(log, opaque), self._rates or self._engine.backend.kernels
            tape.costs = step_costs(tape, device)
            self._tapes[log, opaque] = tape  # whole: an interruption leaves no tape without costs behind
        return tape

    def _opaque_in(self, call: OpenCall, recorded: RecordedCall) -> frozenset[int]:
        """Storages that something unseen writes into, as a call of this log showed that was recorded with checksums."""
        key = (call.layer.name, recorded.key)
        known, seen = self._opaque.get(key) or frozenset(), call.recorder.changed_unseen()
        if not seen <= known:
            self._warn_of(call, "something that torch does not see has begun to write into its tensors")
            known = self._opaque[key] = known.union(seen)
            self._written_unseen.add(call.layer.name)
        return known

    def _passes_again(self, call: OpenCall, recorded: RecordedCall, found: Found, key: tuple[Any, ...]) -> bool:
        """Tries a found plan again; True also where it cannot be: no room, other ranks, a device that is not here."""
        _, _, opaque, setting = key
        if isinstance(found, RefusedPlan) or call.recorder.collectives or self._rates is not None:
            return True
        unlike = self.trials.again(self._case(call, recorded, setting, opaque), found)
        if unlike is None:
            return True
        self._warn_of(call, str(unlike))
        return False

    def _warn_of(self, call: OpenCall, what: str) -> None:
        """Warns of the calls since the last one that was tried: their replays may have been wrong."""
        if call.untried is not None and call.untried > 1:
            warn_user(
                f"{call.layer.name}: {what}. Gradients of this layer's {call.untried - 1} calls before this one may be "
                "wrong; it is planned anew from here on. Go back to a checkpoint before them; memo.offload(verify=True) "
                "checks each call"
            )

    def _made(self, case: Case, shared: Shared) -> tuple[Found, Shared]:
        """The plan of a new log, or why there is none, and what was agreed with other ranks.

        Raises:
            SwapError: other ranks repeat a collective that this one cannot repeat, of which they know nothing.
        """
        if shared.numbers and shared.agreed is None:
            plan, shared = self._settled(case, shared)
            if plan is not None:
                return plan, shared
        if not shared.always:
            return self._tried(case, shared), shared
        assert shared.agreed is not None
        wrong, opaque = shared.agreed.known_of(case.tape)
        case = self._case(case.call, case.recorded, case.setting, opaque)
        plan = self._plan(case, case.choice.under(shared, wrong))
        if plan is None:
            raise SwapError(
                f"{case.layer} was to be recomputed together with other ranks, and now must not be: a collective"
                " that they repeat cannot be repeated here; exclude it with alpha=1"
            )
        return plan, shared

    def _next(self, case: Case, shared: Shared, found: Found) -> Found:
        """The plan that the next call is recorded for: as if all that this one made could be kept."""
        choice = case.choice.for_next.under(shared)
        try:
            cut = choice.cut(case.setting)
        except ValueError:
            return found
        return choice.plan(cut) if cut.replayed else found

    def _plan(self, case: Case, choice: Choice) -> Plan | None:
        """A plan that repeats the collectives that were agreed on; None if there is none."""
        try:
            plan = choice.plan(choice.cut(case.setting))
        except ValueError:
            return None
        return plan if plan.wanted else None

    def _tried(self, case: Case, shared: Shared) -> Plan | RefusedPlan:
        """A plan that other ranks have no part in, tried out; or why there is none."""
        reason = None
        for _ in range(MOST_TRIALS):
            wrong = self.trials.wrong_of(case)
            choice = case.choice.under(shared, wrong)
            cut = choice.cut(case.setting)
            if not cut.replayed:
                return RefusedPlan(reason, wrong)
            plan = choice.plan(cut)
            if self.trials.may_skip(case, plan):
                return plan
            try:
                unlike = self.trials.unlike(case, plan)
            except torch.OutOfMemoryError:
                self._short[case.layer] = short = self._short.get(case.layer, 0) + 1
                reason = "there was no device memory to try its replay out"
                return RefusedPlan(reason, wrong, for_now=short < MOST_SHORT)
            if unlike is None:
                self.trials.passed(case, plan)
                return dataclasses.replace(plan, wrong=wrong) if wrong else plan
            reason = str(unlike)
            if unlike.step is None or case.call.has_released:
                return RefusedPlan(reason, wrong)
        return RefusedPlan(reason, self.trials.wrong_of(case))

    def _settled(self, case: Case, shared: Shared) -> tuple[Plan | None, Shared]:
        """Agrees with other ranks on the collectives of a new kind of call, and tries the plan out with them.

        All that decides here is exchanged, so that all ranks take the same way. A plan that repeats no collective is
        left to this rank alone.
        """
        wrong = self.trials.wrong_of(case)
        steps = case.tape.steps
        for _ in range(MOST_TRIALS):
            settled = self._agreements.settle(case.layer, shared, self._proposed(case, shared, wrong))
            plan = self._plan(case, case.choice.under(settled, wrong)) if settled.always else None
            if not self._ranks.all_have(case.layer, plan is not None):
                break
            assert plan is not None
            is_shown = self._ranks.all_have(case.layer, self.trials.may_skip(case, plan))
            unlike = None if is_shown else self.trials.unlike(case, plan)
            if self._ranks.all_have(case.layer, unlike is None):
                assert settled.agreed is not None
                if not is_shown:
                    self.trials.passed(case, plan)
                agreed = CollectiveAgreement(
                    repeats=settled.agreed.repeats,
                    operators=tuple(step.operator for step in steps),
                    wrong=wrong,
                    opaque=self._opaque_in(case.call, case.recorded),
                )
                return plan, self._agreements.add(case.layer, shared, agreed)
            if unlike is not None:
                wrong |= {step.number for step in steps} if unlike.step is None else {unlike.step}
        return None, self._agreements.add(case.layer, shared, CollectiveAgreement((False,) * len(shared.numbers)))

    def _proposed(self, case: Case, shared: Shared, wrong: Iterable[int]) -> tuple[bool, ...]:
        """Which collectives this rank would repeat, in this call and in the ones that are held for."""
        choice = case.choice.under(shared, wrong)
        cuts = [each.cut(case.setting) for each in (choice, choice.for_next)]
        return tuple(map(all, zip(*(shared.repeated_by(cut.replayed) for cut in cuts), strict=True)))

    # -- costs

    def _counts(self, case: Case) -> LayerCosts:
        """Costs of the curve's points at this call's sizes."""
        each_s, choice = self.trials.unit_s[case.layer], case.choice.for_next
        saved = set(case.recorded.saved)
        others = self._others_nbytes[case.layer] = case.recorded.others_nbytes
        size = case.call.recorder.values[0][2]  # of the hidden states; of their memory a view may have been saved
        return LayerCosts(
            layer=case.layer,
            tokens=max(1, size[-2] if len(size) > 1 else 1),
            points=tuple(
                PointCost(
                    name=point,
                    saved_bytes=others + cut.keep_cost // 8,
                    recompute_s=each_s * cut.replay_cost,
                    beside_bytes=choice.beside_nbytes(cut, saved),
                    **self._beside(choice.plan(cut), in_parts=point == Level.SAVE_ATTENTION.point),
                )
                for point, cut in choice.points().items()
            ),
            sizes=tuple(case.tape.storages[storage][1] for storage in case.tape.saved_storages),
        )

    def _beside(self, plan: Plan, *, in_parts: bool) -> dict[str, int]:
        """Bytes that a recompute holds, and saved bytes that are absent in backward while it runs in parts."""
        held, absent = held_and_absent(plan) if in_parts else (plan.held_bytes, 0)
        return {"held_bytes": held, "absent_bytes": absent}


def _without(setting: Setting, kind: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(part for part in kind if part is not setting)


def _steps_of(found: Found) -> Sequence[int] | frozenset[int]:
    """Numbers of the steps that run again."""
    return () if isinstance(found, RefusedPlan) else found.steps
