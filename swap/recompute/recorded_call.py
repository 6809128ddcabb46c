"""A recorded call: what the end of a layer's forward finds of it, and the replays that are made of that."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch

from memo.swap.engine.handles import Guard, Handle, KeptTensor, Sharded
from memo.swap.engine.saved_storage import content_of
from memo.swap.kept import is_kept
from memo.swap.layers import Layer, is_gathered_whole
from memo.swap.recompute.parts import parts_of
from memo.swap.recompute.tape.log import Function, Origin
from memo.swap.recompute.tape.plan import Kept, Plan, Sources
from memo.swap.recompute.tape.recorder import is_recordable
from memo.swap.recompute.tape.replay import Brought, Replay, Wanted
from memo.swap.tensor_kinds import is_sharded, local_part, tensors_within

if TYPE_CHECKING:
    from memo.swap.engine.engine import Engine
    from memo.swap.engine.handles import Packed
    from memo.swap.engine.layer_calls import Group
    from memo.swap.engine.saved_storage import SavedStorage
    from memo.swap.levels import Setting
    from memo.swap.recompute.tape.log import Key
    from memo.swap.recompute.tape.recorder import Recorder

SMALL = 512
"""Bytes of a constant that is copied, so that the program may change it later: one block of torch's allocator."""


class Ended(NamedTuple):
    """What of a call decides on its plan."""

    key: Key
    sources: Sources
    wanted: tuple[int, ...]
    """Saved storages that backward may replay."""
    stuck: tuple[int, ...]
    """Saved storages that move in any case."""


@dataclasses.dataclass(slots=True)
class OpenCall:
    """The call that is recorded now."""

    layer: Layer
    group: Group
    recorder: Recorder
    setting: Setting
    kind: tuple[Any, ...]
    hidden: torch.Tensor
    """The layer's input, as it was given."""
    last: Ended | None = None
    """The layer's last call, as which this one most often ends: objects that are the same are found faster."""
    copies_input: bool = False
    """A copy of the layer's input is kept where autograd does not save it: the program may change it after the layer."""
    verify: bool = False
    """What replays read is compared with what it was."""
    untried: int | None = None
    """Calls since the last one that was tried, this one included; None: this one is not tried again."""
    proves: bool | None = None
    """Whether a trial that passes says something of other calls; None: not asked yet."""
    nested: bool = False
    has_released: bool = False
    """A trial has taken saved tensors from the recorder, in the place of which there are equal ones: no other plan can be
    made of this call."""


class RecordedCall:
    """What the end of a recorded call finds: its log, what of it is still there, and what autograd saved."""

    def __init__(self) -> None:
        self.ended: Ended
        self.others_nbytes = 0
        """Bytes that autograd saved before they were changed in place: no tape has them, and they move at every level."""
        self.saved: dict[int, SavedStorage] = {}
        self.has_copied = False
        """A copy of the layer's input was packed in its place."""
        self._lent: set[int] = set()  # local parts of parameters and buffers
        self._returned: set[int] = set()  # held, and the program has them too and may change them
        self._others: set[int] = set()  # given or found, and not saved: nothing may count the program's changes of them
        self._coded: set[int] = set()  # saved by another layer, whose reload gives codes' values
        self._copies: dict[int, torch.Tensor] = {}  # of these three, and of the input
        self._call: OpenCall

    @classmethod
    def of(
        cls, call: OpenCall, output: Any, engine: Engine, gathered: Collection[torch.nn.Parameter] = ()
    ) -> RecordedCall:
        """Reads the recorder of a call that has just ended; `gathered` parameters may be gone before backward."""
        self, recorder = cls(), call.recorder
        self._call = call
        returned = [part for tensor in tensors_within(output) if is_recordable(part := local_part(tensor))]
        outputs = {recorder.number_of(part.untyped_storage()) for part in returned}
        like_given = _shapes_given(recorder)
        passed_on = {recorder.number_of(part.untyped_storage()) for part in returned if part.shape in like_given}
        free, saved, held = set(), set(), set()
        own: set[ref[torch.UntypedStorage]] | None = None
        storages, number_of, saved_as = recorder.storages, recorder.number_of, engine.saved_as
        for number, tensor in recorder.tensors.items():
            birth, nbytes, *_ = storages[number]
            storage = tensor.untyped_storage()
            if birth is Origin.PARAMETER:
                is_there = storage.nbytes() == nbytes and number_of(storage) == number
                if is_there and not (gathered and tensor in gathered):
                    free.add(number)
                continue
            known = saved_as(storage)
            if known is not None and known.group is call.group:
                if known.content == content_of(tensor):
                    saved.add(number)
                    self.saved[number] = known
                    if is_kept(storage):
                        free.add(number)
            elif storage.nbytes() != nbytes or (birth is Origin.GIVEN and tensor.is_inference()):
                continue  # freed by its owner, as sharded parameters are; or what nothing counts the changes of
            elif known is not None and known.coded is not None:
                held.add(number)
                self._coded.add(number)
            elif birth is Origin.GIVEN or known is not None or engine.stays(storage):
                free.add(number)
            else:
                if own is None and birth is Origin.FOUND:
                    own = {ref(local_part(tensor).untyped_storage()) for tensor in _own_tensors(call.layer.module)}
                if birth is Origin.FOUND and own is not None and ref(storage) in own:
                    free.add(number)
                    self._lent.add(number)
                else:
                    held.add(number)
                    if number in outputs:
                        self._returned.add(number)
        given = {number for number, (birth, *_) in enumerate(storages) if birth in (Origin.GIVEN, Origin.FOUND)}
        self._others = given - saved - recorder.lent
        lent = recorder.lent - free - saved
        passed_on |= free
        stuck = tuple(
            sorted(number for number in self.saved if number in passed_on or storages[number][0] is not Origin.MADE)
        )
        wanted = tuple(sorted(number for number in self.saved if number not in stuck))
        sources = Sources(
            free=frozenset(free),
            saved=frozenset(saved),
            held=frozenset(held - lent),
            bits=frozenset(recorder.bits),
            lent=frozenset(lent),
        )
        ended, last = Ended(recorder.key, sources, wanted, stuck), call.last
        self.ended = last if last is not None and last == ended else ended
        self.others_nbytes = max(0, call.group.nbytes - self.saved_nbytes)  # before replays add what they are given
        return self

    @property
    def key(self) -> Key:
        """Its log."""
        return self.ended.key

    @property
    def operators(self) -> Iterator[Any]:
        """Its log without sizes, which differ from call to call where rows are routed to experts."""
        return (word for word in self.key.log if type(word) is not int)

    @property
    def saved_nbytes(self) -> int:
        """Bytes of all storages that autograd saved."""
        return sum(saved.nbytes for saved in self.saved.values())

    @property
    def sources(self) -> Sources:
        """What of it can be kept."""
        return self.ended.sources

    @property
    def wanted(self) -> tuple[int, ...]:
        """Saved storages that backward may replay."""
        return self.ended.wanted

    @property
    def stuck(self) -> tuple[int, ...]:
        """Saved storages that move in any case."""
        return self.ended.stuck

    def replay(self, plan: Plan, engine: Engine) -> Replay:
        """The replay of this call by a plan, as a whole."""
        return self._replay(plan, self._kept_of(plan, engine), engine)

    def replays(self, plan: Plan, engine: Engine, *, together: bool = False) -> dict[SavedStorage, Replay]:
        """For each saved storage that a plan gives the replay that gives it, of the whole or of a part.

        Args:
            plan: of this call.
            engine: packs what the plan keeps.
            together: other ranks take part in its collectives.
        """
        kept = self._kept_of(plan, engine)
        collectives = frozenset(each.number for each in self._call.recorder.collectives) if together else frozenset()
        found: dict[SavedStorage, Replay] = {}
        for part in parts_of(plan, collectives):
            replay = self._replay(part, kept, engine, together=not collectives.isdisjoint(part.steps))
            found |= {self.saved[storage]: replay for storage in part.wanted}
            if part is not plan:
                for item in part.kept:
                    _note_reader(kept[item].packed, replay)
        return found

    def _kept_of(self, plan: Plan, engine: Engine) -> dict[Kept, Brought]:
        recorder = self._call.recorder
        return {
            item: self._brought(recorder.bits[item.bits_of], -1 - item.bits_of, engine)
            if item.bits_of >= 0
            else self._brought(recorder.tensors[item.storage], item.storage, engine)
            for item in plan.kept
        }

    def _replay(self, plan: Plan, kept: Mapping[Kept, Brought], engine: Engine, *, together: bool = False) -> Replay:
        recorder = self._call.recorder
        repeats_functions = any(isinstance(plan.tape.steps[step].operator, Function) for step in plan.steps)
        captured = recorder.captured.values() if repeats_functions else ()
        return Replay(
            engine,
            self._call.layer.name,
            plan,
            [*(kept[item] for item in plan.kept), *(self._lies_there(tensor) for tensor in captured)],
            carried=recorder.carried,
            precision=recorder.precision,
            wanted=[Wanted(self.saved[storage].hold, self.saved[storage].nbytes) for storage in plan.wanted],
            together=together,
            verify=self._call.verify,
        )

    def _brought(self, tensor: torch.Tensor, number: int, engine: Engine) -> Brought:
        """Packs what a plan keeps, on the stream on which it was held."""
        recorder, storage = self._call.recorder, tensor.untyped_storage()
        beside = tuple(map(Guard, recorder.beside.get(number, {}).values()))
        if number >= 0 and recorder.storages[number][0] is Origin.PARAMETER:
            return self._lies_there(tensor, beside)
        whole = recorder.sharded.get(ref(storage))
        if whole is not None:
            return Brought(Sharded(whole, KeptTensor(tensor)), storage.nbytes())
        if number in self._lent:
            return Brought(KeptTensor(tensor), storage.nbytes())
        home = recorder.streams.get(number)
        here = home is None or home == engine.backend.current_stream()
        given = tensor
        is_small = number in self._others and storage.nbytes() <= SMALL
        with nullcontext() if here or home is None else engine.backend.stream_context(home):
            is_input = number == 0 and tensor is recorder.tensors[0] and not self._is_saved(tensor, engine)
            is_copied = is_small or number in self._returned or number in self._coded
            if is_copied and tensor is recorder.tensors[number]:
                tensor, is_input = self._copied(tensor, number), False
            elif is_input and self._call.copies_input:
                tensor, is_input, self.has_copied = self._copied(tensor, number), False, True
            # A copy of what a plan has for nothing stays: it counts as nothing.
            packed: Packed = KeptTensor(tensor) if is_small and number in self.sources.free else engine.pack(tensor)
            if is_input and is_sharded(self._call.hidden) and not isinstance(packed, Sharded):
                packed = Sharded(self._call.hidden, packed)  # which alone counts changes of the whole
            return Brought(packed, tensor.untyped_storage().nbytes(), None, beside if tensor is given else ())

    def _lies_there(self, tensor: torch.Tensor, beside: tuple[Guard, ...] = ()) -> Brought:
        """A parameter, or what a function has captured: it stays, and must not change."""
        storage = local_part(tensor).untyped_storage()
        known = None if is_gathered_whole(self._call.layer.module) else ref(storage)
        return Brought(KeptTensor(tensor), storage.nbytes(), known, beside)

    def _is_saved(self, tensor: torch.Tensor, engine: Engine) -> bool:
        """True if autograd saves a tensor, or has saved it before, and so guards it."""
        known = engine.saved_as(tensor.untyped_storage())
        return known is not None and known.content == content_of(tensor)

    def _copied(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """What autograd did not save and the program has too, in memory that the program does not have."""
        copy = self._copies.get(number)
        if copy is None:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            geometry = tensor.storage_offset(), tensor.size(), tensor.stride()
            copy = self._copies[number] = tensor.new().set_(whole.clone().untyped_storage(), *geometry)
        return copy


def _note_reader(packed: Packed, replay: Replay) -> None:
    """Notes that a part reads something that autograd may have saved as well, and a backward may write into."""
    handle = packed.local if isinstance(packed, Sharded) else packed
    if isinstance(handle, Handle):
        handle.hold.saved.readers += (ref(replay),)


def _shapes_given(recorder: Recorder) -> set[torch.Size]:
    """Shapes of the arguments. The next layer is given a result of such a shape, and keeps it anyway.

    Not so what a layer shows besides, as the weights of its attention, which the program drops.
    """
    given = enumerate(recorder.storages)  # arguments are the first values, one for each storage
    return {recorder.values[number][2] for number, (birth, *_) in given if birth in (Origin.INPUT, Origin.GIVEN)}


def _own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for tensor in (*module.parameters(), *module.buffers()):
        if is_recordable(local_part(tensor)):
            yield tensor
