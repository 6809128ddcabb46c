#!/usr/bin/env python3
"""Builds what is released, twice, and compares: a wheel, an sdist, a list of what they depend on, and checksums, in dist/.

    make release [SIGN_KEY=~/.ssh/id_ed25519]

Both builds begin with the commit's files in folders of different names and environments of their own, with the versions of
constraints.txt and the commit's time as SOURCE_DATE_EPOCH. The wheel is built from the sdist, so that the sdist is whole.
The checksums are signed by OpenSSH, with a private key, or a public one whose private key an agent or a token has.
Exit 1 where a byte differs, twine finds fault, the wheel does not run in an environment without this tree, or the key
does not sign.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORK, DIST = ROOT / "build" / "release", ROOT / "dist"
TOOLS = ("build==1.6.1", "twine==7.0.0", "cyclonedx-bom==7.5.0")
BACKEND = ("setuptools==84.2.1", "wheel==0.48.0")
NAMESPACE = "memo-release"
"""Of the signature: none that the same key made for another purpose passes for it (ssh-keygen(1), -Y sign)."""


def run(*command: object, cwd: Path = ROOT, stdin: str = "", **environment: str) -> str:
    """Standard output of a command; what fails is shown, and ends this."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def made_environment(name: str, *packages: object, constrained: bool = False) -> Path:
    """Its interpreter."""
    folder = WORK / name
    run(sys.executable, "-m", "venv", folder)
    limits = ["--constraint", ROOT / "constraints.txt"] if constrained else []
    if packages:
        run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *limits, *packages)
    return folder / "bin" / "python"


def built(python: Path, name: str, epoch: str) -> list[Path]:
    """The sdist and the wheel, from the commit's files in a folder of this name."""
    tree, out = WORK / name, WORK / f"{name}-dist"
    tree.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(tree, filter="data")
    limits = WORK / "backend.txt"
    limits.write_text("\n".join(BACKEND) + "\n")
    run(
        python,
        "-m",
        "build",
        "--outdir",
        out,
        tree,
        SOURCE_DATE_EPOCH=epoch,
        PIP_CONSTRAINT=str(limits),
        TZ=f"UTC{len(name)}",
    )
    for sdist in out.glob("*.tar.gz"):
        normalise(sdist, int(epoch))
    return sorted(out.iterdir())


def normalise(sdist: Path, epoch: int) -> None:
    """Rewrites an sdist with one time, no owners and sorted names: setuptools writes its own time of day into it."""
    content = io.BytesIO()
    with tarfile.open(sdist) as source, tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as target:
        for member in sorted(source.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            target.addfile(member, source.extractfile(member) if member.isfile() else None)
    sdist.write_bytes(gzip.compress(content.getvalue(), mtime=epoch))


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sign(sums: Path, key: Path) -> str:
    """Writes the signature beside the checksums; returns what OpenSSH says of it when it reads it back."""
    signature = sums.with_name(f"{sums.name}.sig")
    signature.unlink(missing_ok=True)
    run("ssh-keygen", "-Y", "sign", "-f", key, "-n", NAMESPACE, sums)
    check = ("ssh-keygen", "-Y", "check-novalidate", "-n", NAMESPACE, "-s", signature)
    return run(*check, stdin=sums.read_text()).strip()


def main() -> int:
    """Builds, compares, checks, signs and tells."""
    parser = argparse.ArgumentParser(description="Builds what is released; see the top of this file.")
    parser.add_argument("--sign-key", type=Path, metavar="FILE", help="key of OpenSSH that signs the checksums")
    key = parser.parse_args().sign_key
    if key is not None and not key.is_file():
        sys.exit(f"no key to sign with: {key}")
    shutil.rmtree(WORK, ignore_errors=True)
    shutil.rmtree(DIST, ignore_errors=True)
    WORK.mkdir(parents=True)
    DIST.mkdir()
    if run("git", "status", "--porcelain", "-uno").strip():
        print("note: the tree differs from its commit, and the commit is what is built")
    epoch = run("git", "log", "-1", "--format=%ct").strip()
    tools = made_environment("tools", *TOOLS)
    one, other = built(tools, "one", epoch), built(tools, "another", epoch)
    differing = [a.name for a, b in zip(one, other, strict=True) if (a.name, digest(a)) != (b.name, digest(b))]
    if differing:
        sys.exit(f"not reproducible: {', '.join(differing)}")
    for path in one:
        shutil.copy(path, DIST)
    print(run(tools, "-m", "twine", "check", "--strict", *DIST.iterdir()).strip())
    (wheel,) = DIST.glob("*.whl")
    clean = made_environment("clean", wheel, constrained=True)
    print(run(clean, "-m", "memo.cli.main", "--version", cwd=Path("/")).strip(), "runs without this tree")
    bom = DIST / f"{wheel.name.split('-')[0]}.cdx.json"
    run(clean, "-m", "pip", "uninstall", "--quiet", "--yes", "pip", "setuptools")
    arguments = (
        "environment",
        "--output-reproducible",
        "--pyproject",
        ROOT / "pyproject.toml",
        "--output-file",
        bom,
        clean,
    )
    run(tools, "-m", "cyclonedx_py", *arguments)
    parts = json.loads(bom.read_text())["components"]
    sums = "".join(f"{digest(path)}  {path.name}\n" for path in sorted(DIST.iterdir()))
    written = DIST / "SHA256SUMS"
    written.write_text(sums)
    print(f"{bom.name}: {len(parts)} packages that memo-train depends on\n{sums}", end="")
    print("two builds are equal, byte for byte")
    print("SHA256SUMS is not signed: give SIGN_KEY=FILE" if key is None else f"SHA256SUMS.sig: {sign(written, key)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
