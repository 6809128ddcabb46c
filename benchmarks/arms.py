"""The arms of gpu-bench: each measures, prints as it goes and writes its result file anew after each row."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_allocator, gpu_hf, gpu_million
from benchmarks.comparison import Setup, compare
from benchmarks.gpu_bench import Case, Options
from benchmarks.gpu_plans import ALPHAS, alphas, at_alphas, plans
from benchmarks.link_use import link_use
from benchmarks.longest import longest
from benchmarks.peers.ways import Way, peers
from benchmarks.results import ROOT, newest_result, write_result
from benchmarks.table import Table
from memo.gpt.config import GPTConfig, preset


class Bench:
    """Runs arms with these options on this device."""

    def __init__(self, options: Options, gpu_facts: dict[str, Any]) -> None:
        self._told: set[Path] = set()
        self._options, self._facts = options, gpu_facts
        index = torch.cuda.current_device() if options.device == "cuda" else None
        self._device = torch.device(options.device, index) if index is not None else torch.device("cpu")

    def run(self, arm: str) -> bool:
        """True where the arm did what it should: memo's own rows all ran."""
        if arm == "allocator":
            return self._allocator()
        if arm == "1m":
            return self._million()
        if arm == "length":
            return self._length()
        if arm == "plan":
            return self._plans()
        if arm == "alpha":
            return self._alphas()
        if arm == "hf":
            return self._hugging_face()
        return self._table(arm)

    def _written(self, arm: str) -> Callable[[dict[str, Any]], Path]:
        """Writes the arm's body so far; nothing on a CPU."""

        def write(body: dict[str, Any]) -> Path:
            if self._options.device == "cpu":
                return Path(f"gpu-bench-{arm}.json")
            path = write_result(f"gpu-bench-{arm}", {"device": self._facts, **body})
            if path not in self._told:
                print(f"Writes {path}", flush=True)
            self._told.add(path)
            return path

        return write

    def _setup(self, case: Case) -> Setup:
        return Setup(model=case.model, device=self._device, rounds=case.rounds)

    def _config(self, case: Case, **others: Any) -> GPTConfig:
        if self._options.layers is not None:
            others["layers"] = self._options.layers[0]
        if self._options.mlp_tiles is not None:
            others["mlp_tiles"] = self._options.mlp_tiles
        return preset(case.model, max_seq=case.seq, **others)

    def _ways(self, of_memo: Sequence[float], host: str) -> list[Way]:
        """Fixed ways, memo's at these alphas last, of which `--ways` may name some."""
        return self._options.chosen([*peers(trl=self._options.trl), *at_alphas(of_memo, host)])

    def _table(self, arm: str) -> bool:
        done: list[dict[str, Any]] = []
        write = self._written(arm)
        ways = self._ways((1.0,), self._options.host_of("64GiB"))
        for case in self._options.cases(arm):

            def so_far(table: Table) -> None:
                write({"cases": [*done, table.body()]})

            setup, config = self._setup(case), self._config(case)
            done.append(compare(setup, config, ways, so_far).body())
            if self._device.type == "cuda":
                done[-1]["link_use"] = link_use(setup, config, self._options.host_of("64GiB"))
                write({"cases": done})
        return _ours_ran(done)

    def _plans(self) -> bool:
        cases, host = self._options.cases("plan"), self._options.host_of("96GiB")
        configs = [self._config(case) for case in cases]
        found = plans(self._setup(cases[0]), configs, self._ways((0.0, 1.0), host), host, written=self._written("plan"))
        return _ours_ran(found) and all("failed" not in case["plan"] for case in found)

    def _alphas(self) -> bool:
        case = self._options.cases("alpha")[0]
        ways = self._ways(ALPHAS, self._options.host_of("96GiB"))
        found = alphas(self._setup(case), self._config(case), ways, written=self._written("alpha"))
        return _ours_ran([found])

    def _hugging_face(self) -> bool:
        options, write, done = self._options, self._written("hf"), list[dict[str, Any]]()
        ways = options.chosen(gpu_hf.ways(options.disk))
        earlier = {} if options.resume is None else json.loads(options.resume.read_text())
        predictions = newest_result("hf-predicted", ROOT / "benchmarks" / "results") or {}
        for case in options.cases("hf"):
            layers = None if options.layers is None else options.layers[0]
            fields = gpu_hf.SMALL if options.small else {}
            task = gpu_hf.Task(model=case.model, tokens=case.seq, layers=layers, fields=fields)
            body = gpu_hf.measure(
                task,
                self._device,
                ways,
                case.rounds,
                lambda body: write({"cases": [*done, body]}),
                done=[row for row in _rows_of(earlier, task) if row["failed"] is None],
                predicted=_rows_of(predictions, task),
                compare_bits=not options.no_bits,
            )
            done.append(body)
        return _ours_ran(done)

    def _length(self) -> bool:
        options = self._options
        case = Case(model=options.model or "350m", seq=max(options.seq or [1 << 20]), rounds=1)
        write = self._written("length")
        rows = longest(
            self._setup(case),
            lambda seq: self._config(dataclasses.replace(case, seq=seq), positions="rotary"),
            [*peers(trl=options.trl), *at_alphas((1.0, 0.0), options.host_of("96GiB"), device=options.cap)],
            cap=options.cap,
            most=case.seq,
            seconds=60 * options.minutes,
            written=lambda rows: write({"model": case.model, "cap_bytes": options.cap, "ways": rows}),
        )
        return all(row["fits"] for row in rows if row["way"].startswith("memo"))

    def _million(self) -> bool:
        options = self._options
        request = gpu_million.available(
            seq=max(options.seq or [1 << 20]),
            depths=options.layers or [24, 12, 8, 6, 4],
            seconds=60 * options.minutes,
            host=options.host,
            gpu=options.gpu,
            model=options.model or "350m",
        )
        return gpu_million.run(request, self._device, self._written("1m"))

    def _allocator(self) -> bool:
        return gpu_allocator.main(["--rounds", "3"]) == 0


def _rows_of(body: dict[str, Any], task: gpu_hf.Task) -> list[dict[str, Any]]:
    """Rows of the same model, depth and length in a result file."""
    same = (task.model, task.tokens, task.layers)
    cases = (case for case in body.get("cases", ()) if (case["model"], case["tokens"], case["layers"]) == same)
    return [row for case in cases for row in case["ways"]]


def _ours_ran(tables: list[dict[str, Any]]) -> bool:
    return not any(row["failed"] for table in tables for row in table["ways"] if row["way"].startswith("memo"))
