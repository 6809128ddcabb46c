"""Compilation of the package's C++ files at first use.

Owns the cache: one directory per user, one library per source, flags, compiler and processor, named by their hash. A
library is written to a temporary name and renamed, so concurrent processes may compile twice but never load half a
file. Cached files are loaded into the process, so the directory must belong to the user and be writable by nobody else.
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

FLAGS = ("-O3", "-march=native", "-std=c++20", "-shared", "-fPIC")
COMPILE_LIMIT_S = 120


@functools.cache
def load(source: Path, *, includes: tuple[Path, ...] = (), flags: Sequence[str] = FLAGS) -> ctypes.CDLL | None:
    """Compiles and loads a C++ file; None, after one warning with the reason, where that is not possible.

    Args: as `build`.

    The compiler is `$CXX`, else the system's `c++`, `g++` or `clang++`.
    """
    try:
        return ctypes.CDLL(str(build(source, includes=includes, flags=flags)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.stderr.strip()[-300:] if isinstance(error, subprocess.CalledProcessError) else str(error)
        warnings.warn(
            f"{source.name} could not be compiled ({reason}); addresses are of greedy fits, which are proven smallest only "
            "where they meet the lower bound",
            stacklevel=2,
        )
        return None


def build(source: Path, *, includes: Sequence[Path] = (), flags: Sequence[str] = FLAGS) -> Path:
    """Compiles a C++ file to a shared library, or finds the library in the cache.

    Args:
        source: the file to compile.
        includes: files of ours that it includes; a change of them is a change of the library.
        flags: the compiler's flags.

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
    """Identity of the processor, since `-march=native` depends on it and home directories are shared by machines."""
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
    """Returns the user's cache directory for compiled files, and creates it.

    Raises:
        OSError: it cannot be created, belongs to somebody else, or is writable by others.
    """
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache = Path(base) / "memo"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = cache.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{cache} is writable by others")
    return cache
