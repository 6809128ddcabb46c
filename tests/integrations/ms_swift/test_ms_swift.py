"""ms-swift's own training, from its arguments to the trained model, with and without memo's callback."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("swift") is None:
    pytest.skip("ms-swift is not installed", allow_module_level=True)

from integrations import MIN_BYTES, STEPS, Run, assert_divided, assert_same, llama, run_of, sentences, word_tokenizer
from swift import sft_main
from swift.callbacks import callbacks_map
from transformers import TrainerCallback

from memo.integrations.hf import MemoCallback

LAYERS = 3


class Watch(TrainerCallback):  # type: ignore[misc]
    """Keeps the run as it ends."""

    run: Run

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        self.run = run_of(model, [row["loss"] for row in state.log_history if "loss" in row])


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, memo: MemoCallback | None, *more: str) -> Run:
    folder.mkdir()
    llama(LAYERS).save_pretrained(folder / "model")
    word_tokenizer().save_pretrained(folder / "model")
    texts = [{"messages": [{"role": "assistant", "content": text}]} for text in sentences()]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    watch = Watch()
    monkeypatch.setitem(callbacks_map, "memo", lambda args, trainer: memo)
    monkeypatch.setitem(callbacks_map, "watch", lambda args, trainer: watch)
    arguments = {
        "model": folder / "model",
        "model_type": "llama",
        "template": "default",
        "dataset": folder / "texts.jsonl",
        "output_dir": folder / "out",
        "torch_dtype": "float32",
        "max_length": 64,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "no",
        "split_dataset_ratio": 0,
        "report_to": "none",
        "use_cpu": "true",
        "check_model": "false",  # whether it is the newest, on the network
        "seed": 1,
    }
    flags = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    sft_main([*flags, "--callbacks", *(["memo"] * (memo is not None)), "watch", *more])
    return watch.run


ANOTHER = ("--gradient_checkpointing_kwargs", '{"use_reentrant": false}')


@pytest.mark.parametrize(
    "more",
    [
        ("--tuner_type", "full", *ANOTHER),
        ("--tuner_type", "full", "--gradient_checkpointing", "false"),
        ("--tuner_type", "lora", *ANOTHER),
    ],
    ids=["full", "without checkpointing", "lora"],
)
def test_five_steps_are_as_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> None:
    want = trained(tmp_path / "plain", monkeypatch, None, *more)
    memo = MemoCallback(alpha=0.0, host="64MiB", min_bytes=MIN_BYTES)
    assert_same(trained(tmp_path / "managed", monkeypatch, memo, *more), want)
    assert_divided(memo.manager, LAYERS)
