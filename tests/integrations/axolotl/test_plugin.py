"""Axolotl's own training, from its configuration to the saved model, with and without memo's plugin."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"  # before it is imported
pytest.importorskip("axolotl", reason="axolotl is not installed")

from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.integrations.base import PluginManager
from axolotl.train import train
from axolotl.utils.dict import DictDefault
from integrations import (
    STEPS,
    Run,
    assert_divided,
    assert_same,
    llama,
    run_of,
    sentences,
    word_tokenizer,
)

NAME = "memo.integrations.axolotl.MemoPlugin"
LAYERS = 3


def trained(folder: Path, **more: Any) -> tuple[Run, Any]:
    """The run, and the plugin where there is one."""
    llama(LAYERS).save_pretrained(folder / "model")
    word_tokenizer().save_pretrained(folder / "model")
    data = folder / "texts.jsonl"
    data.write_text("\n".join(json.dumps({"text": text}) for text in sentences()))
    config = {
        "base_model": str(folder / "model"),
        "datasets": [{"path": str(data), "type": "completion"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "output_dir": str(folder / "out"),
        "sequence_len": 64,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "logging_steps": 1,
        "val_set_size": 0,
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "seed": 1,
        "save_strategy": "no",
        "include_tkps": False,
        "gradient_checkpointing": False,
    }
    PluginManager.get_instance().plugins.clear()
    cfg = load_cfg(DictDefault({**config, **more}))
    model, _, trainer = train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg))
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return run_of(model, losses), PluginManager.get_instance().plugins.get(NAME)


LORA: dict[str, Any] = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_linear": True,
    "lora_dropout": 0.0,
}
LORA |= dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)  # they are Triton's, for CUDA


@pytest.mark.parametrize("more", [{}, LORA], ids=["full", "lora"])
def test_plugin_leaves_the_losses_as_they_are(more: dict[str, Any], tmp_path: Path) -> None:
    want, none = trained(tmp_path / "plain", **more)
    assert none is None
    options = {"plugins": [NAME], "memo_alpha": 0.25, "memo_min_bytes": "1KiB", "memo_disk": str(tmp_path)}
    got, plugin = trained(tmp_path / "memo", **more, **options)
    assert_same(got, want)
    assert_divided(plugin.callback.manager, LAYERS)


def test_fields_are_checked_by_axolotl(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memo_alpha"):
        trained(tmp_path, plugins=[NAME], memo_alpha="many")
