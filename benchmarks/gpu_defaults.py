"""`python3 -m benchmarks.gpu_bench defaults`: a model of transformers, unmodified, by memo.offload(model) with nothing else.

Beside it, on the same model and tokens: keep everything, full checkpointing and checkpointing that keeps attention's results
(both by transformers' own switch), and memo at alpha 0. A step is forward, backward and AdamW at a
learning rate of 0. `--model llama-3-8b+lora16` names a published model (memo rehearse --help) and the rank of PEFT's
adapters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import memo
from benchmarks.comparison import deterministic, guarded, now, relative_norm, release_memory, train_step
from benchmarks.peers.checkpointing import attention_saved
from benchmarks.peers.ways import CHECKPOINTING, KEEP, Compute, Running, Way, memo_way, simple
from memo.autoplan.device_budget import device_budget_of
from memo.errors import UsageError
from memo.hugging_face import PUBLISHED, configuration_from, model_class, published_name
from memo.units import format_bytes

__all__ = ["DEFAULTS", "Task", "measure", "ways"]

DEFAULTS = "memo, defaults"
MOST_STEPS = 14
"""Number of steps in which a plan has to settle."""


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


def ways() -> Sequence[Way]:
    """In the order in which they run."""
    return (
        simple(KEEP, lambda model: contextlib.nullcontext(), Compute.ONCE),
        _checkpointing(CHECKPOINTING),
        _checkpointing("attention kept", context_fn=lambda: create_selective_checkpoint_contexts(attention_saved)),
        memo_way("memo, alpha 0", alpha=0.0),
        memo_way(DEFAULTS),
    )


def _checkpointing(name: str, **options: Any) -> Way:
    @contextlib.contextmanager
    def start(model: Any) -> Iterator[Running]:
        _switch(model, "enable")({"use_reentrant": False, **options})
        try:
            yield Running()
        finally:
            _switch(model, "disable")()

    return Way(name=name, start=start, compute=Compute.OTHER)


def _switch(model: Any, name: str) -> Any:
    """transformers' own; before 5.18 it is called gradient checkpointing."""
    new, old = (f"{kind}_checkpointing_{name}" for kind in ("activation", "gradient"))
    return getattr(model, new if hasattr(model, new) else old)


def measure(
    task: Task, device: torch.device, chosen: Sequence[Way], rounds: int, written: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    """Each way's steps and peaks, then its gradients; what there is so far goes to `written` after each of the two."""
    loss = _Loss(task.make(device))
    vocabulary = loss.model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    ids = torch.randint(0, vocabulary, (1, task.tokens + 1), generator=torch.Generator().manual_seed(1)).to(device)
    body: dict[str, Any] = {**dataclasses.asdict(task), "rounds": rounds, "ways": []}
    print(f"\n{task.model}, {task.tokens} tokens", flush=True)
    reference: dict[str, torch.Tensor] = {}
    for way in chosen:
        row: dict[str, Any] = {"way": way.name, "at": now(), "failed": None}
        body["ways"].append(row)

        def add(found: dict[str, Any], row: dict[str, Any] = row) -> None:
            row.update(found, at=now())
            print(_line(row), flush=True)
            written(body)

        failed = guarded(lambda way=way, add=add: _measure(way, loss, ids, rounds, reference, add))
        if failed is not None:
            add({"failed": failed})
        loss.zero_grad(set_to_none=True)
        release_memory()
    return body


def _measure(
    way: Way,
    loss: _Loss,
    ids: torch.Tensor,
    rounds: int,
    reference: dict[str, torch.Tensor],
    add: Callable[[dict[str, Any]], None],
) -> None:
    """Adds steps and peaks to the row, then how far gradients differ; the first way's gradients go to `reference`."""
    trained = [parameter for parameter in loss.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0)
    budget = device_budget_of(ids.device, None).total_bytes
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
                "reserved_bytes": torch.cuda.memory_reserved() if ids.is_cuda else None,
                "peak_host_bytes": None if running.host_bytes is None else running.host_bytes(),
                "loss": steps[-1].loss,
                "report": running.report(),
            }
        )
        with deterministic():
            train_step(loss, ids, running)
    gradients = {name: p.grad for name, p in loss.named_parameters() if p.grad is not None}
    if not reference:
        reference |= {name: gradient.cpu() for name, gradient in gradients.items()}
    add({"gradient_difference": max(relative_norm(g, reference[name]) for name, g in gradients.items())})


def _line(row: dict[str, Any]) -> str:
    if row["failed"] is not None:
        return f"  {row['way']:20} {row['failed']}"
    host = row["peak_host_bytes"]
    differs = row.get("gradient_difference")
    first = row["steps_s"][: row["steps_before"]]
    cells = (
        f"{row['way']:20} {row['step_s']:.3f} s",
        f"device {format_bytes(row['peak_device_bytes'])}",
        f"at most {format_bytes(max(row['peaks_bytes']))} of {format_bytes(row['budget_bytes'])}",
        "no host memory" if host is None else f"host {format_bytes(host)}",
        "" if differs is None else f"gradients differ by {differs:.1e}",
        f"first {', '.join(f'{seconds:.2f}' for seconds in first)} s",
    )
    return "  " + ", ".join(filter(None, cells))
