"""Compiles a C++ file of this package at its first use and loads it; answers None where that cannot be done.

Owns the cache: one directory of the user's, one library per source, flags and compiler, named by their hash. A library is
written to a temporary name and renamed, so processes that race each other compile twice and agree. The directory must
belong to the user and be writable by nobody else, or it is not used: its files are loaded into the process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

__all__ = ["build", "load", "open_cache"]

FLAGS = ("-O3", "-march=native", "-std=c++20", "-shared", "-fPIC")
COMPILE_LIMIT_S = 120


@functools.cache
def load(source: Path, *, flags: Sequence[str] = FLAGS) -> ctypes.CDLL | None:
    """The library made of `source`, or None, with one warning that says why, when it cannot be made here.

    `$CXX` names the compiler, as it does for every build tool; else the system's `c++` or `g++`.
    """
    try:
        return ctypes.CDLL(str(build(source, flags=flags)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.stderr.strip()[-300:] if isinstance(error, subprocess.CalledProcessError) else str(error)
        warnings.warn(
            f"{source.name} could not be compiled ({reason}); the slower Python version is used", stacklevel=2
        )
        return None


def build(source: Path, *, includes: Sequence[Path] = (), flags: Sequence[str] = FLAGS) -> Path:
    """The library made of `source`, and of the files it includes, from the cache if it is there.

    Raises:
        OSError: there is no compiler, or no directory that can be trusted.
        subprocess.SubprocessError: the compiler failed or took too long.
    """
    compiler = _compiler()
    texts = [path.read_text(encoding="utf-8") for path in (source, *includes)]
    recipe = "\0".join([*texts, *compiler, *flags, _processor()])
    name = f"{source.stem}-{hashlib.sha256(recipe.encode()).hexdigest()[:20]}.so"
    cache = open_cache()
    library = cache / name
    if not library.exists():
        handle, partial = tempfile.mkstemp(dir=cache, prefix=f"{source.stem}-", suffix=".part")
        os.close(handle)
        try:
            command = [*compiler, *flags, "-o", partial, str(source)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
            os.replace(partial, library)
        finally:
            Path(partial).unlink(missing_ok=True)
    return library


def _processor() -> str:
    """What `-march=native` means here: a home directory may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{os.uname().machine} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        return named
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise OSError("no C++ compiler found")


def open_cache() -> Path:
    """The user's cache directory for compiled files, made if need be; OSError if it cannot be trusted."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache = Path(base) / "memo"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = cache.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{cache} is writable by others")
    return cache
