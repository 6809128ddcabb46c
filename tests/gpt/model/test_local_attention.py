"""Local attention: exact, in blocks, linear in memory, the same bits with memo at every level, full where the window is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.utils._python_dispatch import TorchDispatchMode

import memo
from memo.gpt import AttentionPattern, GPTConfig, preset
from memo.gpt.model import GPT, local_attention
from memo.gpt.model.attention import attend, attend_within
from memo.gpt.model.attention_kernel import AttentionKind, Kernel, KernelChoice, choose
from memo.gpt.model.packed_documents import DocumentSpans
from memo.swap import Level

Tensors = tuple[torch.Tensor, ...]


def _qkv(seq: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> Tensors:
    torch.manual_seed(0)
    return tuple(torch.randn(2, seq, n, 16, dtype=dtype).requires_grad_() for n in (4, kv_heads, kv_heads))


def _masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int) -> torch.Tensor:
    """Attention over all pairs of tokens, those out of the window masked."""
    key, value = (tensor.repeat_interleave(query.shape[2] // tensor.shape[2], 2) for tensor in (key, value))
    token = torch.arange(query.shape[1])
    ahead = token[:, None] - token
    scores = torch.einsum("bqnd,bknd->bnqk", query, key) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill((ahead < 0) | (ahead >= window), -torch.inf)
    return torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), value)


def _with_gradients(out: torch.Tensor, tensors: Tensors) -> Tensors:
    torch.manual_seed(1)
    return out, *torch.autograd.grad(out, tensors, torch.randn(out.shape).to(out.dtype))


@pytest.mark.covering(2)
@pytest.mark.parametrize("kernel", [local_attention._FUSED, local_attention._PRODUCTS], ids=["fused", "products"])
@pytest.mark.parametrize(
    ("seq", "window"), [(48, 1), (48, 7), (128, 127), (129, 128), (300, 40), (300, 129), (300, 290)]
)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_it_is_attention_with_a_mask(
    seq: int, window: int, kv_heads: int, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_attention, "_kernel", lambda _: kernel)
    tensors = _qkv(seq, kv_heads)
    found = _with_gradients(local_attention.local_attention(*tensors, window), tensors)
    plain = _with_gradients(_masked(*tensors, window), tensors)
    # Sums of up to 300 products of numbers of order one, in another order.
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", [local_attention._FUSED, local_attention._PRODUCTS], ids=["fused", "products"])
def test_half_precision_is_as_near_as_its_roundings(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_attention, "_kernel", lambda _: kernel)
    tensors = _qkv(300, 2, torch.bfloat16)
    found = _with_gradients(local_attention.local_attention(*tensors, 150), tensors)
    wide = tuple(tensor.detach().double().requires_grad_() for tensor in tensors)
    plain = _with_gradients(_masked(*wide, 150), wide)
    for one, exact in zip(found, plain, strict=True):
        # bfloat16 has 8 bits: probabilities, sums and results are rounded a few times each.
        assert (one - exact).abs().max() <= 8 * 2**-8 * exact.abs().max()


def test_a_window_of_the_sequence_has_the_bits_of_full_attention() -> None:
    tensors = _qkv(300, 2, torch.float32)
    full = _with_gradients(attend(*tensors), tensors)
    for window in (300, 301, 1 << 40):
        wide = _with_gradients(attend(*tensors, window=window), tensors)
        assert all(map(torch.equal, full, wide))


def test_documents_have_their_own_windows() -> None:
    tokens = torch.zeros(2, 48, dtype=torch.int64)
    tokens[0, [9, 40]] = tokens[1, 20] = 1
    spans, tensors = DocumentSpans.of(tokens, 1), _qkv(48, 2)
    found = _with_gradients(attend_within(*tensors, spans, window=12), tensors)
    parts, begin = [], 0
    flat = [tensor.flatten(0, 1) for tensor in tensors]
    for length in spans.lengths:
        parts.append(_masked(*(tensor[None, begin : begin + length] for tensor in flat), 12)[0])
        begin += length
    plain = _with_gradients(torch.cat(parts).view(tensors[0].shape), tensors)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("documents", [False, True])
def test_a_local_layer_sees_its_window_and_nothing_before(documents: bool) -> None:
    shape = preset("local-tiny", max_seq=160, pattern=AttentionPattern(window=24, full_every=2))
    model, x = GPT(shape), torch.randn(1, 160, shape.hidden)
    spans = DocumentSpans.of(torch.zeros(1, 160, dtype=torch.int64), 1) if documents else None

    def last(layer: int, change: slice) -> torch.Tensor:
        other = x.clone()
        other[:, change] *= -1.0
        out: torch.Tensor = model.layers[layer](other, None, spans)
        return out[0, -1]

    assert torch.equal(last(0, slice(0, 136)), last(0, slice(0, 0)))
    assert not torch.equal(last(0, slice(136, 137)), last(0, slice(0, 0)))
    assert not torch.equal(last(1, slice(0, 1)), last(1, slice(0, 0)))  # full


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operator makes, and the operators that are attention."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.attention = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.attention |= {func._schema.name} if "attention" in func._schema.name else set()
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.untyped_storage().nbytes() // one.element_size())
        return out


def test_nothing_in_a_step_is_quadratic_or_more_than_the_window_times_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    seq = 2048
    config = preset("local-tiny", layers=2, hidden=32, heads=4, max_seq=seq)
    model, tokens = GPT(config), torch.randint(0, config.vocab_size, (1, seq))
    with _Largest() as seen:
        model(tokens, tokens).backward()
    names = {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"}
    own = {"memo::local_attention", "memo::local_attention_backward"}
    assert seen.attention == own | {f"aten::{name}" for name in names}
    assert seen.elements <= seq * config.vocab_size < seq * seq // 4
    masks: list[torch.Size] = []
    mask = local_attention._mask
    monkeypatch.setattr(
        local_attention,
        "_mask",
        lambda *given, **sizes: masks.append(mask(*given, **sizes).shape) or mask(*given, **sizes),
    )
    local_attention.local_attention(*(tensor.detach() for tensor in _qkv(seq, 4, torch.float32)), 64)
    assert masks == [(128, 128), (128, 191)]  # of the first block, and of all others


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("documents", [False, True])
def test_gradients_are_the_same_bits_at_every_level(dtype: torch.dtype, documents: bool) -> None:
    shape = preset("tiny", layers=2, heads=4, hidden=64, max_seq=160, pattern=AttentionPattern(window=24, full_every=2))
    shape = preset("tiny", **{**_fields(shape), "end_of_document": 3 if documents else None})
    plain = _two_steps(shape, dtype)
    for setting in (
        {"alpha": 1.0},
        {"alpha": 0.5},
        {"alpha": 0.0},
        {"levels": {0: Level.SAVE_MATMULS, 1: Level.SAVE_INPUT}},
        {"levels": {0: Level.SAVE_INPUT, 1: 0.25}},
    ):
        assert all(map(torch.equal, plain, _two_steps(shape, dtype, **setting))), setting


def _fields(shape: GPTConfig) -> dict[str, Any]:
    names = ("layers", "heads", "hidden", "max_seq", "pattern")
    return {name: getattr(shape, name) for name in names}


def _two_steps(shape: GPTConfig, dtype: torch.dtype, **setting: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, found = GPT(shape, dtype=dtype), []
    manager = memo.offload(model, min_bytes=0, **setting) if setting else None
    for step in range(2):
        tokens = torch.randint(0, shape.vocab_size, (2, 160), generator=torch.Generator().manual_seed(step))
        if manager is None:
            loss = model(tokens, tokens)
        else:
            with manager:
                loss = model(tokens, tokens)
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        model.zero_grad()
    if manager is not None:
        manager.close()
    return found


def test_it_is_kept_as_attention_is_and_saves_the_bytes_of_full_attention() -> None:
    shape = preset("local-tiny", layers=2, max_seq=160)
    model, tokens = GPT(shape), torch.zeros(1, 160, dtype=torch.int64)
    with memo.offload(model, alpha=0.0, min_bytes=0) as manager:
        loss = model(tokens, tokens)
    local, full = manager.explain(0), manager.explain(1)
    (attention,) = (row for row in local.rows if "attention" in row.operator)
    assert (attention.operator, attention.why) == ("memo.local_attention", "attention is kept")
    assert local.saved_nbytes == full.saved_nbytes
    assert sum(row.kept_nbytes for row in local.rows) == sum(row.kept_nbytes for row in full.rows)
    loss.backward()
    manager.close()


def test_a_gpus_half_precision_is_by_a_kernel_with_a_window_and_all_else_in_blocks() -> None:
    def chosen(device: str, dtype: torch.dtype, head_dim: int = 64) -> KernelChoice:
        shape = {"heads": 8, "kv_heads": 2, "head_dim": head_dim, "local": True}
        return choose(AttentionKind(device=torch.device(device), dtype=dtype, **shape))

    blocks = KernelChoice(kernel=Kernel.BLOCKS)
    assert chosen("cpu", torch.float32) == chosen("cpu", torch.bfloat16) == blocks
    if not torch.cuda.is_available():
        assert chosen("cuda", torch.bfloat16).kernel is Kernel.FLASH
    assert chosen("cuda", torch.float32) == blocks


def test_torchs_flash_kernel_gets_the_window_it_counts_without_the_token_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("memo.gpt.model.attention.choose", lambda _: KernelChoice(kernel=Kernel.FLASH))
    tensors = tuple(torch.empty(2, 48, n, 16, dtype=torch.bfloat16, device="meta").requires_grad_() for n in (4, 2, 2))
    out = attend(*tensors, window=12)
    node: Any = out.grad_fn
    assert (node._saved_window_size_left, node._saved_window_size_right) == (11, 0)
    out.sum().backward()
    assert [tensor.grad.shape for tensor in tensors if tensor.grad is not None] == [one.shape for one in tensors]


def test_compiled_layers_have_it_without_a_break() -> None:
    torch._dynamo.reset()
    model = GPT(preset("local-tiny", layers=2, max_seq=160))
    tokens = torch.randint(0, 257, (1, 160))
    parameters = tuple(model.parameters())
    plain = _with_gradients(model(tokens, tokens), parameters)
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, plain, _with_gradients(model(tokens, tokens), parameters)))
