"""The disk tier against fio: sustained O_DIRECT write and read, same file system, block size and depth, one run.

    python -m benchmarks.disk [--dir DIR] [--bytes 1GiB] [--rounds 5] [--block 1MiB --block 4MiB] [--threads 2 ...]

Rounds alternate fio and the store, since a shared disk drifts by tens of percent within a minute; both overwrite a
file that was written once before. Each arm's median counts, and so does the median of the ratios within rounds.
Where kvikio is installed its POSIX path is an arm too: same tensors, same number of threads, same size of a piece, O_DIRECT
both ways. It is what a machine with kvikio but without GPUDirect Storage could use instead of the store. Its host I/O
needs a libcuda.so.1, though no GPU.

fio submits from one thread and from small pages, the store from several threads and from huge pages: above 100 % is
possible where the processor and not the disk is the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import write_result
from memo.swap.disk.store import DiskStore
from memo.swap.memory.page_aligned import aligned_empty
from memo.units import format_bytes, parse_bytes

GOAL = 0.9
TENSOR_BYTES = 16 << 20


class StoreArm:
    """Tensors of 16 MiB through a DiskStore, all issued at once."""

    def __init__(self, directory: Path, nbytes: int, block_bytes: int, threads: int, *, aligned: bool, verify: bool):
        self.store = DiskStore([directory], nbytes, block_bytes=block_bytes, threads=threads, verify=verify)
        # One offset for all: a tensor of torch.empty lies 64 bytes after a page's start.
        self.buffers = [
            aligned_empty(TENSOR_BYTES) if aligned else aligned_empty(TENSOR_BYTES + 64)[64:] for _ in range(4)
        ]
        for buffer in self.buffers:
            buffer.random_(0, 256)
        self.extents = [self.store.reserve(TENSOR_BYTES) for _ in range(nbytes // TENSOR_BYTES)]

    def write(self) -> float:
        return self._measure(self.store.write)

    def read(self) -> float:
        return self._measure(self.store.read)

    def _measure(self, issue: Callable[..., Any]) -> float:
        """Bytes per second from the first call to the last byte."""
        begin = time.perf_counter()
        operations = [
            issue(extent, self.buffers[index % len(self.buffers)]) for index, extent in enumerate(self.extents)
        ]
        for operation in operations:
            operation.synchronize()
        return len(self.extents) * TENSOR_BYTES / (time.perf_counter() - begin)


class FioArm:
    """fio with one asynchronous queue of the same depth as the store has threads."""

    def __init__(self, path: Path, nbytes: int, block_bytes: int, depth: int) -> None:
        self.path = path
        self.options = [
            "--name=memo",
            f"--filename={path}",
            f"--size={nbytes}",
            f"--bs={block_bytes}",
            f"--iodepth={depth}",
            "--direct=1",
            "--ioengine=libaio",
            "--output-format=json",
        ]

    def write(self) -> float:
        return self._measure("write")

    def read(self) -> float:
        return self._measure("read")

    def _measure(self, direction: str) -> float:
        output = subprocess.run(
            ["fio", f"--rw={direction}", *self.options], capture_output=True, text=True, check=True, cwd="/"
        ).stdout
        return float(json.loads(output)["jobs"][0][direction]["bw_bytes"])


class KvikioArm:
    """The store's tensors, block size and thread count through kvikio's own POSIX threads."""

    def __init__(self, library: Any, path: Path, nbytes: int, block_bytes: int, threads: int) -> None:
        self.path = path
        path.touch()
        os.truncate(path, nbytes)
        # ON is the POSIX path wherever this runs; opening the driver without a GPU hangs.
        library.defaults.set(
            {
                "compat_mode": library.CompatMode.ON,
                "num_threads": threads,
                "task_size": block_bytes,
                "auto_direct_io_read": True,
                "auto_direct_io_write": True,
            }
        )
        self.file = library.CuFile(path, "r+")
        self.buffers = [aligned_empty(TENSOR_BYTES).random_(0, 256) for _ in range(4)]
        self.offsets = range(0, nbytes, TENSOR_BYTES)

    def write(self) -> float:
        return self._measure(self.file.pwrite)

    def read(self) -> float:
        return self._measure(self.file.pread)

    def _measure(self, issue: Callable[..., Any]) -> float:
        begin = time.perf_counter()
        futures = [
            issue(self.buffers[index % len(self.buffers)].numpy(), TENSOR_BYTES, offset)
            for index, offset in enumerate(self.offsets)
        ]
        moved = sum(future.get() for future in futures)
        assert moved == TENSOR_BYTES * len(self.offsets)
        return moved / (time.perf_counter() - begin)

    def close(self) -> None:
        self.file.close()
        self.path.unlink()


def find_kvikio(directory: Path) -> tuple[Any, str]:
    """kvikio, if its POSIX path works here, or None and why not."""
    try:
        library: Any = importlib.import_module("kvikio")
        importlib.import_module("kvikio.defaults")  # no attribute of the package before
    except ImportError:
        return None, "kvikio is not installed"
    except Exception as error:  # its own, where a CUDA library is missing
        return None, f"kvikio cannot be imported: {error}"
    try:
        arm = KvikioArm(library, directory / "try-kvikio", TENSOR_BYTES, TENSOR_BYTES, 1)
        try:
            arm.write()
        finally:
            arm.close()
    except RuntimeError as error:
        return None, f"kvikio's host I/O does not work: {str(error).strip().splitlines()[-1]}"
    return library, f"kvikio {library.__version__}"


def compare(
    directory: Path, nbytes: int, rounds: int, block_bytes: int, threads: int, kvikio: Any = None
) -> dict[str, Any]:
    """All arms at one block size and depth, interleaved."""
    arms: dict[str, StoreArm | FioArm | KvikioArm] = {
        "memo": StoreArm(directory, nbytes, block_bytes, threads, aligned=True, verify=False),
        "memo_unaligned": StoreArm(directory, nbytes, block_bytes, threads, aligned=False, verify=False),
        "memo_verify": StoreArm(directory, nbytes, block_bytes, threads, aligned=True, verify=True),
    }
    if shutil.which("fio"):
        arms["fio"] = FioArm(directory / "fio", nbytes, block_bytes, threads)
    if kvikio is not None:
        arms["kvikio"] = KvikioArm(kvikio, directory / "kvikio", nbytes, block_bytes, threads)
    try:
        for arm in arms.values():
            arm.write()  # the first write into reserved blocks costs the file system more
        rates: dict[str, list[float]] = {}
        for number in range(rounds):
            names = sorted(arms, reverse=bool(number % 2))
            for name in names:
                rates.setdefault(f"{name}_write", []).append(arms[name].write())
            for name in names:
                rates.setdefault(f"{name}_read", []).append(arms[name].read())
    finally:
        for arm in arms.values():
            if isinstance(arm, StoreArm):
                arm.store.close()
            elif isinstance(arm, KvikioArm):
                arm.close()
            else:
                arm.path.unlink(missing_ok=True)
    return _summary(rates, block_bytes, threads)


def _summary(rates: dict[str, list[float]], block_bytes: int, threads: int) -> dict[str, Any]:
    result: dict[str, Any] = {"block_bytes": block_bytes, "depth": threads}
    for name, values in rates.items():
        result[f"{name}_bytes_per_s"] = statistics.median(values)
        result[f"{name}_rounds_bytes_per_s"] = [round(value) for value in values]
        direction = name.rsplit("_", 1)[1]
        peer = rates.get(f"fio_{direction}")
        if peer and not name.startswith("fio"):
            result[f"{name}_over_fio"] = statistics.median(values) / statistics.median(peer)
            result[f"{name}_over_fio_paired"] = statistics.median(a / b for a, b in zip(values, peer, strict=True))
    for direction in ("write", "read"):
        if f"kvikio_{direction}" in rates:
            pairs = zip(rates[f"memo_{direction}"], rates[f"kvikio_{direction}"], strict=True)
            result[f"memo_over_kvikio_{direction}_paired"] = statistics.median(a / b for a, b in pairs)
    return result


def _print(result: dict[str, Any]) -> None:
    print(f"\nblock {format_bytes(result['block_bytes'])}, depth {result['depth']}")
    for direction in ("write", "read"):
        for arm in ("fio", "memo", "memo_unaligned", "memo_verify", "kvikio"):
            rate = result.get(f"{arm}_{direction}_bytes_per_s")
            if rate is not None:
                ratio = result.get(f"{arm}_{direction}_over_fio")
                share = "" if ratio is None else f"  {ratio:6.1%} of fio"
                print(f"  {direction:<6} {arm:<15} {rate / 1e6:8.0f} MB/s{share}")


def _file_system(directory: Path) -> dict[str, str]:
    """The mount that holds the directory."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [m for m in mounts if directory.resolve().is_relative_to(m[1])]
    source, _, kind, options = max(inside, key=lambda mount: len(mount[1]))[:4]
    return {"device": source, "type": kind, "options": options}


@contextlib.contextmanager
def _scratch(parent: str | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="memo-bench-", dir=parent) as name:
        yield Path(name)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disk", description="the disk tier against fio")
    parser.add_argument("--dir", default=os.getcwd(), help="a directory on the disk to measure")
    parser.add_argument("--bytes", default="1GiB", help="bytes per arm and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", action="append", help="block size; repeat to compare several")
    parser.add_argument("--threads", type=int, action="append", help="depth; repeat to compare several")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not shutil.which("fio"):
        print("fio is not installed: the store is measured alone (apt-get install fio)")
    nbytes = parse_bytes(args.bytes, what="--bytes") // TENSOR_BYTES * TENSOR_BYTES
    results = []
    with _scratch(args.dir) as directory:
        file_system = _file_system(directory)
        kvikio, told = find_kvikio(directory)
        print(told)
        for block in args.block or ["4MiB"]:
            for threads in args.threads or [4]:
                results.append(compare(directory, nbytes, args.rounds, parse_bytes(block), threads, kvikio))
                _print(results[-1])
    load = os.getloadavg()[1]  # other work on the machine disturbs every arm
    body = {
        "load_average_5min": load,
        "file_system": file_system,
        "bytes_per_round": nbytes,
        "goal_over_fio": GOAL,
        "kvikio": told,
        "settings": results,
    }
    print(f"\nWrote {write_result('disk', body)}")


if __name__ == "__main__":
    main()
