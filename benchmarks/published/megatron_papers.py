"""Megatron-LM's papers: Narayanan et al. 2021, Korthikanti et al. 2022, and Smith et al. 2022 (Megatron-Turing NLG).

All ran on DGX A100 with 80 GB, in float16, with vocabularies of 51,200, sequences of 2,048 tokens, learned positions,
dropout, Megatron's fused kernels and attention's scores in memory. Microbatches and chunks of Narayanan's Table 1 are not
in the paper: they are in its artifact, NVIDIA/Megatron-LM examples/academic_paper_scripts/sc21/run_table_1.sh.
"""

from __future__ import annotations

import dataclasses
import functools

from benchmarks.published.framework_training import AttentionKernel, FrameworkTraining, Recompute
from benchmarks.published.rows import Inexpressible, Row
from benchmarks.published.run import Fitted, Run
from benchmarks.published.target import Table, Target, step_target
from memo.gpt.arithmetic import StateBytes, StepLayout
from memo.gpt.config import GPTConfig

GPU = "a100-80g"
PEAK = 312e12
SEQ, VOCAB = 2048, 51_200
# run_table_1.sh, by (tp, pp): sequences of a microbatch, and layers of a chunk; None without chunks.
ARTIFACT = {
    (1, 1): (16, None),
    (2, 1): (16, None),
    (4, 1): (16, None),
    (8, 1): (8, None),
    (8, 2): (4, None),
    (8, 4): (2, 5),
    (8, 8): (2, 5),
    (8, 16): (1, 3),
    (8, 35): (1, 1),
    (8, 64): (1, None),
}
STATES = StateBytes(weight=2, gradient=2, optimizer=12, reduced=2, passes=28)
FULL = FrameworkTraining(
    states=STATES,
    attention=AttentionKernel.MATERIALISED,
    recompute=Recompute.FULL,
    dropout=0.1,
    attention_dropout=0.1,
    sequence_parallel=False,
    fused_accumulation=False,
    overlaps_gradients=False,
)
# Smith et al. trained in bfloat16, for which Megatron adds up and reduces gradients in float32.
BFLOAT16 = dataclasses.replace(FULL, states=StateBytes(weight=2, gradient=4, optimizer=12, reduced=4, passes=30))
# Korthikanti et al. ran what became Megatron-LM 3.0: products add to gradients, and backward's sums overlap with them.
FULL_2022 = dataclasses.replace(FULL, fused_accumulation=True, overlaps_backward_sums=True)
SELECTIVE = dataclasses.replace(FULL_2022, recompute=Recompute.SCORES, sequence_parallel=True)


def _model(row: Row, *, layers: int | None = None) -> GPTConfig:
    hidden, heads = row.count("hidden"), row.count("heads")
    return GPTConfig(
        vocab_size=VOCAB,
        hidden=hidden,
        layers=layers or row.count("layers"),
        heads=heads,
        kv_heads=heads,
        ffn=4 * hidden,
        max_seq=SEQ,
    )


def _usual_batch(ranks: int) -> int:
    """Sequences of a microbatch for other layouts: what the artifact has for as many ranks of a replica, or more."""
    return next((batch for (tp, pp), (batch, _) in ARTIFACT.items() if tp * pp >= ranks), 1)


def _narayanan(row: Row) -> list[Target]:
    config, tp, pp, gpus = _model(row), row.count("tp"), row.count("pp"), row.count("gpus")
    batch, layers_of_chunk = ARTIFACT.get((tp, pp)) or (_usual_batch(tp * pp), None)
    layout = StepLayout(tokens=SEQ, batch=batch, gpus=gpus, tp=tp, pp=pp)
    chunks = config.layers // pp // layers_of_chunk if layers_of_chunk else 1
    microbatches = row.count("global_batch") // (batch * layout.replicas)
    run = Run(gpu=GPU, config=config, layout=layout, training=FULL, microbatches=microbatches, chunks=chunks)
    s, h, layers = SEQ, config.hidden, config.layers
    flops = 96 * row.number("global_batch") * s * layers * h**2 * (1 + s / (6 * h) + VOCAB / (16 * layers * h))
    return [step_target(f"{row['params_B']}B", run, flops / (row.number("tflops_per_gpu") * 1e12 * gpus))]


def _smith(row: Row) -> list[Target]:
    config = GPTConfig(vocab_size=VOCAB, hidden=20480, layers=105, heads=128, kv_heads=128, ffn=4 * 20480, max_seq=SEQ)
    layout = StepLayout(tokens=SEQ, gpus=row.count("gpus"), tp=8, pp=35)
    run = Run(gpu=GPU, config=config, layout=layout, training=BFLOAT16, microbatches=1920 // row.count("dp"))
    return [step_target(f"530B, dp {row['dp']}", run, row.number("iter_s"))]


def _korthikanti(row: Row) -> list[Target]:
    config, tp, pp = _model(row), row.count("tp"), row.count("pp")
    batch = row.count("microbatch")
    layout = StepLayout(tokens=SEQ, batch=batch, gpus=row.count("gpus"), tp=tp, pp=pp)
    microbatches = row.count("global_batch") // (batch * layout.replicas)
    # m = 3 for 175B and 530B: those whose stages of three or more layers divide so, beside the 1T model's of two.
    chunks = 3 if pp > 1 and config.layers // pp % 3 == 0 else 1
    full = Run(gpu=GPU, config=config, layout=layout, training=FULL_2022, microbatches=microbatches, chunks=chunks)
    selective = dataclasses.replace(full, training=SELECTIVE)
    targets = []
    if row["iter_s_full_recompute"]:
        targets.append(step_target(f"{row['model']}, full", full, row.number("iter_s_full_recompute")))
    if row["iter_s_sp_selective"]:
        targets.append(step_target(f"{row['model']}, selective", selective, row.number("iter_s_sp_selective")))
    elif row["mfu_pct"]:
        s, h, layers = SEQ, config.hidden, config.layers
        flops = 72 * row.number("global_batch") * layers * s * h**2 * (1 + s / (6 * h) + VOCAB / (12 * h * layers))
        published = flops / (row.number("mfu_pct") / 100 * PEAK * layout.gpus)
        targets.append(step_target(f"{row['model']}, selective", selective, published))
    return targets


LAYER = {
    "baseline no recompute": (Recompute.NONE, False),
    "sequence parallelism": (Recompute.NONE, True),
    "full recompute": (Recompute.FULL, False),
    "selective recompute": (Recompute.SCORES, False),
    "selective + SP": (Recompute.SCORES, True),
}


def _one_layer(row: Row) -> list[Target]:
    if row["experiment"] not in LAYER:
        raise Inexpressible(f"no such method: {row['experiment']}")
    recompute, sequence_parallel = LAYER[row["experiment"]]
    config = GPTConfig(vocab_size=VOCAB, hidden=6144, layers=48, heads=64, kv_heads=64, ffn=4 * 6144, max_seq=SEQ)
    training = dataclasses.replace(FULL_2022, recompute=recompute, sequence_parallel=sequence_parallel)
    run = Run(gpu=GPU, config=config, layout=StepLayout(tokens=SEQ, batch=4, gpus=8, tp=8), training=training)

    def both_s(fitted: Fitted) -> float:
        (layer,) = run.profile(fitted).classes
        return layer.forward_s + layer.backward_s

    return [
        Target(
            label=row["experiment"],
            quantity="layer s",
            published=row.number("combined_ms") / 1e3,
            gpu=GPU,
            predict=both_s,
            work=both_s,
        )
    ]


def _stage_memory(row: Row) -> list[Target]:
    """Activations of a pipeline rank of the 530B model under 1F1B and full recompute, figure 9.

    Without deallocation a stage also keeps the outputs that it has sent, until their backward.
    """
    rank = row.count("pp_rank")
    if rank > 34:
        raise Inexpressible(f"there is no rank {rank} of 35")
    config = GPTConfig(vocab_size=VOCAB, hidden=20480, layers=105, heads=128, kv_heads=128, ffn=4 * 20480, max_seq=SEQ)
    run = Run(
        gpu=GPU, config=config, layout=StepLayout(tokens=SEQ, gpus=280, tp=8, pp=35), training=FULL, microbatches=280
    )

    def activations(fitted: Fitted, *, deallocates: bool) -> float:
        plan = run.plan(fitted)
        problem = plan.problem
        nbytes = plan.stages[rank].peak_device_bytes - problem.stages[rank].static.nbytes
        sent = 0 if deallocates or rank == 34 else problem.pipeline.in_flight(rank)
        return (nbytes + sent * 2 * SEQ * config.hidden) / 1e9

    targets = []
    for column, deallocates in (("activation_GB_no_dealloc", False), ("activation_GB_with_dealloc", True)):
        if row[column]:
            targets.append(
                Target(
                    label=f"530B, rank {rank}, {'deallocates' if deallocates else 'keeps'} outputs",
                    quantity="GB",
                    published=row.number(column),
                    gpu=GPU,
                    predict=functools.partial(activations, deallocates=deallocates),
                )
            )
    return targets


TABLES = (
    Table(file="korthikanti_stage_memory.csv", title="Korthikanti et al. 2022, Figure 9", targets=_stage_memory),
    Table(file="megatron_ptdp_table1.csv", title="Narayanan et al. 2021, Table 1", targets=_narayanan),
    Table(file="mtnlg_530b.csv", title="Smith et al. 2022, 530B", targets=_smith),
    Table(file="korthikanti_table3_5.csv", title="Korthikanti et al. 2022, Tables 3 and 5", targets=_korthikanti),
    Table(file="korthikanti_table4_layer_times.csv", title="Korthikanti et al. 2022, Table 4", targets=_one_layer),
)
