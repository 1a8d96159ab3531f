"""`retriever.fields`, and settings of which no default request could be answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from protocol.errors import UserError
from retriever.backends.index import open_searcher
from retriever.config import RetrieverSettings
from retriever.corpus.manifest import MANIFEST


@pytest.fixture
def rich(tmp_path: Path) -> Path:
    """A corpus whose passages also have a title and a url."""
    path = tmp_path / "rich.jsonl"
    lines = [{"id": f"d{i}", "contents": f'"T"\nword{i}', "title": "T", "url": f"http://x/{i}"} for i in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_fields_that_are_sent_belong_to_the_fingerprint(rich: Path) -> None:
    opened = [open_searcher(RetrieverSettings(corpus=rich, fields=fields)) for fields in (None, (), ("url",))]
    assert len({searcher.fingerprint for searcher in opened}) == 3
    assert [searcher.info()["fields"] for searcher in opened] == [["title", "url"], [], ["url"]]


def test_an_index_with_unknown_fields_reports_that(rich: Path) -> None:
    manifest = RetrieverSettings(corpus=rich).index_path / MANIFEST
    open_searcher(RetrieverSettings(corpus=rich))
    old = json.loads(manifest.read_text())
    del old["fields"]
    manifest.write_text(json.dumps(old))
    assert open_searcher(RetrieverSettings(corpus=rich)).info()["fields"] is None
    chosen = open_searcher(RetrieverSettings(corpus=rich, fields=("url",)))
    assert chosen.info()["fields"] == ["url"]
    (answer,) = chosen.search(["word1"], 1)
    assert set(json.loads(answer.documents[0])) == {"id", "contents", "url"}


@pytest.mark.parametrize("name", ["urll", "id", "contents"])
def test_a_field_that_the_corpus_lacks_is_refused(rich: Path, name: str) -> None:
    with pytest.raises(UserError, match=rf"no field '{name}'"):
        open_searcher(RetrieverSettings(corpus=rich, fields=("url", name)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"topk": 1001}, "less than or equal to 1000"),
        ({"overload_wait_s": 1e9}, "less than or equal to 3600"),
    ],
)
def test_settings_that_refuse_every_default_request_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RetrieverSettings.model_validate(settings)
