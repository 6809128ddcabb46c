"""Files written completely or not at all: under a temporary name beside them, which is then renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from memo.errors import MemoError, OutputExists


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], *, overwrite: bool) -> Iterator[Path]:
    """Yields a temporary sibling of a file, which takes its place when the block ends without an error.

    Raises:
        OutputExists: the file exists and `overwrite` is False.
        MemoError: it cannot be written; nothing is left behind.
    """
    target = Path(path)
    try:
        handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:80]}-", suffix=target.suffix[:20])
        os.close(handle)
        try:
            yield Path(partial)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(partial, 0o666 & ~mask)
            if not overwrite:
                target.open("x").close()  # fails if the name is taken, however late that happened
            os.replace(partial, target)
        finally:
            Path(partial).unlink(missing_ok=True)
    except FileExistsError:
        raise OutputExists(f"{str(path)!r} exists; give -f to overwrite it") from None
    except OSError as error:
        raise MemoError(f"{str(path)!r}: cannot write: {error.strerror}") from None
