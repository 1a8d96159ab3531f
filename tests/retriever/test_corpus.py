"""Offsets, ids and odd lines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import UserError
from protocol.runtime.files import sha256_file
from protocol.search import Passage
from retriever.corpus import corpus as corpus_module
from retriever.corpus.corpus import Corpus, read_texts, scan_corpus

ROWS = [
    {
        "id": "0",
        "contents": '"東京"\n東京 は日本の首都。',
        "source": "x",
        "title": "東京",
        "year": 1868,
        "old": True,
        "seen": None,
    },
    {"id": 1, "contents": "naïve café 🦊 \u2028 line\nseparators\r\n inside"},
    {"contents": "", "id": "empty"},
    {"id": "é", "contents": "last"},
]


def scanned(path: Path, directory: Path) -> Corpus:
    scan = scan_corpus(path, directory)
    texts = list(read_texts(path))
    corpus = Corpus(path, directory)
    assert (scan.passages, scan.bytes, scan.sha256) == (len(texts), path.stat().st_size, sha256_file(path))
    assert [corpus.passage(row).contents for row in range(len(corpus))] == texts
    return corpus


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n  \n"])
@pytest.mark.parametrize("head", ["", "\ufeff", "\n"])
def test_every_line_is_found_by_row_and_by_id(tmp_path: Path, ascii_only: bool, end: str, head: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes((head + end.join(json.dumps(row, ensure_ascii=ascii_only) for row in ROWS)).encode())
    corpus = scanned(path, tmp_path)
    assert len(corpus) == 4
    for number, row in enumerate(ROWS):
        expected = Passage.model_validate(row | {"id": str(row["id"])})
        assert corpus.passage(number) == expected
        assert corpus.find(str(row["id"])) == expected
    assert corpus.find("absent") is None


def test_what_a_passage_carries_beside_its_contents_is_bounded(tmp_path: Path) -> None:
    odd = {"vector": [0.5] * 768, "meta": {"a": 1}, "html": "x" * 4097, "n" * 65: 1, "big": 2**70, "nan": float("nan")}
    row = {"id": "0", "contents": "c", "url": "https://a/\ud800", **odd, **{f"f{i}": i for i in range(40)}}
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(row))
    scan = scan_corpus(path, tmp_path)
    kept = {"url": "https://a/?", **{f"f{i}": i for i in range(31)}}
    assert Corpus(path, tmp_path).passage(0).model_extra == kept
    assert scan.fields == tuple(kept)


def test_a_row_outside_is_an_error_and_never_the_last_passage(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(ROWS[0]))
    corpus = scanned(path, tmp_path)
    for row in (-1, 1):
        with pytest.raises(IndexError):
            corpus.passage(row)


def test_of_equal_ids_the_first_passage_is_found(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(json.dumps({"id": "same", "contents": str(i)}) for i in range(5)))
    found = scanned(path, tmp_path).find("same")
    assert found is not None
    assert found.contents == "0"


def test_ids_with_colliding_hashes_are_distinguished(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    scanned(path, tmp_path)
    hashes = np.load(tmp_path / "id_hashes.npy")
    wanted = int(np.load(tmp_path / "id_rows.npy").tolist().index(3))
    np.save(tmp_path / "id_hashes.npy", np.full_like(hashes, hashes[wanted]))
    found = Corpus(path, tmp_path).find("é")
    assert found is not None
    assert found.contents == "last"


def test_a_lone_surrogate_becomes_a_question_mark(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"id": "\\ud800", "contents": "a\\udfffb"}')
    assert scanned(path, tmp_path).passage(0) == Passage(id="?", contents="a?b")


def test_ids_sorted_in_many_ranges_are_found_and_texts_are_read_from_any_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"id": f"d{i % 900}", "contents": f"text {i}"}) + "\n" for i in range(1000)))
    scan_corpus(path, tmp_path)
    at_once = [(tmp_path / name).read_bytes() for name in corpus_module.SCAN_FILES]
    monkeypatch.setattr(corpus_module, "_SORT_ROWS", 7)
    corpus = scanned(path, tmp_path)
    assert [(tmp_path / name).read_bytes() for name in corpus_module.SCAN_FILES] == at_once
    assert all(corpus.find(f"d{i}") == Passage(id=f"d{i}", contents=f"text {i}") for i in range(900))
    offset = int(corpus_module.open_offsets(tmp_path)[990])
    assert list(read_texts(path, offset)) == [f"text {i}" for i in range(990, 1000)]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{not json}", "Expecting property name"),
        ("[1]", "expected an object, found a list"),
        ('{"id": "1", "text": "x"}', "missing contents; it has ['id', 'text']"),
        ('{"id": "1", "contents": null}', "must be a string"),
        ('{"id": [], "contents": "x"}', "must be a string"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(UserError) as caught:
        scan_corpus(path, tmp_path)
    assert "line 2 of" in caught.value.what
    assert complaint in caught.value.why


def test_a_line_without_end_is_refused_before_it_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "corpus.jsonl"
    line = '{"id": "1", "contents": "a"}'
    path.write_text(line + "\n" + line.replace("a", "a" * 5000))
    monkeypatch.setattr("retriever.corpus.corpus.MAX_RECORD", 1000)
    for read in (lambda: scan_corpus(path, tmp_path), lambda: list(read_texts(path))):
        with pytest.raises(UserError, match=r"line 2 of .*/corpus.jsonl") as refused:
            read()
        assert refused.value.why == "it has more than 1,000 bytes"


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"id": "1", "contents": "\xff"}')
    with pytest.raises(UserError, match="line 1"):
        scan_corpus(path, tmp_path)


def test_a_missing_corpus_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the corpus"):
        scan_corpus(tmp_path / "absent.jsonl", tmp_path)


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(st.characters(exclude_categories=("Cs",))), min_size=1, max_size=8))
def test_any_text_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    directory = tmp_path_factory.mktemp("corpus")
    path = directory / "c.jsonl"
    path.write_text(
        "\n".join(json.dumps({"id": text, "contents": text}, ensure_ascii=False) for text in texts), newline=""
    )
    corpus = scanned(path, directory)
    assert [corpus.passage(row).contents for row in range(len(texts))] == texts
    assert all(corpus.find(text) == Passage(id=text, contents=text) for text in texts)
