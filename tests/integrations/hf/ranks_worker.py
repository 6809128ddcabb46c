"""Trains with Trainer on this rank of several, without memo and with it, and compares; started by test_ranks.py."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from integrations import MIN_BYTES, STEPS, Run, Texts, assert_divided, assert_same, llama, run_of

from memo.integrations.hf import MemoCallback

LAYERS = 3


def trained(folder: Path, accumulated: int, callbacks: list[MemoCallback]) -> Run:
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=accumulated,
        learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=True, ddp_backend="gloo",
    )  # fmt: skip
    trainer = transformers.Trainer(llama(LAYERS), arguments, train_dataset=Texts(), callbacks=callbacks)
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    return run_of(trainer.model, [row["loss"] for row in trainer.state.log_history if "loss" in row])


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for accumulated in (1, 2):
        want = trained(folder, accumulated, [])
        ours = MemoCallback(alpha=0.25, min_bytes=MIN_BYTES, disk=folder)
        assert_same(trained(folder, accumulated, [ours]), want)
        assert ours.manager is not None
        assert_divided(ours.manager, LAYERS, forwards=accumulated * STEPS)
        assert ours.manager.step == STEPS
    print("the same on this rank", flush=True)


if __name__ == "__main__":
    main()
