"""Configurations of transformers, read from a file, a folder or a dictionary, and the model that each one describes.

Nothing is fetched: a name that is neither a file nor a folder here is no configuration. transformers is imported only when
a configuration is read.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memo.bounded_files import Refused, read_object
from memo.errors import UsageError, one_line

LEAST_TRANSFORMERS = 5
"""Version from which models save the bytes that are predicted; in older ones experts loop in Python (docs/versions.md)."""
INSTALL = f'pip install "transformers>={LEAST_TRANSFORMERS}"'
_COUNTS = {r"(layers?|blocks?|depths?|attention_types)$": 10_000, r"num_labels$": 1_000_000}
"""Largest numbers in fields, by the ends of their names, of which transformers makes lists of that length."""
_FILE = "config.json"
_FLOAT = "__float__"
_MODELS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
)
"""Transformers' tables of models that take labels, by the class of their configuration."""


def names_configuration(model: str) -> bool:
    """True for the path of a configuration or of a folder, False for a preset's name."""
    return model.endswith(".json") or "/" in model or Path(model).is_dir()


def configuration_from(source: str | Mapping[str, Any], *, name: str | None = None) -> Any:
    """Reads a configuration.

    Args:
        source: path of a configuration's file, or of a folder that holds a `config.json`; or the fields of one.
        name: of the model in error messages; None is the path.

    Returns:
        The configuration as an object of transformers.

    Raises:
        UsageError: there is no such file, transformers is not installed, or it knows no such architecture.
    """
    called = name or (source if isinstance(source, str) else str(source.get("model_type")))
    fields = _read(source) if isinstance(source, str) else dict(source)
    kind = fields.get("model_type")
    if not isinstance(kind, str):
        raise UsageError(f"{called}: no configuration of transformers: it has no model_type")
    try:
        import transformers
    except ImportError:
        raise UsageError(f"{called}: a configuration of transformers needs transformers: {INSTALL}") from None
    if kind not in transformers.CONFIG_MAPPING:
        raise UsageError(
            f"{called}: transformers {transformers.__version__} has no architecture {kind!r}; a newer one may, and code "
            "that comes with a model is not run: give memo profile its module:function"
        )
    for field, number in _numbers("", fields):
        most = next((most for names, most in _COUNTS.items() if re.search(names, field)), number)
        if number > most:
            raise UsageError(f"{called}: {field} is {str(number)[:40]}; a model has at most {most:,}")
    try:
        with quiet():
            return transformers.CONFIG_MAPPING[kind].from_dict(fields)
    except Exception as error:  # of another package's validation, which raises what it likes
        raise UsageError(f"{called}: {one_line(error)}") from None


def model_class(config: Any, *, name: str) -> type[Any]:
    """The class of transformers that trains the configuration's model: the one it names, or the first that takes labels.

    Raises:
        UsageError: the configuration belongs to no language model.
    """
    import transformers

    tables = [getattr(transformers, table) for table in _MODELS if hasattr(transformers, table)]
    found = [models[type(config)] for models in tables if type(config) in models]
    known = [kind for entry in found for kind in (entry if isinstance(entry, (tuple, list)) else (entry,))]
    if not known:
        raise UsageError(f"{name}: {type(config).__name__} belongs to no language model; give module:function")
    named = config.architectures if isinstance(config.architectures, (list, tuple)) else ()
    made: type[Any] = next((kind for kind in known if kind.__name__ in named), known[0])
    return made


def language_part(config: Any) -> Any:
    """The configuration of the language model in one of several models, where transformers has it as a model of its own."""
    import transformers

    text = config.get_text_config()
    return text if type(text) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING else config


def transformers_version() -> str:
    """Version of transformers."""
    import transformers

    return str(transformers.__version__)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers' log, whose hints are for people who run the model."""
    log = logging.getLogger("transformers")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def _numbers(field: str, value: object) -> Iterator[tuple[str, int]]:
    """Integers of a configuration, at any depth, with the names of their fields."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(str(name)[:80], inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _numbers(field, inner)
    elif isinstance(value, int):
        yield field, value


def _decoded(value: Any) -> Any:
    """The value with transformers' own form of numbers that JSON has not, {"__float__": "Infinity"}, as numbers."""
    if isinstance(value, dict):
        if set(value) == {_FLOAT} and value[_FLOAT] in ("Infinity", "-Infinity", "NaN"):
            return float(value[_FLOAT])
        return {name: _decoded(inner) for name, inner in value.items()}
    return [_decoded(inner) for inner in value] if isinstance(value, list) else value


def _read(path: str) -> dict[str, Any]:
    file = Path(path)
    if file.is_dir():
        file /= _FILE
        if not file.is_file():
            raise UsageError(f"{path}: the folder has no {_FILE}")
    if not file.is_file():
        raise UsageError(f"{path}: no such file")
    try:
        return {name: _decoded(value) for name, value in read_object(file, constants=True).items()}
    except (OSError, Refused) as error:
        raise UsageError(f"{path}: no configuration of transformers: {one_line(error)}") from None
