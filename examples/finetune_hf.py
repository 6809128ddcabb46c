r"""Finetunes an unmodified Hugging Face causal language model on your text, at a length whose activations do not fit.

    a small Llama made from a config, on a CPU     python examples/finetune_hf.py
    a model of yours, on one GPU                   python examples/finetune_hf.py --model ./llama --data books/ \
                                                       --seq 256k --host 64GiB --steps 200 --output ./llama-books
    the same with LoRA                             ... --lora 16
    over the GPUs of one machine, or eight         torchrun --standalone --nproc-per-node 8 examples/finetune_hf.py \
    processes on a CPU                                 --model ./llama --data books/ --seq 1m --tp 2 --pp 2 --dp 2
    from where that ended, in another layout       ... --resume ./llama-books --tp 8

Without arguments the text is Python's standard library, and on a CPU the budget is too small to keep all saved tensors: the
report of these 6 steps, a minute or so on two cores, says what was offloaded and recomputed.

memo needs two lines: `memo.offload(model)`, and `with manager:` around the forward. At this length the logits matter, too:
a quarter of a million tokens times 128,000 words in float32 are 128 GiB. `memo.loss_without_logits(model)` computes the
model's loss from one chunk of logits at a time. With `--tp`, `--pp`, `--dp` or `--cp`, `memo.parallelize` divides the model
over the processes; the losses stay those of one process with as many rows. `--output` writes the model as transformers does,
for `from_pretrained`, and AdamW's state beside it. `--without-memo` trains without offloading: `python -m
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
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import memo
from memo import Manager
from memo.errors import MemoError
from memo.gpt.data.batches import Batches
from memo.gpt.data.token_file import TokenFile, open_tokens
from memo.machine import peak_rss_bytes, return_freed_memory
from memo.parallel.decoders import whole_tensor
from memo.parallel.layout import parse_layer_counts
from memo.units import format_bytes, parse_tokens

STATE = "optimizer.pt"
"""File beside a saved model with AdamW's state."""
MOMENTS = ("exp_avg", "exp_avg_sq")
SMALL = "700MiB"
"""Device budget of the small Llama on a CPU: at 4k tokens 200 of 332 MiB of saved tensors have room beside torch."""


def main() -> int:
    """Trains, prints a line per step and returns the exit code."""
    args = arguments()
    device, first = join_others(args.tp * args.pp * args.dp * args.cp)
    if device.type == "cpu":
        return_freed_memory()
    torch.manual_seed(args.seed)
    tokens = open_tokens(args.data, tokenizer=tokenizer_of(args.model))
    rows = args.dp * args.microbatches
    batches = Batches(tokens, batch=args.rows or rows, seq=parse_tokens(args.seq), seed=args.seed)
    model = divided(args, tokens, device)
    if first:
        print(header(args, model, device), flush=True)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr, weight_decay=0.0)
    done = restored(args, model, optimizer, tokens, device) if args.resume is not None else 0
    own = own_rows(args, batches.batch)
    manager = None if args.without_memo else managed(args, model, device, len(range(batches.batch)[own]))
    for step in range(done + 1, done + args.steps + 1):
        begin = time.perf_counter()
        ids = batches.at(step)[0][own].to(device)
        if args.pp > 1:
            with manager or contextlib.nullcontext():
                loss = model.step(input_ids=ids, labels=ids)
            model.clip_grad_norm_(1.0)
        else:
            losses = []
            for part in ids.chunk(args.microbatches):
                with manager or contextlib.nullcontext():
                    loss = model(part, labels=part).loss / args.microbatches
                loss.backward()
                losses.append(loss.detach())
            loss = mean_of_replicas(args, torch.stack(losses).sum())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if manager is not None:
            manager.step_done()
        speed = batches.batch * batches.seq / (time.perf_counter() - begin)
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
        save(args, model, optimizer, tokens, done + args.steps)
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
    parser.add_argument("--tp", type=int, default=1, help="processes that divide each matrix (default 1)")
    parser.add_argument("--pp", type=int, default=1, help="processes that divide the layers (default 1)")
    parser.add_argument(
        "--dp", type=int, default=1, help="processes that divide the rows, and shard weights (default 1)"
    )
    parser.add_argument("--cp", type=int, default=1, help="processes that divide the tokens of each row (default 1)")
    parser.add_argument("--microbatches", type=int, help="parts of a step (default: 1, with --pp twice as many)")
    parser.add_argument("--schedule", default="1f1b", help="with --pp: gpipe, 1f1b or interleaved-1f1b (default 1f1b)")
    parser.add_argument("--stage-layers", help="with --pp: layers of each stage, such as 9,7 (default: equal FLOPs)")
    parser.add_argument("--rows", type=int, help="sequences of a step (default: one for each process or microbatch)")
    parser.add_argument("--resume", type=Path, help="folder that a run's --output wrote, to go on from")
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
    if args.resume is not None and not (args.resume / STATE).is_file():
        parser.error(f"--resume {args.resume}: no folder that --output wrote")
    args.microbatches = args.microbatches or (2 * args.pp if args.pp > 1 else 1)
    return args


def join_others(ranks: int) -> tuple[torch.device, bool]:
    """Joins the processes of torchrun; returns this one's device, and True if it is the first, which prints."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != started:
        sys.exit(
            f"finetune_hf: --tp times --pp times --dp times --cp is {ranks}, and {started} processes were started; start "
            f"them with torchrun --nproc-per-node {ranks}"
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device, ranks == 1 or dist.get_rank() == 0


def divided(args: argparse.Namespace, tokens: TokenFile, device: torch.device, change: Any = None) -> Any:
    """This process's part of the model, on its device. `change` is called with the whole model before."""
    model = open_model(args.resume if args.resume is not None and not args.lora else args.model, tokens)
    if args.lora:
        model = adapted(model, args.lora)
    model.config.use_cache = False  # keys and values are kept for generation only
    if change is not None:
        change(model)
    model.to(device).train()
    part: Any = memo.parallelize(
        model,
        tp=args.tp,
        pp=args.pp,
        dp=args.dp,
        cp=args.cp,
        microbatches=args.microbatches if args.pp > 1 else None,
        schedule=args.schedule,
        stage_layers=parse_layer_counts(args.stage_layers) if args.stage_layers else (),
        tokens=parse_tokens(args.seq) if args.pp > 1 else None,
    )
    for whole in [stage.model for stage in part.stages if stage.is_last] if args.pp > 1 else [part]:
        memo.loss_without_logits(whole)
    return part


def own_rows(args: argparse.Namespace, rows: int) -> slice:
    """The rows of a batch that this process's replica takes."""
    if rows % (args.dp * args.microbatches):
        sys.exit(f"finetune_hf: --rows {rows} do not divide over --dp {args.dp} and --microbatches {args.microbatches}")
    replica = dist.get_rank() // (args.cp * args.tp) % args.dp if dist.is_initialized() else 0
    return slice(replica * rows // args.dp, (replica + 1) * rows // args.dp)


def managed(args: argparse.Namespace, model: Any, device: torch.device, rows: int) -> Manager:
    """Memo's manager of the model, or of this process's pipeline stages."""
    budgets = {"device": device_budget(args, device), "host": args.host, "disk": args.disk}
    if args.pp == 1:
        return memo.offload(model, alpha=args.alpha, **budgets)
    schedule = model.schedule(rows, parse_tokens(args.seq))
    return memo.offload(model, alpha=args.alpha, layers=model.layers, schedule=schedule, **budgets)


def mean_of_replicas(args: argparse.Namespace, loss: torch.Tensor) -> torch.Tensor:
    """The loss of all rows."""
    loss = loss.detach()
    if args.dp > 1:
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss


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


def whole_state(args: argparse.Namespace, model: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the whole model from those of its parts, in the first process's memory; called by all."""
    if args.pp > 1:
        found: dict[str, torch.Tensor] = model.full_state(values)
        return found
    return {name: whole_tensor(value) for name, value in values.items()}


def save(args: argparse.Namespace, model: Any, optimizer: torch.optim.Optimizer, tokens: TokenFile, step: int) -> None:
    """Gathers model and optimizer in the first process, which writes them, the model as transformers does."""
    named = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad or not args.lora
    }
    weights = whole_state(args, model, named)
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    states = {
        key: whole_state(args, model, {name: optimizer.state[parameter][key] for name, parameter in trained.items()})
        for key in MOMENTS
    }
    if not dist.is_initialized() or dist.get_rank() == 0:
        whole: Any = open_model(args.model, tokens)
        whole = adapted(whole, args.lora) if args.lora else whole
        whole.load_state_dict(weights, strict=False)
        whole.save_pretrained(args.output)
        torch.save({"step": step, "weights": weights if args.lora else {}, **states}, args.output / STATE)
        print(f"Wrote {args.output}")


def restored(
    args: argparse.Namespace, model: Any, optimizer: torch.optim.Optimizer, tokens: TokenFile, device: torch.device
) -> int:
    """Reads the optimizer's state, and adapters; returns the number of steps that were done.

    A state is divided as the weights are: it is put in the place of the weights of another model, which is divided.
    """
    saved = torch.load(args.resume / STATE, map_location="cpu", weights_only=True)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for key in (*MOMENTS, *(("weights",) if args.lora else ())):

        def fill(whole: torch.nn.Module, key: str = key) -> None:
            whole.load_state_dict(saved[key], strict=False)

        for name, value in divided(args, tokens, device, fill).named_parameters():
            if name in parameters and key == "weights":
                parameters[name].data.copy_(value.data)
            elif name in parameters:
                optimizer.state[parameters[name]][key] = value.detach().clone()
    for parameter in parameters.values():
        optimizer.state[parameter]["step"] = torch.tensor(float(saved["step"]))
    return int(saved["step"])


def peak(device: torch.device) -> int:
    """Peak device memory in bytes, or the peak resident set on a CPU."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_rss_bytes()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MemoError as error:
        print(f"finetune_hf: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
