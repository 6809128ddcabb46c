"""Lossless packing of saved activations: ratio and time of leaving zeros out, of byte planes, and the bound by entropy.

    make bench ARMS=lossless
    python -m benchmarks.lossless [--steps 100]

Transformer layers of torch are trained on the documentation of this repository, with ReLU and GELU, with and without
dropout; then all that a step saves is packed, storage by storage, in float32 and in bfloat16. Four figures, each a share of
the bytes:

    zeros      one bit for each value, and the values that are not zero: what a kernel packs in one pass
    planes     the bytes of all values by their place in the value, with the sign last, so that an exponent is one byte; of
               128 of one plane their least and, in as few bits as the largest needs, what each is above it
    entropy    of each plane's bytes by how often they occur: no coder that looks at one byte at a time packs further
    zlib       level 1 on the planes, as a library would

`zeros pays` counts the storages of which zeros are at least half: a place of half a storage and a mask would take them.
Seconds are processor time of one thread, beside a copy of the same bytes.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.results import ROOT, write_result

HIDDEN, LAYERS, SEQ, BATCH, VOCABULARY = 128, 3, 128, 8, 256
GROUP = 128
MODELS = {
    "gelu": {"activation": "gelu", "dropout": 0.0},
    "gelu, dropout 0.1": {"activation": "gelu", "dropout": 0.1},
    "relu": {"activation": "relu", "dropout": 0.0},
    "relu, dropout 0.1": {"activation": "relu", "dropout": 0.1},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Model(nn.Module):
    """A language model of torch's own layers."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        layer = nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, batch_first=True, norm_first=True, **options)
        layer.self_attn.dropout = 0.0  # kernels of attention do not save its probabilities
        self.stack = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1, dtype=self.head.weight.dtype)
        hidden = self.stack(self.embed(tokens[:, :-1]), mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens[:, 1:].flatten())


def batches(text: torch.Tensor, seed: int) -> torch.Tensor:
    """Random pieces of the text."""
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - SEQ - 1, (BATCH,), generator=draw)
    return torch.stack([text[start : start + SEQ + 1] for start in starts.tolist()])


def saved_storages(model: Model, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Storages that the layers save in a forward, without parameters."""
    kept = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() and tensor.untyped_storage()._cdata not in kept:
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            found.setdefault(tensor.untyped_storage()._cdata, whole)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens)
    storages = [tensor.detach().clone() for tensor in found.values() if tensor.numel() >= BATCH * SEQ * HIDDEN // 8]
    del loss
    return storages


def planes(values: torch.Tensor) -> torch.Tensor:
    """Bytes by their place in a value, [itemsize, values]; the sign of a float is its last bit."""
    if values.is_floating_point():
        bits = values.view({2: torch.int16, 4: torch.int32}[values.itemsize])
        values = (bits << 1) | (bits < 0).to(bits.dtype)
    return values.view(torch.uint8).view(-1, values.itemsize).t().contiguous()


def zeros_nbytes(values: torch.Tensor) -> float:
    """Bytes of a mask and of the values of which a bit is set."""
    bits = planes(values).amax(dim=0) if values.dtype is not torch.bool else values.view(torch.uint8)
    held = int((bits != 0).sum()) * (values.itemsize if values.dtype is not torch.bool else 0)
    return values.numel() / 8 + held


def planes_nbytes(values: torch.Tensor) -> float:
    """Bytes of groups of each plane, as their least and the bits of what is above it."""
    found = 0.0
    for plane in planes(values):
        groups = torch.nn.functional.pad(plane, (0, -len(plane) % GROUP)).view(-1, GROUP).int()
        least, most = groups.amin(dim=1), groups.amax(dim=1)
        bits = torch.ceil(torch.log2((most - least).float() + 1))
        found += float((2 + bits * GROUP / 8).sum())
    return found


def entropy_nbytes(values: torch.Tensor) -> float:
    """Bytes by the frequencies of each plane's bytes."""
    found = 0.0
    for plane in planes(values):
        shares = torch.bincount(plane.int(), minlength=256).double() / len(plane)
        found += len(plane) * float(-(shares[shares > 0] * shares[shares > 0].log2()).sum()) / 8
    return found


def zlib_nbytes(values: torch.Tensor) -> float:
    """Bytes of a library's fastest level."""
    return float(len(zlib.compress(planes(values).numpy().tobytes(), 1)))


def pack_zeros(values: torch.Tensor) -> torch.Tensor:
    """The values that are not zero: the costly part of leaving zeros out, as torch does it."""
    return values[values != 0]


WAYS: dict[str, Callable[[torch.Tensor], float]] = {
    "zeros": zeros_nbytes,
    "planes": planes_nbytes,
    "entropy": entropy_nbytes,
    "zlib": zlib_nbytes,
}


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Processor time of the shortest of some runs."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def row(name: str, dtype: str, storages: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Shares of all bytes by way; those that pay by zeros; and the times of packing and of a copy."""
    nbytes = sum(one.numel() * one.itemsize for one in storages)
    floats = [one for one in storages if one.is_floating_point()]
    paying = [one for one in storages if zeros_nbytes(one) <= one.numel() * one.itemsize / 2 + one.numel() / 8]
    left = [one.numel() * one.itemsize for one in storages if all(one is not other for other in paying)]
    return {
        "model": name,
        "dtype": dtype,
        "nbytes": nbytes,
        "storages": len(storages),
        "shares": {way: sum(map(packed, storages)) / nbytes for way, packed in WAYS.items()},
        "zeros_pay_storages": len(paying),
        "zeros_pay_share_of_bytes": 1 - sum(left) / nbytes,
        "share_with_zeros_where_they_pay": (sum(left) + sum(map(zeros_nbytes, paying))) / nbytes,
        "pack_zeros_s": seconds(lambda: [pack_zeros(one) for one in floats]),
        "zlib_s": seconds(lambda: [zlib_nbytes(one) for one in floats], 1),
        "copy_s": seconds(lambda: [one.clone() for one in floats]),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lossless", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50, help="of training before what is saved is packed")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    text = "\n".join(path.read_text() for path in sorted(ROOT.glob("docs/*.md"))).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = []
    for name, options in MODELS.items():
        torch.manual_seed(0)
        model = Model(**options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        reached = 0.0
        for step in range(args.steps):
            loss = model(batches(data, step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            reached = loss.item()
        for dtype, kind in DTYPES.items():
            rows.append(row(name, dtype, saved_storages(model.to(kind), batches(data, args.steps))))
            shares = ", ".join(f"{way} {share:.0%}" for way, share in rows[-1]["shares"].items())
            print(f"  {name:18} {dtype:9} loss {reached:.2f}: {shares}", flush=True)
            print(
                f"  {'':28} zeros where they pay {rows[-1]['share_with_zeros_where_they_pay']:.0%}; "
                f"packing takes {rows[-1]['pack_zeros_s'] / rows[-1]['copy_s']:.1f} times a copy, "
                f"zlib {rows[-1]['zlib_s'] / rows[-1]['copy_s']:.0f} times",
                flush=True,
            )
        del model
    print(f"\nWrote {write_result('lossless', {'steps': args.steps, 'rows': rows})}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
