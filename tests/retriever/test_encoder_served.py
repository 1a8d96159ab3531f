"""A model from building to serving: the index knows which model, prefix and pooling made it; reranked at the end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import UserError
from retriever.backends.index import Searcher, open_searcher
from retriever.config import RetrieverSettings
from tests.support.encoders import tiny_model

QUERY = "who discovered radium"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "e5-tiny")


@pytest.fixture
def searcher(corpus: Path, model: Path, tmp_path: Path) -> Any:
    """Open the index in `tmp_path / "index"`, which the first call builds; keyword arguments are the encoder's."""

    def make(rerank: dict[str, Any] | None = None, **encoder: Any) -> Searcher:
        chosen = {"type": "transformer", "model": model, "device": "cpu", **encoder}
        settings = {"corpus": corpus, "index_dir": tmp_path / "index", "rerank": rerank}
        return open_searcher(
            RetrieverSettings.model_validate({**settings, "index": {"type": "faiss_flat", "encoder": chosen}})
        )

    return make


def ids(searcher: Searcher, k: int = 5) -> list[str]:
    return [json.loads(document)["id"] for document in searcher.search([QUERY], k)[0].documents]


def test_an_index_is_served_by_the_model_that_built_it_wherever_it_lies(
    searcher: Any, model: Path, tmp_path: Path
) -> None:
    built = searcher()
    moved = Path(shutil.copytree(model, tmp_path / "elsewhere" / "renamed"))
    again = searcher(model=moved, family="e5", dtype="float32")
    assert ids(again) == ids(built)
    assert again.fingerprint == built.fingerprint


def test_another_model_prefix_or_pooling_is_refused_and_named(searcher: Any, tmp_path: Path) -> None:
    searcher()
    other = tiny_model(tmp_path / "e5-other", seed=9)
    for changed, word in (
        ({"model": other}, "encoder.model"),
        ({"query_prefix": ""}, "encoder.query_prefix"),
        ({"passage_prefix": "text: "}, "encoder.passage_prefix"),
        ({"pooling": "cls"}, "encoder.pooling"),
        ({"normalize": False}, "encoder.normalize"),
        ({"max_passage_tokens": 20}, "encoder.max_passage"),
    ):
        with pytest.raises(UserError) as caught:
            searcher(**changed)
        assert word in caught.value.render()


def test_a_reranker_puts_its_candidates_in_its_own_order(searcher: Any, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "reranker", "BertForSequenceClassification")
    rerank = {"type": "cross_encoder", "model": folder, "candidates": 8, "device": "cpu"}
    plain = searcher()
    reranked = searcher(rerank=rerank)
    before, after = ids(plain, 12), ids(reranked, 12)
    assert after[8:] == before[8:]
    assert sorted(after[:8]) == sorted(before[:8])
    assert after != before
    # three of eight: the best of all candidates, not of the first three
    assert ids(reranked, 3) == after[:3]
    assert plain.fingerprint != reranked.fingerprint
