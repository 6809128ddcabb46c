"""Mixture of experts: each token passes through its top-k experts and the shared MLP; no token is dropped.

    x (T, h) -> Router: experts and weights (T, k)
    row n of (T k): choice n % k of token n // k; sorted by expert, order of tokens kept
        rows (T k, h)  --experts-->  (T k, h)  --unsorted-->  (T, k, h)  --weights, sum over k-->  (T, h)
    with a bottleneck b: (T, h)  --descend-->  (T, b), all of the above with b for h, (T, b)  --ascend-->  (T, h)

Owns routing, the order of rows, and the router's losses. Every sum has one order: backward gathers by the inverse
permutation and adds the k rows of a token in the order of its choices, since adding by index has no fixed order on a GPU.
T k does not depend on the routing, so without expert parallelism every saved tensor's size is the same in each step.

Expert-parallel ranks exchange rows: each gets those of its experts from all ranks, in the order of the ranks, and sends
the results back. How many it gets depends on the routing.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from memo.gpt.config import GPTConfig, MoeConfig
from memo.parallel import exchange_rows, own_experts
from memo.swap import memoize

_GROUPED = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNED_BYTES = 16
"""Rows of a grouped product's operands begin at multiples of this."""


class Router(nn.Module):
    """Choice of experts by softmax, in float32 or wider: the k largest probabilities, normalised to a sum of one.

    With one expert for a token its weight is the probability itself; one divided by itself would not train the router.
    """

    def __init__(self, hidden: int, moe: MoeConfig) -> None:
        super().__init__()
        self.moe = moe
        self.group: dist.ProcessGroup | None = None
        """Ranks whose tokens are one batch, for the load balance; None where this process has the batch."""
        self.sharers: dist.ProcessGroup | None = None
        """Ranks that divide the tokens of this one's loss; None where it has all of them."""
        self.weight = nn.Parameter(torch.empty(moe.experts, hidden))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Routes tokens.

        Args:
            x: (tokens, hidden).

        Returns:
            Experts (tokens, k), int64; their weights (tokens, k); the router's losses, a scalar.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(wide), self.weight.to(wide))
        shares = logits.softmax(-1)
        largest, chosen = shares.topk(self.moe.top_k, dim=-1)
        weights = largest if self.moe.top_k == 1 else largest / largest.sum(-1, keepdim=True)
        return chosen, weights, self._losses(logits, shares, chosen)

    def _losses(self, logits: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        # Load balance: experts times the dot product of the fraction of choices and the mean probability of each expert
        # (Fedus et al. 2021, "Switch Transformers", eq. 4; 1 when balanced). z: mean of log-sum-exp squared (Zoph et al.
        # 2022, "ST-MoE", eq. 5).
        counts = _choices(chosen, self.moe.experts, self.group)
        choices = chosen.numel() * (1 if self.group is None else self.group.size())
        fractions = (counts / choices).to(shares.dtype)
        balance = self.moe.experts * (fractions * shares.mean(0)).sum()
        z = logits.logsumexp(-1).square().mean()
        losses = self.moe.balance_coefficient * balance + self.moe.z_coefficient * z
        return losses if self.sharers is None else _mean(losses, self.sharers)


class _ExpertMatrix(nn.Module):
    """Matrix of each expert: weight (experts, inputs, outputs)."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, inputs, outputs))

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Product of rows (n, inputs), sorted by expert, with their experts' matrices.

        Args:
            rows: (n, inputs), in the type of products.
            ends: row after the last one of each expert, (experts), int32.

        Returns:
            (n, outputs).
        """
        weight = own_experts(self.weight)
        if torch.is_autocast_enabled(rows.device.type):
            weight = weight.to(rows.dtype)
        return _grouped_product(rows, weight, ends)


def _grouped_product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    aligned = all(size * rows.element_size() % _ALIGNED_BYTES == 0 for size in weight.shape[1:])
    if rows.dtype in _GROUPED and aligned and len(rows):
        return F.grouped_mm(rows, weight, offs=ends)
    last = ends.tolist()
    sizes = [end - begin for begin, end in zip([0, *last], last, strict=False)]
    return torch.cat([part @ one for part, one in zip(rows.split(sizes), weight.unbind(0), strict=True)])


class Experts(nn.Module):
    """MLPs of all experts, without biases."""

    def __init__(self, config: GPTConfig, moe: MoeConfig) -> None:
        super().__init__()
        hidden, wide = moe.bottleneck or config.hidden, moe.expert_hidden
        self.count = moe.experts
        self.group: dist.ProcessGroup | None = None
        """Ranks that the experts are divided over; None where each has all."""
        self.most_rows = 0.0
        """Most rows of a call that came to this rank's experts, as a multiple of the mean of these ranks."""
        self.gate = _ExpertMatrix(moe.experts, hidden, wide) if config.mlp == "swiglu" else None
        self.up = _ExpertMatrix(moe.experts, hidden, wide)
        self.down = _ExpertMatrix(moe.experts, wide, hidden)

    def forward(self, rows: torch.Tensor, sorted_experts: torch.Tensor) -> torch.Tensor:
        """Output of each row's expert.

        Args:
            rows: (n, hidden or bottleneck), sorted by expert.
            sorted_experts: (n), int64.

        Returns:
            Of the shape of `rows`.
        """
        if torch.is_autocast_enabled(rows.device.type):  # once for all products, and before the exchange
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        if self.group is not None:
            return self._on_their_ranks(rows, sorted_experts, self.group)
        return self._computed(rows, sorted_experts, self.count)

    @staticmethod
    def exchanged_counts(
        sorted_experts: torch.Tensor, count: int, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of this rank for each expert, and those from each rank for each expert of this one, both (count), int64."""
        counts = F.one_hot(sorted_experts, count).sum(0)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        return counts, theirs

    def _on_their_ranks(
        self, rows: torch.Tensor, sorted_experts: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ranks, own = group.size(), self.count // group.size()
        counts, theirs, sorted_numbers, order, inverse = _arrivals(sorted_experts, self.count, group)
        sent, received = (part.view(ranks, own).sum(1).tolist() for part in (counts, theirs))
        self.most_rows = max(self.most_rows, sum(received) / sum(sent))  # each rank sends as many
        arrived = _permuted(exchange_rows(rows, group, sent, received), order, inverse)
        done = _permuted(self._computed(arrived, sorted_numbers, own), inverse, order)
        return exchange_rows(done, group, received, sent)

    def _computed(self, rows: torch.Tensor, sorted_experts: torch.Tensor, count: int) -> torch.Tensor:
        numbers = torch.arange(count, device=rows.device)
        ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
        if self.gate is None:
            return self.down(F.gelu(self.up(rows, ends)), ends)  # type: ignore[no-any-return]
        return self.down(F.silu(self.gate(rows, ends)) * self.up(rows, ends), ends)  # type: ignore[no-any-return]


class MoeMlp(nn.Module):
    """Mixture of experts in the place of a layer's MLP.

    Args:
        config: the model, with `moe`.
        shared: MLP that all tokens pass besides; None is none.
    """

    def __init__(self, config: GPTConfig, shared: nn.Module | None) -> None:
        super().__init__()
        assert config.moe is not None
        self.router = Router(config.hidden, config.moe)
        self.experts = Experts(config, config.moe)
        self.shared = shared
        hidden, narrow = config.hidden, config.moe.bottleneck
        self.descend = nn.Linear(hidden, narrow, bias=False) if narrow else None
        self.ascend = nn.Linear(narrow, hidden, bias=False) if narrow else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output of `x`, both (batch, tokens, hidden), and the router's losses, a scalar."""
        tokens = x.flatten(0, -2)
        chosen, weights, losses = self.router(tokens)
        flat = chosen.flatten()
        sorted_experts, order = flat.sort(stable=True)
        inverse = order.argsort()
        given = tokens if self.descend is None else self.descend(tokens)
        # Nested, since a name would hold each of these to the end.
        per_choice = _permuted(
            self.experts(_sorted_rows(given, order, inverse), sorted_experts), inverse, order
        ).unflatten(0, chosen.shape)
        mixed = (per_choice * weights.unsqueeze(-1).to(per_choice.dtype)).sum(1)
        out = (mixed if self.ascend is None else self.ascend(mixed)).view_as(x)
        return (out if self.shared is None else out + self.shared(x)), losses


@memoize  # other ranks may not repeat the layer
def _choices(chosen: torch.Tensor, experts: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Choices of each expert, (experts), over all ranks of the group."""
    counts = F.one_hot(chosen, experts).sum((0, 1))
    if group is not None:
        dist.all_reduce(counts, group=group)
    return counts


def _mean(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Mean over the group, on every rank; each has its part of the gradient."""
    return cast("torch.Tensor", _Mean.apply(x, group))  # type: ignore[no-untyped-call]


@memoize  # other ranks may not repeat the layer
def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    result: torch.Tensor = x.clone()
    dist.all_reduce(result, group=group)
    return result


@memoize  # other ranks may not repeat the layer
def _arrivals(sorted_experts: torch.Tensor, count: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    """Rows that come to this rank's experts.

    Args:
        sorted_experts: experts of the rows that this rank sends, (n), int64.
        count: experts of all ranks.
        group: the ranks.

    Returns:
        Rows of this rank for each expert, (count); rows from each rank for each expert of this one, (count); the arriving
        rows' experts sorted, counted from this rank's first, the order that sorts them, and its inverse.
    """
    counts, theirs = Experts.exchanged_counts(sorted_experts, count, group)
    ranks = group.size()
    numbers = torch.arange(count // ranks, device=counts.device).repeat(ranks).repeat_interleave(theirs)
    sorted_numbers, order = numbers.sort(stable=True)
    return counts, theirs, sorted_numbers, order, order.argsort()


def _sorted_rows(tokens: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return cast("torch.Tensor", _SortedRows.apply(tokens, order, inverse))  # type: ignore[no-untyped-call]


def _permuted(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return cast("torch.Tensor", _Permuted.apply(rows, order, inverse))  # type: ignore[no-untyped-call]


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.ranks = ranks = group.size()
        return _summed(x, group) / ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad / ctx.ranks, None


class _SortedRows(torch.autograd.Function):
    """Rows (T k, h) of tokens (T, h) in an order of their choices; backward sums a token's k rows."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.tokens = len(tokens)
        return tokens.index_select(0, order // (len(order) // len(tokens)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse).unflatten(0, (ctx.tokens, -1)).sum(1), None, None


class _Permuted(torch.autograd.Function):
    """Rows in another order; backward gathers by the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None
