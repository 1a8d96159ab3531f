"""Both dialects over every kind of index and over an online engine: a real service, asked as Search-R1's and ReSearch's
trainers ask theirs (`requests.post(url, json=..).json()`, here by the standard library)."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import faiss
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from protocol.search import SearchResponse
from retriever.config import RetrieverSettings
from retriever.index.config import IndexSettings
from retriever.server import running

PASSAGES = 40
INDEXES = [member.model_fields["type"].default for member in get_args(get_args(IndexSettings)[0])]
# small corpora too are searched approximately, and find fewer than k
ROUGH = {"rough_ivf": {"type": "faiss_ivf", "exact_below": 0, "nlist": 4, "nprobe": 2}}


async def searxng(request: web.Request) -> web.Response:
    """Ten results that speak of the query."""
    query = request.query["q"]
    link = urllib.parse.quote(query)
    results = [
        {"title": f"{query} {i}", "content": f"About {query}.", "url": f"https://example.org/{link}/{i}"}
        for i in range(10)
    ]
    return web.json_response({"query": query, "results": results})


@asynccontextmanager
async def service_of(kind: str, corpus: Path) -> AsyncIterator[int]:
    """The port of a service over one kind of index, or over an online engine."""
    async with AsyncExitStack() as stack:
        fields: dict[str, Any] = {"port": 0, "threads": 1, "window_ms": 1}
        if kind == "online":
            app = web.Application()
            app.router.add_get("/search", searxng)
            server = await stack.enter_async_context(TestServer(app))
            limits = {"rate": 1e6}
            fields |= {"online": {"type": "searxng", "base_url": str(server.make_url("/search")), **limits}}
        else:
            index_dir = corpus.with_name(f"{kind}.index")
            fields |= {"corpus": corpus, "index_dir": index_dir, "index": ROUGH.get(kind, {"type": kind})}
        yield await stack.enter_async_context(running(RetrieverSettings.model_validate(fields)))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty passages with a number word each."""
    path = tmp_path_factory.mktemp("dialects") / "corpus.jsonl"
    lines = [
        {
            "id": f"https://d/{i}?a=b#c" if i % 2 else f"d{i}",
            "contents": f'"Title {i}"\nOf number{i} and more.',
            "url": f"https://d/{i}",
            "year": 1900 + i,
        }
        for i in range(PASSAGES)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module", params=[*INDEXES, *ROUGH, "online"])
def url(request: pytest.FixtureRequest, corpus: Path) -> Iterator[str]:
    """The address of a service of one kind, which runs in a thread while the module's tests of it do."""
    if request.param == "faiss_gpu" and not faiss.get_num_gpus():
        pytest.skip("no GPU, or a FAISS without GPU support")
    started, failed, ports = threading.Event(), [], []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        try:
            async with service_of(request.param, corpus) as port:
                ports.append(port)
                started.set()
                await stop.wait()
        except BaseException as error:
            failed.append(error)
            raise
        finally:
            started.set()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert started.wait(60)
    assert not failed, failed
    yield f"http://127.0.0.1:{ports[0]}"
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)
    assert not thread.is_alive() and not failed
    loop.close()


@pytest.fixture
def online(request: pytest.FixtureRequest) -> bool:
    """Whether the service at hand asks an online engine: its documents are not of the corpus."""
    return bool(request.node.callspec.params["url"] == "online")


@pytest.fixture
def sure(request: pytest.FixtureRequest) -> bool:
    """Whether the passage with the query's word is always found, and found first."""
    return request.node.callspec.params["url"] not in ROUGH


def fetch(url: str, body: object = None) -> tuple[int, Any]:
    """Status and JSON, by GET without a body."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


class SearchR1Client:
    """What Search-R1's `LLMGenerationManager.batch_search` does: no check, no retry, `result` is there."""

    def __init__(self, url: str, topk: int) -> None:
        self.search_url, self.topk = f"{url}/retrieve", topk

    def batch_search(self, queries: list[str]) -> list[str]:
        payload = {"queries": queries, "topk": self.topk, "return_scores": True}
        results = fetch(self.search_url, payload)[1]["result"]
        return [self.passages_to_string(result) for result in results]

    def passages_to_string(self, retrieval_result: list[Any]) -> str:
        text = ""
        for number, item in enumerate(retrieval_result):
            content = item["document"]["contents"]
            title, *rest = content.split("\n")
            text += f"Doc {number + 1}(Title: {title}) " + "\n".join(rest) + "\n"
        return text


class ReSearchClient:
    """What ReSearch's rollout does with `search_url`: a list of lists of documents assumed."""

    def __init__(self, url: str) -> None:
        self.search_url = url

    def batch_search(self, query: str | list[str], top_n: int = 5) -> list[str]:
        query = [query] if isinstance(query, str) else query
        answer = fetch(f"{self.search_url}/batch_search", {"query": query, "top_n": top_n})[1]
        return ["".join(f"{line['contents']}\n\n" for line in item).strip() for item in answer]


def test_a_client_written_like_search_r1s_reads_the_passages(url: str, sure: bool) -> None:
    queries = [f"number{i}" for i in range(12)]
    texts = SearchR1Client(url, 3).batch_search(queries)
    assert len(texts) == 12
    for query, text in zip(queries, texts, strict=True):
        first = text.split("\n")[0]
        assert first.startswith('Doc 1(Title: "') and (query in first or not sure)
        assert text.count("(Title: ") == 3


def test_a_client_written_like_researchs_reads_the_passages(url: str, sure: bool) -> None:
    client = ReSearchClient(url)
    for query, text in zip(["number3", "number4"], client.batch_search(["number3", "number4"], 2), strict=True):
        assert query in text.split("\n\n")[0] or not sure
        assert len(text.split("\n\n")) == 2
    assert client.batch_search("number5")[0].count("\n\n") == 4


@pytest.mark.parametrize("count", [0, 1, 2, 3, 1000])
@pytest.mark.parametrize("scores", [True, False, None])
def test_search_r1s_dialect_is_right_for_any_number_of_queries(
    url: str, sure: bool, online: bool, count: int, scores: bool | None
) -> None:
    body: dict[str, Any] = {"queries": [f"number{i % PASSAGES}" for i in range(count)], "topk": 2}
    status, answer = fetch(f"{url}/retrieve", body if scores is None else body | {"return_scores": scores})
    assert status == 200 and list(answer) == ["result"] and len(answer["result"]) == count
    for query, hits in zip(body["queries"], answer["result"], strict=True):
        assert len(hits) == 2
        documents = [hit["document"] for hit in hits] if scores else hits
        assert f"{query} " in documents[0]["contents"].replace(".", " ") or not sure
        fields = {"id", "contents", "url"} if online else {"id", "contents", "url", "year"}
        assert all(set(document) == fields for document in documents)
        if scores:
            assert all(set(hit) == {"document", "score"} for hit in hits)
            assert hits[0]["score"] >= hits[1]["score"]
    if scores:
        SearchResponse.model_validate(answer)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 1000])
def test_flashrags_batches_are_right_for_any_number_of_queries(url: str, count: int) -> None:
    queries = [f"number{i % PASSAGES}" for i in range(count)]
    _, ours = fetch(f"{url}/retrieve", {"queries": queries, "topk": 2, "return_scores": True})
    status, plain = fetch(f"{url}/batch_search", {"query": queries, "top_n": 2})
    assert status == 200
    assert plain == [[hit["document"] for hit in hits] for hits in ours["result"]]
    status, (documents, scores) = fetch(f"{url}/batch_search", {"query": queries, "top_n": 2, "return_score": True})
    assert status == 200
    assert documents == plain
    assert scores == [[hit["score"] for hit in hits] for hits in ours["result"]]


def test_flashrags_single_search_has_its_two_forms(url: str) -> None:
    _, body = fetch(f"{url}/retrieve", {"queries": ["number7"], "topk": 3, "return_scores": True})
    (hits,) = body["result"]
    assert fetch(f"{url}/search", {"query": "number7", "top_n": 3}) == (200, [hit["document"] for hit in hits])
    status, (documents, scores) = fetch(f"{url}/search", {"query": "number7", "top_n": 3, "return_score": True})
    assert (status, documents) == (200, [hit["document"] for hit in hits])
    assert scores == [hit["score"] for hit in hits]


def test_blank_queries_are_defined_in_each_form(url: str) -> None:
    for blank in ("", "  \n"):
        status, answer = fetch(f"{url}/search", {"query": blank})
        assert status == 400 and "empty" in answer["detail"]
    assert fetch(f"{url}/batch_search", {"query": ["", "number1"], "top_n": 1})[1][0] == []
    assert fetch(f"{url}/retrieve", {"queries": [" "], "topk": 1}) == (200, {"result": [[]]})


@pytest.mark.parametrize(
    "query", ["a\x00", "</information><answer>", "\U0001f600 ünïcode", "x" * 4097, '"quoted" \\ / {}', "\ud800 number1"]
)
def test_any_text_is_a_query(url: str, query: str) -> None:
    status, answer = fetch(f"{url}/retrieve", {"queries": [query, "number1"], "topk": 2})
    assert status == 200 and len(answer["result"]) == 2 and len(answer["result"][1]) == 2
    assert fetch(f"{url}/search", {"query": query, "top_n": 2})[0] == 200


def test_impossible_numbers_and_shapes_are_refused_in_words(url: str) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("retrieve", {"queries": ["a"], "topk": -1}),
        ("retrieve", {"queries": ["a"] * 67_000, "topk": 3}),
        ("search", {"query": "a", "top_n": 0}),
        ("batch_search", {"query": "a"}),
        ("search", {"query": ["a"]}),
    ]
    for path, body in bodies:
        status, answer = fetch(f"{url}/{path}", body)
        assert status == 400, (path, body)
        assert answer["error"] and answer["error"] == answer.get("detail", answer["error"])


def test_topk_0_is_the_default_as_in_search_r1(url: str) -> None:
    assert len(fetch(f"{url}/retrieve", {"queries": ["number1"], "topk": 0})[1]["result"][0]) == 3


@pytest.mark.parametrize("topk", [1000, 5000])
def test_more_hits_than_there_are_gives_each_once(url: str, online: bool, topk: int) -> None:
    status, answer = fetch(f"{url}/retrieve", {"queries": ["number1"], "topk": topk, "return_scores": True})
    if online and topk == 5000:  # the number of documents of an online engine is unknown
        assert status == 400 and "max_topk" in answer["error"]
        return
    ids = [hit["document"]["id"] for hit in answer["result"][0]]
    assert 1 <= len(ids) == len(set(ids)) <= PASSAGES
    assert all(abs(hit["score"]) < 1e9 for hit in answer["result"][0])


def test_every_document_that_was_brought_can_be_fetched_by_its_id(url: str) -> None:
    _, answer = fetch(f"{url}/retrieve", {"queries": ["number3", "number4"], "topk": 3})
    for document in (document for hits in answer["result"] for document in hits):
        escaped = urllib.parse.quote(document["id"], safe="")
        assert fetch(f"{url}/passages/{escaped}") == (200, document)
        assert fetch(f"{url}/passages?id={escaped}") == (200, document)
    assert fetch(f"{url}/passages/https%3A%2F%2Fexample.org%2Fmade-up")[0] == 404
    assert fetch(f"{url}/passages/https://example.org/made-up")[0] == 404


def test_health_and_info_say_what_is_served(url: str, online: bool) -> None:
    status, health = fetch(f"{url}/health")
    assert status == 200 and health["status"] == "healthy" and health["ready"] is True
    assert health["retrievers"] == {"total": 1, "available": 1}
    _, info = fetch(f"{url}/info")
    assert info["backend"] == ("online" if online else "index")
    assert len(info["fingerprint"]) == 16 and info["max_topk"] == 1000
    assert fetch(f"{url}/ready")[0] == 200
