"""Runs on each of two ranks: the loss over a vocabulary of which each holds a part equals the loss over all of it."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from live_bytes import LiveBytes

from memo.loss import VocabularyShard, chunked_linear_cross_entropy
from memo.loss.chunked_cross_entropy import IGNORE
from memo.loss.logit_transform_shape import LogitTransformShape
from memo.parallel import join

TOKENS, HIDDEN = 101, 24


def case(vocab: int, dtype: torch.dtype, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(vocab)
    x = torch.randn(1, tokens, HIDDEN).to(dtype).requires_grad_()
    weight = torch.randn(vocab, HIDDEN).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (1, tokens))
    targets[:, ::5] = IGNORE
    return x, weight, targets


def shard_of(weight: torch.Tensor, split: int) -> tuple[torch.Tensor, VocabularyShard]:
    """Rows [0, split) on rank 0, the others on rank 1."""
    first, last = ((0, split), (split, len(weight)))[dist.get_rank()]
    assert dist.group.WORLD is not None
    shard = VocabularyShard(group=dist.group.WORLD, first=first, largest=max(split, len(weight) - split))
    return weight.detach()[first:last].clone().requires_grad_(), shard


def equals_the_whole(vocab: int, split: int, chunk: int | None, keep: bool) -> None:
    x, weight, targets = case(vocab, torch.float64)
    expected = F.cross_entropy(F.linear(x, weight).flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    grad_x, grad_weight = torch.autograd.grad(expected * 0.37, (x, weight))
    part, shard = shard_of(weight, split)
    loss = chunked_linear_cross_entropy(x, part, targets, chunk=chunk, vocabulary=shard, keep_gradients=keep)
    grads = torch.autograd.grad(loss * 0.37, (x, part))
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(grads[0], grad_x, rtol=0, atol=1e-12)
    torch.testing.assert_close(grads[1], grad_weight[shard.first : shard.first + len(part)], rtol=0, atol=1e-12)


def equals_the_whole_when_tokens_are_divided_too(vocab: int, chunk: int | None, keep: bool) -> None:
    x, weight, targets = case(vocab, torch.float64, tokens=2 * TOKENS)
    targets[:, :TOKENS:2] = IGNORE  # not equally many count on both ranks
    expected = F.cross_entropy(F.linear(x, weight).flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    grad_x, grad_weight = torch.autograd.grad(expected * 0.37, (x, weight))
    assert dist.group.WORLD is not None
    shard = VocabularyShard.of(vocab, dist.group.WORLD, divides_tokens=True)
    part = weight.detach()[shard.first :][: shard.largest].clone().requires_grad_()
    own = slice(dist.get_rank() * TOKENS, (dist.get_rank() + 1) * TOKENS)
    mine = x.detach()[:, own].clone().requires_grad_()
    loss = chunked_linear_cross_entropy(mine, part, targets[:, own], chunk=chunk, vocabulary=shard, keep_gradients=keep)
    grads = torch.autograd.grad(loss * 0.37, (mine, part))
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(grads[0], grad_x[:, own], rtol=0, atol=1e-12)
    torch.testing.assert_close(grads[1], grad_weight[shard.first : shard.first + len(part)], rtol=0, atol=1e-12)


def equals_the_whole_with_a_bias_and_a_shape(split: int, chunk: int | None, keep: bool) -> None:
    vocab = 53
    x, weight, targets = case(vocab, torch.float64)
    bias = torch.randn(vocab, dtype=torch.float64, requires_grad=True)
    logits = torch.tanh((F.linear(x, weight) + bias) * 1.7 / 4.0) * 4.0
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum") / 10
    wanted = torch.autograd.grad(expected, (x, weight, bias))
    part, shard = shard_of(weight, split)
    own = slice(shard.first, shard.first + len(part))
    own_bias = bias.detach()[own].clone().requires_grad_()
    given = {"bias": own_bias, "shape": LogitTransformShape(scale=1.7, soft_cap=4.0), "reduction": "sum"}
    loss = (
        chunked_linear_cross_entropy(x, part, targets, chunk=chunk, vocabulary=shard, keep_gradients=keep, **given) / 10
    )
    grads = torch.autograd.grad(loss, (x, part, own_bias))
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(grads, (wanted[0], wanted[1][own], wanted[2][own]), rtol=0, atol=1e-12)


def is_close_in_bfloat16() -> None:
    x, weight, targets = case(257, torch.bfloat16, tokens=2048)
    exact = F.cross_entropy(F.linear(x.float(), weight.float()).flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    part, shard = shard_of(weight, 100)
    loss = chunked_linear_cross_entropy(x, part, targets, chunk=32, vocabulary=shard)
    assert loss.dtype is torch.float32
    assert abs(loss.item() - exact.item()) < 1e-3 * exact.item()


def logits_far_out_do_not_overflow() -> None:
    weight = torch.tensor([[1.0], [-1.0]])
    part, shard = shard_of(weight, 1)
    for target, loss in ((0, 0.0), (1, 2000.0)):
        given = torch.tensor([[[1000.0]]]), part, torch.tensor([[target]])
        assert chunked_linear_cross_entropy(*given, vocabulary=shard).item() == loss


def holds_a_chunk_of_its_own_logits_at_a_time(*, divides_tokens: bool) -> None:
    """`tokens` are this rank's; where ranks have different ones, logits are of a chunk of both's."""
    for tokens in (1024, 4096):
        x, weight, targets = case(2048, torch.float32, tokens=tokens)
        part, shard = shard_of(weight, 1024)
        shard = dataclasses.replace(shard, divides_tokens=divides_tokens)
        logits, grads = 64 * 1024 * 4, (tokens * HIDDEN + 1024 * HIDDEN) * 4
        # gloo's threads let go of what they sent when they get to it: three numbers a token, and hidden states.
        travelled = tokens * (3 + HIDDEN) * 4 * (4 if divides_tokens else 1)
        with LiveBytes() as alive:
            loss = chunked_linear_cross_entropy(x, part, targets, chunk=64, vocabulary=shard)
            deadline = time.monotonic() + 20
            while alive.live != grads + 8 and time.monotonic() < deadline:
                time.sleep(0.01)
        assert alive.live == grads + 8, (alive.live, grads)
        assert alive.largest == max(logits, tokens * HIDDEN * 4, 1024 * HIDDEN * 4)
        assert alive.peak <= grads + 4 * logits + travelled, (alive.peak, grads)
        assert loss.requires_grad


def main() -> None:
    torch.set_num_threads(1)
    with join(torch.device("cpu")):
        for vocab, split in ((53, 26), (53, 40), (7, 7), (7, 0)):
            for chunk in (16, None):
                for keep in (True, False):
                    equals_the_whole(vocab, split, chunk, keep)
        for chunk in (1, 16, None):
            for keep in (True, False):
                equals_the_whole_when_tokens_are_divided_too(53, chunk, keep)
        for split, chunk, keep in ((26, 16, True), (26, None, False), (53, 16, True), (0, 16, False)):
            equals_the_whole_with_a_bias_and_a_shape(split, chunk, keep)
        is_close_in_bfloat16()
        logits_far_out_do_not_overflow()
        for divides_tokens in (False, True):
            holds_a_chunk_of_its_own_logits_at_a_time(divides_tokens=divides_tokens)
        print(f"rank {dist.get_rank()} done", flush=True)


if __name__ == "__main__":
    main()
