"""Shape of a transformer as the arithmetic reads it: a GPT's, with what published models have and memo's own has not.

Owns a head size that is not hidden / heads, and mixtures of experts. `memo.gpt.model` builds a GPTConfig alone.
"""

from __future__ import annotations

import dataclasses

from memo.errors import UsageError
from memo.gpt.config import GPTConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """MLPs of which each token uses a few."""

    count: int
    per_token: int = 1
    ffn: int
    """Inner width of one expert."""
    shared_ffn: int = 0
    """Inner width of an MLP that all tokens use besides; 0 is none."""
    ranks: int = 1
    """Ranks that the experts are divided over."""
    tensor_ranks: int = 1
    """Ranks that each expert's matrices are divided over."""

    def __post_init__(self) -> None:
        if not (1 <= self.per_token <= self.count and 1 <= self.ranks <= self.count and self.tensor_ranks >= 1):
            raise UsageError(
                f"{self.count} experts, {self.per_token} for a token, do not divide over {self.ranks} ranks"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transformer(GPTConfig):
    """A GPT whose heads may have any size, and whose MLPs may be experts."""

    head_size: int | None = None
    """Width of a head; None is hidden / heads."""
    experts: Experts | None = None
    head_norms: bool = False
    """Queries and keys are normalised, head by head."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads if self.head_size is None else self.head_size

    @property
    def expert_matrices(self) -> int:
        """Weights of one expert."""
        if self.experts is None:
            return 0
        return (3 if self.mlp == "swiglu" else 2) * self.hidden * self.experts.ffn

    @property
    def beside_experts(self) -> int:
        """Weights of the router and of the MLP that all tokens use; 0 without experts."""
        if self.experts is None:
            return 0
        shared = (3 if self.mlp == "swiglu" else 2) * self.hidden * self.experts.shared_ffn
        return shared + self.experts.count * self.hidden
