"""Imports: `import memo` adds next to nothing to torch's, and `memo.offload` loads nothing that it has no use for yet."""

from __future__ import annotations

import json
import subprocess
import sys

MOST = 0.08
"""Of torch's own import, which takes some two seconds on an idle core: 150 ms."""
LATER = (
    "triton",
    "transformers",
    "pulp",
    "highspy",
    "rich",
    "matplotlib",
    "pyarrow",
    "tokenizers",
    "tensorboard",
    "pynvml",
)


def _told(code: str) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/")
    told: dict[str, object] = json.loads(done.stdout)
    return told


def test_importing_memo_takes_a_small_part_of_importing_torch() -> None:
    code = (
        "import json, time\n"
        "a = time.process_time()\nimport torch\n"
        "b = time.process_time()\nimport memo\n"
        "c = time.process_time()\nprint(json.dumps({'torch': b - a, 'memo': c - b}))"
    )
    told = _told(code)
    assert float(str(told["memo"])) < MOST * float(str(told["torch"]))


def test_offload_loads_no_package_before_it_is_used() -> None:
    code = (
        "import json, sys, torch\nbefore = set(sys.modules)\nimport memo\nmemo.offload\n"
        "print(json.dumps({'new': sorted(set(sys.modules) - before)}))"
    )
    new = _told(code)["new"]
    assert isinstance(new, list)
    assert "memo.manager.manager" in new
    assert not set(LATER) & set(new)
