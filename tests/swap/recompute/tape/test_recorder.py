"""The recorder writes equal logs for equal calls, numbers memory by its object, and holds no tensor that nobody needs."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from taped import assert_replays, record
from torch import nn
from torch.nn import functional as F

import memo
from memo.swap.recompute.tape.log import HIDDEN, Function, Marker, Origin
from memo.swap.recompute.tape.recorder import Recorder, aside
from memo.swap.recompute.tape.tape import Tape

if TYPE_CHECKING:
    from collections.abc import Callable


def hidden(seed: int = 0, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (2, 8, 4)), generator=generator).requires_grad_()


def names(taped: Any) -> list[str]:
    return [step.name.rpartition(".")[2] for step in taped.tape.steps]


LAYER = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))


def test_equal_calls_have_equal_logs_whatever_their_numbers() -> None:
    assert record(LAYER, hidden(0)).recorder.key == record(LAYER, hidden(1)).recorder.key


@pytest.mark.parametrize(
    "other",
    [
        lambda x: LAYER(x.double().float()),  # another path
        lambda x: nn.Sequential(LAYER[0], nn.GELU("tanh"), LAYER[2])(x),  # another constant
        lambda x: LAYER(x[:1]),  # another size
        lambda x: LAYER(x.transpose(0, 1).contiguous().transpose(0, 1)),  # other strides
        lambda x: (LAYER(x), LAYER[0](x)),  # more
        lambda x: LAYER(x).detach(),  # seen otherwise at the end
    ],
)
def test_calls_that_differ_have_other_logs(other: Callable[[torch.Tensor], Any]) -> None:
    assert record(other, hidden()).recorder.key != record(LAYER, hidden()).recorder.key


def test_what_autograd_saves_is_part_of_the_log() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    trained = nn.Linear(4, 4)
    assert record(frozen, hidden()).recorder.key != record(trained, hidden()).recorder.key


def test_true_is_not_one() -> None:
    """`True == 1` and their hashes agree: as words they must not."""
    some = record(lambda x: x.sum(1, keepdim=True), hidden())
    assert Marker.TRUE in some.recorder.log
    assert not [word for word in some.recorder.log if type(word) is bool]


def test_numbers_with_a_fraction_are_carried_beside_the_log() -> None:
    """They change from call to call, as a scale that follows a schedule, and the plan is the same."""
    one, other = (record(lambda x, by=by: (x * by).sin() + by, hidden()) for by in (0.5, 0.25))
    assert one.recorder.key == other.recorder.key
    assert one.recorder.carried == [0.5, 0.5]
    assert other.recorder.carried == [0.25, 0.25]
    plan = one.plan()
    given = other.replay(plan)
    assert given
    assert all(torch.equal(made, other.sources[storage]) for storage, made in given.items())


def test_a_probability_is_a_word_since_nothing_is_drawn_at_some() -> None:
    one, other = (record(lambda x, p=p: F.dropout(x, p), hidden()) for p in (0.5, 0.25))
    assert one.recorder.key != other.recorder.key


def test_births() -> None:
    weight = nn.Parameter(torch.ones(4))
    table = torch.ones(4)

    def layer(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return ((x * given) * weight * table).sin()

    births = [birth for birth, *_ in record(layer, hidden(), torch.ones(4)).tape.storages]
    made = births.count(Origin.MADE)
    assert births[:2] == [Origin.INPUT, Origin.GIVEN]
    assert sorted(birth.name for birth in births if birth is not Origin.MADE) == [
        "FOUND",
        "GIVEN",
        "INPUT",
        "PARAMETER",
    ]
    assert made == len(births) - 4 > 0


def test_one_piece_of_memory_has_one_number_whatever_is_seen_of_it() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.repeat(1, 1, 3).chunk(3, -1)
        return (q * k.transpose(1, 2).transpose(1, 2)).sin() + v.reshape(-1).view_as(v)

    taped = record(layer, hidden())
    fused = taped.step("aten.repeat").out.content
    assert taped.step("aten.mul").reads == (fused,)


def test_memory_that_is_used_again_for_another_tensor_has_another_number() -> None:
    """Addresses come back as soon as a tensor is freed; objects are told apart."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            y = x * 2
            del y
        return x.sin()

    taped = record(layer, hidden())
    made = {step.makes for step in taped.tape.steps if step.name == "aten.mul"}
    assert len(made) == 20


class _Holds(torch.utils._python_dispatch.TorchDispatchMode):
    """Weak references to all that operators give."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == (2, 8, 4):  # and none of the sums
            self.given.append(weakref.ref(out.untyped_storage()))
        return out


@pytest.mark.parametrize("checked", [False, True])
def test_what_nobody_saves_dies_while_the_layer_runs(checked: bool) -> None:
    alive: list[int] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(6):
                x = x.sin()
                alive.append(sum(one() is not None for one in watched.given))
        return x

    with _Holds() as watched:
        record(layer, hidden(), checked=checked)
    assert max(alive) <= 3, alive  # the last result, and the one before it while it is read


def test_a_recorder_keeps_no_graph_alive() -> None:
    """Holding a result as a tensor would make a cycle with its node that no collector sees."""
    gc.collect()
    gc.disable()
    try:
        taped = record(LAYER, hidden())
        taped.out.grad_fn.metadata["mark"] = mark = nn.Module()
        node = weakref.ref(mark)
        del mark
        assert node() is not None
        taped.out = None
        assert node() is None
        assert taped.recorder.tensors
    finally:
        gc.enable()


def test_what_a_plan_will_keep_is_held_and_nothing_else() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.matmul(torch.ones(4, 4))
        return y * x.tanh()

    first = record(layer, hidden())
    product = first.step("aten.mm")
    holds = {product.number: (product.operator, (0,), False)}
    again = record(layer, hidden(), holds=holds)
    storage = again.tape.contents[product.makes[0]].storage
    assert storage in again.recorder.tensors
    assert set(again.recorder.tensors) >= set(again.sources)
    everywhere = dict.fromkeys(range(4), holds[product.number])
    other = record(lambda x: x.detach().sin(), hidden(), holds=everywhere)
    assert other.step("aten.sin").makes
    assert set(other.recorder.tensors) == {0}, "other operators stand there"


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("dropout", lambda x: F.dropout(x, 0.3)),
        ("native dropout", lambda x: torch.native_dropout(x, 0.3, True)[0]),
        ("bernoulli_", lambda x: x * torch.empty_like(x).bernoulli_(0.3)),
        ("bernoulli", lambda x: x * torch.bernoulli(torch.full_like(x, 0.3))),
        ("booleans", lambda x: x.masked_fill(torch.empty_like(x, dtype=torch.bool).bernoulli_(0.3), 0.0)),
    ],
)
def test_zeros_and_ones_that_were_drawn_are_kept_as_bits(
    name: str, draw: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    taped = record(lambda x: draw(x.sin()).cos(), hidden(0, 2, 16, 32))
    plan = assert_replays(taped)
    kept = [item for item in plan.kept if item.bits_of >= 0]
    assert len(kept) == 1, plan.code
    (number,) = (item.bits_of for item in kept)
    assert taped.recorder.bits[number].untyped_storage().nbytes() == 2 * 16 * 32 // 8
    assert plan.kept_bits == 2 * 16 * 32
    assert set(plan.wanted) == set(taped.wanted), "a mask that autograd saves does not move besides"


def test_no_bits_are_held_where_the_expected_plan_keeps_none() -> None:
    taped = record(lambda x: F.dropout(x, 0.3), hidden(), holds={})
    assert taped.recorder.bits == {}


def test_a_tensor_that_its_memory_does_not_describe_is_hidden() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(x.reshape(2, 8, 2, 2)).conj()
        return torch.view_as_real(turned * turned).sin()

    taped = record(layer, hidden())
    assert HIDDEN in taped.recorder.log
    assert_replays(taped)


def test_a_memoized_function_is_one_operator_whose_results_are_kept() -> None:
    calls = 0

    @memo.memoize
    def scaled(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return (x * 2).sin()

    taped = record(lambda x: scaled(x.tanh()).cos(), hidden())
    (step,) = (step for step in taped.tape.steps if isinstance(step.operator, Function))
    assert step.opaque == "its results are kept, as declared"
    plan = assert_replays(taped)
    assert step.number not in plan.steps
    assert calls == 1


def test_a_recomputable_function_is_one_operator_that_may_run_again() -> None:
    calls = 0

    @memo.recomputable
    def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x * by

    taped = record(lambda x: scaled(x.detach().tanh(), 0.5) * x.cos(), hidden())
    (step,) = (step for step in taped.tape.steps if isinstance(step.operator, Function))
    assert step.opaque is None
    plan = assert_replays(taped)
    assert step.number in plan.steps
    assert calls == 2


def test_an_operator_that_raises_is_not_in_the_log() -> None:
    """A layer may catch what an operator raises and go on in another way."""

    def tries(x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError):
            x.sin().view(7, 7)
        with contextlib.suppress(RuntimeError):
            torch.mm(x[0], x[0])
        return x.cos().sin()

    taped = record(tries, hidden())
    assert "mm" not in names(taped)
    assert_replays(taped)


def test_a_recorder_that_sleeps_hears_nothing() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        mode = torch.utils._python_dispatch._get_current_dispatch_mode()
        mode.asleep = True  # type: ignore[union-attr]
        try:
            x.cos()
        finally:
            mode.asleep = False  # type: ignore[union-attr]
        return x.sin()

    assert names(record(layer, hidden())) == ["sin"]


@pytest.mark.parametrize("how", ["numpy", "set_"])
def test_memory_that_something_unseen_wrote_is_found_by_checksums(how: str) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y.detach().numpy()[...] = x.detach().numpy() * 2
        return (x + y).sin()

    taped = record(layer, hidden(), checked=True)
    zeros = taped.step("aten.zeros_like").out.content
    assert taped.recorder.changed_unseen() == {taped.tape.contents[zeros].storage}
    assert taped.step("aten.add").opaque is not None
    assert record(layer, hidden()).recorder.changed_unseen() == frozenset(), "unchecked calls are not searched"
    assert_replays(taped)


def test_nothing_is_suspected_where_operators_alone_write() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y[:, :4].add_(x[:, 4:])
        y[:, 4:] = x[:, :4]
        out = torch.empty_like(x).detach()
        torch.mul(y.detach(), 2.0, out=out)
        return (y * out).sin()

    taped = record(layer, hidden(), checked=True)
    assert taped.recorder.changed_unseen() == frozenset()
    assert_replays(taped)


def test_a_call_like_the_last_one_has_its_key() -> None:
    key = record(LAYER, hidden(0)).recorder.key
    assert record(LAYER, hidden(1), expected=key).recorder.key is key


@pytest.mark.parametrize(
    "other",
    [
        lambda x: LAYER(x).detach(),  # another operator at the end
        lambda x: LAYER(x[:, :4]),  # other sizes
        lambda x: nn.Sequential(LAYER[0], nn.GELU("tanh"), LAYER[2])(x),  # another constant
    ],
)
def test_a_call_unlike_the_last_one_has_a_key_of_its_own(other: Callable[[torch.Tensor], Any]) -> None:
    key = record(LAYER, hidden()).recorder.key
    found = record(other, hidden(), expected=key).recorder.key
    assert found == record(other, hidden()).recorder.key != key


class _Heard(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("alone", [True, False])
def test_the_engines_own_operators_are_not_recorded_and_other_modes_hear_them(alone: bool) -> None:
    x, heard = torch.randn(4), _Heard()
    recorder = Recorder(x, [])
    with contextlib.nullcontext() if alone else heard, recorder:
        with aside(recorder, x):
            x.clone()
        assert recorder.log == []
        x.sin()
    assert len(Tape(recorder.key).steps) == 1
    assert heard.names == ([] if alone else ["clone", "sin"])
