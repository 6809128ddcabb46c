"""Longest sequences: Snowflake's recipes of long-sequence training (ALST), and Argonne's of Megatron-DeepSpeed.

A length fits where the plan's peak is within the GPU's memory, less what CUDA and NCCL hold, and the host's bytes within a
node's. ALST's models are Hugging Face's, under DeepSpeed's ZeRO-3 with its default buckets; Liger's kernels fuse norms,
rotation, activation and loss. Argonne's model is examples_deepspeed/deepspeed4science/megatron_long_seq_support/
pretrain_gpt_30B_seq_parallel.sh. What the table calls old ran with options that are not published.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from benchmarks.published.framework_training import FrameworkTraining, Kernels, Loss, Recompute
from benchmarks.published.rows import Inexpressible, Row
from benchmarks.published.run import Fitted, Run
from benchmarks.published.target import Table, Target, step_target
from benchmarks.published.transformer import Transformer
from memo.gpt.arithmetic import StateBytes, StepLayout
from memo.gpt.arithmetic.flops import parameter_count
from memo.gpt.config import GPTConfig
from memo.mip.inputs import hardware_preset

GIB = 1 << 30
HELD = 3 * GIB // 2
"""Bytes of a GPU that CUDA's context, libraries' workspaces and NCCL's buffers hold."""
# DeepSpeed's defaults: 1e9 live parameters, a reduce bucket of 5e8 and as much for contiguous gradients, 2 bytes each.
BUCKETS = 2 * 1_000_000_000 + 2 * 2 * 500_000_000
HOST_STATES = 1.5 * 16
"""Bytes per parameter on the host under optimizer offload: float32 weight, gradient and two moments, and the half of it
that DeepSpeed's own estimate adds for buffers (deepspeed/runtime/zero/stage3.py, additional_buffer_factor)."""
HOST_BYTES = {"h100": 1.9e12}
"""Host memory of a node, where the recipes say it; else the preset's."""
STATES = StateBytes(weight=2, gradient=2, optimizer=12, reduced=2, passes=30)

# (hidden, layers, heads, key/value heads, head size, width of the MLP, vocabulary), from the models' config.json.
MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": (4096, 32, 32, 8, 128, 14336, 128_256),
    "meta-llama/Llama-3.1-70B-Instruct": (8192, 80, 64, 8, 128, 28672, 128_256),
    "Qwen/Qwen3-32B": (5120, 64, 64, 8, 128, 25600, 151_936),
    "meta-llama/Llama-3.2-1B-Instruct": (2048, 16, 32, 8, 64, 8192, 128_256),
    "meta-llama/Llama-3.2-3B-Instruct": (3072, 28, 24, 8, 128, 8192, 128_256),
    "Qwen/Qwen3-1.7B": (2048, 28, 16, 8, 128, 6144, 151_936),
    "Qwen/Qwen3-4B": (2560, 36, 32, 8, 128, 9728, 151_936),
    "Qwen/Qwen3-8B": (4096, 36, 32, 8, 128, 12288, 151_936),
    "Qwen/Qwen3-14B": (5120, 40, 40, 8, 128, 17408, 151_936),
}


def _alst(row: Row) -> list[Target]:
    if row["model"] not in MODELS:
        raise Inexpressible(f"the shape of {row['model']} is not known here")
    gpu = hardware_preset(row["gpu"]).name
    hidden, layers, heads, kv_heads, head_size, ffn, vocabulary = MODELS[row["model"]]
    config = Transformer(
        vocab_size=vocabulary,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        ffn=ffn,
        max_seq=1 << 20,
        norm="rmsnorm",
        mlp="swiglu",
        positions="rotary",
        bias=False,
        tie_embeddings=False,
        head_norms=row["model"].startswith("Qwen"),
    )
    ranks, liger = row.count("n_gpus_sp"), row.flag("liger")
    training = FrameworkTraining(
        states=STATES,
        zero=3,
        recompute=Recompute.FULL,
        stops_early=True,
        kernels=Kernels.FUSED if liger else Kernels.EAGER,
        loss=Loss.CHUNKED if liger else Loss.EAGER,
        tiled_mlp=row.flag("tiled_mlp"),
        optimizer_offload=True,
        parameter_offload=row.flag("param_offload"),
        input_offload=row.flag("ckpt_offload"),
        workspace_bytes=BUCKETS,
    )
    # The recipes without Liger's kernels are those without Ulysses, by the names of their files.
    shared = ranks if liger else 1
    layout = StepLayout(tokens=shared, gpus=ranks, cp=shared)
    run = Run(gpu=gpu, config=config, layout=layout, training=training)
    names = [name for name in ("ckpt_offload", "tiled_mlp", "liger", "param_offload") if row.flag(name)]
    label = f"{row['model'].split('/')[-1]} on {ranks} {row['gpu']}, {' '.join(names) or 'nothing'}"
    return [
        Target(
            label=label,
            quantity="tokens",
            published=row.number("max_len"),
            gpu=gpu,
            predict=lambda fitted: _longest(run, fitted),
        )
    ]


def _longest(run: Run, fitted: Fitted) -> float:
    """Longest sequence that fits, in the multiple of ranks that the layout needs."""
    least, most = 1, 1 << 16
    while _fits(run, fitted, most * run.layout.cp):
        least, most = most, 2 * most
        if most > 1 << 34:
            break
    while most - least > max(least // 500, 1):
        middle = (least + most) // 2
        if _fits(run, fitted, middle * run.layout.cp):
            least = middle
        else:
            most = middle
    return float(least * run.layout.cp)


def _fits(run: Run, fitted: Fitted, tokens: int) -> bool:
    longer = dataclasses.replace(run, layout=dataclasses.replace(run.layout, tokens=tokens))
    machine = hardware_preset(run.gpu)
    if max(stage.peak_device_bytes for stage in longer.plan(fitted).stages) > machine.device_bytes - HELD:
        return False
    nodes = math.ceil(run.layout.gpus / machine.gpus_per_node)
    return _host_bytes(longer, tokens) / nodes <= HOST_BYTES.get(run.gpu, machine.host_bytes)


def _host_bytes(run: Run, tokens: int) -> float:
    training, parameters = run.training, parameter_count(run.config)
    states = HOST_STATES * parameters if training.optimizer_offload else 0.0
    weights = 2 * parameters if training.parameter_offload else 0.0
    replicas = run.layout.replicas
    inputs = 2 * run.config.hidden * run.config.layers * tokens * replicas if training.input_offload else 0.0
    return states + weights + inputs


ARGONNE = GPTConfig(
    vocab_size=53_248,  # GPT-2's, padded to a multiple of 128 x tp
    hidden=6144,
    layers=64,
    heads=64,
    kv_heads=64,
    ffn=4 * 6144,
    max_seq=2048,
)
NEW = FrameworkTraining(
    states=StateBytes(weight=2, gradient=2, optimizer=12, reduced=2, passes=28),
    recompute=Recompute.FULL,
    dropout=0.1,
    attention_dropout=0.1,
    fused_accumulation=False,
)


def _argonne(row: Row) -> list[Target]:
    if not row["new_tflops"].replace(".", "").isdigit():
        raise Inexpressible("no number in the row")
    run = _argonne_run(_argonne_tokens(row), row.count("tp"))
    s, h, layers, vocabulary = run.layout.tokens, ARGONNE.hidden, ARGONNE.layers, ARGONNE.vocab_size
    flops = 96 * 2 * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (16 * layers * h))
    return [step_target(f"new, s {row['seq']}", run, flops / (row.number("new_tflops") * 1e12 * run.layout.gpus))]


def _argonne_tokens(row: Row) -> int:
    return 1024 * int(row["seq"].removesuffix("k"))


def _argonne_run(tokens: int, tp: int) -> Run:
    # Ranks of sequence parallelism have a part of the table of positions each.
    config = dataclasses.replace(ARGONNE, max_seq=max(tokens // tp, 1))
    layout = StepLayout(tokens=tokens, gpus=32, tp=tp)
    return Run(gpu="a100-40g", config=config, layout=layout, training=NEW, microbatches=2)


def _argonne_longest(rows: Sequence[Row]) -> list[Target]:
    """The longest of the table's lengths that runs."""
    ran = [_argonne_tokens(row) for row in rows if row["new_tflops"].replace(".", "").isdigit()]
    if not ran:
        return []
    lengths, tp = sorted(_argonne_tokens(row) for row in rows), rows[0].count("tp")

    def longest(fitted: Fitted) -> float:
        return float(max((n for n in lengths if _fits(_argonne_run(n, tp), fitted, n)), default=0))

    return [
        Target(
            label="new, longest listed", quantity="tokens", published=float(max(ran)), gpu="a100-40g", predict=longest
        )
    ]


TABLES = (
    Table(
        file="alst_recipes_maxlen.csv",
        title="Snowflake's ALST, longest sequences",
        targets=_alst,
        inputs=("gpu", "n_gpus_sp", "model", "ckpt_offload", "tiled_mlp", "liger", "param_offload"),
    ),
    Table(
        file="alcf_megatron_deepspeed_longseq.csv",
        title="Argonne's Megatron-DeepSpeed",
        targets=_argonne,
        whole=_argonne_longest,
    ),
)
