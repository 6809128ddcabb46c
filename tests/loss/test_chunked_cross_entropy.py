"""The chunked loss: equal to the plain one, exact in its reductions, and blind to the length of the sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from live_bytes import LiveBytes

from memo.loss import chunked_linear_cross_entropy
from memo.loss.chunked_cross_entropy import IGNORE, Reduction
from memo.loss.chunks import CHUNK_LOGITS, MAX_CHUNK_TOKENS, TRAINED_CHUNK_LOGITS, chunk_tokens
from memo.loss.logit_transform_shape import LogitTransformShape


def _case(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(1, tokens, hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, hidden, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocab, (1, tokens))
    targets[:, ::5] = IGNORE
    return x, weight, targets


def _plain(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight).flatten(0, 1), targets.flatten(), ignore_index=IGNORE)


@pytest.mark.parametrize("chunk", [1, 7, 64, 101, 1000, None])
def test_value_and_gradients_equal_the_plain_loss(chunk: int | None) -> None:
    x, weight, targets = _case(101, 24, 53, torch.float64)
    loss = chunked_linear_cross_entropy(x, weight, targets, chunk=chunk)
    expected = _plain(x, weight, targets)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    grads = torch.autograd.grad(loss * 0.37, (x, weight))
    torch.testing.assert_close(grads, torch.autograd.grad(expected * 0.37, (x, weight)), rtol=0, atol=1e-12)


def test_gradcheck() -> None:
    x, weight, targets = _case(11, 5, 7, torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: chunked_linear_cross_entropy(a, b, targets, chunk=4), (x, weight))


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_gradient_of_one_input_alone(needs: tuple[bool, bool]) -> None:
    x, weight, targets = _case(11, 5, 7, torch.float64)
    expected = torch.autograd.grad(_plain(x, weight, targets), (x, weight))
    x, weight = x.detach().requires_grad_(needs[0]), weight.detach().requires_grad_(needs[1])
    chunked_linear_cross_entropy(x, weight, targets, chunk=4).backward()
    for leaf, grad, needed in zip((x, weight), expected, needs, strict=True):
        assert (leaf.grad is not None) == needed
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, grad, rtol=0, atol=1e-12)


def test_bfloat16_loss_is_within_a_thousandth_of_float32s() -> None:
    # The chunks of 32 are where summing in bfloat16 would be off by a tenth.
    x, weight, targets = _case(4096, 64, 257, torch.bfloat16)
    with torch.no_grad():
        x *= 0.3
    loss = chunked_linear_cross_entropy(x, weight, targets, chunk=32)
    assert loss.dtype is torch.float32
    exact = _plain(x.float(), weight.float(), targets)
    assert abs(loss.item() - exact.item()) < 1e-3 * exact.item()


def test_bfloat16_weight_gradient_is_summed_in_float32() -> None:
    # Every chunk adds the same small gradient: summed in bfloat16 it would stop growing at 256 chunks of one.
    x = torch.ones(2048, 8, dtype=torch.bfloat16)
    weight = torch.zeros(4, 8, dtype=torch.bfloat16, requires_grad=True)
    chunked_linear_cross_entropy(x, weight, torch.zeros(2048, dtype=torch.int64), chunk=1).backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.bfloat16
    # softmax - one_hot over four classes; 1/2048 per token is exact in bfloat16.
    expected = torch.tensor([-0.75, 0.25, 0.25, 0.25], dtype=torch.bfloat16)
    assert torch.equal(weight.grad[:, 0], expected)


@pytest.mark.parametrize("scale", [1, 2**16])
def test_float16_gradients_are_as_close_as_a_plain_scaled_losss(scale: int) -> None:
    # Classes that are no target have probabilities of some 1e-6 and mean gradients of 1e-7, which float16 can hardly hold.
    x, weight, targets = _case(256, 64, 2000, torch.float16)
    rare = slice(1000, None)
    with torch.no_grad():
        weight *= 0.1  # logits of float16 are coarse where they are large
        x[..., 0], weight[:, 0], weight[rare, 0] = 1, 0, -7
    targets = targets.where(targets == IGNORE, targets % 1000)

    def gradients(dtype: torch.dtype, of_loss: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        leaves = [leaf.detach().to(dtype, copy=True).requires_grad_() for leaf in (x, weight)]
        return [grad.double() / scale for grad in torch.autograd.grad(of_loss(*leaves) * scale, leaves)]

    exact = gradients(torch.float64, lambda *leaves: _plain(*leaves, targets))
    found = gradients(torch.float16, lambda *leaves: chunked_linear_cross_entropy(*leaves, targets, chunk=8192))
    for part in (slice(None), rare) if scale > 1 else (slice(None),):
        error = (found[1] - exact[1])[part].norm() / exact[1][part].norm()
        assert error < 2e-3
    assert (found[0] - exact[0]).norm() < 2e-3 * exact[0].norm()


@pytest.mark.parametrize("factor", [0.05, 20.0, -300.0])
def test_float16_gradients_of_scaled_logits_are_finite_and_close(factor: float) -> None:
    x, weight, targets = _case(64, 32, 100, torch.float16)
    with torch.no_grad():
        weight *= 0.1 / abs(factor)
    shape = LogitTransformShape(scale=factor)

    def gradients(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [leaf.detach().to(dtype, copy=True).requires_grad_() for leaf in (x, weight)]
        return torch.autograd.grad(chunked_linear_cross_entropy(*leaves, targets, shape=shape), leaves)

    for found, exact in zip(gradients(torch.float16), gradients(torch.float64), strict=True):
        assert (found - exact).norm() < 5e-3 * exact.norm()


def test_autocast_computes_in_bfloat16_and_returns_float32_gradients() -> None:
    x, weight, targets = _case(100, 16, 31, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_linear_cross_entropy(x, weight, targets, chunk=32)
    loss.backward()
    assert loss.dtype is torch.float32
    assert x.grad is not None
    assert weight.grad is not None
    assert x.grad.dtype is weight.grad.dtype is torch.float32
    low = chunked_linear_cross_entropy(x.detach().bfloat16(), weight.detach().bfloat16(), targets, chunk=32)
    assert torch.equal(loss, low)
    assert abs(loss.item() - _plain(x, weight, targets).item()) < 1e-2 * loss.item()


def test_nothing_counted_is_zero_with_zero_gradients() -> None:
    x, weight, targets = _case(10, 4, 6, torch.float32)
    loss = chunked_linear_cross_entropy(x, weight, torch.full_like(targets, IGNORE), chunk=3)
    loss.backward()
    assert loss.item() == 0.0
    assert x.grad is not None
    assert weight.grad is not None
    assert not x.grad.any()
    assert not weight.grad.any()


def test_ignored_tokens_get_no_gradient() -> None:
    x, weight, targets = _case(30, 4, 6, torch.float32)
    chunked_linear_cross_entropy(x, weight, targets, chunk=7).backward()
    assert x.grad is not None
    assert not x.grad[targets == IGNORE].any()
    assert x.grad[targets != IGNORE].any(dim=-1).all()


def test_backward_twice_with_a_retained_graph() -> None:
    x, weight, targets = _case(30, 4, 6, torch.float64)
    loss = chunked_linear_cross_entropy(x, weight, targets, chunk=7)
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, (x, weight))))


def test_logits_far_out_do_not_overflow() -> None:
    x = torch.tensor([[[1000.0]]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]])
    assert chunked_linear_cross_entropy(x, weight, torch.tensor([[0]])).item() == 0.0
    assert chunked_linear_cross_entropy(x, weight, torch.tensor([[1]])).item() == 2000.0


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("vocab", [1, 257, 32000, 50257, 128256, 1 << 28])
def test_chunks_stay_within_the_budget_of_logits(vocab: int, trained: bool) -> None:
    most = TRAINED_CHUNK_LOGITS if trained else CHUNK_LOGITS
    tokens = chunk_tokens(vocab, trained=trained)
    assert tokens & (tokens - 1) == 0
    assert tokens <= MAX_CHUNK_TOKENS
    assert tokens == 1 or tokens * vocab <= most
    assert tokens == MAX_CHUNK_TOKENS or 2 * tokens * vocab > most


def _peaks(tokens: int, *, hidden: int = 8, vocab: int = 512, chunk: int = 64) -> tuple[int, int, int]:
    """Peak bytes of forward, what stays alive after it, and peak of backward; inputs are not counted."""
    x, weight, targets = _case(tokens, hidden, vocab, torch.float32)
    with LiveBytes() as bytes_:
        loss = chunked_linear_cross_entropy(x, weight, targets, chunk=chunk)
        forward, kept = bytes_.peak, bytes_.live
        assert bytes_.largest == max(chunk * vocab, tokens * hidden) * 4
        loss.backward()
    return forward, kept, bytes_.peak


def test_memory_beyond_gradients_does_not_depend_on_the_length() -> None:
    short, long, hidden, vocab = 1024, 8192, 8, 512
    grad_hidden, grad_weight = (lambda tokens: tokens * hidden * 4), vocab * hidden * 4
    forward_short, kept_short, _ = _peaks(short)
    forward_long, kept_long, backward_long = _peaks(long)
    # Scalars (the loss, the reciprocal of the count) aside, what stays is the two gradients.
    assert kept_short == grad_hidden(short) + grad_weight + 8
    assert kept_long == grad_hidden(long) + grad_weight + 8
    assert forward_long - grad_hidden(long) == forward_short - grad_hidden(short)
    # Beside the gradients: one chunk's logits and log softmax, its part of the weight's gradient, a few numbers a token.
    chunk = 2 * 64 * vocab * 4
    assert chunk / 2 < forward_long - kept_long <= chunk + grad_weight + 64 * (hidden + 16) * 4
    # Backward holds the gradients and their product with the incoming one.
    assert backward_long <= max(forward_long, 2 * (grad_hidden(long) + grad_weight) + 64)
    # The plain loss keeps the log-probabilities of all tokens.
    assert forward_long < long * vocab * 4 / 4


def test_no_gradient_is_made_without_grad_mode() -> None:
    x, weight, targets = _case(256, 8, 512, torch.float32)
    with LiveBytes() as bytes_, torch.no_grad():
        loss = chunked_linear_cross_entropy(x, weight, targets, chunk=64)
    assert not loss.requires_grad
    assert bytes_.live == 4
    assert bytes_.peak + (256 * 8 + 512 * 8) * 4 <= _peaks(256)[0]


def test_gradients_are_freed_by_backward_while_the_loss_lives() -> None:
    x, weight, targets = _case(256, 8, 512, torch.float32)
    with LiveBytes() as bytes_:
        loss = chunked_linear_cross_entropy(x, weight, targets, chunk=64)
        loss.backward()
    x.grad = weight.grad = None
    assert bytes_.live <= 4 + 4  # the loss, and the one that backward starts from
    assert loss.requires_grad


torchs_own = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy")


@pytest.fixture(params=[pytest.param("torch's own", marks=torchs_own), "ours, run again"])
def _kept_nothing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to keep no gradients; without torch's function, torch 2.11's way is taken."""
    if request.param == "ours, run again":
        monkeypatch.delattr(F, "linear_cross_entropy", raising=False)


@pytest.mark.usefixtures("_kept_nothing")
@pytest.mark.parametrize("chunk", [1, 7, 64, 101, 1000, None])
def test_without_kept_gradients_the_result_is_the_same(chunk: int | None) -> None:
    x, weight, targets = _case(101, 24, 53, torch.float64)
    loss = chunked_linear_cross_entropy(x, weight, targets, chunk=chunk, keep_gradients=False)
    expected = _plain(x, weight, targets)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    grads = torch.autograd.grad(loss * 0.37, (x, weight))
    torch.testing.assert_close(grads, torch.autograd.grad(expected * 0.37, (x, weight)), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("_kept_nothing")
def test_without_kept_gradients_only_the_loss_stays() -> None:
    tokens, hidden, vocab, chunk = 4096, 8, 512, 64
    x, weight, targets = _case(tokens, hidden, vocab, torch.float32)
    with LiveBytes() as bytes_:
        loss = chunked_linear_cross_entropy(x, weight, targets, chunk=chunk, keep_gradients=False)
        # The loss; a number a token may be kept beside it, but no gradient and no logits.
        assert bytes_.live <= 16 + tokens * 4
        forward = bytes_.peak
        loss.backward()
    logits, grads = chunk * vocab * 4, (tokens * hidden + vocab * hidden) * 4
    assert forward <= 4 * logits + grads
    assert bytes_.peak <= 4 * logits + 2 * grads + 4 * tokens * 4
    assert bytes_.largest <= max(logits, tokens * hidden * 4)


@pytest.mark.usefixtures("_kept_nothing")
def test_without_kept_gradients_a_bfloat16_loss_is_as_close() -> None:
    x, weight, targets = _case(4096, 64, 257, torch.bfloat16)
    with torch.no_grad():
        x *= 0.3
    loss = chunked_linear_cross_entropy(x, weight, targets, chunk=32, keep_gradients=False)
    assert loss.dtype is torch.float32
    exact = _plain(x.float(), weight.float(), targets)
    assert abs(loss.item() - exact.item()) < 1e-3 * exact.item()


@pytest.mark.usefixtures("_kept_nothing")
def test_without_kept_gradients_autocast_and_nothing_counted() -> None:
    x, weight, targets = _case(100, 16, 31, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_linear_cross_entropy(x, weight, targets, chunk=32, keep_gradients=False)
        kept = chunked_linear_cross_entropy(x, weight, targets, chunk=32)
        none = chunked_linear_cross_entropy(x, weight, torch.full_like(targets, IGNORE), chunk=32, keep_gradients=False)
    assert loss.dtype is torch.float32
    assert abs(loss.item() - kept.item()) < 2**-8 * kept.item()
    assert none.item() == 0.0
    none.backward()
    assert x.grad is not None
    assert not x.grad.any()


SHAPES = {
    "plain": LogitTransformShape(),
    "scaled": LogitTransformShape(scale=0.0625),
    "capped": LogitTransformShape(soft_cap=5.0),
    "scaled and capped": LogitTransformShape(scale=-1.7, soft_cap=5.0),
}


def _shaped(logits: torch.Tensor, shape: LogitTransformShape) -> torch.Tensor:
    logits = logits * shape.scale
    return logits if shape.soft_cap is None else torch.tanh(logits / shape.soft_cap) * shape.soft_cap


@pytest.mark.usefixtures("_kept_nothing")
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "again"])
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "matrix"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bias_and_shape_give_the_plain_loss_and_gradients(
    shape: LogitTransformShape, with_bias: bool, keep: bool
) -> None:
    x, weight, targets = _case(101, 24, 53, torch.float64)
    bias = torch.randn(53, dtype=torch.float64, requires_grad=True)
    leaves = (x, weight, bias) if with_bias else (x, weight)
    given = {"bias": bias if with_bias else None, "shape": shape, "keep_gradients": keep}
    logits = _shaped(F.linear(x, weight, given["bias"]), shape)
    for reduction in ("mean", "sum"):
        loss = chunked_linear_cross_entropy(x, weight, targets, chunk=16, reduction=reduction, **given)
        plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction=reduction)
        torch.testing.assert_close(loss, plain, rtol=1e-14, atol=1e-12)
        grads = torch.autograd.grad(loss * 0.37, leaves)
        want = torch.autograd.grad(plain * 0.37, leaves, retain_graph=True)
        torch.testing.assert_close(grads, want, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("_kept_nothing")
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "again"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_does_not_count_can_have_another_number(reduction: Reduction, keep: bool) -> None:
    x, weight, targets = _case(60, 8, 13, torch.float64)
    targets[targets == IGNORE] = 3
    loss = chunked_linear_cross_entropy(
        x, weight, targets, chunk=16, reduction=reduction, ignore_index=3, keep_gradients=keep
    )
    logits = F.linear(x, weight)
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=3, reduction=reduction)
    torch.testing.assert_close(loss, plain, rtol=0, atol=1e-12)


def test_shaped_bfloat16_loss_is_within_a_thousandth_of_float32s() -> None:
    x, weight, targets = _case(4096, 64, 257, torch.bfloat16)
    with torch.no_grad():
        x *= 0.3
    bias, shape = torch.randn(257).bfloat16(), LogitTransformShape(scale=2.0, soft_cap=8.0)
    loss = chunked_linear_cross_entropy(x, weight, targets, chunk=32, bias=bias, shape=shape)
    logits = _shaped(F.linear(x.float(), weight.float(), bias.float()), shape)
    exact = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    assert abs(loss.item() - exact.item()) < 1e-3 * exact.item()


def test_memory_of_a_shaped_loss_does_not_depend_on_the_length_either() -> None:
    hidden, vocab, chunk = 8, 512, 64
    beyond = []
    for tokens in (1024, 8192):
        x, weight, targets = _case(tokens, hidden, vocab, torch.float32)
        bias = torch.zeros(vocab, requires_grad=True)
        grads = (tokens * hidden + vocab * hidden + vocab) * 4
        with LiveBytes() as alive:
            loss = chunked_linear_cross_entropy(
                x, weight, targets, chunk=chunk, bias=bias, shape=SHAPES["scaled and capped"]
            )
        assert loss.requires_grad
        assert alive.live == grads + 8
        assert alive.largest == max(chunk * vocab, tokens * hidden) * 4
        beyond.append(alive.peak - alive.live)
    assert beyond[0] == beyond[1]
    # Three of a chunk's logits: capped, the tanh behind the cap and the log softmax; and the parts of the gradients.
    assert 2 * chunk * vocab * 4 < beyond[0] <= 4 * chunk * vocab * 4 + vocab * hidden * 4


@torchs_own
def test_torchs_bfloat16_weight_gradient_is_summed_chunk_by_chunk_in_bfloat16() -> None:
    # Why keeping gradients is the default; when torch is as good this fails, and torch's own may take its place.
    x, weight, targets = _case(4096, 64, 512, torch.bfloat16)
    with torch.no_grad():
        x *= 0.3
    exact_weight = weight.detach().float().requires_grad_()
    (exact,) = torch.autograd.grad(_plain(x.detach().float(), exact_weight, targets), (exact_weight,))

    def error(keep: bool, chunks: int) -> float:
        loss = chunked_linear_cross_entropy(x, weight, targets, chunk=4096 // chunks, keep_gradients=keep)
        (grad,) = torch.autograd.grad(loss, (weight,))
        return float((grad.float() - exact).norm() / exact.norm())

    assert error(True, 256) < 1.1 * error(True, 4)
    assert error(False, 256) > 2 * error(False, 4)
    assert error(False, 256) > 2 * error(True, 256)
