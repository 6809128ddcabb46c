"""The first minute on a GPU: whether each piece works there at all, one line a check, the most telling first.

    python3 -m benchmarks.gpu_smoke
    python3 -m benchmarks.gpu_smoke --device cpu     the same checks where there is no GPU, for testing them

A check that fails says why, and the next one runs; one whose packages are missing is left out. What is known is written to a
result file after each of them, so that a run that is cut off leaves what came before. Exits 3 without a GPU, 1 when a check
fails.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from benchmarks.machine import DETERMINISTIC, SOLVER, describe, gpu, missing, no_gpu
from benchmarks.results import ROOT, write_result

if TYPE_CHECKING:
    import torch

    from memo.gpt.model.model import GPT
    from memo.manager.machine import Machine
    from memo.manager.manager import Manager

VOCAB, SEQ = 512, 1024
# A product over part of the rows may run through another kernel: a few roundings of float32. A wrong token is off by 1.
ROUNDINGS = 1e-4
ALLOCATOR_LIMIT_S = 40


class LeftOut(Exception):
    """A check that cannot be made here, and why."""


def offload(device: torch.device) -> str:
    """One step with every activation sent to host memory, against the step that keeps them."""
    manager = _equal_gradients(device, host="1GiB")
    return f"gradients equal bit for bit, {manager.stats.bytes_host >> 20} MiB through host memory"


def disk(device: torch.device) -> str:
    """Likewise to disk and back."""
    with tempfile.TemporaryDirectory() as folder:
        manager = _equal_gradients(device, host=0, disk=folder)
        return f"gradients equal bit for bit, {manager.stats.bytes_disk >> 20} MiB through {folder}"


def tokens(device: torch.device) -> str:
    """Three quarters of the tokens recomputed."""
    import torch

    import memo

    want = _gradients(_model(device, torch.float32))
    model = _model(device, torch.float32)
    manager = memo.offload(model, alpha=0.25, host="1GiB")
    got = _gradients(model, manager)
    off = max(float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))
    manager.close()
    use = manager.report().recompute
    assert use is not None
    assert not use.refused, use.refused
    assert off <= ROUNDINGS, f"gradients are off by {off:.1e}"
    return f"{manager.stats.bytes_recomputed >> 20} MiB recomputed, gradients within {off:.1e}"


def kernels(device: torch.device) -> str:
    """A mask into bits and back, by Triton where there is a GPU."""
    import torch

    from memo.kernels import pack_mask, unpack_mask
    from memo.kernels.dispatch import on_triton

    mask = torch.rand(2, 64, 99, device=device) < 0.1
    bits = pack_mask(mask)
    assert torch.equal(unpack_mask(bits, torch.empty_like(mask)), mask), "what was packed did not come back"
    by_triton = on_triton(mask)
    assert by_triton or device.type != "cuda", "triton does not work here, see the warning"
    return f"{bits.numel()} bytes packed and back, by {'Triton' if by_triton else 'torch'}"


def link(device: torch.device) -> str:
    """Copies between the device and pinned memory."""
    from memo.machine.link_bandwidth import measure_lanes

    rates = measure_lanes(device, directories=[], seconds=0.3)
    return ", ".join(f"{lane.value} {rate / 1e9:.1f} GB/s" for lane, rate in rates.items())


def blocking_kvikio() -> Any:
    """kvikio in its compatibility mode, told to GdsDisk as GPUDirect Storage, since it refuses calls that block."""
    library: Any = importlib.import_module("kvikio")
    importlib.import_module("kvikio.defaults").set("compat_mode", library.CompatMode.ON)
    return SimpleNamespace(CuFile=library.CuFile, defaults=SimpleNamespace(is_compat_mode_preferred=lambda: False))


def gds(device: torch.device) -> str:
    """kvikio's disk path beside staging through pinned memory; in its compatibility mode without GPUDirect Storage."""
    if device.type != "cuda" or missing(("kvikio",)):
        raise LeftOut("needs a GPU and kvikio")
    from memo.manager.machine import Machine, use_machine
    from memo.swap.backends import copy_stream
    from memo.swap.disk import GdsDisk, obstacles, try_gds

    class ByGds(Machine):
        """This machine, whose disk is kvikio's whatever the driver has."""

        def disk(self, directories: Any, nbytes: int | None, *, verify: bool) -> Any:
            return GdsDisk(directories, nbytes, new_stream=lambda: copy_stream(device), kvikio=library), None

    with tempfile.TemporaryDirectory() as folder:
        lacks = obstacles(Path(folder)) or try_gds(Path(folder))
        library = blocking_kvikio() if lacks else None  # None: GdsDisk imports kvikio itself
        rates = [_disk_rates(machine, Path(folder)) for machine in (ByGds(device), Machine(device))]
        with use_machine(ByGds(device)):
            manager = _equal_gradients(device, host=0, disk=folder)
    mode = f"kvikio's compatibility mode ({lacks[0]})" if lacks else "GPUDirect Storage"
    return f"{mode}: {rates[0]}, staged {rates[1]}; gradients equal, {manager.stats.bytes_disk >> 20} MiB by kvikio"


def _disk_rates(machine: Machine, folder: Path, tensors: int = 16, nbytes: int = 64 << 20) -> str:
    """Rates of writing and reading so many tensors of the device, all issued at once."""
    import torch

    from memo.swap.backends.cuda import CudaBackend

    disk, _ = machine.disk([folder], tensors * nbytes, verify=False)
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=machine.device)
    targets = [torch.zeros_like(source) for _ in range(tensors)]
    extents = [disk.reserve(nbytes) for _ in range(tensors)]
    after = (CudaBackend(machine.device).compute_event(),)
    told = []
    for name, issue in (
        ("write", lambda: [disk.write(extent, source, after=after) for extent in extents]),
        ("read", lambda: [disk.read(*pair, after=after) for pair in zip(extents, targets, strict=True)]),
    ):
        begin = time.perf_counter()
        for operation in issue():
            operation.synchronize()
        told.append(f"{name} {tensors * nbytes / (time.perf_counter() - begin) / 1e9:.2f} GB/s")
    assert all(torch.equal(target, source) for target in targets), "what was written did not come back"
    disk.close()
    return ", ".join(told)


def plan(device: torch.device) -> str:
    """The automatic plan: a few measured steps, then a solver."""
    import torch

    import memo

    lacks = missing(SOLVER)
    if lacks:
        raise LeftOut(f"{' and '.join(lacks)} not installed")
    model = _model(device, torch.float32)
    manager = memo.offload(model, host="1GiB", disk=[])
    for _ in range(8):
        _gradients(model, manager)
        manager.step_done()
        if manager.plan is not None:
            break
    made = manager.plan
    manager.close()
    assert made is not None, "no plan after eight steps"
    return f"{'everything fits' if made.declined else 'planned'}, a step of {made.step_s * 1e3:.1f} ms predicted"


def allocator(device: torch.device) -> str:
    """The planned allocator in torch's place, in a process of its own since it must be chosen before CUDA is used."""
    if device.type != "cuda":
        raise LeftOut("needs a GPU")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_smoke", "--planned-allocator"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=ALLOCATOR_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.strip()
    return done.stdout.strip().splitlines()[-1]


CHECKS: tuple[Callable[[torch.device], str], ...] = (offload, kernels, tokens, link, allocator, disk, plan, gds)


def _planned_allocator() -> None:
    """Steps under the planned allocator; prints what was served by plan."""
    import memo

    serving = memo.use_planned_allocator()
    import torch

    model = _model(torch.device("cuda"), torch.bfloat16)
    for number in range(8):
        with serving.step():
            first = _gradients(model)
        if number == 0:
            want = first
        assert all(map(torch.equal, first, want)), f"step {number} differs"
        del first
        serving.wait()
    stats = memo.memory_stats()
    assert stats.planned > 0, str(stats)
    print(f"{stats.planned} requests at planned places, {stats.fallbacks} against the plan")


def _equal_gradients(device: torch.device, **tiers: Any) -> Manager:
    import torch

    import memo

    want = _gradients(_model(device, torch.bfloat16))
    again = _gradients(_model(device, torch.bfloat16))
    assert all(map(torch.equal, again, want)), "the step without memo does not repeat itself, nothing can be compared"
    model = _model(device, torch.bfloat16)
    manager = memo.offload(model, alpha=1.0, **tiers)
    got = _gradients(model, manager)
    live = manager.stats.live_entries
    manager.close()
    assert all(map(torch.equal, got, want)), "gradients differ from those without memo"
    assert manager.stats.bytes_host + manager.stats.bytes_disk > 0, "nothing was moved"
    assert live == 0, f"{live} saved tensors are left after backward"
    return manager


def _model(device: torch.device, dtype: torch.dtype) -> GPT:
    import torch

    from memo.gpt.config import preset
    from memo.gpt.model.model import GPT

    torch.manual_seed(0)
    return GPT(preset("tiny", vocab_size=VOCAB, max_seq=SEQ)).to(device=device, dtype=dtype)


def _gradients(model: GPT, manager: Any = None) -> list[torch.Tensor]:
    """Of one step; the model's own are gone afterwards."""
    import contextlib

    import torch

    ids = torch.randint(0, VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(1))
    ids = ids.to(next(model.parameters()).device)
    with manager or contextlib.nullcontext():
        loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return gradients


def run(device: torch.device, head: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The result of each check, told and, on a GPU, written as it comes."""
    done: dict[str, dict[str, Any]] = {}
    for check in CHECKS:
        row = done[check.__name__] = _outcome(check, device)
        print(f"{check.__name__:10} {row['outcome']:8} {row['seconds']:6.1f} s  {row['said']}", flush=True)
        if device.type == "cuda":
            write_result("gpu-smoke", {"device": head, "checks": done})
    return done


def _outcome(check: Callable[[torch.device], str], device: torch.device) -> dict[str, Any]:
    begin = time.monotonic()
    try:
        outcome, said = "works", check(device)
    except LeftOut as reason:
        outcome, said = "left out", str(reason)
    except Exception as error:  # whatever a piece raises where it does not work; the others are still worth knowing
        traceback.print_exc()
        outcome, said = "FAILS", f"{type(error).__name__}: {error}"
    return {"outcome": outcome, "said": said, "seconds": round(time.monotonic() - begin, 1)}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_smoke")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--planned-allocator", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    os.environ.update(DETERMINISTIC)
    import torch

    torch.use_deterministic_algorithms(True)  # attention's backward adds by atomics otherwise, also with `warn_only`
    if args.planned_allocator:
        _planned_allocator()
        return 0
    found = {} if args.device == "cpu" else gpu()
    if found is None:
        return no_gpu("gpu-smoke")
    if found:
        print(describe(found), flush=True)
    done = run(torch.device(args.device), found)
    return 1 if any(row["outcome"] == "FAILS" for row in done.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
