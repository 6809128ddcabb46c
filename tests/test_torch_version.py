"""A torch that is too old is refused in one line, before anything fails for what it lacks."""

from __future__ import annotations

import importlib
import importlib.metadata
import tomllib
from pathlib import Path

import pytest

import memo.manager
from memo.torch_version import LEAST_TORCH

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("version", ["2.10.1", "2.9.0+cu128", "1.13.1"])
def test_an_older_torch_is_refused_in_one_line(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(ImportError, match=rf"^memo needs torch 2\.11 or newer, and this is torch {version[:4]}.*$"):
        importlib.reload(memo.manager)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.0a0+git1234", "3.0"])
def test_another_is_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    importlib.reload(memo.manager)


def test_the_package_asks_for_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={'.'.join(map(str, LEAST_TORCH))}" in project["dependencies"]
