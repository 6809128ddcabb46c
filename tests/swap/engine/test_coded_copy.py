"""Copies as codes: half or a quarter of the bytes for a bounded error, the same whenever backward asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from code_bounds import error_bound
from race_checker import CheckingBackend, CheckingDisk
from torch import nn

import memo
from memo.errors import UsageError
from memo.kernels import Codec
from memo.kernels.codec import LARGEST
from memo.swap import Engine
from memo.swap.tiers import DiskTier, HostTier

VALUES = 4096
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CODECS = [Codec.INT8, Codec.FP8]


def engine_of(codec: Codec | None, policy: str = "lazy") -> Engine:
    backend = CheckingBackend(policy)
    return Engine(backend, [HostTier(backend, 1 << 20)], min_bytes=1, codec=codec)


def around(engine: Engine, tensors: list[torch.Tensor], *, released: bool = True) -> list[torch.Tensor]:
    """What backward gets of tensors that a layer saves; their sources are released before, or not."""
    hidden = torch.empty(VALUES)
    group = engine.begin_layer(0, "first", (hidden,), {}, last=False)
    handles = [engine.pack(tensor) for tensor in tensors]
    engine.end_layer(group, between=False)
    if released:
        following = engine.begin_layer(1, "second", (hidden,), {}, last=False)
        engine.end_layer(following, between=False)
    engine.end_forwards()
    return [engine.unpack(handle).clone() for handle in handles]


@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_come_back_within_the_bound(dtype: torch.dtype, codec: Codec, released: bool) -> None:
    torch.manual_seed(0)
    engine, saved = engine_of(codec), torch.randn(64, 64).to(dtype)
    (got,) = around(engine, [saved.t()], released=released)
    off = (got.t().double() - saved.double()).abs().flatten()
    assert not torch.equal(got, saved.t())
    assert (off <= error_bound(saved.flatten(), codec)).all()
    assert engine.stats.bytes_codes == codec.nbytes(VALUES) == engine.tiers[0].peak
    engine.close()


@pytest.mark.promise("R6")
@pytest.mark.parametrize("codec", CODECS)
def test_backward_gets_the_same_whether_or_not_the_source_is_still_there(codec: Codec) -> None:
    saved = torch.randn(64, 64)
    results = [around(engine_of(codec), [saved.clone()], released=released)[0] for released in (True, False)]
    assert torch.equal(*results)


@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_storage_that_is_not_finite_is_exact_and_counted(value: float, released: bool) -> None:
    engine, saved = engine_of(Codec.INT8), torch.randn(64, 64)
    saved[3, 5] = value
    want = saved.clone()
    (got,) = around(engine, [saved], released=released)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    if released:
        assert engine.stats.coded_exact == 1
        assert engine.stats.bytes_codes == 0
    engine.close()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 1.9 * LARGEST])
def test_on_disk_it_is_exact_too_and_what_is_saved_beside_it_is_coded(value: float, codec: Codec) -> None:
    backend = CheckingBackend("lazy")
    engine = Engine(backend, [DiskTier(CheckingDisk(backend, 1 << 20), 1 << 20)], min_bytes=1, codec=codec)
    broken, beside = torch.randn(64, 64), torch.randn(64, 64)
    broken[63, 63] = value
    want, others = broken.clone(), beside.clone()
    got, coded = around(engine, [broken, beside])
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    assert not torch.equal(coded, others)
    assert engine.stats.coded_exact == 1
    assert engine.stats.bytes_disk == 4 * VALUES + codec.nbytes(VALUES)
    engine.close()


@pytest.mark.parametrize(
    "saved",
    [
        torch.arange(VALUES),
        torch.rand(VALUES) > 0.5,
        torch.rand(VALUES, dtype=torch.float64),
        torch.randn(VALUES // 8),
        torch.empty(0),
    ],
    ids=["indices", "mask", "float64", "statistics", "empty"],
)
def test_what_is_never_coded_comes_back_exactly(saved: torch.Tensor) -> None:
    engine, want = engine_of(Codec.INT8), saved.clone()
    (got,) = around(engine, [saved])
    assert torch.equal(got, want)
    assert engine.stats.bytes_coded == 0
    engine.close()


def test_a_view_of_another_type_is_exact() -> None:
    engine, saved = engine_of(Codec.INT8), torch.randn(VALUES)
    want = saved.clone()
    _, got = around(engine, [saved, saved.view(torch.int32)])
    assert torch.equal(got, want.view(torch.int32))
    engine.close()


@pytest.mark.parametrize("again", [False, True], ids=["read from its source", "copied once more"])
def test_a_storage_whose_coding_had_no_memory_is_not_taken_for_coded(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block was there before its codes were checked: backward was an AssertionError."""
    engine, saved, hidden = engine_of(Codec.INT8), torch.randn(64, 64), torch.empty(VALUES)
    group = engine.begin_layer(0, "first", (hidden,), {}, last=False)
    handle = engine.pack(saved.clone())
    monkeypatch.setattr("memo.swap.engine.coded_copy.encode", _no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        engine.end_layer(group, between=False)
    monkeypatch.undo()
    if again:
        engine.end_layer(group, between=False)
        engine.end_layer(engine.begin_layer(1, "second", (hidden,), {}, last=False), between=False)
    engine.end_forwards()
    off = (engine.unpack(handle).double() - saved.double()).abs().flatten()
    assert (off <= error_bound(saved.flatten(), Codec.INT8)).all()
    engine.close()


def _no_memory(*args: object, **kwargs: object) -> None:
    raise torch.OutOfMemoryError


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def trained(codec: Any, **options: Any) -> tuple[list[torch.Tensor], memo.manager.Report]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(64) for _ in range(3)))
    manager = memo.offload(model, layers=Layer, min_bytes="1KiB", codec=codec, **options)
    with manager:
        loss = model(torch.randn(2, 128, 64)).pow(2).mean()
    loss.backward()
    report = manager.report()
    manager.close()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], report


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_gradients_are_near_and_the_report_has_the_bytes_and_the_error(tier: str, tmp_path: Any) -> None:
    room = {"host": "16MiB"} if tier == "host" else {"host": 0, "disk": tmp_path}
    want, plain = trained(None, alpha=1.0, **room)
    got, report = trained("int8", alpha=1.0, **room)
    assert plain.coded is None
    assert report.coded is not None
    assert 3.8 < report.coded.decoded_bytes / report.coded.moved_bytes < 4
    assert 0 < report.coded.largest_error <= 1 / 254 * (1 + 2**-13)
    assert "codec: " in str(report)
    for one, other in zip(got, want, strict=True):
        assert (one - other).norm() < 0.05 * other.norm()
    assert not torch.equal(got[0], want[0])  # of the first layer, whose tensors move


def test_checksums_are_of_what_moves() -> None:
    want, _ = trained("int8", alpha=1.0, host="16MiB")
    got, _ = trained("int8", alpha=1.0, host="16MiB", verify=True)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_layers_of_which_something_is_recomputed_are_not_coded() -> None:
    """What they move is what they are recomputed from."""
    _, whole = trained("int8", alpha=1.0, host="16MiB")
    _, report = trained("int8", levels={0: 0.9}, host="16MiB")
    assert whole.coded is not None
    assert report.coded is not None
    assert report.coded.decoded_bytes == whole.coded.decoded_bytes / 2  # of two layers, and a third that never moves


@pytest.mark.parametrize("options", [{"alpha": 0.9}, {"alpha": 0.0}, {"levels": {0: 0.5, 1: 0.5, 2: 0.5}}])
def test_a_codec_for_nothing_is_refused_in_one_line(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"^codec: nothing would be coded"):
        trained("int8", host="16MiB", **options)


class Chooses(nn.Module):
    """Ends in a tanh, whose result it saves and the next layer is given; the second one chooses rows of a table by it."""

    def __init__(self, chooses: bool) -> None:
        super().__init__()
        self.linear, self.gate, self.chooses = nn.Linear(64, 64), nn.Linear(64, 512), chooses
        self.table = nn.Embedding(512, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.linear(x.sin())
        return torch.tanh(h + self.table(self.gate(x).argmax(-1)) if self.chooses else h)


def test_a_layer_is_not_recomputed_from_what_another_one_has_coded() -> None:
    """Another row of the table would be chosen: wrong by far more than a code. The layers' levels change meanwhile."""

    def run(codec: str | None) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(*(Chooses(chooses) for chooses in (False, True, False)))
        levels = {0: 0.0, 1: 0.0}
        manager = memo.offload(model, layers=Chooses, min_bytes=1, levels=levels, codec=codec, host="64MiB")  # type: ignore[arg-type]
        found = []
        for step in range(5):
            if step == 3:
                manager.choose_levels({1: 0.0})
            torch.manual_seed(step)
            with manager:
                loss = model(torch.randn(1024, 64)).sum()
            model.zero_grad()
            loss.backward()
            found.append(model[1].table.weight.grad.clone())
        report = manager.report()
        assert report.recompute is not None
        assert report.recompute.accepted == 1
        assert (report.coded is not None) == (codec is not None)
        manager.close()
        return found

    for ours, exact in zip(run("int8"), run(None), strict=True):
        assert torch.equal(ours, exact)
