"""memo.checkpoint in place of torch's: the same bits, each function run once, and what it refuses."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memo
from memo.checkpointing.function import _share_of_node, _thread
from memo.errors import ModifiedAfterSave, UsageError

WIDTH = 32


@pytest.fixture(autouse=True)
def contexts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[torch.device, Any]]:
    """Contexts of this thread, which take tensors of 64 bytes, too."""
    monkeypatch.setattr("memo.checkpointing.function.MIN_BYTES", 64)
    _thread.contexts.clear()
    yield _thread.contexts
    for context in _thread.contexts.values():
        assert context.report().live_entries == 0
        context.close()
    _thread.contexts.clear()


class Block(nn.Module):
    """Attention and an MLP with dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = dropout
        self.calls = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2)) * scale
        return x + F.dropout(self.down(F.silu(self.up(x))), self.dropout)


Call = Callable[..., Any]
"""Calls a block with its arguments, checkpointed in some way."""


def _trained(call: Call, dropout: float = 0.0, **named: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    blocks = [Block(dropout) for _ in range(3)]
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(2, 64, WIDTH, requires_grad=True)
        hidden = x
        for block in blocks:
            block.zero_grad()
            hidden = call(block, hidden, **named)
        (hidden.sum() + torch.rand(())).backward()
    grads = [parameter.grad for block in blocks for parameter in block.parameters()]
    return [x.grad, *grads, torch.tensor([float(block.calls) for block in blocks])]  # type: ignore[list-item]


def _plainly(block: Block, x: torch.Tensor, **named: Any) -> Any:
    return block(x, **named)


WAYS: dict[str, Call] = {
    "module": memo.checkpoint,
    "method": lambda block, x: memo.checkpoint(block.__call__, x),
    "partial": lambda block, x: memo.checkpoint(functools.partial(block.forward, scale=1.0), x),
    "closure": lambda block, x: memo.checkpoint(lambda hidden: block(hidden), x),
    "reentrant": lambda block, x: memo.checkpoint(block, x, use_reentrant=True, preserve_rng_state=False),
    "wrapper": lambda block, x: checkpoint_wrapper(block, checkpoint_fn=memo.checkpoint)(x),
    "nested": lambda block, x: memo.checkpoint(lambda hidden: memo.checkpoint(block, hidden), x),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_equal_and_each_function_runs_once(way: str, dropout: float, contexts: dict[Any, Any]) -> None:
    wanted, got = _trained(_plainly, dropout), _trained(WAYS[way], dropout)
    assert all(map(torch.equal, got, wanted))
    (context,) = contexts.values()
    report = context.report()
    assert report.tiers[-1].moved_bytes > 0
    assert report.recompute is not None
    assert report.recompute.recomputed_bytes > 0


def test_keyword_arguments_are_the_functions() -> None:
    wanted, got = _trained(_plainly, scale=0.5), _trained(memo.checkpoint, scale=0.5)
    assert all(map(torch.equal, got, wanted))


def test_results_of_any_kind_pass() -> None:
    x = torch.randn(4, WIDTH, requires_grad=True)
    linear = nn.Linear(WIDTH, WIDTH)

    def several(a: torch.Tensor) -> dict[str, Any]:
        return {"first": linear(a), "others": (a.exp(), 3)}

    found = memo.checkpoint(several, x)
    (found["first"] * found["others"][0]).sum().backward()
    got, x.grad = x.grad, None
    found = several(x)
    (found["first"] * found["others"][0]).sum().backward()
    assert got is not None
    assert x.grad is not None
    assert torch.equal(got, x.grad)
    assert memo.checkpoint(lambda a: None, x) is None
    assert memo.checkpoint(lambda: 5) == 5


def test_inside_memos_saved_tensors_it_is_a_region_of_it(contexts: dict[Any, Any]) -> None:
    with memo.saved_tensors(host="8MiB", min_bytes=64) as context:
        got = _trained(memo.checkpoint)
    assert all(map(torch.equal, got, _trained(_plainly)))
    assert not contexts
    report = context.report()
    assert report.layers == 3
    assert report.recompute is not None
    assert report.recompute.accepted == 3
    context.close()


def test_in_a_manager_it_is_a_plain_call(contexts: dict[Any, Any]) -> None:
    wanted = _trained(_plainly)
    moved = []
    for call in (_plainly, memo.checkpoint):
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block() for _ in range(3))
        manager = memo.offload(blocks, layers=blocks, alpha=0.0, host="8MiB", min_bytes=64)
        for step in range(3):
            blocks.zero_grad()
            torch.manual_seed(step)
            hidden = x = torch.randn(2, 64, WIDTH, requires_grad=True)
            with manager:
                for block in blocks:
                    hidden = call(block, hidden)
            (hidden.sum() + torch.rand(())).backward()
        got = [x.grad, *(parameter.grad for parameter in blocks.parameters())]
        assert all(map(torch.equal, got, wanted))  # type: ignore[arg-type]
        moved.append(manager.report().tiers[-1].moved_bytes)
        manager.close()
    assert moved[0] == moved[1] > 0
    assert not contexts


def test_in_a_checkpoint_of_torchs_it_is_a_plain_call(contexts: dict[Any, Any]) -> None:
    def both(block: Block, x: torch.Tensor) -> Any:
        return torch_checkpoint(lambda hidden: memo.checkpoint(block, hidden), x, use_reentrant=False)

    wanted, got = _trained(_plainly), _trained(both)
    assert all(map(torch.equal, got[:-1], wanted[:-1]))
    assert not contexts


def test_without_gradients_nothing_is_saved(contexts: dict[Any, Any]) -> None:
    block, x = Block(), torch.randn(2, 64, WIDTH)
    with torch.no_grad():
        assert torch.equal(memo.checkpoint(block, x), block(x))
    assert not contexts


def test_backward_may_run_twice(contexts: dict[Any, Any]) -> None:
    block, x = Block(), torch.randn(2, 64, WIDTH, requires_grad=True)
    loss = memo.checkpoint(block, x).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, x)))


def test_threads_have_contexts_of_their_own() -> None:
    wanted = _trained(_plainly)
    found: list[bool] = []
    lock = threading.Lock()  # of the seeds

    def run() -> None:
        with lock:
            found.append(all(map(torch.equal, _trained(memo.checkpoint), wanted)))
        for context in _thread.contexts.values():
            context.close()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True, True]


def test_an_exception_of_the_function_leaves_nothing_behind() -> None:
    block, x = Block(), torch.randn(2, 64, WIDTH, requires_grad=True)

    def fails(hidden: torch.Tensor) -> torch.Tensor:
        block(hidden)
        raise ValueError("of the function")

    with pytest.raises(ValueError, match="of the function"):
        memo.checkpoint(fails, x)
    got = _trained(memo.checkpoint)
    assert all(map(torch.equal, got, _trained(_plainly)))


def test_a_change_in_place_is_an_error() -> None:
    x = torch.randn(2, 64, WIDTH, requires_grad=True)
    hidden = x * 2
    loss = memo.checkpoint(lambda a: a.exp() * a, hidden).sum()
    hidden.add_(1)
    with pytest.raises(ModifiedAfterSave):
        loss.backward()
    del loss, hidden
    gc.collect()


def test_a_model_is_not_held() -> None:
    block = Block()
    memo.checkpoint(block, torch.randn(2, 64, WIDTH, requires_grad=True)).sum().backward()
    gone = [weakref.ref(block), *map(weakref.ref, block.parameters())]
    del block
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)


def test_what_torchs_checkpoint_refuses_is_refused() -> None:
    x = torch.randn(2, 64, WIDTH, requires_grad=True)
    with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
        memo.checkpoint(Block(), x, use_reentrant=True, scale=2.0)
    with pytest.raises(UsageError, match="leave context_fn out"):
        memo.checkpoint(Block(), x, context_fn=lambda: (None, None))
    with pytest.raises(UsageError, match="determinism_check 'often' is neither"):
        memo.checkpoint(Block(), x, determinism_check="often")


def test_turned_off_it_is_torchs(monkeypatch: pytest.MonkeyPatch, contexts: dict[Any, Any]) -> None:
    monkeypatch.setenv("MEMO_DISABLE", "1")
    got = _trained(memo.checkpoint)
    assert torch.equal(got[-1], torch.tensor([6.0] * 3))
    assert not contexts


def test_ranks_of_a_node_share_its_memory_without_asking_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert _share_of_node(100) == 25
