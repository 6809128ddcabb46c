"""Random steps that leave their plans in every way, under AddressSanitizer; threads, under ThreadSanitizer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from standin_runtime import SOURCE

from memo.mip import build

HARNESS = Path(__file__).with_name("arena_fuzz.cpp")
ALLOCATOR = Path(__file__).parent.parent.parent / "allocator"
INCLUDES = [ALLOCATOR / "arena.cpp", *sorted(ALLOCATOR.glob("*.h"))]


def sanitized(sanitizers: str) -> tuple[Path, Path]:
    """The harness and the stand-in runtime, built with these sanitizers."""
    flags = ("-O1", "-std=c++20", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-pthread")
    try:
        return build(HARNESS, includes=INCLUDES, flags=flags), build(SOURCE, flags=(*flags, "-shared", "-fPIC"))
    except subprocess.CalledProcessError as error:
        if "cannot find" in error.stderr and "san" in error.stderr:
            pytest.skip(f"this compiler comes without -fsanitize={sanitizers}")
        raise


def run(sanitizers: str, *arguments: str) -> str:
    harness, runtime = sanitized(sanitizers)
    done = subprocess.run(
        [str(harness), str(runtime), *arguments],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},  # the one allocator lives as long as the process
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("first_seed", [1, 1_000_001])
def test_every_divergence_is_detected_and_survived_under_address_sanitizer(first_seed: int) -> None:
    assert run("address,undefined", str(first_seed), "500").strip() == "500 rounds"


def test_threads_do_not_race() -> None:
    assert run("thread", "1", "10", "threads").strip() == "10 rounds"
