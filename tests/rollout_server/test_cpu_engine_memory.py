"""Long prompts in parts, rows that make room for cached prefixes, and seeds: the CPU engine under uneven load."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from protocol.errors import UserError
from rollout_server.cpu_engine.scheduler import scheduler as scheduling
from rollout_server.cpu_engine.scheduler.prefix_cache import PrefixCache, chain
from rollout_server.cpu_engine.scheduler.request import Request
from rollout_server.cpu_engine.scheduler.scheduler import Scheduler, one_of
from rollout_server.cpu_engine.server.auth import CLIENT_GONE, guard
from rollout_server.cpu_engine.server.generate import Generation, Inbox
from rollout_server.cpu_engine.server.validation import Limits, parse
from rollout_server.node.process import seed_of
from tests.rollout_server.test_cpu_engine_model import check, prompt, request, run, scheduler, write
from tests.support.engine_http import post, serving, write_policy

PART = 64


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("policy")
    return path, write(path, "qwen2 tied")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "CHUNK", PART)


def steps(s: Scheduler, count: int) -> None:
    with torch.inference_mode():
        for _ in range(count):
            s.step()


def test_decoding_goes_on_while_a_long_prompt_is_computed(policy: tuple[Path, Any], parts: None) -> None:
    path, model = policy
    s = scheduler(path)
    short, long, after = (
        request(prompt(9, 3), 40, 1),
        request(prompt(1000), 4, 2, logprob_start=300),
        request([7], 3, 3),
    )
    s.submit(short)
    steps(s, 1)
    for r in (long, after):
        s.submit(r)
    for done in range(1, 1000 // PART + 1):
        computed = s.counters.computed_tokens
        steps(s, 1)
        assert len(short.output_ids) == 1 + done, "a token in each step"
        assert s.counters.computed_tokens == computed + PART, "a sign of life in each step"
        assert s.used_tokens == done * PART + 9 + done and not long.output_ids
    run(s)
    check(model, [short, long, after])
    assert long.input_logprobs is not None and len(long.input_logprobs) == 699


def test_the_work_of_a_step_is_bounded_by_the_size_of_the_model(
    policy: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = sum(weight.numel() for weight in policy[1].parameters())
    monkeypatch.setattr(scheduling, "WAVE_PRODUCTS", 200 * parameters + 1)
    s = scheduler(policy[0])
    assert s.wave == 200
    requests = [request(prompt(length, length), 2, length) for length in (1, 150, 60, 700, 30, 199, 5)]
    for r in requests:
        s.submit(r)
    while s.waiting or s.running:
        computed = s.counters.computed_tokens
        steps(s, 1)
        assert s.counters.computed_tokens - computed <= 200
    check(policy[1], requests)
    monkeypatch.setattr(scheduling, "WAVE_PRODUCTS", 1)
    assert scheduler(policy[0]).wave == scheduling.LEAST_TOKENS


def test_the_smallest_cache_is_the_one_that_its_error_names(policy: tuple[Path, Any]) -> None:
    with pytest.raises(UserError, match="--max-total-tokens 63 is too small") as caught:
        scheduler(policy[0], max_total_tokens=63)
    assert caught.value.todo == "set it to at least 64"
    assert scheduler(policy[0], max_total_tokens=64).runner.kv.budget == 64


@pytest.mark.parametrize("event", ["abort", "retract", "another leaves", "weights"])
def test_whatever_happens_in_the_middle_of_a_prompt(policy: tuple[Path, Any], parts: None, event: str) -> None:
    path, model = policy
    s = scheduler(path, max_total_tokens=1536)
    others = [request(prompt(20 + i, i + 5), 60, i) for i in range(3)]
    for r in others:
        s.submit(r)
    steps(s, 2)
    long = request(prompt(300), 5, 9, logprob_start=200)
    s.submit(long)
    steps(s, 3)
    assert s.running[-1] is long and not long.output_ids and s.runner.length[long.row] == 3 * PART
    if event == "abort":
        with torch.inference_mode():
            s.abort(one_of([long]))
        assert long.finish is not None and not long.output_ids
        again = request(long.prompt_ids, 5, 10)
        run(s, [again])
        assert again.cached_tokens == 3 * PART, "what was computed is kept"
        check(model, [*others, again])
        return
    if event == "retract":
        s.retract_all()
    elif event == "another leaves":
        with torch.inference_mode():
            s.abort(one_of([others[0]]))
        assert s.running == [others[1], others[2], long] or s.running == [others[2], others[1], long]
        assert [r.row for r in s.running] == [0, 1, 2]
    else:
        s.weights_changed()
        assert long.row == -1 and not s.cache.tokens, "none of its keys and values are of the new weights"
    run(s)
    check(model, [*others, long])
    assert long.input_logprobs is not None and len(long.input_logprobs) == 99 and len(long.output_ids) == 5


def conversations(s: Scheduler, salt: int, *, count: int, running: int, turns: int, length: int) -> float:
    """Play conversations whose turns extend each other, `running` at once. Return the share of cached tokens."""
    draw = random.Random(salt)
    threads = {i: [draw.randrange(1, 97) for _ in range(length)] for i in range(count)}
    left = [i for _ in range(turns) for i in range(count)]
    live: dict[int, Request] = {}
    before = s.counters.cached_tokens, s.counters.prompt_tokens
    while left or live:
        for i, r in list(live.items()):
            if r.finish is not None:
                threads[i] = r.prompt_ids + r.output_ids + [draw.randrange(1, 97) for _ in range(length // 2)]
                del live[i]
        for i in list(left):
            if len(live) < running and i not in live:
                left.remove(i)
                live[i] = request(threads[i], length // 2, seed=draw.randrange(1 << 30))
                s.submit(live[i])
        steps(s, 1)
        assert s.runner.kv.tokens + s.cache.tokens <= s.runner.kv.budget
    cached, prompts = s.counters.cached_tokens - before[0], s.counters.prompt_tokens - before[1]
    return cached / prompts


@pytest.mark.parametrize("scale", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_burst_does_not_cost_later_conversations_their_prefixes(policy: tuple[Path, Any], scale: int) -> None:
    """At scale 4 the settings are a node's: 64 rows, 65,536 tokens, a burst of 64 requests of 1,020 tokens."""
    rows, budget = 16 * scale, 4096 * scale * scale
    s = scheduler(policy[0], max_running=rows, max_total_tokens=budget)
    load = {"count": 16, "running": 4, "turns": 4, "length": 24 * scale}
    rates = [conversations(s, 1, **load)]
    run(s, [request([1 + i % 96, *prompt(250 * scale, i)], 3 * scale, i) for i in range(rows)])
    assert s.runner.kv.tokens < budget / 2 and s.row_tokens == 0, "the rows have made room for prefixes"
    rates += [conversations(s, salt, **load) for salt in (2, 3)]
    print(f"hit rate before a burst {rates[0]:.3f}, after it {rates[1]:.3f} and {rates[2]:.3f}")
    assert rates[0] > 0.5 and max(rates) - min(rates) < 0.01


@pytest.mark.parametrize("scale", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_rows_take_no_more_than_they_need_where_prefixes_need_the_room(policy: tuple[Path, Any], scale: int) -> None:
    """40 conversations of 44,000 tokens in all at scale 4, of which 20 run."""
    s = scheduler(policy[0], max_running=20, max_total_tokens=4096 * scale * scale)
    rate = conversations(s, 1, count=40, running=20, turns=5, length=15 * scale * scale)
    print(f"hit rate of 40 conversations {rate:.3f}")
    assert rate > 0.7


def test_a_prefix_is_found_as_long_as_any_sequence_with_it_is_kept() -> None:
    cache, long, short = PrefixCache(), list(range(40)), [*range(16), *range(90, 98)]
    for ids in (long, short):
        cache.keep(ids, chain(ids, "", 0), None)
    assert cache.find(long, chain(long, "", 0), 39)[1] == 39  # the longer one is the last used
    cache.trim(40)
    other = [*range(16), 77, 77]
    assert cache.find(other, chain(other, "", 0), 17)[1] == 16
    cache.clear()
    assert not cache._holders and not cache.tokens


def test_two_engines_share_no_seed_in_groups_of_eight() -> None:
    def seeds(seed: int | None) -> set[int]:
        generation = Generation(*cast(Any, [None] * 4), seed, incremental=False)
        return {generation._seed(None, 0) for _ in range(4 * 2_500)}

    for one, other in ((seed_of(3, "a", "1f"), seed_of(3, "b", "2e")), (None, None)):
        repeated = len(seeds(one) & seeds(other))
        print(f"first turns with a seed of the other engine: {repeated} of 20,000")
        assert repeated == 0


async def test_two_engines_give_one_prompt_eight_different_answers(tmp_path: Path) -> None:
    model, answers = write_policy(tmp_path), []
    for _ in range(2):
        async with serving(model, seed=None) as client:
            for _ in range(4):
                body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 16, "ignore_eos": True}}
                answers.append(tuple((await post(client, "/generate", **body))["output_ids"]))
    assert len(set(answers)) == 8


async def test_a_salt_cannot_name_the_prefixes_of_an_adapter(tmp_path: Path) -> None:
    adapters = SimpleNamespace(named=lambda name: SimpleNamespace(number=5) if name else None)
    engine = SimpleNamespace(scheduler=SimpleNamespace())
    generation = Generation(cast(Any, engine), cast(Any, None), Limits(99, 99, 99), cast(Any, adapters), 0, False)

    def key(**body: Any) -> str:
        calls = parse({"input_ids": [1], **body}, cast(Any, None), Limits(99, 99, 99)).calls
        return generation._requests(calls, False, Inbox())[0].extra_key

    salts = ["", "5", "\0005", "5\0", "\0", "5\0005"]
    keys = [key(cache_salt=salt, lora_path=name) for salt in salts for name in ("", "a")]
    assert len(set(keys)) == len(keys)


async def test_an_end_token_beyond_the_vocabulary_ends_nothing(tmp_path: Path) -> None:
    model = write_policy(tmp_path)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 100_000]}))
    async with serving(model) as client:
        asked = {"max_new_tokens": 4, "min_new_tokens": 4, "top_k": 1}
        answer = await post(client, "/generate", input_ids=[5, 6], sampling_params=asked)
        assert len(answer["output_ids"]) == 4
        assert (await (await client.get("/model_info")).json())["eos_token_ids"] == [0]


async def test_banned_tokens_are_not_listed_and_every_answer_is_json(tmp_path: Path) -> None:
    async with serving(write_policy(tmp_path)) as client:
        vocab = (await (await client.get("/model_info")).json())["vocab_size"]
        body = {"input_ids": [5, 6], "return_logprob": True, "top_logprobs_num": vocab}
        asked = {"max_new_tokens": 2, "min_new_tokens": 2}
        text = await (await client.post("/generate", json=body | {"sampling_params": asked})).text()
        answer = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        for best in answer["meta_info"]["output_top_logprobs"]:
            assert len(best) == vocab - 1 and 0 not in [token for _, token, _ in best]
        asked["temperature"] = cast(int, 1e300)
        assert "temperature" in (await post(client, "/generate", 400, **body, sampling_params=asked))["message"]
        asked["temperature"] = cast(int, 1e38)
        await post(client, "/generate", **body, sampling_params=asked)
        scored = {**body, "logprob_start_len": 2, "sampling_params": {"max_new_tokens": 1}}
        meta = (await post(client, "/generate", **scored))["meta_info"]
        assert len(meta["input_top_logprobs"]) == len(meta["input_token_logprobs"])


@pytest.mark.parametrize(("gone", "status"), [(True, CLIENT_GONE), (False, 500)])
async def test_only_a_client_that_has_left_is_no_error(
    gone: bool, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def cut(_: web.Request) -> web.StreamResponse:
        raise ConnectionResetError("Cannot write to closing transport")

    transport = SimpleNamespace(is_closing=lambda: gone, get_extra_info=lambda *_: None)
    request = make_mocked_request("GET", "/health", transport=transport)
    answer = await guard("", "")(request, cut)
    assert answer.status == status and bool(caplog.records) is not gone
