"""Imports: `import memo` adds next to nothing to torch's, and `memo.offload` loads nothing that it has no use for yet."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest

from memo import lazy

MOST = 0.08
"""Of torch's own import, which takes some two seconds on an idle core: 150 ms."""
LATER = (
    "triton",
    "transformers",
    "pulp",
    "highspy",
    "matplotlib",
    "pyarrow",
    "tokenizers",
    "tensorboard",
    "pynvml",
)


@functools.cache
def _told(code: str) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/")
    told: dict[str, object] = json.loads(done.stdout)
    return told


IMPORTS = (
    "import json, sys, time\n"
    "a = time.process_time()\nimport torch\n"
    "b, before = time.process_time(), set(sys.modules)\nimport memo\n"
    "c = time.process_time()\nmemo.offload\n"
    "print(json.dumps({'torch': b - a, 'memo': c - b, 'new': sorted(set(sys.modules) - before)}))"
)


def test_importing_memo_takes_a_small_part_of_importing_torch() -> None:
    told = _told(IMPORTS)
    assert float(str(told["memo"])) < MOST * float(str(told["torch"]))


def test_offload_loads_no_package_before_it_is_used() -> None:
    new = _told(IMPORTS)["new"]
    assert isinstance(new, list)
    assert "memo.manager.manager" in new
    assert not set(LATER) & set(new)


def test_a_fixed_alpha_needs_torch_alone() -> None:
    """Each package but torch and what it requires is hidden: a step with memo is the one without."""
    code = """
import json, re, sys
from importlib import metadata
needed, waiting = set(), ["torch"]
while waiting:
    name = re.split(r"[ ;<>=!~\\[(]", waiting.pop())[0].lower().replace("_", "-")
    if name not in needed:
        needed.add(name)
        try:
            waiting += [one for one in metadata.requires(name) or () if "extra ==" not in one]
        except metadata.PackageNotFoundError:
            pass
hidden = []
for package, owners in metadata.packages_distributions().items():
    if package != "memo" and package not in sys.modules and not needed & {one.lower().replace("_", "-") for one in owners}:
        sys.modules[package] = None
        hidden.append(package)
import torch, memo
def step(managed):
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(3))
    x = torch.randn(2, 48, 32)
    manager = memo.offload(model, alpha=0.5, host="16MiB", min_bytes=1) if managed else None
    def forward(x):
        for layer in model.layers:
            x = layer(x)
        return x.square().mean()
    if manager is None:
        forward(x).backward()
    else:
        with manager:
            loss = forward(x)
        loss.backward()
        assert manager.stats.bytes_host and manager.stats.bytes_recomputed, manager.stats
        print(manager.report(), file=sys.stderr)
        manager.close()
    return [each.grad for each in model.parameters()]
print(json.dumps({"hidden": hidden, "equal": all(map(torch.equal, step(True), step(False)))}))
"""
    told = _told(code)
    assert {"numpy", "pulp", "highspy", "pynvml"} <= set(told["hidden"])  # type: ignore[call-overload]
    assert told["equal"] is True


def test_an_error_while_a_module_is_imported_is_not_taken_for_a_missing_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """`from memo.manager import Manager` said "cannot import name" where a newer torch lacked something."""

    def broken(name: str) -> None:
        raise AttributeError("torch has no attribute 'apply'")

    monkeypatch.setattr(lazy.importlib, "import_module", broken)
    with pytest.raises(ImportError, match="offloading: torch has no"):
        lazy.attach("memo")[0]("offload")
