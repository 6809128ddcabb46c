"""Tables of data that lie beside the code as TOML files."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

_LIKE, _FAMILIES = "like", "family"


def toml_tables(beside: str, name: str) -> dict[str, dict[str, Any]]:
    """The tables of a TOML file, by name.

    A table with `like = "X"` also has the fields of `[family.X]`, or of the earlier table X, that it does not have itself;
    tables within tables are merged alike. Families are not among the results.

    Args:
        beside: `__file__` of the module in whose folder the file lies.
        name: of the file.
    """
    found = tomllib.loads(Path(beside).with_name(name).read_text(encoding="utf-8"))
    known: dict[str, dict[str, Any]] = dict(found.pop(_FAMILIES, {}))
    for key, fields in found.items():
        base = fields.pop(_LIKE, None)
        known[key] = found[key] = fields if base is None else _merged(known[base], fields)
    return found


def _merged(base: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    nested = {
        key: _merged(base[key], value) for key, value in fields.items() if isinstance(value, dict) and key in base
    }
    return {**base, **fields, **nested}
