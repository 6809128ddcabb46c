"""A table of ways to hold a step's activations: its rows as measured, and the figures that follow from several of them.

step          seconds, also as a ratio to keep-everything's and to full checkpointing's
moved         bytes out and back in a step; GB/s is moved over the step's seconds
hidden        1 - (step - compute) / copies. Copies: the seconds that the bytes take on the link alone, one direction
              after the other. Compute: the measured step that computes the same and moves nothing, keep-everything's or
              full checkpointing's; where that did not fit, the other's times the ratio of their FLOPs. Blank where
              neither ran, nothing moved, there is no GPU, or the way computes what neither does.
mfu_causal    as in memo.gpt.arithmetic.flops, without the FLOPs that were done twice
device, host  peaks; a peer's host memory is what torch pinned for it, rounded up to powers of two
gradients     largest relative norm of a parameter's difference to keep-everything's, or to the first way's that ran;
              "bit for bit" where every bit is equal
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from benchmarks.peers.moved import Moved
from benchmarks.peers.ways import CHECKPOINTING, KEEP, Compute
from memo.gpt.arithmetic.flops import flops_per_token, recompute_flops_per_token
from memo.units import format_bytes

if TYPE_CHECKING:
    from memo.gpt.config import GPTConfig
    from memo.machine.link_bandwidth import LinkRates


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way, as it was measured."""

    way: str
    at: str
    """Date and time of day, UTC."""
    compute: Compute
    start_s: float | None = None
    """To put the way around the model: pinning, mostly."""
    step_s: float | None = None
    loss: float | None = None
    moved: Moved = dataclasses.field(default_factory=Moved)
    """In a step."""
    waited_s: float | None = None
    """For copies, in a step, where the way measures it."""
    peak_device_bytes: int = 0
    peak_host_bytes: int | None = None
    gradient_difference: float | None = None
    compared_with: str | None = None
    """The way whose gradients these were compared with."""
    report: str | None = None
    """The way's own report; memo's is `str(manager.report())`."""
    failed: str | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class Table:
    """One model at one length on one machine."""

    model: str
    config: GPTConfig
    rounds: int
    link: LinkRates | None
    """None on a CPU."""
    peak_flops: float | None
    rows: list[Row] = dataclasses.field(default_factory=list)

    @property
    def seq(self) -> int:
        """Tokens in a step."""
        return self.config.max_seq

    def step_of(self, way: str) -> float | None:
        """Seconds of the way of this name, if it ran."""
        return next((row.step_s for row in self.rows if row.way == way), None)

    def compute_s(self, compute: Compute) -> float | None:
        """A step without copies; see `hidden` above."""
        once, twice = self.step_of(KEEP), self.step_of(CHECKPOINTING)
        ratio = self._checkpointing_flops()
        if compute is Compute.ONCE:
            return once or (twice / ratio if twice else None)
        if compute is Compute.TWICE:
            return twice or (once * ratio if once else None)
        return None

    def _checkpointing_flops(self) -> float:
        """FLOPs of full checkpointing over those of keeping everything: it repeats attention's forward too."""
        flops = flops_per_token(self.config, self.seq)
        attention = 2 * self.config.layers * self.config.hidden * self.seq
        return (flops + recompute_flops_per_token(self.config) + attention) / flops

    def figures(self, row: Row) -> dict[str, Any]:
        """The row with what follows from it and the others."""
        measured = {**dataclasses.asdict(row), "compute": row.compute.value}
        if row.step_s is None:
            return measured
        keep, checkpointing = self.step_of(KEEP), self.step_of(CHECKPOINTING)
        return {
            **measured,
            "to_keep": row.step_s / keep if keep else None,
            "to_checkpointing": row.step_s / checkpointing if checkpointing else None,
            "moved_bytes_per_s": (row.moved.out_bytes + row.moved.back_bytes) / row.step_s,
            "compute_s": self.compute_s(row.compute),
            "hidden": self.hidden(row),
            "mfu_causal": self._mfu(row.step_s),
            "bit_equal": None if row.gradient_difference is None else row.gradient_difference == 0,
        }

    def hidden(self, row: Row) -> float | None:
        """Share of the copies' time that the step does not show; negative where waiting costs more than copying would."""
        compute_s = self.compute_s(row.compute)
        if compute_s is None or self.link is None or row.step_s is None:
            return None
        out_s = row.moved.out_bytes / self.link.d2h_bytes_per_s
        copies_s = out_s + row.moved.back_bytes / self.link.h2d_bytes_per_s
        return 1 - (row.step_s - compute_s) / copies_s if copies_s else None

    def _mfu(self, step_s: float) -> float | None:
        if self.peak_flops is None:
            return None
        return flops_per_token(self.config, self.seq) * self.seq / step_s / self.peak_flops

    def body(self) -> dict[str, Any]:
        """For a result file."""
        return {
            "model": self.model,
            "config": dataclasses.asdict(self.config),
            "seq": self.seq,
            "rounds": self.rounds,
            "link": None if self.link is None else dataclasses.asdict(self.link),
            "ways": [self.figures(row) for row in self.rows],
        }

    def heading(self) -> str:
        """The model and its length, and the names of the columns."""
        names = " ".join(name.rjust(width) for name, width in _COLUMNS)
        tiles = f", MLPs in {self.config.mlp_tiles} tiles" if self.config.mlp_tiles > 1 else ""
        what = f"{self.model}, {self.config.layers} layers{tiles}, {self.seq} tokens, {self.rounds} rounds"
        return f"\n{what}\n  {'':24} {names}"

    def line(self, row: Row) -> str:
        """One row for people."""
        if row.step_s is None:
            return f"  {row.way:24} {row.failed}"
        found, moved = self.figures(row), row.moved.out_bytes + row.moved.back_bytes
        cells = (
            _seconds(row.step_s),
            _ratio(found["to_keep"]),
            _ratio(found["to_checkpointing"]),
            format_bytes(moved) if moved else "-",
            f"{found['moved_bytes_per_s'] / 1e9:.1f}" if moved else "-",
            _ratio(found["hidden"]),
            _ratio(found["mfu_causal"]),
            format_bytes(row.peak_device_bytes),
            "-" if row.peak_host_bytes is None else format_bytes(row.peak_host_bytes),
            "bit for bit"
            if found["bit_equal"]
            else "-"
            if found["bit_equal"] is None
            else f"{row.gradient_difference:.1e}",
        )
        padded = (cell.rjust(width) for cell, (_, width) in zip(cells, _COLUMNS, strict=True))
        return f"  {row.way:24} {' '.join(padded)}"


_COLUMNS = (
    ("step", 10),
    ("/keep", 6),
    ("/ckpt", 6),
    ("moved", 10),
    ("GB/s", 6),
    ("hidden", 6),
    ("mfu", 5),
    ("device", 10),
    ("host", 10),
    ("gradients", 11),
)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.2f} s"
