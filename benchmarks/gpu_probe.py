"""The facts of a GPU machine that the design rests on, in a minute: one line each, the most telling first.

    python3 -m benchmarks.gpu_probe            memory up to 16 GiB is pinned
    python3 -m benchmarks.gpu_probe --small    the same code at small sizes, for testing it

    host        cores, memory, huge pages, limits on locked memory
    locking     seconds to pin and to unlock, by size
    link        bytes per second each way, alone and together, and what it costs the host to ask for a copy
    issue       host time of each call that the engine makes at a layer's edge
    rows        whether a matrix product over fewer rows repeats the bits of the whole: recompute rests on it
    attention   the kernel that attention takes, deterministic or not
    kernels     rates of products, attention by head size, length and direction, copies and launches

Written to a result file after each. Exits 3 without a GPU, 1 when a measurement fails; the others still run.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import describe, gpu, no_gpu, nvidia_smi
from benchmarks.results import write_result

if TYPE_CHECKING:
    import torch

GIB = 1 << 30
KEPT = (0.1, 0.25, 0.5, 0.9)
"""Shares of the tokens that a recompute leaves out."""
PRODUCTS = ((1024, 3072), (1024, 4096), (4096, 1024), (2048, 8192), (4096, 4096))
"""Inner and outer width of matrix products, as in the presets."""
REPEATS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes, tokens and calls of the measurements."""

    locked_bytes: tuple[int, ...] = (GIB, 4 * GIB, 16 * GIB)
    copied_bytes: int = 256 << 20
    tokens: int = 64 << 10
    calls: int = 500


SMALL = Sizes(locked_bytes=(4 << 20,), copied_bytes=1 << 20, tokens=256, calls=5)


def host(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Cores, memory and limits, as the kernel tells them."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "cores": len(os.sched_getaffinity(0)),
        **{name: lines[name].strip() for name in ("MemTotal", "MemAvailable")},
        "huge pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "overcommit": _read("/proc/sys/vm/overcommit_memory"),
        "control group": _read("/sys/fs/cgroup/memory.max"),
        "locked memory": "no limit" if locked == resource.RLIM_INFINITY else locked,
        "link": nvidia_smi("pcie.link.gen.current", "pcie.link.width.current"),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "not told"


def locking(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Seconds to lock fresh pages in one call, to give them back, and to lock a slab whose pages threads make first."""
    from memo.swap.memory.pinned import PinnedSlab, empty_pinned

    found = {}
    for nbytes in sizes.locked_bytes:
        begin = time.perf_counter()
        memory = empty_pinned(nbytes)
        locked = time.perf_counter()
        del memory
        unlocked = time.perf_counter()
        slab = PinnedSlab(nbytes, device)
        slab.grow(nbytes)
        slab.wait(nbytes)
        row = {"lock_s": locked - begin, "unlock_s": unlocked - locked, "slab_s": time.perf_counter() - unlocked}
        slab.close()
        del slab
        per_gib = {f"{name}_per_gib": row[name] / nbytes * GIB for name in ("lock_s", "slab_s")}
        found[f"{nbytes / GIB:g} GiB"] = {**row, **per_gib}
    return found


def link(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Rates of copies, and whether the host goes on while they run."""
    import torch

    from memo.swap.backends.cuda import CudaBackend
    from memo.swap.memory.pinned import empty_pinned

    backend, nbytes = CudaBackend(device), sizes.copied_bytes
    memory = empty_pinned(2 * nbytes)
    on_device = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def out() -> None:
        backend.d2h.copy(memory[:nbytes], on_device[0])

    def back() -> None:
        backend.h2d.copy(on_device[1], memory[nbytes:])

    def together() -> None:
        out()
        back()

    found = {}
    for name, copies, work in (("d2h", 1, out), ("h2d", 1, back), ("together", 2, together)):
        timed(work, 1)
        issued_s, done_s = timed(work, REPEATS)
        found[name] = {
            "bytes_per_s": copies * nbytes / done_s,
            "issue_s": issued_s,
            "host_goes_on": issued_s < done_s / 2,
        }
    return found


def issue(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Host seconds of one call, while the device is not behind."""
    import torch

    from memo.swap.backends.cuda import CudaBackend
    from memo.swap.memory.pinned import empty_pinned

    backend = CudaBackend(device)
    memory, small = empty_pinned(1 << 16), torch.empty(1 << 16, dtype=torch.uint8, device=device)
    event = backend.compute_event()
    calls: dict[str, Callable[[], Any]] = {
        "copy of 64 KiB": lambda: backend.d2h.copy(memory, small),
        "compute_event": backend.compute_event,
        "compute_wait": lambda: backend.compute_wait(event),
        "timed event": lambda: torch.cuda.Event(enable_timing=True).record(),
        "memory_stats": lambda: torch.cuda.memory_stats(device),
        "memory_stats_as_nested_dict": lambda: torch.cuda.memory_stats_as_nested_dict(device),
        "mem_get_info": lambda: torch.cuda.mem_get_info(device),
        "reset_peak_memory_stats": lambda: torch.cuda.reset_peak_memory_stats(device),
    }
    found = {}
    for name, call in calls.items():
        timed(call, 1)
        found[name] = {"issue_s": timed(call, sizes.calls)[0]}
    return found


def rows(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """For each product, the shares of rows left out for which the rest came out bit for bit."""
    import torch

    found = {}
    for inner, outer in PRODUCTS:
        x = torch.randn(sizes.tokens, inner, device=device).bfloat16()
        weight = torch.randn(outer, inner, device=device).bfloat16()
        whole = x @ weight.T
        firsts = {share: int(share * sizes.tokens) for share in KEPT}
        found[f"{inner}x{outer}"] = {
            f"without the first {share:.0%}": torch.equal(whole[first:], x[first:] @ weight.T)
            for share, first in firsts.items()
        }
    return found


def attention(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """The kernel chosen for heads of 128 in bfloat16."""
    import torch

    from memo.gpt.model.attention_kernel import AttentionKind, choose

    kind = AttentionKind(device=device, dtype=torch.bfloat16, heads=8, kv_heads=8, head_dim=128)
    before = torch.are_deterministic_algorithms_enabled()
    found = {}
    try:
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            found["deterministic" if deterministic else "any"] = str(choose(kind))
    finally:
        torch.use_deterministic_algorithms(before)
    return found


def timed(work: Callable[[], Any], times: int) -> tuple[float, float]:
    """Seconds of one call until the host went on, and until the device was done."""
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        work()
    issued = time.perf_counter() - begin
    torch.cuda.synchronize()
    return issued / times, (time.perf_counter() - begin) / times


def kernels(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Rates of products, attention, copies and launches, as `memo doctor` measures them and plans take them."""
    from memo.machine import measure_kernels

    found = dataclasses.asdict(measure_kernels(device, seconds=3.0, small=sizes is SMALL))
    rates = {f"{each.pop('head')} x {each.pop('tokens')}": each for each in found.pop("attention")}
    return {**found, **rates}


MEASURED: tuple[Callable[[torch.device, Sizes], dict[str, Any]], ...] = (
    host,
    kernels,
    locking,
    link,
    issue,
    rows,
    attention,
)


def shown(value: Any) -> str:
    """One fact for people."""
    if isinstance(value, dict):
        return ", ".join(f"{_unit(name, each)}" for name, each in value.items())
    return str(value)


def _unit(name: str, value: Any) -> str:
    if name.endswith("issue_s"):
        return f"host {value * 1e6:.1f} us"
    if name == "bytes_per_s":
        return f"{value / 1e9:.2f} GB/s"
    return f"{name} {value:.3f}" if isinstance(value, float) else f"{name}: {value}"


def run(device: torch.device, sizes: Sizes, head: dict[str, Any]) -> bool:
    """Measures one after the other, told and written as it comes; whether all of them worked."""
    facts: dict[str, Any] = {}
    for measure in MEASURED:
        try:
            facts[measure.__name__] = measure(device, sizes)
        except Exception as error:  # one fact that this machine refuses must not hide the others
            traceback.print_exc()
            facts[measure.__name__] = {"failed": f"{type(error).__name__}: {error}"}
        for name, value in facts[measure.__name__].items():
            print(f"{measure.__name__:10} {name:28} {shown(value)}", flush=True)
        write_result("gpu-probe", {"device": head, "facts": facts})
    return not any("failed" in found for found in facts.values())


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_probe")
    parser.add_argument("--small", action="store_true", help="small sizes, for testing")
    args = parser.parse_args(arguments)
    found = gpu()
    if found is None:
        return no_gpu("gpu-probe")
    print(describe(found), flush=True)
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    return 0 if run(device, SMALL if args.small else Sizes(), found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
