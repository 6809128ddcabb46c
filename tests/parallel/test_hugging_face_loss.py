"""The loss of a divided Hugging Face model from its hidden states: that of one process, and no rank makes all logits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from launching import DIVIDES_FUSED, launch
from live_bytes import LiveLocalBytes

import memo
from memo.errors import UsageError

VOCAB, HIDDEN, SEQ, CHUNK = 8192, 64, 512, 8
MATRIX, LOGITS = VOCAB * HIDDEN * 4, SEQ * VOCAB * 4


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("ranks", "models"),
    [
        (2, ("gpt2:tied", "llama:untied", "opt:tied", "neox:untied")),
        (2, ("llama:tied", "opt:untied")),
        (4, ("gpt2:untied",)),
    ],
)
def test_without_logits_and_with_them_it_is_the_loss_of_one_process(ranks: int, models: tuple[str, ...]) -> None:
    here = [model for model in models if DIVIDES_FUSED or "gpt2" not in model]
    if not here:
        pytest.skip("GPT-2 needs torch 2.13")
    said = launch(ranks, "hugging_face_loss_worker.py", *here)
    for model in here:
        assert f"equal {model} within" in said


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of eight ranks; sizes are real, what the others would send is not."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (8,))
    dist.destroy_process_group()


def llama(vocab: int = VOCAB, tied: bool = False) -> nn.Module:
    shape = {"hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=vocab, tie_word_embeddings=tied))


def largest(model: nn.Module) -> int:
    """Bytes of the largest tensor that a step makes."""
    tokens = torch.randint(VOCAB, (1, SEQ))
    with LiveLocalBytes() as alive:
        hidden = model.base_model(tokens, use_cache=False).last_hidden_state
        memo.linear_cross_entropy(hidden, model.get_output_embeddings(), tokens, chunk=CHUNK).backward()
    return alive.largest


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_no_rank_makes_the_matrix_or_the_logits(tied: bool, mesh: DeviceMesh) -> None:
    model = memo.parallelize(llama(tied=tied), mesh)
    assert largest(model) == MATRIX // 8  # the gradient of its rows; a chunk of logits is less
    for end in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert end.weight.grad.to_local().nbytes == MATRIX // 8


def test_the_measure_sees_the_matrix_of_one_process() -> None:
    assert largest(llama()) == MATRIX < LOGITS


def test_the_bias_of_a_projection_is_divided_with_its_rows(mesh: DeviceMesh) -> None:
    model = llama()
    model.lm_head = nn.Linear(HIDDEN, VOCAB)
    memo.parallelize(model, mesh)
    assert largest(model) == MATRIX // 8
    assert model.lm_head.bias.grad.to_local().nbytes == VOCAB * 4 // 8


class OfItsOwn(nn.Linear):
    """A forward that could be anything."""


@pytest.mark.skipif(not DIVIDES_FUSED, reason="GPT-2 needs torch 2.13")
def test_an_embedding_whose_matrix_is_used_elsewhere_too_stays_whole_and_tied(mesh: DeviceMesh) -> None:
    no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=HIDDEN, n_head=8, n_layer=2, n_positions=64, **no_dropout)
    )
    own = OfItsOwn(HIDDEN, VOCAB)
    own.weight = model.transformer.wte.weight
    model.lm_head = own
    memo.parallelize(model, mesh)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.lm_head.weight.to_local().nbytes == MATRIX


def test_rows_that_something_else_divided_are_refused(mesh: DeviceMesh) -> None:
    """Sharded data parallelism divides rows too, and each of its ranks has tokens of its own."""
    projection = nn.Linear(HIDDEN, VOCAB, bias=False)
    projection.weight = nn.Parameter(distribute_tensor(projection.weight.detach(), mesh, [Shard(0)]))
    for given in (projection, projection.weight):
        with pytest.raises(UsageError, match=r"its rows are divided as \[Shard\(dim=0\)\] over 8 ranks"):
            memo.linear_cross_entropy(torch.zeros(1, HIDDEN), given, torch.zeros(1, dtype=torch.int64))


def test_a_vocabulary_that_leaves_a_rank_without_words_is_refused_and_nothing_is_changed(mesh: DeviceMesh) -> None:
    model = llama(vocab=9)
    with pytest.raises(UsageError, match="8 ranks leave one without any of the vocabulary's 9 tokens"):
        memo.parallelize(model, mesh)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
