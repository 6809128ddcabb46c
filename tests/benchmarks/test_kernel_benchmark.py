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
for case in cases(torch.device("cpu"), count=1024):
    case.work()
    found[case.name] = case.nbytes
print(json.dumps(found))
"""


def test_every_case_runs_and_counts_its_bytes() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True)
    codes = ("encode, int8", "decode, int8", "encode, fp8", "decode, fp8")
    assert json.loads(done.stdout) == {
        **dict.fromkeys(codes, 2 * 1024 + 1024 + 1024 // 128 * 4),
        "pack mask": 1024 + 1024 // 8,
        "unpack mask": 1024 + 1024 // 8,
    }
