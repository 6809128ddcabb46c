"""`python3 -m benchmarks.gpu_bench hf`: unmodified models of transformers, by memo.offload(model) and by the best flags.

Beside memo's defaults and alpha 0, on the same model and tokens: keep everything, full checkpointing, checkpointing that
keeps attention's results (transformers' own switch, TRL's `selective`), likewise with inputs on the host (transformers'
`offload=True`), and Axolotl's two flags, which put both there. Every way computes its loss without logits, so that what
differs is how activations are held. A step is forward, backward and AdamW at a learning rate of 0. `--model
llama-3-8b+lora16` names a published model (memo rehearse --help) and the rank of PEFT's adapters; without adapters all of
it is trained, its states in bfloat16.

    tokens_per_s   of the median step
    mfu_causal     (6 N + 6 L h s) tokens/s / peak, N weights of linear maps, of which those that are not trained count 4 N;
                   a causal mask leaves half of the scores, and recompute counts nothing (memo.gpt.arithmetic.flops)
    to_flag        memo's rows: step over the shortest of the other ways that took no more device memory
    predicted_s    of the newest benchmarks/results/*-hf-predicted.json, which benchmarks.hf_predicted makes without a GPU
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memo
from benchmarks.comparison import (
    deterministic,
    guarded,
    now,
    pinned_bytes,
    relative_norm,
    release_memory,
    train_step,
)
from benchmarks.peers.checkpointing import keep_attention
from benchmarks.peers.ways import (
    ATTENTION,
    CHECKPOINTING,
    KEEP,
    Compute,
    Way,
    memo_way,
    offloading_libraries,
    simple,
    transformers_way,
)
from memo.autoplan.device_budget import device_budget_of
from memo.errors import UsageError
from memo.hugging_face import PUBLISHED, configuration_from, model_class, published_name
from memo.mip.inputs import peak_flops
from memo.units import format_bytes

DEFAULTS = "memo, defaults"
ALPHA_0 = "memo, alpha 0"
MOST_STEPS = 14
"""Number of steps in which a plan has to settle."""
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "head_dim": 8,
}
"""Fields of a configuration with which a step is a matter of milliseconds, for testing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model, what is trained of it, and its length."""

    model: str
    """Name of a published model, behind which `+lora16` asks for adapters of rank 16."""
    tokens: int
    layers: int | None = None
    """Number of layers instead of the model's own."""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the configuration instead of the model's own."""

    def make(self, device: torch.device) -> nn.Module:
        """The model with random weights, in bfloat16, whose loss needs no logits."""
        name, _, adapters = self.model.partition("+lora")
        published = published_name(name)
        if published is None:
            raise UsageError(f"unknown model {name!r}; choose one of {', '.join(PUBLISHED)}")
        fields = {**PUBLISHED[published].config, **self.fields}
        if self.layers is not None:
            fields["num_hidden_layers"] = self.layers
        config: Any = configuration_from(fields, name=name)
        config.use_cache = False
        torch.manual_seed(0)
        with device:
            model = model_class(config, name=name)._from_config(config, dtype=torch.bfloat16)
        if adapters:
            from peft import LoraConfig, get_peft_model

            kind = LoraConfig(r=int(adapters), target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, kind)
        model.train()
        memo.loss_without_logits(model)
        return model  # type: ignore[no-any-return]


class _Loss(nn.Module):
    """A model of transformers, called as memo's GPT is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]


def ways(disk: Path | None = None) -> Sequence[Way]:
    """In the order in which they run: what the others are compared with, flags, memo; with a folder memo on disk, too."""
    on_disk = () if disk is None else (memo_way(f"{ALPHA_0} on disk", alpha=0.0, host=0, disk=disk),)
    return (
        simple(KEEP, lambda model: contextlib.nullcontext(), Compute.ONCE),
        transformers_way(CHECKPOINTING, Compute.TWICE),
        transformers_way(ATTENTION, Compute.OTHER, context_fn=keep_attention),
        *offloading_libraries()[1:],
        memo_way(ALPHA_0, alpha=0.0),
        memo_way(DEFAULTS),
        *on_disk,
    )


def flops_of_step(model: nn.Module, tokens: int) -> float | None:
    """FLOPs of a step of one sequence without recompute; None for experts and windows, which are not counted here."""
    text: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    if any(parameter.dim() > 2 for parameter in model.parameters()):
        return None
    if any(kind != "full_attention" for kind in getattr(text, "layer_types", None) or ()):
        return None
    maps = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    products = sum((6 if weight.requires_grad else 4) * weight.numel() for weight in maps)
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return float(tokens * (products + 6 * text.num_hidden_layers * width * tokens))


def best_flag_s(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float | None:
    """Shortest step of the ways without memo that took no more device memory than this row; None where none did."""
    others = (
        other["step_s"]
        for other in rows
        if not other["way"].startswith("memo")
        and other.get("step_s") is not None
        and other["peak_device_bytes"] <= row["peak_device_bytes"]
    )
    return min(others, default=None)


def measure(
    task: Task,
    device: torch.device,
    chosen: Sequence[Way],
    rounds: int,
    written: Callable[[dict[str, Any]], Any],
    *,
    done: Sequence[dict[str, Any]] = (),
    predicted: Sequence[dict[str, Any]] = (),
    compare_bits: bool = True,
) -> dict[str, Any]:
    """Each way's steps and peaks, then its gradients; what there is so far goes to `written` after each of the two.

    Args:
        task: model and length.
        device: where it runs.
        chosen: the ways.
        rounds: number of steps of which the median counts.
        written: is given the body of the result file.
        done: rows of an earlier run, which stay and whose ways do not run again.
        predicted: rows of a prediction, whose figures stand beside the measured ones.
        compare_bits: takes one more step, by deterministic algorithms, whose gradients are compared.

    Returns:
        The body of the result file.
    """
    by_way = {row["way"]: row for row in predicted}
    loss = _Loss(task.make(device))
    vocabulary = loss.model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    ids = torch.randint(0, vocabulary, (1, task.tokens + 1), generator=torch.Generator().manual_seed(1)).to(device)
    body: dict[str, Any] = {**dataclasses.asdict(task), "rounds": rounds, "ways": [*done]}
    print(f"\n{task.model}, {task.tokens} tokens", flush=True)
    reference: dict[str, torch.Tensor] = {}
    flops = flops_of_step(loss.model, task.tokens)
    for way in (way for way in chosen if way.name not in {row["way"] for row in done}):
        row: dict[str, Any] = {"way": way.name, "at": now(), "failed": None}
        for name in ("predicted_s", "predicted_device_bytes"):
            row[name] = by_way.get(way.name, {}).get(name)
        body["ways"].append(row)

        def add(found: dict[str, Any], row: dict[str, Any] = row) -> None:
            row.update(found, at=now())
            if "step_s" in found:
                row.update(_figures(row, body["ways"], task.tokens, flops, device))
            print(_line(row), flush=True)
            written(body)

        compared = reference if compare_bits else None
        failed = guarded(lambda way=way, add=add, to=compared: _measure(way, loss, ids, rounds, to, add))
        if failed is not None:
            add({"failed": failed})
        loss.zero_grad(set_to_none=True)
        release_memory()
    return body


def _figures(
    row: dict[str, Any], rows: Sequence[dict[str, Any]], tokens: int, flops: float | None, device: torch.device
) -> dict[str, Any]:
    """Figures that follow from a row and those before it."""
    per_s = tokens / row["step_s"]
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    flag_s = best_flag_s(row, rows) if row["way"].startswith("memo") else None
    return {
        "tokens_per_s": per_s,
        "mfu_causal": None if flops is None or peak is None else flops / row["step_s"] / peak,
        "to_flag": None if flag_s is None else row["step_s"] / flag_s,
    }


def _measure(
    way: Way,
    loss: _Loss,
    ids: torch.Tensor,
    rounds: int,
    reference: dict[str, torch.Tensor] | None,
    add: Callable[[dict[str, Any]], None],
) -> None:
    """Adds steps and peaks to the row, then how far gradients differ from `reference`, which the first way fills."""
    trained = [parameter for parameter in loss.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0)
    budget = device_budget_of(ids.device, None).total_bytes
    if ids.is_cuda:
        torch.cuda.reset_peak_host_memory_stats()
    with way.start(loss.model) as running:
        steps = [train_step(loss, ids, running, optimizer)]
        while not running.settled() and len(steps) < MOST_STEPS:
            steps.append(train_step(loss, ids, running, optimizer))
        before = len(steps)
        steps += [train_step(loss, ids, running, optimizer) for _ in range(rounds)]
        add(
            {
                "step_s": statistics.median(step.seconds for step in steps[before:]),
                "steps_before": before,
                "steps_s": [step.seconds for step in steps],
                "peak_device_bytes": max(step.peak_bytes for step in steps[before:]),
                "peaks_bytes": [step.peak_bytes for step in steps],
                "budget_bytes": budget,
                "reserved_bytes": torch.cuda.max_memory_reserved() if ids.is_cuda else None,
                "peak_host_bytes": pinned_bytes(ids.device) if running.host_bytes is None else running.host_bytes(),
                "loss": steps[-1].loss,
                "report": running.report(),
            }
        )
        if reference is None:
            return
        with deterministic():
            train_step(loss, ids, running)
    gradients = {name: p.grad for name, p in loss.named_parameters() if p.grad is not None}
    if not reference:
        reference |= {name: gradient.cpu() for name, gradient in gradients.items()}
    add({"gradient_difference": max(relative_norm(g, reference[name]) for name, g in gradients.items())})


def _line(row: dict[str, Any]) -> str:
    if row["failed"] is not None:
        return f"  {row['way']:40} {row['failed']}"
    host, predicted, mfu = row["peak_host_bytes"], row["predicted_s"], row["mfu_causal"]
    differs = row.get("gradient_difference")
    first = row["steps_s"][: row["steps_before"]]
    cells = (
        f"{row['way']:40} {row['step_s']:.3f} s",
        predicted and f"predicted {predicted:.3f}",
        row["to_flag"] and f"{row['to_flag']:.2f} of the best flag",
        f"{row['tokens_per_s']:.0f} tokens/s",
        mfu and f"mfu {mfu:.2f}",
        f"device {format_bytes(row['peak_device_bytes'])}",
        f"at most {format_bytes(max(row['peaks_bytes']))} of {format_bytes(row['budget_bytes'])}",
        "no host memory" if not host else f"host {format_bytes(host)}",
        "" if differs is None else f"gradients differ by {differs:.1e}",
        f"first {', '.join(f'{seconds:.2f}' for seconds in first)} s",
    )
    return "  " + ", ".join(filter(None, cells))
