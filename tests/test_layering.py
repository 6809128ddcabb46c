"""The arrows of the house: memo -> swap -> allocator -> mip, all -> kernels; data needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"swap": "memo.swap", "allocator": "memo.allocator", "mip": "memo.mip", "kernels": "memo.kernels"}
SHARED = {"memo.errors", "memo.units", "memo.events"}
MAY_IMPORT = {
    "memo.swap": {"memo.swap", "memo.allocator", "memo.mip", "memo.kernels"},
    "memo.allocator": {"memo.allocator", "memo.mip", "memo.kernels"},
    "memo.mip": {"memo.mip", "memo.kernels"},
    "memo.kernels": {"memo.kernels"},
}


def imports(source: str) -> set[str]:
    """Every module named by an import statement, at any depth of nesting."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {str(node.module)} | {f"{node.module}.{name.name}" for name in node.names}
    return found


def ours(modules: set[str]) -> set[str]:
    return {module for module in modules if module == "memo" or module.startswith("memo.")}


def allowed(module: str, package: str) -> bool:
    within = MAY_IMPORT[package] | SHARED
    return module in {"memo", "memo.trace"} or any(module == name or module.startswith(f"{name}.") for name in within)


@pytest.mark.parametrize("folder", FOLDERS)
def test_packages_import_only_what_lies_below(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for module in ours(imports(path.read_text())):
            assert allowed(module, FOLDERS[folder]), f"{path.relative_to(ROOT)} imports {module}"


def test_shared_ground_imports_nothing_of_ours_but_itself() -> None:
    for name in SHARED:
        path = ROOT / (name.replace(".", "/") + ".py")
        for module in ours(imports(path.read_text())):
            assert any(module == other or module.startswith(f"{other}.") for other in SHARED), f"{name}: {module}"


def test_nothing_names_the_root_folders_as_packages() -> None:
    for path in [*ROOT.glob("*/**/*.py")]:
        if ".venv" in path.parts or "build" in path.parts:
            continue
        for module in imports(path.read_text()):
            assert module.split(".")[0] not in FOLDERS, (
                f"{path.relative_to(ROOT)} imports {module}; write memo.{module}"
            )


@pytest.mark.parametrize(
    "statement",
    [
        "import memo, memo.mip, memo.errors, memo.units",
        "import memo.events, memo.trace.reader, memo.trace.stats",
        "from memo.cli.main import main; main(['--help'])",
        "from memo.cli.main import main; main(['train', '--help'])",
        "from memo.cli.main import main; main(['pack', '--help'])",
        "from memo.cli.main import main; main(['trace', '--help'])",
    ],
)
def test_data_and_help_do_not_import_torch(statement: str) -> None:
    code = f"import sys\n{statement}\nassert 'torch' not in sys.modules"
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


def test_the_layer_test_sees_a_forbidden_import() -> None:
    found = ours(imports("def f():\n    from memo.manager.manager import offload\n"))
    assert "memo.manager.manager" in found
    assert not allowed("memo.manager.manager", "memo.swap")
