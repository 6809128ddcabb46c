"""One reader under a coverage-guided fuzzer (Atheris, which is libFuzzer): python -m tests.fuzz.one_reader NAME ... FLAGS

The code of memo is instrumented as it is imported, so this module imports it late. Each way to fail is written once, as a
file that is named after it, and the fuzzer goes on. What ends the process, such as a crash within C or an input that does
not end, is left to libFuzzer, which writes the input as well.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import random
import re
import shlex
import sys
import tempfile
import traceback
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import atheris

if TYPE_CHECKING:
    from tests.fuzz.readers import Reader

_ROOT = Path(__file__).parents[2]
_COMMANDS_OF = 8
"""Commands take a hundred times as long as their readers: they run on one input in so many."""


def way_to_fail(error: BaseException) -> str:
    """A name of the kind of an error and the last line of memo, or of these tests, that it passed."""
    ours = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(_ROOT) and "site-packages" not in frame.filename
    ]
    place = f"{Path(ours[-1].filename).stem}-{ours[-1].name}" if ours else "outside"
    words = str(error)[:60] if type(error).__name__ == "Broken" else ""
    return re.sub(r"[^A-Za-z0-9]+", "-", f"{type(error).__name__}-{place}-{words}").strip("-")[:120]


def run(reader: Reader, finds: Path, flags: Sequence[str]) -> NoReturn:
    """Runs the fuzzer on one reader, whose code is instrumented; ends the process.

    Args:
        reader: the reader.
        finds: folder for inputs that fail, each named after its way to fail.
        flags: libFuzzer's own arguments.
    """
    from tests.fuzz.readers import Broken, examine

    folder = Path(tempfile.mkdtemp(prefix="memo-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    for seed in reader.seeds():
        for _ in (reader.read, *reader.commands):
            with contextlib.suppress(Broken):  # it imports what is imported on first use, which takes time and is told
                examine(reader, seed, folder)
        if not examine(reader, seed, folder):
            raise SystemExit(f"{reader.name} refuses its own seed")
    warnings.simplefilter("ignore")
    logging.disable()
    faulthandler.disable()
    known: set[str] = set()

    def one(data: bytes) -> None:
        try:
            examine(reader, data, folder, commands=zlib.crc32(data) % _COMMANDS_OF == 0)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            way = way_to_fail(error)
            if way not in known:
                known.add(way)
                (finds / way).write_bytes(data)
                (finds / f"{way}.txt").write_text("".join(traceback.format_exception(error))[-4000:], errors="replace")

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        return reader.shape(data, most, random.Random(seed), atheris.Mutate)

    again = shlex.join([sys.executable, "-m", "tests.fuzz.one_reader", reader.name, str(finds)])  # as -merge=1 does
    atheris.Setup([again, *flags], one, custom_mutator=mutate)
    atheris.Fuzz()
    raise AssertionError("libFuzzer ends the process")


def main() -> None:
    """Fuzzes a reader by its name: NAME, the folder for finds, then libFuzzer's own arguments."""
    name, finds, *flags = sys.argv[1:]
    sys.path.insert(0, str(_ROOT / "tests" / "support"))
    with atheris.instrument_imports(include=["memo"], enable_loader_override=False):
        from tests.fuzz.readers import READERS

        run(READERS[name], Path(finds), flags)


if __name__ == "__main__":
    main()
