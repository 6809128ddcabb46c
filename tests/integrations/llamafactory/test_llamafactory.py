"""LLaMA-Factory's own training, from its arguments to the trained model, with and without memo's callback."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

if importlib.util.find_spec("llamafactory") is None:
    pytest.skip("llamafactory is not installed", allow_module_level=True)

from transformers import TrainerCallback

if importlib.util.find_spec("torchaudio") is None:  # imported for sound, of which there is none here
    sys.modules["torchaudio"] = ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)

from integrations import MIN_BYTES, STEPS, Run, assert_divided, assert_same, llama, run_of, sentences, word_tokenizer
from llamafactory.train.tuner import run_exp

from memo.integrations.hf import MemoCallback

LAYERS = 3


class Watch(TrainerCallback):  # type: ignore[misc]
    """Keeps the run as it ends."""

    run: Run

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        self.run = run_of(model, [row["loss"] for row in state.log_history if "loss" in row])


def trained(folder: Path, *callbacks: Any, **more: Any) -> Run:
    llama(LAYERS).save_pretrained(folder / "model")
    word_tokenizer().save_pretrained(folder / "model")
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in sentences()))
    (folder / "dataset_info.json").write_text(
        json.dumps({"texts": {"file_name": "texts.jsonl", "columns": {"prompt": "text"}}})
    )
    watch = Watch()
    arguments = {
        "stage": "pt",
        "do_train": True,
        "model_name_or_path": str(folder / "model"),
        "dataset": "texts",
        "dataset_dir": str(folder),
        "output_dir": str(folder / "out"),
        "cutoff_len": 64,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "seed": 1,
        "finetuning_type": "full",
        "use_reentrant_gc": False,
    }
    run_exp(arguments | more, callbacks=[*callbacks, watch])
    return watch.run


@pytest.mark.parametrize(
    "more",
    [{}, {"disable_gradient_checkpointing": True}, {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all"}],
    ids=["full", "without checkpointing", "lora"],
)
def test_five_steps_are_as_without(tmp_path: Path, more: dict[str, Any]) -> None:
    for name in ("plain", "managed"):
        (tmp_path / name).mkdir()
    want = trained(tmp_path / "plain", **more)
    memo = MemoCallback(alpha=0.0, host="64MiB", min_bytes=MIN_BYTES)
    assert_same(trained(tmp_path / "managed", memo, **more), want)
    assert_divided(memo.manager, LAYERS)
    assert memo.manager.report().replaced == (0 if "disable_gradient_checkpointing" in more else LAYERS)
