"""Private names of torch: each stands in memo/torch_private.py alone, and this torch has it."""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memo import torch_private
from memo.torch_private import AOT_AUTOGRAD, ATTRIBUTES, DYNAMO, NAMES, PrivateUse, found, place

ROOT = Path(__file__).parent.parent
HOME = ROOT / "memo" / "torch_private.py"
TOPS = ("memo", "swap", "allocator", "mip", "kernels")
SOURCES = {
    path: path.read_text()
    for top in TOPS
    for path in sorted((ROOT / top).rglob("*.py"))
    if "node_modules" not in path.parts
}
OF_ATTRIBUTES = {*ATTRIBUTES, "_version", "_base"}
OF_OTHERS = {
    "argparse": {"_ArgumentGroup"},
    "named tuples": {"_replace"},
    "locks": {"_at_fork_reinit", "_is_owned"},
    "os": {"_exit"},
    "pickle": {"_Unpickler"},
    "sys": {"_getframe"},
    "IPython": {"_repr_html_"},
    "transformers": {"_attn_implementation", "_embeddings", "_from_config"},
    "DeepSpeed": {"_z3_leaf"},
}
"""Private names that are not torch's."""
PRIVATE = re.compile(r"_(?!_)\w*")
PRIVATE_MODULE = re.compile(r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*")
BY_NAME = ("getattr", "setattr", "hasattr", "delattr")


def own_names(trees: list[ast.AST]) -> set[str]:
    """Private names that memo gives to its own functions, classes, attributes, fields and variables."""
    names: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Assign) and "__slots__" in {getattr(target, "id", None) for target in node.targets}:
            names |= {part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)}
    return names


def violations(source: str, own: set[str]) -> list[str]:
    """What a source has of torch's private names, but attributes that have a row and operators."""
    nodes = list(ast.walk(ast.parse(source)))
    roots, operators, said = set(), set(), []
    for node in nodes:
        if isinstance(node, ast.Import):
            roots |= {(name.asname or name.name).split(".")[0] for name in node.names if is_torch(name.name)}
            said += [name.name for name in node.names if PRIVATE_MODULE.fullmatch(name.name)]
        elif isinstance(node, ast.ImportFrom) and is_torch(node.module or ""):
            roots |= {name.asname or name.name for name in node.names}
            said += [path for name in node.names if PRIVATE_MODULE.fullmatch(path := f"{node.module}.{name.name}")]
        elif isinstance(node, ast.Assign) and "torch.ops." in source and "torch.ops." in ast.unparse(node.value):
            operators |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    texts = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            said += _at(node.value, node.attr, roots, operators, own)
        elif isinstance(node, ast.Call) and _by_name(node.func) and isinstance(node.args[1], ast.Constant):
            said += _at(node.args[0], node.args[1].value, roots, operators, own)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            said += [node.value] if PRIVATE_MODULE.fullmatch(node.value) else []
    return said


def _at(owner: ast.expr, name: str, roots: set[str], operators: set[str], own: set[str]) -> Iterator[str]:
    if not PRIVATE.fullmatch(name) or name in OF_ATTRIBUTES:
        return
    chain = ast.unparse(owner)
    root = chain.partition(".")[0]
    if root in operators or chain.startswith("torch.ops"):
        return
    if root in roots or not any(name in known for known in (own, *OF_OTHERS.values())):
        yield f"{chain}.{name}"


def _by_name(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and function.id in BY_NAME


def is_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def is_here(use: PrivateUse) -> bool:
    return use.build != "cuda" or torch.version.cuda is not None


@pytest.mark.parametrize("name", NAMES)
def test_this_torch_has_each_name(name: str) -> None:
    module, path, use = NAMES[name]
    if not is_here(use):
        pytest.skip("torch for CPUs")
    there = found(name)
    assert there is not None or use.lost, f"{module}.{path}"
    owner, attribute = place(name)
    assert there is getattr(owner, attribute, None)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_this_torch_has_each_attribute(name: str) -> None:
    """A class's own, or one that its source, or that of a class above it, gives to an instance."""
    module, path, use = ATTRIBUTES[name]
    of: Any = getattr(importlib.import_module(module), path.removesuffix(f".{name}"))
    classes = [each for each in inspect.getmro(of) if is_torch(each.__module__)] if isinstance(of, type) else [of]
    there = hasattr(of, name) or any(re.search(rf"\b{name}\b", inspect.getsource(each)) for each in classes)
    assert there or use.lost


def test_each_row_has_its_use_and_says_what_for() -> None:
    words = {word for path, source in SOURCES.items() if path != HOME for word in re.findall(r"\w+", source)}
    for name, (_, _, use) in {**NAMES, **ATTRIBUTES}.items():
        assert {name, re.sub("^[gs]et_", "", name)} & words, name
        assert use.what
    for table, names in ((torch_private._NAMES, NAMES), (torch_private._ATTRIBUTES, ATTRIBUTES)):
        assert len(list(torch_private._rows(table))) == len(names), "two of torch have one name here"


def test_modules_that_are_told_by_name_are_there() -> None:
    for module in (DYNAMO, AOT_AUTOGRAD):
        importlib.import_module(module)


def test_no_other_file_has_a_private_name_of_torch() -> None:
    own = own_names([ast.parse(source) for path, source in SOURCES.items() if path != HOME])
    for path, source in SOURCES.items():
        if path != HOME:
            assert violations(source, own) == [], path.relative_to(ROOT)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch._C._current_graph_task_id()",
        "import torch._dynamo",
        "from torch._ops import OpOverload",
        "from torch.fx import _symbolic_trace",
        "def f():\n    from torch.utils._pytree import tree_map",
        "import torch\ndef f(x: torch._ops.OpOverload): ...",
        "from torch.distributed.pipelining import schedules\nschedules._add_unshard_reshard = None",
        "import torch\nx = getattr(torch.autograd, '_engine_run_backward', None)",
        "import sys\nx = 'torch._dynamo' in sys.modules",
        "def f(x):\n    return x._is_view_of_torch",
    ],
)
def test_such_a_name_is_seen(source: str) -> None:
    assert violations(source, set())


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.ops.aten._softmax",
        "import torch\n_ATEN = torch.ops.aten\nx = _ATEN._softmax, getattr(_ATEN, '_grouped_mm')",
        "def f(tensor):\n    return tensor._version, tensor._base, getattr(tensor, '_local_tensor', None)",
        "import sys\nx = sys._getframe(1)",
        "x = 'of torch._C, a text'",
    ],
)
def test_operators_and_attributes_that_have_a_row_are_not(source: str) -> None:
    assert violations(source, set()) == []


def test_a_type_checker_sees_torchs_own() -> None:
    (typed, _) = [node for node in ast.parse(HOME.read_text()).body if isinstance(node, ast.If)]
    seen = {
        str(name.asname): f"{node.module}.{name.name}"
        for node in typed.body
        if isinstance(node, ast.ImportFrom) and is_torch(str(node.module))
        for name in node.names
    }
    assert seen == {name: ".".join(NAMES[name][:2]) for name in seen}


def test_a_name_that_memo_needs_and_torch_has_not_is_an_error_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "gone", ("torch._C", "_autograd._gone", PrivateUse("tells nothing")))
    monkeypatch.setitem(NAMES, "away", ("torch._away", "_gone", PrivateUse("tells nothing")))
    with pytest.raises(ImportError) as error:
        importlib.import_module("memo.torch_private").gone  # noqa: B018
    assert str(error.value) == (
        f"this is torch {torch.__version__}, which has no torch._C._autograd._gone (memo's use of it: tells nothing; "
        "since torch 2.11, the oldest that memo takes): install a torch that docs/versions.md names, or a memo that is "
        "made for this one"
    )
    with pytest.raises(ImportError, match=r"has no torch\._C\._autograd\._gone"):
        exec("from memo.torch_private import gone")
    for ask in (found, place):
        with pytest.raises(ImportError, match=r"has no torch\._away\._gone"):
            ask("away")
    with pytest.raises(ImportError, match="cannot import name 'never_declared'"):
        exec("from memo.torch_private import never_declared")


def test_a_name_that_memo_can_do_without_is_none_and_says_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(NAMES, "gone", ("torch.autograd", "_gone", PrivateUse("tells nothing", lost="nothing is told")))
    with caplog.at_level(logging.INFO, logger="memo"):
        assert found("gone") is None
    assert caplog.messages == ["this torch has no torch.autograd._gone (tells nothing): nothing is told"]


def test_what_memo_replaces_is_replaced_in_torch() -> None:
    importlib.import_module("memo.swap.saving_hooks")
    for name in ("saved_tensors_hooks_disable", "saved_tensors_hooks_enable"):
        owner, attribute = place(name)
        assert owner is torch._C._autograd
        assert getattr(owner, attribute).__module__ == "memo.swap.saving_hooks"
