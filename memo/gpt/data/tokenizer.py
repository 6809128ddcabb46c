"""Text to token numbers: one token a byte, or a Hugging Face `tokenizer.json`.

A tokenizer here is a vocabulary size, an end-of-document token inside it, and a function from texts to arrays. Bytes
need no file, no download and no training, and lose nothing; that is why they are the default.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from memo.errors import DataError

__all__ = ["ByteTokenizer", "FileTokenizer", "Tokenizer", "load_tokenizer"]

# Names under which published tokenizers keep their end-of-document token, most specific first.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer(Protocol):
    """What the token cache needs to know."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int: ...

    @property
    def identity(self) -> str:
        """Equal for two tokenizers exactly if they make the same tokens."""

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """The tokens of each text, without an end-of-document token."""


class ByteTokenizer:
    """UTF-8 bytes 0 to 255, and 256 for the end of a document."""

    vocab_size = 257
    end_of_document = 256
    identity = "bytes"

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint32) for text in texts]


class FileTokenizer:
    """A `tokenizer.json`, through the `tokenizers` library.

    A vocabulary without an end-of-document token gets one, the next free number.
    """

    def __init__(self, path: Path) -> None:
        """Raises DataError where the file cannot be read as a tokenizer, or the library is missing."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"tokenizer {path}: {error.strerror or error}") from error
        self._tokenizer = _parsed(path, content)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        known = [vocabulary[name] for name in END_NAMES if name in vocabulary]
        # The count of a vocabulary with holes is below its largest number; an embedding needs the latter.
        used = max(vocabulary.values(), default=-1) + 1
        self.end_of_document = known[0] if known else used
        self.vocab_size = max(used, self.end_of_document + 1)
        self.identity = f"tokenizer.json {hashlib.sha256(content).hexdigest()}"

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]


def load_tokenizer(path: str | None) -> Tokenizer:
    """Bytes for None, else the tokenizer.json at `path`."""
    return ByteTokenizer() if path is None else FileTokenizer(Path(path).expanduser())


def _parsed(path: Path, content: bytes) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(f'tokenizer {path}: needs the tokenizers library; pip install "memo-train[data]"') from error
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception and ValueError for what it cannot parse
        raise DataError(f"tokenizer {path}: not a tokenizer.json ({error})") from error
