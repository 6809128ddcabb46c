"""A million tokens on one GPU: a full step under an activation plan, and the same step with full checkpointing.

    python3 -m benchmarks.gpu_million [--seq 1m] [--layers 24,12,8,6,4] [--minutes 7] [--host SIZE] [--gpu h200]

350m with heads of 128 and rotary positions, in bfloat16: forward, backward and AdamW. Attention alone is 190 PFLOP a step in
24 layers, so its time is measured first, at an eighth of the length, and the largest of the depths whose two steps fit into
the minutes is taken; what is compared is a ratio, in which the depth cancels. Both ways warm up at a short length.
Reported: seconds, mfu_causal, and the peaks of device and host against the plan's. Exits 3 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_check import NO_GPU, gpu
from benchmarks.results import write_result
from memo.units import format_bytes, format_duration, parse_bytes, parse_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from memo.gpt.config import GPTConfig
    from memo.mip.activation import ActivationPlan

__all__ = ["Request", "measure"]

HEADS = 8
WARM_UP_TOKENS = 8192
PROBE_SHARE = 8
"""The length at which attention is timed, as a part of the whole: its time grows with the square."""
RECOMPUTED_ATTENTION = 4.5 / 3.5
"""Of a step with full checkpointing against one without: forward once more, at 1 to backward's 2.5."""
NOT_ATTENTION = 1.25
"""Of attention's time, what the whole step takes at this length; a guess that only chooses the depth."""
DEVICE_SHARE, HOST_SHARE = 0.92, 0.8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to measure."""

    seq: int
    depths: Sequence[int]
    """Layers, the most first."""
    seconds: float
    """For the two measured steps together."""
    host_bytes: int
    device_bytes: int
    gpu: str
    """Whose rates the plan takes."""
    model: str = "350m"


def shape(request: Request, layers: int) -> GPTConfig:
    """The model. Learned positions for a million tokens would be three times as many parameters as all the rest."""
    from memo.gpt.config import preset

    return preset(request.model, layers=layers, heads=HEADS, max_seq=request.seq, positions="rotary")


def choose_depth(request: Request, attention_s: float) -> int:
    """The most layers whose two steps fit into the time, given one layer's attention, forward and backward."""
    for layers in request.depths:
        if layers * attention_s * NOT_ATTENTION * (1 + RECOMPUTED_ATTENTION) <= request.seconds:
            return layers
    return request.depths[-1]


def attention_seconds(request: Request, device: torch.device) -> float:
    """Forward and backward of one layer's attention at the full length, from a shorter one."""
    import torch
    from torch.nn import functional as F

    config = shape(request, request.depths[-1])
    tokens = max(request.seq // PROBE_SHARE, 1)
    size = (1, config.heads, tokens, config.head_dim)
    q, k, v = (torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    best = float("inf")
    for _ in range(3):  # the first chooses kernels
        wait(device)
        begin = time.perf_counter()
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        wait(device)
        best = min(best, time.perf_counter() - begin)
    return best * (request.seq / tokens) ** 2


def plan_for(request: Request, config: GPTConfig) -> ActivationPlan:
    """The shortest step within the budgets."""
    from memo.gpt.derive import Layout, derive_profile
    from memo.mip.activation import ActivationProblem, Budgets
    from memo.mip.activation_solve import solve_problem
    from memo.mip.hardware import hardware

    machine = dataclasses.replace(hardware(request.gpu), device_bytes=request.device_bytes)
    budgets = Budgets(device_bytes=request.device_bytes, host_bytes=request.host_bytes)
    profile = derive_profile(config, machine, Layout(tokens=request.seq), name=request.model)
    return solve_problem(ActivationProblem(profile=profile, hardware=machine, budgets=budgets))


class Steps:
    """A model, its optimizer and its batch: the same ones for both ways, so that their losses are equal."""

    def __init__(self, config: GPTConfig, device: torch.device) -> None:
        import torch

        from memo.gpt.model import GPT
        from memo.gpt.optimizer import adamw

        torch.manual_seed(0)
        self.device = device
        self.model = GPT(config, device=device, dtype=torch.bfloat16)
        self.optimizer = adamw(self.model, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def step(self, tokens: int, around: contextlib.AbstractContextManager[Any]) -> tuple[float, int, float]:
        """(seconds, peak bytes of the device, loss) of one forward, backward and update."""
        import torch

        config: GPTConfig = self.model.config
        ids = torch.randint(config.vocab_size, (1, tokens + 1), generator=torch.Generator().manual_seed(1))
        inputs, targets = ids[:, :-1].to(self.device), ids[:, 1:].to(self.device)
        wait(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        with around:
            loss = self.model(inputs, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        wait(self.device)
        seconds = time.perf_counter() - begin
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        return seconds, peak, float(loss.detach())


def wait(device: torch.device) -> None:
    """Until the device has done what it was asked."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(request: Request, device: torch.device) -> dict[str, Any]:
    """Plans, then one warm-up and one measured step each way, memo first: it is the one that must not fail."""
    import memo
    from benchmarks.gpu_bench import checkpointed
    from memo.gpt.counts import mfu_causal
    from memo.mip.hardware import hardware

    attention_s = attention_seconds(request, device)
    config = shape(request, choose_depth(request, attention_s))
    plan = plan_for(request, config)
    predicted = plan.stages[0]
    print(
        f"{request.model}, {config.layers} layers at {request.seq} tokens; attention {attention_s:.1f} s a layer; plan: "
        f"step {format_duration(plan.step_s)}, device {format_bytes(predicted.peak_device_bytes)}, "
        f"host {format_bytes(predicted.peak_host_bytes)}",
        flush=True,
    )

    def ours() -> dict[str, Any]:
        steps = Steps(config, device)
        begin = time.perf_counter()
        manager = memo.offload(steps.model, plan=plan, host=request.host_bytes, disk=None)
        opened_s = time.perf_counter() - begin
        try:
            steps.step(min(WARM_UP_TOKENS, request.seq), manager)
            manager.step_done()
            row = one_way(steps, request, lambda: manager)
            report, stats = manager.report(), manager.stats
            tiers = {str(use.tier): use.peak_bytes for use in report.tiers}
            return {**row, "open_s": opened_s, "peak_bytes_by_tier": tiers, "stall_s": stats.stall_s,
                    "recompute_s": stats.recompute_s, "report": str(report)}  # fmt: skip
        finally:
            manager.close()

    def theirs() -> dict[str, Any]:
        steps = Steps(config, device)
        steps.step(min(WARM_UP_TOKENS, request.seq), checkpointed(steps.model))
        return one_way(steps, request, lambda: checkpointed(steps.model))

    rows = {"memo, by plan": tried(ours, device), "full checkpointing": tried(theirs, device)}
    for name, row in rows.items():
        if "failed" in row:
            print(f"  {name:20} {row['failed']}", flush=True)
            continue
        row["mfu_causal"] = mfu_causal(
            config,
            seq=request.seq,
            tokens_per_s=request.seq / row["step_s"],
            peak_flops=hardware(request.gpu).peak_flops,
        )
        peak = format_bytes(row["peak_device_bytes"])
        print(f"  {name:20} {row['step_s']:8.1f} s  mfu_causal {row['mfu_causal']:.1%}  peak {peak}", flush=True)
    times = [row.get("step_s") for row in rows.values()]
    ratio = times[1] / times[0] if None not in times else None
    if ratio is not None:
        print(f"  memo is {ratio:.2f} times as fast; expected is 1.2 at least", flush=True)
    return {
        "request": dataclasses.asdict(request),
        "layers": config.layers,
        "attention_s_per_layer": attention_s,
        "plan": {
            "step_s": plan.step_s,
            "peak_device_bytes": predicted.peak_device_bytes,
            "peak_host_bytes": predicted.peak_host_bytes,
            "layers": [dataclasses.asdict(layer) for layer in plan.layers],
        },
        "ways": rows,
        "speed_ratio": ratio,
    }


def one_way(steps: Steps, request: Request, around: Callable[[], Any]) -> dict[str, Any]:
    seconds, peak, loss = steps.step(request.seq, around())
    return {"step_s": seconds, "peak_device_bytes": peak, "loss": loss}


def tried(way: Callable[[], dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """Its result, or why there is none: the other way is still worth measuring."""
    import torch

    from memo.errors import MemoError

    try:
        return way()
    except (torch.OutOfMemoryError, MemoError) as error:
        return {"failed": str(error).splitlines()[0]}
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpu_million")
    parser.add_argument("--seq", default="1m")
    parser.add_argument("--layers", default="24,12,8,6,4", help="depths to choose from, the most first")
    parser.add_argument("--minutes", type=float, default=7.0, help="for the two measured steps together")
    parser.add_argument("--host", help="default: 80 %% of what is free, 128GiB at most")
    parser.add_argument("--gpu", help="preset of rates for the plan (default: by name)")
    args = parser.parse_args(argv)
    device = gpu()
    if device is None:
        print("gpu-bench: no CUDA GPU that this interpreter's torch can use; nothing was run", file=sys.stderr)
        return NO_GPU
    import torch

    from memo.mip.hardware import hardware_of
    from memo.node import available_host_bytes

    free = min(int(HOST_SHARE * available_host_bytes()), 128 << 30)
    request = Request(
        seq=parse_tokens(args.seq),
        depths=[int(depth) for depth in args.layers.split(",")],
        seconds=60 * args.minutes,
        host_bytes=free if args.host is None else parse_bytes(args.host, what="--host"),
        device_bytes=int(DEVICE_SHARE * torch.cuda.mem_get_info()[0]),
        gpu=args.gpu or hardware_of(torch.cuda.get_device_name()).name,
    )
    result = measure(request, torch.device("cuda", torch.cuda.current_device()))
    print(f"Wrote {write_result('gpu-bench-1m', {'device': device, **result})}")
    return 1 if "failed" in result["ways"]["memo, by plan"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
