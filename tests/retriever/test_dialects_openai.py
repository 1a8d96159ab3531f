"""`/v1/embeddings` over the index's encoder: as OpenAI's clients read it, and as the `semantic` reward does."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from protocol.errors import UserError
from protocol.messages import Question, Status
from retriever import server
from retriever.config import RetrieverSettings
from retriever.encoder import build_encoder
from retriever.encoder.config import HashedEncoderSettings
from retriever.server import running
from rollout_server.rewards import build_reward
from rollout_server.rewards.base import RewardInput
from rollout_server.rewards.resources import RewardResources
from rollout_server.rewards.semantic import SemanticSettings
from tests.support.waiting import eventually

Settings = Callable[..., RetrieverSettings]
StartBench = Callable[..., AbstractAsyncContextManager[Any]]
DENSE = {"index": {"type": "memory", "encoder": {"type": "hashed", "dim": 64}}, "window_ms": 1}


async def ask(port: int, body: Any, path: str = "/v1/embeddings") -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.request("GET" if body is None else "POST", f"http://127.0.0.1:{port}{path}", json=body) as response,
    ):
        return response.status, await response.json()


def expected(texts: list[str]) -> Any:
    return build_encoder(HashedEncoderSettings(dim=64)).encode_passages(texts)


async def test_texts_become_the_encoders_vectors_in_order_in_both_formats(settings: Settings) -> None:
    texts = ["capital of France", "東京", "radium", "capital of France"] + [f"word{i}" for i in range(40)]
    async with running(settings(**DENSE)) as port:
        status, answer = await ask(port, {"input": texts, "model": "any/name"})
        assert status == 200
        assert (answer["object"], answer["model"]) == ("list", "any/name")
        assert answer["usage"] == {"prompt_tokens": 48, "total_tokens": 48}
        assert [item["index"] for item in answer["data"]] == list(range(44))
        assert all(item["object"] == "embedding" for item in answer["data"])
        found = np.asarray([item["embedding"] for item in answer["data"]], dtype=np.float32)
        np.testing.assert_array_equal(found, expected(texts))
        _, packed = await ask(port, {"input": texts[0], "encoding_format": "base64", "input_type": "query"})
        assert packed["model"] == "hashed"
        row = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), dtype="<f4")
        np.testing.assert_array_equal(row, found[0])
        status, models = await ask(port, None, "/v1/models")
        assert (status, models["data"][0]["id"]) == (200, "hashed")


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({}, "input"),
        ({"input": []}, "at least 1 item"),
        ({"input": ""}, "at least 1 character"),
        ({"input": ["a", ""]}, "at least 1 character"),
        ({"input": [1, 2]}, "token ids are refused"),
        ({"input": [[1], [2, 3]]}, "check_embedding_ctx_length=False"),
        ({"input": [[1], "a", [-1]]}, "greater than or equal to 0"),
        ({"input": [[True]]}, "valid integer"),
        ({"input": [[]]}, "at least 1 item"),
        ({"input": [{}]}, "valid string"),
        ({"input": "x" * 40_000}, "at most"),
        ({"input": "a", "encoding_format": "hex"}, "'float' or 'base64'"),
        ({"input": "a", "input_type": "title"}, "'query' or 'passage'"),
        ({"input": "a", "dimensions": 32}, "this encoder has 64"),
    ],
)
async def test_what_cannot_be_embedded_is_refused_in_openais_shape(
    settings: Settings, body: dict[str, Any], complaint: str
) -> None:
    async with running(settings(**DENSE)) as port:
        status, answer = await ask(port, body)
    assert status == 400
    assert complaint in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


async def test_token_ids_are_decoded_with_the_tokenizer_that_is_named(settings: Settings, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"capital": 0, "of": 1, "France": 2}, unk_token="of")).save(str(tmp_path / "tokenizer.json"))
    texts = ["capital of France", "France", "radium"]
    async with running(settings(**DENSE, token_ids=tmp_path / "tokenizer.json")) as port:
        status, answer = await ask(port, {"input": [[0, 1, 2], [2], "radium"]})
        assert status == 200 and answer["usage"]["prompt_tokens"] == 5
        found = np.asarray([item["embedding"] for item in answer["data"]], dtype=np.float32)
        np.testing.assert_array_equal(found, expected(texts))
        _, one = await ask(port, {"input": [0, 1, 2]})
        np.testing.assert_array_equal(np.asarray(one["data"][0]["embedding"], dtype=np.float32), found[0])
        status, answer = await ask(port, {"input": [0, 3]})
        assert status == 400 and "no ids of a text" in answer["error"]["message"]
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        async with running(settings(**DENSE, token_ids=tmp_path / "none.json")):
            pass


async def test_an_index_without_encoder_reports_that(settings: Settings) -> None:
    async with running(settings()) as port:
        for path, body in (("/v1/embeddings", {"input": "a"}), ("/v1/models", None)):
            status, answer = await ask(port, body, path)
            assert status == 404
            assert answer["error"]["code"] == "model_not_found" and "encoder" in answer["error"]["message"]


async def test_requests_share_calls_of_the_encoder_which_stay_small(
    bench: StartBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "EMBED_BATCH", 8)
    async with bench(**DENSE | {"window_ms": 30}) as b, aiohttp.ClientSession(b.url) as session:
        calls: list[int] = []
        embed = b.watched.searcher.embed
        b.watched.searcher.embed = lambda texts, kind: (calls.append(len(texts)), embed(texts, kind))[1]

        async def one(i: int) -> int:
            async with session.post("/v1/embeddings", json={"input": [f"word{i}", "shared"]}) as response:
                return response.status

        assert set(await asyncio.gather(*(one(i) for i in range(30)))) == {200}
        assert max(calls) <= 8 and len(calls) < 30
        assert b.count("embedded_texts_total") == sum(calls) >= 31


async def test_texts_count_towards_the_bound_of_the_queue(bench: StartBench) -> None:
    async with bench(**DENSE | {"window_ms": 0}, queue_limit=3) as b, aiohttp.ClientSession(b.url) as session:
        b.watched.gate.clear()
        held = asyncio.create_task(session.post("/retrieve", json={"queries": ["number0", "number1"]}))
        await eventually(lambda: b.count("queue") == 2, "two queries are held")
        async with session.post("/v1/embeddings", json={"input": ["a", "b"]}) as response:
            assert response.status == 429 and int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["type"] == "server_error"
        waiting = asyncio.create_task(session.post("/v1/embeddings", json={"input": "a"}))
        await eventually(lambda: b.count("queue") == 3, "one text waits behind them")
        async with session.post("/retrieve", json={"queries": ["number2"]}) as response:
            assert response.status == 429
        b.watched.gate.set()
        for task in (held, waiting):
            async with await task as response:
                assert response.status == 200
        assert b.count("queue") == 0


async def test_the_semantic_reward_works_against_it(settings: Settings) -> None:
    question = Question(id="q", text="Who?", answers=("Marie Curie", "Maria Skłodowska"))
    io = RewardResources()
    try:
        async with running(settings(**DENSE)) as port:
            reward = build_reward(SemanticSettings(url=f"http://127.0.0.1:{port}/v1", model="hashed", attempts=1), io)
            scores = [
                await reward(RewardInput(question, Status.ANSWERED, answer, (), 0))
                for answer in ("Marie Curie", "marie curie the physicist", "the Eiffel tower")
            ]
    finally:
        await io.close()
    assert scores[0] == pytest.approx(1.0)
    assert 1 > scores[1] > 0.5 > scores[2]
