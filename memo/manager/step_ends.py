"""Where one training step ends and the next begins, told from the optimizer, the parameters and their gradients.

A step has ended when nothing is saved any more and an optimizer has stepped, parameters have changed, or gradients have
been cleared. So microbatches whose gradients are accumulated are one step, and an evaluation in between is none.

    optimizers of torch       a hook after each `step`, also where a fused kernel counts no version of what it changes
    changes by hand           version counters of some parameters
    neither seen so far       no gradient is left, as where DeepSpeed releases them; or MOST_FORWARDS have passed

The hook belongs to one manager and ends with it. memo.swap has another one, of the process, that notes which memory a step
wrote; it tells nothing of ends.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch.optim.optimizer import register_optimizer_step_post_hook

from memo.warn_user import warn_user

if TYPE_CHECKING:
    import torch
    from torch import nn

MOST_FORWARDS = 16
"""Forwards, each after the backward of the one before, that are one step where nothing has ever shown an end."""
WARNED_AFTER = 4 * MOST_FORWARDS
"""Forwards without a sign of a step's end after which memo warns; few programs accumulate gradients over so many."""
LOOKED_AT = 4
"""Parameters that are looked at, from either end of the model."""


class StepEnds:
    """Ends of a model's training steps.

    Args:
        model: held weakly.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._steps = _Steps()
        # By their modules: a tensor that has a weak reference could not be swapped, as `to` does with sharded ones.
        self._places: list[tuple[weakref.ref[nn.Module], str]] = []
        self._before, self._had_gradients = self._state()
        self._is_seen = False
        self._forwards = self._unseen = 0
        # The hook holds the counter alone: it must not keep the manager.
        self._stop = weakref.finalize(self, register_optimizer_step_post_hook(self._steps).remove)

    def close(self) -> None:
        """Removes the hook of optimizers. Idempotent."""
        self._stop()

    def done(self) -> None:
        """Notes an end that the program has told."""
        self._steps.taken += 1

    def has_ended(self, *, has_trained: bool) -> bool:
        """True if a step has ended since this was last called. Call it before each forward that finds nothing saved.

        Args:
            has_trained: a training forward has run since the last end; otherwise the answer is False.
        """
        now, has_gradients = self._state()
        is_changed = self._before != now
        is_cleared = self._had_gradients and not has_gradients
        self._before, self._had_gradients = now, has_gradients
        if not has_trained:
            return False
        self._forwards += 1
        self._is_seen |= is_changed
        ended = is_changed or is_cleared
        if not self._is_seen:
            if is_cleared:
                self._unseen = 0
            is_long = not ended and self._forwards > MOST_FORWARDS
            ended |= not has_gradients or is_long
            self._unseen += MOST_FORWARDS * is_long
            if is_long and self._unseen == WARNED_AFTER:
                warn_user(
                    f"memo.offload: nothing showed where a training step ends in {WARNED_AFTER} forwards: no optimizer "
                    f"step, changed parameter or cleared gradient. memo counts {MOST_FORWARDS} forwards as one step; call "
                    "optimizer.step() or zero_grad() in each step, or manager.step_done() after it"
                )
        if ended:
            self._forwards = 0
        return ended

    def _state(self) -> tuple[tuple[int, ...], bool]:
        """Optimizer steps and versions, and whether there are gradients."""
        parameters = self._looked_at()
        versions = (0 if one.is_inference() else one._version for one in parameters)
        return (self._steps.taken, *versions), any(one.grad is not None for one in parameters)

    def _looked_at(self) -> list[torch.Tensor]:
        """Some parameters that are trained; others where one of them is gone."""
        found: list[torch.Tensor] = [
            parameter
            for known, name in self._places
            if (module := known()) is not None and (parameter := module._parameters.get(name)) is not None
        ]
        if found and len(found) == len(self._places) and all(one.requires_grad for one in found):
            return found
        model = self._model()
        trained = [] if model is None else _trained(model)
        chosen = trained if len(trained) <= 2 * LOOKED_AT else trained[:LOOKED_AT] + trained[-LOOKED_AT:]
        self._places = [(weakref.ref(module), name) for module, name, _ in chosen]
        return [parameter for _, _, parameter in chosen]


def _trained(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Parameters that are trained, each with its module and its name there."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]


class _Steps:
    """Counts the steps of all optimizers of the process."""

    def __init__(self) -> None:
        self.taken = 0

    def __call__(self, *args: object) -> None:
        self.taken += 1
