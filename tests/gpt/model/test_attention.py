"""Attention: only fused kernels, in every precision, forward and backward; shared heads equal repeated ones."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import library as operator_library
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memo
from memo.errors import DeviceOutOfMemory, SwapError
from memo.gpt import Variant, preset
from memo.gpt.model import GPT, attention_kernel
from memo.gpt.model.attention import attend, attend_within
from memo.gpt.model.attention_kernel import AttentionKind, Kernel, KernelChoice, choose, is_refusal, refuse, score_bytes
from memo.gpt.model.packed_documents import DocumentSpans

FLASH = {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"}


class Seen(TorchDispatchMode):
    """Names of the operations that ran, and the largest tensor any of them made."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.untyped_storage().nbytes() // value.element_size())
        return result

    @property
    def attention(self) -> set[str]:
        """Without the loss's log softmax."""
        attention = {name for name in self.names if "attention" in name or "softmax" in name or "bmm" in name}
        return attention - {"_log_softmax"}


def _qkv(
    heads: int, kv_heads: int, dtype: torch.dtype, seq: int = 48, d: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, seq, n, d, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_only_the_fused_kernel_runs_on_a_cpu(dtype: torch.dtype, kv_heads: int) -> None:
    query, key, value = _qkv(4, kv_heads, dtype)
    with Seen() as seen:
        attend(query, key, value).sum().backward()
    assert seen.attention == FLASH


@pytest.mark.parametrize("variant", ["gpt", "llama"])
def test_nothing_in_a_training_step_is_quadratic(variant: Variant) -> None:
    seq = 2048
    config = preset("tiny", variant=variant, layers=2, hidden=32, heads=4, max_seq=seq)
    model = GPT(config)
    tokens = torch.randint(0, config.vocab_size, (1, seq))
    with Seen() as seen:
        model(tokens, tokens).backward()
    assert seen.attention == FLASH
    assert seen.largest <= seq * config.vocab_size < seq * seq // 4


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_shared_heads_equal_repeated_ones(kv_heads: int) -> None:
    query, key, value = _qkv(4, kv_heads, torch.float64)
    upstream = torch.randn(2, 48, 4, 16, dtype=torch.float64)
    shared = attend(query, key, value)
    grads = torch.autograd.grad(shared, (query, key, value), upstream)

    scores = torch.einsum("bqnd,bknd->bnqk", query, key.repeat_interleave(4 // kv_heads, 2)) / 4.0
    scores = scores.masked_fill(torch.ones(48, 48).triu(1).bool(), -torch.inf)
    plain = torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), value.repeat_interleave(4 // kv_heads, 2))
    plain_grads = torch.autograd.grad(plain, (query, key, value), upstream)

    torch.testing.assert_close(shared, plain, rtol=0, atol=1e-12)
    torch.testing.assert_close(grads, plain_grads, rtol=0, atol=1e-12)


def test_repeating_heads_gives_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = _qkv(4, 2, torch.float64)
    grouped = attend(query, key, value)
    monkeypatch.setattr("memo.gpt.model.attention.choose", lambda kind: KernelChoice(kernel=Kernel.FLASH, repeats=True))
    torch.testing.assert_close(attend(query, key, value), grouped, rtol=0, atol=1e-14)


def test_a_later_token_changes_nothing_earlier() -> None:
    query, key, value = _qkv(2, 2, torch.float32)
    before = attend(query, key, value)[:, :40]
    with torch.no_grad():
        key[:, 40:] += 1.0
        value[:, 40:] += 1.0
    assert torch.equal(attend(query, key, value)[:, :40], before)


def _kind(device: str = "cpu", dtype: torch.dtype = torch.bfloat16, **others: Any) -> AttentionKind:
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 16} | others
    return AttentionKind(device=torch.device(device), dtype=dtype, **shape)


PACKAGES = {kernel: 1 for kernel in Kernel if kernel.package is not None}
TWO = {Kernel.FLASH_ATTN_2: 1, Kernel.CUDNN: 2}


@pytest.fixture
def _fresh_choices() -> Iterator[None]:
    """Clears the cached choices before and after a test that changes their conditions."""
    choose.cache_clear()
    yield
    attention_kernel._refused.clear()
    choose.cache_clear()


@contextmanager
def _refusing(operator: str, key: str, longest: int) -> Iterator[list[int]]:
    """Makes one of torch's attention operators refuse more than `longest` tokens; yields the lengths of its calls."""
    original, seen = getattr(torch.ops.aten, operator).default, []

    def refuse_longer(keys: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(query.shape[2])
        if query.shape[2] > longest:
            raise RuntimeError("No valid execution plans built.\nmore lines")
        return original.redispatch(keys & torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), query, *args, **kwargs)

    with operator_library._scoped_library("aten", "IMPL") as kernels:
        kernels.impl(operator, refuse_longer, key, with_keyset=True)
        yield seen


CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.usefixtures("_fresh_choices")
def test_a_kernel_that_refuses_a_length_is_replaced_in_one_line_and_for_good() -> None:
    long, short = _qkv(4, 2, torch.float64), _qkv(4, 2, torch.float64, seq=16)
    expected = [attend(*tensors) for tensors in (long, short)]
    with _refusing(CPU_FLASH, "AutogradCPU", 32) as seen:
        attend(*short)
        with pytest.warns(RuntimeWarning) as told:
            found = attend(*long)
        # A part of the tokens, in a recompute, goes the way of all of them, though the kernel would take so few.
        part = attend(*short)
    assert seen == [16, 48]
    assert torch.allclose(found, expected[0], rtol=0, atol=1e-14)
    assert torch.allclose(part, expected[1], rtol=0, atol=1e-14)
    (line,) = [str(warning.message) for warning in told]
    assert line == (
        "attention: flash, in torch refused: No valid execution plans built.; "
        "instead: torch's own of all pairs of tokens, quadratic in memory"
    )


@pytest.mark.usefixtures("_fresh_choices")
def test_a_recompute_does_not_turn_to_another_kernel_than_its_forward() -> None:
    query, key, value = _qkv(4, 4, torch.float64)
    out = checkpoint(attend, query, key, value, use_reentrant=False)
    with _refusing(CPU_FLASH, "AutogradCPU", 32), pytest.raises(RuntimeError, match="No valid execution plans"):
        out.sum().backward()
    assert choose(_kind(dtype=torch.float64, kv_heads=4)) == KernelChoice(kernel=Kernel.FLASH)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory"),
        SwapError("a layer did not repeat"),
    ],
)
def test_what_another_kernel_would_meet_as_well_is_no_refusal(error: Exception) -> None:
    assert not is_refusal(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built."),
        RuntimeError("No available kernel. Aborting execution."),
        ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda"),
        torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"),
        AssertionError("(head_dim, head_dim_v)=(256, 128) is not supported on SM90."),
    ],
)
def test_a_kernel_that_is_not_there_or_does_not_support_it_refuses(error: Exception) -> None:
    assert is_refusal(error)


@pytest.mark.usefixtures("_fresh_choices")
def test_the_package_that_throws_is_replaced_by_torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernel, "installed", lambda package: package == "flash_attn_interface")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention_kernel, "_is_supported", lambda kernel, kind, repeats: True)
    assert choose(_kind("cuda")).kernel is Kernel.FLASH_ATTN_3
    with pytest.warns(RuntimeWarning, match=r"flash_attn_interface package refused: undefined symbol; instead: cuDNN"):
        refuse(_kind("cuda"), Kernel.FLASH_ATTN_3, ImportError("undefined symbol"))
    assert choose(_kind("cuda")).kernel is Kernel.CUDNN
    assert choose(_kind("cuda", heads=8)).kernel is Kernel.FLASH_ATTN_3


@pytest.mark.usefixtures("_fresh_choices")
@pytest.mark.parametrize(
    ("kind", "installed", "takes", "choice"),
    [
        (_kind("cuda"), True, PACKAGES, KernelChoice(kernel=Kernel.FLASH_ATTN_3)),
        (_kind("cuda", torch.float16), True, PACKAGES, KernelChoice(kernel=Kernel.FLASH_ATTN_3)),
        (_kind("cuda"), True, {Kernel.FLASH_ATTN_2: 1, Kernel.CUDNN: 2}, KernelChoice(kernel=Kernel.CUDNN)),
        (
            _kind("cuda", packed=True),
            True,
            {Kernel.FLASH_ATTN_2: 1, Kernel.CUDNN: 2},
            KernelChoice(kernel=Kernel.FLASH_ATTN_2),
        ),
        (_kind("cuda", local=True), True, PACKAGES, KernelChoice(kernel=Kernel.FLASH_ATTN_3)),
        (_kind("cuda", local=True), True, {Kernel.CUDNN: 2, Kernel.FLASH: 4}, KernelChoice(kernel=Kernel.FLASH)),
        (_kind("cuda", local=True), True, {}, KernelChoice(kernel=Kernel.BLOCKS)),
        (_kind("cuda"), False, {Kernel.CUDNN: 2, Kernel.FLASH: 2}, KernelChoice(kernel=Kernel.CUDNN)),
        (_kind("cuda"), False, {Kernel.FLASH: 2, Kernel.EFFICIENT: 4}, KernelChoice(kernel=Kernel.FLASH)),
        (
            _kind("cuda", torch.float32),
            True,
            {Kernel.EFFICIENT: 4},
            KernelChoice(kernel=Kernel.EFFICIENT, repeats=True),
        ),
        (_kind("cuda", head_dim=512), True, {Kernel.EFFICIENT: 4}, KernelChoice(kernel=Kernel.EFFICIENT, repeats=True)),
        (_kind("cuda", head_dim=512), True, {}, KernelChoice(kernel=Kernel.MATH)),
        (_kind("cpu"), True, {Kernel.FLASH: 2}, KernelChoice(kernel=Kernel.FLASH)),
    ],
)
def test_the_choice_of_kernel(
    kind: AttentionKind,
    installed: bool,
    takes: dict[Kernel, int],
    choice: KernelChoice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # `takes`: the kernels that this GPU would have, and the fewest key/value heads that each takes for four.
    monkeypatch.setattr(attention_kernel, "installed", lambda package: installed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        attention_kernel,
        "_is_supported",
        lambda kernel, kind, repeats: takes.get(kernel, 99) <= (kind.heads if repeats else kind.kv_heads),
    )
    assert choose(kind) == choice


@pytest.mark.usefixtures("_fresh_choices")
def test_torchs_flash_comes_before_cudnn_on_older_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernel, "installed", lambda package: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(attention_kernel, "_is_supported", lambda kernel, kind, repeats: True)
    assert choose(_kind("cuda")).kernel is Kernel.FLASH


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_cpu_is_asked_and_has_the_flash_kernel(dtype: torch.dtype) -> None:
    assert choose(_kind(dtype=dtype)) == KernelChoice(kernel=Kernel.FLASH)


def test_the_choice_is_not_seen_by_modes_around_the_caller() -> None:
    choose.cache_clear()
    query, key, value = _qkv(4, 2, torch.float32)
    with Seen() as seen:
        attend(query, key, value)
    assert "empty" not in seen.names


def test_quadratic_attention_is_refused_with_its_arithmetic_where_it_cannot_fit() -> None:
    seq = 1 << 20
    query, key, value = (torch.zeros(1, seq, heads, 1, dtype=torch.bfloat16) for heads in (2, 1, 1))
    needed = 2 * 1 * 2 * seq * seq * 4
    assert score_bytes(batch=1, heads=2, seq=seq, dtype=torch.bfloat16) == needed
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(DeviceOutOfMemory) as refused:
        attend(query, key, value)
    assert f"2 x 1 x 2 x {seq}^2 x 4 bytes = 16 TiB" in str(refused.value)
    assert "no fused kernel takes 2 heads of 1 in torch.bfloat16" in str(refused.value)


def test_quadratic_attention_runs_where_it_fits() -> None:
    query, key, value = _qkv(4, 2, torch.float64)
    expected = attend(query, key, value)
    with sdpa_kernel(SDPBackend.MATH), Seen() as seen:
        found = attend(query, key, value)
    assert not seen.attention & FLASH
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_the_package_gets_its_own_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        assert options == {"causal": True, "deterministic": False}
        assert q.shape == (2, 48, 4, 16)
        assert k.shape == v.shape == (2, 48, 2, 16)
        return _by_torch(q, k, v), torch.zeros(2, 4, 48)

    _provide(monkeypatch, "flash_attn.cute", flash_attn_func)
    query, key, value = _qkv(4, 2, torch.float32)
    expected = attend(query, key, value)
    monkeypatch.setattr("memo.gpt.model.attention.choose", lambda kind: KernelChoice(kernel=Kernel.FLASH_ATTN_4))
    assert torch.equal(attend(query, key, value), expected)


def _by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _provide(monkeypatch: pytest.MonkeyPatch, package: str, function: Any) -> None:
    module = types.ModuleType(package)
    setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, package, module)


@pytest.mark.usefixtures("_fresh_choices")
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (None, None),
        (lambda out: out * 1.25, r"its result or gradients are 0\.2\d* off torch's"),
        (lambda out: out.detach() + (out - out.detach()) * 1.5, r"its result or gradients are 0\.5\d* off torch's"),
        (lambda out: getattr(out, "nothing"), "has no attribute 'nothing'"),  # noqa: B009
    ],
)
def test_a_package_that_differs_from_torch_is_not_used(
    wrong: Any, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        out = _by_torch(q, k, v)
        return out if wrong is None else wrong(out)  # type: ignore[no-any-return]

    _provide(monkeypatch, "flash_attn_interface", flash_attn_func)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    agrees = (
        pytest.warns(RuntimeWarning, match=f"flash_attn_interface package is not used: .*{why}")
        if why
        else nullcontext()
    )
    before = torch.get_rng_state()
    with agrees, Seen() as seen, torch.no_grad():
        assert attention_kernel._agrees(Kernel.FLASH_ATTN_3, _kind(dtype=torch.bfloat16)) is (why is None)
    assert not seen.names, "modes of the caller saw the trial"
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("_fresh_choices")
@pytest.mark.parametrize("off", [0, 1])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_package_is_compared_within_windows_and_documents_where_it_is_asked_for_them(
    packed: bool, local: bool, off: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, starts: list[int]) -> torch.Tensor:
        at = torch.arange(q.shape[0])
        back = at[:, None] - at
        document = torch.bucketize(at, torch.tensor(starts), right=True)
        seen = (back >= 0) & (back <= window) & (document[:, None] == document)
        q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(0, 1)

    def flash_attn_func(q: Any, k: Any, v: Any, *, window_size: Any = (999, 0), **options: Any) -> torch.Tensor:
        return attended(q[0], k[0], v[0], window_size[0] - 9 * off, [0])[None]

    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, *, cu_seqlens_q: torch.Tensor, window_size: Any = (999, 0), **options: Any
    ) -> torch.Tensor:
        return attended(q, k, v, window_size[0] - 9 * off, [end + 9 * off for end in cu_seqlens_q.tolist()[:-1]])

    _provide(monkeypatch, "flash_attn_interface", flash_attn_func)
    sys.modules["flash_attn_interface"].flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())  # the trial runs on the CPU here
    agrees = off == 0 or not (packed or local)
    told = nullcontext() if agrees else pytest.warns(RuntimeWarning, match="result or gradients are")
    with told:
        kind = _kind(dtype=torch.bfloat16, packed=packed, local=local)
        assert attention_kernel._agrees(Kernel.FLASH_ATTN_3, kind) is agrees


def test_the_folder_of_flash_attention_4_is_not_flash_attention_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    attention_kernel.installed.cache_clear()
    try:
        assert attention_kernel.installed("flash_attn.cute")
        assert not attention_kernel.installed("flash_attn")
    finally:
        attention_kernel.installed.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
            del sys.modules[name]


END = 9


def _rows() -> torch.Tensor:
    """Two rows of 48 tokens in documents of 1 to 30; one ends with its row, one is cut by it."""
    tokens = torch.ones(2, 48, dtype=torch.int64)
    tokens[0, [0, 6, 20, 47]] = END
    tokens[1, [29]] = END
    return tokens


def test_spans_of_packed_documents() -> None:
    spans = DocumentSpans.of(_rows(), END)
    assert spans.lengths == (1, 6, 14, 27, 30, 18)
    assert spans.starts.tolist() == [0, 1, 7, 21, 48, 78, 96]
    assert spans.longest == 30
    assert spans.positions.shape == (2, 48)
    assert spans.positions[0, :10].tolist() == [0, 0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert spans.positions[1, 28:32].tolist() == [28, 29, 0, 1]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_no_token_attends_to_another_document(kv_heads: int) -> None:
    query, key, value = _qkv(4, kv_heads, torch.float64)
    spans = DocumentSpans.of(_rows(), END)
    upstream = torch.randn(2, 48, 4, 16, dtype=torch.float64)
    within = attend_within(query, key, value, spans)
    grads = torch.autograd.grad(within, (query, key, value), upstream)

    document = spans.positions.eq(0).cumsum(1)
    allowed = document[:, :, None].eq(document[:, None, :]) & torch.ones(48, 48).tril().bool()
    scores = torch.einsum("bqnd,bknd->bnqk", query, key.repeat_interleave(4 // kv_heads, 2)) / 4.0
    scores = scores.masked_fill(~allowed[:, None], -torch.inf)
    plain = torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), value.repeat_interleave(4 // kv_heads, 2))
    plain_grads = torch.autograd.grad(plain, (query, key, value), upstream)

    torch.testing.assert_close(within, plain, rtol=0, atol=1e-12)
    torch.testing.assert_close(grads, plain_grads, rtol=0, atol=1e-12)


def test_the_package_gets_all_documents_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = _qkv(4, 2, torch.float32)
    spans = DocumentSpans.of(_rows(), END)
    expected = attend_within(query, key, value, spans)
    calls = []

    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **options: bool,
    ) -> torch.Tensor:
        assert options == {"causal": True, "deterministic": False}
        assert q.shape == (96, 4, 16)
        assert k.shape == v.shape == (96, 2, 16)
        assert cu_seqlens_q.dtype is cu_seqlens_k.dtype is torch.int32
        assert max_seqlen_q == max_seqlen_k == 30
        calls.append(cu_seqlens_q)
        out = torch.empty_like(q)
        for first, last in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_k[1:].tolist(), strict=True):
            parts = (tensor[first:last].transpose(0, 1)[None] for tensor in (q, k, v))
            out[first:last] = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        return out

    _provide(monkeypatch, "flash_attn", flash_attn_varlen_func)
    monkeypatch.setattr("memo.gpt.model.attention.choose", lambda kind: KernelChoice(kernel=Kernel.FLASH_ATTN_2))
    assert torch.equal(attend_within(query, key, value, spans), expected)
    assert len(calls) == 1


@pytest.mark.parametrize("variant", ["gpt", "llama"])
def test_a_packed_row_gives_the_logits_of_its_documents_alone(variant: Variant) -> None:
    config = preset("tiny", variant=variant, layers=2, hidden=32, heads=4, max_seq=48, end_of_document=END)
    model = GPT(config, dtype=torch.float64)
    rows = torch.randint(10, 200, (2, 48))
    rows[_rows() == END] = END
    packed = model(rows).flatten(0, 1).split(DocumentSpans.of(rows, END).lengths)
    documents = rows.flatten().split(DocumentSpans.of(rows, END).lengths)
    for logits, document in zip(packed, documents, strict=True):
        torch.testing.assert_close(logits, model(document[None])[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", ["gpt", "llama"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_packed_documents_train_bit_for_bit_with_memo(variant: Variant, alpha: float) -> None:
    config = preset("tiny", variant=variant, layers=2, hidden=64, heads=4, max_seq=64, end_of_document=END)
    torch.manual_seed(0)
    model = GPT(config)
    rows = torch.randint(0, 40, (1, 64))
    plain = torch.autograd.grad(model(rows, rows), list(model.parameters()))
    with warnings.catch_warnings(), closing(memo.offload(model, alpha=alpha, min_bytes=1, host="64MiB")) as manager:
        warnings.simplefilter("ignore")  # whether a layer with spans is divided by tokens is not the matter here
        with manager:
            loss = model(rows, rows)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        assert manager.stats.bytes_host > 0
    assert all(map(torch.equal, grads, plain))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_attention_on_a_gpu_stays_linear_in_memory(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    seq, heads = 32768, 8
    query, key, value = (
        torch.randn(1, seq, n, 64, device="cuda", dtype=dtype, requires_grad=True) for n in (heads, 2, 2)
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(query, key, value).sum().backward()
    # Scores alone would be seq * seq elements; everything here is a small multiple of seq * heads * 64.
    assert torch.cuda.max_memory_allocated() - before < 40 * seq * heads * 64 * query.element_size()


@pytest.mark.gpu
@pytest.mark.usefixtures("_fresh_choices")
def test_a_model_whose_kernel_refuses_trains_on_with_the_next_bit_for_bit() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    torch.manual_seed(0)
    model = GPT(preset("tiny", layers=3, max_seq=256), device="cuda", dtype=torch.bfloat16)
    kind = AttentionKind(device=model.tokens.weight.device, dtype=torch.bfloat16, heads=2, kv_heads=2, head_dim=64)
    first = choose(kind).kernel
    if first not in (Kernel.CUDNN, Kernel.FLASH):
        pytest.skip(f"{first.value} is not torch's")
    ids = torch.randint(0, 257, (1, 257), device="cuda")
    operator = "_scaled_dot_product_cudnn_attention" if first is Kernel.CUDNN else "_scaled_dot_product_flash_attention"
    with (
        _refusing(operator, "AutogradCUDA", 0) as seen,
        closing(memo.offload(model, alpha=0.5, min_bytes=1, host="64MiB", disk=[])) as manager,
    ):
        found = []
        for _ in range(2):
            with manager:
                loss = model(ids[:, :-1], ids[:, 1:])
            found.append(torch.autograd.grad(loss, list(model.parameters())))
        plain = torch.autograd.grad(model(ids[:, :-1], ids[:, 1:]), list(model.parameters()))
        assert manager.stats.bytes_recomputed > 0
    assert seen == [256]
    assert choose(kind).kernel is not first
    for gradients in found:
        assert all(map(torch.equal, gradients, plain))
