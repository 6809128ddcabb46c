"""Types of flags that several commands have, for the fields of their dataclasses: see fields.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from memo.cli.terminal.output_files import file_name
from memo.errors import UsageError
from memo.units import parse_bytes, parse_tokens


class Flag(dict[str, Any]):
    """Keywords of argparse in an annotation that is combined with others, as in `Size | None`."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def at_least(least: int) -> Callable[[str], int]:
    """Argument type of whole numbers from `least` on."""

    def parse(text: str) -> int:
        number = int(text)
        if number < least:
            raise UsageError(f"{number} is less than {least}")
        return number

    return parse


def parse_alpha(text: str) -> float:
    """Argument type of the fraction of activations that are moved instead of recomputed."""
    alpha = float(text)
    if not 0 <= alpha <= 1:
        raise UsageError(f"{alpha} is not between 0 (recompute all) and 1 (move all)")
    return alpha


Count = Annotated[int, Flag(type=at_least(1))]
Size = Annotated[int, Flag(type=parse_bytes, metavar="SIZE")]
Tokens = Annotated[int, Flag(type=parse_tokens, metavar="TOKENS")]
Alpha = Annotated[float, Flag(type=parse_alpha)]
InputFile = Annotated[str, Flag(metavar="FILE")]
WrittenFile = Annotated[str, Flag(type=file_name, metavar="FILE")]
OutputFile = Annotated[str, Flag(flags="-o --output", type=file_name, metavar="FILE")]
Force = Annotated[bool, Flag(flags="-f --force", help="overwrite existing files")]
Json = Annotated[bool, Flag(help="print one JSON object instead of text")]
