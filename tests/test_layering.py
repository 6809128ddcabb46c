"""Package boundaries: the imports that each folder may have, by faces only, without a cycle; and data needs no torch.

Every import counts, at any depth: those for type checkers only and those inside functions, too.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOPS = ("memo", "swap", "allocator", "mip", "kernels")
MOST_MODULES = 18  # in one folder
OF_A_ROOT_FOLDER = re.compile(rf"\b(import|from)\b.*(?<![.\w])({'|'.join(TOPS[1:])})\b")
"""A line that may import a root folder as a package of its own."""

# For each folder all folders that it imports, lowest first. A folder may only name those above its own line. The faces
# of `memo` and `swap` come after their packages, the modules beside them before.
IMPORTS = {
    "memo": "",
    "kernels": "memo",
    "mip": "memo",
    "mip/address": "memo mip",
    "mip/inputs": "memo mip",
    "mip/simulate": "memo mip/inputs",
    "mip/activation": "memo mip mip/address mip/inputs mip/simulate",
    "mip/simulate face": "memo mip/simulate mip/activation",
    "mip/cluster": "memo mip mip/inputs mip/activation",
    "allocator": "memo mip mip/address",
    "swap": "memo",
    "swap/memory": "memo mip/address",
    "swap/backends": "memo swap/memory",
    "swap/disk": "memo swap/memory swap/backends",
    "swap/tiers": "memo swap/memory swap/backends",
    "swap/engine": "memo kernels swap swap/backends swap/tiers",
    "swap/recompute/tape": "memo kernels swap swap/engine",
    "swap/recompute": "memo swap swap/engine swap/recompute/tape",
    "swap face": "memo swap swap/memory swap/engine swap/recompute/tape swap/recompute",
    "memo/trace": "memo mip/address",
    "memo/out_of_memory": "memo memo/trace",
    "memo/machine": "memo mip/inputs swap/backends swap/disk swap face",
    "memo/parallel": "memo mip/inputs mip/activation swap face",
    "memo/parallel/decoders": "memo swap face memo/parallel",
    "memo/compression": "memo kernels memo/parallel",
    "memo/loss": "memo memo/parallel",
    "memo/autoplan": "memo mip/inputs mip/activation allocator swap face memo/machine",
    "memo/manager": "memo kernels mip/activation mip/simulate face allocator swap/backends swap/disk swap/tiers swap face "
    "memo/trace memo/out_of_memory memo/machine memo/parallel memo/autoplan",
    "memo/gpt/optim": "memo swap/backends",
    "memo/gpt": "memo memo/parallel memo/compression memo/gpt/optim",
    "memo/gpt/data": "memo",
    "memo/gpt/checkpoint": "memo",
    "memo/gpt/arithmetic": "memo mip mip/inputs mip/activation swap face memo/parallel memo/loss memo/gpt/optim memo/gpt",
    "memo/gpt/model": "memo allocator swap face memo/machine memo/parallel memo/loss memo/gpt",
    "memo/gpt/train": "memo mip/inputs mip/activation allocator swap face memo/machine memo/parallel memo/compression "
    "memo/manager memo/gpt/optim memo/gpt memo/gpt/data memo/gpt/checkpoint memo/gpt/arithmetic memo/gpt/model",
    "memo/record": "memo allocator swap/backends swap/tiers swap face memo/parallel memo/manager memo/gpt/optim memo/gpt "
    "memo/gpt/model memo/gpt/train",
    "memo/dry_run": "memo mip/activation allocator swap face memo/machine memo/parallel memo/autoplan memo/gpt/optim "
    "memo/gpt memo/gpt/arithmetic memo/gpt/model memo/gpt/train memo/record",
    "memo/hugging_face": "memo mip/inputs allocator swap face memo/machine memo/parallel memo/parallel/decoders memo/loss "
    "memo/autoplan memo/gpt memo/gpt/arithmetic memo/record memo/dry_run",
    "memo/search": "memo mip/inputs mip/activation mip/cluster memo/gpt memo/gpt/arithmetic memo/hugging_face",
    "memo/adapt": "memo mip mip/inputs mip/activation allocator swap face memo/trace memo/machine memo/parallel "
    "memo/autoplan memo/gpt memo/gpt/arithmetic memo/gpt/train memo/search",
    "memo/profiling": "memo mip/inputs swap face memo/autoplan memo/manager memo/record",
    "memo/rehearsal": "memo mip/inputs mip/activation allocator swap/backends swap/disk swap face memo/machine "
    "memo/parallel memo/parallel/decoders memo/loss memo/autoplan memo/manager memo/gpt/optim memo/gpt "
    "memo/gpt/arithmetic memo/gpt/model memo/gpt/train memo/record memo/dry_run memo/hugging_face",
    "memo/checkpointing": "memo swap face memo/manager",
    "memo face": "memo allocator swap swap/recompute/tape memo/parallel/decoders memo/loss memo/manager memo/checkpointing "
    "memo/profiling memo/rehearsal",
    "memo/integrations": "memo swap face memo face",
    "memo/cli/tables": "memo mip/address mip/inputs mip/activation mip/simulate face memo/trace memo/gpt/arithmetic "
    "memo/search memo/rehearsal",
    "memo/cli/terminal": "memo mip memo/trace",
    "memo/cli/inputs": "memo memo/parallel memo/gpt memo/gpt/arithmetic memo/record memo/hugging_face memo/rehearsal "
    "mip/activation mip/inputs memo/cli/terminal",
    "memo/cli/planning": "memo memo/parallel memo/gpt memo/gpt/arithmetic memo/hugging_face "
    "mip/address mip/activation mip/cluster mip/inputs mip/simulate face memo/trace memo/search "
    "memo/cli/tables memo/cli/inputs memo/cli/terminal",
    "memo/cli": "memo allocator mip mip/address mip/inputs mip/activation mip/simulate face swap face memo/trace "
    "memo/out_of_memory memo/machine memo/parallel memo/gpt/optim memo/gpt "
    "memo/gpt/arithmetic memo/gpt/train memo/record memo/dry_run memo/hugging_face memo/search memo/adapt "
    "memo/rehearsal memo face memo/cli/tables memo/cli/inputs memo/cli/terminal memo/cli/planning",
}
# Package boundaries: within a package modules are imported directly, from elsewhere by its face.
PACKAGES = sorted({folder.removesuffix(" face") for folder in IMPORTS} - {"memo"}, key=len)


@functools.cache
def folder_imports() -> dict[str, set[str]]:
    """For each folder, the folders that its modules import."""
    found: dict[str, set[str]] = {}
    for path in sources():
        here = folder_of(path)
        found.setdefault(here, set()).update(folder_of(module) for module in imports_of(path))
        found[here].discard(here)
    return found


def sources() -> list[Path]:
    return [path for top in TOPS for path in sorted((ROOT / top).rglob("*.py")) if "node_modules" not in path.parts]


def folder_of(path: Path) -> str:
    folder = path.parent.relative_to(ROOT).as_posix()
    return f"{folder} face" if path.name == "__init__.py" and f"{folder} face" in IMPORTS else folder


@functools.cache
def imports_of(path: Path) -> list[Path]:
    return imported(path.read_text())


def imported(source: str) -> list[Path]:
    """The files of ours that import statements name, at any depth of nesting."""
    files = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            files += [file_of(name.name) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            files += [file_of(f"{node.module}.{name.name}") or file_of(str(node.module)) for name in node.names]
    return [path for path in files if path is not None]


@functools.cache
def file_of(module: str) -> Path | None:
    """The file of one of our modules."""
    head, *rest = module.split(".")
    if head != "memo":
        return None
    stem = ROOT.joinpath(*(rest if rest and rest[0] in TOPS else ("memo", *rest)))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.exists()), None)


def package_of(path: Path) -> str:
    folder = path.parent.relative_to(ROOT).as_posix()
    return next((package for package in PACKAGES if f"{folder}/".startswith(f"{package}/")), folder)


def faces() -> list[str]:
    return [
        re.sub(r"^(?!memo)", "memo.", path.parent.relative_to(ROOT).as_posix().replace("/", "."))
        for path in sources()
        if path.name == "__init__.py" and "attach(" in path.read_text()
    ]


def test_each_folder_imports_the_folders_that_it_says() -> None:
    found = folder_imports()
    assert found.keys() == IMPORTS.keys()
    for folder, said in IMPORTS.items():
        assert found[folder] == set(re.findall(r"\S+ face|\S+", said)), folder


def test_no_folder_is_in_a_cycle() -> None:
    """The order of the table is one in which every folder stands above all that it imports."""
    floors = list(IMPORTS)
    for folder, below in folder_imports().items():
        assert all(floors.index(other) < floors.index(folder) for other in below), folder
    list(TopologicalSorter(folder_imports()).static_order())


def test_from_outside_a_package_is_imported_by_its_face() -> None:
    for path in sources():
        if path == ROOT / "memo" / "__init__.py":
            continue
        for other in imports_of(path):
            outside = package_of(other) not in ("memo", package_of(path))
            assert not outside or other.name == "__init__.py", f"{path.relative_to(ROOT)}: {other.relative_to(ROOT)}"


def test_no_folder_holds_more_than_a_reader_can_take_in() -> None:
    for folder in IMPORTS:
        modules = [path.name for path in (ROOT / folder.removesuffix(" face")).glob("*.py")]
        assert len(modules) - ("__init__.py" in modules) <= MOST_MODULES, folder


def test_a_wheel_has_every_package() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {path.parent.relative_to(ROOT).as_posix() for path in sources()}
    assert sorted(packages) == sorted(re.sub(r"^(?!memo)", "memo.", folder.replace("/", ".")) for folder in there)


def test_the_design_has_a_row_for_every_folder() -> None:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    tree = design[design.index("## The tree") : design.index("## Data flow")]
    told = {name.split("/")[-1] for name in re.findall(r"`([a-z_/]+)`", tree)}
    for folder in IMPORTS:
        assert folder.removesuffix(" face").split("/")[-1] in told, folder


@pytest.mark.parametrize("name", faces())
def test_a_face_gives_what_type_checkers_see(name: str) -> None:
    face = importlib.import_module(name)
    path = file_of(name)
    assert path is not None
    (typed,) = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If) and node.orelse]
    homes = {
        alias.name: statement.module
        for statement in typed.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert set(dir(face)) | {"__version__"} == homes.keys() | {"__version__"}
    for public, home in homes.items():
        assert file_of(f"{name}.{public}") is None, f"the module {name}.{public} would hide {public}"
        assert getattr(face, public) is getattr(importlib.import_module(str(home)), public)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = face.no_such_name


def test_memo_shows_all_its_names_and_gives_them() -> None:
    import memo

    given: dict[str, object] = {}
    exec("from memo import *", given)
    assert given.keys() - {"__builtins__"} == set(memo.__all__) == {*dir(memo), "__version__"}
    assert "offload" in dir(memo)


def test_nothing_names_the_root_folders_as_packages() -> None:
    folders = [folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name not in {".venv", "build"}]
    for path in [path for folder in folders for path in folder.rglob("*.py")]:
        if "node_modules" in path.parts or not OF_A_ROOT_FOLDER.search(text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            named = node.module if isinstance(node, ast.ImportFrom) else None
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(named)]
            for name in names:
                assert name.split(".")[0] not in TOPS[1:], f"{path.relative_to(ROOT)}: write memo.{name}"


@pytest.mark.parametrize(
    "statement",
    [
        "import memo, memo.errors, memo.torch_private, memo.units, memo.events",
        "import importlib; [importlib.import_module(name) for name in DATA]",
        "from memo.mip.activation import *; from memo.mip.address import *; from memo.trace import *",
        "from memo.gpt import GPTConfig, RunConfig",
        "from memo.cli.main import main; main(['--help'])",
        "from memo.cli.main import main; main(['train', '--help'])",
        "from memo.cli.main import main; main(['pack', '--help'])",
        "from memo.cli.main import main; main(['trace', '--help'])",
    ],
)
def test_data_and_help_do_not_import_torch(statement: str) -> None:
    paths = [path.relative_to(ROOT).with_suffix("") for path in sources()]
    data = [re.sub(r"^(?!memo)", "memo.", path.as_posix().replace("/", ".")) for path in paths]
    data = [name for name in data if name.startswith(("memo.mip", "memo.trace"))]
    code = f"import sys\nDATA = {data}\n{statement}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd="/")


def test_a_run_that_plans_nothing_loads_no_solver() -> None:
    code = (
        "import sys, torch, memo\n"
        "layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))\n"
        "model = torch.nn.Sequential(*layers)\n"
        "manager = memo.offload(model, alpha=1.0, layers=layers, min_bytes=512)\n"
        "with manager:\n    loss = model(torch.ones(32, 64, requires_grad=True)).sum()\n"
        "loss.backward()\n"
        "assert manager.stats.packed\n"
        "manager.close()\n"
        "assert not {'pulp', 'highspy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd="/")


def test_imports_are_seen_wherever_they_stand() -> None:
    source = "def f():\n    from memo.manager import offload\n    import memo.mip.strict_json, os\n"
    assert imported(source) == [ROOT / "memo" / "manager" / "__init__.py", ROOT / "mip" / "strict_json.py"]
    assert package_of(ROOT / "swap" / "recompute" / "tape" / "operators.py") == "swap"
    assert file_of("memo.no_such_module") is None
