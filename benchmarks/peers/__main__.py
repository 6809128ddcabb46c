"""memo beside its peers on the same model, data, seed and length: step time, memory, the longest sequence, hooks' cost.

    make peers                                          makes the environments of TRL and DeepSpeed, then runs this
    make bench ARMS=peers                               without them those ways say what they lack
    python -m benchmarks.peers [--parts steps,length,hooks] [--families gpt,llama] [--caps 256MiB,1GiB] [--seconds 60]
                               [--rounds 3] [--layers 8] [--hidden 256] [--heads 4] [--tokens 1k] [--most 64k]
                               [--disk-dir DIR] [--threads 1] [--workers 2] [--only "WAY; ..."] [--device cuda --host 96GiB]

Each way is a process of its own, with the interpreter that has its library. A way that cannot run is a row that says why. On
a CPU each has one thread: two that wait for each other show every other process of the machine tenfold.

steps     one length that fits in every way; the processes live side by side and take steps in turn, a round after the other.
          Ratios are of one round, to keep-everything and to full checkpointing, their medians and quartiles are shown.
          memo's automatic plans are given shares of what keep-everything takes above rest; the one named without a share
          gets full checkpointing's peak. hidden: share of the disk's busy time that compute covers, by memo's own report.
length    the longest sequence under a cap, by bisection, a process a try: on a GPU a cap of torch's allocator, on a CPU a
          limit, which the kernel enforces, of the process's data beside what torch takes when it is loaded; weights and
          gradients are inside. memo may use the disk.
hooks     processor time that hooks add to a step of a model whose tensors are small, a saved tensor, over a step without
          hooks; one thread. The copies of these few KiB are in it.

The result file is written anew as it goes. Exits 1 where memo's own rows failed or differ from keep-everything's gradients.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.longest import bisect
from benchmarks.machine import NO_GPU, gpu
from benchmarks.peers.models import Family, Shape
from benchmarks.peers.process import Process
from benchmarks.peers.request import ALPHAS, AUTOMATIC, IDENTITY, INPUTS, SAVED_TENSORS, Request
from benchmarks.peers.ways import (
    ATTENTION,
    ATTENTION_OFFLOADED,
    CHECKPOINTING,
    KEEP,
    SAVE_ON_CPU,
    SELECTIVE,
    TRL,
    libraries,
    peers,
)
from benchmarks.results import ROOT, quartiles, write_result
from memo.units import format_bytes, parse_bytes, parse_tokens

SHARES = (0.25, 0.5, 0.75)
"""Of keep-everything's memory above rest: budgets of further automatic plans."""
BETWEEN = (ATTENTION, ATTENTION_OFFLOADED, SELECTIVE, "checkpointing, every 2nd", "sac_ilp, half", "memo, alpha 1/2")
"""Ways that give memory for time: their longest sequences lie between those of others."""
PLANNED_STEPS = 6
"""Until an automatic plan is in force: three are measured, then it is corrected once or twice."""
MEASURED_STEPS = 4
"""The three that are measured, and the first by plan."""
PART = 16
"""A search ends when the bracket is no wider than this part of the length."""
LEAST = 128
"""Lengths are multiples of it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of one run; the names are those of the command line."""

    parts: list[str]
    families: list[Family]
    caps: list[int]
    rounds: int
    layers: int
    hidden: int
    heads: int | None
    tokens: int
    most: int
    device: str
    dtype: str
    host: str | int
    disk_dir: str
    threads: int
    workers: int
    only: list[str] | None
    trl: str | None
    seconds: float

    def shape(self, family: Family, tokens: int) -> Shape:
        """The model of this family at a length; on a CPU Llama's heads are narrow, which keeps long attention affordable."""
        heads = self.heads or max(1, self.hidden // 64)
        narrow = 16 if family == "llama" and self.device == "cpu" else None
        return Shape(
            family=family, layers=self.layers, hidden=self.hidden, heads=heads, head_dim=narrow, tokens=tokens,
            dtype=self.dtype,
        )  # fmt: skip

    def request(self, way: str, shape: Shape, **others: Any) -> Request:
        """Request to the process of a way."""
        return Request(
            way=way, shape=shape, device=self.device, host_bytes=self.host, disk=self.disk_dir or None, trl=self.trl,
            **others,
        )  # fmt: skip

    def ways(self) -> list[str]:
        """Those asked for, or all that stand for themselves."""
        names = [way.name for way in (*peers(), *libraries())] + [
            *(f"memo, {name}" for name in ALPHAS),
            SAVED_TENSORS,
            INPUTS,
            AUTOMATIC,
        ]
        return [name for name in names if self.only is None or name in (KEEP, CHECKPOINTING) or name in self.only]


class Steps:
    """One model at one length: every way's process, and their steps in turn."""

    def __init__(self, options: Options, shape: Shape) -> None:
        self._options, self._shape = options, shape
        self.rows: list[dict[str, Any]] = []

    def run(self) -> Iterator[list[dict[str, Any]]]:
        """The rows, once, when all rounds are over."""
        with ExitStack() as open_processes, tempfile.TemporaryDirectory() as folder:
            running: dict[str, Process] = {}
            reference = Path(folder) / "gradients.pt"
            peaks: dict[str, int] = {}
            rests: dict[str, int] = {}
            for way, device_bytes in self._ways(peaks, rests):
                process = open_processes.enter_context(
                    Process(
                        self._options.request(_base(way), self._shape, device_bytes=device_bytes),
                        threads=self._options.threads,
                    )
                )
                found = process.started if "failed" in process.started else process.step(_warm_up(way))
                row: dict[str, Any] = {"way": way, "budget_bytes": device_bytes}
                self.rows.append(row)
                if "failed" not in found:
                    row["rest_bytes"] = rests[way] = process.started["rest_bytes"]
                    row["gradient_difference"] = process.gradients(reference)["difference"]
                    peaks[way] = found["peak_bytes"]
                    running[way] = process
                else:
                    row["failed"] = found["failed"]
                    process.close()
            self._rounds(running)
            yield self.rows

    def _ways(self, peaks: dict[str, int], rests: dict[str, int]) -> Iterator[tuple[str, int | None]]:
        for way in self._options.ways():
            if way != AUTOMATIC:
                yield way, None
            elif {KEEP, CHECKPOINTING} <= set(peaks):
                yield way, peaks[CHECKPOINTING]
                for share in SHARES:
                    yield f"{way} {share:.0%}", round(rests[KEEP] + share * (peaks[KEEP] - rests[KEEP]))

    def _rounds(self, running: dict[str, Process]) -> None:
        taken: dict[str, list[dict[str, Any]]] = {way: [] for way in running}
        for _ in range(self._options.rounds):
            for way, process in list(running.items()):
                found = process.step()
                if "failed" in found:
                    self._row(way)["failed"] = found["failed"]
                    del running[way]
                else:
                    taken[way].append(found)
        for way in running:
            self._row(way).update(self._figures(taken[way], taken.get(KEEP, []), taken.get(CHECKPOINTING, [])))

    def _row(self, way: str) -> dict[str, Any]:
        return next(row for row in self.rows if row["way"] == way)

    def _figures(self, steps: list[Any], keep: list[Any], twice: list[Any]) -> dict[str, Any]:
        def to(others: list[Any], kind: str) -> dict[str, float] | None:
            ratios = [one[kind] / other[kind] for one, other in zip(steps, others, strict=False)]
            return quartiles(ratios) if ratios else None

        last = steps[-1]
        return {
            "step_s": quartiles([step["seconds"] for step in steps]),
            "to_keep": to(keep, "seconds"),
            "to_checkpointing": to(twice, "seconds"),
            "processor_to_keep": to(keep, "processor_s"),
            "tokens_per_s": self._shape.tokens / statistics.median(step["seconds"] for step in steps),
            "above_rest_bytes": round(statistics.median(step["above_rest_bytes"] for step in steps)),
            **{name: last[name] for name in ("out_bytes", "back_bytes", "hidden", "loss")},
        }


def _base(way: str) -> str:
    """The way's name without the share of its budget."""
    return AUTOMATIC if way.startswith(AUTOMATIC) else way


def _warm_up(way: str) -> int:
    return PLANNED_STEPS if _base(way) == AUTOMATIC else 2


def lengths(options: Options) -> Iterator[dict[str, Any]]:
    """A row for each way and cap: the longest sequence that trains. BETWEEN is left out unless asked for."""
    ways = [way for way in options.ways() if options.only is not None or way not in BETWEEN]
    with ThreadPoolExecutor(options.workers) as workers:
        searches = [workers.submit(_of_way, options, family, way) for family in options.families for way in ways]
        for search in searches:
            yield from search.result()


def _of_way(options: Options, family: Family, way: str) -> list[dict[str, Any]]:
    first, rows = 1024, []
    steps = MEASURED_STEPS if way == AUTOMATIC else 1
    for cap in options.caps:
        begun = time.monotonic()
        found = bisect(
            functools.partial(_peak, options, family, way, cap, steps),
            cap=cap,
            first=min(first, options.most),
            most=options.most,
            deadline=begun + options.seconds * steps * cap / options.caps[0],
            step=LEAST,
            part=PART,
        )
        first = min(options.most, round(found.fits * 1.9)) if found.fits else first
        seconds = time.monotonic() - begun
        rows.append({"family": family, "way": way, "cap_bytes": cap, "seconds": seconds, **dataclasses.asdict(found)})
        if not found.fits and not _is_memory(found.why):
            break
    return rows


def _peak(options: Options, family: Family, way: str, cap: int, steps: int, tokens: int) -> int | str:
    """Memory of the last of so many steps at this length beside what torch takes, or why there is none."""
    request = options.request(way, options.shape(family, tokens), limit_bytes=cap)
    with Process(request, threads=options.threads) as process:
        started = process.started
        found = started if "failed" in started else process.step(steps)
    if "failed" in found:
        return str(found["failed"])
    return int(found["peak_bytes"]) - (started["loaded_bytes"] if options.device == "cpu" else 0)


def _is_memory(why: str | None) -> bool:
    if why is None or "pin_memory" in why:  # of pinned memory without a GPU
        return False
    return "memory" in why or "budget" in why or "ended with" in why


HOOKED = Shape(family="gpt", layers=8, hidden=128, heads=2, tokens=64)
"""A step that is Python more than kernels; its smallest saved tensors are norms' statistics of 256 bytes."""


def hooks(options: Options) -> list[dict[str, Any]]:
    """Processor time that each way's hooks add, a saved tensor."""
    ways = [KEEP, IDENTITY, SAVE_ON_CPU, TRL, "memo, all moved"]
    rows: list[dict[str, Any]] = []
    with ExitStack() as open_processes:
        running: dict[str, Process] = {}
        for way in ways:
            request = dataclasses.replace(
                options.request(way, HOOKED, counted=False, count=way == KEEP, min_bytes=1024),
                host_bytes="256MiB", disk=None,
            )  # fmt: skip
            process = open_processes.enter_context(Process(request, threads=1))
            found = process.started if "failed" in process.started else process.step(5)
            rows.append({"way": way} | ({"failed": found["failed"]} if "failed" in found else {}))
            if "failed" not in found:
                running[way] = process
        taken: dict[str, list[float]] = {way: [] for way in running}
        for _ in range(max(options.rounds, 15)):
            for way, process in running.items():
                taken[way].append(process.step()["processor_s"])
        saved = running[KEEP].started["saved"] if KEEP in running else None
        for row in rows if saved else ():
            if row["way"] in running and row["way"] != KEEP:
                added = [one - plain for one, plain in zip(taken[row["way"]], taken[KEEP], strict=True)]
                row["us_a_saved_tensor"] = quartiles([seconds / saved * 1e6 for seconds in added])
        return [{"saved_tensors": saved, **row} for row in rows]


HEADING = (
    f"{'step':>10}  {'/ keep':>12}  {'/ ckpt':>6}  {'tokens/s':>8}  {'above rest':>11}  {'moved':>11}"
    "  hidden  gradients"
)


def told_step(row: dict[str, Any]) -> str:
    """One line of the table of steps."""
    if "failed" in row:
        return f"  {row['way']:28} {row['failed'][:110]}"
    unknown = {"median": float("nan"), "spread": float("nan")}
    keep, twice = row["to_keep"] or unknown, row["to_checkpointing"] or unknown
    moved = row["out_bytes"] + row["back_bytes"]
    cells = (
        f"{row['step_s']['median']:8.3f} s", f"{keep['median']:6.2f} ±{keep['spread']:.2f}",
        f"{twice['median']:6.2f}", f"{row['tokens_per_s']:8.0f}", f"{format_bytes(row['above_rest_bytes']):>11}",
        f"{format_bytes(moved) if moved else '-':>11}", "     -" if row["hidden"] is None else f"{row['hidden']:6.1%}",
        "bit for bit" if row["gradient_difference"] == 0 else f"{row['gradient_difference']:.1e}",
    )  # fmt: skip
    return f"  {row['way']:28} {'  '.join(cells)}"


def told_length(row: dict[str, Any]) -> str:
    """One line of the table of lengths."""
    what = f"  {row['family']:6} {format_bytes(row['cap_bytes']):>8}  {row['way']:28}"
    if not row["fits"]:
        return f"{what} {(row['why'] or 'no time was left')[:100]}"
    bound = "" if row["complete"] else "; at least, the time was over"
    return f"{what} {row['fits']:7} tokens, peak {format_bytes(row['peak_bytes'])}, {row['tries']} tries{bound}"


def parsed(arguments: Sequence[str]) -> Options:
    """The options. Exits 2 for what cannot be meant."""
    parser = argparse.ArgumentParser(
        prog="peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(text: str) -> list[str]:
        return [name.strip() for name in text.split(",")]

    def ways(text: str) -> list[str]:
        return [name.strip() for name in text.split(";")]

    parser.add_argument("--parts", type=names, default=["steps", "length", "hooks"])
    parser.add_argument("--families", type=names, default=["gpt", "llama"])
    parser.add_argument("--caps", type=lambda text: [parse_bytes(one) for one in names(text)], default=[256 << 20])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument(
        "--heads", type=int, help="attention heads, of which fewer make long steps shorter (hidden / 64)"
    )
    parser.add_argument("--tokens", type=parse_tokens, default=1024)
    parser.add_argument("--most", type=parse_tokens, default=64 << 10, help="no longer sequence is tried")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default=None, help="bfloat16 on a GPU, else float32"
    )
    parser.add_argument(
        "--host", type=parse_bytes, default=0, help="memo's host memory; 0 on a CPU, where it is the device"
    )
    parser.add_argument("--disk-dir", default=tempfile.gettempdir(), help="memo's disk tier; '' for none")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--workers", type=int, default=None, help="searches at a time: 2 on a CPU, 1 on a GPU")
    parser.add_argument(
        "--only", type=ways, help="these ways, divided by semicolons, beside keep everything and full checkpointing"
    )
    parser.add_argument("--trl", help="TRL's activation_offloading.py, where no trl is installed")
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="for a way's search under the first cap, four times for plans, and in proportion under others",
    )
    args = parser.parse_args(arguments)
    for given, allowed in ((args.parts, {"steps", "length", "hooks"}), (args.families, {"gpt", "llama"})):
        unknown = [name for name in given if name not in allowed]
        if unknown:
            parser.error(f"unknown {unknown[0]!r}; choose from {', '.join(sorted(allowed))}")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} is not a number of 1 or more")
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    args.workers = args.workers or (1 if args.device == "cuda" else 2)
    options = Options(**vars(args))
    unknown = [name for name in options.only or () if name not in dataclasses.replace(options, only=None).ways()]
    if unknown:
        parser.error(
            f"--only: unknown way {unknown[0]!r}; one of: {'; '.join(dataclasses.replace(options, only=None).ways())}"
        )
    return options


def versions() -> dict[str, str]:
    """Of what runs here and of the peers' environments."""
    found = {
        name: importlib.metadata.version(name) for name in ("torch", "transformers") if importlib.util.find_spec(name)
    }
    for name in ("trl", "deepspeed"):
        for path in (ROOT / "build" / "integrations" / name / "lib").glob(f"*/site-packages/{name}-*.dist-info"):
            found[name] = path.name.removeprefix(f"{name}-").removesuffix(".dist-info")
    return found


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    facts = gpu() if options.device == "cuda" else None
    if options.device == "cuda" and facts is None:
        print(
            "peers: --device cuda: no CUDA GPU that this interpreter's torch can use; nothing was run", file=sys.stderr
        )
        return NO_GPU
    body: dict[str, Any] = {
        "options": dataclasses.asdict(options) | {"trl": options.trl and Path(options.trl).name},
        "device": facts,
        "versions": versions(),
        "steps": [],
        "lengths": [],
        "hooks": [],
    }
    write = functools.partial(write_result, "gpu-peers" if options.device == "cuda" else "peers")
    if "steps" in options.parts:
        for family in options.families:
            shape = options.shape(family, options.tokens)
            print(
                f"\n{family}, {shape.layers} layers of {shape.hidden}, {shape.tokens} tokens: steps in turn", flush=True
            )
            print(f"  {'':28} {HEADING}")
            for rows in Steps(options, shape).run():
                body["steps"].append({"shape": dataclasses.asdict(shape), "rows": rows})
                print("\n".join(told_step(row) for row in rows), flush=True)
            write(body)
    if "length" in options.parts:
        print("\nthe longest sequence", flush=True)
        for row in lengths(options):
            body["lengths"].append(row)
            print(told_length(row), flush=True)
            write(body)
    if "hooks" in options.parts:
        body["hooks"] = hooks(options)
        print("\nprocessor time that hooks add, a saved tensor")
        for row in body["hooks"]:
            if "failed" in row:
                print(f"  {row['way']:28} {row['failed'][:110]}")
            elif row["way"] != KEEP:
                cost = row["us_a_saved_tensor"]
                print(f"  {row['way']:28} {cost['median']:6.1f} us ±{cost['spread']:.1f}")
    print(f"\nWrote {write(body)}")
    ours = [row for table in body["steps"] for row in table["rows"] if row["way"].startswith("memo")]
    return 0 if not any("failed" in row or row["gradient_difference"] for row in ours) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
