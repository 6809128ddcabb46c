"""Settings that a layer's forward ran under, for its recompute: autocast, attention kernels, random numbers, own state.

The first three are set again for the time of a recompute. A layer's own state is only watched: parameters, buffers and
plain attributes of its modules must be in backward what they were in forward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.modules.module as torch_modules
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memo.errors import ModifiedAfterSave
from memo.swap.engine.saved_storage import version_of
from memo.swap.tensor_kinds import is_sharded

__all__ = ["ModuleState", "Precision", "RandomState", "has_others", "hooks_within", "modules_of", "parameters_of"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What the program had chosen during the forward: autocast, and which attention kernels."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    attention: tuple[bool, bool, bool, bool]
    """Whether flash, memory-efficient, cuDNN and plain attention were allowed."""

    @classmethod
    def now(cls, device_type: str) -> Precision:
        return cls(
            device_type=device_type,
            enabled=torch.is_autocast_enabled(device_type),
            dtype=torch.get_autocast_dtype(device_type),
            attention=_attention_allowed(),
        )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            undo.enter_context(torch.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=False))
            if self.attention != _attention_allowed():  # a choice of kernels that ended before backward
                backends = [name for name, allowed in zip(_BACKENDS, self.attention, strict=True) if allowed]
                undo.enter_context(sdpa_kernel(backends))
            yield


_BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)


def _attention_allowed() -> tuple[bool, bool, bool, bool]:
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.math_sdp_enabled()


class RandomState:
    """The generators of the host and of one device, as they were when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = self._read()

    def _read(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        on_device = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return torch.get_rng_state(), on_device

    def _write(self, states: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1], self._device)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draws the same numbers once more; the program's own stream goes on as if nothing had been drawn."""
        now = self._read()
        self._write(self._states)
        try:
            yield
        finally:
            self._write(now)

    def restore(self) -> None:
        """As if nothing had been drawn since."""
        self._write(self._states)

    def is_now(self) -> bool:
        """True when nothing has been drawn since."""
        return all(
            was is None or (now is not None and torch.equal(was, now))
            for was, now in zip(self._states, self._read(), strict=True)
        )


def has_others(module: torch.nn.Module, own: Sequence[torch.Tensor]) -> bool:
    """Whether a layer has other parameters than `own`, for a while: torch.func.functional_call lends it some for one call.

    A sharded one is another while it is gathered, in backward as in forward.
    """
    now = parameters_of(module)
    return len(now) != len(own) or any(a is not b and not is_sharded(b) for a, b in zip(now, own, strict=True))


# What an attribute may be to be compared: a value that cannot change in place. Others (a list, a configuration object)
# are not watched.
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})


def modules_of(module: nn.Module) -> list[nn.Module]:
    """It and all in it, each once; `module.modules()` makes names on its way, and takes three times as long."""
    found = [module]
    known = {module}
    for parent in found:
        for child in parent._modules.values():
            if child is not None and child not in known:
                known.add(child)
                found.append(child)
    return found


def parameters_of(module: nn.Module) -> list[torch.Tensor]:
    """Its parameters and those of all in it; one that several modules have as often."""
    every = [parameter for child in modules_of(module) for parameter in child._parameters.values()]
    return [parameter for parameter in every if parameter is not None]


def hooks_within(module: nn.Module) -> str | None:
    """Which hooks a second run of a layer would call again; None where there are none.

    Those on the layer itself are called around what is repeated.
    """
    if _has_hooks_of_others(torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks):
        return "hooks on all modules"
    for child in modules_of(module):
        if child is not module and _has_hooks_of_others(child._forward_hooks, child._forward_pre_hooks):
            return "hooks on its modules"
    return None


def _has_hooks_of_others(*hooks: Mapping[int, Any]) -> bool:
    """True for a hook that might tell somebody what it sees. Those of torch and of memo change what passes, and no more."""
    for hook in itertools.chain.from_iterable(some.values() for some in hooks if some):
        module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
        if module.split(".")[0] not in ("torch", "memo"):
            return True
    return False


class ModuleState:
    """Parameters, buffers and plain attributes of a layer's modules, as they were when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tensors = [
            (tensor, version_of(tensor))
            for child in modules_of(module)
            for tensor in (*child._parameters.values(), *child._buffers.values())
            if tensor is not None
        ]
        self._attributes = _attributes(module)

    def check(self, name: str) -> None:
        """Raises ModifiedAfterSave for what has changed."""
        for tensor, version in self._tensors:
            if version_of(tensor) != version:
                raise ModifiedAfterSave(
                    f"a parameter or buffer of {name} of shape {tuple(tensor.shape)} was changed in place before"
                    " backward recomputed the layer; step the optimizer after backward"
                )
        changed = self.changed_attribute()
        if changed is not None:
            raise ModifiedAfterSave(
                f"{changed} of {name} was changed before backward recomputed the layer, which would compute something"
                " else now; change it after backward"
            )
        hooks = hooks_within(self._module)
        if hooks is not None:
            raise ModifiedAfterSave(
                f"{name} cannot be computed again in backward: {hooks} would be called again; put them there after backward"
            )

    def changed_tensor(self) -> torch.Tensor | None:
        """A parameter or buffer that was changed in place."""
        return next((tensor for tensor, version in self._tensors if version_of(tensor) != version), None)

    def changed_attribute(self) -> str | None:
        """The first plain attribute that is another now."""
        now = _attributes(self._module)
        if now == self._attributes:
            return None
        return _first_difference(self._attributes, now)


_Attributes = list[tuple[int, dict[str, object]]]
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _attributes(module: nn.Module) -> _Attributes:
    return [(id(child), _own(vars(child))) for child in modules_of(module)]


def _own(every: dict[str, object]) -> dict[str, object]:
    """What not every module has; of that only whether it trains."""
    own: dict[str, object] = {"training": every["training"]}
    for name in every.keys() - _OF_EVERY_MODULE:
        if type(every[name]) in _PLAIN:
            own[name] = every[name]
    return own


def _first_difference(before: _Attributes, now: _Attributes) -> str:
    for (was, ours), (is_, theirs) in zip(before, now, strict=False):
        if was != is_:
            break
        for name in ours.keys() | theirs.keys():
            if name not in ours or name not in theirs or not _same(ours[name], theirs[name]):
                return f"attribute {name!r} of a module"
    return "the set of modules"


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other
