"""Tokenizers: one token per byte, or a Hugging Face `tokenizer.json`.

A tokenizer has a vocabulary size, an end-of-document token inside it, and a function from texts to arrays. Bytes are the
default, since they need no file, no download and no training, and lose nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from memo.bounded_files import Refused, read_bytes
from memo.errors import DataError

MOST_NBYTES = 256 << 20
"""Size of a file; the largest published ones have 35 MB."""
# Names of the end-of-document token in published tokenizers, most specific first.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer(Protocol):
    """Tokenizer as the token cache uses it."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the end-of-document token included."""

    @property
    def end_of_document(self) -> int:
        """Number of the end-of-document token."""

    @property
    def identity(self) -> str:
        """Name that two tokenizers share exactly if they produce the same tokens."""

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Tokens of each text, without an end-of-document token."""


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes: 0 to 255, and 256 for the end of a document."""

    vocab_size = 257
    end_of_document = 256
    identity = "bytes"

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """UTF-8 bytes of each text."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint32) for text in texts]


class FileTokenizer:
    """Tokenizer of a `tokenizer.json`, by the `tokenizers` library.

    A vocabulary without an end-of-document token gets one, the next free number.

    Args:
        path: the file.

    Raises:
        DataError: the file cannot be read as a tokenizer, or the library is missing.
    """

    def __init__(self, path: Path) -> None:
        try:
            content = read_bytes(path, most=MOST_NBYTES)
        except (OSError, Refused) as error:
            raise DataError(f"tokenizer {path}: {getattr(error, 'strerror', None) or error}") from error
        self._path = path
        self._tokenizer = _parsed(path, content)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        known = [vocabulary[name] for name in END_NAMES if name in vocabulary]
        # A vocabulary may have gaps; an embedding needs its largest number, not its count.
        used = max(vocabulary.values(), default=-1) + 1
        self.end_of_document = known[0] if known else used
        self.vocab_size = max(used, self.end_of_document + 1)
        self.identity = f"tokenizer.json {hashlib.sha256(content).hexdigest()}"

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Tokens of each text, without special tokens.

        Raises:
            DataError: the tokenizer lacks what it needs for them, such as its unknown token.
        """
        with _refusing(f"tokenizer {self._path}: cannot encode"):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]


def load_tokenizer(path: str | None) -> Tokenizer:
    """Byte tokenizer for None, else the tokenizer.json at `path`.

    Raises:
        DataError: the file cannot be read as a tokenizer, or the `tokenizers` library is missing.
    """
    return ByteTokenizer() if path is None else FileTokenizer(Path(path).expanduser())


def _parsed(path: Path, content: bytes) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(f"tokenizer {path}: needs the tokenizers library; pip install tokenizers") from error
    with _refusing(f"tokenizer {path}: not a tokenizer.json"):
        return tokenizers.Tokenizer.from_buffer(content)


@contextlib.contextmanager
def _refusing(words: str) -> Iterator[None]:
    """Turns what the tokenizers library raises into a DataError that begins with `words`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # bare Exceptions, and panics of Rust, which are not even that
        raise DataError(f"{words} ({' '.join(str(error).split())[:200]})") from error
