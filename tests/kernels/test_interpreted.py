"""Kernels without a GPU: every test marked `gpu` here, in Triton's interpreter, and every kernel compiled for real GPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILE = HERE.parent / "support" / "compile_kernels.py"
# The largest block of shared memory that a program may ask for: sm_80 163 KiB, sm_90 227 KiB (CUDA C++ Programming
# Guide, technical specifications per compute capability).
SHARED_NBYTES = {"sm_80": 163 << 10, "sm_90a": 227 << 10}

pytest.importorskip("triton")


def test_kernels_agree_with_their_references_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", str(HERE)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    assert re.search(r"\d+ passed", last)
    assert "skipped" not in last


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, object]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, COMPILE, "80", "90"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles_for_a100_and_h100_without_a_gpu(compiled: list[dict[str, object]]) -> None:
    names = {target: [r["kernel"] for r in compiled if r["target"] == target] for target in SHARED_NBYTES}
    assert len(compiled) == sum(map(len, names.values()))
    assert names["sm_80"] == names["sm_90a"]
    assert len(set(names["sm_80"])) == len(names["sm_80"])
    for report in compiled:
        assert report["is_elf"], report
        assert report["shared_nbytes"] <= SHARED_NBYTES[report["target"]], report  # type: ignore[index,operator]


def test_every_kernel_of_the_package_is_compiled(compiled: list[dict[str, object]]) -> None:
    import compile_kernels

    from memo.kernels import codec_triton, masks_triton

    covered = {kernel.__name__ for _, kernel, *_ in compile_kernels.kernels()}
    written = {name for module in (masks_triton, codec_triton) for name in vars(module) if name.endswith("_kernel")}
    assert covered == written
    assert len({report["kernel"] for report in compiled}) == len(list(compile_kernels.kernels()))


def test_aligned_copies_move_sixteen_bytes_a_thread(compiled: list[dict[str, object]]) -> None:
    for report in compiled:
        if "aligned" in str(report["kernel"]) and "fp8" not in str(report["kernel"]):
            assert report["accesses_of_16_bytes"], report
    assert [r for r in compiled if "aligned" in str(r["kernel"])]


def test_bfloat16_results_are_rounded_to_nearest_even(compiled: list[dict[str, object]]) -> None:
    results = re.compile(r"(decode|unpack mask) bf16")
    rounded = [report for report in compiled if results.match(str(report["kernel"]))]
    assert rounded
    for report in rounded:
        assert report["rounds_to_nearest_even"], report
