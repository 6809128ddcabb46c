"""What the shipped code never does with a file: unpickle it, load it as a pickle of any kind, or run what it says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREES = ("memo", "swap", "allocator", "mip", "kernels", "benchmarks", "examples", "tests")
SHIPPED = TREES[:5]
KNOWN = {
    "memo/out_of_memory/snapshot.py": "unpickles lists, dicts, texts and numbers, in a process of its own",
    "memo/gpt/checkpoint/plain_reader.py": "unpickles what torch writes to .metadata, by the names of its classes",
    "swap/recompute/tape/plan.py": "compiles the replay that it has written itself, of a step that ran",
}


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def unsafe_loads(source: str) -> list[int]:
    """Lines that call torch.load, under any name, without weights_only=True."""
    tree = ast.parse(source)
    names = {"torch.load", "torch.serialization.load"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.serialization"):
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "load"}
        if isinstance(node, ast.Import):
            names |= {f"{alias.asname}.load" for alias in node.names if alias.name == "torch" and alias.asname}

    def safe(call: ast.Call) -> bool:
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        value = given.get("weights_only")
        return isinstance(value, ast.Constant) and value.value is True

    return [call.lineno for call in _calls(tree) if _called(call) in names and not safe(call)]


def executing(source: str) -> list[str]:
    """Calls that run what they are given, and uses of pickle and its like."""
    tree = ast.parse(source)
    found = [
        f"line {call.lineno}: {_called(call)}"
        for call in _calls(tree)
        if _called(call) in ("eval", "exec", "os.system", "os.popen", "marshal.loads", "marshal.load")
        or any(
            key.arg == "shell" and not (isinstance(key.value, ast.Constant) and not key.value.value)
            for key in call.keywords
        )
    ]
    names = ("pickle", "dill", "cloudpickle", "shelve", "yaml", "marshal", "joblib")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [f"line {node.lineno}: {alias.name}" for alias in node.names if alias.name.split(".")[0] in names]
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in names:
            found.append(f"line {node.lineno}: {node.module}")
    return found


def _sources(*tops: str) -> list[Path]:
    return [path for top in tops for path in sorted((ROOT / top).rglob("*.py")) if "node_modules" not in path.parts]


def test_torch_load_takes_weights_only() -> None:
    found = {str(path.relative_to(ROOT)): unsafe_loads(path.read_text()) for path in _sources(*TREES)}
    assert not {name: lines for name, lines in found.items() if lines}


def test_nothing_that_is_shipped_runs_or_unpickles_what_it_reads() -> None:
    found = {path.relative_to(ROOT).as_posix(): executing(path.read_text()) for path in _sources(*SHIPPED)}
    assert {name for name, lines in found.items() if lines} == KNOWN.keys()


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(f)",
        "import torch\ntorch.load(f, weights_only=False)",
        "import torch\ntorch.load(f, None, None, weights_only=flag)",
        "from torch import load\nload(f)",
        "from torch import load as read\nread(f)",
        "import torch as t\nt.load(f)",
    ],
)
def test_each_way_to_load_anything_is_seen(source: str) -> None:
    assert unsafe_loads(source) == [2]


@pytest.mark.parametrize(
    "source", ["eval(x)", "import pickle", "from pickle import loads", "f(shell=True)", "os.system(x)", "import yaml"]
)
def test_each_way_to_run_what_is_read_is_seen(source: str) -> None:
    assert len(executing(source)) == 1
    assert not unsafe_loads("import torch\ntorch.load(f, weights_only=True)")
