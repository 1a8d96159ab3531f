"""Clients without a wheel, as models of their requests and of what they read of an answer: written from their sources,
not their code. The published ones run in tests/peers. `make test-peers` shows both in one table.

Names and places: Search-R1 `search_r1/llm_agent/generation.py`, SkyRL `skyrl_gym/tools/search.py`, slime
`examples/search-r1/local_search_server.py`, rLLM `examples/search/local_retrieval_tool.py`, ASearcher
`utils/search_tool.py`, ReSearch `vllm_rollout_spmd.py`.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from retriever.config import RetrieverSettings
from retriever.server import running

Did = Callable[[str, object], None]
ROWS = [
    {
        "id": f"d{i}",
        "contents": f'"Title {i}"\nOf number{i} and more.',
        "title": f"Title {i}",
        "text": f"Of number{i} and more.",
        "url": f"https://example.org/{i}",
        "source": "wiki",
    }
    for i in range(40)
]


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    async with running(RetrieverSettings(corpus=corpus, port=0, window_ms=1)) as port:
        yield f"http://127.0.0.1:{port}"


async def post(url: str, body: dict[str, Any]) -> Any:
    """`requests.post(url, json=body)`, then `raise_for_status()` and `json()`."""

    def send() -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    return await asyncio.to_thread(send)


async def test_model_of_search_r1_batch_search(url: str, record_property: Did) -> None:
    """One bad query of a batch must not end the trainer: it reads `result` of any answer."""
    odd = ["x" * 100_000, "number3 \ud800", "number4\x00", "", "\U0001f600", "[]"]
    queries = [*odd, *(f"number{i % 40}" for i in range(5114))]
    answer = await post(f"{url}/retrieve", {"queries": queries, "topk": 3, "return_scores": True})
    contents = [[hit["document"]["contents"] for hit in hits] for hits in answer["result"]]
    assert len(contents) == 5120 and [len(hits) for hits in contents[:6]] == [3, 3, 3, 0, 3, 3]
    assert "number3" in contents[1][0] and "number4" in contents[2][0]
    assert all(f"number{i % 40} " in hits[0] for i, hits in enumerate(contents[6:]))
    metrics = await asyncio.to_thread(lambda: urllib.request.urlopen(f"{url}/metrics").read().decode())
    for cause in ("long", "surrogate", "nul"):
        assert f'foray_retriever_rewritten_queries_total{{cause="{cause}"}} 1.0' in metrics
    record_property("client", "Search-R1 generation.batch_search (model)")
    record_property("did", "5,120 queries at once, six of them odd")


async def test_model_of_search_r1_reading_whole_corpus_rows(url: str, record_property: Did) -> None:
    body = {"queries": ["number5"], "topk": 1, "return_scores": True}
    assert (await post(f"{url}/retrieve", body))["result"][0][0]["document"] == ROWS[5]
    record_property("client", "Search-R1 retrieval_server (its answer)")
    record_property("did", "a document is the whole corpus row")


async def test_model_of_skyrl_search_tool(url: str, record_property: Did) -> None:
    answer = await post(f"{url}/retrieve", {"query": "number7", "topk": 2, "return_scores": True})
    ((first, second),) = answer["result"]
    assert "number7" in first["document"]["contents"] and first["score"] >= second["score"]
    assert "results" not in answer
    record_property("client", "SkyRL call_search_api (model)")
    record_property("did", "one `query`: one list of hits")


async def test_model_of_rllm_local_retrieval_tool(url: str, record_property: Did) -> None:
    body = {"query": "number7", "top_k": 5, "description": "", "args": [], "kwargs": {}}
    results = (await post(f"{url}/retrieve", body))["results"]
    shown = [f"(ID: {hit['id']}, Score: {hit['score']:.3f})\n{hit['content'][:300]}" for hit in results]
    assert len(shown) == 5 and shown[0].startswith("(ID: d7, Score: ") and "number7" in shown[0]
    assert (await post(f"{url}/retrieve", {"query": " ", "top_k": 5}))["results"] == []
    record_property("client", "rLLM LocalRetrievalTool (model)")
    record_property("did", "query, top_k: `results` of id, content, score")


async def test_model_of_asearcher_query_async(url: str, record_property: Did) -> None:
    answer = await post(f"{url}/retrieve", {"queries": ["number7", "number8"], "topk": 2, "return_scores": False})
    read = [[(hit["contents"], hit["url"]) for hit in hits] for hits in answer["result"]]
    assert [hits[0][1] for hits in read] == ["https://example.org/7", "https://example.org/8"]
    record_property("client", "ASearcher query_async (model)")
    record_property("did", "contents and url of 4 hits; its /access is not offered")


async def test_model_of_slime_local_search(url: str, record_property: Did) -> None:
    answer = await post(f"{url}/retrieve", {"queries": ["number9"], "topk": 3, "return_scores": False})
    assert answer["result"][0][0]["contents"].split("\n")[0] == '"Title 9"'
    record_property("client", "slime local_search_server (model)")
    record_property("did", "bare documents without scores")


async def test_model_of_research_batch_search(url: str, record_property: Did) -> None:
    answer = await post(f"{url}/batch_search", {"query": ["number1", "number2"], "top_n": 5})
    texts = ["".join(f"{line['contents']}\n\n" for line in item).strip() for item in answer]
    assert [text.count('"Title ') for text in texts] == [5, 5] and "number2" in texts[1]
    assert answer[0][0] == ROWS[1]
    record_property("client", "ReSearch batch_search (model)")
    record_property("did", "2 queries x 5 documents, all their fields")


async def test_model_of_a_client_that_asks_for_few_fields(tmp_path: Path) -> None:
    """`retriever.fields` omits unused fields."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    async with running(RetrieverSettings(corpus=corpus, port=0, fields=("url",))) as port:
        answer = await post(f"http://127.0.0.1:{port}/retrieve", {"queries": ["number5"], "topk": 1})
        info = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/info")))
    assert set(answer["result"][0][0]) == {"id", "contents", "url"}
    assert info["fields"] == ["url"]
