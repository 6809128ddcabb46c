"""Documents: every form of input in a fixed order, and every bad one as one clear line."""

from __future__ import annotations

import gzip
import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from memo.errors import DataError
from memo.gpt.data.documents import find_files, read_documents, read_packages, standard_library


def _texts(*names: Path | str, field: str = "text") -> list[str]:
    return list(read_documents(find_files([str(name) for name in names]), field=field))


def _refused(says: str, *names: Path | str, field: str = "text") -> None:
    with pytest.raises(DataError, match=says) as caught:
        _texts(*names, field=field)
    assert "\n" not in str(caught.value)


def test_text_files_in_the_order_named(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.unknown").write_text("first")
    assert _texts(tmp_path / "b.txt", tmp_path / "a.unknown") == ["second", "first"]


def test_directory_is_read_recursively_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "z.md").write_text("z")
    (tmp_path / "deep" / "er" / "m.py").write_text("m")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "rows.jsonl").write_text('{"text": "row"}\n')
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    assert _texts(tmp_path) == ["a", "m", "row", "z"]


def test_glob_matches_files_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.txt").write_text("d")
    assert _texts(tmp_path / "[ab].txt") == ["a", "b"]
    assert _texts(tmp_path / "**" / "*.txt") == ["a", "b", "c", "d"]


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    assert _texts(tmp_path / "a.txt", tmp_path, tmp_path / "*.txt") == ["a"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("literal")
    (tmp_path / "a1.txt").write_text("match")
    assert _texts(tmp_path / "a[1].txt") == ["literal"]


def test_bad_utf8_is_replaced_and_empty_documents_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"a\xff\xfeb")
    (tmp_path / "empty.txt").write_bytes(b"")
    assert _texts(tmp_path) == ["a\ufffd\ufffdb"]


def test_gzip_is_looked_through(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text"))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "row"}\n'))
    assert _texts(tmp_path) == ["text", "row"]


def test_torn_gzip_is_a_data_error(tmp_path: Path) -> None:
    whole = gzip.compress(bytes(range(256)) * 100)
    (tmp_path / "a.txt.gz").write_bytes(whole[: len(whole) // 2])
    _refused("cannot read .*a.txt.gz", tmp_path)
    (tmp_path / "a.txt.gz").write_bytes(b"not gzip")
    _refused("cannot read .*a.txt.gz", tmp_path)
    (tmp_path / "a.txt.gz").write_bytes(whole[:40] + b"\0\1\2\3" * 9 + whole[60:])
    _refused("cannot read .*a.txt.gz", tmp_path)


def test_json_lines_by_field(tmp_path: Path) -> None:
    rows = [{"text": "one", "body": "ä"}, {"text": "", "body": "two"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    assert _texts(path) == ["one"]
    assert _texts(path, field="body") == ["ä", "two"]


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a\\ud800b"}')
    assert _texts(path) == ["a?b"]


@pytest.mark.parametrize(
    ("second_line", "says"),
    [
        ('{"body": "x", "id": 1}', "line 2: no field 'text'; it has body, id; choose one with --field"),
        ("{}", "line 2: no field 'text'; it has none"),
        ('{"text": 5}', "line 2: field 'text' is not text but int"),
        ('{"text": null}', "line 2: field 'text' is not text but NoneType"),
        ('["text"]', "line 2: not a JSON object"),
        ('{"text": ', "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
    ],
)
def test_bad_json_lines_name_file_and_line(tmp_path: Path, second_line: str, says: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n' + second_line + "\n")
    _refused(f"rows.jsonl, {says}", path)


def test_parquet_by_column(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    table = {"text": ["one", None, "two"], "body": ["x"] * 3, "id": [1, 2, 3]}
    parquet.write_table(pyarrow.table(table), path)
    assert _texts(path) == ["one", "two"]
    assert _texts(path, field="body") == ["x"] * 3
    _refused("no column 'title'; it has text, body, id; choose one with --field", path, field="title")
    _refused("column 'id' is not text but int", path, field="id")
    path.write_bytes(b"PAR1 this is no table PAR1")
    _refused("not a readable Parquet file", path)
    path.write_bytes(b"")
    _refused("rows.parquet", path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    _refused("needs pyarrow; pip install pyarrow", tmp_path)


def test_what_is_not_there_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "only.bin").write_bytes(b"x")
    (tmp_path / "sub").mkdir()
    _refused("missing.txt: no such file, directory or glob", tmp_path / "missing.txt")
    _refused("no such file, directory or glob", tmp_path / "*.txt")
    _refused("no such file, directory or glob", tmp_path / "su*")
    _refused("no text, .jsonl or .parquet file in this directory", tmp_path)
    _refused("no such file", "with\0nul")
    _refused("no such file", "x" * 5000)
    with pytest.raises(DataError, match="no data given"):
        find_files([])


def test_unreadable_file_is_a_data_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")

    def denied(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("memo.gpt.data.documents.open_file", denied)
    _refused("cannot read .*a.txt: Permission denied", tmp_path)


def test_default_is_the_standard_library_without_installed_packages() -> None:
    files = find_files(None)
    assert files == standard_library() == sorted(files)
    assert Path(sysconfig.get_path("stdlib")) / "json" / "decoder.py" in files
    assert not [file for file in files if "site-packages" in file.parts or "dist-packages" in file.parts]
    assert sum(file.stat().st_size for file in files) > 5 << 20


def test_python_without_source_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"no source of its standard library .* name data with --data"):
        find_files(None)


def test_packages_of_the_standard_library_are_documents_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    for name, text in {"a.py": "a\n\n", "b/__init__.py": "\n", "b/c/d.py": "d", "b/e.py": "e\n", "b.py": "b"}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert list(read_packages(standard_library())) == ["a\n", "d\ne\n", "b\n"]


def test_the_standard_library_has_a_package_of_a_million_bytes() -> None:
    # What examples/train_1m.py trains on without --data: idlelib and test may be missing, encodings never is.
    assert max(map(len, read_packages(standard_library()))) > 1 << 20


@pytest.mark.parametrize(("name", "says"), [("", "an empty name is no data"), ("/dev/zero", "a device, not a file")])
def test_what_is_endless_or_unnamed_is_refused(name: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        find_files([name])
