"""The documented format is the one that the dataclasses write and the reader takes."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from pathlib import Path
from typing import Any

import pytest

from memo.events import FORMAT, VERSION, CounterEvent, Note, Owned, Span, Stall, StateChange, StepMark, StorageUse

DOCS = Path(__file__).parent.parent.parent / "docs"
SCHEMA = json.loads((DOCS / "trace-format.schema.json").read_text(encoding="utf-8"))
KINDS = (StateChange, Span, Stall, StorageUse, CounterEvent, Owned, StepMark, Note)
NATURAL = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}


def property_of(annotation: Any) -> dict[str, Any]:
    if isinstance(annotation, types.UnionType):
        annotation = next(arm for arm in typing.get_args(annotation) if arm is not types.NoneType)
    if isinstance(annotation, enum.EnumMeta):
        return {"enum": [member.value for member in annotation]}
    if typing.get_origin(annotation) is tuple:
        return {"type": "array", "items": NATURAL}
    return NATURAL if annotation is int else {"type": "string"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_schema_of_a_kind_is_its_dataclass(kind: type[Any]) -> None:
    schema = SCHEMA["$defs"][kind.kind]
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    expected = {field.name: property_of(hints[field.name]) for field in fields}
    if kind is StepMark:
        expected["phase"] = {"enum": ["begin", "end"]}
    assert schema["properties"] == {"k": {"const": kind.kind}} | expected
    assert schema["required"] == ["k", *(field.name for field in fields if field.default is dataclasses.MISSING)]
    assert schema["additionalProperties"] is False


def test_the_schema_names_every_line_and_nothing_else() -> None:
    names = {"header", "end", *(kind.kind for kind in KINDS)}
    assert set(SCHEMA["$defs"]) == names
    assert {entry["$ref"] for entry in SCHEMA["oneOf"]} == {f"#/$defs/{name}" for name in names}
    assert SCHEMA["$defs"]["header"]["properties"]["format"] == {"const": FORMAT}
    assert SCHEMA["$defs"]["header"]["properties"]["version"] == {"const": VERSION}


@pytest.mark.parametrize("kind", KINDS)
def test_the_document_explains_every_kind_field_and_member(kind: type[Any]) -> None:
    text = (DOCS / "trace-format.md").read_text(encoding="utf-8")
    assert f"**`{kind.kind}`**" in text
    for field in dataclasses.fields(kind):
        assert f"`{field.name}`" in text, field.name
        for value in property_of(typing.get_type_hints(kind)[field.name]).get("enum", []):
            assert f"`{value}`" in text, value
