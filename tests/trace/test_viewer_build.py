"""The committed page is what its sources build to, its types hold, and it writes numbers as Python does.

Needs Node.js and the pinned packages (`npm ci` in memo/trace/viewer, which `.ci/browser` runs); skipped without them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from memo.trace import format
from memo.units import format_bytes

VIEWER = Path(__file__).parent.parent.parent / "memo" / "trace" / "viewer"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(
    NODE is None or not (VIEWER / "node_modules").is_dir(), reason="the viewer's packages are not installed (npm ci)"
)


def node(*arguments: str) -> str:
    assert NODE is not None
    done = subprocess.run([NODE, *arguments], cwd=VIEWER, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_committed_assets_are_what_the_sources_build_to(tmp_path: Path) -> None:
    node("build.mjs", str(tmp_path))
    built = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_bytes() for path in (VIEWER.parent / "assets").iterdir()}
    assert built.keys() == committed.keys()
    for name, content in built.items():
        assert content == committed[name], f"{name} is stale: npm run build in memo/trace/viewer"


def test_the_sources_hold_their_types() -> None:
    node("node_modules/typescript/bin/tsc", "--noEmit")


def test_the_page_writes_numbers_and_names_as_the_terminal_does(tmp_path: Path) -> None:
    target = tmp_path / "format.mjs"
    bundle = "import {buildSync} from 'esbuild'; buildSync({entryPoints: ['src/format.ts'], outfile: process.argv[1]});"
    node("--input-type=module", "-e", bundle, str(target))
    times = [
        0,
        1000,
        999_400,
        999_600,
        1_500_000,
        9_940_000,
        9_960_000,
        140e6,
        999.4e6,
        999.6e6,
        4.81e9,
        119.9e9,
        185e9,
    ]
    shares = [0, 0.01, 0.05, 3.14, 9.94, 9.96, 61.4, 100, -4.2]
    sizes = [0, 1, 1023, 1024, 1536, 2.5 * 2**20, 80 * 2**30, 3 * 2**40]
    rates = [5, 9.99e5, 1.2e6, 23.14e9, 9e8]
    names = ["layers.4", "\x1b[31m", "a\u202eb", "\u2028", "x" * 200, "\U000e0001", "é日本"]
    names += ["a step's plan keeps what fits at alpha 0.125, " * 4, "x" * 60 + " " + "y" * 60]
    script = (
        "const f = await import(process.argv[1]); const [t, p, b, r, n] = JSON.parse(process.argv[2]);"
        "console.log(JSON.stringify([t.map(f.duration), p.map(f.percent), b.map(f.bytes), r.map(f.rate),"
        " n.map((x) => f.printable(x))]));"
    )
    values = json.dumps([times, shares, sizes, rates, names])
    found = json.loads(node("--input-type=module", "-e", script, str(target), values))
    assert found == [
        [format.duration(ns) for ns in times],
        [format.percent(share) for share in shares],
        [format_bytes(nbytes) for nbytes in sizes],
        [format.rate(value) for value in rates],
        [format.printable(name) for name in names],
    ]
