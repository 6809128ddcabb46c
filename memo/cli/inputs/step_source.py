"""Training step that a command measures: its options, and the builder of its `Step`.

Shared by `memo profile` and `memo record`. A step is one of the GPT presets, or the user's own `module:function`. torch is
imported only when a builder is made.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

from memo.cli.inputs.fields import refuse_given
from memo.cli.inputs.flag_types import Count, Flag, Tokens
from memo.gpt import PRESETS, GPTConfig, Precision, preset

if TYPE_CHECKING:
    from memo.record import Step

OWN_MODEL = """\
A model of your own is given as module:function; the module must be importable from the current directory. The function is
called with the keywords batch and tokens and returns (model, step): a module on the CPU, and any callable without arguments
that runs one forward pass and returns the loss.
"""
"""Explanation of `--model module:function` for the end of a help text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The step. The fields are flags."""

    model: Annotated[str, Flag(names=tuple(PRESETS))] = "tiny"
    """GPT preset ({names}), or a model of your own as module:function."""
    variant: Literal["gpt", "llama"] | None = None
    """Architecture of the preset's layers (default: its own, gpt where it has both)."""
    layers: Count | None = None
    """Number of layers (default: the preset's)."""
    seq: Tokens = 1024
    """Sequence length in tokens, such as 32k or 1m (default 1k)."""
    batch: Count = 1
    """Sequences in the batch."""
    precision: Annotated[str, Flag(choices=(str(Precision.FP32), str(Precision.BF16)), metavar=None)] = "fp32"
    """Number format of a preset."""

    @property
    def is_preset(self) -> bool:
        """True for a GPT preset, False for the user's `module:function`."""
        return ":" not in self.model

    @property
    def config(self) -> GPTConfig:
        """The preset's shape, with a position table of at least `seq` rows.

        Raises:
            UsageError: no preset has this name, or its numbers do not fit together.
        """
        shape = functools.partial(preset, self.model, variant=self.variant, layers=self.layers)
        config = shape()
        return shape(max_seq=self.seq) if config.positions == "learned" and self.seq > config.max_seq else config

    def builder(self, *, needs_loss: bool = True) -> Callable[[], Step]:
        """A callable that builds the step on one rank.

        Args:
            needs_loss: False takes steps of the user's that run backward themselves, too.

        Raises:
            UsageError: the preset or the function does not exist, or an option does not apply to the user's model.
        """
        if not self.is_preset:
            refuse_given(self, "--layers --variant", "applies to named models only; leave it out")
            from memo.record import load_step

            return functools.partial(load_step(self.model, needs_loss=needs_loss), batch=self.batch, tokens=self.seq)
        config = self.config
        from memo.record import gpt_step

        precision = Precision(self.precision)
        return functools.partial(gpt_step, config, batch=self.batch, tokens=self.seq, precision=precision)
