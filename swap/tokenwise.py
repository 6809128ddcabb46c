"""Token-wise swap and recompute of unmodified layers: what MEMO does in its own layer, for any layer that allows it.

Of what a layer saves, its input and the results of attention move whole; of everything else, which each token's own
numbers determine, only the first tokens move and backward computes the rest again, in one run of the layer's forward that
never repeats attention. Two checks stand before a layer is treated so, and both must pass:

    proof     the token axis, carried through every operator of the call, reaches each saved tensor (noting)
    trial     at the first call of a kind the recompute runs at once, and what it gives is compared with what was saved

A layer that fails moves whole tensors, which is always right; it says so once, with the reason, and the report lists it.
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from memo.errors import MemoError, UsageError
from memo.swap.capture import layer_input
from memo.swap.noting import Noting, Slot
from memo.swap.partial import Partial
from memo.swap.replay import Argument, LayerCall, Precision, Wanted
from memo.swap.tokenrules import Unproven, tensors_in
from memo.swap.tokens import Axis, Mark, layout_of_tail, rows_of

if TYPE_CHECKING:
    from memo.swap.engine import Engine
    from memo.swap.layers import Layer
    from memo.swap.saved import Group, Handle, Kept, SavedStorage, Sharded

__all__ = ["BOUND", "TokenWise", "tokens_kept"]

# Largest accepted root-mean-square difference between a recomputed and a saved tensor, in units of the type's epsilon and
# of the tensor's own root mean square. A matrix product of another height may run through another kernel, which adds in
# another order: one rounding of the result in half precision, a few in single and double. Wrong tokens differ by about 1.
BOUND = {torch.float64: 16.0, torch.float32: 16.0, torch.bfloat16: 1.0, torch.float16: 1.0}

# Long sequences are divided at a multiple of this, which is a multiple of every matrix kernel's tile: a product over part
# of the rows then runs as the whole one does.
TILE_TOKENS = 256
_LONG = 8 * TILE_TOKENS

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)


def tokens_kept(alpha: float, tokens: int) -> int:
    """How many of `tokens` tokens move rather than being computed again."""
    kept = int(alpha * tokens)
    return kept // TILE_TOKENS * TILE_TOKENS if tokens >= _LONG and kept < tokens else kept


class TokenWise:
    """The layers of one manager. `alpha` is the fraction of the tokens that moves."""

    def __init__(self, engine: Engine, alpha: float) -> None:
        if not 0.0 <= alpha <= 1.0:
            raise UsageError(f"alpha: {alpha} is no fraction; give a number from 0 (recompute all) to 1 (move all)")
        self.alpha = alpha
        self.refused: dict[str, str] = {}
        """Layers that move whole tensors, and why."""
        self.deviation: dict[str, float] = {}
        """Accepted layers, and the largest difference their trial found (0: equal bit for bit), in units of BOUND."""
        self._engine = engine
        self._open: _Watch | None = None
        self._unsuited: set[str] = set()
        self._verdicts: dict[tuple[Any, ...], str | None] = {}
        self._warned: set[str] = set()
        engine_pack = engine.pack

        def pack(tensor: torch.Tensor) -> Handle | Kept | Sharded:
            watch = self._open
            if watch is None:
                return engine_pack(tensor)
            noting = watch.noting
            noting.asleep = True
            try:
                noting.save(tensor)
                return engine_pack(tensor)
            finally:
                noting.asleep = False

        self.pack = pack

    def look_at(self, layers: Sequence[Layer]) -> None:
        """Before a forward: what modules are made of decides already. Inside a compiled layer it could not be said."""
        if self.alpha == 1.0:
            return
        self._unsuited.clear()
        for layer in layers:
            reason = _unsuited(layer.module)
            if reason is not None:
                self._unsuited.add(layer.name)
                self._refuse(layer.name, reason)

    def begin(self, layer: Layer, group: Group, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A layer's forward begins; `end` must follow."""
        if torch.compiler.is_compiling() or layer.name in self._unsuited:
            return
        if self._open is not None:
            self._open.noting.reason = "it contains another managed layer"
            return
        if self.alpha == 1.0 or not torch.is_grad_enabled():
            return
        kind = _kind(layer, args, kwargs)
        reason = self._verdicts.get(kind)
        if reason is not None:
            return
        try:
            hidden = _check_arguments(args, kwargs)
        except Unproven as unproven:
            self._verdicts[kind] = str(unproven)
            self._refuse(layer.name, str(unproven))
            return
        first = tokens_kept(self.alpha, hidden.size(-2))
        if first == hidden.size(-2):
            return
        group.held = True
        self._open = _Watch(layer, group, args, kwargs, hidden, kind, Noting(hidden, args, kwargs, first=first))
        self._open.noting.__enter__()  # type: ignore[no-untyped-call]

    def end(self, group: Group, output: Any) -> None:
        """The layer's forward has ended; what it saved may move now."""
        watch = self._open
        if watch is None or watch.group is not group:
            return
        self._open = None
        watch.noting.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        parts: dict[SavedStorage, Partial] = {}
        try:
            if output is not None:  # None after an exception: nothing is to come back
                parts = self._decide(watch, output)
        except Unproven as unproven:
            self._verdicts[watch.kind] = str(unproven)
            self._refuse(watch.layer.name, str(unproven))
        finally:
            self._engine.settle(group, parts)

    def _decide(self, watch: _Watch, output: Any) -> dict[SavedStorage, Partial]:
        noting = watch.noting
        if noting.reason is not None:
            raise Unproven(noting.reason)
        if not noting.slots:
            return {}  # a checkpointed layer: others keep what it saves
        if watch.hidden._version != watch.version:
            raise Unproven("it changes its input in place")
        wanted = self._wanted(watch, output)
        if not wanted:
            return {}
        call = watch.call(self._engine)
        call.wanted += wanted
        trial = (*watch.kind, tuple(noting.operators), tuple((w.position, w.layout, w.rows) for w in wanted))
        if trial not in self._verdicts:
            self._try(watch.layer.name, call)
            self._verdicts[trial] = None
        parts: dict[SavedStorage, Partial] = {}
        for want in wanted:
            saved = want.saved()
            if saved is not None:
                parts[saved] = Partial(call, want.rows, tokens=call.tokens, first=call.first)
        return parts

    def _wanted(self, watch: _Watch, output: Any) -> list[Wanted]:
        """What can be computed again: each storage once, at the first place where autograd saved it."""
        noting, engine = watch.noting, self._engine
        whole = {tensor.untyped_storage() for tensor in tensors_in(tree_leaves(output))}
        whole |= {*noting.whole, watch.hidden.untyped_storage()}
        wanted: list[Wanted] = []
        seen: set[torch.UntypedStorage] = set()
        for position, slot in enumerate(noting.slots):
            storage = slot.tensor.untyped_storage()
            if storage in seen or storage in whole or noting.is_outside(slot.tensor):
                continue
            seen.add(storage)
            saved = engine.saved_as(storage)
            if saved is None or saved.group is not watch.group:
                continue  # too small to move, or another layer's
            if slot.meaning is Mark.MIXED:
                raise Unproven(noting.mixes)
            want = _want(position, slot, saved, noting)
            if want is not None:
                wanted.append(want)
        return wanted

    def _try(self, name: str, call: LayerCall) -> None:
        """Runs the recompute now, while what it should give is still there.

        Raises:
            Unproven: it gave something else, or failed.
        """
        random = torch.get_rng_state()
        worst = 0.0

        def compare(want: Wanted, tail: torch.Tensor) -> None:
            nonlocal worst
            saved = want.saved()
            assert saved is not None
            assert saved.source is not None
            part = Partial(call, want.rows, tokens=call.tokens, first=call.first)
            worst = max(worst, _difference(part.tail_of(saved.source), tail, want))

        try:
            call.recompute(compare)
        except (Unproven, MemoError) as error:
            raise Unproven(str(error)) from error
        except Exception as error:
            what = str(error).splitlines()[0] if str(error) else ""
            raise Unproven(f"it cannot run on a part of the tokens ({type(error).__name__}: {what})") from error
        if not torch.equal(random, torch.get_rng_state()):
            raise Unproven("its recompute draws random numbers")
        self.deviation[name] = max(worst, self.deviation.get(name, 0.0))

    def _refuse(self, name: str, reason: str) -> None:
        self.refused[name] = reason
        self.deviation.pop(name, None)
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(
                f"{name} moves whole tensors instead of a part of the tokens: {reason}", RuntimeWarning, stacklevel=2
            )


class _Watch:
    """One layer call while its forward runs."""

    def __init__(
        self,
        layer: Layer,
        group: Group,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        hidden: torch.Tensor,
        kind: tuple[Any, ...],
        noting: Noting,
    ) -> None:
        self.layer = layer
        self.group = group
        self.hidden = hidden
        self.version = hidden._version
        self.kind = kind
        self.noting = noting
        self._args = args
        self._kwargs = kwargs
        self._precision = Precision.now(hidden.device.type)

    def call(self, engine: Engine) -> LayerCall:
        """What a recompute of this call needs, with everything large in the engine's hands."""
        hidden = engine.pack(self.hidden)
        for answer in self.noting.answers:
            answer.store(engine)
        return LayerCall(
            engine,
            self.layer.module,
            self.layer.name,
            hidden=hidden,
            hidden_grad=self.hidden.requires_grad,
            arguments=_arguments(self._args, self._kwargs, self.hidden),
            answers=self.noting.answers,
            precision=self._precision,
            outside=self.noting.outside,
            first=self.noting.first,
            tokens=self.noting.tokens.tokens,
        )


def _arguments(
    args: Sequence[Any], kwargs: dict[str, Any], hidden: torch.Tensor
) -> Callable[[torch.Tensor, int], tuple[Sequence[Any], dict[str, Any]]]:
    """Makes the arguments of a recompute, given its hidden states. Holds no reference to those of the forward."""
    tokens = hidden.size(-2)

    def hold(value: Any) -> Any:
        if value is hidden:
            return _HIDDEN
        if _is_cache(value):
            return _Cache(type(value))
        return Argument(value, tokens) if isinstance(value, torch.Tensor) else value

    held = _map((tuple(args), kwargs), hold)

    def make(part: torch.Tensor, first: int) -> tuple[Sequence[Any], dict[str, Any]]:
        def give(value: Any) -> Any:
            if value is _HIDDEN:
                return part
            if isinstance(value, _Cache):
                return value.kind()
            return value.cut(first) if isinstance(value, Argument) else value

        made: tuple[Sequence[Any], dict[str, Any]] = _map(held, give)
        return made

    return make


_HIDDEN = object()


@dataclasses.dataclass(frozen=True, slots=True)
class _Cache:
    """A key/value cache, which training fills for nothing. A recompute gets a new one.

    One that was not empty gives attention more keys than there are tokens, and the proof fails.
    """

    kind: type


def _is_cache(value: object) -> bool:
    return type(value).__name__ == "DynamicCache" and type(value).__module__.startswith("transformers.")


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, change) for item in value))
    if type(value) in (tuple, list):
        return type(value)(_map(item, change) for item in value)
    if type(value) is dict:
        return {key: _map(item, change) for key, item in value.items()}
    return change(value)


def _want(position: int, slot: Slot, saved: SavedStorage, noting: Noting) -> Wanted | None:
    tensor, axis = slot.tensor, slot.meaning
    if not isinstance(axis, Axis) or saved.version != tensor._version:
        return None
    tokens = noting.tokens.tokens
    rows = rows_of(tensor, axis, tokens)
    if rows is None:
        return None
    return Wanted(
        position=position,
        saved=weakref.ref(saved),
        axis=axis,
        rows=rows,
        layout=layout_of_tail(tensor, axis, rows, noting.first, tokens),
        dtype=tensor.dtype,
    )


def _difference(saved: torch.Tensor, again: torch.Tensor, want: Wanted) -> float:
    """How far apart the bytes are, in units of BOUND; 0 when they are the same.

    Raises:
        Unproven: more than 1.
    """
    again = again.view(saved.shape)
    if torch.equal(saved, again):
        return 0.0
    if want.dtype not in BOUND:
        raise Unproven(f"a recomputed tensor of {want.dtype} differs from the saved one")
    ours, theirs = (t.contiguous().flatten().view(want.dtype).double() for t in (again, saved))
    scale = theirs.square().mean().sqrt()
    off = ((ours - theirs).square().mean().sqrt() / scale / torch.finfo(want.dtype).eps / BOUND[want.dtype]).item()
    if not off <= 1.0:  # also where it is no number
        raise Unproven(
            f"what it recomputes of a tensor of shape {want.layout.shape} and {want.dtype} differs from what it saved"
            f" by {off:.3g} times the bound"
        )
    return float(off)


def _kind(layer: Layer, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Calls of one kind are treated alike: same layer, same mode, same arguments but for the tensors' content."""
    device = next((tensor.device.type for tensor in tensors_in((args, kwargs))), "cpu")
    described = tuple(_describe(value) for value in tree_leaves((tuple(args), kwargs)))
    return layer.name, layer.module.training, Precision.now(device), described


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, tuple(value.shape), value.stride(), value.requires_grad
    return value if isinstance(value, _PLAIN) else type(value)


def _check_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """The layer's input. Raises Unproven for arguments that cannot be cut by tokens or given twice."""
    hidden = layer_input(args, kwargs)
    if hidden is None or type(hidden) is not torch.Tensor or hidden.layout is not torch.strided:
        raise Unproven("its input is no plain tensor")
    if hidden.ndim not in (2, 3) or hidden.size(-2) < 2 or not hidden.is_floating_point():
        raise Unproven(f"its input of shape {tuple(hidden.shape)} is not (batch, tokens, hidden)")

    def check(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
                raise Unproven(f"it is given a {type(value).__name__}")
        elif not isinstance(value, _PLAIN) and not _is_cache(value):
            raise Unproven(f"it is given a {type(value).__name__}, which a second run might change")
        return value

    _map((tuple(args), kwargs), check)
    return hidden


def _unsuited(module: torch.nn.Module) -> str | None:
    for child in module.modules():
        if child._compiled_call_impl is not None or hasattr(child, "_orig_mod"):
            return "it is compiled, and a part of the tokens may be fused in another way"
        if child is not module and type(child).__name__.startswith("FSDP"):
            return "parts of it are sharded on their own; shard whole layers"
    return None
