"""Writes traces of a training run that never ran: layers, lanes, stalls and states as the engine would emit them.

A small list-scheduling model of the swap engine on fixed rates; it exists so that the reader, the statistics and the
viewer can be tested and measured without a GPU, at any size. Every number follows from the arguments and the seed.

    python -m benchmarks.synthetic_trace --layers 32 --tensors 12 --steps 4 --ranks 2 --out traces
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

from memo.events import (
    FORMAT,
    VERSION,
    CounterEvent,
    Event,
    Lane,
    Note,
    Owned,
    Owner,
    Span,
    Stall,
    StallCause,
    StateChange,
    StepMark,
    StorageUse,
    TensorState,
    TierName,
    UseKind,
    to_json,
)
from memo.trace.tensor_lifetimes import lifetimes_of, residency_changes

MILLISECOND = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the imagined run does."""

    layers: int = 24
    tensors: int = 6
    """Saved storages of each layer."""
    steps: int = 3
    tensor_nbytes: int = 96 << 20
    forward_ns: int = 40 * MILLISECOND
    """Of one layer; backward takes twice that."""
    d2h_bytes_per_s: float = 22e9
    h2d_bytes_per_s: float = 24e9
    disk_bytes_per_s: float = 6e9
    prefetch_depth: int = 1
    """Layers whose reload is issued ahead of the one in backward."""
    disk_every: int = 6
    """Each n-th storage goes on to disk; 0 for none."""
    recompute_share: float = 0.12
    """Of a layer's forward, recomputed in backward."""
    late_layer: int | None = None
    """This layer's reload is issued only when backward asks for it."""
    seed: int = 0


OWNED_NBYTES = 6 << 30
OTHER_NBYTES = 400 << 20
NAMES = {
    "input": "Add",
    "attn.q_proj": "Mm",
    "attn.k_proj": "Mm",
    "attn.out": "ScaledDotProductFlashAttention",
    "mlp.up": "Mm",
    "mlp.act": "Silu",
    "mlp.down": "Mul",
    "norm": "NativeLayerNorm",
}


class Run:
    """One rank's run: a clock per lane, and the events in the order they become known."""

    def __init__(self, workload: Workload, *, rank: int = 0) -> None:
        self._work = workload
        self._random = random.Random(workload.seed * 1000 + rank)
        self._clock = 0
        self._free = dict.fromkeys(Lane, 0)
        self._host = 0
        self._counted: list[tuple[int, int]] = []
        self._disk = 0
        self._next_id = 0
        self._step = 0
        self.events: list[Event] = []

    def run(self) -> list[Event]:
        while self._step < self._work.steps:
            self._one_step()
            self._clock += 2 * MILLISECOND
            self._step += 1
        self._measure()
        self.events.sort(key=lambda event: event.t + getattr(event, "d", 0))
        return self.events

    def _measure(self) -> None:
        """Counts the device at the end of each layer: what is owned and saved there, and some transient bytes."""
        by_time = sorted(self.events, key=lambda event: event.t)
        changes = [one for one in residency_changes(lifetimes_of(by_time)) if one.tier is TierName.DEVICE]
        times = [change.t for change in changes]
        totals = list(itertools.accumulate(change.delta for change in changes))
        for t, step in self._counted:
            index = bisect.bisect_right(times, t)
            saved = totals[index - 1] if index else 0
            transient = int(self._work.tensor_nbytes * self._random.uniform(0.5, 2.5))
            nbytes = OWNED_NBYTES + OTHER_NBYTES + saved + transient
            self._emit(CounterEvent(t=t, step=step, tier=TierName.DEVICE, nbytes=nbytes))

    def _one_step(self) -> None:
        work = self._work
        self._emit(StepMark(t=self._clock, step=self._step, phase="begin"))
        self._own()
        layers = [self._forward(layer) for layer in range(work.layers)]
        self._compute("lm_head", "forward", work.forward_ns // 3)
        self._compute("lm_head", "backward", work.forward_ns * 2 // 3)
        reload_done: dict[int, int] = {}
        for layer in reversed(range(work.layers)):
            for ahead in range(layer, max(layer - work.prefetch_depth, 0) - 1, -1):
                if ahead not in reload_done and (ahead != work.late_layer or ahead == layer):
                    reload_done[ahead] = self._reload(layers[ahead], issued=self._clock)
            self._backward(layer, layers[layer], reload_done[layer])
        self._compute("optimizer", "optimizer", work.forward_ns // 2)
        if self._step == 0:
            self._emit(Note(t=self._clock, step=0, cause="fallback", message="layers.3.mlp: whole-tensor swap"))
        self._emit(StepMark(t=self._clock, step=self._step, phase="end"))

    def _own(self) -> None:
        """Weights, gradients and optimizer state: 6 GiB together, and the largest weight."""
        for owner, nbytes in ((Owner.WEIGHTS, 1 << 30), (Owner.GRADIENTS, 1 << 30), (Owner.OPTIMIZER, 4 << 30)):
            self._emit(Owned(t=self._clock, step=self._step, owner=owner, nbytes=nbytes))
        head = Owned(
            t=self._clock,
            step=self._step,
            owner=Owner.WEIGHTS,
            nbytes=250 << 20,
            module="lm_head.weight",
            shape=(32_000, 4096),
            dtype="bfloat16",
        )
        self._emit(head)

    def _forward(self, layer: int) -> list[_Saved]:
        work = self._work
        start = self._clock
        self._compute(f"layers.{layer}", "forward", self._jitter(work.forward_ns))
        saved = []
        for slot in range(work.tensors):
            at = start + (self._clock - start) * (slot + 1) // (work.tensors + 1)
            nbytes = max(512, int(work.tensor_nbytes * self._random.uniform(0.5, 1.5)) // 512 * 512)
            saved.append(self._save(layer, slot, nbytes, at))
        for one in saved:
            self._drain(one)
        self._count()
        return saved

    def _save(self, layer: int, slot: int, nbytes: int, at: int) -> _Saved:
        name, op = list(NAMES.items())[slot % len(NAMES)]
        one = _Saved(id=self._next_id, nbytes=nbytes, module=f"layers.{layer}.{name}", slot=slot, away=0)
        self._next_id += 1
        self._emit(
            StateChange(
                t=at,
                step=self._step,
                id=one.id,
                to=TensorState.LIVE,
                nbytes=nbytes,
                tier=TierName.DEVICE,
                module=one.module,
                shape=(1, nbytes // 2 // 256, 256),
                dtype="bfloat16",
                op=op,
                line=f"gpt/block.py:{40 + slot % len(NAMES)} forward < gpt/model.py:88 forward",
            )
        )
        return one

    def _drain(self, one: _Saved) -> None:
        """Queues the copy out; the compute stream waits when the lane is over a layer behind."""
        behind = self._free[Lane.D2H] - self._clock
        if behind > self._work.forward_ns:
            self._stall(StallCause.DRAIN, behind - self._work.forward_ns, one)
        self._change(one, self._clock, TensorState.LEAVING, TierName.HOST)
        done = self._copy(Lane.D2H, one, self._work.d2h_bytes_per_s, self._clock)
        self._change(one, done, TensorState.AWAY, TierName.HOST)
        self._host += one.nbytes
        if self._work.disk_every and one.id % self._work.disk_every == 0:
            done = self._copy(Lane.DISK_WRITE, one, self._work.disk_bytes_per_s, done)
            self._change(one, done, TensorState.AWAY, TierName.DISK)
            self._host -= one.nbytes
            self._disk += one.nbytes
            one.tier = TierName.DISK
        one.away = done

    def _reload(self, saved: Sequence[_Saved], *, issued: int) -> int:
        done = issued
        for one in saved:
            self._change(one, max(issued, one.away), TensorState.RETURNING, one.tier)
            one.issued = issued
            ready = max(issued, one.away)
            if one.tier is TierName.DISK:
                ready = self._copy(Lane.DISK_READ, one, self._work.disk_bytes_per_s, ready)
            done = self._copy(Lane.H2D, one, self._work.h2d_bytes_per_s, ready)
            one.back = done
            self._change(one, done, TensorState.BACK, TierName.DEVICE)
        return done

    def _backward(self, layer: int, saved: Sequence[_Saved], ready: int) -> None:
        work = self._work
        module = f"layers.{layer}"
        for one in saved:
            how = UseKind.FETCHED if one.issued >= self._clock else UseKind.PREFETCHED
            if one.back > self._clock:
                self._stall(StallCause.RELOAD, one.back - self._clock, one)
            self._emit(StorageUse(t=self._clock, step=self._step, id=one.id, how=how))
        if work.recompute_share:
            self._compute(module, "backward", int(work.forward_ns * work.recompute_share), lane=Lane.RECOMPUTE)
        self._compute(module, "backward", self._jitter(2 * work.forward_ns))
        for one in saved:
            self._change(one, self._clock, TensorState.GONE, None)
            if one.tier is TierName.DISK:
                self._disk -= one.nbytes
            else:
                self._host -= one.nbytes
        self._count()

    def _stall(self, cause: StallCause, d: int, one: _Saved) -> None:
        module = ".".join(one.module.split(".")[:2])
        self._emit(Stall(t=self._clock, d=d, step=self._step, cause=cause, module=module, id=one.id))
        self._clock += d

    def _compute(self, module: str, phase: str, d: int, *, lane: Lane = Lane.COMPUTE) -> None:
        self._emit(Span(t=self._clock, d=d, step=self._step, lane=lane, module=module, phase=phase))
        self._clock += d

    def _copy(self, lane: Lane, one: _Saved, bytes_per_s: float, ready: int) -> int:
        start = max(ready, self._free[lane])
        d = self._jitter(int(one.nbytes / bytes_per_s * 1e9))
        self._emit(Span(t=start, d=d, step=self._step, lane=lane, id=one.id, nbytes=one.nbytes))
        self._free[lane] = start + d
        return start + d

    def _change(self, one: _Saved, at: int, to: TensorState, tier: TierName | None) -> None:
        self._emit(StateChange(t=at, step=self._step, id=one.id, to=to, nbytes=one.nbytes, tier=tier))

    def _count(self) -> None:
        self._counted.append((self._clock, self._step))
        for tier, nbytes in ((TierName.HOST, self._host), (TierName.DISK, self._disk)):
            self._emit(CounterEvent(t=self._clock, step=self._step, tier=tier, nbytes=max(nbytes, 0)))

    def _jitter(self, d: int) -> int:
        return max(1, int(d * self._random.uniform(0.96, 1.06)))

    def _emit(self, event: Event) -> None:
        self.events.append(event)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Saved:
    """A storage between its forward and its backward."""

    id: int
    nbytes: int
    module: str
    slot: int
    away: int
    tier: TierName = TierName.HOST
    issued: int = 0
    back: int = 0


def header(workload: Workload, *, rank: int = 0, world_size: int = 1) -> dict[str, object]:
    moved = workload.layers * workload.tensors * workload.tensor_nbytes
    return {
        "format": FORMAT,
        "version": VERSION,
        "rank": rank,
        "world_size": world_size,
        "origin_unix_ns": 1_760_000_000_000_000_000 + rank * 3 * MILLISECOND,
        "meta": {
            "command": "memo train --model gpt-7b --seq 128k --device 80GiB --host 64GiB",
            "model": f"gpt, {workload.layers} layers (synthetic)",
            "hardware": "synthetic: 1 GPU, PCIe 4.0 x16, 1 NVMe",
            "versions": {"memo": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
            "plan": {
                "alpha": 0.88,
                "predicted_peak_nbytes": {
                    "device": workload.tensors * workload.tensor_nbytes * 2,
                    "host": int(moved * 0.9),
                },
            },
            "budgets": {"device": 8 << 30, "host": 64 << 30, "disk": 1 << 40},
            "link_bytes_per_s": {
                "d2h": workload.d2h_bytes_per_s * 1.05,
                "h2d": workload.h2d_bytes_per_s * 1.05,
                "nvme-write": workload.disk_bytes_per_s * 1.1,
                "nvme-read": workload.disk_bytes_per_s * 1.1,
            },
        },
    }


def write(path: Path, workload: Workload, *, rank: int = 0, world_size: int = 1) -> int:
    """One rank's file; returns its number of events."""
    events = Run(workload, rank=rank).run()
    lines: list[dict[str, object]] = [header(workload, rank=rank, world_size=world_size), *map(to_json, events)]
    lines.append({"k": "end", "t": events[-1].t, "events": len(events), "dropped": 0})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return len(events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in dataclasses.fields(Workload):
        if field.name != "late_layer":
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    parser.add_argument("--late-layer", type=int, default=None)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = vars(parser.parse_args())
    out, ranks = args.pop("out"), args.pop("ranks")
    out.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        path = out / f"trace.rank{rank}.jsonl"
        print(f"{path}: {write(path, Workload(**args), rank=rank, world_size=ranks):,} events")


if __name__ == "__main__":
    main()
