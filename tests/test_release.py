"""The signature of a release's checksums, checked as SECURITY.md says; `make release` itself takes minutes."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs OpenSSH")


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def new_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", path], check=True)
    return path


@pytest.fixture
def released(release: ModuleType, tmp_path: Path) -> Path:
    """Folder of a release, signed, with the signers that a user allows."""
    dist = tmp_path / "dist"
    dist.mkdir()
    wheel = dist / "memo.whl"
    wheel.write_bytes(b"wheel")
    (dist / "SHA256SUMS").write_text(f"{release.digest(wheel)}  memo.whl\n")
    key = new_key(tmp_path / "key")
    for _ in range(2):  # the second signature takes the place of the first
        said = release.sign(dist / "SHA256SUMS", key)
    assert re.fullmatch(r'Good "memo-release" signature with ED25519 key SHA256:\S+', said)
    (dist / "allowed_signers").write_text(f"memo {key.with_suffix('.pub').read_text()}")
    return dist


def checked(dist: Path) -> bool:
    """Runs the lines of SECURITY.md, in the folder of the release."""
    lines = [line.strip() for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("    ")]
    told = [line for line in lines if line.startswith(("ssh-keygen", "sha256sum"))]
    assert len(told) == 2
    return subprocess.run(["bash", "-c", " && ".join(told)], cwd=dist, capture_output=True, check=False).returncode == 0


def test_a_release_passes_the_check_that_users_are_told(released: Path) -> None:
    assert checked(released)


@pytest.mark.parametrize("name", ["memo.whl", "SHA256SUMS", "SHA256SUMS.sig"])
def test_a_release_of_which_a_byte_is_changed_fails_it(name: str, released: Path) -> None:
    content = bytearray((released / name).read_bytes())
    content[len(content) // 2] ^= 1
    (released / name).write_bytes(content)
    assert not checked(released)


def test_a_file_with_new_checksums_fails_it(release: ModuleType, released: Path) -> None:
    (released / "memo.whl").write_bytes(b"other")
    (released / "SHA256SUMS").write_text(f"{release.digest(released / 'memo.whl')}  memo.whl\n")
    assert not checked(released)


def test_another_key_or_another_purpose_fails_it(release: ModuleType, released: Path, tmp_path: Path) -> None:
    release.sign(released / "SHA256SUMS", new_key(tmp_path / "other"))
    assert not checked(released)
    (released / "SHA256SUMS.sig").unlink()
    command = ["ssh-keygen", "-Y", "sign", "-f", tmp_path / "key", "-n", "file", released / "SHA256SUMS"]
    subprocess.run(command, check=True, capture_output=True)
    assert not checked(released)


def test_a_key_that_is_none_ends_the_release_in_one_line(release: ModuleType, released: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "release.py", "--sign-key", tmp_path / "none"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, f"no key to sign with: {tmp_path / 'none'}\n")
    (tmp_path / "text").write_text("no key")
    with pytest.raises(SystemExit, match="ssh-keygen -Y sign"):
        release.sign(released / "SHA256SUMS", tmp_path / "text")
