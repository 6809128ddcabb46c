"""Predicted rows of `gpu_bench hf`, without a GPU: each way rehearsed on a simulated one.

    python -m benchmarks.hf_predicted [--model llama-3-8b+lora16 --seq 32k --seq 64k] [--gpu h100] [--host 125GiB]

Rehearsed (memo.rehearsal): keeping everything, full checkpointing, attention kept, memo at alpha 0 and by its defaults. Of
the flags that hold checkpoints on the host, by arithmetic from the rehearsed row of attention kept: transformers'
`offload=True` holds each layer's input there and copies on the stream that computes, so that both copies are added to the
step; Axolotl's flags hold inputs and attention's results there and copy beside it, which adds nothing. The result file is
written anew after each row, and gpu_bench shows the newest one beside what it measures.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.gpu_bench import CASES
from benchmarks.gpu_hf import ALPHA_0, DEFAULTS, Task
from benchmarks.peers.checkpointing import keep_attention
from benchmarks.peers.libraries import checkpointing_switch
from benchmarks.peers.ways import ATTENTION, AXOLOTL, CHECKPOINTING, KEEP, TRANSFORMERS_ATTENTION
from benchmarks.results import write_result
from memo.hugging_face import PUBLISHED, configuration_from, published_name
from memo.mip.inputs import hardware_preset
from memo.record import Step
from memo.rehearsal import Rehearsal, SimulatedMachine, Way, hugging_face_step, rehearse
from memo.units import format_bytes, parse_bytes, parse_tokens

STEPS = 2
"""Number of steps of a way without a plan; the first initialises the optimizer's state."""


def predicted(task: Task, gpu: str, host_bytes: int) -> Iterator[dict[str, Any]]:
    """The rows of one model and length, as they come.

    Args:
        task: model and length; the length is that of the step.
        gpu: preset of the simulated GPU.
        host_bytes: host memory that is free.
    """
    name, _, rank = task.model.partition("+lora")
    fields = {**PUBLISHED[published_name(name) or name].config, **task.fields}
    build = hugging_face_step(fields, lora=int(rank or 0), without_logits=True, layers=task.layers)

    def run(way: Way, flags: dict[str, Any] | None = None, **options: Any) -> Rehearsal:
        gc.collect()

        def step() -> Step:
            made = build(batch=1, tokens=task.tokens)
            if flags is not None:
                checkpointing_switch(made.model, "enable")(
                    {"use_reentrant": False, "preserve_rng_state": False, **flags}
                )
            return made

        return rehearse(step, SimulatedMachine(gpu, host_bytes=host_bytes, assume=0.0), way=way, **options)

    ways: dict[str, Callable[[], Rehearsal]] = {
        KEEP: lambda: run(Way.KEEP, steps=STEPS),
        CHECKPOINTING: lambda: run(Way.KEEP, {}, steps=STEPS),
        ATTENTION: lambda: run(Way.KEEP, {"context_fn": keep_attention}, steps=STEPS),
        ALPHA_0: lambda: run(Way.MEMO, steps=STEPS + 1, alpha=0.0),
        DEFAULTS: lambda: run(Way.MEMO),
    }
    for way, rehearsed in ways.items():
        row = _row(way, rehearsed())
        yield row
        if way == ATTENTION and row["predicted_s"] is not None:
            yield from _offloaded(row, fields, task, gpu)


def _row(way: str, found: Rehearsal) -> dict[str, Any]:
    last = found.steps[-1] if found.steps and found.failure is None else None
    return {
        "way": way,
        "by": "rehearsal",
        "predicted_s": None if last is None else found.step_s,
        "predicted_device_bytes": None if last is None else last.device_bytes,
        "predicted_host_bytes": None if last is None else last.host_bytes,
        "settled": found.settled,
        "failed": found.failure,
    }


def _offloaded(kept: dict[str, Any], fields: dict[str, Any], task: Task, gpu: str) -> Iterator[dict[str, Any]]:
    """Rows of the flags that hold checkpoints on the host."""
    text: Any = configuration_from(fields, name=task.model).get_text_config()
    layers, hardware = task.layers or text.num_hidden_layers, hardware_preset(gpu)
    heads = text.num_attention_heads
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    inputs = 2 * layers * task.tokens * text.hidden_size
    results = (
        layers * task.tokens * (2 * width + 4 * heads)
    )  # attention's result in bfloat16, its log-sum-exp in float32
    copies_s = inputs / hardware.d2h_bytes_per_s + inputs / hardware.h2d_bytes_per_s
    for way, host_bytes, added_s in ((TRANSFORMERS_ATTENTION, inputs, copies_s), (AXOLOTL, inputs + results, 0.0)):
        yield {
            **kept,
            "way": way,
            "by": "arithmetic",
            "predicted_s": kept["predicted_s"] + added_s,
            "predicted_device_bytes": kept["predicted_device_bytes"] - host_bytes,
            "predicted_host_bytes": host_bytes,
        }


def _line(row: dict[str, Any]) -> str:
    if row["predicted_s"] is None:
        return f"  {row['way']:40} {str(row['failed'])[:80]}"
    host = row["predicted_host_bytes"]
    return (
        f"  {row['way']:40} {row['predicted_s']:.3f} s, device {format_bytes(row['predicted_device_bytes'])}"
        f"{f', host {format_bytes(host)}' if host else ''}{'' if row['settled'] else ', no settled plan'}"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="instead of all cases of gpu_bench hf, as llama-3-8b+lora16")
    parser.add_argument("--seq", action="append", type=parse_tokens, help="with --model; may be given several times")
    parser.add_argument("--layers", type=int, help="instead of the model's own")
    parser.add_argument("--gpu", default="h100", help="preset (default h100)")
    parser.add_argument("--host", type=parse_bytes, default=125 << 30, help="free host memory (default 125GiB)")
    args = parser.parse_args(arguments)
    cases = [(case.model, case.seq) for case in CASES["hf"]]
    if args.model is not None:
        cases = [(args.model, seq) for seq in args.seq or [32 << 10]]
    found: list[dict[str, Any]] = []
    for model, tokens in cases:
        task = Task(model=model, tokens=tokens, layers=args.layers)
        found.append({**dataclasses.asdict(task), "ways": (rows := list[dict[str, Any]]())})
        print(f"\n{model}, {tokens} tokens, {args.gpu}", flush=True)
        for row in predicted(task, args.gpu, args.host):
            rows.append(row)
            print(_line(row), flush=True)
            write_result("hf-predicted", {"gpu": args.gpu, "host_bytes": args.host, "cases": found})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
