"""Every shape of corpus becomes the same lines, and what is broken is named."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from protocol.errors import UserError
from retriever.corpus.formats import FORMATS
from retriever.corpus.formats.base import Document, content_id
from retriever.corpus.formats.plain import split_contents
from retriever.corpus.formats.synthetic import Synthetic
from retriever.indexing.input import CORPUS, CorpusInput, documents, read_input, write_corpus

PAGES = [("Ada", "Ada wrote\tthe first program."), ("東京", "日本の首都 \u2028 である。"), ("", "no title, 🦊")]
CONTENTS = [f'"{title}"\n{text}' if title else text for title, text in PAGES]

Write = Callable[[Path, list[dict[str, Any]]], None]


def as_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("\ufeff" + "\n\n".join(json.dumps(record, ensure_ascii=False) for record in records))


def as_gzip(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(record) + "\r\n" for record in records).encode()))


def as_array(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text(" \n" + json.dumps(records, indent=1))


def as_parquet(path: Path, records: list[dict[str, Any]]) -> None:
    columns = {key: [record[key] for record in records] for key in records[0]}
    pq.write_table(pa.table({**columns, "embedding": [[0.5] * 4] * len(records)}), path, row_group_size=2)


def as_tsv(path: Path, records: list[dict[str, Any]]) -> None:
    rows = [list(records[0]), *([str(value) for value in record.values()] for record in records)]
    quoted = ("\t".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows)
    path.write_text("\n".join(quoted))


def lines_of(given: CorpusInput, directory: Path) -> list[dict[str, str]]:
    """What the corpus becomes."""
    write_corpus(given, directory / CORPUS, lambda share, passages: None)
    return [json.loads(line) for line in (directory / CORPUS).read_bytes().splitlines()]


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (as_lines, "c.jsonl"),
        (as_gzip, "c.jsonl.gz"),
        (as_array, "c.json"),
        (as_parquet, "c.parquet"),
        (as_tsv, "c.tsv"),
    ],
)
def test_titles_and_texts_in_any_file_become_lines_of_contents(tmp_path: Path, write: Write, name: str) -> None:
    write(tmp_path / name, [{"id": f"p{i}", "title": t, "text": x} for i, (t, x) in enumerate(PAGES)])
    given = read_input(tmp_path / name)
    assert (given.format, given.in_place) == ("title_text", False)
    assert lines_of(given, tmp_path) == [{"id": f"p{i}", "contents": text} for i, text in enumerate(CONTENTS)]


@pytest.mark.parametrize(
    ("write", "name", "in_place"),
    [(as_lines, "c.jsonl", True), (as_lines, "noname", True), (as_gzip, "c.gz", False), (as_array, "c.jsonl", False)],
)
def test_only_plain_lines_of_contents_are_taken_where_they_lie(
    tmp_path: Path, write: Write, name: str, in_place: bool
) -> None:
    write(tmp_path / name, [{"id": i, "contents": text, "source": "x"} for i, text in enumerate(CONTENTS)])
    given = read_input(tmp_path / name)
    assert (given.format, given.in_place) == ("contents", in_place)
    expected = [{"id": str(i), "contents": text, "source": "x"} for i, text in enumerate(CONTENTS)]
    assert lines_of(given, tmp_path) == expected


PARAGRAPHS = [["Ada", ["Ada wrote.", " She did."]], ["Bell", ["Bell rang."]]]
AS_COLUMNS = {"title": ["Ada", "Bell"], "sentences": [["Ada wrote.", " She did."], ["Bell rang."]]}
MUSIQUE = [{"idx": 0, "title": "Ada", "paragraph_text": "Ada wrote. She did."},
           {"idx": 1, "title": "Bell", "paragraph_text": "Bell rang."}]  # fmt: skip


@pytest.mark.parametrize(
    ("record", "form"),
    [
        ({"_id": "q", "question": "?", "context": PARAGRAPHS}, "hotpotqa"),
        ({"id": "q", "question": "?", "context": AS_COLUMNS}, "hotpotqa"),
        ({"id": "q", "question": "?", "context": json.dumps(PARAGRAPHS)}, "hotpotqa"),
        ({"id": "q", "question": "?", "paragraphs": MUSIQUE}, "musique"),
    ],
)
def test_paragraphs_of_questions_become_passages_once_with_names_of_their_own(
    tmp_path: Path, record: dict[str, Any], form: str
) -> None:
    path = tmp_path / "questions.json"
    path.write_text(json.dumps([record, {**record, "question": "another"}]))
    given = read_input(path)
    assert given.format == form
    found = lines_of(given, tmp_path)
    assert [line["contents"] for line in found] == ['"Ada"\nAda wrote. She did.', '"Bell"\nBell rang.']
    assert found[0]["id"] == content_id(Document("", "Ada", "Ada wrote. She did.")) == "0784f54929896a32"
    assert found[1]["id"] != found[0]["id"]


def test_long_documents_are_cut_and_every_piece_keeps_its_title(tmp_path: Path) -> None:
    as_lines(
        tmp_path / "c.jsonl", [{"id": "d", "contents": '"T"\none two three\nfour five'}, {"id": "e", "contents": ""}]
    )
    given = read_input(tmp_path / "c.jsonl", words=2)
    assert not given.in_place
    assert lines_of(given, tmp_path) == [
        {"id": "d#0", "contents": '"T"\none two'},
        {"id": "d#1", "contents": '"T"\nthree four'},
        {"id": "d#2", "contents": '"T"\nfive'},
        {"id": "e#0", "contents": ""},
    ]


@pytest.mark.parametrize(
    ("contents", "expected"),
    [('"T"\nx\ny', ("T", "x\ny")), ('"a "b" c"\nx', ('a "b" c', "x")), ("T\nx", ("", "T\nx")), ('"T"', ("", '"T"'))],
)
def test_a_title_is_a_first_line_in_quotes(contents: str, expected: tuple[str, str]) -> None:
    assert split_contents(contents) == expected
    assert Document("", *expected).contents == contents


def test_a_directory_is_read_file_by_file(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    as_parquet(folder / "b.parquet", [{"id": "2", "text": "two"}, {"id": "3", "text": "three"}])
    as_gzip(folder / "a.jsonl.gz", [{"id": "1", "text": "one"}])
    (folder / "README.md").write_text("not a corpus")
    assert [line["id"] for line in lines_of(read_input(folder), tmp_path)] == ["1", "2", "3"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no corpus found in"):
        read_input(tmp_path / "empty")


def test_progress_never_goes_back_and_ends_at_one(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("a", "b"):
        as_array(folder / f"{name}.json", [{"id": f"{name}{i}", "text": "x" * 3000} for i in range(900)])
    shares: list[float] = []
    for _ in documents(read_input(folder), lambda share, passages: shares.append(share)):
        pass
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert any(0 < share < 0.5 for share in shares) and any(0.5 <= share < 1 for share in shares)


def _truncated_gzip(path: Path) -> None:
    as_gzip(path, [{"id": str(i), "text": os.urandom(9).hex()} for i in range(99)])
    path.write_bytes(path.read_bytes()[:-40])


def _broken_array(path: Path) -> None:
    path.write_text('[{"id": "1", "text": "x"}, {"id": "2", "te')


def _damaged_parquet(path: Path) -> None:
    path.write_bytes(b"PAR1 and then nothing of the kind")


def _latin_1(path: Path) -> None:
    path.write_bytes(b'{"id": "1", "text": "\xe9t\xe9"}\n')


def _wrong_type(path: Path) -> None:
    path.write_text('{"id": "1", "text": "x"}\n{"id": "2", "text": 3}\n')


def _missing_field(path: Path) -> None:
    path.write_text('{"id": "1", "text": "x"}\n{"id": "2", "title": "y"}\n')


@pytest.mark.parametrize(
    ("write", "complaint"),
    [
        (_truncated_gzip, "cannot read the corpus"),
        (_broken_array, "record 2 of"),
        (_damaged_parquet, "cannot read the corpus"),
        (_latin_1, "not UTF-8"),
        (_wrong_type, "`text` is a int, not text"),
        (_missing_field, "no 'text'"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, write: Callable[[Path], None], complaint: str) -> None:
    write(tmp_path / "c")
    with pytest.raises(UserError) as caught:
        list(documents(read_input(tmp_path / "c"), lambda share, passages: None))
    assert complaint in caught.value.render()
    assert str(tmp_path / "c") in caught.value.render()


def test_unknown_formats_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    as_lines(tmp_path / "c.jsonl", [{"question": "?", "answer": "!"}])
    with pytest.raises(UserError, match="unknown corpus format") as caught:
        read_input(tmp_path / "c.jsonl")
    assert all(name in caught.value.todo for name in FORMATS)
    with pytest.raises(UserError, match="unknown format 'hotpot'"):
        read_input(tmp_path / "c.jsonl", "hotpot")


def test_synthetic_text_is_the_same_everywhere_and_a_longer_corpus_begins_with_a_shorter(tmp_path: Path) -> None:
    shorter, longer = read_input("synthetic:40"), read_input("synthetic:1100:0")
    assert [*documents(shorter, lambda s, n: None)] == [*documents(longer, lambda s, n: None)][:40]
    write_corpus(longer, tmp_path / "c", lambda share, passages: None)
    content = (tmp_path / "c").read_bytes()
    assert hashlib.sha256(content).hexdigest() == "aade18cfd00544ea2a69678fe5ab83345c1bec65662c179494a887866a57f983"
    words = [len(json.loads(line)["contents"].split("\n")[1].split()) for line in content.splitlines()]
    assert (min(words), max(words)) == (80, 120)
    other = [document.text for document in Synthetic(40, seed=1).documents()]
    assert not set(other) & {document.text for document in Synthetic(40, seed=0).documents()}


@pytest.mark.parametrize("spec", ["synthetic:", "synthetic:0", "synthetic:x", "synthetic:5:", "synthetic:5:-1"])
def test_a_misspelt_synthetic_corpus_is_explained(spec: str) -> None:
    if spec == "synthetic:5:":
        assert read_input(spec).spec == "synthetic:5:0"
        return
    with pytest.raises(UserError, match="not of the form synthetic:N"):
        read_input(spec)


@pytest.mark.data
def test_the_published_files_are_read() -> None:
    directory = Path(os.environ.get("FORAY_DATA", "")) / "formats"
    if not directory.is_dir():
        pytest.skip("FORAY_DATA does not name a directory with formats/")
    counts = {"hotpotqa_distractor_40.json": 400, "musique_10.json": 196, "search_r1_example_corpus.jsonl": 10}
    for name, count in counts.items():
        found = list(documents(read_input(directory / name), lambda share, passages: None))
        assert (len(found), len({document.id for document in found})) == (count, count)
        assert all(document.title and document.text for document in found)
