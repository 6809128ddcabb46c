"""Galvatron's plan of Llama-2 7B on eight GPUs of 36 GB beside plans by Galvatron's own measurements.

Its tables have the forward of a layer and of the rest of the model, the memory of models of one and two layers, and its
collectives: no figure is of memo's arithmetic but the copies to the host, of which Galvatron has none. A backward is two
forwards, and a second of collectives beside compute lengthens it by the overlap coefficient less one, as in Galvatron's cost
model. Layers are kept or checkpointed whole. The tables name no machine; copies have the rates of an A800.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from benchmarks.published.rows import TABLES, Row, read_rows
from memo.mip.activation import (
    ActivationPlan,
    ActivationProblem,
    Budgets,
    LayerPlan,
    Pipeline,
    find_plan,
    predict_stages,
)
from memo.mip.inputs import (
    ALL,
    INPUT,
    EmbeddingOrHeadProfile,
    LayerProfile,
    PointProfile,
    Profile,
    Role,
    Signature,
    StaticBytes,
    hardware_preset,
)
from memo.mip.simulate import simulate

GPUS, SEQUENCES, TOKENS, LAYERS, HIDDEN = 8, 16, 2048, 32, 4096
"""Of the published plan: its file's name and global_bsz, and Llama-2 7B."""
PROFILED = 8
"""Sequences of the steps whose memory was measured."""
MOST_PROFILED = 12
"""Sequences of the largest batch whose forward was measured."""
DEVICE_BYTES = 36 << 30
HOST_BYTES = 512 << 30
MIB = 1 << 20
BACKWARD = 2.0
LAYER_WEIGHTS = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * 11008
SYNCS = 2
"""All-reduces of a layer's forward under tensor parallelism, or a gather and a reduce-scatter in the place of each."""


def galvatron_rows() -> Iterator[dict[str, Any]]:
    """The published plan against the fastest ones of dp and tp, without and with swap: rows of benchmarks.searched."""
    published = _published_plan()
    for host_bytes, how in ((0, "without swap"), (HOST_BYTES, "with swap")):
        found = [plan for tp in (1, 2, 4, 8) if (plan := find_plan(_problem(tp, host_bytes))) is not None]
        yield {
            "name": f"Galvatron LLaMA2-7B on {GPUS} GPUs of 36 GB by its own costs, {how}",
            "fixed": _side(published),
            "free": _side(min(found, key=lambda plan: plan.step_s)),
        }


def _side(plan: ActivationPlan) -> dict[str, Any]:
    """A layout and its step, by the keys of `memo plan --search --json`."""
    tp = plan.problem.profile.signature.tp
    checkpointed, moved = sum(layer.recomputes for layer in plan.layers), sum(layer.host for layer in plan.layers)
    does = f"{checkpointed} of {LAYERS} layers checkpointed" + (f", {moved:.3g} in host memory" if moved else "")
    sizes = {"pp": 1, "dp": GPUS // tp, "cp": 1, "tp": tp, "schedule": None, "chunks": 1, "zero": 3}
    batch = {"batch": plan.problem.profile.signature.batch, "accumulate": 1}
    steps = {"step_s": plan.step_s, "simulated_step_s": simulate(plan).step_s}
    return {**sizes, **batch, "does": does, **steps, "peak_device_bytes": plan.stages[0].peak_device_bytes}


def _published_plan() -> ActivationPlan:
    """The plan that checkpoints the layers that the file names, under dp alone."""
    (row,) = (row for row in _rows("galvatron_searched_plan_llama2_7b_8gpu_36GB.csv") if row["key"] == "checkpoint")
    layers = tuple(LayerPlan(point=INPUT if int(flag) else ALL) for flag in row["value"].split(","))
    problem = _problem(1, 0)
    return ActivationPlan(problem=problem, layers=layers, stages=predict_stages(problem, layers))


def _problem(tp: int, host_bytes: int) -> ActivationProblem:
    """Planning problem of one microbatch under dp = 8 / tp, everything sharded over those ranks."""
    return ActivationProblem(
        profile=_profile(tp),
        hardware=hardware_preset("a800"),
        budgets=Budgets(device_bytes=DEVICE_BYTES, host_bytes=host_bytes, ranks_per_node=GPUS),
        pipeline=Pipeline(stage_ranks=GPUS),
    )


def _profile(tp: int) -> Profile:
    dp = GPUS // tp
    samples = SEQUENCES // dp
    sync_s = 0.0 if tp == 1 else SYNCS * _allreduce_s(tp, samples * TOKENS * HIDDEN * 2)
    compute_s = _forward_s("layertype_0", samples) / tp
    whole_s = _weights_s(dp, 2 * LAYER_WEIGHTS // tp)
    slower = _number("galvatron_hardware_profile.csv", "overlap_coe") - 1
    forward_s = compute_s + sync_s + slower * whole_s
    memory = _memory(f"1_{tp}_{dp}_sp")
    checkpoint = _memory("1_1_8_c_sp")["act"]
    layer = LayerProfile(
        name="layer",
        always_bytes=checkpoint,
        points=(
            PointProfile(name=ALL, saved_bytes=memory["act"] - checkpoint),
            PointProfile(name=INPUT, saved_bytes=0, recompute_s=compute_s + sync_s),
        ),
        forward_s=forward_s,
        backward_s=BACKWARD * compute_s + sync_s + slower * 2 * whole_s,
        forward_exchange_s=sync_s,
        backward_exchange_s=sync_s,
        gather_s=whole_s,
        reduce_s=whole_s,
        static=StaticBytes(other=memory["ms"]),
    )
    rest_s = _forward_s("layertype_other", samples) / tp
    return Profile(
        signature=Signature(model="llama2-7b", batch=samples, tokens=TOKENS, dtype="bf16", tp=tp),
        role=Role.MEASURED,
        classes=(layer,),
        layers=("layer",) * LAYERS,
        head=EmbeddingOrHeadProfile(
            forward_s=rest_s,
            backward_s=BACKWARD * rest_s,
            saved_bytes=memory["other_act"],
            transient_bytes=memory["other_peak"],
            static=StaticBytes(other=memory["other_ms"]),
        ),
    )


def _memory(config: str) -> dict[str, int]:
    """Bytes of a layer and of the rest on a rank: model states, and activations at this step's number of sequences."""
    one, two = (
        {
            key: _number("galvatron_llama2_7b_memory_profile.csv", f"layernum[{n}]_bsz8_seq2048_rank0_{key}", config)
            for key in ("ms", "act", "act_peak")
        }
        for n in (1, 2)
    )
    larger = SEQUENCES / PROFILED
    found = {
        "ms": two["ms"] - one["ms"],
        "act": larger * (two["act"] - one["act"]),
        "other_ms": 2 * one["ms"] - two["ms"],
        "other_act": larger * (2 * one["act"] - two["act"]),
        "other_peak": larger * (one["act_peak"] - one["act"]),
    }
    return {name: round(mib * MIB) for name, mib in found.items()}


def _forward_s(part: str, samples: int) -> float:
    """Forward of so many sequences on one GPU; beyond the largest batch that was measured, at that one's rate."""
    measured = min(samples, MOST_PROFILED)
    return samples * _number("galvatron_llama2_7b_compute_profile.csv", f"{part}_bsz{measured}_seq2048") / 1e3


def _weights_s(dp: int, nbytes: int) -> float:
    """Gather of weights over data-parallel ranks, or reduction of their gradients, from an all-reduce's bus bandwidth."""
    if dp == 1:
        return 0.0
    key = f"allreduce_size_{dp}_consec_{1 if dp == GPUS else 0}"
    rate = _number("galvatron_hardware_profile.csv", key, "allreduce_bandwidth_1nodes_8gpus_per_node") * 1e9
    return nbytes * (dp - 1) / dp / rate


def _allreduce_s(ranks: int, nbytes: int) -> float:
    """All-reduce over neighbours, between the two sizes that were measured around it."""
    sizes = [1 << power for power in range(11)]
    large = next((size for size in sizes if size * MIB >= nbytes), sizes[-1])
    small = max(large // 2, 1)
    low, high = (
        _number("galvatron_hardware_profile.csv", f"allreduce_size_{ranks}_{size}MB_time") for size in (small, large)
    )
    share = 1.0 if small == large else (nbytes / MIB - small) / (large - small)
    return (low + share * (high - low)) / 1e3


def _number(table: str, key: str, among: str = "") -> float:
    """The number of a key of a table, of the rows of one configuration or file where `among` names it."""
    for row in _rows(table):
        if row["key"] == key and among in ("", row["config"], row["file"]):
            return next(row.number(name) for name in ("value", "MB", "ms") if row[name])
    raise KeyError(f"{table}: {among} {key}")


@functools.cache
def _rows(table: str) -> tuple[Row, ...]:
    return tuple(read_rows(TABLES, table))
