"""Published models by name, as far as a plan needs their configurations: sizes, experts, windows.

published.toml has each with its source. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from memo.gpt import preset_key
from memo.toml_tables import toml_tables


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published model."""

    config: Mapping[str, Any]
    """Fields of its configuration in transformers."""
    source: str
    """Repository on huggingface.co whose config.json has them."""


def _published(source: str, **config: Any) -> Published:
    return Published(config=config, source=source)


PUBLISHED: dict[str, Published] = {
    name: _published(**fields) for name, fields in toml_tables(__file__, "published.toml").items()
}


def published_name(name: str) -> str | None:
    """The key of PUBLISHED that a name means, by any case, a repository's name included; None for none."""
    key = _spelling(name.rpartition("/")[2])
    return next((known for known in PUBLISHED if key in _SPELLINGS[known]), None)


def _spelling(name: str) -> str:
    """As preset_key, with the release of a Llama 3, which changes its positions, and without Gemma's kinds of training."""
    key = re.sub(r"-(it|pt)$", "", preset_key(name))
    release = re.match(r"(?:meta-)?llama-?3\.([123])-", re.sub(r"[\s_]+", "-", name.strip().lower()))
    return key if release is None else key.replace("llama3-", f"llama3.{release[1]}-", 1)


_SPELLINGS = {known: {_spelling(known), _spelling(one.source.partition("/")[2])} for known, one in PUBLISHED.items()}
"""Names of each model: its own, and its repository's."""
