"""What a layer returns: what the next layer is given is kept, what is only shown besides is replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import SEQ, Stack, assert_equal, ids, plain, train
from torch import nn

from memo.errors import ModifiedAfterSave

if TYPE_CHECKING:
    import memo

HEADS, HIDDEN, BATCH, LAYERS = 4, 32, 2, 3
SCORES_NBYTES = BATCH * HEADS * SEQ * SEQ * 4


class ShowsWeights(nn.Module):
    """A block that returns the weights of its attention beside the hidden states, as many models' do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, before: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*x.shape[:2], HEADS, HIDDEN // HEADS)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        scores = q @ k.transpose(2, 3)
        weights: torch.Tensor = (scores if before is None else scores + before).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(x.shape)), weights


class Shows(Stack):
    """Layers that show their weights; `hands_on` to the next one, `uses` them in the loss."""

    hands_on = False
    uses = False

    def __init__(self) -> None:
        super().__init__(layers=LAYERS, make=ShowsWeights)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, weights, self.shown = self.embed(ids), None, []
        for layer in self.layers:
            x, weights = layer(x, weights if self.hands_on else None)
            self.shown.append(weights)
        loss: torch.Tensor = x.square().mean()
        return loss + sum(shown.amax(-1).mean() for shown in self.shown) if self.uses else loss


def shows(**of: Any) -> Callable[[], Shows]:
    def make() -> Shows:
        torch.manual_seed(0)
        model = Shows()
        for name, value in of.items():
            setattr(model, name, value)
        return model

    return make


@pytest.mark.covering(1)
@pytest.mark.parametrize("alpha", [0.0, 0.5, (0.0, 1.0, 0.0)], ids=str)
@pytest.mark.parametrize("of", [{}, {"uses": True}, {"hands_on": True}, {"uses": True, "hands_on": True}], ids=str)
def test_gradients_are_equal_whoever_reads_what_a_layer_shows(
    offload: Callable[..., memo.Manager], of: dict[str, bool], alpha: Any
) -> None:
    model = shows(**of)()
    manager = offload(model, alpha=alpha)
    got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, plain(shows(**of)))
    assert manager.stats.bytes_recomputed > 0


def test_weights_that_a_layer_shows_do_not_move(offload: Callable[..., memo.Manager]) -> None:
    model = shows()()
    manager = offload(model, alpha=0.0)
    train(model, lambda step: model(ids(step)), manager, steps=1)
    assert manager.stats.bytes_disk < SCORES_NBYTES
    assert manager.stats.bytes_recomputed >= LAYERS * SCORES_NBYTES


def test_what_the_next_layer_is_given_is_kept(offload: Callable[..., memo.Manager]) -> None:
    """Else each layer would wait for the whole replay of the one before."""
    model = shows(hands_on=True)()
    manager = offload(model, alpha=0.0)
    train(model, lambda step: model(ids(step)), manager, steps=1)
    assert manager.stats.bytes_disk > SCORES_NBYTES, "the second layer's weights; the last one's are not out yet"


def test_what_a_layer_shows_must_not_change_before_backward(offload: Callable[..., memo.Manager]) -> None:
    model = shows()()
    manager = offload(model, alpha=0.0)
    train(model, lambda step: model(ids(step)), manager, steps=1)
    with manager:
        loss = model(ids(1))
    with torch.no_grad():
        model.shown[0].add_(1)
    model.shown.clear()
    with pytest.raises(ModifiedAfterSave):
        loss.backward()


class Picks(nn.Module):
    """Attends to the likeliest keys, and returns which ones these are: a number for each, of which no graph needs any."""

    def __init__(self, shown_as: Callable[[torch.Tensor], torch.Tensor] = lambda picked: picked) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.shown_as = shown_as

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.mT
        picked = scores.detach().topk(4, -1).indices
        masked = scores + torch.full_like(scores, -1e4).scatter(-1, picked, 0.0)
        return x + self.out(masked.softmax(-1) @ v), self.shown_as(picked)


class Picking(Stack):
    """Layers that return what they picked, which the program writes into: no graph needs it."""

    def __init__(self, shown_as: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(layers=LAYERS, make=lambda: Picks(shown_as))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x, picked = layer(x)
            picked.zero_()
        loss: torch.Tensor = x.square().mean()
        return loss


VIEWS = {"whole": lambda picked: picked, "part": lambda picked: picked[..., 1:], "transposed": lambda picked: picked.mT}


@pytest.mark.covering(1)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, (0.0, 1.0, 0.0)], ids=str)
def test_what_a_layer_returns_is_kept_as_a_copy_where_no_graph_guards_it(
    offload: Callable[..., memo.Manager], alpha: Any, view: str
) -> None:
    """The program may write into it, which is no error without memo."""

    def make() -> Picking:
        torch.manual_seed(0)
        return Picking(VIEWS[view])

    model = make()
    manager = offload(model, alpha=alpha, min_bytes=1)
    got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, plain(make))
    told = manager.explain(0)
    assert told.used.name != "now", "what the next call was to keep was there to be kept"
    if alpha == 0.0:
        assert told.used == next(point for point in told.points if point.name == "attention")
        picked = next(row for row in told.rows if row.operator == "aten.topk")
        assert picked.kept_nbytes == BATCH * SEQ * 4 * 8
