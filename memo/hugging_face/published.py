"""Published models by name."""
from __future__ import annotations
import dataclasses
from typing import Any
__all__ = ["PUBLISHED", "Published", "published_name"]
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    config: dict[str, Any]
    source: str
PUBLISHED: dict[str, Published] = {}
def published_name(name: str) -> str | None:
    return None
