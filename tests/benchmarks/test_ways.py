"""The ways that the benchmarks compare: each gives plain training's gradients, and its row's figures are what they say."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.comparison import Setup, compare, relative_norm
from benchmarks.gpu_bench import main, parsed
from benchmarks.gpu_plans import at_alphas
from benchmarks.longest import bisect
from benchmarks.peers import fetched
from benchmarks.peers.moved import Moved
from benchmarks.peers.ways import (
    ATTENTION,
    AXOLOTL,
    CHECKPOINTING,
    DEEPSPEED,
    KEEP,
    SAVE_ON_CPU,
    SELECTIVE,
    TRANSFORMERS,
    TRANSFORMERS_ATTENTION,
    TRL,
    Compute,
    Running,
    Way,
    libraries,
    peers,
    simple,
)
from benchmarks.table import Row, Table
from memo.errors import UsageError
from memo.gpt import preset
from memo.gpt.model import GPT
from memo.machine import LinkRates

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CONFIG = preset("tiny", layers=3, hidden=64, max_seq=192, positions="rotary", vocab_size=97)
HIDDEN_BYTES = 192 * 64 * 4


def rows_of(ways: list[Way], *, dtype: torch.dtype = torch.float32, optimizer: bool = False) -> dict[str, Row]:
    setup = Setup(model="tiny", device=CPU, rounds=1, warm_up_steps=1, dtype=dtype, optimizer=optimizer)
    return {row.way: row for row in compare(setup, CONFIG, ways).rows}


@pytest.mark.parametrize(("dtype", "optimizer"), [(torch.float32, False), (torch.bfloat16, True)])
def test_each_way_gives_the_gradients_of_plain_training_bit_for_bit(dtype: torch.dtype, optimizer: bool) -> None:
    ours = at_alphas((0.0, 1.0), "64MiB")
    rows = rows_of([*peers(), *libraries(), *ours], dtype=dtype, optimizer=optimizer)
    ran = {name for name, row in rows.items() if row.failed is None}
    # An accelerator, a model of transformers', and an installed DeepSpeed are not here.
    assert ran == set(rows) - {TRL, TRANSFORMERS, TRANSFORMERS_ATTENTION, AXOLOTL, DEEPSPEED}
    # torch's save_on_cpu gives backward contiguous copies: other strides, rounded another way by some processors' bfloat16.
    exact = ran - {SAVE_ON_CPU} if dtype == torch.bfloat16 else ran
    assert {rows[name].gradient_difference for name in exact} == {0.0}
    assert (rows[SAVE_ON_CPU].gradient_difference or 0) < 0.01
    assert len({rows[name].loss for name in ran}) == 1
    assert {rows[name].compared_with for name in ran} == {KEEP}


def test_a_gradient_that_differs_by_one_bit_is_seen() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return torch.nextafter(grad, grad.new_tensor(torch.inf))

    def around(model: GPT) -> Any:
        return model.layers[1].register_forward_hook(lambda module, args, out: Wrong.apply(out))  # type: ignore[no-untyped-call]

    rows = rows_of([peers()[0], simple("wrong", around, Compute.ONCE)])
    assert 0 < (rows["wrong"].gradient_difference or 0) < 1e-4


def test_offloaded_checkpointing_moves_each_layers_input_and_nothing_else() -> None:
    row = rows_of([peers()[2]])["offloaded checkpointing"]
    assert row.moved == Moved(out_bytes=3 * HIDDEN_BYTES, back_bytes=3 * HIDDEN_BYTES)
    assert row.peak_host_bytes == 3 * HIDDEN_BYTES


class Calls(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_offloaded_checkpointing_keeps_its_memory_for_shorter_sequences() -> None:
    model, ids = GPT(CONFIG), torch.randint(97, (1, 193))
    with peers()[2].start(model) as running:
        assert running.host_bytes is not None
        for tokens in (192, 64):
            with running.around():
                loss = model(ids[:, :tokens], ids[:, 1 : tokens + 1])
            found = torch.autograd.grad(loss, list(model.parameters()))
            plain = torch.autograd.grad(model(ids[:, :tokens], ids[:, 1 : tokens + 1]), list(model.parameters()))
            assert all(map(torch.equal, found, plain))
            assert running.host_bytes() == 3 * HIDDEN_BYTES


def test_offloaded_checkpointing_refuses_a_second_forward_before_backward() -> None:
    model, ids = GPT(CONFIG), torch.randint(97, (1, 193))
    with peers()[2].start(model) as running:
        for step in range(2):
            with pytest.raises(RuntimeError, match="before the last") if step else nullcontext(), running.around():
                model(ids[:, :-1], ids[:, 1:])


def test_selective_checkpointing_repeats_products_and_no_attention() -> None:
    model = GPT(CONFIG)
    ids = torch.randint(97, (1, 193))
    named = {way.name: way for way in peers()}
    counts = {}
    for name in (KEEP, ATTENTION, SELECTIVE):
        with named[name].start(model) as running, Calls() as calls:
            with running.around():
                loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
        counts[name] = calls.counts
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    assert {count[flash] for count in counts.values()} == {3}
    # Of a layer's products qkv, out, up and down nothing needs the fourth; torchtitan's policy saves the first and third.
    assert counts[ATTENTION]["addmm"] == counts[KEEP]["addmm"] + 9
    assert counts[SELECTIVE]["addmm"] == counts[KEEP]["addmm"] + 3


def test_a_way_that_fails_is_a_row_and_the_others_run() -> None:
    def fails(model: GPT) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")

    def breaks(model: GPT) -> Any:
        raise KeyError("of a peer")

    keep, full = peers()[:2]
    rows = rows_of([keep, simple("fails", fails, Compute.ONCE), simple("breaks", breaks, Compute.ONCE), full])
    assert rows["fails"].failed == "CUDA out of memory. Tried to allocate 9 GiB."
    assert rows["breaks"].failed == "KeyError: 'of a peer'"
    assert rows[CHECKPOINTING].gradient_difference == 0


def test_the_table_is_handed_over_after_each_row() -> None:
    lengths: list[int] = []
    setup = Setup(model="tiny", device=CPU, rounds=1, warm_up_steps=0)
    compare(setup, CONFIG, peers()[:2], lambda table: lengths.append(len(table.body()["ways"])))
    assert lengths == [1, 2]


def table(*rows: Row) -> Table:
    link = LinkRates(
        d2h_bytes_per_s=100.0, h2d_bytes_per_s=50.0, d2h_together_bytes_per_s=1.0, h2d_together_bytes_per_s=1.0
    )
    return Table(model="tiny", config=CONFIG, rounds=1, link=link, peak_flops=1e12, rows=list(rows))


def row(way: str, compute: Compute, step_s: float, moved: int = 0) -> Row:
    return Row(way=way, at="", compute=compute, step_s=step_s, moved=Moved(out_bytes=moved, back_bytes=moved))


def test_hidden_is_the_share_of_the_copies_time_that_the_step_does_not_show() -> None:
    keep, full = row(KEEP, Compute.ONCE, 10.0), row(CHECKPOINTING, Compute.TWICE, 13.0)
    swap, other = row("swap", Compute.ONCE, 13.0, moved=200), row("other", Compute.OTHER, 13.0, moved=200)
    inputs = row("inputs", Compute.TWICE, 13.0, moved=200)
    known = table(keep, full)
    assert known.hidden(swap) == 0.5  # 2 s out and 4 s back, of which 3 show
    assert known.hidden(inputs) == 1.0
    assert known.hidden(other) is None
    assert known.hidden(keep) is None  # moves nothing
    assert known.figures(swap)["to_keep"] == 1.3
    assert known.figures(swap)["to_checkpointing"] == 1.0
    # Where keep-everything did not fit, its step is checkpointing's by the ratio of their FLOPs, between 1 and 4/3.
    estimated = table(full)
    assert 13.0 * 3 / 4 < (estimated.compute_s(Compute.ONCE) or 0) < 13.0
    assert table().hidden(swap) is None


def test_relative_norm_is_zero_for_equal_bits_alone() -> None:
    one = torch.ones(4, dtype=torch.bfloat16)
    assert relative_norm(one, one.clone()) == 0
    assert relative_norm(torch.zeros(4), -torch.zeros(4)) == 0  # torch.equal: the zeros' signs do not count
    assert relative_norm(one * 1.5, one) == 0.5


@pytest.mark.parametrize("limit", [1000, 5000, 9216, 100_000, 300_000])
def test_bisection_finds_the_longest_length_that_fits_the_cap(limit: int) -> None:
    tried: list[int] = []

    def peak_of(length: int) -> int | str:
        tried.append(length)
        return 7 * length + 11 if length <= limit else "out of memory"

    found = bisect(peak_of, cap=7 * limit, first=8192, most=1 << 18, deadline=float("inf"))
    best = min(limit, 1 << 18) // 1024 * 1024
    assert found.complete
    assert best - max(best // 32, 1024) < found.fits <= best
    assert found.fits == max((length for length in tried if length <= limit), default=0)
    assert len(tried) == len(set(tried)) == found.tries < 12


def test_a_search_that_is_out_of_time_says_what_it_had() -> None:
    assert bisect(len, cap=1, first=8192, most=8192, deadline=0.0).tries == 0  # type: ignore[arg-type]
    begun: list[int] = []

    def peak_of(length: int) -> int:
        begun.append(length)
        clock.append(2.0)
        return length

    clock = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.longest.time.monotonic", lambda: clock[-1])
        found = bisect(peak_of, cap=1 << 20, first=8192, most=1 << 18, deadline=1.0)
    assert begun == [8192]
    assert found.fits == 8192
    assert not found.complete


def test_trls_file_is_loaded_where_what_it_imports_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "trl_activation_offloading.py"
    file.write_text(
        "import psutil\n"
        "from accelerate.logging import get_logger\n"
        "from accelerate.utils.versions import is_torch_version\n"
        "from transformers import is_torch_npu_available\n"
        "assert not is_torch_npu_available() and is_torch_version('>=', '2.5.0')\n"
        "assert not is_torch_version('<', '2.5.0')\n"
        "logger = get_logger(__name__)\n"
    )
    monkeypatch.setattr(fetched, "_is_there", lambda name: False)
    for name in [name for name in sys.modules if name.split(".")[0] in ("psutil", "accelerate", "transformers")]:
        monkeypatch.delitem(sys.modules, name)
    assert fetched.load_file(file).logger.name == "trl_activation_offloading"
    assert "accelerate" not in sys.modules
    with pytest.raises(UsageError, match=r"nowhere\.py"):
        fetched.load_file(tmp_path / "nowhere.py")


def test_options_go_to_the_arms_in_any_order() -> None:
    arms, options = parsed(["1m", "--host", "88GiB", "--layers", "8,6,4", "--minutes", "5"])
    assert arms == ["1m"]
    assert (options.host, options.layers, options.minutes) == (88 << 30, [8, 6, 4], 5.0)
    arms, options = parsed(["--model", "tiny", "short", "--seq", "2k", "--seq", "4k", "plan", "--rounds", "1"])
    assert arms == ["short", "plan"]
    assert [(case.model, case.seq, case.rounds) for case in options.cases("plan")] == [
        ("tiny", 2048, 1),
        ("tiny", 4096, 1),
    ]
    with pytest.raises(SystemExit) as refused:
        parsed(["nothing"])
    assert refused.value.code == 2


def test_arms_run_on_a_cpu_and_those_that_cannot_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "short 1m --device cpu --model tiny --layers 2 --seq 128 --rounds 1 --host 64MiB"
    assert main(arguments.split()) == 0
    told = capsys.readouterr()
    assert "memo, alpha 1" in told.out
    assert told.err == "gpu-bench: 1m: only on a GPU\n"


def test_without_options_a_running_way_moves_nothing() -> None:
    assert Running().moved() == Moved()


LEAVES = """
import gc, weakref, warnings
import torch
from benchmarks.comparison import Setup, compare
from benchmarks.gpu_plans import at_alphas, automatic
from benchmarks.peers.ways import peers
from memo.gpt.config import preset

made, make = [], Setup.make

def noted(setup, config):
    model, ids = make(setup, config)
    made.append(weakref.ref(model))
    return model, ids

Setup.make = noted
setup = Setup(model="tiny", device=torch.device("cpu"), rounds=1)
config = preset("tiny", layers=2, hidden=64, max_seq=128)
compare(setup, config, [*peers(), *at_alphas((0.0,), "64MiB")])
warnings.simplefilter("ignore")  # that so little memory cannot do
automatic(setup, config, 1 << 20, "64MiB")
gc.collect()
print([model() for model in made])
"""


def test_no_model_outlives_its_comparison_or_its_plan() -> None:
    # In a process of its own: the first import of the solver is a part of it.
    ran = subprocess.run([sys.executable, "-c", LEAVES], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[None, None]"
