"""Fully sharded runs: MosaicML's MPT with torch's FSDP, and torchtitan's Llama 3.

MPT's shapes are llm-foundry's scripts/train/yamls/pretrain/mpt-*.yaml, Llama 3's are its authors' (Grattafiori et al.
2024). torchtitan ran as many microbatches as pipeline stages, its default.
"""

from __future__ import annotations

import dataclasses

from benchmarks.published.framework_training import ContextExchange, FrameworkTraining, Kernels, Loss, Recompute
from benchmarks.published.rows import Inexpressible, Row
from benchmarks.published.run import Run
from benchmarks.published.target import Table, Target, step_target
from memo.gpt.arithmetic import ADAM_FP32, ADAM_PURE, StepLayout
from memo.gpt.config import PRESETS, GPTConfig
from memo.mip.inputs import hardware_preset

# (hidden, layers, heads) of each of MPT's sizes.
MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
# Composer's DecoupledAdamW is not fused: some 20 passes over a parameter's tensors where a fused one makes 7.
NOT_FUSED = 20 / 7
# Composer computes cross entropy and perplexity of every training batch anew: each reads the logits and writes their
# logarithms, which it reads again.
METRICS = 2 * 6


def llama3(size: str) -> GPTConfig:
    """Shape of a Llama 3."""
    name = f"llama3-{size.lower()}"
    if name not in PRESETS:
        raise Inexpressible(f"the shape of Llama 3 {size} is not known here")
    return PRESETS[name]


def _mpt(row: Row) -> list[Target]:
    if row["Model"] not in MPT:
        raise Inexpressible(f"the shape of MPT {row['Model']} is not known here")
    gpu = hardware_preset(row["GPU"].replace("_", "-").removesuffix("b")).name
    hidden, layers, heads = MPT[row["Model"]]
    seq, gpus = row.count("SeqLen (T)"), row.count("# GPUs")
    config = GPTConfig(
        vocab_size=50_368,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        ffn=4 * hidden,
        max_seq=seq,
        bias=True,
    )
    pure = row["MP Mode"] == "PURE"
    states = ADAM_PURE if row["Precision"] == "bf16" else ADAM_FP32
    states = dataclasses.replace(states, reduced=2 if pure else 4, passes=NOT_FUSED * states.passes)
    training = FrameworkTraining(
        states=states,
        zero={"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}.get(row["Sharding Strategy"], 0),
        recompute=Recompute.FULL if row.flag("Activation Checkpointing") else Recompute.NONE,
        stops_early=True,
        loss=Loss.FUSED,
        metric_bytes=METRICS,
        fp8=row["Precision"] == "amp_fp8",
    )
    if row.flag("Activation CPUOffload"):
        raise Inexpressible("activations on the host, copied as the step goes: a plan's work, not a fixed method")
    layout = StepLayout(tokens=seq, batch=row.count("MicroBatchSize"), gpus=gpus)
    run = Run(gpu=gpu, config=config, layout=layout, training=training, microbatches=row.count("GradAccum"))
    step_s = row.number("GlobalBatchSize (T)") / row.number("Throughput (T/s)")
    precision = "fp8" if training.fp8 else "pure" if pure else "amp"
    return [step_target(f"{row['Model']} s {seq} on {gpus} {row['GPU']} {precision}", run, step_s)]


def _torchtitan(row: Row) -> list[Target]:
    config, technique = llama3(row["model"]), row["technique"]
    tp, cp, pp, batch = row.count("tp"), row.count("cp"), row.count("pp"), row.count("local_batch")
    seq, gpus = row.count("seq"), row.count("gpus")
    microbatches = pp if pp > 1 else 1
    interleaved = technique.lower().startswith("interleaved")
    training = FrameworkTraining(
        states=ADAM_FP32,
        zero=3,
        recompute=Recompute.FULL if row["ac"] == "full" else Recompute.EVERY_OTHER,
        kernels=Kernels.FUSED if "compile" in technique else Kernels.EAGER,
        loss=Loss.EAGER,
        fp8="fp8" in technique,
        overlaps_tensor="async" in technique.lower(),
        context=ContextExchange.KEYS,
        whole_in_step=pp > 1,
        stops_early=True,
    )
    layout = StepLayout(tokens=seq, batch=max(batch // microbatches, 1), gpus=gpus, tp=tp, cp=cp, pp=pp)
    run = Run(
        gpu="h100-96g",
        config=config,
        layout=layout,
        training=training,
        microbatches=microbatches,
        chunks=2 if interleaved else 1,
    )
    label = f"{row['model']} {row['table']} s {seq} on {gpus}, {row['ac']} {technique}"
    targets = []
    if row["tok_s_gpu"]:
        step_s = batch * seq * layout.replicas / (gpus * row.number("tok_s_gpu"))
        targets.append(step_target(label, run, step_s))
    if row["mem_GiB"]:
        targets.append(
            Target(
                label=label,
                quantity="peak GiB",
                published=row.number("mem_GiB"),
                gpu=run.gpu,
                predict=lambda fitted: max(stage.peak_device_bytes for stage in run.plan(fitted).stages) / (1 << 30),
            )
        )
    return targets


TABLES = (
    Table(file="mpt_llmfoundry_throughput.csv", title="MosaicML, MPT with FSDP", targets=_mpt),
    Table(file="torchtitan_llama3_h100.csv", title="torchtitan, Llama 3", targets=_torchtitan),
)
