"""The bandwidth benchmark's cases: each runs, and counts the bytes that it must move."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# In a process of its own: benchmarks are no installed package, and the root must not be on this one's path.
CODE = """
import json, torch
from benchmarks.kernels import cases
found = {}
for case in cases(torch.device("cpu"), rows=2, tokens=8, width=64):
    case.work()
    found[case.name] = case.nbytes
print(json.dumps(found))
"""


def test_every_case_runs_and_counts_its_bytes() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True)
    tail = 2 * 4 * 64 * 2  # two rows, the last four of eight tokens, 64 values of bfloat16
    codes = ("pack, int8", "unpack, int8", "pack, fp8", "unpack, fp8")
    assert json.loads(done.stdout) == {
        "pack, exact": 6 * tail,
        "unpack, exact": 6 * tail,
        **dict.fromkeys(codes, 3 * (tail + tail // 2 + tail // 256 * 4)),
        "pack mask": tail // 2 + tail // 16,
        "unpack mask": tail // 2 + tail // 16,
    }
