"""Cache of trial results, which tells the calls that need no trial: at a new length one layer of each class is tried.

What a trial finds depends on three things, and each is looked at again where it changes:

    the layer       state of its own, what its forward leaves behind: every layer is tried itself, once for each
                    signature of its recompute (operators, levels, what is wanted)
    the shapes      rounding: a library chooses a matrix product's kernel by height and width. Layers of one class (type,
                    shapes of parameters) that divide alike run the same kernels, so the first one answers for the others
    the tokens      nothing: the proof has carried the axis through every operator of this very call, whatever its length

So a run over ever new lengths tries one layer a length and not all. A trial that failed speaks for its layer alone.

All of it is bounded: what was not used for longest is forgotten, and tried again if it comes back. Ranks that compute a
layer together forget alike, since each class forgets by the calls of its own layers.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from memo.lru import LRU
from memo.swap.recompute.axis.operator_rules import tensors_in
from memo.swap.recompute.guards.rng_and_autocast import Precision
from memo.swap.recompute.record.layer_arguments import but_for_sizes, describe

if TYPE_CHECKING:
    from memo.swap.layers import Layer
    from memo.swap.recompute.rank_agreement import Ranks
    from memo.swap.recompute.token_split import Division
    from memo.swap.token_levels import Level

__all__ = ["Kind", "TrialResult", "Trials"]

MOST_REFUSED = 256
"""Kinds of calls of one layer."""
MOST_SHOWN = 2048
"""Shapes of one class of layers, each with every way that its tokens are divided."""
MOST_SHORT = 3
"""Trials of a layer in a row that may find no memory before it is refused."""
MOST_SIGNATURES = 64
"""Of one layer."""

_Signature = tuple[object, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Key of equal calls: same layer, mode, precision and arguments, but for the content of tensors."""

    layer: str
    call: tuple[Any, ...]
    is_whole: bool = False
    """The recompute runs the layer whole."""
    no_pairs: bool = False
    """Arguments are read without masks over pairs of tokens (memo.swap.recompute.axis.argument_axes)."""

    @classmethod
    def of(cls, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kind:
        """Kind of a call: its layer, mode, precision and arguments without their content."""
        device = next((tensor.device.type for tensor in tensors_in((args, kwargs))), "cpu")
        described = tuple(describe(value) for value in tree_leaves((tuple(args), kwargs)))
        return cls(layer=layer.name, call=(layer.module.training, Precision.now(device), described))

    @property
    def repeated(self) -> Kind:
        """The same call, to run again whole."""
        return dataclasses.replace(self, is_whole=True)

    @property
    def without_pairs(self) -> Kind:
        """The same call, with its arguments read in another way."""
        return dataclasses.replace(self, no_pairs=True)

    @property
    def key(self) -> tuple[Any, ...]:
        """The kind without its layer."""
        return (self.is_whole, self.no_pairs, self.call)

    def signature(self, division: Division | None) -> _Signature:
        """Operations of the recompute, independent of sizes."""
        training, precision, described = self.call
        done = None if division is None else division.steps
        return (self.is_whole, self.no_pairs, training, precision, tuple(map(but_for_sizes, described)), done)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """Outcome of a trial that passed."""

    deviation: float
    """Largest difference, in units of trial.BOUND of its dtype; 0 where all bytes are equal."""
    seconds_per_token: Mapping[Level, float]
    """Time of the recompute by level."""


class _Class:
    """Layers that run the same kernels where they are divided in the same way, and their passed trials."""

    def __init__(self) -> None:
        self.shown: LRU[tuple[Any, ...], TrialResult] = LRU(MOST_SHOWN)
        self.calls: LRU[tuple[Any, ...], bool] = LRU(MOST_SHOWN)

    def all(self) -> tuple[LRU[Any, Any], ...]:
        """The caches."""
        return self.shown, self.calls


class Trials:
    """Passed trials and refusals of one manager's layers."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._refused: dict[str, LRU[Kind, str]] = {}
        self._short: collections.Counter[str] = collections.Counter()
        """Layer -> consecutive trials that found no memory."""
        self._signatures: dict[str, LRU[_Signature, bool]] = {}
        self._first: dict[object, str] = {}
        """Class -> its first layer, by which it is named."""
        self._classes: dict[str, _Class] = {}

    def refuse(self, kind: Kind, reason: str) -> None:
        """Refuses the recompute of calls of a kind."""
        self._refused.setdefault(kind.layer, LRU(MOST_REFUSED))[kind] = reason

    def ran_short(self, kind: Kind, reason: str) -> None:
        """Records a trial that found no memory; `MOST_SHORT` of a layer in a row refuse its kind of call."""
        self._short[kind.layer] += 1
        if self._short[kind.layer] >= MOST_SHORT:
            self.refuse(kind, reason)

    def found_room(self, layer: str) -> bool:
        """Records that the layer is divided; True where its last call was not, for want of memory."""
        return self._short.pop(layer, 0) > 0

    def refusal(self, kind: Kind) -> str | None:
        """Reason why the recompute of a kind is refused; None where it is not."""
        known = self._refused.get(kind.layer)
        return None if known is None else known.get(kind)

    def find(self, kind: Kind, division: Division | None) -> TrialResult | None:
        """Result of an earlier trial that covers the call; None where its layer must be tried."""
        alike = self._classes.get(kind.layer)
        shown = None if alike is None else alike.shown.get(_form(kind, division))
        return shown if shown is not None and kind.signature(division) in self._signatures[kind.layer] else None

    def were_of(self, kind: Kind) -> bool:
        """True when a call of this kind needs no trial if it is divided as before."""
        alike = self._classes.get(kind.layer)
        return alike is not None and kind.key in alike.calls

    def add(self, kind: Kind, division: Division | None, module: torch.nn.Module, shown: TrialResult) -> None:
        """Records a passed trial. The first one of a layer is a collective call."""
        if kind.layer not in self._classes:
            self._assign(kind.layer, module)
        alike = self._classes[kind.layer]
        self._signatures[kind.layer][kind.signature(division)] = True
        alike.calls[kind.key] = True
        form = _form(kind, division)
        before = alike.shown.get(form)
        alike.shown[form] = shown if before is None or before.deviation < shown.deviation else before

    def _assign(self, layer: str, module: torch.nn.Module) -> None:
        """Assigns a layer to its class; to one of its own where ranks disagree on the class."""
        first = self._first.setdefault((self._ranks.partners(layer), _class_of(module)), layer)
        if not self._ranks.say_the_same(layer, first):
            first = layer
        self._classes[layer] = self._classes.setdefault(first, _Class())
        self._signatures[layer] = LRU(MOST_SIGNATURES)


def _form(kind: Kind, division: Division | None) -> tuple[Any, ...]:
    return (kind.key, None if division is None else division.form)


def _class_of(module: torch.nn.Module) -> object:
    parameters = ((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters())
    return type(module), tuple(parameters)
