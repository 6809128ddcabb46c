"""Arguments of one layer call, held for its recompute: whole, or cut to some of its tokens.

Tensors are held by reference, since all layers share them, and are watched for changes; the layer's input is the
caller's to hold, for it moves. A key/value cache, which training fills for nothing, is replaced by a new one. Anything
else that a second run might change ends the attempt (`Unproven`). Of a sharded tensor (DTensor) it is this rank's part
that is held and cut, and the layer is given the whole that such parts make.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from memo.errors import ModifiedAfterSave
from memo.swap.engine.saved_storage import version_of
from memo.swap.recompute.axis.argument_axes import TokenDims
from memo.swap.recompute.axis.operator_rules import Unproven
from memo.swap.recompute.axis.token_axis import cut
from memo.swap.recompute.record.sharded_arguments import Placed, is_even
from memo.swap.tensor_kinds import is_sharded, layer_input, local_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "Arguments",
    "argument_tensors",
    "but_for_sizes",
    "check_arguments",
    "describe",
    "token_input",
]

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
_LEAVES = (torch.Tensor, type(None), bool, int, float, str)  # most of what a layer is given


class Arguments:
    """The arguments of one layer call; `hidden` among them is its input. Holds no reference to that one.

    `dims` says which of their dimensions run over the tokens.
    """

    def __init__(
        self, args: Sequence[Any], kwargs: dict[str, Any], hidden: torch.Tensor, dims: TokenDims | None = None
    ) -> None:
        known = dims or TokenDims(local_part(hidden).size(-2) if hidden.ndim > 1 else 0)
        positions = itertools.count()

        self._hidden = Placed.of(hidden)

        def hold(value: Any) -> Any:
            position = next(positions) if isinstance(value, torch.Tensor) else -1
            if value is hidden:
                return _HIDDEN
            if _is_cache(value):
                return _Cache(type(value))
            return _Held(value, position, known) if isinstance(value, torch.Tensor) else value

        self._held = _map((tuple(args), kwargs), hold)
        self._joined: tuple[int, ...] = ()

    def join(self, shards: Iterable[int]) -> None:
        """The layer gathers the tokens of so many ranks: arguments as long as those together are cut by them too."""
        self._joined = tuple(shards)

    def give(self, hidden: torch.Tensor, span: tuple[int, int] | None) -> tuple[Sequence[Any], dict[str, Any]]:
        """Rebuilds the arguments around another input, whole (`span` None) or cut to the tokens of `span`.

        Of a sharded input `hidden` is this rank's part.

        Raises:
            ModifiedAfterSave: one was changed in place meanwhile.
        """

        def give(value: Any) -> Any:
            if value is _HIDDEN:
                return _placed(hidden, self._hidden, hidden.requires_grad)
            if isinstance(value, _Cache):
                return value.fresh()
            if not isinstance(value, _Held):
                return value
            return value.whole() if span is None else value.cut(*span, self._joined)

        given: tuple[Sequence[Any], dict[str, Any]] = _map(self._held, give)
        return given

    def check(self) -> None:
        """Raises ModifiedAfterSave where an argument was changed in place."""

        def check(value: Any) -> None:
            if isinstance(value, _Held):
                value.check()

        _map(self._held, check)


class _Held:
    """A tensor that the layer was given."""

    __slots__ = ("_dims", "_position", "_requires_grad", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, position: int, dims: TokenDims) -> None:
        self._tensor = tensor.detach()
        self._version = version_of(tensor)
        self._requires_grad = tensor.requires_grad
        self._position = position
        self._dims = dims

    def check(self) -> None:
        if version_of(self._tensor) != self._version:
            raise ModifiedAfterSave(
                f"an argument of shape {tuple(self._tensor.shape)} of a layer was changed in place before backward"
                " recomputed the layer; use an out-of-place operation"
            )

    def whole(self) -> torch.Tensor:
        self.check()
        return _placed(local_part(self._tensor), Placed.of(self._tensor), self._requires_grad)

    def cut(self, first: int, stop: int, joined: Sequence[int]) -> torch.Tensor:
        self.check()
        part = local_part(self._tensor)
        axes = self._dims.axes(self._position, part, joined)
        for axis in axes:
            if len(axes) > 1 and axis.outer == 1:
                # A mask over pairs of tokens, which only attention sees, and attention is not computed again.
                part = part.narrow(axis.dim, first, stop - first)
            else:
                part = cut(part, axis, first, stop, self._dims.tokens)
        return _placed(part, Placed.of(self._tensor), self._requires_grad)


def _placed(part: torch.Tensor, placed: Placed | None, requires_grad: bool) -> torch.Tensor:
    """A tensor anew, or the sharded one of which a rank has `part`."""
    whole = part.detach() if placed is None else placed.over(part)
    return whole.requires_grad_(requires_grad)


_HIDDEN = object()


@dataclasses.dataclass(frozen=True, slots=True)
class _Cache:
    """A key/value cache. One that was not empty gives attention more keys than there are tokens, and the proof fails."""

    kind: type

    def fresh(self) -> Any:
        """An empty one. That of an encoder-decoder is two: of the layer's own keys and of the encoder's."""
        if self.kind.__name__ == "DynamicCache":
            return self.kind()
        from transformers import DynamicCache

        return self.kind(DynamicCache(), DynamicCache())


def _is_cache(value: object) -> bool:
    kind = type(value)
    return kind.__name__ in ("DynamicCache", "EncoderDecoderCache") and kind.__module__.startswith("transformers.")


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, _LEAVES):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, change) for item in value))
    if type(value) in (tuple, list):
        return type(value)(_map(item, change) for item in value)
    if type(value) is dict:
        return {key: _map(item, change) for key, item in value.items()}
    if _is_record(value):
        return dataclasses.replace(
            value, **{field.name: _map(getattr(value, field.name), change) for field in dataclasses.fields(value)}
        )
    return change(value)


def _is_record(value: object) -> bool:
    """A frozen dataclass, as the spans of packed documents: fields that nobody replaces, and tensors to be watched.

    It is made anew around what is held of its fields; so none that looks at them when it is made, or makes some itself.
    """
    kind = type(value)
    if kind is _Cache or not dataclasses.is_dataclass(kind) or hasattr(kind, "__post_init__"):
        return False
    frozen: bool = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return frozen and all(field.init for field in dataclasses.fields(kind))


def argument_tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors of a call, in order; of a sharded one this rank's part."""
    found: list[torch.Tensor] = []

    def note(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            found.append(local_part(value))
        return value

    _map((tuple(args), kwargs), note)
    return found


def describe(value: Any) -> Any:
    """An argument but for the content of a tensor."""
    if isinstance(value, torch.Tensor):
        kind = Placed.of(value) or type(value)
        return kind, value.dtype, tuple(value.shape), value.stride(), value.requires_grad
    return value if isinstance(value, _PLAIN) else type(value)


def but_for_sizes(described: Any) -> Any:
    """A description without sizes: for a tensor all but shape and strides."""
    if type(described) is not tuple:
        return described
    kind, dtype, shape, _, requires_grad = described
    return kind, dtype, len(shape), requires_grad


def check_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """The layer's input. Raises Unproven for arguments that cannot be given twice."""
    hidden = layer_input(args, kwargs)
    local = None if hidden is None else local_part(hidden)
    if hidden is None or type(local) is not torch.Tensor or local.layout is not torch.strided:
        raise Unproven("its input is no plain tensor")

    def check(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            local = local_part(value)
            if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout is not torch.strided:
                raise Unproven(f"it is given a {type(value).__name__}")
            if is_sharded(value) and not is_even(cast("DTensor", value)):
                raise Unproven("it is given a DTensor of which not every rank has as much")
        elif not isinstance(value, _PLAIN) and not _is_cache(value):
            raise Unproven(f"it is given a {type(value).__name__}, which a second run might change")
        return value

    _map((tuple(args), kwargs), check)
    return hidden


def token_input(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """The layer's input as (batch, tokens, hidden), what this rank has of it.

    Raises:
        Unproven: the arguments cannot be cut by tokens.
    """
    hidden = local_part(check_arguments(args, kwargs))
    if hidden.ndim not in (2, 3) or hidden.size(-2) < 2 or not hidden.is_floating_point():
        raise Unproven(f"its input of shape {tuple(hidden.shape)} is not (batch, tokens, hidden)")
    return hidden
