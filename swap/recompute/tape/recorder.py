"""Recorder of one layer call: writes each operator that runs below autograd into a log, while the layer's forward runs once.

A storage is numbered by a weak reference to its object, since addresses are reused. The recorder holds no tensor that
autograd does not save, but the layer's arguments, and those that the caller names beforehand in `holds`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.nn import Parameter

from memo.kernels import pack_mask
from memo.nested import closure_of, leaves_of
from memo.swap.dynamo import keep_from_dynamo
from memo.swap.generators import leaves_generators
from memo.swap.recompute.tape.log import (
    CARRIED,
    FALSE,
    HIDDEN,
    LIST,
    NAMED,
    OTHER,
    OUTPUTS,
    SAVED,
    TRUE,
    Function,
    Geometry,
    Holds,
    Key,
    LoggedCollective,
    Origin,
    Ref,
    Storage,
    word_of,
)
from memo.swap.recompute.tape.operators import Operator, apart, call, group_of, operator_of
from memo.swap.recompute.tape.settings import precision_of_products
from memo.swap.recompute.tape.uncounted_writes import uncounted_writes
from memo.swap.tensor_kinds import has_storage, is_sharded, local_part, tensors_within
from memo.torch_private import (
    DisableTorchDispatch,
    DispatchKey,
    TorchDispatchMode,
    TorchDispatchModeKey,
    disabled_torch_dispatch_impl,
    dispatch_tls_is_dispatch_key_excluded,
    dispatch_tls_set_dispatch_key_excluded,
    get_current_dispatch_mode,
    get_dispatch_mode,
    get_dispatch_stack_at,
    len_torch_dispatch_stack,
    pop_mode,
    push_mode,
)

if TYPE_CHECKING:
    from memo.swap.recompute.tape.checksums import Checksums

_PLAIN = (torch.Tensor, Parameter)
_OTHERS = (Origin.FOUND, Origin.GIVEN)
_CONSTANTS = frozenset({type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format})
_ADINPLACE = DispatchKey.ADInplaceOrView
_FAKE, _PROXY = TorchDispatchModeKey.FAKE, TorchDispatchModeKey.PROXY  # of what is traced, not run
_ATEN = torch.ops.aten
_DROPOUT = _ATEN.native_dropout.default
_DRAWS_BITS = frozenset({_ATEN.bernoulli_.float, _ATEN.bernoulli.default, _DROPOUT})
"""Random operators that give zeros and ones; of dropout's results the log has the mask alone."""


def _dropped(x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """What dropout makes of its mask, rounded as it does."""
    if x.device.type == "cpu":  # the mask is divided in the tensor's own type
        return x * (mask if p >= 1 else mask.to(x.dtype).div_(1 - p))
    out: torch.Tensor = _ATEN.native_dropout_backward.default(x, mask, 0.0 if p >= 1 else 1 / (1 - p))
    return out


_DROPPED = Function(_dropped, repeats=True)


def is_recordable(tensor: torch.Tensor) -> bool:
    """True for a strided tensor that its storage, offset, sizes, strides and type describe completely."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested)
        and not tensor._is_zerotensor()
    )


class Aside:
    """`with Aside(mode):` around the engine's own operators.

    Taken off the stack the mode costs them nothing. Where another mode lies above, it is put to sleep: some 10 us each.
    """

    __slots__ = ("_is_off", "_mode", "_was_asleep")

    def __init__(self, mode: Any) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._is_off = get_current_dispatch_mode() is self._mode
        if self._is_off:
            pop_mode()
        else:
            self._was_asleep = self._mode.asleep
            self._mode.asleep = True

    def __exit__(self, *exception: object) -> None:
        if self._is_off:
            push_mode(self._mode)
        else:
            self._mode.asleep = self._was_asleep


def aside(mode: Any, tensor: torch.Tensor) -> Any:
    """Suspends a mode for the engine's own operators on `tensor`, and on plain ones.

    Where no other mode is on the stack, and no subclass has its own way, all dispatch to Python is switched off: that
    takes an eighth of the time.
    """
    return DisableTorchDispatch() if type(tensor) is torch.Tensor and len_torch_dispatch_stack() == 1 else Aside(mode)


def leave_mode(mode: TorchDispatchMode) -> None:
    """Takes a mode off the stack of dispatch modes if an interruption has left it there, wherever. Idempotent."""
    stack = [get_dispatch_stack_at(at) for at in range(len_torch_dispatch_stack())]
    is_within = any(mode is other for other in stack)
    if not is_within and mode.old_dispatch_mode_flags:  # `Aside` has it, or torch's own way in or out was interrupted
        push_mode(mode)
        stack.append(mode)
        is_within = True
    if is_within:
        above = stack[next(at for at, other in enumerate(stack) if other is mode) + 1 :]
        for _ in above:
            pop_mode()
        if mode.old_dispatch_mode_flags:
            TorchDispatchMode.__exit__(mode, None, None, None)
        else:
            pop_mode()
        for other in above:
            push_mode(other)


class Recorder(TorchDispatchMode):
    """Dispatch mode around one forward of a layer.

    Args:
        hidden: local part of the layer's input.
        given: the local parts of its other tensor arguments.
        holds: what the plan that is expected to fit will keep; None for a call of which nothing is known, where bits are
            held of every random 0/1 mask.
        checksums: checks that memory changes by recorded operators alone; None: no check.
        here: the caller's compute stream.
        all_bits: holds all random 0/1 masks as bits, whatever `holds` says.
        expected: key of the layer's last call, which is taken as that of this one if it is equal.
    """

    supports_higher_order_operators = True
    asleep = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else every call goes through torch._disable_dynamo; `__enter__` does the same at no cost

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled under the mode: run operator by operator they would round differently."""
        return True

    def __init__(
        self,
        hidden: torch.Tensor,
        given: Sequence[torch.Tensor],
        *,
        holds: Holds | None = None,
        checksums: Checksums | None = None,
        here: Callable[[], int] = lambda: 0,
        all_bits: bool = False,
        expected: Key | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log: list[Any] = []
        self.values: list[Geometry] = []
        self.storages: list[Storage] = []
        self.carried: list[Any] = []
        """Floating-point numbers and objects among the operators' arguments, in order."""
        self.precision = precision_of_products()
        """In force where the call begins."""
        self.tensors: dict[int, torch.Tensor] = {}
        """Storage number -> a tensor over it, for arguments, parameters, what was found, saved or held."""
        self.bits: dict[int, torch.Tensor] = {}
        """Operator number -> the zeros and ones that it drew, one bit each."""
        self.streams: dict[int, int] = {}
        """Storage number -> the stream on which it was held; -1 - operator number for bits."""
        self.sharded: dict[ref[torch.UntypedStorage], torch.Tensor] = {}
        """Memory of a local part -> its DTensor, a parameter or an argument, which alone counts changes of the whole."""
        self.lent: set[int] = set()
        """Storages that the layer's call has made or found, and that a parameter had then: gathered for it, and released."""
        self.beside: dict[int, dict[int, torch.Tensor]] = {}
        """Storage number -> other parameters and tensors in the memory of its first one, which count changes themselves."""
        self.captured: dict[int, torch.Tensor] = {}
        """Tensors that functions which repeat read besides those among their arguments, by id."""
        self.collectives: list[LoggedCollective] = []
        """In order; a call with other numbers in the same log may have other groups."""
        self._within: list[str] | None = None  # groups of the function of the program that runs now
        self._suspects: list[tuple[int, torch.Tensor]] = []
        self._counts: dict[tuple[int, int], int] = {}  # (storage number, id of a view's base) -> version
        self._miscounted: set[int] = set()  # storages whose version moved on without an operator that was recorded
        self._written: set[int] = set()  # storages that other layers may read
        self._numbers: dict[ref[torch.UntypedStorage], int] = {}
        self._by_geometry: dict[Geometry, Ref] = {}
        self._roots: dict[int, dict[int, torch.Tensor]] = {}
        """Storage that the call did not make -> bases of views that were read, by id."""
        self._holds = holds
        self._expected = expected
        self._here = here
        self._all_bits = all_bits
        self._checksums = checksums
        self._count = 0
        self._exact = False
        self._has_complex = False  # only then a view may be conjugated or negated
        self._born(hidden, Origin.INPUT)
        for tensor in given:
            number = self._numbers.get(ref(tensor.untyped_storage()))
            if number is None:
                self._born(tensor, Origin.GIVEN)
            elif type(tensor) is not Parameter:
                self._counted(number, tensor)
        if checksums is not None:
            checksums.note([hidden, *given])

    def __enter__(self) -> Recorder:
        keep_from_dynamo(Recorder.__torch_dispatch__)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        """Idempotent, also where the call or an earlier exit was interrupted."""
        leave_mode(self)
        uncounted_writes.by_layer(self.tensors[number].untyped_storage() for number in self._written - self.lent)
        self._written.clear()

    @property
    def operators(self) -> int:
        """Number of operators so far."""
        return self._count

    @property
    def key(self) -> Key:
        """The call's log, values and storages."""
        expected = self._expected
        if expected is not None and expected.is_of(self.log, self.values, self.storages):
            return expected
        return Key(self.log, self.values, self.storages)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_traced = get_dispatch_mode(_FAKE) is not None or get_dispatch_mode(_PROXY) is not None
        if self.asleep or is_traced:
            operator = operator_of(func)
            if self._within is not None and operator.group_at is not None:
                self._within += _groups_of(operator, args)
            if is_traced:  # no kernel runs
                return func(*args, **(kwargs or {}))
            return call(operator, args, kwargs or {}, is_complex=self._has_complex)
        for kind in types:
            if kind not in _PLAIN and _dispatches(kind):
                self._note_sharded(args)
                return NotImplemented  # a DTensor, or the like, which comes back with its local tensors
        operator = operator_of(func)
        if operator.heeds_precision and precision_of_products() != self.precision:
            operator = apart(operator)
        if operator.group_at is not None and (groups := _groups_of(operator, args)):
            self.collectives.append(LoggedCollective(self._count, operator.func._schema.name, groups))
        words, carried = len(self.log), len(self.carried)
        try:
            if self._checksums is not None:
                return self._checked(operator, args, kwargs or {})
            self._arguments(operator, args, kwargs)
            if operator.writes:
                self._count_writes(operator, args, kwargs)
            if operator.calls_others or self._has_complex:
                out = call(operator, args, kwargs or {}, is_complex=self._has_complex)
            else:
                out = func(*args, **kwargs) if kwargs else func(*args)
        except BaseException:  # the layer may go on in another way
            del self.log[words:], self.carried[carried:]
            if self.collectives and self.collectives[-1].number == self._count:
                self.collectives.pop()
            raise
        if func is _DROPOUT:
            return self._dropout(operator, args, out)
        self._results(operator, out)
        return out

    def _note_sharded(self, args: Sequence[Any]) -> None:
        for value in args:
            if isinstance(value, Parameter) and is_sharded(value):
                self.sharded[ref(local_part(value).untyped_storage())] = value

    def _dropout(self, operator: Operator, args: tuple[Any, ...], out: Any) -> Any:
        """Notes a dropout as two operators: one draws a mask, and one that may be repeated applies it."""
        result, mask = out
        if args[2] is False:  # not training
            self._results(operator, out)
            return out
        self._results(operator, (None, mask))
        self._arguments(_DROPPED, (args[0], mask, args[1]), None)
        self._results(_DROPPED, result)
        return out

    def _checked(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls an operator between checksums of what it reads and what it has written."""
        checksums = self._checksums
        assert checksums is not None
        self._arguments(operator, args, kwargs)
        self._count_writes(operator, args, kwargs)
        given = [tensor for tensor in _tensors_in((args, kwargs)) if is_recordable(tensor)]
        # These may be given what a collective is still writing.
        is_view = getattr(operator.func, "is_view", False) or (
            operator.awaits and operator.func._schema.name.endswith("_wrap_tensor_autograd")
        )
        if not operator.reads_shapes and not operator.awaits and not is_view:
            for tensor in given:
                self._check(tensor)
        out = call(operator, args, kwargs, is_complex=self._has_complex)
        if operator.func is _DROPOUT:
            self._dropout(operator, args, out)
        else:
            self._results(operator, out)
        made = [tensor for tensor in _tensors_in(out) if is_recordable(tensor)]
        if operator.group_at is not None:
            checksums.forget([*made, *given] if operator.func.namespace == "c10d" else made)
        elif not operator.allocates and not is_view:
            checksums.note([*made, *given] if operator.writes else made)
        return out

    def _arguments(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        append, word = self.log.append, self._word
        append(operator)
        self._exact = operator.is_random  # whether it draws at all may depend on a number
        for value in args:
            kind = type(value)
            if kind is torch.Tensor or kind is Parameter:
                append(word(value))
            elif kind is int:
                append(value)
            else:
                self._argument(value)
        if kwargs:
            for name, value in kwargs.items():
                append(NAMED)
                append(name)
                self._argument(value)

    def _count_writes(self, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        for position, name in operator.writes:
            given = args[position] if position < len(args) else (kwargs or {}).get(name)
            for tensor in _tensors_in(given):
                number = self._numbers.get(ref(tensor.untyped_storage())) if has_storage(tensor) else None
                if number is not None:
                    self._count_changes(number, tensor, writes=1)
                    if self.storages[number][0] in _OTHERS:
                        self._written.add(number)

    def _argument(self, value: Any) -> None:
        kind, append = type(value), self.log.append
        if kind is int or kind in _CONSTANTS:
            append(value)
        elif kind is list or kind is tuple or kind is torch.Size:
            append(LIST)
            append(len(value))
            for item in value:
                if type(item) is int:
                    append(item)
                else:
                    self._argument(item)
        elif kind is bool:
            append(TRUE if value else FALSE)
        elif kind is float and self._exact:
            append(value)
        elif isinstance(value, torch.Tensor):
            append(self._word(value))
        else:
            append(CARRIED)
            append(kind)
            self.carried.append(value)

    def _word(self, tensor: torch.Tensor, *, made: bool = False) -> Any:
        """The word of a tensor, which gets a number if it has none."""
        if self._has_complex and (tensor.is_conj() or tensor.is_neg()):
            return HIDDEN
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a sparse tensor has none; steps that work with it are kept
            return HIDDEN
        number = self._numbers.get(ref(storage))
        if number is not None and not made:
            self._count_changes(number, tensor)
        if number is None:
            if not is_recordable(tensor):
                return HIDDEN
            number = self._born(
                tensor, Origin.MADE if made else Origin.PARAMETER if isinstance(tensor, Parameter) else Origin.FOUND
            )
            if made:
                self._count_changes(number, tensor)
        elif type(tensor) is Parameter and tensor is not self.tensors.get(number):
            if self.storages[number][0] is not Origin.PARAMETER:
                self.lent.add(number)
            else:
                self.beside.setdefault(number, {})[id(tensor)] = tensor
        elif number in self._roots and not made:  # `x.data` gets its version counter after the operator that makes it
            self._counted(number, tensor)
        geometry = (number, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
        word = self._by_geometry.get(geometry)
        return self._value(geometry) if word is None else word

    def _count_changes(self, number: int, tensor: torch.Tensor, writes: int = 0) -> None:
        """Notes a storage of which torch has counted more changes than were recorded, before `writes` more.

        By another thread, below a mode that is off, or by a kernel whose schema does not say that it writes.
        """
        try:
            version = tensor._version
        except RuntimeError:  # of an inference tensor, which counts none
            return
        base = tensor._base
        key = number, id(tensor if base is None else base)
        known = self._counts.get(key)
        if known != version or writes:
            if known is not None and version > known:
                self._miscounted.add(number)
            self._counts[key] = version + writes

    def _counted(self, number: int, tensor: torch.Tensor) -> None:
        """Notes a tensor over memory that is known, if it may have a version counter of its own, as `x.data` beside `x`."""
        roots, root = self._roots.setdefault(number, {}), tensor if tensor._base is None else tensor._base
        if id(root) not in roots:
            roots[id(root)] = root
            self.beside.setdefault(number, {})[id(root)] = _alias(tensor)

    def _value(self, geometry: Geometry) -> Ref:
        number = len(self.values)
        self._has_complex = self._has_complex or geometry[4].is_complex
        word = self._by_geometry[geometry] = word_of(number)
        self.values.append(geometry)
        return word

    def _born(self, tensor: torch.Tensor, birth: Origin) -> int:
        storage = tensor.untyped_storage()
        number = self._numbers[ref(storage)] = len(self.storages)
        maker = self._count if birth is Origin.MADE else -1
        self.storages.append((birth, storage.nbytes(), maker, tensor.device.type))
        if birth is Origin.PARAMETER:
            self.tensors[number] = tensor
        elif birth is not Origin.MADE:
            self.tensors[number] = _alias(tensor)
            root = tensor if tensor._base is None else tensor._base
            self._roots[number] = {id(root): root}
        if birth is not Origin.MADE:
            self._value((number, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype))
            if self._checksums is not None:
                self._checksums.note([tensor])
        return number

    def _results(self, operator: Any, out: Any) -> None:
        self.log.append(OUTPUTS)
        if type(out) is torch.Tensor:
            self.log.append(self._word(out, made=True))
        else:
            self._result(out)
        holds = self._holds
        if holds is None:
            if operator.func in _DRAWS_BITS:
                self._hold(out, (0,), as_bits=True)
        else:
            hold = holds.get(self._count)
            if hold is not None and hold[0] == operator:
                self._hold(out, hold[1], as_bits=hold[2])
            elif self._all_bits and operator.func in _DRAWS_BITS:
                self._hold(out, (0,), as_bits=True)
        self._count += 1

    def _result(self, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            self.log.append(self._word(out, made=True))
        elif isinstance(out, (tuple, list)):
            self.log.append(LIST)
            self.log.append(len(out))
            for item in out:
                self._result(item)
        else:
            self.log.append(None if out is None else OTHER)

    @leaves_generators
    def _hold(self, out: Any, positions: Sequence[int], *, as_bits: bool) -> None:
        results = _tensors_in(out)
        for position in positions:
            if position >= len(results):
                continue
            if as_bits:
                self.bits[self._count] = pack_mask(results[position])
                self.streams[-1 - self._count] = self._here()
            else:
                number = self._numbers.get(ref(results[position].untyped_storage()))
                if number is not None:
                    self.tensors[number] = _alias(results[position])
                    self.streams[number] = self._here()

    def save(self, tensor: torch.Tensor) -> None:
        """Notes a tensor that autograd saves. The mode must be suspended (`aside`)."""
        kind = type(tensor)
        if kind is Parameter:
            return
        local = tensor if kind is torch.Tensor else local_part(tensor)
        if not has_storage(local):
            return
        word = self._word(local)
        self.log.append(SAVED)
        self.log.append(word)
        if word is HIDDEN:
            return
        number = self.values[word.value][0]
        if self._checksums is not None:
            self._check(local)
        if self.storages[number][0] is not Origin.PARAMETER:
            base = local if local._base is None else local._base  # which a detached view has no more
            self.tensors[number] = base.detach()

    def _check(self, tensor: torch.Tensor) -> None:
        assert self._checksums is not None
        if tensor.is_meta:
            return
        differs = self._checksums.differs(tensor)
        if differs is not None:
            self._suspects.append((self._numbers[ref(tensor.untyped_storage())], differs))

    def changed_unseen(self) -> frozenset[int]:
        """Storages of the call that has ended into which something unseen has written. Waits for the device."""
        changed = set(self._miscounted)
        for number, tensor in self.tensors.items() if self._checksums is not None else ():
            birth, nbytes, *_ = self.storages[number]
            if birth is Origin.MADE and tensor.untyped_storage().nbytes() == nbytes:  # another layer may read it next
                self._check(tensor)
        for device in {differs.device for _, differs in self._suspects}:  # a GPU's attention has its seed on the host
            here = [(number, differs) for number, differs in self._suspects if differs.device == device]
            flags = torch.stack([differs for _, differs in here])
            if not torch.equal(flags, torch.zeros_like(flags)):  # which tensors without bytes answer too
                changed.update(number for (number, _), differs in zip(here, flags.tolist(), strict=True) if differs)
        return frozenset(changed)

    def number_of(self, storage: torch.UntypedStorage) -> int | None:
        """Number of a storage; None for one that the layer has not touched."""
        return self._numbers.get(ref(storage))

    # Functions of the program that are one operator.

    def memoized(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function whose results are kept (memo.memoize)."""
        return self._run(Function(function, repeats=False), function, args, kwargs)

    def recomputable(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function that may be called again (memo.recomputable)."""
        return self._run(Function(function, repeats=precision_of_products() == self.precision), function, args, kwargs)

    def _run(
        self, operator: Function, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.asleep:
            return function(*args, **kwargs)
        self._within, self.asleep = [], True
        try:
            out = function(*args, **kwargs)
        finally:
            groups, self._within, self.asleep = tuple(dict.fromkeys(self._within)), None, False
        operator.repeats = operator.repeats and isinstance(out, (torch.Tensor, list, tuple))
        if operator.repeats:
            found = _captured(function, args, kwargs)
            self.captured.update((id(each), each) for each in found if is_recordable(local_part(each)))
        with Aside(self):
            if groups:
                operator.talks = True
                self.collectives.append(LoggedCollective(self._count, repr(operator), groups))
            self._arguments(operator, _local_parts(args), {name: _local_parts(value) for name, value in kwargs.items()})
            self._results(operator, _local_parts(out))
            if self._checksums is not None:
                self._checksums.note([tensor for tensor in _tensors_in(_local_parts(out)) if has_storage(tensor)])
        return out


def _captured(function: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Tensors in a function's closure; parameters and buffers of modules there and among its arguments, as `self`."""
    closure = closure_of(function)
    yield from tensors_within(closure)
    for module in leaves_of((closure, args, kwargs)):
        if isinstance(module, torch.nn.Module):
            yield from itertools.chain(module.parameters(), module.buffers())


@leaves_generators
def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """A detached alias that shares the tensor's version counter, also below autograd.

    Never the tensor itself: autograd makes an operator's result the output of its node, which holds the saved tensors.
    """
    excluded = dispatch_tls_is_dispatch_key_excluded(_ADINPLACE)
    if not excluded:
        return tensor.detach()
    dispatch_tls_set_dispatch_key_excluded(_ADINPLACE, False)
    try:
        return tensor.detach()
    finally:
        dispatch_tls_set_dispatch_key_excluded(_ADINPLACE, True)


def _dispatches(kind: type) -> bool:
    """True for a subclass of tensors that handles operators itself."""
    own = getattr(kind, "__torch_dispatch__", None)
    return own is not None and own is not disabled_torch_dispatch_impl


def _groups_of(operator: Operator, args: Sequence[Any]) -> tuple[str, ...]:
    """Name of the process group of a collective; nothing for one rank alone."""
    group = group_of(operator.func, args)
    return () if group is None or group.size() < 2 else (group.group_name,)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors_in(item)]
    return []


def _local_parts(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return local_part(value)
    if isinstance(value, (tuple, list)):
        return [_local_parts(item) for item in value]
    if isinstance(value, dict):
        return [_local_parts(item) for item in value.values()]
    return value
