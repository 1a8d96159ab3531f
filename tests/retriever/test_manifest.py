"""What an index says about itself: where its corpus is, with what it was built, and what does not fit it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import UserError
from protocol.runtime.progress import Progress
from retriever.backends.index import open_searcher
from retriever.config import RetrieverSettings
from retriever.corpus.manifest import MANIFEST, corpus_of, read_manifest, settings_of
from retriever.index import index_identity
from retriever.index.config import Bm25Settings, FaissIvfSettings, MemoryIndexSettings
from retriever.indexing import build
from retriever.indexing.build import build_index
from retriever.indexing.verify import verify_index


def quiet(_line: str) -> None:
    """Discarded progress."""


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """An index of synthetic text, with its corpus inside."""
    settings = MemoryIndexSettings.model_validate({"encoder": {"type": "hashed", "dim": 16}})
    build_index("synthetic:30", tmp_path / "index", settings, progress=quiet)
    return tmp_path / "index"


def test_a_converted_corpus_lies_in_the_index_and_moves_with_it(converted: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    converted.rename(moved)
    assert corpus_of(moved, None) == moved / "corpus.jsonl"
    searcher = open_searcher(RetrieverSettings(index_dir=moved))
    passage = searcher.find("7")
    assert passage is not None
    assert b'"id": "7"' in searcher.search([passage.contents], 1)[0].documents[0]


def test_an_index_can_be_replaced_by_one_of_the_corpus_that_lies_in_it(converted: Path) -> None:
    text = (converted / "corpus.jsonl").read_bytes()
    build_index(converted / "corpus.jsonl", converted, Bm25Settings(), overwrite=True, progress=quiet)
    assert read_manifest(converted).type == "bm25"
    assert corpus_of(converted, None).read_bytes() == text


def test_a_service_over_a_corpus_of_another_format_converts_it(tmp_path: Path) -> None:
    table = tmp_path / "psgs.tsv"
    table.write_text("id\ttext\ttitle\n1\tAda wrote a program\tAda\n2\tBell rang\tBell\n")
    for _ in range(2):  # builds, and opens what was built
        searcher = open_searcher(RetrieverSettings(corpus=table))
        assert b'\\"Bell\\"\\nBell rang' in searcher.search(["rang"], 1)[0].documents[0]


@pytest.mark.parametrize("folder", [False, True])
def test_a_converted_corpus_that_has_changed_is_not_served_stale(tmp_path: Path, folder: bool) -> None:
    table = tmp_path / "passages" / "a.tsv"
    table.parent.mkdir()
    table.write_text("id\ttext\ttitle\n1\tAda wrote a program\tAda\n2\tBell rang\tBell\n")
    corpus, index, before = table.parent if folder else table, tmp_path / "index", table.read_text()
    build_index(corpus, index, Bm25Settings(), progress=quiet)
    settings = RetrieverSettings(corpus=corpus, index_dir=index)
    sizes_only = settings.model_copy(update={"verify_corpus": False})
    for change, noticed_by in (
        (before.replace("rang", "sang"), [settings]),
        (before + "3\tCuri found radium\tCuri\n", [settings, sizes_only]),
    ):
        table.write_text(change)
        for chosen in noticed_by:
            with pytest.raises(UserError, match=f"{corpus} has changed since {index} was built") as refused:
                open_searcher(chosen)
        with pytest.raises(UserError, match="has changed"):
            verify_index(index, Progress.of(quiet), corpus=corpus)
    assert f"foray index build --corpus {corpus} --out {index} --index bm25" in refused.value.todo
    with pytest.raises(UserError, match="already exists"):
        build_index(corpus, index, Bm25Settings(), progress=quiet)
    table.write_text(before)
    assert open_searcher(settings).search(["rang"], 1)[0].documents
    table.unlink()
    if not folder:
        assert open_searcher(settings).search(["rang"], 1)[0].documents, "the copy is complete"


def test_an_index_without_a_checksum_of_its_input_is_used_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table, index = tmp_path / "a.tsv", tmp_path / "index"
    table.write_text("id\ttext\ttitle\n1\tAda wrote a program\tAda\n")
    build_index(table, index, Bm25Settings(), progress=quiet)
    manifest = json.loads((index / MANIFEST).read_text())
    del manifest["source"]["sha256"], manifest["source"]["bytes"]
    (index / MANIFEST).write_text(json.dumps(manifest))
    for configured in (None, table, table):
        assert corpus_of(index, configured) == index / "corpus.jsonl"
    (said,) = caplog.messages
    assert said.startswith(f"unverified: whether {table} has changed") and "--overwrite" in said


def test_an_input_that_changes_while_it_is_converted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "a.tsv"
    table.write_text("id\ttext\ttitle\n1\tAda wrote a program\tAda\n")
    write = build.write_index

    def changed(*given: Any) -> None:
        write(*given)
        with table.open("a") as file:
            file.write("2\tBell rang\tBell\n")

    monkeypatch.setattr(build, "write_index", changed)
    with pytest.raises(UserError, match="changed while it was indexed"):
        build_index(table, tmp_path / "index", Bm25Settings(), progress=quiet)


def test_a_corpus_that_was_converted_may_also_be_named_by_its_origin(converted: Path, tmp_path: Path) -> None:
    for origin in ("synthetic:30", "synthetic:30:0"):
        assert corpus_of(converted, Path(origin)) == converted / "corpus.jsonl"
    assert corpus_of(converted, tmp_path / "other.jsonl") == tmp_path / "other.jsonl"


def test_a_corpus_that_was_indexed_where_it_lies_is_found_there(corpus: Path, tmp_path: Path) -> None:
    build_index(corpus, tmp_path / "index", Bm25Settings(), progress=quiet)
    assert corpus_of(tmp_path / "index", None) == corpus
    assert not (tmp_path / "index" / "corpus.jsonl").exists()
    corpus.rename(tmp_path / "moved.jsonl")
    with pytest.raises(UserError, match="was moved or removed"):
        corpus_of(tmp_path / "index", None)
    assert corpus_of(tmp_path / "index", tmp_path / "moved.jsonl") == tmp_path / "moved.jsonl"


def test_the_settings_of_the_build_are_known_and_can_be_changed_in_part(converted: Path) -> None:
    built = settings_of(converted)
    assert built == MemoryIndexSettings.model_validate({"encoder": {"type": "hashed", "dim": 16}})
    changed = settings_of(converted, {"encoder": {"ngram": 3}})
    assert (changed.encoder.dim, changed.encoder.ngram) == (16, 3)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="cannot be opened with the settings"):
        settings_of(converted, {"encoder": {"ngrams": 3}})


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"encoder": {"type": "hashed", "dim": 24}}, "encoder.dim: built with 16, configured 24"),
        ({"encoder": {"type": "hashed", "dim": 16, "ngram": 3}}, "encoder.ngram: built with 4, configured 3"),
        (
            {"encoder": {"type": "openai", "dim": 16, "query_prefix": "query: "}},
            "encoder.query_prefix: built with absent, configured 'query: '",
        ),
        (
            {"encoder": {"type": "hashed", "dim": 16}, "dtype": "float16"},
            "dtype: built with float32, configured float16",
        ),
    ],
)
def test_serving_with_another_encoder_is_refused_and_the_field_is_named(
    converted: Path, fields: dict[str, Any], complaint: str
) -> None:
    index = {"type": "memory", **fields}
    with pytest.raises(UserError) as caught:
        open_searcher(RetrieverSettings.model_validate({"index_dir": converted, "index": index}))
    assert complaint in caught.value.render()


def test_every_file_has_its_checksum(converted: Path) -> None:
    manifest = read_manifest(converted)
    assert sorted([MANIFEST, *manifest.files]) == sorted(path.name for path in converted.iterdir())
    assert manifest.checksums.keys() == manifest.files.keys()
    assert manifest.checksums["corpus.jsonl"] == manifest.corpus_sha256
    assert json.loads((converted / MANIFEST).read_text())["source"]["spec"] == "synthetic:30:0"


def test_an_index_of_a_version_with_more_settings_still_matches(converted: Path) -> None:
    """Removed settings at their former default are left out, and what an index depends on stays in its identity."""
    manifest = json.loads((converted / MANIFEST).read_text())
    encoder = {"type": "openai", "dim": 16, "max_chars": 8192, "batch": 64, "backoff_s": 0.5}
    former = {"type": "faiss_ivf", "nlist": 4, "train_size": 0, "seed": 0, "temp_mb": 512.0, "encoder": encoder}

    def opened(**changed: Any) -> Any:
        (converted / MANIFEST).write_text(json.dumps(manifest | {"settings": former | changed}))
        return settings_of(converted)

    identity = index_identity(opened())
    assert (identity["seed"], identity["train_size"], identity["encoder"]["max_chars"]) == (0, 0, 8192)
    now = {"nlist": 4, "encoder": {"type": "openai", "dim": 16}}
    assert identity == index_identity(FaissIvfSettings.model_validate(now))
    with pytest.raises(UserError) as raised:
        opened(seed=7)
    assert "seed: Extra inputs" in raised.value.why
