"""Contents in a byteless run: counts and masks have them, weights and what is computed from weights do not."""

from __future__ import annotations

import resource

import pytest
import torch
from torch import nn

from memo.allocator import BytelessMode
from memo.errors import RecordError


def test_counts_and_masks_can_be_read() -> None:
    with BytelessMode():
        positions = torch.cat([torch.arange(3), torch.arange(5)])
        starts = positions == 0
        assert starts.nonzero().flatten().tolist() == [0, 3]
        assert starts.cumsum(0).tolist() == [1, 1, 1, 2, 2, 2, 2, 2]
        assert positions.unique().numel() == 5
        assert int(positions.max()) == 4
        assert bool((torch.ones(2, 4, dtype=torch.int64) == 1).all())
        lengths = torch.tensor([2, 3])
        assert torch.repeat_interleave(lengths, lengths).numpy().tolist() == [2, 2, 3, 3, 3]
        written = torch.empty(3, dtype=torch.int64)
        assert written.tolist() == [0, 0, 0]
        written[1:] = lengths
        assert written.tolist() == [0, 2, 3]


def unreadable(tensor: torch.Tensor) -> bool:
    with pytest.raises(RecordError, match="needs the contents"):
        tensor.flatten()[0].item()
    return True


def test_what_weights_touch_has_no_contents() -> None:
    with BytelessMode() as mode:
        weight, ones, ids = torch.empty(4), torch.ones(4), torch.arange(4)
        assert unreadable(weight)
        assert unreadable(ids * weight)
        assert unreadable(torch.randn(4))
        assert unreadable(weight.argmax())
        assert ones.sum().item() == 4
        mode.forget([ones])
        assert unreadable(ones)
        ids[1:] = weight[1:].long()
        assert unreadable(ids)


def test_contents_come_with_the_whole_tensor() -> None:
    with BytelessMode():
        scale = torch.empty(3)
        scale[:2] = torch.tensor([1.0, 2.0])
        assert unreadable(scale)
        scale.copy_(torch.tensor([1.0, 2.0, 3.0]))
        assert scale.tolist() == [1, 2, 3]
        assert torch.zeros_like(torch.randn(3)).tolist() == [0, 0, 0]
        assert set(torch.randint(5, 7, (100,)).tolist()) == {5, 6}


def test_large_counts_have_no_contents_and_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with BytelessMode():
        mask = torch.arange(1 << 16)[:, None] >= torch.arange(1 << 16)
        assert unreadable(mask)
        assert unreadable(torch.zeros(1 << 20))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB


def test_masks_with_contents_select_from_tensors_without() -> None:
    with BytelessMode():
        hidden, kept = torch.randn(2, 3, 8), torch.tensor([[True, False, True], [False, False, True]])
        assert hidden[kept].shape == (3, 8)
        assert hidden[0, kept[0]].shape == (2, 8)
        assert hidden[..., 0][kept].shape == (3,)
        assert hidden.masked_select(kept[..., None]).shape == (24,)
        assert unreadable(hidden[kept])
        with pytest.raises(RecordError, match=r"aten\.index\.Tensor"):
            hidden[hidden > 0]


def test_numbers_count_as_finite() -> None:
    model = nn.Linear(4, 4)
    with BytelessMode():
        x = torch.randn(4, 4)
        assert x.isfinite().all()
        assert not x.isnan().any()
        assert not torch.isinf(x).any()
        scaler, sgd = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters())
        for _ in range(2):
            scaler.scale(model(x).sum()).backward()
            scaler.unscale_(sgd)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            scaler.step(sgd)
            scaler.update()
        assert scaler.get_scale() == 65536


def test_a_routers_choices_are_balanced() -> None:
    with BytelessMode():
        weights, chosen = torch.randn(8, 4).softmax(-1).topk(2)
        assert torch.bincount(chosen.flatten(), minlength=4).tolist() == [4, 4, 4, 4]
        assert all(len(set(row)) == 2 for row in chosen.tolist())
        assert unreadable(weights)


def test_an_assumed_number_is_what_a_step_reads() -> None:
    with BytelessMode(assume=2.5):
        loss = torch.randn(3).sum()
        assert loss.item() == 2.5
        assert int(loss) == 2
        assert torch.randn(2).tolist() == [2.5, 2.5]
        assert (torch.randn(4, 4) > 0).nonzero().shape == (16, 2)


def test_weights_are_drawn_though_a_draw_is_repeated_until_it_is_in_bounds() -> None:
    with BytelessMode():
        assert nn.init.trunc_normal_(torch.empty(8, 8)).shape == (8, 8)


@pytest.mark.parametrize(
    ("read", "operator"),
    [
        (lambda x: x.sum().item(), r"aten\._local_scalar_dense\.default \(item\(\), int\(\), float\(\) or bool\(\)\)"),
        (lambda x: x.unique(), r"aten\._unique2\.default"),
        (lambda x: x.tolist(), r"Tensor\.tolist\(\)"),
        (lambda x: x.numpy(), r"Tensor\.numpy\(\)"),
    ],
    ids=["item", "unique", "tolist", "numpy"],
)
def test_a_refusal_names_the_operator_the_place_and_the_remedies(read: object, operator: str) -> None:
    assert callable(read)
    remedies = r".*--assume 1.*--real"
    with (
        BytelessMode(),
        pytest.raises(RecordError, match=rf"{operator} at .*test_contents\.py:\d+ \(<lambda>\){remedies}"),
    ):
        read(torch.randn(3))


@torch.library.custom_op("memo_test::without_shapes", mutates_args=())
def without_shapes(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_an_operator_without_a_shape_function_runs_where_its_arguments_have_contents() -> None:
    with BytelessMode():
        assert without_shapes(torch.arange(3)).tolist() == [0, 1, 2]
        with pytest.raises(RecordError, match=r"memo_test\.without_shapes\.default at .*register_fake"):
            without_shapes(torch.randn(3))
