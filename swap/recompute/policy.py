"""Recompute of one manager's layers by their tapes: records each call, chooses what is kept, and has the rest replayed.

forward    the layer runs once under a Recorder
its end    the plan of its log is looked up, or made
backward   the engine asks for a storage that no tier has; its Replay runs the plan's steps
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.autograd import forward_ad
from torch.utils.weak import WeakIdKeyDictionary

from memo.errors import SwapError, UsageError
from memo.lru import LRU
from memo.swap.engine.handles import Guard, KeptTensor, Sharded
from memo.swap.engine.tier_choice import WhenFull
from memo.swap.generators import leaves_generators
from memo.swap.layers import Layer, is_gathered_whole, is_transformed
from memo.swap.levels import LayerCosts, Level, Setting, setting_of
from memo.swap.recompute.explain import explain
from memo.swap.recompute.plans import Plans, RefusedPlan
from memo.swap.recompute.rank_agreement import AgreeingRanks, CollectiveRecorder
from memo.swap.recompute.recorded_call import OpenCall, RecordedCall
from memo.swap.recompute.tape.bans import Bans
from memo.swap.recompute.tape.checksums import Checksums
from memo.swap.recompute.tape.recorder import Recorder, aside, is_recordable, leave_mode
from memo.swap.tensor_kinds import has_storage, is_sharded, layer_input, local_part, tensors_within
from memo.torch_private import top_saved_tensors_default_hooks
from memo.warn_user import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable

    from memo.swap.engine.engine import Engine
    from memo.swap.engine.handles import Handle
    from memo.swap.engine.layer_calls import Group
    from memo.swap.engine.saved_storage import SavedStorage
    from memo.swap.recompute.explanation import LayerExplanation
    from memo.swap.recompute.tape.replay import Replay
    from memo.swap.recompute.tape.work import Rates

MOST_WARNED = 256
MOST_COUNTED = 512
"""Layers and settings whose calls are counted."""
TRIED_AGAIN = (2, *(10**power for power in range(1, 9)))
"""Calls of a layer at one setting that are recorded with checksums, and whose recompute is tried, once more."""
MOST_OPERATORS = 20_000
"""Operators of a layer whose recompute is planned: some seconds on a slow host."""


class RecomputePolicy:
    """Recompute policy of one manager's layers.

    Args:
        engine: packs what moves; its `pack` is replaced by this object's while a forward runs.
        default: setting of layers that `choose` has not named.
        bans: layer -> operators that the user keeps or repeats by name.
        verify: compares by checksums what replays read with what it was in the forward.
        rates: of a device that is not here, from which the costs of replays then follow.
    """

    def __init__(
        self,
        engine: Engine,
        default: Setting,
        *,
        bans: Mapping[str, Bans] | None = None,
        verify: bool = False,
        rates: Rates | None = None,
    ) -> None:
        self.default = setting_of(default)
        self.refused: dict[str, str] = {}
        """Layer -> reason, for layers that move whole tensors though they should not."""
        self.repeated: dict[str, str] = {}
        """Layer -> reason, for layers of which all is repeated for lack of room."""
        self.recomputed: set[str] = set()
        """Layers of which something is recomputed."""
        self._engine = engine
        self._chosen: dict[str, Setting] = {}
        self._bans = dict(bans or {})
        self._verify = verify
        self._open: OpenCall | None = None
        self._position: dict[str, int] = {}
        self._warned: LRU[str, bool] = LRU(MOST_WARNED)
        self._inputs: dict[str, Guard] = {}
        """Layer -> the input of its last call, which was copied to find out if the program changes it after the layer."""
        self._changing: set[str] = set()
        """Layers whose input the program changes after them, though autograd does not save it: `x += layer(x)`."""
        self.tries_again = True
        """False while steps are measured: a second trial would be measured, too."""
        self._calls: LRU[tuple[str, Setting], tuple[int, int]] = LRU(MOST_COUNTED)
        """Number of the last call of a layer at a setting, and of the last one that was tried."""
        self._long: dict[str, str] = {}
        """Layer -> reason, for layers of more operators than are planned, which are not recorded again."""
        self._ranks = AgreeingRanks(engine.backend.device)
        self._plans = Plans(engine, self._ranks, self._bans, rates=rates)
        self._has_bytes = rates is None
        """False for a device that is not here: nothing unseen changes its tensors."""
        self._gathered: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Parameters that had no memory before the first forward: something else gathers them, and releases them."""
        self._hearing: CollectiveRecorder | None = None

    def pack(self, tensor: torch.Tensor) -> Handle | KeptTensor | Sharded:
        """The engine's hook for a tensor that autograd saves, which a recorder of the layer is told of."""
        now = self._open
        if now is None:
            return self._engine.pack(tensor)
        kind = type(tensor)
        if kind is torch.nn.Parameter:
            return self._engine.pack(tensor)
        if kind is not torch.Tensor:
            local_part(tensor)  # that it waits for a collective is an operator of the layer
        with aside(now.recorder, tensor):
            now.recorder.save(tensor)
            return self._engine.pack(tensor)

    @property
    def trials_run(self) -> int:
        """Trials so far."""
        return self._plans.trials.run

    def keep_within(self, device_room: Callable[[], int]) -> None:
        """Sets what tells the bytes of the device's budget that are free: trials that can wait do not exceed them."""
        self._plans.trials.device_room = device_room

    @property
    def is_idle(self) -> bool:
        """True where all tensors move whole anyway."""
        return self._engine.when_full is not WhenFull.RECOMPUTE and all(
            setting is Level.SAVE_ALL for setting in (self.default, *self._chosen.values())
        )

    @property
    def described(self) -> str:
        """Text for reports."""
        return "by layer" if self._chosen else str(self.default)

    def choose(self, settings: Mapping[str, Setting]) -> None:
        """Sets per-layer settings from the next forward on; unnamed layers use the default. Clears refusals."""
        self._chosen = {name: setting_of(one) for name, one in settings.items()}
        self.refused.clear()
        self.repeated.clear()
        self.recomputed.clear()

    def costs(self) -> list[LayerCosts]:
        """Bytes and seconds of each level, for layers that have been recorded."""
        return self._plans.costs()

    def moved_nbytes(self, layer: str, setting: Setting) -> list[int]:
        """Bytes of the storages that a layer's last call would have moved whole at a setting, in the order of their saves.

        Empty for a layer of which no call was recorded.
        """
        return self._plans.moved_nbytes(layer, setting)

    def explain(self, layer: Layer) -> LayerExplanation:
        """Explains what the last recorded call of a layer keeps and replays, and what it could.

        Raises:
            UsageError: no call was recorded.
        """
        last = self._plans.last(layer.name)
        if last is None:
            raise UsageError(f"{layer.name} has no tape: {self._why_no_tape(layer.name)}")
        choice, setting, found = last
        is_whole = isinstance(found, RefusedPlan)
        return explain(layer, choice, setting, refused=self.refused.get(layer.name), is_whole=is_whole)

    def _why_no_tape(self, name: str) -> str:
        if name in self.refused:
            return f"it moves whole tensors: {self.refused[name]}"
        if self._chosen.get(name, self.default) is Level.SAVE_ALL and self._engine.when_full is not WhenFull.RECOMPUTE:
            return "all that it saves is offloaded, so its forward is not recorded"
        return "no forward of it has run in the manager yet"

    def begin_forwards(self, layers: Sequence[Layer]) -> None:
        """Prepares a forward of the managed layers."""
        self._ranks.begin_forward()
        new = [layer for layer in layers if layer.name not in self._position]
        self._gathered.update(_without_memory(new))
        self._position = {layer.name: position for position, layer in enumerate(layers)}

    @leaves_generators
    def begin(self, layer: Layer, group: Group, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Begins recording a layer's forward; `end` must follow."""
        if forward_ad._current_level >= 0 or is_transformed():
            return  # tangents are computed below the recorder; vmap's tensors have no bytes
        if self._open is not None:
            self._open.nested = True
            return
        if not torch.is_grad_enabled() or self._hearing is not None:
            return
        setting = self._chosen.get(layer.name, self.default)
        if self._ranks.talks(layer.name):
            for other in self._ranks.agree(self._told, _shape_of_input(args, kwargs)):
                self.refused.pop(other, None)
        elif self._ranks.several:
            self._hearing = self._ranks.listen(layer.name, _shape_of_input(args, kwargs))
        if self._hearing is not None:
            self._hearing.__enter__()  # type: ignore[no-untyped-call]
        if setting is Level.SAVE_ALL and not group.may_lack_room and self._engine.when_full is not WhenFull.RECOMPUTE:
            return
        hooks = top_saved_tensors_default_hooks(False)
        if hooks is None or hooks[1] != self._engine.unpack:
            return  # a checkpoint around the layer, say, is told of what autograd saves, and the engine is not
        reason = self._long.get(layer.name) or self._ranks.disagreed.get(layer.name)
        if reason is not None:
            self._refuse(layer.name, reason)
            return
        hidden = layer_input(args, kwargs)
        if hidden is None or not is_recordable(local_part(hidden)):
            return
        arguments = list(tensors_within((args, kwargs)))
        tensors = [part for tensor in arguments if is_recordable(part := local_part(tensor))]
        kind = (layer.name, type(layer.module), layer.module.training, setting, _described(tensors))
        last, holds = self._plans.expected(layer.name, kind, setting)
        is_new = holds is None or not self._plans.has_recorded(kind, setting)
        untried = self._count(layer.name, setting)
        is_checked = self._has_bytes and (is_new or untried is not None or self._plans.is_written_unseen(layer.name))
        recorder = Recorder(
            local_part(hidden),
            tensors,
            holds=holds,
            checksums=Checksums() if is_checked else None,
            here=self._engine.backend.current_stream,
            all_bits=self._ranks.talks(layer.name),
            expected=None if last is None else last.key,
        )
        for tensor in arguments:
            if type(tensor) is not torch.Tensor and tensor is not hidden and is_sharded(tensor):
                recorder.sharded[ref(local_part(tensor).untyped_storage())] = tensor
        guard = self._inputs.pop(layer.name, None)
        if guard is not None and guard.is_changed:
            self._changing.add(layer.name)
        copies = is_new or layer.name in self._changing
        self._open = OpenCall(
            layer,
            group,
            recorder,
            setting,
            kind,
            hidden,
            last,
            copies_input=copies,
            verify=self._verify,
            untried=untried,
        )
        group.held = True
        recorder.__enter__()

    def _count(self, layer: str, setting: Setting) -> int | None:
        """Counts a call. Returns the calls since the last one that was tried, if this one is tried again; else None."""
        before, tried = self._calls.get((layer, setting)) or (0, 0)
        number = before + 1
        is_tried = number == 1 or self._verify or (self.tries_again and number in TRIED_AGAIN)
        self._calls[layer, setting] = number, number if is_tried else tried
        return number - tried if is_tried and tried else None

    @leaves_generators
    def end(self, group: Group, output: Any) -> None:
        """Ends the recording of a layer's forward, and hands its saved tensors to the engine."""
        call = self._open
        if call is not None:
            if call.group is not group:
                return
            call.recorder.__exit__(None, None, None)
            self._open = None
        replays: Mapping[SavedStorage, Replay] = {}
        try:
            self._heard(group.module, output)
            if call is not None and output is not None:  # None after an exception: nothing is to come back
                replays = self._decide(call, output)
        finally:
            if call is not None:
                call = None  # and with it what the recorder holds: sources go one by one as they are copied out
                self._engine.copy_out_held(group, replays)

    @leaves_generators
    def end_forwards(self) -> None:
        """Ends a forward. A layer still open was interrupted where no hook is called (Ctrl-C); its tensors move whole."""
        if self._hearing is not None:
            leave_mode(self._hearing)
            self._hearing = None
        call = self._open
        if call is not None:
            call.recorder.__exit__(None, None, None)
            self._open = None
            self._engine.copy_out_held(call.group, {})

    def _heard(self, name: str, output: Any) -> None:
        """Stores the process groups recorded in the layer's first forward."""
        hearing = self._hearing
        if hearing is None or hearing.layer != name:
            return
        leave_mode(hearing)
        self._hearing = None
        if output is not None:
            self._ranks.heard(hearing, self._told(name))

    def _decide(self, call: OpenCall, output: Any) -> Mapping[SavedStorage, Replay]:
        name = call.layer.name
        if name in self._ranks.disagreed:
            self._refuse(name, self._ranks.disagreed[name])
            return {}
        if call.nested:
            self._refuse(name, "it contains another managed layer")
            return {}
        # A layer that talks to other ranks is planned all the same: they may repeat it.
        if call.recorder.operators > MOST_OPERATORS and not self._ranks.talks(name):
            reason = f"its forward runs more than {MOST_OPERATORS:,} operators, too many to plan a recompute of"
            self._long[name] = reason
            self._refuse(name, reason)
            return {}
        recorded = RecordedCall.of(call, output, self._engine, self._gathered)
        replays = self._planned(call, recorded, call.setting)
        if recorded.has_copied and name not in self._changing and has_storage(local_part(call.hidden)):
            self._inputs[name] = Guard(call.hidden)
        if replays and call.setting is Level.SAVE_INPUT:
            self.repeated[name] = "as chosen"
        return self._fitting(call, recorded, replays)

    def _fitting(
        self, call: OpenCall, recorded: RecordedCall, replays: Mapping[SavedStorage, Replay]
    ) -> Mapping[SavedStorage, Replay]:
        """`replays`, or where they have no room those of the least level, if the response to a full tier is to recompute.

        With STAY layers that run collectives are asked about while no plan places them: ranks have to agree at each call.
        """
        name, when_full = call.layer.name, self._engine.when_full
        stays = when_full is WhenFull.STAY
        placed = call.group.quota is not None or call.setting is Level.SAVE_INPUT
        if not (when_full is WhenFull.RECOMPUTE or (stays and not (placed and self._ranks.talks(name)))):
            return replays
        besides = [] if stays else self._least_after(call, recorded)
        lacking = self._engine.lacking_nbytes(call.group, replays, besides=besides)
        fits = self._ranks.all_have(name, not lacking)
        if fits or not self._ranks.all_have(name, not call.has_released):
            return replays
        least = self._planned(call, recorded, Level.SAVE_INPUT)
        if least:
            self.repeated[name] = reason = "no tier has room for it"
            if stays:
                self._engine.recomputes_for_room(call.group, lacking)
            else:
                self._warn(reason, f"{name} is recomputed whole in backward, attention too: {reason}")
        return least or replays

    def _least_after(self, call: OpenCall, recorded: RecordedCall) -> list[int]:
        """Bytes that the layers after this one need at least: each as much as this one would move when recomputed whole.

        That is its input, and what no replay makes again: results of collectives, and of functions declared as kept. It is
        not looked for where there is room for all that they save.
        """
        after = len(self._position) - 1 - self._position[call.layer.name]
        if self._engine.has_room_for(call.group, calls=1 + after):
            return []
        return [*self._plans.least_nbytes(call, recorded)] * after

    def _planned(self, call: OpenCall, recorded: RecordedCall, setting: Setting) -> dict[SavedStorage, Replay]:
        """The storages that are replayed instead of moved, each with its replay."""
        if setting is Level.SAVE_ALL:
            return {}
        name = call.layer.name
        try:
            found, together = self._plans.of(call, recorded, setting)
            replays = {} if isinstance(found, RefusedPlan) else recorded.replays(found, self._engine, together=together)
        except (AssertionError, LookupError) as fault:  # memo's own: nothing is lost yet
            at = traceback.extract_tb(fault.__traceback__)[-1]
            place = f"{type(fault).__name__} in {at.name}, {Path(at.filename).name}:{at.lineno}"
            if call.recorder.collectives:  # other ranks count on this one
                raise SwapError(
                    f"the replay of {name}, in which other ranks take part, could not be planned, by a fault of memo's "
                    f"({place}); give levels={{{name!r}: 1.0}} to memo.offload, which moves it whole, and please report it"
                ) from fault
            self._refuse(name, f"its replay could not be planned, by a fault of memo's ({place}); please report it")
            return {}
        if isinstance(found, RefusedPlan):
            if found.reason is not None:
                self._refuse(name, found.reason)
            return {}
        self.recomputed.add(name)
        self.refused.pop(name, None)
        return replays

    def _told(self, name: str) -> str:
        """Text of all settings of a layer on this rank, compared between ranks."""
        besides = ["to recompute when full"] if self._engine.when_full is WhenFull.RECOMPUTE else []
        bans = [str(self._bans[name])] if name in self._bans else []
        return ", ".join([str(self._chosen.get(name, self.default)), *bans, *besides])

    def _refuse(self, name: str, reason: str) -> None:
        self.refused[name] = reason
        self.recomputed.discard(name)
        self._warn(reason, f"{name} moves whole tensors: {reason}")

    def _warn(self, reason: str, message: str) -> None:
        """Warns once of each reason."""
        if reason not in self._warned:
            self._warned[reason] = True
            warn_user(message)


def _without_memory(layers: Sequence[Layer]) -> Mapping[torch.nn.Parameter, bool]:
    modules = (layer.module for layer in layers if not is_gathered_whole(layer.module))
    own = (parameter for module in modules for parameter in module.parameters())
    return {each: True for each in own if local_part(each).numel() == 0}


def _shape_of_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    hidden = layer_input(args, kwargs)
    return "no tensor" if hidden is None else str(tuple(hidden.shape))


def _described(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return tuple((tensor.size(), tensor.stride(), tensor.dtype, tensor.requires_grad) for tensor in tensors)
