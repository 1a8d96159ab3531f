"""A large body does not block other requests, and the cost of a chunk depends on its new tokens only."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_server.cpu_engine.config import EngineSettings
from rollout_server.cpu_engine.model import runner
from rollout_server.cpu_engine.model.tokenizer import LONG_TEXT, Tokenizer
from rollout_server.cpu_engine.scheduler import scheduler
from rollout_server.cpu_engine.scheduler.request import EngineCounters, Request, SamplingParams
from rollout_server.cpu_engine.server import generate, openai_bodies
from rollout_server.cpu_engine.server import validation as bodies
from rollout_server.cpu_engine.server import validation as contract
from rollout_server.cpu_engine.server.app import build_engine
from rollout_server.cpu_engine.server.validation import BadRequest, Limits, parse
from tests.support.engine_http import Client, post, serving, write_policy

MESSAGES = [{"role": "user", "content": "where is"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
async def client(model: Path) -> AsyncIterator[Client]:
    async with serving(model) as client:
        yield client


async def test_a_stream_with_logprobs_spells_each_token_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    spelt: Counter[int] = Counter()
    plain = Tokenizer.spelling

    def counted(tokenizer: Tokenizer, token: int) -> str:
        spelt[token] += 1
        return plain(tokenizer, token)

    monkeypatch.setattr(Tokenizer, "spelling", counted)
    body = {"prompt": list(range(20, 120)), "max_tokens": 60, "ignore_eos": True, "echo": True, "logprobs": 0}
    answer = await client.post("/v1/completions", json={**body, "stream": True})
    assert answer.status == 200 and "[DONE]" in await answer.text()
    # 100 echoed and 60 new tokens, each as a token, for its width and as the best one's name
    assert 160 <= sum(spelt.values()) <= 4 * 160


def test_the_spelling_of_a_token_is_worked_out_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(model)
    expected = [tokenizer.spelling(token) for token in range(20)]
    monkeypatch.setattr(tokenizer, "bytes_of", None)
    assert [tokenizer.spelling(token) for token in range(20)] == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "where is "}),
        ("/v1/completions", {"prompt": "where is ", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
        ("/generate", {"text": "where is ", "sampling_params": {"max_new_tokens": 1}}),
    ],
)
async def test_large_texts_are_encoded_off_the_event_loop(
    client: Client, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    plain = Tokenizer.encode

    def seen(tokenizer: Tokenizer, *given: Any, **named: Any) -> list[int]:
        threads.append(threading.current_thread() is threading.main_thread())
        return plain(tokenizer, *given, **named)

    monkeypatch.setattr(Tokenizer, "encode", seen)
    await post(client, path, **body)
    monkeypatch.setattr(bodies, "LARGE_BODY", 10)
    await post(client, path, **body)
    assert threads == [True, False]


def test_a_long_text_has_the_ids_of_its_parts(model: Path) -> None:
    tokenizer = Tokenizer(model)
    part = tokenizer.encode("where is ")
    times = LONG_TEXT // 9 + 1
    assert tokenizer.encode("where is " * times) == part * times


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_an_answer_with_many_logprobs_is_written_off_the_event_loop(
    client: Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large: list[bool] = []

    async def seen(is_large: bool, work: Any) -> Any:
        large.append(is_large)
        return await bodies.unblocked(is_large, work)

    monkeypatch.setattr(generate, "LARGE_ANSWER", 50)
    body: dict[str, Any] = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 5}, "return_logprob": True}
    many = {"top_logprobs_num": 20}
    if path != "/generate":
        body, many = {"prompt": [5, 6], "max_tokens": 5, "logprobs": 0}, {"logprobs": 20}
    few = await post(client, path, **body)
    monkeypatch.setattr(generate, "unblocked", seen)
    await post(client, path, **body)
    await post(client, path, **body | many)
    assert few and large[-1] and large.count(True) == 1


def test_scored_prompt_tokens_count_though_no_alternatives_are_asked_for(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "MOST_TOPS", 1000)
    limits, tokenizer = Limits(300, 512, 512), Tokenizer(model)
    body = {"input_ids": [[5] * 100] * 2, "sampling_params": {"n": 6}, "return_logprob": True, "logprob_start_len": 0}
    with pytest.raises(BadRequest, match="1000 log-probs"):
        parse(body, tokenizer, limits)
    parse(body | {"sampling_params": {"n": 5}}, tokenizer, limits)
    parse(body | {"logprob_start_len": -1}, tokenizer, limits)  # a rollout scores nothing: its length is its own affair


async def test_a_chat_without_a_limit_is_cut_to_what_its_alternatives_allow(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (contract, openai_bodies):
        monkeypatch.setattr(module, "MOST_TOPS", 200)
    asked = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 5, "ignore_eos": True}
    answer = await post(client, "/v1/chat/completions", n=2, **asked)
    assert answer["usage"]["completion_tokens"] == 2 * 20
    error = await post(client, "/v1/chat/completions", 400, n=2, max_tokens=30, **asked)
    assert "200 log-probs" in error["error"]["message"]


async def test_attempts_at_one_prompt_score_it_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[int] = []
    plain = runner.ModelRunner._score

    def counted(self: Any, prompt: Any, *rest: Any) -> None:
        scored.extend([len(prompt.ids)] if prompt.score_from is not None else [])
        plain(self, prompt, *rest)

    monkeypatch.setattr(runner.ModelRunner, "_score", counted)
    ids = [10 + i % 80 for i in range(100)]
    body = {"prompt": [ids, [7, 8, 9]], "n": 4, "echo": True, "logprobs": 1, "max_tokens": 2, "ignore_eos": True}
    choices = (await post(client, "/v1/completions", **body))["choices"]
    assert scored == [100, 3]
    for of_one, length in ((choices[:4], 100), (choices[4:], 3)):
        for choice in of_one:
            assert choice["logprobs"]["token_logprobs"][:length] == of_one[0]["logprobs"]["token_logprobs"][:length]
            assert len(choice["logprobs"]["token_logprobs"]) == length + 2
    scored.clear()
    sampling = {"n": 3, "max_new_tokens": 0}
    answers = await post(client, "/generate", input_ids=ids, return_logprob=True, logprob_start_len=0,
                         sampling_params=sampling)  # fmt: skip
    assert scored == [100] and all(len(a["meta_info"]["input_token_logprobs"]) == 100 for a in answers)


async def test_an_attempt_scores_for_itself_where_the_first_one_ended_without(model: Path) -> None:
    engine, _, _ = build_engine(EngineSettings(model_path=model))
    s = engine.scheduler

    def asked(**more: Any) -> Request:
        ids = list(range(5, 45))
        return Request("r", ids, SamplingParams(), 0, 2, lambda *_: None, return_logprob=True, logprob_start=0, **more)

    first = asked()
    second = asked(first=first)
    s.submit(first)
    s.submit(second)
    s.abort(lambda r: r is first)
    with torch.inference_mode():
        for _ in range(5):
            s.step()
    assert first.input_logprobs is None and second.finish and len(second.input_logprobs or ()) == 39


def test_one_long_prompt_does_not_widen_the_masks_of_many_short_ones(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, _ = build_engine(EngineSettings(model_path=model))
    s, pairs = engine.scheduler, []
    plain = runner._prompt_part

    def measured(*args: Any) -> Any:
        part = plain(*args)
        pairs.append((len(part.rows), len(part.rows) * part.longest * part.width))
        return part

    monkeypatch.setattr(runner, "_prompt_part", measured)
    monkeypatch.setattr(scheduler, "WAVE_PAIRS", 20_000)
    lengths = [8] * 10 + [400] + [9] * 10
    requests = [
        Request(str(i), [i + 1] * length, SamplingParams(), 0, 2, lambda *_: None) for i, length in enumerate(lengths)
    ]
    for request in requests:
        s.submit(request)
    with torch.inference_mode():
        while s.waiting or s.running:
            s.step()
    assert all(r.finish and r.finish["type"] == "length" and len(r.output_ids) == 2 for r in requests)
    assert all(size <= 20_000 for _, size in pairs)
    assert [count for count, _ in pairs] == [10, *[1] * 8, 10]  # the long one in parts of 50 tokens


def test_prompts_that_lack_little_are_not_padded_to_whole_ones() -> None:
    parts = [(2, [7] * 300, 0), (3, [8] * 20, 290), (4, [9] * 25, 280), (5, [7] * 280, 10)]
    whole, rests = runner._prompt_parts(parts, [0])
    assert (whole.rows.tolist(), whole.longest, whole.width) == ([2, 5], 300, 300)
    assert (rests.rows.tolist(), rests.longest, rests.width) == ([3, 4], 25, 310)
    assert whole.token.tolist() == [*range(300), *range(345, 625)] and rests.token.tolist() == list(range(300, 345))
    assert rests.row.tolist() == [0] * 20 + [1] * 25 and rests.offset.tolist() == [*range(20), *range(25)]
    assert rests.masks[0][0, 0, 5].eq(0).tolist() == [key <= 295 for key in range(310)]


def test_the_throughput_is_of_the_last_second_of_work() -> None:
    counters = EngineCounters()
    for tokens, now, throughput in ((10, 100.0, 0.0), (10, 100.5, 0.0), (20, 101.5, 20.0), (9, 200.0, 20.0)):
        counters.count_tokens(tokens, now)
        assert counters.throughput == throughput
