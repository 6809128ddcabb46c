"""A Hugging Face model's own loss, with its logits and without them: memory, time, and how far from float32's it is.

    python -m benchmarks.own_loss [--tokens 1k,2k,4k] [--vocab 32768] [--hidden 256] [--rounds 5] [--autocast no,bfloat16]

One unmodified Llama of two layers, forward with labels and backward, in turn as it is and with `memo.loss_without_logits`,
in float32 and under autocast to bfloat16. Memory is the resident set at its peak above what it was before; times are the
least and the median of interleaved rounds, told as multiples of the model's own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import memo
from benchmarks.results import write_result
from memo.autoplan.device_budget import device_budget_of
from memo.machine.process_memory import return_freed_memory
from memo.units import format_bytes, format_tokens, parse_tokens

WAYS = ("own", "without logits")


def model_of(vocab: int, hidden: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=vocab, use_cache=False))


def step(model: LlamaForCausalLM, ids: torch.Tensor, *, low: bool) -> dict[str, float]:
    """One forward and backward: seconds, peak bytes above what was there before, loss."""
    memory = device_budget_of(ids.device, None)
    memory.restart()
    before, begin = memory.peak_bytes(), time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {"seconds": time.perf_counter() - begin, "peak_bytes": memory.peak_bytes() - before, "loss": loss.item()}
    model.zero_grad()
    return found


def compare(tokens: int, vocab: int, hidden: int, rounds: int, *, low: bool) -> dict[str, dict[str, float]]:
    """Each way's figures; the first round warms up and does not count."""
    model = model_of(vocab, hidden)
    ids = torch.randint(vocab, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    seen: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds + 1):
        for way, rows in seen.items():
            with contextlib.nullcontext() if way == "own" else memo.loss_without_logits(model):
                rows.append(step(model, ids, low=low))
    return {
        way: {
            "least_s": min(row["seconds"] for row in rows[1:]),
            "median_s": statistics.median(row["seconds"] for row in rows[1:]),
            "peak_bytes": max(row["peak_bytes"] for row in rows[1:]),
            "loss": rows[0]["loss"],
        }
        for way, rows in seen.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1k,2k,4k")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--autocast", default="no,bfloat16")
    args = parser.parse_args()
    return_freed_memory()
    cases: list[dict[str, Any]] = []
    for autocast in args.autocast.split(","):
        for tokens in map(parse_tokens, args.tokens.split(",")):
            ways = compare(tokens, args.vocab, args.hidden, args.rounds, low=autocast == "bfloat16")
            own, without = (ways[way] for way in WAYS)
            kind = "float32" if autocast == "no" else autocast
            cases.append({"tokens": tokens, "matrix_products": kind, "ways": ways})
            print(
                f"{kind:8} {format_tokens(tokens):>4} tokens  peak {format_bytes(int(own['peak_bytes'])):>9} -> "
                f"{format_bytes(int(without['peak_bytes'])):>9}  time {without['least_s'] / own['least_s']:.2f} of its own "
                f"(median {without['median_s'] / own['median_s']:.2f})  loss {own['loss']:.6f} -> {without['loss']:.6f}",
                flush=True,
            )
    body = {"vocab": args.vocab, "hidden": args.hidden, "rounds": args.rounds, "cases": cases}
    versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    print(f"Wrote {write_result('own-loss', {**versions, **body, 'load_average': os.getloadavg()})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
