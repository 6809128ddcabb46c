"""A million tokens on one GPU: a full step under an activation plan, and the same step with layers checkpointed.

    python3 -m benchmarks.gpu_bench 1m [--seq 1m] [--layers 24,12,8,6,4] [--minutes 7] [--host SIZE] [--gpu h200]

350m with heads of 128 and rotary positions, in bfloat16: forward, backward and AdamW. The planner chooses the tiles of the
MLPs; full and offloaded checkpointing compute them in the same tiles. Attention alone is 190 PFLOP a step in 24 layers, so
its time is measured first, and the largest of the depths that has a plan and whose steps fit into the minutes is taken;
what is compared is a ratio, in which the depth cancels. Each way warms up at a short length. Expected steps that no time is
left for are not begun.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.attention_probe import probe_attention
from benchmarks.comparison import Comparison, Setup, guarded, release_memory
from benchmarks.machine import no_solver
from benchmarks.peers.ways import CHECKPOINTING, OFFLOADED, Compute, memo_way, peers
from memo.errors import Infeasible
from memo.gpt.config import preset
from memo.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memo.gpt.config import GPTConfig
    from memo.mip.activation.plan import ActivationPlan, ActivationProblem

OURS = "memo, by plan"
HEADS = 8
WARM_UP_TOKENS = 8192
RECOMPUTED_ATTENTION = 4.5 / 3.5
"""Attention's time in a step with checkpointing, over that without: forward once more, at 1 to backward's 2.5."""
CHECKPOINTED_WAYS = 2
STEP_OVER_ATTENTION = 1.25
"""A step's time over attention's at this length; a guess that only chooses the depth."""
DEVICE_SHARE, HOST_SHARE, HOST_MOST = 0.92, 0.8, 128 << 30
SLACK = 1.1
"""Longest time that a way is expected to take, over the slowest before it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Model, length, time and budgets of one measurement."""

    seq: int
    depths: Sequence[int]
    """Layers, the most first."""
    seconds: float
    """For the measured steps together."""
    host_bytes: int
    device_bytes: int
    gpu: str
    """Whose rates the plan takes."""
    model: str = "350m"
    heads: int | None = HEADS


def available(
    *, seq: int, depths: Sequence[int], seconds: float, host: int | None, gpu: str | None, model: str
) -> Request:
    """The request for this machine's GPU, within its free device and host memory."""
    from memo.mip.inputs.hardware import hardware_of
    from memo.swap.memory.host_memory import available_host_bytes

    return Request(
        seq=seq,
        depths=depths,
        seconds=seconds,
        host_bytes=min(int(HOST_SHARE * available_host_bytes()), HOST_MOST) if host is None else host,
        device_bytes=int(DEVICE_SHARE * torch.cuda.mem_get_info()[0]),
        gpu=gpu or hardware_of(torch.cuda.get_device_name()).name,
        model=model,
        heads=HEADS if model == "350m" else None,
    )


def shape(request: Request, layers: int) -> GPTConfig:
    """The model. Learned positions for a million tokens would be three times as many parameters as all the rest."""
    config = preset(request.model, layers=layers, max_seq=request.seq, positions="rotary")
    return config if request.heads is None else dataclasses.replace(config, heads=request.heads, kv_heads=request.heads)


def choose_depth(request: Request, attention_s: float) -> int:
    """The most layers whose steps fit into the time, given one layer's attention, forward and backward."""
    for layers in request.depths:
        step_s = layers * attention_s * STEP_OVER_ATTENTION
        if step_s * (1 + CHECKPOINTED_WAYS * RECOMPUTED_ATTENTION) <= request.seconds:
            return layers
    return request.depths[-1]


def plan_for(request: Request, config: GPTConfig) -> ActivationPlan:
    """The shortest step within the budgets, of the number of MLP tiles that gives it. Raises Infeasible."""
    from memo.gpt.arithmetic.profile_by_arithmetic import StepLayout, derive_profile
    from memo.mip.activation.mlp_tiles import solve_mlp_tiles
    from memo.mip.activation.plan import ActivationProblem, Budgets
    from memo.mip.inputs.hardware import hardware_preset

    machine = dataclasses.replace(hardware_preset(request.gpu), device_bytes=request.device_bytes)
    budgets = Budgets(device_bytes=request.device_bytes, host_bytes=request.host_bytes)

    def problem(tiles: int) -> ActivationProblem:
        tiled = dataclasses.replace(config, mlp_tiles=tiles)
        profile = derive_profile(tiled, machine, StepLayout(tokens=request.seq), name=request.model)
        return ActivationProblem(profile=profile, hardware=machine, budgets=budgets)

    return solve_mlp_tiles(problem)


def plan_within(request: Request, attention_s: float) -> tuple[GPTConfig, ActivationPlan]:
    """The deepest model that fits time and memory, and its plan.

    Raises:
        Infeasible: no depth of these has a plan; the message is the last one's, in one line.
    """
    deepest = choose_depth(request, attention_s)
    refused: dict[int, str] = {}
    for layers in request.depths[request.depths.index(deepest) :]:
        config = shape(request, layers)
        try:
            plan = plan_for(request, config)
        except Infeasible as error:
            refused[layers] = " ".join(str(error).split())
            print(f"  {layers} layers: no plan: {refused[layers]}", file=sys.stderr, flush=True)
            continue
        return dataclasses.replace(config, mlp_tiles=plan.problem.profile.mlp_tiles), plan
    raise Infeasible(f"{layers} layers at {request.seq} tokens: {refused[layers]}")


def measure(
    request: Request, device: torch.device, written: Callable[[dict[str, Any]], Any] = lambda body: None
) -> dict[str, Any]:
    """Plans, then one warm-up and one measured step each way, memo first: it is the one that must not fail.

    The result so far goes to `written` after each row. Raises Infeasible, as `plan_within`.
    """
    attention = probe_attention(shape(request, request.depths[-1]), device, torch.bfloat16)
    release_memory()
    print(
        f"attention: {attention.kernel}, {attention.seconds:.2f} s a layer at {request.seq} tokens, "
        f"timed at {attention.tokens}",
        flush=True,
    )
    config, plan = plan_within(request, attention.seconds)
    planned = {"mlp_tiles": config.mlp_tiles, **_predictions(plan)}
    print(
        f"plan: step {format_duration(plan.step_s)}, device {format_bytes(planned['peak_device_bytes'])}, "
        f"host {format_bytes(planned['peak_host_bytes'])}, MLPs in {config.mlp_tiles} tiles",
        flush=True,
    )
    setup = Setup(
        model=request.model,
        device=device,
        rounds=1,
        warm_up_steps=1,
        warm_up_tokens=min(WARM_UP_TOKENS, request.seq),
        optimizer=True,
        compares_bits=False,  # one more step takes a minute
    )
    head = {"request": dataclasses.asdict(request), "attention": dataclasses.asdict(attention), "plan": planned}
    body = _rows(request, plan, Comparison(setup, config), lambda table: written({**head, **table}))
    return {**head, **body}


def _predictions(plan: ActivationPlan) -> dict[str, Any]:
    stage = plan.stages[0]
    return {
        "step_s": plan.step_s,
        "peak_device_bytes": stage.peak_device_bytes,
        "peak_host_bytes": stage.peak_host_bytes,
        "layers": [dataclasses.asdict(layer) for layer in plan.layers],
    }


def _rows(
    request: Request, plan: ActivationPlan, comparison: Comparison, written: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    table = comparison.table
    print(table.heading(), flush=True)
    ours = memo_way(OURS, Compute.OTHER, plan=plan, host=request.host_bytes, disk=None)
    theirs = [way for way in peers() if way.name in (CHECKPOINTING, OFFLOADED)]
    left_s = request.seconds
    body: dict[str, Any] = {}
    for way in (ours, *theirs):
        slowest = max((row.step_s or 0 for row in table.rows), default=0.0)
        if way.name == OFFLOADED and SLACK * slowest > left_s:
            row = comparison.failed(way, f"not begun: {left_s:.0f} s are left, and it may take {SLACK * slowest:.0f} s")
            table.rows.append(row)
        else:
            begin = time.perf_counter()
            row = comparison.measure(way)
            left_s -= time.perf_counter() - begin
        print(table.line(row), flush=True)
        body = {**table.body(), "speed_ratio": _speed(table.step_of(OURS), table.step_of(CHECKPOINTING))}
        written(body)
    if body["speed_ratio"] is not None:
        print(f"  memo is {body['speed_ratio']:.2f} times as fast as full checkpointing; expected is 1.2 at least")
    return body


def _speed(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else theirs / ours


def run(request: Request, device: torch.device, written: Callable[[dict[str, Any]], Any]) -> bool:
    """`measure`, with one line for what cannot be; True where memo's row ran."""
    if (lacking := no_solver()) is not None:
        print(f"gpu-bench 1m: {lacking}; nothing was run", file=sys.stderr)
        return False
    found = guarded(lambda: measure(request, device, written))
    if isinstance(found, str):
        print(f"gpu-bench 1m: {found}", file=sys.stderr)
        written({"request": dataclasses.asdict(request), "failed": found})
        return False
    return not any(row["failed"] for row in found["ways"] if row["way"] == OURS)


if __name__ == "__main__":
    from benchmarks.gpu_bench import main

    sys.exit(main(["1m", *sys.argv[1:]]))
