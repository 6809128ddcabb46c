"""Finetunes an unmodified Hugging Face causal language model on your text, at a length whose activations do not fit.

    a small Llama made from a config, on a CPU     python examples/finetune_hf.py --data notes/ --seq 8k --alpha 0.25
    a model of yours, on one GPU                   python examples/finetune_hf.py --model ./llama --data books/ \\
                                                       --seq 256k --host 64GiB --steps 200 --output ./llama-books

Two lines are memo's: `memo.offload(model)`, and `with manager:` around the forward. A third thing matters at this length
and is nobody's fault: the logits. A quarter of a million tokens times 128,000 words in float32 are 128 GiB, so the loss is
taken from the hidden states, a chunk of logits at a time. `--without-memo` trains the same without the two lines:
`python -m benchmarks.finetune_hf` runs both under a limit of memory that only one of them survives.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import memo
from memo.gpt.batches import Batches
from memo.gpt.loss import linear_cross_entropy
from memo.gpt.process_memory import peak_rss_bytes, return_freed_memory
from memo.gpt.tokens import TokenFile, open_tokens
from memo.units import format_bytes, parse_tokens


def main() -> int:
    args = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        return_freed_memory()
    torch.manual_seed(args.seed)
    tokens = open_tokens(args.data, tokenizer=tokenizer_of(args.model))
    batches = Batches(tokens, batch=1, seq=parse_tokens(args.seq), seed=args.seed)
    model = open_model(args.model, tokens).to(device).train()
    model.config.use_cache = False  # keys and values are kept for generation only
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    manager = None if args.without_memo else memo.offload(model, alpha=args.alpha, host=args.host, disk=args.disk)
    for step in range(1, args.steps + 1):
        begin = time.perf_counter()
        inputs, targets = (part.to(device) for part in batches.at(step))
        with manager or contextlib.nullcontext():
            hidden = model.base_model(inputs).last_hidden_state
            loss = linear_cross_entropy(hidden, model.get_output_embeddings().weight, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if manager is not None:
            manager.step_done()
        speed = inputs.numel() / (time.perf_counter() - begin)
        print(f"step {step}  loss {loss.item()!r}  memory {format_bytes(peak(device))}  tps {speed:,.0f}", flush=True)
    if manager is not None:
        print(manager.report())
        manager.close()
    if args.output is not None:
        model.save_pretrained(args.output)
        print(f"Wrote {args.output}")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="a local folder of a causal model (default: a small Llama, untrained)"
    )
    parser.add_argument("--data", nargs="+", help="text files, folders, .jsonl (default: Python's standard library)")
    parser.add_argument("--seq", default="4k", help="tokens of a sequence (default 4k)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alpha", type=float, help="fraction of the tokens moved, not recomputed")
    parser.add_argument("--host", default="auto", help="host memory for activations, such as 64GiB")
    parser.add_argument("--disk", help="a folder for a scratch file (on a CPU: the system's temporary one)")
    parser.add_argument("--output", type=Path, help="save the model here")
    parser.add_argument("--without-memo", action="store_true", help="the same training with activations in memory")
    return parser.parse_args()


def open_model(path: Path | None, tokens: TokenFile) -> PreTrainedModel:
    """The user's model as it is, or a Llama of 8 layers with a word for each byte."""
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    shape = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 8, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=tokens.vocab_size, max_position_embeddings=1 << 20))


def tokenizer_of(model: Path | None) -> str | None:
    """The model's own where it has one; else a token is a byte."""
    file = None if model is None else model / "tokenizer.json"
    return str(file) if file is not None and file.exists() else None


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_rss_bytes()


if __name__ == "__main__":
    sys.exit(main())
