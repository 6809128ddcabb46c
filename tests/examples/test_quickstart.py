"""The programs of docs/quickstart.md run, on the CPU, and the first one trains as without memo."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "quickstart.md").read_text(), re.DOTALL)


def program() -> str:
    return PROGRAMS[0].replace(".cuda()", "")


def trained(code: str, folder: Path) -> tuple[list[float], str]:
    """Losses and what was printed."""
    torch.manual_seed(0)
    batches = [dict.fromkeys(("input_ids", "labels"), torch.randint(0, 61, (1, 256))) for _ in range(4)]
    losses: list[float] = []
    printed: list[str] = []
    code = code.replace("    loss.backward()", "    losses.append(loss.item())\n    loss.backward()")
    names: dict[str, Any] = {"folder": folder, "batches": batches, "losses": losses, "print": printed.append}
    exec(code, names)
    if "manager" in names:
        names["manager"].close()
    return losses, "".join(map(str, printed))


def test_the_program_trains_as_without_memo(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 61}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with_memo, report = trained(program(), tmp_path)
    plain = re.sub(r"^(memo\.loss|manager|print).*\n", "", program(), flags=re.MULTILINE)
    without, _ = trained(plain, tmp_path)
    assert with_memo == pytest.approx(without, rel=2e-3)  # the chunked loss rounds otherwise, in bfloat16
    assert "all saved tensors fit" in report


def test_the_program_for_a_cpu_runs_and_prints_losses_and_a_report() -> None:
    pytest.importorskip("transformers")
    _, code = PROGRAMS
    assert "2048" in code
    assert "range(6)" in code
    small = code.replace("2048", "64").replace("range(6)", "range(2)")
    done = subprocess.run([sys.executable, "-c", small], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [line.split()[:3] for line in said[:2]] == [["step", str(step), "loss"] for step in range(2)]
    assert said[2].startswith("saved tensors take at most ")


def test_it_is_short() -> None:
    lines = [line for line in program().splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 13
