"""The cross-encoder against a slow loop over pairs; every query meets its own texts only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from protocol.errors import UserError
from retriever.rerank import build_reranker, cross_encoder, reranker_identity
from retriever.rerank.base import Reranker, order
from retriever.rerank.config import CrossEncoderSettings
from tests.support.encoders import tiny_model

PAIRS: list[tuple[str, list[str]]] = [
    ("who discovered radium", ["Marie Curie discovered radium.", "Paris is in France.", "", "radium " * 40]),
    ("capital of france", []),
    ("capital of france", ["Paris is in France.", "Marie Curie discovered radium."]),
    ("", ["Paris is in France."]),
]


@pytest.fixture(scope="module", params=[1, 2])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    return tiny_model(root / "reranker", "BertForSequenceClassification", seed=3, num_labels=request.param)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_encoder, "MAX_TOKENS", 48)
    monkeypatch.setattr(cross_encoder, "BATCH_TOKENS", 100)


def build(folder: Path, **fields: Any) -> Reranker:
    chosen = {"model": folder, "device": "cpu", **fields}
    return build_reranker(CrossEncoderSettings.model_validate(chosen))


def slowly(folder: Path, query: str, text: str) -> float:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    # as lists: a lone "" would count as no document
    tokens = tokenizer([query], [text], return_tensors="pt", truncation=True, max_length=48)
    assert tokens["token_type_ids"].max() == 1
    with torch.no_grad():
        logits = model(**tokens).logits[0]
    return float(logits[0] if len(logits) == 1 else logits[1] - logits[0])


def test_scores_are_those_of_a_slow_loop_over_each_query_and_its_own_texts(folder: Path) -> None:
    scores = build(folder).scores(PAIRS)
    assert [len(line) for line in scores] == [4, 0, 2, 1]
    assert {line.dtype for line in scores} == {np.dtype(np.float32)}
    for (query, texts), line in zip(PAIRS, scores, strict=True):
        np.testing.assert_allclose(line, [slowly(folder, query, text) for text in texts], rtol=0, atol=1e-5)


def test_a_pairs_score_does_not_depend_on_other_queries(folder: Path) -> None:
    reranker = build(folder)
    together = reranker.scores(PAIRS)
    for pair, line in zip(PAIRS, together, strict=True):
        np.testing.assert_allclose(reranker.scores([pair])[0], line, rtol=0, atol=1e-6)
    assert reranker.scores([]) == []
    # the same text for another query has another score
    assert abs(together[0][1] - together[2][0]) > 1e-3


def test_many_pairs_are_scored_in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = build(folder).scores(PAIRS)
    monkeypatch.setattr("retriever.rerank.cross_encoder._CHUNK", 3)
    for line, other in zip(build(folder).scores(PAIRS), expected, strict=True):
        np.testing.assert_allclose(line, other, rtol=0, atol=1e-6)


def test_order_is_by_score_and_then_by_the_place_before() -> None:
    scores = np.array([0.5, 2.0, 0.5, -1.0, 2.0, 0.5], dtype=np.float32)
    assert order(scores).tolist() == [1, 4, 0, 2, 5, 3]
    assert order(np.zeros(0, dtype=np.float32)).tolist() == []


def test_identity_is_the_model_and_its_settings(folder: Path, tmp_path: Path) -> None:
    def identity(**fields: Any) -> dict[str, Any]:
        return reranker_identity(CrossEncoderSettings.model_validate({"model": folder, **fields}))

    assert identity(device="cpu") == identity()
    other = tiny_model(tmp_path / "reranker", "BertForSequenceClassification", seed=4)
    for changed in ({"candidates": 7}, {"model": other}):
        assert identity(**changed) != identity()


def test_what_is_no_reranker_is_refused_in_words(tmp_path: Path) -> None:
    three = tiny_model(tmp_path / "three", "BertForSequenceClassification", num_labels=3)
    with pytest.raises(UserError, match="not a reranker"):
        build(three)
    with pytest.raises(UserError, match="do not belong to a BertForSequenceClassification"):
        build(tiny_model(tmp_path / "encoder"))
    with pytest.raises(UserError, match="no model found"):
        build(tmp_path / "nowhere")
