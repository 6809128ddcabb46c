"""Runs under torchrun: a Llama divided by torch's own styles, whose activations are DTensors, with memo and without.

Says `equal <layout>` once all settings were equal bit for bit, treated as told, moved what the arithmetic says and repeated
no other collective than they must.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import sys
import warnings
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import memo
from memo.errors import ModifiedAfterSave
from memo.swap import Level, Setting, setting_of

LAYERS, BATCH, HIDDEN, HEADS, FFN, VOCAB = 3, 2, 64, 8, 96, 61
HEAD_DIM = HIDDEN // HEADS
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"alpha": 1.0},
    "zero": {"alpha": 0.0},
    "half": {"alpha": 0.5},
    "levels": {"alpha": (0.25, 0.5, 0.25)},
    "middle": {"alpha": (0, 1, 0)},
    "nothing": {"alpha": 0.5, "levels": {0: Level.SAVE_INPUT}},
}
Counts = collections.Counter[str]
Step = tuple[float, dict[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Styles:
    """How the model is divided. `sharded` keeps DTensors between modules (use_local_output False), `sequence` divides tokens
    between the products, `rows` has fully_shard around each layer."""

    sequence: bool
    sharded: bool
    rows: bool
    dtype: torch.dtype
    tokens: int

    @property
    def between(self) -> Shard | Replicate:
        """Where the tokens are between the products."""
        return Shard(1) if self.sequence else Replicate()

    @classmethod
    def of(cls, name: str) -> Styles:
        words = name.split("_")
        return cls(
            sequence="sequence" in words,
            sharded="sharded" in words,
            rows="rows" in words,
            dtype=torch.bfloat16 if "bf16" in words else torch.float32,
            tokens=129 if "uneven" in words else 128,
        )


class Kernel(nn.Module):
    """Attention alone: no rule of torch divides the CPU's kernel, so the styles give it local tensors."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.kernel = Kernel()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (project(x).view(batch, tokens, -1, HEAD_DIM) for project in (self.wq, self.wk, self.wv))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        out = self.kernel(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.wo(out.transpose(1, 2).reshape(batch, tokens, -1))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(*size, bias=False) for size in ((HIDDEN, FFN), (FFN, HIDDEN), (HIDDEN, FFN))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), MLP()
        self.before, self.between = (nn.LayerNorm(HIDDEN, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x), cos, sin)
        return x + self.mlp(self.between(x))


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh, styles: Styles) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.out = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.mesh = mesh
        self.styles = styles

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(ids.size(1))[:, None] / 10 ** (torch.arange(HEAD_DIM) % (HEAD_DIM // 2) / 2)
        x = self.embedding(ids)
        tables = [table.to(x.dtype)[:, None] for table in (angles.cos(), angles.sin())]
        between = self.styles.between
        x = self._everywhere(x).redistribute(placements=[between])
        if self.styles.sharded:
            tables = [self._everywhere(table) for table in tables]
        else:
            x = x.to_local()
        for layer in self.layers:
            x = layer(x, *tables)
        if not self.styles.sharded:
            x = DTensor.from_local(x, self.mesh, [between])
        return self.out(x.full_tensor())

    def _everywhere(self, tensor: torch.Tensor) -> Any:
        return DTensor.from_local(tensor, self.mesh, [Replicate()])


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def divide(layer: nn.Module, mesh: DeviceMesh, styles: Styles) -> None:
    """As training scripts do: gathered once before the projections that share an input, scattered after the last."""
    between, local = styles.between, not styles.sharded
    tables = (None, None) if local else (Replicate(), Replicate())
    column, row = (
        ColwiseParallel(use_local_output=local),
        RowwiseParallel(output_layouts=between, use_local_output=local),
    )
    plan: dict[str, Any] = {
        "attention": PrepareModuleInput(input_layouts=(between, *tables), desired_input_layouts=(Replicate(), *tables)),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        **dict.fromkeys(("attention.wq", "attention.wk", "attention.wv", "mlp.w1", "mlp.w3"), column),
        **dict.fromkeys(("attention.wo", "mlp.w2"), row),
    }
    if styles.sharded:
        heads = (Shard(1),)
        plan["attention.kernel"] = PrepareModuleInputOutput(
            input_layouts=heads * 3, desired_input_layouts=heads * 3, use_local_input=True,
            output_layouts=heads, desired_output_layouts=heads, use_local_output=False,
        )  # fmt: skip
    norms = [layer.get_submodule(name) for name in ("before", "between")]
    if styles.sequence:
        plan |= dict.fromkeys(("before", "between"), SequenceParallel(use_local_output=local))
    elif styles.sharded:
        for norm in norms:
            distribute_module(norm, mesh)
    parallelize_module(layer, mesh, plan)


@functools.cache
def mesh_of(*, rows: bool) -> DeviceMesh:
    ranks = dist.get_world_size()
    return init_device_mesh("cpu", (2, ranks // 2) if rows else (1, ranks), mesh_dim_names=("dp", "tp"))


def build(styles: Styles) -> nn.Module:
    mesh = mesh_of(rows=styles.rows)
    torch.manual_seed(0)
    model = Model(mesh["tp"], styles).to(styles.dtype)
    for layer in model.layers:
        divide(layer, mesh["tp"], styles)
        if styles.rows:
            fully_shard(layer, mesh=mesh["dp"])
    return model


class Collectives(TorchDispatchMode):
    """Counts what torch's own collectives move of activations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) or hasattr(kind, "trigger_wait") for kind in types):
            return NotImplemented
        if func.namespace == "_c10d_functional" and func.overloadpacket.__name__.startswith(("all_", "reduce_")):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOrder:
    """Of a run with memo."""

    steps: list[Step]
    collectives: Counts
    """Of the last step."""
    nbytes: int
    """That moved."""


def run(styles: Styles, options: dict[str, Any] | None) -> PipelineOrder:
    model = build(styles)
    manager = None
    if options is not None:
        layers: Any = list(model.layers)  # type: ignore[arg-type]
        manager = memo.offload(model, host="16MiB", min_bytes=64, layers=layers, **options)
    steps: list[Step] = []
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, VOCAB, (BATCH, styles.tokens), generator=generator)
        with Collectives() as collectives:
            with manager or contextlib.nullcontext():
                loss = F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
            model.zero_grad()
            loss.backward()
        grads: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
        steps.append((loss.item(), {name: _local(grad).clone() for name, grad in grads.items()}))
    if manager is None:
        return PipelineOrder(steps=steps, collectives=collectives.counts, nbytes=0)
    with closing(manager):
        use = manager.report().recompute
        if options["alpha"] != 1.0:
            assert use is not None
            assert use.refused == {}, use
            assert set(use.repeated.values()) <= {"as chosen"}, use
            assert use.accepted == LAYERS, use
        assert manager.stats.live_entries == 0, manager.stats
        return PipelineOrder(steps=steps, collectives=collectives.counts, nbytes=manager.stats.bytes_host)


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def moving_nbytes(styles: Styles, levels: Setting) -> int:
    """Of two steps of float32, in which the last layer's tensors stay."""
    tp = dist.get_world_size() // (2 if styles.rows else 1)
    tokens = styles.tokens // tp if styles.sequence else styles.tokens
    gathered = BATCH * (tp if styles.sequence else 1)  # rows of a token that products are given
    projections, activations = 3 * gathered * HIDDEN // tp, gathered * FFN // tp
    summed, statistics = BATCH * HIDDEN, 4 * BATCH
    kept = summed + gathered * (HIDDEN + HEADS) // tp  # the input, and what attention gave
    all_ = statistics + 2 * gathered * HIDDEN + projections + summed + 4 * activations
    matmuls = projections + 2 * activations + summed
    shares = shares_of(levels)
    if len(shares) > 1:  # sums that are not repeated are kept in any case
        kept += 2 * summed
    each = kept + shares.get("all", 0.0) * all_ + shares.get("matmuls", 0.0) * matmuls
    return 2 * (LAYERS - 1) * 4 * math.ceil(each * tokens)


def shares_of(levels: Setting) -> dict[str, float]:
    """Fractions of the levels that are not 0."""
    points = {levels.point: 1.0} if isinstance(levels, Level) else levels.points
    return {point: share for point, share in points.items() if share}


def repeated(styles: Styles, levels: Setting) -> Counts:
    """Collectives of a step's recomputes: what is gathered was saved, and is gathered again; sums only at SAVE_ATTENTION."""
    shares = shares_of(levels)
    if not styles.sequence:
        counts = Counts(all_reduce=1) if "attention" in shares else Counts()
    else:
        again = len(shares.keys() & {"matmuls", "attention"})
        counts = Counts(all_gather_into_tensor=2 * again, reduce_scatter_tensor=int("attention" in shares))
    return +Counts({kind: count * (LAYERS - 1) for kind, count in counts.items()})  # the last layer's tensors stay


def check(name: str) -> None:
    styles = Styles.of(name)
    want = run(styles, None)
    exact = (
        styles.dtype is torch.float32 and not styles.tokens % 2
    )  # bytes and collectives are compared with arithmetic
    for setting in SETTINGS if exact else ("zero", "half", "levels"):
        options = SETTINGS[setting]
        got = run(styles, options)
        what = f"{name}, {setting}"
        for (loss, grads), (loss0, grads0) in zip(got.steps, want.steps, strict=True):
            assert loss == loss0, f"{what}: {loss}, not {loss0}"
            for parameter in grads0:
                assert torch.equal(grads[parameter], grads0[parameter]), f"{what}: {parameter}"
        levels = setting_of(options["alpha"])
        if setting == "nothing" or not exact:
            continue
        nbytes, again = moving_nbytes(styles, levels), got.collectives - want.collectives
        most = repeated(styles, levels)
        if setting in ("half", "levels"):  # whole storages fit in between
            assert got.nbytes <= nbytes, f"{what}: {got.nbytes} bytes moved, more than {nbytes}"
            assert again <= most, f"{what}: {again} again, more than {most}"
        else:
            assert got.nbytes == nbytes, f"{what}: {got.nbytes} bytes moved, not {nbytes}"
            assert again == (most if setting != "whole" else Counts()), f"{what}: {again} again, not {most}"


class Changing(nn.Module):
    """Saves a tensor, and changes it in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        out = doubled.sin()
        doubled.add_(1)
        return out


def check_changes() -> None:
    """An in-place change is counted at the DTensor and not at what a rank has of it: it must be seen all the same."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(Changing(), Changing())
    for alpha in (1.0, 0.5):
        x = DTensor.from_local(torch.randn(2, 32, 16), mesh, [Shard(1)]).requires_grad_()
        with closing(memo.offload(model, host="1MiB", min_bytes=64, layers=list(model), alpha=alpha)) as manager:
            with manager:
                loss = model(x).sum()
            try:
                loss.backward()
            except ModifiedAfterSave:
                continue
            raise AssertionError("a change in place was not seen")


def main() -> None:
    """Arguments: names of layouts, or `changes`."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*whole tensors|.*is recomputed whole")
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        if name == "changes":
            check_changes()
        else:
            check(name)
        if dist.get_rank() == 0:
            print(f"equal {name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
