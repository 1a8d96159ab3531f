"""Files of records: every row is read, or refused with its number, or counted; no row takes unbounded memory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from protocol.errors import UserError
from protocol.runtime import records
from protocol.runtime.records import RecordKind, RecordReader, RowCount

KIND = RecordKind("row", "table", "give another file")


def read(path: Path, *, skip: bool = False) -> tuple[list[tuple[int, dict[str, Any]]], RowCount]:
    rows = RowCount(skip_invalid=skip)
    return [(number, dict(record)) for number, record in RecordReader(path, KIND, rows=rows)], rows


def cells(path: Path) -> list[list[str]]:
    return [list(record.values()) for _, record in read(path)[0]]


def test_a_quote_that_is_not_closed_takes_no_other_row(tmp_path: Path) -> None:
    path = tmp_path / "q.tsv"
    lines = ["id\ttext", '1\t"Heroes" is by whom?', '2\t"Who wrote it?', "3\tx", '4\t"a ""b"" c"', '5\t"tab\there"']
    path.write_text("\n".join(lines) + '\n\n6\t"\n')
    expected = ['"Heroes" is by whom?', '"Who wrote it?', "x", 'a "b" c', "tab\there", '"']
    assert cells(path) == [[str(n), text] for n, text in enumerate(expected, start=1)]
    assert [number for number, _ in read(path)[0]] == [2, 3, 4, 5, 6, 8]


@pytest.mark.parametrize(
    ("text", "refused", "kept"),
    [
        ('a,b\n1,"x\n2,y\n3,z\n', "line 2", None),
        ('a,b\n1,"x\n2,y "or" z\n3,z\n', "line 2", None),
        ('a,b\n1,"x" y\n2,"y\nz"\n3,z\n', "line 2", [["2", "y\nz"], ["3", "z"]]),
        ("a,b\n1,x\n2\n3,y,z\n4,w\n", "line 3", [["1", "x"], ["4", "w"]]),
        ("a\tb\n1\tx\n2\n3\ty\tz\n4\tw\n", "line 3", [["1", "x"], ["4", "w"]]),
    ],
)
def test_a_row_of_another_width_is_refused_or_counted(
    tmp_path: Path, text: str, refused: str, kept: list[list[str]] | None
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=f"{refused} of "):
        read(path)
    if kept is None:  # how many rows the quote swallowed is unknown
        with pytest.raises(UserError, match=f"{refused} of "):
            read(path, skip=True)
        return
    found, rows = read(path, skip=True)
    assert [list(record.values()) for _, record in found] == kept
    assert rows.read == len(kept) + rows.dropped.total() and rows.valid == len(kept)


def test_a_quote_that_is_closed_by_chance_is_counted_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "q.csv"
    path.write_text('id,question,answer\n1,x,a\n2,"Heroes who?,a\n3,who is 12",b\n\n4,"y\nz",c\n')
    found, rows = read(path)
    assert [number for number, _ in found] == [2, 3, 6] and rows.broken == 2
    said = f"2 rows have line breaks in a field (first: lines 3 to 4 of {path}): check that they are one row"
    assert rows.account(3, "") == f"3 rows read: 3 written; {said}"
    path.write_text('a,b\n1,"' + "x\n" * 300 + 'y",2\n')
    for skip in (False, True):
        with pytest.raises(UserError, match=r"line 2 of ") as refused:
            read(path, skip=skip)
        assert "closed 300 lines later" in refused.value.why


def test_the_last_suffix_says_whether_a_file_is_a_table(tmp_path: Path) -> None:
    (tmp_path / "q.tsv.jsonl").write_text('{"a": "x\\ty"}\n')
    assert read(tmp_path / "q.tsv.jsonl")[0] == [(1, {"a": "x\ty"})]
    (tmp_path / "q.tsv.gz").write_bytes(gzip.compress(b"a\tb\nx\ty\n"))
    assert cells(tmp_path / "q.tsv.gz") == [["x", "y"]]


def test_invalid_lines_are_counted_with_their_reason_and_the_first_one(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"a": 1}\n{\n\n[2]\n{"a": 2}\n}\n')
    found, rows = read(path, skip=True)
    assert [number for number, _ in found] == [1, 5]
    assert dict(rows.dropped) == {"not JSON": 2, "expected an object, found a list": 1} and rows.read == 5
    said = rows.account(1, "not drawn")
    assert said.startswith("5 rows read: 1 written, 1 not drawn, 2 dropped: not JSON (first: line 2 of ")


def test_the_list_of_a_nested_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.json"  # TriviaQA's shape
    path.write_text(json.dumps({"Data": [{"a": 1}, {"a": 2}], "Domain": "x", "Version": 1.0}, indent=4))
    assert [record for _, record in read(path)[0]] == [{"a": 1}, {"a": 2}]


def test_text_after_an_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('[{"a": 1}]\n[{"a": 2}]')
    with pytest.raises(UserError) as caught:
        read(path)
    assert "after the end of the array" in caught.value.why


def _line(path: Path) -> None:
    path.write_bytes(gzip.compress(b'{"a": 1}\n{"a": "' + b"x" * 5000))


def _array(path: Path) -> None:
    path.write_bytes(gzip.compress(b'[{"a": 1}, {"a": "' + b"x" * 5000))


def _blanks(path: Path) -> None:
    path.write_bytes(gzip.compress(b"\n" + b" " * 5000))


@pytest.mark.parametrize("write", [_line, _array, _blanks])
def test_a_line_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(records, "MAX_RECORD", 1000)
    monkeypatch.setattr(records, "_CHUNK", 100)
    write(tmp_path / "q")
    with pytest.raises(UserError, match=r"(line|record) 2 of "):
        read(tmp_path / "q", skip=True)


@pytest.mark.parametrize("plain", [True, False], ids=["strings", "dictionary"])
def test_a_value_that_a_small_file_repeats_is_not_held_many_times(tmp_path: Path, plain: bool) -> None:
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 100, pa.int32()), pa.array(["x" * (4 << 20)]))
    pq.write_table(pa.table({"text": text}), tmp_path / "b.parquet", store_schema=not plain, compression="zstd")
    assert (tmp_path / "b.parquet").stat().st_size < 10_000
    before, most = pa.total_allocated_bytes(), 0
    numbers = []
    for number, _ in RecordReader(tmp_path / "b.parquet", KIND):
        numbers.append(number)
        most = max(most, pa.total_allocated_bytes() - before)
    assert numbers == list(range(1, 101)) and most < 64 << 20


def test_rows_beyond_the_limit_of_a_batch_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_MAX_BATCH", 1000)
    table = pa.table({"text": ["a", "b" * 5000]})
    pq.write_table(table, tmp_path / "b.parquet")
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    for name in ("b.parquet", "b.arrow"):
        with pytest.raises(UserError) as caught:
            read(tmp_path / name)
        assert "rows 1 to 2 have 5," in caught.value.why
