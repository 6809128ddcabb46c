"""Readers of files and texts that anyone may have written, each with inputs that it accepts and what is then done with them.

An input passes if its reader ends, within two seconds of processor time and a GiB of memory, with a value or a MemoError,
and if the commands that people give such a file end with an exit code of the contract, with at most one line on standard
error, no character that a terminal obeys and no HTML of the input in a page.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import io
import json
import pickle
import pickletools
import resource
import time
import unicodedata
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from activation_problems import random_problem, with_codes

from memo.cli.main import main
from memo.errors import ExitCode, MemoError
from memo.mip.inputs import PRESETS
from tests.fuzz.mutations import BYTES, CANARY, GZIPPED_LINES, JSON, LINES, WORDS, Shape

ROOT = Path(__file__).parents[2]
MOST_S = 2.0
MOST_BYTES = 1 << 30
MOST_CHARACTERS = 4000
"""Of the line on standard error."""
APART_OF = 64
"""Raw pickles: one in so many is read in a process of its own whatever is in it."""
FEW = 12
"""Tuples of a pickle: hashing so many that share each other takes no time."""
ENDS = frozenset(ExitCode) - {ExitCode.INTERRUPTED}


class Broken(AssertionError):
    """An input did something else than it may."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A reader, and what its inputs look like."""

    name: str
    seeds: Callable[[], Sequence[bytes]]
    """Inputs that it accepts."""
    shape: Shape
    file: str
    """Name that the input's file has."""
    read: Callable[[Path], object] | None = None
    """What must end with a value or a MemoError; None: the commands read."""
    commands: tuple[str, ...] = ()
    """Run on files that `read` accepts: `{}` is the file, and `{page}` a file to write."""
    suits: Callable[[str, Any], bool] = lambda command, value: True
    """Whether a command is run on what `read` gave."""
    prepared: Callable[[bytes], bytes] = bytes
    """The file's bytes, of the input's."""
    beside: Callable[[Path], object] | None = None
    """Makes what lies beside the input's file, once for a folder."""


def examine(reader: Reader, data: bytes, folder: Path, *, commands: bool = True) -> bool:
    """Gives one input to a reader. Returns whether it was accepted.

    Args:
        reader: the reader.
        data: the input.
        folder: where its file is made, which is the only one in use there.
        commands: whether commands run, too, on what the reader accepts.

    Raises:
        Broken: the input did something else than it may.
        BaseException: what the reader raised beside MemoErrors.
    """
    path = folder / reader.file
    if reader.beside is not None and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        reader.beside(path.parent)
    path.write_bytes(reader.prepared(data))
    begun, before = time.process_time(), _peak_bytes()
    accepted, value = (True, None) if reader.read is None else _reads(reader.read, path)
    if accepted and (commands or reader.read is None):
        for command in reader.commands:
            if reader.suits(command, value):
                _run(command, path, folder / "page.html")
    seconds, grown = time.process_time() - begun, _peak_bytes() - before
    if seconds > MOST_S:
        raise Broken(f"{seconds:.1f} s of processor time")
    if grown > MOST_BYTES:
        raise Broken(f"{grown >> 20} MiB more memory")
    return accepted


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _reads(read: Callable[[Path], object], path: Path) -> tuple[bool, object]:
    try:
        return True, read(path)
    except MemoError as error:
        if not str(error).strip():
            raise Broken(f"{type(error).__name__} without a word") from error
        return False, None


def _run(command: str, path: Path, page: Path) -> None:
    page.unlink(missing_ok=True)
    out, errors = io.StringIO(), io.StringIO()
    arguments = [
        word.replace("{page}", str(page)).replace("{beside}", str(path.parent)).replace("{}", str(path))
        for word in command.split()
    ]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main(arguments)
    said = errors.getvalue()
    if code not in ENDS:
        raise Broken(f"memo {command}: exit code {code}")
    if said.count("\n") > 1 or (code == ExitCode.FAILURE and not said.strip()) or len(said) > MOST_CHARACTERS:
        raise Broken(f"memo {command}: exit code {code} with {said.count(chr(10))} lines, {len(said)} characters")
    for text in (out.getvalue(), said):
        acting = [char for char in set(text) - {"\n"} if unicodedata.category(char) in ("Cc", "Cf", "Cs")]
        if acting:
            raise Broken(f"memo {command}: {acting[0]!a} reached the terminal")
    if page.exists() and CANARY in page.read_text(encoding="utf-8"):
        raise Broken(f"memo {command}: HTML of the input is in the page")


# What lies in the examples below is written by the project's own writers, so that no format's change leaves them behind.


@functools.cache
def _activation_plan() -> Any:
    from memo.mip.activation import Pipeline, solve_problem

    return solve_problem(random_problem(2, layers=4, classes=2, pipeline=Pipeline(stages=2, microbatches=3)))


@functools.cache
def _coded_plan() -> Any:
    from memo.mip.activation import solve_problem

    return solve_problem(with_codes(random_problem(2, layers=3, classes=2), 2))


def _activation_plans() -> list[bytes]:
    from memo.mip.activation import plan_to_json

    return [plan_to_json(plan).encode() for plan in (_activation_plan(), _coded_plan())]


def _profiles() -> list[bytes]:
    from memo.mip.activation import profile_to_json

    return [profile_to_json(plan.problem.profile).encode() for plan in (_activation_plan(), _coded_plan())]


def _machines() -> list[bytes]:
    from memo.mip.activation.files import hardware_to_json

    return [hardware_to_json(PRESETS[name]).encode() for name in ("h100", "gb200")]


_PROBLEM = b"""id,lower,upper,size,alignment,group,tag
a,0,4,1024,512,layers.0.forward,weights
b,1,3,2048,1,layers.0.forward,
c,3,9,512,256,,saved
"""


def _address_problems() -> list[bytes]:
    from memo.mip.address import problem_to_json, read_problem

    return [_PROBLEM, problem_to_json(_parsed(read_problem, _PROBLEM)).encode()]


@functools.cache
def _address_plans() -> list[bytes]:
    from memo.mip.address import Method, plan_to_json, read_problem, solve

    plan = solve(_parsed(read_problem, _PROBLEM), method=Method.MIP)
    return [plan_to_json(plan).encode()]


def _parsed(read: Callable[[str], Any], data: bytes) -> Any:
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".csv") as file:
        file.write(data)
        file.flush()
        return read(file.name)


@functools.cache
def _traces() -> list[bytes]:
    import tempfile

    from memo.mip.simulate import simulate, stage_events
    from memo.trace import TraceRecorder

    simulation = simulate(_activation_plan(), _activation_plan().problem)
    events = stage_events(simulation.stages[0], end_s=simulation.step_s)
    meta = {"model": "tiny", "plan": {"predicted_peak_nbytes": {"host": 5}, "limits": "d2h"}, "budgets": {"host": 9}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        recorder = TraceRecorder(path, rank=0, world_size=2, meta=meta, capacity=1000)
        for event in events[:60]:
            recorder.emit(event)
        recorder.close()
        whole = path.read_bytes()
    owned = b"""{"k":"owned","t":0,"step":4,"owner":"weights","nbytes":2048}"""
    short = [*whole.splitlines()[:9], owned, *whole.splitlines()[-3:-1]]
    return [whole, b"\n".join(short) + b"\n"]


_SYNTHETIC = b"""{"format":"memo-trace","version":1,"rank":0,"world_size":1,"origin_unix_ns":0,"meta":{}}
{"k":"step","t":0,"step":4,"phase":"begin"}
{"k":"owned","t":0,"step":4,"owner":"weights","nbytes":2048}
{"k":"counter","t":1,"step":4,"tier":"device","nbytes":3072}
{"k":"step","t":2,"step":4,"phase":"end"}
{"k":"end","t":3,"events":4,"dropped":0}
"""


def _all_traces() -> list[bytes]:
    return [*_traces(), _SYNTHETIC]


_DOCTOR = {
    "gpus": [
        {
            "memory_total_bytes": 80 << 30,
            "link": {
                "d2h_bytes_per_s": 2e10,
                "h2d_bytes_per_s": 2e10,
                "d2h_together_bytes_per_s": 1e10,
                "h2d_together_bytes_per_s": 1e10,
            },
        }
    ],
    "host": {"memory_available_bytes": 1 << 40},
    "disks": [{"rates": {"write_bytes_per_s": 1e9, "read_bytes_per_s": 2e9}}],
    "collectives": {
        "fits": [
            {
                "collective": name,
                "within_node": nodes == 1,
                "ranks": 8 * nodes,
                "nodes": nodes,
                "ranks_per_node": 8,
                "fewest_ranks_per_node": 8,
                "times": [{"message_bytes": 1 << 30, "median_s": 0.1}],
                "latency_s": 4e-5,
                "bytes_per_s": 2e11,
            }
            for name, nodes in (("all_gather", 1), ("reduce_scatter", 4), ("send", 1))
        ]
    },
}


def _with_rates(path: Path) -> object:
    from memo.mip.activation import read_hardware
    from memo.mip.activation.files import hardware_to_json
    from memo.mip.inputs import with_measured_rates

    machine = with_measured_rates(PRESETS["a800"], path)
    path.with_name("again.json").write_text(hardware_to_json(machine))
    if read_hardware(path.with_name("again.json")) != machine:
        raise Broken("the machine does not come back from its file")
    return machine


def _comes_back(read: Callable[[Any], Any], write: Callable[[Any], str], path: Path) -> object:
    value = read(path)
    again = path.with_name("again.json")
    again.write_text(write(value))
    if read(again) != value:
        raise Broken("it does not come back from its file")
    return value


def _profile(path: Path) -> object:
    from memo.mip.activation import profile_to_json, read_profile

    return _comes_back(read_profile, profile_to_json, path)


def _hardware(path: Path) -> object:
    from memo.mip.activation import read_hardware
    from memo.mip.activation.files import hardware_to_json

    return _comes_back(read_hardware, hardware_to_json, path)


def _activations(path: Path) -> object:
    from memo.mip.activation import plan_to_json, read_activation_plan

    return _comes_back(read_activation_plan, plan_to_json, path)


def _is_short(command: str, plan: Any) -> bool:
    """`memo simulate` runs each layer of each microbatch: a tenth of a millisecond, and ten times that under the fuzzer."""
    return not command.startswith("simulate") or len(plan.layers) * plan.problem.pipeline.microbatches <= 500


def _problem(path: Path) -> object:
    from memo.allocator import Segments, simulate_caching, trace_of
    from memo.mip.address import problem_to_json, read_problem

    problem = read_problem(path)
    _comes_back(read_problem, problem_to_json, path)
    for segments in Segments:
        simulate_caching(trace_of(problem), segments)
    return problem


def _address(path: Path) -> object:
    from memo.mip.address import check, plan_to_json, read_plan
    from memo.trace import address_plan_drawings

    plan = _comes_back(read_plan, plan_to_json, path)
    if check(plan) is None:  # type: ignore[arg-type]
        json.dumps(address_plan_drawings(plan, title=path.name), allow_nan=False)  # type: ignore[arg-type]
    return plan


def _cluster(path: Path) -> object:
    from memo.mip.cluster import read_cluster

    return read_cluster(path)


def _trace(path: Path) -> object:
    from memo.trace import build_report, chrome_trace, page_data, read_traces, render_page

    traces = read_traces([path])
    report = build_report(traces)
    json.dumps(report.to_json(), allow_nan=False)
    json.dumps(chrome_trace(traces), allow_nan=False)
    if CANARY in render_page(page_data(report), title="x"):
        raise Broken("HTML of the input is in the page")
    return report


def _configuration(path: Path) -> object:
    from memo.hugging_face import configuration_from

    return configuration_from(str(path))


_CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    | {
        "num_key_value_heads": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "architectures": ["LlamaForCausalLM"],
    },
    {
        "model_type": "gemma3",
        "text_config": {"num_hidden_layers": 4, "hidden_size": 32},
        "vision_config": {"hidden_size": 16},
    },
    {"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_labels": 3},
    {"model_type": "gemma2", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "id2label": {"0": "a"}},
    {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "hidden_size": 64},
)


def _checkpoint_beside(folder: Path) -> None:
    (folder / "__0_0.distcp").write_bytes(b"weights")
    (folder / ".metadata").write_bytes(b"names")


_CHECKPOINT = {
    "format": "memo-checkpoint",
    "version": 1,
    "step": 200,
    "settings": {"model": {"layers": 2}, "seq": 64, "batch": 1},
    "files": {".metadata": 5, "__0_0.distcp": 7},
}


def _checkpoint(path: Path) -> object:
    from memo.gpt.checkpoint.directory import Checkpoint, newest

    newest(path.parent.parent)
    return Checkpoint.at(path.parent)


_SNAPSHOT = {
    "segments": [
        {
            "device": 0,
            "address": 0,
            "total_size": 4096,
            "blocks": [
                {
                    "address": 0,
                    "size": 1024,
                    "state": "active_allocated",
                    "frames": [{"name": "forward", "filename": "m.py", "line": 4}],
                },
                {"address": 1024, "size": 1024, "state": "inactive", "frames": []},
            ],
        }
    ],
    "device_traces": [
        [
            {"action": "segment_alloc", "addr": 0, "size": 4096, "stream": 0, "frames": []},
            {"action": "alloc", "addr": 0, "size": 1024, "stream": 0, "frames": []},
            {
                "action": "alloc",
                "addr": 2048,
                "size": 512,
                "frames": [{"name": "backward", "filename": "g.py", "line": 1}],
            },
            {"action": "free_completed", "addr": 2048, "size": 512, "frames": []},
            {"action": "oom", "size": 9999, "device_free": 100, "frames": []},
        ]
    ],
}


def _pickled(data: bytes) -> bytes:
    try:
        return pickle.dumps(json.loads(data))
    except (ValueError, RecursionError):
        return data


def _held(path: Path) -> object:
    from memo.out_of_memory import explain_memory, held_in_snapshot, read_snapshot

    return explain_memory(held_in_snapshot(read_snapshot(path))).to_json()


def _held_apart(path: Path) -> object:
    """In a process of its own, as `memo explain-oom` does, what may end or stop the interpreter; else here: 0.3 ms for 10.

    The reader runs nothing that a snapshot names, and the limit of memory is the other process's.
    """
    from memo.errors import TraceError
    from memo.out_of_memory import explain_apart, held_in_snapshot, read_snapshot

    data = path.read_bytes()
    if _nests(data) or zlib.crc32(data) % APART_OF == 0:
        return explain_apart(path)
    _, hard = before = resource.getrlimit(resource.RLIMIT_AS)
    used_pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (used_pages * resource.getpagesize() + (MOST_BYTES >> 1), hard))
    try:
        return held_in_snapshot(read_snapshot(path))
    except (MemoryError, RecursionError):  # which end the other process
        raise TraceError("reading it takes too much memory, or does not end") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _nests(data: bytes) -> bool:
    """Whether a pickle makes more than a few of the containers that are hashed, whose nesting has no bound in CPython."""
    made = 0
    with contextlib.suppress(Exception):  # it is damaged from here on, and its reader stops here too
        for opcode, _, _ in pickletools.genops(data):
            made += opcode.name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET")
    return made > FEW


def _metrics(path: Path) -> object:
    from memo.gpt.train.metrics import MetricsFile

    with MetricsFile(path, after_step=3) as file:
        return file


def _documents(path: Path) -> object:
    from memo.gpt.data.documents import read_documents

    return sum(map(len, read_documents([path])))


def _parquet() -> list[bytes]:
    import pyarrow
    import pyarrow.parquet

    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two words", None]}), sink)
    return [sink.getvalue()]


_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {"id": 3, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "unk_token": "u", "vocab": {"u": 0, "a": 1, "b": 2, "ab": 4}, "merges": [["a", "b"]]},
}


def _tokenizer(path: Path) -> object:
    from memo.gpt.data.tokenizer import FileTokenizer

    return [tokens.tolist() for tokens in FileTokenizer(path).encode(["ab a", ""])]


def _kind(path: Path) -> object:
    from memo.cli.terminal.file_kinds import kind_of

    return kind_of(path)


def _texts(path: Path) -> object:
    """Sizes, counts, times and networks as they stand on command lines and in cluster files."""
    from memo.errors import UsageError
    from memo.mip.inputs import Network, hardware_preset, parse_network
    from memo.units import parse_bytes, parse_duration_s, parse_tokens

    text = path.read_bytes().decode(errors="surrogateescape")
    for parse in (
        parse_bytes,
        parse_tokens,
        parse_duration_s,
        hardware_preset,
        lambda word: parse_network(word, Network()),
    ):
        with contextlib.suppress(UsageError):
            parse(text)
    return text


def _json_seed(*documents: Any) -> Callable[[], list[bytes]]:
    return lambda: [json.dumps(document).encode() for document in documents]


READERS: dict[str, Reader] = {
    reader.name: reader
    for reader in (
        Reader(
            name="activation-plan",
            seeds=_activation_plans,
            shape=JSON,
            file="plan.json",
            read=_activations,
            commands=("show {}", "show {} --json", "check {}", "simulate {}"),
            suits=_is_short,
        ),
        Reader(
            name="address-plan",
            seeds=_address_plans,
            shape=JSON,
            file="plan.json",
            read=_address,
            commands=("show {}", "check {}"),
        ),
        Reader(name="address-problem", seeds=lambda: _address_problems()[1:], shape=JSON, file="p.json", read=_problem),
        Reader(name="buffers-csv", seeds=lambda: [_PROBLEM], shape=WORDS, file="p.csv", read=_problem),
        Reader(name="profile", seeds=_profiles, shape=JSON, file="profile.json", read=_profile),
        Reader(name="hardware", seeds=_machines, shape=JSON, file="machine.json", read=_hardware),
        Reader(
            name="cluster",
            seeds=lambda: [(ROOT / "examples" / "two_clusters.json").read_bytes()],
            shape=JSON,
            file="cluster.json",
            read=_cluster,
        ),
        Reader(name="doctor", seeds=_json_seed(_DOCTOR), shape=JSON, file="doctor.json", read=_with_rates),
        Reader(
            name="trace",
            seeds=_all_traces,
            shape=LINES,
            file="trace.jsonl",
            read=_trace,
            commands=("trace stats {}", "trace diff {} {}", "explain-oom {}"),
        ),
        Reader(
            name="trace-gz",
            seeds=lambda: [gzip.compress(text, mtime=0) for text in _all_traces()],
            shape=GZIPPED_LINES,
            file="trace.jsonl.gz",
            read=_trace,
        ),
        Reader(
            name="configuration",
            seeds=_json_seed(*_CONFIGURATIONS),
            shape=JSON,
            file="config.json",
            read=_configuration,
        ),
        Reader(
            name="checkpoint",
            seeds=_json_seed(_CHECKPOINT),
            shape=JSON,
            file="step-00000200/meta.json",
            read=_checkpoint,
            beside=_checkpoint_beside,
        ),
        Reader(
            name="snapshot", seeds=_json_seed(_SNAPSHOT), shape=JSON, file="s.pickle", read=_held, prepared=_pickled
        ),
        Reader(
            name="snapshot-bytes",
            seeds=lambda: [pickle.dumps(_SNAPSHOT, protocol=protocol) for protocol in (2, 4)],
            shape=BYTES,
            file="s.pickle",
            read=_held_apart,
        ),
        Reader(
            name="metrics",
            seeds=lambda: [b'{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.0}\n{"step": 9, "loss": 2.0}\n'],
            shape=LINES,
            file="metrics.jsonl",
            read=_metrics,
        ),
        Reader(
            name="documents",
            seeds=lambda: [b'{"text": "one", "id": 4}\n{"text": "two"}\n'],
            shape=LINES,
            file="d.jsonl",
            read=_documents,
        ),
        Reader(
            name="documents-gz",
            seeds=lambda: [gzip.compress(b'{"text": "one", "id": 4}\n{"text": "two"}\n', mtime=0)],
            shape=GZIPPED_LINES,
            file="d.jsonl.gz",
            read=_documents,
        ),
        Reader(name="documents-parquet", seeds=_parquet, shape=BYTES, file="d.parquet", read=_documents),
        Reader(name="tokenizer", seeds=_json_seed(_TOKENIZER), shape=JSON, file="tokenizer.json", read=_tokenizer),
        Reader(
            name="file-kind",
            seeds=lambda: [*_address_problems(), b"\x80\x04.", b"\x1f\x8b", b'{"step": 1, "loss": 2}', b"<svg>"],
            shape=BYTES,
            file="any",
            read=_kind,
        ),
        Reader(
            name="sizes",
            seeds=lambda: [b"80GiB", b"1.5m", b"60s", b"8x400Gb", b"h100"],
            shape=WORDS,
            file="text",
            read=_texts,
        ),
    )
}
