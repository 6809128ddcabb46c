"""The token cache: right tokens, found again, never half-written, never a stale or torn one."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from memo.errors import DataError
from memo.gpt.data import token_file as tokens_module
from memo.gpt.data.token_file import HEADER, TokenFile, default_cache_dir, open_tokens


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "text.txt"
    path.parent.mkdir()
    path.write_text("hällo")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def _refused(says: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(DataError, match=says) as caught:
        open_tokens(*args, **kwargs)
    assert "\n" not in str(caught.value)


def _builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one with every build."""
    built: list[int] = []
    real = tokens_module._write

    def counted(*args: Any) -> None:
        built.append(1)
        real(*args)

    monkeypatch.setattr(tokens_module, "_write", counted)
    return built


def test_bytes_and_an_end_after_every_document(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("hä")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    file = open_tokens([str(tmp_path / "*.txt")], cache_dir=cache)
    assert file.tokens.tolist() == [*"hä".encode(), 256, *"\ufffd".encode(), 256]
    assert (file.vocab_size, file.end_of_document, file.documents, len(file)) == (257, 256, 2, 8)
    assert file.tokens.dtype == np.uint16
    assert not file.tokens.flags.writeable


def test_second_opening_reads_no_text(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = _builds(monkeypatch)
    first = open_tokens([str(text)], cache_dir=cache)
    second = open_tokens([str(text)], cache_dir=cache)
    assert built == [1]
    assert (first.path, first.tokens.tolist()) == (second.path, second.tokens.tolist())


def test_more_documents_than_one_encoding_keep_their_order(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": str(n)}) for n in range(300)))
    file = open_tokens([str(path)], cache_dir=cache)
    words = bytes(min(token, 255) for token in file.tokens.tolist()).split(b"\xff")
    assert words == [*(str(n).encode() for n in range(300)), b""]
    assert file.documents == 300


def test_the_key_is_everything_the_tokens_depend_on(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a", "body": "b"}')
    base = open_tokens([str(path)], cache_dir=cache)
    assert open_tokens([str(path)], field="body", cache_dir=cache).path != base.path
    path.write_text('{"text": "c", "body": "b"}')
    os.utime(path, ns=(1, 1))
    touched = open_tokens([str(path)], cache_dir=cache)
    assert touched.path != base.path
    assert chr(touched.tokens[0]) == "c"
    path.write_text('{"text": "longer", "body": "b"}')
    os.utime(path, ns=(1, 1))
    assert open_tokens([str(path)], cache_dir=cache).path != touched.path


@pytest.mark.parametrize("cut", [0, 10, HEADER.size, HEADER.size + 3, -1])
def test_truncated_cache_is_made_again(text: Path, cache: Path, cut: int) -> None:
    whole = open_tokens([str(text)], cache_dir=cache)
    tokens, content = whole.tokens.tolist(), whole.path.read_bytes()
    with whole.path.open("wb") as file:
        file.write(content[:cut])
    assert open_tokens([str(text)], cache_dir=cache).tokens.tolist() == tokens


def test_foreign_cache_file_is_made_again(text: Path, cache: Path) -> None:
    whole = open_tokens([str(text)], cache_dir=cache)
    tokens, content = whole.tokens.tolist(), whole.path.read_bytes()
    whole.path.unlink()
    whole.path.write_bytes(b"another!" + content[8:-2] + b"\0\0")
    assert open_tokens([str(text)], cache_dir=cache).tokens.tolist() == tokens


def _build(data: str, cache: Path, start: Any, results: Any) -> None:
    start.wait()
    results.put(open_tokens([data], cache_dir=cache).tokens.tolist())


def test_concurrent_builders_agree_and_leave_one_file(tmp_path: Path, cache: Path) -> None:
    for n in range(50):
        (tmp_path / f"{n:02}.txt").write_text(str(n) * 1000)
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    data = str(tmp_path / "*.txt")
    builders = [context.Process(target=_build, args=(data, cache, start, results)) for _ in range(4)]
    for builder in builders:
        builder.start()
    start.set()
    answers = [results.get(timeout=60) for _ in builders]
    for builder in builders:
        builder.join()
    expected = [token for n in range(50) for token in (*(str(n) * 1000).encode(), 256)]
    assert all(answer == expected for answer in answers)
    assert [file.suffix for file in cache.iterdir()] == [".tokens"]


def test_empty_data_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    _refused("the data holds no text", [str(tmp_path / "empty.txt")], cache_dir=cache)
    assert list(cache.iterdir()) == []


def test_an_error_half_way_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n' * 200 + "{")
    _refused("line 201: not JSON", [str(path)], cache_dir=cache)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_interrupted_building_leaves_nothing(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, interruption: BaseException
) -> None:
    def interrupted(out: IO[bytes], documents: Iterator[str], tokenizer: object) -> None:
        out.write(b"half")
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(tokens_module, "_write", interrupted)
        expected = DataError if isinstance(interruption, OSError) else KeyboardInterrupt
        with pytest.raises(expected) as caught:
            open_tokens([str(text)], cache_dir=cache)
    if expected is DataError:
        assert "No space left on device" in str(caught.value)
    assert list(cache.iterdir()) == []
    assert len(open_tokens([str(text)], cache_dir=cache)) == 7


def test_what_a_killed_builder_left_is_removed_once_it_is_old(text: Path, cache: Path) -> None:
    cache.mkdir()
    old, young = cache / "x.1.unfinished", cache / "x.2.unfinished"
    for file in (old, young):
        file.write_bytes(b"half")
    os.utime(old, (time.time() - 90_000,) * 2)
    open_tokens([str(text)], cache_dir=cache)
    assert not old.exists()
    assert young.exists()


def test_default_place_follows_the_xdg_convention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "memo" / "tokens"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unset in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert default_cache_dir() == tmp_path / "home" / ".cache" / "memo" / "tokens"


def _unwritable(tmp_path: Path) -> Path:
    """A cache directory that cannot be, for root as well: below a plain file."""
    (tmp_path / "plain").write_text("")
    return tmp_path / "plain" / "cache"


def test_unwritable_default_falls_back_to_a_private_temporary(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(_unwritable(tmp_path)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = open_tokens([str(text)])
    assert file.path.parent == tmp_path / f"memo-tokens-{os.getuid()}"
    assert file.path.parent.stat().st_mode & 0o777 == 0o700
    assert file.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("trap", ["symlink", "open to all"])
def test_a_temporary_directory_that_others_prepared_is_refused(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(_unwritable(tmp_path)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place, elsewhere = tmp_path / f"memo-tokens-{os.getuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if trap == "symlink":
        place.symlink_to(elsewhere)
    else:
        place.mkdir()
        place.chmod(0o777)
    _refused("it belongs to someone else", [str(text)])
    assert list(elsewhere.iterdir()) == []


def test_unwritable_directory_that_was_asked_for_is_refused(text: Path, tmp_path: Path) -> None:
    _refused("cannot write the token cache in .*plain/cache", [str(text)], cache_dir=_unwritable(tmp_path))


def test_missing_data_is_refused(tmp_path: Path, cache: Path) -> None:
    _refused("no such file, directory or glob", [str(tmp_path / "none")], cache_dir=cache)


def _tokenizer(path: Path, words: dict[str, int], end: str | None = None) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if end is not None:
        made.add_special_tokens([end])
    made.save(str(path))
    return str(path)


def test_tokenizer_file_with_its_own_end(text: Path, tmp_path: Path, cache: Path) -> None:
    text.write_text("b a c")
    tokenizer = _tokenizer(tmp_path / "tokenizer.json", {"?": 0, "a": 1, "b": 2}, end="<|endoftext|>")
    file = open_tokens([str(text)], tokenizer=tokenizer, cache_dir=cache)
    assert file.tokens.tolist() == [2, 1, 0, 3]
    assert (file.vocab_size, file.end_of_document) == (4, 3)


def test_tokenizer_without_an_end_gets_the_next_number(text: Path, tmp_path: Path, cache: Path) -> None:
    text.write_text("b a")
    tokenizer = _tokenizer(tmp_path / "tokenizer.json", {"?": 0, "a": 1, "b": 70_000})
    file = open_tokens([str(text)], tokenizer=tokenizer, cache_dir=cache)
    assert file.tokens.tolist() == [70_000, 1, 70_001]
    assert file.tokens.dtype == np.uint32
    assert (file.vocab_size, file.end_of_document) == (70_002, 70_001)


def test_tokens_of_another_tokenizer_are_another_file(text: Path, tmp_path: Path, cache: Path) -> None:
    one = _tokenizer(tmp_path / "one.json", {"?": 0, "a": 1})
    other = _tokenizer(tmp_path / "other.json", {"?": 1, "a": 0})
    paths = {open_tokens([str(text)], tokenizer=name, cache_dir=cache).path for name in (None, one, other)}
    assert len(paths) == 3


def test_bad_tokenizers_are_refused(text: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    _refused("bad.json: not a tokenizer.json", [str(text)], tokenizer=str(bad), cache_dir=cache)
    _refused("none.json: No such file", [str(text)], tokenizer=str(tmp_path / "none.json"), cache_dir=cache)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    _refused("pip install tokenizers", [str(text)], tokenizer=str(bad), cache_dir=cache)


def test_token_file_knows_its_length(text: Path, cache: Path) -> None:
    file = open_tokens([str(text)], cache_dir=cache)
    assert isinstance(file, TokenFile)
    assert len(file) == len(file.tokens) == 7


def test_packages_and_files_of_the_standard_library_are_cached_apart(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    for name in "bc":
        path = tmp_path / "a" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{name}\n")
    by_file, by_package = (open_tokens(None, cache_dir=cache, packages=packages) for packages in (False, True))
    assert (by_file.documents, by_file.ends().tolist()) == (2, [2, 5])
    assert (by_package.documents, by_package.ends().tolist()) == (1, [4])
    assert (
        open_tokens([str(tmp_path / "a")], cache_dir=cache, packages=True).documents == 2
    )  # what is named stays apart
