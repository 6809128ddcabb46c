"""TRL's trainers with and without memo's callback: five steps to the same losses and parameters."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations import (
    MIN_BYTES,
    STEPS,
    VOCAB,
    Run,
    assert_divided,
    assert_same,
    llama,
    run_of,
    sentences,
    word_tokenizer,
)

import memo

trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed, which TRL needs")
import transformers  # noqa: E402

from memo.integrations.hf import MemoCallback  # noqa: E402

LAYERS = 3
LENGTHS = {"seq": 48, "new": 24}


def texts() -> Any:
    return datasets.Dataset.from_dict({"text": sentences()})


def pairs() -> Any:
    kinds = {"prompt": 1, "chosen": 2, "rejected": 3}
    return datasets.Dataset.from_dict({name: sentences(seed=seed) for name, seed in kinds.items()})


def judged() -> Any:
    rows = {"prompt": sentences(seed=1), "completion": sentences(seed=2)}
    return datasets.Dataset.from_dict({**rows, "label": [row % 2 == 0 for row in range(len(rows["prompt"]))]})


def prompts() -> Any:
    return datasets.Dataset.from_dict({"prompt": sentences(seed=1)})


def lora() -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")


def judge(completions: list[str], **others: Any) -> list[float]:
    """Rewards, some of each sign, that depend on the words only."""
    return [sum(ord(letter) for letter in text) % 7 - 3.0 for text in completions]


def scoring_llama() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**shape, vocab_size=VOCAB, num_hidden_layers=LAYERS, num_labels=1, pad_token_id=0)
    return transformers.LlamaForSequenceClassification(config)


def llama_with_a_path(folder: Path) -> Any:
    """TRL loads the reference model from where the model came from."""
    llama(LAYERS).save_pretrained(folder / "model")
    return transformers.LlamaForCausalLM.from_pretrained(folder / "model")


def trainer_of(kind: str, folder: Path, callbacks: list[Any], **more: Any) -> Any:
    told = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "use_cpu": True}
    sizes = {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "bf16": False}
    common = {**told, **sizes, "gradient_checkpointing": False, **more}
    tokens = word_tokenizer()
    name, _, variant = kind.partition(" ")
    if name == "SFT":
        common |= {"max_length": LENGTHS["seq"], "packing": variant == "packed"}
        data, model = texts(), llama_with_a_path(folder)
    elif name in ("DPO", "KTO"):
        common |= {"max_length": LENGTHS["seq"]}
        data, model = (pairs() if name == "DPO" else judged()), llama_with_a_path(folder)
    elif name == "Reward":
        common |= {"max_length": LENGTHS["seq"]}
        data, model = pairs(), scoring_llama()
    else:
        common |= {"num_generations": 2, "max_completion_length": LENGTHS["new"]}
        data, model = prompts(), llama_with_a_path(folder)
    named: dict[str, Any] = {"train_dataset": data, "processing_class": tokens, "callbacks": callbacks}
    if variant == "LoRA":
        named["peft_config"] = lora()
    if name in ("GRPO", "RLOO"):
        named["reward_funcs"] = judge
    torch.manual_seed(0)
    return getattr(trl, f"{name}Trainer")(
        model=model, args=getattr(trl, f"{name}Config")(str(folder), **common), **named
    )


def trained(trainer: Any) -> Run:
    torch.manual_seed(1)  # generation
    trainer.train()
    return run_of(trainer.model, [row["loss"] for row in trainer.state.log_history if "loss" in row])


KINDS = ["SFT", "SFT packed", "SFT LoRA", "DPO", "DPO LoRA", "KTO", "Reward", "GRPO", "GRPO LoRA", "RLOO"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_callback_leaves_the_losses_as_they_are(kind: str, alpha: float, tmp_path: Path) -> None:
    want = trained(trainer_of(kind, tmp_path, []))
    ours = MemoCallback(alpha=alpha, min_bytes=MIN_BYTES)
    assert_same(trained(trainer_of(kind, tmp_path, [ours])), want)
    assert ours.manager is not None
    assert_divided(ours.manager, LAYERS)


def test_a_context_of_trl_is_enough(tmp_path: Path) -> None:
    want = trained(trainer_of("SFT", tmp_path, []))
    trainer = trainer_of("SFT", tmp_path, [])
    manager = memo.offload(trainer.model, alpha=0.25, min_bytes=MIN_BYTES)
    trainer.maybe_activation_offload_context = manager
    assert_same(trained(trainer), want)
    assert_divided(manager, LAYERS)


def test_gradient_checkpointing_which_trl_turns_on_is_replaced(tmp_path: Path) -> None:
    default = trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False).gradient_checkpointing
    assert default, "TRL's default; if it is gone, docs/integrations/trl.md has half a line less"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        want = trained(trainer_of("SFT", tmp_path, [], gradient_checkpointing=True))
        ours = MemoCallback(alpha=0.25, min_bytes=MIN_BYTES)
        got = trained(trainer_of("SFT", tmp_path, [ours], gradient_checkpointing=True))
    assert_same(got, want)
    assert ours.manager is not None
    assert ours.manager.report().replaced == LAYERS
