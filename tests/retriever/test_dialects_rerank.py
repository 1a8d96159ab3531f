"""A service with a cross-encoder behind its index, over HTTP: the model's own scores, in their order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from retriever.config import RetrieverSettings
from retriever.rerank import build_reranker
from retriever.rerank.config import CrossEncoderSettings
from retriever.server import running
from tests.support.encoders import tiny_model


async def test_hits_come_in_the_rerankers_order_with_its_scores(
    settings: Callable[..., RetrieverSettings], tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "reranker", "BertForSequenceClassification", seed=3, num_labels=1)
    rerank = {
        "type": "cross_encoder",
        "model": model,
        "candidates": 10,
        "device": "cpu",
    }
    queries = ["number7 letter", "Curie"]
    body = {"queries": queries, "topk": 10, "return_scores": True}
    found = []
    for chosen in (settings(), settings(rerank=rerank)):
        async with running(chosen) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            async with session.post("/retrieve", json=body) as response:
                found.append((await response.json())["result"])
            async with session.get("/info") as response:
                info = await response.json()
    plain, reranked = found
    assert info["rerank"]["candidates"] == 10 and info["fingerprint"] != info["index_fingerprint"]
    reranker = build_reranker(CrossEncoderSettings.model_validate(rerank))
    for query, before, after in zip(queries, plain, reranked, strict=True):
        texts = [hit["document"]["contents"] for hit in before]
        (scores,) = reranker.scores([(query, texts)])
        assert {hit["document"]["id"] for hit in after} == {hit["document"]["id"] for hit in before}
        assert [hit["score"] for hit in after] == pytest.approx(sorted(scores.tolist(), reverse=True), abs=1e-5)
        best = max(zip(scores.tolist(), texts, strict=True), key=lambda pair: pair[0])
        assert after[0]["score"] == pytest.approx(best[0], abs=1e-5)
