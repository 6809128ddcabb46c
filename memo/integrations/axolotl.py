"""Axolotl's plugin: `plugins: [memo.integrations.axolotl.MemoPlugin]` in its configuration, and fields named `memo_...`.

Owns the fields, which are those of MemoArguments; MemoCallback does the rest.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import TYPE_CHECKING, Any

import pydantic
from axolotl.integrations.base import BasePlugin

from memo.integrations.hf import MemoArguments, MemoCallback

if TYPE_CHECKING:
    from transformers import Trainer


def _fields() -> dict[str, Any]:
    """Optional fields of a configuration, by name: an option that is not given has memo's own default."""
    kinds = typing.get_type_hints(MemoArguments)
    return {
        field.name: (
            kinds[field.name] | None,
            pydantic.Field(default=None, description=field.metadata["help"].replace("%%", "%")),
        )
        for field in dataclasses.fields(MemoArguments)
    }


MemoArgs = pydantic.create_model("MemoArgs", **_fields())
"""Fields that the plugin adds to Axolotl's configuration."""


class MemoPlugin(BasePlugin):  # type: ignore[misc]
    """Axolotl plugin that manages the activations of every kind of training that Axolotl does with a Trainer.

    Attributes:
        callback: Of the last trainer; it has the manager. None before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.callback: MemoCallback | None = None

    def get_input_args(self) -> str:
        """Where Axolotl finds the fields."""
        return "memo.integrations.axolotl.MemoArgs"

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        """Adds the callback, in front of those that report."""
        given = {field.name: cfg.get(field.name) for field in dataclasses.fields(MemoArguments)}
        arguments = MemoArguments(**{name: value for name, value in given.items() if value is not None})
        self.callback = MemoCallback(arguments).add_to(trainer)
