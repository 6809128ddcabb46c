"""Small models, steps of them with and without memo, and managers over the checking backend. Shared by tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from race_checker import CheckingBackend, CheckingDisk
from torch import nn

from memo.manager import Manager
from memo.swap import Engine, RecomputePolicy, WhenFull, find_layers, setting_of
from memo.swap.tiers import DiskTier, HostTier

SEQ = 48


class Block(nn.Module):
    """A pre-norm block with a fused projection: sixteen units of b·s·h are saved, q, k and v in one storage."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        shape = (batch, seq, self.heads, hidden // self.heads)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Stack(nn.Module):
    """Embedding, blocks, tied head, loss."""

    def __init__(self, layers: int = 3, hidden: int = 32, vocab: int = 61, make: Callable[[], nn.Module] | None = None):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList([make() if make else Block(hidden, 2) for _ in range(layers)])
        self.norm = nn.LayerNorm(hidden)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.norm(x) @ self.embed.weight.t()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@dataclasses.dataclass(frozen=True)
class Step:
    loss: torch.Tensor
    gradients: list[torch.Tensor | None]


def ids(step: int = 0, batch: int = 2, vocab: int = 61, seq: int = SEQ) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, seq), generator=torch.Generator().manual_seed(100 + step))


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_equal(got: list[Step], want: list[Step]) -> None:
    assert len(got) == len(want)
    for number, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(ours.loss, theirs.loss), f"loss of step {number}"
        for position, (a, b) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
            assert (a is None) == (b is None), f"gradient {position} of step {number}"
            assert a is None or torch.equal(a, b), f"gradient {position} of step {number}"


def train(model: nn.Module, forward: Callable[[int], torch.Tensor], manager: Any = None, steps: int = 3) -> list[Step]:
    """`steps` steps of SGD; backward runs outside the manager."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    done = []
    for step in range(steps):
        if manager is None:
            loss = forward(step)
        else:
            with manager:
                loss = forward(step)
        loss.backward()
        done.append(Step(loss.detach().clone(), gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    return done


def stack(**kwargs: Any) -> Stack:
    torch.manual_seed(0)
    return Stack(**kwargs)


def plain(make: Callable[[], nn.Module] = stack, **kwargs: Any) -> list[Step]:
    """The steps without memo."""
    model = make()
    return train(model, lambda step: model(ids(step)), **kwargs)


def lives(manager: Manager) -> list[Any]:
    """What is saved now."""
    return [saved for group in manager._engine._layer_calls for saved in group.living()]


@dataclasses.dataclass
class Checked:
    """A manager over the checking backend."""

    manager: Manager
    backend: CheckingBackend
    engine: Engine


def checked(
    model: nn.Module,
    policy: Any = "lazy",
    *,
    tier: str = "host",
    seed: int = 0,
    engine: type[Engine] = Engine,
    budget: int = 1 << 24,
    alpha: Any = 1.0,
    when_full: WhenFull = WhenFull.SPILL,
    **recompute_policy: Any,
) -> Checked:
    backend = CheckingBackend(policy, seed=seed)
    host = HostTier(backend, budget, segment_bytes=1 << 20)
    tiers = [host] if tier == "host" else [DiskTier(CheckingDisk(backend, budget), budget)]
    made = engine(backend, tiers, min_bytes=512, when_full=when_full)
    wise = RecomputePolicy(made, setting_of(alpha), **recompute_policy)
    return Checked(Manager(model, find_layers(model), made, recompute_policy=wise), backend, made)
