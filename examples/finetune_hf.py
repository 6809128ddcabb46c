r"""Finetunes an unmodified Hugging Face causal language model on your text, at a length whose activations do not fit.

    a small Llama made from a config, on a CPU     python examples/finetune_hf.py
    a model of yours, on one GPU                   python examples/finetune_hf.py --model ./llama --data books/ \
                                                       --seq 256k --host 64GiB --steps 200 --output ./llama-books
    the same with LoRA                             ... --lora 16
    over the GPUs of one machine, or two           torchrun --standalone --nproc-per-node 8 examples/finetune_hf.py \
    processes on a CPU (--nproc-per-node 2)            --model ./llama --data books/ --seq 1m --tp 8

Without arguments the text is Python's standard library, and on a CPU the budget is too small to keep all saved tensors: the
report of these 6 steps, a minute or so on two cores, says what was offloaded and recomputed.

memo needs two lines: `memo.offload(model)`, and `with manager:` around the forward. At this length the logits matter, too:
a quarter of a million tokens times 128,000 words in float32 are 128 GiB. `memo.loss_without_logits(model)` computes the
model's loss from one chunk of logits at a time. With `--tp`, `memo.parallelize(model, mesh)` divides the model over the
processes; the losses stay those of one process. `--without-memo` trains without offloading: `python -m
benchmarks.finetune_hf` runs both under a memory limit that only the run with memo survives.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import memo
from memo.errors import MemoError
from memo.gpt.data.batches import Batches
from memo.gpt.data.token_file import TokenFile, open_tokens
from memo.machine import peak_rss_bytes, return_freed_memory
from memo.units import format_bytes, parse_tokens

SMALL = "700MiB"
"""Device budget of the small Llama on a CPU: at 4k tokens 200 of 332 MiB of saved tensors have room beside torch."""


def main() -> int:
    """Trains, prints a line per step and returns the exit code."""
    args = arguments()
    device, first = join_others(args.tp)
    if device.type == "cpu":
        return_freed_memory()
    torch.manual_seed(args.seed)
    tokens = open_tokens(args.data, tokenizer=tokenizer_of(args.model))
    batches = Batches(tokens, batch=1, seq=parse_tokens(args.seq), seed=args.seed)
    model = open_model(args.model, tokens)
    if args.tp > 1:
        memo.parallelize(model, init_device_mesh(device.type, (args.tp,)))
    if args.lora:
        model = adapted(model, args.lora)
    memo.loss_without_logits(model)
    model.to(device).train()
    model.config.use_cache = False  # keys and values are kept for generation only
    if first:
        print(header(args, model, device), flush=True)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr, weight_decay=0.0)
    budgets = {"device": device_budget(args, device), "host": args.host, "disk": args.disk}
    manager = None if args.without_memo else memo.offload(model, alpha=args.alpha, **budgets)
    for step in range(1, args.steps + 1):
        begin = time.perf_counter()
        ids = batches.at(step)[0].to(device)
        with manager or contextlib.nullcontext():
            loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if manager is not None:
            manager.step_done()
        speed = ids.numel() / (time.perf_counter() - begin)
        if first:
            memory = format_bytes(peak(device))
            print(f"step {step}  loss {loss.item():.{args.digits}g}  memory {memory}  tps {speed:,.0f}", flush=True)
    if manager is not None:
        if first:
            print(manager.report())
            if args.model is not None and device.type == "cpu":
                print(f"on a GPU: memo rehearse --model {args.model} --seq {args.seq} --loss-without-logits --gpu h100")
        manager.close()
    if args.output is not None:
        save(model, args.output)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def arguments() -> argparse.Namespace:
    """Parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="local folder of a causal language model (default: a small untrained Llama)"
    )
    parser.add_argument("--data", nargs="+", help="text files, folders, .jsonl (default: Python's standard library)")
    parser.add_argument("--seq", default="4k", help="sequence length in tokens (default 4k)")
    parser.add_argument("--steps", type=int, default=6, help="number of steps (default 6: a plan has settled by then)")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate (default 1e-4)")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train PEFT's adapters of this rank alone")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument(
        "--tp", type=int, default=1, help="processes that divide the model, started by torchrun (default 1)"
    )
    parser.add_argument(
        "--alpha", type=float, help="most of what can be recomputed that moves, 0 to 1 (default: planned)"
    )
    parser.add_argument(
        "--device", help=f"device memory, such as 40GiB (default: what is usable; of the small Llama on a CPU {SMALL})"
    )
    parser.add_argument("--host", default="auto", help="host memory for activations, such as 64GiB (default auto)")
    parser.add_argument(
        "--disk", help="folder of the scratch file (default: none on a GPU, the system's temporary one on a CPU)"
    )
    parser.add_argument("--digits", type=int, default=6, help="digits of the losses; 9 are all of them (default 6)")
    parser.add_argument("--output", type=Path, help="save the model to this folder (default: do not save)")
    parser.add_argument("--without-memo", action="store_true", help="train without offloading")
    args = parser.parse_args()
    if args.model is not None and not args.model.is_dir():
        parser.error(f"--model {args.model}: no such folder")
    return args


def join_others(tp: int) -> tuple[torch.device, bool]:
    """Joins the processes of torchrun; returns this one's device, and True if it is the first, which prints."""
    if tp != int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"finetune_hf: --tp {tp} is for {tp} processes; start it with torchrun --nproc-per-node {tp}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if tp > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device, tp == 1 or dist.get_rank() == 0


def open_model(path: Path | None, tokens: TokenFile) -> PreTrainedModel:
    """The user's model unchanged, or an untrained Llama of 8 layers whose tokens are bytes."""
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    shape = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 8, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=tokens.vocab_size, max_position_embeddings=1 << 20))


def device_budget(args: argparse.Namespace, device: torch.device) -> str | None:
    """The device budget that is asked for; with a plan of the small Llama on a CPU `SMALL`."""
    planned = args.alpha is None and not args.without_memo
    return SMALL if args.device is None and args.model is None and device.type == "cpu" and planned else args.device


def header(args: argparse.Namespace, model: PreTrainedModel, device: torch.device) -> str:
    """Line of text with the model, its device and what it trains on."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    budget = device_budget(args, device)
    within = "" if budget is None else f" within {budget}"
    return f"{type(model).__name__}, {trained:,} trained parameters, on {device}{within}; {args.seq} tokens a step"


def adapted(model: PreTrainedModel, rank: int) -> PreTrainedModel:
    """The model with PEFT's adapters on all linear maps, which alone are trained."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():  # PEFT reads a property that transformers has renamed
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        made: PreTrainedModel = get_peft_model(model, config)
    return made


def tokenizer_of(model: Path | None) -> str | None:
    """The model's tokenizer.json; None, for one token per byte, where it has none."""
    file = None if model is None else model / "tokenizer.json"
    return str(file) if file is not None and file.exists() else None


def save(model: PreTrainedModel, folder: Path) -> None:
    """Gathers the whole model in the first process, which writes it."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
        print(f"Wrote {folder}")


def peak(device: torch.device) -> int:
    """Peak device memory in bytes, or the peak resident set on a CPU."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_rss_bytes()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MemoError as error:
        print(f"finetune_hf: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
