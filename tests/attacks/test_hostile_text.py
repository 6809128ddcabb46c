"""Training text made to harm: archives that unpack without bound, devices, pipes, tokenizers without end."""

from __future__ import annotations

import functools
import gzip
import os
import zlib
from pathlib import Path

import pytest

from memo.bounded_files import Refused, Unpacked, open_file
from memo.errors import DataError
from memo.gpt.data.documents import read_documents
from memo.gpt.data.tokenizer import FileTokenizer

MIB = 1 << 20


@functools.cache
def _packed(text: bytes, times: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return b"".join([*(packer.compress(text) for _ in range(times)), packer.flush()])


@pytest.mark.parametrize("name", ["bomb.txt.gz", "bomb.jsonl.gz"])
@pytest.mark.parametrize("text", [b"\0" * MIB, b'{"text": "' + b"x" * (MIB - 13) + b'"}\n', b"\n" * MIB])
def test_an_archive_that_unpacks_to_a_thousand_times_its_size_is_refused(
    name: str, text: bytes, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(_packed(text, 128))
    assert path.stat().st_size < MIB
    with pytest.raises(DataError, match=r"cannot read .*bomb.*: unpacks to over 100 times its size"):
        for _ in read_documents([path]):
            pass


def test_an_archive_of_text_is_read_whole(tmp_path: Path) -> None:
    text = "".join(f"line {number} of {number * number}\n" for number in range(200_000))
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert list(read_documents([path])) == [text]
    with Unpacked(open_file(path), most_ratio=2) as narrow, pytest.raises(Refused, match="over 2 times"):
        narrow.read()


@pytest.mark.parametrize("name", ["t.txt", "t.jsonl", "t.txt.gz", "tokenizer.json"])
@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom", "fifo"])
def test_devices_and_idle_pipes_end_at_once(name: str, device: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if device == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(device)
    if name == "tokenizer.json":
        with pytest.raises(DataError, match="not a regular file"):
            FileTokenizer(path)
    elif device == "fifo":  # a shell's <(...) is one, too; without a writer it is empty
        assert list(read_documents([path])) == []
    else:
        with pytest.raises(DataError, match="not a regular file"):
            list(read_documents([path]))


def test_a_pipe_with_a_writer_is_read_to_its_end() -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        for _ in range(64):
            os.write(write, b"x" * 4096)
        os._exit(0)
    os.close(write)
    try:
        (text,) = read_documents([Path(f"/dev/fd/{read}")])
    finally:
        os.close(read)
        os.waitpid(pid, 0)
    assert text == "x" * (64 * 4096)
