"""Small models and data for tests with other packages' loops, and the comparison of a run with memo with one without."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import memo

STEPS = 5
VOCAB = 96
SEQ = 64
MIN_BYTES = 1024
"""Of memo.offload: these models' tensors are small."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What a training run computed."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    """After the last step, detached copies."""


def run_of(model: nn.Module, losses: Iterable[Any]) -> Run:
    """The run that ended with `model` as it is now."""
    return Run([float(loss) for loss in losses], {n: p.detach().clone() for n, p in model.named_parameters()})


def assert_same(got: Run, want: Run, *, steps: int = STEPS) -> None:
    """Same losses and same parameters, to the last bit; and something was trained."""
    assert len(want.losses) == steps
    assert got.losses == want.losses
    assert got.parameters.keys() == want.parameters.keys()
    for name, parameter in want.parameters.items():
        assert torch.equal(got.parameters[name], parameter), name


def assert_divided(manager: memo.Manager, layers: int, *, forwards: int = STEPS) -> None:
    """At least `layers` layers moved a part and recomputed the rest, none moved whole, in as many forwards.

    Args:
        manager: With an alpha below 1; it may be closed.
        layers: Number of the model's repeated layers.
        forwards: The least number of training forwards.
    """
    report = manager.report()
    assert report.recompute is not None, "nothing is recomputed"
    assert report.recompute.refused == {}
    assert report.recompute.repeated == {}
    assert report.recompute.accepted == report.layers == layers
    assert report.recompute.recomputed_bytes >= forwards * layers * MIN_BYTES
    assert report.live_entries == 0


def assert_checkpointed_by_memo(layers: int) -> None:
    """Asserts that `memo.checkpoint` ran and recomputed each layer in this thread, and ends its context."""
    from memo.checkpointing.function import _thread

    (context,) = _thread.contexts.values()
    _thread.contexts.clear()
    context.close()
    recompute = context.report().recompute
    assert recompute is not None
    assert recompute.accepted == layers
    assert recompute.refused == {}


def compare(
    train: Callable[[Callable[[nn.Module], memo.Manager] | None], Run],
    alpha: float | None,
    *,
    steps: int = STEPS,
    **options: Any,
) -> memo.Manager:
    """Trains without memo and with it, asserts the same run, and returns the manager.

    Args:
        train: Makes a model and trains it. It gets None, or a function from the model to a manager of it.
        alpha: Of memo.offload; None plans.
        steps: Number of losses.
        options: More of memo.offload.
    """
    made: list[memo.Manager] = []

    def offload(model: nn.Module) -> memo.Manager:
        made.append(memo.offload(model, alpha=alpha, **{"min_bytes": MIN_BYTES, **options}))
        return made[-1]

    want = train(None)
    got = train(offload)
    assert_same(got, want, steps=steps)
    (manager,) = made
    return manager


def llama(layers: int = 3, **shape: Any) -> Any:
    """A Llama for causal language modelling, always with the same weights, in training mode."""
    import transformers as hf

    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = hf.LlamaConfig(**{**small, "vocab_size": VOCAB, "num_hidden_layers": layers, **shape})
    return hf.LlamaForCausalLM(config).train()


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens, for causal language modelling."""

    def __init__(self, rows: int = 4 * STEPS, seq: int = SEQ) -> None:
        self.ids = torch.randint(3, VOCAB, (rows, seq), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def word_tokenizer() -> Any:
    """A tokenizer of the words w3, w4, ... to VOCAB, with a chat template; nothing is downloaded."""
    import tokenizers
    import transformers as hf

    words = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, VOCAB))]
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} </s> {% endfor %}"
    return tokenizer


def sentences(rows: int = 4 * STEPS, words: int = 24, seed: int = 0) -> list[str]:
    """Texts of the tokenizer's words, of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(words // 2, words + 1, (rows,), generator=generator).tolist()
    return [" ".join(f"w{n}" for n in torch.randint(3, VOCAB, (k,), generator=generator).tolist()) for k in lengths]
