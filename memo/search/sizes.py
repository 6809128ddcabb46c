"""Sizes of a model that ranks divide, and the numbers of ranks that do."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

from memo.gpt import GPTConfig

if TYPE_CHECKING:
    from memo.search.request import Request


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model that ranks divide."""

    layers: int
    heads: int
    kv_heads: int
    ffn: int
    asked_tp: int | None = None
    """The ranks of `--tp`, or 1, of a model of transformers: no other numbers are tried. None for memo's GPT."""
    experts: int = 1
    """That ranks of data parallelism may divide; 1 without."""

    @classmethod
    def of(cls, request: Request, *, tp: object = None) -> ModelSizes:
        """Sizes of a request's model; `tp` is the number of tensor-parallel ranks that is asked for."""
        config = request.config
        if isinstance(config, GPTConfig):
            moe = config.moe
            return cls(
                layers=config.layers,
                heads=config.heads,
                kv_heads=config.kv_heads,
                ffn=config.ffn if moe is None else math.gcd(config.ffn, moe.shared_hidden or config.ffn),
                experts=config.expert_count or 1,
            )
        assert config is not None
        asked = tp if isinstance(tp, int) else 1
        return cls(layers=config.layers, heads=config.heads, kv_heads=config.heads, ffn=1, asked_tp=asked)

    @property
    def tensor_words(self) -> str:
        """Sizes that ranks of tensor parallelism divide."""
        if self.asked_tp is not None:
            return "a model of transformers"
        kv = "" if self.kv_heads == self.heads else f", {self.kv_heads} key/value heads"
        return f"{self.heads} heads{kv} and an MLP of {self.ffn}"

    def tensor_ranks(self) -> list[int]:
        """Numbers of ranks that divide the heads and the MLP."""
        if self.asked_tp is not None:
            return sorted({1, self.asked_tp})
        return [tp for tp in divisors_of(self.kv_heads) if self.heads % tp == 0 and self.ffn % tp == 0]

    def context_ranks(self, tp: int) -> list[int]:
        """Numbers of ranks that divide the query heads of a tensor-parallel rank."""
        return list(divisors_of(self.heads // tp)) if self.heads else [1]


@functools.lru_cache(maxsize=1024)
def divisors_of(number: int) -> tuple[int, ...]:
    """Divisors, ascending."""
    small = [part for part in range(1, int(number**0.5) + 1) if number % part == 0]
    return tuple(sorted({*small, *(number // part for part in small)}))
