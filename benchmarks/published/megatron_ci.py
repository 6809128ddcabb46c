"""Peaks of Megatron-Core's own functional tests, as its CI measured them.

A case's flags are the table's columns and, for what has no column, `megatron_functional_cases.csv`: the flags of every
case's model_config.yaml, inputs alone. What a flag means was read in Megatron-LM d98e8a64:

    which rank       the last one writes the log (training.py: is_last_rank), so the peak is the last stage's
    vocabulary       padded to a multiple of --make-vocab-size-divisible-by x tp; GPT-2's without another
    bytes            bfloat16 weights and float32 gradients, master weights and moments; the last three over data-parallel
                     ranks with --use-distributed-optimizer: the optimizer's alone
    dropout          0.1 on hidden states and scores where the flags are absent
    loss             float32 copy of the logits, in place from there on (cross_entropy.py)
    workspace        cuBLAS's two of 32 MiB (CUBLAS_WORKSPACE_CONFIG=:4096:8, of forward's and of backward's thread), and
                     Transformer Engine's: 32 MiB from Hopper on, 4 MiB before
"""

from __future__ import annotations

import functools
import math

from benchmarks.published.framework_training import (
    ADAM_MIXED,
    AttentionKernel,
    ContextExchange,
    FrameworkTraining,
    Loss,
    Recompute,
)
from benchmarks.published.rows import TABLES as FOLDER, Inexpressible, Row, read_rows
from benchmarks.published.run import Fitted, Run
from benchmarks.published.target import Table, Target
from benchmarks.published.transformer import Experts, Transformer
from memo.gpt.arithmetic import ADAM_FP32, StepLayout

MIB = 1 << 20
GPT2 = 50_257
# TikToken's as these tests use it, Nemotron's by the name of its file, BERT's with lower case, which is its default.
VOCABULARIES = {"TikTokenizer": 131_072, "GPTSentencePieceTokenizer": 256_000}
BERT = 30_522
KINDS = {"t5": "encoder and decoder", "multimodal-llava": "vision tower", "mimo": "vision tower"}


@functools.cache
def _cases() -> dict[str, Row]:
    return {row["case"]: row for row in read_rows(FOLDER, "megatron_functional_cases.csv")}


def _targets(row: Row) -> list[Target]:
    run = _run(row)

    def last_stage(fitted: Fitted) -> float:
        return run.plan(fitted).stages[-1].peak_device_bytes

    return [
        Target(
            label=f"{row['case']} {row['platform']}",
            quantity="peak bytes",
            published=row.number("max_alloc_bytes"),
            gpu=run.gpu,
            kind=_kind(row),
            predict=last_stage,
        )
    ]


def _kind(row: Row) -> str:
    if row["case"].startswith("bert"):
        return "BERT"
    if row["num-experts"]:
        return "mixtures of experts"
    return "dense, grouped queries" if row.flag("group-query-attention") else "dense"


def _gpu(platform: str) -> str:
    for name in ("gb200", "h100"):
        if name in platform:
            return name
    return "a100-80g"


def _run(row: Row) -> Run:
    case = row["case"]
    flags = _cases().get(case)
    if flags is None:
        raise Inexpressible("the case's flags are not in megatron_functional_cases.csv")
    _refuse(row, flags)
    gpu = _gpu(row["platform"])
    world = 4 if case.endswith("_1node") and gpu == "gb200" else 8
    tp, pp = row.count("tensor-model-parallel-size", 1), row.count("pipeline-model-parallel-size", 1)
    cp = row.count("context-parallel-size", 1)
    seq, batch = row.count("seq-length"), row.count("micro-batch-size")
    # No more replicas than the step has microbatches.
    steps = row.count("global-batch-size") // batch
    replicas = max(min(world // (tp * pp * cp), steps), 1)
    layout = StepLayout(tokens=seq, batch=batch, gpus=replicas * tp * pp * cp, tp=tp, cp=cp, pp=pp)
    microbatches = max(steps // replicas, 1)
    config = _config(row, flags, tp)
    per_chunk = row.count("num-layers-per-virtual-pipeline-stage", 0)
    chunks = config.layers // pp // per_chunk if per_chunk else flags.count("num-virtual-stages-per-pipeline-rank", 1)
    return Run(
        gpu=gpu,
        config=config,
        layout=layout,
        training=_training(row, flags, gpu, replicas * cp),
        microbatches=microbatches,
        chunks=chunks,
    )


def _refuse(row: Row, flags: Row) -> None:
    kind = row["case"].split("/")[0]
    if kind in KINDS:
        raise Inexpressible(f"{KINDS[kind]}")
    reasons = {
        "multi-latent attention": flags.flag("multi-latent-attention"),
        "layers of several kinds (Mamba, hybrid)": bool(
            flags["hybrid-layer-pattern"] or flags["hybrid-override-pattern"] or flags.flag("is-hybrid-model")
        ),
        "another attention": bool(flags["experimental-attention-variant"]),
        "CUDA graphs, whose pools hold more": bool(flags["cuda-graph-impl"]),
        "8-bit weights": bool(flags["fp8-format"]),
        "reinforcement learning": flags.flag("perform-rl-step"),
        "another optimizer": flags["optimizer"] not in ("", "adam"),
        "tensors offloaded as the step goes": bool(
            row.flag("fine-grained-activation-offloading") or row["cpu-offloading-num-layers"]
        ),
        "stages of unequal numbers of layers": bool(
            flags["decoder-first-pipeline-num-layers"]
            or flags["decoder-last-pipeline-num-layers"]
            or flags["pipeline-model-parallel-layout"]
            or flags.flag("account-for-embedding-in-pipeline-split")
            or flags.flag("account-for-loss-in-pipeline-split")
            or "uneven_pipeline" in row["case"]
        ),
        "layers of two kinds, with experts and without": bool(flags["moe-layer-freq"]),
        "layers that predict further tokens": bool(flags["mtp-num-layers"]),
        "gradients of the embedding put off": flags.flag("defer-embedding-wgrad-compute"),
        "a batch that grows, on a number of nodes that the table does not state": not row["global-batch-size"],
        "a release's run, on a number of nodes that the table does not state": (
            "release" in row["case"] and row.flag("use-distributed-optimizer")
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise Inexpressible(reason)
    if not row["seq-length"] or not row["num-layers"] or not row["max_alloc_bytes"]:
        raise Inexpressible("no sequence length, layers or peak in the row")


def _config(row: Row, flags: Row, tp: int) -> Transformer:
    bert = row["case"].startswith("bert")
    hidden, heads = row.count("hidden-size"), row.count("num-attention-heads")
    swiglu = row.flag("swiglu")
    default_ffn = int(4 * hidden * 2 / 3 / 64) * 64 if swiglu else 4 * hidden
    ffn = row.count("ffn-hidden-size", default_ffn)
    groups = row.count("num-query-groups", 1) if row.flag("group-query-attention") else heads
    vocabulary = row.count("vocab-size", VOCABULARIES.get(flags["tokenizer-type"], BERT if bert else GPT2))
    multiple = flags.count("make-vocab-size-divisible-by", 128) * tp
    rotary = flags["position-embedding-type"] in ("rope", "yarn") or "rope" in row["case"]
    experts = None
    if row["num-experts"]:
        experts = Experts(
            count=row.count("num-experts"),
            per_token=flags.count("moe-router-topk", 2),
            ffn=flags.count("moe-ffn-hidden-size", ffn),
            shared_ffn=flags.count("moe-shared-expert-intermediate-size", 0),
            ranks=row.count("expert-model-parallel-size", 1),
            tensor_ranks=flags.count("expert-tensor-parallel-size", tp),
        )
    return Transformer(
        vocab_size=math.ceil(vocabulary / multiple) * multiple,
        hidden=hidden,
        layers=row.count("num-layers"),
        heads=heads,
        kv_heads=groups,
        ffn=ffn,
        max_seq=row.count("seq-length"),
        norm="rmsnorm" if flags["normalization"] == "RMSNorm" else "layernorm",
        mlp="swiglu" if swiglu else "gelu",
        positions="rotary" if rotary else "learned",
        bias=not flags.flag("disable-bias-linear"),
        tie_embeddings=not (row.flag("untie-embeddings-and-output-weights") or bert),
        head_size=flags.count("kv-channels", hidden // heads),
        experts=experts,
        head_norms=flags.flag("qk-layernorm"),
    )


def _training(row: Row, flags: Row, gpu: str, ranks: int) -> FrameworkTraining:
    half = row.flag("bf16") or flags.flag("fp16")
    te = flags["transformer-impl"] != "local"  # the default is Transformer Engine
    # On "dracooci" values are of the time when every test ran with NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0. Context
    # parallelism has no other attention than fused.
    unfused = flags["attention-backend"] in ("unfused", "local") or not te or "dracooci" in row["platform"]
    materialised = unfused and row.count("context-parallel-size", 1) == 1 and not flags.flag("use-flash-attn")
    sharded = row["data-parallel-sharding-strategy"]
    zero = 3 if sharded == "optim_grads_params" or flags.flag("use-torch-fsdp2") else 1
    if not (row.flag("use-distributed-optimizer") or sharded or flags.flag("use-torch-fsdp2")):
        zero = 0
    recompute = {"full": Recompute.FULL, "selective": Recompute.SCORES}.get(
        row["recompute-granularity"], Recompute.NONE
    )
    workspace = 2 * 32 + ((4 if gpu.startswith("a100") else 32) if te else 0)
    return FrameworkTraining(
        states=ADAM_MIXED if half else ADAM_FP32,
        zero=zero,
        recompute=recompute,
        attention=AttentionKernel.MATERIALISED if materialised else AttentionKernel.FUSED,
        sharded_over=max(ranks // flags.count("num-distributed-optimizer-instances", 1), 1),
        loss=Loss.COMPILED if flags.flag("cross-entropy-loss-fusion") else Loss.FLOAT32,
        context=ContextExchange.KEYS,
        dropout=flags.number("hidden-dropout", 0.1),
        attention_dropout=flags.number("attention-dropout", 0.1),
        sequence_parallel=row.flag("sequence-parallel"),
        workspace_bytes=workspace * MIB,
    )


TABLES = (Table(file="megatron_functional_tests_memory.csv", title="Megatron-Core's CI, peaks", targets=_targets),)
